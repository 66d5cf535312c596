//! Commits offsets that may be below the offsets that the broker has committed.
//!
//! # Workaround
//! - *Symptom:* a stored offset below the committed one is never committed, for example after a log
//!   was truncated. *Version:* librdkafka 2.12.1.
//! - *Workaround:* the first offset of each assignment is committed at once
//!   (`OffsetCommitMode::Immediate`), and repeatedly until the broker confirms a commit.
//! - *Upstream:* confluentinc/librdkafka#1372 (open); #1538 and #1558 describe a shortened log.
//! - *Test:* `a_log_that_was_truncated_below_the_committed_offset_commits_lower` in `tests/kafka`.
//! - *May be removed* when librdkafka commits each changed offset.

use oncegate_core::internal::fault;
use rdkafka::consumer::{BaseConsumer, ConsumerContext};

use super::batch;
use super::commits::partition_list;
use super::log::log_error;
use crate::partition::OffsetCommitMode;
use crate::shared::OffsetCommit;

/// Sends a commit request for the offsets whose mode is `Immediate`, and does not wait for the
/// response.
pub(super) fn commit_at_once<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    commits: &[OffsetCommit],
) {
    let sent = partition_list(
        commits
            .iter()
            .filter(|commit| commit.mode == OffsetCommitMode::Immediate),
    );
    if sent.count() > 0 {
        log_error(
            "cannot commit offsets; the commit is repeated unless the partition is revoked; check the group coordinator",
            batch::commit(consumer, &sent),
        );
        fault::point("kafka.commit.sent");
    }
}
