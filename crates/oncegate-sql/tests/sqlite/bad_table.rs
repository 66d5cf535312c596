//! Invalid rows and files, as a table that the book repeats: the input, the answer to a claim, and
//! the outcome that the operator sees.

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::{MessageId, Scope, StoreError};
use oncegate_testkit::bad_input::ObservedOutcome;
use rusqlite::Connection;

use crate::support::{Directory, apply_one, at, claim};

const FOREIGN: &str = "unreadable: holds no marker that this release can read";
const DELETE: &str = "in doubt: delete the row, or upgrade oncegate here";
const NEWER: &str = "the consumer does not start: upgrade oncegate here";

/// The scope of the consumer.
const SCOPE: &str = "bad";

/// The input, the SQL that makes it of a marker in progress, the answer to a claim, and what the
/// operator sees.
type Row = (&'static str, &'static str, &'static str, &'static str);

const ROWS: &[Row] = &[
    (
        "an expired marker",
        "UPDATE oncegate_merged_markers SET state = 0, expires = 1, guarantee = NULL",
        "granted",
        "`completed`",
    ),
    (
        "an unknown state",
        "UPDATE oncegate_merged_markers SET state = 9",
        FOREIGN,
        DELETE,
    ),
    (
        "in progress without a token",
        "UPDATE oncegate_merged_markers SET token = NULL",
        FOREIGN,
        DELETE,
    ),
    (
        "a truncated token",
        "UPDATE oncegate_merged_markers SET token = x'0102'",
        FOREIGN,
        DELETE,
    ),
    (
        "no lease",
        "UPDATE oncegate_merged_markers SET lease = NULL",
        FOREIGN,
        DELETE,
    ),
    (
        "a negative lease",
        "UPDATE oncegate_merged_markers SET lease = -1",
        FOREIGN,
        DELETE,
    ),
    (
        "no attempt",
        "UPDATE oncegate_merged_markers SET attempt = NULL",
        FOREIGN,
        DELETE,
    ),
    (
        "an attempt beyond 32 bits",
        "UPDATE oncegate_merged_markers SET attempt = 4294967296",
        FOREIGN,
        DELETE,
    ),
    (
        "no base of the attempts",
        "UPDATE oncegate_merged_markers SET base = NULL",
        FOREIGN,
        DELETE,
    ),
    (
        "a negative number of crashes",
        "UPDATE oncegate_merged_markers SET crashes = -1",
        FOREIGN,
        DELETE,
    ),
    (
        "an unknown effect",
        "UPDATE oncegate_merged_markers SET effect = 9",
        FOREIGN,
        DELETE,
    ),
    (
        "an unknown guarantee",
        "UPDATE oncegate_merged_markers SET guarantee = 9",
        FOREIGN,
        DELETE,
    ),
    (
        "a negative fingerprint",
        "UPDATE oncegate_merged_markers SET fingerprint = -1",
        FOREIGN,
        DELETE,
    ),
    (
        "the table of a newer release",
        "UPDATE oncegate_schema SET version = 4",
        "refused: newer release",
        NEWER,
    ),
];

/// The content of the file, the answer to a claim, and what the operator sees.
const FILES: &[Row] = &[
    (
        "a text file",
        "not a database, and longer than nothing\n",
        "refused: is not a SQLite database",
        "the consumer does not start: use another file",
    ),
    (
        "another program's database",
        "CREATE TABLE articles (name TEXT)",
        "refused: belongs to another program",
        "the consumer does not start: use a separate file for oncegate",
    ),
];

fn line((input, _, answer, seen): &Row) -> String {
    format!("| {input} | {answer} | {seen} |")
}

#[test]
fn the_book_has_the_table() {
    let book = include_str!("../../../../docs/contributing/bad-input.md");
    let (_, section) = book.split_once("## From SQLite").expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(2)
        .collect();
    assert_eq!(
        lines,
        ROWS.iter().chain(FILES).map(line).collect::<Vec<_>>()
    );
}

