//! RabbitMQ consumers that are killed, or frozen for longer than their leases and heartbeats.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::broker::{Broker, Sent};
use crate::process::ConsumerProcess;
use crate::world::World;

const LOAD: usize = 1_000;

/// Consumers under load: twice, one is frozen until the broker has redelivered its messages, and
/// one is killed.
async fn frozen_and_killed(guarantee: &str) -> (World, Vec<ConsumerProcess>) {
    let world = World::new(Broker::RabbitMq).await;
    world
        .publish(
            (0..LOAD).map(|n| Sent::slow(format!("id-{n:04}"), [100, 150, 200, 250, 300][n % 5])),
        )
        .await;
    // The broker closes a connection after about two missed heartbeats.
    let url = format!("{}?heartbeat=1", Broker::RabbitMq.url());
    let start = || {
        world
            .consumer(guarantee)
            .with("url", &url)
            .with("lease-ms", 1_000)
            .with("in-flight", 8)
            .with("prefetch", 16)
            .start()
    };
    let mut fleet = vec![start(), start(), start()];
    for effects in [LOAD / 20, LOAD / 2] {
        world.until_effects(effects).await;
        fleet[0].freeze();
        fleet.remove(1).kill();
        fleet.push(start());
        // Other consumers have claimed its messages; its fencing tokens are outdated.
        tokio::time::sleep(Duration::from_secs(4)).await;
        fleet[0].thaw();
        fleet.rotate_left(1);
    }
    assert!(
        world.effects().len() < LOAD,
        "it ended before anything happened to it"
    );
    world
        .until_done_or_in_doubt((0..LOAD).map(|n| format!("id-{n:04}")))
        .await;
    (world, fleet)
}

/// Drains the consumers. Does not check their logs, since clients log lost connections as errors.
async fn end(world: World, fleet: Vec<ConsumerProcess>) {
    for consumer in fleet {
        consumer.stop().await;
    }
    assert_eq!(
        world.broker.left(&world.name).await,
        0,
        "not settled\n{}",
        world.story()
    );
    world.broker.remove(&world.name).await;
}

#[tokio::test]
async fn frozen_and_killed_under_load_has_no_effect_twice_at_most_once() {
    let (world, fleet) = frozen_and_killed("at-most-once").await;
    let doubted: BTreeSet<String> = world
        .in_doubt()
        .await
        .iter()
        .map(|rejected| rejected.header("id").to_owned())
        .collect();
    let effected = world.effected();
    let once: BTreeSet<String> = effected.iter().cloned().collect();
    assert_eq!(effected.len(), once.len(), "an effect happened twice");
    let starts: BTreeSet<String> = world.starts().into_iter().map(|run| run.id).collect();
    assert_eq!(
        world.starts().len(),
        starts.len(),
        "a handler was started twice"
    );
    assert_eq!(once.union(&doubted).count(), LOAD, "lost");
    assert!(
        !doubted.is_empty(),
        "nothing was taken from the frozen: the test proves nothing"
    );
    assert_eq!(world.dead_letters().await, []);
    end(world, fleet).await;
}

#[tokio::test]
async fn frozen_and_killed_under_load_loses_nothing_effectively_once() {
    let (world, fleet) = frozen_and_killed("effectively-once").await;
    let effected: BTreeSet<String> = world.effected().into_iter().collect();
    assert_eq!(effected.len(), LOAD, "lost");
    assert_eq!(
        (world.dead_letters().await, world.in_doubt().await),
        (vec![], vec![])
    );
    end(world, fleet).await;
}
