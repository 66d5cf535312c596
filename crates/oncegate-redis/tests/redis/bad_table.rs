//! Bad input as a table: what stands where a marker should, what a claim is told, what the operator
//! sees, and what the book says of it.

use oncegate_core::StoreError;
use oncegate_core::marker::Verdict;
use oncegate_testkit::bad_input::Sight;
use redis::aio::MultiplexedConnection;

use crate::support::*;

const FOREIGN: &str = "unreadable: another program wrote this key, or it was cut off";
const GIVE: &str =
    "in doubt: give markers a prefix of their own with Redis::prefix, or delete the key";
const WRONG: &str = "unreadable: Redis says WRONGTYPE";
const GIVE_ANYHOW: &str = "in doubt: another program uses this key; give markers a prefix of their own with Redis::prefix";
const LATER: &str = "refused: a newer release wrote this marker";
const DUPLICATE: &str = "`duplicate`";

/// The scope of the consumer that meets it.
const SCOPE: &str = "bad";

/// What stands there, the commands that put it there, what a claim is told, and what the operator
/// sees.
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
    ("an empty value", &[&["SET", "KEY", ""]], FOREIGN, GIVE),
    (
        "another program's word, such as `processing`",
        &[&["SET", "KEY", "processing"]],
        FOREIGN,
        GIVE,
    ),
    (
        "a marker that was cut off",
        &[&["SET", "KEY", "v1 p 0000000000000000000000000000"]],
        FOREIGN,
        GIVE,
    ),
    (
        "a marker with more behind it",
        &[&["SET", "KEY", "v1 c 1 2"]],
        FOREIGN,
        GIVE,
    ),
    (
        "bytes that are no text",
        &[
            &["SET", "KEY", ""],
            &["SETBIT", "KEY", "7", "1"],
            &["SETBIT", "KEY", "8", "1"],
        ],
        FOREIGN,
        GIVE,
    ),
    (
        "a marker of a later version",
        &[&["SET", "KEY", "v2 p x"]],
        LATER,
        "the consumer ends: upgrade oncegate here",
    ),
    ("a list", &[&["RPUSH", "KEY", "1"]], WRONG, GIVE_ANYHOW),
    ("a hash", &[&["HSET", "KEY", "1", "1"]], WRONG, GIVE_ANYHOW),
];

fn line((input, _, told, seen): &Row) -> String {
    format!("| {input} | {told} | {seen} |")
}

/// Puts it there.
async fn put(raw: &mut MultiplexedConnection, commands: &[&[&str]], key: &str) {
    for command in commands {
        let mut sent = redis::cmd(command[0]);
        sent.arg(
            command[1..]
                .iter()
                .map(|part| part.replace("KEY", key))
                .collect::<Vec<_>>(),
        );
        let _: redis::Value = sent.query_async(raw).await.expect("it is put there");
    }
}

/// What stands there.
async fn dump(raw: &mut MultiplexedConnection, key: &str) -> Vec<u8> {
    redis::cmd("DUMP")
        .arg(key)
        .query_async(raw)
        .await
        .expect("a value")
}

#[test]
fn the_book_has_the_table() {
    let book = include_str!("../../../../docs/src/bad-input.md");
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
async fn each_gets_its_verdict_and_stays_as_it_is() {
    let (store, prefix) = store();
    let mut raw = client().await;
    for (number, (input, commands, told, _)) in ROWS.iter().enumerate() {
        let (id, key) = (format!("row-{number}"), format!("{prefix}row-{number}"));
        put(&mut raw, commands, &key).await;
        let before = dump(&mut raw, &key).await;
        let seen = match ask(&store, claim(&id, 7)).await {
            Ok(Verdict::Duplicate) => "duplicate".to_owned(),
            Err(StoreError::Misconfigured(why)) => format!("refused: {why}"),
            Err(StoreError::UnreadableMarker(why)) => format!("unreadable: {why}"),
            other => format!("{other:?}"),
        };
        assert!(seen.starts_with(told), "{input}: {seen}");
        assert_eq!(
            dump(&mut raw, &key).await,
            before,
            "{input}: it was changed"
        );
    }
}

#[tokio::test]
async fn the_operator_sees_what_to_do_about_each() {
    let mut raw = client().await;
    for (number, (input, commands, _, told)) in ROWS.iter().enumerate() {
        let (store, prefix) = store();
        let key = format!("{prefix}{SCOPE}|row-{number}");
        put(&mut raw, commands, &key).await;
        let before = dump(&mut raw, &key).await;
        let seen = Sight::of(store, SCOPE, &format!("row-{number}")).await;
        assert!(seen.is(told), "{input}: {seen:?}");
        assert_eq!(
            dump(&mut raw, &key).await,
            before,
            "{input}: it was changed"
        );
    }
}
