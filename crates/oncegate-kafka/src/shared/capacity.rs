//! How many messages may be read, and from which partitions.

use std::sync::Arc;

use oncegate_core::source::QueueLevel;

use super::unconfirmed::MessageTotals;
use super::{AssignedPartition, SourcePhase, SourceState};
use crate::partition::AssignmentState;

/// From this number of unconfirmed dead letters on, a partition that has its share of them is not
/// read. The share is this number divided by the number of assigned partitions.
pub(super) const MAX_UNCONFIRMED: usize = 10_000;
/// Like [`MAX_UNCONFIRMED`], for the size of the unconfirmed dead letters in bytes.
pub(super) const MAX_UNCONFIRMED_BYTES: usize = 128 << 20;
/// From this number of messages between the lowest unsettled one and the last one that was read, a
/// partition is not read. Each takes 8 bytes, and a crash redelivers all of them.
pub(super) const MAX_SPAN: usize = 1 << 20;

impl SourceState {
    /// How many messages may be read now, from the partitions that are not
    /// [full](Self::full_partitions).
    pub(crate) fn room(&self) -> usize {
        let above_mean = self.above_mean();
        let is_any_readable =
            self.assigned.is_empty() || self.readable().any(|it| !self.is_full(it, &above_mean));
        if self.phase == SourcePhase::Running && is_any_readable {
            self.deliveries.room()
        } else {
            0
        }
    }

    /// The partitions that are not read until some of their messages are settled: see
    /// [`is_full`](Self::is_full).
    pub(crate) fn full_partitions(&self) -> Vec<(Arc<str>, i32)> {
        let above_mean = self.above_mean();
        self.readable()
            .filter(|it| self.is_full(it, &above_mean))
            .map(|it| (it.topic.clone(), it.number))
            .collect()
    }

    /// The partitions that are not being revoked.
    pub(super) fn readable(&self) -> impl Iterator<Item = &AssignedPartition> {
        self.assigned
            .values()
            .filter(|it| it.partition.state() != AssignmentState::Revoking)
    }

    /// The epochs of the assignments with more unsettled deliveries than the mean of all
    /// assignments, while the consumer's queue is at least half full; none otherwise. Their
    /// messages are neither read nor handed out, so that no partition waits for the retries of
    /// another.
    pub(super) fn above_mean(&self) -> Vec<u64> {
        if self.queue_level == QueueLevel::Low {
            return Vec::new();
        }
        let handed_out = |it: &AssignedPartition| it.partition.handed_out();
        let all: usize = self.assigned.values().map(handed_out).sum();
        let mean = all / self.assigned.len().max(1);
        let is_above_mean = |it: &&AssignedPartition| handed_out(it) > mean;
        let above_mean = self.assigned.values().filter(is_above_mean);
        above_mean.map(|it| it.partition.epoch()).collect()
    }

    /// Whether the partition has [`MAX_SPAN`] messages from its lowest unsettled one on, or is
    /// among `above_mean`, or the source has [`MAX_UNCONFIRMED`] unconfirmed dead letters (or
    /// [`MAX_UNCONFIRMED_BYTES`]) and the partition has its share of them. A partition with fewer
    /// is read, so that no partition waits for the dead letters of another.
    ///
    /// All assigned partitions together have at most twice the limit of unconfirmed dead letters,
    /// plus the messages that were read or fetched before the partitions became full: `MAX_READY`
    /// messages (see `deliveries`), and for each partition `queued.min.messages` and one fetch
    /// (`fetch.message.max.bytes`, but at least one record batch). One fetch may have 20,000
    /// messages of a few bytes. The dead letters of revoked partitions are not included.
    pub(super) fn is_full(&self, assigned: &AssignedPartition, above_mean: &[u64]) -> bool {
        let unconfirmed = &self.deliveries.unconfirmed;
        let own = unconfirmed.of(&assigned.topic, assigned.number);
        let total = unconfirmed.total();
        let has_share = |of: fn(MessageTotals) -> usize, limit: usize| {
            of(total) >= limit && of(own) >= (limit / self.assigned.len()).max(1)
        };
        assigned.partition.span() >= MAX_SPAN
            || above_mean.contains(&assigned.partition.epoch())
            || has_share(|it| it.count, MAX_UNCONFIRMED)
            || has_share(|it| it.bytes, MAX_UNCONFIRMED_BYTES)
    }
}
