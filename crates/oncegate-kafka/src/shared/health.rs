//! The status of the source, and the health of its client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::Delivery;

use super::SourceState;
use super::assignment::{AssignedPartition, AssignmentState};
use crate::client::statistics;
use crate::partition::{BlockedBy, Blocker, PartitionStatus};

/// The polling thread's progress with the message queue, which all partitions share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadProgress {
    /// How many messages were read from the queue.
    read: u64,
    /// The length of the queue when it was last checked.
    queued: u64,
    /// How often the length was checked.
    length_checks: u64,
}

impl ReadProgress {
    /// Whether everything that was in the queue at `self` has been read at `now`. An empty queue
    /// counts too, because some operations are never read as messages.
    pub(crate) fn is_queue_read_at(self, now: Self) -> bool {
        now.length_checks > self.length_checks
            && (now.queued == 0 || now.read >= self.read + self.queued)
    }
}

impl SourceState {
    /// Records the length of the message queue.
    pub(crate) fn set_queue_length(&mut self, queued: u64) {
        self.progress.queued = queued;
        self.progress.length_checks += 1;
    }

    /// Counts messages that were read from the message queue.
    pub(crate) fn count_read(&mut self, count: u64) {
        self.progress.read += count;
    }

    pub(crate) fn read_progress(&self) -> ReadProgress {
        self.progress
    }

    /// Records whether a topic of the group may not exist any more.
    pub(crate) fn suspect_missing_topic(&mut self, may_be_missing: bool) {
        self.topic_may_be_missing = may_be_missing;
    }

    pub(crate) fn topic_may_be_missing(&self) -> bool {
        self.topic_may_be_missing
    }

    /// Requests that another client replaces this one. The first reason is kept.
    pub(crate) fn request_replacement(&mut self, reason: String) {
        self.replacement_reason.get_or_insert(reason);
    }

    /// Whether a replacement was requested.
    pub(crate) fn needs_replacement(&self) -> bool {
        self.replacement_reason.is_some()
    }

    /// Records whether the client reports a connection to its group coordinator. A suspected client
    /// that still has none is replaced.
    pub(crate) fn record_group_state(&mut self, is_coordinator_up: bool, now: Instant) {
        let is_late = self
            .reported_at
            .replace(now)
            .is_some_and(|before| now.duration_since(before) > 2 * statistics::INTERVAL);
        if is_coordinator_up {
            (self.without_group_since, self.suspected_since) = (None, None);
            return;
        }
        // This report was delayed: the client may have reconnected since, as the next one would say.
        if is_late && self.suspected_since.is_some() {
            self.suspected_since = Some(now);
        }
        self.without_group_since.get_or_insert(now);
        if self
            .suspected_since
            .is_some_and(|since| now.duration_since(since) >= statistics::INTERVAL)
        {
            self.request_replacement(
                "it cannot reach the group coordinator, but other clients can".into(),
            );
        }
    }

    /// Since when the client has not reached its group coordinator.
    pub(crate) fn without_group_since(&self) -> Option<Instant> {
        self.without_group_since
    }

    /// Records the suspicion that the client has lost its broker metadata: fresh clients have reached
    /// the group coordinator for longer than this client needs to reconnect.
    pub(crate) fn suspect_lost_metadata(&mut self, without_group_since: Instant, now: Instant) {
        // The client may have reconnected or been replaced since the probe.
        if self.without_group_since == Some(without_group_since) {
            self.suspected_since.get_or_insert(now);
        }
    }

    /// Whether the client does not reach its group coordinator while others do.
    pub(crate) fn is_suspected(&self) -> bool {
        self.suspected_since.is_some()
    }

    /// Returns the reason of a requested replacement, and counts it.
    pub(crate) fn take_replacement(&mut self) -> Option<String> {
        let reason = self.replacement_reason.take()?;
        self.replacements += 1;
        (self.without_group_since, self.suspected_since) = (None, None);
        Some(reason)
    }

