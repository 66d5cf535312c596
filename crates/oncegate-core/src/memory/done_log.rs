//! The done markers of the memory store, which are nearly all of its markers.

use std::collections::VecDeque;

use hashbrown::HashTable;

use super::key_hash::KeyHash;
use crate::marker::Fingerprint;

/// A log of done markers in the order in which they were written, with an index. A marker takes 24
/// bytes (32 with a fingerprint), and 6 to 12 bytes in the index; while the index grows, its old
/// table takes memory in addition.
///
/// The lookup of a new id reads only the control bytes of the index. Entries are never moved.
#[derive(Debug, Default)]
pub(super) struct DoneLog {
    /// The serial numbers of the entries, modulo 2^32. They are unique, because 2^32 entries would
    /// take 150 GB.
    index: HashTable<u32>,
    entries: DoneEntries,
}

/// The entries in blocks, so that they are never moved.
#[derive(Debug, Default)]
struct DoneEntries {
    /// All blocks but the last are full.
    blocks: VecDeque<Block>,
    /// The number of the first entry of the first block, modulo 2^32.
    first: u32,
    /// How many entries of the first block have expired.
    expired: usize,
}

/// The number of entries in a block: 12 KiB, or 16 KiB with fingerprints.
const BLOCK: usize = 512;

#[derive(Debug)]
struct Block {
    entries: Vec<DoneEntry>,
    /// One for each entry, or empty while no entry of the block has a fingerprint.
    fingerprints: Vec<u64>,
}

/// An entry stays until it expires, even if its id was removed or written again.
#[derive(Debug)]
struct DoneEntry {
    key: KeyHash,
    /// In nanoseconds since the start of the store.
    expires: u64,
}

/// The value for an entry without a fingerprint. Every fingerprint is smaller.
const NO_FINGERPRINT: u64 = u64::MAX;

/// A done marker, expired or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DoneMarker {
    pub(super) fingerprint: Option<Fingerprint>,
    /// In nanoseconds since the start of the store.
    pub(super) expires: u64,
}

impl DoneLog {
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Loads the control bytes of the keys of a batch into the CPU cache. With a million ids each
    /// lookup is a cache miss; in one loop, the misses overlap.
    pub(super) fn prefetch(&self, keys: &[KeyHash]) {
        for key in keys {
            std::hint::black_box(self.index.find(key.table_hash(), |_| false));
        }
    }

    /// The marker of an id, expired or not.
    pub(super) fn find(&self, key: KeyHash) -> Option<DoneMarker> {
        let number = self.index.find(key.table_hash(), |number| {
            self.entries.has_key(*number, key)
        })?;
        self.entries.marker(*number)
    }

    /// Appends the marker of an id that the log does not have.
    #[inline]
    pub(super) fn write(&mut self, key: KeyHash, marker: DoneMarker) {
        let number = self.entries.push(key, marker);
        self.index
            .insert_unique(key.table_hash(), number, |number| {
                self.entries.table_hash(*number)
            });
    }

    pub(super) fn forget(&mut self, key: KeyHash) {
        let is_same = |number: &u32| self.entries.has_key(*number, key);
        if let Ok(found) = self.index.find_entry(key.table_hash(), is_same) {
            found.remove();
        }
    }

    /// Removes expired entries, the oldest first, up to the first that has not expired.
    pub(super) fn expire(&mut self, now: u64) {
        while let Some((number, key)) = self.entries.pop_expired(now) {
            let is_same = |other: &u32| *other == number;
            if let Ok(found) = self.index.find_entry(key.table_hash(), is_same) {
                found.remove();
            }
        }
    }
}

