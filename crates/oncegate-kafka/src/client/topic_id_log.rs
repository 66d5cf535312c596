//! Parses librdkafka's log lines about topic ids, and names the start offset of a recreated topic.
//!
//! # Workarounds
//! Seen with librdkafka 2.12.1.
//!
//! - *Symptom:* a changed topic id does not reset the position. If the new topic is longer than the
//!   deleted one was, its first messages are skipped. *Workaround:* no event reports the change, so
//!   [`IdChange::parse`] parses the debug line that does, and `poll` seeks to the beginning.
//!   *Upstream:* confluentinc/librdkafka#3255 and `docs/upstream/librdkafka-topic-id-change.md`.
//!   *Test:* `a_recreated_topic_that_is_longer_than_before_is_read_completely` in `tests/kafka`.
//!   *May be removed* when librdkafka resets the position or reports the change as an event.
//! - *Symptom:* `Offset::Beginning` of a recreated topic is the log start offset of the deleted
//!   one. *Workaround:* reading starts at [`RECREATED_LOG_START`]. *Upstream:*
//!   `docs/upstream/librdkafka-cached-beginning.md`. *Test:* `a_recreated_topic_starts_at_offset_0`
//!   in `rebalance`. *May be removed* when librdkafka discards the cached offset with the topic id.

use rdkafka::topic_partition_list::Offset;

/// The start of a recreated topic's log, instead of `Offset::Beginning`.
pub(crate) const RECREATED_LOG_START: Offset = Offset::Offset(0);

/// The topic id that librdkafka logs as the former id of a topic whose id it had not seen before.
pub(crate) const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

/// A log line about a changed topic id.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct IdChange<'a> {
    pub(crate) topic: &'a str,
    /// The topic id before the change; [`NO_ID`] for the first one.
    pub(crate) before: &'a str,
    /// The topic id from now on.
    pub(crate) id: &'a str,
}

impl<'a> IdChange<'a> {
    /// Parses a line; `None` if it does not report a changed topic id.
    pub(crate) fn parse(line: &'a str) -> Option<Self> {
        let (topic, ids) = line.split_once(" changed id from ")?;
        let (_, topic) = topic.rsplit_once("Topic ")?;
        let (before, id) = ids.trim_end().split_once(" to ")?;
        Some(Self { topic, before, id })
    }
}
