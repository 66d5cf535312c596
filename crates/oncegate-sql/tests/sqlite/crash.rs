//! kill -9 during writes: answered operations are not lost.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use oncegate_core::marker::{Attempts, Marker, Verdict};

use crate::support::{Directory, Random, at, claim, complete, key, verdicts};

const FILE: &str = "ONCEGATE_TEST_SQLITE_FILE";
const WRITER: &str = "crash::writes_until_it_is_killed";
const BATCH: usize = 40;

/// Claims and completes batches until it is killed, and prints each batch after its answers.
#[tokio::test]
#[ignore = "a process of the test below"]
async fn writes_until_it_is_killed() {
    let file = std::env::var_os(FILE).expect("the file to write to");
    let store = at(file);
    let mut output = std::io::stdout();
    for round in 0_u32.. {
        let ids: Vec<String> = (0..BATCH)
            .map(|n| format!("{}-{round}-{n}", std::process::id()))
            .collect();
        let claims: Vec<_> = ids.iter().map(|id| claim(id, 1)).collect();
        verdicts(&store, &claims).await;
        writeln!(output, "claimed {} {round}", std::process::id()).expect("written");
        // Some stay in progress.
        let completions: Vec<_> = ids
            .iter()
            .skip(BATCH / 4)
            .map(|id| complete(id, 1))
            .collect();
        verdicts(&store, &completions).await;
        writeln!(output, "completed {} {round}", std::process::id()).expect("written");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answered_operations_survive_kill_9() {
    let directory = Directory::new();
    let mut random = Random::seeded();
    let store = directory.store(); // open all the time, besides the killed processes
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
        let mut output: Vec<_> = writers
            .iter_mut()
            .map(|writer| BufReader::new(writer.stdout.take().expect("piped")).lines())
            .collect();
        // Starts after the first answer.
        let mut lines = Vec::new();
        for lines_of_one in &mut output {
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
        lines.extend(output.into_iter().flatten().map_while(Result::ok));
        for line in lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            // The test harness prints first; an incomplete line is ignored.
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
                    .read_marker(&key(&format!("{process}-{round}-{n}")))
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
    // The store still works.
    assert_eq!(
        verdicts(&store, &[claim("next", 1)]).await,
        [Verdict::Granted(Attempts::new(1))]
    );
}
