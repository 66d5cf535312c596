//! Kafka with rdkafka alone.

use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::broker::{Letter, Sent};
use crate::process::LOOK_EVERY;

/// Partitions of a topic, so that copies of a message are handled at the same time.
const PARTITIONS: i32 = 3;
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) async fn create(brokers: &str, topic: &str) {
    let new = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
    let created = admin(brokers)
        .create_topics(
            [&new],
            &AdminOptions::new().operation_timeout(Some(PATIENCE)),
        )
        .await;
    created
        .expect("Kafka answers")
        .into_iter()
        .for_each(|topic| drop(topic.expect("a topic that is new")));
    // The broker says that a topic is created a moment before it says that it exists.
    on_a_thread(brokers, topic, |consumer, topic| {
        let until = Instant::now() + PATIENCE;
        while partitions(consumer, topic) != (0..PARTITIONS) {
            assert!(Instant::now() < until, "the new topic is not there");
            std::thread::sleep(LOOK_EVERY);
        }
    })
    .await;
}

pub(crate) async fn publish(brokers: &str, topic: &str, messages: &[Sent]) {
    let producer: FutureProducer = config(brokers)
        .set("acks", "all")
        .create()
        .expect("a producer");
    let mut sent = Vec::new();
    for (message, partition) in messages.iter().zip((0..PARTITIONS).cycle()) {
        let mut record = FutureRecord::<(), str>::to(topic)
            .partition(partition)
            .payload(&message.body);
        if let Some(id) = &message.id {
            record = record.headers(OwnedHeaders::new().insert(Header {
                key: "id",
                value: Some(id),
            }));
        }
        sent.push(
            producer
                .send_result(record)
                .unwrap_or_else(|(error, _)| panic!("{error}")),
        );
    }
    for confirmed in sent {
        confirmed
            .await
            .expect("the producer lives")
            .unwrap_or_else(|(error, _)| panic!("{error}"));
    }
}

pub(crate) async fn letters(brokers: &str, topic: &str) -> Vec<Letter> {
    on_a_thread(brokers, topic, |consumer, topic| {
        let mut left: u64 = 0;
        let mut all = TopicPartitionList::new();
        for partition in partitions(consumer, topic) {
            let (low, high) = consumer
                .fetch_watermarks(topic, partition, PATIENCE)
                .expect("watermarks");
            left += u64::try_from(high - low).expect("the end is not before the beginning");
            all.add_partition_offset(topic, partition, Offset::Beginning)
                .expect("a valid offset");
        }
        consumer.assign(&all).expect("its partitions");
        let read = (0..left).map(|_| {
            let message = consumer
                .poll(PATIENCE)
                .expect("what the watermarks promise")
                .expect("a message");
            let headers = message
                .headers()
                .into_iter()
                .flat_map(|headers| headers.iter());
            Letter {
                headers: headers
                    .map(|it| (it.key.to_owned(), text(it.value.unwrap_or_default())))
                    .collect(),
                body: text(message.payload().unwrap_or_default()),
            }
        });
        read.collect()
    })
    .await
}

pub(crate) async fn left(brokers: &str, topic: &str) -> u64 {
    on_a_thread(brokers, topic, |consumer, topic| {
        let mut all = TopicPartitionList::new();
        for partition in partitions(consumer, topic) {
            all.add_partition(topic, partition);
        }
        let committed = consumer
            .committed_offsets(all, PATIENCE)
            .expect("the group's offsets");
        let behind = committed.elements().into_iter().map(|element| {
            let (low, high) = consumer
                .fetch_watermarks(topic, element.partition(), PATIENCE)
                .expect("watermarks");
            let next = element
                .offset()
                .to_raw()
                .filter(|offset| *offset >= 0)
                .unwrap_or(low);
            u64::try_from(high - next).expect("nothing beyond the end is committed")
        });
        behind.sum()
    })
    .await
}

pub(crate) async fn remove(brokers: &str, topic: &str) {
    let topics = [
        topic.to_owned(),
        format!("{topic}.dead-letters"),
        format!("{topic}.in-doubt"),
    ];
    let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
    // What is left over harms nobody: its name is never used again.
    let _ = admin(brokers)
        .delete_topics(&topics, &AdminOptions::new())
        .await;
}

/// The client waits without yielding, so it does so elsewhere.
async fn on_a_thread<T: Send + 'static>(
    brokers: &str,
    topic: &str,
    ask: fn(&BaseConsumer, &str) -> T,
) -> T {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    let asked = tokio::task::spawn_blocking(move || {
        // The consumers' group bears the topic's name.
        let consumer: BaseConsumer = config(&brokers)
            .set("group.id", &topic)
            .set("enable.auto.commit", "false")
            .create()
            .expect("a consumer");
        ask(&consumer, &topic)
    });
    asked.await.expect("no panic inside")
}

fn partitions(consumer: &BaseConsumer, topic: &str) -> std::ops::Range<i32> {
    let metadata = consumer
        .fetch_metadata(Some(topic), PATIENCE)
        .expect("metadata");
    let count = metadata
        .topics()
        .first()
        .map_or(0, |topic| topic.partitions().len());
    0..i32::try_from(count).expect("a few partitions")
}

fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    config(brokers).create().expect("an admin client")
}

fn config(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
