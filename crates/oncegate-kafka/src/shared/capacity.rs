//! How much may be read.

use std::sync::Arc;

use oncegate_core::source::QueueLevel;

use super::unconfirmed::Backlog;
use super::{AssignedPartition, SourcePhase, SourceState};
use crate::partition::AssignmentState;

/// Maximum number of unconfirmed dead letters. From this number on, a partition that has its share of
/// them is not read.
pub(super) const MAX_UNCONFIRMED: usize = 10_000;
/// Maximum size of the unconfirmed dead letters, in bytes.
pub(super) const MAX_UNCONFIRMED_BYTES: usize = 128 << 20;
/// Maximum number of messages from the lowest unsettled offset of a partition to the last one read.
/// From this number on, the partition is not read. Each costs 8 bytes, and a crash redelivers up to
/// this many.
pub(super) const MAX_SPAN: usize = 1 << 20;

impl SourceState {
    /// How many messages may be read now, from the partitions that are not
    /// [full](Self::full_partitions).
    pub(crate) fn room(&self) -> usize {
        let crowded = self.crowded();
        let is_any_readable =
            self.assigned.is_empty() || self.readable().any(|it| !self.is_full(it, &crowded));
        if self.phase == SourcePhase::Running && is_any_readable {
            self.deliveries.room()
        } else {
            0
        }
    }

    /// The partitions that are not read until some of their messages are settled.
    pub(crate) fn full_partitions(&self) -> Vec<(Arc<str>, i32)> {
        let crowded = self.crowded();
        self.readable()
            .filter(|it| self.is_full(it, &crowded))
            .map(|it| (it.topic.clone(), it.number))
            .collect()
    }

    /// The partitions that are not being revoked.
    pub(super) fn readable(&self) -> impl Iterator<Item = &AssignedPartition> {
        self.assigned
            .values()
            .filter(|it| it.partition.state() != AssignmentState::Revoking)
    }

    /// The assignments that have more than the mean number of deliveries that the consumer has not
    /// settled, if its queue is half full: they are not read and not handed out, so that no partition
    /// waits for the retries of another.
    pub(super) fn crowded(&self) -> Vec<u64> {
        if self.queue_level == QueueLevel::Low {
            return Vec::new();
        }
        let handed_out = |it: &AssignedPartition| it.partition.handed_out();
        let all: usize = self.assigned.values().map(handed_out).sum();
        let mean = all / self.assigned.len().max(1);
        let is_crowded = |it: &&AssignedPartition| handed_out(it) > mean;
        let crowded = self.assigned.values().filter(is_crowded);
        crowded.map(|it| it.partition.epoch()).collect()
    }

    /// Whether the partition has [`MAX_SPAN`] messages from its lowest unsettled one on, or is
    /// [crowded](Self::crowded), or the source has [`MAX_UNCONFIRMED`] dead letters (or
    /// [`MAX_UNCONFIRMED_BYTES`]) and the partition has its share of them. A partition with fewer is
    /// read, so that none waits for the dead letters of another.
    ///
    /// The assigned partitions have at most twice the limit, plus the messages that were read or
    /// fetched before they became full: `MAX_READY` messages of `deliveries`, and for each partition
    /// `queued.min.messages` and one fetch (`fetch.message.max.bytes`, but at least one record
    /// batch). One fetch may have 20,000 messages of a few bytes. The dead letters of revoked
    /// partitions are not included.
    pub(super) fn is_full(&self, assigned: &AssignedPartition, crowded: &[u64]) -> bool {
        let unconfirmed = &self.deliveries.unconfirmed;
        let own = unconfirmed.of(&assigned.topic, assigned.number);
        let total = unconfirmed.total();
        let has_share = |of: fn(Backlog) -> usize, limit: usize| {
            of(total) >= limit && of(own) >= (limit / self.assigned.len()).max(1)
        };
        assigned.partition.span() >= MAX_SPAN
            || crowded.contains(&assigned.partition.epoch())
            || has_share(|it| it.count, MAX_UNCONFIRMED)
            || has_share(|it| it.bytes, MAX_UNCONFIRMED_BYTES)
    }
}
