//! What is sent back, and what is left: a letter stands for ever, and what keeps its id from being
//! handled twice does not.

use std::sync::Arc;

use oncegate::marker::{Ask, Terms};
use rdkafka::admin::{AdminOptions, AlterConfig, ResourceSpecifier};
use rdkafka::producer::{FutureProducer, FutureRecord};
use serde_json::Value;

use crate::desk::{Desk, terms};
use crate::letters::{ids, on_both_brokers};
use crate::world::{Broker, PATIENCE, Provider, World};

on_both_brokers!(
    what_may_have_been_handled_longer_ago_than_the_window_is_reconciled,
    without_a_promise_of_at_most_once_it_is_left,
    what_came_from_elsewhere_is_left,
    a_conflict_is_sent_only_by_its_name,
    without_a_store_what_the_gate_may_hold_is_left,
    what_its_holder_left_gets_out_of_the_dead_letters,
    what_is_left_does_not_use_up_the_limit,
    one_marker_that_cannot_be_read_keeps_no_other_letter,
    an_id_that_is_a_place_is_not_sent_back,
);

const TWO_DAYS_MS: u64 = 2 * 24 * 3_600_000;
const BODY: &str = r#"{"card":"works"}"#;

fn now_ms() -> u64 {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_millis()).expect("before the end of time")
}

