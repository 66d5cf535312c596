//! Released deliveries and their redelivery.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::Settlement;
use oncegate_core::source::{Order, Source, headers};

use crate::KINDS;
use crate::fixture::*;
use crate::recovery::{Direction, rewriting_proxy};

#[tokio::test]
async fn a_failed_delivery_that_is_released_at_shutdown_keeps_its_count() {
    for kind in KINDS {
        let fixture = QueueFixture::new().await;
        let mut source = open(fixture.source(kind)).await;
        let mut table = FieldTable::default();
        table.insert("mine".into(), AMQPValue::LongString("kept".into()));
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_expiration("60000".into())
            .with_message_id("m".into());
        fixture.publish_with("later", properties).await;
        let later = delivery(&mut source).await;
        source.stop().await;
        settle(&mut source, later, release(Duration::ZERO)).await;
        close(source).await;
        let mut again = open(fixture.source(kind)).await;
        let later = delivery(&mut again).await;
        assert_eq!(
            (&later.message.body[..], later.failures),
            (&b"later"[..], 1)
        );
        assert_eq!(later.message.headers.last("mine"), Some(&b"kept"[..]));
        assert_eq!(later.message.message_id.as_deref(), Some(&b"m"[..]));
        assert!(later.message.headers.last(headers::FIRST_SEEN).is_some());
        settle(&mut again, later, accept()).await;
        close(again).await;
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn a_long_release_waits_in_a_delay_queue_and_not_in_the_prefetch() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum).prefetch(1)).await;
    fixture.publish("later").await;
    let later = delivery(&mut source).await;
    settle(&mut source, later, release(Duration::from_secs(20))).await;
    fixture.publish("now").await;
    let now = delivery(&mut source).await;
    assert_eq!(&now.message.body[..], b"now");
    settle(&mut source, now, accept()).await;
    close(source).await;
    let copy = fixture
        .take(&format!("{}.delay.30000", fixture.queue))
        .await;
    assert_eq!(
        header(&copy.delivery, headers::FAILURES).as_deref(),
        Some("1")
    );
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn without_delay_queues_a_release_is_redelivered_at_once() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Classic)).await).await;
    let mut source = open(fixture.source(QueueKind::Classic).topology(Topology::Trust)).await;
    fixture.publish("later").await;
    let later = delivery(&mut source).await;
    let tag_before = channel_and_tag(&later);
    settle(&mut source, later, release(Duration::from_secs(60))).await;
    let later = delivery(&mut source).await;
    assert_eq!((channel_and_tag(&later), later.failures), (tag_before, 1));
    settle(&mut source, later, accept()).await;
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

static REJECTS: AtomicUsize = AtomicUsize::new(0);
static NACKS: AtomicUsize = AtomicUsize::new(0);

/// Counts `basic.reject` and `basic.nack` on their way to the broker.
fn count_returns(passed: &mut [u8]) {
    REJECTS.fetch_add(count_methods(passed, 90), Ordering::SeqCst);
    NACKS.fetch_add(count_methods(passed, 120), Ordering::SeqCst);
}

/// How many frames have this method of the class `basic`.
fn count_methods(passed: &[u8], number: u8) -> usize {
    // Type 1, two bytes for the channel, four for the size.
    passed
        .windows(11)
        .filter(|part| part[0] == 1 && part[7..] == [0, 60, 0, number])
        .count()
}

static NACKS_ON_CLOSE: AtomicUsize = AtomicUsize::new(0);

