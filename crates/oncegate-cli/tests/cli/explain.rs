//! Explanations for each outcome of an id, and the plan of a load.

use std::sync::Arc;

use oncegate::marker::OperationKind;

use crate::cli::{TestCli, terms};
use crate::fixture::{Broker, BrokerFixture, PaymentProvider};
use crate::redrive::write_marker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explains_each_outcome_on_kafka() {
    explains_each_outcome(Broker::Kafka).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explains_each_outcome_on_rabbitmq() {
    explains_each_outcome(Broker::RabbitMq).await;
}

async fn explains_each_outcome(broker: Broker) {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture
        .publish(&[
            ("charged", "works"),
            ("twice", "works"),
            ("declined", "declined"),
            ("silent", "silent"),
        ])
        .await;
    // A duplicate, and another payment under a used id.
    fixture
        .publish(&[("twice", "works"), ("charged", "another card")])
        .await;
    fixture.consume(PaymentProvider::Judges, 2, 2, 1).await;
    let assert_explained = async |id: &str, verdict: &str, words: &[&str]| {
        let explanation = fixture.json(&["explain", id]).await;
        assert_eq!(explanation["verdict"], verdict, "{explanation}");
        for word in words {
            assert!(
                explanation.to_string().contains(word),
                "no {word:?} in {explanation}"
            );
        }
        explanation
    };
    let twice = assert_explained(
        "twice",
        "handled",
        &[
            "accepted without calling the handler",
            "duplicate is not recorded",
        ],
    )
    .await;
    assert!(
        twice["dead_letters"].as_array().is_some_and(Vec::is_empty),
        "{twice}"
    );
    let charged = assert_explained("charged", "handled", &["ANOTHER BODY", "conflict"]).await;
    assert_eq!(charged["dead_letters"][0]["reason"], "conflict");
    let declined = assert_explained(
        "declined",
        "dead-lettered",
        &[
            "its handler rejected it",
            "the card was declined",
            "dead-letters redrive",
        ],
    )
    .await;
    assert_eq!(
        (
            &declined["marker"]["state"],
            &declined["dead_letters"][0]["state"]
        ),
        (&"rejected".into(), &"waiting".into())
    );
    let silent = assert_explained(
        "silent",
        "in-doubt",
        &[
            "its handler reported that it may have happened",
            "in-doubt resolve",
            ".in-doubt",
        ],
    )
    .await;
    assert_eq!(silent["in_doubt"][0]["reason"], "in-doubt-handler-reported");
    assert_explained(
        "nobody",
        "unknown",
        &[
            "Nothing is known about this id",
            "removed without this tool",
            "scope and the prefix",
        ],
    )
    .await;
    // What remains of a message whose attempts are exhausted, if its dead letter was purged.
    write_marker(&fixture.cli, "purged", Some("v1 c 5 0 0 u")).await;
    assert_explained(
        "purged",
        "will-run-again",
        &["if it is still in the broker", "removed without this tool"],
    )
    .await;
    write_marker(&fixture.cli, "purged", None).await;
    if broker == Broker::Kafka {
        let copies = fixture.json(&["explain", "twice", "--copies"]).await;
        assert_eq!(
            (
                &copies["verdict"],
                copies["copies"].as_array().map(Vec::len)
            ),
            (&"handled-with-duplicates".into(), Some(2)),
            "{copies}"
        );
        // No consumer has claimed them: the topic still has them.
        fixture
            .cli
            .configure(&format!("scope = \"other\"\n{}", fixture.settings()));
        let copies = fixture.json(&["explain", "twice", "--copies"]).await;
        assert_eq!(
            (
                &copies["verdict"],
                copies["copies"].as_array().map(Vec::len)
            ),
            (&"not-recorded".into(), Some(2)),
            "{copies}"
        );
        let says = copies["description"].as_str().expect("a text");
        assert!(
            says.contains("The topic has 2 messages with this id")
                && !says.contains("Nothing is known"),
            "{says}"
        );
        fixture.cli.configure(&fixture.settings());
        fixture
            .run(&["explain", "twice", "--copies"])
            .await
            .exits_with(0)
            .prints("2 messages with this id outside the destinations: one was handled");
    } else {
        let refused = fixture
            .run(&["explain", "twice", "--copies"])
            .await
            .exits_with(2);
        refused
            .prints("A RabbitMQ queue does not keep consumed messages")
            .prints("omit --copies");
    }

    // After an operator resolved it.
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--id",
            "declined",
            "--yes",
            "--as",
            "ann",
        ])
        .await
        .exits_with(0);
    assert_explained(
        "declined",
        "sent-back",
        &["ann sent it back", "dead-letters redrive"],
    )
    .await;
    fixture
        .run(&[
            "in-doubt",
            "resolve",
            "silent",
            "--happened",
            "--yes",
            "--as",
            "bob",
        ])
        .await
        .exits_with(0);
    assert_explained(
        "silent",
        "handled",
        &["bob recorded that", "in-doubt resolve"],
    )
    .await;
    fixture
        .run(&["dead-letters", "drop", "--reason", "conflict", "--yes"])
        .await
        .exits_with(0);
    let left = if broker == Broker::Kafka { 2 } else { 0 };
    fixture
        .consume(
            PaymentProvider::Works,
            3,
            left,
            if broker == Broker::Kafka { 1 } else { 0 },
        )
        .await;
    assert_explained("declined", "handled", &["ann"]).await;
    fixture
        .run(&["explain", "declined"])
        .await
        .exits_with(0)
        .prints("declined: handled, once")
        .prints("Actions of operators")
        .prints("The marker");
    fixture
        .run(&["marker", "forget", "twice", "--yes", "--as", "cleo"])
        .await
        .exits_with(0);
    assert_explained("twice", "unknown", &["cleo forgot it", "it was done"]).await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explains_dropped_messages_and_names_what_was_not_checked() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    fixture.publish(&[("a", "declined")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 1, 0).await;
    fixture
        .run(&["dead-letters", "drop", "--id", "a", "--yes", "--as", "ann"])
        .await
        .exits_with(0);
    assert_eq!(fixture.json(&["explain", "a"]).await["verdict"], "dropped");
    let (cli, settings) = (&fixture.cli, fixture.settings());
    cli.write(
        "oncegate.toml",
        &format!("[store]\nurl = \"redis://127.0.0.1:1\"\n{settings}"),
    );
    let output = fixture.run(&["explain", "a", "--json"]).await.exits_with(3);
    let explanation = output.json();
    assert_eq!(explanation["verdict"], "store-unreadable");
    assert!(
        explanation["not_checked"]
            .as_array()
            .is_some_and(|parts| parts.len() == 2),
        "the store and its audit: {explanation}"
    );
    cli.configure(&settings.replace(&cli.name, "no-such-queue"));
    let output = fixture.run(&["explain", "a"]).await.exits_with(3);
    output
        .prints("dropped by an operator")
        .prints("`no-such-queue.dead-letters` does not exist");
    fixture.end().await;
}

