//! Which messages a redrive sends and which it skips: messages stay without limit, markers expire.

use std::sync::Arc;

use lapin::options::BasicGetOptions;
use oncegate::marker::{OperationKind, Terms};
use rdkafka::admin::{AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde_json::Value;

use crate::cli::{TestCli, terms};
use crate::destinations::{ids, on_both_brokers};
use crate::fixture::{Broker, BrokerFixture, PaymentProvider, TEST_TIMEOUT};

on_both_brokers!(
    messages_older_than_the_window_are_reconciled,
    messages_older_than_the_window_are_skipped_without_at_most_once,
    messages_from_another_source_are_skipped,
    the_preview_says_that_the_marker_of_a_refused_message_is_absent,
    conflicts_are_redriven_only_by_id,
    without_a_store_messages_that_a_marker_may_block_are_skipped,
    lapsed_ids_are_redriven,
    skipped_messages_do_not_count_towards_the_limit,
    an_unreadable_marker_blocks_no_other_message,
    position_ids_are_not_redriven,
);

const TWO_DAYS_MS: u64 = 2 * 24 * 3_600_000;
const BODY: &str = r#"{"card":"works"}"#;

fn now_ms() -> u64 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_millis()).expect("before the end of time")
}

impl BrokerFixture {
    async fn dead_letter(&self, destination: &str, id: &str, reason: &str, more: &[(&str, &str)]) {
        let origin = match self.broker {
            Broker::Kafka => format!("{}/0/7", self.cli.name),
            Broker::RabbitMq => self.cli.name.clone(),
        };
        let origin = if more.iter().any(|(name, _)| *name == "oncegate-origin") {
            None
        } else {
            Some(("oncegate-origin", origin.as_str()))
        };
        let headers: Vec<(&str, &str)> = [("oncegate-id", id), ("oncegate-reason", reason)]
            .into_iter()
            .chain(origin)
            .chain(more.iter().copied())
            .collect();
        self.publish_to(
            &format!("{}.{destination}", self.cli.name),
            id,
            BODY,
            &headers,
        )
        .await;
    }

    /// The expected number of remaining messages.
    fn remaining(&self, on_kafka: u64, on_rabbitmq: u64) -> u64 {
        if self.broker == Broker::Kafka {
            on_kafka
        } else {
            on_rabbitmq
        }
    }
}

/// Writes any value under the key of a marker; `None` deletes it, as if it had expired.
pub(crate) async fn write_marker(cli: &TestCli, id: &str, value: Option<&str>) {
    let client = redis::Client::open(cli.redis.as_str()).expect("a URL");
    let mut plain = client
        .get_multiplexed_async_connection()
        .await
        .expect("Redis answers");
    let key = format!("{}{id}", cli.prefix());
    let () = match value {
        Some(value) => redis::cmd("SET")
            .arg(key)
            .arg(value)
            .query_async(&mut plain)
            .await
            .expect("set"),
        None => redis::cmd("DEL")
            .arg(key)
            .query_async(&mut plain)
            .await
            .expect("deleted"),
    };
}

