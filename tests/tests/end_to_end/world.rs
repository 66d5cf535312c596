//! The topic or queue of a test, its consumers, and their diary.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_tests::diary::{self, DiaryRun, Entry};
use tempfile::TempDir;

use crate::broker::{Broker, RejectedMessage, Sent};
use crate::process::{ConsumerProcess, POLL_INTERVAL};

/// The time limit of each wait.
const WAIT_TIMEOUT: Duration = Duration::from_secs(45);

/// The outcomes of settled deliveries that are not redelivered.
const FINAL: [&str; 5] = [
    "completed",
    "duplicate",
    "passed_without_store",
    "rejected",
    "in_doubt",
];

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) broker: Broker,
    /// The name of the topic or queue, the consumer group and the scope.
    pub(crate) name: String,
    redis: String,
    directory: TempDir,
    started: AtomicU32,
}

/// The arguments of a consumer.
#[derive(Debug)]
pub(crate) struct ConsumerArguments<'a> {
    world: &'a World,
    arguments: Vec<String>,
}

impl World {
    pub(crate) async fn new(broker: Broker) -> Self {
        Self::with_redis(
            broker,
            oncegate_testkit::redis_url().unwrap_or_else(|missing| panic!("{missing}")),
        )
        .await
    }

    pub(crate) async fn with_redis(broker: Broker, redis: String) -> Self {
        static WORLDS: AtomicU32 = AtomicU32::new(0);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock")
            .as_millis();
        let name = format!(
            "e2e-{}-{now}-{}",
            std::process::id(),
            WORLDS.fetch_add(1, Ordering::Relaxed)
        );
        broker.create(&name).await;
        Self {
            broker,
            name,
            redis,
            directory: tempfile::tempdir().expect("a directory"),
            started: AtomicU32::new(0),
        }
    }

    pub(crate) async fn publish(&self, messages: impl IntoIterator<Item = Sent>) {
        let messages: Vec<Sent> = messages.into_iter().collect();
        self.broker.publish(&self.name, &messages).await;
    }

