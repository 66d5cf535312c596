//! The status of a source, and the replacement of stalled clients.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Delivery, Limit, Source};
use oncegate_kafka::{BlockedBy, KafkaStatus, PartitionStatus};

use crate::fixture::*;

/// Waits until the status of the only partition matches.
async fn wait_for_status(
    status: &KafkaStatus,
    what: &str,
    condition: impl Fn(&PartitionStatus) -> bool,
) -> PartitionStatus {
    let end = Instant::now() + BOUND;
    loop {
        let partitions = status.partitions();
        match &partitions[..] {
            [one] if condition(one) => return one.clone(),
            _ => assert!(Instant::now() < end, "{what}: {partitions:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_shows_the_blocker_with_its_offset_and_age() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 5).await;
    let status = KafkaStatus::new();
    assert_eq!(status.partitions(), []);
    let mut source = topic
        .source()
        .status(status.clone())
        .stalled_after(Duration::from_secs(4))
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let partition = wait_for_status(&status, "it was read", |it| {
        it.lag == Some(5) && it.blocker.is_some()
    })
    .await;
    assert_eq!(
        (
            &*partition.topic,
            partition.partition,
            partition.committable,
            partition.log_end
        ),
        (&*topic.name, 0, Some(0), Some(5))
    );
    assert_eq!(
        partition.blocker.map(|it| (it.offset, it.blocked_by)),
        Some((0, BlockedBy::Queue))
    );

    let mut deliveries = receive(&mut source, 5).await;
    let third = deliveries.remove(2);
    accept(&mut source, deliveries).await;
    let held = |it: &PartitionStatus| {
        it.blocker.is_some_and(|lowest| {
            lowest.offset == 2 && lowest.blocked_for >= Duration::from_secs(1)
        })
    };
    let partition = wait_for_status(&status, "the third message blocks it", held).await;
    assert_eq!((partition.committable, partition.handed_out), (Some(2), 1));
    assert_eq!(
        partition.blocker.map(|it| it.blocked_by),
        Some(BlockedBy::Consumer)
    );
    assert!(
        partition.to_string().contains("/0: committable 2, ")
            && partition.to_string().contains("blocked by 2 for "),
        "{partition}"
    );

    accept(&mut source, [third]).await;
    close(source).await;
    assert_eq!(
        (status.partitions(), status.clients_replaced()),
        (vec![], 0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stalls_is_replaced_and_nothing_is_lost() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 5).await;
    let status = KafkaStatus::new();
    // Once a message is not received, this client fetches no other one for five minutes. A replacement
    // client fetches when it starts.
    let stalling = [
        ("queued.min.messages", "1"),
        ("fetch.queue.backoff.ms", "300000"),
    ];
    let kafka = stalling.iter().fold(topic.source(), |kafka, (key, value)| {
        kafka.property(*key, *value)
    });
    let mut source = kafka
        .status(status.clone())
        .stalled_after(Duration::from_secs(2))
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let (mut seen, mut sent, mut goal, end) =
        (BTreeSet::new(), 5, None, Instant::now() + BOUND * 2);
    while goal.is_none_or(|goal| (0..goal).any(|offset| !seen.contains(&offset))) {
        assert!(
            Instant::now() < end,
            "{} of {goal:?}, replaced {} times",
            seen.len(),
            status.clients_replaced()
        );
        // A stall is detected only while the log grows.
        topic.send_numbers(0, 1).await;
        sent += 1;
        if status.clients_replaced() > 0 {
            goal.get_or_insert(sent);
        }
        let mut incoming = Vec::new();
        let receiving = source.receive(Limit::new(10, 1 << 20), &mut incoming);
        if let Ok(received) = tokio::time::timeout(Duration::from_millis(200), receiving).await {
            received.expect("deliveries");
        }
        let deliveries: Vec<Delivery> = incoming.into_iter().filter_map(delivery).collect();
        seen.extend(offsets(&deliveries));
        accept(&mut source, deliveries).await;
    }
    close(source).await;
}

/// Messages of one partition wait in librdkafka's queue behind those of another, and are not fetched
/// while that queue is full. They are delivered late, and the client is not replaced.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_behind_the_backlog_of_another_is_not_stalled() {
    const BACKLOG: usize = 15_000;
    let topic = Topic::new(2).await;
    topic.send_numbers(0, BACKLOG).await;
    let status = KafkaStatus::new();
    let kafka = topic
        .source()
        .status(status.clone())
        .stalled_after(Duration::from_secs(1));
    let mut source = kafka
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut seen = receive(&mut source, 1).await.len();
    let (mut sent_late, started) = (0, Instant::now());
    while started.elapsed() < Duration::from_secs(4) {
        topic.send_numbers(1, 1).await;
        sent_late += 1;
        let deliveries = receive(&mut source, 10).await;
        seen += deliveries.len();
        accept(&mut source, deliveries).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(status.clients_replaced(), 0);
    receive(&mut source, BACKLOG + sent_late - seen).await;
    assert_eq!(status.clients_replaced(), 0);
    close(source).await;
}
