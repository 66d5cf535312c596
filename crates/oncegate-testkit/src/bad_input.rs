//! Malformed input as a table: the messages that a real broker delivers, their outcome, what the
//! operator sees, and the table in the book.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use oncegate_core::{
    Connect, Consumer, Context, Error, Failure, Handler, IdSource, MemoryBroker, MemoryStore,
    Message, Store,
};
use tokio::sync::oneshot;

use crate::Lines;

/// How long the settlement of a message may take, and the interval of polling.
const PATIENCE: Duration = Duration::from_secs(60);
/// The lease, and the handler timeout.
const LEASE: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long the handler of `blocks` blocks its thread, and so the consumer: longer than a lease
/// that is not renewed.
const BLOCKED: Duration = Duration::from_millis(2_500);
const LOOK: Duration = Duration::from_millis(10);
/// The outcomes of settled messages in `oncegate_deliveries_total`.
const OUTCOMES: [&str; 4] = ["completed", "duplicate", "rejected", "in_doubt"];
/// The log lines of a message that the gate rejects.
const GATE_LOG_LINES: [&str; 2] = [
    "message rejected, sending it to the dead letters",
    "message in doubt",
];
/// The log line of a source that rejects a message.
const SOURCE_LOG_LINE: &str = "message body exceeds body_limit";

/// A row of the table. The body of a message is the number of its row, unless the body itself is
/// malformed.
pub struct Row<M> {
    /// The input, in the words of the book.
    pub input: &'static str,
    /// The number of effects.
    pub effects: usize,
    /// The reason of each rejected message.
    pub reasons: &'static [&'static str],
    /// The messages to publish, in the type of the broker's client.
    pub messages: Vec<M>,
    /// The component that rejects them.
    by: By,
}

/// The component that rejects a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The gate, which counts and logs it.
    Gate,
    /// The source, which does not deliver it. It logs on a thread of its own, so the log line is
    /// not collected.
    Source,
    /// The source, on the thread of the consumer, so that its log line is collected.
    SourceHere,
}

impl<M> Row<M> {
    /// A row whose messages the gate rejects.
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
            by: By::Gate,
        }
    }

    /// The same row, rejected by another component.
    pub fn set_aside_by(self, by: By) -> Self {
        Self { by, ..self }
    }

    /// The outcomes that the gate counts.
    fn counted(&self) -> BTreeMap<&'static str, u64> {
        let (handed_over, rejected) = match self.by {
            By::Gate => (self.messages.len(), self.reasons.len()),
            By::Source | By::SourceHere => (self.messages.len() - self.reasons.len(), 0),
        };
        let counts = [
            ("completed", self.effects),
            ("duplicate", handed_over - self.effects - rejected),
            ("rejected", rejected),
        ];
        counts
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| (name, count as u64))
            .collect()
    }

    fn line(&self) -> String {
        let verdict = match (self.effects, self.reasons) {
            (1, []) => "handled once".to_owned(),
            (0, [reason]) => format!("dead letters, `{reason}`"),
            (count, _) => format!("handled {count} times"),
        };
        let times = |(name, count): (&str, u64)| {
            if count == 1 {
                format!("`{name}`")
            } else {
                format!("`{name}` × {count}")
            }
        };
        let mut sees: Vec<String> = self.counted().into_iter().map(times).collect();
        match self.by {
            _ if self.reasons.is_empty() => {}
            By::Gate => sees.push("a warning".to_owned()),
            By::Source | By::SourceHere => sees.push("a warning of the source".to_owned()),
        }
        format!("| {} | {verdict} | {} |", self.input, sees.join(", "))
    }
}

/// Checks that the section of the book with this heading contains exactly this table.
///
/// # Panics
/// If it does not.
pub fn assert_the_book_has<M>(book: &str, heading: &str, rows: &[Row<M>]) {
    let (_, section) = book.split_once(heading).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let told: Vec<&str> = section
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(2)
        .collect();
    assert_eq!(told, rows.iter().map(Row::line).collect::<Vec<_>>());
}