async fn messages_older_than_the_window_are_reconciled(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    let old = (now_ms() - TWO_DAYS_MS).to_string();
    // It was too large, so its marker was not read when it was dead-lettered.
    fixture
        .dead_letter(
            "dead-letters",
            "old",
            "too-large",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    let preview = fixture
        .run(&["dead-letters", "redrive", "--all", "--dry-run"])
        .await
        .exits_with(0);
    preview
        .prints("with its original oncegate-first-seen")
        .prints("1 d, the default");
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    // The consumer finds it too old, and its `reconcile` cannot decide: nothing is charged.
    fixture
        .consume(PaymentProvider::Works, 0, fixture.remaining(1, 0), 1)
        .await;
    assert_eq!(
        fixture.json(&["in-doubt", "list"]).await["messages"][0]["reason"],
        "in-doubt-too-old"
    );
    // The operator accepts the risk and it runs.
    fixture
        .dead_letter(
            "dead-letters",
            "sure",
            "too-large",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--id",
            "sure",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .exits_with(0)
        .prints("1 redriven");
    fixture
        .consume(PaymentProvider::Works, 1, fixture.remaining(2, 0), 1)
        .await;
    assert_eq!(fixture.charged(), ["sure"]);
    fixture.end().await;
}

async fn messages_older_than_the_window_are_skipped_without_at_most_once(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture.cli.configure(
        &fixture
            .settings()
            .replace("at-most-once", "effectively-once"),
    );
    let old = (now_ms() - TWO_DAYS_MS).to_string();
    fixture
        .dead_letter(
            "dead-letters",
            "old",
            "too-large",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    fixture
        .dead_letter(
            "in-doubt",
            "doubt",
            "in-doubt-too-old",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1)
        .prints("longer ago than the window of 1 d, the default");
    fixture
        .run(&["in-doubt", "resolve", "doubt", "--did-not-happen", "--yes"])
        .await
        .exits_with(1)
        .prints("--accept-forgotten");
    fixture.until_there_are(0, "").await;
    fixture.cli.configure(&fixture.settings().replace(
        "at-most-once\"",
        "effectively-once\"\ndedup-window = \"7d\"",
    ));
    fixture
        .run(&["dead-letters", "redrive", "--all", "--dry-run"])
        .await
        .exits_with(0)
        .prints("1 would be redriven");
    fixture
        .run(&[
            "in-doubt",
            "resolve",
            "doubt",
            "--did-not-happen",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .exits_with(0)
        .prints("1 resolved");
    fixture.until_there_are(1, "").await;
    fixture.end().await;
}

async fn messages_from_another_source_are_skipped(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    let origin = if broker == Broker::Kafka {
        "theirs/0/7"
    } else {
        "theirs"
    };
    fixture
        .dead_letter(
            "dead-letters",
            "a",
            "refused",
            &[("oncegate-origin", origin)],
        )
        .await;
    fixture
        .dead_letter(
            "in-doubt",
            "a",
            "in-doubt-handler-reported",
            &[("oncegate-origin", origin)],
        )
        .await;
    for action in [
        &["dead-letters", "redrive", "--all"][..],
        &["dead-letters", "drop", "--all"],
        &["in-doubt", "resolve", "a", "--did-not-happen"],
    ] {
        let arguments: Vec<&str> = action.iter().copied().chain(["--yes"]).collect();
        fixture
            .run(&arguments)
            .await
            .exits_with(1)
            .prints("it was consumed from theirs")
            .prints("1 left where they are");
    }
    let explanation = fixture.json(&["explain", "a"]).await;
    assert_eq!(
        explanation["verdict"], "unknown",
        "messages of another consumer are ignored"
    );
    let text = explanation["description"].as_str().expect("a text");
    assert!(text.contains("was consumed from theirs"), "{text}");
    for (destination, count) in [(".dead-letters", 1), (".in-doubt", 1), ("", 0)] {
        fixture.until_there_are(count, destination).await;
    }
    assert_eq!(
        fixture.json(&["audit"]).await.as_array().map(Vec::len),
        Some(0)
    );
    fixture.end().await;
}

async fn the_preview_says_that_the_marker_of_a_refused_message_is_absent(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture.publish(&[("a", "declined")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 1, 0).await;
    let preview = ["dead-letters", "redrive", "--all", "--dry-run"];
    let output = fixture.run(&preview).await.exits_with(0);
    let output = output.prints("its marker is rejected, attempt 1, and would be cleared");
    assert!(!output.out.contains("warning"), "{output:?}");

    // The consumer has no scope, so this is another key.
    let settings = fixture.settings();
    let wrong = format!("scope = \"ledger\"\n{settings}");
    fixture.cli.configure(&wrong);
    let preview = fixture.run(&preview).await.exits_with(0);
    preview
        .prints("its marker is absent")
        .prints("store.scope or store.prefix differ")
        .prints("`rejected-before`");
    fixture.cli.configure(&settings);
    fixture.end().await;
}

async fn conflicts_are_redriven_only_by_id(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture
        .publish(&[("a", "works"), ("a", "another card")])
        .await;
    fixture.consume(PaymentProvider::Works, 1, 1, 0).await;
    fixture
        .run(&["dead-letters", "redrive", "--id", "a", "--yes"])
        .await
        .exits_with(1)
        .prints("its id was handled with another body");
    // The marker of the handled id expired.
    write_marker(&fixture.cli, "a", None).await;
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1)
        .prints("its id was used for another body");
    fixture.until_there_are(1, ".dead-letters").await;
    let explanation = fixture.json(&["explain", "a"]).await;
    assert_eq!(explanation["verdict"], "conflict", "{explanation}");
    for words in ["is unknown", "ANOTHER BODY", "dead-letters"] {
        let text = explanation["description"].as_str().expect("a text");
        assert!(text.contains(words), "{words} in {text}");
    }
    fixture
        .run(&["explain", "a"])
        .await
        .exits_with(0)
        .prints("a: unknown; another body with this id");
    let redrive = ["dead-letters", "redrive", "--id", "a"];
    fixture
        .run(&[&redrive[..], &["--yes"]].concat())
        .await
        .exits_with(1)
        .prints("whether that was handled is unknown");
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .exits_with(1)
        .prints("whether that was handled is unknown");
    fixture
        .run(&[&redrive[..], &["--accept-forgotten", "--dry-run"]].concat())
        .await
        .exits_with(0)
        .prints("1 would be redriven");
    let drop = ["dead-letters", "drop", "--id", "a", "--yes", "--as", "bob"];
    fixture.run(&drop).await.exits_with(0);
    let explanation = fixture.json(&["explain", "a"]).await;
    assert_eq!(explanation["verdict"], "unknown", "{explanation}");
    assert!(
        explanation["description"].as_str().is_some_and(
            |text| text.contains("bob dropped a message with this id and another body")
        ),
        "{explanation}"
    );
    fixture
        .dead_letter("dead-letters", "a", "conflict", &[])
        .await;
    // The first message failed without an effect, and will run again.
    write_marker(&fixture.cli, "a", Some("v1 c 2 0 0 n")).await;
    let explanation = fixture.json(&["explain", "a"]).await;
    assert_eq!(explanation["verdict"], "will-run-again", "{explanation}");
    assert!(explanation.to_string().contains("ANOTHER BODY"));
    // An expired lease is unfinished: only its own message or delivery may continue.
    let short = Terms {
        lease: std::time::Duration::from_millis(1),
        ..terms()
    };
    fixture
        .cli
        .apply_one("held", OperationKind::Claim, 1, 0, short)
        .await;
    fixture
        .dead_letter("dead-letters", "held", "conflict", &[])
        .await;
    fixture
        .run(&["dead-letters", "redrive", "--id", "held", "--yes"])
        .await
        .exits_with(1)
        .prints("another body, whose lease expired");
    let explanation = fixture.json(&["explain", "held"]).await;
    assert_eq!(explanation["verdict"], "abandoned");
    assert!(
        !explanation.to_string().contains("sends it back"),
        "redrive refuses it: {explanation}"
    );
    fixture.end().await;
}

async fn lapsed_ids_are_redriven(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    let short = Terms {
        lease: std::time::Duration::from_millis(1),
        ..terms()
    };
    fixture
        .cli
        .apply_one("a", OperationKind::Claim, 1, 0, short)
        .await;
    fixture
        .dead_letter("dead-letters", "a", "attempts-spent", &[])
        .await;
    let explanation = fixture.json(&["explain", "a"]).await;
    assert_eq!(explanation["verdict"], "abandoned");
    assert!(
        explanation["description"]
            .as_str()
            .is_some_and(|says| says.contains("dead-letters redrive")),
        "{explanation}"
    );
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    // The gate finds it in doubt.
    fixture
        .consume(PaymentProvider::Works, 0, fixture.remaining(1, 0), 1)
        .await;
    fixture.end().await;
}

async fn skipped_messages_do_not_count_towards_the_limit(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture
        .dead_letter("dead-letters", "used", "conflict", &[])
        .await;
    fixture
        .dead_letter("dead-letters", "good", "refused", &[])
        .await;
    fixture
        .dead_letter("dead-letters", "better", "refused", &[])
        .await;
    for rest in [1, 0] {
        let output = fixture
            .run(&[
                "dead-letters",
                "redrive",
                "--all",
                "--limit",
                "1",
                "--yes",
                "--json",
            ])
            .await;
        assert_eq!(output.json()["done"], 1, "{output:?}");
        let preview = fixture
            .run(&["dead-letters", "redrive", "--all", "--dry-run"])
            .await
            .exits_with(0);
        preview.prints(&format!("{rest} would be redriven, 1 would be left"));
    }
    fixture.end().await;
}

async fn an_unreadable_marker_blocks_no_other_message(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    write_marker(&fixture.cli, "odd", Some("v9 of a later release")).await;
    fixture
        .dead_letter("dead-letters", "odd", "refused", &[])
        .await;
    fixture
        .dead_letter("dead-letters", "good", "refused", &[])
        .await;
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1);
    output
        .prints("the key is unchanged")
        .prints("1 redriven, 1 left");
    assert_eq!(ids(&fixture.json(&["dead-letters", "list"]).await), ["odd"]);
    fixture.end().await;
}

async fn without_a_store_messages_that_a_marker_may_block_are_skipped(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    for (id, reason) in [("spent", "attempts-spent"), ("unrouted", "no-route")] {
        fixture.dead_letter("dead-letters", id, reason, &[]).await;
    }
    fixture
        .dead_letter("dead-letters", "odd", "too-large", &[])
        .await;
    let brokers = fixture.settings();
    let audit = fixture.cli.path("audit.jsonl");
    fixture.cli.write(
        "oncegate.toml",
        &format!("{brokers}[audit]\nfile = \"{}\"\n", audit.display()),
    );
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1);
    output.prints("set store.url").prints("1 redriven, 2 left");
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["spent", "unrouted"]
    );
    fixture.cli.configure(&brokers);
    fixture.end().await;
}

async fn position_ids_are_not_redriven(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture
        .dead_letter(
            "dead-letters",
            "queue/0/7",
            "refused",
            &[("oncegate-origin", "queue/0/7")],
        )
        .await;
    let target = if broker == Broker::Kafka {
        "queue"
    } else {
        "queue/0/7"
    };
    fixture.cli.configure(&fixture.settings().replace(
        &format!("\"{}\"", fixture.cli.name),
        &format!(
            "\"{target}\"\ndead-letters = \"{}.dead-letters\"",
            fixture.cli.name
        ),
    ));
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1)
        .prints("its id is its position");
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--accept-forgotten",
            "--dry-run",
        ])
        .await
        .exits_with(0)
        .prints("1 would be redriven");
    fixture.cli.configure(&fixture.settings());
    fixture.end().await;
}

