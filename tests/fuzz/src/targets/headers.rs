//! Encoded blocks of headers, valid and malformed.

use bytes::Bytes;
use oncegate_core::message::{Headers, HeadersBuilder};

/// Encoded headers decode to the same headers, and decoding a malformed block ends.
///
/// # Panics
/// If a property is violated.
pub fn headers(data: &[u8]) {
    let torn = Headers::from_block(Bytes::copy_from_slice(data));
    assert!(
        torn.iter()
            .map(|(name, value)| 8 + name.len() + value.map_or(0, <[u8]>::len))
            .sum::<usize>()
            <= data.len()
    );
    let _ = (format!("{torn:?}"), torn.last("id"), torn.last(""));

    // Each piece is a header: its first byte encodes the length of the name and whether there is a
    // value.
    let mut written: Vec<(&[u8], Option<&[u8]>)> = Vec::new();
    let mut builder = HeadersBuilder::default();
    for piece in data.split(|byte| *byte == 0xfe) {
        let Some((first, rest)) = piece.split_first() else {
            continue;
        };
        let (name, value) = rest.split_at(usize::from(*first >> 1).min(rest.len()));
        let value = (first & 1 == 0).then_some(value);
        builder.push(name, value);
        written.push((name, value));
    }
    let headers = builder.finish();
    assert_eq!(headers.iter().collect::<Vec<_>>(), written);
    assert_eq!(headers.is_empty(), written.is_empty());
    for (name, _) in &written {
        let Ok(name) = std::str::from_utf8(name) else {
            continue;
        };
        let last = written
            .iter()
            .rev()
            .find(|(it, _)| *it == name.as_bytes())
            .and_then(|(_, value)| *value);
        assert_eq!(headers.last(name), last);
    }
}
