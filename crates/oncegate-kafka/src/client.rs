//! librdkafka and its Rust wrapper: reading in batches, log, statistics, errors, and workarounds for
//! defects.
//!
//! # Workarounds
//!
//! Seen with librdkafka 2.12.1 and rdkafka 0.39.0. Each may be removed when its test passes without
//! it; a new version of either crate is the time to try.
//!
//! | defect | workaround | test |
//! | --- | --- | --- |
//! | After a metadata response without brokers, a client may never connect again. | `lost_metadata`, `watch` and `poll` replace the consumer, `topics` the client that opens the source, `dead_letters` the producer | `lost_metadata_is_detected_once_probes_succeed_for_the_reconnect_time`, `a_client_whose_requests_fail_is_replaced` |
//! | A changed topic id does not reset the position, and appears only in the debug log. | `topic_recreated` parses the log, `poll` seeks | `a_recreated_topic_that_is_longer_than_before_is_read_completely` |
//! | For `Offset::Beginning` of a recreated topic, the log start offset of the deleted topic is used. | `context` starts at offset 0 | `a_recreated_topic_starts_at_offset_0` |
//! | An error of a partition counts as a message: after a rebalance, reading resumes one message too far. | `context` seeks after each error | `a_rebalance_after_a_fetch_that_failed_skips_nothing` |
//! | A stored offset below the committed one is never committed. | `shared` commits the first offset of each assignment at once (`SendMode::Immediate`) | `a_log_that_was_truncated_below_the_committed_offset_commits_lower` |
//! | An error response resets the cached log start offset. | `shared` defers offset gaps until it is known | `a_deferred_gap_is_counted_once_when_the_log_start_is_known` |
//! | A consumer that is unsubscribed and closed at once never leaves its group. | `poll` closes it without unsubscribing | none |
//! | Log lines in the main queue overtake rebalances. | `batch` gives the log a queue of its own | `log_lines_do_not_delay_rebalances` |
//! | Names in the statistics are not escaped, so they may be invalid JSON. | `statistics` searches for one field | `only_statistics_with_another_state_than_up_count_as_disconnected` |
//! | rdkafka: an error code that its enum lacks is undefined behavior. | `batch` reads it as a number | `an_error_code_that_the_bindings_do_not_have_is_unknown` |
//! | rdkafka: `metadata()` of a committed offset panics if it is not UTF-8. | [`commit_metadata`] | none |
//! | rdkafka: `fetch_cluster_id` leaks the string. | it is called only once per rebalance, and until it is known | none |

use std::panic::{AssertUnwindSafe, catch_unwind};

use rdkafka::topic_partition_list::TopicPartitionListElem;

// The workspace denies `unsafe` code; only `batch` allows it.
#[allow(unsafe_code)]
pub(crate) mod batch;
pub(crate) mod connection_errors;
pub(crate) mod error;
pub(crate) mod log;
pub(crate) mod lost_metadata;
pub(crate) mod statistics;

/// The metadata of a committed offset; empty if it is not UTF-8, for which rdkafka panics. Any
/// program may commit arbitrary metadata for the group.
pub(crate) fn commit_metadata(committed: &TopicPartitionListElem<'_>) -> String {
    catch_unwind(AssertUnwindSafe(|| committed.metadata().to_owned())).unwrap_or_default()
}
