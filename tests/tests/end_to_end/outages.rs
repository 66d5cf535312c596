//! Outages of Redis.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use crate::broker::{Broker, Sent};
use crate::on_both_brokers;
use crate::world::World;

on_both_brokers!(
    a_redis_restart_loses_and_doubles_nothing,
    sigterm_while_redis_is_unavailable_ends_in_time
);

async fn a_redis_restart_loses_and_doubles_nothing(broker: Broker) {
    const COUNT: usize = 400;
    let mut redis =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("Redis starts");
    for guarantee in ["at-most-once", "effectively-once"] {
        let world = World::with_redis(broker, redis.url()).await;
        let ids: Vec<String> = (0..COUNT).map(|n| format!("id-{n:03}")).collect();
        // Enough that most are not handled when Redis stops, also on a slow machine.
        let (before, meanwhile) = ids.split_at(COUNT * 3 / 4);
        world
            .publish(before.iter().map(|id| Sent::slow(id, 50)))
            .await;
        let consumer = world.consumer(guarantee).with("in-flight", 8).start();
        world.until_effects(40).await;

        redis.stop();
        let held = world.effects().len();
        assert!(held < before.len(), "Redis was stopped too late");
        world
            .publish(meanwhile.iter().map(|id| Sent::slow(id, 50)))
            .await;
        // Longer than a lease, so that all leases expire.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert!(
            world.effects().len() <= held + 8,
            "it went on without its store"
        );
        redis.start_again().expect("Redis starts again");

        world.until_settled(COUNT).await;
        assert_eq!(world.effected(), ids, "{guarantee}");
        assert_eq!(
            (world.dead_letters().await, world.in_doubt().await),
            (vec![], vec![]),
            "{guarantee}"
        );
        world.end([consumer]).await;
    }
}

/// An effect that could not be recorded is in doubt for the next consumer.
async fn sigterm_while_redis_is_unavailable_ends_in_time(broker: Broker) {
    const COUNT: usize = 40;
    let mut redis =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("Redis starts");
    let world = World::with_redis(broker, redis.url()).await;
    let ids: BTreeSet<String> = (0..COUNT).map(|n| format!("id-{n:03}")).collect();
    world
        .publish(ids.iter().map(|id| Sent::slow(id, 300)))
        .await;
    let first = world
        .consumer("at-most-once")
        .with("in-flight", 8)
        .with("drain-ms", 1_500)
        .start();
    world.until_effects(8).await;
    world
        .until("more has started", async || {
            world.starts().len() > world.effects().len()
        })
        .await;
    redis.stop();
    let (status, took) = first.terminate(Duration::from_secs(15)).await;
    assert!(status.success(), "{status}\n{}", world.story());
    assert!(took < Duration::from_secs(8), "the drain took {took:?}");
    redis.start_again().expect("Redis starts again");

    let second = world.consumer("at-most-once").start();
    world.until_done_or_in_doubt(ids.clone()).await;
    let doubted = world
        .in_doubt()
        .await
        .into_iter()
        .map(|rejected| rejected.header("id").to_owned());
    assert_eq!(
        world
            .effected()
            .into_iter()
            .chain(doubted)
            .collect::<BTreeSet<String>>(),
        ids
    );
    let effected = world.effected();
    assert_eq!(
        effected.len(),
        effected.iter().collect::<BTreeSet<_>>().len(),
        "an effect happened twice"
    );
    let starts: BTreeSet<String> = world.starts().into_iter().map(|run| run.id).collect();
    assert_eq!(
        world.starts().len(),
        starts.len(),
        "a handler was started twice"
    );
    world.end([second]).await;
}