#[test]
fn plan_uses_measured_bytes() {
    let cli = TestCli::new();
    cli.write("oncegate.toml", "");
    let plan = cli.json(&["plan", "--rate", "1000", "--window", "24h"]);
    let memory = plan["memory_bytes"].as_u64().expect("a number");
    assert!((14_000_000_000..17_000_000_000).contains(&memory), "{plan}");
    cli.write("oncegate.toml", "[gate]\nrate = 1000\ndedup-window = \"24h\"\nguarantee = \"at-most-once\"\n[store]\nreplicas = 1\n");
    let strict = cli.json(&["plan"]);
    assert!(
        strict["memory_bytes"]
            .as_u64()
            .is_some_and(|more| more > memory)
            && strict["fingerprints"] == true,
        "{strict}"
    );
    assert_eq!(
        (&strict["servers"], &strict["connections_to_each_primary"]),
        (&2.into(), &3.into())
    );
    cli.run(&["plan"])
        .exits_with(0)
        .prints("maxmemory")
        .prints("GB");
    cli.write("oncegate.toml", "");
    cli.run(&["plan"]).exits_with(2).prints("--rate");
}

#[test]
fn plan_refuses_impossible_numbers() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    for (option, value) in [
        ("--id-bytes", "18446744073709551615"),
        ("--id-bytes", "0"),
        ("--processes", "0"),
        ("--primaries", "0"),
    ] {
        cli.run(&["plan", "--rate", "1", option, value])
            .exits_with(2)
            .prints(option)
            .prints("is not in");
    }
}

