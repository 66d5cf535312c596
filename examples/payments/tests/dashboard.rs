//! Evaluates the dashboard's queries and the alert rules in a Prometheus that scrapes the demo's
//! workers.
#![cfg(all(feature = "kafka", feature = "rabbitmq"))]
#![forbid(unsafe_code)]

mod killed;
mod traces;
mod worker;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

const PAYMENTS: &str = env!("CARGO_BIN_EXE_payments");

/// Metrics that do not exist before their first event, which does not occur in the demo. The
/// dashboard's queries return 0 for them (`or vector(0)`).
const ZERO_IN_DEMO: &[&str] = &[
    "oncegate_redis_paused",
    "oncegate_redis_anomalies_total",
    "oncegate_sqlite_clock_jumps_total",
];

/// A process that is killed when the test ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended
        let _ = self.0.wait();
    }
}

fn monitoring(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../monitoring")
        .join(file)
}

/// Starts a process and waits until it prints `until`. Returns the word after it.
fn start(command: &mut Command, until: &str) -> (Process, String) {
    let mut process = Process(
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}")),
    );
    let (out, errors) = (
        process.0.stdout.take().expect("piped"),
        process.0.stderr.take().expect("piped"),
    );
    let (lines_tx, lines) = std::sync::mpsc::channel();
    // Reads both to the end, so that the process never blocks on a full pipe.
    for mut reader in [
        Box::new(BufReader::new(out)) as Box<dyn BufRead + Send>,
        Box::new(BufReader::new(errors)),
    ] {
        let lines_tx = lines_tx.clone();
        std::thread::spawn(move || {
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|read| read > 0) {
                let _ = lines_tx.send(std::mem::take(&mut line)); // fails once the receiver is dropped
            }
        });
    }
    drop(lines_tx);
    let mut output = String::new();
    for line in lines {
        if let Some((_, after)) = line.split_once(until) {
            return (
                process,
                after
                    .split_whitespace()
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
            );
        }
        output += &line;
    }
    panic!("{command:?} ended with the output: {output}");
}

/// A process of the demo, configured by variables.
fn demo(
    arguments: &[&str],
    variables: &[(&str, &str)],
    run_dir: &Path,
    until: &str,
) -> (Process, String) {
    let mut command = Command::new(PAYMENTS);
    command.args(arguments).arg("--run-dir").arg(run_dir);
    start(command.envs(variables.iter().copied()), until)
}

/// The configuration of a worker or a producer.
///
/// The Redis of tests is volatile, which at most once refuses, so the guarantee is effectively
/// once.
fn variables<'a>(
    name: &'a str,
    broker: &'a str,
    [kafka, rabbitmq, redis]: [&'a str; 3],
) -> Vec<(&'a str, &'a str)> {
    vec![
        ("ONCEGATE_STORE_URL", redis),
        ("ONCEGATE_STORE_SCOPE", name),
        ("ONCEGATE_GATE_ID", "header payment-id"),
        ("ONCEGATE_GATE_GUARANTEE", "effectively-once"),
        ("ONCEGATE_GATE_BROKER", broker),
        ("ONCEGATE_GATE_MAX_ATTEMPTS", "20"),
        ("ONCEGATE_KAFKA_BROKERS", kafka),
        ("ONCEGATE_KAFKA_TOPIC", name),
        ("ONCEGATE_KAFKA_GROUP", name),
        ("ONCEGATE_KAFKA_CREATE_PARTITIONS", "1"),
        ("ONCEGATE_KAFKA_CREATE_REPLICAS", "1"),
        ("ONCEGATE_RABBITMQ_URL", rabbitmq),
        ("ONCEGATE_RABBITMQ_QUEUE", name),
    ]
}

/// A Prometheus with the alert rules that scrapes the workers every half a second.
struct Prometheus {
    _process: Process,
    address: String,
}

impl Prometheus {
    fn start(directory: &Path, targets: &[&str]) -> Self {
        let rules = monitoring("alerts.yml").canonicalize().expect("the rules");
        let config = serde_json::json!({
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [rules],
            "scrape_configs": [{"job_name": "oncegate", "static_configs": [{"targets": targets}]}],
        });
        let file = directory.join("prometheus.yml"); // JSON is YAML
        std::fs::write(&file, config.to_string()).expect("written");
        // `cargo xtask setup` installs Debian's package `prometheus`. The system chooses a free
        // port.
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                directory.join("tsdb").display()
            ))
            .arg("--web.listen-address=127.0.0.1:0");
        let (process, address) = start(&mut command, "msg=\"Listening on\" address=");
        Self {
            _process: process,
            address,
        }
    }

    /// The data of a reply; `None` if there is no reply.
    async fn query(&self, path: &str) -> Option<Value> {
        let answer = reqwest::get(format!("http://{}/api/v1/{path}", self.address))
            .await
            .ok()?;
        let answer: Value = serde_json::from_str(&answer.text().await.ok()?).ok()?;
        assert_eq!(answer["status"], "success", "{path}: {answer}");
        Some(answer["data"].clone())
    }

    /// How many series a query returns.
    async fn series(&self, query: &str) -> usize {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let data = self.query(&format!("query?query={encoded}")).await;
        data.and_then(|it| it["result"].as_array().map(Vec::len))
            .unwrap_or_default()
    }
}

