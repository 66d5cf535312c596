//! The status of the assigned partitions.

use std::sync::Arc;
use std::time::Duration;

use super::{AssignedPartition, SourceState};
use crate::partition::AssignmentState;
use crate::status::{BlockedBy, Blocker, PartitionStatus};

impl SourceState {
    /// All assigned partitions.
    pub(crate) fn partitions(&self) -> Vec<(String, i32)> {
        let assigned = self.assigned.values();
        assigned
            .map(|it| (it.topic.to_string(), it.number))
            .collect()
    }

    /// Records the end of a partition's log.
    pub(crate) fn set_log_end(&mut self, topic: &str, partition: i32, offset: i64) {
        let mut assigned = self.assigned.values_mut();
        if let Some(it) = assigned.find(|it| it.is_partition(topic, partition)) {
            it.log_end = Some(offset);
        }
    }

    /// Assignment epoch, topic, partition and position of each partition that is being read.
    pub(crate) fn read_positions(&self) -> Vec<(u64, Arc<str>, i32, Option<i64>)> {
        // Includes partitions whose seek fails repeatedly, so that they count as stalled. Excludes
        // full partitions, which are not read on purpose.
        let above_mean = self.above_mean();
        let is_read = |it: &AssignedPartition| {
            let state = it.partition.state();
            matches!(state, AssignmentState::Active | AssignmentState::Seeking)
                && !self.is_full(it, &above_mean)
        };
        self.assigned
            .iter()
            .filter(|(_, it)| is_read(it))
            .map(|(epoch, it)| (*epoch, it.topic.clone(), it.number, it.partition.position()))
            .collect()
    }

    /// The position of a partition: the offset of the next message. `None` if it is unknown, or the
    /// partition is not read.
    pub(crate) fn position_of(&self, topic: &str, partition: i32) -> Option<i64> {
        let assigned = &self
            .assigned
            .get(&self.epoch_of(topic, partition)?)?
            .partition;
        let position = assigned.position()?;
        (assigned.state() == AssignmentState::Active).then_some(position)
    }

    /// The status of each partition, sorted.
    pub(crate) fn status(&self) -> Vec<PartitionStatus> {
        let mut statuses: Vec<_> = self
            .assigned
            .values()
            .map(|it| self.status_of(it))
            .collect();
        statuses.sort_by(|one, other| {
            (&one.topic, one.partition).cmp(&(&other.topic, other.partition))
        });
        statuses
    }

    fn status_of(&self, assigned: &AssignedPartition) -> PartitionStatus {
        let (partition, log_end) = (&assigned.partition, assigned.log_end);
        let epoch = partition.epoch();
        let blocker = partition.blocked_by().map(|(offset, since)| {
            let unconfirmed = &self.deliveries.unconfirmed;
            let blocked_by = if self.deliveries.is_ready(epoch, offset) {
                BlockedBy::Queue
            } else if unconfirmed.contains(&assigned.topic, assigned.number, offset) {
                BlockedBy::DeadLetter
            } else {
                BlockedBy::Consumer
            };
            let blocked_for = since.map_or(Duration::ZERO, |since| since.elapsed());
            Blocker {
                offset,
                blocked_for,
                blocked_by,
            }
        });
        let committable = partition.committable();
        PartitionStatus {
            topic: assigned.topic.clone(),
            partition: assigned.number,
            committable,
            log_end,
            lag: committable
                .zip(log_end)
                .map(|(offset, end)| u64::try_from(end - offset).unwrap_or(0)),
            handed_out: partition.handed_out(),
            blocker,
        }
    }
}