impl DoneEntries {
    /// Appends an entry and returns its number.
    #[inline]
    fn push(&mut self, key: KeyHash, marker: DoneMarker) -> u32 {
        let is_full = |block: &Block| block.entries.len() == BLOCK;
        if self.blocks.back().is_none_or(is_full) {
            self.blocks.push_back(Block {
                entries: Vec::with_capacity(BLOCK),
                fingerprints: Vec::new(),
            });
        }
        let before = (self.blocks.len() - 1) * BLOCK;
        let Some(block) = self.blocks.back_mut() else {
            return 0; // a block was just pushed
        };
        let at = block.entries.len();
        if !block.fingerprints.is_empty() || marker.fingerprint.is_some() {
            block
                .fingerprints
                .reserve_exact(BLOCK - block.fingerprints.len());
            block.fingerprints.resize(at, NO_FINGERPRINT);
            let fingerprint = marker.fingerprint.map_or(NO_FINGERPRINT, Fingerprint::get);
            block.fingerprints.push(fingerprint);
        }
        block.entries.push(DoneEntry {
            key,
            expires: marker.expires,
        });
        self.first.wrapping_add((before + at) as u32)
    }

    /// Removes the oldest entry if it has expired. Returns its number and its key.
    fn pop_expired(&mut self, now: u64) -> Option<(u32, KeyHash)> {
        let oldest = self.blocks.front()?.entries.get(self.expired)?;
        if oldest.expires > now {
            return None;
        }
        let popped = (self.first.wrapping_add(self.expired as u32), oldest.key);
        self.expired += 1;
        if self.expired == BLOCK {
            self.blocks.pop_front();
            (self.first, self.expired) = (self.first.wrapping_add(BLOCK as u32), 0);
        }
        Some(popped)
    }

    /// The block of an entry, and its index there.
    fn block_of(&self, number: u32) -> Option<(&Block, usize)> {
        let at = number.wrapping_sub(self.first) as usize;
        Some((self.blocks.get(at / BLOCK)?, at % BLOCK))
    }

    fn has_key(&self, number: u32, key: KeyHash) -> bool {
        self.block_of(number)
            .and_then(|(block, at)| block.entries.get(at))
            .is_some_and(|entry| entry.key == key)
    }

    /// The hash of an entry in the index. Every number in the index is that of an entry.
    fn table_hash(&self, number: u32) -> u64 {
        self.block_of(number)
            .and_then(|(block, at)| block.entries.get(at))
            .map_or(0, |entry| entry.key.table_hash())
    }

    fn marker(&self, number: u32) -> Option<DoneMarker> {
        let (block, at) = self.block_of(number)?;
        Some(DoneMarker {
            expires: block.entries.get(at)?.expires,
            fingerprint: block
                .fingerprints
                .get(at)
                .filter(|number| **number != NO_FINGERPRINT)
                .map(|number| Fingerprint::new(*number)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::key_hash::KeyHasher;
    use super::*;
    use crate::id::{Key, MessageId};

    fn key(number: u64) -> Key {
        Key::new(&MessageId::new(number.to_string()).expect("an id"))
    }

    /// Compares the log with a map that has the latest marker of each id. The numbers of the
    /// entries wrap around at 2^32.
    #[test]
    fn the_log_agrees_with_a_map() {
        for seed in 0..6 {
            let hasher = KeyHasher::default();
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut log, mut map) = (DoneLog::default(), HashMap::new());
            log.entries.first = 0_u32.wrapping_sub(2 * BLOCK as u32);
            let ids = random.u64(1..3 * BLOCK as u64);
            for now in 0..10 * BLOCK as u64 {
                let id = hasher.hash(&key(random.u64(..ids)));
                log.expire(now);
                map.retain(|_, marker: &mut DoneMarker| marker.expires > now);
                assert_eq!(log.len(), map.len());
                assert_eq!(log.find(id), map.get(&id).copied(), "seed {seed}, {now}");
                log.forget(id);
                map.remove(&id);
                if random.u8(..4) > 0 {
                    let marker = DoneMarker {
                        // Blocks with fingerprints, without, and with both kinds of entries.
                        fingerprint: (now / 700 % 2 == 0)
                            .then(|| Fingerprint::new(random.u64(..9))),
                        expires: now + ids / 2 + 1,
                    };
                    log.write(id, marker);
                    map.insert(id, marker);
                }
            }
            log.expire(u64::MAX);
            assert_eq!((log.len(), log.find(hasher.hash(&key(0)))), (0, None));
            let blocks = log.entries.blocks.len();
            assert!(blocks <= 1, "{blocks} blocks are kept");
        }
    }
}
