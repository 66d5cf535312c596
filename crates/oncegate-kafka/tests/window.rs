//! What is said of topics that keep their messages for longer than the consumer remembers them, or
//! for less. Alone in its process, because it listens to all that is logged.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/stage.rs"]
mod stage;

use std::time::Duration;

use oncegate_core::source::Open;
use oncegate_kafka::Kafka;
use oncegate_testkit::Lines;
use rdkafka::mocking::MockCluster;

use crate::stage::*;

const DAY: Duration = Duration::from_secs(86_400);
const WEEK: (&str, &str) = ("retention.ms", "604800000");

/// All that is warned of while this is opened, told of this window.
async fn warned(lines: &Lines, kafka: Kafka, window: Option<Duration>) -> Vec<String> {
    lines.take();
    let kafka = window.into_iter().fold(kafka, Kafka::for_window);
    close(kafka.open().await.expect("a source")).await;
    let said = lines.take().into_iter().map(|(_, line)| line);
    said.filter(|line| {
        [" WARN ", " ERROR "]
            .iter()
            .any(|level| line.contains(level))
    })
    .collect()
}

fn is_one(said: &[String], parts: &[&str]) {
    let [line] = said else {
        panic!("{} lines: {said:#?}", said.len())
    };
    assert!(parts.iter().all(|part| line.contains(part)), "{line}");
}

/// One after the other: there is one place where lines are heard.
#[tokio::test(flavor = "multi_thread")]
async fn how_long_messages_are_kept_is_held_against_the_window() {
    let lines = Lines::of_this_process();
    a_window_below_the_retention_of_what_is_read(&lines).await;
    dead_letters_that_go_before_their_ids(&lines).await;
    a_broker_that_does_not_tell(&lines).await;
}

async fn a_window_below_the_retention_of_what_is_read(lines: &Lines) {
    let topic = topic_with(&[WEEK]).await;
    is_one(
        &warned(lines, topic.source(), Some(DAY)).await,
        &[
            "window: 1 day is shorter than messages may come again",
            &format!(
                "`{}` keeps them for 7 days, retention.ms=604800000",
                topic.name
            ),
            // The broker's own default.
            "set back, or after 7 days without a member",
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
            &format!("`{}` keeps them for 7 days", topic.name),
            &format!("`{}` keeps them without limit", compacted.name),
            "how far back",
        ],
    );
}

async fn dead_letters_that_go_before_their_ids(lines: &Lines) {
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
            &format!(
                "in_doubt: the topic `{}` forgets messages (retention.ms=3600000) sooner than the window (1 day)",
                topic.in_doubt()
            ),
            "or at least 86400000",
        ],
    );
    assert_eq!(warned(lines, kafka(), Some(DAY / 24)).await, [""; 0]);
}

/// librdkafka's own small broker knows nothing of configurations, as one that does not let this
/// client read them.
async fn a_broker_that_does_not_tell(lines: &Lines) {
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
            "it is not known for how long these topics keep their messages: ",
            "t.dead-letters, t.in-doubt, t (",
            "grant DescribeConfigs",
        ],
    );
}

/// A topic with such a configuration, and all that belongs to it.
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
