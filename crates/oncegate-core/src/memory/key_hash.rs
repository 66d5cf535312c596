//! A keyed hash, which the store keeps instead of the text of a key.

use siphasher::sip128::SipHasher13;

use crate::id::Key;

/// 128 bits of a key's SipHash-1-3. Keys with equal hashes count as the same key: for `n` ids the
/// probability of any such pair is below `n² / 2^129`, about 10^-25 for ten million. The hash is
/// keyed with random bits of each store, so a sender cannot choose ids whose hashes are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KeyHash([u64; 2]);

impl KeyHash {
    /// The bits that a hash table uses.
    pub(super) fn table_hash(self) -> u64 {
        self.0[0]
    }
}

/// Hashes keys with the random bits of one store.
#[derive(Debug)]
pub(super) struct KeyHasher(SipHasher13);

impl KeyHasher {
    #[inline]
    pub(super) fn hash(&self, key: &Key) -> KeyHash {
        let (high, low) = self.0.hash(key.as_bytes()).as_u64();
        KeyHash([high, low])
    }
}

impl Default for KeyHasher {
    /// With 128 random bits from the operating system.
    fn default() -> Self {
        let mut bits = [0; 16];
        // Panics without random bits: a sender that knows them could choose ids whose hashes are
        // equal.
        getrandom::fill(&mut bits).expect("the operating system provides random bytes");
        Self(SipHasher13::new_with_key(&bits))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::id::MessageId;

    #[test]
    fn each_store_has_its_own_hashes_and_each_half_distinguishes_the_keys() {
        let keys: Vec<Key> = (0..10_000)
            .map(|number| Key::new(&MessageId::new(format!("id-{number}")).expect("an id")))
            .collect();
        let hashers = [KeyHasher::default(), KeyHasher::default()];
        let halves: HashSet<u64> = hashers
            .iter()
            .flat_map(|hasher| keys.iter().flat_map(|key| hasher.hash(key).0))
            .collect();
        assert_eq!(halves.len(), 2 * 2 * keys.len());
        assert_eq!(hashers[0].hash(&keys[0]), hashers[0].hash(&keys[0]));
    }
}
