//! Invalid files: each is reported in one line with the setting and the remedy.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use oncegate_core::marker::{Attempts, Verdict};
use oncegate_core::{Persistence, Store, StoreError};
use oncegate_sql::{Sqlite, Synchronous};
use rusqlite::Connection;

use crate::support::{Directory, GRANTED, SECOND, apply_one, at, claim, line, verdicts};

/// The message at the first use of this file; a claim fails with the same one.
async fn refused(path: impl AsRef<Path>) -> String {
    let store = at(path.as_ref());
    let at_start = store.persistence().await.expect_err("it is refused");
    assert!(
        matches!(at_start, StoreError::Misconfigured(_)),
        "{at_start:?}"
    );
    let claimed = apply_one(&store, claim("a", 1))
        .await
        .expect_err("it is refused");
    assert_eq!(line(&at_start), line(&claimed));
    line(&at_start)
}

fn says(line: &str, words: &[&str]) {
    assert!(
        words.iter().all(|word| line.contains(word)),
        "{line}: lacks one of {words:?}"
    );
}

#[tokio::test]
async fn a_path_that_is_not_a_file_is_reported() {
    let directory = Directory::new();
    let missing = directory.path().join("nowhere/payments.db");
    says(
        &refused(&missing).await,
        &[
            "Sqlite::file",
            "the directory",
            "nowhere does not exist",
            "create it",
        ],
    );
    says(
        &refused(directory.path()).await,
        &["Sqlite::file", "is a directory", "a file in it"],
    );
    for nothing in ["", ":memory:"] {
        says(
            &refused(nothing).await,
            &["Sqlite::file", "is not a file", "MemoryStore"],
        );
    }
    assert!(!missing.exists());
}

