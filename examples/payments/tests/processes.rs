//! The demo's processes, when something outside of them goes wrong. Needs no servers.
#![cfg(feature = "rabbitmq")]
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
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
        command.args(["provider", "--listen", "127.0.0.1:0", "--run-dir"]).arg(run_dir);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line).expect("read");
        match line.trim().strip_prefix("http://") {
            Some(address) => Some(Self { process, address: address.to_owned() }),
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
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
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
    let charged = (0..100).filter(|n| first.charge(&format!("pay-{n}")) == 200).take(3).count();
    assert_eq!(charged, 3);
    let ledger = std::fs::read_to_string(run_dir.path().join("ledger.jsonl")).expect("a ledger");
    assert!(ledger.lines().count() >= 3, "{ledger}");
}

#[test]
fn what_a_full_disk_cuts_short_is_answered_with_an_error_and_not_in_the_ledger() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let mut limited = Command::new("sh");
    // One block of 512 bytes or of 1,024: a line that crosses its end is written in part, and then fails.
    limited.args(["-c", r#"trap '' XFSZ; ulimit -f 1; exec "$0" "$@""#, PAYMENTS]);
    let provider = Provider::start(limited, run_dir.path()).expect("it answers");
    let answers: Vec<u16> = (0..100).map(|n| provider.charge(&format!("pay-{n}"))).take_while(|status| *status != 503).collect();
    assert!(answers.contains(&200) && answers.len() < 100, "{answers:?}");

    let ledger = std::fs::read_to_string(run_dir.path().join("ledger.jsonl")).expect("a ledger");
    assert!(ledger.ends_with("}\n"), "{ledger}");
    assert!(ledger.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "{ledger}");
}

#[test]
fn a_demo_that_is_told_to_stop_takes_its_processes_along() {
    let temporary = tempfile::tempdir().expect("a directory");
    let nobody = ["--rabbitmq", "amqp://127.0.0.1:1/%2f", "--redis", "redis://127.0.0.1:1"];
    let mut demo = Command::new(PAYMENTS)
        .args(["--broker", "rabbitmq"])
        .args(nobody)
        .env("TMPDIR", temporary.path())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    eventually("a provider and workers run", || others(temporary.path(), demo.id()).len() > 1);
    kill_process(Pid::from_child(&demo), Signal::TERM).expect("it runs");
    assert_eq!(demo.wait().expect("it ended").code(), Some(2));
    eventually("all have ended", || others(temporary.path(), demo.id()).is_empty());
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
        arguments.windows(directory.len()).any(|window| window == directory)
    };
    numbers.filter(|number| *number != but).filter(is_given).collect()
}
