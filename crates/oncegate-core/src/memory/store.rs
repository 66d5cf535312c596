//! A store in this process: [`marker::apply`](crate::marker::apply) on a map.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::done_log::{DoneLog, DoneMarker};
use super::key_hash::{KeyHash, KeyHasher};
use crate::id::Key;
use crate::internal::Lock;
use crate::marker::{Age, Change, Fingerprint, Marker, Operation, Verdict, apply};
use crate::result_store::{Completion, ResultStore};
use crate::store::{Persistence, Store, StoreError};

/// Keeps markers in the memory of this process. Clones share them.
///
/// Each batch takes one lock. A done id takes 33 to 37 bytes, 41 to 45 with a fingerprint, whatever
/// its length: the store keeps a 128-bit hash of it (SipHash-1-3). Two ids with the same hash would
/// count as duplicates; among ten million ids that has a probability below 10^-24. The hash has a
/// random key in each store, so a sender cannot choose such ids.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Lock<MarkerTables>>);

/// The markers of a store. Each id has a marker in at most one of `open` and `done`.
#[derive(Debug)]
struct MarkerTables {
    hasher: KeyHasher,
    /// The moment from which times of markers are counted.
    start: Instant,
    /// The markers that are not done.
    open: HashTable<OpenMarker>,
    done: DoneLog,
    /// The results of done ids.
    results: HashMap<KeyHash, StoredResult>,
    /// The number of results at which `expire` scans them next.
    sweep_results_at: usize,
    /// The number of open markers at which `expire` scans them next.
    sweep_at: usize,
    /// Empty between batches, whose keys use its memory again.
    keys: Vec<KeyHash>,
}

/// The result of a completed run.
#[derive(Debug)]
struct StoredResult {
    encoded: Vec<u8>,
    /// In nanoseconds since the start of the store.
    expires: u64,
}

/// The longest expiry, so that no clock overflows.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Below this number of open markers, `expire` does not scan them.
const MIN_SWEEP: usize = 4096;

/// A marker that is not done. Times are in nanoseconds since the start of the store.
#[derive(Clone, Copy, Debug)]
struct OpenMarker {
    key: KeyHash,
    marker: Marker,
    written: u64,
    expires: u64,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// The marker of a key, and how long ago it was written. Done and absent markers have the age
    /// zero.
    pub fn marker(&self, key: &Key) -> (Marker, Duration) {
        let tables = self.0.lock();
        let (now, key) = (tables.now(), tables.hasher.hash(key));
        match tables.open.find(key.table_hash(), |open| open.key == key) {
            Some(open) => open.read(now),
            None => read_done(tables.done.find(key), now),
        }
    }

    pub(crate) fn forget(&self, key: &Key) {
        let mut tables = self.0.lock();
        let key = tables.hasher.hash(key);
        if let Ok(open) = tables
            .open
            .find_entry(key.table_hash(), |open| open.key == key)
        {
            open.remove();
        }
        tables.done.forget(key);
        tables.results.remove(&key);
    }

    /// The number of remembered ids.
    pub fn len(&self) -> usize {
        let tables = self.0.lock();
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
        let mut tables = self.0.lock();
        let now = tables.now();
        tables.expire(now);
        let mut keys = std::mem::take(&mut tables.keys);
        keys.extend(
            operations
                .iter()
                .map(|operation| tables.hasher.hash(&operation.key)),
        );
        tables.done.prefetch(&keys);
        let verdicts = operations
            .iter()
            .zip(keys.drain(..))
            .map(|(operation, key)| Ok(tables.apply(operation, key, now)))
            .collect();
        tables.keys = keys; // keeps the allocation
        verdicts
    }

    fn described(&self) -> String {
        "the memory of this process".to_owned()
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(Persistence::Volatile(
            "the memory store forgets everything when its process ends".into(),
        ))
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }
}

#[async_trait]
impl ResultStore for MemoryStore {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        let mut tables = self.0.lock();
        let (now, key) = (tables.now(), tables.hasher.hash(&completion.key));
        tables.expire(now);
        let was_done = tables.done_at(key, now).is_some();
        let verdict = tables.apply(completion, key, now);
        let mut earlier = None;
        if was_done {
            earlier = tables.result(key, completion.terms.fingerprint, now);
        } else if let Some(done) = tables.done_at(key, now) {
            let stored = StoredResult {
                encoded: result.to_vec(),
                expires: done.expires,
            };
            tables.results.insert(key, stored);
        }
        Ok(Completion { verdict, earlier })
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let tables = self.0.lock();
        let (now, key) = (tables.now(), tables.hasher.hash(key));
        Ok(tables.result(key, fingerprint, now))
    }
}

