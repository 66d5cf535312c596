//! Messages that nobody should send.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqStatus};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::{Delivery, Open, SourceError, headers};

use crate::rig::*;
use crate::trouble::{Way, spoiling_proxy};

/// A table in a table in a table, as it travels: a name of one letter, `F`, a length, and what is
/// inside.
fn nested(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0; depth * 7];
    for (level, part) in bytes.chunks_exact_mut(7).enumerate() {
        let inside = u32::try_from((depth - level - 1) * 7).expect("a frame holds it");
        part[..3].copy_from_slice(b"\x01aF");
        part[3..].copy_from_slice(&inside.to_be_bytes());
    }
    bytes
}

/// Makes the text under `nested` a table: both have a length and so many bytes.
fn as_table(passed: &mut [u8]) {
    if let Some(found) = passed.windows(7).position(|seven| seven == b"nestedS") {
        passed[found + 6] = b'F';
    }
}

#[tokio::test]
async fn headers_nested_as_deeply_as_fits_are_carried_and_end_no_process() {
    for depth in [2, 18_000] {
        let rig = Rig::new().await;
        let mut source = open(rig.source(QueueKind::Quorum)).await;
        let spoiler = rig
            .again_at(&spoiling_proxy(Way::ToTheBroker, as_table).await)
            .await;
        let mut table = FieldTable::default();
        table.insert("nested".into(), AMQPValue::LongString(nested(depth).into()));
        spoiler
            .publish_with("a", BasicProperties::default().with_headers(table))
            .await;
        let first = delivery(&mut source).await;
        assert_eq!(
            first.message.headers.last("nested"),
            None,
            "it was no table: the test proves nothing"
        );
        settle(&mut source, first, release(Duration::from_millis(1))).await;
        let again = delivery(&mut source).await;
        settle(&mut source, again, accept()).await;
        close(source).await;
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

/// Makes `@@@@` a text that is not UTF-8.
fn not_text(passed: &mut [u8]) {
    while let Some(found) = passed.windows(4).position(|four| four == b"@@@@") {
        passed[found..found + 4].fill(0xff);
    }
}

#[tokio::test]
async fn what_is_not_text_where_text_has_to_be_stands_in_the_dead_letters_and_stops_nothing() {
    let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
    let mut source = open(rig.source(QueueKind::Quorum).status(status.clone())).await;
    let spoiler = rig
        .again_at(&spoiling_proxy(Way::ToTheBroker, not_text).await)
        .await;
    rig.publish("before").await;
    // As long as a short string may be.
    spoiler
        .publish_with(
            "message id",
            BasicProperties::default().with_message_id(("@".repeat(252) + "end").into()),
        )
        .await;
    let mut table = FieldTable::default();
    table.insert("a@@@@".into(), AMQPValue::LongString("value".into()));
    spoiler
        .publish_with("header", BasicProperties::default().with_headers(table))
        .await;
    rig.publish("behind").await;
    for body in ["before", "behind"] {
        let delivery = delivery(&mut source).await;
        assert_eq!(delivery.message.body, body);
        settle(&mut source, delivery, accept()).await;
    }
    for body in ["message id", "header"] {
        let dead = rig.take(&rig.dead_letters()).await.delivery;
        assert_eq!(
            (&dead.data[..], header(&dead, headers::REASON).as_deref()),
            (body.as_bytes(), Some("unreadable"))
        );
        assert!(header(&dead, headers::LAST_ERROR).is_some_and(|error| error.contains("UTF-8")));
    }
    close(source).await;
    assert_eq!(status.snapshot().reconnects, 0);
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

static NO_TIME: AtomicUsize = AtomicUsize::new(0);

/// Makes the expiration no number. The broker takes none that is not one.
fn no_time(passed: &mut [u8]) {
    while let Some(found) = passed.windows(10).position(|ten| ten == b"4294967295") {
        passed[found..found + 10].copy_from_slice(b"-1 weeks;\0");
        NO_TIME.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn odd_priorities_and_expirations_and_a_nested_forged_history_change_nothing() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Classic)).await).await;
    let way = spoiling_proxy(Way::FromTheBroker, no_time).await;
    let mut source = open(rig.source(QueueKind::Classic).url(way)).await;
    for garbage in ["", "-1", "1e3", "weeks"] {
        let rig = rig.again().await;
        let sent = rig.channel.basic_publish(
            "".into(),
            rig.queue.as_str().into(),
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
        AMQPValue::LongString(rig.queue.as_str().into()),
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
    rig.publish_with("", properties).await;
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
        NO_TIME.load(Ordering::SeqCst),
        1,
        "it was a number: the test proves nothing"
    );
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    let dead = rig.take(&rig.dead_letters()).await.delivery;
    assert_eq!(
        (dead.properties.priority(), dead.properties.expiration()),
        (&Some(255), &None)
    );
    close(source).await;
    rig.done().await;
}

#[tokio::test]
async fn forged_headers_are_stripped_on_every_way_into_the_dead_letters() {
    const LIMIT: usize = 10;
    let rig = Rig::new().await;
    // With this prefetch nothing waits in memory: what is released becomes a delayed copy.
    let mut source = open(rig.source(QueueKind::Quorum).body_limit(LIMIT).prefetch(1)).await;
    let names = [
        "oncegate-id",
        "oncegate-reason",
        "oncegate-origin",
        "oncegate-body-omitted",
        "oncegate-set-aside-at",
        "mine",
    ];
    let table: BTreeMap<_, _> = names
        .into_iter()
        .map(|name| (name.into(), AMQPValue::LongString("victim".into())))
        .collect();
    let forged = BasicProperties::default().with_headers(table.into());
    let spoiler = rig
        .again_at(&spoiling_proxy(Way::ToTheBroker, not_text).await)
        .await;
    rig.publish_with("too large for it", forged.clone()).await;
    spoiler
        .publish_with("unreadable", forged.clone().with_message_id("@@@@".into()))
        .await;
    for body in ["no id", "in doubt", "delayed"] {
        rig.publish_with(body, forged.clone()).await;
    }
    let settlements = [
        Settlement::Reject(Reason::MissingId),
        Settlement::Reject(Reason::InDoubt(DoubtCause::Said)),
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
        "a delayed copy is as it was sent"
    );
    let seen = header_of(&delayed, headers::FIRST_SEEN).expect("it says when it was seen first");
    settle(&mut source, delayed, Settlement::Reject(Reason::Refused)).await;

    let mut letters = vec![rig.take(&rig.in_doubt()).await.delivery];
    for _ in 0..4 {
        letters.push(rig.take(&rig.dead_letters()).await.delivery);
    }
    for letter in letters {
        let body = String::from_utf8_lossy(&letter.data).into_owned();
        let table = letter.properties.headers().clone().unwrap_or_default();
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
            header(&letter, "x-death"),
            None,
            "{body}: that is the broker's, and tells what the broker dead-lettered"
        );
        let (first_seen, set_aside) = (
            header(&letter, headers::FIRST_SEEN),
            header(&letter, "oncegate-set-aside-at"),
        );
        assert_eq!(
            first_seen,
            (body == "delayed").then(|| seen.clone()),
            "{body}"
        );
        assert!(
            set_aside.is_some_and(|at| at.parse::<u64>().is_ok()),
            "{body}"
        );
    }
    close(source).await;
    rig.done().await;
}

fn header_of(delivery: &Delivery, name: &str) -> Option<String> {
    delivery
        .message
        .headers
        .last(name)
        .map(|value| String::from_utf8_lossy(value).into_owned())
}

/// A tool takes messages one by one, which the source never does.
#[tokio::test]
async fn a_connection_for_tools_survives_what_the_source_survives() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Classic)).await).await;
    let (queue, exchange) = (rig.queue.as_str(), "amq.topic");
    rig.channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            "#".into(),
            Default::default(),
            FieldTable::default(),
        )
        .await
        .expect("bound");
    let spoiler = rig
        .again_at(&spoiling_proxy(Way::ToTheBroker, not_text).await)
        .await;
    let odd = spoiler.channel.basic_publish(
        exchange.into(),
        "@@@@".into(),
        Default::default(),
        b"odd",
        BasicProperties::default(),
    );
    assert!(odd.await.expect("sent").await.expect("confirmed").is_ack());
    let spoiler = rig
        .again_at(&spoiling_proxy(Way::ToTheBroker, as_table).await)
        .await;
    let mut table = FieldTable::default();
    table.insert(
        "nested".into(),
        AMQPValue::LongString(nested(15_000).into()),
    );
    spoiler
        .publish_with("deep", BasicProperties::default().with_headers(table))
        .await;

    let connection = rig
        .source(QueueKind::Classic)
        .connect("a tool")
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
    rig.done().await;
}

