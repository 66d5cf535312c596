//! Bad input as a table: what comes in from a real broker, what becomes of it, what the operator
//! sees, and what the book says of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use oncegate_core::{
    Consumer, Context, Error, Failure, Handler, IdSource, MemoryBroker, MemoryStore, Message, Open,
    Store, async_trait,
};
use tokio::sync::oneshot;

use crate::Lines;

/// How long it may take until a message is settled, and how often it is looked.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a claim holds, and how long a handler may run that waits for something.
const LEASE: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long the handler of `blocks` holds its thread, and with it the consumer: for longer than a
/// claim holds that nobody renews.
const BLOCKED: Duration = Duration::from_millis(2_500);
const LOOK: Duration = Duration::from_millis(10);
/// How each message ends that the gate settles, as `oncegate_deliveries_total` has it.
const ENDS: [&str; 4] = ["completed", "duplicate", "rejected", "in_doubt"];
/// What the log says of a message that the gate rejects.
const SAID: [&str; 2] = [
    "message rejected, sending it to the dead letters",
    "message in doubt",
];
/// What a source says of one that it sets aside.
const SOURCE_SAID: &str = "a body is over the limit";

/// A line of the table. A message says by its body which row it is of, unless the body is what is
/// bad.
pub struct Row<M> {
    /// What comes in, as the book says it.
    pub input: &'static str,
    /// How many effects that has.
    pub effects: usize,
    /// Why each of the others is set aside.
    pub reasons: &'static [&'static str],
    /// What is sent, as the broker has it.
    pub messages: Vec<M>,
    /// Who sets it aside.
    by: By,
}

/// Who sets a message aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The gate, which counts it and says so.
    Gate,
    /// The source, which never hands it over, on a thread of its own, where nobody here hears what
    /// it says.
    Source,
    /// The source, where the consumer runs, so that what it says is heard.
    SourceHere,
}

impl<M> Row<M> {
    /// A row.
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

    /// The same, set aside by somebody else.
    pub fn set_aside_by(self, by: By) -> Self {
        Self { by, ..self }
    }

    /// What the gate counts.
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

/// Whether the section of the book with this heading has this table and no other line.
///
/// # Panics
/// If it has not.
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

/// A consumer to which bad input is sent. It has one attempt, and takes the id from the header
/// `id`. Its handler panics at the id `panic` with what is no text, blocks its thread at `blocks`
/// for longer than the lease, waits at `waits` without end, and leaves at `leaves` a thread behind
/// that runs until the consumer has ended. It has a thread of its own, so that what it counts and
/// logs is known apart from what others do.
pub struct Trial {
    effects: Effects,
    counters: Counters,
    lines: Lines,
    /// All that was logged.
    said: Vec<String>,
    /// What was counted before the present row.
    before: BTreeMap<&'static str, u64>,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), Error>>,
}

/// How many effects each row had, and what was left behind.
#[derive(Clone, Default)]
struct Effects {
    of_rows: Arc<Mutex<BTreeMap<usize, usize>>>,
    /// Threads that run until they are told that nobody waits for them any more.
    left: Arc<Mutex<Vec<Left>>>,
}

/// What tells a thread to end, and the thread.
type Left = (mpsc::Sender<()>, JoinHandle<()>);

impl Effects {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.of_rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn left(&self) -> Vec<Left> {
        std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[async_trait]
impl Handler for Effects {
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
    /// Consumes from this source, from now on.
    ///
    /// # Panics
    /// If the system gives no thread.
    pub fn begin(source: impl Open + 'static) -> Self {
        let (effects, counters, lines) =
            (Effects::default(), Counters::default(), Lines::default());
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
        let running = watched(&counters, &lines, move || {
            consumer.run_until(async { drop(stopped.await) })
        });
        Self {
            effects,
            counters,
            lines,
            said: Vec::new(),
            before: BTreeMap::new(),
            stop,
            running,
        }
    }

