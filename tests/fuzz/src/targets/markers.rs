//! Values under the key of a marker.

use oncegate_redis::fuzzing::{decode_marker, encode_marker};

/// A value decodes to a marker or to none, and an encoded marker decodes to the same marker.
///
/// # Panics
/// If a property is violated.
pub fn markers(data: &[u8]) {
    if let Some(marker) = decode_marker(data) {
        let written = encode_marker(&marker);
        // The input may have leading zeros in numbers; after one round trip the text is stable.
        let again = decode_marker(written.as_bytes())
            .unwrap_or_else(|| panic!("{written:?} was written and is not read"));
        assert_eq!(encode_marker(&again), written);
    }
}
