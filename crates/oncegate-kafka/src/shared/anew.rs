//! Topics that were deleted and made anew while they were read.

use std::fmt;

use super::assigned::{Assigned, BEGINNING, Begins, Ids, Keeps, Log, ReadTo};
use super::{Monitor, Shared, State};
use crate::topic_identity::TopicIdentity;

impl<M: Monitor> Shared<M> {
    /// A topic was deleted and made anew: what was read of the old log is over, and nothing of the
    /// new one is taken in before librdkafka has gone back to its beginning. Answers of how many
    /// partitions that is.
    pub(crate) fn begin_anew(&self, topic: &str, identity: Option<TopicIdentity>) -> usize {
        let partitions = self.lock().begin_anew(topic, identity);
        self.wake_consumer();
        partitions
    }

    /// Has librdkafka `seek` where each partition begins that is to be read again. What fails is
    /// tried again with the next call, for as long as the partition is ours.
    pub(crate) fn go_back<E: fmt::Display>(
        &self,
        mut seek: impl FnMut(&str, i32, i64) -> Result<(), E>,
    ) {
        let going_back = self.lock().going_back();
        for (epoch, topic, partition, offset) in going_back {
            match seek(&topic, partition, offset) {
                Ok(()) => self.lock().is_back(epoch),
                Err(error) => {
                    tracing::warn!(%error, topic, partition, offset, "going back; trying again")
                }
            }
        }
    }
}

impl State {
    /// Ends what is assigned of a topic, and begins it again at its beginning.
    pub(super) fn begin_anew(&mut self, topic: &str, identity: Option<TopicIdentity>) -> usize {
        // Where it was assigned after it was made anew it has begun there already.
        let epochs = self.outdated_assignments(topic, identity.as_ref());
        for epoch in &epochs {
            self.withdraw(*epoch);
            let Some(old) = self.assigned.remove(epoch) else {
                continue;
            };
            let epoch = self.begin(
                old.topic,
                old.partition,
                Begins::Anew,
                Log {
                    identity: identity.clone(),
                    ids: Ids::ANEW,
                },
            );
            if let Some(assigned) = self.assigned.get_mut(&epoch) {
                assigned.keeps = Keeps::GoingBack;
            }
        }
        epochs.len()
    }

    /// The assignments of a topic's partitions that were made while the topic had another id than
    /// `current`, or that may have been.
    pub(crate) fn outdated_assignments(
        &self,
        topic: &str,
        current: Option<&TopicIdentity>,
    ) -> Vec<u64> {
        let is_outdated = |it: &Assigned| match (&it.log.identity, current) {
            (Some(assigned), Some(current)) => assigned.topic_id != current.topic_id,
            (None, _) | (_, None) => true,
        };
        let outdated =
            |it: &Assigned| it.keeps != Keeps::Revoking && *it.topic == *topic && is_outdated(it);
        self.assigned
            .iter()
            .filter(|(_, it)| outdated(it))
            .map(|(epoch, _)| *epoch)
            .collect()
    }

    pub(super) fn going_back(&self) -> Vec<(u64, String, i32, i64)> {
        let going_back = self
            .assigned
            .iter()
            .filter(|(_, it)| it.keeps == Keeps::GoingBack);
        let to = |it: &Assigned| it.watermark.end().unwrap_or(BEGINNING);
        going_back
            .map(|(epoch, it)| (*epoch, it.topic.to_string(), it.partition, to(it)))
            .collect()
    }

    pub(super) fn is_back(&mut self, epoch: u64) {
        // It may have gone meanwhile.
        if let Some(assigned) = self
            .assigned
            .get_mut(&epoch)
            .filter(|it| it.keeps == Keeps::GoingBack)
        {
            (assigned.keeps, assigned.read_to) = (Keeps::Assigned, ReadTo::Unproven);
        }
    }
}
