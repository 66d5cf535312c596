//! Bad input as a table: what stands where a marker should, what a claim is told, and what the book says of it.

use oncegate_core::StoreError;
use oncegate_core::marker::Verdict;

use crate::support::*;

const FOREIGN: &str = "refused: another program wrote this key, or it was cut off";
const WRONG: &str = "refused: Redis says WRONGTYPE";

/// What stands there, the commands that put it there, and what a claim is told.
type Row = (&'static str, &'static [&'static [&'static str]], &'static str);

const ROWS: &[Row] = &[
    ("`1`, as `SET … NX` of another program writes it", &[&["SET", "KEY", "1", "PX", "60000"]], "duplicate"),
    ("`1` without an expiry", &[&["SET", "KEY", "1"]], "duplicate"),
    ("an empty value", &[&["SET", "KEY", ""]], FOREIGN),
    ("another program's word, such as `processing`", &[&["SET", "KEY", "processing"]], FOREIGN),
    ("a marker that was cut off", &[&["SET", "KEY", "v1 p 0000000000000000000000000000"]], FOREIGN),
    ("a marker with more behind it", &[&["SET", "KEY", "v1 c 1 2"]], FOREIGN),
    ("bytes that are no text", &[&["SET", "KEY", ""], &["SETBIT", "KEY", "7", "1"], &["SETBIT", "KEY", "8", "1"]], FOREIGN),
    ("a marker of a later version", &[&["SET", "KEY", "v2 p x"]], "refused: a newer release wrote this marker"),
    ("a list", &[&["RPUSH", "KEY", "1"]], WRONG),
    ("a hash", &[&["HSET", "KEY", "1", "1"]], WRONG),
];

fn line((input, _, told): &Row) -> String {
    format!("| {input} | {told} |")
}

#[test]
fn the_book_has_the_table() {
    let book = include_str!("../../../../docs/src/bad-input.md");
    let (_, section) = book.split_once("## From Redis").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert_eq!(lines, ROWS.iter().map(line).collect::<Vec<_>>());
}

#[tokio::test]
async fn each_gets_its_verdict_and_stays_as_it_is() {
    let (store, prefix) = store();
    let mut raw = client().await;
    for (number, (input, commands, told)) in ROWS.iter().enumerate() {
        let (id, key) = (format!("row-{number}"), format!("{prefix}row-{number}"));
        for command in *commands {
            let mut sent = redis::cmd(command[0]);
            sent.arg(command[1..].iter().map(|part| part.replace("KEY", &key)).collect::<Vec<_>>());
            let _: redis::Value = sent.query_async(&mut raw).await.expect("it is put there");
        }
        let dump = async |raw: &mut redis::aio::MultiplexedConnection| -> Vec<u8> {
            redis::cmd("DUMP").arg(&key).query_async(raw).await.expect("a value")
        };
        let before = dump(&mut raw).await;
        let seen = match ask(&store, claim(&id, 7)).await {
            Ok(Verdict::Duplicate) => "duplicate".to_owned(),
            Err(StoreError::Misconfigured(why)) => format!("refused: {why}"),
            other => format!("{other:?}"),
        };
        assert!(seen.starts_with(told), "{input}: {seen}");
        assert_eq!(dump(&mut raw).await, before, "{input}: it was changed");
    }
}
