//! Requests and replies over topics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use oncegate_core::replies::{Replies, ReplyingHandler};
use oncegate_core::{Consumer, Context, Failure, IdSource, MemoryStore};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};

use crate::fixture::*;

/// Replies with the number of the run.
struct Charge(Arc<AtomicU32>);

impl ReplyingHandler for Charge {
    type Payload = u32;
    type Reply = (u32, u32);

    async fn handle(&self, cents: u32, _: &Context) -> Result<(u32, u32), Failure> {
        Ok((self.0.fetch_add(1, Ordering::SeqCst), cents))
    }
}

fn header<'a>(key: &'a str, value: &'a str) -> Header<'a, &'a str> {
    Header {
        key,
        value: Some(value),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_copy_of_a_request_gets_the_reply_of_the_first_run() {
    const REQUESTS: u32 = 10;
    const COPIES: u32 = 3;
    let topic = Topic::new(1).await;
    let answers = format!("{}.answers", topic.name);
    topic.create(&answers, 1, &[]).await;
    for copy in 0..COPIES {
        for id in 0..REQUESTS {
            let (name, correlation) = (format!("payment-{id}"), format!("{id}/{copy}"));
            let mut headers = OwnedHeaders::new().insert(header("id", &name));
            if id > 0 {
                headers = headers
                    .insert(header("reply-topic", &answers))
                    .insert(header("correlation-id", &correlation));
            }
            let body = id.to_string();
            topic.send(None, Some(body.as_bytes()), headers).await;
        }
    }
    let runs = Arc::new(AtomicU32::new(0));
    let replies = Replies::by(topic.source().publisher());
    let consumer = Consumer::builder()
        .source(topic.source())
        .store(MemoryStore::new())
        .id(IdSource::header("id"))
        .replying_handler(Charge(runs.clone()), replies);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));

    let expected = ((REQUESTS - 1) * COPIES) as usize;
    let started = Instant::now();
    while topic.end_of(&answers).await < expected {
        assert!(started.elapsed() < BOUND, "replies are missing");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    drop(stop);
    running.await.expect("it does not panic").expect("no error");
    assert_eq!(runs.load(Ordering::SeqCst), REQUESTS);
    // All requests are committed after their replies.
    let all = i64::from(REQUESTS * COPIES);
    assert_eq!(topic.committed(0).await, Some(all));
    assert_eq!(topic.end_of(&answers).await, expected);

    let received = tokio::task::spawn_blocking(move || read_replies(&topic.brokers, &answers));
    let received = received.await.expect("the replies");
    assert_eq!(received.len(), REQUESTS as usize - 1);
    for (id, bodies) in &received {
        assert_eq!(bodies.len(), COPIES as usize, "{id}: {bodies:?}");
        assert!(
            bodies
                .iter()
                .all(|body| *body == bodies[0] && body.ends_with(&format!(",{id}]"))),
            "{id}: {bodies:?}"
        );
    }
}

/// The bodies of all replies, by the request in their correlation id.
fn read_replies(brokers: &str, topic: &str) -> BTreeMap<String, Vec<String>> {
    let mut config = client(brokers);
    config
        .set("group.id", topic)
        .set("enable.partition.eof", "true");
    let reader: BaseConsumer = config.create().expect("a consumer");
    let mut from = rdkafka::TopicPartitionList::new();
    from.add_partition_offset(topic, 0, rdkafka::Offset::Beginning)
        .expect("an offset");
    reader.assign(&from).expect("assigned");
    let mut received: BTreeMap<String, Vec<String>> = BTreeMap::new();
    loop {
        let record = match reader.poll(BOUND).expect("a record") {
            Err(rdkafka::error::KafkaError::PartitionEOF(_)) => return received,
            record => record.expect("a record"),
        };
        let headers = record.headers().expect("headers");
        let value = |name: &str| {
            let header = headers.iter().find(|header| header.key == name);
            let value = header.and_then(|header| header.value).expect("a value");
            String::from_utf8(value.to_vec()).expect("text")
        };
        let correlation = value("correlation-id");
        let (id, _) = correlation.split_once('/').expect("an id");
        assert_eq!(value("message-id"), format!("payment-{id}/reply"));
        let body = String::from_utf8(record.payload().expect("a body").to_vec());
        let of_request = received.entry(id.to_owned()).or_default();
        of_request.push(body.expect("JSON is UTF-8"));
    }
}
