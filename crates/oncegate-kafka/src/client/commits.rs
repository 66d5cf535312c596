//! Stores and commits offsets.

use oncegate_core::internal::fault;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::log::log_error;
use super::lowered_commit;
use crate::shared::{OffsetCommit, SharedState};

/// Stores the offsets to commit in librdkafka, which commits a stored offset within
/// `auto.commit.interval.ms` and when it unassigns the partition. Offsets that librdkafka would not
/// commit by itself are committed at once.
pub(crate) fn store<C: ConsumerContext>(consumer: &BaseConsumer<C>, shared: &SharedState) {
    let commits = shared.lock().commits();
    if commits.is_empty() {
        return;
    }
    fault::point("kafka.commit.before");
    // Offsets that are committed at once are stored too: otherwise librdkafka would next commit an
    // earlier stored offset, which may be higher.
    if let Err(error) = consumer.store_offsets(&partition_list(commits.iter())) {
        // The partition belongs to another member now. That member receives the messages again, and
        // skips them as duplicates.
        tracing::debug!(%error, "cannot store offsets of a revoked partition");
    }
    fault::point("kafka.commit.stored");
    lowered_commit::commit_at_once(consumer, &commits);
}

pub(super) fn partition_list<'a>(
    commits: impl Iterator<Item = &'a OffsetCommit>,
) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for commit in commits {
        let mut element = list.add_partition(&commit.topic, commit.partition);
        log_error(
            "cannot set the offset to commit",
            element.set_offset(Offset::Offset(commit.offset)),
        );
        if let Some(identity) = &commit.identity {
            element.set_metadata(identity.to_string());
        }
    }
    list
}