    /// Waits until the gate has counted the messages of a row, which were sent, and compares what
    /// became of them, and what the operator sees, with what should. The first message that a trial
    /// sets aside has to be named in the log, with its reason, its id if it has one, and this
    /// place; the first that a source sets aside that is heard with this place. What stands in the
    /// dead letters, the test sees.
    ///
    /// # Panics
    /// If it is something else.
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
            ENDS.map(new)
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
        self.before = ENDS.map(|name| (name, self.counters.of(name))).into();
        let effects = self
            .effects
            .lock()
            .get(&number)
            .copied()
            .unwrap_or_default();
        assert_eq!(effects, row.effects, "{input}");
        self.hears(row, place).await;
    }

    async fn hears<M>(&mut self, row: &Row<M>, place: &str) {
        let wanted = |line: &String| match row.by {
            By::Gate => SAID.iter().any(|said| line.contains(said)),
            _ => line.contains(SOURCE_SAID),
        };
        if row.by == By::Source || row.reasons.is_empty() || self.said.iter().any(wanted) {
            return;
        }
        let end = Instant::now() + PATIENCE;
        let line = loop {
            self.said
                .extend(self.lines.take().into_iter().map(|(_, line)| line));
            if let Some(line) = self.said.iter().find(|line| wanted(line)) {
                break line;
            }
            assert!(
                Instant::now() < end,
                "{}: nobody said so: {:?}",
                row.input,
                self.said
            );
            tokio::time::sleep(LOOK).await;
        };
        assert!(line.contains(place), "{}: {line} names no place", row.input);
        if row.by != By::Gate {
            return;
        }
        let reason = row.reasons.first().copied().unwrap_or_default();
        assert!(
            line.contains(&format!("reason=\"{reason}\"")),
            "{}: {line} names no reason",
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
    /// If it did not end well.
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

/// Runs it on a thread of its own, on which its counters and its warnings are heard.
fn watched<F: Future<Output: Send + 'static>>(
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

/// What an operator sees of a message whose id meets something bad in the store.
#[derive(Debug)]
pub struct Sight {
    /// How the gate counted it.
    counted: Vec<&'static str>,
    /// The warnings and errors in the log.
    said: Vec<String>,
    /// Why the consumer ended, if not because the message was settled.
    ended: Option<String>,
    /// Whether the message is there for another consumer.
    waits: bool,
}

impl Sight {
    /// Hands a message with this id to a consumer with this scope and this store, and waits until
    /// it is settled or the consumer ends.
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
        // What waits for an answer that a person has to change first is waited for in a drain, too.
        let (consumer, drained) = (
            consumer
                .handler(Effects::default())
                .drain_timeout(Duration::from_millis(200)),
            broker.clone(),
        );
        let running = watched(&counters, &lines, move || async move {
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
            counted: ENDS
                .into_iter()
                .filter(|end| counters.of(end) > 0)
                .collect(),
            said: lines.take().into_iter().map(|(_, line)| line).collect(),
            ended: ended
                .expect("it is settled, or the consumer ends")
                .err()
                .map(|error| error.to_string()),
            waits: broker.unsettled() > 0,
        }
    }

    /// Whether this is what a table says in few words: how the message was counted, or that it is
    /// in doubt, or that the consumer does not start, or ends, and words of why. The log has said
    /// the same, unless the consumer did not start. Where it ends, the message is left to the next.
    pub fn is(&self, told: &str) -> bool {
        let Some((how, words)) = told.split_once(": ") else {
            return self.ended.is_none() && !self.waits && self.counted == [told.trim_matches('`')];
        };
        if how == "in doubt" {
            let unreadable = |line: &String| {
                line.contains("ERROR") && line.contains("unreadable marker") && line.contains(words)
            };
            return self.said.iter().any(unreadable)
                && self.ended.is_none()
                && self.counted == ["in_doubt"]
                && !self.waits;
        }
        let stopping = |line: &String| {
            line.contains("ERROR") && line.contains("stopping") && line.contains(words)
        };
        let said = match how {
            "the consumer ends" => self.said.iter().any(stopping),
            "the consumer does not start" => self.said.is_empty(),
            _ => false,
        };
        said && self.ended.as_ref().is_some_and(|why| why.contains(words))
            && self.counted.is_empty()
            && self.waits
    }
}

/// Counters by the values of their labels.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    /// What the gate has counted under this outcome.
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
