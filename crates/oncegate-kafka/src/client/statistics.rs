//! librdkafka's statistics, from which only the state of the group coordinator is used.
//!
//! Error events are not sufficient: they report once that no broker is reachable, but never that a
//! broker is reachable again, nor that the coordinator is not reachable.
//!
//! # Workaround
//! - *Symptom:* the statistics are not valid JSON if a name contains a quote. *Version:* librdkafka
//!   2.12.1.
//! - *Workaround:* this module searches for the one field that it needs, instead of parsing.
//! - *Upstream:* `docs/upstream/librdkafka-statistics-escaping.md`.
//! - *Test:* `only_statistics_with_another_state_than_up_count_as_disconnected`.
//! - *May stay:* a search also costs less than parsing.

use std::time::Duration;

/// The statistics interval.
pub(crate) const INTERVAL: Duration = Duration::from_secs(2);

/// The text before the coordinator's state.
const CGRP_STATE: &[u8] = br#""cgrp": { "state": ""#;

/// Whether the client is connected to its group coordinator. Statistics without the state count as
/// connected.
pub(crate) fn is_coordinator_up(statistics: &[u8]) -> bool {
    // The search begins at the end, because the state is near it, and the statistics have about 1
    // KB per partition.
    let at = statistics
        .windows(CGRP_STATE.len())
        .rposition(|it| it == CGRP_STATE);
    at.is_none_or(|at| statistics[at + CGRP_STATE.len()..].starts_with(br#"up""#))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_statistics_with_another_state_than_up_count_as_disconnected() {
        // As librdkafka writes it, without escaping names.
        let statistics_with = |group| {
            format!(
                r#"{{ "name": "a"b", "brokers":{{ "b/1": {{"state":"DOWN"}} }}, "topics":{{}}{group}, "tx":3}}"#
            )
        };
        let is_up = |group| is_coordinator_up(statistics_with(group).as_bytes());
        assert!(is_up(
            r#", "cgrp": { "state": "up", "stateage": 1, "join_state": "steady" }"#
        ));
        assert!(!is_up(
            r#", "cgrp": { "state": "query-coord", "stateage": 1, "join_state": "init" }"#
        ));
        assert!(!is_up(
            r#", "cgrp": { "state": "wait-broker-transport", "join_state": "steady" }"#
        ));
        assert!(is_up("") && is_coordinator_up(b"incomplete"));
    }
}
