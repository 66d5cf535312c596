//! Runs `oncegate` on a finished run of the demo, on each broker. `ONCEGATE_KAFKA`,
//! `ONCEGATE_RABBITMQ` and `ONCEGATE_REDIS` are the servers.
#![cfg(all(feature = "kafka", feature = "rabbitmq"))]
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const PAYMENTS: &str = env!("CARGO_BIN_EXE_payments");
/// With seed 3, the first payment that is sent twice.
const SENT_TWICE: &str = "pay-000013";
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn explain_resolve_and_redrive_on_kafka() {
    explain_resolve_and_redrive(&Run::of("kafka"));
}

#[test]
fn explain_resolve_and_redrive_on_rabbitmq() {
    explain_resolve_and_redrive(&Run::of("rabbitmq"));
}

fn explain_resolve_and_redrive(run: &Run) {
    let broken = run.listed_ids("dead-letters");
    assert!(
        ["pay-000199", "pay-000200"]
            .iter()
            .all(|id| run.listed_ids("in-doubt").contains(*id))
    );
    let broken = broken
        .iter()
        .find(|id| id.starts_with("broken-"))
        .unwrap_or_else(|| panic!("about one in two hundred is malformed: {broken:?}"))
        .as_str();

    run.assert_explained(
        "pay-000001",
        "handled",
        &["accepted without calling the handler"],
    );
    run.assert_explained(SENT_TWICE, "handled", &["duplicate is not recorded"]);
    if run.broker == "kafka" {
        let explanation = run.json(&["explain", SENT_TWICE, "--copies"]);
        assert_eq!(
            (
                explanation["verdict"].as_str(),
                explanation["copies"].as_array().map(Vec::len)
            ),
            (Some("handled-with-duplicates"), Some(2)),
            "{explanation}"
        );
    }
    run.assert_explained(
        "pay-000200",
        "in-doubt",
        &["Its effect is unknown", "in-doubt resolve"],
    );
    run.assert_explained(broken, "dead-lettered", &["dead-letters redrive"]);
    run.assert_explained("nobody", "unknown", &["Nothing is known about this id"]);

    // The ledger shows that the charge happened. Without --yes the command is a preview.
    assert!(run.charged("pay-000200"));
    let resolve = [
        "in-doubt",
        "resolve",
        "pay-000200",
        "--happened",
        "--as",
        "ann",
        "--why",
        "it is in the ledger",
    ];
    run.exits_with(&resolve, 4);
    run.exits_with(&[resolve.as_slice(), &["--yes"]].concat(), 0);
    let left = run.listed_ids("in-doubt");
    assert!(
        left.contains("pay-000199") && !left.contains("pay-000200"),
        "{left:?}"
    );
    let resolved = run.assert_explained("pay-000200", "handled", &["ann recorded that"]);
    assert_eq!(resolved["marker"]["state"], "done", "{resolved}");

    let redrive = ["dead-letters", "redrive", "--id", broken, "--as", "bob"];
    run.exits_with(&redrive, 4);
    run.exits_with(&[redrive.as_slice(), &["--yes"]].concat(), 0);
    assert!(!run.listed_ids("dead-letters").contains(broken));
    run.assert_explained(broken, "sent-back", &["bob sent it back"]);
    // A worker receives the copy, which is malformed as before, and dead-letters it.
    let worker = run.worker();
    wait_until("the message is dead-lettered again", || {
        run.listed_ids("dead-letters").contains(broken)
    });
    worker.stop();
    // Before the redrive the reason may be `rejected-before`, if a worker was killed after it had
    // recorded the rejection. Now it is `unreadable`.
    run.assert_explained(
        broken,
        "dead-lettered",
        &["unreadable", "not the JSON that was expected", "bob"],
    );

    // The store's audit log has the actions of all runs; those of this run have its scope.
    for (who, what, id) in [
        ("ann", "in-doubt resolve", "pay-000200"),
        ("bob", "dead-letters redrive", broken),
    ] {
        let actions = run.json(&["audit", "--id", id]);
        let is_done = |action: &Value| {
            [
                &action["scope"],
                &action["who"],
                &action["what"],
                &action["id"],
                &action["stage"],
            ] == [&run.name, who, what, id, "done"]
        };
        assert!(
            actions
                .as_array()
                .is_some_and(|them| them.iter().any(is_done)),
            "{actions}"
        );
    }
    run.remove();
}

/// A finished run of the demo whose files were kept.
struct Run {
    broker: &'static str,
    name: String,
    /// The `--run-dir` of the demo.
    temporary: tempfile::TempDir,
}