/// Without a marker an old action proves nothing about later deliveries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_ignores_actions_older_than_the_window() {
    let fixture = Arc::new(BrokerFixture::on(Broker::Kafka).await);
    fixture
        .publish(&[("a", "declined"), ("b", "declined"), ("c", "declined")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 3, 0).await;
    let assert_explained = async |id: &str, verdict: &str, words: &str| {
        let explanation = fixture.json(&["explain", id]).await;
        assert_eq!(explanation["verdict"], verdict, "{explanation}");
        assert!(
            explanation["description"]
                .as_str()
                .is_some_and(|says| says.contains(words)),
            "no {words:?} in {explanation}"
        );
    };
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--id",
            "a",
            "--yes",
            "--as",
            "ann",
        ])
        .await
        .exits_with(0);
    fixture
        .run(&["dead-letters", "drop", "--id", "b", "--yes", "--as", "bob"])
        .await
        .exits_with(0);
    assert_explained("a", "sent-back", "ann sent it back").await;
    assert_explained("b", "dropped", "bob dropped it").await;
    for id in ["a", "b", "c"] {
        write_marker(&fixture.cli, id, None).await;
    }
    // As after the window.
    fixture.cli.configure(
        &fixture
            .settings()
            .replace("[kafka]", "dedup-window = \"1ms\"\n[kafka]"),
    );
    assert_explained("a", "unknown", "longer ago than the window of 1 ms").await;
    assert_explained("b", "unknown", "longer ago than the window of 1 ms").await;
    assert_explained(
        "c",
        "dead-lettered",
        "was handled before or since is unknown",
    )
    .await;
    fixture.end().await;
}

