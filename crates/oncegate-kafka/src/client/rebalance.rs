//! Rebalances: assigns and revokes partitions.

use std::time::{Duration, Instant};

use oncegate_core::internal::fault;
use rdkafka::consumer::{Consumer, RebalanceProtocol};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::callbacks::{CallbackContext, GroupConsumer};
use super::log::log_error;
use super::time_budget::TimeBudget;
use super::topic_id_log::RECREATED_LOG_START;
use super::{commits, start_position};
use crate::partition::{PartitionEvent, StartPosition};
use crate::settings::{OutOfRange, StartAt};
use crate::shared::{RevocationKind, SourcePhase};

/// How long one read waits for a message while a revocation waits for unsettled deliveries.
const DRAIN_TURN: Duration = Duration::from_millis(5);

impl CallbackContext {
    /// Determines where each partition starts, and assigns the partitions.
    pub(super) fn assign(&self, consumer: &GroupConsumer, partitions: &TopicPartitionList) {
        let Some(queue) = self.queue() else {
            // The client is closing: it reads nothing more, and its requests for committed offsets
            // get no response.
            return self.assign_partitions(consumer, partitions);
        };
        let mut assigned = partitions.clone();
        let is_cancelled =
            || self.shared.lock().phase() > SourcePhase::Running || consumer.assignment_lost();
        let mut budget = TimeBudget::new(self.request_budget, &is_cancelled);
        let starts = start_position::start_positions(
            consumer,
            partitions,
            &self.topics,
            &mut budget,
            || queue.forward_log(),
        );
        let mut log_starts = start_position::log_starts(consumer, &starts, self.start, &mut budget);
        for (topic, partition, start) in starts {
            // Before the assignment: otherwise the first messages arrive in librdkafka's main
            // queue.
            if !queue.forward_partition(&topic, partition) {
                tracing::error!(
                    topic,
                    partition,
                    "partition queue not found in librdkafka; its messages are read one by one, which takes longer; restart the consumer to read them in batches"
                );
            }
            let log = self.topics.log(&topic, start);
            let mut state = self.shared.lock();
            state.assign(&topic, partition, start, log);
            if let Some(log_start) = log_starts.remove(&(topic.clone(), partition)) {
                // The start offset is committed even if the partition is empty.
                state.apply(&topic, partition, PartitionEvent::StartFound(log_start));
            }
            drop(state);
            if let Some(offset) = self.start_offset(&topic, partition, start) {
                log_error(
                    "cannot set the start offset of a partition; reading starts at the committed offset, or as auto.offset.reset says",
                    assigned.set_partition_offset(&topic, partition, offset),
                );
            }
        }
        metrics::counter!(crate::metric::ASSIGNED).increment(partitions.count() as u64);
        self.assign_partitions(consumer, &assigned);
        // In a partition that was just assigned, librdkafka has no position yet. Recorded now, this
        // shows later that a reported position is not one of an earlier assignment.
        self.advance_past_transaction_markers(consumer);
    }

    /// Logs and counts where reading starts, and with `OutOfRange::Error` ends the source if the
    /// topic was, or may have been, recreated. Returns the offset to assign; `None` if librdkafka
    /// starts at the committed offset or as `auto.offset.reset` says.
    fn start_offset(&self, topic: &str, partition: i32, start: StartPosition) -> Option<Offset> {
        use StartPosition as S;
        let halts = self.out_of_range == OutOfRange::Error;
        if let S::Mirrored(_) | S::Ambiguous(_) = start {
            metrics::counter!(crate::metric::REPLICA_OFFSETS).increment(1);
        }
        match start {
            S::Committed(offset) | S::Mirrored(offset) | S::Ambiguous(offset) => {
                tracing::info!(topic, partition, offset, "partition assigned");
                if halts && matches!(start, S::Ambiguous(_)) {
                    let error = start_position::ambiguous(topic, partition, offset);
                    self.halt(topic, partition, error);
                }
                None
            }
            S::Unknown => {
                tracing::info!(topic, partition, "partition assigned");
                None
            }
            S::Recreated => {
                metrics::counter!(crate::metric::TOPICS_RECREATED).increment(1);
                tracing::error!(
                    topic,
                    partition,
                    "partition assigned; topic recreated: the committed offset belongs to the deleted topic; reading from the beginning; with OutOfRange::Error the consumer ends, and reads from the beginning after a restart; with IdSource::position(), give the consumer another .scope(…)"
                );
                if halts {
                    self.halt(topic, partition, start_position::recreated(topic));
                }
                Some(RECREATED_LOG_START)
            }
            S::AddedPartition => {
                metrics::counter!(crate::metric::PARTITIONS_ADDED).increment(1);
                tracing::warn!(
                    topic,
                    partition,
                    "partition assigned; partition added: the group already reads its topic; reading the new partition from its beginning; check whether producers now send a key's messages to another partition, because messages of one key are not ordered across partitions"
                );
                Some(Offset::Beginning)
            }
            S::NoOffset if self.start == StartAt::Earliest => {
                tracing::info!(
                    topic,
                    partition,
                    "partition assigned; the group has no committed offset for it; reading from the beginning"
                );
                Some(Offset::Beginning)
            }
            S::NoOffset => {
                tracing::info!(
                    topic,
                    partition,
                    "partition assigned; the group has no committed offset for it"
                );
                None
            }
        }
    }

