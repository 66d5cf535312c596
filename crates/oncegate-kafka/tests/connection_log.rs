//! The log lines of a source without a broker or without partitions. Alone in its process, because
//! it captures all log lines.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions, Limit, Source};
use oncegate_kafka::{Kafka, TopicCreation};
use oncegate_testkit::Lines;
use oncegate_testkit::servers::KafkaServer;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

/// Sequential, because the log is global.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_broker_or_partitions_one_line_is_logged_soon() {
    let lines = Lines::of_this_process();
    no_broker_at_start(&lines).await;
    outage_while_reading(&lines).await;
    waits_for_a_partition(&lines).await;
}

async fn no_broker_at_start(lines: &Lines) {
    let begun = Instant::now();
    let opening = Kafka::topic("t")
        .brokers("127.0.0.1:1")
        .group("g")
        .connect(ConnectOptions::default());
    assert!(
        tokio::time::timeout(Duration::from_secs(7), opening)
            .await
            .is_err()
    );
    is_logged_once("127.0.0.1:1", begun, &lines.take());
}

/// Another member has the only partition, until it leaves.
async fn waits_for_a_partition(lines: &Lines) {
    let server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker");
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", server.brokers())
        .create()
        .expect("a client");
    let created = admin
        .create_topics(
            &[NewTopic::new("t", 1, TopicReplication::Fixed(1))],
            &AdminOptions::new(),
        )
        .await;
    created.expect("an answer")[0].as_ref().expect("created");
    let kafka = Kafka::topic("t")
        .brokers(server.brokers())
        .group("g")
        .property("session.timeout.ms", "12000");
    let kafka = kafka.create_topics(TopicCreation::Create {
        partitions: 1,
        replication: 1,
    });
    let other = kafka
        .clone()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    line_with(lines, "partition assigned").await;
    let source = kafka
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let line = line_with(lines, "waiting for partitions to be assigned").await;
    for part in [
        "INFO",
        "group=\"g\"",
        "topics=[\"t\"]",
        "session_timeout=12s",
        "only after its session timeout (12s, session.timeout.ms)",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    drop(other);
    let line = line_with(lines, "partitions assigned after waiting").await;
    assert!(
        line.contains("INFO") && line.contains("waited=") && line.contains("partitions=1"),
        "{line}"
    );
    let _ = Box::new(source)
        .close(Instant::now() + Duration::from_secs(30))
        .await;
}

async fn outage_while_reading(lines: &Lines) {
    let mut server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker");
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", server.brokers())
        .create()
        .expect("a client");
    let created = admin
        .create_topics(
            &[NewTopic::new("t", 1, TopicReplication::Fixed(1))],
            &AdminOptions::new(),
        )
        .await;
    created.expect("an answer")[0].as_ref().expect("created");
    let kafka = Kafka::topic("t").brokers(server.brokers()).group("g");
    let mut source = kafka
        .create_topics(TopicCreation::Create {
            partitions: 1,
            replication: 1,
        })
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    lines.take();
    server.kill();
    let begun = Instant::now();
    let mut none = Vec::new();
    let reading = source.receive(Limit::new(1, 1 << 20), &mut none);
    assert!(
        tokio::time::timeout(Duration::from_secs(8), reading)
            .await
            .is_err()
    );
    is_logged_once(&server.brokers(), begun, &lines.take());
    let _ = Box::new(source).close(Instant::now()).await; // the broker is down
}

/// Waits for a line that contains `part`.
async fn line_with(lines: &Lines, part: &str) -> String {
    let found = async {
        loop {
            if let Some((_, line)) = lines
                .take()
                .into_iter()
                .find(|(_, line)| line.contains(part))
            {
                return line;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), found)
        .await
        .expect(part)
}

fn is_logged_once(brokers: &str, begun: Instant, lines: &[(Instant, String)]) {
    let [(at, line)] = lines else {
        panic!("{} lines: {lines:#?}", lines.len())
    };
    assert!(
        at.duration_since(begun) < Duration::from_secs(2),
        "after {:?}",
        at.duration_since(begun)
    );
    for part in [
        "WARN",
        "cannot reach the brokers, retrying",
        &format!("brokers={brokers:?}"),
        "check that Kafka is running, and that host, port and security.protocol are correct",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
}
