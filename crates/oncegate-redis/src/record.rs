//! The format of a marker in Redis.
//!
//! A done marker is `1`, as programs that deduplicate with `SET … 1 … NX` write it, or `-1` and the
//! 18 digits of its fingerprint: Redis stores both as integers. A time in nanoseconds, which other
//! programs write, is not such a number. Every other record begins with a version:
//!
//! ```text
//! v1 p <token> <attempts> <lease ms> <horizon ms> <guarantee a|e|b> <fingerprint or ->   in progress
//! v1 w …                                                                                 in doubt, no holder reconciles it
//! v1 r …                                                                                 in doubt, its holder reconciles it
//! v1 x <attempt> <fingerprint or ->                                                      rejected
//! v1 c <attempts>                                                                        cleared
//! ```
//!
//! `<attempts>` is `<number> <base> <crashes> <n|u>`: the number of the last attempt, how many
//! attempts `max_attempts` does not count, how many ended in a crash since the id was last redriven,
//! and whether earlier attempts had no effect (`n`) or an unknown one (`u`).
//!
//! `<horizon ms>` is how long after the last write the marker expires if it is not resolved before.
//!
//! `apply.lua` reads and writes the same format.

use std::fmt::Write;
use std::time::Duration;

use oncegate_core::marker::{
    Attempts, Doubt, Effect, Fingerprint, Guarantee, Hold, Marker, Operation, Terms, Token,
};

/// The longest time in a record or an expiry, a hundred years: the expiry of a longer one overflows
/// in Redis.
const LONGEST_MS: u64 = 100 * 365 * 24 * 3600 * 1000;

/// The version of the records that this release reads and writes.
pub(crate) const VERSION: u64 = 1;

/// Why a value cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecodeError {
    /// A newer release wrote it, with this version of the record.
    UnknownVersion(u64),
    /// Another program wrote it, or it is truncated.
    NotAMarker,
}

/// Whole milliseconds, rounded up so that nothing expires early.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000))
        .map_or(LONGEST_MS, |ms| ms.min(LONGEST_MS))
}

/// Whole milliseconds of an expiry, at least 1: Redis rejects 0.
pub(crate) fn expiry(duration: Duration) -> u64 {
    milliseconds(duration).max(1)
}

/// The code of a guarantee in a record.
pub(crate) fn guarantee_code(guarantee: Guarantee) -> char {
    match guarantee {
        Guarantee::AtMostOnce => 'a',
        Guarantee::EffectivelyOnce => 'e',
        Guarantee::Bare => 'b',
    }
}

/// A token in hexadecimal.
pub(crate) fn token(token: Token) -> String {
    format!("{:032x}", token.0)
}

/// A fingerprint as 18 digits, or `-`.
fn format_fingerprint(fingerprint: Option<Fingerprint>) -> String {
    fingerprint.map_or_else(|| "-".into(), |value| format!("{:018}", value.get()))
}

/// The record of a first claim with this operation's token and terms, and this attempt number.
pub(crate) fn first_claim(operation: &Operation, attempt: u32) -> String {
    let Operation { token, terms, .. } = *operation;
    let Terms {
        guarantee,
        lease,
        fingerprint,
        ..
    } = terms;
    let (attempts, earlier, horizon) = (Attempts::new(attempt), Effect::Nothing, terms.horizon());
    format_hold(
        'p',
        &Hold {
            token,
            attempts,
            earlier,
            lease,
            horizon,
            guarantee,
            fingerprint,
        },
    )
}

/// The record of a marker; empty for [`Marker::Absent`].
pub(crate) fn encode(marker: &Marker) -> String {
    match marker {
        Marker::Absent => String::new(),
        Marker::Cleared { attempts, effect } => {
            format!("v1 c {}", format_attempts(attempts, *effect))
        }
        Marker::InProgress(hold) => format_hold('p', hold),
        Marker::InDoubt(hold, Doubt::Waiting) => format_hold('w', hold),
        Marker::InDoubt(hold, Doubt::Reconciling) => format_hold('r', hold),
        Marker::Rejected {
            attempt,
            fingerprint,
        } => format!("v1 x {attempt} {}", format_fingerprint(*fingerprint)),
        Marker::Done(fingerprint) => done(*fingerprint),
    }
}

/// The record of a done marker.
pub(crate) fn done(fingerprint: Option<Fingerprint>) -> String {
    fingerprint.map_or_else(|| "1".into(), |value| format!("-1{:018}", value.get()))
}

fn format_attempts(
    Attempts {
        number,
        base,
        crashes,
    }: &Attempts,
    effect: Effect,
) -> String {
    let effect = match effect {
        Effect::Nothing => 'n',
        Effect::Unknown => 'u',
    };
    format!("{number} {base} {crashes} {effect}")
}

