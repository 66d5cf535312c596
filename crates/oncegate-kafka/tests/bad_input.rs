//! Bad input as a table: the message at a real broker, the outcome, the reasons that the operator
//! sees, and the text of the book.

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/fixture.rs"]
mod fixture;

use oncegate_core::source::headers;
use oncegate_testkit::bad_input::{BadInputConsumer, RejectedBy, Row, assert_book_table};
use rdkafka::message::{Header, OwnedHeaders};

use crate::fixture::*;

/// The body limit of the source.
const BODY_LIMIT: usize = 1 << 16;

/// The headers in addition to the row number, the key and the body.
struct Message {
    headers: Vec<(&'static str, Option<Vec<u8>>)>,
    key: Option<&'static [u8]>,
    body: Body,
}

enum Body {
    /// The row number.
    Row,
    Null,
    Of(&'static [u8]),
}

/// A message with these headers, whose body is the row number.
fn with_headers(headers: Vec<(&'static str, Option<Vec<u8>>)>) -> Message {
    Message {
        headers,
        key: None,
        body: Body::Row,
    }
}

/// Messages that differ only in their ids.
fn ids<const N: usize>(ids: [&[u8]; N]) -> Vec<Message> {
    ids.into_iter()
        .map(|id| with_headers(vec![("id", Some(id.to_vec()))]))
        .collect()
}

fn body(id: &str, body: Body) -> Message {
    Message {
        body,
        ..with_headers(vec![("id", Some(id.into()))])
    }
}

fn rows() -> Vec<Row<Message>> {
    let also = |id: &[u8], name, value: Option<&[u8]>| {
        vec![with_headers(vec![
            ("id", Some(id.into())),
            (name, value.map(Vec::from)),
        ])]
    };
    vec![
        Row::new("no id", 0, &["missing-id"], vec![with_headers(vec![])]),
        Row::new("an empty id", 0, &["missing-id"], ids([b""])),
        Row::new(
            "an id that is null",
            0,
            &["unusable-id"],
            vec![with_headers(vec![("id", None)])],
        ),
        Row::new("an id of blanks", 1, &[], ids([b"   "])),
        Row::new("a NUL in an id", 1, &[], ids([b"a\0b"])),
        Row::new(
            "an id that is a Redis command, with CR and LF",
            1,
            &[],
            ids([b"x\r\n*1\r\n$8\r\nFLUSHALL\r\n"]),
        ),
        Row::new("an id that is not UTF-8", 1, &[], ids([b"\xff\xfe"])),
        Row::new("`{}` and `{a}b`: two ids", 2, &[], ids([b"{}", b"{a}b"])),
        Row::new(
            "`a:b` and `processed:a:b`: two ids",
            2,
            &[],
            ids([b"a:b", b"processed:a:b"]),
        ),
        Row::new(
            "ids of 200 and 201 bytes, one the beginning of the other",
            2,
            &[],
            ids([&[b'i'; 200], &[b'i'; 201]]),
        ),
        Row::new("an id of 64 KiB", 1, &[], ids([&[b'i'; 1 << 16]])),
        Row::new(
            "the same word in NFC and in NFD: two ids",
            2,
            &[],
            ids(["é".as_bytes(), "e\u{301}".as_bytes()]),
        ),
        Row::new(
            "two ids in one message",
            0,
            &["unusable-id"],
            vec![with_headers(vec![
                ("id", Some(b"first".into())),
                ("id", Some(b"last".into())),
            ])],
        ),
        Row::new("the same message twice", 1, &[], ids([b"twice", b"twice"])),
        Row::new(
            "the same id with another body",
            1,
            &[],
            vec![
                body("other", Body::Of(b" 14")),
                body("other", Body::Of(b"14 ")),
            ],
        ),
        Row::new(
            "a null body (a tombstone)",
            0,
            &["unreadable"],
            vec![body("null", Body::Null)],
        ),
        Row::new(
            "an empty body",
            0,
            &["unreadable"],
            vec![body("empty", Body::Of(b""))],
        ),
        Row::new(
            "a body that does not parse",
            0,
            &["unreadable"],
            vec![body("parse", Body::Of(b"{\"a\":"))],
        ),
        Row::new(
            "a body beyond the limit",
            0,
            &["too-large"],
            vec![body("large", Body::Of(&[b'x'; BODY_LIMIT + 1]))],
        )
        .rejected_by(RejectedBy::SourceInline),
        Row::new(
            "a null header value",
            1,
            &[],
            also(b"also null", "null", None),
        ),
        Row::new(
            "a header name that is not UTF-8",
            1,
            &[],
            also(b"also odd", invalid_utf8(b"a\xff"), Some(b"value")),
        ),
        Row::new(
            "a key that is not UTF-8",
            1,
            &[],
            vec![Message {
                key: Some(b"\xff\0"),
                ..with_headers(vec![("id", Some(b"key".into()))])
            }],
        ),
        Row::new(
            "a handler that panics with a payload that is not text, at its last attempt",
            0,
            &["attempts-spent"],
            ids([b"panic"]),
        ),
        Row::new(
            "a handler that blocks its thread for longer than its lease",
            1,
            &[],
            ids([b"blocks"]),
        ),
        Row::new(
            "a handler that waits without end, at its last attempt",
            0,
            &["attempts-spent"],
            ids([b"waits"]),
        ),
        Row::new(
            "a handler that leaves a thread behind, which outlives the consumer",
            1,
            &[],
            ids([b"leaves"]),
        ),
    ]
}

/// A header name that the Rust producers cannot send.
#[allow(unsafe_code)]
fn invalid_utf8(name: &'static [u8]) -> &'static str {
    // SAFETY: the client reads only its pointer and length; nothing uses it as text.
    unsafe { std::str::from_utf8_unchecked(name) }
}

#[test]
fn the_book_has_the_table() {
    assert_book_table(
        include_str!("../../../docs/contributing/bad-input.md"),
        "## From Kafka",
        &rows(),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_bad_input_has_the_expected_outcome_and_the_consumer_continues() {
    let (topic, rows) = (Topic::new(1).await, rows());
    let mut consumer = BadInputConsumer::start(topic.source().body_limit(BODY_LIMIT));
    let (mut sent, mut rejected) = (0, 0);
    for (number, row) in rows.iter().enumerate() {
        let text = number.to_string();
        for Message { headers, key, body } in &row.messages {
            let all = OwnedHeaders::new().insert(Header {
                key: "row",
                value: Some(&text),
            });
            let all = headers.iter().fold(all, |all, (key, value)| {
                all.insert(Header {
                    key,
                    value: value.as_ref(),
                })
            });
            let body = match body {
                Body::Row => Some(text.as_bytes()),
                Body::Null => None,
                Body::Of(bytes) => Some(*bytes),
            };
            topic.send(*key, body, all).await;
            sent += 1;
        }
        rejected += row.reasons.len();
        consumer.check_row(number, row, &topic.name).await;
    }
    topic.await_commit(0, sent).await;
    consumer.end().await;
    let mut reasons = vec![Vec::new(); rows.len()];
    for dead_letter in topic
        .read(topic.dead_letters(), rejected, text_headers)
        .await
    {
        let last = |name: &str| {
            dead_letter
                .iter()
                .rev()
                .find(|(it, _)| it == name)
                .and_then(|(_, value)| value.clone())
                .expect("a value")
        };
        reasons[last("row").parse::<usize>().expect("a number")].push(last(headers::REASON));
    }
    for (row, reasons) in rows.iter().zip(reasons) {
        assert_eq!(reasons, row.reasons, "{}", row.input);
    }
    assert_eq!(
        (
            topic.end_of(&topic.dead_letters()).await,
            topic.end_of(&topic.in_doubt()).await
        ),
        (rejected, 0)
    );
}