/// The stages of all actions, and whether they failed.
fn stages(audit: &Value) -> Vec<(&str, bool)> {
    let actions = audit.as_array().expect("a list");
    actions
        .iter()
        .map(|action| {
            (
                action["stage"].as_str().expect("a stage"),
                action["failure"].is_string(),
            )
        })
        .collect()
}

async fn set_largest(topic: &str, bytes: &str) {
    let config = AlterConfig::new(ResourceSpecifier::Topic(topic)).set("max.message.bytes", bytes);
    let altered = crate::fixture::admin()
        .alter_configs(&[config], &AdminOptions::new())
        .await
        .expect("Kafka answers");
    altered
        .into_iter()
        .for_each(|topic| drop(topic.expect("altered")));
}

/// Publishes a body that exceeds the default limit of a producer.
async fn publish_large(topic: &str, id: &str, reason: &str, bytes: usize) {
    let mut config = crate::fixture::config();
    let producer: FutureProducer = config
        .set("acks", "all")
        .set("message.max.bytes", "100000000")
        .create()
        .expect("a producer");
    let mut headers = rdkafka::message::OwnedHeaders::new();
    for (key, value) in [
        ("payment-id", id),
        ("oncegate-id", id),
        ("oncegate-reason", reason),
    ] {
        headers = headers.insert(rdkafka::message::Header {
            key,
            value: Some(value),
        });
    }
    // Not zeros, which compression would shrink.
    let body = vec![b'x'; bytes];
    let started = std::time::Instant::now();
    loop {
        let record = FutureRecord::to(topic)
            .key(id)
            .payload(&body)
            .headers(headers.clone());
        match producer.send(record, TEST_TIMEOUT).await {
            Ok(_) => return,
            // The broker applies a changed limit after a moment.
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge), _))
                if started.elapsed() < TEST_TIMEOUT => {}
            Err((error, _)) => panic!("{error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_two_megabytes_is_redriven_on_kafka() {
    let fixture = Arc::new(BrokerFixture::on(Broker::Kafka).await);
    let (name, messages) = (
        fixture.cli.name.clone(),
        format!("{}.dead-letters", fixture.cli.name),
    );
    set_largest(&name, "5000000").await;
    set_largest(&messages, "5000000").await;
    publish_large(&messages, "large", "refused", 2_000_000).await;
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    fixture.until_there_are(1, "").await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_copy_blocks_no_other_message() {
    let fixture = Arc::new(BrokerFixture::on(Broker::Kafka).await);
    let name = fixture.cli.name.clone();
    set_largest(&name, "1000").await;
    publish_large(&format!("{name}.dead-letters"), "large", "refused", 5_000).await;
    publish_large(
        &format!("{name}.in-doubt"),
        "doubt",
        "in-doubt-handler-reported",
        5_000,
    )
    .await;
    fixture
        .cli
        .apply_one("doubt", OperationKind::Claim, 1, 0, terms())
        .await;
    fixture
        .cli
        .apply_one("doubt", OperationKind::Doubt, 1, 1, terms())
        .await;
    fixture
        .dead_letter("dead-letters", "small", "refused", &[])
        .await;
    let output = fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--yes",
            "--why",
            "to see",
        ])
        .await
        .exits_with(1);
    output
        .prints("too large for the topic")
        .prints("1 redriven, 1 left");
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["large"],
        "the refused copy leaves the message"
    );
    fixture
        .run(&["in-doubt", "resolve", "doubt", "--did-not-happen", "--yes"])
        .await
        .exits_with(1)
        .prints("too large for the topic");
    assert_eq!(
        fixture.json(&["in-doubt", "list"]).await["messages"][0]["state"],
        "waiting"
    );
    let audit = fixture.json(&["audit"]).await;
    let mut assert_explained = stages(&audit);
    assert_explained.sort_unstable();
    assert_eq!(
        assert_explained,
        [
            ("done", false),
            ("done", false),
            ("not-sent", true),
            ("not-sent", true)
        ],
        "{audit}"
    );
    let large = audit
        .as_array()
        .expect("a list")
        .iter()
        .find(|action| action["id"] == "large")
        .expect("the action");
    assert_eq!(
        large["why"], "to see",
        "the reason of the operator is recorded: {large}"
    );
    set_largest(&name, "1000000").await;
    let again = async |arguments: &[&str]| {
        // The broker applies the new limit after a moment.
        let started = std::time::Instant::now();
        while fixture.run(arguments).await.code != 0 {
            assert!(started.elapsed() < TEST_TIMEOUT, "{arguments:?}");
        }
    };
    again(&["dead-letters", "redrive", "--all", "--yes"]).await;
    again(&["in-doubt", "resolve", "doubt", "--did-not-happen", "--yes"]).await;
    fixture.until_there_are(3, "").await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_in_doubt_message_stays_if_its_copy_is_refused_on_rabbitmq() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    fixture.publish(&[("a", "silent")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 0, 1).await;
    crate::fixture::delete(&fixture.cli.name).await;
    fixture
        .run(&["in-doubt", "resolve", "a", "--did-not-happen", "--yes"])
        .await
        .exits_with(3)
        .prints("does not exist or is full");
    fixture.until_there_are(1, ".in-doubt").await;
    assert_eq!(
        stages(&fixture.json(&["audit"]).await),
        [("done", false), ("not-sent", true)]
    );
    crate::fixture::declare_like_the_source(&fixture.cli.name).await;
    fixture
        .run(&["in-doubt", "resolve", "a", "--did-not-happen", "--yes"])
        .await
        .exits_with(0)
        .prints("1 resolved");
    fixture.consume(PaymentProvider::Works, 1, 0, 0).await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_lost_headers_need_acceptance() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    fixture
        .dead_letter(
            "dead-letters",
            "a",
            "refused",
            &[("oncegate-dropped-headers", "signature")],
        )
        .await;
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1)
        .prints("signature");
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--accept-lost-headers",
            "--yes",
        ])
        .await
        .exits_with(0)
        .prints("1 redriven");
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rate_limit_holds() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    let audit = fixture.cli.path("audit.jsonl");
    fixture.cli.configure(&format!(
        "{}[audit]\nfile = \"{}\"\n",
        fixture.settings(),
        audit.display()
    ));
    for id in ["a", "b", "c"] {
        fixture
            .dead_letter("dead-letters", id, "refused", &[])
            .await;
    }
    fixture
        .run(&["dead-letters", "drop", "--all", "--rate", "1", "--yes"])
        .await
        .exits_with(0)
        .prints("3 dropped");
    let lines = std::fs::read_to_string(audit).expect("the audit");
    let started: Vec<u64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"))
        .filter(|action| action["stage"] == "begun")
        .map(|action| action["at_ms"].as_u64().expect("a time"))
        .collect();
    assert_eq!(started.len(), 3);
    assert!(
        started[2] - started[0] >= 1_000,
        "three messages at one per second take at least 1 s: {started:?}"
    );
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tombstone_stays_a_tombstone() {
    let fixture = Arc::new(BrokerFixture::on(Broker::Kafka).await);
    let name = fixture.cli.name.clone();
    let producer: FutureProducer = crate::fixture::config()
        .set("acks", "all")
        .create()
        .expect("a producer");
    let headers = rdkafka::message::OwnedHeaders::new().insert(rdkafka::message::Header {
        key: "oncegate-reason",
        value: Some("missing-id"),
    });
    let messages = format!("{name}.dead-letters");
    producer
        .send(
            FutureRecord::<str, [u8]>::to(&messages)
                .key("k")
                .headers(headers),
            TEST_TIMEOUT,
        )
        .await
        .expect("confirmed");
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    let read = crate::fixture::bodies(&name).await;
    assert_eq!(read, [None]);
    fixture.end().await;
}

