//! Counts the rejected messages whose dead letter is not confirmed yet.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use oncegate_core::Delivery;

/// A number of messages and their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MessageTotals {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl MessageTotals {
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
    total: MessageTotals,
    by_partition: HashMap<(Arc<str>, u32), PartitionTotals>,
}

/// The messages of one partition that are being published, from all assignments of the partition.
#[derive(Debug, Default)]
struct PartitionTotals {
    totals: MessageTotals,
    /// How many unconfirmed dead letters each offset has. After a rebalance, a message may be
    /// rejected again before its first dead letter is confirmed.
    offsets: HashMap<u64, usize>,
}

impl UnconfirmedDeadLetters {
    /// Counts a rejected delivery.
    pub(super) fn add(&mut self, delivery: &Delivery) {
        let bytes = delivery.message.size();
        self.total.add(bytes);
        let own = self.by_partition.entry(partition_of(delivery)).or_default();
        own.totals.add(bytes);
        *own.offsets.entry(delivery.receipt.position).or_default() += 1;
    }

    /// Stops counting a delivery whose dead letter is confirmed.
    pub(super) fn remove(&mut self, delivery: &Delivery) {
        let (bytes, partition) = (delivery.message.size(), partition_of(delivery));
        self.total.remove(bytes);
        if let Some(own) = self.by_partition.get_mut(&partition) {
            own.totals.remove(bytes);
            if own.totals.count == 0 {
                self.by_partition.remove(&partition);
            } else if let Entry::Occupied(mut count) = own.offsets.entry(delivery.receipt.position)
            {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    /// Replaces all counts by these totals of one partition.
    #[cfg(test)]
    pub(super) fn set(&mut self, topic: &str, partition: u32, totals: MessageTotals) {
        self.total = totals;
        let own = PartitionTotals {
            totals,
            offsets: HashMap::new(),
        };
        self.by_partition = HashMap::from([((Arc::from(topic), partition), own)]);
    }

    pub(super) fn total(&self) -> MessageTotals {
        self.total
    }

    /// The totals of one partition, from all its assignments.
    pub(super) fn of(&self, topic: &Arc<str>, partition: i32) -> MessageTotals {
        self.partition(topic, partition)
            .map_or_else(MessageTotals::default, |own| own.totals)
    }

    /// Whether a dead letter of this message is not confirmed yet.
    pub(super) fn contains(&self, topic: &Arc<str>, partition: i32, offset: i64) -> bool {
        let offset = u64::try_from(offset).ok();
        self.partition(topic, partition)
            .zip(offset)
            .is_some_and(|(own, offset)| own.offsets.contains_key(&offset))
    }

    fn partition(&self, topic: &Arc<str>, partition: i32) -> Option<&PartitionTotals> {
        let partition = u32::try_from(partition).ok()?;
        self.by_partition.get(&(topic.clone(), partition))
    }
}

fn partition_of(delivery: &Delivery) -> (Arc<str>, u32) {
    (
        delivery.message.origin.name.clone(),
        delivery.receipt.partition,
    )
}
