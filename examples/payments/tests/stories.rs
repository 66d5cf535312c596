//! What `oncegate`, the operator's tool, reports of a run of the demo, and does to it, on each
//! broker. `ONCEGATE_KAFKA`, `ONCEGATE_RABBITMQ` and `ONCEGATE_REDIS` say where the servers are.
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
const COPIED: &str = "pay-000013";
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn explain_answers_for_each_payment_on_kafka() {
    each_payment_is_explained_and_an_operator_settles_the_rest(&Run::of("kafka"));
}

#[test]
fn explain_answers_for_each_payment_on_rabbitmq() {
    each_payment_is_explained_and_an_operator_settles_the_rest(&Run::of("rabbitmq"));
}

fn each_payment_is_explained_and_an_operator_settles_the_rest(run: &Run) {
    let copied = COPIED;
    let broken = run.waiting("dead-letters");
    assert!(
        ["pay-000199", "pay-000200"]
            .iter()
            .all(|id| run.waiting("in-doubt").contains(*id))
    );
    let broken = broken
        .iter()
        .find(|id| id.starts_with("broken-"))
        .expect("about one in two hundred")
        .as_str();

    run.tells("pay-000001", "handled", &["Not twice, because"]);
    run.tells(copied, "handled", &["duplicate leaves no trace"]);
    if run.broker == "kafka" {
        let explanation = run.json(&["explain", copied, "--copies"]);
        assert_eq!(
            (
                explanation["verdict"].as_str(),
                explanation["copies"].as_array().map(Vec::len)
            ),
            (Some("handled-with-duplicates"), Some(2)),
            "{explanation}"
        );
    }
    run.tells(
        "pay-000200",
        "in-doubt",
        &["Its effect is unknown", "in-doubt resolve"],
    );
    run.tells(
        broken,
        "dead-lettered",
        &[
            "unreadable",
            "not the JSON that was expected",
            "dead-letters redrive",
        ],
    );
    run.tells("nobody", "unknown", &["Nothing is known about this id"]);

    // The ledger has it: it happened. Without --yes that is only shown.
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
    run.ends(&resolve, 4);
    run.ends(&[resolve.as_slice(), &["--yes"]].concat(), 0);
    let left = run.waiting("in-doubt");
    assert!(
        left.contains("pay-000199") && !left.contains("pay-000200"),
        "{left:?}"
    );
    let resolved = run.tells("pay-000200", "handled", &["ann recorded that"]);
    assert_eq!(resolved["marker"]["state"], "done", "{resolved}");

    let redrive = ["dead-letters", "redrive", "--id", broken, "--as", "bob"];
    run.ends(&redrive, 4);
    run.ends(&[redrive.as_slice(), &["--yes"]].concat(), 0);
    assert!(!run.waiting("dead-letters").contains(broken));
    run.tells(broken, "sent-back", &["bob sent it back"]);
    // It is not lost on its way: a worker takes it, and it comes back, as broken as it was.
    let worker = run.worker();
    eventually("it is in the dead letters again", || {
        run.waiting("dead-letters").contains(broken)
    });
    worker.ends();
    run.tells(broken, "dead-lettered", &["unreadable", "bob"]);

    // The audit of the store has the actions of all runs; the scope is that of this run.
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

/// A run of the demo that is over, and was kept.
struct Run {
    broker: &'static str,
    name: String,
    /// Where the demo was told to write.
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
        let report = ended(&ran, 0);
        // By the ledger: those in doubt stand in it too.
        for (count, wanted) in [("charged", 200), ("charged_twice", 0), ("lost", 0)] {
            assert_eq!(report[count], wanted, "{count}: {report}");
        }
        let mut runs = std::fs::read_dir(temporary.path())
            .expect("it is there")
            .map(|run| run.expect("it is there").file_name());
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

    fn ask(&self, arguments: &[&str]) -> Output {
        let mut oncegate = Command::new(tool());
        oncegate
            .arg("--config")
            .arg(self.path("oncegate.toml"))
            .args(arguments)
            .output()
            .expect("it ran")
    }

    #[track_caller]
    fn ends(&self, arguments: &[&str], code: i32) -> Value {
        ended(&self.ask(&[arguments, &["--json"]].concat()), code)
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        self.ends(arguments, 0)
    }

    /// The ids of what waits for a person.
    fn waiting(&self, shelf: &str) -> HashSet<String> {
        let list = self.json(&[shelf, "list"]);
        list["messages"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|letter| letter["id"].as_str().expect("an id").to_owned())
            .collect()
    }

    #[track_caller]
    fn tells(&self, id: &str, verdict: &str, words: &[&str]) -> Value {
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

    /// Takes away what it made on the broker.
    fn remove(&self) {
        let beside = [
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
            .chain(beside)
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
    let _ = admin.delete_topics(&names, &AdminOptions::new()).await; // what stays harms nobody: no name is used again
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
    /// Drains and ends well.
    fn ends(mut self) {
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

/// The operator's tool, which tests of the whole workspace have built beside the demo. Where only
/// those of the demo run, it is built once; what stands there then is not built anew.
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

/// It ended so, and said this.
#[track_caller]
fn ended(output: &Output, code: i32) -> Value {
    let (said, why) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(code), "{said}{why}");
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}{why}"))
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "not so: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
