//! Where a group reads on when the log is not as it was left.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use oncegate_core::source::Open;
use oncegate_core::{Delivery, Limit, Source, SourceError};
use oncegate_kafka::{KafkaSource, OutOfRange, StartAt};

use crate::stage::*;

/// The setting and the text of the error that a source ends with.
async fn refusal(source: &mut KafkaSource) -> (String, String) {
    let mut incoming = Vec::new();
    let received = tokio::time::timeout(BOUND, async {
        while incoming.is_empty() {
            source.receive(Limit { count: 1, bytes: 1 << 20 }, &mut incoming).await?;
        }
        Ok(())
    });
    match received.await.expect("an answer in time") {
        Err(SourceError::Misconfigured { setting, problem, remedy }) => (setting, format!("{problem}; {remedy}")),
        other => panic!("received {incoming:?}: {other:?}"),
    }
}

/// A topic of 20 messages whose group stands at 5, though the first 12 were removed.
async fn removed() -> Topic {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 20).await;
    topic.commit(5).await;
    topic.remove_below(12).await;
    topic
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_messages_were_removed_reads_on_at_the_first_that_is_left() {
    let topic = removed().await;
    let mut source = topic.open().await;
    let deliveries = receive(&mut source, 8).await;
    assert_eq!(offsets(&deliveries), (12..20).collect::<Vec<_>>());
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 20).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_messages_were_removed_ends_if_it_is_told_to() {
    let topic = removed().await;
    let mut source = topic.source().out_of_range(OutOfRange::Error).open().await.expect("a source");
    let (setting, text) = refusal(&mut source).await;
    assert_eq!(setting, "out_of_range");
    assert!(text.contains(&format!("stands at offset 5 of {}/0", topic.name)), "{text}");
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_cut_ends_the_source_if_it_is_told_to() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic.commit(50).await;
    let mut source = topic.source().out_of_range(OutOfRange::Error).open().await.expect("a source");
    let (setting, text) = refusal(&mut source).await;
    assert_eq!(setting, "out_of_range");
    assert!(text.contains(&format!("stands at offset 50 of {}/0", topic.name)), "{text}");
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(50));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_without_an_offset_begins_at_the_beginning_though_it_may_not_begin_again() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    let mut source = topic.source().out_of_range(OutOfRange::Error).open().await.expect("a source");
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
    let kafka = topic.source().start(StartAt::Error).property("topic.metadata.refresh.interval.ms", "500");
    let mut source = kafka.open().await.expect("a source");
    assert!(is_silent(&mut source, Duration::from_millis(500)).await);
    topic.grow(2).await;
    // Before the source has heard of it.
    topic.renewed().send_numbers(1, 5).await;
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
async fn a_topic_that_is_made_anew_and_longer_than_before_is_read_whole() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 20).await;
    let mut source = topic.open().await;
    let all = receive(&mut source, 20).await;
    accept(&mut source, all).await;
    topic.await_commit(0, 20).await;
    topic.make_anew().await;
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
    close(source).await;
}

/// Takes and accepts what comes within a while; answers which offsets of partition 0 that were.
async fn take(source: &mut KafkaSource) -> BTreeSet<i64> {
    let mut incoming = Vec::new();
    let receiving = source.receive(Limit { count: 50, bytes: 1 << 20 }, &mut incoming);
    if let Ok(received) = tokio::time::timeout(Duration::from_millis(100), receiving).await {
        received.expect("deliveries");
    }
    let deliveries: Vec<Delivery> = incoming.into_iter().filter_map(delivery).collect();
    let seen = deliveries.iter().filter(|it| it.receipt.partition == 0).map(offset).collect();
    accept(source, deliveries).await;
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rebalance_after_a_log_began_anew_skips_nothing() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 50).await;
    let kafka = || topic.source().property("topic.metadata.refresh.interval.ms", "500");
    let mut first = kafka().open().await.expect("a source");
    let all = receive(&mut first, 50).await;
    accept(&mut first, all).await;
    topic.await_commit(0, 50).await;
    topic.make_anew().await;
    topic.grow(2).await;
    let again = topic.renewed();
    again.send_numbers(0, 10).await;
    again.send_numbers(1, 1).await;
    let (mut seen, end) = (BTreeSet::new(), Instant::now() + BOUND);
    while seen.len() < 10 {
        assert!(Instant::now() < end, "{seen:?}");
        seen.extend(take(&mut first).await);
    }
    // One partition goes, and librdkafka begins again with the other where it thinks that it stood.
    let mut second = kafka().open().await.expect("a source");
    let mut moved = false;
    while !moved {
        assert!(Instant::now() < end, "nothing moved");
        again.send_numbers(0, 1).await;
        again.send_numbers(1, 1).await;
        seen.extend(take(&mut first).await);
        let mut incoming = Vec::new();
        let receiving = second.receive(Limit { count: 1, bytes: 1 << 20 }, &mut incoming);
        if let Ok(received) = tokio::time::timeout(Duration::from_millis(100), receiving).await {
            received.expect("deliveries");
        }
        for it in incoming.into_iter().filter_map(delivery) {
            moved = true;
            if it.receipt.partition == 0 {
                seen.insert(offset(&it));
            }
            accept(&mut second, [it]).await;
        }
    }
    again.send_numbers(0, 60).await;
    while !(0..70).all(|offset| seen.contains(&offset)) {
        assert!(Instant::now() < end, "skipped: {:?}", (0..70).filter(|offset| !seen.contains(offset)).collect::<Vec<_>>());
        seen.extend(take(&mut first).await);
        seen.extend(take(&mut second).await);
    }
    close(first).await;
    close(second).await;
}
