//! Where librdkafka continues after a rebalance if a fetch failed before it. Uses librdkafka's mock
//! cluster, which fails on request.

use std::sync::mpsc;
use std::time::Duration;

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Incoming, Limit, Source};
use oncegate_kafka::{Kafka, KafkaSource};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use crate::fixture::*;

const PARTITIONS: i32 = 3;

/// librdkafka counts an error that it returns as a message at its offset. A rebalance pauses the
/// remaining partitions and resumes them after the counted error, one message too far.
#[tokio::test(flavor = "multi_thread")]
async fn a_rebalance_after_a_fetch_that_failed_skips_nothing() {
    let cluster = MockCluster::new(1).expect("a broker");
    for (name, partitions) in [("t", PARTITIONS), ("t.dead-letters", 1), ("t.in-doubt", 1)] {
        cluster.create_topic(name, partitions, 1).expect("a topic");
    }
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", cluster.bootstrap_servers())
        .create()
        .expect("a producer");
    let send = async |partition: i32| {
        producer
            .send(
                FutureRecord::<[u8], _>::to("t")
                    .partition(partition)
                    .payload("x"),
                BOUND,
            )
            .await
            .expect("sent");
    };
    // The coordinator waits for a joining member as long as the session timeout, less a second.
    let quick = [
        ("session.timeout.ms", "3000"),
        ("heartbeat.interval.ms", "500"),
    ];
    let kafka = Kafka::topic("t")
        .brokers(cluster.bootstrap_servers())
        .group("g");
    let kafka = quick
        .iter()
        .fold(kafka, |kafka, (key, value)| kafka.property(*key, *value));
    // No message of partition 2 is read before the failed fetch.
    send(0).await;
    send(1).await;
    let mut source = kafka
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut held = receive(&mut source, 2).await;

    cluster.request_errors(
        RDKafkaApiKey::Fetch,
        &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN],
    );
    // One fetch requests all partitions: when the next message of one has arrived, so have the
    // errors of the others.
    send(0).await;
    held.extend(receive(&mut source, 1).await);

    let mut other = ClientConfig::new();
    other
        .set("bootstrap.servers", cluster.bootstrap_servers())
        .set("group.id", "g");
    other.set("partition.assignment.strategy", "cooperative-sticky");
    for (key, value) in quick {
        other.set(key, value);
    }
    let other: BaseConsumer = other.create().expect("a consumer");
    other.subscribe(&["t"]).expect("a member");
    let (leave, left) = mpsc::channel::<()>();
    let other = tokio::task::spawn_blocking(move || {
        while left.try_recv() == Err(mpsc::TryRecvError::Empty) {
            let _ = other.poll(Duration::from_millis(50));
        }
    });
    // The held deliveries delay the rebalance and keep the remaining partitions paused.
    let epoch = revoked(&mut source).await;
    // The revoked partition, usually the first one, delivers nothing more to this member.
    let revoked_one = held
        .iter()
        .find(|it| it.receipt.epoch == epoch)
        .map_or(2, |it| it.receipt.partition);
    send(1).await;
    send(2).await;
    accept(&mut source, held).await;
    let expected: Vec<_> = [(1, 1), (2, 0)]
        .into_iter()
        .filter(|(partition, _)| *partition != revoked_one)
        .collect();
    let mut next: Vec<_> = receive(&mut source, expected.len())
        .await
        .iter()
        .map(|it| (it.receipt.partition, offset(it)))
        .collect();
    next.sort_unstable();
    assert_eq!(next, expected);
    leave.send(()).expect("a member");
    other.await.expect("left");
    close(source).await;
}

async fn revoked(source: &mut KafkaSource) -> u64 {
    let revoked = tokio::time::timeout(BOUND, async {
        loop {
            let mut incoming = Vec::new();
            source
                .receive(Limit::NOTHING, &mut incoming)
                .await
                .expect("a revocation or a wake-up");
            if let Some(Incoming::Revoked(epoch)) = incoming.pop() {
                return epoch;
            }
        }
    });
    revoked.await.expect("a revocation")
}
