//! kill -9 in the middle of writing: what was answered is still known.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use oncegate_core::marker::{Attempts, Marker, Verdict};

use crate::support::{Directory, Random, at, claim, complete, key, verdicts};

const FILE: &str = "ONCEGATE_TEST_SQLITE_FILE";
const WRITER: &str = "crash::writes_until_it_is_killed";
const BATCH: usize = 40;

/// Claims and completes batches until it is killed, and says so of each once it was answered.
#[tokio::test]
#[ignore = "a process of the test below"]
async fn writes_until_it_is_killed() {
    let file = std::env::var_os(FILE).expect("the file to write to");
    let store = at(file);
    let mut said = std::io::stdout();
    for round in 0_u32.. {
        let ids: Vec<String> = (0..BATCH)
            .map(|n| format!("{}-{round}-{n}", std::process::id()))
            .collect();
        let claims: Vec<_> = ids.iter().map(|id| claim(id, 1)).collect();
        verdicts(&store, &claims).await;
        writeln!(said, "claimed {} {round}", std::process::id()).expect("somebody reads");
        // Some are left in progress.
        let completions: Vec<_> = ids
            .iter()
            .skip(BATCH / 4)
            .map(|id| complete(id, 1))
            .collect();
        verdicts(&store, &completions).await;
        writeln!(said, "completed {} {round}", std::process::id()).expect("somebody reads");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_answered_before_kill_9_is_known_after_it() {
    let directory = Directory::new();
    let mut random = Random::seeded();
    let store = directory.store(); // open all the time, beside those that are killed
    let mut rounds = 0;
    for _ in 0..10 {
        let mut writers: Vec<_> = (0..2)
            .map(|_| {
                Command::new(std::env::current_exe().expect("this test"))
                    .args([
                        WRITER,
                        "--exact",
                        "--ignored",
                        "--nocapture",
                        "--test-threads=1",
                    ])
                    .env(FILE, directory.file())
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("it starts")
            })
            .collect();
        let mut said: Vec<_> = writers
            .iter_mut()
            .map(|writer| BufReader::new(writer.stdout.take().expect("piped")).lines())
            .collect();
        // From the moment when the first was answered.
        let mut lines = Vec::new();
        for lines_of_one in &mut said {
            lines.extend(
                lines_of_one
                    .by_ref()
                    .map_while(Result::ok)
                    .find(|line| line.contains("claimed")),
            );
        }
        std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
        for writer in &mut writers {
            writer.kill().expect("it runs");
            writer.wait().expect("it ended");
        }
        lines.extend(said.into_iter().flatten().map_while(Result::ok));
        for line in lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            // The harness says its own name first; what was cut short was never said.
            let Some(at) = words
                .iter()
                .position(|word| matches!(*word, "claimed" | "completed"))
            else {
                continue;
            };
            let [what, process, round] = words[at..] else {
                continue;
            };
            for n in 0..BATCH {
                let marker = store
                    .look(&key(&format!("{process}-{round}-{n}")))
                    .await
                    .expect("a marker");
                let is_known = matches!(marker, Marker::Done(_))
                    || matches!(marker, Marker::InProgress(_))
                        && (what == "claimed" || n < BATCH / 4);
                assert!(is_known, "{line}: {n} is {marker:?}");
            }
            rounds += 1;
        }
    }
    assert!(rounds >= 20, "{rounds}");
    let whole: String = directory
        .raw()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .expect("an answer");
    assert_eq!(whole, "ok");
    // And it goes on.
    assert_eq!(
        verdicts(&store, &[claim("next", 1)]).await,
        [Verdict::Granted(Attempts::new(1))]
    );
}
