//! Bad input as a table: what comes in from a real broker, what becomes of it, and what the book says of it.

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/stage.rs"]
mod stage;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::source::headers;
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, async_trait};
use rdkafka::message::{Header, OwnedHeaders};

use crate::stage::*;

/// What the source takes.
const BODY_LIMIT: usize = 1 << 16;

/// Headers beside the number of the row, the key, and the body; without one, the number of the row.
struct Message {
    headers: Vec<(&'static str, Option<Vec<u8>>)>,
    key: Option<&'static [u8]>,
    body: Body,
}

enum Body {
    Row,
    Null,
    Of(&'static [u8]),
}

/// What comes in, how many effects that has, why each of the others is set aside, and the messages.
type Row = (&'static str, usize, &'static [&'static str], Vec<Message>);

/// A message with these headers.
fn headed(headers: Vec<(&'static str, Option<Vec<u8>>)>) -> Message {
    Message { headers, key: None, body: Body::Row }
}

/// Messages that differ in their ids alone.
fn ids<const N: usize>(ids: [&[u8]; N]) -> Vec<Message> {
    ids.into_iter().map(|id| headed(vec![("id", Some(id.to_vec()))])).collect()
}

fn body(id: &str, body: Body) -> Message {
    Message { body, ..headed(vec![("id", Some(id.into()))]) }
}

fn rows() -> Vec<Row> {
    let also = |id: &[u8], name, value: Option<&[u8]>| vec![headed(vec![("id", Some(id.into())), (name, value.map(Vec::from))])];
    vec![
        ("no id", 0, &["missing-id"], vec![headed(vec![])]),
        ("an empty id", 0, &["missing-id"], ids([b""])),
        ("an id that is null", 0, &["missing-id"], vec![headed(vec![("id", None)])]),
        ("an id of blanks", 1, &[], ids([b"   "])),
        ("a NUL in an id", 1, &[], ids([b"a\0b"])),
        ("an id that is a Redis command, with CR and LF", 1, &[], ids([b"x\r\n*1\r\n$8\r\nFLUSHALL\r\n"])),
        ("an id that is not UTF-8", 1, &[], ids([b"\xff\xfe"])),
        ("`{}` and `{a}b`: two ids", 2, &[], ids([b"{}", b"{a}b"])),
        ("`a:b` and `processed:a:b`: two ids", 2, &[], ids([b"a:b", b"processed:a:b"])),
        ("ids of 200 and 201 bytes, one the beginning of the other", 2, &[], ids([&[b'i'; 200], &[b'i'; 201]])),
        ("an id of 64 KiB", 1, &[], ids([&[b'i'; 1 << 16]])),
        ("the same word in NFC and in NFD: two ids", 2, &[], ids(["é".as_bytes(), "e\u{301}".as_bytes()])),
        ("two ids: the last one counts", 1, &[], vec![headed(vec![("id", Some(b"first".into())), ("id", Some(b"last".into()))])]),
        ("the same message twice", 1, &[], ids([b"twice", b"twice"])),
        ("the same id with another body", 1, &[], vec![body("other", Body::Of(b" 14")), body("other", Body::Of(b"14 "))]),
        ("a null body (a tombstone)", 0, &["unreadable"], vec![body("null", Body::Null)]),
        ("an empty body", 0, &["unreadable"], vec![body("empty", Body::Of(b""))]),
        ("a body that does not parse", 0, &["unreadable"], vec![body("parse", Body::Of(b"{\"a\":"))]),
        ("a body beyond the limit", 0, &["too-large"], vec![body("large", Body::Of(&[b'x'; BODY_LIMIT + 1]))]),
        ("a null header value", 1, &[], also(b"also null", "null", None)),
        ("a header name that is not UTF-8", 1, &[], also(b"also odd", unread(b"a\xff"), Some(b"value"))),
        ("a key that is not UTF-8", 1, &[], vec![Message { key: Some(b"\xff\0"), ..headed(vec![("id", Some(b"key".into()))]) }]),
        ("a handler that panics with what is no text, at its last attempt", 0, &["attempts-spent"], ids([b"panic"])),
    ]
}

/// A name that no Rust producer can send by its own means.
#[allow(unsafe_code)]
fn unread(name: &'static [u8]) -> &'static str {
    // SAFETY: the client takes its pointer and its length, and nothing reads it as text.
    unsafe { std::str::from_utf8_unchecked(name) }
}

/// As the book has it.
fn line((input, effects, reasons, _): &Row) -> String {
    let verdict = match (effects, reasons) {
        (1, []) => "handled once".to_owned(),
        (0, [reason]) => format!("dead letters, `{reason}`"),
        (count, _) => format!("handled {count} times"),
    };
    format!("| {input} | {verdict} |")
}

#[test]
fn the_book_has_the_table() {
    let book = include_str!("../../../docs/src/bad-input.md");
    let (_, section) = book.split_once("## From Kafka").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let told: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert_eq!(told, rows().iter().map(line).collect::<Vec<_>>());
}

/// How many effects each row had.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<BTreeMap<usize, usize>>>);

#[async_trait]
impl Handler for Effects {
    type Payload = usize;

    async fn handle(&self, row: usize, cx: &Context) -> Result<(), Failure> {
        if cx.id() == "panic" {
            std::panic::panic_any(row);
        }
        *self.0.lock().expect("it panics elsewhere").entry(row).or_default() += 1;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_gets_its_verdict_and_stops_nothing() {
    let (topic, effects, rows) = (Topic::new(1).await, Effects::default(), rows());
    for (number, (_, _, _, messages)) in rows.iter().enumerate() {
        let row = number.to_string();
        for Message { headers, key, body } in messages {
            let all = OwnedHeaders::new().insert(Header { key: "row", value: Some(&row) });
            let all = headers.iter().fold(all, |all, (key, value)| all.insert(Header { key, value: value.as_ref() }));
            let body = match body {
                Body::Row => Some(row.as_bytes()),
                Body::Null => None,
                Body::Of(bytes) => Some(*bytes),
            };
            topic.send(*key, body, all).await;
        }
    }
    let sent: usize = rows.iter().map(|row| row.3.len()).sum();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(topic.source().body_limit(BODY_LIMIT))
        .store(MemoryStore::new())
        .id(IdSource::header("id"))
        .attempts(1)
        .handler(effects.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    topic.await_commit(0, i64::try_from(sent).expect("a few")).await;
    let letters = rows.iter().map(|row| row.2.len()).sum();
    let mut set_aside: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for letter in topic.read(topic.dead_letters(), letters, text_headers).await {
        let header = |name: &str| letter.iter().rev().find(|(it, _)| it == name).and_then(|(_, value)| value.clone()).expect("a value");
        set_aside.entry(header("row").parse().expect("a number")).or_default().push(header(headers::REASON));
    }
    let (expected, end) = (rows.iter().map(|row| row.1).sum::<usize>(), Instant::now() + BOUND);
    while effects.0.lock().expect("it panics elsewhere").values().sum::<usize>() < expected && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    assert_eq!((topic.end_of(&topic.dead_letters()).await, topic.end_of(&topic.in_doubt()).await), (letters, 0));

    let effects = effects.0.lock().expect("it panics elsewhere").clone();
    for (number, (input, expected, reasons, _)) in rows.iter().enumerate() {
        let seen = (effects.get(&number).copied().unwrap_or_default(), set_aside.remove(&number).unwrap_or_default());
        assert_eq!(seen, (*expected, reasons.iter().map(|reason| (*reason).to_owned()).collect()), "{input}");
    }
}
