//! The demo's processes, when something outside of them goes wrong. `ONCEGATE_RABBITMQ` says where
//! a RabbitMQ is.
#![cfg(feature = "rabbitmq")]
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

const PAYMENTS: &str = env!("CARGO_BIN_EXE_payments");

/// A provider that is killed when the test ends.
struct Provider {
    process: Child,
    address: String,
}

impl Provider {
    /// Starts one; `None` if it ends instead of answering.
    fn start(mut command: Command, run_dir: &Path) -> Option<Self> {
        command
            .args(["provider", "--listen", "127.0.0.1:0", "--run-dir"])
            .arg(run_dir);
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("read");
        match line.trim().strip_prefix("http://") {
            Some(address) => Some(Self {
                process,
                address: address.to_owned(),
            }),
            None => {
                assert!(!process.wait().expect("it ended").success());
                None
            }
        }
    }

    /// Charges a cent, and returns the status of the answer.
    fn charge(&self, id: &str) -> u16 {
        let body = format!(r#"{{"card":"card","amount":1,"id":"{id}","attempt":1}}"#);
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let head = "POST /charges HTTP/1.1\r\nhost: provider\r\nconnection: close\r\ncontent-type: application/json";
        write!(
            stream,
            "{head}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .expect("a status")
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }
}

#[test]
fn a_second_provider_on_a_ledger_ends_and_leaves_it_whole() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let first = Provider::start(Command::new(PAYMENTS), run_dir.path()).expect("it answers");
    assert!(Provider::start(Command::new(PAYMENTS), run_dir.path()).is_none());
    let charged = (0..100)
        .filter(|n| first.charge(&format!("pay-{n}")) == 200)
        .take(3)
        .count();
    assert_eq!(charged, 3);
    let ledger = std::fs::read_to_string(run_dir.path().join("ledger.jsonl")).expect("a ledger");
    assert!(ledger.lines().count() >= 3, "{ledger}");
}

#[test]
fn what_a_full_disk_cuts_short_is_answered_with_an_error_and_not_in_the_ledger() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let mut limited = Command::new("sh");
    // One block of 512 bytes or of 1,024: a line that crosses its end is written in part, and then
    // fails.
    limited.args([
        "-c",
        r#"trap '' XFSZ; ulimit -f 1; exec "$0" "$@""#,
        PAYMENTS,
    ]);
    let provider = Provider::start(limited, run_dir.path()).expect("it answers");
    let answers: Vec<u16> = (0..100)
        .map(|n| provider.charge(&format!("pay-{n}")))
        .take_while(|status| *status != 503)
        .collect();
    assert!(answers.contains(&200) && answers.len() < 100, "{answers:?}");

    let ledger = std::fs::read_to_string(run_dir.path().join("ledger.jsonl")).expect("a ledger");
    assert!(ledger.ends_with("}\n"), "{ledger}");
    assert!(
        ledger
            .lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{ledger}"
    );
}

#[test]
fn a_demo_that_is_told_to_stop_takes_its_processes_along() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let url = oncegate_testkit::rabbitmq_url().expect("ONCEGATE_RABBITMQ is set");
    let mut demo = Command::new(PAYMENTS)
        .args([
            "--broker",
            "rabbitmq",
            "--store",
            "sqlite",
            "--payments",
            "100000",
            "--rabbitmq",
            &url,
            "--run-dir",
        ])
        .arg(directory.path())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    eventually("a provider and workers run", || {
        others(directory.path(), demo.id()).len() > 1
    });
    kill_process(Pid::from_child(&demo), Signal::TERM).expect("it runs");
    assert_eq!(demo.wait().expect("it ended").code(), Some(2));
    eventually("all have ended", || {
        others(directory.path(), demo.id()).is_empty()
    });
    let run = std::fs::read_dir(directory.path())
        .expect("it is there")
        .next()
        .expect("a run")
        .expect("it is there");
    remove_queues(&url, run.file_name().to_str().expect("text"));
}

/// What a demo that was stopped leaves for whoever looks into it.
fn remove_queues(url: &str, name: &str) {
    use lapin::options::QueueDeleteOptions;
    let beside = [
        ".dead-letters",
        ".in-doubt",
        ".delay.1000",
        ".delay.5000",
        ".delay.30000",
        ".delay.120000",
        ".delay.600000",
    ];
    let removing = async {
        let connection = lapin::Connection::connect(url, lapin::ConnectionProperties::default())
            .await
            .expect("connected");
        let channel = connection.create_channel().await.expect("a channel");
        for suffix in [""].into_iter().chain(beside) {
            channel
                .queue_delete(
                    format!("{name}{suffix}").into(),
                    QueueDeleteOptions::default(),
                )
                .await
                .expect("deleted");
        }
    };
    tokio::runtime::Runtime::new()
        .expect("a runtime")
        .block_on(removing);
}

/// What a demo says that ends at once, and how long it took.
fn ends(arguments: &[&str]) -> (String, Duration) {
    let temporary = tempfile::tempdir().expect("a directory");
    let begun = Instant::now();
    let ended = Command::new(PAYMENTS)
        .args(arguments)
        .env("TMPDIR", temporary.path())
        .output()
        .expect("it ran");
    assert_eq!(ended.status.code(), Some(2));
    assert_eq!(
        std::fs::read_dir(temporary.path())
            .expect("it is there")
            .count(),
        0,
        "nothing was started"
    );
    (
        String::from_utf8_lossy(&ended.stderr).into_owned(),
        begun.elapsed(),
    )
}

