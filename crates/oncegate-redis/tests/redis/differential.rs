//! Random histories: the server does to each key what `marker::apply` says, row by row.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use oncegate_core::marker::{
    self, Age, Ask, Change, Doubt, Effect, Finding, Fingerprint, Guarantee, Marker, Operation, Terms, Token, Verdict,
};
use oncegate_core::{Key, Store};
use redis::aio::MultiplexedConnection;

use crate::support::{SECOND, client, key, operation, store};

const KEYS: [&str; 4] = ["a", "b", "c", "d"];
const HISTORIES: u64 = 40;
const STEPS: usize = 120;

/// Leases end this far from every age that is tried, so that real time decides nothing.
const MARGIN: Duration = Duration::from_secs(4);

#[tokio::test(flavor = "multi_thread")]
async fn redis_does_to_a_marker_what_the_table_says() {
    let first = Token::random().0 as u64;
    let mut seen = HashMap::new();
    for seed in (0..HISTORIES).map(|it| first.wrapping_add(it)) {
        history(seed, &mut seen).await;
    }
    // The histories have to reach every verdict, or they prove little.
    for verdict in ["Granted", "InDoubt", "Busy", "Duplicate", "Rejected", "Conflict", "Kept", "Done", "Lost"] {
        assert!(seen.get(verdict).is_some_and(|times| *times > 10), "{verdict} hardly ever seen: {seen:?}");
    }
}

