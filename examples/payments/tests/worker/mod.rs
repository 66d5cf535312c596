//! Tests the program `worker` with `worker.toml`, on real brokers and Redis. Environment variables
//! name the servers.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The time limit of each wait, long because other tests share the machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The number of payments; about a tenth are sent twice.
const PAYMENTS: usize = 10_000;

/// The program, and the lines that it writes to standard output and standard error.
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

    /// Waits until the worker logs the address of its admin port, and returns it.
    fn admin(&self) -> String {
        loop {
            let line = self
                .errors
                .recv_timeout(TEST_TIMEOUT)
                .expect("a line with the address of the admin port");
            if let Some((_, address)) = line.split_once("admin port http://") {
                return address.trim_end_matches("/status").to_owned();
            }
        }
    }

    /// Stops the worker with SIGTERM. Adds the ids that it still prints to the counts.
    fn stop(mut self, mut counts: HashMap<String, usize>) -> HashMap<String, usize> {
        kill_process(Pid::from_child(&self.process), Signal::TERM).expect("it runs");
        let status = self.process.wait().expect("it ended");
        assert_eq!(
            status.code(),
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
    let (lines_tx, lines) = channel();
    std::thread::spawn(move || {
        BufReader::new(from)
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| lines_tx.send(line))
    });
    lines
}

/// Counts the id in a line that the handler has printed.
fn count(counts: &mut HashMap<String, usize>, line: &str) {
    let (id, _) = line
        .split_once(": ")
        .unwrap_or_else(|| panic!("not a line of the handler: {line}"));
    *counts.entry(id.to_owned()).or_default() += 1;
}

/// Each message is handled once, although some are sent twice and the worker is restarted.
async fn each_message_is_handled_once(
    broker: &str,
    produce: impl Fn(&str) -> Command,
    send_before_start: bool,
) {
    let name = format!("worker-{broker}-{}", std::process::id());
    let (kafka, rabbitmq) = (
        oncegate_testkit::kafka_brokers().expect("set"),
        oncegate_testkit::rabbitmq_url().expect("set"),
    );
    let redis = oncegate_testkit::redis_url().expect("set");
    let send = || {
        let mut producer = produce(&name);
        producer.stdout(Stdio::null()).stderr(Stdio::piped());
        producer.spawn().expect("it was built")
    };
    let sent = |producer: Child| {
        let sent = producer.wait_with_output().expect("it ran");
        assert!(
            sent.status.success(),
            "{}",
            String::from_utf8_lossy(&sent.stderr)
        );
    };
    let mut producer = None;
    if send_before_start {
        sent(send());
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
    if !send_before_start {
        producer = Some(send());
    }
    // The worker is stopped after its first message: it drains, and the next one handles the rest.
    let mut counts = HashMap::new();
    count(
        &mut counts,
        &worker
            .out
            .recv_timeout(TEST_TIMEOUT)
            .expect("it handles something"),
    );
    let mut counts = worker.stop(counts);
    producer.into_iter().for_each(sent);
    assert!(counts.len() < PAYMENTS, "none was left when SIGTERM came");
    let worker = start();
    let admin = worker.admin();
    let started = Instant::now();
    let query = async |path: &str| {
        reqwest::get(format!("http://{admin}/{path}"))
            .await
            .expect("it answers")
    };
    loop {
        match worker.out.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => count(&mut counts, &line),
            Err(RecvTimeoutError::Timeout) => {
                let metrics = query("metrics").await.text().await.expect("text");
                let has_outcome = |outcome: &str| {
                    metrics.lines().any(|it| {
                        it.starts_with(&format!(
                            "oncegate_deliveries_total{{outcome=\"{outcome}\"}}"
                        ))
                    })
                };
                if counts.len() == PAYMENTS && has_outcome("duplicate") {
                    break;
                }
                assert!(
                    started.elapsed() < TEST_TIMEOUT,
                    "{} of {PAYMENTS}: {metrics}",
                    counts.len()
                );
            }
            Err(RecvTimeoutError::Disconnected) => {
                panic!("it ended: {:?}", worker.errors.iter().collect::<Vec<_>>())
            }
        }
    }
    assert_eq!(query("ready").await.status(), 200);
    let status = query("status").await.text().await.expect("text");
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
async fn a_configured_worker_handles_each_message_once_on_kafka() {
    let run_dir = tempfile::tempdir().expect("a directory");
    // The producer creates the topic.
    each_message_is_handled_once("kafka", produce("kafka", run_dir.path()), true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_worker_handles_each_message_once_on_rabbitmq() {
    let run_dir = tempfile::tempdir().expect("a directory");
    // The worker declares the queue, so it starts before the producer.
    each_message_is_handled_once("rabbitmq", produce("rabbitmq", run_dir.path()), false).await;
}

#[test]
fn a_misconfigured_worker_fails_with_one_line_that_names_the_setting() {
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
        let status = worker.process.wait().expect("it ended");
        let output: Vec<String> = worker.errors.iter().collect();
        assert_eq!(status.code(), Some(1), "{output:?}");
        let lines: Vec<&String> = output
            .iter()
            .filter(|line| line.starts_with("Error: "))
            .collect();
        assert!(
            lines.len() == 1 && lines[0].contains(says),
            "no {says:?} in {output:?}"
        );
    }
}
