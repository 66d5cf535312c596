//! The age of a message.

use std::time::{Duration, SystemTime};

use crate::message::Message;
use crate::source::first_seen_header;

/// The time since the message's own timestamp, or since its first copy was received (the header
/// `oncegate-first-seen`), whichever is longer. Ignores a time in the future. `None` without
/// either.
#[inline]
pub(crate) fn age(message: &Message, now: SystemTime) -> Option<Duration> {
    let first_seen = first_seen_header(message)
        .and_then(|ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms)));
    message
        .sent_at
        .into_iter()
        .chain(first_seen)
        .filter_map(|at| now.duration_since(at).ok())
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Headers;
    use crate::source::headers;

    #[test]
    fn a_message_is_as_old_as_its_first_copy() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let seen = |value: &[u8]| {
            let mut block = Vec::new();
            Headers::encode(&mut block, headers::FIRST_SEEN.as_bytes(), Some(value));
            Headers::from_block(block.into())
        };
        let now = SystemTime::now();
        let ms = |at: SystemTime| {
            at.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_millis()
                .to_string()
        };
        let day_ago = ms(now - hours(24));
        let aged = |headers, sent_at| {
            age(
                &Message {
                    headers,
                    sent_at,
                    ..Message::default()
                },
                now,
            )
        };
        let about = |age: Option<Duration>, expected| {
            age.is_some_and(|age| age >= expected && age < expected + hours(1))
        };

        assert_eq!(aged(Headers::default(), None), None);
        assert!(about(
            aged(Headers::default(), Some(now - hours(2))),
            hours(2)
        ));
        assert!(about(aged(seen(day_ago.as_bytes()), None), hours(24)));
        assert!(
            about(aged(seen(day_ago.as_bytes()), Some(now)), hours(24)),
            "a copy is published with a new timestamp"
        );
        assert!(about(
            aged(seen(ms(now).as_bytes()), Some(now - hours(2))),
            hours(2)
        ));
        for invalid in [
            &b"soon"[..],
            b"",
            b"-1",
            b"\xff",
            b"99999999999999999999",
            b"18446744073709551615",
        ] {
            assert_eq!(aged(seen(invalid), None), None, "{invalid:?}");
        }
    }
}
