//! Malformed and forged messages.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqStatus};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::{Connect, ConnectOptions, Delivery, SourceError, headers};

use crate::fixture::*;
use crate::recovery::{Direction, rewriting_proxy};

/// Nested field tables, encoded: each is a name of one letter, `F`, a length and the next table.
fn nested(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0; depth * 7];
    for (level, part) in bytes.chunks_exact_mut(7).enumerate() {
        let inside = u32::try_from((depth - level - 1) * 7).expect("a frame holds it");
        part[..3].copy_from_slice(b"\x01aF");
        part[3..].copy_from_slice(&inside.to_be_bytes());
    }
    bytes
}

/// Turns the string in the header `nested` into a table: both are a length and that many bytes.
fn make_table(passed: &mut [u8]) {
    if let Some(found) = passed.windows(7).position(|seven| seven == b"nestedS") {
        passed[found + 6] = b'F';
    }
}

#[tokio::test]
async fn deeply_nested_headers_crash_nothing() {
    for depth in [2, 18_000] {
        let fixture = QueueFixture::new().await;
        let mut source = open(fixture.source(QueueKind::Quorum)).await;
        let rewriting_fixture = fixture
            .reconnect_to(&rewriting_proxy(Direction::ToTheBroker, make_table).await)
            .await;
        let mut table = FieldTable::default();
        table.insert("nested".into(), AMQPValue::LongString(nested(depth).into()));
        rewriting_fixture
            .publish_with("a", BasicProperties::default().with_headers(table))
            .await;
        let first = delivery(&mut source).await;
        assert_eq!(
            first.message.headers.last("nested"),
            None,
            "the header is not a table, so this test checks nothing"
        );
        settle(&mut source, first, release(Duration::from_millis(1))).await;
        let again = delivery(&mut source).await;
        settle(&mut source, again, accept()).await;
        close(source).await;
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

/// Turns `@@@@` into bytes that are not UTF-8.
fn break_utf8(passed: &mut [u8]) {
    while let Some(found) = passed.windows(4).position(|four| four == b"@@@@") {
        passed[found..found + 4].fill(0xff);
    }
}

#[tokio::test]
async fn a_short_string_that_is_not_utf8_is_dead_lettered_and_blocks_nothing() {
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let mut source = open(fixture.source(QueueKind::Quorum).status(status.clone())).await;
    let rewriting_fixture = fixture
        .reconnect_to(&rewriting_proxy(Direction::ToTheBroker, break_utf8).await)
        .await;
    fixture.publish("before").await;
    // The maximum length of a short string.
    rewriting_fixture
        .publish_with(
            "message id",
            BasicProperties::default().with_message_id(("@".repeat(252) + "end").into()),
        )
        .await;
    let mut table = FieldTable::default();
    table.insert("a@@@@".into(), AMQPValue::LongString("value".into()));
    rewriting_fixture
        .publish_with("header", BasicProperties::default().with_headers(table))
        .await;
    fixture.publish("behind").await;
    for body in ["before", "behind"] {
        let delivery = delivery(&mut source).await;
        assert_eq!(delivery.message.body, body);
        settle(&mut source, delivery, accept()).await;
    }
    for body in ["message id", "header"] {
        let dead = fixture.take(&fixture.dead_letters()).await.delivery;
        assert_eq!(
            (&dead.data[..], header(&dead, headers::REASON).as_deref()),
            (body.as_bytes(), Some("unreadable"))
        );
        assert!(header(&dead, headers::LAST_ERROR).is_some_and(|error| error.contains("UTF-8")));
    }
    close(source).await;
    assert_eq!(status.snapshot().channels_lost, 0);
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

static BROKEN_EXPIRATIONS: AtomicUsize = AtomicUsize::new(0);

/// Replaces the expiration by text that is no number, which the broker itself would refuse.
fn break_expiration(passed: &mut [u8]) {
    while let Some(found) = passed.windows(10).position(|ten| ten == b"4294967295") {
        passed[found..found + 10].copy_from_slice(b"-1 weeks;\0");
        BROKEN_EXPIRATIONS.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn invalid_priorities_expirations_and_death_headers_have_no_effect() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Classic)).await).await;
    let proxied_url = rewriting_proxy(Direction::FromTheBroker, break_expiration).await;
    let mut source = open(fixture.source(QueueKind::Classic).url(proxied_url)).await;
    for garbage in ["", "-1", "1e3", "weeks"] {
        let fixture = fixture.reconnect().await;
        let sent = fixture.channel.basic_publish(
            "".into(),
            fixture.queue.as_str().into(),
            Default::default(),
            b"",
            BasicProperties::default().with_expiration(garbage.into()),
        );
        let answer = sent.await.expect("sent").await;
        assert!(
            answer
                .as_ref()
                .is_err_and(|error| error.to_string().contains("expiration")),
            "`{garbage}`: {answer:?}"
        );
    }
    let mut death = FieldTable::default();
    death.insert(
        "queue".into(),
        AMQPValue::LongString(fixture.queue.as_str().into()),
    );
    death.insert("reason".into(), AMQPValue::LongString("rejected".into()));
    death.insert("count".into(), AMQPValue::FieldTable(FieldTable::default()));
    let mut table = FieldTable::default();
    table.insert(
        "x-death".into(),
        AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death), AMQPValue::Boolean(true)].into()),
    );
    table.insert(
        "x-delivery-count".into(),
        AMQPValue::LongString("many".into()),
    );
    table.insert("x-acquired-count".into(), AMQPValue::Void);
    table.insert(headers::FAILURES.into(), AMQPValue::Double(1e300));
    let properties = BasicProperties::default()
        .with_headers(table)
        .with_priority(255)
        .with_expiration("4294967295".into())
        .with_timestamp(u64::MAX);
    fixture.publish_with("", properties).await;
    let first = delivery(&mut source).await;
    assert_eq!(
        (
            first.failures,
            first.message.body.len(),
            first.message.sent_at
        ),
        (0, 0, None)
    );
    assert_eq!(
        BROKEN_EXPIRATIONS.load(Ordering::SeqCst),
        1,
        "the expiration was not replaced, so this test checks nothing"
    );
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    let dead = fixture.take(&fixture.dead_letters()).await.delivery;
    assert_eq!(
        (dead.properties.priority(), dead.properties.expiration()),
        (&Some(255), &None)
    );
    close(source).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn forged_headers_are_removed_from_every_kind_of_dead_letter() {
    const LIMIT: usize = 10;
    let fixture = QueueFixture::new().await;
    // With this prefetch every release becomes a delayed copy.
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .body_limit(LIMIT)
            .prefetch(1),
    )
    .await;
    let names = [
        "oncegate-id",
        "oncegate-reason",
        "oncegate-origin",
        "oncegate-body-omitted",
        "oncegate-rejected-at",
        "mine",
    ];
    let table: BTreeMap<_, _> = names
        .into_iter()
        .map(|name| (name.into(), AMQPValue::LongString("victim".into())))
        .collect();
    let forged = BasicProperties::default().with_headers(table.into());
    let rewriting_fixture = fixture
        .reconnect_to(&rewriting_proxy(Direction::ToTheBroker, break_utf8).await)
        .await;
    fixture
        .publish_with("a body over the limit", forged.clone())
        .await;
    rewriting_fixture
        .publish_with("unreadable", forged.clone().with_message_id("@@@@".into()))
        .await;
    for body in ["no id", "in doubt", "delayed"] {
        fixture.publish_with(body, forged.clone()).await;
    }
    let settlements = [
        Settlement::Reject(Reason::MissingId),
        Settlement::Reject(Reason::InDoubt(DoubtCause::HandlerReported)),
        release(Duration::from_millis(1)),
    ];
    for settlement in settlements {
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, settlement).await;
    }
    let delayed = delivery(&mut source).await;
    assert_eq!(
        (delayed.failures, header_of(&delayed, "oncegate-id")),
        (1, Some("victim".into())),
        "a delayed copy keeps the producer's headers"
    );
    let seen = header_of(&delayed, headers::FIRST_SEEN).expect("the header");
    settle(&mut source, delayed, Settlement::Reject(Reason::Refused)).await;

    let mut dead_letters = vec![fixture.take(&fixture.in_doubt()).await.delivery];
    for _ in 0..4 {
        dead_letters.push(fixture.take(&fixture.dead_letters()).await.delivery);
    }
    for dead_letter in dead_letters {
        let body = String::from_utf8_lossy(&dead_letter.data).into_owned();
        let table = dead_letter.properties.headers().clone().unwrap_or_default();
        let forged = table.inner().iter().filter(|(_, value)| {
            value
                .as_long_string()
                .is_some_and(|value| value.as_bytes() == b"victim")
        });
        assert_eq!(
            forged.map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["mine"],
            "{body}"
        );
        assert_eq!(
            header(&dead_letter, "x-death"),
            None,
            "{body}: only messages that the broker dead-lettered have it"
        );
        let (first_seen, rejected_at) = (
            header(&dead_letter, headers::FIRST_SEEN),
            header(&dead_letter, "oncegate-rejected-at"),
        );
        assert_eq!(
            first_seen,
            (body == "delayed").then(|| seen.clone()),
            "{body}"
        );
        assert!(
            rejected_at.is_some_and(|at| at.parse::<u64>().is_ok()),
            "{body}"
        );
    }
    close(source).await;
    fixture.delete_queues().await;
}

