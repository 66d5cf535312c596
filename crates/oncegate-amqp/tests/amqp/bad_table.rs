//! Bad input as a table: what comes in from a real broker, what becomes of it, and what the book says of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use oncegate_amqp::QueueKind;
use oncegate_core::source::headers;
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, async_trait};

use crate::rig::*;

/// What the source takes.
const BODY_LIMIT: usize = 1 << 16;
const PATIENCE: Duration = Duration::from_secs(40);

/// The number of a row, which is the body of its messages, and what else a message may have.
type Message = (Option<AMQPValue>, Vec<(&'static str, AMQPValue)>, Option<&'static [u8]>);

/// What comes in, how many effects that has, why each of the others is set aside, and the messages.
type Row = (&'static str, usize, &'static [&'static str], Vec<Message>);

fn text(bytes: impl AsRef<[u8]>) -> AMQPValue {
    AMQPValue::LongString(bytes.as_ref().into())
}

/// Messages that differ in their ids alone.
fn ids<const N: usize>(ids: [AMQPValue; N]) -> Vec<Message> {
    ids.into_iter().map(|id| (Some(id), Vec::new(), None)).collect()
}

fn with(name: &'static str, id: &str, value: AMQPValue) -> Vec<Message> {
    vec![(Some(text(id)), vec![(name, value)], None)]
}

fn rows() -> Vec<Row> {
    let nested = || AMQPValue::FieldTable([("id".into(), text("inner"))].into_iter().collect::<std::collections::BTreeMap<_, _>>().into());
    let death = [("queue", text("elsewhere")), ("reason", text("rejected")), ("count", AMQPValue::LongString("-1".into()))];
    let death: FieldTable = death.into_iter().map(|(name, value)| (name.into(), value)).collect::<BTreeMap<_, _>>().into();
    let deaths = AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(death), AMQPValue::Boolean(true)]));
    let body = |id: &str, body: &'static [u8]| (Some(text(id)), Vec::new(), Some(body));
    vec![
        ("no id", 0, &["missing-id"], vec![(None, Vec::new(), None)]),
        ("an empty id", 0, &["missing-id"], ids([text("")])),
        ("an id of blanks", 1, &[], ids([text("   ")])),
        ("a NUL in an id", 1, &[], ids([text("a\0b")])),
        ("an id that is a Redis command, with CR and LF", 1, &[], ids([text("x\r\n*1\r\n$8\r\nFLUSHALL\r\n")])),
        ("an id that is not UTF-8", 1, &[], ids([text(b"\xff\xfe")])),
        ("`{}` and `{a}b`: two ids", 2, &[], ids([text("{}"), text("{a}b")])),
        ("`a:b` and `processed:a:b`: two ids", 2, &[], ids([text("a:b"), text("processed:a:b")])),
        ("ids of 200 and 201 bytes, one the beginning of the other", 2, &[], ids([text("i".repeat(200)), text("i".repeat(201))])),
        ("an id of 64 KiB", 1, &[], ids([text("i".repeat(1 << 16))])),
        ("the same word in NFC and in NFD: two ids", 2, &[], ids([text("é"), text("e\u{301}")])),
        ("an id as a number, then as text: one id", 1, &[], ids([AMQPValue::LongInt(42), text("42")])),
        ("an id that is null", 0, &["missing-id"], ids([AMQPValue::Void])),
        ("an id that is a table", 0, &["missing-id"], ids([nested()])),
        ("the same message twice, neither marked as redelivered", 1, &[], ids([text("twice"), text("twice")])),
        ("the same id with another body", 1, &[], vec![body("other", b" 15"), body("other", b"15 ")]),
        ("an empty body", 0, &["unreadable"], vec![body("empty", b"")]),
        ("a body that does not parse", 0, &["unreadable"], vec![body("parse", b"{\"a\":")]),
        ("a body beyond the limit", 0, &["too-large"], vec![body("large", &[b'x'; BODY_LIMIT + 1])]),
        ("a forged `x-death`", 1, &[], with("x-death", "death", deaths)),
        ("a forged `x-delivery-count` of a wrong type", 1, &[], with("x-delivery-count", "count", text("many"))),
        ("a forged number of failures that nobody believes", 1, &[], with(headers::FAILURES, "failures", AMQPValue::Double(1e300))),
        ("a handler that panics with what is no text, at its last attempt", 0, &["attempts-spent"], ids([text("panic")])),
    ]
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
    let book = include_str!("../../../../docs/src/bad-input.md");
    let (_, section) = book.split_once("## From RabbitMQ").expect("the section");
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
    let (rig, effects, rows) = (Rig::new().await, Effects::default(), rows());
    close(open(rig.source(QueueKind::Quorum)).await).await;
    for (number, (_, _, _, messages)) in rows.iter().enumerate() {
        for (id, others, body) in messages {
            let mut table = FieldTable::default();
            table.insert("row".into(), text(number.to_string()));
            for (name, value) in id.iter().map(|id| (&"id", id)).chain(others.iter().map(|(name, value)| (name, value))) {
                table.insert((*name).into(), value.clone());
            }
            let body = body.map_or_else(|| number.to_string().into_bytes(), <[u8]>::to_vec);
            assert!(rig.reaches(body, BasicProperties::default().with_headers(table)).await);
        }
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(rig.source(QueueKind::Quorum).body_limit(BODY_LIMIT))
        .store(MemoryStore::new())
        .id(IdSource::header("id"))
        .attempts(1)
        .handler(effects.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let mut set_aside: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for _ in 0..rows.iter().map(|row| row.2.len()).sum() {
        let letter = rig.take(&rig.dead_letters()).await.delivery;
        let row = header(&letter, "row").expect("its row").parse().expect("a number");
        set_aside.entry(row).or_default().push(header(&letter, headers::REASON).expect("a reason"));
    }
    let (expected, end) = (rows.iter().map(|row| row.1).sum::<usize>(), Instant::now() + PATIENCE);
    while effects.0.lock().expect("it panics elsewhere").values().sum::<usize>() < expected && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    rig.becomes_empty(&rig.queue).await;
    assert_eq!((rig.ready(&rig.dead_letters()).await, rig.ready(&rig.in_doubt()).await), (0, 0));

    let effects = effects.0.lock().expect("it panics elsewhere").clone();
    for (number, (input, expected, reasons, _)) in rows.iter().enumerate() {
        let seen = (effects.get(&number).copied().unwrap_or_default(), set_aside.remove(&number).unwrap_or_default());
        assert_eq!(seen, (*expected, reasons.iter().map(|reason| (*reason).to_owned()).collect()), "{input}");
    }
    rig.done().await;
}
