//! Several nodes, and several consumers of a queue.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::ExchangeKind;
use lapin::options::{
    BasicPublishOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqStatus, Topology};
use oncegate_core::source::{Incoming, Order, Source};
use oncegate_core::{
    Consumer, Context, Failure, Guarantee, Handler, IdSource, MemoryStore, Readiness,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::fixture::*;

/// The broker's URL with another host and port.
pub(crate) fn url_with_address(address: impl std::fmt::Display) -> String {
    let url = url();
    let at = url.rfind('@').expect("user@host") + 1;
    let end = url[at..].find('/').map_or(url.len(), |slash| at + slash);
    format!("{}{address}{}", &url[..at], &url[end..])
}

/// The broker's host and port.
fn broker() -> String {
    url()
        .rsplit_once('@')
        .expect("user@host")
        .1
        .split('/')
        .next()
        .expect("a host")
        .to_owned()
}

/// A proxy to the broker.
pub(crate) fn proxy() -> oncegate_testkit::proxy::Proxy {
    let port = broker()
        .rsplit_once(':')
        .expect("a port")
        .1
        .parse()
        .expect("a number");
    oncegate_testkit::proxy::Proxy::to(port).expect("a port")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_source_connects_to_another_node_after_a_failure() {
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let (first, second) = (proxy(), proxy());
    let unused = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address");
    let urls = [
        url_with_address(unused),
        url_with_address(format!("127.0.0.1:{}", first.port())),
        url_with_address(format!("127.0.0.1:{}", second.port())),
    ];
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .urls(urls)
            .status(status.clone()),
    )
    .await;
    fixture.publish("a").await;
    let stale = delivery(&mut source).await;
    // Only one of the three nodes is reachable from now on.
    drop(first);
    second.reset();
    let (mut again, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    settle(&mut source, stale, accept()).await;
    settle(&mut source, again.remove(0), accept()).await;
    assert!(status.snapshot().channels_lost >= 1);
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_broker_is_reached_by_its_ipv6_address() {
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        println!("skipped: this machine has no IPv6");
        return;
    };
    let url = url_with_address(listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut broker = TcpStream::connect(broker()).await.expect("the broker");
                let _ = tokio::io::copy_bidirectional(&mut client, &mut broker).await;
            });
        }
    });
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum).url(&url)).await;
    assert!(url.contains("@[::1]:"), "{url}");
    fixture.publish("a").await;
    let delivery = delivery(&mut source).await;
    settle(&mut source, delivery, accept()).await;
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

