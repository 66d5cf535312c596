//! Warnings about topics that retain messages for longer or shorter than the deduplication window.
//! Alone in its process, because it captures all log lines.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/fixture.rs"]
mod fixture;

use std::time::Duration;

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_kafka::Kafka;
use oncegate_testkit::Lines;
use rdkafka::mocking::MockCluster;

use crate::fixture::*;

const DAY: Duration = Duration::from_secs(86_400);
const WEEK: (&str, &str) = ("retention.ms", "604800000");

/// All warnings and errors while this source is opened with this window.
async fn warned(lines: &Lines, kafka: Kafka, window: Option<Duration>) -> Vec<String> {
    lines.take();
    let mut options = ConnectOptions::default();
    options.dedup_window = window;
    close(kafka.connect(options).await.expect("a source")).await;
    let warnings = lines.take().into_iter().map(|(_, line)| line);
    warnings
        .filter(|line| {
            [" WARN ", " ERROR "]
                .iter()
                .any(|level| line.contains(level))
        })
        .collect()
}

fn is_one(warnings: &[String], parts: &[&str]) {
    let [line] = warnings else {
        panic!("{} lines: {warnings:#?}", warnings.len())
    };
    assert!(parts.iter().all(|part| line.contains(part)), "{line}");
}

/// Sequential, because the log is global.
#[tokio::test(flavor = "multi_thread")]
async fn topic_retention_is_compared_with_the_deduplication_window() {
    let lines = Lines::of_this_process();
    a_window_below_the_retention_of_what_is_read(&lines).await;
    dead_letters_that_expire_before_their_ids(&lines).await;
    a_broker_that_returns_no_configuration(&lines).await;
}

async fn a_window_below_the_retention_of_what_is_read(lines: &Lines) {
    let topic = topic_with(&[WEEK]).await;
    is_one(
        &warned(lines, topic.source(), Some(DAY)).await,
        &[
            "deduplication window shorter than the topic retention",
            "window=\"1 day\"",
            &format!(
                "`{}` retains messages for 7 days, retention.ms=604800000",
                topic.name
            ),
            // The broker's default.
            "reset or expire, after 7 days without a member,",
            "set .dedup_window(…) to at least 7 days",
        ],
    );
    assert_eq!(warned(lines, topic.source(), Some(DAY * 7)).await, [""; 0]);
    assert_eq!(
        warned(lines, topic.source(), None).await,
        [""; 0],
        "without a consumer there is no window"
    );

    let compacted = topic_with(&[("retention.ms", "1000"), ("cleanup.policy", "compact")]).await;
    let both = Kafka::topics([&topic.name, &compacted.name])
        .brokers(&topic.brokers)
        .group(&topic.name);
    is_one(
        &warned(lines, both, Some(DAY)).await,
        &[
            &format!("`{}` retains messages for 7 days", topic.name),
            &format!("`{}` retains messages without limit", compacted.name),
            "how far back",
        ],
    );
}

async fn dead_letters_that_expire_before_their_ids(lines: &Lines) {
    let topic = Topic::configured(
        oncegate_testkit::kafka_brokers().expect("a broker"),
        1,
        &[("retention.ms", "60000")],
    )
    .await;
    topic.create(&topic.dead_letters(), 1, &[WEEK]).await;
    topic
        .create(&topic.in_doubt(), 1, &[("retention.ms", "3600000")])
        .await;
    let kafka = || topic.source().accept_limited_retention();
    is_one(
        &warned(lines, kafka(), Some(DAY)).await,
        &[
            "setting=\"in_doubt\"",
            &format!(
                "topic={:?} retention=\"retention.ms=3600000\" window=\"1 day\"",
                topic.in_doubt()
            ),
            "or at least 86400000",
        ],
    );
    assert_eq!(warned(lines, kafka(), Some(DAY / 24)).await, [""; 0]);
}

/// librdkafka's mock cluster does not support configurations, like a broker that denies access to
/// them.
async fn a_broker_that_returns_no_configuration(lines: &Lines) {
    let cluster = MockCluster::new(1).expect("a broker");
    for name in ["t", "t.dead-letters", "t.in-doubt"] {
        cluster.create_topic(name, 1, 1).expect("a topic");
    }
    let kafka = Kafka::topic("t")
        .brokers(cluster.bootstrap_servers())
        .group("g");
    is_one(
        &warned(lines, kafka, Some(DAY)).await,
        &[
            "cannot read the configuration of topics",
            "topics=\"t.dead-letters, t.in-doubt, t\"",
            "grant DescribeConfigs",
        ],
    );
}

/// A topic with this configuration, and its dead-letter and in-doubt topics.
async fn topic_with(config: &[(&str, &str)]) -> Topic {
    let topic = Topic::configured(
        oncegate_testkit::kafka_brokers().expect("a broker"),
        1,
        config,
    )
    .await;
    for name in [topic.dead_letters(), topic.in_doubt()] {
        topic
            .create(
                &name,
                1,
                &[("retention.ms", "-1"), ("retention.bytes", "-1")],
            )
            .await;
    }
    topic
}
