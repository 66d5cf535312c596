//! Malformed input as a table: the messages that a real broker delivers, their outcome, and what
//! the operator sees. [`assert_book_table`] compares it with `docs/contributing/bad-input.md`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use oncegate_core::internal::Lock;
use oncegate_core::{
    Connect, Consumer, Context, Error, Failure, Handler, IdSource, MemoryBroker, MemoryStore,
    Message, Store,
};
use tokio::sync::oneshot;

use crate::Lines;

/// How long a test waits for a message to be settled.
const SETTLEMENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Shorter than [`BLOCKED`], so that a blocked thread misses the renewal.
const LEASE: Duration = Duration::from_secs(2);
/// Ends the handler of the id `waits`.
const HANDLER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the handler of the id `blocks` blocks its thread, and so the consumer: longer than
/// [`LEASE`].
const BLOCKED: Duration = Duration::from_millis(2_500);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The outcomes of settled messages in `oncegate_deliveries_total`.
const OUTCOMES: [&str; 4] = ["completed", "duplicate", "rejected", "in_doubt"];
/// The texts that the consumer logs when it rejects a message.
const CONSUMER_LOG_LINES: [&str; 2] = [
    "message rejected, sending it to the dead letters",
    "message in doubt",
];
/// The text that a source logs when it rejects a message.
const SOURCE_LOG_LINE: &str = "message body exceeds body_limit";

/// A row of the table. The body of a message is the number of its row, unless the body itself is
/// malformed.
pub struct Row<M> {
    /// The text of the table's first column.
    pub input: &'static str,
    /// The expected number of effects: calls of the handler that return `Ok`.
    pub effects: usize,
    /// The expected value of `oncegate-reason` of each rejected message.
    pub reasons: &'static [&'static str],
    /// The messages to publish, in the type of the broker's client.
    pub messages: Vec<M>,
    /// The component that rejects messages of this row.
    rejected_by: RejectedBy,
}

/// The component that rejects a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectedBy {
    /// The consumer, which counts and logs the rejection.
    Gate,
    /// The source, which does not deliver the message. It logs on a thread of its own, so
    /// [`BadInputConsumer`] does not collect the log line.
    Source,
    /// The source, which logs on the thread of the consumer, so [`BadInputConsumer`] collects the
    /// log line.
    SourceInline,
}

impl<M> Row<M> {
    /// A row whose rejected messages are rejected by the consumer.
    pub fn new(
        input: &'static str,
        effects: usize,
        reasons: &'static [&'static str],
        messages: Vec<M>,
    ) -> Self {
        Self {
            input,
            effects,
            reasons,
            messages,
            rejected_by: RejectedBy::Gate,
        }
    }

    /// The same row, rejected by another component.
    pub fn rejected_by(self, rejected_by: RejectedBy) -> Self {
        Self {
            rejected_by,
            ..self
        }
    }

    /// How much the messages of this row add to `oncegate_deliveries_total`, by outcome.
    fn expected_counts(&self) -> BTreeMap<&'static str, u64> {
        let (delivered, rejected) = match self.rejected_by {
            RejectedBy::Gate => (self.messages.len(), self.reasons.len()),
            RejectedBy::Source | RejectedBy::SourceInline => {
                (self.messages.len() - self.reasons.len(), 0)
            }
        };
        let counts = [
            ("completed", self.effects),
            ("duplicate", delivered - self.effects - rejected),
            ("rejected", rejected),
        ];
        counts
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| (name, count as u64))
            .collect()
    }

    /// The row as a line of the Markdown table.
    fn table_line(&self) -> String {
        let result = match (self.effects, self.reasons) {
            (1, []) => "handled once".to_owned(),
            (0, [reason]) => format!("dead letters, `{reason}`"),
            (count, _) => format!("handled {count} times"),
        };
        let outcome_text = |(name, count): (&str, u64)| {
            if count == 1 {
                format!("`{name}`")
            } else {
                format!("`{name}` × {count}")
            }
        };
        let mut observed: Vec<String> = self
            .expected_counts()
            .into_iter()
            .map(outcome_text)
            .collect();
        match self.rejected_by {
            _ if self.reasons.is_empty() => {}
            RejectedBy::Gate => observed.push("a warning".to_owned()),
            RejectedBy::Source | RejectedBy::SourceInline => {
                observed.push("a warning of the source".to_owned())
            }
        }
        format!("| {} | {result} | {} |", self.input, observed.join(", "))
    }
}

