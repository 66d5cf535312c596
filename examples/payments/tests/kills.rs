//! The demo as a person runs it: killed at any moment, started again, started twice. Needs no
//! servers.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A demo whose files lie here.
fn demo(run_dir: &Path, arguments: &[&str]) -> Command {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_payments"));
    demo.arg("--run-dir")
        .arg(run_dir)
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    demo
}

/// The counts that it printed as JSON; it has to have found all right.
fn counts(output: &Output) -> HashMap<String, u64> {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{}: {said}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    serde_json::from_slice(&output.stdout).expect("numbers by name")
}

/// The one folder of a run.
fn folder(run_dir: &Path) -> PathBuf {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(run_dir)
        .expect("it is there")
        .map(|entry| entry.expect("it is there").path())
        .collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    folders.remove(0)
}

/// How often each payment was charged, by the provider's ledger.
fn charges(folder: &Path) -> HashMap<String, u32> {
    let ledger = rusqlite::Connection::open(folder.join("ledger.db")).expect("a ledger");
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
fn killed_ten_times_and_started_again_it_charges_nobody_twice_and_loses_nothing() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let seed = fastrand::u64(..1_000_000);
    let moments: Vec<Duration> = (0..10)
        .map(|_| Duration::from_millis(fastrand::u64(50..5_000)))
        .collect();
    println!("--seed {seed}, killed after {moments:?}");
    let seed = ["--seed", &seed.to_string()];
    let mut charged = 0;
    for moment in &moments {
        let mut killed = demo(&run_dir, &seed).spawn().expect("it starts");
        std::thread::sleep(*moment);
        killed.kill().expect("it is ours");
        let killed = killed.wait_with_output().expect("it ended");
        // It takes longer than any of the moments, so it was in the middle of its work.
        assert_eq!(
            killed.status.code(),
            None,
            "{}",
            String::from_utf8_lossy(&killed.stderr)
        );
        let now = if run_dir.exists() {
            charges(&folder(&run_dir)).len()
        } else {
            0
        };
        assert!(
            now >= charged,
            "{now} payments are charged, {charged} were before"
        );
        charged = now;
    }
    assert!(charged > 0, "all were killed before the first charge");

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
    assert!(counts["duplicates_stopped"] > 0, "{counts:?}");
    let charges = charges(&folder(&run_dir));
    assert!(charges.values().all(|times| *times == 1), "{charges:?}");
    // What nobody could find out about waits for a person; what is charged besides is in the
    // ledger.
    assert!(
        charges.len() as u64 + counts["in_doubt"] >= 2000,
        "{} charged: {counts:?}",
        charges.len()
    );
    assert_eq!(charges.len() as u64, counts["charged"]);
}

#[test]
fn each_whole_run_begins_anew_and_no_two_share_their_files() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let arguments = ["--payments", "600", "--json"];
    let first = demo(&run_dir, &arguments).spawn().expect("it starts");
    let begun = Instant::now();
    while !run_dir.exists() || charges(&folder(&run_dir)).is_empty() {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it charges nothing"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let beside = demo(&run_dir, &arguments).output().expect("it ran");
    assert_eq!(beside.status.code(), Some(2));
    let said = String::from_utf8_lossy(&beside.stderr);
    assert!(said.contains("is in use by another run"), "{said}");

    let again = |run: Output| {
        let counts = counts(&run);
        assert_eq!(
            (counts["charged_twice"], counts["lost"], counts["charged"]),
            (0, 0, 600 - counts["in_doubt"]),
            "{counts:?}"
        );
        let reconciled = counts["reconciled_happened"] + counts["reconciled_had_not"];
        assert!(
            counts["duplicates_stopped"] > 0 && reconciled > 0,
            "{counts:?}"
        );
        assert!(
            !run_dir.exists(),
            "a run that is over leaves nothing behind"
        );
    };
    again(first.wait_with_output().expect("it ended"));
    again(demo(&run_dir, &arguments).output().expect("it ran"));
}

#[test]
fn without_what_the_store_remembers_payments_are_charged_twice() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let run_dir = directory.path().join("runs");
    let mut killed = demo(&run_dir, &[]).spawn().expect("it starts");
    let begun = Instant::now();
    let has_begun =
        || std::fs::read_dir(&run_dir).is_ok_and(|mut folders| folders.next().is_some());
    while !has_begun() || charges(&folder(&run_dir)).len() < 200 {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it charges nothing"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    killed.kill().expect("it is ours");
    killed.wait().expect("it ended");
    for file in ["payments.db", "payments.db-wal", "payments.db-shm"] {
        std::fs::remove_file(folder(&run_dir).join(file)).expect("it is there");
    }
    let last = demo(&run_dir, &["--json"]).output().expect("it ran");
    assert_eq!(last.status.code(), Some(1));
    let counts: HashMap<String, u64> =
        serde_json::from_slice(&last.stdout).expect("numbers by name");
    assert!(counts["charged_twice"] > 100, "{counts:?}");
    // What was wrong is kept, for whoever looks into it.
    assert!(charges(&folder(&run_dir)).values().any(|times| *times > 1));
}