/// A consumer that receives malformed input. It has one attempt, and reads the id from the header
/// `id`. Its handler panics at the id `panic` with a value that is not text, blocks its thread at
/// `blocks` for longer than the lease, never returns at `waits`, and starts at `leaves` a thread
/// that runs until the consumer has ended. The consumer has a thread of its own, so that its
/// counters and log lines are separate from those of other tests.
pub struct Trial {
    effects: RowEffects,
    counters: Counters,
    lines: Lines,
    /// All log lines.
    logged: Vec<String>,
    /// The counters before the current row.
    before: BTreeMap<&'static str, u64>,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), Error>>,
}

/// The number of effects of each row, and the threads that the handler started.
#[derive(Clone, Default)]
struct RowEffects {
    of_rows: Arc<Mutex<BTreeMap<usize, usize>>>,
    /// Threads that run until their sender is dropped.
    left: Arc<Mutex<Vec<Left>>>,
}

/// The sender that ends a thread, and the thread.
type Left = (mpsc::Sender<()>, JoinHandle<()>);

impl RowEffects {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.of_rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn left(&self) -> Vec<Left> {
        std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Handler for RowEffects {
    type Payload = usize;

    async fn handle(&self, row: usize, cx: &Context) -> Result<(), Failure> {
        match cx.id() {
            "panic" => std::panic::panic_any(row),
            "blocks" => std::thread::sleep(BLOCKED),
            "waits" => std::future::pending().await,
            "leaves" => {
                let (ends, end) = mpsc::channel();
                let behind = std::thread::spawn(move || {
                    let _ = end.recv();
                });
                self.left
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((ends, behind));
            }
            _ => {}
        }
        *self.lock().entry(row).or_default() += 1;
        Ok(())
    }
}

impl Trial {
    /// Starts to consume from this source.
    ///
    /// # Panics
    /// If no thread can be started.
    pub fn begin(source: impl Connect + 'static) -> Self {
        let (effects, counters, lines) =
            (RowEffects::default(), Counters::default(), Lines::default());
        let (stop, stopped) = oneshot::channel();
        let consumer = Consumer::builder()
            .source(source)
            .store(MemoryStore::new())
            .id(IdSource::header("id"))
            .handler(effects.clone());
        let consumer = consumer
            .max_attempts(1)
            .lease(LEASE)
            .handler_timeout(TIMEOUT);
        let running = run_recorded(&counters, &lines, move || {
            consumer.run_until(async { drop(stopped.await) })
        });
        Self {
            effects,
            counters,
            lines,
            logged: Vec::new(),
            before: BTreeMap::new(),
            stop,
            running,
        }
    }

    /// Waits until the gate has counted the published messages of a row, and compares outcomes,
    /// effects and log lines with the expected ones. The first rejected message must be logged with
    /// its reason, its id if it has one, and `place`; the first one that the source rejects and
    /// logs here with `place`. The test itself checks the dead letters.
    ///
    /// # Panics
    /// If something differs.
    pub async fn sees<M>(&mut self, number: usize, row: &Row<M>, place: &str) {
        let (input, counted) = (row.input, row.counted());
        let (expected, end) = (counted.values().sum::<u64>(), Instant::now() + PATIENCE);
        let since = |before: &BTreeMap<&str, u64>| -> BTreeMap<&'static str, u64> {
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
        while since(&self.before).values().sum::<u64>() < expected {
            assert!(
                Instant::now() < end,
                "{input}: {:?} instead of {counted:?}",
                since(&self.before)
            );
            tokio::time::sleep(LOOK).await;
        }
        assert_eq!(since(&self.before), counted, "{input}");
        self.before = OUTCOMES.map(|name| (name, self.counters.of(name))).into();
        let effects = self
            .effects
            .lock()
            .get(&number)
            .copied()
            .unwrap_or_default();
        assert_eq!(effects, row.effects, "{input}");
        self.check_log(row, place).await;
    }

