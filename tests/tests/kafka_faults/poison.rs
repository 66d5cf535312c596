//! A message that always fails, among many that do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncegate::{Consumer, Context, Failure, Handler, IdSource, Kafka, MemoryStore, async_trait};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};

use crate::rig::Rig;
use crate::{PATIENCE, shared_broker};

const POISON: u32 = 0;
/// How often the poisoned one is handed over before it is set aside, and how often each time its handler runs.
const ATTEMPTS: u32 = 3;
const RUNS: u32 = 2;
/// How much longer the others may take beside a poisoned one.
const SLOWER: f64 = 1.10;

#[derive(Clone, Default)]
struct Counts {
    handled: Arc<AtomicU32>,
    poisoned: Arc<AtomicU32>,
}

#[async_trait]
impl Handler for Counts {
    type Payload = u32;

    async fn handle(&self, number: u32, _: &Context) -> Result<(), Failure> {
        if number == POISON {
            self.poisoned.fetch_add(1, Ordering::SeqCst);
            return Err(Failure::Retry("always".into()));
        }
        self.handled.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Publishes these messages without a key, so that none waits for another of its key.
fn publish(brokers: &str, topic: &str, numbers: impl Iterator<Item = u32>) {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("acks", "all");
    let producer: ThreadedProducer<DefaultProducerContext> = config.create().expect("a producer");
    for number in numbers {
        let (id, body) = (format!("n-{number}"), number.to_string());
        let headers = OwnedHeaders::new().insert(Header { key: "id", value: Some(&id) });
        let mut record = BaseRecord::<(), str>::to(topic).payload(&body).headers(headers);
        while let Err((error, again)) = producer.send(record) {
            assert_eq!(error, KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull));
            record = again;
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    producer.flush(PATIENCE).expect("all were confirmed");
}

/// Handles so many sound messages of one partition, behind a poisoned one or none; how long that took from the first of them to the
/// last. At the end all is committed, and a poisoned one stands in the dead letters.
async fn handle(brokers: &str, sound: u32, first: u32) -> Duration {
    let rig = Rig::new(brokers.to_owned(), 1, 1).await;
    publish(brokers, &rig.name, first..=sound);
    let counts = Counts::default();
    let consumer = Consumer::builder()
        .source(Kafka::topic(&rig.name).brokers(brokers).group(&rig.name))
        .store(MemoryStore::new())
        .id(IdSource::header("id"))
        .attempts(ATTEMPTS)
        .retries(RUNS - 1)
        .backoff(Duration::from_millis(20), Duration::from_millis(100))
        .handler(counts.clone());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let until = Instant::now() + PATIENCE;
    let reaches = async |count| {
        while counts.handled.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < until, "{} of {count}", counts.handled.load(Ordering::SeqCst));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Instant::now()
    };
    let (first_handled, last_handled) = (reaches(1).await, reaches(sound).await);
    rig.until_committed(PATIENCE).await;
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(counts.handled.load(Ordering::SeqCst), sound, "one was handled twice");
    let (poisoned, letters) = if first == POISON { (ATTEMPTS * RUNS, 1) } else { (0, 0) };
    assert_eq!(counts.poisoned.load(Ordering::SeqCst), poisoned, "the poisoned one ran more or less often than it may");
    let reader: BaseConsumer = ClientConfig::new().set("bootstrap.servers", brokers).create().expect("a consumer");
    let ends = reader.fetch_watermarks(&format!("{}.dead-letters", rig.name), 0, PATIENCE).expect("where the dead letters end");
    assert_eq!(ends, (0, letters), "dead letters");
    last_handled - first_handled
}

/// Rounds in turn without a poisoned message and with one; how long the sound ones took in each.
async fn poison_among(sound: u32, rounds: usize) -> [Vec<Duration>; 2] {
    let brokers = shared_broker();
    let mut took = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        // Whichever comes second finds the broker warmer.
        for with in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            let first = if with == 1 { POISON } else { POISON + 1 };
            took[with].push(handle(&brokers, sound, first).await);
        }
    }
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poisoned_message_is_set_aside_after_its_attempts_and_the_others_go_on() {
    poison_among(1_000, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures: cargo xtask kafka-faults"]
async fn long_a_poisoned_message_among_ten_thousand() {
    const SOUND: u32 = 10_000;
    const ROUNDS: usize = 20;
    let [without, with] = poison_among(SOUND, ROUNDS).await;
    // Round by round: what else the machine does meets both halves of one.
    let mut ratios: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with.as_secs_f64() / without.as_secs_f64()).collect();
    for (what, took) in [("without", &without), ("with", &with)] {
        let mut took: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1_000.0).collect();
        let [least, median, most] = spread(&mut took);
        println!("{SOUND} sound messages {what} a poisoned one: median {median:.0} ms, {least:.0} to {most:.0}, {ROUNDS} rounds");
    }
    let [least, median, most] = spread(&mut ratios);
    println!("with to without in each round: median {median:.3}, {least:.3} to {most:.3}; {SLOWER} is allowed");
    assert!(median <= SLOWER, "{without:?} without a poisoned one, {with:?} with one");
}

/// The least, the median and the most.
fn spread(figures: &mut [f64]) -> [f64; 3] {
    figures.sort_by(f64::total_cmp);
    [0, figures.len() / 2, figures.len() - 1].map(|at| figures[at])
}
