//! Bad input as a table: what comes in from a real broker, what becomes of it, and what the book says of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::{Consumer, Context, Error, Failure, Handler, IdSource, MemoryStore, Open, async_trait};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// How long the effects may take to come, and how often it is looked for them.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

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
}

impl<M> Row<M> {
    /// A row.
    pub fn new(input: &'static str, effects: usize, reasons: &'static [&'static str], messages: Vec<M>) -> Self {
        Self { input, effects, reasons, messages }
    }

    fn line(&self) -> String {
        let verdict = match (self.effects, self.reasons) {
            (1, []) => "handled once".to_owned(),
            (0, [reason]) => format!("dead letters, `{reason}`"),
            (count, _) => format!("handled {count} times"),
        };
        format!("| {} | {verdict} |", self.input)
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
/// `panic` with what is no text.
pub struct Trial {
    effects: Effects,
    set_aside: BTreeMap<usize, Vec<String>>,
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
    pub fn begin(source: impl Open + 'static) -> Self {
        let (effects, (stop, stopped)) = (Effects::default(), oneshot::channel());
        let consumer =
            Consumer::builder().source(source).store(MemoryStore::new()).id(IdSource::header("id")).attempts(1).handler(effects.clone());
        let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
        Self { effects, set_aside: BTreeMap::new(), stop, running }
    }

    /// Notes that a message of this row was found in the dead letters, with this reason.
    pub fn set_aside(&mut self, row: &str, reason: String) {
        self.set_aside.entry(row.parse().expect("a number")).or_default().push(reason);
    }

    /// Waits for the effects, ends the consumer, and compares what became of each row with what should.
    ///
    /// # Panics
    /// If it is something else, or the consumer did not end well.
    pub async fn end<M>(mut self, rows: &[Row<M>]) {
        let (expected, end) = (rows.iter().map(|row| row.effects).sum::<usize>(), Instant::now() + PATIENCE);
        while self.effects.lock().values().sum::<usize>() < expected && Instant::now() < end {
            tokio::time::sleep(LOOK).await;
        }
        self.stop.send(()).expect("the consumer runs");
        self.running.await.expect("no panic").expect("a clean end");
        let effects = self.effects.lock().clone();
        for (number, Row { input, effects: expected, reasons, .. }) in rows.iter().enumerate() {
            let seen = (effects.get(&number).copied().unwrap_or_default(), self.set_aside.remove(&number).unwrap_or_default());
            assert_eq!(seen, (*expected, reasons.iter().map(|reason| (*reason).to_owned()).collect()), "{input}");
        }
    }
}
