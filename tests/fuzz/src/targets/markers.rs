//! A value that stands where a marker should: it is read as exactly one marker, or as none.

use crate::record;

/// A value is read as exactly one marker, or as none, and what is written of it is read.
///
/// # Panics
/// If that does not hold.
pub fn markers(data: &[u8]) {
    if let Ok(marker) = record::decode(data) {
        let written = record::encode(&marker);
        // Numbers may have been written with zeros before them; once written by us, nothing changes
        // any more.
        let again = record::decode(written.as_bytes());
        let again =
            again.unwrap_or_else(|problem| panic!("{written:?} was written and is {problem:?}"));
        assert_eq!(record::encode(&again), written);
    }
}
