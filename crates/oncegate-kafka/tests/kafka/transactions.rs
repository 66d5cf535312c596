//! Topics with transactions.

use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_kafka::KafkaStatus;
use rdkafka::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};

use crate::fixture::*;

struct Writer(FutureProducer);

impl Writer {
    async fn new(topic: &Topic) -> Self {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &topic.brokers)
            .set("transactional.id", &topic.name);
        let producer: FutureProducer = config.create().expect("a producer");
        let ready = producer.clone();
        let begun = tokio::task::spawn_blocking(move || ready.init_transactions(BOUND));
        begun.await.expect("no panic").expect("transactions");
        Self(producer)
    }

    /// Writes these messages in a transaction that stays open.
    async fn write(&self, topic: &Topic, bodies: &[&str]) {
        self.0.begin_transaction().expect("a transaction");
        for body in bodies {
            let record = FutureRecord::<[u8], _>::to(&topic.name)
                .partition(0)
                .payload(*body);
            self.0.send(record, BOUND).await.expect("sent");
        }
    }

    async fn commit(&self) {
        let producer = self.0.clone();
        tokio::task::spawn_blocking(move || producer.commit_transaction(BOUND))
            .await
            .expect("no panic")
            .expect("committed");
    }

    async fn abort(&self) {
        let producer = self.0.clone();
        tokio::task::spawn_blocking(move || producer.abort_transaction(BOUND))
            .await
            .expect("no panic")
            .expect("aborted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_transactions_are_read_aborted_ones_are_not_and_markers_do_not_block() {
    let topic = Topic::new(1).await;
    let writer = Writer::new(&topic).await;
    let status = KafkaStatus::new();
    let mut source = topic
        .source()
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("a source");

    writer.write(&topic, &["a", "b"]).await;
    assert!(
        is_silent(&mut source, Duration::from_millis(700)).await,
        "a message of an open transaction was delivered"
    );
    writer.commit().await;
    let first = receive(&mut source, 2).await;
    assert_eq!(offsets(&first), [0, 1]);
    accept(&mut source, first).await;
    // After the marker at 2.
    topic.await_commit(0, 3).await;

    writer.write(&topic, &["never"; 4]).await;
    writer.abort().await;
    // After four messages and their marker, none of which is delivered.
    topic.await_commit(0, 8).await;

    writer.write(&topic, &["never"]).await;
    writer.abort().await;
    writer.write(&topic, &["c"]).await;
    writer.commit().await;
    writer.write(&topic, &["open"]).await;
    let last = receive(&mut source, 1).await;
    assert_eq!(
        (offsets(&last), &last[0].message.body[..]),
        (vec![10], &b"c"[..])
    );
    topic.await_commit(0, 10).await;
    accept(&mut source, last).await;
    topic.await_commit(0, 12).await;
    // Nothing above the start of an open transaction is committed: it may still be committed itself.
    assert!(is_silent(&mut source, Duration::from_millis(1_500)).await);
    assert_eq!(topic.committed(0).await, Some(12));
    writer.commit().await;
    let opened = receive(&mut source, 1).await;
    assert_eq!(offsets(&opened), [12]);
    accept(&mut source, opened).await;
    topic.await_commit(0, 14).await;
    assert_eq!(
        status.messages_expired(),
        0,
        "transaction markers were counted as expired messages"
    );
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(14));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_starts_before_an_aborted_transaction_commits_its_end() {
    let topic = Topic::new(1).await;
    let writer = Writer::new(&topic).await;
    writer.write(&topic, &["a"]).await;
    writer.commit().await;
    topic.commit(2).await;
    writer.write(&topic, &["never"; 3]).await;
    writer.abort().await;
    let status = KafkaStatus::new();
    let source = topic
        .source()
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    // After three messages and their marker, none of which is delivered.
    topic.await_commit(0, 6).await;
    let end = Instant::now() + BOUND;
    while status.partitions().first().and_then(|it| it.lag) != Some(0) {
        assert!(Instant::now() < end, "{status:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        status.messages_expired(),
        0,
        "aborted messages were counted as expired"
    );
    close(source).await;
}
