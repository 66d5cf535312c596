//! A queue of a test's own on the real broker, and what a test does with it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqSource};
use oncegate_core::lifecycle::Settlement;
use oncegate_core::source::{Delivery, Incoming, Limit, Open, Settled, Source};
use oncegate_testkit::Lines;
pub(crate) use oncegate_testkit::laws::source::accepted as accept;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Where the broker answers.
pub(crate) fn url() -> String {
    oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against")
}

/// How many lines that have all of these parts were logged in this process since its first rig was
/// made. Among them are the broker's refusals, each with its reason: the client logs them.
pub(crate) fn logged(parts: &[&str]) -> usize {
    static LOG: OnceLock<(Lines, Mutex<Vec<String>>)> = OnceLock::new();
    let (lines, log) = LOG.get_or_init(|| (Lines::of_this_process(), Mutex::default()));
    let mut log = log.lock().expect("nobody panics with it");
    log.extend(lines.take().into_iter().map(|(_, line)| line));
    log.iter()
        .filter(|line| parts.iter().all(|part| line.contains(part)))
        .count()
}

/// No test of this process had an acknowledgement refused so far.
fn no_acknowledgement_was_refused() {
    assert_eq!(logged(&["PRECONDITION_FAILED", "delivery tag"]), 0, "406");
}

/// A queue with a name that nobody else uses.
pub(crate) struct Rig {
    url: String,
    pub(crate) queue: String,
    pub(crate) channel: Channel,
    connection: Connection,
}

impl Rig {
    pub(crate) async fn new() -> Self {
        Self::at(&url()).await
    }

