//! Consumers that are killed or receive SIGTERM.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::broker::{Broker, Sent};
use crate::on_both_brokers;
use crate::process::ConsumerProcess;
use crate::world::World;

on_both_brokers!(
    killed_in_a_handler_is_in_doubt_at_most_once,
    killed_in_a_handler_runs_again_effectively_once,
    killed_in_a_handler_is_lost_bare,
    killed_under_load_has_no_effect_twice_at_most_once,
    killed_under_load_loses_nothing_effectively_once,
    joining_and_leaving_consumers_cause_no_second_effect,
    sigterm_under_load_finishes_running_handlers_and_loses_nothing,
    sigterm_does_not_wait_for_a_handler_that_never_returns,
);

/// Kills a consumer during a handler, and starts another one that settles the message.
async fn killed(broker: Broker, guarantee: &str) -> World {
    let world = World::new(broker).await;
    world.publish([Sent::new("done", "work")]).await;
    let doomed = world.consumer(guarantee).start();
    world.until_settled(1).await;
    world.publish([Sent::new("a", "hang")]).await;
    world.until_starts(2).await;
    doomed.kill();
    world
}

async fn killed_in_a_handler_is_in_doubt_at_most_once(broker: Broker) {
    let world = killed(broker, "at-most-once").await;
    let second = world.consumer("at-most-once").start();
    world
        .until("it is in doubt", async || world.in_doubt().await.len() == 1)
        .await;
    let rejected = world.in_doubt().await.remove(0);
    assert_eq!(
        (rejected.reason(), rejected.header("oncegate-id")),
        ("in-doubt-interrupted", "a")
    );
    assert_eq!(rejected.body, r#"{"do":"hang"}"#);
    assert_eq!(
        (world.attempts("a"), world.effected()),
        (vec![1], vec!["done".to_owned()])
    );
    assert!(
        world
            .marker("a")
            .await
            .is_some_and(|marker| marker.starts_with("v1 "))
    );
    assert!(world.is_done("done").await);
    world.end([second]).await;
}

async fn killed_in_a_handler_runs_again_effectively_once(broker: Broker) {
    let world = killed(broker, "effectively-once").await;
    let second = world.consumer("effectively-once").start();
    world.until_effects(2).await;
    world
        .until("it is marked as done", async || {
            world.marker("a").await.as_deref() == Some("1")
        })
        .await;
    assert_eq!(
        (world.attempts("a"), world.attempts("done")),
        (vec![1, 2], vec![1])
    );
    assert_eq!(world.effected(), ["a", "done"]);
    world.end([second]).await;
}

/// `bare` loses a message: the marker of the interrupted attempt counts it as handled.
async fn killed_in_a_handler_is_lost_bare(broker: Broker) {
    let world = killed(broker, "bare").await;
    let second = world.consumer("bare").start();
    world.until_settled(2).await;
    assert_eq!(
        (world.attempts("a"), world.effected()),
        (vec![1], vec!["done".to_owned()])
    );
    assert_eq!(world.marker("a").await.as_deref(), Some("1"));
    world.end([second]).await;
}

/// Kills a consumer that holds messages, while a second one with this prefetch runs, which gets them at
/// once or after the session timeout. All run again within two leases.
async fn what_was_held_runs_again(broker: Broker, prefetch: u32) {
    const LEASE: Duration = Duration::from_secs(12); // longer than the consumer waits itself
    const HELD: usize = 40;
    let world = World::new(broker).await;
    let consumer = || {
        let consumer = world.consumer("effectively-once");
        consumer.with("lease-ms", LEASE.as_millis().to_string())
    };
    let doomed = consumer().start();
    world
        .publish((0..HELD).map(|n| Sent::new(load(n), "hang")))
        .await;
    world.until_starts(HELD).await;
    let second = consumer().with("prefetch", prefetch).start();
    doomed.kill();
    let killed = Instant::now();
    world.until_effects(HELD).await;
    let took = killed.elapsed();
    // One second for the start of a process and the handlers.
    assert!(took < 2 * LEASE + Duration::from_secs(1), "{took:?}");
    let attempts = (0..HELD).map(|n| world.attempts(&load(n)));
    assert!(attempts.into_iter().all(|attempts| attempts == [1, 2]));
    world.end([second]).await;
}

/// The delays of the delay queues must not postpone a message beyond the lease of its dead holder.
#[tokio::test(flavor = "multi_thread")]
async fn on_rabbitmq_what_a_killed_consumer_held_runs_again_within_two_leases() {
    what_was_held_runs_again(Broker::RabbitMq, 64).await;
}

/// With more than half of the prefetch waiting for a lease, messages wait in delay queues.
#[tokio::test(flavor = "multi_thread")]
async fn on_rabbitmq_with_a_small_prefetch_it_also_runs_again_within_two_leases() {
    what_was_held_runs_again(Broker::RabbitMq, 8).await;
}

/// The session timeout of the group is shorter than the lease.
#[tokio::test(flavor = "multi_thread")]
async fn on_kafka_what_a_killed_consumer_held_runs_again_within_two_leases() {
    what_was_held_runs_again(Broker::Kafka, 64).await;
}

const LOAD: usize = 300;

/// Kills several consumers one after the other during many handlers; a last one settles the rest.
async fn killed_under_load(broker: Broker, guarantee: &str) -> (World, ConsumerProcess) {
    let world = World::new(broker).await;
    // Of different lengths, so that some handler always runs.
    world
        .publish((0..LOAD).map(|n| Sent::slow(load(n), [20, 35, 50, 65, 90][n % 5])))
        .await;
    for effects in [LOAD / 4, LOAD / 2] {
        let doomed = world.consumer(guarantee).with("in-flight", 16).start();
        world.until_effects(effects).await;
        doomed.kill();
    }
    assert!(
        world.effects().len() < LOAD,
        "it ended before it was killed"
    );
    let last = world.consumer(guarantee).with("in-flight", 16).start();
    world.until_done_or_in_doubt((0..LOAD).map(load)).await;
    (world, last)
}

fn load(n: usize) -> String {
    format!("id-{n:03}")
}

async fn killed_under_load_has_no_effect_twice_at_most_once(broker: Broker) {
    let (world, last) = killed_under_load(broker, "at-most-once").await;
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
    // An id whose consumer was killed between effect and completion has an effect and is in doubt;
    // one killed between claim and start is only in doubt.
    assert_eq!(once.union(&doubted).count(), LOAD);
    assert!(
        !doubted.is_empty() && doubted.len() <= 2 * 16,
        "{doubted:?}"
    );
    assert_eq!(world.dead_letters().await, []);
    world.end([last]).await;
}

async fn killed_under_load_loses_nothing_effectively_once(broker: Broker) {
    let (world, last) = killed_under_load(broker, "effectively-once").await;
    let effected: BTreeSet<String> = world.effected().into_iter().collect();
    assert_eq!(effected.len(), LOAD);
    for n in 0..LOAD {
        let attempts = world.attempts(&load(n));
        assert!(
            attempts.is_sorted_by(|one, next| one < next),
            "{}: {attempts:?}",
            load(n)
        );
    }
    assert!(world.starts().len() > LOAD, "nothing was run again");
    assert_eq!(
        (world.dead_letters().await, world.in_doubt().await),
        (vec![], vec![])
    );
    world.end([last]).await;
}

async fn joining_and_leaving_consumers_cause_no_second_effect(broker: Broker) {
    let world = World::new(broker).await;
    let consumer = || {
        world
            .consumer("at-most-once")
            .with("in-flight", 4)
            .with("prefetch", 8)
            .start()
    };
    let first = consumer();
    world
        .publish((0..LOAD).map(|n| Sent::slow(load(n), 60)))
        .await;
    world.until_effects(20).await;
    let second = consumer();
    world.until_effects(100).await;
    first.stop().await;
    let third = consumer();
    world.until_done_or_in_doubt((0..LOAD).map(load)).await;
    let ids: Vec<String> = (0..LOAD).map(load).collect();
    assert_eq!(world.effected(), ids);
    assert_eq!(
        (world.dead_letters().await, world.in_doubt().await),
        (vec![], vec![])
    );
    world.end([second, third]).await;
}

async fn sigterm_under_load_finishes_running_handlers_and_loses_nothing(broker: Broker) {
    const COUNT: usize = 400;
    let world = World::new(broker).await;
    world
        .publish((0..COUNT).map(|n| Sent::slow(format!("id-{n:03}"), 100)))
        .await;
    let first = world.consumer("at-most-once").with("in-flight", 8).start();
    world.until_effects(40).await;
    let (status, took) = first.terminate(Duration::from_secs(15)).await;
    assert!(status.success(), "{status}\n{}", world.story());
    assert!(took < Duration::from_secs(10), "the drain took {took:?}");
    let (started, ended) = (world.starts().len(), world.effects().len());
    assert_eq!(started, ended, "what had started was not finished");
    assert!(ended < COUNT, "it ended before SIGTERM");

    let second = world.consumer("at-most-once").start();
    world.until_effects(COUNT).await;
    world.until_settled(COUNT).await;
    let ids: Vec<String> = (0..COUNT).map(|n| format!("id-{n:03}")).collect();
    assert_eq!(world.effected(), ids);
    assert_eq!(
        (world.dead_letters().await, world.in_doubt().await),
        (vec![], vec![])
    );
    world.end([second]).await;
}

async fn sigterm_does_not_wait_for_a_handler_that_never_returns(broker: Broker) {
    let world = World::new(broker).await;
    world.publish([Sent::new("a", "hang")]).await;
    let first = world
        .consumer("effectively-once")
        .with("drain-ms", 1_000)
        .start();
    world.until_starts(1).await;
    let (status, took) = first.terminate(Duration::from_secs(15)).await;
    assert!(status.success(), "{status}\n{}", world.story());
    assert!(took < Duration::from_secs(6), "the drain took {took:?}");

    let second = world.consumer("effectively-once").start();
    world.until_settled(1).await;
    assert_eq!(
        (world.attempts("a"), world.effected()),
        (vec![1, 2], vec!["a".to_owned()])
    );
    world.end([second]).await;
}
