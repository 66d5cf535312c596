//! Opening a source: rejected settings and created topics.

use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_kafka::{Kafka, TopicCreation};

use crate::fixture::*;

async fn connect_error(kafka: Kafka) -> (String, String) {
    let opened = tokio::time::timeout(BOUND, kafka.connect(ConnectOptions::default()))
        .await
        .expect("an answer in time");
    match opened {
        Err(SourceError::Misconfigured {
            setting,
            problem,
            remedy,
        }) => (setting, format!("{problem}; {remedy}")),
        other => panic!("opened: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_is_named_with_a_remedy() {
    let topic = Topic::alone(1).await;
    let (setting, text) = connect_error(
        Kafka::topic("oncegate-test-nowhere")
            .brokers(&topic.brokers)
            .group("g"),
    )
    .await;
    assert_eq!(setting, "topic");
    assert!(
        text.contains("oncegate-test-nowhere")
            && text.contains("--create")
            && text.contains("--replication-factor 1 "),
        "{text}"
    );

    let (setting, text) = connect_error(topic.source()).await;
    assert_eq!(setting, "dead_letters");
    assert!(
        text.contains(&topic.dead_letters()) && text.contains("create_topics"),
        "{text}"
    );
    // The cluster has one broker.
    assert!(
        text.contains("replication: 1 ")
            && text.contains("--replication-factor 1 ")
            && !text.contains("replication: 3"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_dead_letter_topics_are_created_on_request() {
    let topic = Topic::alone(1).await;
    let kafka = || {
        topic.source().create_topics(TopicCreation::Create {
            partitions: 1,
            replication: 1,
        })
    };
    close(
        kafka()
            .connect(ConnectOptions::default())
            .await
            .expect("a source"),
    )
    .await;
    // The topics exist now.
    close(
        kafka()
            .connect(ConnectOptions::default())
            .await
            .expect("a source"),
    )
    .await;
    close(topic.open().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_topic_with_limited_retention_is_rejected_unless_accepted() {
    for config in [
        ("retention.ms", "3600000"),
        ("retention.bytes", "1000000"),
        ("cleanup.policy", "compact"),
    ] {
        let topic = Topic::with_dead_letters(&[config]).await;
        let (setting, text) = connect_error(topic.source()).await;
        assert_eq!(setting, "dead_letters");
        let command = format!(
            "--entity-type topics --entity-name {} --add-config {}=",
            topic.dead_letters(),
            config.0
        );
        assert!(
            text.contains(&command)
                && text.contains(&format!("{}={}", config.0, config.1))
                && !text.contains('\n'),
            "{text}"
        );
        close(
            topic
                .source()
                .accept_limited_retention()
                .connect(ConnectOptions::default())
                .await
                .expect("a source"),
        )
        .await;
    }
    // The broker's default retention counts too.
    let topic = Topic::alone(1).await;
    topic
        .create(&topic.dead_letters(), 1, &[("retention.ms", "-1")])
        .await;
    topic.create(&topic.in_doubt(), 1, &[]).await;
    assert_eq!(connect_error(topic.source()).await.0, "in_doubt");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_property_is_named_without_its_value() {
    let topic = Topic::new(1).await;
    assert_eq!(
        connect_error(topic.source().property("no.such.property", "1"))
            .await
            .0,
        "no.such.property"
    );
    assert_eq!(
        connect_error(topic.source().property("enable.auto.commit", "true"))
            .await
            .0,
        "enable.auto.commit"
    );
    let (_, text) = connect_error(
        topic
            .source()
            .property("ssl.key.pem", "secret-canary")
            .property("security.protocol", "ssl"),
    )
    .await;
    assert!(!text.contains("canary"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn opening_waits_for_a_broker() {
    let kafka = Kafka::topic("t").brokers("127.0.0.1:1").group("g");
    assert!(
        tokio::time::timeout(
            Duration::from_secs(2),
            kafka.connect(ConnectOptions::default())
        )
        .await
        .is_err()
    );
}