/// The one line that begins so.
fn line<'a>(said: &'a str, begins: &str) -> &'a str {
    let lines: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with(begins))
        .collect();
    assert_eq!(lines.len(), 1, "{begins}: {said}");
    lines[0]
}

#[test]
fn a_demo_whose_servers_are_not_there_names_each_with_what_to_do() {
    let nobody = [
        "--redis",
        "redis://127.0.0.1:1",
        "--rabbitmq",
        "amqp://someone:canary@127.0.0.1:1/%2f",
        "--kafka",
        "127.0.0.1:1",
    ];
    let mut brokers = vec![(
        "rabbitmq",
        "payments: --rabbitmq (or ONCEGATE_RABBITMQ): RabbitMQ at 127.0.0.1:1 cannot be reached",
    )];
    if cfg!(feature = "kafka") {
        brokers.push((
            "kafka",
            "payments: --kafka (or ONCEGATE_KAFKA): Kafka at 127.0.0.1:1 cannot be reached",
        ));
    }
    for (broker, begins) in brokers {
        let (said, took) = ends(&[["--broker", broker].as_slice(), &nobody].concat());
        let redis = line(&said, "payments: --redis (or ONCEGATE_REDIS): ");
        assert!(
            redis.contains("no connection to Redis at 127.0.0.1:1")
                && redis.contains("is it running"),
            "{redis}"
        );
        let broker = line(&said, begins);
        assert!(
            broker.contains("refused")
                && broker.contains("is it running, ")
                && !broker.contains("canary"),
            "{broker}"
        );
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

#[test]
fn a_demo_whose_servers_say_nothing_waits_for_all_at_once_and_not_for_ever() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port"); // accepts in the kernel, and never answers
    let address = silent.local_addr().expect("an address").to_string();
    let (redis, rabbitmq) = (
        format!("redis://{address}"),
        format!("amqp://{address}/%2f"),
    );
    let (said, took) = ends(&[
        "--broker",
        "rabbitmq",
        "--redis",
        &redis,
        "--rabbitmq",
        &rabbitmq,
    ]);
    assert!(
        line(&said, "payments: --redis (or ONCEGATE_REDIS): ").contains("no reply"),
        "{said}"
    );
    assert!(
        line(&said, "payments: --rabbitmq (or ONCEGATE_RABBITMQ): ")
            .contains("no answer within 10s"),
        "{said}"
    );
    assert!(took < Duration::from_secs(14), "{took:?}");
}

#[test]
fn a_wrong_password_is_told_at_once_and_never_repeated() {
    let right = oncegate_testkit::rabbitmq_url().expect("ONCEGATE_RABBITMQ is set");
    let broker = right.split_once('@').expect("user@host").1;
    let wrong = format!("amqp://guest:canary@{broker}");
    let (said, took) = ends(&[
        "--broker",
        "rabbitmq",
        "--store",
        "sqlite",
        "--rabbitmq",
        &wrong,
    ]);
    let told = line(
        &said,
        "payments: --rabbitmq (or ONCEGATE_RABBITMQ): RabbitMQ at ",
    );
    assert!(
        told.contains("refuses the user or the password; correct them") && !said.contains("canary"),
        "{said}"
    );
    assert!(took < Duration::from_secs(10), "{took:?}");
    let (said, _) = ends(&[
        "--broker",
        "rabbitmq",
        "--store",
        "sqlite",
        "--rabbitmq",
        "http://guest:canary@localhost",
    ]);
    assert!(
        line(&said, "payments: --rabbitmq").contains("not an AMQP URL; write amqp://")
            && !said.contains("canary"),
        "{said}"
    );
}

#[test]
fn a_redis_that_forgets_is_refused_before_anything_starts() {
    use oncegate_testkit::servers::{RedisOptions, RedisServer};
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let rabbitmq = oncegate_testkit::rabbitmq_url().expect("ONCEGATE_RABBITMQ is set");
    let (said, _) = ends(&[
        "--broker",
        "rabbitmq",
        "--redis",
        &server.url(),
        "--rabbitmq",
        &rabbitmq,
    ]);
    let told = line(
        &said,
        "payments: --redis (or ONCEGATE_REDIS): at most once needs a store that does not forget",
    );
    assert!(told.contains("set appendonly yes"), "{told}");
}

#[test]
fn a_worker_that_ends_is_quoted() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let url = oncegate_testkit::rabbitmq_url().expect("ONCEGATE_RABBITMQ is set");
    // In memory no file keeps what at most once needs, so the workers refuse to begin.
    let ended = Command::new(PAYMENTS)
        .args([
            "--broker",
            "rabbitmq",
            "--store",
            "sqlite",
            "--rabbitmq",
            &url,
            "--run-dir",
            "/dev/shm",
        ])
        .env("TMPDIR", directory.path())
        .output()
        .expect("it ran");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{said}");
    let told = line(&said, "payments: worker-");
    assert!(
        told.contains(" ended with exit status: 2: ") && told.contains("; see /dev/shm/payments-"),
        "{told}"
    );
    let run = told
        .rsplit_once("; what was written lies in ")
        .expect("where it lies")
        .1;
    std::fs::remove_dir_all(run).expect("it is there");
}

fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not so: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that this directory was given to, but for this one.
fn others(directory: &Path, but: u32) -> Vec<u32> {
    let directory = directory.to_str().expect("text").as_bytes();
    let entries = std::fs::read_dir("/proc").expect("Linux").flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_given = |number: &u32| {
        let arguments = std::fs::read(format!("/proc/{number}/cmdline")).unwrap_or_default();
        arguments
            .windows(directory.len())
            .any(|window| window == directory)
    };
    numbers
        .filter(|number| *number != but)
        .filter(is_given)
        .collect()
}
