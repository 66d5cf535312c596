//! Dead letters a second, beside a bare publisher with confirms on the same node.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqStatus};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{
    Connect, ConnectOptions, FailureHistory, Incoming, Limit, Settled, Source,
};
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, Raw};
use oncegate_testkit::servers::RabbitServer;

const QUEUE: &str = "orders";
const DEAD_LETTERS: &str = "orders.dead-letters";
/// The size of a body in bytes.
const BODY: usize = 100;
/// The number of messages of one measurement.
const MESSAGES: usize = 40_000;
/// The number of rounds; each measures the bare publisher and oncegate, in turn.
const ROUNDS: usize = 2;
/// The default prefetch, and one with which the confirms of a classic queue, which RabbitMQ syncs every
/// 200 ms, are no limit. The bare publisher has as many unconfirmed messages.
const PREFETCHES: [u32; 2] = [512, 4_000];
const TIMEOUT: Duration = Duration::from_secs(300);

/// The CPU time of a process so far, in seconds.
fn cpu_seconds(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("Linux");
    let fields = stat.rsplit_once(')').expect("a name").1;
    let ticks: f64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|ticks| ticks.parse::<f64>().expect("a number"))
        .sum();
    // The clock ticks of Linux are 1/100 s on all supported machines.
    ticks / 100.0
}

/// Measures the rate and the CPU time of a run.
struct RateMeasurement {
    started: Instant,
    client: f64,
    broker: f64,
}

impl RateMeasurement {
    fn start(server: &RabbitServer) -> Self {
        Self {
            started: Instant::now(),
            client: cpu_seconds(std::process::id()),
            broker: cpu_seconds(server.pid()),
        }
    }

    /// Prints the result, and returns the messages per second.
    fn finish(self, server: &RabbitServer, what: &str) -> f64 {
        let took = self.started.elapsed().as_secs_f64();
        let micros = |before: f64, now: f64| (now - before) * 1e6 / MESSAGES as f64;
        let rate = MESSAGES as f64 / took;
        println!(
            "{what}: {rate:.0}/s; CPU time per message: client {:.1} µs, broker {:.1} µs; {:.2} cores busy",
            micros(self.client, cpu_seconds(std::process::id())),
            micros(self.broker, cpu_seconds(server.pid())),
            (cpu_seconds(std::process::id()) - self.client + cpu_seconds(server.pid())
                - self.broker)
                / took,
        );
        rate
    }
}

/// Publishes `MESSAGES` messages with at most this many outstanding confirms.
async fn publish_all(channel: &Channel, queue: &str, headers: &FieldTable, window: u32) {
    let body = vec![b'x'; BODY];
    let mut confirms = FuturesUnordered::new();
    for number in 0..MESSAGES {
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_message_id(format!("n-{number}").into())
            .with_headers(headers.clone());
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let sent = channel.basic_publish("".into(), queue.into(), options, &body, properties);
        confirms.push(sent.await.expect("sent"));
        while confirms.len() >= window as usize {
            let confirm = confirms.next().await.expect("a confirm").expect("open");
            assert!(confirm.is_ack() && confirm.take_message().is_none());
        }
    }
    while let Some(confirm) = confirms.next().await {
        assert!(confirm.expect("open").take_message().is_none());
    }
}

/// Headers like those of a dead letter.
fn headers_of_a_dead_letter() -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in [
        ("oncegate-attempts", "1"),
        ("oncegate-first-seen", "1700000000000"),
        ("oncegate-id", "n-1234567"),
        ("oncegate-last-error", "no such order"),
        ("oncegate-origin", QUEUE),
        ("oncegate-reason", "refused"),
        ("oncegate-rejected-at", "1700000000000"),
    ] {
        table.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    table
}