/// The queries of the panels, with the variables replaced as by Grafana.
fn queries() -> Vec<String> {
    let text = std::fs::read_to_string(monitoring("dashboard.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").clone();
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    let queries = targets.map(|target| target["expr"].as_str().expect("a query").to_owned());
    let variables = [
        ("$instance", ".*"),
        ("$__rate_interval", "10s"),
        ("$__range", "1m"),
    ];
    let queries: Vec<String> = queries
        .map(|query| {
            variables
                .iter()
                .fold(query, |it, (name, value)| it.replace(name, value))
        })
        .collect();
    assert!(
        queries.len() > 30 && queries.iter().all(|it| !it.contains('$')),
        "{queries:?}"
    );
    queries
}

/// The names of the metrics in a query.
fn names(query: &str) -> Vec<&str> {
    let words = query.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
    words.filter(|word| word.starts_with("oncegate_")).collect()
}

/// Repeats a check until it succeeds. Panics with the last error after two minutes.
async fn until(what: &str, mut query: impl AsyncFnMut() -> Result<(), String>) {
    let mut last_error = String::new();
    let asking = async {
        while let Err(error) = query().await {
            last_error = error;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(120), asking)
        .await
        .is_ok();
    assert!(in_time, "timed out: {what}: {last_error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_dashboard_query_returns_data_and_every_rule_is_evaluated() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (run_dir, name) = (
        directory.path(),
        format!("dashboard-{}", std::process::id()),
    );
    let (kafka, rabbitmq) = (
        oncegate_testkit::kafka_brokers().expect("set"),
        oncegate_testkit::rabbitmq_url().expect("set"),
    );
    let redis = oncegate_testkit::redis_url().expect("set");
    let servers = [kafka.as_str(), &rabbitmq, &redis];
    let worker = |broker: &'static str| {
        let mut variables = variables(&name, broker, servers);
        variables.push(("ONCEGATE_ADMIN_LISTEN", "127.0.0.1:0"));
        let arguments = ["work", "--guarantee", "effectively-once"];
        let (process, output) = demo(&arguments, &variables, run_dir, "admin port http://");
        (process, output.trim_end_matches("/status").to_owned())
    };
    let (workers, admins): (Vec<Process>, Vec<String>) =
        ["kafka", "rabbitmq"].map(worker).into_iter().unzip();
    let prometheus = Prometheus::start(
        directory.path(),
        &admins.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    let _producers = ["kafka", "rabbitmq"].map(|broker| {
        let arguments = [
            "produce",
            "--broker",
            broker,
            "--prefix",
            broker,
            "--payments",
            "100000",
            "--rate",
            "200",
        ];
        demo(
            &arguments,
            &variables(&name, broker, servers),
            run_dir,
            "sending ",
        )
    });

    let mut without_data = queries();
    for query in without_data.iter().filter(|it| it.contains("or vector(0)")) {
        assert!(
            names(query).iter().all(|it| ZERO_IN_DEMO.contains(it)),
            "`or vector(0)` would hide missing data: {query}"
        );
    }
    until("every query returns data", async || {
        let mut remaining = Vec::new();
        for query in std::mem::take(&mut without_data) {
            if prometheus.series(&query).await == 0 {
                remaining.push(query);
            }
        }
        without_data = remaining;
        if without_data.is_empty() {
            Ok(())
        } else {
            Err(format!("none for {without_data:#?}"))
        }
    })
    .await;
    // Rules are evaluated every half a second.
    until(
        "each rule is evaluated, and dead letters alert",
        async || {
            let groups = prometheus.query("rules").await.ok_or("no answer")?["groups"].clone();
            let rules: Vec<&Value> = groups
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|it| it["rules"].as_array())
                .flatten()
                .collect();
            let fires = |name: &str| {
                rules
                    .iter()
                    .any(|it| it["name"] == name && it["state"] == "firing")
            };
            let are_evaluated = rules.len() > 15 && rules.iter().all(|it| it["health"] == "ok");
            if are_evaluated && fires("OncegateDeadLetters") && !fires("OncegateWorkerDown") {
                Ok(())
            } else {
                Err(format!("{groups:#}"))
            }
        },
    )
    .await;
    for (admin, broker) in admins.iter().zip(["kafka", "rabbitmq"]) {
        until(
            "the status page shows a ready consumer with progress",
            async || {
                let page = reqwest::get(format!("http://{admin}/status"))
                    .await
                    .expect("it answers")
                    .text()
                    .await
                    .expect("text");
                assert!(
                    !page.contains("amqp://") && !page.contains("redis://"),
                    "{page}"
                );
                let read: Value = serde_json::from_str(&page).expect("JSON");
                let sources = read["sources"].as_array().expect("a list");
                let source = sources
                    .iter()
                    .find(|it| it["broker"] == broker)
                    .expect("its source");
                let progress = if broker == "kafka" {
                    &source["partitions"][0]["committable"]
                } else {
                    &source["delivered"]
                };
                if read["ready"] == true && progress.as_i64().is_some_and(|it| it > 0) {
                    Ok(())
                } else {
                    Err(page)
                }
            },
        )
        .await;
    }
    drop(workers);
    remove_queues(&rabbitmq, &name).await;
}

async fn remove_queues(url: &str, name: &str) {
    use lapin::options::QueueDeleteOptions;
    let suffixes = [
        ".dead-letters",
        ".in-doubt",
        ".delay.1000",
        ".delay.5000",
        ".delay.30000",
        ".delay.120000",
        ".delay.600000",
    ];
    let connection = lapin::Connection::connect(url, lapin::ConnectionProperties::default())
        .await
        .expect("connected");
    let channel = connection.create_channel().await.expect("a channel");
    for suffix in [""].into_iter().chain(suffixes) {
        channel
            .queue_delete(
                format!("{name}{suffix}").into(),
                QueueDeleteOptions::default(),
            )
            .await
            .expect("deleted");
    }
}