/// The answer to a claim with another token and handle.
async fn claim_answer(directory: &Directory) -> String {
    match apply_one(&at(directory.file()), claim("a", 7)).await {
        Ok(Verdict::Granted { .. }) => "granted".to_owned(),
        Err(StoreError::Misconfigured(why)) => format!("refused: {why}"),
        Err(StoreError::UnreadableMarker(why)) => format!("unreadable: {why}"),
        other => format!("{other:?}"),
    }
}

fn matches_answer(seen: &str, expected: &str) -> bool {
    match expected.split_once(": ") {
        None => seen == expected,
        Some((how, words)) => {
            seen.starts_with(how) && seen.contains(words) && seen.contains("is unchanged")
        }
    }
}

/// A file with a claim of `a` that was then changed by this SQL.
async fn a_marker(made: &str, claimed: Operation) -> Directory {
    let directory = Directory::new();
    apply_one(&directory.store(), claimed)
        .await
        .expect("granted");
    directory.raw().execute_batch(made).expect("written");
    directory
}

/// The row in the table.
fn dump(directory: &Directory) -> String {
    let shown = "SELECT quote(expires) || quote(state) || quote(fingerprint) || quote(attempt) || quote(base) || quote(crashes) || quote(effect) || quote(token) || quote(lease)
        || quote(horizon) || quote(guarantee) FROM oncegate_markers";
    directory
        .raw()
        .query_row(shown, [], |row| row.get(0))
        .expect("a row")
}

/// A file with another content.
fn no_markers(content: &str) -> Directory {
    let directory = Directory::new();
    if content.starts_with("CREATE") {
        Connection::open(directory.file())
            .expect("it opens")
            .execute_batch(content)
            .expect("written");
    } else {
        std::fs::write(directory.file(), content.repeat(100)).expect("written");
    }
    directory
}

#[tokio::test]
async fn each_row_gets_its_answer_and_a_rejected_one_is_unchanged() {
    for (input, made, expected, _) in ROWS {
        let directory = a_marker(made, claim("a", 1)).await;
        let before = dump(&directory);
        let seen = claim_answer(&directory).await;
        assert!(matches_answer(&seen, expected), "{input}: {seen}");
        assert_eq!(
            dump(&directory) == before,
            *expected != "granted",
            "{input}"
        );
    }
}

#[tokio::test]
async fn each_file_gets_its_answer_and_is_unchanged() {
    for (input, content, expected, _) in FILES {
        let directory = no_markers(content);
        let before = std::fs::read(directory.file()).expect("it is there");
        let seen = claim_answer(&directory).await;
        assert!(matches_answer(&seen, expected), "{input}: {seen}");
        assert!(
            std::fs::read(directory.file()).expect("it is there") == before,
            "{input}: it was changed"
        );
    }
}

#[tokio::test]
async fn the_operator_sees_the_remedy_for_each() {
    let scope = Scope::named(SCOPE).expect("a scope");
    let claimed = || Operation {
        key: scope.key(&MessageId::new("a").expect("an id")),
        ..claim("a", 1)
    };
    for (input, made, _, expected) in ROWS {
        let directory = a_marker(made, claimed()).await;
        let before = dump(&directory);
        let seen = ObservedOutcome::of(at(directory.file()), SCOPE, "a").await;
        assert!(seen.matches(expected), "{input}: {seen:?}");
        assert_eq!(
            dump(&directory) == before,
            expected.contains(": "),
            "{input}"
        );
    }
    for (input, content, _, expected) in FILES {
        let directory = no_markers(content);
        let before = std::fs::read(directory.file()).expect("it is there");
        let seen = ObservedOutcome::of(at(directory.file()), SCOPE, "a").await;
        assert!(seen.matches(expected), "{input}: {seen:?}");
        assert!(
            std::fs::read(directory.file()).expect("it is there") == before,
            "{input}: it was changed"
        );
    }
}
