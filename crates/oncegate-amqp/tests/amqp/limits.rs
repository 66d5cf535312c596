//! What a queue is, what a delivery may be, and how long it may stand open.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqStatus, Rejects, Topology};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::{Limit, Open, Source, SourceError, headers};
use oncegate_testkit::servers::RabbitServer;

use crate::rig::*;

fn arguments(pairs: &[(&str, AMQPValue)]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in pairs {
        table.insert((*name).into(), value.clone());
    }
    table
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

async fn declare(rig: &Rig, queue: &str, arguments: FieldTable) {
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    rig.channel
        .queue_declare(queue.into(), options, arguments)
        .await
        .expect("these are its arguments");
}

#[tokio::test]
async fn the_queues_are_declared_so_that_nothing_is_dropped_on_the_way() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum).single_active_consumer()).await).await;
    // The broker refuses to declare a queue with other arguments than it has.
    let confirmed = |target: &str| {
        vec![
            ("x-queue-type", text("quorum")),
            ("x-dead-letter-exchange", text("")),
            ("x-dead-letter-routing-key", text(target)),
            ("x-dead-letter-strategy", text("at-least-once")),
            ("x-overflow", text("reject-publish")),
        ]
    };
    let mut consumed = confirmed(&rig.dead_letters());
    consumed.push(("x-single-active-consumer", AMQPValue::Boolean(true)));
    declare(&rig, &rig.queue, arguments(&consumed)).await;
    let mut delay = confirmed(&rig.queue);
    delay.push(("x-message-ttl", AMQPValue::LongInt(30_000)));
    declare(
        &rig,
        &format!("{}.delay.30000", rig.queue),
        arguments(&delay),
    )
    .await;
    rig.done().await;
}

#[tokio::test]
async fn a_stream_is_refused_with_the_reason() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum)).await).await;
    rig.channel
        .queue_delete(rig.queue.as_str().into(), Default::default())
        .await
        .expect("deleted");
    declare(
        &rig,
        &rig.queue,
        arguments(&[("x-queue-type", text("stream"))]),
    )
    .await;
    for topology in [Topology::Check, Topology::Trust, Topology::Declare] {
        let opening = tokio::time::timeout(
            Duration::from_secs(20),
            rig.source(QueueKind::Quorum).topology(topology).open(),
        );
        match opening.await.expect("an answer") {
            Err(error @ SourceError::Misconfigured { .. }) => {
                assert!(error.to_string().contains("stream"), "{error}")
            }
            other => panic!("{other:?}"),
        }
    }
    rig.done().await;
}