fn format_hold(kind: char, hold: &Hold) -> String {
    let mut record = String::with_capacity(96);
    let (lease, horizon, guarantee) = (
        milliseconds(hold.lease),
        expiry(hold.horizon),
        guarantee_code(hold.guarantee),
    );
    let attempts = format_attempts(&hold.attempts, hold.earlier);
    // Writing to a String cannot fail.
    let _ = write!(
        record,
        "v1 {kind} {:032x} {attempts} {lease} {horizon} {guarantee} ",
        hold.token.0
    );
    let _ = match hold.fingerprint {
        Some(fingerprint) => write!(record, "{:018}", fingerprint.get()),
        None => write!(record, "-"),
    };
    record
}

/// Reads a record.
///
/// # Errors
/// [`DecodeError`] if it is no marker of this release.
pub(crate) fn decode(raw: &[u8]) -> Result<Marker, DecodeError> {
    let text = std::str::from_utf8(raw).map_err(|_| DecodeError::NotAMarker)?;
    if text == "1" {
        return Ok(Marker::Done(None));
    }
    if let Some(version) = text
        .strip_prefix('v')
        .and_then(|record| record.split_once(' '))
        .map(|(version, _)| version)
        && version != "1"
        && !version.is_empty()
        && version.bytes().all(|byte| byte.is_ascii_digit())
    {
        return Err(DecodeError::UnknownVersion(read_version(version)));
    }
    parse(text).ok_or(DecodeError::NotAMarker)
}

/// A version as a number; [`u64::MAX`] if it is larger.
pub(crate) fn read_version(digits: &str) -> u64 {
    digits.parse().unwrap_or(u64::MAX)
}

fn parse(text: &str) -> Option<Marker> {
    if let Some(digits) = text.strip_prefix("-1") {
        return Some(Marker::Done(Some(read_fingerprint(digits)?)));
    }
    let mut fields = text.strip_prefix("v1 ")?.split(' ');
    let kind = fields.next()?;
    let marker = match kind {
        "c" => {
            let (attempts, effect) = read_attempts(&mut fields)?;
            Marker::Cleared { attempts, effect }
        }
        "x" => {
            let attempt = read_count(fields.next()?)?;
            Marker::Rejected {
                attempt,
                fingerprint: read_optional_fingerprint(fields.next()?)?,
            }
        }
        "p" | "w" | "r" => {
            let token = read_token(fields.next()?)?;
            let (attempts, earlier) = read_attempts(&mut fields)?;
            let hold = Hold {
                token,
                attempts,
                earlier,
                lease: read_duration(fields.next()?)?,
                horizon: read_duration(fields.next()?)?,
                guarantee: read_guarantee(fields.next()?)?,
                fingerprint: read_optional_fingerprint(fields.next()?)?,
            };
            match kind {
                "p" => Marker::InProgress(hold),
                "w" => Marker::InDoubt(hold, Doubt::Waiting),
                _ => Marker::InDoubt(hold, Doubt::Reconciling),
            }
        }
        _ => return None,
    };
    fields.next().is_none().then_some(marker)
}

/// A number of at most this many decimal digits, without a sign.
fn digits(text: &str, longest: usize) -> Option<u64> {
    let fits =
        !text.is_empty() && text.len() <= longest && text.bytes().all(|byte| byte.is_ascii_digit());
    fits.then(|| text.parse().ok()).flatten()
}

fn read_attempts<'a>(fields: &mut impl Iterator<Item = &'a str>) -> Option<(Attempts, Effect)> {
    let mut count = || read_count(fields.next()?);
    let attempts = Attempts {
        number: count()?,
        base: count()?,
        crashes: count()?,
    };
    let effect = match fields.next()? {
        "n" => Effect::Nothing,
        "u" => Effect::Unknown,
        _ => return None,
    };
    Some((attempts, effect))
}

fn read_count(text: &str) -> Option<u32> {
    digits(text, 10)?.try_into().ok()
}

fn read_duration(text: &str) -> Option<Duration> {
    digits(text, 15).map(Duration::from_millis)
}

fn read_token(text: &str) -> Option<Token> {
    let fits = text.len() == 32
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    fits.then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
        .map(Token)
}

fn read_guarantee(text: &str) -> Option<Guarantee> {
    match text {
        "a" => Some(Guarantee::AtMostOnce),
        "e" => Some(Guarantee::EffectivelyOnce),
        "b" => Some(Guarantee::Bare),
        _ => None,
    }
}

fn read_fingerprint(text: &str) -> Option<Fingerprint> {
    if text.len() == 18 {
        digits(text, 18).map(Fingerprint::new)
    } else {
        None
    }
}

