//! Random histories of one client, compared with [`marker::apply`], in which the test changes the
//! ages of markers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::marker::{
    self, Age, Change, Effect, Finding, Fingerprint, Guarantee, Marker, Operation, OperationKind,
    Terms, Verdict,
};
use oncegate_core::{Key, Store};

use super::random::{repeat_hint, seeds};
use crate::operations::{SECOND, key, operation};

const KEYS: [&str; 4] = ["a", "b", "scope|c", "h:d"];
/// The default number of histories in a run.
const HISTORIES: u64 = 40;
const STEPS: usize = 120;

/// The minimum difference between every tested age and a lease, so that the real time that a
/// history takes does not change a verdict.
const MARGIN: Duration = Duration::from_secs(8);

/// A store whose markers a test can make older, date into the future, or let expire.
#[async_trait]
pub trait AgingStore: Sync {
    /// Two handles to the store, like those of two processes.
    fn handles(&self) -> [&dyn Store; 2];

    /// The marker of a key.
    async fn read_marker(&self, key: &Key) -> Marker;

    /// Sets the time until the marker of a key expires. With zero it has expired.
    async fn set_time_left(&self, key: &Key, left: Duration);

    /// The time until the marker of a key expires; `None` if it has expired or is missing.
    async fn time_left(&self, key: &Key) -> Option<Duration>;
}

/// Checks with random histories that the store gives the verdicts of [`marker::apply`] for each
/// marker, also for old and expired ones and for those dated into the future. `make` makes a store
/// for each history. Panics at the first difference.
pub async fn agrees_with_marker_apply<S: AgingStore>(make: impl AsyncFn() -> S) {
    let mut seen = HashMap::new();
    for seed in seeds(HISTORIES) {
        check_history(&make().await, seed, &mut seen).await;
    }
    // The histories must reach every verdict.
    for verdict in [
        "Granted",
        "InDoubt",
        "Busy",
        "Duplicate",
        "Rejected",
        "Conflict",
        "Applied",
        "Done",
        "Lost",
    ] {
        assert!(
            seen.get(verdict).is_some_and(|times| *times > 10),
            "too few operations had the verdict {verdict}: {seen:?}"
        );
    }
}

async fn check_history(store: &dyn AgingStore, seed: u64, seen: &mut HashMap<String, u32>) {
    let mut random = Random(fastrand::Rng::with_seed(seed));
    let mut model: HashMap<Key, AgedMarker> = HashMap::new();
    for step in 0..STEPS {
        let key = key(random.pick(&KEYS));
        let entry = model.entry(key.clone()).or_default();
        if let Some(left) = entry.age_at_random(&mut random) {
            store.set_time_left(&key, left).await;
        }

        let batch: Vec<Operation> = (0..1 + random.below(5))
            .map(|_| random_operation(&mut random, &model))
            .collect();
        let answers = random.pick(&store.handles()).apply(&batch).await;
        assert_eq!(answers.len(), batch.len());
        for (operation, answer) in batch.iter().zip(answers) {
            let entry = model.entry(operation.key.clone()).or_default();
            let before = *entry;
            let (change, expected) = marker::apply(entry.marker, entry.age(), operation);
            entry.apply_change(change);
            let verdict = answer.unwrap_or_else(|error| {
                panic!(
                    "{} step {step}: {error}; {operation:?} on {before:?}",
                    repeat_hint(seed)
                )
            });
            assert!(
                is_same_verdict(verdict, expected),
                "{} step {step}: {verdict:?}, not {expected:?}: {operation:?} on {before:?}",
                repeat_hint(seed)
            );
            let debug_text = format!("{verdict:?}");
            *seen
                .entry(
                    debug_text
                        .split([' ', '{', '('])
                        .next()
                        .unwrap_or_default()
                        .to_owned(),
                )
                .or_default() += 1;
        }
        for (key, entry) in &model {
            let context = format!("{} step {step} after {batch:?}", repeat_hint(seed));
            assert_eq!(store.read_marker(key).await, entry.marker, "{context}");
            let left = store.time_left(key).await;
            assert!(
                is_nearly_equal(left, entry.left()),
                "{context}: {left:?} left, not {:?}",
                entry.left()
            );
        }
    }
}

/// The expected marker of one key.
#[derive(Clone, Copy, Debug)]
struct AgedMarker {
    marker: Marker,
    /// The time to live at the moment `since`.
    expiry: Duration,
    since: Instant,
}

impl Default for AgedMarker {
    fn default() -> Self {
        Self {
            marker: Marker::Absent,
            expiry: Duration::ZERO,
            since: Instant::now(),
        }
    }
}

impl AgedMarker {
    fn left(&self) -> Option<Duration> {
        (self.marker != Marker::Absent).then(|| self.expiry.saturating_sub(self.since.elapsed()))
    }

