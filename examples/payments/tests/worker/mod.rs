//! The program that is configured by a file alone, on real brokers and a real Redis. Its file is the
//! one that the book shows; variables say where the servers of this run are.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Generous, since other tests may keep the machine busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is sent: so many payments, of which about a tenth comes twice.
const PAYMENTS: usize = 80;

/// The program, and the lines that it writes.
struct Worker {
    process: Child,
    out: Receiver<String>,
    errors: Receiver<String>,
}

impl Worker {
    fn start(variables: &[(&str, &str)]) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("worker.toml");
        let mut command = Command::new(env!("CARGO_BIN_EXE_worker"));
        command
            .env("ONCEGATE_CONFIG", file)
            .env_remove("RUST_LOG")
            .envs(variables.iter().copied());
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it was built");
        let out = lines(process.stdout.take().expect("piped"));
        let errors = lines(process.stderr.take().expect("piped"));
        Self {
            process,
            out,
            errors,
        }
    }

    /// Where its admin port is.
    fn admin(&self) -> String {
        loop {
            let line = self
                .errors
                .recv_timeout(PATIENCE)
                .expect("it says where its admin port is");
            if let Some((_, address)) = line.split_once("admin port http://") {
                return address.trim_end_matches("/status").to_owned();
            }
        }
    }

    /// Ends it as an operator does. How often it has written of each id by then, with those of
    /// before.
    fn stop(mut self, mut counts: HashMap<String, usize>) -> HashMap<String, usize> {
        kill_process(Pid::from_child(&self.process), Signal::TERM).expect("it runs");
        let ended = self.process.wait().expect("it ended");
        assert_eq!(
            ended.code(),
            Some(0),
            "{:?}",
            self.errors.iter().collect::<Vec<_>>()
        );
        self.out.iter().for_each(|line| count(&mut counts, &line));
        counts
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }
}

fn lines(from: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        BufReader::new(from)
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    told
}

fn count(counts: &mut HashMap<String, usize>, line: &str) {
    let (id, _) = line
        .split_once(": ")
        .unwrap_or_else(|| panic!("no line of the handler's: {line}"));
    *counts.entry(id.to_owned()).or_default() += 1;
}

/// Everything is handled once, though some of it was sent twice.
async fn everything_is_handled_once(
    broker: &str,
    produce: impl Fn(&str) -> Command,
    sent_first: bool,
) {
    let name = format!("worker-{broker}-{}", std::process::id());
    let (kafka, rabbitmq) = (
        oncegate_testkit::kafka_brokers().expect("set"),
        oncegate_testkit::rabbitmq_url().expect("set"),
    );
    let redis = oncegate_testkit::redis_url().expect("set");
    let send = || {
        let sent = produce(&name).output().expect("it ran");
        assert!(
            sent.status.success(),
            "{}",
            String::from_utf8_lossy(&sent.stderr)
        );
    };
    if sent_first {
        send();
    }
    let start = || {
        Worker::start(&[
            ("ONCEGATE_STORE_URL", &redis),
            ("ONCEGATE_STORE_SCOPE", &name),
            ("ONCEGATE_STORE_TIMEOUT", "10s"),
            ("ONCEGATE_GATE_BROKER", broker),
            ("ONCEGATE_KAFKA_BROKERS", &kafka),
            ("ONCEGATE_KAFKA_TOPIC", &name),
            ("ONCEGATE_KAFKA_GROUP", &name),
            ("ONCEGATE_KAFKA_CREATE_PARTITIONS", "1"),
            ("ONCEGATE_KAFKA_CREATE_REPLICAS", "1"),
            ("ONCEGATE_RABBITMQ_URL", &rabbitmq),
            ("ONCEGATE_RABBITMQ_QUEUE", &name),
            ("ONCEGATE_ADMIN_LISTEN", "127.0.0.1:0"),
        ])
    };
    let worker = start();
    worker.admin();
    if !sent_first {
        send();
    }
    // It is told to stop in the midst of its work: what it has begun it finishes, and the next goes
    // on with the rest.
    let mut counts = HashMap::new();
    count(
        &mut counts,
        &worker
            .out
            .recv_timeout(PATIENCE)
            .expect("it handles something"),
    );
    let mut counts = worker.stop(counts);
    let worker = start();
    let admin = worker.admin();
    let begun = Instant::now();
    let ask = async |path: &str| {
        reqwest::get(format!("http://{admin}/{path}"))
            .await
            .expect("it answers")
    };
    loop {
        match worker.out.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => count(&mut counts, &line),
            Err(RecvTimeoutError::Timeout) => {
                let metrics = ask("metrics").await.text().await.expect("text");
                let said = |outcome: &str| {
                    metrics.lines().any(|it| {
                        it.starts_with(&format!(
                            "oncegate_deliveries_total{{outcome=\"{outcome}\"}}"
                        ))
                    })
                };
                if counts.len() == PAYMENTS && said("duplicate") {
                    break;
                }
                assert!(
                    begun.elapsed() < PATIENCE,
                    "{} of {PAYMENTS}: {metrics}",
                    counts.len()
                );
            }
            Err(RecvTimeoutError::Disconnected) => {
                panic!("it ended: {:?}", worker.errors.iter().collect::<Vec<_>>())
            }
        }
    }
    assert_eq!(ask("ready").await.status(), 200);
    let status = ask("status").await.text().await.expect("text");
    assert!(
        status.contains(&name) && status.contains(&format!("\"broker\":\"{broker}\"")),
        "{status}"
    );
    let counts = worker.stop(counts);
    assert!(
        counts.len() == PAYMENTS && counts.values().all(|count| *count == 1),
        "{counts:?}"
    );
    if broker == "rabbitmq" {
        crate::remove_queues(&rabbitmq, &name).await;
    }
}

