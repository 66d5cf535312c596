//! Findings about Kafka topics and permissions.

use rdkafka::admin::{NewTopic, TopicReplication};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::assert_broker_findings;
use crate::cli::TestCli;
use crate::fixture;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_topics() {
    let cli = TestCli::new();
    let configure = |topic: &str| {
        cli.write(
            "oncegate.toml",
            &format!(
                "[gate]\ndedup-window = \"30d\"\n[kafka]\nbrokers = \"{}\"\ntopic = \"{topic}\"\n",
                fixture::kafka()
            ),
        );
    };
    configure(&cli.name);
    let missing = [
        ("topic-missing", "error"),
        ("dead-letter-topic-missing", "error"),
        ("in-doubt-topic-missing", "error"),
    ];
    assert_broker_findings(&cli, &missing);
    let output = cli
        .run(&["doctor"])
        .exits_with(1)
        .prints("--replication-factor 1 ")
        .prints("kafka.create-replicas = 1")
        .prints("kafka-topics.sh");
    assert!(
        !output.out.contains("factor 3"),
        "the cluster has one broker: {output:?}"
    );
    fixture::create_topics(&[NewTopic::new(&cli.name, 2, TopicReplication::Fixed(1))]).await;
    assert_broker_findings(&cli, &missing[1..]);
    let settings = std::fs::read_to_string(cli.path("oncegate.toml")).expect("just written");
    cli.write(
        "oncegate.toml",
        &format!("{settings}create-partitions = 1\ncreate-replicas = 1\n"),
    );
    let not_created = [
        ("dead-letter-topic-missing", "warning"),
        ("in-doubt-topic-missing", "warning"),
    ];
    assert_broker_findings(&cli, &not_created);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("one that runs cannot send to it");
    cli.write(
        "oncegate.toml",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n",
    );
    assert_broker_findings(&cli, &[("kafka-unreachable", "error")]);
    for (settings, problem) in [
        (
            "topic = \"a b\"",
            "kafka.topic: `a b` has the character ' '",
        ),
        (
            "topic = \"t\"\ndead-letters = \"bad\"\nin-doubt = \"bad\"",
            "kafka.in-doubt: `bad` is also the dead-letter topic",
        ),
        ("topic = \"t\"\npassword = \"x\"", "does not use SASL"),
    ] {
        let text = format!("[kafka]\nbrokers = \"{}\"\n{settings}\n", fixture::kafka());
        cli.write("oncegate.toml", &text);
        assert_broker_findings(&cli, &[("settings-refused", "error")]);
        let output = cli.run(&["doctor"]).exits_with(1).prints(problem);
        assert!(!output.out.contains("Checked Kafka"), "{output:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_topics_that_lose_or_reject_dead_letters() {
    let cli = TestCli::new();
    let keeping =
        |name| NewTopic::new(name, 2, TopicReplication::Fixed(1)).set("retention.ms", "-1");
    let names: Vec<String> = (0..8).map(|n| format!("{}-{n}", cli.name)).collect();
    fixture::create_topics(&[
        keeping(&names[0]),
        NewTopic::new(&names[1], 2, TopicReplication::Fixed(1)).set("retention.ms", "3600000"),
        keeping(&names[2]).set("retention.bytes", "1000000"),
        keeping(&names[3]).set("cleanup.policy", "compact"),
        keeping(&names[4]).set("min.insync.replicas", "2"),
        keeping(&names[5]).set("max.message.bytes", "1000"),
        NewTopic::new(&names[6], 2, TopicReplication::Fixed(1)).set("retention.ms", "3600000"),
        keeping(&names[7]),
    ])
    .await;
    let with = |topic: &str, dead_letters: &str, in_doubt: &str| {
        let kafka = format!(
            "brokers = \"{}\"\ntopic = \"{topic}\"\ndead-letters = \"{dead_letters}\"\nin-doubt = \"{in_doubt}\"\n",
            fixture::kafka()
        );
        cli.write("oncegate.toml", &format!("[kafka]\n{kafka}"));
    };
    with(&names[6], &names[0], &names[7]);
    assert_broker_findings(&cli, &[]);
    let settings = std::fs::read_to_string(cli.path("oncegate.toml")).expect("just written");
    cli.write(
        "oncegate.toml",
        &format!("{settings}group = \"{}\"\n", cli.name),
    );
    assert_broker_findings(&cli, &[]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("dead-letter-topic-one-replica");
    for (messages, code, level) in [
        (&names[1], "dead-letter-topic-limited-retention", "error"),
        (&names[2], "dead-letter-topic-limited-retention", "error"),
        (&names[3], "dead-letter-topic-compacted", "error"),
        (&names[4], "dead-letter-topic-min-insync-replicas", "error"),
        (&names[5], "dead-letter-topic-max-message-bytes", "warning"),
    ] {
        with(&names[6], messages, &names[0]);
        assert_broker_findings(&cli, &[(code, level)]);
        with(&names[6], &names[0], messages);
        assert_broker_findings(&cli, &[(code, level)]);
    }
    // An unlimited topic may be read again from the start.
    let unlimited = format!("{}-unlimited", cli.name);
    fixture::create_topics(&[keeping(&unlimited)]).await;
    with(&unlimited, &names[0], &names[7]);
    assert_broker_findings(&cli, &[("window-shorter-than-retention", "warning")]);
}

/// A broker that denies DescribeConfigs: it does not know the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_unreadable_topic_configurations() {
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let cli = TestCli::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        broker
            .create_topic(&format!("{}{suffix}", cli.name), 1, 1)
            .expect("a topic");
    }
    cli.write(
        "oncegate.toml",
        &format!(
            "[kafka]\nbrokers = \"{}\"\ntopic = \"{}\"\n",
            broker.bootstrap_servers(),
            cli.name
        ),
    );
    assert_broker_findings(&cli, &[("topic-config-not-readable", "warning"); 3]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("grant DescribeConfigs");
}

/// A broker that denies Describe on each topic, like one with an authorizer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_describe_permission() {
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let cli = TestCli::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        let topic = format!("{}{suffix}", cli.name);
        broker.create_topic(&topic, 1, 1).expect("a topic");
        broker
            .topic_error(
                &topic,
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
            )
            .expect("an existing topic");
    }
    cli.write(
        "oncegate.toml",
        &format!(
            "[kafka]\nbrokers = \"{}\"\ntopic = \"{}\"\n",
            broker.bootstrap_servers(),
            cli.name
        ),
    );
    assert_broker_findings(&cli, &[("kafka-permission-missing", "error"); 3]);
    cli.run(&["doctor"]).exits_with(1).prints(&format!(
        "grant Describe on the topic {}.in-doubt",
        cli.name
    ));
}

