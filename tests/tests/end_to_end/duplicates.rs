//! The same id more than once.

use crate::broker::{Broker, Sent};
use crate::on_both_brokers;
use crate::world::World;

on_both_brokers!(one_after_the_other, at_the_same_time);

async fn one_after_the_other(broker: Broker) {
    let world = World::new(broker).await;
    let consumer = world.consumer("effectively-once").start();
    world.publish([Sent::new("a", "work")]).await;
    world.until_settled(1).await;
    world.publish([Sent::new("a", "work"), Sent::new("a", "work"), Sent::new("b", "work"), Sent::new("a", "work")]).await;
    world.until_settled(5).await;
    assert_eq!(world.effected(), ["a", "b"]);
    assert_eq!(world.starts().len(), 2);
    assert_eq!(world.marker("a").await.as_deref(), Some("1"));
    world.end([consumer]).await;
}

/// Two consumers and, on Kafka, three partitions: six copies of each message are handed over while the first is handled.
async fn at_the_same_time(broker: Broker) {
    const IDS: usize = 10;
    const COPIES: usize = 6;
    let world = World::new(broker).await;
    let copies = (0..IDS * COPIES).map(|n| Sent::slow(format!("id-{:02}", n % IDS), 300));
    world.publish(copies).await;
    let consumers = [world.consumer("at-most-once").start(), world.consumer("at-most-once").start()];
    world.until_settled(IDS * COPIES).await;
    let ids: Vec<String> = (0..IDS).map(|n| format!("id-{n:02}")).collect();
    assert_eq!(world.effected(), ids);
    assert_eq!(world.starts().len(), IDS);
    assert!(world.counted("busy") > 0, "no copy came while another was handled");
    let marker = world.marker("id-00").await.expect("a marker");
    assert!(marker.len() == 19 && marker.starts_with('1') && marker.bytes().all(|byte| byte.is_ascii_digit()), "{marker}");
    world.end(consumers).await;
}
