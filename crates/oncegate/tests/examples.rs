//! Runs the examples, and checks their output.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use oncegate::Sqlite;
use oncegate::marker::Marker;

/// Runs an example that cargo built beside this test, with the Redis that all tests share. Returns the
/// lines of its output.
fn run(example: &str) -> Vec<String> {
    run_in(example, Path::new("."))
}

fn path(example: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    test.ancestors()
        .nth(2)
        .expect("this test is in target/<profile>/deps")
        .join("examples")
        .join(example)
}

/// The same, in this working directory, where an earlier run may have left files.
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
fn in_the_cron_example_one_of_three_machines_runs_the_job() {
    let lines = run("cron");
    assert_eq!(
        (lines.len(), count(&lines, "settled 3 entries")),
        (3, 1),
        "{lines:?}"
    );
}

#[test]
fn in_the_handlers_example_each_message_goes_to_the_handler_of_its_type() {
    let mut lines = run("handlers");
    lines.sort(); // handlers run concurrently
    assert_eq!(
        lines,
        [
            "dead letter: no-route",
            "shop-7/1: charged 5 to alice",
            "shop-7/2: refunded 3"
        ]
    );
}

#[test]
fn in_the_stored_result_example_three_requests_get_the_receipt_of_one_charge() {
    let lines = run("stored_result");
    assert_eq!(
        (
            count(
                &lines,
                "charged now: ChargeReceipt { number: 1, cents: 4200 }"
            ),
            count(
                &lines,
                "charged before: ChargeReceipt { number: 1, cents: 4200 }"
            ),
            count(&lines, "used for another request"),
        ),
        (1, 2, 1),
        "{lines:?}"
    );
}

#[test]
fn in_the_cache_example_one_of_twenty_readers_refreshes() {
    let lines = run("cache_refresh");
    assert_eq!(
        (lines.len(), count(&lines, "refreshed")),
        (20, 1),
        "{lines:?}"
    );
}

/// As the first page of the book describes: of three messages, one is a duplicate; in a second run,
/// all are.
#[test]
fn the_start_example_handles_each_id_once_also_in_a_second_run() {
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

/// With SIGTERM, as a container runtime sends it, and with SIGINT: every handler that has started
/// returns, and no message is in doubt.
#[tokio::test]
async fn at_a_signal_the_stop_example_completes_its_running_handlers() {
    for signal in ["-TERM", "-INT"] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let mut program = Command::new(path("stop"))
            .current_dir(directory.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the example is built");
        let mut lines = BufReader::new(program.stdout.take().expect("piped"))
            .lines()
            .map(|line| line.expect("text"));
        let mut output: Vec<String> = lines.by_ref().take(50).collect();
        let killed = Command::new("kill")
            .args([signal, &program.id().to_string()])
            .status()
            .expect("the system has a `kill`");
        assert!(killed.success());
        output.extend(lines);
        let ended = program.wait_with_output().expect("it ended");
        assert_eq!(
            ended.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&ended.stderr)
        );
        let ids = |line_end: &str| -> BTreeSet<String> {
            output
                .iter()
                .filter(|line| line.ends_with(line_end))
                .filter_map(|line| Some(line.split_once(':')?.0.to_owned()))
                .collect()
        };
        let (started, charged) = (ids("cents"), ids("charged"));
        assert_eq!(
            started, charged,
            "{signal}: started handlers on the left, completed ones on the right"
        );
        assert!(
            started.len() >= 25 && started.len() < 20_000,
            "{signal}: {} charged",
            started.len()
        );
        let mut rows = Sqlite::file(directory.path().join("payments.db")).browse(1_000);
        let mut done = 0;
        while let Some(page) = rows.next().await.expect("the store answers") {
            for (key, row) in page {
                match row.expect("a marker").0 {
                    Marker::Done(_) => done += 1,
                    Marker::Cleared { .. } => {} // it was claimed, and its handler had not started
                    other => panic!("{signal}: {key}: {other:?}"),
                }
            }
        }
        assert_eq!(done, charged.len(), "{signal}");
    }
}
