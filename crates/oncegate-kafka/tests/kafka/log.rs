//! Truncated and damaged logs.

use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Delivery, Limit, Source, SourceError};
use oncegate_kafka::{KafkaSource, TopicCreation};
use oncegate_testkit::servers::KafkaServer;
use rdkafka::message::OwnedHeaders;

use crate::fixture::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_truncated_below_the_committed_offset_commits_lower() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic.commit(50).await;
    let mut source = topic.open().await;
    let mut deliveries = receive(&mut source, 10).await;
    assert_eq!(offsets(&deliveries), (0..10).collect::<Vec<_>>());
    // Committed before anything is settled; otherwise a crash would skip the messages that fill the
    // log up to 50.
    topic.await_reset(0, 0).await;
    accept(&mut source, deliveries.drain(..4)).await;
    topic.await_commit(0, 4).await;
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 10).await;
    topic.send_numbers(0, 50).await;
    let next = receive(&mut source, 50).await;
    assert_eq!(offsets(&next), (10..60).collect::<Vec<_>>());
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_recreated_while_it_is_read_commits_lower() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 50).await;
    let mut source = topic
        .source()
        .property("topic.metadata.refresh.interval.ms", "500")
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let all = receive(&mut source, 50).await;
    accept(&mut source, all).await;
    topic.await_commit(0, 50).await;
    topic.recreate().await;
    topic.send_numbers(0, 10).await;
    let mut again = receive(&mut source, 10).await;
    assert_eq!(offsets(&again), (0..10).collect::<Vec<_>>());
    accept(&mut source, again.drain(..4)).await;
    topic.await_reset(0, 4).await;
    // Longer than librdkafka waits before it commits stored offsets.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(topic.committed(0).await, Some(4));
    accept(&mut source, again).await;
    settle_until(&mut source, &topic, &mut BTreeMap::new(), |_| true, 10).await;
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(10));
}

/// Two topics on one broker, which is stopped once.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_is_truncated_while_it_is_read_commits_lower_and_skips_nothing_unsettled() {
    // Printed if the test fails, which may depend on what happens while the broker restarts.
    let _ = tracing_subscriber::fmt().with_test_writer().try_init();
    let mut server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker");
    let emptied = Topic::at(server.brokers(), 1).await;
    emptied.send_numbers(0, 50).await;
    let mut emptied_source = open(&emptied).await;
    let all = receive(&mut emptied_source, 50).await;
    accept(&mut emptied_source, all).await;
    emptied.await_commit(0, 50).await;
    let truncated = TruncatedTopic::of(server.brokers()).await;
    let mut truncated_source = open(&truncated.topic).await;
    let held = truncated.settle_some(&mut truncated_source).await;

    let log = |topic: &Topic| {
        server
            .directory()
            .join("data")
            .join(format!("{}-0", topic.name))
    };
    let (emptied_log, truncated_log) = (log(&emptied), log(&truncated.topic));
    let again = tokio::task::spawn_blocking(move || {
        server.stop();
        truncate_log(&emptied_log, 0);
        truncate_log(&truncated_log, TruncatedTopic::TRUNCATED_AT);
        server.start_again().expect("the broker again");
        server
    });
    let server = again.await.expect("the broker again");
    emptied.send_numbers(0, 10).await;
    truncated.topic.send_numbers(0, TruncatedTopic::NEW).await;

    let mut again = receive_offsets(&mut emptied_source, 0..10).await;
    settle_until(&mut emptied_source, &emptied, &mut again, |_| false, 0).await;
    let mut received_again = truncated.receive_again(&mut truncated_source).await;
    // Deliveries from before the truncation: their settlements are stale.
    accept(&mut truncated_source, held).await;
    settle_until(
        &mut truncated_source,
        &truncated.topic,
        &mut received_again,
        |offset| offset != TruncatedTopic::UNSETTLED,
        TruncatedTopic::UNSETTLED,
    )
    .await;
    // Longer than librdkafka waits before it commits stored offsets.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        (
            emptied.committed(0).await,
            truncated.topic.committed(0).await
        ),
        (Some(0), Some(TruncatedTopic::UNSETTLED))
    );
    settle_until(
        &mut emptied_source,
        &emptied,
        &mut again,
        |offset| offset < 4,
        4,
    )
    .await;
    close(emptied_source).await;
    assert_eq!(emptied.committed(0).await, Some(4));
    settle_until(
        &mut truncated_source,
        &truncated.topic,
        &mut received_again,
        |_| true,
        TruncatedTopic::TRUNCATED_AT + TruncatedTopic::NEW as i64,
    )
    .await;
    close(truncated_source).await;
    drop(server);
}