/// A mistyped id records nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_that_are_not_in_doubt_are_not_resolved() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    for (found, suggests_complete) in [("--happened", true), ("--did-not-happen", false)] {
        let output = fixture
            .run(&["in-doubt", "resolve", "typo", found, "--yes"])
            .await
            .exits_with(1)
            .prints("typo is absent, not in doubt")
            .prints("Check the spelling of the id");
        assert_eq!(
            format!("{output:?}").contains("marker complete"),
            suggests_complete,
            "{found}: {output:?}"
        );
    }
    assert_eq!(
        fixture.json(&["marker", "show", "typo"]).await["state"],
        "absent"
    );
    // A marker without a message may be in doubt, and the finding lasts for the window.
    fixture
        .cli
        .apply_one("a", OperationKind::Claim, 1, 0, terms())
        .await;
    fixture
        .cli
        .apply_one("a", OperationKind::Doubt, 1, 1, terms())
        .await;
    fixture
        .run(&["in-doubt", "resolve", "a", "--happened", "--dry-run"])
        .await
        .exits_with(0)
        .prints("would be done for 1 d, the default");
    assert_eq!(
        fixture.json(&["marker", "show", "a"]).await["state"],
        "in-doubt"
    );
    fixture
        .run(&["in-doubt", "resolve", "a", "--happened", "--yes"])
        .await
        .exits_with(0)
        .prints("is done for 1 d, the default");
    assert_eq!(
        fixture.json(&["marker", "show", "a"]).await["state"],
        "done"
    );
    fixture.end().await;
}

