//! More than one way to the broker, and more than one consumer of a queue.

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
    Consumer, Context, Failure, Guarantee, Handler, IdSource, MemoryStore, Readiness, async_trait,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::rig::*;

/// The broker's URL with another host and port.
pub(crate) fn by_way_of(address: impl std::fmt::Display) -> String {
    let url = url();
    let at = url.rfind('@').expect("user@host") + 1;
    let end = url[at..].find('/').map_or(url.len(), |slash| at + slash);
    format!("{}{address}{}", &url[..at], &url[end..])
}

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
async fn of_several_nodes_another_takes_over() {
    let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
    let (first, second) = (proxy(), proxy());
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address");
    let ways = [
        by_way_of(nobody),
        by_way_of(format!("127.0.0.1:{}", first.port())),
        by_way_of(format!("127.0.0.1:{}", second.port())),
    ];
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .urls(ways)
            .status(status.clone()),
    )
    .await;
    rig.publish("a").await;
    let stale = delivery(&mut source).await;
    // Whichever it used: now there is one left.
    drop(first);
    second.reset();
    let (mut again, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    settle(&mut source, stale, accept()).await;
    settle(&mut source, again.remove(0), accept()).await;
    assert!(status.snapshot().reconnects >= 1);
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn a_broker_is_reached_by_its_ipv6_address() {
    let Ok(listener) = TcpListener::bind("[::1]:0").await else {
        println!("left out: this machine has no IPv6");
        return;
    };
    let url = by_way_of(listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut far = TcpStream::connect(broker()).await.expect("the broker");
                let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum).url(&url)).await;
    assert!(url.contains("@[::1]:"), "{url}");
    rig.publish("a").await;
    let delivery = delivery(&mut source).await;
    settle(&mut source, delivery, accept()).await;
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

/// The queue is the user's own, and nobody said that one of its consumers is active and the others
/// wait.
#[tokio::test]
async fn who_waits_behind_an_active_consumer_does_not_connect_over_and_over() {
    let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
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
    rig.channel
        .queue_declare(rig.queue.as_str().into(), options, arguments)
        .await
        .expect("declared");
    let source = || {
        rig.source(QueueKind::Quorum)
            .topology(Topology::Trust)
            .prefetch(1)
    };
    let mut active = open(source()).await;
    rig.publish("held").await;
    let held = delivery(&mut active).await;
    let mut waiting = open(source().status(status.clone())).await;
    rig.publish("stands ready").await;
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
        "it was handed something: {into:?}"
    );
    assert!(status.snapshot().reconnects <= 1, "{:?}", status.snapshot());
    settle(&mut active, held, accept()).await;
    close(active).await;
    let next = delivery(&mut waiting).await;
    assert_eq!(&next.message.body[..], b"stands ready");
    settle(&mut waiting, next, accept()).await;
    close(waiting).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

const KEYS: u32 = 4;
const EACH: u32 = 60;
const NAMES: [char; 2] = ['a', 'b'];

/// What was handled, in order: key and number, and by whom.
#[derive(Clone, Default)]
struct Journal(Arc<Mutex<Vec<(u32, u32, char)>>>);

impl Journal {
    fn count(&self) -> usize {
        self.0.lock().expect("nobody panics with it").len()
    }

    /// Who handled the last one.
    fn active(&self) -> char {
        self.0
            .lock()
            .expect("nobody panics with it")
            .last()
            .expect("something was handled")
            .2
    }

    async fn reaches(&self, count: usize) {
        let patience = Instant::now() + Duration::from_secs(60);
        while self.count() < count {
            assert!(Instant::now() < patience, "{} of {count}", self.count());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[derive(Clone)]
struct Writes {
    journal: Journal,
    name: char,
}

#[async_trait]
impl Handler for Writes {
    type Payload = (u32, u32);

    async fn handle(&self, (key, number): (u32, u32), _: &Context) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..20))).await;
        self.journal
            .0
            .lock()
            .expect("nobody panics with it")
            .push((key, number, self.name));
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_single_active_consumer_the_order_by_key_holds_across_a_fleet() {
    let (rig, ways, store, journal) = (
        Rig::new().await,
        [proxy(), proxy()],
        MemoryStore::new(),
        Journal::default(),
    );
    let begin = async |number: usize| {
        let way = by_way_of(format!("127.0.0.1:{}", ways[number].port()));
        let (readiness, (stop, stopped)) = (Readiness::new(), oneshot::channel::<()>());
        let consumer = Consumer::builder()
            .source(
                rig.source(QueueKind::Quorum)
                    .single_active_consumer()
                    .url(way),
            )
            .store(store.clone())
            .guarantee(Guarantee::AtMostOnce)
            .allow_volatile_store()
            .id(IdSource::message_id())
            .order(Order::ByKey)
            .max_in_flight(16)
            .readiness(readiness.clone())
            .handler(Writes {
                journal: journal.clone(),
                name: NAMES[number],
            });
        let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
        let patience = Instant::now() + Duration::from_secs(60);
        while !readiness.is_ready() {
            assert!(Instant::now() < patience, "it does not consume");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        (stop, running)
    };
    let mut fleet = vec![begin(0).await, begin(1).await];
    let exchange = format!("{}.exchange", rig.queue);
    let declaring = rig.channel.exchange_declare(
        exchange.as_str().into(),
        ExchangeKind::Topic,
        ExchangeDeclareOptions::default(),
        FieldTable::default(),
    );
    declaring.await.expect("an exchange");
    let binding = rig.channel.queue_bind(
        rig.queue.as_str().into(),
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
            let sent = rig.channel.basic_publish(
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
    let end = async |(stop, running): (oneshot::Sender<()>, tokio::task::JoinHandle<_>)| {
        stop.send(()).expect("it runs");
        let ended: Result<(), oncegate_core::Error> = running.await.expect("no panic");
        ended.expect("a clean end");
    };
    // Whoever is active loses the queue, again and again: by force, and as a new version is brought
    // out.
    let all = (KEYS * EACH) as usize;
    for part in 1..=6 {
        journal.reaches(all * part / 8).await;
        let active = NAMES
            .iter()
            .position(|name| *name == journal.active())
            .expect("one of them");
        if part % 2 == 0 {
            end(fleet.remove(active)).await;
            fleet.insert(active, begin(active).await);
        } else {
            ways[active].reset();
        }
    }
    journal.reaches(all).await;
    for member in fleet {
        end(member).await;
    }
    let journal = journal.0.lock().expect("nobody panics with it").clone();
    for key in 0..KEYS {
        let entries: Vec<_> = journal.iter().filter(|entry| entry.0 == key).collect();
        let numbers: Vec<u32> = entries.iter().map(|entry| entry.1).collect();
        assert_eq!(numbers, (0..EACH).collect::<Vec<_>>(), "{entries:?}");
    }
    assert!(
        NAMES
            .into_iter()
            .all(|name| journal.iter().any(|entry| entry.2 == name)),
        "only one of them consumed"
    );
    rig.channel
        .exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default())
        .await
        .expect("deleted");
    rig.done().await;
}