impl Run {
    fn of(broker: &'static str) -> Self {
        let temporary = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let ran = Command::new(PAYMENTS)
            .args([
                "--broker",
                broker,
                "--store",
                "redis",
                "--payments",
                "200",
                "--unsure",
                "2",
                "--seed",
                "3",
            ])
            .args(["--keep", "--json"])
            .arg("--run-dir")
            .arg(temporary.path())
            .output()
            .expect("it ran");
        let report = json_of(&ran, 0);
        // `charged` is counted in the ledger, which also has the payments in doubt.
        for (count, wanted) in [("charged", 200), ("charged_twice", 0), ("lost", 0)] {
            assert_eq!(report[count], wanted, "{count}: {report}");
        }
        let mut runs = std::fs::read_dir(temporary.path())
            .expect("a directory entry")
            .map(|run| run.expect("a directory entry").file_name());
        let name = runs
            .next()
            .expect("a run was kept")
            .into_string()
            .expect("text");
        Self {
            broker,
            name,
            temporary,
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.temporary.path().join(&self.name).join(file)
    }

    fn charged(&self, id: &str) -> bool {
        let ledger = rusqlite::Connection::open(self.path("ledger.db")).expect("a ledger");
        let query = "SELECT count(*) FROM charges WHERE id = ?";
        ledger
            .query_row(query, [id], |row| row.get::<_, u32>(0))
            .expect("a count")
            > 0
    }

    /// Runs `oncegate` with the configuration of the run.
    fn oncegate(&self, arguments: &[&str]) -> Output {
        let mut oncegate = Command::new(tool());
        oncegate
            .arg("--config")
            .arg(self.path("oncegate.toml"))
            .args(arguments)
            .output()
            .expect("it ran")
    }

    /// Runs `oncegate`, asserts its exit code and returns its JSON.
    #[track_caller]
    fn exits_with(&self, arguments: &[&str], code: i32) -> Value {
        json_of(&self.oncegate(&[arguments, &["--json"]].concat()), code)
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        self.exits_with(arguments, 0)
    }

    /// The ids of the pending messages of a destination.
    fn listed_ids(&self, destination: &str) -> HashSet<String> {
        let list = self.json(&[destination, "list"]);
        list["messages"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|message| message["id"].as_str().expect("an id").to_owned())
            .collect()
    }

    /// Asserts the verdict of `oncegate explain` and that its output contains these words.
    #[track_caller]
    fn assert_explained(&self, id: &str, verdict: &str, words: &[&str]) -> Value {
        let explanation = self.json(&["explain", id]);
        assert_eq!(explanation["verdict"], verdict, "{explanation}");
        for word in words {
            assert!(
                explanation.to_string().contains(word),
                "no {word:?} in {explanation}"
            );
        }
        explanation
    }

    /// A worker in a process of its own.
    fn worker(&self) -> Worker {
        let worker = Command::new(PAYMENTS)
            .args(["work", "--run-dir"])
            .arg(self.path(""))
            .env("ONCEGATE_CONFIG", self.path("oncegate.toml"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Worker(worker.expect("it starts"))
    }

    /// Removes the topics or queues of the run.
    fn remove(&self) {
        let suffixes = [
            ".dead-letters",
            ".in-doubt",
            ".delay.1000",
            ".delay.5000",
            ".delay.30000",
            ".delay.120000",
            ".delay.600000",
        ];
        let names: Vec<String> = [""]
            .into_iter()
            .chain(suffixes)
            .map(|suffix| format!("{}{suffix}", self.name))
            .collect();
        tokio::runtime::Runtime::new()
            .expect("a runtime")
            .block_on(async {
                match self.broker {
                    "kafka" => remove_topics(&names[..3]).await,
                    _ => remove_queues(&names).await,
                }
            });
    }
}

async fn remove_topics(names: &[String]) {
    use rdkafka::admin::{AdminClient, AdminOptions};
    use rdkafka::client::DefaultClientContext;
    let brokers = oncegate_testkit::kafka_brokers().expect("ONCEGATE_KAFKA is set");
    let admin: AdminClient<DefaultClientContext> = rdkafka::ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .create()
        .expect("an admin client");
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let _ = admin.delete_topics(&names, &AdminOptions::new()).await; // leftovers are harmless: names are not reused
}

async fn remove_queues(names: &[String]) {
    let url = oncegate_testkit::rabbitmq_url().expect("ONCEGATE_RABBITMQ is set");
    let connection = lapin::Connection::connect(&url, lapin::ConnectionProperties::default())
        .await
        .expect("connected");
    let channel = connection.create_channel().await.expect("a channel");
    for name in names {
        channel
            .queue_delete(
                name.as_str().into(),
                lapin::options::QueueDeleteOptions::default(),
            )
            .await
            .expect("deleted");
    }
}

/// A worker that is killed when the test ends.
struct Worker(Child);

impl Worker {
    /// Sends SIGTERM and asserts exit code 0.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).expect("it runs");
        assert!(self.0.wait().expect("it ended").success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

/// The program `oncegate`, next to the demo. Builds it if the test run did not.
fn tool() -> &'static Path {
    static TOOL: OnceLock<PathBuf> = OnceLock::new();
    TOOL.get_or_init(|| {
        let tool = Path::new(PAYMENTS).with_file_name("oncegate");
        if !tool.exists() {
            let directory = tool
                .ancestors()
                .nth(2)
                .expect("the target directory has a profile's in it");
            let mut cargo = Command::new(env!("CARGO"));
            cargo
                .args(["build", "--quiet", "-p", "oncegate-cli", "--target-dir"])
                .arg(directory);
            assert!(cargo.status().expect("cargo runs").success());
        }
        tool
    })
}

/// Asserts the exit code and parses the output.
#[track_caller]
fn json_of(output: &Output, code: i32) -> Value {
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(code), "{stdout}{stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}"))
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < TEST_TIMEOUT, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