    /// How often the client was replaced.
    pub(crate) fn replacements(&self) -> u64 {
        self.replacements
    }

    /// All assigned partitions.
    pub(crate) fn partitions(&self) -> Vec<(String, i32)> {
        self.assigned
            .values()
            .map(|it| (it.topic.to_string(), it.partition))
            .collect()
    }

    /// Records the end of a partition's log.
    pub(crate) fn set_log_end(&mut self, topic: &str, partition: i32, offset: i64) {
        for assigned in self
            .assigned
            .values_mut()
            .filter(|it| it.partition == partition && *it.topic == *topic)
        {
            assigned.log_end = Some(offset);
        }
    }

    /// Assignment epoch, topic, partition and position of each partition that is being read.
    pub(crate) fn read_positions(&self) -> Vec<(u64, Arc<str>, i32, Option<i64>)> {
        // Includes partitions whose seek fails repeatedly: they make no progress either. A full
        // partition is not read on purpose.
        let is_read = |it: &AssignedPartition| {
            matches!(it.state, AssignmentState::Active | AssignmentState::Seeking)
                && !self.is_full(it)
        };
        let being_read = self.assigned.iter().filter(|(_, it)| is_read(it));
        being_read
            .map(|(epoch, it)| {
                (
                    *epoch,
                    it.topic.clone(),
                    it.partition,
                    it.watermark.end().or(it.start.offset()),
                )
            })
            .collect()
    }

    /// The position of a partition: the offset of the next message. `None` if it is unknown.
    pub(crate) fn position_of(&self, topic: &str, partition: i32) -> Option<i64> {
        let assigned = self.assigned.get(&self.epoch_of(topic, partition)?)?;
        assigned.watermark.end().or(assigned.start.offset())
    }

    /// The status of each partition, sorted.
    pub(crate) fn status(&self) -> Vec<PartitionStatus> {
        let mut statuses: Vec<_> = self
            .assigned
            .iter()
            .map(|(epoch, it)| self.status_of(*epoch, it))
            .collect();
        statuses.sort_by(|one, other| {
            (&one.topic, one.partition).cmp(&(&other.topic, other.partition))
        });
        statuses
    }

    fn status_of(&self, epoch: u64, assigned: &AssignedPartition) -> PartitionStatus {
        let AssignedPartition {
            topic,
            partition,
            watermark,
            start,
            log_end,
            lowest_since,
            handed_out,
            ..
        } = assigned;
        let committable = watermark.position().or(start.offset());
        let released = self
            .released
            .iter()
            .filter(|(_, delivery)| delivery.receipt.epoch == epoch);
        let blocker = watermark.lowest().map(|offset| {
            let is_lowest = |delivery: &Delivery| {
                delivery.receipt.epoch == epoch && delivery.receipt.position == offset as u64
            };
            let delayed = self
                .released
                .iter()
                .find(|(_, delivery)| is_lowest(delivery));
            let blocked_by = match delayed {
                Some((_, delivery)) => BlockedBy::Delay {
                    failures: delivery.failures,
                },
                None if self.ready.iter().any(is_lowest) => BlockedBy::Queue,
                None => BlockedBy::Consumer,
            };
            // Recorded once per turn of the polling thread. An offset that became the lowest after
            // that has not waited yet.
            let since = if lowest_since.0 == Some(offset) {
                lowest_since.1.elapsed()
            } else {
                Duration::ZERO
            };
            Blocker {
                offset,
                since,
                blocked_by,
            }
        });
        PartitionStatus {
            topic: topic.clone(),
            partition: *partition,
            committable,
            log_end: *log_end,
            lag: committable
                .zip(*log_end)
                .map(|(at, end)| u64::try_from(end - at).unwrap_or(0)),
            handed_out: *handed_out,
            delayed: released.count(),
            blocker,
        }
    }
}