/// The last of several actions on one id decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_uses_the_last_action() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    fixture
        .publish(&[("a", "declined"), ("b", "declined")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 2, 0).await;
    let explanation = async |id: &str| fixture.json(&["explain", id]).await;
    // Redriven, failed again, then dropped.
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes", "--as", "ann"])
        .await
        .exits_with(0);
    fixture.consume(PaymentProvider::Judges, 0, 2, 0).await;
    fixture
        .run(&["dead-letters", "drop", "--id", "a", "--yes", "--as", "bob"])
        .await
        .exits_with(0);
    assert_eq!(explanation("a").await["verdict"], "dropped");
    // Redriven, rejected again, and its dead letter removed by another tool.
    crate::fixture::take_all(&format!("{}.dead-letters", fixture.cli.name)).await;
    let gone = explanation("b").await;
    assert_eq!(
        gone["verdict"], "dead-lettered",
        "its copy was rejected again: {gone}"
    );
    // Completed by an operator, forgotten, then handled.
    let says = |explanation: &serde_json::Value| {
        explanation["description"]
            .as_str()
            .expect("a text")
            .to_owned()
    };
    fixture
        .run(&["marker", "complete", "c", "--yes", "--as", "cleo"])
        .await
        .exits_with(0);
    assert!(says(&explanation("c").await).contains("cleo recorded that"));
    fixture
        .run(&["marker", "forget", "c", "--yes", "--as", "dora"])
        .await
        .exits_with(0);
    assert!(
        says(&explanation("c").await).contains("dora forgot it"),
        "the audit keeps the action by the hash of the id"
    );
    fixture
        .cli
        .apply_one("c", OperationKind::Claim, 1, 0, terms())
        .await;
    fixture
        .cli
        .apply_one("c", OperationKind::Complete, 1, 1_000_001, terms())
        .await;
    let handled = explanation("c").await;
    assert!(
        handled["verdict"] == "handled-perhaps-again" && !says(&handled).contains("cleo"),
        "{handled}"
    );
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_are_not_counted_as_duplicates_and_control_characters_are_replaced() {
    let fixture = Arc::new(BrokerFixture::on(Broker::Kafka).await);
    // One payment, and another one with its id.
    fixture
        .publish(&[("a", "works"), ("a", "another card")])
        .await;
    fixture.consume(PaymentProvider::Works, 1, 1, 0).await;
    let explanation = fixture.json(&["explain", "a", "--copies"]).await;
    assert_eq!(
        (
            &explanation["verdict"],
            explanation["copies"].as_array().map(Vec::len)
        ),
        (&"handled".into(), Some(2)),
        "{explanation}"
    );
    let origin = format!("{}/0/7", fixture.cli.name);
    let headers = [
        ("oncegate-id", "b"),
        ("oncegate-reason", "refused"),
        ("oncegate-origin", &origin),
        ("oncegate-last-error", "\u{1b}[2Jgone\nb: handled, once"),
    ];
    fixture
        .publish_to(
            &format!("{}.dead-letters", fixture.cli.name),
            "b",
            "{}",
            &headers,
        )
        .await;
    let output = fixture
        .run(&["explain", "b", "--as", "\u{1b}[2J"])
        .await
        .exits_with(0)
        .prints("[2Jgone");
    assert!(
        !output.out.contains('\u{1b}') && !output.out.contains("\nb: handled"),
        "{output:?}"
    );
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_claims_only_the_configured_guarantee() {
    let cli = TestCli::new();
    cli.run(&["marker", "complete", "a", "--yes"]).exits_with(0);
    cli.apply_one("b", OperationKind::Complete, 1, 1, terms())
        .await;
    let output = cli
        .run(&["explain", "b"])
        .exits_with(0)
        .prints("may have run more than once");
    assert!(!output.out.contains("handled, once"), "{output:?}");
    cli.configure("[gate]\nguarantee = \"at-most-once\"\n");
    let output = cli
        .run(&["explain", "b"])
        .exits_with(0)
        .prints("b: handled, once");
    assert!(!output.out.contains("more than once"), "{output:?}");
    cli.configure("[kafka]\nbrokers = \"127.0.0.1:1\"\n");
    cli.run(&["explain", "b"])
        .exits_with(2)
        .prints("b: handled; not checked: kafka")
        .prints("kafka.topic is missing");
}

/// Services may share a Redis, an audit and ids.
#[tokio::test]
async fn explain_ignores_actions_of_other_scopes() {
    let cli = TestCli::new();
    cli.configure("scope = \"ledger\"\n");
    cli.run(&["marker", "complete", "order-1", "--yes", "--as", "ann"])
        .exits_with(0);
    cli.run(&["explain", "order-1"])
        .exits_with(0)
        .prints("ann recorded that")
        .prints("no broker is configured");
    cli.run(&["explain", "order-1", "--copies"])
        .exits_with(2)
        .prints("set kafka.brokers and kafka.topic");
    cli.configure("scope = \"shipping\"\n");
    let explanation = cli.json(&["explain", "order-1"]);
    assert_eq!(
        (
            &explanation["verdict"],
            explanation["audit"].as_array().map(Vec::len)
        ),
        (&"unchecked".into(), Some(0)),
        "{explanation}"
    );
    let audit = cli.json(&["audit", "--id", "order-1"]);
    assert_eq!(
        audit[0]["scope"], "ledger",
        "`audit` shows all scopes: {audit}"
    );
    cli.run(&["marker", "complete", "order-2", "--yes", "--as", "bob"])
        .exits_with(0);
    cli.configure("");
    cli.run(&["marker", "complete", "order-3", "--yes", "--as", "cleo"])
        .exits_with(0);
    for (scope, who) in [
        ("ledger", vec!["ann"]),
        ("shipping", vec!["bob"]),
        ("", vec!["cleo"]),
    ] {
        let audit = cli.json(&["audit", "--scope", scope]);
        let actions = audit.as_array().expect("a list");
        assert_eq!(
            actions
                .iter()
                .map(|action| action["who"].as_str().expect("a name"))
                .collect::<Vec<_>>(),
            who,
            "{scope:?}: {audit}"
        );
    }
}

/// `gate.id` writes the whole numbers of JSON out, so `7.0` and `7` are one id in a message.
#[test]
fn an_unknown_number_is_explained_with_its_id() {
    let cli = TestCli::on_sqlite();
    std::fs::write(cli.path("markers.db"), "").expect("the directory is writable");
    cli.configure("[gate]\nid = \"json /id\"\n");
    cli.run(&["marker", "complete", "7", "--yes"]).exits_with(0);
    cli.run(&["explain", "7.0"]).exits_with(0).prints(
        "If the producer wrote 7.0 as a JSON number, its id is 7, since gate.id writes whole numbers out: run `oncegate explain 7`.",
    );
    for (id, source) in [
        ("7", "json /id"),
        ("7.5", "json /id"),
        ("\"8\"", "json /id"),
        ("8.0", "message-id"),
    ] {
        cli.configure(&format!("[gate]\nid = \"{source}\"\n"));
        let output = cli.run(&["explain", id]).exits_with(0);
        assert!(!output.out.contains("JSON number"), "{output:?}");
    }
}

#[test]
fn explain_with_copies_shows_what_was_read_if_the_topic_is_unreachable() {
    let cli = TestCli::on_sqlite();
    std::fs::write(cli.path("markers.db"), "").expect("the directory is writable");
    cli.configure(
        "[gate]\nid = \"header payment-id\"\n[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"payments\"\n",
    );
    cli.run(&["marker", "complete", "a", "--yes", "--as", "ann"])
        .exits_with(0);
    let explanation = cli
        .run(&["explain", "a", "--copies", "--json"])
        .exits_with(3)
        .json();
    assert_eq!(
        (
            &explanation["verdict"],
            &explanation["marker"]["state"],
            &explanation["audit"][0]["who"],
            explanation.get("copies"),
        ),
        (
            &"handled".into(),
            &"done".into(),
            &"ann".into(),
            Some(&serde_json::Value::Null)
        ),
        "{explanation}"
    );
    let unchecked = explanation["not_checked"].as_array().expect("a list");
    assert_eq!(unchecked.len(), 3, "{explanation}");
    assert_eq!(unchecked[2]["where"], "the consumed topic on kafka");
}
