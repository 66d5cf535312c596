//! Recognizes librdkafka's log lines about missing topics.
//!
//! # Workaround
//! - *Symptom:* librdkafka logs a missing topic as an error every second for each partition,
//!   without a code. *Version:* librdkafka 2.12.1.
//! - *Workaround:* [`is_missing_line`] recognizes the lines, which are then logged as debug lines.
//! - *Upstream:* confluentinc/librdkafka#4310 (open) asks for fewer lookups of such a topic.
//! - *Test:* `only_lines_about_missing_topics_are_recognized`, below.
//! - *May be removed* when librdkafka reports a missing topic once, or with a code.

/// Whether this line of librdkafka's log says that a topic or partition does not exist. Instead of
/// the line, `missing_topics` logs the topic once a minute.
pub(super) fn is_missing_line(facility: &str, line: &str) -> bool {
    facility == "ERROR"
        && [
            "]: topic does not exist (",
            "]: desired partition is no longer available (",
        ]
        .iter()
        .any(|text| line.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_about_missing_topics_are_recognized() {
        for (facility, line, is) in [
            (
                "ERROR",
                "[thrd:app]: oncegate#consumer-3: payments [1]: topic does not exist (Broker: Unknown topic or partition)",
                true,
            ),
            (
                "ERROR",
                "[thrd:app]: oncegate#consumer-3: payments [1]: desired partition is no longer available (Local: Unknown partition)",
                true,
            ),
            ("FAIL", "x: payments [1]: topic does not exist (", false),
            ("ERROR", "[thrd:app]: 1/1 brokers are down", false),
        ] {
            assert_eq!(is_missing_line(facility, line), is, "{facility} {line}");
        }
    }
}
