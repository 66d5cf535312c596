//! Topics that are deleted and created again while they are read.

use std::fmt;

use super::assignment::{
    AssignedPartition, AssignmentState, LOG_START, LogIdentity, PositionIds, PositionTrust,
    StartPosition,
};
use super::{SharedState, SourceState, StateLock};
use crate::topic_identity::TopicIdentity;

impl<M: StateLock> SharedState<M> {
    /// Restarts a recreated topic: ends its assignments and starts new ones, to which no records are
    /// added before librdkafka has sought to the beginning. Returns the number of partitions.
    pub(crate) fn restart_topic(&self, topic: &str, identity: Option<TopicIdentity>) -> usize {
        let partitions = self.lock().restart_topic(topic, identity);
        self.wake_consumer();
        partitions
    }

    /// Calls `seek` with topic, partition and offset for each partition in
    /// [`AssignmentState::Seeking`]. A failed seek is retried by the next call.
    pub(crate) fn seek_all<E: fmt::Display>(
        &self,
        mut seek: impl FnMut(&str, i32, i64) -> Result<(), E>,
    ) {
        let pending_seeks = self.lock().pending_seeks();
        for (epoch, topic, partition, offset) in pending_seeks {
            match seek(&topic, partition, offset) {
                Ok(()) => self.lock().seek_done(epoch),
                Err(error) => {
                    tracing::warn!(%error, topic, partition, offset, "seek failed, retrying; nothing is read from the partition before it succeeds; check that the partition has a leader")
                }
            }
        }
    }
}

impl SourceState {
    /// Ends the assignments of a topic's partitions and starts new ones at the beginning.
    pub(super) fn restart_topic(&mut self, topic: &str, identity: Option<TopicIdentity>) -> usize {
        // Without the partitions that were assigned after the topic was recreated: they started at the
        // beginning.
        let epochs = self.outdated_assignments(topic, identity.as_ref());
        for epoch in &epochs {
            self.withdraw(*epoch);
            let Some(old) = self.assigned.remove(epoch) else {
                continue;
            };
            let epoch = self.start_assignment(
                old.topic,
                old.partition,
                StartPosition::Recreated,
                LogIdentity {
                    identity: identity.clone(),
                    ids: PositionIds::RECREATED,
                },
            );
            if let Some(assigned) = self.assigned.get_mut(&epoch) {
                assigned.state = AssignmentState::Seeking;
            }
        }
        epochs.len()
    }

    /// The assignments of a topic's partitions that were, or may have been, made while the topic
    /// had another id than `current`.
    pub(crate) fn outdated_assignments(
        &self,
        topic: &str,
        current: Option<&TopicIdentity>,
    ) -> Vec<u64> {
        let is_outdated = |it: &AssignedPartition| match (&it.log.identity, current) {
            (Some(assigned), Some(current)) => assigned.topic_id != current.topic_id,
            (None, _) | (_, None) => true,
        };
        let is_match = |it: &AssignedPartition| {
            it.state != AssignmentState::Revoking && *it.topic == *topic && is_outdated(it)
        };
        self.assigned
            .iter()
            .filter(|(_, it)| is_match(it))
            .map(|(epoch, _)| *epoch)
            .collect()
    }

    pub(super) fn pending_seeks(&self) -> Vec<(u64, String, i32, i64)> {
        let pending_seeks = self
            .assigned
            .iter()
            .filter(|(_, it)| it.state == AssignmentState::Seeking);
        let target = |it: &AssignedPartition| it.watermark.end().unwrap_or(LOG_START);
        pending_seeks
            .map(|(epoch, it)| (*epoch, it.topic.to_string(), it.partition, target(it)))
            .collect()
    }

    pub(super) fn seek_done(&mut self, epoch: u64) {
        // The partition may be revoked by now.
        if let Some(assigned) = self
            .assigned
            .get_mut(&epoch)
            .filter(|it| it.state == AssignmentState::Seeking)
        {
            (assigned.state, assigned.position_trust) =
                (AssignmentState::Active, PositionTrust::Unconfirmed);
        }
    }
}