/// With `Topology::Trust` the source does not know that the queue has a single active consumer.
#[tokio::test]
async fn a_consumer_behind_a_single_active_one_does_not_reconnect_repeatedly() {
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    fixture
        .channel
        .queue_declare(fixture.queue.as_str().into(), options, arguments)
        .await
        .expect("declared");
    let source = || {
        fixture
            .source(QueueKind::Quorum)
            .topology(Topology::Trust)
            .prefetch(1)
    };
    let mut active = open(source()).await;
    fixture.publish("held").await;
    let held = delivery(&mut active).await;
    let mut waiting = open(source().status(status.clone())).await;
    fixture.publish("ready").await;
    let (until, mut into) = (
        tokio::time::Instant::now() + Duration::from_secs(9),
        Vec::new(),
    );
    while tokio::time::timeout_at(until, waiting.receive(LIMIT, &mut into))
        .await
        .is_ok()
    {}
    assert!(
        into.iter()
            .all(|incoming| matches!(incoming, Incoming::Revoked(_))),
        "the consumer that is not active received a delivery: {into:?}"
    );
    assert!(
        status.snapshot().channels_lost <= 1,
        "{:?}",
        status.snapshot()
    );
    settle(&mut active, held, accept()).await;
    close(active).await;
    let next = delivery(&mut waiting).await;
    assert_eq!(&next.message.body[..], b"ready");
    settle(&mut waiting, next, accept()).await;
    close(waiting).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

const KEYS: u32 = 4;
const EACH: u32 = 60;
const NAMES: [char; 2] = ['a', 'b'];

/// The handled messages, in order: key, number and the name of the consumer.
#[derive(Clone, Default)]
struct HandledLog(Arc<Mutex<Vec<(u32, u32, char)>>>);

impl HandledLog {
    fn count(&self) -> usize {
        self.0.lock().expect("no panic while it is locked").len()
    }

    /// The consumer that handled the last message.
    fn active(&self) -> char {
        self.0
            .lock()
            .expect("no panic while it is locked")
            .last()
            .expect("a message was handled")
            .2
    }

    /// Waits until this many messages are handled.
    async fn wait_for(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.count() < count {
            assert!(Instant::now() < deadline, "{} of {count}", self.count());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[derive(Clone)]
struct RecordingHandler {
    handled: HandledLog,
    name: char,
}

impl Handler for RecordingHandler {
    type Payload = (u32, u32);

    async fn handle(&self, (key, number): (u32, u32), _: &Context) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..20))).await;
        self.handled
            .0
            .lock()
            .expect("no panic while it is locked")
            .push((key, number, self.name));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_single_active_consumer_order_by_key_holds_across_a_fleet() {
    // On a busy machine, the other consumer may be reconnecting at each change.
    let both_handled = order_holds_in_a_fleet().await || order_holds_in_a_fleet().await;
    assert!(both_handled, "only one consumer handled messages, twice");
}

/// Returns whether both consumers handled messages.
async fn order_holds_in_a_fleet() -> bool {
    let (fixture, urls, store, handled) = (
        QueueFixture::new().await,
        [proxy(), proxy()],
        MemoryStore::new(),
        HandledLog::default(),
    );
    let start = async |number: usize| {
        let url = url_with_address(format!("127.0.0.1:{}", urls[number].port()));
        let (readiness, (stop, stopped)) = (Readiness::new(), oneshot::channel::<()>());
        let consumer = Consumer::builder()
            .source(
                fixture
                    .source(QueueKind::Quorum)
                    .single_active_consumer()
                    .url(url),
            )
            .store(store.clone())
            .guarantee(Guarantee::AtMostOnce)
            .allow_volatile_store()
            .id(IdSource::message_id())
            .order(Order::ByKey)
            .max_in_flight(16)
            .readiness(readiness.clone())
            .handler(RecordingHandler {
                handled: handled.clone(),
                name: NAMES[number],
            });
        let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !readiness.is_ready() {
            assert!(
                Instant::now() < deadline,
                "the consumer did not start in time"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        (stop, running)
    };
    let mut fleet = vec![start(0).await, start(1).await];
    let exchange = format!("{}.exchange", fixture.queue);
    let declaring = fixture.channel.exchange_declare(
        exchange.as_str().into(),
        ExchangeKind::Topic,
        ExchangeDeclareOptions::default(),
        FieldTable::default(),
    );
    declaring.await.expect("an exchange");
    let binding = fixture.channel.queue_bind(
        fixture.queue.as_str().into(),
        exchange.as_str().into(),
        "#".into(),
        QueueBindOptions::default(),
        FieldTable::default(),
    );
    binding.await.expect("bound");
    for number in 0..EACH {
        for key in 0..KEYS {
            let properties =
                BasicProperties::default().with_message_id(format!("{key}-{number}").into());
            let body = format!("[{key},{number}]");
            let options = BasicPublishOptions {
                mandatory: true,
                ..BasicPublishOptions::default()
            };
            let sent = fixture.channel.basic_publish(
                exchange.as_str().into(),
                format!("key.{key}").into(),
                options,
                body.as_bytes(),
                properties,
            );
            assert!(
                sent.await
                    .expect("sent")
                    .await
                    .expect("confirmed")
                    .take_message()
                    .is_none()
            );
        }
    }
    let stop = async |(stop, running): (oneshot::Sender<()>, tokio::task::JoinHandle<_>)| {
        stop.send(()).expect("the consumer runs");
        let ended: Result<(), oncegate_core::Error> = running.await.expect("no panic");
        ended.expect("a clean end");
    };
    // The active consumer changes repeatedly: its connection is reset, or it is restarted.
    let all = (KEYS * EACH) as usize;
    for part in 1..=6 {
        handled.wait_for(all * part / 8).await;
        let active = NAMES
            .iter()
            .position(|name| *name == handled.active())
            .expect("the active consumer is one of these");
        if part % 2 == 0 {
            stop(fleet.remove(active)).await;
            fleet.insert(active, start(active).await);
        } else {
            urls[active].reset();
        }
    }
    handled.wait_for(all).await;
    for member in fleet {
        stop(member).await;
    }
    let handled = handled
        .0
        .lock()
        .expect("no panic while it is locked")
        .clone();
    for key in 0..KEYS {
        let entries: Vec<_> = handled.iter().filter(|entry| entry.0 == key).collect();
        let numbers: Vec<u32> = entries.iter().map(|entry| entry.1).collect();
        assert_eq!(numbers, (0..EACH).collect::<Vec<_>>(), "{entries:?}");
    }
    fixture
        .channel
        .exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default())
        .await
        .expect("deleted");
    fixture.delete_queues().await;
    NAMES
        .into_iter()
        .all(|name| handled.iter().any(|entry| entry.2 == name))
}