/// Checks that the section with this heading of a Markdown page contains exactly these rows.
///
/// # Panics
/// If it differs.
pub fn assert_book_table<M>(book: &str, heading: &str, rows: &[Row<M>]) {
    let (_, section) = book.split_once(heading).expect("the page has the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(2)
        .collect();
    assert_eq!(lines, rows.iter().map(Row::table_line).collect::<Vec<_>>());
}

/// A consumer that receives malformed input. It has one attempt, and reads the id from the header
/// `id`. The id selects what its handler does: it panics at `panic` with a value that is not text,
/// blocks its thread at `blocks` for longer than the lease, never returns at `waits`, and starts at
/// `leaves` a thread that runs until the consumer has ended. The consumer has a thread of its own,
/// so that its counters and log lines are separate from those of other tests.
pub struct BadInputConsumer {
    handler: BadInputHandler,
    counters: Counters,
    lines: Lines,
    /// The log lines taken from `lines` so far.
    logged: Vec<String>,
    /// The counters before the current row.
    before: BTreeMap<&'static str, u64>,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), Error>>,
}

/// The handler. It counts the effects of each row and keeps the threads that it started.
#[derive(Clone, Default)]
struct BadInputHandler {
    /// The number of effects of each row.
    effects: Arc<Lock<BTreeMap<usize, usize>>>,
    /// Threads that run until their sender is dropped.
    background_threads: Arc<Lock<Vec<BackgroundThread>>>,
}

/// The sender that ends a thread, and the thread.
type BackgroundThread = (mpsc::Sender<()>, JoinHandle<()>);

impl BadInputHandler {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.effects.lock()
    }

    fn take_background_threads(&self) -> Vec<BackgroundThread> {
        std::mem::take(&mut *self.background_threads.lock())
    }
}

impl Handler for BadInputHandler {
    type Payload = usize;

    async fn handle(&self, row: usize, cx: &Context) -> Result<(), Failure> {
        match cx.id() {
            "panic" => std::panic::panic_any(row),
            "blocks" => std::thread::sleep(BLOCKED),
            "waits" => std::future::pending().await,
            "leaves" => {
                let (stop, stopped) = mpsc::channel();
                let thread = std::thread::spawn(move || {
                    let _ = stopped.recv();
                });
                self.background_threads.lock().push((stop, thread));
            }
            _ => {}
        }
        *self.lock().entry(row).or_default() += 1;
        Ok(())
    }
}

impl BadInputConsumer {
    /// Starts to consume from this source.
    ///
    /// # Panics
    /// If no thread can be started.
    pub fn start(source: impl Connect + 'static) -> Self {
        let (handler, counters, lines) = (
            BadInputHandler::default(),
            Counters::default(),
            Lines::default(),
        );
        let (stop, stopped) = oneshot::channel();
        let consumer = Consumer::builder()
            .source(source)
            .store(MemoryStore::new())
            .id(IdSource::header("id"))
            .handler(handler.clone());
        let consumer = consumer
            .max_attempts(1)
            .lease(LEASE)
            .handler_timeout(HANDLER_TIMEOUT);
        let running = run_recorded(&counters, &lines, move || {
            consumer.run_until(async { drop(stopped.await) })
        });
        Self {
            handler,
            counters,
            lines,
            logged: Vec::new(),
            before: BTreeMap::new(),
            stop,
            running,
        }
    }

