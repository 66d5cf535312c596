//! Kafka by rdkafka.

use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::broker::{RejectedMessage, Sent};
use crate::process::POLL_INTERVAL;

/// The partitions of a topic; several, so that copies of a message are handled concurrently.
const PARTITIONS: i32 = 3;
/// The timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) async fn create(brokers: &str, topic: &str) {
    let new = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
    let created = admin(brokers)
        .create_topics(
            [&new],
            &AdminOptions::new().operation_timeout(Some(REQUEST_TIMEOUT)),
        )
        .await;
    created
        .expect("Kafka answers")
        .into_iter()
        .for_each(|topic| drop(topic.expect("a topic that is new")));
    // Kafka confirms the creation of a topic before its metadata is available.
    on_a_thread(brokers, topic, |consumer, topic| {
        let until = Instant::now() + REQUEST_TIMEOUT;
        while partitions(consumer, topic) != (0..PARTITIONS) {
            assert!(Instant::now() < until, "the new topic is not there");
            std::thread::sleep(POLL_INTERVAL);
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

pub(crate) async fn rejected_messages(brokers: &str, topic: &str) -> Vec<RejectedMessage> {
    on_a_thread(brokers, topic, |consumer, topic| {
        let mut left: u64 = 0;
        let mut all = TopicPartitionList::new();
        for partition in partitions(consumer, topic) {
            let (low, high) = consumer
                .fetch_watermarks(topic, partition, REQUEST_TIMEOUT)
                .expect("watermarks");
            left += u64::try_from(high - low).expect("the end is not before the beginning");
            all.add_partition_offset(topic, partition, Offset::Beginning)
                .expect("a valid offset");
        }
        consumer.assign(&all).expect("its partitions");
        let read = (0..left).map(|_| {
            let message = consumer
                .poll(REQUEST_TIMEOUT)
                .expect("what the watermarks promise")
                .expect("a message");
            let headers = message
                .headers()
                .into_iter()
                .flat_map(|headers| headers.iter());
            RejectedMessage {
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
            .committed_offsets(all, REQUEST_TIMEOUT)
            .expect("the group's offsets");
        let behind = committed.elements().into_iter().map(|element| {
            let (low, high) = consumer
                .fetch_watermarks(topic, element.partition(), REQUEST_TIMEOUT)
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
    // Errors are ignored: the names are never used again.
    let _ = admin(brokers)
        .delete_topics(&topics, &AdminOptions::new())
        .await;
}

/// Runs a blocking request on another thread.
async fn on_a_thread<T: Send + 'static>(
    brokers: &str,
    topic: &str,
    ask: fn(&BaseConsumer, &str) -> T,
) -> T {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    let asked = tokio::task::spawn_blocking(move || {
        // The consumer group has the name of the topic.
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
        .fetch_metadata(Some(topic), REQUEST_TIMEOUT)
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
