//! What librdkafka says of itself every two seconds, of which one thing is of interest: whether it is with its group.
//!
//! Its events say that no broker is reached, once, and never that one is reached again, or that the group is not.

use std::time::Duration;

use serde::Deserialize;

/// How often it says so.
pub(crate) const EVERY: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
struct Statistics<'a> {
    #[serde(borrow)]
    cgrp: Option<Group<'a>>,
}

#[derive(Deserialize)]
struct Group<'a> {
    state: &'a str,
}

/// Whether the client is connected to the broker that coordinates its group. What cannot be read says nothing against it.
pub(crate) fn is_with_its_group(statistics: &[u8]) -> bool {
    let state = serde_json::from_slice::<Statistics<'_>>(statistics).ok().and_then(|it| it.cgrp);
    state.is_none_or(|group| group.state == "up")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_says_that_it_is_not_up_does() {
        let whole = |group| format!(r#"{{ "name": "a", "brokers":{{ "b/1": {{"state":"DOWN"}} }}, "topics":{{}}{group}, "tx":3}}"#);
        let is = |group| is_with_its_group(whole(group).as_bytes());
        assert!(is(r#", "cgrp": { "state": "up", "stateage": 1, "join_state": "steady" }"#));
        assert!(!is(r#", "cgrp": { "state": "query-coord", "stateage": 1, "join_state": "init" }"#));
        assert!(!is(r#", "cgrp": { "state": "wait-broker-transport", "join_state": "steady" }"#));
        assert!(is("") && is_with_its_group(b"cut o"));
    }
}
