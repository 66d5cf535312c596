//! Invalid values under a marker's key, as a table that the book repeats: the value, the answer to a
//! claim, and the outcome that the operator sees.

use oncegate_core::StoreError;
use oncegate_core::marker::Verdict;
use oncegate_testkit::bad_input::ObservedOutcome;
use redis::aio::MultiplexedConnection;

use crate::support::*;

const UNREADABLE: &str = "unreadable: another program wrote this key, or the value is truncated";
const IN_DOUBT_UNREADABLE: &str =
    "in doubt: set a separate key prefix with Redis::prefix, or delete the key";
const WRONG_TYPE: &str = "unreadable: Redis replied WRONGTYPE";
const IN_DOUBT_WRONG_TYPE: &str =
    "in doubt: another program uses this key; set a separate key prefix with Redis::prefix";
const NEWER_RELEASE: &str = "unreadable: a newer release wrote this marker";
const DUPLICATE: &str = "`duplicate`";

/// The scope of the consumer.
const SCOPE: &str = "bad";

/// The value, the commands that write it, the answer to a claim, and what the operator sees.
type Row = (
    &'static str,
    &'static [&'static [&'static str]],
    &'static str,
    &'static str,
);

const ROWS: &[Row] = &[
    (
        "`1`, as `SET … NX` of another program writes it",
        &[&["SET", "KEY", "1", "PX", "60000"]],
        "duplicate",
        DUPLICATE,
    ),
    (
        "`1` without an expiry",
        &[&["SET", "KEY", "1"]],
        "duplicate",
        DUPLICATE,
    ),
    (
        "an empty value",
        &[&["SET", "KEY", ""]],
        UNREADABLE,
        IN_DOUBT_UNREADABLE,
    ),
    (
        "a word of another program, such as `processing`",
        &[&["SET", "KEY", "processing"]],
        UNREADABLE,
        IN_DOUBT_UNREADABLE,
    ),
    (
        "a truncated marker",
        &[&["SET", "KEY", "v1 p 0000000000000000000000000000"]],
        UNREADABLE,
        IN_DOUBT_UNREADABLE,
    ),
    (
        "a marker with trailing bytes",
        &[&["SET", "KEY", "v1 c 1 2"]],
        UNREADABLE,
        IN_DOUBT_UNREADABLE,
    ),
    (
        "bytes that are not UTF-8",
        &[
            &["SET", "KEY", ""],
            &["SETBIT", "KEY", "7", "1"],
            &["SETBIT", "KEY", "8", "1"],
        ],
        UNREADABLE,
        IN_DOUBT_UNREADABLE,
    ),
    (
        "a marker of a later version",
        &[&["SET", "KEY", "v2 p x"]],
        NEWER_RELEASE,
        "in doubt: upgrade oncegate here",
    ),
    (
        "a list",
        &[&["RPUSH", "KEY", "1"]],
        WRONG_TYPE,
        IN_DOUBT_WRONG_TYPE,
    ),
    (
        "a hash",
        &[&["HSET", "KEY", "1", "1"]],
        WRONG_TYPE,
        IN_DOUBT_WRONG_TYPE,
    ),
];

fn line((input, _, answer, seen): &Row) -> String {
    format!("| {input} | {answer} | {seen} |")
}

/// Writes the value.
async fn put(raw: &mut MultiplexedConnection, commands: &[&[&str]], key: &str) {
    for command in commands {
        let mut sent = redis::cmd(command[0]);
        sent.arg(
            command[1..]
                .iter()
                .map(|part| part.replace("KEY", key))
                .collect::<Vec<_>>(),
        );
        let _: redis::Value = sent.query_async(raw).await.expect("written");
    }
}

/// The value.
async fn dump(raw: &mut MultiplexedConnection, key: &str) -> Vec<u8> {
    redis::cmd("DUMP")
        .arg(key)
        .query_async(raw)
        .await
        .expect("a value")
}

#[test]
fn the_book_has_the_table() {
    let book = include_str!("../../../../docs/contributing/bad-input.md");
    let (_, section) = book.split_once("## From Redis").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(2)
        .collect();
    assert_eq!(lines, ROWS.iter().map(line).collect::<Vec<_>>());
}

#[tokio::test]
async fn each_value_gets_its_answer_and_is_unchanged() {
    let (store, prefix) = store();
    let mut raw = client().await;
    for (number, (input, commands, expected, _)) in ROWS.iter().enumerate() {
        let (id, key) = (format!("row-{number}"), format!("{prefix}row-{number}"));
        put(&mut raw, commands, &key).await;
        let before = dump(&mut raw, &key).await;
        let seen = match apply_one(&store, claim(&id, 7)).await {
            Ok(Verdict::Duplicate) => "duplicate".to_owned(),
            Err(StoreError::Misconfigured(why)) => format!("refused: {why}"),
            Err(StoreError::UnreadableMarker(why)) => format!("unreadable: {why}"),
            other => format!("{other:?}"),
        };
        assert!(seen.starts_with(expected), "{input}: {seen}");
        assert_eq!(
            dump(&mut raw, &key).await,
            before,
            "{input}: the value was changed"
        );
    }
}

#[tokio::test]
async fn the_operator_sees_the_remedy_for_each() {
    let mut raw = client().await;
    for (number, (input, commands, _, expected)) in ROWS.iter().enumerate() {
        let (store, prefix) = store();
        let key = format!("{prefix}{SCOPE}|row-{number}");
        put(&mut raw, commands, &key).await;
        let before = dump(&mut raw, &key).await;
        let seen = ObservedOutcome::of(store, SCOPE, &format!("row-{number}")).await;
        assert!(seen.matches(expected), "{input}: {seen:?}");
        assert_eq!(
            dump(&mut raw, &key).await,
            before,
            "{input}: the value was changed"
        );
    }
}
