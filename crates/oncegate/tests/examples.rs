//! The examples of the gate do what they say.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use oncegate::Sqlite;
use oncegate::marker::Marker;

/// Runs an example that cargo built beside this test, against the Redis that all tests share; its
/// lines.
fn run(example: &str) -> Vec<String> {
    run_in(example, Path::new("."))
}

fn path(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    test.ancestors()
        .nth(2)
        .expect("it lies in target/<profile>/deps")
        .join("examples")
        .join(example)
}

/// The same, where it finds what it left in this directory.
fn run_in(example: &str, directory: &Path) -> Vec<String> {
    let redis = oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set");
    let output = Command::new(path(example))
        .env("ONCEGATE_REDIS", redis)
        .current_dir(directory)
        .output()
        .expect("the example is built");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout)
        .expect("text")
        .lines()
        .map(str::to_owned)
        .collect()
}

fn count(lines: &[String], text: &str) -> usize {
    lines.iter().filter(|line| line.contains(text)).count()
}

#[test]
fn one_of_three_machines_settles_the_day() {
    let lines = run("cron");
    assert_eq!(
        (lines.len(), count(&lines, "settled 3 entries")),
        (3, 1),
        "{lines:?}"
    );
}

#[test]
fn five_requests_with_one_key_place_one_order() {
    let lines = run("idempotency_key");
    assert_eq!(
        (count(&lines, "201 Created"), count(&lines, "200 OK")),
        (1, 4),
        "{lines:?}"
    );
}

#[test]
fn one_of_twenty_readers_refreshes_the_cache() {
    let lines = run("cache_refresh");
    assert_eq!(
        (lines.len(), count(&lines, "refreshed")),
        (20, 1),
        "{lines:?}"
    );
}

/// As the first page of the book says: two of three messages, and none of them when it is started
/// again.
#[test]
fn what_one_starts_with_handles_each_message_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let first = run_in("start", directory.path());
    assert_eq!(
        (count(&first, "3 of tea"), count(&first, "7 of milk")),
        (1, 1),
        "{first:?}"
    );
    let again = run_in("start", directory.path());
    assert_eq!(
        count(&again, "of tea") + count(&again, "of milk"),
        0,
        "{again:?}"
    );
}

/// What a container runtime does to the book's sample while it is full of work: what has begun is
/// finished, and nothing is in doubt.
#[tokio::test]
async fn a_consumer_that_is_told_to_stop_finishes_what_it_has_begun() {
    for signal in ["-TERM", "-INT"] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let mut program = Command::new(path("stop"))
            .current_dir(directory.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it is built");
        let mut lines = BufReader::new(program.stdout.take().expect("piped"))
            .lines()
            .map(|line| line.expect("text"));
        let mut said: Vec<String> = lines.by_ref().take(50).collect();
        let told = Command::new("kill")
            .args([signal, &program.id().to_string()])
            .status()
            .expect("there is a kill");
        assert!(told.success());
        said.extend(lines);
        let ended = program.wait_with_output().expect("it ended");
        assert_eq!(
            ended.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&ended.stderr)
        );
        let ids = |what: &str| -> BTreeSet<String> {
            said.iter()
                .filter(|line| line.ends_with(what))
                .filter_map(|line| Some(line.split_once(':')?.0.to_owned()))
                .collect()
        };
        let (begun, charged) = (ids("cents"), ids("charged"));
        assert_eq!(
            begun, charged,
            "{signal}: what began on the left, what was charged on the right"
        );
        assert!(
            begun.len() >= 25 && begun.len() < 20_000,
            "{signal}: {} charged",
            begun.len()
        );
        let mut rows = Sqlite::file(directory.path().join("payments.db")).browse(1_000);
        let mut done = 0;
        while let Some(page) = rows.next().await.expect("the store answers") {
            for (key, row) in page {
                match row.expect("a marker").0 {
                    Marker::Done(_) => done += 1,
                    Marker::Cleared { .. } => {} // it was claimed, and had not begun
                    other => panic!("{signal}: {key}: {other:?}"),
                }
            }
        }
        assert_eq!(done, charged.len(), "{signal}");
    }
}
