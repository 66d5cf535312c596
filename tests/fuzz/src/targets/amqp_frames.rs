//! Whatever a broker sends passes in its order and its length, but for what comes back, in however
//! small pieces it comes.

use crate::frames::{Frames, SPOILT};

fn passed(data: &[u8], pieces: impl Iterator<Item = usize>, at_once: usize) -> Vec<u8> {
    let (mut frames, mut out, mut buffer) = (Frames::default(), Vec::new(), vec![0; at_once]);
    let mut rest = data;
    let mut hand_out = |frames: &mut Frames| {
        loop {
            match frames.hand_out(&mut buffer) {
                0 => return,
                count => out.extend_from_slice(&buffer[..count]),
            }
        }
    };
    for size in pieces {
        let (piece, after) = rest.split_at(size.clamp(1, rest.len().max(1)).min(rest.len()));
        rest = after;
        frames.take_in(piece);
        hand_out(&mut frames);
        if rest.is_empty() {
            break;
        }
    }
    frames.end();
    hand_out(&mut frames);
    out
}

/// What a broker sends passes in its order and its length, but for what comes back, in however
/// small pieces it comes.
///
/// # Panics
/// If that does not hold.
pub fn amqp_frames(data: &[u8]) {
    let whole = passed(data, std::iter::once(data.len()), 4_096);
    // A message that comes back passes without its content.
    let comes_back = data.windows(4).any(|four| four == [0, 60, 0, 50]);
    assert!(if comes_back {
        whole.len() <= data.len()
    } else {
        whole.len() == data.len()
    });
    assert!(SPOILT.is_ascii());
    // What begins like no frame passes at once, as far as it has come: only frames may be compared
    // piece by piece.
    if is_of_frames(data) {
        let odd = data
            .iter()
            .map(|byte| usize::from(*byte % 23) + 1)
            .chain(std::iter::repeat(1));
        assert_eq!(passed(data, odd, 7), whole);
    }
}

/// Whether all of it is frames, but for the end of the last one.
fn is_of_frames(mut data: &[u8]) -> bool {
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