    /// On a broker of the test's own.
    pub(crate) async fn at(url: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        no_acknowledgement_was_refused();
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .expect("a clock after 1970")
            .as_nanos();
        let queue = format!("test.{now}.{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let connection = Connection::connect(url, ConnectionProperties::default())
            .await
            .expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await
            .expect("confirms");
        Self {
            url: url.to_owned(),
            queue,
            channel,
            connection,
        }
    }

    /// The same queue, by a new connection.
    pub(crate) async fn again(&self) -> Self {
        self.again_at(&self.url).await
    }

    /// The same queue, by another way to its broker.
    pub(crate) async fn again_at(&self, url: &str) -> Self {
        Self {
            queue: self.queue.clone(),
            ..Self::at(url).await
        }
    }

    pub(crate) fn source(&self, kind: QueueKind) -> RabbitMq {
        RabbitMq::queue(&self.queue).url(&self.url).queue_kind(kind)
    }

    pub(crate) async fn publish(&self, body: &str) {
        self.publish_with(body, BasicProperties::default()).await;
    }

    pub(crate) async fn publish_with(&self, body: &str, properties: BasicProperties) {
        assert!(
            self.reaches(body, properties).await,
            "the message reached no queue"
        );
    }

    /// Publishes, and says whether there was a queue to take it.
    pub(crate) async fn reaches(
        &self,
        body: impl AsRef<[u8]>,
        properties: BasicProperties,
    ) -> bool {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let confirm = self.channel.basic_publish(
            "".into(),
            self.queue.as_str().into(),
            options,
            body.as_ref(),
            properties,
        );
        let confirmation = confirm.await.expect("published").await.expect("confirmed");
        confirmation.is_ack() && confirmation.take_message().is_none()
    }

    /// How many messages stand ready in a queue.
    pub(crate) async fn ready(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        self.channel
            .queue_declare(queue.into(), options, FieldTable::default())
            .await
            .expect("the queue exists")
            .message_count()
    }

    /// How many consume from a queue.
    pub(crate) async fn consumers(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        self.channel
            .queue_declare(queue.into(), options, FieldTable::default())
            .await
            .expect("the queue exists")
            .consumer_count()
    }

    /// Waits until nothing stands ready in a queue. The broker puts back what a channel held only
    /// after it closed.
    pub(crate) async fn becomes_empty(&self, queue: &str) {
        let patience = Instant::now() + Duration::from_secs(10);
        while self.ready(queue).await > 0 {
            assert!(
                Instant::now() < patience,
                "{} messages stay in `{queue}`",
                self.ready(queue).await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether there is such a queue. Asked on a channel of its own: the broker closes it if there
    /// is none.
    pub(crate) async fn exists(&self, queue: &str) -> bool {
        let channel = self.connection.create_channel().await.expect("a channel");
        let options = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let exists = channel
            .queue_declare(queue.into(), options, FieldTable::default())
            .await
            .is_ok();
        let _ = channel.close(200, "OK".into()).await;
        exists
    }

    /// The next message of a queue, waited for up to ten seconds.
    pub(crate) async fn take(&self, queue: &str) -> lapin::message::BasicGetMessage {
        let patience = Instant::now() + Duration::from_secs(10);
        while Instant::now() < patience {
            if let Some(message) = self
                .channel
                .basic_get(queue.into(), BasicGetOptions { no_ack: true })
                .await
                .expect("the queue exists")
            {
                return message;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("nothing came to `{queue}`");
    }

    pub(crate) fn dead_letters(&self) -> String {
        format!("{}.dead-letters", self.queue)
    }

    pub(crate) fn in_doubt(&self) -> String {
        format!("{}.in-doubt", self.queue)
    }

    /// Removes the queues.
    pub(crate) async fn done(self) {
        let delays = [1_000, 5_000, 30_000, 120_000, 600_000]
            .map(|delay| format!("{}.delay.{delay}", self.queue));
        for queue in [self.queue.clone(), self.dead_letters(), self.in_doubt()]
            .into_iter()
            .chain(delays)
        {
            self.channel
                .queue_delete(queue.as_str().into(), QueueDeleteOptions::default())
                .await
                .expect("deleted");
        }
        no_acknowledgement_was_refused();
    }
}

pub(crate) async fn open(source: RabbitMq) -> Box<RabbitMqSource> {
    Box::new(
        tokio::time::timeout(Duration::from_secs(15), source.open())
            .await
            .expect("in time")
            .expect("opened"),
    )
}

pub(crate) const LIMIT: Limit = Limit {
    count: 1_000,
    bytes: 1 << 20,
};

/// Receives until this many deliveries came; what was revoked on the way comes along.
pub(crate) async fn deliveries(
    source: &mut RabbitMqSource,
    count: usize,
    patience: Duration,
) -> (Vec<Delivery>, Vec<u64>) {
    within(LIMIT, source, count, patience).await
}

async fn within(
    limit: Limit,
    source: &mut RabbitMqSource,
    count: usize,
    patience: Duration,
) -> (Vec<Delivery>, Vec<u64>) {
    let (mut taken, mut revoked) = (Vec::new(), Vec::new());
    let deadline = tokio::time::Instant::now() + patience;
    while taken.len() < count {
        let mut into = Vec::new();
        let receiving = tokio::time::timeout_at(deadline, source.receive(limit, &mut into)).await;
        receiving
            .unwrap_or_else(|_| panic!("{} of {count} deliveries in {patience:?}", taken.len()))
            .expect("received");
        for incoming in into {
            match incoming {
                Incoming::Delivery(delivery) => taken.push(delivery),
                Incoming::Revoked(epoch) => revoked.push(epoch),
            }
        }
    }
    (taken, revoked)
}

/// By which channel a delivery came, and as which of it.
pub(crate) fn place(delivery: &Delivery) -> (u64, u64) {
    (delivery.receipt.epoch, delivery.receipt.position)
}

/// The next delivery, alone.
pub(crate) async fn delivery(source: &mut RabbitMqSource) -> Delivery {
    within(
        Limit { count: 1, ..LIMIT },
        source,
        1,
        Duration::from_secs(10),
    )
    .await
    .0
    .remove(0)
}

/// Asserts that nothing is handed over for a while.
pub(crate) async fn nothing(source: &mut RabbitMqSource, patience: Duration) {
    let deadline = tokio::time::Instant::now() + patience;
    let mut into = Vec::new();
    while tokio::time::timeout_at(deadline, source.receive(LIMIT, &mut into))
        .await
        .is_ok()
    {
        assert!(into.is_empty(), "{into:?}");
    }
}

pub(crate) async fn settle(
    source: &mut RabbitMqSource,
    delivery: Delivery,
    settlement: Settlement,
) {
    source
        .settle(&mut vec![Settled {
            delivery,
            settlement,
            story: None,
        }])
        .await
        .expect("settled");
}

pub(crate) async fn close(source: Box<RabbitMqSource>) {
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed with nothing left over");
    no_acknowledgement_was_refused();
}

/// A release for this long, after an attempt that failed.
pub(crate) fn release(after: Duration) -> Settlement {
    Settlement::Release { after, failures: 1 }
}

pub(crate) fn header(message: &lapin::message::Delivery, name: &str) -> Option<String> {
    match message.properties.headers().as_ref()?.inner().get(name)? {
        AMQPValue::LongString(value) => Some(value.to_string()),
        value => Some(format!("{value:?}")),
    }
}

/// Stands between a source and the broker, and can cut or freeze every connection through it.
pub(crate) struct Proxy {
    pub(crate) url: String,
    fault: watch::Sender<Fault>,
}

#[derive(Clone, Copy)]
enum Fault {
    None,
    Cut,
    Frozen,
}

impl Proxy {
    pub(crate) async fn start() -> Self {
        let url = url();
        let at = url.rfind('@').expect("user@host") + 1;
        let end = url[at..].find('/').map_or(url.len(), |slash| at + slash);
        let broker = url[at..end].to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let fault = watch::Sender::new(Fault::None);
        let faults = fault.subscribe();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let (mut faults, broker) = (faults.clone(), broker.clone());
                // A connection meets the faults that come after it.
                faults.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(&broker).await else {
                        return;
                    };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                        _ = faults.changed() => {}
                    }
                    let fault = *faults.borrow();
                    if let Fault::Frozen = fault {
                        tokio::time::sleep(Duration::from_secs(60)).await;
                    }
                });
            }
        });
        Self {
            url: format!("{}{address}{}", &url[..at], &url[end..]),
            fault,
        }
    }

    /// Closes the connections that there are.
    pub(crate) fn cut(&self) {
        self.fault.send_replace(Fault::Cut);
    }

    /// Keeps the connections open, and forwards nothing on them any more.
    pub(crate) fn freeze(&self) {
        self.fault.send_replace(Fault::Frozen);
    }
}
