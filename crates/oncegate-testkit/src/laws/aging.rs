//! Random histories of one client, with markers of every age.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::marker::{
    self, Age, Ask, Change, Effect, Finding, Fingerprint, Guarantee, Marker, Operation, Terms,
    Verdict,
};
use oncegate_core::{Key, Store};

use super::random::{repeat, seeds};
use crate::operations::{SECOND, key, operation};

const KEYS: [&str; 4] = ["a", "b", "scope|c", "h:d"];
/// The default number of histories in a run.
const HISTORIES: u64 = 40;
const STEPS: usize = 120;

/// The distance of every tested age from the end of a lease, so that real time has no influence.
const MARGIN: Duration = Duration::from_secs(8);

/// A store of which a test can make the markers older, move them to the future, or let them expire.
#[async_trait]
pub trait AgingStore: Sync {
    /// Two handles to the store, like those of two processes.
    fn handles(&self) -> [&dyn Store; 2];

    /// The marker of a key.
    async fn look(&self, key: &Key) -> Marker;

    /// Sets the time until the marker of a key expires. With zero it has expired.
    async fn set_time_left(&self, key: &Key, left: Duration);

    /// The time until the marker of a key expires; `None` if it has expired or is missing.
    async fn time_left(&self, key: &Key) -> Option<Duration>;
}

/// Random histories: the store applies [`marker::apply`] to each marker, also to old and to expired
/// ones and to those of the future. `make` makes a store for each history.
pub async fn agrees_with_marker_apply<S: AgingStore>(make: impl AsyncFn() -> S) {
    let mut seen = HashMap::new();
    for seed in seeds(HISTORIES) {
        history(&make().await, seed, &mut seen).await;
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
            "{verdict} hardly ever seen: {seen:?}"
        );
    }
}

async fn history(store: &dyn AgingStore, seed: u64, seen: &mut HashMap<String, u32>) {
    let mut random = Random(fastrand::Rng::with_seed(seed));
    let mut model: HashMap<Key, AgedMarker> = HashMap::new();
    for step in 0..STEPS {
        let key = key(random.pick(&KEYS));
        let entry = model.entry(key.clone()).or_default();
        if let Some(left) = entry.age_at_random(&mut random) {
            store.set_time_left(&key, left).await;
        }

        let batch: Vec<Operation> = (0..1 + random.below(5))
            .map(|_| choose(&mut random, &model))
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
                    repeat(seed)
                )
            });
            assert!(
                same(verdict, expected),
                "{} step {step}: {verdict:?}, not {expected:?}: {operation:?} on {before:?}",
                repeat(seed)
            );
            let word = format!("{verdict:?}");
            *seen
                .entry(
                    word.split([' ', '{', '('])
                        .next()
                        .unwrap_or_default()
                        .to_owned(),
                )
                .or_default() += 1;
        }
        for (key, entry) in &model {
            let context = format!("{} step {step} after {batch:?}", repeat(seed));
            assert_eq!(store.look(key).await, entry.marker, "{context}");
            let left = store.time_left(key).await;
            assert!(
                near(left, entry.left()),
                "{context}: {left:?} left, not {:?}",
                entry.left()
            );
        }
    }
}

/// The model of one row: its marker and its remaining expiry.
#[derive(Clone, Copy, Debug)]
struct AgedMarker {
    marker: Marker,
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

    /// Sometimes makes the marker older, moves it to the future, or lets it expire. Returns the time
    /// that is left then.
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
            *self = Self::default(); // the row stays until it is swept, and counts as absent
        } else {
            (self.expiry, self.since) = (expiry, Instant::now());
        }
        Some(expiry)
    }
}

/// An operation that probably matches the current marker.
fn choose(random: &mut Random, model: &HashMap<Key, AgedMarker>) -> Operation {
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
        // Between the tested ages, a margin away from each.
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
    let ask = match random.below(17) {
        0..=4 => Ask::Claim,
        5 => Ask::Renew,
        6 => Ask::Complete,
        7 => Ask::Clear(random.pick(&[Effect::Nothing, Effect::Unknown])),
        8 => Ask::Reject(Effect::Nothing),
        9 => Ask::Reject(Effect::Unknown),
        10 | 11 => Ask::Doubt,
        12 => Ask::Resolve(random.pick(&[Finding::Happened, Finding::DidNotHappen])),
        13 | 14 => {
            let seen = if random.below(4) == 0 {
                Marker::Absent
            } else {
                marker
            };
            Ask::Redrive {
                seen,
                effect: random.pick(&[Effect::Nothing, Effect::Unknown]),
            }
        }
        15 => Ask::Withdraw,
        _ => Ask::Forget {
            seen: if random.below(3) == 0 {
                Marker::Done(None)
            } else {
                marker
            },
        },
    };
    let (holder, at) = match marker {
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
        1 | 2 => at.saturating_add(1),
        _ => at,
    };
    operation(id, ask, token, attempt, terms)
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

fn same(one: Verdict, other: Verdict) -> bool {
    match (one, other) {
        (Verdict::Busy { remaining: one }, Verdict::Busy { remaining: other }) => {
            one.abs_diff(other) < MARGIN / 2
        }
        _ => one == other,
    }
}

fn near(one: Option<Duration>, other: Option<Duration>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.abs_diff(other) < MARGIN / 2,
        (one, other) => one == other,
    }
}