async fn history(seed: u64, seen: &mut HashMap<String, u32>) {
    let (store, prefix) = store();
    let mut raw = client().await;
    let mut random = Random(seed);
    let mut model: HashMap<Key, Entry> = HashMap::new();
    for step in 0..STEPS {
        let key = key(random.pick(&KEYS));
        let name = format!("{prefix}{}", key.as_str());
        tamper(&mut random, &mut raw, &name, model.entry(key).or_default()).await;

        let batch: Vec<Operation> = (0..1 + random.below(5)).map(|_| choose(&mut random, &model)).collect();
        let answers = store.apply(&batch).await;
        assert_eq!(answers.len(), batch.len());
        for (operation, answer) in batch.iter().zip(answers) {
            let entry = model.entry(operation.key.clone()).or_default();
            let before = *entry;
            let (change, expected) = marker::apply(entry.marker, entry.age(), operation);
            entry.become_what(change);
            let verdict = answer.unwrap_or_else(|error| panic!("seed {seed} step {step}: {error}; {operation:?} on {before:?}"));
            assert!(same(verdict, expected), "seed {seed} step {step}: {verdict:?}, not {expected:?}: {operation:?} on {before:?}");
            let word = format!("{verdict:?}");
            *seen.entry(word.split([' ', '{']).next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        for (key, entry) in &model {
            let context = format!("seed {seed} step {step} after {batch:?}");
            assert_eq!(store.look(key).await.expect("a marker"), entry.marker, "{context}");
            let left: i64 = redis::cmd("PTTL").arg(format!("{prefix}{}", key.as_str())).query_async(&mut raw).await.expect("an answer");
            let expected = entry.left();
            assert!(near(left, expected), "{context}: {left} ms left, not {expected}");
        }
    }
    for id in KEYS {
        let _: i64 = redis::cmd("DEL").arg(format!("{prefix}{id}")).query_async(&mut raw).await.expect("an answer");
    }
}

/// The model of one key: its marker, and what is left of its expiry.
#[derive(Clone, Copy, Debug)]
struct Entry {
    marker: Marker,
    /// `None` if it never expires.
    expiry: Option<Duration>,
    since: Instant,
}

impl Default for Entry {
    fn default() -> Self {
        Self { marker: Marker::Absent, expiry: None, since: Instant::now() }
    }
}

impl Entry {
    /// What `PTTL` says.
    fn left(&self) -> i64 {
        match (self.marker, self.expiry) {
            (Marker::Absent, _) => -2,
            (_, None) => -1,
            (_, Some(expiry)) => expiry.saturating_sub(self.since.elapsed()).as_millis() as i64,
        }
    }

    fn age(&self) -> Age {
        let (Marker::InProgress(hold) | Marker::InDoubt(hold, _)) = self.marker else { return Age::Unknown };
        let Some(expiry) = self.expiry else { return Age::Unknown };
        hold.horizon.checked_sub(expiry).map_or(Age::Unknown, |age| Age::Of(age + self.since.elapsed()))
    }

    fn become_what(&mut self, change: Change) {
        match change {
            Change::Keep => {}
            Change::Write(marker, expiry) => *self = Self { marker, expiry: Some(expiry), since: Instant::now() },
            Change::Delete => *self = Self::default(),
        }
    }
}

/// Sometimes makes a marker older, takes or lengthens its expiry, or lets it expire.
async fn tamper(random: &mut Random, raw: &mut MultiplexedConnection, name: &str, entry: &mut Entry) {
    if entry.marker == Marker::Absent {
        return;
    }
    let horizon = match entry.marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.horizon,
        _ => entry.expiry.unwrap_or(600 * SECOND),
    };
    let expiry = match random.below(10) {
        0 => None,
        1 => Some(horizon + 60 * SECOND),
        2 => {
            let _: i64 = redis::cmd("DEL").arg(name).query_async(raw).await.expect("an answer");
            *entry = Entry::default();
            return;
        }
        3..=6 => horizon.checked_sub(random.pick(&[MARGIN, 2 * MARGIN, 4 * MARGIN, 8 * MARGIN, 16 * MARGIN])),
        _ => return,
    };
    let mut command = match expiry {
        None => redis::cmd("PERSIST"),
        Some(_) => redis::cmd("PEXPIRE"),
    };
    command.arg(name);
    if let Some(expiry) = expiry {
        command.arg(expiry.as_millis() as u64);
    }
    let _: i64 = command.query_async(raw).await.expect("an answer");
    (entry.expiry, entry.since) = (expiry, Instant::now());
}

/// An operation that has a good chance to be about the marker as it is.
fn choose(random: &mut Random, model: &HashMap<Key, Entry>) -> Operation {
    let id = random.pick(&KEYS);
    let marker = model.get(&key(id)).map_or(Marker::Absent, |entry| entry.marker);
    let terms = Terms {
        guarantee: random.pick(&[
            Guarantee::AtMostOnce,
            Guarantee::AtMostOnce,
            Guarantee::AtMostOnce,
            Guarantee::EffectivelyOnce,
            Guarantee::EffectivelyOnce,
            Guarantee::EffectivelyOnce,
            Guarantee::Bare,
        ]),
        // Between the ages that are tried, a margin away from each.
        lease: random.pick(&[12 * SECOND, 24 * SECOND]),
        window: random.pick(&[300 * SECOND, 600 * SECOND]),
        fingerprint: random.pick(&[None, None, Some(Fingerprint::new(7)), Some(Fingerprint::new(Fingerprint::LIMIT - 1))]),
    };
    let ask = match random.below(14) {
        0..=4 => Ask::Claim,
        5 => Ask::Renew,
        6 => Ask::Complete,
        7 => Ask::Clear(random.pick(&[Effect::Nothing, Effect::Unknown])),
        8 => Ask::Reject(Effect::Nothing),
        9 => Ask::Reject(Effect::Unknown),
        10 | 11 => Ask::Doubt,
        12 => Ask::Resolve(random.pick(&[Finding::Happened, Finding::DidNotHappen])),
        _ => Ask::Forget { seen: if random.below(3) == 0 { Marker::Done(None) } else { marker } },
    };
    let (holder, at) = match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, Doubt::Waiting | Doubt::Reconciling) => (hold.token.0, hold.attempt),
        Marker::Cleared { attempt } => (random.below(4) as u128, attempt),
        _ => (random.below(4) as u128, 1),
    };
    let token = if random.below(3) == 0 { random.below(4) as u128 } else { holder };
    let attempt = match random.below(16) {
        0 => u32::MAX,
        1 | 2 => at.saturating_add(1),
        _ => at,
    };
    operation(id, ask, token, attempt, terms)
}

fn same(one: Verdict, other: Verdict) -> bool {
    match (one, other) {
        (Verdict::Busy { remaining: one }, Verdict::Busy { remaining: other }) => one.abs_diff(other) < MARGIN / 2,
        _ => one == other,
    }
}

fn near(left: i64, expected: i64) -> bool {
    if left < 0 || expected < 0 { left == expected } else { left.abs_diff(expected) < (MARGIN / 2).as_millis() as u64 }
}

/// A small generator (SplitMix64), so that a seed alone repeats a history.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % bound as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
