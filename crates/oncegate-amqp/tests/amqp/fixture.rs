//! A queue on a real broker for one test, and helpers for it.

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
use oncegate_core::source::{
    Connect, ConnectOptions, Delivery, Incoming, Limit, Order, Settled, Source,
};
use oncegate_testkit::Lines;
pub(crate) use oncegate_testkit::laws::source::accepted as accept;
use oncegate_testkit::servers::ServerSet;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The broker's URL.
pub(crate) fn url() -> String {
    oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against")
}

/// What a table expects of the release of RabbitMQ under test.
pub(crate) fn expected<T: Copy>(by_release: &[(&str, T)]) -> T {
    let release = ServerSet::current().expect("a set of servers").rabbitmq();
    let row = by_release.iter().find(|row| row.0 == release);
    row.unwrap_or_else(|| panic!("no row for RabbitMQ {release}"))
        .1
}

/// The number of log lines of this process that contain all of these parts. The broker's errors are in
/// lapin's lines.
pub(crate) fn logged(parts: &[&str]) -> usize {
    static LOG: OnceLock<(Lines, Mutex<Vec<String>>)> = OnceLock::new();
    let (lines, log) = LOG.get_or_init(|| {
        // Includes lapin's lines, which show the broker's errors while a channel closes.
        (Lines::filtered("info,lapin=debug"), Mutex::default())
    });
    let mut log = log.lock().expect("no panic while it is locked");
    log.extend(lines.take().into_iter().map(|(_, line)| line));
    log.iter()
        .filter(|line| parts.iter().all(|part| line.contains(part)))
        .count()
}

/// Asserts that the broker has refused no acknowledgement of this process.
fn no_acknowledgement_was_refused() {
    assert_eq!(logged(&["PRECONDITION_FAILED", "delivery tag"]), 0, "406");
}

/// A queue with a unique name.
pub(crate) struct QueueFixture {
    url: String,
    pub(crate) queue: String,
    pub(crate) channel: Channel,
    connection: Connection,
}

impl QueueFixture {
    pub(crate) async fn new() -> Self {
        Self::at(&url()).await
    }

    /// A queue with a unique name on this broker.
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

    /// The same queue, with a new connection.
    pub(crate) async fn reconnect(&self) -> Self {
        self.reconnect_to(&self.url).await
    }

