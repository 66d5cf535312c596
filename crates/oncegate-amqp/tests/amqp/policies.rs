//! Brokers and messages with settings of their own: denied features, TTL and priorities.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use oncegate_amqp::{QueueKind, Rejects};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::headers;
use oncegate_testkit::servers::{RabbitOptions, RabbitServer};

use crate::KINDS;
use crate::fixture::*;

/// RabbitMQ 3.10 has no setting that denies them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_source_uses_no_transient_queues() {
    let denied = expected(&[
        ("3.10", &[][..]),
        (
            "4.3",
            &["deprecated_features.permit.transient_nonexcl_queues"],
        ),
    ]);
    let options = denied
        .iter()
        .fold(RabbitOptions::new(), |options, feature| {
            options.setting(*feature, "false")
        });
    let server = tokio::task::spawn_blocking(move || RabbitServer::start_with(&options))
        .await
        .expect("no panic")
        .expect("a server");
    let other = QueueFixture::at(&server.url()).await;
    let transient = other.channel.queue_declare(
        "transient".into(),
        QueueDeclareOptions::default(),
        FieldTable::default(),
    );
    assert_eq!(transient.await.is_ok(), denied.is_empty());
    for kind in KINDS {
        let fixture = QueueFixture::at(&server.url()).await;
        let mut source = open(fixture.source(kind).prefetch(1)).await;
        for body in ["delayed", "dead letter", "in doubt"] {
            fixture.publish(body).await;
        }
        let delayed = delivery(&mut source).await;
        settle(&mut source, delayed, release(Duration::from_secs(1))).await;
        for reason in [Reason::Refused, Reason::InDoubt(DoubtCause::Panicked)] {
            let rejected = delivery(&mut source).await;
            settle(&mut source, rejected, Settlement::Reject(reason)).await;
        }
        let delayed = delivery(&mut source).await;
        assert_eq!(
            (&delayed.message.body[..], delayed.failures),
            (&b"delayed"[..], 1)
        );
        settle(&mut source, delayed, accept()).await;
        close(source).await;
        for (queue, body) in [
            (fixture.dead_letters(), "dead letter"),
            (fixture.in_doubt(), "in doubt"),
        ] {
            let copy = fixture.take(&queue).await.delivery;
            assert_eq!(copy.data, body.as_bytes(), "{kind:?}");
        }
        fixture.wait_until_empty(&fixture.queue).await;
    }
}

/// How long messages of these tests live.
const TTL: Duration = Duration::from_secs(1);

fn expiring() -> BasicProperties {
    BasicProperties::default().with_expiration(TTL.as_millis().to_string().into())
}

/// The message, dead-lettered by RabbitMQ, has no headers of oncegate.
fn assert_expired(message: &lapin::message::Delivery, body: &str, last_reason: Option<&str>) {
    assert_eq!(message.data, body.as_bytes());
    for (name, value) in [
        ("x-first-death-reason", Some("expired")),
        ("x-last-death-reason", last_reason),
        (headers::REASON, None),
    ] {
        assert_eq!(header(message, name).as_deref(), value, "{name}");
    }
    let deaths = header(message, "x-death").expect("x-death");
    assert!(deaths.contains("original-expiration"), "{deaths}");
}

#[tokio::test]
async fn an_expired_message_is_dead_lettered_by_a_quorum_queue_and_dropped_by_a_classic_one() {
    // Newer releases also add headers about the last dead-lettering.
    let last_reason = expected(&[("3.10", None), ("4.3", Some("expired"))]);
    for kind in KINDS {
        let fixture = QueueFixture::new().await;
        close(open(fixture.source(kind)).await).await;
        fixture.publish_with("ready", expiring()).await;
        fixture.wait_until_empty(&fixture.queue).await;
        let mut source = open(fixture.source(kind).prefetch(1)).await;

        // Expires neither while the consumer holds it, nor in a delay queue.
        fixture.publish_with("handled", expiring()).await;
        let handled = delivery(&mut source).await;
        tokio::time::sleep(TTL.mul_f64(1.2)).await;
        settle(&mut source, handled, release(Duration::from_secs(1))).await;
        let handled = delivery(&mut source).await;
        assert_eq!(
            (&handled.message.body[..], handled.failures),
            (&b"handled"[..], 1)
        );
        settle(&mut source, handled, accept()).await;

        // Expires when it is requeued.
        fixture.publish_with("requeued", expiring()).await;
        delivery(&mut source).await;
        tokio::time::sleep(TTL.mul_f64(1.2)).await;
        close(source).await;
        let deadline = Instant::now() + Duration::from_secs(10);
        let dead_letters = fixture.dead_letters();
        let expired = match kind {
            QueueKind::Quorum => &["ready", "requeued"][..],
            _ => &[],
        };
        while (fixture.ready_messages(&dead_letters).await as usize) < expired.len() {
            assert!(Instant::now() < deadline, "not dead-lettered");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for body in expired {
            let dead = fixture.take(&dead_letters).await.delivery;
            assert_expired(&dead, body, last_reason);
        }
        assert!(fixture.try_take(&dead_letters).await.is_none());
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

/// A quorum queue of RabbitMQ 4.3 delivers by priority, and requeues at the front. That of 3.10 delivers
/// in the order of publication, and requeues at the back if it has no delivery limit.
#[tokio::test]
async fn messages_with_priorities_are_delivered_by_priority_and_not_lost() {
    // The first delivery is requeued.
    let order = expected(&[
        ("3.10", [0, 9, 5, 4, 1, 20, 6, 0]),
        ("4.3", [20, 20, 9, 6, 5, 4, 1, 0]),
    ]);
    let fixture = QueueFixture::new().await;
    let source = || fixture.source(QueueKind::Quorum).prefetch(1);
    close(open(source()).await).await;
    for priority in [0, 9, 5, 4, 1, 20, 6_u8] {
        let properties = BasicProperties::default().with_priority(priority);
        fixture
            .publish_with(&priority.to_string(), properties)
            .await;
    }
    let mut source_now = open(source()).await;
    let mut delivered = Vec::new();
    for number in 0..order.len() {
        let next = delivery(&mut source_now).await;
        delivered.push(String::from_utf8_lossy(&next.message.body).into_owned());
        if number == 0 {
            close(source_now).await;
            source_now = open(source()).await;
        } else {
            settle(&mut source_now, next, accept()).await;
        }
    }
    close(source_now).await;
    assert_eq!(delivered, order.map(|priority| priority.to_string()));
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

/// RabbitMQ 3.10 takes over an `x-death` that a publisher sends; 4.3 replaces it.
#[tokio::test]
async fn x_death_of_a_republished_message_counts_by_the_rules_of_the_release() {
    let failures_by_round = expected(&[("3.10", [0, 1, 2]), ("4.3", [0, 1, 1])]);
    let fixture = QueueFixture::new().await;
    let source = fixture.source(QueueKind::Quorum).rejects(Rejects::ByQueue);
    let mut source = open(source).await;
    fixture.publish("a").await;
    let mut failures = Vec::new();
    for _ in failures_by_round {
        let rejected = delivery(&mut source).await;
        failures.push(rejected.failures);
        settle(&mut source, rejected, Settlement::Reject(Reason::Refused)).await;
        let dead = fixture.take(&fixture.dead_letters()).await.delivery;
        fixture.publish_with("a", dead.properties).await;
    }
    let last = delivery(&mut source).await;
    settle(&mut source, last, accept()).await;
    close(source).await;
    assert_eq!(failures, failures_by_round);
    fixture.delete_queues().await;
}
