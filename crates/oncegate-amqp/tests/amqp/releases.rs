//! Deliveries that come back later.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqStatus, Topology};
use oncegate_core::source::{Open, Order, Source, headers};

use crate::KINDS;
use crate::rig::*;
use crate::trouble::{Way, spoiling_proxy};

#[tokio::test]
async fn a_short_release_comes_back_after_its_delay_while_others_go_on() {
    for kind in KINDS {
        let rig = Rig::new().await;
        let mut source = open(rig.source(kind)).await;
        rig.publish("later").await;
        let later = delivery(&mut source).await;
        let released = Instant::now();
        settle(&mut source, later, release(Duration::from_millis(400))).await;
        rig.publish("now").await;
        let now = delivery(&mut source).await;
        assert_eq!((&now.message.body[..], now.failures), (&b"now"[..], 0));
        settle(&mut source, now, accept()).await;
        let later = delivery(&mut source).await;
        assert_eq!(
            (&later.message.body[..], later.failures),
            (&b"later"[..], 1)
        );
        let after = released.elapsed();
        assert!(
            after >= Duration::from_millis(400) && after < Duration::from_secs(2),
            "{after:?}"
        );
        settle(&mut source, later, accept()).await;
        close(source).await;
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

#[tokio::test]
async fn a_release_that_waits_at_shutdown_keeps_its_delay_and_its_count() {
    for kind in KINDS {
        let rig = Rig::new().await;
        let mut source = open(rig.source(kind)).await;
        let mut table = FieldTable::default();
        table.insert("mine".into(), AMQPValue::LongString("kept".into()));
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_expiration("60000".into())
            .with_message_id("m".into());
        rig.publish_with("later", properties).await;
        let later = delivery(&mut source).await;
        let released = Instant::now();
        settle(&mut source, later, release(Duration::from_millis(900))).await;
        close(source).await;
        let mut again = open(rig.source(kind)).await;
        let later = delivery(&mut again).await;
        assert!(
            released.elapsed() >= Duration::from_millis(900),
            "{:?}",
            released.elapsed()
        );
        assert_eq!(
            (&later.message.body[..], later.failures),
            (&b"later"[..], 1)
        );
        assert_eq!(later.message.headers.last("mine"), Some(&b"kept"[..]));
        assert_eq!(later.message.message_id.as_deref(), Some(&b"m"[..]));
        assert!(later.message.headers.last(headers::FIRST_SEEN).is_some());
        settle(&mut again, later, accept()).await;
        close(again).await;
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

#[tokio::test]
async fn a_long_release_waits_in_a_delay_queue_and_not_in_the_prefetch() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum).prefetch(1)).await;
    rig.publish("later").await;
    let later = delivery(&mut source).await;
    settle(&mut source, later, release(Duration::from_secs(20))).await;
    rig.publish("now").await;
    let now = delivery(&mut source).await;
    assert_eq!(&now.message.body[..], b"now");
    settle(&mut source, now, accept()).await;
    close(source).await;
    let copy = rig.take(&format!("{}.delay.30000", rig.queue)).await;
    assert_eq!(
        header(&copy.delivery, headers::FAILURES).as_deref(),
        Some("1")
    );
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn what_waits_in_memory_at_shutdown_goes_where_the_rest_of_its_delay_is_kept() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
    rig.publish("later").await;
    let later = delivery(&mut source).await;
    settle(&mut source, later, release(Duration::from_secs(5))).await;
    close(source).await;
    let copy = rig.take(&format!("{}.delay.5000", rig.queue)).await;
    assert_eq!(
        header(&copy.delivery, headers::FAILURES).as_deref(),
        Some("1")
    );
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn what_waits_leaves_half_of_the_prefetch_to_others() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum).prefetch(8)).await;
    for number in 0..20 {
        rig.publish(&number.to_string()).await;
    }
    for _ in 0..20 {
        let next = delivery(&mut source).await;
        assert_eq!(
            next.failures, 0,
            "the prefetch was full of what waits, until one of them was due"
        );
        settle(&mut source, next, release(Duration::from_secs(5))).await;
    }
    drop(source);
    rig.done().await;
}

#[tokio::test]
async fn what_waits_in_memory_for_long_is_handed_over_before_it_costs_the_channel() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Classic)).await).await;
    let source = rig
        .source(QueueKind::Classic)
        .topology(Topology::Trust)
        .consumer_timeout(Duration::from_secs(6));
    let mut source = open(source).await;
    rig.publish("later").await;
    let later = delivery(&mut source).await;
    let place_before = place(&later);
    settle(&mut source, later, release(Duration::from_secs(60))).await;
    let later = delivery(&mut source).await;
    assert_eq!((place(&later), later.failures), (place_before, 1));
    settle(&mut source, later, accept()).await;
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn a_release_without_delay_queues_waits_in_memory() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Classic)).await).await;
    let mut source = open(rig.source(QueueKind::Classic).topology(Topology::Trust)).await;
    rig.publish("later").await;
    let later = delivery(&mut source).await;
    let released = Instant::now();
    settle(&mut source, later, release(Duration::from_secs(6))).await;
    let later = delivery(&mut source).await;
    assert!(released.elapsed() >= Duration::from_secs(6));
    assert_eq!(later.failures, 1);
    settle(&mut source, later, accept()).await;
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

