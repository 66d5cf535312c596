//! The table of bad input: what is published to a real broker, how it is handled, what is logged,
//! and the table in the book.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use oncegate_amqp::QueueKind;
use oncegate_core::source::headers;
use oncegate_testkit::bad_input::{BadInputConsumer, RejectedBy, Row, assert_book_table};

use crate::fixture::*;

/// The source's body limit in bytes.
const BODY_LIMIT: usize = 1 << 16;

/// The id, other headers, and the body if it is not the number of the row.
type TestMessage = (
    Option<AMQPValue>,
    Vec<(&'static str, AMQPValue)>,
    Option<&'static [u8]>,
);

fn text(bytes: impl AsRef<[u8]>) -> AMQPValue {
    AMQPValue::LongString(bytes.as_ref().into())
}

/// Messages that differ only in their ids.
fn ids<const N: usize>(ids: [AMQPValue; N]) -> Vec<TestMessage> {
    ids.into_iter()
        .map(|id| (Some(id), Vec::new(), None))
        .collect()
}

fn with(name: &'static str, id: &str, value: AMQPValue) -> Vec<TestMessage> {
    vec![(Some(text(id)), vec![(name, value)], None)]
}

fn rows() -> Vec<Row<TestMessage>> {
    let nested = || {
        AMQPValue::FieldTable(
            [("id".into(), text("inner"))]
                .into_iter()
                .collect::<std::collections::BTreeMap<_, _>>()
                .into(),
        )
    };
    let death = [
        ("queue", text("elsewhere")),
        ("reason", text("rejected")),
        ("count", AMQPValue::LongString("-1".into())),
    ];
    let death: FieldTable = death
        .into_iter()
        .map(|(name, value)| (name.into(), value))
        .collect::<BTreeMap<_, _>>()
        .into();
    let deaths = AMQPValue::FieldArray(FieldArray::from(vec![
        AMQPValue::FieldTable(death),
        AMQPValue::Boolean(true),
    ]));
    let body = |id: &str, body: &'static [u8]| (Some(text(id)), Vec::new(), Some(body));
    vec![
        Row::new("no id", 0, &["missing-id"], vec![(None, Vec::new(), None)]),
        Row::new("an empty id", 0, &["missing-id"], ids([text("")])),
        Row::new("an id of blanks", 1, &[], ids([text("   ")])),
        Row::new("a NUL in an id", 1, &[], ids([text("a\0b")])),
        Row::new(
            "an id that is a Redis command, with CR and LF",
            1,
            &[],
            ids([text("x\r\n*1\r\n$8\r\nFLUSHALL\r\n")]),
        ),
        Row::new("an id that is not UTF-8", 1, &[], ids([text(b"\xff\xfe")])),
        Row::new(
            "`{}` and `{a}b`: two ids",
            2,
            &[],
            ids([text("{}"), text("{a}b")]),
        ),
        Row::new(
            "`a:b` and `processed:a:b`: two ids",
            2,
            &[],
            ids([text("a:b"), text("processed:a:b")]),
        ),
        Row::new(
            "ids of 200 and 201 bytes, one the beginning of the other",
            2,
            &[],
            ids([text("i".repeat(200)), text("i".repeat(201))]),
        ),
        Row::new("an id of 64 KiB", 1, &[], ids([text("i".repeat(1 << 16))])),
        Row::new(
            "the same word in NFC and in NFD: two ids",
            2,
            &[],
            ids([text("é"), text("e\u{301}")]),
        ),
        Row::new(
            "an id as a number, then as text: one id",
            1,
            &[],
            ids([AMQPValue::LongInt(42), text("42")]),
        ),
        Row::new(
            "an id that is null",
            0,
            &["unusable-id"],
            ids([AMQPValue::Void]),
        ),
        Row::new(
            "an id that is a table",
            0,
            &["unusable-id"],
            ids([nested()]),
        ),
        Row::new(
            "an id that is a number with a fraction",
            1,
            &[],
            ids([AMQPValue::Double(1.5)]),
        ),
        Row::new(
            "the same message twice, neither marked as redelivered",
            1,
            &[],
            ids([text("twice"), text("twice")]),
        ),
        Row::new(
            "the same id with another body",
            1,
            &[],
            vec![body("other", b" 16"), body("other", b"16 ")],
        ),
        Row::new(
            "an empty body",
            0,
            &["unreadable"],
            vec![body("empty", b"")],
        ),
        Row::new(
            "a body that does not parse",
            0,
            &["unreadable"],
            vec![body("parse", b"{\"a\":")],
        ),
        Row::new(
            "a body beyond the limit",
            0,
            &["too-large"],
            vec![body("large", &[b'x'; BODY_LIMIT + 1])],
        )
        .rejected_by(RejectedBy::Source),
        Row::new(
            "a forged `x-death`",
            1,
            &[],
            with("x-death", "death", deaths),
        ),
        Row::new(
            "a forged `x-delivery-count` of a wrong type",
            1,
            &[],
            with("x-delivery-count", "count", text("many")),
        ),
        Row::new(
            "a forged number of failures out of range",
            1,
            &[],
            with(headers::FAILURES, "failures", AMQPValue::Double(1e300)),
        ),
        Row::new(
            "a handler that panics with a payload that is not text, at its last attempt",
            0,
            &["attempts-spent"],
            ids([text("panic")]),
        ),
        Row::new(
            "a handler that blocks its thread for longer than its lease",
            1,
            &[],
            ids([text("blocks")]),
        ),
        Row::new(
            "a handler that waits without end, at its last attempt",
            0,
            &["attempts-spent"],
            ids([text("waits")]),
        ),
        Row::new(
            "a handler that leaves a thread behind, which outlives the consumer",
            1,
            &[],
            ids([text("leaves")]),
        ),
    ]
}

#[test]
fn the_book_has_the_table() {
    assert_book_table(
        include_str!("../../../../docs/contributing/bad-input.md"),
        "## From RabbitMQ",
        &rows(),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_bad_message_is_handled_as_documented_and_blocks_no_other() {
    let (fixture, rows) = (QueueFixture::new().await, rows());
    let begin =
        || BadInputConsumer::start(fixture.source(QueueKind::Quorum).body_limit(BODY_LIMIT));
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    let mut consumer = begin();
    for (number, row) in rows.iter().enumerate() {
        if !row.reasons.is_empty() {
            // A consumer logs such a warning once in ten seconds, and each row has one.
            std::mem::replace(&mut consumer, begin()).end().await;
        }
        for (id, others, body) in &row.messages {
            let mut table = FieldTable::default();
            table.insert("row".into(), text(number.to_string()));
            for (name, value) in id
                .iter()
                .map(|id| (&"id", id))
                .chain(others.iter().map(|(name, value)| (name, value)))
            {
                table.insert((*name).into(), value.clone());
            }
            let body = body.map_or_else(|| number.to_string().into_bytes(), <[u8]>::to_vec);
            assert!(
                fixture
                    .try_publish(body, BasicProperties::default().with_headers(table))
                    .await
            );
        }
        let mut reasons = Vec::new();
        for _ in row.reasons {
            let dead_letter = fixture.take(&fixture.dead_letters()).await.delivery;
            assert_eq!(
                header(&dead_letter, "row"),
                Some(number.to_string()),
                "{}",
                row.input
            );
            reasons.push(header(&dead_letter, headers::REASON).expect("a reason"));
        }
        assert_eq!(reasons, row.reasons, "{}", row.input);
        consumer.check_row(number, row, &fixture.queue).await;
    }
    consumer.end().await;
    fixture.wait_until_empty(&fixture.queue).await;
    assert_eq!(
        (
            fixture.ready_messages(&fixture.dead_letters()).await,
            fixture.ready_messages(&fixture.in_doubt()).await
        ),
        (0, 0)
    );
    fixture.delete_queues().await;
}
