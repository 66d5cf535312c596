//! A store in this process: [`marker::apply`](crate::marker::apply) on a map.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::done::Log;
use crate::id::Key;
use crate::marker::{Age, Change, Marker, Operation, Verdict, apply};
use crate::store::{Persistence, Store, StoreError};

/// Remembers ids in this process, for as long as it lives. Cloning shares what is remembered.
///
/// One lock a batch; what is in progress stands in a small table, what is done in a compact one:
/// some 120 bytes an id of up to 40.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<Tables>>);

/// Each operation hashes its key once, for both tables.
#[derive(Debug, Default)]
struct Tables {
    hasher: DefaultHashBuilder,
    open: HashTable<(Key, Open)>,
    done: Log,
    /// When so many are open, those that have expired are looked for.
    crowded: usize,
}

/// No clock reaches further, and nobody waits longer.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// As many open markers as are not worth a look.
const FEW: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Open {
    marker: Marker,
    written: Instant,
    expires: Instant,
}

/// What stands under a key, and in which table, though it may have expired.
#[derive(Clone, Copy)]
enum Stands {
    Open,
    Done,
    Nowhere,
}

impl MemoryStore {
    /// A store that remembers nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The marker of a key, and how long ago it was written where that matters.
    pub fn marker(&self, key: &Key) -> (Marker, Duration) {
        let tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (marker, age, _) = tables.read(tables.hasher.hash_one(key), key, Instant::now());
        (marker, age)
    }

    /// How many ids are remembered.
    pub fn len(&self) -> usize {
        let tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tables.open.len() + tables.done.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let now = Instant::now();
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tables.expire(now);
        let hashes: Vec<u64> = operations
            .iter()
            .map(|operation| tables.hasher.hash_one(&operation.key))
            .collect();
        tables.done.look_up_together(&hashes);
        operations
            .iter()
            .zip(hashes)
            .map(|(operation, hash)| Ok(tables.apply(operation, hash, now)))
            .collect()
    }

    fn described(&self) -> String {
        "the memory of this process".to_owned()
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(Persistence::Volatile(
            "the memory store forgets everything when its process ends".into(),
        ))
    }
}

impl Tables {
    fn apply(&mut self, operation: &Operation, hash: u64, now: Instant) -> Verdict {
        let (marker, age, stands) = self.read(hash, &operation.key, now);
        let (change, verdict) = apply(marker, Age::Of(age), operation);
        let write = match change {
            Change::Keep => return verdict,
            Change::Delete => None,
            Change::Write(marker, horizon) => Some((marker, now + horizon.min(CENTURY))),
        };
        match stands {
            Stands::Open => drop(
                self.open
                    .find_entry(hash, |(it, _)| *it == operation.key)
                    .map(|entry| entry.remove()),
            ),
            Stands::Done => self.done.forget(hash, &operation.key),
            Stands::Nowhere => {}
        }
        match write {
            Some((Marker::Done(fingerprint), expires)) => {
                self.done
                    .write(hash, operation.key.clone(), fingerprint, expires)
            }
            Some((marker, expires)) => {
                let open = Open {
                    marker,
                    written: now,
                    expires,
                };
                let hasher = &self.hasher;
                self.open
                    .insert_unique(hash, (operation.key.clone(), open), |(key, _)| {
                        hasher.hash_one(key)
                    });
            }
            None => {}
        }
        verdict
    }

    fn read(&self, hash: u64, key: &Key, now: Instant) -> (Marker, Duration, Stands) {
        match self.open.find(hash, |(it, _)| it == key) {
            Some((_, open)) if now < open.expires => {
                return (
                    open.marker,
                    now.saturating_duration_since(open.written),
                    Stands::Open,
                );
            }
            Some(_) => return (Marker::Absent, Duration::ZERO, Stands::Open),
            None => {}
        }
        match self.done.find(hash, key) {
            Some(done) if now < done.expires => {
                (Marker::Done(done.fingerprint), Duration::ZERO, Stands::Done)
            }
            Some(_) => (Marker::Absent, Duration::ZERO, Stands::Done),
            None => (Marker::Absent, Duration::ZERO, Stands::Nowhere),
        }
    }

    /// Forgets what has expired. What is open is few, and is looked through when it has doubled
    /// since the last time.
    fn expire(&mut self, now: Instant) {
        self.done.expire(&self.hasher, now);
        if self.open.len() >= self.crowded.max(FEW) {
            self.open.retain(|(_, open)| now < open.expires);
            self.crowded = self.open.len() * 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MessageId;
    use crate::marker::{Ask, Effect, Guarantee, Terms, Token};

    #[tokio::test]
    async fn what_stays_open_is_forgotten_after_its_window() {
        let store = MemoryStore::new();
        let terms = Terms {
            guarantee: Guarantee::EffectivelyOnce,
            lease: Duration::from_millis(1),
            window: Duration::from_millis(2),
            fingerprint: None,
        };
        for id in 0..10 * FEW {
            let key = Key::new(&MessageId::new(id.to_string()).expect("an id"));
            let claim = Operation {
                key,
                ask: Ask::Claim,
                token: Token(1),
                attempt: 0,
                terms,
            };
            let failed = Operation {
                ask: Ask::Clear(Effect::Unknown),
                attempt: 1,
                ..claim.clone()
            };
            store.apply(&[claim, failed]).await;
            if id % FEW == 0 {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
        assert!(
            store.len() <= 3 * FEW,
            "{} of {} expired markers are kept",
            store.len(),
            10 * FEW
        );
    }
}
