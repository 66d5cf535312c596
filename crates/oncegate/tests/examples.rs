//! The examples of the gate do what they say.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs an example that cargo built beside this test, against the Redis that all tests share; its lines.
fn run(example: &str) -> Vec<String> {
    run_in(example, Path::new("."))
}

/// The same, where it finds what it left in this directory.
fn run_in(example: &str, directory: &Path) -> Vec<String> {
    let test = std::env::current_exe().expect("this test has a path");
    let examples: PathBuf = test.ancestors().nth(2).expect("it lies in target/<profile>/deps").join("examples");
    let redis = oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set");
    let output =
        Command::new(examples.join(example)).env("ONCEGATE_REDIS", redis).current_dir(directory).output().expect("the example is built");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").lines().map(str::to_owned).collect()
}

fn count(lines: &[String], text: &str) -> usize {
    lines.iter().filter(|line| line.contains(text)).count()
}

#[test]
fn one_of_three_machines_settles_the_day() {
    let lines = run("cron");
    assert_eq!((lines.len(), count(&lines, "settled 3 entries")), (3, 1), "{lines:?}");
}

#[test]
fn five_requests_with_one_key_place_one_order() {
    let lines = run("idempotency_key");
    assert_eq!((count(&lines, "201 Created"), count(&lines, "200 OK")), (1, 4), "{lines:?}");
}

#[test]
fn one_of_twenty_readers_refreshes_the_cache() {
    let lines = run("cache_refresh");
    assert_eq!((lines.len(), count(&lines, "refreshed")), (20, 1), "{lines:?}");
}

/// As the first page of the book says: two of three messages, and none of them when it is started again.
#[test]
fn what_one_starts_with_handles_each_message_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let first = run_in("start", directory.path());
    assert_eq!((count(&first, "3 of tea"), count(&first, "7 of milk")), (1, 1), "{first:?}");
    let again = run_in("start", directory.path());
    assert_eq!(count(&again, "of tea") + count(&again, "of milk"), 0, "{again:?}");
}