    fn assign_partitions(&self, consumer: &GroupConsumer, partitions: &TopicPartitionList) {
        fault::point("kafka.assign.before");
        let outcome = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
            _ => consumer.assign(partitions),
        };
        fault::point("kafka.assign.after");
        log_error(
            "cannot assign partitions; nothing is read from them before the next rebalance; restart the consumer if the lag grows",
            outcome,
        );
    }

    /// Waits for unsettled deliveries up to `drain_on_revoke`, stores the offsets, and unassigns
    /// the partitions. librdkafka commits stored offsets when it unassigns partitions, before
    /// another member is assigned them. Lost partitions may already belong to another member, so
    /// for these nothing is awaited or stored.
    pub(super) fn revoke(&self, consumer: &GroupConsumer, partitions: &TopicPartitionList) {
        let revoked = topic_partitions(partitions);
        let kind = revocation_kind(consumer);
        let lost = kind == RevocationKind::Lost;
        let store = || commits::store(consumer, &self.shared);
        let unsettled =
            self.shared
                .end_assignments(&revoked, kind, |epochs| self.drain(epochs), store);
        for (topic, partition) in &revoked {
            tracing::info!(
                topic,
                partition,
                lost,
                unsettled_of_all_revoked = unsettled,
                "partition revoked"
            );
        }
        metrics::counter!(crate::metric::REVOKED, "lost" => if lost { "yes" } else { "no" })
            .increment(revoked.len() as u64);
        self.unassign(consumer, partitions);
    }

    /// Waits until every delivery of these assignments is settled or released, up to
    /// `drain_on_revoke`. Other partitions are read while it waits.
    pub(super) fn drain(&self, epochs: &[u64]) {
        let end = Instant::now() + self.revoke_drain_timeout;
        while Instant::now() < end {
            let state = self.shared.lock();
            if state.phase() >= SourcePhase::Closing || state.handed_out(epochs) == 0 {
                return;
            }
            drop(state);
            self.forward_log();
            self.read_batch(DRAIN_TURN);
        }
        let unsettled = self.shared.lock().handed_out(epochs);
        tracing::warn!(
            group = self.group,
            unsettled,
            timeout = ?self.revoke_drain_timeout,
            "drain_on_revoke exceeded, abandoning unsettled deliveries; they are redelivered; if handlers take longer, raise .drain_on_revoke(…), which is capped at a third of max.poll.interval.ms"
        );
    }

    /// Unassigns the partitions, which ends the rebalance for this member.
    pub(super) fn unassign(&self, consumer: &GroupConsumer, partitions: &TopicPartitionList) {
        fault::point("kafka.unassign.before");
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
            _ => consumer.unassign(),
        };
        fault::point("kafka.unassign.after");
        log_error(
            "cannot unassign partitions; the group waits for this member until max.poll.interval.ms; restart the consumer if it stays without partitions",
            unassigned,
        );
    }
}

/// Whether the partitions that are being revoked still belong to this member.
pub(super) fn revocation_kind(consumer: &GroupConsumer) -> RevocationKind {
    if consumer.assignment_lost() {
        RevocationKind::Lost
    } else {
        RevocationKind::Revoked
    }
}

fn topic_partitions(partitions: &TopicPartitionList) -> Vec<(String, i32)> {
    partitions
        .elements()
        .iter()
        .map(|it| (it.topic().to_owned(), it.partition()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kafka;

    /// For `Offset::Beginning` librdkafka would use the log start offset of the deleted topic if it
    /// has read that topic.
    #[test]
    fn a_recreated_topic_starts_at_offset_0() {
        let context = CallbackContext::with_new_state(&Kafka::topic("t").brokers("b").group("g"));
        let start_offset = |start| context.start_offset("t", 0, start);
        assert_eq!(
            start_offset(StartPosition::Recreated),
            Some(Offset::Offset(0))
        );
        assert_eq!(
            [StartPosition::AddedPartition, StartPosition::NoOffset].map(start_offset),
            [Some(Offset::Beginning); 2]
        );
        assert_eq!(
            [
                StartPosition::Committed(7),
                StartPosition::Unknown,
                StartPosition::Mirrored(7),
                StartPosition::Ambiguous(7)
            ]
            .map(start_offset),
            [None; 4]
        );
    }
}
