//! Bad input as a table: what stands where a marker should, what a claim is told, and what the book says of it.

use oncegate_core::StoreError;
use oncegate_core::marker::Verdict;
use rusqlite::Connection;

use crate::support::{Directory, ask, at, claim};

const FOREIGN: &str = "refused: holds no marker that this release can read";

/// What stands there, what made it of a marker in progress, and what a claim is told.
const ROWS: &[(&str, &str, &str)] = &[
    ("a marker whose time is over", "UPDATE markers SET state = 0, expires = 1, guarantee = NULL", "granted"),
    ("a state that nobody knows", "UPDATE markers SET state = 9", FOREIGN),
    ("in progress, and no token", "UPDATE markers SET token = NULL", FOREIGN),
    ("a token that was cut off", "UPDATE markers SET token = x'0102'", FOREIGN),
    ("no lease", "UPDATE markers SET lease = NULL", FOREIGN),
    ("a lease below nothing", "UPDATE markers SET lease = -1", FOREIGN),
    ("no attempt", "UPDATE markers SET attempt = NULL", FOREIGN),
    ("an attempt beyond 32 bits", "UPDATE markers SET attempt = 4294967296", FOREIGN),
    ("a guarantee that nobody knows", "UPDATE markers SET guarantee = 9", FOREIGN),
    ("a fingerprint below nothing", "UPDATE markers SET fingerprint = -1", FOREIGN),
    ("the table of a newer release", "PRAGMA user_version = 2", "refused: newer release"),
];

/// What stands where the file should, and what a claim is told.
const FILES: &[(&str, &str, &str)] = &[
    ("a text", "not a database, and longer than nothing\n", "refused: is no SQLite database"),
    ("another program's database", "CREATE TABLE articles (name TEXT)", "refused: belongs to another program"),
];

fn line((input, _, told): &(&str, &str, &str)) -> String {
    format!("| {input} | {told} |")
}

#[test]
fn the_book_has_the_table() {
    let book = include_str!("../../../../docs/src/bad-input.md");
    let (_, section) = book.split_once("## From SQLite").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert_eq!(lines, ROWS.iter().chain(FILES).map(line).collect::<Vec<_>>());
}

/// A claim with a token of its own, on a file as another process would open it.
async fn told(directory: &Directory) -> String {
    match ask(&at(directory.file()), claim("a", 7)).await {
        Ok(Verdict::Granted { .. }) => "granted".to_owned(),
        Err(StoreError::Misconfigured(why)) => format!("refused: {why}"),
        other => format!("{other:?}"),
    }
}

fn is_told(seen: &str, expected: &str) -> bool {
    match expected.split_once(": ") {
        None => seen == expected,
        Some((how, words)) => seen.starts_with(how) && seen.contains(words) && seen.contains("left as it is"),
    }
}

#[tokio::test]
async fn each_row_gets_its_verdict_and_what_is_refused_stays_as_it_is() {
    for (input, made, expected) in ROWS {
        let directory = Directory::new();
        ask(&directory.store(), claim("a", 1)).await.expect("granted");
        directory.raw().execute_batch(made).expect("written");
        let dump = || -> String {
            let shown = "SELECT quote(expires) || quote(state) || quote(fingerprint) || quote(attempt) || quote(token) || quote(lease)
                || quote(horizon) || quote(guarantee) FROM markers";
            directory.raw().query_row(shown, [], |row| row.get(0)).expect("a row")
        };
        let before = dump();
        let seen = told(&directory).await;
        assert!(is_told(&seen, expected), "{input}: {seen}");
        assert_eq!(dump() == before, *expected != "granted", "{input}");
    }
}

#[tokio::test]
async fn each_file_gets_its_verdict_and_stays_as_it_is() {
    for (input, content, expected) in FILES {
        let directory = Directory::new();
        if content.starts_with("CREATE") {
            Connection::open(directory.file()).expect("it opens").execute_batch(content).expect("written");
        } else {
            std::fs::write(directory.file(), content.repeat(100)).expect("written");
        }
        let before = std::fs::read(directory.file()).expect("it is there");
        let seen = told(&directory).await;
        assert!(is_told(&seen, expected), "{input}: {seen}");
        assert!(std::fs::read(directory.file()).expect("it is there") == before, "{input}: it was changed");
    }
}
