//! The demo without servers: killed at random times, resumed, and started twice at once.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The demo with this directory for its files.
fn demo(run_dir: &Path, arguments: &[&str]) -> Command {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_payments"));
    demo.arg("--run-dir")
        .arg(run_dir)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    demo
}

/// The counts of a successful run, from its JSON.
fn counts(output: &Output) -> HashMap<String, u64> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}: {stderr}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    serde_json::from_slice(&output.stdout).expect("numbers by name")
}

/// The directory of the run; there must be only one.
fn run_folder(run_dir: &Path) -> PathBuf {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(run_dir)
        .expect("a directory entry")
        .map(|entry| entry.expect("a directory entry").path())
        .collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    folders.remove(0)
}

/// How often each payment was charged, by the provider's ledger.
fn charges(run_folder: &Path) -> HashMap<String, u32> {
    charges_in(&run_folder.join("ledger.db"))
}

fn charges_in(file: &Path) -> HashMap<String, u32> {
    let ledger = rusqlite::Connection::open(file).expect("a ledger");
    ledger.busy_timeout(Duration::from_secs(10)).expect("set");
    let Ok(mut query) = ledger.prepare("SELECT id, count(*) FROM charges GROUP BY id") else {
        return HashMap::new(); // killed before it created the table
    };
    let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)));
    rows.expect("rows")
        .collect::<Result<_, _>>()
        .expect("charges")
}

#[test]
fn a_demo_killed_ten_times_charges_once_and_loses_nothing() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let seed = fastrand::u64(..1_000_000);
    let kill_times: Vec<Duration> = (0..10)
        .map(|_| Duration::from_millis(fastrand::u64(50..5_000)))
        .collect();
    println!("--seed {seed}, killed after {kill_times:?}");
    let seed = ["--seed", &seed.to_string()];
    let mut charged = 0;
    for kill_time in &kill_times {
        let mut killed = demo(&run_dir, &seed).spawn().expect("it starts");
        std::thread::sleep(*kill_time);
        killed.kill().expect("it can be killed");
        let killed = killed.wait_with_output().expect("it ended");
        // A run takes longer than any of the kill times, so it was killed before its end.
        assert_eq!(
            killed.status.code(),
            None,
            "{}",
            String::from_utf8_lossy(&killed.stderr)
        );
        let now = if run_dir.exists() {
            charges(&run_folder(&run_dir)).len()
        } else {
            0
        };
        assert!(
            now >= charged,
            "{now} payments are charged, {charged} were before"
        );
        charged = now;
    }
    assert!(charged > 0, "all runs were killed before the first charge");

    let last = demo(&run_dir, &seed)
        .args(["--json", "--keep"])
        .output()
        .expect("it ran");
    let counts = counts(&last);
    assert_eq!(
        (counts["charged_twice"], counts["lost"]),
        (0, 0),
        "{counts:?}"
    );
    assert!(counts["duplicates_skipped"] > 0, "{counts:?}");
    let charges = charges(&run_folder(&run_dir));
    assert!(charges.values().all(|times| *times == 1), "{charges:?}");
    // Each payment is charged or in doubt.
    assert!(
        charges.len() as u64 + counts["in_doubt"] >= 2000,
        "{} charged: {counts:?}",
        charges.len()
    );
    assert_eq!(charges.len() as u64, counts["charged"]);
}

#[test]
fn with_an_inbox_nothing_is_in_doubt_after_kills() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let arguments = ["--guarantee", "exactly-once-in-database", "--json"];
    let mut charged = 0;
    for _ in 0..5 {
        let mut killed = demo(&run_dir, &arguments).spawn().expect("it starts");
        let more = charged + fastrand::usize(1..300);
        let started = Instant::now();
        while charged < more {
            assert!(started.elapsed() < Duration::from_secs(30), "{charged}");
            std::thread::sleep(Duration::from_millis(10));
            let folder = std::fs::read_dir(&run_dir)
                .ok()
                .and_then(|mut it| it.next());
            let file = folder.map(|it| it.expect("a directory entry").path().join("payments.db"));
            // The program creates the file: a test that creates it could do so too early.
            let Some(file) = file.filter(|file| file.exists()) else {
                continue;
            };
            charged = charges_in(&file).len();
        }
        killed.kill().expect("it can be killed");
        killed.wait().expect("it ended");
    }
    let counts = counts(&demo(&run_dir, &arguments).output().expect("it ran"));
    let [twice, lost, in_doubt, charged] =
        ["charged_twice", "lost", "in_doubt", "charged"].map(|count| counts[count]);
    assert_eq!(
        (twice, lost, in_doubt, charged),
        (0, 0, 0, 2000),
        "{counts:?}"
    );
    assert!(counts["duplicates_skipped"] > 0, "{counts:?}");
    assert!(counts["retried"] > 0, "{counts:?}");
}

#[test]
fn complete_runs_remove_their_files_and_concurrent_runs_are_refused() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let arguments = ["--payments", "600", "--json"];
    let first = demo(&run_dir, &arguments).spawn().expect("it starts");
    let started = Instant::now();
    while !run_dir.exists() || charges(&run_folder(&run_dir)).is_empty() {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "no payment is charged"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let second_run = demo(&run_dir, &arguments).output().expect("it ran");
    assert_eq!(second_run.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&second_run.stderr);
    assert!(stderr.contains("is in use by another run"), "{stderr}");

    let check_run = |run: Output| {
        let counts = counts(&run);
        assert_eq!(
            (counts["charged_twice"], counts["lost"], counts["charged"]),
            (0, 0, 600 - counts["in_doubt"]),
            "{counts:?}"
        );
        let reconciled = counts["reconciled_happened"] + counts["reconciled_did_not"];
        assert!(
            counts["duplicates_skipped"] > 0 && reconciled > 0,
            "{counts:?}"
        );
        assert!(!run_dir.exists(), "a complete run removes its files");
    };
    check_run(first.wait_with_output().expect("it ended"));
    check_run(demo(&run_dir, &arguments).output().expect("it ran"));
}

#[test]
fn without_the_store_payments_are_charged_twice() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let mut killed = demo(&run_dir, &[]).spawn().expect("it starts");
    let started = Instant::now();
    let has_begun =
        || std::fs::read_dir(&run_dir).is_ok_and(|mut folders| folders.next().is_some());
    while !has_begun() || charges(&run_folder(&run_dir)).len() < 200 {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "no payment is charged"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    killed.kill().expect("it can be killed");
    killed.wait().expect("it ended");
    for file in ["payments.db", "payments.db-wal", "payments.db-shm"] {
        std::fs::remove_file(run_folder(&run_dir).join(file)).expect("a directory entry");
    }
    let last = demo(&run_dir, &["--json"]).output().expect("it ran");
    assert_eq!(last.status.code(), Some(1));
    let counts: HashMap<String, u64> =
        serde_json::from_slice(&last.stdout).expect("numbers by name");
    assert!(counts["charged_twice"] > 100, "{counts:?}");
    // The files of a failed run are kept.
    assert!(
        charges(&run_folder(&run_dir))
            .values()
            .any(|times| *times > 1)
    );
}
