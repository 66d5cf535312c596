//! A broker that is killed and restarted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Delivery, Limit, Source};
use oncegate_kafka::TopicCreation;
use oncegate_testkit::servers::KafkaServer;

use crate::fixture::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_source_recovers_from_an_outage_and_closes_during_one() {
    let mut server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker");
    let topic = Topic::at(server.brokers(), 1).await;
    topic.send_numbers(0, 20).await;
    let kafka = topic.source().create_topics(TopicCreation::Create {
        partitions: 1,
        replication: 1,
    });
    let mut source = kafka
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut deliveries = receive(&mut source, 20).await;
    accept(&mut source, deliveries.drain(..5)).await;
    topic.await_commit(0, 5).await;

    server.kill();
    // Settled during the outage: committed later, or redelivered.
    accept(&mut source, deliveries.drain(..5)).await;
    assert!(is_silent(&mut source, Duration::from_secs(2)).await);
    let again = tokio::task::spawn_blocking(move || {
        server.start_again().expect("the broker starts again");
        server
    });
    let mut server = again.await.expect("the broker starts again");
    accept(&mut source, deliveries).await;
    topic.send_numbers(0, 5).await;
    let mut seen = BTreeSet::new();
    let recovered = tokio::time::timeout(BOUND, async {
        while !(20..25).all(|offset| seen.contains(&offset)) {
            let mut incoming = Vec::new();
            source
                .receive(Limit::new(50, 1 << 20), &mut incoming)
                .await
                .expect("no error");
            let deliveries: Vec<Delivery> = incoming.into_iter().filter_map(delivery).collect();
            seen.extend(offsets(&deliveries));
            accept(&mut source, deliveries).await;
        }
    });
    assert!(recovered.await.is_ok(), "only {seen:?} were delivered");
    // If the client was replaced meanwhile, messages that were accepted before are received again.
    settle_until(&mut source, &topic, &mut BTreeMap::new(), |_| true, 25).await;

    server.kill();
    let started = Instant::now();
    // `close` returns in time, whether the group was left or not.
    let _ = Box::new(source)
        .close(started + Duration::from_secs(2))
        .await;
    assert!(started.elapsed() < Duration::from_secs(3));
}
