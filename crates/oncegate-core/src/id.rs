//! The idempotency key of a message, and its key in a store.

pub(crate) mod json;
mod source;

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;
pub use source::{IdError, IdSource, IntoIdSource};

/// The longest id that is used in a key unchanged, in bytes.
pub const LONGEST_PLAIN_ID: usize = 200;

/// An idempotency key: messages with the same id count as one message.
///
/// 1 to 200 bytes of `[A-Za-z0-9._:@/+=-]` are used unchanged. A longer id, one with other bytes,
/// or one that begins with the reserved `h:` becomes `h:` and its SHA-256 in hexadecimal. So two
/// different ids never share a key, no id contains the `|` and `!` of scopes and of oncegate's own
/// keys or the hash tags of Redis Cluster, and every id is safe in a header or a log. There is no
/// Unicode normalisation: the same text in two normal forms is two ids.
#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(SmallVec<[u8; 40]>);

impl MessageId {
    /// An id from the bytes that a producer wrote; `None` if there are none.
    pub fn new(raw: impl AsRef<[u8]>) -> Option<Self> {
        let raw = raw.as_ref();
        if raw.is_empty() {
            return None;
        }
        Some(if is_plain(raw) {
            Self(SmallVec::from_slice(raw))
        } else {
            Self::hash_of(raw)
        })
    }

    /// The same id as `h:` and its SHA-256, even if it could be used unchanged: see
    /// [`IdSource::hashed`].
    pub fn hashed(self) -> Self {
        if self.0.starts_with(b"h:") {
            self
        } else {
            Self::hash_of(&self.0)
        }
    }

    fn hash_of(raw: &[u8]) -> Self {
        let mut id = SmallVec::from_slice(b"h:");
        push_hex(&mut id, &Sha256::digest(raw));
        Self(id)
    }

    /// Parses an id in the form that [`as_str`](Self::as_str) returns and that keys, headers and
    /// logs contain. Does not hash `h:` and a hash again. `None` if the text does not have that
    /// form.
    pub fn stored(text: &str) -> Option<Self> {
        let is_hash = |text: &str| {
            text.len() == 64
                && text
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_valid = match text.strip_prefix("h:") {
            Some(digest) => is_hash(digest),
            None => !text.is_empty() && is_plain(text.as_bytes()),
        };
        is_valid.then(|| Self(SmallVec::from_slice(text.as_bytes())))
    }

    /// The id as it is written in keys, headers and logs.
    pub fn as_str(&self) -> &str {
        // Only ASCII is stored: see `is_plain` and `push_hex`.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

// Not derived: `SmallVec::clone` copies byte by byte, and an id is cloned several times for each
// message.
impl Clone for MessageId {
    fn clone(&self) -> Self {
        Self(SmallVec::from_slice(&self.0))
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageId({self})")
    }
}

/// Whether an id is used in a key unchanged: see [`MessageId`].
fn is_plain(raw: &[u8]) -> bool {
    const PLAIN: [bool; 256] = {
        let mut table = [false; 256];
        let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@/+=-";
        let mut i = 0;
        while i < alphabet.len() {
            table[alphabet[i] as usize] = true;
            i += 1;
        }
        table
    };
    raw.len() <= LONGEST_PLAIN_ID
        && !raw.starts_with(b"h:")
        // Without a branch for each byte, because nearly all ids are plain.
        && raw.iter().fold(true, |plain, byte| plain & PLAIN[*byte as usize])
}

/// Appends bytes as lower-case hexadecimal digits.
fn push_hex<const N: usize>(into: &mut SmallVec<[u8; N]>, bytes: &[u8]) {
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            into.push(b"0123456789abcdef"[digit as usize]);
        }
    }
}

/// The key of an id in a store: the id, after its scope if there is one (`<scope>|<id>`).
///
/// The store adds its prefix.
#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(SmallVec<[u8; 40]>);

impl Key {
    /// The key of an id without a scope.
    #[inline]
    pub fn new(id: &MessageId) -> Self {
        Self(SmallVec::from_slice(&id.0))
    }

    fn scoped(scope: &str, id: &MessageId) -> Self {
        let mut key = SmallVec::with_capacity(scope.len() + 1 + id.0.len());
        key.extend_from_slice(scope.as_bytes());
        key.push(b'|');
        key.extend_from_slice(&id.0);
        Self(key)
    }

