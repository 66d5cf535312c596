//! The publisher of an outbox.

use std::time::Instant;

use futures_util::future::join_all;
use oncegate_core::IdSource;
use oncegate_core::outbox::{NotPublished, OutboxMessage, Publisher};
use oncegate_kafka::Kafka;

use crate::fixture::*;

fn message(topic: &str, number: usize) -> OutboxMessage {
    OutboxMessage::new(format!("t-{number}/1"), topic, number.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_arrives_with_its_id_key_headers_and_body() {
    let topic = Topic::new(1).await;
    let publisher = topic.source().publisher();
    let mut sent = message(&topic.name, 7);
    sent.key = Some("k".into());
    sent.headers = vec![("currency".into(), "EUR".into())];
    publisher.publish(&sent).await.expect("confirmed");
    let mut source = topic.open().await;
    let mut delivered = receive(&mut source, 1).await;
    let delivery = delivered.pop().expect("a message");
    let received = &delivery.message;
    let id = IdSource::header("message-id").read(received);
    assert_eq!(id.expect("an id").as_str(), "t-7/1");
    assert_eq!(received.key.as_deref(), Some(&b"k"[..]));
    assert_eq!(received.headers.last("currency"), Some(&b"EUR"[..]));
    assert_eq!(&received.body[..], b"7");
    accept(&mut source, [delivery]).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_for_a_missing_topic_is_not_confirmed_until_the_topic_exists() {
    let topic = Topic::alone(1).await;
    let publisher = topic.source().publisher();
    let missing = format!("{}.later", topic.name);
    let (early, present) = (message(&missing, 1), message(&topic.name, 2));
    let (early_result, present) =
        tokio::join!(publisher.publish(&early), publisher.publish(&present));
    present.expect("confirmed");
    let Err(NotPublished::NoDestination(_)) = early_result else {
        panic!("{early_result:?}")
    };
    assert!(!topic.exists(&missing), "the publisher creates no topic");
    topic.create(&missing, 1, &[]).await;
    let started = Instant::now();
    while publisher.publish(&early).await.is_err() {
        assert!(started.elapsed() < BOUND, "the topic is not found");
    }
    assert_eq!(topic.end_of(&missing).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_can_never_be_written_is_refused_and_others_are_confirmed() {
    let topic = Topic::alone(1).await;
    let limits = [("max.message.bytes", "5000")];
    topic.configure(&topic.name, &limits).await;
    let compacted = format!("{}.compacted", topic.name);
    topic
        .create(&compacted, 1, &[("cleanup.policy", "compact")])
        .await;
    let publisher = topic.source().publisher();
    let mut with_exchange = message(&topic.name, 1);
    with_exchange.exchange = "events".into();
    let refused = [
        OutboxMessage::new("t/1", &topic.name, vec![7; 10_000]),
        message(&compacted, 2), // without a key
        message("not a topic", 3),
        message("a\0b", 4),
        message(&"x".repeat(600), 5),
        with_exchange,
    ];
    let others: Vec<_> = (0..200)
        .map(|number| message(&topic.name, number))
        .collect();
    let published = others.iter().map(|message| publisher.publish(message));
    let (others, refused) = tokio::join!(
        join_all(published),
        join_all(refused.iter().map(|message| publisher.publish(message)))
    );
    for result in others {
        result.expect("confirmed");
    }
    for result in refused {
        assert!(
            matches!(result, Err(NotPublished::Refused(_))),
            "{result:?}"
        );
    }
    assert!(topic.end_of(&topic.name).await >= 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_are_named_at_the_start() {
    let error = Kafka::topic("t").publisher().preflight().await;
    let error = error.expect_err("no brokers").to_string();
    assert!(error.starts_with("brokers"), "{error}");
    let secret = Kafka::topic("t")
        .brokers("localhost:1")
        .property("sasl.password", "canary");
    assert!(!format!("{:?}", secret.publisher()).contains("canary"));
}
