//! Random histories: the store applies `marker::apply` to each row, also to old rows, to rows from
//! the future and to expired rows.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use oncegate_core::marker::{
    self, Age, Ask, Change, Effect, Finding, Fingerprint, Guarantee, Marker, Operation, Terms,
    Token, Verdict,
};
use oncegate_core::{Key, Store};
use rusqlite::{Connection, OptionalExtension};

use crate::support::{Directory, Random, SECOND, key, operation};

const KEYS: [&str; 4] = ["a", "b", "scope|c", "h:d"];
const HISTORIES: u64 = 40;
const STEPS: usize = 120;

/// The distance of every tested age from the end of a lease, so that real time has no influence.
const MARGIN: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_agrees_with_marker_apply() {
    let first = Token::random().0 as u64;
    let mut seen = HashMap::new();
    for seed in (0..HISTORIES).map(|it| first.wrapping_add(it)) {
        history(seed, &mut seen).await;
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

async fn history(seed: u64, seen: &mut HashMap<String, u32>) {
    let directory = Directory::new();
    let (store, other) = (directory.store(), directory.store());
    store.look(&key("a")).await.expect("nothing yet");
    let raw = directory.raw();
    let mut random = Random(seed);
    let mut model: HashMap<Key, Entry> = HashMap::new();
    for step in 0..STEPS {
        let key = key(random.pick(&KEYS));
        tamper(
            &mut random,
            &raw,
            &key,
            model.entry(key.clone()).or_default(),
        );

        let batch: Vec<Operation> = (0..1 + random.below(5))
            .map(|_| choose(&mut random, &model))
            .collect();
        let answers = random.pick(&[&store, &other]).apply(&batch).await;
        assert_eq!(answers.len(), batch.len());
        for (operation, answer) in batch.iter().zip(answers) {
            let entry = model.entry(operation.key.clone()).or_default();
            let before = *entry;
            let (change, expected) = marker::apply(entry.marker, entry.age(), operation);
            entry.apply_change(change);
            let verdict = answer.unwrap_or_else(|error| {
                panic!("seed {seed} step {step}: {error}; {operation:?} on {before:?}")
            });
            assert!(
                same(verdict, expected),
                "seed {seed} step {step}: {verdict:?}, not {expected:?}: {operation:?} on {before:?}"
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
            let context = format!("seed {seed} step {step} after {batch:?}");
            assert_eq!(
                store.look(key).await.expect("a marker"),
                entry.marker,
                "{context}"
            );
            let left = left(&raw, key);
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
struct Entry {
    marker: Marker,
    expiry: Duration,
    since: Instant,
}

impl Default for Entry {
    fn default() -> Self {
        Self {
            marker: Marker::Absent,
            expiry: Duration::ZERO,
            since: Instant::now(),
        }
    }
}

impl Entry {
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
}

/// Sometimes makes a marker older, moves it to the future, or lets it expire.
fn tamper(random: &mut Random, raw: &Connection, key: &Key, entry: &mut Entry) {
    let horizon = match entry.marker {
        Marker::Absent => return,
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.horizon,
        _ => entry.expiry,
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
        _ => return,
    };
    let expires = now() + i64::try_from(expiry.as_millis()).expect("years");
    raw.execute(
        "UPDATE merged_markers SET expires = ?2 WHERE key = ?1",
        (key.as_str(), expires),
    )
    .expect("it is there");
    if expiry.is_zero() {
        *entry = Entry::default(); // the row stays until it is swept, and counts as absent
    } else {
        (entry.expiry, entry.since) = (expiry, Instant::now());
    }
}

/// An operation that probably matches the current marker.
fn choose(random: &mut Random, model: &HashMap<Key, Entry>) -> Operation {
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

/// The remaining expiry of a row; `None` if it has expired or is missing.
fn left(raw: &Connection, key: &Key) -> Option<Duration> {
    let expires = raw.query_row(
        "SELECT expires FROM markers WHERE key = ?1",
        [key.as_str()],
        |row| row.get::<_, i64>(0),
    );
    let left = expires.optional().expect("a number")? - now();
    u64::try_from(left)
        .ok()
        .filter(|left| *left > 0)
        .map(Duration::from_millis)
}

fn now() -> i64 {
    let since = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .expect("after 1970");
    i64::try_from(since.as_millis()).expect("not so late")
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