    /// The key as bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        // Scope and id are both plain ASCII.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl Clone for Key {
    fn clone(&self) -> Self {
        Self(SmallVec::from_slice(&self.0))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.as_str())
    }
}

/// Separates several consumers of the same messages on one store. Without one, two services that
/// share a store skip each other's messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope(Option<Arc<str>>);

impl Scope {
    /// The scope of the only consumer on its store and prefix.
    pub const fn none() -> Self {
        Self(None)
    }

    /// A named scope: 1 to 100 bytes of `[A-Za-z0-9._:@/+=-]`, not beginning with `h:`.
    ///
    /// # Errors
    /// [`BadScope`] for any other name. Its text says what is allowed.
    pub fn named(name: &str) -> Result<Self, BadScope> {
        if name.is_empty() || name.len() > 100 || !is_plain(name.as_bytes()) {
            return Err(BadScope(name.escape_debug().take(120).collect()));
        }
        Ok(Self(Some(Arc::from(name))))
    }

    /// The key of an id in this scope.
    #[inline]
    pub fn key(&self, id: &MessageId) -> Key {
        match &self.0 {
            Some(scope) => Key::scoped(scope, id),
            None => Key::new(id),
        }
    }
}

/// A scope name that is empty, longer than 100 bytes, begins with `h:`, or has characters that are
/// not allowed in a key.
#[derive(Debug, thiserror::Error)]
#[error(
    "scope `{0}` cannot be part of a key: use 1 to 100 of the characters A-Z a-z 0-9 . _ : @ / + = - and not `h:` at the start"
)]
pub struct BadScope(String);

#[cfg(test)]
mod tests {
    use super::*;

    fn id(raw: impl AsRef<[u8]>) -> String {
        MessageId::new(raw).expect("an id").to_string()
    }

    #[test]
    fn plain_ids_are_unchanged_and_all_others_are_hashed_without_collision() {
        assert_eq!(id("pay-42"), "pay-42");
        assert_eq!(id("a".repeat(200)), "a".repeat(200));
        let unusual: Vec<Vec<u8>> = vec![
            b" ".to_vec(),
            b"a\0b".to_vec(),
            b"a\r\n$3\r\nSET".to_vec(),
            vec![0xff, 0xfe],
            b"{}".to_vec(),
            b"{a}b".to_vec(),
            b"a|b".to_vec(),
            b"!canary".to_vec(),
            b"h:0".to_vec(),
            vec![b'a'; 201],
            vec![b'a'; 65_536],
            vec![b'a'; 10 << 20],
            "\u{e9}".into(),
            "e\u{301}".into(),
        ];
        let ids: std::collections::HashSet<String> = unusual.iter().map(id).collect();
        assert_eq!(ids.len(), unusual.len());
        assert!(ids.iter().all(|id| id.starts_with("h:") && id.len() == 66));
        assert!(MessageId::new("").is_none());
    }

    #[test]
    fn a_hashed_id_cannot_be_forged() {
        let hashed = id("{}");
        assert_ne!(id(&hashed), hashed);
    }

    #[test]
    fn a_stored_id_is_parsed_as_the_same_id() {
        for raw in ["pay-42", "{}", "h:0"] {
            let id = MessageId::new(raw).expect("an id");
            assert_eq!(MessageId::stored(id.as_str()), Some(id));
        }
        for no_id in [
            "",
            "{}",
            "a|b",
            "!canary",
            "h:",
            "h:0",
            &format!("h:{}", "A".repeat(64)),
            &format!("h:{}", "0".repeat(65)),
        ] {
            assert_eq!(MessageId::stored(no_id), None, "{no_id}");
        }
    }

    #[test]
    fn scopes_cannot_collide() {
        let id = MessageId::new("b").expect("an id");
        assert_eq!(Scope::named("a").expect("a scope").key(&id).as_str(), "a|b");
        assert_eq!(Scope::none().key(&id).as_str(), "b");
        assert!(
            ["", "a|b", "!x", "h:x"]
                .iter()
                .all(|name| Scope::named(name).is_err())
        );
    }
}
