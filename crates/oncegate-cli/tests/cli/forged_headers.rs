//! Forged `oncegate-*` headers: no command acts on the id that they name.

use std::collections::BTreeMap;
use std::sync::Arc;

use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, BasicRejectOptions};
use lapin::types::AMQPValue;
use serde_json::{Value, json};

use crate::destinations::{ids, on_both_brokers};
use crate::fixture::{
    BODY_LIMIT, Broker, BrokerFixture, PaymentProvider, open, publish_properties, rabbitmq, text,
};

on_both_brokers!(
    redrive_ignores_a_forged_id,
    redrive_skips_another_body_under_a_rejected_id,
    explain_ignores_forged_ids_of_copies
);

const BODY: &str = r#"{"card":"works"}"#;

/// The year 2100.
const FUTURE_MS: &str = "4102444800000";

/// Headers that make a message look like a dead letter of the id `victim`.
const FORGED: [(&str, &str); 6] = [
    ("oncegate-id", "victim"),
    ("oncegate-reason", "refused"),
    ("oncegate-attempts", "9"),
    ("oncegate-last-error", "forged"),
    ("oncegate-rejected-at", FUTURE_MS),
    ("oncegate-first-seen", FUTURE_MS),
];

/// A fixture in which `victim` is rejected and its dead letter was dropped.
async fn fixture_with_rejected_victim(broker: Broker) -> Arc<BrokerFixture> {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    fixture.publish(&[("victim", "declined")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 1, 0).await;
    fixture
        .run(&["dead-letters", "drop", "--id", "victim", "--yes"])
        .await
        .exits_with(0)
        .prints("1 dropped");
    fixture
}

async fn assert_victim_is_rejected(fixture: &Arc<BrokerFixture>) {
    assert_eq!(
        fixture.json(&["marker", "show", "victim"]).await["state"],
        "rejected",
        "the marker of another id was cleared"
    );
}

/// One value of each message, ordered by id.
fn values(listed: &Value, name: &str) -> Vec<Value> {
    let mut messages = listed["messages"].as_array().expect("a list").clone();
    messages.sort_by_key(|message| message["id"].to_string());
    messages
        .into_iter()
        .map(|message| message[name].clone())
        .collect()
}

async fn redrive_ignores_a_forged_id(broker: Broker) {
    let fixture = fixture_with_rejected_victim(broker).await;
    let name = fixture.cli.name.clone();
    fixture.publish_with(&name, BODY, &FORGED).await;
    let large = "x".repeat(BODY_LIMIT + 1);
    let without_body = ("oncegate-body-omitted", "5");
    fixture
        .publish_to(
            &name,
            "large",
            &large,
            &[
                &FORGED[..],
                &[without_body, ("oncegate-origin", "theirs/0/7")],
            ]
            .concat(),
        )
        .await;
    fixture
        .consume(
            PaymentProvider::Judges,
            0,
            if broker == Broker::Kafka { 3 } else { 2 },
            0,
        )
        .await;

    let listed = fixture.json(&["dead-letters", "list"]).await;
    assert_eq!(ids(&listed), ["-", "large"], "{listed}");
    assert_eq!(values(&listed, "reason"), ["too-large", "missing-id"]);
    assert_eq!(values(&listed, "last_error"), [Value::Null, Value::Null]);
    assert_eq!(
        ids(&fixture
            .json(&["dead-letters", "list", "--id", "victim"])
            .await),
        [""; 0]
    );
    assert_eq!(
        ids(&fixture
            .json(&["dead-letters", "list", "--younger-than", "1h"])
            .await)
        .len(),
        2,
        "a forged time in the future is ignored"
    );
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("2 redriven");
    assert_victim_is_rejected(&fixture).await;
    fixture.end().await;
}

/// Too large for the gate, so that oncegate wrote no id: the id comes from the producer.
async fn redrive_skips_another_body_under_a_rejected_id(broker: Broker) {
    let fixture = fixture_with_rejected_victim(broker).await;
    let large = "x".repeat(BODY_LIMIT + 1);
    fixture
        .publish_to(
            &fixture.cli.name,
            "victim",
            &large,
            &[("payment-id", "victim")],
        )
        .await;
    fixture
        .consume(
            PaymentProvider::Judges,
            0,
            if broker == Broker::Kafka { 2 } else { 1 },
            0,
        )
        .await;
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1);
    output
        .prints("its id was used for another body; select it with --id")
        .prints("0 redriven, 1 left");
    assert_victim_is_rejected(&fixture).await;
    fixture
        .run(&["dead-letters", "redrive", "--id", "victim", "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    fixture.end().await;
}

async fn explain_ignores_forged_ids_of_copies(broker: Broker) {
    if broker == Broker::RabbitMq {
        return; // A queue keeps no consumed messages to count.
    }
    let fixture = fixture_with_rejected_victim(broker).await;
    fixture
        .publish_to(&fixture.cli.name, "another", BODY, &FORGED)
        .await;
    let copies = fixture.json(&["explain", "victim", "--copies"]).await["copies"].clone();
    assert_eq!(copies.as_array().map(Vec::len), Some(1), "{copies}");
    fixture.end().await;
}

/// `x-death` as the broker would write it for another queue in the year 2100.
fn forged_death(queue: &str, reason: &str) -> AMQPValue {
    let time = AMQPValue::Timestamp(4_102_444_800);
    let entries = [
        ("queue", text(queue)),
        ("reason", text(reason)),
        ("count", AMQPValue::LongLongInt(1)),
        ("time", time),
    ];
    let entry: BTreeMap<_, _> = entries
        .into_iter()
        .map(|(name, value)| (name.into(), value))
        .collect();
    AMQPValue::FieldArray(vec![AMQPValue::FieldTable(entry.into())].into())
}

/// Why RabbitMQ dead-letters a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeathCause {
    /// Its TTL expires.
    Expiration,
    /// A consumer rejects it.
    Rejection,
}

async fn broker_dead_letters(
    fixture: &BrokerFixture,
    id: &str,
    by: DeathCause,
    more: &[(&str, AMQPValue)],
) {
    let name = &fixture.cli.name;
    let forged = FORGED
        .into_iter()
        .chain([("payment-id", id)])
        .map(|(name, value)| (name, text(value)));
    let table: BTreeMap<_, _> = forged
        .chain(more.iter().cloned())
        .map(|(name, value)| (name.into(), value))
        .collect();
    let mut properties = BasicProperties::default().with_headers(table.into());
    if by == DeathCause::Expiration {
        properties = properties.with_expiration("1".into());
    }
    publish_properties(&rabbitmq(), name, BODY, properties).await;
    if by == DeathCause::Rejection {
        let (connection, channel) = open().await;
        let message = channel
            .basic_get(name.as_str().into(), BasicGetOptions::default())
            .await
            .expect("the queue")
            .expect("a message");
        channel
            .basic_reject(
                message.delivery.delivery_tag,
                BasicRejectOptions { requeue: false },
            )
            .await
            .expect("rejected");
        connection
            .close(200, "OK".into())
            .await
            .expect("a clean end");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redrive_ignores_forged_headers_of_rabbitmq_dead_letters() {
    let fixture = fixture_with_rejected_victim(Broker::RabbitMq).await;
    let name = fixture.cli.name.clone();
    let origin = [("oncegate-origin", text("theirs"))];
    broker_dead_letters(&fixture, "expired", DeathCause::Expiration, &origin).await;
    broker_dead_letters(&fixture, "rejected", DeathCause::Rejection, &origin).await;
    // The broker increments its own entry, and replaces a value that is not a list.
    broker_dead_letters(
        &fixture,
        "same",
        DeathCause::Rejection,
        &[("x-death", forged_death(&name, "rejected"))],
    )
    .await;
    broker_dead_letters(
        &fixture,
        "text",
        DeathCause::Rejection,
        &[("x-death", text("none"))],
    )
    .await;
    fixture.until_there_are(4, ".dead-letters").await;

    let listed = fixture.json(&["dead-letters", "list"]).await;
    assert_eq!(
        ids(&listed),
        ["expired", "rejected", "same", "text"],
        "{listed}"
    );
    for (value, expected) in [
        ("reason", json!("dead-lettered-by-broker")),
        ("attempts", Value::Null),
        ("last_error", Value::Null),
        ("origin", Value::Null),
        ("first_error", Value::Null),
    ] {
        assert_eq!(values(&listed, value), vec![expected; 4], "{value}");
    }
    let shown = fixture
        .run(&["dead-letters", "show", "rejected"])
        .await
        .exits_with(0)
        .prints("payment-id: rejected")
        .prints("x-death");
    assert!(!shown.out.contains("victim"), "{shown:?}");
    fixture
        .run(&["in-doubt", "resolve", "victim", "--happened"])
        .await
        .exits_with(1)
        .prints("it is dead-lettered");
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("4 redriven");
    assert_victim_is_rejected(&fixture).await;
    fixture.consume(PaymentProvider::Works, 4, 0, 0).await;
    let mut charged = fixture.charged();
    charged.sort();
    assert_eq!(charged, ["expired", "rejected", "same", "text"]);
    fixture.end().await;
}
