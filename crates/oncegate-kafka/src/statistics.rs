//! What librdkafka says of itself every two seconds, of which one thing is of interest: whether it
//! is with its group.
//!
//! Its events say that no broker is reached, once, and never that one is reached again, or that the
//! group is not.

use std::time::Duration;

/// How often it says so.
pub(crate) const EVERY: Duration = Duration::from_secs(2);

/// After this it says it. All of it is JSON of a kilobyte for each partition, or none, where it has
/// quoted a name that has a quote in it.
const STATE: &[u8] = br#""cgrp": { "state": ""#;

/// Whether the client is connected to the broker that coordinates its group. What does not say so
/// says nothing against it.
pub(crate) fn is_with_its_group(statistics: &[u8]) -> bool {
    // Little comes after it.
    let at = statistics.windows(STATE.len()).rposition(|it| it == STATE);
    at.is_none_or(|at| statistics[at + STATE.len()..].starts_with(br#"up""#))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_says_that_it_is_not_up_does() {
        // As librdkafka has it, which quotes no name.
        let whole = |group| {
            format!(
                r#"{{ "name": "a"b", "brokers":{{ "b/1": {{"state":"DOWN"}} }}, "topics":{{}}{group}, "tx":3}}"#
            )
        };
        let is = |group| is_with_its_group(whole(group).as_bytes());
        assert!(is(
            r#", "cgrp": { "state": "up", "stateage": 1, "join_state": "steady" }"#
        ));
        assert!(!is(
            r#", "cgrp": { "state": "query-coord", "stateage": 1, "join_state": "init" }"#
        ));
        assert!(!is(
            r#", "cgrp": { "state": "wait-broker-transport", "join_state": "steady" }"#
        ));
        assert!(is("") && is_with_its_group(b"cut o"));
    }
}
