//! The effect of settlements on offsets and dead letters.

use std::time::{Duration, Instant};

use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_kafka::{BlockedBy, KafkaStatus};
use rdkafka::Message;
use rdkafka::message::{Header, OwnedHeaders};

use crate::fixture::*;

#[tokio::test(flavor = "multi_thread")]
async fn accepted_deliveries_are_committed() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 600).await;
    let mut source = topic.open().await;
    let deliveries = receive(&mut source, 600).await;
    assert_eq!(offsets(&deliveries), (0..600).collect::<Vec<_>>());
    assert!(
        deliveries
            .iter()
            .enumerate()
            .all(|(number, it)| it.message.body == number.to_string() && it.failures == 0)
    );
    topic.await_commit(0, 0).await;
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 600).await;
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(600));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_redelivers_unsettled_messages_and_nothing_below_them() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    let mut source = topic.open().await;
    let (early, late): (Vec<_>, Vec<_>) = receive(&mut source, 10)
        .await
        .into_iter()
        .partition(|it| offset(it) < 4);
    let (unsettled, late): (Vec<_>, Vec<_>) = late.into_iter().partition(|it| offset(it) == 4);
    accept(&mut source, late).await;
    accept(&mut source, early).await;
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(4));
    assert_eq!(offsets(&unsettled), [4]);

    let mut source = topic.open().await;
    assert_eq!(offsets(&receive(&mut source, 6).await), [4, 5, 6, 7, 8, 9]);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_a_source_returns_at_once_and_its_deliveries_are_redelivered() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    let mut source = topic.open().await;
    let mut deliveries = receive(&mut source, 3).await;
    deliveries.truncate(1);
    accept(&mut source, deliveries).await;
    let begun = Instant::now();
    drop(source);
    assert!(begun.elapsed() < Duration::from_millis(100));
    topic.await_commit(0, 1).await;
    let mut source = topic.open().await;
    assert_eq!(offsets(&receive(&mut source, 2).await), [1, 2]);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_redelivered_with_its_failures_and_delays_the_commit() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 6).await;
    let mut source = topic.open().await;
    let mut deliveries = receive(&mut source, 6).await;
    let first = deliveries.remove(0);
    accept(&mut source, deliveries).await;
    release(&mut source, first).await;
    let mut again = receive(&mut source, 1).await;
    assert_eq!((offsets(&again), again[0].failures), (vec![0], 1));
    assert_eq!(again[0].message.body, "0");
    topic.await_commit(0, 0).await;
    release(&mut source, again.remove(0)).await;
    let again = receive(&mut source, 1).await;
    assert_eq!(again[0].failures, 2);
    accept(&mut source, again).await;
    topic.await_commit(0, 6).await;
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_delivery_is_published_before_it_is_committed() {
    let topic = Topic::new(1).await;
    let headers = OwnedHeaders::new()
        .insert(Header {
            key: "id",
            value: Some("p1"),
        })
        .insert(Header {
            key: "none",
            value: None::<&str>,
        });
    topic.send(Some(b"key"), Some(b"body"), headers).await;
    topic
        .send(None, Some(b"unclear"), OwnedHeaders::new())
        .await;
    let mut source = topic.open().await;
    for (delivery, reason) in receive(&mut source, 2)
        .await
        .into_iter()
        .zip([Reason::Refused, Reason::InDoubt(DoubtCause::TimedOut)])
    {
        reject(&mut source, delivery, reason).await;
    }
    topic.await_commit(0, 2).await;
    close(source).await;

    let copy = |message: &rdkafka::message::BorrowedMessage<'_>| {
        (
            message.key().map(<[u8]>::to_vec),
            message.payload().map(<[u8]>::to_vec),
            text_headers(message),
        )
    };
    let (key, body, headers) = topic.read(topic.dead_letters(), 1, copy).await.remove(0);
    assert_eq!(
        (key.as_deref(), body.as_deref()),
        (Some(&b"key"[..]), Some(&b"body"[..]))
    );
    let (first_seen, others): (Vec<_>, Vec<_>) = headers
        .into_iter()
        .partition(|(name, _)| name == "oncegate-first-seen");
    let expected = [
        ("id", Some("p1".to_owned())),
        ("none", None),
        ("oncegate-reason", Some("refused".to_owned())),
        ("oncegate-attempts", Some("0".to_owned())),
        ("oncegate-origin", Some(format!("{}/0/0", topic.name))),
    ];
    assert_eq!(
        others,
        expected.map(|(name, value)| (name.to_owned(), value))
    );
    assert_eq!(first_seen.len(), 1);
    let (key, body, headers) = topic.read(topic.in_doubt(), 1, copy).await.remove(0);
    assert_eq!((key, body.as_deref()), (None, Some(&b"unclear"[..])));
    assert_eq!(
        headers[0],
        (
            "oncegate-reason".to_owned(),
            Some("in-doubt-timed-out".to_owned())
        )
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_rejected_with_its_body_and_never_delivered() {
    let topic = Topic::new(1).await;
    topic
        .send(None, Some(&[b'x'; 101]), OwnedHeaders::new())
        .await;
    topic
        .send(None, Some(&[b'y'; 100]), OwnedHeaders::new())
        .await;
    let mut source = topic
        .source()
        .body_limit(100)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let deliveries = receive(&mut source, 1).await;
    assert_eq!(offsets(&deliveries), [1]);
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 2).await;
    close(source).await;
    let found = topic
        .read(topic.dead_letters(), 1, |it| {
            (it.payload().map(<[u8]>::len), text_headers(it))
        })
        .await;
    assert_eq!(found[0].0, Some(101));
    assert_eq!(
        found[0].1[0],
        ("oncegate-reason".to_owned(), Some("too-large".to_owned()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_source_delivers_nothing_more_and_still_settles() {
    use oncegate_core::Source;
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 4).await;
    let mut source = topic.open().await;
    let two = receive(&mut source, 2).await;
    source.stop().await;
    assert!(is_silent(&mut source, Duration::from_millis(300)).await);
    accept(&mut source, two).await;
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receive_with_limit_zero_delivers_nothing() {
    use oncegate_core::{Limit, Source};
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    let mut source = topic.open().await;
    let first = receive(&mut source, 1).await.remove(0);
    release(&mut source, first).await;
    let mut incoming = Vec::new();
    let received = tokio::time::timeout(
        Duration::from_millis(500),
        source.receive(Limit::NOTHING, &mut incoming),
    );
    assert!(received.await.is_err() && incoming.is_empty());
    let mut all = offsets(&receive(&mut source, 3).await);
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2]);
    close(source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unconfirmed_dead_letter_blocks_its_offset_and_nothing_else() {
    use oncegate_core::{Source, SourceError};
    // A compacted topic rejects messages without a key.
    let topic = Topic::with_dead_letters(&[("cleanup.policy", "compact")]).await;
    topic.send_numbers(0, 3).await;
    let status = KafkaStatus::new();
    let open = async |status: KafkaStatus| {
        topic
            .source()
            .accept_limited_retention()
            .status(status)
            .connect(ConnectOptions::default())
            .await
            .expect("a source")
    };
    let mut source = open(status.clone()).await;
    let mut deliveries = receive(&mut source, 3).await;
    accept(&mut source, deliveries.drain(..1)).await;
    let blocker = || {
        let partitions = status.partitions();
        let blocker = partitions.into_iter().find_map(|it| it.blocker);
        blocker.map(|it| (it.offset, it.blocked_by))
    };
    assert_eq!(blocker(), Some((1, BlockedBy::Consumer)));
    reject(&mut source, deliveries.remove(0), Reason::Refused).await;
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 1).await;
    assert_eq!(blocker(), Some((1, BlockedBy::DeadLetter)));
    topic.send_numbers(0, 1).await;
    let next = receive(&mut source, 1).await;
    assert_eq!(offsets(&next), [3]);
    accept(&mut source, next).await;
    let closed = Box::new(source)
        .close(Instant::now() + Duration::from_secs(3))
        .await;
    assert!(
        matches!(closed, Err(SourceError::Unavailable(_))),
        "{closed:?}"
    );
    assert_eq!(topic.committed(0).await, Some(1));

    let mut source = open(KafkaStatus::new()).await;
    assert_eq!(offsets(&receive(&mut source, 3).await), [1, 2, 3]);
    close(source).await;
}