    /// The same queue, with a connection to this URL.
    pub(crate) async fn reconnect_to(&self, url: &str) -> Self {
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
            self.try_publish(body, properties).await,
            "the message was routed to no queue"
        );
    }

    /// Publishes; `false` if the message is unroutable.
    pub(crate) async fn try_publish(
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

    /// How many messages of a queue are ready.
    pub(crate) async fn ready_messages(&self, queue: &str) -> u32 {
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

    /// How many consumers a queue has.
    pub(crate) async fn consumer_count(&self, queue: &str) -> u32 {
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

    /// Waits until a queue has no ready messages. The broker requeues those of a closed channel
    /// with a delay.
    pub(crate) async fn wait_until_empty(&self, queue: &str) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.ready_messages(queue).await > 0 {
            assert!(
                Instant::now() < deadline,
                "`{queue}` still has {} messages",
                self.ready_messages(queue).await
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether a queue exists. On a channel of its own, which the broker closes if it does not.
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

    /// Takes a message from the queue; `None` if there is none.
    pub(crate) async fn try_take(&self, queue: &str) -> Option<lapin::message::BasicGetMessage> {
        let options = BasicGetOptions { no_ack: true };
        let taken = self.channel.basic_get(queue.into(), options).await;
        taken.expect("the queue exists")
    }

    /// The next message of a queue, within ten seconds.
    pub(crate) async fn take(&self, queue: &str) -> lapin::message::BasicGetMessage {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if let Some(message) = self.try_take(queue).await {
                return message;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no message in `{queue}`");
    }

    pub(crate) fn dead_letters(&self) -> String {
        format!("{}.dead-letters", self.queue)
    }

    pub(crate) fn in_doubt(&self) -> String {
        format!("{}.in-doubt", self.queue)
    }

    /// Deletes the queues.
    pub(crate) async fn delete_queues(self) {
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
    open_with(source, ConnectOptions::default()).await
}

/// Opens the source of a consumer with this order.
pub(crate) async fn open_ordered(source: RabbitMq, order: Order) -> Box<RabbitMqSource> {
    let mut options = ConnectOptions::default();
    options.order = Some(order);
    open_with(source, options).await
}

async fn open_with(source: RabbitMq, options: ConnectOptions) -> Box<RabbitMqSource> {
    Box::new(
        tokio::time::timeout(Duration::from_secs(15), source.connect(options))
            .await
            .expect("in time")
            .expect("opened"),
    )
}

pub(crate) const LIMIT: Limit = Limit::new(1_000, 1 << 20);

/// Receives this many deliveries, and the revoked epochs in between.
pub(crate) async fn deliveries(
    source: &mut RabbitMqSource,
    count: usize,
    timeout: Duration,
) -> (Vec<Delivery>, Vec<u64>) {
    receive_within(LIMIT, source, count, timeout).await
}

async fn receive_within(
    limit: Limit,
    source: &mut RabbitMqSource,
    count: usize,
    timeout: Duration,
) -> (Vec<Delivery>, Vec<u64>) {
    let (mut taken, mut revoked) = (Vec::new(), Vec::new());
    let deadline = tokio::time::Instant::now() + timeout;
    while taken.len() < count {
        let mut into = Vec::new();
        let receiving = tokio::time::timeout_at(deadline, source.receive(limit, &mut into)).await;
        receiving
            .unwrap_or_else(|_| panic!("{} of {count} deliveries in {timeout:?}", taken.len()))
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

/// The channel's epoch and the delivery tag.
pub(crate) fn channel_and_tag(delivery: &Delivery) -> (u64, u64) {
    (delivery.receipt.epoch, delivery.receipt.position)
}

/// The next delivery.
pub(crate) async fn delivery(source: &mut RabbitMqSource) -> Delivery {
    receive_within(
        Limit::new(1, LIMIT.bytes),
        source,
        1,
        Duration::from_secs(30),
    )
    .await
    .0
    .remove(0)
}

/// Asserts that nothing is delivered within the timeout.
pub(crate) async fn assert_nothing_delivered(source: &mut RabbitMqSource, timeout: Duration) {
    let deadline = tokio::time::Instant::now() + timeout;
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
        .settle(&mut vec![Settled::new(delivery, settlement)])
        .await
        .expect("settled");
}

pub(crate) async fn close(source: Box<RabbitMqSource>) {
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed with all settlements finished");
    no_acknowledgement_was_refused();
}

/// A release with this delay, after a failed attempt.
pub(crate) fn release(after: Duration) -> Settlement {
    Settlement::Release { after, failures: 1 }
}

pub(crate) fn header(message: &lapin::message::Delivery, name: &str) -> Option<String> {
    match message.properties.headers().as_ref()?.inner().get(name)? {
        AMQPValue::LongString(value) => Some(value.to_string()),
        value => Some(format!("{value:?}")),
    }
}

/// A TCP proxy to the broker that can cut or freeze its connections.
pub(crate) struct ConnectionProxy {
    pub(crate) url: String,
    fault: watch::Sender<ConnectionFault>,
}

#[derive(Clone, Copy)]
enum ConnectionFault {
    None,
    Cut,
    Frozen,
}

impl ConnectionProxy {
    pub(crate) async fn start() -> Self {
        let url = url();
        let at = url.rfind('@').expect("user@host") + 1;
        let end = url[at..].find('/').map_or(url.len(), |slash| at + slash);
        let broker = url[at..end].to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let fault = watch::Sender::new(ConnectionFault::None);
        let faults = fault.subscribe();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (mut faults, address) = (faults.clone(), broker.clone());
                // Only later faults affect this connection.
                faults.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut broker) = TcpStream::connect(&address).await else {
                        return;
                    };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut broker) => return,
                        _ = faults.changed() => {}
                    }
                    let fault = *faults.borrow();
                    if let ConnectionFault::Frozen = fault {
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

    /// Closes the current connections.
    pub(crate) fn cut(&self) {
        self.fault.send_replace(ConnectionFault::Cut);
    }

    /// Keeps the current connections open, and forwards nothing more on them.
    pub(crate) fn freeze(&self) {
        self.fault.send_replace(ConnectionFault::Frozen);
    }
}