async fn open(topic: &Topic) -> KafkaSource {
    for name in [topic.dead_letters(), topic.in_doubt()] {
        topic.create(&name, 1, &UNLIMITED_RETENTION).await;
    }
    let source = topic.source_with_short_session();
    let source = source.connect(ConnectOptions::default()).await;
    source.expect("a source")
}

/// A topic whose log is truncated: some messages are settled below and above the truncation, one
/// never is, and the rest is in flight.
struct TruncatedTopic {
    topic: Topic,
}

impl TruncatedTopic {
    const ALL: i64 = 20;
    const UNSETTLED: i64 = 5;
    const TRUNCATED_AT: i64 = 12;
    /// Fewer than were truncated, so that the log remains shorter than the read position.
    const NEW: usize = 4;

    async fn of(brokers: String) -> Self {
        let topic = Topic::at(brokers, 1).await;
        for number in 0..Self::ALL {
            // Sent one by one, so that each is its own batch, after which the log can be truncated.
            topic
                .send(
                    None,
                    Some(number.to_string().as_bytes()),
                    OwnedHeaders::new(),
                )
                .await;
        }
        Self { topic }
    }

    /// Settles some messages, and returns the deliveries in flight.
    async fn settle_some(&self, source: &mut KafkaSource) -> Vec<Delivery> {
        let all = receive(source, Self::ALL as usize).await;
        let mut held = Vec::new();
        for delivery in all {
            match offset(&delivery) {
                0..5 | 8 | 15 => accept(source, [delivery]).await,
                Self::UNSETTLED => drop(delivery),
                _ => held.push(delivery),
            }
        }
        self.topic.await_commit(0, Self::UNSETTLED).await;
        held
    }

    /// Receives all unsettled messages that are left and the new ones; and settled ones, if
    /// librdkafka seeks to the beginning.
    async fn receive_again(&self, source: &mut KafkaSource) -> BTreeMap<i64, Delivery> {
        let received = receive_offsets(
            source,
            Self::UNSETTLED..Self::TRUNCATED_AT + Self::NEW as i64,
        )
        .await;
        for (offset, delivery) in &received {
            let number = if *offset < Self::TRUNCATED_AT {
                *offset
            } else {
                offset - Self::TRUNCATED_AT
            };
            assert_eq!(delivery.message.body, number.to_string(), "at {offset}");
        }
        received
    }
}

/// Receives until all of these offsets have arrived; of a redelivered one the later delivery
/// counts.
async fn receive_offsets(source: &mut KafkaSource, offsets: Range<i64>) -> BTreeMap<i64, Delivery> {
    let mut found = BTreeMap::new();
    while !offsets.clone().all(|offset| found.contains_key(&offset)) {
        found.extend(
            receive(source, 1)
                .await
                .into_iter()
                .map(|it| (offset(&it), it)),
        );
    }
    found
}