/// RabbitMQ hides a message that another reader holds: its marker is not cleared without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn markers_of_messages_that_another_reader_holds_are_not_cleared() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    let payments = ["a", "b", "c"].map(|id| (id, "silent"));
    fixture.publish(&payments).await;
    fixture.consume(PaymentProvider::Judges, 0, 0, 3).await;
    let resolve = async |id: &str, finding: &[&str]| {
        let arguments = ["in-doubt", "resolve", id].into_iter();
        let arguments: Vec<&str> = arguments.chain(finding.iter().copied()).collect();
        fixture.run(&arguments).await
    };
    let state = async |id: &str| fixture.json(&["marker", "show", id]).await["state"].clone();
    let verdict = async |id: &str| {
        let explanation = fixture.json(&["explain", id]).await;
        assert!(
            !explanation.to_string().contains("will run again"),
            "{explanation}"
        );
        explanation["verdict"].clone()
    };

    let (other_reader, channel) = crate::fixture::open().await;
    let queue = format!("{}.in-doubt", fixture.cli.name);
    for _ in 0..3 {
        let read = channel.basic_get(queue.as_str().into(), BasicGetOptions::default());
        assert!(read.await.expect("the queue").is_some());
    }
    resolve("a", &["--did-not-happen", "--yes"])
        .await
        .exits_with(1)
        .prints("another reader")
        .prints("0 resolved, 1 left");
    resolve("a", &["--did-not-happen", "--dry-run"])
        .await
        .exits_with(0)
        .prints("0 would be resolved, 1 would be left");
    assert_eq!(
        (state("a").await, verdict("a").await),
        ("in-doubt".into(), "in-doubt".into())
    );
    assert_eq!(
        fixture.json(&["audit", "--id", "a"]).await,
        serde_json::json!([])
    );
    resolve("b", &["--happened", "--yes"])
        .await
        .exits_with(0)
        .prints("if `in-doubt list` shows a message later, resolve the id again");
    assert_eq!(
        (state("b").await, verdict("b").await),
        ("done".into(), "handled".into())
    );
    resolve("c", &["--did-not-happen", "--without-message", "--yes"])
        .await
        .exits_with(0)
        .prints("only the marker is changed")
        .prints("nothing is sent");
    assert_eq!(
        (state("c").await, verdict("c").await),
        ("cleared".into(), "unknown".into())
    );

    other_reader
        .close(200, "OK".into())
        .await
        .expect("a clean end");
    fixture.until_there_are(3, ".in-doubt").await;
    for id in ["a", "c"] {
        resolve(id, &["--did-not-happen", "--yes"])
            .await
            .exits_with(0)
            .prints("sent to");
    }
    resolve("b", &["--happened", "--yes"])
        .await
        .exits_with(0)
        .prints("removed, since the effect happened");
    fixture.consume(PaymentProvider::Works, 2, 0, 0).await;
    let mut charged = fixture.charged();
    charged.sort_unstable();
    assert_eq!(charged, ["a", "c"]);
    fixture.end().await;
}
