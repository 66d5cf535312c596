//! Counts the rejected messages whose dead letter is not confirmed yet.

use std::collections::HashMap;
use std::sync::Arc;

use oncegate_core::Delivery;

/// A number of messages and their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backlog {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl Backlog {
    fn add(&mut self, bytes: usize) {
        (self.count, self.bytes) = (self.count + 1, self.bytes + bytes);
    }

    fn remove(&mut self, bytes: usize) {
        (self.count, self.bytes) = (
            self.count.saturating_sub(1),
            self.bytes.saturating_sub(bytes),
        );
    }
}

/// The messages that are being published to dead-letter topics: in total and for each partition.
///
/// A message counts from its rejection until its dead letter is confirmed, however often publishing
/// fails. It counts for its partition, not for an assignment: a partition that is assigned again
/// still has its unconfirmed dead letters.
#[derive(Debug, Default)]
pub(super) struct UnconfirmedDeadLetters {
    total: Backlog,
    by_partition: HashMap<(Arc<str>, u32), Backlog>,
}

impl UnconfirmedDeadLetters {
    /// Counts a rejected delivery.
    pub(super) fn add(&mut self, delivery: &Delivery) {
        let bytes = delivery.message.size();
        self.total.add(bytes);
        self.by_partition
            .entry(partition_of(delivery))
            .or_default()
            .add(bytes);
    }

    /// Stops counting a delivery whose dead letter is confirmed.
    pub(super) fn remove(&mut self, delivery: &Delivery) {
        let (bytes, partition) = (delivery.message.size(), partition_of(delivery));
        self.total.remove(bytes);
        if let Some(backlog) = self.by_partition.get_mut(&partition) {
            backlog.remove(bytes);
            if backlog.count == 0 {
                self.by_partition.remove(&partition);
            }
        }
    }

    /// Replaces all counts by this backlog of one partition.
    #[cfg(test)]
    pub(super) fn set(&mut self, topic: &str, partition: u32, backlog: Backlog) {
        self.total = backlog;
        self.by_partition = HashMap::from([((Arc::from(topic), partition), backlog)]);
    }

    pub(super) fn total(&self) -> Backlog {
        self.total
    }

    /// Those of one partition, of all its assignments.
    pub(super) fn of(&self, topic: &Arc<str>, partition: i32) -> Backlog {
        u32::try_from(partition)
            .ok()
            .and_then(|partition| self.by_partition.get(&(topic.clone(), partition)))
            .copied()
            .unwrap_or_default()
    }
}

fn partition_of(delivery: &Delivery) -> (Arc<str>, u32) {
    (
        delivery.message.origin.name.clone(),
        delivery.receipt.partition,
    )
}
