//! One message that always fails or panics, among many that succeed: whether the others are
//! handled, and how much it delays them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::{Connect, Consumer, Context, Failure, Handler, IdSource, MemoryStore};
use tokio::sync::oneshot;

/// The body of the poison message; all others succeed.
pub const POISON: u32 = 0;

/// What the poison message does to its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    /// It fails, and nothing happened.
    Fails,
    /// It panics, so its outcome is unknown.
    Panics,
}

/// The number of attempts of the poison message.
const ATTEMPTS: u32 = 3;
/// The number of runs in each attempt of a poison message that fails.
const RUNS: u32 = 2;
/// The maximum time of the other messages in a run with a poison message, relative to their time
/// in a run without it.
const MAX_SLOWDOWN: f64 = 1.10;
/// The time limit of one call of [`handle`].
const ROUND_TIMEOUT: Duration = Duration::from_secs(120);

/// Fails or panics with the poison message and handles all others.
#[derive(Clone)]
struct PoisonHandler {
    poison: Poison,
    /// The number of runs that succeeded.
    handled: Arc<AtomicU32>,
    /// The number of runs of the poison message.
    poisoned: Arc<AtomicU32>,
}

impl Handler for PoisonHandler {
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

/// Handles the messages `first..=last` of a source with an empty store, and returns the time from
/// the first successful message to the last. `first` is [`POISON`], or `POISON + 1` for a run
/// without the poison message. `settled` must return when the broker shows all messages as settled;
/// then the consumer ends.
///
/// # Panics
/// If handling takes more than two minutes, a message is handled twice, or the poison message has
/// more or fewer runs than expected.
pub async fn handle(
    source: impl Connect + 'static,
    id: IdSource,
    (poison, first): (Poison, u32),
    last: u32,
    settled: impl AsyncFnOnce(),
) -> Duration {
    let counts = PoisonHandler {
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
    let until = Instant::now() + ROUND_TIMEOUT;
    let reaches = async |count| {
        while counts.handled.load(Ordering::SeqCst) < count {
            assert!(
                Instant::now() < until,
                "{} of {count} messages handled within {ROUND_TIMEOUT:?}",
                counts.handled.load(Ordering::SeqCst)
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Instant::now()
    };
    let (first_handled, last_handled) = (reaches(1).await, reaches(last).await);
    settled().await;
    stop.send(()).expect("the consumer is still running");
    running
        .await
        .expect("the consumer does not panic")
        .expect("the consumer ends without an error");
    assert_eq!(
        counts.handled.load(Ordering::SeqCst),
        last,
        "a message was handled twice"
    );
    let poisoned = match poison {
        _ if first != POISON => 0,
        Poison::Fails => ATTEMPTS * RUNS,
        Poison::Panics => ATTEMPTS,
    };
    assert_eq!(
        counts.poisoned.load(Ordering::SeqCst),
        poisoned,
        "the number of runs of the poison message"
    );
    last_handled - first_handled
}

/// The times of the other messages in each round, without a poison message and with one.
#[derive(Debug)]
pub struct Rounds {
    poison: Poison,
    without: Vec<Duration>,
    with: Vec<Duration>,
}

impl Rounds {
    /// Runs this many rounds, each without a poison message and with one. `run` must pass its
    /// argument to [`handle`] and return the result.
    pub async fn measure(
        poison: Poison,
        rounds: usize,
        mut run: impl AsyncFnMut((Poison, u32)) -> Duration,
    ) -> Self {
        let mut results = Self {
            poison,
            without: Vec::new(),
            with: Vec::new(),
        };
        for round in 0..rounds {
            // The order alternates, because the broker's caches are warm in the second run.
            let order = if round % 2 == 0 {
                [POISON + 1, POISON]
            } else {
                [POISON, POISON + 1]
            };
            for first in order {
                let took = run((poison, first)).await;
                if first == POISON {
                    &mut results.with
                } else {
                    &mut results.without
                }
                .push(took);
            }
        }
        results
    }

    /// Prints the times and compares the two runs of each round, since other load on the machine
    /// affects both.
    ///
    /// # Panics
    /// If the other messages took more than a tenth longer with a poison message than without it,
    /// by the median of all rounds.
    pub fn assert_slowdown_limit(&self) {
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
            let [min, median, max] = spread(&mut took);
            println!(
                "the other messages, {what} a poison message that {:?}: median {median:.0} ms, {min:.0} to {max:.0}, {} rounds",
                self.poison,
                took.len()
            );
        }
        let [min, median, max] = spread(&mut ratios);
        println!(
            "{:?}: with to without in each round: median {median:.3}, {min:.3} to {max:.3}; the limit is {MAX_SLOWDOWN}",
            self.poison
        );
        assert!(median <= MAX_SLOWDOWN, "{self:?}");
    }
}

/// Minimum, median and maximum.
fn spread(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [0, values.len() / 2, values.len() - 1].map(|index| values[index])
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
        rounds(&[300, 109, 90]).assert_slowdown_limit();
    }

    #[test]
    #[should_panic(expected = "Rounds")]
    fn a_larger_slowdown_fails() {
        rounds(&[300, 112, 90]).assert_slowdown_limit();
    }
}
