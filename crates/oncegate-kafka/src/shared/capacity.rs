//! How much may be read.

use std::sync::Arc;

use super::held_messages::Backlog;
use super::{AssignedPartition, SourcePhase, SourceState};
use crate::partition::AssignmentState;

/// Maximum number of held messages: released, or being published to dead-letter topics. From this
/// number on, a partition that holds its share of them is not read.
pub(super) const MAX_HELD: usize = 10_000;
/// Maximum size of the held messages, in bytes.
pub(super) const MAX_HELD_BYTES: usize = 128 << 20;
/// Maximum number of messages from the lowest unsettled offset of a partition to the last one read.
/// From this number on, the partition is not read. Each costs 8 bytes, and a crash redelivers up to
/// this many.
pub(super) const MAX_SPAN: usize = 1 << 20;
impl SourceState {
    /// How many messages may be read now, from the partitions that are not
    /// [full](Self::full_partitions).
    pub(crate) fn room(&self) -> usize {
        let is_any_readable =
            self.assigned.is_empty() || self.readable().any(|it| !self.is_full(it));
        if self.phase == SourcePhase::Running && is_any_readable {
            self.deliveries.room()
        } else {
            0
        }
    }

    /// The partitions that are not read until some of their messages are settled.
    pub(crate) fn full_partitions(&self) -> Vec<(Arc<str>, i32)> {
        self.readable()
            .filter(|it| self.is_full(it))
            .map(|it| (it.topic.clone(), it.number))
            .collect()
    }

    /// The partitions that are not being revoked.
    pub(super) fn readable(&self) -> impl Iterator<Item = &AssignedPartition> {
        self.assigned
            .values()
            .filter(|it| it.partition.state() != AssignmentState::Revoking)
    }

    /// Whether the partition has [`MAX_SPAN`] messages from its lowest unsettled one on, or the source
    /// holds [`MAX_HELD`] messages (or [`MAX_HELD_BYTES`]) and the partition has its share of them. A
    /// partition with fewer is read, so that none waits for the dead letters of another.
    ///
    /// The assigned partitions hold at most twice the limit, plus the messages that were read or
    /// fetched before they became full: `MAX_READY` messages of `deliveries`, and for each partition
    /// `queued.min.messages` and one fetch (`fetch.message.max.bytes`, but at least one record
    /// batch). One fetch may have 20,000 messages of a few bytes. The dead letters of revoked
    /// partitions are not included.
    pub(super) fn is_full(&self, assigned: &AssignedPartition) -> bool {
        let held = self.deliveries.held();
        let (total, own) = (held.total(), held.of(&assigned.topic, assigned.number));
        let has_share = |of: fn(Backlog) -> usize, limit: usize| {
            of(total) >= limit && of(own) >= (limit / self.assigned.len()).max(1)
        };
        assigned.partition.span() >= MAX_SPAN
            || has_share(|it| it.count, MAX_HELD)
            || has_share(|it| it.bytes, MAX_HELD_BYTES)
    }
}