#[tokio::test]
async fn a_body_over_the_limit_stands_in_the_dead_letters_and_an_empty_one_is_handed_over() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum).body_limit(100)).await;
    let large = "x".repeat(101);
    for body in [large.as_str(), "", &large[..100]] {
        rig.publish(body).await;
    }
    for size in [0, 100] {
        let delivery = delivery(&mut source).await;
        assert_eq!(delivery.message.body.len(), size);
        settle(&mut source, delivery, accept()).await;
    }
    let dead = rig.take(&rig.dead_letters()).await.delivery;
    assert_eq!(
        (dead.data.len(), header(&dead, headers::REASON).as_deref()),
        (101, Some("too-large"))
    );
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn a_delivery_that_stands_open_gives_the_channel_up_before_the_broker_does() {
    let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
    let source = rig
        .source(QueueKind::Quorum)
        .consumer_timeout(Duration::from_secs(3))
        .status(status.clone());
    let mut source = open(source).await;
    rig.publish("slow").await;
    let stale = delivery(&mut source).await;
    let (again, revoked) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    assert_eq!(
        (revoked, status.snapshot().redelivered),
        (vec![stale.receipt.epoch], 1)
    );
    settle(&mut source, stale, accept()).await;
    for delivery in again {
        settle(&mut source, delivery, accept()).await;
    }
    close(source).await;
    let read = status.snapshot();
    assert_eq!(
        (read.delivered, read.stale_receipts, read.unacked),
        (2, 1, 0),
        "{read:?}"
    );
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn what_is_left_to_the_queues_own_dead_letter_exchange_arrives_there_and_costs_no_channel() {
    const COUNT: usize = 300;
    let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .rejects(Rejects::ByQueue)
            .prefetch(32)
            .status(status.clone()),
    )
    .await;
    for number in 0..COUNT {
        rig.publish(&number.to_string()).await;
    }
    let (mut waiting, mut rejected, mut seen) = (Vec::new(), BTreeSet::new(), 0);
    while seen < COUNT || !waiting.is_empty() {
        if seen < COUNT && waiting.len() < 16 {
            let (some, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
            seen += some.len();
            waiting.extend(some);
        }
        // In any order, so that rejections lie before, within and beyond what is acknowledged
        // together.
        let delivery = waiting.swap_remove(fastrand::usize(..waiting.len()));
        let settlement = match fastrand::u8(..3) {
            0 => {
                rejected.insert(delivery.message.body.to_vec());
                Settlement::Reject(Reason::Refused)
            }
            _ => accept(),
        };
        settle(&mut source, delivery, settlement).await;
    }
    rig.publish("doubt").await;
    let doubt = delivery(&mut source).await;
    settle(
        &mut source,
        doubt,
        Settlement::Reject(Reason::InDoubt(DoubtCause::Panicked)),
    )
    .await;
    let mut dead = BTreeSet::new();
    while dead.len() < rejected.len() {
        let letter = rig.take(&rig.dead_letters()).await.delivery;
        assert!(header(&letter, "x-death").is_some() && header(&letter, headers::REASON).is_none());
        dead.insert(letter.data);
    }
    assert_eq!(dead, rejected);
    assert_eq!(rig.take(&rig.in_doubt()).await.delivery.data, b"doubt");
    close(source).await;
    let read = status.snapshot();
    assert_eq!(
        (read.reconnects, read.redelivered, read.copies),
        (0, 0, 1),
        "{read:?}"
    );
    rig.becomes_empty(&rig.queue).await;
    assert_eq!(
        rig.ready(&rig.dead_letters()).await,
        0,
        "one was rejected twice"
    );
    rig.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_only_lay_in_the_prefetch_keeps_its_attempts_however_often_the_connection_is_lost()
 {
    let (rig, proxy) = (Rig::new().await, Proxy::start().await);
    let mut source = open(rig.source(QueueKind::Quorum).url(&proxy.url)).await;
    rig.publish_with("a", BasicProperties::default()).await;
    for _ in 0..3 {
        delivery(&mut source).await;
        proxy.cut();
        let mut into = Vec::new();
        source
            .receive(Limit::NOTHING, &mut into)
            .await
            .expect("received");
    }
    let last = delivery(&mut source).await;
    let count = last
        .message
        .headers
        .last("x-delivery-count")
        .map(<[u8]>::to_vec);
    assert_eq!(
        (last.failures, count),
        (0, Some(b"3".to_vec())),
        "the broker counts, and we do not"
    );
    settle(&mut source, last, accept()).await;
    close(source).await;
    rig.done().await;
}

/// Who ends its consumer each time it is handed over, and whose attempts no store counts, is set
/// aside by the broker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_broker_gives_up_on_stands_in_the_dead_letters() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let rig = Rig::at(&server.url()).await;
    server
        .control(&[
            "-q",
            "set_policy",
            "limit",
            ".*",
            r#"{"delivery-limit": 2}"#,
            "--apply-to",
            "queues",
        ])
        .expect("a policy");
    let source = || rig.source(QueueKind::Quorum).prefetch(1);
    close(open(source()).await).await;
    rig.publish("poison").await;
    rig.publish("sound").await;
    for handed_over in 1..=4 {
        let mut source = open(source()).await;
        let body = delivery(&mut source).await.message.body;
        assert_eq!(
            &body[..],
            if handed_over <= 3 {
                &b"poison"[..]
            } else {
                b"sound"
            }
        );
        // It goes without a word, as with its process.
        drop(source);
        let patience = Instant::now() + Duration::from_secs(10);
        while rig.ready(&rig.queue).await + rig.ready(&rig.dead_letters()).await < 2 {
            assert!(Instant::now() < patience, "what it held did not come back");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let dead = rig.take(&rig.dead_letters()).await.delivery;
    assert_eq!(dead.data, b"poison");
    assert!(
        header(&dead, "x-first-death-reason")
            .is_some_and(|reason| reason.contains("delivery_limit")),
        "{dead:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_that_were_refused_are_taken_once_there_is_room_whatever_the_channel_was_told()
{
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let (rig, status) = (Rig::at(&server.url()).await, RabbitMqStatus::new());
    let mut source = open(rig.source(QueueKind::Quorum).status(status.clone())).await;
    let full = r#"{"max-length":0,"overflow":"reject-publish"}"#;
    server
        .control(&[
            "-q",
            "set_policy",
            "--apply-to",
            "queues",
            "full",
            r"\.dead-letters$",
            full,
        ])
        .expect("a policy");
    // Until the queue has heard of it, letters are taken.
    let patience = Instant::now() + Duration::from_secs(60);
    while status.snapshot().copy_retries == 0 {
        assert!(
            Instant::now() < patience,
            "nothing was refused: the test proves nothing"
        );
        rig.publish("letter").await;
        let letter = delivery(&mut source).await;
        settle(&mut source, letter, Settlement::Reject(Reason::Refused)).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server
        .control(&["-q", "clear_policy", "full"])
        .expect("no policy");
    let patience = Instant::now() + Duration::from_secs(60);
    while status.snapshot().unacked > 0 {
        assert!(
            Instant::now() < patience,
            "refused for good: {:?}",
            status.snapshot()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
}
