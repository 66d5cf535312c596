//! A store in this process: [`marker::apply`](crate::marker::apply) on a map.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hashbrown::{DefaultHashBuilder, HashTable};

use crate::id::Key;
use crate::marker::{Age, Change, Fingerprint, Marker, Operation, Verdict, apply};
use crate::store::{Memory, Store, StoreError};

/// Remembers ids in this process, for as long as it lives. Cloning shares what is remembered.
///
/// One lock a batch; what is in progress stands in a small table, what is done in a compact one.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<Mutex<Tables>>);

/// Each operation hashes its key once, for both tables.
#[derive(Debug, Default)]
struct Tables {
    hasher: DefaultHashBuilder,
    open: HashTable<(Key, Open)>,
    done: HashTable<(Key, Done)>,
    /// When each done marker expires, in the order in which they were written. An entry whose marker was written again
    /// since is passed over.
    expiries: VecDeque<(Instant, Key)>,
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

#[derive(Clone, Copy, Debug)]
struct Done {
    fingerprint: Option<Fingerprint>,
    expires: Instant,
}

impl MemoryStore {
    /// A store that remembers nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The marker of a key, and how long ago it was written where that matters.
    pub fn marker(&self, key: &Key) -> (Marker, Duration) {
        let tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tables.read(tables.hasher.hash_one(key), key, Instant::now())
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
        operations.iter().map(|operation| Ok(tables.apply(operation, now))).collect()
    }

    async fn memory(&self) -> Result<Memory, StoreError> {
        Ok(Memory::Forgets("the memory store forgets everything when its process ends".into()))
    }
}

impl Tables {
    fn apply(&mut self, operation: &Operation, now: Instant) -> Verdict {
        let hash = self.hasher.hash_one(&operation.key);
        let (marker, age) = self.read(hash, &operation.key, now);
        let (change, verdict) = apply(marker, Age::Of(age), operation);
        match change {
            Change::Keep => {}
            Change::Delete => drop(self.remove(hash, &operation.key)),
            Change::Write(Marker::Done(fingerprint), window) => {
                let expires = now + window.min(CENTURY);
                let key = self.remove(hash, &operation.key).unwrap_or_else(|| operation.key.clone());
                self.expiries.push_back((expires, key.clone()));
                let hasher = &self.hasher;
                self.done.insert_unique(hash, (key, Done { fingerprint, expires }), |(key, _)| hasher.hash_one(key));
            }
            Change::Write(marker, horizon) => {
                let open = Open { marker, written: now, expires: now + horizon.min(CENTURY) };
                let key = self.remove(hash, &operation.key).unwrap_or_else(|| operation.key.clone());
                let hasher = &self.hasher;
                self.open.insert_unique(hash, (key, open), |(key, _)| hasher.hash_one(key));
            }
        }
        verdict
    }

    fn read(&self, hash: u64, key: &Key, now: Instant) -> (Marker, Duration) {
        if let Some((_, open)) = self.open.find(hash, |(it, _)| it == key).filter(|(_, open)| now < open.expires) {
            return (open.marker, now.saturating_duration_since(open.written));
        }
        match self.done.find(hash, |(it, _)| it == key).filter(|(_, done)| now < done.expires) {
            Some((_, done)) => (Marker::Done(done.fingerprint), Duration::ZERO),
            None => (Marker::Absent, Duration::ZERO),
        }
    }

    /// Takes a key out of both tables; the key, if it was in one.
    fn remove(&mut self, hash: u64, key: &Key) -> Option<Key> {
        let open = self.open.find_entry(hash, |(it, _)| it == key).ok().map(|entry| entry.remove().0.0);
        let done = self.done.find_entry(hash, |(it, _)| it == key).ok().map(|entry| entry.remove().0.0);
        open.or(done)
    }

    /// Forgets what has expired. What is open is few, and is looked through when it has doubled since the last time.
    fn expire(&mut self, now: Instant) {
        while let Some((expires, key)) = self.expiries.front() {
            if *expires > now {
                break;
            }
            let hash = self.hasher.hash_one(key);
            if let Ok(entry) = self.done.find_entry(hash, |(it, done)| it == key && done.expires <= now) {
                entry.remove();
            }
            self.expiries.pop_front();
        }
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
            let claim = Operation { key, ask: Ask::Claim, token: Token(1), attempt: 0, terms };
            let failed = Operation { ask: Ask::Clear(Effect::Unknown), attempt: 1, ..claim.clone() };
            store.apply(&[claim, failed]).await;
            if id % FEW == 0 {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
        assert!(store.len() <= 3 * FEW, "{} of {} expired markers are kept", store.len(), 10 * FEW);
    }
}