impl World {
    async fn set_aside(&self, shelf: &str, id: &str, reason: &str, more: &[(&str, &str)]) {
        let origin = match self.broker {
            Broker::Kafka => format!("{}/0/7", self.desk.name),
            Broker::RabbitMq => self.desk.name.clone(),
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
        self.publish_to(&format!("{}.{shelf}", self.desk.name), id, BODY, &headers)
            .await;
    }

    /// How many letters stay when so many were taken out.
    fn stay(&self, on_kafka: u64, on_rabbitmq: u64) -> u64 {
        if self.broker == Broker::Kafka {
            on_kafka
        } else {
            on_rabbitmq
        }
    }
}

/// Puts anything under the id of a marker; nothing, as if its time were over.
pub(crate) async fn write_marker(desk: &Desk, id: &str, value: Option<&str>) {
    let client = redis::Client::open(desk.redis.as_str()).expect("a URL");
    let mut plain = client
        .get_multiplexed_async_connection()
        .await
        .expect("Redis answers");
    let key = format!("{}{id}", desk.prefix());
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

async fn what_may_have_been_handled_longer_ago_than_the_window_is_reconciled(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    let old = (now_ms() - TWO_DAYS_MS).to_string();
    // As large as it is, nobody looked at its marker when it was set aside.
    world
        .set_aside(
            "dead-letters",
            "old",
            "too-large",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    let would = world
        .run(&["dead-letters", "redrive", "--all", "--dry-run"])
        .await
        .ended(0);
    would
        .says("with its age, to be reconciled")
        .says("1 d, the default");
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("1 redriven");
    // The consumer finds it too old, and its `reconcile` cannot tell: nothing is charged on a
    // guess.
    world.consume(Provider::Works, 0, world.stay(1, 0), 1).await;
    assert_eq!(
        world.json(&["in-doubt", "list"]).await["letters"][0]["reason"],
        "in-doubt-too-old"
    );
    // Whoever answers for it has it run.
    world
        .set_aside(
            "dead-letters",
            "sure",
            "too-large",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    world
        .run(&[
            "dead-letters",
            "redrive",
            "--id",
            "sure",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .ended(0)
        .says("1 redriven");
    world.consume(Provider::Works, 1, world.stay(2, 0), 1).await;
    assert_eq!(world.charged(), ["sure"]);
    world.end().await;
}

async fn without_a_promise_of_at_most_once_it_is_left(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    world
        .desk
        .configure(&world.settings().replace("at-most-once", "effectively-once"));
    let old = (now_ms() - TWO_DAYS_MS).to_string();
    world
        .set_aside(
            "dead-letters",
            "old",
            "too-large",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    world
        .set_aside(
            "in-doubt",
            "doubt",
            "in-doubt-too-old",
            &[("oncegate-first-seen", &old)],
        )
        .await;
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1)
        .says("longer ago than the window of 1 d, the default");
    world
        .run(&["in-doubt", "resolve", "doubt", "--did-not-happen", "--yes"])
        .await
        .ended(1)
        .says("--accept-forgotten");
    world.until_there_are(0, "").await;
    world.desk.configure(
        &world
            .settings()
            .replace("at-most-once\"", "effectively-once\"\nwindow = \"7d\""),
    );
    world
        .run(&["dead-letters", "redrive", "--all", "--dry-run"])
        .await
        .ended(0)
        .says("1 would be redriven");
    world
        .run(&[
            "in-doubt",
            "resolve",
            "doubt",
            "--did-not-happen",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .ended(0)
        .says("1 resolved");
    world.until_there_are(1, "").await;
    world.end().await;
}

async fn what_came_from_elsewhere_is_left(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    let origin = if broker == Broker::Kafka {
        "theirs/0/7"
    } else {
        "theirs"
    };
    world
        .set_aside(
            "dead-letters",
            "a",
            "refused",
            &[("oncegate-origin", origin)],
        )
        .await;
    world
        .set_aside(
            "in-doubt",
            "a",
            "in-doubt-said",
            &[("oncegate-origin", origin)],
        )
        .await;
    for act in [
        &["dead-letters", "redrive", "--all"][..],
        &["dead-letters", "drop", "--all"],
        &["in-doubt", "resolve", "a", "--did-not-happen"],
    ] {
        let arguments: Vec<&str> = act.iter().copied().chain(["--yes"]).collect();
        world
            .run(&arguments)
            .await
            .ended(1)
            .says("it came from theirs")
            .says("1 left where they are");
    }
    assert_eq!(
        world.json(&["explain", "a"]).await["verdict"],
        "unknown",
        "it is another consumer's"
    );
    for (shelf, count) in [(".dead-letters", 1), (".in-doubt", 1), ("", 0)] {
        world.until_there_are(count, shelf).await;
    }
    assert_eq!(
        world.json(&["audit"]).await.as_array().map(Vec::len),
        Some(0)
    );
    world.end().await;
}

async fn a_conflict_is_sent_only_by_its_name(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    world
        .publish(&[("a", "works"), ("a", "another card")])
        .await;
    world.consume(Provider::Works, 1, 1, 0).await;
    // The time of the marker of what was handled is over.
    write_marker(&world.desk, "a", None).await;
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1)
        .says("its id was used for another body");
    world.until_there_are(1, ".dead-letters").await;
    world
        .run(&["dead-letters", "redrive", "--id", "a", "--dry-run"])
        .await
        .ended(0)
        .says("1 would be redriven");
    // Whose lease is over is not done with: its own letter, or its next delivery, is for the other
    // body.
    let short = Terms {
        lease: std::time::Duration::from_millis(1),
        ..terms()
    };
    world.desk.ask("held", Ask::Claim, 1, 0, short).await;
    world
        .set_aside("dead-letters", "held", "conflict", &[])
        .await;
    world
        .run(&["dead-letters", "redrive", "--id", "held", "--yes"])
        .await
        .ended(1)
        .says("another body, whose holder is gone");
    world.end().await;
}

async fn what_its_holder_left_gets_out_of_the_dead_letters(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    let short = Terms {
        lease: std::time::Duration::from_millis(1),
        ..terms()
    };
    world.desk.ask("a", Ask::Claim, 1, 0, short).await;
    world
        .set_aside("dead-letters", "a", "attempts-spent", &[])
        .await;
    let story = world.json(&["explain", "a"]).await;
    assert_eq!(story["verdict"], "left-by-its-holder");
    assert!(
        story["says"]
            .as_str()
            .is_some_and(|says| says.contains("dead-letters redrive")),
        "{story}"
    );
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("1 redriven");
    // The gate finds it in doubt, whatever sent it.
    world.consume(Provider::Works, 0, world.stay(1, 0), 1).await;
    world.end().await;
}

async fn what_is_left_does_not_use_up_the_limit(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    world
        .set_aside("dead-letters", "used", "conflict", &[])
        .await;
    world
        .set_aside("dead-letters", "good", "refused", &[])
        .await;
    world
        .set_aside("dead-letters", "better", "refused", &[])
        .await;
    for rest in [1, 0] {
        let said = world
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
        assert_eq!(said.json()["done"], 1, "{said:?}");
        let would = world
            .run(&["dead-letters", "redrive", "--all", "--dry-run"])
            .await
            .ended(0);
        would.says(&format!("{rest} would be redriven, 1 would be left"));
    }
    world.end().await;
}

async fn one_marker_that_cannot_be_read_keeps_no_other_letter(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    write_marker(&world.desk, "odd", Some("v9 of a later release")).await;
    world.set_aside("dead-letters", "odd", "refused", &[]).await;
    world
        .set_aside("dead-letters", "good", "refused", &[])
        .await;
    let said = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1);
    said.says("left as it is").says("1 redriven, 1 left");
    assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), ["odd"]);
    world.end().await;
}

async fn without_a_store_what_the_gate_may_hold_is_left(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    world
        .set_aside("dead-letters", "spent", "attempts-spent", &[])
        .await;
    world
        .set_aside("dead-letters", "odd", "too-large", &[])
        .await;
    let brokers = world.settings();
    let audit = world.desk.path("audit.jsonl");
    world.desk.write(
        "oncegate.toml",
        &format!("{brokers}[audit]\nfile = \"{}\"\n", audit.display()),
    );
    let said = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1);
    said.says("set store.url").says("1 redriven, 1 left");
    assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), ["spent"]);
    world.desk.configure(&brokers);
    world.end().await;
}

async fn an_id_that_is_a_place_is_not_sent_back(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    world
        .set_aside(
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
    world.desk.configure(&world.settings().replace(
        &format!("\"{}\"", world.desk.name),
        &format!(
            "\"{target}\"\ndead-letters = \"{}.dead-letters\"",
            world.desk.name
        ),
    ));
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1)
        .says("its id is its place");
    world
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--accept-forgotten",
            "--dry-run",
        ])
        .await
        .ended(0)
        .says("1 would be redriven");
    world.desk.configure(&world.settings());
    world.end().await;
}

