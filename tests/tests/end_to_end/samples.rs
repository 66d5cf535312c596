//! The samples of the documentation that run until a signal: SIGTERM under load, then a second run.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use oncegate::defaults::DRAIN_TIMEOUT;
use rustix::process::{Pid, Signal, kill_process};

use crate::broker::{Broker, Sent};
use crate::world::World;

/// Messages that one run cannot handle before the signal.
const MESSAGES: usize = 3_000;

/// Whether the sample skips ids that an earlier run handled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Duplicates {
    Skipped,
    /// It only counts them.
    Handled,
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq() {
    let body = r#"{"article":"tea","level":3}"#;
    stopped(Broker::RabbitMq, "rabbitmq", body, Duplicates::Skipped).await;
}

const PAYMENT: &str = r#"{"card":"4000","cents":100}"#;

#[tokio::test(flavor = "multi_thread")]
async fn kafka() {
    stopped(Broker::Kafka, "kafka", PAYMENT, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn coming_from() {
    stopped(Broker::Kafka, "coming_from", PAYMENT, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn admin() {
    stopped(Broker::Kafka, "admin", PAYMENT, Duplicates::Skipped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trial() {
    stopped(Broker::Kafka, "trial", PAYMENT, Duplicates::Handled).await;
}

/// Stops the sample in the middle of its work: it ends with 0 within the drain timeout and a second.
/// The next run handles the rest, and nothing twice: each handler that had started was finished.
async fn stopped(broker: Broker, sample: &'static str, body: &str, duplicates: Duplicates) {
    let world = World::new(broker).await;
    let messages = (0..MESSAGES).map(|n| Sent::raw(Some(format!("id-{n:04}")), body));
    world.publish(messages).await;
    let name = world.name.clone();
    let run = async |lines| {
        let name = name.clone();
        let run = tokio::task::spawn_blocking(move || run_until(broker, sample, &name, lines));
        run.await.expect("no panic")
    };
    let first = run(MESSAGES / 10).await;
    assert!(first.len() < MESSAGES, "it handled all before the signal");
    let rest = MESSAGES - first.len();
    let second = run(rest).await;
    let mut handled = BTreeMap::new();
    for id in first.into_iter().chain(second) {
        *handled.entry(id).or_insert(0) += 1;
    }
    if duplicates == Duplicates::Skipped {
        assert_eq!(handled.len(), MESSAGES, "each message is handled");
        let twice: Vec<_> = handled.iter().filter(|(_, count)| **count > 1).collect();
        assert!(twice.is_empty(), "{twice:?}");
        assert_eq!(world.in_doubt().await, []);
    }
    assert_eq!(world.dead_letters().await, []);
    world.broker.remove(&world.name).await;
}

/// Runs the sample until it has handled this many messages, then sends SIGTERM. Returns the ids in its
/// output.
fn run_until(broker: Broker, sample: &str, name: &str, count: usize) -> Vec<String> {
    let redis = oncegate_testkit::redis_url().unwrap_or_else(|missing| panic!("{missing}"));
    let address = match broker {
        Broker::Kafka => "ONCEGATE_KAFKA",
        Broker::RabbitMq => "ONCEGATE_RABBITMQ",
    };
    let mut program = Command::new(env!("CARGO_BIN_EXE_sample"))
        .arg(sample)
        .envs([
            ("NAME", name),
            ("ONCEGATE_REDIS", &redis),
            (address, &broker.url()),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program of the samples");
    let output = BufReader::new(program.stdout.take().expect("it is piped"));
    let mut ids = output.lines().filter_map(|line| {
        let line = line.expect("text");
        let id = line.split(':').next().unwrap_or_default();
        id.starts_with("id-").then(|| id.to_owned())
    });
    let mut handled: Vec<String> = ids.by_ref().take(count).collect();
    let pid = i32::try_from(program.id()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process number"), Signal::TERM).expect("it runs");
    let since = Instant::now();
    handled.extend(ids);
    let status = program.wait().expect("it was started here");
    assert!(status.success(), "{sample}: {status}");
    assert!(since.elapsed() < DRAIN_TIMEOUT + Duration::from_secs(1));
    handled
}
