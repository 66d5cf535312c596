//! librdkafka and its Rust wrapper.
//!
//! | modules | content |
//! | --- | --- |
//! | `topics`, `retention` | before the group is joined: topics exist and retain dead letters |
//! | `poll`, `assignment_wait` | the polling thread, the only one that serves the group |
//! | `callbacks`, `rebalance`, `records`, `start_position`, `time_budget`, `topic_ids`, `commits` | what runs on that thread: rebalances, records, errors, offsets |
//! | `watch`, `stall`, `missing_topics`, `lost_metadata` | a second client and thread: lag, stalled partitions, deleted topics, the group coordinator |
//! | `dead_letters` | the producers |
//! | `batch` | reading in batches: the only `unsafe` code |
//! | `log`, `error`, `connection_errors`, `statistics`, `topic_id_log`, `cluster_id`, `commit_metadata` | parts of the wrapper |
//!
//! # Workarounds
//!
//! `docs/upstream/README.md` lists all of them with their upstream issues or reports. Each module
//! describes its own: `batch`, `cluster_id`, `commit_metadata`, `lost_metadata`, `statistics`,
//! `topic_id_log`. These are part of the source, because they depend on its state; seen with
//! librdkafka 2.12.1 and rdkafka 0.39.0:
//!
//! - *Symptom:* in `rd_kafka_consume_batch_queue` an error of a partition advances the position like a
//!   message: after a rebalance, reading resumes one message too far. *Code:* `records` seeks after
//!   each error (`seek_after_last_read`). *Upstream:*
//!   `docs/upstream/librdkafka-batch-error-position.md`. *Test:*
//!   `a_rebalance_after_a_fetch_that_failed_skips_nothing` in `tests/kafka`. *May be removed* when
//!   the position does not change.
//! - *Symptom:* a stored offset below the committed one is never committed. *Code:* `partition`
//!   commits the first offset of each assignment at once (`SendMode::Immediate`). *Upstream:*
//!   confluentinc/librdkafka#1372 (open); #1538 and #1558 describe a shortened log. *Test:*
//!   `a_log_that_was_truncated_below_the_committed_offset_commits_lower` in `tests/kafka`. *May be
//!   removed* when librdkafka commits each changed offset.
//! - *Symptom:* an error response resets the cached log start offset. *Code:* `partition`
//!   keeps offset gaps until it is known. *Upstream:*
//!   `docs/upstream/librdkafka-watermarks-after-error.md`. *Test:*
//!   `a_deferred_gap_is_counted_once_when_the_log_start_is_known` in `offset_gaps`. *May be removed*
//!   when the offset is kept.

use std::sync::{Mutex, MutexGuard, PoisonError};

mod assignment_wait;
// The workspace denies `unsafe` code; only `batch` allows it.
#[allow(unsafe_code)]
pub(crate) mod batch;
pub(crate) mod callbacks;
mod cluster_id;
mod commit_metadata;
mod commits;
pub(crate) mod connection_errors;
pub(crate) mod dead_letters;
pub(crate) mod error;
mod log;
mod lost_metadata;
mod missing_topics;
pub(crate) mod poll;
mod rebalance;
mod records;
mod retention;
mod stall;
mod start_position;
pub(crate) mod statistics;
mod time_budget;
mod topic_id_log;
mod topic_ids;
pub(crate) mod topics;
pub(crate) mod watch;

/// Locks data that each thread leaves complete, even if it panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
