//! Redriven messages run exactly once, with an attempt above every earlier one, also if they were
//! read often and others arrive meanwhile.

use std::collections::HashMap;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use lapin::options::BasicGetOptions;
use lapin::{Channel, Connection};
use oncegate::{Context, Failure, FailureExt, Guarantee, Handler, Reconciled};
use serde_json::Value;

use crate::destinations::on_both_brokers;
use crate::fixture::{Broker, BrokerFixture, COUNTS_ACCEPTED, TEST_TIMEOUT};

on_both_brokers!(
    dead_letters_of_unknown_outcomes_are_redriven_effectively_once,
    dead_letters_of_unknown_outcomes_are_redriven_at_most_once,
    messages_that_did_not_happen_are_handled_effectively_once,
    messages_that_did_not_happen_are_handled_at_most_once,
);

const MESSAGES: usize = 300;

/// Copies of each message in doubt.
const COPIES: usize = 11;

/// A provider that does not reply until it recovers; then it books each charge.
#[derive(Clone, Default)]
struct RecoveringProvider(Arc<BookedCharges>);

#[derive(Default)]
struct BookedCharges {
    recovered: AtomicBool,
    /// Whether `reconcile` can find out the outcome.
    reports_outcome: AtomicBool,
    charges: Mutex<HashMap<String, Account>>,
}

/// The attempts of one id at the provider.
#[derive(Clone, Debug, Default)]
struct Account {
    /// The booked attempts.
    booked: Vec<u32>,
    /// The highest attempt without a reply.
    unanswered: u32,
    /// Attempts up to this one are rejected.
    voided: u32,
}

impl RecoveringProvider {
    fn charges(&self) -> MutexGuard<'_, HashMap<String, Account>> {
        self.0.charges.lock().expect("the lock is not poisoned")
    }

    fn booked(&self) -> usize {
        self.charges()
            .values()
            .map(|account| account.booked.len())
            .sum()
    }
}

impl Handler for RecoveringProvider {
    type Payload = Value;

    async fn handle(&self, _: Value, cx: &Context) -> Result<(), Failure> {
        let mut charges = self.charges();
        let account = charges.entry(cx.id().to_owned()).or_default();
        if !self.0.recovered.load(Ordering::Relaxed) {
            account.unanswered = account.unanswered.max(cx.attempt());
            return Err("no answer").in_doubt();
        }
        if cx.attempt() <= account.voided {
            return Err(format!("attempt {} was voided", cx.attempt())).reject();
        }
        account.booked.push(cx.attempt());
        Ok(())
    }

    async fn reconcile(&self, _: Value, cx: &Context) -> Result<Reconciled, Failure> {
        if !self.0.reports_outcome.load(Ordering::Relaxed) {
            return Ok(Reconciled::Unknown);
        }
        let mut charges = self.charges();
        let account = charges.entry(cx.id().to_owned()).or_default();
        if !account.booked.is_empty() {
            return Ok(Reconciled::Happened);
        }
        account.voided = account.voided.max(cx.attempt());
        Ok(Reconciled::DidNotHappen)
    }
}

fn id(number: usize) -> String {
    format!("pay-{number:04}")
}

async fn fixture(broker: Broker, guarantee: Guarantee) -> Arc<BrokerFixture> {
    let fixture = Arc::new(BrokerFixture::on(broker).await);
    if guarantee == Guarantee::EffectivelyOnce {
        fixture.cli.configure(
            &fixture
                .settings()
                .replace("at-most-once", "effectively-once"),
        );
    }
    fixture
}

