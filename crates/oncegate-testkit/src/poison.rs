//! A message that always fails, or always panics, among many that do not: whether the others are
//! handled, and how much longer they take for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::{
    Consumer, Context, Failure, Handler, IdSource, MemoryStore, Open, async_trait,
};
use tokio::sync::oneshot;

/// The body of the poisoned one; all others are sound.
pub const POISON: u32 = 0;

/// What a poisoned message does to its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// It fails, and says that nothing happened.
    Fails,
    /// It panics, so that nobody knows.
    Panics,
}

/// How often the poisoned one is handed over before it is set aside, and how often each time its
/// handler runs if it fails.
const ATTEMPTS: u32 = 3;
const RUNS: u32 = 2;
/// How much longer the others may take beside a poisoned one.
const SLOWER: f64 = 1.10;
/// How long all of a round may take.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Clone)]
struct Counts {
    poison: Poison,
    handled: Arc<AtomicU32>,
    poisoned: Arc<AtomicU32>,
}

#[async_trait]
impl Handler for Counts {
    type Payload = u32;

    async fn handle(&self, number: u32, _: &Context) -> Result<(), Failure> {
        if number == POISON {
            self.poisoned.fetch_add(1, Ordering::SeqCst);
            match self.poison {
                Poison::Fails => return Err(Failure::Retry("always".into())),
                Poison::Panics => panic!("always"),
            }
        }
        self.handled.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Handles the messages `first..=sound` that lie in a source already, with nothing in its store.
/// How long it took from the first sound one to the last. `settled` comes back when the source's
/// broker shows all of them settled, and the consumer ends.
///
/// # Panics
/// If they are not handled within two minutes, one is handled twice, or the poisoned one runs more
/// or less often than it may.
pub async fn handle(
    source: impl Open + 'static,
    id: IdSource,
    (poison, first): (Poison, u32),
    sound: u32,
    settled: impl AsyncFnOnce(),
) -> Duration {
    let counts = Counts {
        poison,
        handled: Arc::default(),
        poisoned: Arc::default(),
    };
    let consumer = Consumer::builder()
        .source(source)
        .store(MemoryStore::new())
        .id(id)
        .max_attempts(ATTEMPTS)
        .max_inline_retries(RUNS - 1)
        .backoff(Duration::from_millis(20), Duration::from_millis(100))
        .handler(counts.clone());
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let until = Instant::now() + PATIENCE;
    let reaches = async |count| {
        while counts.handled.load(Ordering::SeqCst) < count {
            assert!(
                Instant::now() < until,
                "{} of {count}",
                counts.handled.load(Ordering::SeqCst)
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Instant::now()
    };
    let (first_handled, last_handled) = (reaches(1).await, reaches(sound).await);
    settled().await;
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(
        counts.handled.load(Ordering::SeqCst),
        sound,
        "one was handled twice"
    );
    let poisoned = match poison {
        _ if first != POISON => 0,
        Poison::Fails => ATTEMPTS * RUNS,
        Poison::Panics => ATTEMPTS,
    };
    assert_eq!(
        counts.poisoned.load(Ordering::SeqCst),
        poisoned,
        "the poisoned one ran more or less often than it may"
    );
    last_handled - first_handled
}

/// How long the sound messages took in each round, without a poisoned one before them and with one.
#[derive(Debug)]
pub struct Rounds {
    poison: Poison,
    without: Vec<Duration>,
    with: Vec<Duration>,
}

impl Rounds {
    /// Takes turns so often; `one` is given what to hand on to [`handle`], and says how long the
    /// sound ones took.
    pub async fn play(
        poison: Poison,
        rounds: usize,
        mut one: impl AsyncFnMut((Poison, u32)) -> Duration,
    ) -> Self {
        let mut played = Self {
            poison,
            without: Vec::new(),
            with: Vec::new(),
        };
        for round in 0..rounds {
            // Whichever comes second finds the broker warmer.
            let turns = if round % 2 == 0 {
                [POISON + 1, POISON]
            } else {
                [POISON, POISON + 1]
            };
            for first in turns {
                let took = one((poison, first)).await;
                if first == POISON {
                    &mut played.with
                } else {
                    &mut played.without
                }
                .push(took);
            }
        }
        played
    }

    /// Prints them, and judges them round by round: what else the machine does meets both halves of
    /// one.
    ///
    /// # Panics
    /// If the sound ones took more than a tenth longer beside a poisoned one, by the median of all
    /// rounds.
    pub fn judge(&self) {
        let mut ratios: Vec<f64> = self
            .with
            .iter()
            .zip(&self.without)
            .map(|(with, without)| with.as_secs_f64() / without.as_secs_f64())
            .collect();
        for (what, took) in [("without", &self.without), ("with", &self.with)] {
            let mut took: Vec<f64> = took
                .iter()
                .map(|took| took.as_secs_f64() * 1_000.0)
                .collect();
            let [least, median, most] = spread(&mut took);
            println!(
                "the others {what} one that {:?}: median {median:.0} ms, {least:.0} to {most:.0}, {} rounds",
                self.poison,
                took.len()
            );
        }
        let [least, median, most] = spread(&mut ratios);
        println!(
            "{:?}: with to without in each round: median {median:.3}, {least:.3} to {most:.3}; {SLOWER} is allowed",
            self.poison
        );
        assert!(median <= SLOWER, "{self:?}");
    }
}

/// The least, the median and the most.
fn spread(figures: &mut [f64]) -> [f64; 3] {
    figures.sort_by(f64::total_cmp);
    [0, figures.len() / 2, figures.len() - 1].map(|at| figures[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(with_ms: &[u64]) -> Rounds {
        Rounds {
            poison: Poison::Fails,
            without: vec![Duration::from_millis(100); with_ms.len()],
            with: with_ms
                .iter()
                .map(|ms| Duration::from_millis(*ms))
                .collect(),
        }
    }

    #[test]
    fn the_median_of_all_rounds_may_be_a_tenth_more() {
        rounds(&[300, 109, 90]).judge();
    }

    #[test]
    #[should_panic(expected = "Rounds")]
    fn and_no_more() {
        rounds(&[300, 112, 90]).judge();
    }
}