/// The stages of all acts, and whether something went wrong.
fn ends(audit: &Value) -> Vec<(&str, bool)> {
    let acts = audit.as_array().expect("a list");
    acts.iter()
        .map(|act| {
            (
                act["stage"].as_str().expect("a stage"),
                act["failure"].is_string(),
            )
        })
        .collect()
}

async fn set_largest(topic: &str, bytes: &str) {
    let config = AlterConfig::new(ResourceSpecifier::Topic(topic)).set("max.message.bytes", bytes);
    let altered = crate::world::admin()
        .alter_configs(&[config], &AdminOptions::new())
        .await
        .expect("Kafka answers");
    altered
        .into_iter()
        .for_each(|topic| drop(topic.expect("altered")));
}

/// With a body of so many bytes, which a producer's own limit would refuse.
async fn publish_large(topic: &str, id: &str, reason: &str, bytes: usize) {
    let mut config = crate::world::config();
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
    // Zeros would be compressed by nobody either.
    let body = vec![b'x'; bytes];
    producer
        .send(
            FutureRecord::to(topic)
                .key(id)
                .payload(&body)
                .headers(headers),
            PATIENCE,
        )
        .await
        .expect("it is taken");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_letter_of_two_megabytes_is_sent_back_on_kafka() {
    let world = Arc::new(World::on(Broker::Kafka).await);
    let (name, letters) = (
        world.desk.name.clone(),
        format!("{}.dead-letters", world.desk.name),
    );
    set_largest(&name, "5000000").await;
    set_largest(&letters, "5000000").await;
    publish_large(&letters, "large", "refused", 2_000_000).await;
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("1 redriven");
    world.until_there_are(1, "").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_topic_refuses_waits_on_and_keeps_no_other_letter() {
    let world = Arc::new(World::on(Broker::Kafka).await);
    let name = world.desk.name.clone();
    set_largest(&name, "1000").await;
    publish_large(&format!("{name}.dead-letters"), "large", "refused", 5_000).await;
    publish_large(&format!("{name}.in-doubt"), "doubt", "in-doubt-said", 5_000).await;
    world.desk.ask("doubt", Ask::Claim, 1, 0, terms()).await;
    world.desk.ask("doubt", Ask::Doubt, 1, 1, terms()).await;
    world
        .set_aside("dead-letters", "small", "refused", &[])
        .await;
    let said = world
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--yes",
            "--why",
            "to see",
        ])
        .await
        .ended(1);
    said.says("does not take the copy")
        .says("1 redriven, 1 left");
    assert_eq!(
        ids(&world.json(&["dead-letters", "list"]).await),
        ["large"],
        "nothing of it was done"
    );
    world
        .run(&["in-doubt", "resolve", "doubt", "--did-not-happen", "--yes"])
        .await
        .ended(1)
        .says("does not take the copy");
    assert_eq!(
        world.json(&["in-doubt", "list"]).await["letters"][0]["state"],
        "waiting"
    );
    let audit = world.json(&["audit"]).await;
    let mut told = ends(&audit);
    told.sort_unstable();
    assert_eq!(
        told,
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
        .find(|act| act["id"] == "large")
        .expect("the act");
    assert_eq!(
        large["why"], "to see",
        "what the operator said stays: {large}"
    );
    set_largest(&name, "1000000").await;
    let again = async |arguments: &[&str]| {
        // The broker knows of the new limit a moment later.
        let begun = std::time::Instant::now();
        while world.run(arguments).await.code != 0 {
            assert!(begun.elapsed() < PATIENCE, "{arguments:?}");
        }
    };
    again(&["dead-letters", "redrive", "--all", "--yes"]).await;
    again(&["in-doubt", "resolve", "doubt", "--did-not-happen", "--yes"]).await;
    world.until_there_are(3, "").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doubt_whose_copy_is_not_taken_stays_where_it_is_on_rabbitmq() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    world.publish(&[("a", "silent")]).await;
    world.consume(Provider::Judges, 0, 0, 1).await;
    crate::world::delete(&world.desk.name).await;
    world
        .run(&["in-doubt", "resolve", "a", "--did-not-happen", "--yes"])
        .await
        .ended(3)
        .says("is not there, or is full");
    world.until_there_are(1, ".in-doubt").await;
    assert_eq!(
        ends(&world.json(&["audit"]).await),
        [("done", false), ("not-sent", true)]
    );
    crate::world::declare_as_the_source_does(&world.desk.name).await;
    world
        .run(&["in-doubt", "resolve", "a", "--did-not-happen", "--yes"])
        .await
        .ended(0)
        .says("1 resolved");
    world.consume(Provider::Works, 1, 0, 0).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lost_headers_is_sent_only_if_that_is_accepted() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    world
        .set_aside(
            "dead-letters",
            "a",
            "refused",
            &[("oncegate-dropped-headers", "signature")],
        )
        .await;
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1)
        .says("signature");
    world
        .run(&[
            "dead-letters",
            "redrive",
            "--all",
            "--accept-lost-headers",
            "--yes",
        ])
        .await
        .ended(0)
        .says("1 redriven");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rate_is_kept() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    let audit = world.desk.path("audit.jsonl");
    world.desk.configure(&format!(
        "{}[audit]\nfile = \"{}\"\n",
        world.settings(),
        audit.display()
    ));
    for id in ["a", "b", "c"] {
        world.set_aside("dead-letters", id, "refused", &[]).await;
    }
    world
        .run(&["dead-letters", "drop", "--all", "--rate", "1", "--yes"])
        .await
        .ended(0)
        .says("3 dropped");
    let lines = std::fs::read_to_string(audit).expect("the audit");
    let begun: Vec<u64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"))
        .filter(|act| act["stage"] == "begun")
        .map(|act| act["at_ms"].as_u64().expect("a time"))
        .collect();
    assert_eq!(begun.len(), 3);
    assert!(
        begun[2] - begun[0] >= 1_000,
        "two pauses of a second, the first of which may have begun a while before: {begun:?}"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tombstone_stays_one() {
    let world = Arc::new(World::on(Broker::Kafka).await);
    let name = world.desk.name.clone();
    let producer: FutureProducer = crate::world::config()
        .set("acks", "all")
        .create()
        .expect("a producer");
    let headers = rdkafka::message::OwnedHeaders::new().insert(rdkafka::message::Header {
        key: "oncegate-reason",
        value: Some("missing-id"),
    });
    let letters = format!("{name}.dead-letters");
    producer
        .send(
            FutureRecord::<str, [u8]>::to(&letters)
                .key("k")
                .headers(headers),
            PATIENCE,
        )
        .await
        .expect("it is taken");
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("1 redriven");
    let read = crate::world::bodies(&name).await;
    assert_eq!(read, [None]);
    world.end().await;
}

/// Who mistypes an id records nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_id_without_a_letter_and_without_a_doubt_is_not_resolved() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    for found in ["--happened", "--did-not-happen"] {
        world
            .run(&["in-doubt", "resolve", "typo", found, "--yes"])
            .await
            .ended(1)
            .says("marker complete");
    }
    assert_eq!(
        world.json(&["marker", "show", "typo"]).await["state"],
        "absent"
    );
    // A marker alone may be in doubt, and what was found out lasts for the window.
    world.desk.ask("a", Ask::Claim, 1, 0, terms()).await;
    world.desk.ask("a", Ask::Doubt, 1, 1, terms()).await;
    world
        .run(&["in-doubt", "resolve", "a", "--happened", "--dry-run"])
        .await
        .ended(0)
        .says("would be done for 1 d, the default");
    assert_eq!(
        world.json(&["marker", "show", "a"]).await["state"],
        "in-doubt"
    );
    world
        .run(&["in-doubt", "resolve", "a", "--happened", "--yes"])
        .await
        .ended(0)
        .says("is done for 1 d, the default");
    assert_eq!(world.json(&["marker", "show", "a"]).await["state"], "done");
    world.end().await;
}
