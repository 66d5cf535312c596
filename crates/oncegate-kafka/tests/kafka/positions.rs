//! Where a group starts or continues after a change of its topic: expired messages, a truncated log,
//! an added partition, or a recreated topic.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Incoming, Limit, Source, SourceError};
use oncegate_kafka::{KafkaSource, KafkaStatus, OutOfRange, StartAt};

use crate::fixture::*;

/// The setting and the text of the error that a source ends with, before it delivers anything.
async fn error_before_any_delivery(source: &mut KafkaSource) -> (String, String) {
    let (setting, text, incoming) = end_of(source).await;
    assert!(incoming.is_empty(), "received {incoming:?} before {text}");
    (setting, text)
}

/// The setting and the text of the error that a source ends with, and what it delivers before.
async fn end_of(source: &mut KafkaSource) -> (String, String, Vec<Incoming>) {
    let mut incoming = Vec::new();
    let ended = tokio::time::timeout(BOUND, async {
        loop {
            if let Err(error) = source
                .receive(Limit::new(100, 1 << 20), &mut incoming)
                .await
            {
                return error;
            }
        }
    });
    match ended.await.expect("an error in time") {
        SourceError::Misconfigured {
            setting,
            problem,
            remedy,
        } => (setting, format!("{problem}; {remedy}"), incoming),
        other => panic!("{other:?}"),
    }
}

/// A topic of 20 messages, of which the first 12 were removed, and whose group has committed 5.
async fn topic_with_expired_messages() -> Topic {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 20).await;
    topic.commit(5).await;
    topic.remove_below(12).await;
    topic
}