/// A broker that denies Read on the topic or access to the group, like one with an authorizer. It
/// does not know DescribeConfigs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_read_permission() {
    use RDKafkaRespErr::{
        RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    };
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let cli = TestCli::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        broker
            .create_topic(&format!("{}{suffix}", cli.name), 1, 1)
            .expect("a topic");
    }
    // A response version in which each partition has its own error. A denied partition has no log
    // end offset; this response has one that differs from the position of the reader, or librdkafka
    // would report the end of the partition.
    broker
        .partition_follower(&cli.name, 0, 1)
        .expect("an existing partition");
    broker
        .follower_watermarks(&cli.name, 0, Some(0), Some(7))
        .expect("an existing partition");
    broker
        .apiversion(RDKafkaApiKey::Fetch, Some(0), Some(3))
        .expect("supported versions");
    broker.request_errors(
        RDKafkaApiKey::Fetch,
        &[RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 100],
    );
    broker.request_errors(
        RDKafkaApiKey::FindCoordinator,
        &[RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED; 100],
    );
    let (brokers, topic) = (broker.bootstrap_servers(), &cli.name);
    cli.write(
        "oncegate.toml",
        &format!("[kafka]\nbrokers = \"{brokers}\"\ntopic = \"{topic}\"\ngroup = \"ledger\"\n"),
    );
    let output = cli.run(&["doctor", "--json"]).exits_with(1).json();
    let lacking = output["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|it| it["code"] == "kafka-permission-missing");
    let grants: Vec<&str> = lacking
        .map(|it| it["remedy"].as_str().expect("a text"))
        .collect();
    let expected = [
        format!("grant Read on the topic {topic} to the user"),
        "grant Read on the group ledger to the user".to_owned(),
    ];
    assert!(
        grants.len() == 2
            && expected
                .iter()
                .zip(&grants)
                .all(|(expected, output)| output.starts_with(expected)),
        "{output}"
    );
}