/// Since RabbitMQ 4.3, unacknowledged messages of a closing channel count towards the delivery limit,
/// and `basic.nack` keeps the order.
#[tokio::test]
async fn a_closing_channel_requeues_its_deliveries_by_nack_unless_it_loses_their_order() {
    let ordered_nacks = expected(&[("3.10", 0), ("4.3", 1)]);
    for (order, nacks) in [(Order::Unordered, 1), (Order::ByKey, ordered_nacks)] {
        let fixture = QueueFixture::new().await;
        close(open(fixture.source(QueueKind::Quorum)).await).await;
        NACKS_ON_CLOSE.store(0, Ordering::SeqCst);
        let count = |passed: &mut [u8]| {
            NACKS_ON_CLOSE.fetch_add(count_methods(passed, 120), Ordering::SeqCst);
        };
        let proxied_url = rewriting_proxy(Direction::ToTheBroker, count).await;
        let source = fixture
            .source(QueueKind::Quorum)
            .topology(Topology::Trust)
            .url(proxied_url)
            .consumer_timeout(Duration::from_secs(3));
        let mut source = open_ordered(source, order).await;
        for body in ["open for too long", "not handled"] {
            fixture.publish(body).await;
        }
        let (held, _) = deliveries(&mut source, 2, Duration::from_secs(10)).await;
        let (again, revoked) = deliveries(&mut source, 2, Duration::from_secs(20)).await;
        assert_eq!(
            (
                revoked.len(),
                held.len(),
                NACKS_ON_CLOSE.load(Ordering::SeqCst)
            ),
            (1, 2, nacks),
            "{order:?}"
        );
        for delivery in again {
            settle(&mut source, delivery, accept()).await;
        }
        close(source).await;
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

/// RabbitMQ 4.3 dead-letters a message that counts 21 redeliveries, by default.
#[tokio::test]
async fn a_message_that_is_only_released_is_never_dead_lettered_by_the_broker() {
    const RESTARTS: usize = 32;
    let bodies: Vec<_> = (0..100).map(|number| number.to_string()).collect();
    for order in [Order::Unordered, Order::ByKey] {
        let fixture = QueueFixture::new().await;
        let source = || fixture.source(QueueKind::Quorum);
        let mut source_now = open_ordered(source(), order).await;
        for body in &bodies {
            fixture.publish(body).await;
        }
        for restart in 0..RESTARTS {
            let (all, _) = deliveries(&mut source_now, bodies.len(), Duration::from_secs(20)).await;
            let received: Vec<_> = all
                .iter()
                .map(|it| String::from_utf8_lossy(&it.message.body))
                .collect();
            assert_eq!(received, bodies, "{order:?}, after {restart} restarts");
            // By turns: a restart, a takeover by a waiting consumer, a consumer that is dropped.
            match restart % 3 {
                0 => {
                    source_now.stop().await;
                    for delivery in all {
                        let not_started = Settlement::Release {
                            after: Duration::ZERO,
                            failures: 0,
                        };
                        settle(&mut source_now, delivery, not_started).await;
                    }
                    close(source_now).await;
                    source_now = open_ordered(source(), order).await;
                }
                1 => {
                    let next = open_ordered(source(), order).await;
                    close(source_now).await;
                    source_now = next;
                }
                _ => {
                    drop(source_now);
                    source_now = open_ordered(source(), order).await;
                }
            }
        }
        for _ in &bodies {
            let delivery = delivery(&mut source_now).await;
            settle(&mut source_now, delivery, accept()).await;
        }
        close(source_now).await;
        assert_eq!(fixture.ready_messages(&fixture.dead_letters()).await, 0);
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

/// A single active consumer that keeps an order closes its channel with all messages that it holds.
#[tokio::test]
async fn a_message_that_nears_the_delivery_limit_by_restarts_is_logged() {
    let fixture = QueueFixture::new().await;
    let source = || fixture.source(QueueKind::Quorum).single_active_consumer();
    let mut source_now = open_ordered(source(), Order::ByKey).await;
    fixture.publish("held").await;
    let near = || {
        logged(&[
            "WARN",
            &fixture.queue,
            "was redelivered many times",
            "delivery limit",
        ])
    };
    for restart in 0..10 {
        delivery(&mut source_now).await;
        assert_eq!(near(), 0, "after {restart} restarts");
        close(source_now).await;
        source_now = open_ordered(source(), Order::ByKey).await;
    }
    let held = delivery(&mut source_now).await;
    assert_eq!(near(), 1);
    settle(&mut source_now, held, accept()).await;
    close(source_now).await;
    fixture.delete_queues().await;
}

/// Since RabbitMQ 4.3, `basic.reject` counts towards the delivery limit and `basic.nack` does not.
#[tokio::test]
async fn closing_rejects_failed_deliveries_and_nacks_the_others() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    let proxied_url = rewriting_proxy(Direction::ToTheBroker, count_returns).await;
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .topology(Topology::Trust)
            .url(proxied_url),
    )
    .await;
    for body in ["failed", "not handled", "nor this"] {
        fixture.publish(body).await;
    }
    let (mut three, _) = deliveries(&mut source, 3, Duration::from_secs(10)).await;
    source.stop().await;
    settle(&mut source, three.remove(0), release(Duration::ZERO)).await;
    close(source).await;
    let deadline = Instant::now() + Duration::from_secs(10);
    while fixture.ready_messages(&fixture.queue).await < 3 {
        assert!(Instant::now() < deadline, "not all messages were requeued");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        (REJECTS.load(Ordering::SeqCst), NACKS.load(Ordering::SeqCst)),
        (1, 1)
    );
    fixture.delete_queues().await;
}

/// A single active consumer receives messages until it closes, and does not handle them; another
/// ordered consumer is cancelled at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_to_a_stopping_ordered_consumer_are_requeued_in_order() {
    for single in [true, false] {
        let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
        let ordered = || {
            // A quorum queue counts a cancelled consumer that has unacknowledged messages.
            let source = fixture.source(if single {
                QueueKind::Quorum
            } else {
                QueueKind::Classic
            });
            if single {
                source.single_active_consumer()
            } else {
                source
            }
        };
        let mut source = open_ordered(
            ordered().body_limit(10).status(status.clone()),
            Order::ByKey,
        )
        .await;
        fixture.publish("open").await;
        let handled = delivery(&mut source).await;
        source.stop().await;
        let deadline = Instant::now() + Duration::from_secs(10);
        if !single {
            while fixture.consumer_count(&fixture.queue).await > 0 {
                assert!(
                    Instant::now() < deadline,
                    "the consumer was not cancelled in time"
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        for body in ["more than ten bytes", "short"] {
            fixture.publish(body).await;
        }
        let arrived = if single { 3 } else { 1 };
        while status.snapshot().delivered < arrived {
            assert!(Instant::now() < deadline, "{:?}", status.snapshot());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        settle(&mut source, handled, accept()).await;
        close(source).await;
        assert_eq!(
            (status.snapshot().delivered, status.snapshot().copies),
            (arrived, 0)
        );
        let mut next = open_ordered(ordered(), Order::ByKey).await;
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
        fixture.delete_queues().await;
    }
}
