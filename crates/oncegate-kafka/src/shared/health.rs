//! The status of the source, and the health of its client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::Delivery;

use super::SourceState;
use super::assignment::{AssignedPartition, AssignmentState};
use crate::client::statistics;
use crate::partition::{BlockedBy, Blocker, PartitionStatus};

/// The polling thread's progress with the prefetch queue, which all partitions share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadProgress {
    /// Messages that were read from it.
    read: u64,
    /// Its length at the last look.
    waiting: u64,
    /// How often its length was read.
    looks: u64,
}

impl ReadProgress {
    /// Whether everything that was in the queue has been read since. Some operations are never read
    /// as messages, so an empty queue counts too.
    pub(crate) fn is_over(self, now: Self) -> bool {
        now.looks > self.looks && (now.waiting == 0 || now.read >= self.read + self.waiting)
    }
}

impl SourceState {
    /// Records the length of the queue.
    pub(crate) fn set_queue_length(&mut self, waiting: u64) {
        (self.progress.waiting, self.progress.looks) = (waiting, self.progress.looks + 1);
    }

    /// Counts messages that were read from the queue.
    pub(crate) fn count_read(&mut self, count: u64) {
        self.progress.read += count;
    }

    pub(crate) fn read_progress(&self) -> ReadProgress {
        self.progress
    }

    /// Requests that another client replaces this one.
    pub(crate) fn request_replacement(&mut self, reason: String) {
        self.replace.get_or_insert(reason);
    }

    /// Whether a replacement was requested.
    pub(crate) fn needs_replacement(&self) -> bool {
        self.replace.is_some()
    }

    /// Records whether the client reports a connection to its group coordinator. A suspected client
    /// that still has none is replaced.
    pub(crate) fn record_group_state(&mut self, is_with_it: bool, now: Instant) {
        let is_late = self
            .reported_at
            .replace(now)
            .is_some_and(|before| now.duration_since(before) > 2 * statistics::INTERVAL);
        if is_with_it {
            (self.without_group_since, self.suspected) = (None, None);
            return;
        }
        // The report was delayed, and the next one may say that the client is connected again.
        if is_late && self.suspected.is_some() {
            self.suspected = Some(now);
        }
        self.without_group_since.get_or_insert(now);
        if self
            .suspected
            .is_some_and(|at| now.duration_since(at) >= statistics::INTERVAL)
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

    /// Fresh clients have reached the group coordinator for longer than this client needs to
    /// reconnect.
    pub(crate) fn suspect_lost_metadata(&mut self, without_group_since: Instant, now: Instant) {
        // It may have been replaced meanwhile.
        if self.without_group_since == Some(without_group_since) {
            self.suspected.get_or_insert(now);
        }
    }

    /// Whether the client does not reach its group coordinator while others do.
    pub(crate) fn is_suspected(&self) -> bool {
        self.suspected.is_some()
    }

    /// Returns the reason of a requested replacement, and counts it.
    pub(crate) fn take_replacement(&mut self) -> Option<String> {
        let reason = self.replace.take()?;
        self.replaced += 1;
        (self.without_group_since, self.suspected) = (None, None);
        Some(reason)
    }

    /// How often the client was replaced.
    pub(crate) fn replaced(&self) -> u64 {
        self.replaced
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

    /// The position of each partition that is being read.
    pub(crate) fn read_positions(&self) -> Vec<(u64, Arc<str>, i32, Option<i64>)> {
        // A partition whose seek keeps failing makes no progress either. A full partition is not
        // read, and is not stalled.
        let is_read = |it: &AssignedPartition| {
            matches!(it.state, AssignmentState::Active | AssignmentState::Seeking)
                && !self.is_full(it)
        };
        let progress = self.assigned.iter().filter(|(_, it)| is_read(it));
        progress
            .map(|(epoch, it)| {
                (
                    *epoch,
                    it.topic.clone(),
                    it.partition,
                    it.watermark.end().or(it.start.at()),
                )
            })
            .collect()
    }

    /// The position of a partition, or where it starts.
    pub(crate) fn position_of(&self, topic: &str, partition: i32) -> Option<i64> {
        let assigned = self.assigned.get(&self.epoch_of(topic, partition)?)?;
        assigned.watermark.end().or(assigned.start.at())
    }

    /// The status of each partition, sorted.
    pub(crate) fn status(&self) -> Vec<PartitionStatus> {
        let mut all: Vec<_> = self
            .assigned
            .iter()
            .map(|(epoch, it)| self.status_of(*epoch, it))
            .collect();
        all.sort_by(|one, other| (&one.topic, one.partition).cmp(&(&other.topic, other.partition)));
        all
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
        let committable = watermark.position().or(start.at());
        let released = self
            .released
            .iter()
            .filter(|(_, delivery)| delivery.receipt.epoch == epoch);
        let blocker = watermark.lowest().map(|offset| {
            let is_it = |delivery: &Delivery| {
                delivery.receipt.epoch == epoch && delivery.receipt.position == offset as u64
            };
            let delayed = self.released.iter().find(|(_, delivery)| is_it(delivery));
            let blocked_by = match delayed {
                Some((_, delivery)) => BlockedBy::Delay {
                    failures: delivery.failures,
                },
                None if self.ready.iter().any(is_it) => BlockedBy::Queue,
                None => BlockedBy::Consumer,
            };
            // Recorded once per turn: an offset that became the lowest since then has not waited
            // yet.
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
