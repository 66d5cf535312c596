//! The whole story of an id, told right for each end that it can have; and what a load needs.

use std::sync::Arc;

use crate::desk::Desk;
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
    world.publish(&[("charged", "works"), ("twice", "works"), ("declined", "declined"), ("silent", "silent")]).await;
    // The same payment again, and another one under an id that was used.
    world.publish(&[("twice", "works"), ("charged", "another card")]).await;
    world.consume(Provider::Judges, 2, 2, 1).await;
    let told = async |id: &str, verdict: &str, words: &[&str]| {
        let story = world.json(&["explain", id]).await;
        assert_eq!(story["verdict"], verdict, "{story}");
        for word in words {
            assert!(story.to_string().contains(word), "no {word:?} in {story}");
        }
        story
    };
    let twice = told("twice", "handled", &["Not twice, because", "duplicate leaves no trace"]).await;
    assert!(twice["dead_letters"].as_array().is_some_and(Vec::is_empty), "{twice}");
    let charged = told("charged", "handled", &["ANOTHER BODY", "conflict"]).await;
    assert_eq!(charged["dead_letters"][0]["reason"], "conflict");
    let declined = told("declined", "dead-lettered", &["will never work", "the card was declined", "dead-letters redrive"]).await;
    assert_eq!((&declined["marker"]["state"], &declined["dead_letters"][0]["state"]), (&"rejected".into(), &"waiting".into()));
    let silent = told("silent", "in-doubt", &["its handler said that it may have happened", "in-doubt resolve", ".in-doubt"]).await;
    assert_eq!(silent["in_doubt"][0]["reason"], "in-doubt-said");
    told("nobody", "unknown", &["Nothing is known of this id", "scope and the prefix"]).await;
    if broker == Broker::Kafka {
        let copies = world.json(&["explain", "twice", "--copies"]).await;
        assert_eq!(
            (&copies["verdict"], copies["copies"].as_array().map(Vec::len)),
            (&"handled-with-duplicates".into(), Some(2)),
            "{copies}"
        );
        world.run(&["explain", "twice", "--copies"]).await.ended(0).says("2 messages with this id: one was handled");
    }

    // And when a person has dealt with it.
    world.run(&["dead-letters", "redrive", "--id", "declined", "--yes", "--as", "ann"]).await.ended(0);
    told("declined", "sent-back", &["ann sent it back", "dead-letters redrive"]).await;
    world.run(&["in-doubt", "resolve", "silent", "--happened", "--yes", "--as", "bob"]).await.ended(0);
    told("silent", "handled", &["bob said so", "in-doubt resolve"]).await;
    world.run(&["dead-letters", "drop", "--reason", "conflict", "--yes"]).await.ended(0);
    let left = if broker == Broker::Kafka { 2 } else { 0 };
    world.consume(Provider::Works, 3, left, if broker == Broker::Kafka { 1 } else { 0 }).await;
    told("declined", "handled", &["ann"]).await;
    world.run(&["explain", "declined"]).await.ended(0).says("declined: handled, once").says("What operators did").says("The marker");
    world.run(&["marker", "forget", "twice", "--yes", "--as", "cleo"]).await.ended(0);
    told("twice", "unknown", &["cleo had it forgotten", "it was done"]).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_dropped_and_what_could_not_be_asked_is_said() {
    let world = Arc::new(World::on(Broker::RabbitMq).await);
    world.publish(&[("a", "declined")]).await;
    world.consume(Provider::Judges, 0, 1, 0).await;
    world.run(&["dead-letters", "drop", "--id", "a", "--yes", "--as", "ann"]).await.ended(0);
    assert_eq!(world.json(&["explain", "a"]).await["verdict"], "dropped");
    let (desk, settings) = (&world.desk, world.settings());
    desk.write("oncegate.toml", &format!("[store]\nurl = \"redis://127.0.0.1:1\"\n{settings}"));
    let said = world.run(&["explain", "a", "--json"]).await.ended(3);
    let story = said.json();
    assert_eq!(story["verdict"], "not-seen");
    assert!(story["not_seen"].as_array().is_some_and(|parts| parts.len() == 2), "the store and its audit: {story}");
    desk.configure(&settings.replace(&desk.name, "no-such-queue"));
    let said = world.run(&["explain", "a"]).await.ended(3);
    said.says("dropped by a person").says("`no-such-queue.dead-letters` does not exist");
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
    assert!(strict["memory_bytes"].as_u64().is_some_and(|more| more > memory) && strict["fingerprints"] == true, "{strict}");
    assert_eq!((&strict["servers"], &strict["connections_to_each_primary"]), (&2.into(), &3.into()));
    desk.run(&["plan"]).ended(0).says("maxmemory").says("GB");
    desk.write("oncegate.toml", "");
    desk.run(&["plan"]).ended(2).says("--rate");
}
