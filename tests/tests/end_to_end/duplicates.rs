//! Several messages with the same id.

use std::collections::BTreeSet;

use crate::broker::{Broker, RejectedMessage, Sent};
use crate::on_both_brokers;
use crate::world::World;

on_both_brokers!(
    one_after_the_other,
    at_the_same_time,
    whatever_the_id_looks_like,
    the_same_id_with_another_body_is_a_conflict_at_most_once
);

async fn one_after_the_other(broker: Broker) {
    let world = World::new(broker).await;
    let consumer = world.consumer("effectively-once").start();
    world.publish([Sent::new("a", "work")]).await;
    world.until_settled(1).await;
    world
        .publish([
            Sent::new("a", "work"),
            Sent::new("a", "work"),
            Sent::new("b", "work"),
            Sent::new("a", "work"),
        ])
        .await;
    world.until_settled(5).await;
    assert_eq!(world.effected(), ["a", "b"]);
    assert_eq!(world.starts().len(), 2);
    assert_eq!(world.marker("a").await.as_deref(), Some("1"));
    world.end([consumer]).await;
}

/// Two consumers and, on Kafka, three partitions: six copies of each message are delivered while
/// the first is handled.
async fn at_the_same_time(broker: Broker) {
    const IDS: usize = 10;
    const COPIES: usize = 6;
    let world = World::new(broker).await;
    let copies = (0..IDS * COPIES).map(|n| Sent::slow(format!("id-{:02}", n % IDS), 300));
    world.publish(copies).await;
    let consumers = [
        world.consumer("at-most-once").start(),
        world.consumer("at-most-once").start(),
    ];
    world.until_settled(IDS * COPIES).await;
    let ids: Vec<String> = (0..IDS).map(|n| format!("id-{n:02}")).collect();
    assert_eq!(world.effected(), ids);
    assert_eq!(world.starts().len(), IDS);
    assert!(
        world.counted("busy") > 0,
        "no copy came while another was handled"
    );
    assert!(
        world.is_done("id-00").await && world.marker("id-00").await.as_deref() != Some("1"),
        "at most once compares bodies"
    );
    world.end(consumers).await;
}

async fn whatever_the_id_looks_like(broker: Broker) {
    let odd = [
        "a b",
        "a|b",
        "{a}b",
        "h:0",
        "\u{e9}",
        "e\u{301}",
        "a\r\nSET x",
        &"long".repeat(5_000),
    ];
    let world = World::new(broker).await;
    let consumer = world.consumer("effectively-once").start();
    for _ in 0..2 {
        world.publish(odd.map(|id| Sent::new(id, "work"))).await;
    }
    world.until_settled(odd.len() * 2).await;
    let ids: BTreeSet<String> = world.effected().into_iter().collect();
    assert_eq!(
        (ids.len(), world.effects().len()),
        (odd.len(), odd.len()),
        "{ids:?}"
    );
    assert!(ids.iter().all(|id| id.starts_with("h:")), "{ids:?}");
    world.end([consumer]).await;
}

async fn the_same_id_with_another_body_is_a_conflict_at_most_once(broker: Broker) {
    let world = World::new(broker).await;
    let consumer = world.consumer("at-most-once").start();
    world.publish([Sent::new("a", "work")]).await;
    world.until_settled(1).await;
    world
        .publish([Sent::slow("a", 0), Sent::new("a", "work")])
        .await;
    world.until_settled(3).await;
    world
        .until("it is in the dead letters", async || {
            !world.dead_letters().await.is_empty()
        })
        .await;
    let rejected_messages = world.dead_letters().await;
    assert_eq!(
        rejected_messages
            .iter()
            .map(RejectedMessage::reason)
            .collect::<Vec<_>>(),
        ["conflict"]
    );
    assert_eq!(rejected_messages[0].body, r#"{"do":"slow","ms":0}"#);
    assert_eq!(world.effected(), ["a"]);
    world.end([consumer]).await;
}