impl Default for MarkerTables {
    fn default() -> Self {
        Self {
            hasher: KeyHasher::default(),
            start: Instant::now(),
            open: HashTable::new(),
            done: DoneLog::default(),
            results: HashMap::new(),
            sweep_results_at: 0,
            sweep_at: 0,
            keys: Vec::new(),
        }
    }
}

impl MarkerTables {
    fn apply(&mut self, operation: &Operation, key: KeyHash, now: u64) -> Verdict {
        let entry = self.open.entry(
            key.table_hash(),
            |open| open.key == key,
            |open| open.key.table_hash(),
        );
        let done = match &entry {
            Entry::Occupied(_) => None,
            Entry::Vacant(_) => self.done.find(key),
        };
        let (marker, age) = match &entry {
            Entry::Occupied(open) => open.get().read(now),
            Entry::Vacant(_) => read_done(done, now),
        };
        let (change, verdict) = apply(marker, Age::Of(age), operation);
        if done.is_some() && !matches!(change, Change::Keep) {
            self.done.forget(key);
            self.results.remove(&key);
        }
        let expires = |horizon| now.saturating_add(nanoseconds(horizon));
        match (change, entry) {
            (Change::Write(Marker::Done(fingerprint), horizon), entry) => {
                if let Entry::Occupied(open) = entry {
                    open.remove();
                }
                let done = DoneMarker {
                    fingerprint,
                    expires: expires(horizon),
                };
                self.done.write(key, done);
            }
            (Change::Write(marker, horizon), entry) => {
                entry.insert(OpenMarker {
                    key,
                    marker,
                    written: now,
                    expires: expires(horizon),
                });
            }
            (Change::Delete, Entry::Occupied(open)) => drop(open.remove()),
            (Change::Delete, Entry::Vacant(_)) | (Change::Keep, _) => {}
        }
        verdict
    }

    /// The done marker of an id, unless it has expired.
    fn done_at(&self, key: KeyHash, now: u64) -> Option<DoneMarker> {
        self.done.find(key).filter(|done| now < done.expires)
    }

    /// The result of a done id, unless its body is another one.
    fn result(&self, key: KeyHash, fingerprint: Option<Fingerprint>, now: u64) -> Option<Vec<u8>> {
        let done = self.done_at(key, now)?;
        let is_same = Marker::Done(done.fingerprint).is_done_for(fingerprint);
        let stored = self.results.get(&key).filter(|_| is_same)?;
        // Not that of an earlier marker, which has expired.
        (stored.expires == done.expires).then(|| stored.encoded.clone())
    }

    /// Nanoseconds since the start of the store.
    fn now(&self) -> u64 {
        nanoseconds(self.start.elapsed())
    }

    /// Removes expired markers. Open ones are few, and are scanned only when their number has
    /// doubled since the last scan.
    fn expire(&mut self, now: u64) {
        self.done.expire(now);
        if self.open.len() >= self.sweep_at.max(MIN_SWEEP) {
            self.open.retain(|open| now < open.expires);
            self.sweep_at = self.open.len() * 2;
        }
        if self.results.len() >= self.sweep_results_at.max(MIN_SWEEP) {
            self.results.retain(|_, result| now < result.expires);
            self.sweep_results_at = self.results.len() * 2;
        }
    }
}

impl OpenMarker {
    /// The marker and its age; absent if it has expired.
    fn read(&self, now: u64) -> (Marker, Duration) {
        if now < self.expires {
            let age = Duration::from_nanos(now.saturating_sub(self.written));
            (self.marker, age)
        } else {
            (Marker::Absent, Duration::ZERO)
        }
    }
}

/// The marker of an entry of the done log; absent if there is none or it has expired.
fn read_done(done: Option<DoneMarker>, now: u64) -> (Marker, Duration) {
    let marker = match done {
        Some(done) if now < done.expires => Marker::Done(done.fingerprint),
        _ => Marker::Absent,
    };
    (marker, Duration::ZERO)
}

/// A duration in nanoseconds, at most [`CENTURY`].
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.min(CENTURY).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MessageId;
    use crate::marker::{Effect, Guarantee, OperationKind, Terms, Token};

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
                kind: OperationKind::Claim,
                token: Token(1),
                attempt: 0,
                terms,
            };
            let failed = Operation {
                kind: OperationKind::Clear(Effect::Unknown),
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