    fn age(&self) -> Age {
        let (Marker::InProgress(hold) | Marker::InDoubt(hold, _)) = self.marker else {
            return Age::Unknown;
        };
        hold.horizon
            .checked_sub(self.expiry)
            .map_or(Age::Unknown, |age| Age::Of(age + self.since.elapsed()))
    }

    fn apply_change(&mut self, change: Change) {
        match change {
            Change::Keep => {}
            Change::Write(marker, expiry) => {
                *self = Self {
                    marker,
                    expiry,
                    since: Instant::now(),
                }
            }
            Change::Delete => *self = Self::default(),
        }
    }

    /// With a probability of 0.7 makes the marker older, dates it into the future, or lets it
    /// expire. Returns its new time to live; `None` if the marker is unchanged.
    fn age_at_random(&mut self, random: &mut Random) -> Option<Duration> {
        let horizon = match self.marker {
            Marker::Absent => return None,
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.horizon,
            _ => self.expiry,
        };
        let expiry = match random.below(10) {
            0 => horizon + 60 * SECOND,
            1 => Duration::ZERO,
            2..=6 => horizon.saturating_sub(random.pick(&[
                MARGIN,
                2 * MARGIN,
                4 * MARGIN,
                8 * MARGIN,
                16 * MARGIN,
            ])),
            _ => return None,
        };
        if expiry.is_zero() {
            *self = Self::default(); // the store may delete an expired row later; it counts as absent
        } else {
            (self.expiry, self.since) = (expiry, Instant::now());
        }
        Some(expiry)
    }
}

/// A random operation, usually with the token and attempt of the current marker.
fn random_operation(random: &mut Random, model: &HashMap<Key, AgedMarker>) -> Operation {
    let id = random.pick(&KEYS);
    let marker = model
        .get(&key(id))
        .map_or(Marker::Absent, |entry| entry.marker);
    let terms = Terms {
        guarantee: random.pick(&[
            Guarantee::AtMostOnce,
            Guarantee::AtMostOnce,
            Guarantee::EffectivelyOnce,
            Guarantee::EffectivelyOnce,
        ]),
        // Each lease lies between two tested ages and differs from both by at least `MARGIN`.
        lease: random.pick(&[24 * SECOND, 48 * SECOND]),
        window: random.pick(&[300 * SECOND, 600 * SECOND]),
        fingerprint: random.pick(&[
            None,
            None,
            Some(Fingerprint::new(7)),
            Some(Fingerprint::new(Fingerprint::LIMIT - 1)),
        ]),
    };
    let terms = if random.below(10) == 0 {
        Terms {
            guarantee: Guarantee::Bare,
            ..terms
        }
    } else {
        terms
    };
    let kind = match random.below(17) {
        0..=4 => OperationKind::Claim,
        5 => OperationKind::Renew,
        6 => OperationKind::Complete,
        7 => OperationKind::Clear(random.pick(&[Effect::Nothing, Effect::Unknown])),
        8 => OperationKind::Reject(Effect::Nothing),
        9 => OperationKind::Reject(Effect::Unknown),
        10 | 11 => OperationKind::Doubt,
        12 => OperationKind::Resolve(random.pick(&[Finding::Happened, Finding::DidNotHappen])),
        13 | 14 => {
            let seen = if random.below(4) == 0 {
                Marker::Absent
            } else {
                marker
            };
            OperationKind::Redrive {
                seen,
                effect: random.pick(&[Effect::Nothing, Effect::Unknown]),
            }
        }
        15 => OperationKind::Withdraw,
        _ => OperationKind::Forget {
            seen: if random.below(3) == 0 {
                Marker::Done(None)
            } else {
                marker
            },
        },
    };
    let (holder, holder_attempt) = match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => (hold.token.0, hold.attempts.number),
        Marker::Cleared { attempts, .. } => (u128::MAX - random.below(4) as u128, attempts.number),
        _ => (u128::MAX - random.below(4) as u128, 1),
    };
    let token = if random.below(3) == 0 {
        u128::MAX - random.below(4) as u128
    } else {
        holder
    };
    let attempt = match random.below(16) {
        0 => u32::MAX,
        1 | 2 => holder_attempt.saturating_add(1),
        _ => holder_attempt,
    };
    operation(id, kind, token, attempt, terms)
}

/// Random choices of one history.
struct Random(fastrand::Rng);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0.usize(..bound)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

fn is_same_verdict(one: Verdict, other: Verdict) -> bool {
    match (one, other) {
        (Verdict::Busy { remaining: one }, Verdict::Busy { remaining: other }) => {
            one.abs_diff(other) < MARGIN / 2
        }
        _ => one == other,
    }
}

fn is_nearly_equal(one: Option<Duration>, other: Option<Duration>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.abs_diff(other) < MARGIN / 2,
        (one, other) => one == other,
    }
}