static REJECTED: AtomicUsize = AtomicUsize::new(0);
static GIVEN_BACK: AtomicUsize = AtomicUsize::new(0);

/// Counts `basic.reject` and `basic.nack` on their way to the broker.
fn count_returns(passed: &mut [u8]) {
    REJECTED.fetch_add(methods(passed, 90), Ordering::SeqCst);
    GIVEN_BACK.fetch_add(methods(passed, 120), Ordering::SeqCst);
}

/// How many frames of a method there are with the class of `basic` and this number.
fn methods(passed: &[u8], number: u8) -> usize {
    // Kind 1, two bytes of channel, four of size.
    passed
        .windows(11)
        .filter(|part| part[0] == 1 && part[7..] == [0, 60, 0, number])
        .count()
}

static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);

/// RabbitMQ counts, from 4.3 on, what a channel holds when it closes towards the delivery limit.
#[tokio::test]
async fn a_channel_that_is_given_up_gives_back_what_it_holds_unless_that_would_cost_the_order() {
    for (order, given_back) in [(Order::Unordered, 1), (Order::ByKey, 0)] {
        let rig = Rig::new().await;
        close(open(rig.source(QueueKind::Quorum)).await).await;
        GIVEN_UP.store(0, Ordering::SeqCst);
        let count = |passed: &mut [u8]| {
            GIVEN_UP.fetch_add(methods(passed, 120), Ordering::SeqCst);
        };
        let way = spoiling_proxy(Way::ToTheBroker, count).await;
        let source = rig
            .source(QueueKind::Quorum)
            .topology(Topology::Trust)
            .url(way)
            .for_order(order);
        let mut source = open(source.consumer_timeout(Duration::from_secs(3))).await;
        for body in ["open for too long", "not handled"] {
            rig.publish(body).await;
        }
        let (held, _) = deliveries(&mut source, 2, Duration::from_secs(10)).await;
        let (again, revoked) = deliveries(&mut source, 2, Duration::from_secs(20)).await;
        assert_eq!(
            (revoked.len(), held.len(), GIVEN_UP.load(Ordering::SeqCst)),
            (1, 2, given_back),
            "{order:?}"
        );
        for delivery in again {
            settle(&mut source, delivery, accept()).await;
        }
        close(source).await;
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

/// RabbitMQ counts, from 4.3 on, what is rejected as a failed attempt, and not what is only given
/// back.
#[tokio::test]
async fn at_the_end_what_failed_is_rejected_and_the_rest_is_given_back() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum)).await).await;
    let way = spoiling_proxy(Way::ToTheBroker, count_returns).await;
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .topology(Topology::Trust)
            .url(way),
    )
    .await;
    for body in ["failed", "not handled", "nor this"] {
        rig.publish(body).await;
    }
    let (mut three, _) = deliveries(&mut source, 3, Duration::from_secs(10)).await;
    settle(
        &mut source,
        three.remove(0),
        release(Duration::from_secs(60)),
    )
    .await;
    close(source).await;
    let patience = Instant::now() + Duration::from_secs(10);
    while rig.ready(&rig.queue).await < 3 {
        assert!(Instant::now() < patience, "not all came back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        (
            REJECTED.load(Ordering::SeqCst),
            GIVEN_BACK.load(Ordering::SeqCst)
        ),
        (1, 1)
    );
    rig.done().await;
}

/// Whoever consumes with an order and ends: what comes then lies there unhandled behind a single
/// active consumer, whatever it is, and goes to others elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_to_an_ordered_consumer_that_ends_goes_back_as_it_came() {
    for single in [true, false] {
        let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
        let ordered = || {
            // A quorum queue counts a consumer that was cancelled while it holds something.
            let source = rig
                .source(if single {
                    QueueKind::Quorum
                } else {
                    QueueKind::Classic
                })
                .for_order(Order::ByKey);
            if single {
                source.single_active_consumer()
            } else {
                source
            }
        };
        let mut source = open(ordered().body_limit(10).status(status.clone())).await;
        rig.publish("open").await;
        let handled = delivery(&mut source).await;
        source.stop().await;
        let patience = Instant::now() + Duration::from_secs(10);
        if !single {
            while rig.consumers(&rig.queue).await > 0 {
                assert!(Instant::now() < patience, "it still consumes");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        for body in ["more than ten bytes", "short"] {
            rig.publish(body).await;
        }
        let arrived = if single { 3 } else { 1 };
        while status.snapshot().delivered < arrived {
            assert!(Instant::now() < patience, "{:?}", status.snapshot());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        settle(&mut source, handled, accept()).await;
        close(source).await;
        assert_eq!(
            (status.snapshot().delivered, status.snapshot().copies),
            (arrived, 0)
        );
        let mut next = open(ordered()).await;
        let (again, _) = deliveries(&mut next, 2, Duration::from_secs(10)).await;
        assert_eq!(
            again
                .iter()
                .map(|delivery| &delivery.message.body[..])
                .collect::<Vec<_>>(),
            [&b"more than ten bytes"[..], b"short"]
        );
        for delivery in again {
            settle(&mut next, delivery, accept()).await;
        }
        close(next).await;
        rig.done().await;
    }
}