#[tokio::test(flavor = "multi_thread")]
async fn start_at_error_ends_a_group_without_an_offset() {
    let topic = Topic::new(1).await;
    let mut source = topic
        .source()
        .start(StartAt::Error)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    assert_eq!(error_before_any_delivery(&mut source).await.0, "start");
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_messages_expired_continues_at_the_earliest_one() {
    let (topic, status) = (topic_with_expired_messages().await, KafkaStatus::new());
    let mut source = topic
        .source()
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let deliveries = receive(&mut source, 8).await;
    assert_eq!(offsets(&deliveries), (12..20).collect::<Vec<_>>());
    // Expired messages are counted while the first deliveries are handed out.
    let end = Instant::now() + BOUND;
    while status.messages_expired() != 7 {
        assert!(
            Instant::now() < end,
            "{} expired",
            status.messages_expired()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 20).await;
    topic.remove_below(20).await;
    topic.send_numbers(0, 1).await;
    assert_eq!(offsets(&receive(&mut source, 1).await), [20]);
    assert_eq!(
        status.messages_expired(),
        7,
        "messages that were read were counted as expired"
    );
    close(source).await;
}

/// A message is read before retention removes it, and its gap is classified after that, when the
/// log start offset is already above it.
#[tokio::test(flavor = "multi_thread")]
async fn messages_that_expire_in_the_prefetch_queue_are_counted() {
    let (topic, status) = (Topic::new(2).await, KafkaStatus::new());
    // More than the source reads ahead, so that the rest waits in librdkafka's queue.
    topic.send_numbers(1, 3_000).await;
    topic.send_numbers(0, 20).await;
    topic.commit(5).await;
    topic.remove_below(12).await;
    let mut source = topic
        .source()
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut all = receive(&mut source, 1).await;
    // After an offset that was out of range, librdkafka waits this long before it requests offsets
    // again, and reads the log start offset from each response. If the machine takes longer, the gap
    // is classified in time, and the same number of messages expires.
    tokio::time::sleep(Duration::from_secs(1)).await;
    topic.remove_below(15).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    while all.iter().filter(|it| it.receipt.partition == 0).count() < 5 {
        all.extend(receive(&mut source, 1).await);
    }
    let end = Instant::now() + BOUND;
    while status.messages_expired() == 0 {
        assert!(Instant::now() < end, "no message expired in time");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let first = all
        .iter()
        .filter(|it| it.receipt.partition == 0)
        .map(offset)
        .min()
        .expect("deliveries arrived");
    assert_eq!(
        status.messages_expired(),
        u64::try_from(first - 5).expect("reading continues above the committed offset")
    );
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_messages_end_the_source_with_out_of_range_error() {
    let topic = topic_with_expired_messages().await;
    let mut source = topic
        .source()
        .out_of_range(OutOfRange::Error)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let (setting, text) = error_before_any_delivery(&mut source).await;
    assert_eq!(setting, "out_of_range");
    assert!(
        text.contains(&format!("offset 5 of {}/0", topic.name)),
        "{text}"
    );
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_log_ends_the_source_with_out_of_range_error() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic.commit(50).await;
    let mut source = topic
        .source()
        .out_of_range(OutOfRange::Error)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let (setting, text) = error_before_any_delivery(&mut source).await;
    assert_eq!(setting, "out_of_range");
    assert!(
        text.contains(&format!("offset 50 of {}/0", topic.name)),
        "{text}"
    );
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(50));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_an_offset_starts_at_the_beginning_also_with_out_of_range_error() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    let mut source = topic
        .source()
        .out_of_range(OutOfRange::Error)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let deliveries = receive(&mut source, 3).await;
    assert_eq!(offsets(&deliveries), [0, 1, 2]);
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 3).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_added_is_read_from_its_beginning() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    topic.commit(3).await;
    let kafka = topic
        .source()
        .start(StartAt::Error)
        .property("topic.metadata.refresh.interval.ms", "500");
    let mut source = kafka
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    assert!(is_silent(&mut source, Duration::from_millis(500)).await);
    topic.grow(2).await;
    // Before the source has detected the new partition.
    topic.with_new_producer().send_numbers(1, 5).await;
    let deliveries = receive(&mut source, 5).await;
    assert!(deliveries.iter().all(|it| it.receipt.partition == 1));
    assert_eq!(offsets(&deliveries), [0, 1, 2, 3, 4]);
    accept(&mut source, deliveries).await;
    topic.await_commit(1, 5).await;
    topic.send_numbers(0, 1).await;
    let deliveries = receive(&mut source, 1).await;
    assert_eq!(offsets(&deliveries), [3]);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_topic_that_is_longer_than_before_is_read_completely() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 20).await;
    let mut source = topic.open().await;
    let all = receive(&mut source, 20).await;
    accept(&mut source, all).await;
    topic.await_commit(0, 20).await;
    let before = topic.committed_with(0).await.expect("an offset").1;
    topic.recreate().await;
    topic.send_numbers(0, 60).await;
    let mut seen = BTreeSet::new();
    let end = Instant::now() + BOUND;
    while seen.len() < 60 {
        assert!(Instant::now() < end, "{seen:?}");
        let deliveries = receive(&mut source, 1).await;
        seen.extend(offsets(&deliveries));
        accept(&mut source, deliveries).await;
    }
    topic.await_reset(0, 60).await;
    let after = topic.committed_with(0).await.expect("an offset").1;
    let cluster_id = topic.cluster_id().await;
    assert!(
        [&before, &after]
            .iter()
            .all(|it| is_identity(it, &cluster_id))
            && before != after,
        "{before:?}, {after:?}"
    );
    close(source).await;
}

/// Whether this metadata names a topic id, as 16 bytes in base64, and the cluster.
fn is_identity(metadata: &str, cluster_id: &str) -> bool {
    let is_base64 = |it: char| it.is_ascii_alphanumeric() || "-_+/".contains(it);
    let ids = metadata
        .strip_prefix("topic-id=")
        .and_then(|ids| ids.split_once(" cluster-id="));
    ids.is_some_and(|(topic, cluster)| {
        topic.len() == 22 && topic.chars().all(is_base64) && cluster == cluster_id
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_committed_offset_is_used_unless_its_metadata_names_a_deleted_topic_of_this_cluster() {
    for (metadata, first) in [
        ("topic-id=q5BZ55PYTTyxda8B1C5Amg cluster-id=THIS", 0),
        ("topic-id=q5BZ55PYTTyxda8B1C5Amg cluster-id=another", 4),
        ("topic-id=q5BZ55PYTTyxda8B1C5Amg", 4),
        ("topic-id=orders", 4),
        ("set by hand", 4),
    ] {
        let topic = Topic::new(1).await;
        let cluster_id = topic.cluster_id().await;
        topic.send_numbers(0, 10).await;
        topic
            .commit_with(4, &metadata.replace("THIS", &cluster_id))
            .await;
        let mut source = topic.open().await;
        let all = receive(&mut source, usize::try_from(10 - first).expect("offsets")).await;
        assert_eq!(offsets(&all), (first..10).collect::<Vec<_>>(), "{metadata}");
        // Committed before anything is settled: the next client must not use the other offset.
        topic.await_reset(0, first).await;
        accept(&mut source, all).await;
        topic.await_commit(0, 10).await;
        let (_, metadata) = topic.committed_with(0).await.expect("an offset");
        assert!(is_identity(&metadata, &cluster_id), "{metadata}");
        close(source).await;
    }
}

/// The topic may be a replica or a recreated one.
#[tokio::test(flavor = "multi_thread")]
async fn an_offset_of_another_topic_id_without_a_cluster_id_ends_the_source_with_out_of_range_error()
 {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic
        .commit_with(4, "topic-id=q5BZ55PYTTyxda8B1C5Amg")
        .await;
    let mut source = topic
        .source()
        .out_of_range(OutOfRange::Error)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let (setting, text) = error_before_any_delivery(&mut source).await;
    assert_eq!(setting, "out_of_range");
    assert!(
        text.contains(&format!(
            "offset 4 of {}/0 was committed for a topic with another id",
            topic.name
        )),
        "{text}"
    );
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_topic_ends_the_source_with_out_of_range_error_and_is_read_completely_after_a_restart()
 {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 20).await;
    let kafka = || {
        topic
            .source()
            .out_of_range(OutOfRange::Error)
            .property("topic.metadata.refresh.interval.ms", "500")
    };
    let mut source = kafka()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut all = receive(&mut source, 20).await;
    accept(&mut source, all.drain(..10)).await;
    topic.await_commit(0, 10).await;
    topic.recreate().await;
    topic.send_numbers(0, 60).await;
    // Until the change is detected, messages above may be delivered.
    let (setting, text, _) = end_of(&mut source).await;
    assert_eq!(setting, "out_of_range");
    assert!(
        text.contains(&format!(
            "the topic `{}` was deleted and created again",
            topic.name
        )),
        "{text}"
    );
    // Deliveries of the deleted topic: its last offset must not be the start in the new one.
    accept(&mut source, all).await;
    close(source).await;
    // A start position that was not committed before the source closed is detected again, so no
    // message is skipped.
    let mut seen = Vec::new();
    for _ in 0..10 {
        let mut source = kafka()
            .connect(ConnectOptions::default())
            .await
            .expect("a source");
        let end = Instant::now() + BOUND;
        while seen.len() < 60 {
            assert!(Instant::now() < end, "{seen:?}");
            let mut incoming = Vec::new();
            if source
                .receive(Limit::new(100, 1 << 20), &mut incoming)
                .await
                .is_err()
            {
                break;
            }
            seen.extend(
                incoming
                    .into_iter()
                    .filter_map(delivery)
                    .map(|it| offset(&it)),
            );
        }
        close(source).await;
        if seen.len() == 60 {
            break;
        }
    }
    assert_eq!(seen, (0..60).collect::<Vec<_>>());
}