    async fn check_log<M>(&mut self, row: &Row<M>, place: &str) {
        let wanted = |line: &String| match row.by {
            By::Gate => GATE_LOG_LINES.iter().any(|logged| line.contains(logged)),
            _ => line.contains(SOURCE_LOG_LINE),
        };
        if row.by == By::Source || row.reasons.is_empty() || self.logged.iter().any(wanted) {
            return;
        }
        let end = Instant::now() + PATIENCE;
        let line = loop {
            self.logged
                .extend(self.lines.take().into_iter().map(|(_, line)| line));
            if let Some(line) = self.logged.iter().find(|line| wanted(line)) {
                break line;
            }
            assert!(
                Instant::now() < end,
                "{}: no log line has this: {:?}",
                row.input,
                self.logged
            );
            tokio::time::sleep(LOOK).await;
        };
        assert!(
            line.contains(place),
            "{}: {line} does not contain the place",
            row.input
        );
        if row.by != By::Gate {
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
        self.stop.send(()).expect("the consumer runs");
        let ended = tokio::task::spawn_blocking(|| self.running.join())
            .await
            .expect("no panic");
        ended.expect("no panic").expect("a clean end");
        for (ends, behind) in self.effects.left() {
            assert!(
                !behind.is_finished(),
                "what a handler leaves behind outlives the consumer"
            );
            drop(ends);
            behind.join().expect("no panic");
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
            .expect("a runtime");
        let log = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::WARN);
        let log = log.with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(log, || {
            metrics::with_local_recorder(&recorder, || runtime.block_on(consume()))
        })
    })
}

/// What an operator sees of a message whose marker in the store is malformed.
#[derive(Debug)]
pub struct Sight {
    /// The outcomes that the gate counted.
    counted: Vec<&'static str>,
    /// The warnings and errors in the log.
    logged: Vec<String>,
    /// The error of the consumer, unless the message was settled.
    ended: Option<String>,
    /// Whether the message is still unsettled.
    waits: bool,
}

impl Sight {
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
        // A drain, too, waits for a store error that needs an operator.
        let (consumer, drained) = (
            consumer
                .handler(RowEffects::default())
                .drain_timeout(Duration::from_millis(200)),
            broker.clone(),
        );
        let running = run_recorded(&counters, &lines, move || async move {
            tokio::time::timeout(
                PATIENCE,
                consumer.run_until(async move { drained.drained().await }),
            )
            .await
        });
        let ended = tokio::task::spawn_blocking(|| running.join())
            .await
            .expect("no panic")
            .expect("no panic");
        Self {
            counted: OUTCOMES
                .into_iter()
                .filter(|end| counters.of(end) > 0)
                .collect(),
            logged: lines.take().into_iter().map(|(_, line)| line).collect(),
            ended: ended
                .expect("it is settled, or the consumer ends")
                .err()
                .map(|error| error.to_string()),
            waits: broker.unsettled() > 0,
        }
    }

    /// Whether this equals the short text of a table: an outcome, or `in doubt`, `the consumer does
    /// not start` or `the consumer ends` with words of the error. The same words must be in the
    /// log, unless the consumer did not start. If the consumer ends, the message must be unsettled.
    pub fn is(&self, told: &str) -> bool {
        let Some((how, words)) = told.split_once(": ") else {
            return self.ended.is_none() && !self.waits && self.counted == [told.trim_matches('`')];
        };
        if how == "in doubt" {
            let unreadable = |line: &String| {
                line.contains("ERROR") && line.contains("unreadable marker") && line.contains(words)
            };
            return self.logged.iter().any(unreadable)
                && self.ended.is_none()
                && self.counted == ["in_doubt"]
                && !self.waits;
        }
        let stopping = |line: &String| {
            line.contains("ERROR") && line.contains("stopping") && line.contains(words)
        };
        let logged = match how {
            "the consumer ends" => self.logged.iter().any(stopping),
            "the consumer does not start" => self.logged.is_empty(),
            _ => false,
        };
        logged
            && self.ended.as_ref().is_some_and(|why| why.contains(words))
            && self.counted.is_empty()
            && self.waits
    }
}

/// Counters by the values of their labels.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    /// The gate's counter of this outcome.
    fn of(&self, outcome: &str) -> u64 {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        Counter::from_arc(Arc::clone(
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(name)
                .or_default(),
        ))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
