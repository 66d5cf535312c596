//! A value under the key of a marker: it is read as exactly one marker, or as none.

use oncegate_redis::fuzzing::{decode_marker, encode_marker};

/// A value is read as exactly one marker, or as none, and what is written of it is read.
///
/// # Panics
/// If that does not hold.
pub fn markers(data: &[u8]) {
    if let Some(marker) = decode_marker(data) {
        let written = encode_marker(&marker);
        // Numbers may have been written with zeros before them; once written by us, nothing changes
        // any more.
        let again = decode_marker(written.as_bytes())
            .unwrap_or_else(|| panic!("{written:?} was written and is not read"));
        assert_eq!(encode_marker(&again), written);
    }
}
