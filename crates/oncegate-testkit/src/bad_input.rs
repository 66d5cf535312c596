//! Bad input as a table: what comes in from a real broker, what becomes of it, what the operator sees, and what the book says of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use oncegate_core::{Consumer, Context, Error, Failure, Handler, IdSource, MemoryStore, Open, async_trait};
use tokio::sync::oneshot;

use crate::Lines;

/// How long it may take until a message is settled, and how often it is looked.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);
/// How each message ends that the gate settles, as `oncegate_deliveries_total` has it.
const ENDS: [&str; 4] = ["completed", "duplicate", "rejected", "in_doubt"];
/// What the gate says of a message that it sets aside. Of many it says so of one in ten seconds.
const SAID: &str = "a message is set aside for a person";
/// What a source says of one that it sets aside.
const SOURCE_SAID: &str = "a body is over the limit";

/// A line of the table. A message says by its body which row it is of, unless the body is what is bad.
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
    /// The source, which never hands it over, on a thread of its own, where nobody here hears what it says.
    Source,
    /// The source, where the consumer runs, so that what it says is heard.
    SourceHere,
}

impl<M> Row<M> {
    /// A row.
    pub fn new(input: &'static str, effects: usize, reasons: &'static [&'static str], messages: Vec<M>) -> Self {
        Self { input, effects, reasons, messages, by: By::Gate }
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
        let counts = [("completed", self.effects), ("duplicate", handed_over - self.effects - rejected), ("rejected", rejected)];
        counts.into_iter().filter(|(_, count)| *count > 0).map(|(name, count)| (name, count as u64)).collect()
    }

    fn line(&self) -> String {
        let verdict = match (self.effects, self.reasons) {
            (1, []) => "handled once".to_owned(),
            (0, [reason]) => format!("dead letters, `{reason}`"),
            (count, _) => format!("handled {count} times"),
        };
        let times = |(name, count): (&str, u64)| if count == 1 { format!("`{name}`") } else { format!("`{name}` × {count}") };
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
    let told: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert_eq!(told, rows.iter().map(Row::line).collect::<Vec<_>>());
}

/// A consumer to which bad input is sent. It has one attempt, takes the id from the header `id`, and its handler panics at the id
/// `panic` with what is no text. It has a thread of its own, so that what it counts and logs is known apart from what others do.
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

/// How many effects each row had.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<BTreeMap<usize, usize>>>);

impl Effects {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Handler for Effects {
    type Payload = usize;

    async fn handle(&self, row: usize, cx: &Context) -> Result<(), Failure> {
        if cx.id() == "panic" {
            std::panic::panic_any(row);
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
        let (effects, counters, lines) = (Effects::default(), Counters::default(), Lines::default());
        let (stop, stopped) = oneshot::channel();
        let consumer =
            Consumer::builder().source(source).store(MemoryStore::new()).id(IdSource::header("id")).attempts(1).handler(effects.clone());
        let (recorder, writer) = (counters.clone(), lines.clone());
        let running = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let log = tracing_subscriber::fmt().with_ansi(false).with_max_level(tracing::Level::WARN);
            let log = log.with_writer(move || writer.clone()).finish();
            let consume = || runtime.block_on(consumer.run_until(async { drop(stopped.await) }));
            tracing::subscriber::with_default(log, || metrics::with_local_recorder(&recorder, consume))
        });
        Self { effects, counters, lines, said: Vec::new(), before: BTreeMap::new(), stop, running }
    }

    /// Waits until the gate has counted the messages of a row, which were sent, and compares what became of them, and what the operator
    /// sees, with what should. The first message that a trial sets aside has to be named in the log, with its reason, its id if it has
    /// one, and this place; the first that a source sets aside that is heard with this place. What stands in the dead letters, the test sees.
    ///
    /// # Panics
    /// If it is something else.
    pub async fn sees<M>(&mut self, number: usize, row: &Row<M>, place: &str) {
        let (input, counted) = (row.input, row.counted());
        let (expected, end) = (counted.values().sum::<u64>(), Instant::now() + PATIENCE);
        let since = |before: &BTreeMap<&str, u64>| -> BTreeMap<&'static str, u64> {
            let new = |name| (name, self.counters.of(name) - before.get(name).copied().unwrap_or_default());
            ENDS.map(new).into_iter().filter(|(_, count)| *count > 0).collect()
        };
        while since(&self.before).values().sum::<u64>() < expected {
            assert!(Instant::now() < end, "{input}: {:?} instead of {counted:?}", since(&self.before));
            tokio::time::sleep(LOOK).await;
        }
        assert_eq!(since(&self.before), counted, "{input}");
        self.before = ENDS.map(|name| (name, self.counters.of(name))).into();
        let effects = self.effects.lock().get(&number).copied().unwrap_or_default();
        assert_eq!(effects, row.effects, "{input}");
        self.hears(row, place).await;
    }

    async fn hears<M>(&mut self, row: &Row<M>, place: &str) {
        let wanted = if row.by == By::Gate { SAID } else { SOURCE_SAID };
        if row.by == By::Source || row.reasons.is_empty() || self.said.iter().any(|line| line.contains(wanted)) {
            return;
        }
        let end = Instant::now() + PATIENCE;
        let line = loop {
            self.said.extend(self.lines.take().into_iter().map(|(_, line)| line));
            if let Some(line) = self.said.iter().find(|line| line.contains(wanted)) {
                break line;
            }
            assert!(Instant::now() < end, "{}: nobody said so: {:?}", row.input, self.said);
            tokio::time::sleep(LOOK).await;
        };
        assert!(line.contains(place), "{}: {line} names no place", row.input);
        if row.by != By::Gate {
            return;
        }
        let reason = row.reasons.first().copied().unwrap_or_default();
        assert!(line.contains(&format!("reason=\"{reason}\"")), "{}: {line} names no reason", row.input);
        assert_eq!(line.contains(" id="), reason != "missing-id", "{}: {line}", row.input);
    }

    /// Ends the consumer.
    ///
    /// # Panics
    /// If it did not end well.
    pub async fn end(self) {
        self.stop.send(()).expect("the consumer runs");
        let ended = tokio::task::spawn_blocking(|| self.running.join()).await.expect("no panic");
        ended.expect("no panic").expect("a clean end");
    }
}

/// Counters by the values of their labels.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    /// What the gate has counted under this outcome.
    fn of(&self, outcome: &str) -> u64 {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&format!("oncegate_deliveries_total {outcome}")).map_or(0, |count| count.load(Ordering::SeqCst))
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let name = key.labels().fold(key.name().to_owned(), |name, label| format!("{name} {}", label.value()));
        Counter::from_arc(Arc::clone(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