    /// Waits until the consumer has counted the published messages of a row, and compares outcomes,
    /// effects and log lines with the expected ones. The test itself checks the dead letters.
    ///
    /// If the consumer rejects the messages of the row, the log line of the first must contain its
    /// reason, its id if it has one, and `origin`. If the source rejects them on the consumer's
    /// thread, the log line of the first must contain `origin`.
    ///
    /// # Panics
    /// If something differs.
    pub async fn check_row<M>(&mut self, number: usize, row: &Row<M>, origin: &str) {
        let (input, counted) = (row.input, row.expected_counts());
        let expected = counted.values().sum::<u64>();
        let deadline = Instant::now() + SETTLEMENT_TIMEOUT;
        let counted_since = |before: &BTreeMap<&str, u64>| -> BTreeMap<&'static str, u64> {
            let new = |name| {
                (
                    name,
                    self.counters.of(name) - before.get(name).copied().unwrap_or_default(),
                )
            };
            OUTCOMES
                .map(new)
                .into_iter()
                .filter(|(_, count)| *count > 0)
                .collect()
        };
        while counted_since(&self.before).values().sum::<u64>() < expected {
            assert!(
                Instant::now() < deadline,
                "{input}: {:?} instead of {counted:?}",
                counted_since(&self.before)
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        assert_eq!(counted_since(&self.before), counted, "{input}");
        self.before = OUTCOMES.map(|name| (name, self.counters.of(name))).into();
        let effects = self
            .handler
            .lock()
            .get(&number)
            .copied()
            .unwrap_or_default();
        assert_eq!(effects, row.effects, "{input}");
        self.check_log(row, origin).await;
    }

    /// Checks the log line of the first rejected message; the log throttle may suppress later ones.
    async fn check_log<M>(&mut self, row: &Row<M>, origin: &str) {
        let is_expected = |line: &String| match row.rejected_by {
            RejectedBy::Gate => CONSUMER_LOG_LINES
                .iter()
                .any(|logged| line.contains(logged)),
            _ => line.contains(SOURCE_LOG_LINE),
        };
        if row.rejected_by == RejectedBy::Source
            || row.reasons.is_empty()
            || self.logged.iter().any(is_expected)
        {
            return;
        }
        let deadline = Instant::now() + SETTLEMENT_TIMEOUT;
        let line = loop {
            self.logged
                .extend(self.lines.take().into_iter().map(|(_, line)| line));
            if let Some(line) = self.logged.iter().find(|line| is_expected(line)) {
                break line;
            }
            assert!(
                Instant::now() < deadline,
                "{}: no log line about the rejection in {:?}",
                row.input,
                self.logged
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        };
        assert!(
            line.contains(origin),
            "{}: {line} does not contain {origin}",
            row.input
        );
        if row.rejected_by != RejectedBy::Gate {
            return;
        }
        let reason = row.reasons.first().copied().unwrap_or_default();
        assert!(
            line.contains(&format!("reason=\"{reason}\"")),
            "{}: {line} does not contain the reason",
            row.input
        );
        assert_eq!(
            line.contains(" id="),
            !matches!(reason, "missing-id" | "unusable-id"),
            "{}: {line}",
            row.input
        );
    }

    /// Ends the consumer.
    ///
    /// # Panics
    /// If the consumer failed.
    pub async fn end(self) {
        self.stop.send(()).expect("the consumer is still running");
        let ended = tokio::task::spawn_blocking(|| self.running.join())
            .await
            .expect("the blocking task is not cancelled");
        ended
            .expect("the consumer thread does not panic")
            .expect("the consumer ends without an error");
        for (stop, thread) in self.handler.take_background_threads() {
            assert!(
                !thread.is_finished(),
                "the end of the consumer does not end a thread that its handler started"
            );
            drop(stop);
            thread
                .join()
                .expect("the thread of the handler does not panic");
        }
    }
}

/// Runs a consumer on a thread of its own and collects its counters and warnings.
fn run_recorded<F: Future<Output: Send + 'static>>(
    counters: &Counters,
    lines: &Lines,
    consume: impl FnOnce() -> F + Send + 'static,
) -> JoinHandle<F::Output> {
    let (recorder, writer) = (counters.clone(), lines.clone());
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("the runtime starts");
        let log = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::WARN);
        let log = log.with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(log, || {
            metrics::with_local_recorder(&recorder, || runtime.block_on(consume()))
        })
    })
}

