//! Dead letters a second beside a bare producer, and how late the messages of another partition are
//! meanwhile.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate::{Consumer, Context, Failure, Handler, IdSource, Kafka, MemoryStore};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use tokio::sync::oneshot;

use crate::rig::Rig;
use crate::{WAIT_TIMEOUT, shared_broker};

/// The number of rejected messages of one round.
const REJECTED: u32 = 200_000;
const ROUNDS: usize = 5;
/// The pause between two messages of the other partition.
const GOOD_INTERVAL: Duration = Duration::from_millis(20);
/// The lowest rate of dead letters, relative to that of the bare producer.
const MIN_RATIO: f64 = 0.15;

/// The body of a message that is rejected; the body of another one is the time of sending.
const REJECT: u64 = 0;

/// Rejects the messages of one partition, and notes how late those of the other one are.
#[derive(Clone, Default)]
struct Delays(Arc<Mutex<Vec<Duration>>>);

impl Handler for Delays {
    type Payload = u64;

    async fn handle(&self, sent_at: u64, _: &Context) -> Result<(), Failure> {
        if sent_at == REJECT {
            return Err(Failure::Reject("no such order".into()));
        }
        let delay = Duration::from_micros(micros().saturating_sub(sent_at));
        self.0.lock().expect("no panic").push(delay);
        Ok(())
    }
}

fn micros() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("a clock after 1970").as_micros() as u64
}

fn producer(brokers: &str) -> ThreadedProducer<DefaultProducerContext> {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("enable.idempotence", "true")
        .create()
        .expect("a producer")
}

/// Sends a message to a partition; waits while the producer's queue is full.
fn send(
    producer: &ThreadedProducer<DefaultProducerContext>,
    (topic, partition): (&str, i32),
    body: &str,
    headers: &OwnedHeaders,
) {
    let mut record = BaseRecord::<(), str>::to(topic)
        .partition(partition)
        .payload(body)
        .headers(headers.clone());
    while let Err((error, again)) = producer.send(record) {
        assert_eq!(
            error,
            KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
        );
        record = again;
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn headers_of(fields: &[(&str, &str)]) -> OwnedHeaders {
    fields.iter().fold(OwnedHeaders::new(), |headers, field| {
        headers.insert(Header {
            key: field.0,
            value: Some(field.1),
        })
    })
}

/// The time that a bare producer needs for as many messages with the headers of a dead letter.
fn publish_bare(brokers: &str, topic: &str) -> Duration {
    let headers = headers_of(&[
        ("oncegate-attempts", "1"),
        ("oncegate-first-seen", "1700000000000"),
        ("oncegate-id", "n-1234567"),
        ("oncegate-last-error", "no such order"),
        ("oncegate-origin", "faults-1700000000000000000/0/1234567"),
        ("oncegate-reason", "refused"),
        ("oncegate-rejected-at", "1700000000000"),
    ]);
    let producer = producer(brokers);
    let started = Instant::now();
    for _ in 0..REJECTED {
        send(&producer, (topic, 0), "0", &headers);
    }
    producer.flush(WAIT_TIMEOUT).expect("all were confirmed");
    started.elapsed()
}

/// The time from the first to the last dead letter, and how late the messages of the other partition
/// were meanwhile.
async fn reject_all(brokers: &str) -> (Duration, Vec<Duration>) {
    let rig = Rig::new(brokers.to_owned(), 2, 1).await;
    let backlog = producer(brokers);
    for number in 0..REJECTED {
        let headers = headers_of(&[("id", &format!("r-{number}"))]);
        send(&backlog, (&rig.name, 0), &REJECT.to_string(), &headers);
    }
    backlog.flush(WAIT_TIMEOUT).expect("all were confirmed");
    let delays = Delays::default();
    let consumer = Consumer::builder()
        .source(Kafka::topic(&rig.name).brokers(brokers).group(&rig.name))
        .store(MemoryStore::new())
        .id(IdSource::header("id"))
        .handler(delays.clone());
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let (topic, sender) = (rig.name.clone(), producer(brokers));
    let dead_letters = format!("{topic}.dead-letters");
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .create()
        .expect("a consumer");
    let watched = tokio::task::spawn_blocking(move || {
        let (mut first, began) = (None, Instant::now());
        for number in 0_u32.. {
            let headers = headers_of(&[("id", &format!("s-{number}"))]);
            send(&sender, (&topic, 1), &micros().to_string(), &headers);
            let (_, end) = reader
                .fetch_watermarks(&dead_letters, 0, WAIT_TIMEOUT)
                .expect("the end offset of the dead letters");
            if end > 0 {
                first = first.or(Some((Instant::now(), end)));
            }
            if end >= i64::from(REJECTED) {
                break;
            }
            assert!(began.elapsed() < WAIT_TIMEOUT, "{end} dead letters");
            std::thread::sleep(GOOD_INTERVAL);
        }
        first
    });
    let watched = watched.await.expect("no panic");
    let (first, before) = watched.expect("dead letters");
    let share = f64::from(REJECTED) / (i64::from(REJECTED) - before) as f64;
    let took = first.elapsed().mul_f64(share);
    rig.until_committed(WAIT_TIMEOUT).await;
    stop.send(()).expect("the consumer is still running");
    let ended = running.await.expect("the consumer does not panic");
    ended.expect("the consumer ends without an error");
    let mut delays = std::mem::take(&mut *delays.0.lock().expect("no panic"));
    delays.sort_unstable();
    (took, delays)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures: cargo xtask kafka-faults"]
async fn long_dead_letters_a_second_beside_a_bare_producer() {
    let brokers = shared_broker();
    let mut ratios = Vec::new();
    for round in 0..ROUNDS {
        let target = Rig::new(brokers.clone(), 1, 1).await;
        let (to, topic) = (brokers.clone(), target.name.clone());
        let bare = tokio::task::spawn_blocking(move || publish_bare(&to, &topic));
        let bare = bare.await.expect("no panic");
        let (took, delays) = reject_all(&brokers).await;
        let rate = |time: Duration| f64::from(REJECTED) / time.as_secs_f64();
        println!(
            "round {round}: {:.0} dead letters/s, bare producer {:.0}/s; {} messages of the other partition: {:?} in the median, {:?} at most",
            rate(took),
            rate(bare),
            delays.len(),
            delays[delays.len() / 2],
            delays.last().expect("at least one"),
        );
        ratios.push(rate(took) / rate(bare));
    }
    ratios.sort_unstable_by(f64::total_cmp);
    assert!(ratios[ROUNDS / 2] >= MIN_RATIO, "{ratios:?}");
}
