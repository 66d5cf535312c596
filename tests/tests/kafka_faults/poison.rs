//! A message that always fails, among many that succeed.

use std::time::Duration;

use oncegate::{IdSource, Kafka};
use oncegate_testkit::poison::{self, POISON, Poison, Rounds};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};

use crate::rig::Rig;
use crate::{WAIT_TIMEOUT, shared_broker};

/// Publishes messages without a key, so that none waits for another one.
fn publish(brokers: &str, topic: &str, numbers: impl Iterator<Item = u32>) {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("acks", "all");
    let producer: ThreadedProducer<DefaultProducerContext> = config.create().expect("a producer");
    for number in numbers {
        let (id, body) = (format!("n-{number}"), number.to_string());
        let headers = OwnedHeaders::new().insert(Header {
            key: "id",
            value: Some(&id),
        });
        let mut record = BaseRecord::<(), str>::to(topic)
            .payload(&body)
            .headers(headers);
        while let Err((error, again)) = producer.send(record) {
            assert_eq!(
                error,
                KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
            );
            record = again;
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    producer.flush(WAIT_TIMEOUT).expect("all were confirmed");
}

/// Handles messages of one partition, with or without a poison message at its start. Returns the
/// time from the first to the last successful one. Checks that all offsets are committed and that
/// the poison message is in the dead letters.
async fn handle(brokers: &str, sound: u32, (poison, first): (Poison, u32)) -> Duration {
    let rig = Rig::new(brokers.to_owned(), 1, 1).await;
    publish(brokers, &rig.name, first..=sound);
    let source = Kafka::topic(&rig.name).brokers(brokers).group(&rig.name);
    let took = poison::handle(
        source,
        IdSource::header("id"),
        (poison, first),
        sound,
        async || rig.until_committed(WAIT_TIMEOUT).await,
    )
    .await;
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .create()
        .expect("a consumer");
    let ends = reader
        .fetch_watermarks(&format!("{}.dead-letters", rig.name), 0, WAIT_TIMEOUT)
        .expect("the end offset of the dead letters");
    assert_eq!(ends, (0, i64::from(first == POISON)), "dead letters");
    took
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poison_message_is_dead_lettered_and_does_not_block_the_others() {
    let brokers = shared_broker();
    for poison in [Poison::Fails, Poison::Panics] {
        Rounds::measure(poison, 1, async |what| handle(&brokers, 1_000, what).await).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures: cargo xtask kafka-faults"]
async fn long_a_poison_message_among_ten_thousand() {
    let brokers = shared_broker();
    for poison in [Poison::Fails, Poison::Panics] {
        Rounds::measure(poison, 20, async |what| {
            handle(&brokers, 10_000, what).await
        })
        .await
        .assert_slowdown_limit();
    }
}
