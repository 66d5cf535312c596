//! The whole story of an id, told right for each end that it can have; and what a load needs.

use std::sync::Arc;

use oncegate::marker::Ask;

use crate::desk::{Desk, terms};
use crate::redrive::write_marker;
use crate::world::{Broker, Provider, World};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_end_is_told_right_on_kafka() {
    each_end_is_told_right(Broker::Kafka).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_end_is_told_right_on_rabbitmq() {
    each_end_is_told_right(Broker::RabbitMq).await;
}

async fn each_end_is_told_right(broker: Broker) {
    let world = Arc::new(World::on(broker).await);
    world
        .publish(&[
            ("charged", "works"),
            ("twice", "works"),
            ("declined", "declined"),
            ("silent", "silent"),
        ])
        .await;
    // The same payment again, and another one under an id that was used.
    world
        .publish(&[("twice", "works"), ("charged", "another card")])
        .await;
    world.consume(Provider::Judges, 2, 2, 1).await;
    let told = async |id: &str, verdict: &str, words: &[&str]| {
        let story = world.json(&["explain", id]).await;
        assert_eq!(story["verdict"], verdict, "{story}");
        for word in words {
            assert!(story.to_string().contains(word), "no {word:?} in {story}");
        }
        story
    };
    let twice = told(
        "twice",
        "handled",
        &["Not twice, because", "duplicate leaves no trace"],
    )
    .await;
    assert!(
        twice["dead_letters"].as_array().is_some_and(Vec::is_empty),
        "{twice}"
    );
    let charged = told("charged", "handled", &["ANOTHER BODY", "conflict"]).await;
    assert_eq!(charged["dead_letters"][0]["reason"], "conflict");
    let declined = told(
        "declined",
        "dead-lettered",
        &[
            "will never work",
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
    let silent = told(
        "silent",
        "in-doubt",
        &[
            "its handler said that it may have happened",
            "in-doubt resolve",
            ".in-doubt",
        ],
    )
    .await;
    assert_eq!(silent["in_doubt"][0]["reason"], "in-doubt-said");
    told(
        "nobody",
        "unknown",
        &["Nothing is known of this id", "scope and the prefix"],
    )
    .await;
    if broker == Broker::Kafka {
        let copies = world.json(&["explain", "twice", "--copies"]).await;
        assert_eq!(
            (
                &copies["verdict"],
                copies["copies"].as_array().map(Vec::len)
            ),
            (&"handled-with-duplicates".into(), Some(2)),
            "{copies}"
        );
        // Another consumer has not taken them: they are there all the same.
        world
            .desk
            .configure(&format!("scope = \"other\"\n{}", world.settings()));
        let copies = world.json(&["explain", "twice", "--copies"]).await;
        assert_eq!(
            (
                &copies["verdict"],
                copies["copies"].as_array().map(Vec::len)
            ),
            (&"not-recorded".into(), Some(2)),
            "{copies}"
        );
        let says = copies["says"].as_str().expect("a text");
        assert!(
            says.contains("The topic holds 2 messages with this id")
                && !says.contains("Nothing is known"),
            "{says}"
        );
        world.desk.configure(&world.settings());
        world
            .run(&["explain", "twice", "--copies"])
            .await
            .ended(0)
            .says("2 messages with this id that were not set aside: one was handled");
    } else {
        let refused = world.run(&["explain", "twice", "--copies"]).await.ended(2);
        refused
            .says("A RabbitMQ queue keeps nothing that was consumed")
            .says("leave --copies out");
    }

    // And when a person has dealt with it.
    world
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
        .ended(0);
    told(
        "declined",
        "sent-back",
        &["ann sent it back", "dead-letters redrive"],
    )
    .await;
    world
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
        .ended(0);
    told("silent", "handled", &["bob said so", "in-doubt resolve"]).await;
    world
        .run(&["dead-letters", "drop", "--reason", "conflict", "--yes"])
        .await
        .ended(0);
    let left = if broker == Broker::Kafka { 2 } else { 0 };
    world
        .consume(
            Provider::Works,
            3,
            left,
            if broker == Broker::Kafka { 1 } else { 0 },
        )
        .await;
    told("declined", "handled", &["ann"]).await;
    world
        .run(&["explain", "declined"])
        .await
        .ended(0)
        .says("declined: handled, once")
        .says("What operators did")
        .says("The marker");
    world
        .run(&["marker", "forget", "twice", "--yes", "--as", "cleo"])
        .await
        .ended(0);
    told(
        "twice",
        "unknown",
        &["cleo had it forgotten", "it was done"],
    )
    .await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_dropped_and_what_could_not_be_asked_is_said() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    world.publish(&[("a", "declined")]).await;
    world.consume(Provider::Judges, 0, 1, 0).await;
    world
        .run(&["dead-letters", "drop", "--id", "a", "--yes", "--as", "ann"])
        .await
        .ended(0);
    assert_eq!(world.json(&["explain", "a"]).await["verdict"], "dropped");
    let (desk, settings) = (&world.desk, world.settings());
    desk.write(
        "oncegate.toml",
        &format!("[store]\nurl = \"redis://127.0.0.1:1\"\n{settings}"),
    );
    let said = world.run(&["explain", "a", "--json"]).await.ended(3);
    let story = said.json();
    assert_eq!(story["verdict"], "not-seen");
    assert!(
        story["not_looked_at"]
            .as_array()
            .is_some_and(|parts| parts.len() == 2),
        "the store and its audit: {story}"
    );
    desk.configure(&settings.replace(&desk.name, "no-such-queue"));
    let said = world.run(&["explain", "a"]).await.ended(3);
    said.says("dropped by a person")
        .says("`no-such-queue.dead-letters` does not exist");
    world.end().await;
}

#[test]
fn a_load_is_planned_by_measured_bytes() {
    let desk = Desk::new();
    desk.write("oncegate.toml", "");
    let plan = desk.json(&["plan", "--rate", "1000", "--window", "24h"]);
    let memory = plan["memory_bytes"].as_u64().expect("a number");
    assert!((14_000_000_000..17_000_000_000).contains(&memory), "{plan}");
    desk.write("oncegate.toml", "[gate]\nrate = 1000\nwindow = \"24h\"\nguarantee = \"at-most-once\"\n[store]\nreplicas = 1\n");
    let strict = desk.json(&["plan"]);
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
    desk.run(&["plan"]).ended(0).says("maxmemory").says("GB");
    desk.write("oncegate.toml", "");
    desk.run(&["plan"]).ended(2).says("--rate");
}

/// Where the record of an id is gone with its time, the tool does not make up what happened since.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_longer_ago_than_the_window_is_not_known() {
    let world = Arc::new(World::on(Broker::Kafka).await);
    world
        .publish(&[("a", "declined"), ("b", "declined"), ("c", "declined")])
        .await;
    world.consume(Provider::Judges, 0, 3, 0).await;
    let told = async |id: &str, verdict: &str, words: &str| {
        let story = world.json(&["explain", id]).await;
        assert_eq!(story["verdict"], verdict, "{story}");
        assert!(
            story["says"]
                .as_str()
                .is_some_and(|says| says.contains(words)),
            "no {words:?} in {story}"
        );
    };
    world
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
        .ended(0);
    world
        .run(&["dead-letters", "drop", "--id", "b", "--yes", "--as", "bob"])
        .await
        .ended(0);
    told("a", "sent-back", "ann sent it back").await;
    told("b", "dropped", "bob dropped it").await;
    for id in ["a", "b", "c"] {
        write_marker(&world.desk, id, None).await;
    }
    // As if a window had passed since.
    world.desk.configure(
        &world
            .settings()
            .replace("[kafka]", "window = \"1ms\"\n[kafka]"),
    );
    told("a", "unknown", "longer ago than the window of 1 ms").await;
    told("b", "unknown", "longer ago than the window of 1 ms").await;
    told("c", "dead-lettered", "not known any more").await;
    world.end().await;
}

/// Of several acts on one id the last one counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_act_tells() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    world.publish(&[("a", "declined"), ("b", "declined")]).await;
    world.consume(Provider::Judges, 0, 2, 0).await;
    let story = async |id: &str| world.json(&["explain", id]).await;
    // Sent back, failed again, and given up then.
    world
        .run(&["dead-letters", "redrive", "--all", "--yes", "--as", "ann"])
        .await
        .ended(0);
    world.consume(Provider::Judges, 0, 2, 0).await;
    world
        .run(&["dead-letters", "drop", "--id", "a", "--yes", "--as", "bob"])
        .await
        .ended(0);
    assert_eq!(story("a").await["verdict"], "dropped");
    // Sent back, rejected again, and its letter taken away by somebody else.
    crate::world::take_all(&format!("{}.dead-letters", world.desk.name)).await;
    let gone = story("b").await;
    assert_eq!(
        gone["verdict"], "dead-lettered",
        "it was sent back, and is not on its way any more: {gone}"
    );
    // Recorded by hand, forgotten, and handled then.
    let says = |story: &serde_json::Value| story["says"].as_str().expect("a text").to_owned();
    world
        .run(&["marker", "complete", "c", "--yes", "--as", "cleo"])
        .await
        .ended(0);
    assert!(says(&story("c").await).contains("cleo said so"));
    world
        .run(&["marker", "forget", "c", "--yes", "--as", "dora"])
        .await
        .ended(0);
    assert!(
        says(&story("c").await).contains("dora had it forgotten"),
        "and that is not lost with the id"
    );
    world.desk.ask("c", Ask::Claim, 1, 0, terms()).await;
    world
        .desk
        .ask("c", Ask::Complete, 1, 1_000_001, terms())
        .await;
    let handled = story("c").await;
    assert!(
        handled["verdict"] == "handled" && !says(&handled).contains("cleo"),
        "{handled}"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_set_aside_is_no_duplicate_and_no_message_speaks_to_the_terminal() {
    let world = Arc::new(World::on(Broker::Kafka).await);
    // One payment, and another one under its id.
    world
        .publish(&[("a", "works"), ("a", "another card")])
        .await;
    world.consume(Provider::Works, 1, 1, 0).await;
    let story = world.json(&["explain", "a", "--copies"]).await;
    assert_eq!(
        (&story["verdict"], story["copies"].as_array().map(Vec::len)),
        (&"handled".into(), Some(2)),
        "{story}"
    );
    let origin = format!("{}/0/7", world.desk.name);
    let headers = [
        ("oncegate-id", "b"),
        ("oncegate-reason", "refused"),
        ("oncegate-origin", &origin),
        ("oncegate-last-error", "\u{1b}[2Jgone\nb: handled, once"),
    ];
    world
        .publish_to(
            &format!("{}.dead-letters", world.desk.name),
            "b",
            "{}",
            &headers,
        )
        .await;
    let said = world
        .run(&["explain", "b", "--as", "\u{1b}[2J"])
        .await
        .ended(0)
        .says("[2Jgone");
    assert!(
        !said.out.contains('\u{1b}') && !said.out.contains("\nb: handled"),
        "{said:?}"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promise_that_is_not_made_is_not_told() {
    let desk = Desk::new();
    desk.run(&["marker", "complete", "a", "--yes"]).ended(0);
    desk.ask("b", Ask::Complete, 1, 1, terms()).await;
    let said = desk
        .run(&["explain", "b"])
        .ended(0)
        .says("may have been run more than once");
    assert!(!said.out.contains("handled, once"), "{said:?}");
    desk.configure("[gate]\nguarantee = \"at-most-once\"\n");
    let said = desk
        .run(&["explain", "b"])
        .ended(0)
        .says("b: handled, once");
    assert!(!said.out.contains("more than once"), "{said:?}");
    desk.configure("[kafka]\nbrokers = \"127.0.0.1:1\"\n");
    desk.run(&["explain", "b"])
        .ended(2)
        .says("b: handled; not looked at: kafka")
        .says("kafka.topic is missing");
}

/// Several services may have one Redis, and so one audit, and the same ids.
#[tokio::test]
async fn what_was_done_about_another_services_id_is_not_told() {
    let desk = Desk::new();
    desk.configure("scope = \"ledger\"\n");
    desk.run(&["marker", "complete", "order-1", "--yes", "--as", "ann"])
        .ended(0);
    desk.run(&["explain", "order-1"])
        .ended(0)
        .says("ann said so")
        .says("no broker is configured");
    desk.run(&["explain", "order-1", "--copies"])
        .ended(2)
        .says("set kafka.brokers and kafka.topic");
    desk.configure("scope = \"shipping\"\n");
    let story = desk.json(&["explain", "order-1"]);
    assert_eq!(
        (&story["verdict"], story["audit"].as_array().map(Vec::len)),
        (&"unknown".into(), Some(0)),
        "{story}"
    );
    let audit = desk.json(&["audit", "--id", "order-1"]);
    assert_eq!(
        audit[0]["scope"], "ledger",
        "the audit itself tells of all: {audit}"
    );
    desk.run(&["marker", "complete", "order-2", "--yes", "--as", "bob"])
        .ended(0);
    desk.configure("");
    desk.run(&["marker", "complete", "order-3", "--yes", "--as", "cleo"])
        .ended(0);
    for (scope, who) in [
        ("ledger", vec!["ann"]),
        ("shipping", vec!["bob"]),
        ("", vec!["cleo"]),
    ] {
        let audit = desk.json(&["audit", "--scope", scope]);
        let acts = audit.as_array().expect("a list");
        assert_eq!(
            acts.iter()
                .map(|act| act["who"].as_str().expect("a name"))
                .collect::<Vec<_>>(),
            who,
            "{scope:?}: {audit}"
        );
    }
}
