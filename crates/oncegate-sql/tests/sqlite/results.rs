//! The results of runs: shared files, crashes, expiry, and files of earlier releases.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::gate::Stored;
use oncegate_core::marker::{Marker, Operation, OperationKind};
use oncegate_core::{Completion, Gate, ResultStore, Store};
use oncegate_sql::{Sqlite, Synchronous};

use crate::support::{
    DONE, Directory, GRANTED, Random, SECOND, apply_one, at, claim, complete, key, verdicts,
};

const FILE: &str = "ONCEGATE_TEST_SQLITE_RESULTS";
const WRITER: &str = "results::stores_results_until_it_is_killed";

fn results(store: &Sqlite) -> &dyn ResultStore {
    store.results().expect("SQLite keeps results")
}

async fn store_result(store: &Sqlite, id: &str, result: &[u8]) -> Completion {
    let completed = results(store).complete(&complete(id, 1), result).await;
    completed.expect("the store is available")
}

async fn read(store: &Sqlite, id: &str) -> Option<Vec<u8>> {
    let read = results(store).read(&key(id), None).await;
    read.expect("the store is available")
}

/// The keys in the table of results.
fn rows(directory: &Directory) -> Vec<String> {
    let raw = directory.raw();
    let mut select = raw
        .prepare("SELECT key FROM oncegate_results ORDER BY key")
        .expect("the table");
    let keys = select.query_map([], |row| row.get(0)).expect("rows");
    keys.collect::<Result<_, _>>().expect("texts")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_replayed_by_another_process_on_the_file() {
    let directory = Directory::new();
    for expected in [Stored::Executed(4200), Stored::Replayed(4200)] {
        let gate = Gate::builder().store(directory.store()).open();
        let gate = gate.await.expect("a gate");
        let charged = gate.run_stored("charge", || async { Ok(4200) }).await;
        assert_eq!(charged.expect("an outcome"), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_completions_over_several_handles_agree_on_one_result() {
    let directory = Directory::new();
    let stores: Vec<Sqlite> = (0..5)
        .map(|_| directory.store().synchronous(Synchronous::Normal))
        .collect();
    for round in 0..20 {
        let id = format!("round-{round}");
        let completions = stores.iter().zip(0_u8..).map(|(store, n)| {
            let (store, id) = (store.clone(), id.clone());
            tokio::spawn(async move {
                let completion = store_result(&store, &id, &[n]).await;
                completion.earlier.unwrap_or(vec![n])
            })
        });
        let answers = join_all(completions).await;
        let stored = read(&stores[0], &id).await.expect("a result");
        for answer in answers {
            assert_eq!(answer.expect("no panic"), stored);
        }
    }
}

/// Claims and completes ids, and prints each id after the answer, until it is killed.
#[tokio::test]
#[ignore = "a process of the test below"]
async fn stores_results_until_it_is_killed() {
    let store = at(std::env::var_os(FILE).expect("the file to write to"));
    let mut output = std::io::stdout();
    for n in 0_u32.. {
        let id = format!("{}-{n}", std::process::id());
        verdicts(&store, &[claim(&id, 1)]).await;
        store_result(&store, &id, id.as_bytes()).await;
        writeln!(output, "stored {id}").expect("written");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_kill_9_exactly_the_done_ids_have_results() {
    let directory = Directory::new();
    let mut random = Random::seeded();
    let store = directory.store(); // open all the time, besides the killed processes
    for _ in 0..10 {
        let arguments = [
            WRITER,
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ];
        let mut writer = Command::new(std::env::current_exe().expect("this test"))
            .args(arguments)
            .env(FILE, directory.file())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let output = writer.stdout.take().expect("piped");
        let mut answered = BufReader::new(output)
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| Some(line.split_once("stored ")?.1.to_owned()));
        let first = answered.next().expect("a result is stored");
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        writer.kill().expect("it runs");
        writer.wait().expect("it ended");
        let last = answered.last().unwrap_or_else(|| first.clone());
        for id in [first, last] {
            assert_eq!(read(&store, &id).await, Some(id.into_bytes()));
        }
        let mut listing = store.browse(1000);
        while let Some(page) = listing.next().await.expect("a page") {
            for (id, marker) in page {
                let (marker, _) = marker.expect("a marker");
                let expected = matches!(marker, Marker::Done(_)).then(|| id.clone().into_bytes());
                assert_eq!(read(&store, &id).await, expected, "{id}: {marker:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn results_are_deleted_with_their_expired_markers() {
    let directory = Directory::new();
    let store = directory.store();
    for id in ["kept", "old-1", "old-2", "other", "reused", "without"] {
        assert_eq!(verdicts(&store, &[claim(id, 1)]).await, [GRANTED]);
        if id != "without" {
            store_result(&store, id, b"first").await;
        }
    }
    // As if the window had ended.
    let raw = directory.raw();
    for table in ["oncegate_merged_markers", "oncegate_results"] {
        let expire =
            format!("UPDATE {table} SET expires = 1 WHERE key LIKE 'old%' OR key = 'reused'");
        raw.execute(&expire, []).expect("written");
    }
    for id in ["old-1", "reused"] {
        assert_eq!(read(&store, id).await, None);
    }
    // Another marker, written by a release that keeps no results.
    let other = "UPDATE oncegate_merged_markers SET expires = expires + 1000 WHERE key = 'other'";
    raw.execute(other, []).expect("written");
    assert_eq!(read(&store, "other").await, None);
    // Done again before its row is deleted.
    let mut again = complete("reused", 2);
    again.terms.window = 700 * SECOND;
    apply_one(&store, again).await.expect("done");
    assert_eq!(read(&store, "reused").await, None);

    let begun = std::time::Instant::now();
    while rows(&directory) != ["kept", "other"] {
        assert!(begun.elapsed() < 60 * SECOND, "{:?}", rows(&directory));
        tokio::time::sleep(SECOND / 50).await;
    }
    assert_eq!(read(&store, "kept").await.as_deref(), Some(&b"first"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_marker_takes_its_result_with_it() {
    let directory = Directory::new();
    let store = directory.store();
    for id in ["forgotten", "deleted", "kept"] {
        store_result(&store, id, b"first").await;
    }
    let forget = Operation {
        kind: OperationKind::Forget {
            seen: Marker::Done(None),
        },
        ..complete("forgotten", 1)
    };
    apply_one(&store, forget).await.expect("forgotten");
    let delete = "DELETE FROM oncegate_markers WHERE key = 'deleted'";
    directory.raw().execute(delete, []).expect("deleted");
    assert_eq!(rows(&directory), ["kept"]);
}

/// The tables as an earlier release created them.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_without_the_table_of_results_is_accepted() {
    let directory = Directory::new();
    let store = directory.store();
    verdicts(&store, &[claim("claimed", 1), complete("done", 1)]).await;
    drop(store);
    directory
        .raw()
        .execute_batch("DROP TRIGGER oncegate_delete_result; DROP TABLE oncegate_results")
        .expect("written");
    // Several processes open it at once.
    let stores = [(); 4].map(|()| directory.store());
    let opened = stores.each_ref().map(|store| read(store, "done"));
    assert!(join_all(opened).await.iter().all(Option::is_none));
    let completion = store_result(&stores[0], "claimed", b"first").await;
    let completed = Completion {
        verdict: DONE,
        earlier: None,
    };
    assert_eq!(completion, completed);
    for store in &stores {
        let stored = read(store, "claimed").await;
        assert_eq!(stored.as_deref(), Some(&b"first"[..]));
    }
}