    /// A consumer with the guarantee `at-most-once`, `effectively-once` or `bare`.
    pub(crate) fn consumer(&self, guarantee: &str) -> ConsumerArguments<'_> {
        let settings = ConsumerArguments {
            world: self,
            arguments: Vec::new(),
        };
        settings
            .with("broker", self.broker.name())
            .with("url", self.broker.url())
            .with("from", &self.name)
            .with("group", &self.name)
            .with("scope", &self.name)
            .with("redis", &self.redis)
            .with(
                "diary",
                self.directory.path().join("diary").display().to_string(),
            )
            .with("guarantee", guarantee)
    }

    /// Starts a service with inbox and outbox in this database, which sends to `to`.
    pub(crate) fn start_service(&self, database: &str, to: Option<&str>) -> ConsumerProcess {
        let mut settings = ConsumerArguments {
            world: self,
            arguments: Vec::new(),
        };
        if let Some(to) = to {
            settings = settings.with("to", to);
        }
        settings
            .with("broker", self.broker.name())
            .with("url", self.broker.url())
            .with("from", &self.name)
            .with("database", database)
            .start_program(env!("CARGO_BIN_EXE_service"))
    }

    fn entries(&self) -> Vec<Entry> {
        diary::read(&self.directory.path().join("diary"))
    }

    /// Every start of a handler.
    pub(crate) fn starts(&self) -> Vec<DiaryRun> {
        self.entries()
            .into_iter()
            .filter_map(|entry| {
                if let Entry::Start(run) = entry {
                    Some(run)
                } else {
                    None
                }
            })
            .collect()
    }

    /// Every effect.
    pub(crate) fn effects(&self) -> Vec<DiaryRun> {
        self.entries()
            .into_iter()
            .filter_map(|entry| {
                if let Entry::Effect(run) = entry {
                    Some(run)
                } else {
                    None
                }
            })
            .collect()
    }

    /// The ids of all effects, sorted; one entry for each effect.
    pub(crate) fn effected(&self) -> Vec<String> {
        let mut ids: Vec<String> = self.effects().into_iter().map(|run| run.id).collect();
        ids.sort();
        ids
    }

    /// The attempts with which a handler was started for this id.
    pub(crate) fn attempts(&self, id: &str) -> Vec<u32> {
        self.starts()
            .into_iter()
            .filter(|run| run.id == id)
            .map(|run| run.attempt)
            .collect()
    }

    /// The number of finally settled deliveries, by the counters of the consumers.
    pub(crate) fn settled(&self) -> usize {
        FINAL.iter().map(|outcome| self.counted(outcome)).sum()
    }

    /// How often the consumers counted this outcome.
    pub(crate) fn counted(&self, outcome: &str) -> usize {
        self.entries()
            .iter()
            .filter(|entry| matches!(entry, Entry::Counted(it) if it == outcome))
            .count()
    }

    /// The raw marker of an id in Redis.
    pub(crate) async fn marker(&self, id: &str) -> Option<String> {
        let client = redis::Client::open(self.redis.as_str()).expect("a Redis URL");
        let mut connection = client
            .get_multiplexed_async_connection()
            .await
            .expect("Redis answers");
        redis::cmd("GET")
            .arg(format!("processed:{}|{id}", self.name))
            .query_async(&mut connection)
            .await
            .expect("a string")
    }

    /// Whether the marker of an id is done, with or without a fingerprint.
    pub(crate) async fn is_done(&self, id: &str) -> bool {
        let with_fingerprint = |marker: &str| {
            marker.len() == 20
                && marker.starts_with("-1")
                && marker[1..].bytes().all(|it| it.is_ascii_digit())
        };
        self.marker(id)
            .await
            .is_some_and(|marker| marker == "1" || with_fingerprint(&marker))
    }

    pub(crate) async fn dead_letters(&self) -> Vec<RejectedMessage> {
        self.broker
            .rejected_messages(&format!("{}.dead-letters", self.name))
            .await
    }

    pub(crate) async fn in_doubt(&self) -> Vec<RejectedMessage> {
        self.broker
            .rejected_messages(&format!("{}.in-doubt", self.name))
            .await
    }

    /// Waits until the condition holds.
    pub(crate) async fn until(&self, what: &str, mut is_so: impl AsyncFnMut() -> bool) {
        let until = Instant::now() + WAIT_TIMEOUT;
        while !is_so().await {
            assert!(
                Instant::now() < until,
                "not within {WAIT_TIMEOUT:?}: {what}\n{}",
                self.story()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    pub(crate) async fn until_settled(&self, count: usize) {
        self.until(&format!("{count} deliveries are settled"), async || {
            self.settled() >= count
        })
        .await;
    }

    pub(crate) async fn until_effects(&self, count: usize) {
        self.until(&format!("{count} effects"), async || {
            self.effects().len() >= count
        })
        .await;
    }

    pub(crate) async fn until_starts(&self, count: usize) {
        self.until(&format!("{count} starts"), async || {
            self.starts().len() >= count
        })
        .await;
    }

    /// Waits until each id is done or in doubt, and all messages are settled.
    pub(crate) async fn until_done_or_in_doubt(&self, ids: impl IntoIterator<Item = String>) {
        let mut open: BTreeSet<String> = ids.into_iter().collect();
        let look = async || {
            for id in open.clone() {
                if self.is_done(&id).await {
                    open.remove(&id);
                }
            }
            let doubted = self.in_doubt().await;
            open.retain(|id| !doubted.iter().any(|rejected| rejected.header("id") == id));
            open.is_empty() && self.broker.left(&self.name).await == 0
        };
        self.until("each id is done or in doubt", look).await;
    }

    /// Drains the consumers and checks that no message remains.
    pub(crate) async fn end(self, consumers: impl IntoIterator<Item = ConsumerProcess>) {
        for consumer in consumers {
            consumer.stop().await;
        }
        for number in 0..self.started.load(Ordering::Relaxed) {
            let log = self.log(number);
            // Handler failures are logged as errors on purpose.
            let is_ours =
                |line: &str| line.contains(" ERROR ") && !line.contains("handler panicked");
            assert!(!log.lines().any(is_ours), "{log}");
        }
        let left = self.broker.left(&self.name).await;
        assert_eq!(left, 0, "not settled\n{}", self.story());
        self.broker.remove(&self.name).await;
    }

    fn log(&self, number: u32) -> String {
        std::fs::read_to_string(self.directory.path().join(format!("{number}.log")))
            .unwrap_or_default()
    }

    /// The diary and the logs, for the message of a failed test.
    pub(crate) fn story(&self) -> String {
        let entries = self.entries();
        let last = entries[entries.len().saturating_sub(30)..]
            .iter()
            .map(Entry::to_string);
        let logs = (0..self.started.load(Ordering::Relaxed)).flat_map(|number| {
            let log = self.log(number);
            let lines: Vec<String> = log.lines().map(str::to_owned).collect();
            [format!("log of consumer {number}:")]
                .into_iter()
                .chain(lines[lines.len().saturating_sub(30)..].to_vec())
                .collect::<Vec<_>>()
        });
        last.chain(logs).collect::<Vec<_>>().join("\n")
    }
}

impl ConsumerArguments<'_> {
    /// Replaces or adds one argument.
    pub(crate) fn with(mut self, name: &str, value: impl ToString) -> Self {
        let name = format!("--{name}=");
        self.arguments
            .retain(|argument| !argument.starts_with(&name));
        self.arguments.push(format!("{name}{}", value.to_string()));
        self
    }

    pub(crate) fn start(self) -> ConsumerProcess {
        self.start_program(env!("CARGO_BIN_EXE_consumer"))
    }

    fn start_program(self, program: &str) -> ConsumerProcess {
        let number = self.world.started.fetch_add(1, Ordering::Relaxed);
        let log = self.world.directory.path().join(format!("{number}.log"));
        ConsumerProcess::start(program, &self.arguments, log)
    }
}