/// Removes all messages from this offset on from the directory of a partition. A batch must start
/// at the offset.
fn truncate_log(log: &Path, offset: i64) {
    for file in std::fs::read_dir(log).expect("a log") {
        let path = file.expect("a file").path();
        match path.extension().and_then(|it| it.to_str()) {
            Some("log") => {
                let bytes = std::fs::read(&path).expect("a segment");
                std::fs::write(&path, &bytes[..batch_position(&bytes, offset)])
                    .expect("the segment is truncated");
            }
            Some("index" | "timeindex" | "snapshot") => {
                std::fs::remove_file(path).expect("removed")
            }
            _ => {}
        }
    }
}

/// The position of the batch in a segment that starts at this offset. Each batch starts with its
/// offset, and the length of what follows these twelve bytes.
fn batch_position(segment: &[u8], offset: i64) -> usize {
    let mut at = 0;
    loop {
        let head = segment
            .get(at..at + 12)
            .expect("a batch starts at the offset");
        if i64::from_be_bytes(head[..8].try_into().expect("8 bytes")) == offset {
            return at;
        }
        at += 12 + u32::from_be_bytes(head[8..].try_into().expect("4 bytes")) as usize;
    }
}

/// Receives and accepts until the source fails.
async fn accept_until_failure(source: &mut KafkaSource) -> (Vec<i64>, SourceError) {
    let mut seen = Vec::new();
    let failed = tokio::time::timeout(BOUND, async {
        loop {
            let mut incoming = Vec::new();
            if let Err(error) = source.receive(Limit::new(50, 1 << 20), &mut incoming).await {
                return error;
            }
            let deliveries: Vec<Delivery> = incoming.into_iter().filter_map(delivery).collect();
            seen.extend(offsets(&deliveries));
            accept(source, deliveries).await;
        }
    });
    let error = failed.await.expect("an error in time");
    (seen, error)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_batch_ends_the_source_and_is_never_skipped() {
    let server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker");
    let topic = Topic::at(server.brokers(), 1).await;
    for body in ["first", "second", "to-be-damaged", "fourth"] {
        topic
            .send(None, Some(body.as_bytes()), OwnedHeaders::new())
            .await;
    }
    damage(
        &server
            .directory()
            .join("data")
            .join(format!("{}-0/00000000000000000000.log", topic.name)),
        b"to-be-damaged",
    );
    let open = async || {
        let kafka = topic.source().create_topics(TopicCreation::Create {
            partitions: 1,
            replication: 1,
        });
        kafka
            .property("check.crcs", "true")
            .connect(ConnectOptions::default())
            .await
            .expect("a source")
    };
    for _ in 0..2 {
        let mut source = open().await;
        let (seen, error) = accept_until_failure(&mut source).await;
        assert!(seen.iter().all(|offset| *offset < 2), "{seen:?}");
        let text = error.to_string();
        assert!(
            text.contains(&format!("{}/0", topic.name)) && text.contains("offset 2"),
            "{text}"
        );
        // What was read before the damage is still handed out, and nothing after it.
        let mut incoming = Vec::new();
        let limit = Limit::new(50, 1 << 20);
        while tokio::time::timeout(
            Duration::from_millis(500),
            source.receive(limit, &mut incoming),
        )
        .await
        .is_ok()
        {
            let deliveries: Vec<Delivery> = incoming.drain(..).filter_map(delivery).collect();
            assert!(deliveries.iter().all(|it| offset(it) < 2), "{deliveries:?}");
            accept(&mut source, deliveries).await;
        }
        close(source).await;
        assert!(
            topic
                .committed(0)
                .await
                .is_none_or(|committed| committed <= 2),
            "an offset above the damaged message was committed"
        );
    }
}

/// Overwrites these bytes in a file.
fn damage(file: &Path, bytes_to_damage: &[u8]) {
    let bytes = std::fs::read(file).expect("a log");
    let at = bytes
        .windows(bytes_to_damage.len())
        .position(|it| it == bytes_to_damage)
        .expect("the message");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .open(file)
        .expect("a log");
    file.seek(SeekFrom::Start(at as u64))
        .expect("the file is long enough");
    file.write_all(&vec![b'#'; bytes_to_damage.len()])
        .expect("damaged");
}