/// Rejects all messages of the queue with the source alone, without a store.
async fn reject_with_source(source: RabbitMq, status: &RabbitMqStatus) {
    let source = source
        .connect(ConnectOptions::default())
        .await
        .expect("opened");
    let mut source: Box<dyn Source> = Box::new(source);
    let mut seen = 0;
    while seen < MESSAGES {
        let mut into = Vec::new();
        let limit = Limit::new(256, 1 << 20);
        tokio::time::timeout(TIMEOUT, source.receive(limit, &mut into))
            .await
            .expect("in time")
            .expect("received");
        let mut failure_history = FailureHistory::default();
        failure_history.id = Some("n-1234567".into());
        failure_history.attempts = 1;
        failure_history.last_error = Some("no such order".into());
        let rejected = into.into_iter().map(|incoming| match incoming {
            Incoming::Delivery(delivery) => {
                Settled::new(delivery, Settlement::Reject(Reason::Refused))
                    .with_failure_history(failure_history.clone())
            }
            Incoming::Revoked(epoch) => panic!("channel {epoch} was lost"),
        });
        let mut rejected: Vec<_> = rejected.collect();
        seen += rejected.len();
        source.settle(&mut rejected).await.expect("settled");
    }
    wait_for_acks(status).await;
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
}

async fn wait_for_acks(status: &RabbitMqStatus) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let read = status.snapshot();
        if read.copies >= MESSAGES as u64 && read.unacked == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "{read:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Rejects every message.
struct AlwaysRejectingHandler;

impl Handler for AlwaysRejectingHandler {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Err(Failure::Reject("no such order".into()))
    }
}

/// Rejects all messages of the queue with a consumer and the store in memory.
async fn reject_with_consumer(source: RabbitMq, status: &RabbitMqStatus) {
    let consumer = Consumer::builder()
        .source(source)
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        // The prefetch is capped at twice this.
        .max_in_flight(2_000)
        .handler(AlwaysRejectingHandler);
    consumer
        .run_until(wait_for_acks(status))
        .await
        .expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; cargo xtask faults runs it"]
async fn dead_letters_a_second_beside_a_bare_publisher() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    for (kind, name) in [
        (QueueKind::Classic, "classic"),
        (QueueKind::Quorum, "quorum"),
    ] {
        let connection = Connection::connect(&server.url(), ConnectionProperties::default())
            .await
            .expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await
            .expect("confirms");
        let source = || RabbitMq::queue(QUEUE).url(server.url()).queue_kind(kind);
        let declared: Box<dyn Source> = Box::new(
            source()
                .connect(ConnectOptions::default())
                .await
                .expect("opened"),
        );
        declared
            .close(Instant::now() + Duration::from_secs(10))
            .await
            .expect("closed");
        let purge = async |queue: &str| {
            channel
                .queue_purge(queue.into(), QueuePurgeOptions::default())
                .await
                .expect("purged")
        };
        for prefetch in [PREFETCHES; ROUNDS].into_iter().flatten() {
            let name = format!("{name}, {prefetch}");
            let measurement = RateMeasurement::start(&server);
            publish_all(
                &channel,
                DEAD_LETTERS,
                &headers_of_a_dead_letter(),
                prefetch,
            )
            .await;
            measurement.finish(&server, &format!("{name}: bare publisher"));
            assert_eq!(purge(DEAD_LETTERS).await as usize, MESSAGES);
            for by in ["source", "consumer"] {
                publish_all(&channel, QUEUE, &FieldTable::default(), 2_000).await;
                let status = RabbitMqStatus::new();
                let source = source().prefetch(prefetch).status(status.clone());
                let measurement = RateMeasurement::start(&server);
                if by == "source" {
                    reject_with_source(source, &status).await;
                } else {
                    reject_with_consumer(source, &status).await;
                }
                measurement.finish(&server, &format!("{name}: dead letters of a {by}"));
                assert_eq!(purge(DEAD_LETTERS).await as usize, MESSAGES);
            }
        }
        for queue in [QUEUE, DEAD_LETTERS, "orders.in-doubt"] {
            channel
                .queue_delete(queue.into(), lapin::options::QueueDeleteOptions::default())
                .await
                .expect("deleted");
        }
        for delay in [1_000, 5_000, 30_000, 120_000, 600_000] {
            channel
                .queue_delete(
                    format!("{QUEUE}.delay.{delay}").into(),
                    lapin::options::QueueDeleteOptions::default(),
                )
                .await
                .expect("deleted");
        }
    }
    crate::assert_no_refused_acks(&server);
}
