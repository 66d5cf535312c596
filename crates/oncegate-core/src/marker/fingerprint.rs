//! The fingerprint of a message body.

use sha2::{Digest, Sha256};

/// A hash of a body, which detects that an id was used for another body. Below 10^18, so that Redis
/// stores a done marker as an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// One more than the largest fingerprint.
    pub const LIMIT: u64 = 1_000_000_000_000_000_000;

    /// A fingerprint from a number, modulo [`Fingerprint::LIMIT`].
    pub const fn new(number: u64) -> Self {
        Self(number % Self::LIMIT)
    }

    /// The fingerprint of a body: the beginning of its SHA-256.
    pub fn of(body: &[u8]) -> Self {
        let digest = Sha256::digest(body);
        Self::new(
            digest[..8]
                .iter()
                .fold(0, |number, byte| number << 8 | u64::from(*byte)),
        )
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}
