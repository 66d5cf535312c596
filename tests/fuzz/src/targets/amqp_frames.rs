//! The frame sanitizer keeps order and length of whatever a broker sends, except for returned
//! messages, in pieces of any size.

use oncegate_amqp::fuzzing::{INVALID_UTF8_MARK, SanitizedFrames};

fn sanitize_in_pieces(data: &[u8], pieces: impl Iterator<Item = usize>, at_once: usize) -> Vec<u8> {
    let (mut sanitizer, mut out, mut buffer) =
        (SanitizedFrames::default(), Vec::new(), vec![0; at_once]);
    let mut rest = data;
    let mut read_all = |sanitizer: &mut SanitizedFrames| {
        loop {
            match sanitizer.read(&mut buffer) {
                0 => return,
                count => out.extend_from_slice(&buffer[..count]),
            }
        }
    };
    for size in pieces {
        let (piece, after) = rest.split_at(size.clamp(1, rest.len().max(1)).min(rest.len()));
        rest = after;
        sanitizer.push(piece);
        read_all(&mut sanitizer);
        if rest.is_empty() {
            break;
        }
    }
    sanitizer.finish();
    read_all(&mut sanitizer);
    out
}

/// The frame sanitizer keeps order and length of whatever a broker sends, except for returned
/// messages, in pieces of any size.
///
/// # Panics
/// If that does not hold.
pub fn amqp_frames(data: &[u8]) {
    let whole = sanitize_in_pieces(data, std::iter::once(data.len()), 4_096);
    // A returned message loses its content.
    let has_return = data.windows(4).any(|four| four == [0, 60, 0, 50]);
    assert!(if has_return {
        whole.len() <= data.len()
    } else {
        whole.len() == data.len()
    });
    assert!(INVALID_UTF8_MARK.is_ascii());
    // Bytes that are no frame are passed on as they arrive, so only frames give the same result in
    // pieces.
    if consists_of_frames(data) {
        let odd = data
            .iter()
            .map(|byte| usize::from(*byte % 23) + 1)
            .chain(std::iter::repeat(1));
        assert_eq!(sanitize_in_pieces(data, odd, 7), whole);
    }
}

/// Whether the bytes are frames; the last one may be incomplete.
fn consists_of_frames(mut data: &[u8]) -> bool {
    while let [kind, _, _, a, b, c, d, ..] = data {
        if ![1, 2, 3, 8].contains(kind) {
            return false;
        }
        let size = u32::from_be_bytes([*a, *b, *c, *d]) as usize + 8;
        match data.get(size..) {
            Some(rest) => data = rest,
            None => return true,
        }
    }
    true
}