async fn until(what: &str, is: impl AsyncFn() -> bool) {
    let started = Instant::now();
    while !is().await {
        assert!(started.elapsed() < TEST_TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Each id was booked once, by an attempt above every voided or unanswered one.
fn assert_each_booked_once(provider: &RecoveringProvider) {
    let charges = provider.charges();
    assert_eq!(charges.len(), MESSAGES);
    for (id, account) in charges.iter() {
        let above = account.unanswered.max(account.voided);
        assert!(
            matches!(account.booked[..], [attempt] if attempt > above),
            "{id}: {account:?}"
        );
    }
}

/// Messages fail with unknown effect until their attempts are exhausted; the provider
/// recovers; they are redriven.
async fn redriven(broker: Broker, guarantee: Guarantee) {
    let (fixture, provider) = (
        fixture(broker, guarantee).await,
        RecoveringProvider::default(),
    );
    provider.0.reports_outcome.store(true, Ordering::Relaxed);
    fixture.publish_many((0..MESSAGES).map(id)).await;
    fixture
        .handle(
            guarantee,
            provider.clone(),
            fixture.until_there_are(MESSAGES as u64, ".dead-letters"),
        )
        .await;
    let listed = fixture
        .json(&[
            "dead-letters",
            "list",
            "--limit",
            "1",
            "--reason",
            "attempts-spent",
        ])
        .await;
    assert_eq!(
        listed["messages"].as_array().map(Vec::len),
        Some(1),
        "{listed}"
    );
    assert_eq!(provider.booked(), 0);

    provider.0.recovered.store(true, Ordering::Relaxed);
    let redriven = fixture
        .json(&["dead-letters", "redrive", "--all", "--yes"])
        .await;
    assert_eq!(
        (&redriven["done"], &redriven["left"]),
        (&Value::from(MESSAGES), &0.into())
    );
    let all_booked = async || {
        provider.booked() >= MESSAGES && (broker == Broker::Kafka || fixture.count("").await == 0)
    };
    fixture
        .handle(
            guarantee,
            provider.clone(),
            until("all are booked", all_booked),
        )
        .await;
    assert_each_booked_once(&provider);
    let stays = if broker == Broker::Kafka {
        MESSAGES as u64
    } else {
        0
    };
    assert_eq!(
        (
            fixture.count(".dead-letters").await,
            fixture.count(".in-doubt").await
        ),
        (stays, 0),
        "no redriven message failed again"
    );
    fixture.end().await;
}

async fn dead_letters_of_unknown_outcomes_are_redriven_effectively_once(broker: Broker) {
    redriven(broker, Guarantee::EffectivelyOnce).await;
}

async fn dead_letters_of_unknown_outcomes_are_redriven_at_most_once(broker: Broker) {
    redriven(broker, Guarantee::AtMostOnce).await;
}

/// Messages with ten duplicates each end in doubt; an operator records that none
/// happened; the provider recovers. Consumers with either guarantee may handle what was in doubt.
async fn resolved(broker: Broker, guarantee: Guarantee) {
    let (fixture, provider) = (
        fixture(broker, guarantee).await,
        RecoveringProvider::default(),
    );
    fixture
        .publish_many((0..MESSAGES * COPIES).map(|number| id(number % MESSAGES)))
        .await;
    let all = (MESSAGES * COPIES) as u64;
    fixture
        .handle(
            Guarantee::AtMostOnce,
            provider.clone(),
            fixture.until_there_are(all, ".in-doubt"),
        )
        .await;
    assert_eq!(provider.booked(), 0);

    provider.0.recovered.store(true, Ordering::Relaxed);
    let ids: Vec<String> = (0..MESSAGES).map(id).collect();
    let resolve = ["in-doubt", "resolve"]
        .into_iter()
        .chain(ids.iter().map(String::as_str))
        .chain(["--did-not-happen", "--yes"]);
    let resolved = fixture.json(&resolve.collect::<Vec<_>>()).await;
    assert_eq!(
        (&resolved["done"], &resolved["left"]),
        (&Value::from(all), &0.into())
    );
    let all_booked = async || {
        provider.booked() >= MESSAGES && (broker == Broker::Kafka || fixture.count("").await == 0)
    };
    fixture
        .handle(
            guarantee,
            provider.clone(),
            until("all are booked", all_booked),
        )
        .await;
    assert_each_booked_once(&provider);
    let stays = if broker == Broker::Kafka { all } else { 0 };
    assert_eq!(
        (
            fixture.count(".in-doubt").await,
            fixture.count(".dead-letters").await
        ),
        (stays, 0),
        "no redriven message failed again"
    );
    fixture.end().await;
}

async fn messages_that_did_not_happen_are_handled_effectively_once(broker: Broker) {
    resolved(broker, Guarantee::EffectivelyOnce).await;
}

async fn messages_that_did_not_happen_are_handled_at_most_once(broker: Broker) {
    resolved(broker, Guarantee::AtMostOnce).await;
}

/// Rejects every message, and counts the runs of each id.
#[derive(Clone, Default)]
struct RejectingHandler(Arc<Mutex<HashMap<String, usize>>>);

impl RejectingHandler {
    fn runs(&self) -> HashMap<String, usize> {
        self.0.lock().expect("the lock is not poisoned").clone()
    }
}

impl Handler for RejectingHandler {
    type Payload = Value;

    async fn handle(&self, _: Value, cx: &Context) -> Result<(), Failure> {
        let mut runs = self.0.lock().expect("the lock is not poisoned");
        *runs.entry(cx.id().to_owned()).or_default() += 1;
        Err("declined").reject()
    }
}

/// Reads messages of a queue, and holds them until the connection closes.
async fn hold(queue: &str, count: u64) -> (Connection, Channel) {
    let (connection, channel) = crate::fixture::open().await;
    for _ in 0..count {
        let read = channel.basic_get(queue.into(), BasicGetOptions::default());
        assert!(read.await.expect("the queue").is_some());
    }
    (connection, channel)
}

/// Closes the connection: every quorum queue counts the messages that it returns.
async fn return_messages((connection, _channel): (Connection, Channel)) {
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
}

/// Redrives everything, and returns the reports. Kills a command that does not end.
async fn run_redrives_in_parallel(fixture: &Arc<BrokerFixture>, commands: usize) -> Vec<Value> {
    let start = |number: usize| {
        let out = fixture.cli.path(&format!("redrive-{number}.json"));
        Command::new(env!("CARGO_BIN_EXE_oncegate"))
            .current_dir(fixture.cli.path(""))
            .args([
                "dead-letters",
                "redrive",
                "--reason",
                "refused",
                "--yes",
                "--json",
            ])
            .stdout(std::fs::File::create(out).expect("the directory is writable"))
            .stderr(Stdio::null())
            .spawn()
            .expect("the program was built")
    };
    let mut children: Vec<_> = (0..commands).map(start).collect();
    let started = Instant::now();
    while children
        .iter_mut()
        .any(|child| child.try_wait().expect("a child").is_none())
    {
        if started.elapsed() > TEST_TIMEOUT {
            for child in &mut children {
                let _ = child.kill();
                let _ = child.wait();
            }
            panic!("a redrive did not end");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let report = |number| {
        let out = fixture.cli.path(&format!("redrive-{number}.json"));
        let text = std::fs::read_to_string(out).expect("a report");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    (0..commands).map(report).collect()
}

/// Redrives dead letters that were read so often that they are replaced by copies, while further
/// messages are dead-lettered and the redriven ones fail again.
async fn redrive_while_messages_arrive(commands: usize) {
    const DEAD_LETTERS: usize = 200;
    let (fixture, handler) = (
        Arc::new(BrokerFixture::on(Broker::RabbitMq).await),
        RejectingHandler::default(),
    );
    fixture
        .cli
        .configure(&fixture.settings().replace(COUNTS_ACCEPTED, ""));
    fixture.publish_many((0..DEAD_LETTERS).map(id)).await;
    fixture
        .handle(
            Guarantee::AtMostOnce,
            handler.clone(),
            fixture.until_there_are(DEAD_LETTERS as u64, ".dead-letters"),
        )
        .await;
    let queue = format!("{}.dead-letters", fixture.cli.name);
    // Half of them are read six times, and are behind the other half.
    let half = DEAD_LETTERS as u64 / 2;
    let others = hold(&queue, half).await;
    for _ in 0..5 {
        return_messages(hold(&queue, half).await).await;
        fixture.until(&queue, half).await;
    }
    return_messages(others).await;
    fixture.until(&queue, 2 * half).await;
    return_messages(hold(&queue, half).await).await;
    fixture.until(&queue, 2 * half).await;

    let redriven = async {
        let inflow = async {
            for number in 0.. {
                let ids = (0..10).map(|it| format!("new-{}", number * 10 + it));
                fixture.publish_many(ids).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            () = inflow => unreachable!("the loop does not end"),
            reports = run_redrives_in_parallel(&fixture, commands) => {
                // The messages that were redriven last run, too.
                fixture.until_there_are(0, "").await;
                reports
            }
        }
    };
    let reports = Arc::new(Mutex::new(Vec::new()));
    let until = async {
        let ended = redriven.await;
        *reports.lock().expect("the lock is not poisoned") = ended;
    };
    fixture
        .handle(Guarantee::AtMostOnce, handler.clone(), until)
        .await;

    let (runs, reports) = (
        handler.runs(),
        reports.lock().expect("the lock is not poisoned").clone(),
    );
    let repeated: Vec<_> = runs
        .iter()
        .filter(|(_, runs)| **runs > 1 + commands)
        .collect();
    assert!(
        repeated.is_empty(),
        "redriven more than once by a command: {repeated:?}"
    );
    if commands == 1 {
        let is_redriven = |number: &usize| runs[&id(*number)] == 2;
        assert_eq!((0..DEAD_LETTERS).filter(is_redriven).count(), DEAD_LETTERS);
    }
    let sent: u64 = reports
        .iter()
        .filter_map(|report| report["done"].as_u64())
        .sum();
    let again: usize = runs.values().map(|runs| runs - 1).sum();
    assert_eq!(sent, again as u64, "each redriven message ran once");
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redrive_sends_each_message_once_while_others_arrive() {
    redrive_while_messages_arrive(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_redrives_at_once_end() {
    redrive_while_messages_arrive(2).await;
}
