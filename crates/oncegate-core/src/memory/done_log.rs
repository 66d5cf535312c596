//! The log of done markers, which are most of what a store remembers.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::time::Instant;

use hashbrown::HashTable;

use crate::id::Key;
use crate::marker::Fingerprint;

/// Done markers in the order in which they were written, with an index.
///
/// The lookup of a new id needs only the index, which is small enough for the CPU cache. Each key
/// is stored once, and entries are never moved.
#[derive(Debug, Default)]
pub(super) struct DoneLog {
    index: HashTable<EntryIndex>,
    /// All but the last are full.
    blocks: VecDeque<Vec<DoneEntry>>,
    /// The number of the first entry of the first block.
    first: u64,
    /// How many entries of the first block have expired.
    expired: usize,
}

/// The number of entries in a block.
const BLOCK: usize = 512;

#[derive(Debug)]
struct EntryIndex {
    hash: u64,
    number: u64,
}

/// An entry stays until it expires, even if its id was removed or written again.
#[derive(Debug)]
pub(super) struct DoneEntry {
    key: Key,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) expires: Instant,
}

impl DoneLog {
    /// The number of ids.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Loads the index entries of a batch into the CPU cache. With a million ids each lookup is a
    /// cache miss; back to back, the misses overlap.
    pub(super) fn prefetch(&self, hashes: &[u64]) {
        let found = hashes
            .iter()
            .filter(|hash| self.index.find(**hash, |at| at.hash == **hash).is_some())
            .count();
        std::hint::black_box(found);
    }

    /// The marker of an id, expired or not.
    pub(super) fn find(&self, hash: u64, key: &Key) -> Option<&DoneEntry> {
        let at = self
            .index
            .find(hash, |at| at.is_of(hash, key, &self.blocks, self.first))?;
        at.entry(&self.blocks, self.first)
    }

    /// Appends the marker of an id that the log does not have.
    pub(super) fn write(
        &mut self,
        hash: u64,
        key: Key,
        fingerprint: Option<Fingerprint>,
        expires: Instant,
    ) {
        if self.blocks.back().is_none_or(|block| block.len() == BLOCK) {
            self.blocks.push_back(Vec::with_capacity(BLOCK));
        }
        let before = (self.blocks.len() - 1) * BLOCK;
        let Some(block) = self.blocks.back_mut() else {
            return;
        };
        let number = self.first + (before + block.len()) as u64;
        block.push(DoneEntry {
            key,
            fingerprint,
            expires,
        });
        self.index
            .insert_unique(hash, EntryIndex { hash, number }, |at| at.hash);
    }

    /// Removes an id.
    pub(super) fn forget(&mut self, hash: u64, key: &Key) {
        if let Ok(at) = self
            .index
            .find_entry(hash, |at| at.is_of(hash, key, &self.blocks, self.first))
        {
            at.remove();
        }
    }

    /// Removes expired entries, the oldest first, up to the first that has not expired.
    pub(super) fn expire(&mut self, hasher: &impl BuildHasher, now: Instant) {
        while let Some(oldest) = self
            .blocks
            .front()
            .and_then(|block| block.get(self.expired))
            .filter(|oldest| oldest.expires <= now)
        {
            let (hash, number) = (
                hasher.hash_one(&oldest.key),
                self.first + self.expired as u64,
            );
            if let Ok(at) = self.index.find_entry(hash, |at| at.number == number) {
                at.remove();
            }
            self.expired += 1;
            if self.expired == BLOCK {
                self.blocks.pop_front();
                (self.first, self.expired) = (self.first + BLOCK as u64, 0);
            }
        }
    }
}

impl EntryIndex {
    fn is_of(&self, hash: u64, key: &Key, blocks: &VecDeque<Vec<DoneEntry>>, first: u64) -> bool {
        self.hash == hash
            && self
                .entry(blocks, first)
                .is_some_and(|entry| entry.key == *key)
    }

    fn entry<'a>(&self, blocks: &'a VecDeque<Vec<DoneEntry>>, first: u64) -> Option<&'a DoneEntry> {
        let at = usize::try_from(self.number.checked_sub(first)?).ok()?;
        blocks.get(at / BLOCK)?.get(at % BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::hash::RandomState;
    use std::time::Duration;

    use super::*;
    use crate::id::MessageId;

    fn key(number: u64) -> Key {
        Key::new(&MessageId::new(number.to_string()).expect("an id"))
    }

    /// Against a map that knows each id's latest marker, with windows of one length.
    #[test]
    fn the_log_agrees_with_a_map() {
        let (hasher, start) = (RandomState::new(), Instant::now());
        let hash = |key: &Key| hasher.hash_one(key);
        for seed in 0..6 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut log, mut map) = (DoneLog::default(), HashMap::new());
            let ids = random.u64(1..3 * BLOCK as u64);
            for now in 0..10 * BLOCK as u64 {
                let (at, id) = (start + Duration::from_secs(now), key(random.u64(..ids)));
                log.expire(&hasher, at);
                map.retain(|_, (_, expires)| *expires > at);
                assert_eq!(log.len(), map.len());
                let found = log
                    .find(hash(&id), &id)
                    .map(|entry| (entry.fingerprint, entry.expires));
                assert_eq!(found, map.get(&id).copied(), "seed {seed}, {now}");
                log.forget(hash(&id), &id);
                map.remove(&id);
                if random.u8(..4) > 0 {
                    let (fingerprint, expires) = (
                        Some(Fingerprint::new(random.u64(..9))),
                        at + Duration::from_secs(ids / 2 + 1),
                    );
                    log.write(hash(&id), id.clone(), fingerprint, expires);
                    map.insert(id, (fingerprint, expires));
                }
            }
            log.expire(&hasher, start + Duration::from_secs(1 << 30));
            assert_eq!(
                (log.len(), log.find(hash(&key(0)), &key(0)).is_none()),
                (0, true)
            );
            assert!(
                log.blocks.len() <= 1,
                "{} blocks are kept",
                log.blocks.len()
            );
        }
    }
}
