//! The ids that are done: most of what a store remembers.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::time::Instant;

use hashbrown::HashTable;

use crate::id::Key;
use crate::marker::Fingerprint;

/// Markers that are done, in the order in which they were written, and an index of where each
/// stands.
///
/// A new id is looked for in the index alone, which is small enough to stay in a cache for long;
/// each key is kept once, and none is moved when there are more of them.
#[derive(Debug, Default)]
pub(super) struct DoneLog {
    index: HashTable<EntryIndex>,
    /// Each but the last is full.
    blocks: VecDeque<Vec<DoneEntry>>,
    /// The number of the first entry of the first block.
    first: u64,
    /// How many entries of the first block have expired.
    expired: usize,
}

/// How many entries a block has.
const BLOCK: usize = 512;

#[derive(Debug)]
struct EntryIndex {
    hash: u64,
    number: u64,
}

/// It stays until it expires, though its id may have been forgotten or written again since.
#[derive(Debug)]
pub(super) struct DoneEntry {
    key: Key,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) expires: Instant,
}

impl DoneLog {
    /// How many ids it holds.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Touches what [`DoneLog::find`] will look at. Of a million ids hardly any lies in a cache of
    /// the processor; one lookup right after the other waits for all of them at once, where between
    /// them there is so much to do that each waits alone.
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

    /// Writes the marker of an id that it does not hold.
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

    /// Forgets an id.
    pub(super) fn forget(&mut self, hash: u64, key: &Key) {
        if let Ok(at) = self
            .index
            .find_entry(hash, |at| at.is_of(hash, key, &self.blocks, self.first))
        {
            at.remove();
        }
    }

    /// Forgets what has expired, the oldest first, up to the first that has not.
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
    fn it_holds_what_a_map_holds() {
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
