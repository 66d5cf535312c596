//! Copies that the broker refuses or returns do not affect other copies.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqSource, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Settled, Source};
use oncegate_testkit::servers::RabbitServer;

use crate::fixture::*;

const EACH: usize = 200;

/// Publishes and receives messages, and settles them in one call: half are rejected, half released
/// with a long delay.
async fn reject_and_release(fixture: &QueueFixture, source: &mut RabbitMqSource) {
    for number in 0..2 * EACH {
        fixture.publish(&number.to_string()).await;
    }
    let (all, _) = deliveries(source, 2 * EACH, Duration::from_secs(20)).await;
    let mut settled: Vec<_> = all
        .into_iter()
        .enumerate()
        .map(|(number, delivery)| {
            let settlement = if number % 2 == 0 {
                Settlement::Reject(Reason::Refused)
            } else {
                release(Duration::from_secs(25))
            };
            Settled::new(delivery, settlement)
        })
        .collect();
    source.settle(&mut settled).await.expect("settled");
}

/// Takes all messages of a queue: their bodies and their number. On a connection of its own, which
/// the broker closes if the queue was just declared and is not ready.
async fn take_all(fixture: &QueueFixture, queue: &str) -> (BTreeSet<Vec<u8>>, usize) {
    let fixture = fixture.reconnect().await;
    let (mut bodies, mut count) = (BTreeSet::new(), 0);
    while let Ok(Some(message)) = fixture
        .channel
        .basic_get(queue.into(), BasicGetOptions { no_ack: true })
        .await
    {
        bodies.insert(message.delivery.data);
        count += 1;
    }
    (bodies, count)
}

#[tokio::test]
async fn a_missing_dead_letter_queue_affects_no_copy_to_another_queue() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    // Which confirm lapin attaches the returned copy to is random.
    for _ in 0..4 {
        fixture
            .channel
            .queue_delete(
                fixture.dead_letters().as_str().into(),
                QueueDeleteOptions::default(),
            )
            .await
            .expect("deleted");
        reject_and_release(&fixture, &mut source).await;
        let deadline = Instant::now() + Duration::from_secs(10);
        let (mut dead, mut delayed, mut copies) = (BTreeSet::new(), BTreeSet::new(), 0);
        while dead.len() < EACH || delayed.len() < EACH {
            assert!(
                Instant::now() < deadline,
                "a copy was lost: {} dead letters, {} delayed",
                dead.len(),
                delayed.len()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
            if fixture.exists(&fixture.dead_letters()).await {
                dead.append(&mut take_all(&fixture, &fixture.dead_letters()).await.0);
            }
            let (mut some, count) =
                take_all(&fixture, &format!("{}.delay.30000", fixture.queue)).await;
            delayed.append(&mut some);
            copies += count;
        }
        assert_eq!(
            copies, EACH,
            "copies to the other queue were published again"
        );
        assert_eq!(dead.union(&delayed).count(), 2 * EACH);
    }
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_missing_dead_letter_queue_may_be_created_later() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Classic)).await).await;
    let mut source = open(fixture.source(QueueKind::Classic).topology(Topology::Check)).await;
    fixture
        .channel
        .queue_delete(
            fixture.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    for number in 0..2 * EACH {
        fixture.publish(&number.to_string()).await;
    }
    let (mut dead, _) = deliveries(&mut source, 2 * EACH, Duration::from_secs(20)).await;
    let doubtful = dead.split_off(EACH);
    for delivery in dead {
        settle(&mut source, delivery, Settlement::Reject(Reason::Refused)).await;
    }
    // In-doubt messages are published while dead letters are returned repeatedly.
    for (number, delivery) in doubtful.into_iter().enumerate() {
        settle(
            &mut source,
            delivery,
            Settlement::Reject(Reason::InDoubt(
                oncegate_core::lifecycle::DoubtCause::Panicked,
            )),
        )
        .await;
        if number % 4 == 0 {
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    while (fixture.ready_messages(&fixture.in_doubt()).await as usize) < EACH {
        assert!(
            Instant::now() < deadline,
            "in-doubt messages wait for the dead letters"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("classic".into()),
    );
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    fixture
        .channel
        .queue_declare(fixture.dead_letters().as_str().into(), options, arguments)
        .await
        .expect("declared");
    close(source).await;
    let (doubt, doubts) = take_all(&fixture, &fixture.in_doubt()).await;
    let (dead, _) = take_all(&fixture, &fixture.dead_letters()).await;
    assert_eq!((dead.len(), doubt.len(), doubts), (EACH, EACH, EACH));
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_message_with_headers_up_to_the_frame_size_can_be_rejected_and_delayed() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    let mut table = FieldTable::default();
    table.insert(
        "huge".into(),
        AMQPValue::LongString("h".repeat(80_000).into()),
    );
    table.insert(
        "large".into(),
        AMQPValue::LongString("l".repeat(50_900).into()),
    );
    table.insert("small".into(), AMQPValue::LongString("s".into()));
    for body in ["reject", "release"] {
        fixture
            .publish_with(body, BasicProperties::default().with_headers(table.clone()))
            .await;
    }
    let rejected = delivery(&mut source).await;
    settle(&mut source, rejected, Settlement::Reject(Reason::Refused)).await;
    let released = delivery(&mut source).await;
    settle(&mut source, released, release(Duration::from_secs(25))).await;
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    for queue in [
        fixture.dead_letters(),
        format!("{}.delay.30000", fixture.queue),
    ] {
        let copy = fixture.take(&queue).await.delivery;
        assert_eq!(header(&copy, "huge"), None);
        assert_eq!(
            header(&copy, "large").map(|value| value.len()),
            Some(50_900)
        );
        assert_eq!(header(&copy, "small").as_deref(), Some("s"));
        assert_eq!(
            header(&copy, "oncegate-dropped-headers").as_deref(),
            Some("huge")
        );
    }
    fixture.delete_queues().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_closes_its_channel_blocks_no_other_copy() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let fixture = QueueFixture::at(&server.url()).await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    let large = "x".repeat(5_000);
    fixture.publish(&large).await;
    for number in 0..40 {
        fixture.publish(&number.to_string()).await;
    }
    let (all, _) = deliveries(&mut source, 41, Duration::from_secs(20)).await;
    // As after an upgrade to a release with a lower limit.
    limit_message_size(&server, 1_000);
    for delivery in all {
        settle(&mut source, delivery, Settlement::Reject(Reason::Refused)).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    let (mut dead, mut copies) = (BTreeSet::new(), 0);
    while dead.len() < 40 {
        assert!(
            Instant::now() < deadline,
            "{} of 40 dead letters",
            dead.len()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
        let (mut some, count) = take_all(&fixture, &fixture.dead_letters()).await;
        dead.append(&mut some);
        copies += count;
    }
    assert!(
        !dead.contains(large.as_bytes()),
        "no copy was refused, so this test checks nothing"
    );
    assert!(copies <= 50, "{copies} copies of 40 messages");
    limit_message_size(&server, 10_000);
    assert_eq!(
        fixture
            .take(&fixture.dead_letters())
            .await
            .delivery
            .data
            .len(),
        5_000
    );
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
}

/// RabbitMQ 3 reads the limit from the environment of the application, RabbitMQ 4 from a persistent
/// term.
fn limit_message_size(server: &RabbitServer, bytes: u32) {
    let expression = format!(
        "application:set_env(rabbit, max_message_size, {bytes}), persistent_term:put(max_message_size, {bytes})."
    );
    server.control(&["eval", &expression]).expect("a limit");
}
