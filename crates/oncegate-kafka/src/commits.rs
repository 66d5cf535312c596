//! Commits: what is settled, on its way to the broker.

use oncegate_core::fault;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::log::complain;
use crate::shared::{Commit, Shared, Way};

/// Stores what is settled; librdkafka commits it within a second, and when it gives partitions
/// back. What it would not commit by itself is sent.
pub(crate) fn store<C: ConsumerContext>(consumer: &BaseConsumer<C>, shared: &Shared) {
    let commits = shared.lock().commits();
    if commits.is_empty() {
        return;
    }
    fault::point("kafka.commit.before");
    // Also what is sent: what was stored before it may be higher, and librdkafka would commit that
    // next.
    if let Err(error) = consumer.store_offsets(&listed(commits.iter())) {
        // The partition is someone else's by now: they deliver it again, and the gate knows it.
        tracing::debug!(%error, "storing offsets");
    }
    fault::point("kafka.commit.stored");
    let sent = listed(commits.iter().filter(|commit| commit.way == Way::Sent));
    if sent.count() > 0 {
        complain("sending offsets", consumer.commit(&sent, CommitMode::Async));
        fault::point("kafka.commit.sent");
    }
}

fn listed<'a>(commits: impl Iterator<Item = &'a Commit>) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    for commit in commits {
        let mut element = list.add_partition(&commit.topic, commit.partition);
        complain(
            "an offset",
            element.set_offset(Offset::Offset(commit.offset)),
        );
        if let Some(identity) = &commit.identity {
            element.set_metadata(identity.to_string());
        }
    }
    list
}