#[tokio::test]
async fn a_timeout_of_zero_is_rejected() {
    let directory = Directory::new();
    let store = directory.store().timeout(std::time::Duration::ZERO);
    let at_start = store.persistence().await.expect_err("it is refused");
    let claimed = apply_one(&store, claim("a", 1))
        .await
        .expect_err("it is refused");
    let read = store
        .read_marker(&crate::support::key("a"))
        .await
        .expect_err("it is refused");
    for error in [&at_start, &claimed, &read] {
        assert!(matches!(error, StoreError::Misconfigured(_)), "{error:?}");
        says(&line(error), &["Sqlite::timeout", "the timeout is 0", "2s"]);
    }
    assert!(!directory.file().exists());
    assert_eq!(
        apply_one(&store.timeout(30 * SECOND), claim("a", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

#[tokio::test]
async fn a_file_of_another_program_is_not_changed() {
    let directory = Directory::new();
    let text = directory.path().join("text");
    std::fs::write(
        &text,
        "not a database, and longer than nothing\n".repeat(100),
    )
    .expect("written");

    let other = directory.path().join("other.db");
    let raw = Connection::open(&other).expect("it opens");
    raw.execute_batch("CREATE TABLE articles (name TEXT); INSERT INTO articles VALUES ('tea')")
        .expect("written");
    drop(raw);

    let [older, newer] = [
        (
            "older.db",
            "CREATE TABLE of_another_version (key TEXT); PRAGMA application_id = 0x6f6e6365; PRAGMA user_version = 1",
        ),
        (
            "newer.db",
            "CREATE TABLE oncegate_schema (version INTEGER); INSERT INTO oncegate_schema VALUES (4)",
        ),
    ]
    .map(|(name, content)| {
        let file = directory.path().join(name);
        let raw = Connection::open(&file).expect("it opens");
        raw.execute_batch(content).expect("written");
        file
    });

    for (file, words) in [
        (&text, ["is not a SQLite database", "use another file"]),
        (&other, ["belongs to another program", "a separate file"]),
        (&older, ["older release (version 1", "use a new file"]),
        (&newer, ["newer release (version 4", "upgrade oncegate"]),
    ] {
        let before = std::fs::read(file).expect("it is there");
        let line = refused(file).await;
        says(&line, &words);
        says(&line, &["Sqlite::file", "the file is unchanged"]);
        assert!(
            std::fs::read(file).expect("it is there") == before,
            "{line}"
        );
    }
    let beside = std::fs::read_dir(directory.path())
        .expect("a directory")
        .count();
    assert_eq!(beside, 4, "a log was created for a file of another program");
}

#[tokio::test]
async fn a_file_without_the_windows_table_is_accepted() {
    let directory = Directory::new();
    apply_one(&directory.store(), claim("a", 1))
        .await
        .expect("granted");
    directory
        .raw()
        .execute_batch("DROP TABLE oncegate_windows")
        .expect("written");
    let verdict = apply_one(&directory.store(), claim("a", 2))
        .await
        .expect("a verdict");
    assert!(matches!(verdict, Verdict::Busy { .. }), "{verdict:?}");
    let longest: i64 = directory
        .raw()
        .query_row("SELECT max(longest) FROM oncegate_windows", [], |row| {
            row.get(0)
        })
        .expect("a number");
    assert_eq!(longest, 600_000);
}

#[tokio::test]
async fn a_newer_schema_stops_an_older_release() {
    let directory = Directory::new();
    let store = directory.store();
    apply_one(&store, claim("a", 1)).await.expect("granted");
    directory
        .raw()
        .execute_batch("UPDATE oncegate_schema SET version = 4")
        .expect("written");
    let stopped = apply_one(&store, claim("b", 1))
        .await
        .expect_err("it is not ours any more");
    assert!(
        matches!(stopped, StoreError::Misconfigured(_)),
        "{stopped:?}"
    );
    says(&line(&stopped), &["newer release", "upgrade oncegate here"]);
}

#[tokio::test]
async fn a_removed_or_replaced_file_stops_its_users() {
    for replace in [false, true] {
        let directory = Directory::new();
        let store = directory.store();
        apply_one(&store, claim("a", 1)).await.expect("granted");
        std::fs::rename(directory.file(), directory.path().join("away.db")).expect("moved");
        if replace {
            std::fs::write(directory.file(), "").expect("written");
        }
        for id in ["b", "c"] {
            let stopped = apply_one(&store, claim(id, 1))
                .await
                .expect_err("its write would be lost");
            assert!(
                matches!(stopped, StoreError::Misconfigured(_)),
                "{stopped:?}"
            );
            says(
                &line(&stopped),
                &["Sqlite::file", "removed or replaced", "restore it"],
            );
        }
        assert_eq!(directory.file().exists(), replace, "a new file was made");
        std::fs::rename(directory.path().join("away.db"), directory.file()).expect("moved back");
        assert_eq!(
            apply_one(&store, claim("b", 1)).await.expect("a verdict"),
            GRANTED
        );
    }
}

/// Removes the WAL and the shared-memory file.
#[cfg(target_os = "linux")]
fn remove_log(directory: &Directory) {
    for suffix in ["-wal", "-shm"] {
        std::fs::remove_file(format!("{}{suffix}", directory.file().display())).expect("removed");
    }
}

/// Drops the store, and returns when its thread has closed the file.
#[cfg(target_os = "linux")]
fn close(directory: &Directory, store: Sqlite) {
    drop(store);
    let is_open = || {
        let files = std::fs::read_dir("/proc/self/fd").expect("Linux").flatten();
        files
            .filter_map(|file| std::fs::read_link(file.path()).ok())
            .any(|path| path.starts_with(directory.path()))
    };
    let begun = std::time::Instant::now();
    while is_open() {
        assert!(begun.elapsed() < 30 * SECOND, "it stays open");
        std::thread::yield_now();
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_removed_log_stops_its_users_and_is_checkpointed_on_close() {
    let directory = Directory::new();
    let store = directory.store();
    apply_one(&store, claim("a", 1)).await.expect("granted");
    remove_log(&directory);
    for id in ["b", "c"] {
        let stopped = apply_one(&store, claim(id, 1))
            .await
            .expect_err("its write would be lost");
        assert!(
            matches!(stopped, StoreError::Misconfigured(_)),
            "{stopped:?}"
        );
        says(
            &line(&stopped),
            &["Sqlite::file", "-wal", "removed or replaced", "restore it"],
        );
    }
    close(&directory, store);
    let verdict = apply_one(&directory.store(), claim("a", 2))
        .await
        .expect("a verdict");
    assert!(matches!(verdict, Verdict::Busy { .. }), "{verdict:?}");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn an_id_that_only_the_missing_file_has_is_granted_again_after_a_restart() {
    let directory = Directory::new();
    let store = directory.store();
    apply_one(&store, claim("a", 1)).await.expect("granted");
    std::fs::remove_file(directory.file()).expect("removed");
    remove_log(&directory);
    let stopped = apply_one(&store, claim("b", 1)).await;
    let stopped = line(&stopped.expect_err("its write would be lost"));
    says(
        &stopped,
        &[
            "only the missing file has are handled again",
            "outcome not recorded",
        ],
    );
    close(&directory, store);
    let verdict = apply_one(&directory.store(), claim("a", 2)).await;
    assert_eq!(verdict.expect("a verdict"), GRANTED);
}

#[tokio::test]
#[ignore = "a process of the test below"]
async fn is_granted_b() {
    let file = std::env::var_os(FILE).expect("a file");
    assert_eq!(
        apply_one(&at(file), claim("b", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_process_whose_log_was_replaced_stops_and_changes_nothing() {
    let directory = Directory::new();
    let store = directory.store();
    apply_one(&store, claim("a", 1)).await.expect("granted");
    remove_log(&directory);
    let program = std::env::current_exe().expect("this test");
    // In another process: in this one SQLite would reuse the removed WAL.
    let other = process("is_granted_b", &program, &directory.file())
        .output()
        .expect("it ran");
    assert!(
        other.status.success(),
        "{}",
        String::from_utf8_lossy(&other.stderr)
    );
    for _ in 0..2 {
        let stopped = apply_one(&store, claim("b", 1))
            .await
            .expect_err("another was granted it");
        assert!(
            matches!(stopped, StoreError::Misconfigured(_)),
            "{stopped:?}"
        );
    }
    close(&directory, store);
    let verdict = apply_one(&directory.store(), claim("b", 3))
        .await
        .expect("a verdict");
    assert!(matches!(verdict, Verdict::Busy { .. }), "{verdict:?}");
}

#[tokio::test]
async fn an_unreadable_row_does_not_affect_the_others() {
    let directory = Directory::new();
    let store = directory.store();
    verdicts(
        &store,
        &[claim("a", 1), claim("b", 1), claim("c", 1), claim("d", 1)],
    )
    .await;
    let raw = directory.raw();
    raw.execute(
        "UPDATE oncegate_merged_markers SET state = 9 WHERE key = 'a'",
        [],
    )
    .expect("written");
    raw.execute(
        "UPDATE oncegate_merged_markers SET token = x'00' WHERE key = 'b'",
        [],
    )
    .expect("written");
    raw.execute(
        "UPDATE oncegate_merged_markers SET fingerprint = -1 WHERE key = 'c'",
        [],
    )
    .expect("written");
    let answers = store
        .apply(&[
            claim("a", 2),
            claim("b", 1),
            claim("c", 1),
            claim("d", 1),
            claim("e", 1),
        ])
        .await;
    for (answer, id) in answers.iter().zip(["a", "b", "c"]) {
        let Err(error @ StoreError::UnreadableMarker(_)) = answer else {
            panic!("{answer:?}")
        };
        says(
            &line(error),
            &[
                &format!("the row of {id} "),
                "delete the row",
                "the row is unchanged",
            ],
        );
    }
    assert!(
        matches!(answers[3..], [Ok(GRANTED), Ok(GRANTED)]),
        "{answers:?}"
    );
    let state: u32 = raw
        .query_row(
            "SELECT state FROM oncegate_markers WHERE key = 'a'",
            [],
            |row| row.get(0),
        )
        .expect("it is there");
    assert_eq!(state, 9);
}

#[tokio::test]
async fn persistence_depends_on_synchronous() {
    let directory = Directory::new();
    let full = directory.store().persistence().await.expect("a memory");
    assert!(
        matches!(&full, Persistence::Durable(text) if text.contains("synchronous=FULL")),
        "{full:?}"
    );
    let normal = directory
        .store()
        .synchronous(Synchronous::Normal)
        .persistence()
        .await
        .expect("a memory");
    assert!(
        matches!(&normal, Persistence::Volatile(text) if text.contains("power cut") && text.contains("Synchronous::Normal")),
        "{normal:?}"
    );
    let mode: String = directory
        .raw()
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .expect("an answer");
    assert_eq!(mode, "wal");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_file_system_in_memory_is_volatile() {
    // If this machine has one.
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return;
    };
    let is_in_memory = std::fs::read_to_string("/proc/mounts")
        .expect("Linux")
        .lines()
        .any(|line| line.starts_with("tmpfs /dev/shm ") || line.contains(" /dev/shm tmpfs "));
    let memory = Sqlite::file(directory.path().join("markers.db"))
        .persistence()
        .await
        .expect("a memory");
    assert_eq!(
        matches!(&memory, Persistence::Volatile(text) if text.contains("in memory") && text.contains("on a disk")),
        is_in_memory,
        "{memory:?}"
    );
}

const FILE: &str = "ONCEGATE_TEST_SQLITE_FILE";

/// Runs a test of this module in another process, with a file.
fn process(test: &str, program: &Path, file: &Path) -> Command {
    let mut process = Command::new(program);
    process
        .args([
            &format!("files::{test}"),
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(FILE, file);
    process.stdout(Stdio::null());
    process
}

#[tokio::test]
#[ignore = "a process of a test below"]
async fn reports_that_the_file_is_not_writable() {
    let file = std::env::var_os(FILE).expect("a file");
    says(
        &refused(file).await,
        &[
            "Sqlite::file",
            "is not writable",
            "grant this user write access to the file and its directory",
        ],
    );
}

#[test]
fn a_file_that_is_not_writable_is_rejected() {
    let directory = Directory::for_anybody();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    runtime
        .block_on(async { apply_one(&directory.store(), claim("a", 1)).await })
        .expect("granted");
    let raw = directory.raw();
    raw.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
        .expect("an answer");
    drop(raw);
    // Root may write everything, so the process runs as another user, who needs access to this
    // program.
    let program = directory.path().join("program");
    std::fs::copy(std::env::current_exe().expect("this test"), &program).expect("copied");
    let allow = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("ours")
    };
    allow(&directory.file(), 0o444);
    allow(directory.path(), 0o555);
    let is_root = std::fs::metadata(directory.path())
        .expect("it is there")
        .uid()
        == 0;
    // A read-only file, also in a writable directory, and a file that cannot be created.
    let open = Directory::for_anybody();
    std::fs::copy(directory.file(), open.file()).expect("copied");
    allow(&open.file(), 0o444);
    allow(open.path(), 0o777);
    for file in [
        directory.file(),
        open.file(),
        directory.path().join("new.db"),
    ] {
        let mut found = process("reports_that_the_file_is_not_writable", &program, &file);
        if is_root {
            found.uid(65_534).gid(65_534);
        }
        let found = found.current_dir("/").output().expect("it ran");
        assert!(
            found.status.success(),
            "{}",
            String::from_utf8_lossy(&found.stderr)
        );
    }
    allow(directory.path(), 0o755);
}

#[tokio::test]
#[ignore = "a process of a test below"]
async fn reports_that_the_disk_is_full() {
    let store = at(std::env::var_os(FILE).expect("a file"));
    let mut granted = 0;
    let refused = loop {
        let claims: Vec<_> = (0..100)
            .map(|n| claim(&format!("{granted}-{n}"), 1))
            .collect();
        let answers = store.apply(&claims).await;
        if answers.iter().all(|answer| matches!(answer, Ok(GRANTED))) {
            granted += 1;
            assert!(granted < 10_000, "the disk is never full");
            continue;
        }
        break answers;
    };
    for answer in &refused {
        let Err(error @ (StoreError::NotApplied(_) | StoreError::Unknown(_))) = answer else {
            panic!("{answer:?}")
        };
        assert!(
            line(error).contains("SQLite failed on") || line(error).contains("is full"),
            "{error}"
        );
    }
    // Earlier grants are kept.
    for round in 0..granted {
        let marker = store
            .read_marker(&crate::support::key(&format!("{round}-0")))
            .await
            .expect("a marker");
        assert!(
            matches!(marker, oncegate_core::marker::Marker::InProgress(_)),
            "{marker:?}"
        );
    }
}

#[tokio::test]
async fn a_full_disk_grants_nothing_and_loses_nothing() {
    let directory = Directory::new();
    apply_one(&directory.store(), claim("first", 1))
        .await
        .expect("granted");
    let mut found = Command::new("sh");
    // Blocks of 512 or 1,024 bytes: writes beyond the limit fail, as on a full disk.
    found
        .args(["-c", r#"trap '' XFSZ; ulimit -f 400; exec "$0" "$@""#])
        .arg(std::env::current_exe().expect("this test"));
    found.args([
        "files::reports_that_the_disk_is_full",
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    let found = found.env(FILE, directory.file()).output().expect("it ran");
    assert!(
        found.status.success(),
        "{}{}",
        String::from_utf8_lossy(&found.stdout),
        String::from_utf8_lossy(&found.stderr)
    );
    // The disk has space again.
    let store = directory.store();
    assert_eq!(
        apply_one(&store, claim("0-0", 1)).await.expect("a verdict"),
        Verdict::Granted(Attempts::new(1))
    );
    assert_eq!(
        apply_one(&store, claim("next", 1))
            .await
            .expect("a verdict"),
        Verdict::Granted(Attempts::new(1))
    );
}
