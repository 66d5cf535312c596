//! A store in this process: [`marker::apply`](crate::marker::apply) on a map.

use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::done_log::DoneLog;
use crate::id::Key;
use crate::marker::{Age, Change, Marker, Operation, Verdict, apply};
use crate::store::{Persistence, Store, StoreError};

/// Remembers ids in the memory of this process. Clones share the ids.
///
/// One lock for each batch; markers in progress are in a small table, done ones in a compact log:
/// about 120 bytes for an id of up to 40.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<MarkerTables>>);

/// Both tables use the same hash of a key.
#[derive(Debug, Default)]
struct MarkerTables {
    hasher: DefaultHashBuilder,
    open: HashTable<(Key, OpenMarker)>,
    done: DoneLog,
    /// The number of open markers at which expired ones are removed.
    sweep_at: usize,
}

/// The longest expiry, so that no clock overflows.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Below this number of open markers, expired ones are kept.
const MIN_SWEEP: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct OpenMarker {
    marker: Marker,
    written: Instant,
    expires: Instant,
}

/// Which table has a key, expired or not.
#[derive(Clone, Copy)]
enum FoundIn {
    Open,
    Done,
    Neither,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// The marker of a key, and how long ago it was written; zero if it is done or absent.
    pub fn marker(&self, key: &Key) -> (Marker, Duration) {
        let tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (marker, age, _) = tables.read(tables.hasher.hash_one(key), key, Instant::now());
        (marker, age)
    }

    /// The number of remembered ids.
    pub fn len(&self) -> usize {
        let tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tables.open.len() + tables.done.len()
    }

    /// Whether the store is empty.
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
        tables.done.prefetch(&hashes);
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

impl MarkerTables {
    fn apply(&mut self, operation: &Operation, hash: u64, now: Instant) -> Verdict {
        let (marker, age, found_in) = self.read(hash, &operation.key, now);
        let (change, verdict) = apply(marker, Age::Of(age), operation);
        let write = match change {
            Change::Keep => return verdict,
            Change::Delete => None,
            Change::Write(marker, horizon) => Some((marker, now + horizon.min(CENTURY))),
        };
        match found_in {
            FoundIn::Open => drop(
                self.open
                    .find_entry(hash, |(it, _)| *it == operation.key)
                    .map(|entry| entry.remove()),
            ),
            FoundIn::Done => self.done.forget(hash, &operation.key),
            FoundIn::Neither => {}
        }
        match write {
            Some((Marker::Done(fingerprint), expires)) => {
                self.done
                    .write(hash, operation.key.clone(), fingerprint, expires)
            }
            Some((marker, expires)) => {
                let open = OpenMarker {
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

    fn read(&self, hash: u64, key: &Key, now: Instant) -> (Marker, Duration, FoundIn) {
        match self.open.find(hash, |(it, _)| it == key) {
            Some((_, open)) if now < open.expires => {
                return (
                    open.marker,
                    now.saturating_duration_since(open.written),
                    FoundIn::Open,
                );
            }
            Some(_) => return (Marker::Absent, Duration::ZERO, FoundIn::Open),
            None => {}
        }
        match self.done.find(hash, key) {
            Some(done) if now < done.expires => (
                Marker::Done(done.fingerprint),
                Duration::ZERO,
                FoundIn::Done,
            ),
            Some(_) => (Marker::Absent, Duration::ZERO, FoundIn::Done),
            None => (Marker::Absent, Duration::ZERO, FoundIn::Neither),
        }
    }

    /// Removes expired markers. Open ones are few, and are scanned only when their number has
    /// doubled since the last scan.
    fn expire(&mut self, now: Instant) {
        self.done.expire(&self.hasher, now);
        if self.open.len() >= self.sweep_at.max(MIN_SWEEP) {
            self.open.retain(|(_, open)| now < open.expires);
            self.sweep_at = self.open.len() * 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MessageId;
    use crate::marker::{Ask, Effect, Guarantee, Terms, Token};

    #[tokio::test]
    async fn open_markers_are_removed_after_their_window() {
        let store = MemoryStore::new();
        let terms = Terms {
            guarantee: Guarantee::EffectivelyOnce,
            lease: Duration::from_millis(1),
            window: Duration::from_millis(2),
            fingerprint: None,
        };
        for id in 0..10 * MIN_SWEEP {
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
            if id % MIN_SWEEP == 0 {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
        assert!(
            store.len() <= 3 * MIN_SWEEP,
            "{} of {} expired markers are kept",
            store.len(),
            10 * MIN_SWEEP
        );
    }
}
