//! Copies that are refused, and what becomes of those beside them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqSource, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Settled, Source};
use oncegate_testkit::servers::RabbitServer;

use crate::rig::*;

const EACH: usize = 200;

/// Publishes, receives and settles in one call: half of the messages rejected, half released for
/// long.
async fn reject_and_release(rig: &Rig, source: &mut RabbitMqSource) {
    for number in 0..2 * EACH {
        rig.publish(&number.to_string()).await;
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
            Settled {
                delivery,
                settlement,
                story: None,
            }
        })
        .collect();
    source.settle(&mut settled).await.expect("settled");
}

/// Takes all that stands in a queue: its bodies, and how many messages there were. By a connection
/// of its own: the broker ends one that asks a queue which has just been made, and is not ready.
async fn empty(rig: &Rig, queue: &str) -> (BTreeSet<Vec<u8>>, usize) {
    let rig = rig.again().await;
    let (mut bodies, mut count) = (BTreeSet::new(), 0);
    while let Ok(Some(message)) = rig
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
async fn a_missing_dead_letter_queue_costs_no_copy_to_another_queue() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
    // Which confirmation a returned copy meets is a matter of chance.
    for _ in 0..4 {
        rig.channel
            .queue_delete(
                rig.dead_letters().as_str().into(),
                QueueDeleteOptions::default(),
            )
            .await
            .expect("deleted");
        reject_and_release(&rig, &mut source).await;
        let patience = Instant::now() + Duration::from_secs(10);
        let (mut dead, mut delayed, mut copies) = (BTreeSet::new(), BTreeSet::new(), 0);
        while dead.len() < EACH || delayed.len() < EACH {
            assert!(
                Instant::now() < patience,
                "a copy was lost: {} dead letters, {} delayed",
                dead.len(),
                delayed.len()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
            if rig.exists(&rig.dead_letters()).await {
                dead.append(&mut empty(&rig, &rig.dead_letters()).await.0);
            }
            let (mut some, count) = empty(&rig, &format!("{}.delay.30000", rig.queue)).await;
            delayed.append(&mut some);
            copies += count;
        }
        assert_eq!(
            copies, EACH,
            "the copies to a sound queue were published again"
        );
        assert_eq!(dead.union(&delayed).count(), 2 * EACH);
    }
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn a_missing_dead_letter_queue_may_be_made_by_hand_later() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Classic)).await).await;
    let mut source = open(rig.source(QueueKind::Classic).topology(Topology::Check)).await;
    rig.channel
        .queue_delete(
            rig.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    for number in 0..2 * EACH {
        rig.publish(&number.to_string()).await;
    }
    let (mut dead, _) = deliveries(&mut source, 2 * EACH, Duration::from_secs(20)).await;
    let doubtful = dead.split_off(EACH);
    for delivery in dead {
        settle(&mut source, delivery, Settlement::Reject(Reason::Refused)).await;
    }
    // In-doubt messages go on meanwhile, beside copies that are returned again and again.
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
    let patience = Instant::now() + Duration::from_secs(10);
    while (rig.ready(&rig.in_doubt()).await as usize) < EACH {
        assert!(
            Instant::now() < patience,
            "the in-doubt messages wait for the dead letters"
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
    rig.channel
        .queue_declare(rig.dead_letters().as_str().into(), options, arguments)
        .await
        .expect("declared");
    close(source).await;
    let (doubt, doubts) = empty(&rig, &rig.in_doubt()).await;
    let (dead, _) = empty(&rig, &rig.dead_letters()).await;
    assert_eq!((dead.len(), doubt.len(), doubts), (EACH, EACH, EACH));
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn a_message_with_as_many_headers_as_fit_can_be_rejected_and_delayed() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
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
        rig.publish_with(body, BasicProperties::default().with_headers(table.clone()))
            .await;
    }
    let rejected = delivery(&mut source).await;
    settle(&mut source, rejected, Settlement::Reject(Reason::Refused)).await;
    let released = delivery(&mut source).await;
    settle(&mut source, released, release(Duration::from_secs(25))).await;
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    for queue in [rig.dead_letters(), format!("{}.delay.30000", rig.queue)] {
        let copy = rig.take(&queue).await.delivery;
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
    rig.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_the_broker_answers_by_closing_the_channel_stops_no_other() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let rig = Rig::at(&server.url()).await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
    let large = "x".repeat(5_000);
    rig.publish(&large).await;
    for number in 0..40 {
        rig.publish(&number.to_string()).await;
    }
    let (all, _) = deliveries(&mut source, 41, Duration::from_secs(20)).await;
    // As after an upgrade to a release with a smaller limit.
    server
        .control(&[
            "eval",
            "application:set_env(rabbit, max_message_size, 1000).",
        ])
        .expect("a limit");
    for delivery in all {
        settle(&mut source, delivery, Settlement::Reject(Reason::Refused)).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let patience = Instant::now() + Duration::from_secs(20);
    let (mut dead, mut copies) = (BTreeSet::new(), 0);
    while dead.len() < 40 {
        assert!(
            Instant::now() < patience,
            "{} of 40 dead letters",
            dead.len()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
        let (mut some, count) = empty(&rig, &rig.dead_letters()).await;
        dead.append(&mut some);
        copies += count;
    }
    assert!(
        !dead.contains(large.as_bytes()),
        "the limit stopped nothing: the test proves nothing"
    );
    assert!(copies <= 50, "{copies} copies of 40 messages");
    server
        .control(&[
            "eval",
            "application:set_env(rabbit, max_message_size, 10000).",
        ])
        .expect("no limit");
    assert_eq!(
        rig.take(&rig.dead_letters()).await.delivery.data.len(),
        5_000
    );
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
}
