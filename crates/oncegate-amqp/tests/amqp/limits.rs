//! Types and arguments of queues, and limits of deliveries.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqStatus, Rejects, Topology};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::{Connect, ConnectOptions, Limit, Source, SourceError, headers};
use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::RabbitServer;

use crate::fixture::*;
use crate::recovery::{Direction, rewriting_proxy};

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

async fn declare(fixture: &QueueFixture, queue: &str, arguments: FieldTable) {
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    fixture
        .channel
        .queue_declare(queue.into(), options, arguments)
        .await
        .expect("the queue has these arguments");
}

#[tokio::test]
async fn the_queues_are_declared_with_at_least_once_dead_lettering() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum).single_active_consumer()).await).await;
    // The broker refuses a declaration with other arguments.
    let confirmed = |target: &str| {
        vec![
            ("x-queue-type", text("quorum")),
            ("x-dead-letter-exchange", text("")),
            ("x-dead-letter-routing-key", text(target)),
            ("x-dead-letter-strategy", text("at-least-once")),
            ("x-overflow", text("reject-publish")),
        ]
    };
    let mut consumed = confirmed(&fixture.dead_letters());
    consumed.push(("x-single-active-consumer", AMQPValue::Boolean(true)));
    declare(&fixture, &fixture.queue, arguments(&consumed)).await;
    let mut delay = confirmed(&fixture.queue);
    delay.push(("x-message-ttl", AMQPValue::LongInt(30_000)));
    declare(
        &fixture,
        &format!("{}.delay.30000", fixture.queue),
        arguments(&delay),
    )
    .await;
    fixture.delete_queues().await;
}

/// Changes the server properties in `connection.start`. The new value has the length of the old one.
fn set_server_property(passed: &mut [u8], name: &[u8], value: &[u8]) {
    let entry = [name, b"S\0\0\0"].concat();
    if let Some(found) = passed
        .windows(entry.len())
        .position(|part| part == entry.as_slice())
    {
        let start = found + entry.len() + 1;
        let length = usize::from(passed[start - 1]);
        passed[start..start + length].copy_from_slice(&value[..length]);
    }
}