fn produce(broker: &'static str, run_dir: &Path) -> impl Fn(&str) -> Command {
    move |name| {
        let mut command = Command::new(crate::PAYMENTS);
        command.args(["produce", "--broker", broker]);
        command.args(["--payments", &PAYMENTS.to_string()]);
        let kafka = oncegate_testkit::kafka_brokers().expect("set");
        let rabbitmq = oncegate_testkit::rabbitmq_url().expect("set");
        let servers = [kafka.as_str(), &rabbitmq, "memory:"];
        command.envs(crate::variables(name, broker, servers));
        command.arg("--run-dir").arg(run_dir);
        command
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_is_wired_from_a_file_handles_everything_once_on_kafka() {
    let run_dir = tempfile::tempdir().expect("a directory");
    // It creates the topic.
    everything_is_handled_once("kafka", produce("kafka", run_dir.path()), true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_is_wired_from_a_file_handles_everything_once_on_rabbitmq() {
    let run_dir = tempfile::tempdir().expect("a directory");
    // The program declares the queue.
    everything_is_handled_once("rabbitmq", produce("rabbitmq", run_dir.path()), false).await;
}

#[test]
fn a_program_that_lacks_something_ends_with_one_line_that_names_it() {
    for (variable, value, says) in [
        ("ONCEGATE_STORE_URL", "nothing", "store.url is not valid"),
        ("ONCEGATE_GATE_LEASE", "72h", "gate.lease: "),
        (
            "ONCEGATE_GATE_LAESE",
            "1s",
            "did you mean ONCEGATE_GATE_LEASE?",
        ),
        ("ONCEGATE_ADMIN_LISTEN", "nowhere", "admin.listen: "),
    ] {
        let variables = [
            ("ONCEGATE_ADMIN_LISTEN", "127.0.0.1:0"),
            ("ONCEGATE_STORE_URL", "memory:"),
            (variable, value),
        ];
        let mut worker = Worker::start(&variables);
        let ended = worker.process.wait().expect("it ended");
        let said: Vec<String> = worker.errors.iter().collect();
        assert_eq!(ended.code(), Some(1), "{said:?}");
        let told: Vec<&String> = said
            .iter()
            .filter(|line| line.starts_with("Error: "))
            .collect();
        assert!(
            told.len() == 1 && told[0].contains(says),
            "no {says:?} in {said:?}"
        );
    }
}
