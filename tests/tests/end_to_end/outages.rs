//! Redis goes away and comes back.

use std::time::Duration;

use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use crate::broker::{Broker, Sent};
use crate::on_both_brokers;
use crate::world::World;

on_both_brokers!(redis_stopped_and_started_again_loses_and_doubles_nothing);

async fn redis_stopped_and_started_again_loses_and_doubles_nothing(broker: Broker) {
    const COUNT: usize = 400;
    let mut redis = RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite)).expect("Redis starts");
    for guarantee in ["at-most-once", "effectively-once"] {
        let world = World::with_redis(broker, redis.url()).await;
        let ids: Vec<String> = (0..COUNT).map(|n| format!("id-{n:03}")).collect();
        let (before, meanwhile) = ids.split_at(COUNT / 2);
        world.publish(before.iter().map(|id| Sent::slow(id, 20))).await;
        let consumer = world.consumer(guarantee).with("in-flight", 8).start();
        world.until_effects(40).await;

        redis.stop();
        let held = world.effects().len();
        assert!(held < COUNT / 2, "Redis was stopped too late");
        world.publish(meanwhile.iter().map(|id| Sent::slow(id, 20))).await;
        // Longer than a lease, so that whatever was held is over.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert!(world.effects().len() <= held + 8, "it went on without its store");
        redis.start_again().expect("Redis starts again");

        world.until_settled(COUNT).await;
        assert_eq!(world.effected(), ids, "{guarantee}");
        assert_eq!((world.dead_letters().await, world.in_doubt().await), (vec![], vec![]), "{guarantee}");
        world.end([consumer]).await;
    }
}