#[tokio::test]
async fn a_release_before_3_10_is_refused_with_the_reason() {
    let fixture = QueueFixture::new().await;
    let too_old = |passed: &mut [u8]| set_server_property(passed, b"version", b"3.9.99999");
    let proxied_url = rewriting_proxy(Direction::FromTheBroker, too_old).await;
    let source = fixture.source(QueueKind::Quorum).url(proxied_url);
    let client = source.client("a tool").await;
    let cause = match client {
        Err(SourceError::Unavailable(cause)) => cause.to_string(),
        other => panic!("{other:?}"),
    };
    let error = match source.connect(ConnectOptions::default()).await {
        Err(error @ SourceError::Misconfigured { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(error, cause);
    assert!(
        error.contains("is RabbitMQ 3.9, which is not supported; upgrade RabbitMQ"),
        "{error}"
    );

    let other_product = |passed: &mut [u8]| {
        set_server_property(passed, b"product", b"OtherMQ!");
        set_server_property(passed, b"version", b"1.0.00000");
    };
    let proxied_url = rewriting_proxy(Direction::FromTheBroker, other_product).await;
    close(open(fixture.source(QueueKind::Quorum).url(proxied_url)).await).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_stream_is_refused_with_the_reason() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    fixture
        .channel
        .queue_delete(fixture.queue.as_str().into(), Default::default())
        .await
        .expect("deleted");
    declare(
        &fixture,
        &fixture.queue,
        arguments(&[("x-queue-type", text("stream"))]),
    )
    .await;
    for topology in [Topology::Check, Topology::Trust, Topology::Declare] {
        let opening = tokio::time::timeout(
            Duration::from_secs(20),
            fixture
                .source(QueueKind::Quorum)
                .topology(topology)
                .connect(ConnectOptions::default()),
        );
        match opening.await.expect("an answer") {
            Err(error @ SourceError::Misconfigured { .. }) => {
                assert!(error.to_string().contains("stream"), "{error}")
            }
            other => panic!("{other:?}"),
        }
    }
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_dead_lettered_and_an_empty_one_is_delivered() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum).body_limit(100)).await;
    let large = "x".repeat(101);
    for body in [large.as_str(), "", &large[..100]] {
        fixture.publish(body).await;
    }
    for size in [0, 100] {
        let delivery = delivery(&mut source).await;
        assert_eq!(delivery.message.body.len(), size);
        settle(&mut source, delivery, accept()).await;
    }
    let dead = fixture.take(&fixture.dead_letters()).await.delivery;
    assert_eq!(
        (dead.data.len(), header(&dead, headers::REASON).as_deref()),
        (101, Some("too-large"))
    );
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn the_source_closes_the_channel_of_an_unsettled_delivery_before_the_broker_does() {
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let source = fixture
        .source(QueueKind::Quorum)
        .consumer_timeout(Duration::from_secs(3))
        .status(status.clone());
    let mut source = open(source).await;
    fixture.publish("slow").await;
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
        (read.delivered, read.stale_settlements, read.unacked),
        (2, 1, 0),
        "{read:?}"
    );
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn rejects_by_queue_reach_the_dead_letter_exchange_and_close_no_channel() {
    const COUNT: usize = 300;
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .rejects(Rejects::ByQueue)
            .prefetch(32)
            .status(status.clone()),
    )
    .await;
    for number in 0..COUNT {
        fixture.publish(&number.to_string()).await;
    }
    let (mut waiting, mut rejected, mut seen) = (Vec::new(), BTreeSet::new(), 0);
    while seen < COUNT || !waiting.is_empty() {
        if seen < COUNT && waiting.len() < 16 {
            let (some, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
            seen += some.len();
            waiting.extend(some);
        }
        // In random order, so that rejections are before, within and behind the settled prefix.
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
    fixture.publish("doubt").await;
    let doubt = delivery(&mut source).await;
    settle(
        &mut source,
        doubt,
        Settlement::Reject(Reason::InDoubt(DoubtCause::Panicked)),
    )
    .await;
    let mut dead = BTreeSet::new();
    while dead.len() < rejected.len() {
        let dead_letter = fixture.take(&fixture.dead_letters()).await.delivery;
        assert!(
            header(&dead_letter, "x-death").is_some()
                && header(&dead_letter, headers::REASON).is_none()
        );
        dead.insert(dead_letter.data);
    }
    assert_eq!(dead, rejected);
    assert_eq!(
        fixture.take(&fixture.in_doubt()).await.delivery.data,
        b"doubt"
    );
    close(source).await;
    let read = status.snapshot();
    assert_eq!(
        (read.channels_lost, read.redelivered, read.copies),
        (0, 0, 1),
        "{read:?}"
    );
    fixture.wait_until_empty(&fixture.queue).await;
    assert_eq!(
        fixture.ready_messages(&fixture.dead_letters()).await,
        0,
        "a message was rejected twice"
    );
    fixture.delete_queues().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connections_do_not_count_as_attempts_of_messages_in_the_prefetch() {
    let (fixture, proxy) = (QueueFixture::new().await, ConnectionProxy::start().await);
    let mut source = open(fixture.source(QueueKind::Quorum).url(&proxy.url)).await;
    fixture.publish_with("a", BasicProperties::default()).await;
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
        "x-delivery-count is not a number of failures"
    );
    settle(&mut source, last, accept()).await;
    close(source).await;
    fixture.delete_queues().await;
}

/// A message that crashes each consumer, without a store that counts, is dead-lettered by the
/// broker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_the_delivery_limit_is_in_the_dead_letters() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let fixture = QueueFixture::at(&server.url()).await;
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
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let source = || {
        let url = format!("amqp://guest:guest@127.0.0.1:{}/%2f", proxy.port());
        fixture.source(QueueKind::Quorum).url(url).prefetch(1)
    };
    close(open(source()).await).await;
    fixture.publish("poison").await;
    fixture.publish("sound").await;
    for delivery_number in 1..=4 {
        let mut source = open(source()).await;
        let body = delivery(&mut source).await.message.body;
        assert_eq!(
            &body[..],
            if delivery_number <= 3 {
                &b"poison"[..]
            } else {
                b"sound"
            }
        );
        // As in a crash: nothing reaches the broker. A message that is handed back with `basic.nack`
        // does not count on RabbitMQ 4.3.
        proxy.reset();
        drop(source);
        let deadline = Instant::now() + Duration::from_secs(10);
        while fixture.ready_messages(&fixture.queue).await
            + fixture.ready_messages(&fixture.dead_letters()).await
            < 2
        {
            assert!(Instant::now() < deadline, "the messages were not requeued");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let dead = fixture.take(&fixture.dead_letters()).await.delivery;
    assert_eq!(dead.data, b"poison");
    assert!(
        header(&dead, "x-first-death-reason")
            .is_some_and(|reason| reason.contains("delivery_limit")),
        "{dead:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_dead_letters_are_published_once_the_queue_has_room() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let (fixture, status) = (QueueFixture::at(&server.url()).await, RabbitMqStatus::new());
    let mut source = open(fixture.source(QueueKind::Quorum).status(status.clone())).await;
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
    // The policy takes effect after a moment.
    let deadline = Instant::now() + Duration::from_secs(60);
    while status.snapshot().copy_retries == 0 {
        assert!(
            Instant::now() < deadline,
            "no dead letter was refused, so this test checks nothing"
        );
        fixture.publish("dead letter").await;
        let dead_letter = delivery(&mut source).await;
        settle(
            &mut source,
            dead_letter,
            Settlement::Reject(Reason::Refused),
        )
        .await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server
        .control(&["-q", "clear_policy", "full"])
        .expect("no policy");
    let deadline = Instant::now() + Duration::from_secs(60);
    while status.snapshot().unacked > 0 {
        assert!(
            Instant::now() < deadline,
            "still refused: {:?}",
            status.snapshot()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_queue_with_other_arguments_is_logged_once_while_it_refuses_copies() {
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let dead_letters = format!("{}.dead-letters", fixture.queue);
    let full = arguments(&[
        ("x-max-length", AMQPValue::LongInt(0)),
        ("x-overflow", text("reject-publish")),
    ]);
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let declaring = fixture
        .channel
        .queue_declare(dead_letters.as_str().into(), options, full);
    declaring.await.expect("declared");
    let mut source = open(fixture.source(QueueKind::Quorum).status(status.clone())).await;
    fixture.publish("dead letter").await;
    let dead_letter = delivery(&mut source).await;
    settle(
        &mut source,
        dead_letter,
        Settlement::Reject(Reason::Refused),
    )
    .await;
    until("it is retried", || status.snapshot().copy_retries >= 3).await;
    assert_eq!(
        logged(&[
            "exists with other arguments than oncegate declares",
            &dead_letters
        ]),
        1
    );
    assert!(
        logged(&[
            "WARN",
            &dead_letters,
            "basic.nack; check the length limit of the queue"
        ]) >= 1
    );
    fixture
        .channel
        .queue_delete(dead_letters.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    until("it is published", || status.snapshot().unacked == 0).await;
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

async fn until(what: &str, reached: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