#[tokio::test]
async fn a_connection_for_tools_is_refused_what_the_source_is_refused() {
    let source = |url: &str| RabbitMq::queue("q").url(url);
    for refused in [
        source("amqp://h/%2f?verify=verify_none"),
        source("amqp://guest:can/ary@h/"),
        source("amqp://h").ca_certificate("/x"),
    ] {
        let by_the_source = refused
            .clone()
            .open()
            .await
            .expect_err("refused")
            .to_string();
        let error = refused.connect("a tool").await.expect_err("refused");
        assert!(
            matches!(error, SourceError::Misconfigured { .. })
                && error.to_string() == by_the_source,
            "{error}"
        );
    }
    let wrong = crate::rig::url().replacen("guest:guest", "guest:canary", 1);
    for (url, words) in [
        (wrong.as_str(), "check the user and the password"),
        ("amqp://guest:canary@127.0.0.1:1", "is RabbitMQ running"),
    ] {
        let error = source(url)
            .connect("a tool")
            .await
            .expect_err("no connection");
        let SourceError::Unavailable(cause) = &error else {
            panic!("{error}")
        };
        let told = cause.downcast_ref::<SourceError>();
        assert!(
            matches!(told, Some(SourceError::Misconfigured { setting, .. }) if setting == "url"),
            "{error}"
        );
        assert!(
            error.to_string().contains(words) && !format!("{error} {error:?}").contains("canary"),
            "{error:?}"
        );
    }
}