fn read_optional_fingerprint(text: &str) -> Option<Option<Fingerprint>> {
    if text == "-" {
        Some(None)
    } else {
        read_fingerprint(text).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(guarantee: Guarantee, fingerprint: Option<Fingerprint>) -> Hold {
        let [lease, horizon] = [30_000, 86_400_000].map(Duration::from_millis);
        let attempts = Attempts {
            number: 7,
            base: 3,
            crashes: 2,
        };
        Hold {
            token: Token(0xab),
            attempts,
            earlier: Effect::Unknown,
            lease,
            horizon,
            guarantee,
            fingerprint,
        }
    }

    fn markers() -> Vec<Marker> {
        let most = Attempts {
            number: u32::MAX,
            base: u32::MAX,
            crashes: u32::MAX,
        };
        let mut markers: Vec<_> = [Effect::Nothing, Effect::Unknown]
            .map(|effect| Marker::Cleared {
                attempts: most,
                effect,
            })
            .into();
        for body in [
            None,
            Some(Fingerprint::new(0)),
            Some(Fingerprint::new(Fingerprint::LIMIT - 1)),
        ] {
            markers.extend([
                Marker::Rejected {
                    attempt: 5,
                    fingerprint: body,
                },
                Marker::Done(body),
            ]);
            for guarantee in [
                Guarantee::AtMostOnce,
                Guarantee::EffectivelyOnce,
                Guarantee::Bare,
            ] {
                let hold = hold(guarantee, body);
                markers.push(Marker::InProgress(hold));
                markers.extend(
                    [Doubt::Waiting, Doubt::Reconciling].map(|doubt| Marker::InDoubt(hold, doubt)),
                );
            }
        }
        markers
    }

    #[test]
    fn every_marker_is_read_as_it_was_written() {
        for marker in markers() {
            let record = encode(&marker);
            assert_eq!(decode(record.as_bytes()), Ok(marker), "{record}");
        }
    }

    #[test]
    fn the_records_are_the_documented_bytes() {
        assert_eq!(encode(&Marker::Done(None)), "1");
        assert_eq!(
            encode(&Marker::Done(Some(Fingerprint::new(42)))),
            "-1000000000000000042"
        );
        let in_progress = Marker::InProgress(hold(Guarantee::AtMostOnce, None));
        assert_eq!(
            encode(&in_progress),
            "v1 p 000000000000000000000000000000ab 7 3 2 u 30000 86400000 a -"
        );
        assert_eq!(
            encode(&Marker::Cleared {
                attempts: Attempts::new(2),
                effect: Effect::Nothing
            }),
            "v1 c 2 0 0 n"
        );
        assert_eq!(
            encode(&Marker::Rejected {
                attempt: 2,
                fingerprint: None
            }),
            "v1 x 2 -"
        );
    }

    #[test]
    fn a_truncated_record_is_not_a_marker() {
        for marker in markers() {
            let record = encode(&marker);
            for end in 0..record.len() {
                let cut = &record[..end];
                assert_eq!(
                    decode(cut.as_bytes()),
                    Err(DecodeError::NotAMarker),
                    "{cut}"
                );
            }
        }
    }

    #[test]
    fn values_of_other_programs_are_not_markers() {
        for (newer, version) in [
            ("v2 p x", 2),
            ("v10 ", 10),
            ("v0 c 1", 0),
            ("v99999999999999999999 x", u64::MAX),
        ] {
            assert_eq!(
                decode(newer.as_bytes()),
                Err(DecodeError::UnknownVersion(version)),
                "{newer}"
            );
        }
        let others = [
            "",
            "2",
            "01",
            "1 ",
            "v1",
            "v1 c -1 0 0 n",
            "v1 c 4294967296 0 0 n",
            "v1 c 1 0 0 n ",
            "v1 c 1 0 0",
            "v1 c 1",
            "v1 x 5",
        ];
        // Among them a time in nanoseconds, which other programs write as a marker.
        for other in others.into_iter().chain([
            "processing",
            "\u{e9}",
            "v 1",
            "1763900000000000000",
            "-1",
            "-176390000000000000",
        ]) {
            assert_eq!(
                decode(other.as_bytes()),
                Err(DecodeError::NotAMarker),
                "{other}"
            );
        }
        assert_eq!(decode(&[0xff]), Err(DecodeError::NotAMarker));
    }

    #[test]
    fn times_are_rounded_up_and_bounded() {
        assert_eq!(milliseconds(Duration::from_nanos(1)), 1);
        assert_eq!(milliseconds(Duration::ZERO), 0);
        assert_eq!(expiry(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::MAX), LONGEST_MS);
    }
}