fn header_of(delivery: &Delivery, name: &str) -> Option<String> {
    delivery
        .message
        .headers
        .last(name)
        .map(|value| String::from_utf8_lossy(value).into_owned())
}

/// A tool uses `basic.get`, which the source never does.
#[tokio::test]
async fn a_connection_for_tools_receives_malformed_messages_as_the_source_does() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Classic)).await).await;
    let (queue, exchange) = (fixture.queue.as_str(), "amq.topic");
    fixture
        .channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            "#".into(),
            Default::default(),
            FieldTable::default(),
        )
        .await
        .expect("bound");
    let rewriting_fixture = fixture
        .reconnect_to(&rewriting_proxy(Direction::ToTheBroker, break_utf8).await)
        .await;
    let odd = rewriting_fixture.channel.basic_publish(
        exchange.into(),
        "@@@@".into(),
        Default::default(),
        b"odd",
        BasicProperties::default(),
    );
    assert!(odd.await.expect("sent").await.expect("confirmed").is_ack());
    let rewriting_fixture = fixture
        .reconnect_to(&rewriting_proxy(Direction::ToTheBroker, make_table).await)
        .await;
    let mut table = FieldTable::default();
    table.insert(
        "nested".into(),
        AMQPValue::LongString(nested(15_000).into()),
    );
    rewriting_fixture
        .publish_with("deep", BasicProperties::default().with_headers(table))
        .await;

    let connection = fixture
        .source(QueueKind::Classic)
        .client("a tool")
        .await
        .expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    for (body, key) in [("odd", "\u{1a}\u{1a}\u{1a}\u{1a}"), ("deep", queue)] {
        let taken = channel
            .basic_get(queue.into(), BasicGetOptions { no_ack: true })
            .await
            .expect("the queue")
            .expect("a message");
        assert_eq!(
            (
                &taken.delivery.data[..],
                taken.delivery.routing_key.as_str()
            ),
            (body.as_bytes(), key)
        );
    }
    connection.close(200, "OK".into()).await.expect("closed");
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_connection_for_tools_fails_with_the_errors_of_the_source() {
    let source = |url: &str| RabbitMq::queue("q").url(url);
    for refused in [
        source("amqp://h/%2f?verify=verify_none"),
        source("amqp://guest:can/ary@h/"),
        source("amqp://h").ca_certificate("/x"),
    ] {
        let by_the_source = refused
            .clone()
            .connect(ConnectOptions::default())
            .await
            .expect_err("refused")
            .to_string();
        let error = refused.client("a tool").await.expect_err("refused");
        assert!(
            matches!(error, SourceError::Misconfigured { .. })
                && error.to_string() == by_the_source,
            "{error}"
        );
    }
    let wrong = crate::fixture::url().replacen("guest:guest", "guest:canary", 1);
    for (url, words) in [
        (wrong.as_str(), "check the user and the password"),
        (
            "amqp://guest:canary@127.0.0.1:1",
            "check that RabbitMQ is running",
        ),
    ] {
        let error = source(url)
            .client("a tool")
            .await
            .expect_err("no connection");
        let SourceError::Unavailable(cause) = &error else {
            panic!("{error}")
        };
        let cause = cause.downcast_ref::<SourceError>();
        assert!(
            matches!(cause, Some(SourceError::Misconfigured { setting, .. }) if setting == "url"),
            "{error}"
        );
        assert!(
            error.to_string().contains(words) && !format!("{error} {error:?}").contains("canary"),
            "{error:?}"
        );
    }
}