/// The outcome of a message whose marker in the store is malformed, as an operator sees it.
#[derive(Debug)]
pub struct ObservedOutcome {
    /// The outcomes that the consumer counted.
    counted: Vec<&'static str>,
    /// The warnings and errors in the log.
    logged: Vec<String>,
    /// The error of the consumer, unless the message was settled.
    consumer_error: Option<String>,
    is_unsettled: bool,
}

impl ObservedOutcome {
    /// Delivers a message with this id to a consumer with this scope and store, and waits until the
    /// message is settled or the consumer ends.
    ///
    /// # Panics
    /// If neither happens within a minute.
    pub async fn of(store: impl Store + 'static, scope: &str, id: &str) -> Self {
        let (counters, lines, broker) = (
            Counters::default(),
            Lines::default(),
            MemoryBroker::new("bad"),
        );
        broker.publish(Message::new("1").with_header("id", id));
        let consumer = Consumer::builder()
            .source(broker.source())
            .store(store)
            .id(IdSource::header("id"))
            .scope(scope);
        // While the store reports an error that an operator must repair, the drain waits until this
        // timeout.
        let (consumer, watched_broker) = (
            consumer
                .handler(BadInputHandler::default())
                .drain_timeout(Duration::from_millis(200)),
            broker.clone(),
        );
        let running = run_recorded(&counters, &lines, move || async move {
            tokio::time::timeout(
                SETTLEMENT_TIMEOUT,
                consumer.run_until(async move { watched_broker.all_settled().await }),
            )
            .await
        });
        let ended = tokio::task::spawn_blocking(|| running.join())
            .await
            .expect("the blocking task is not cancelled")
            .expect("the consumer thread does not panic");
        Self {
            counted: OUTCOMES
                .into_iter()
                .filter(|outcome| counters.of(outcome) > 0)
                .collect(),
            logged: lines.take().into_iter().map(|(_, line)| line).collect(),
            consumer_error: ended
                .expect("the message is settled or the consumer ends within the time limit")
                .err()
                .map(|error| error.to_string()),
            is_unsettled: broker.unsettled() > 0,
        }
    }

    /// Whether this equals the expected text of a table: an outcome, or `in doubt`, `the consumer
    /// does not start` or `the consumer ends` with a part of the error. The same text must be in
    /// the log, unless the consumer did not start. If the consumer ends, the message must be
    /// unsettled.
    pub fn matches(&self, expected: &str) -> bool {
        let Some((outcome, text)) = expected.split_once(": ") else {
            return self.consumer_error.is_none()
                && !self.is_unsettled
                && self.counted == [expected.trim_matches('`')];
        };
        if outcome == "in doubt" {
            let unreadable = |line: &String| {
                line.contains("ERROR") && line.contains("unreadable marker") && line.contains(text)
            };
            return self.logged.iter().any(unreadable)
                && self.consumer_error.is_none()
                && self.counted == ["in_doubt"]
                && !self.is_unsettled;
        }
        let stopping = |line: &String| {
            line.contains("ERROR") && line.contains("stopping") && line.contains(text)
        };
        let logged = match outcome {
            "the consumer ends" => self.logged.iter().any(stopping),
            "the consumer does not start" => self.logged.is_empty(),
            _ => false,
        };
        logged
            && self
                .consumer_error
                .as_ref()
                .is_some_and(|error| error.contains(text))
            && self.counted.is_empty()
            && self.is_unsettled
    }
}

/// Counters by their name and the values of their labels, separated by spaces.
#[derive(Clone, Default)]
struct Counters(Arc<Lock<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    /// The value of `oncegate_deliveries_total` with this outcome.
    fn of(&self, outcome: &str) -> u64 {
        let all = self.0.lock();
        all.get(&format!("oncegate_deliveries_total {outcome}"))
            .map_or(0, |count| count.load(Ordering::SeqCst))
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let name = key.labels().fold(key.name().to_owned(), |name, label| {
            format!("{name} {}", label.value())
        });
        Counter::from_arc(Arc::clone(self.0.lock().entry(name).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
