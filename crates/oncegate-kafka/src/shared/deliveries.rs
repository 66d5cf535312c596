//! Deliveries in the memory of the source: read and not handed out yet, or with an unconfirmed dead
//! letter.

use std::collections::{BTreeMap, VecDeque};

use oncegate_core::{Delivery, Message, Origin, Position, Receipt};

use super::unconfirmed::UnconfirmedDeadLetters;
use crate::client::batch::ConsumerRecord;

/// Maximum number of messages that are read ahead of the consumer.
pub(super) const MAX_READY: usize = 2_048;
/// Maximum size of the messages that are read ahead of the consumer, in bytes.
pub(super) const MAX_READY_BYTES: usize = 32 << 20;

#[derive(Default)]
pub(super) struct DeliveryBuffer {
    /// Deliveries that were read or released, and not handed out yet.
    ready: VecDeque<Delivery>,
    ready_bytes: usize,
    /// Deliveries that are not handed out because their assignment has more unsettled deliveries
    /// than the mean, by assignment epoch.
    held_back: BTreeMap<u64, VecDeque<Delivery>>,
    /// Number and size in bytes of the last batch of messages: an estimate for the next batch.
    last_batch: (usize, usize),
    pub(super) unconfirmed: UnconfirmedDeadLetters,
}

impl DeliveryBuffer {
    /// How many more messages may be read: up to [`MAX_READY`] messages and about
    /// [`MAX_READY_BYTES`].
    pub(super) fn room(&self) -> usize {
        if self.ready_bytes >= MAX_READY_BYTES {
            return 0;
        }
        let average_size = self.last_batch.1 / self.last_batch.0.max(1);
        let fitting = (MAX_READY_BYTES - self.ready_bytes) / average_size.max(1) + 1;
        fitting.min(MAX_READY.saturating_sub(self.ready.len()))
    }

    /// Starts a batch of this many records, which [`add`](Self::add) adds one by one.
    pub(super) fn start_batch(&mut self, records: usize) {
        self.last_batch = (records, 0);
    }

    /// Adds a record as a delivery of this assignment.
    pub(super) fn add(&mut self, record: ConsumerRecord, epoch: u64) {
        let delivery = delivery(record, epoch);
        self.last_batch.1 += delivery.message.size();
        self.push(delivery);
    }

    /// Adds a delivery that was read or released.
    pub(super) fn push(&mut self, delivery: Delivery) {
        self.ready_bytes += delivery.message.size();
        self.ready.push_back(delivery);
    }

    /// Makes the deliveries that are held back ready again, except those of these assignments.
    pub(super) fn make_ready_all_except(&mut self, assignments: &[u64]) {
        let others = self.held_back.keys().filter(|it| !assignments.contains(it));
        for epoch in Vec::from_iter(others.copied()) {
            let deliveries = self.held_back.remove(&epoch).unwrap_or_default();
            for delivery in deliveries.into_iter().rev() {
                self.ready_bytes += delivery.message.size();
                self.ready.push_front(delivery);
            }
        }
    }

    /// Takes the first ready delivery, if it has at most `max_bytes`. Skips the deliveries of the
    /// assignments `held_back`, and holds them back.
    pub(super) fn take_next(&mut self, max_bytes: usize, held_back: &[u64]) -> Option<Delivery> {
        loop {
            let next = self.ready.front()?;
            let (epoch, size) = (next.receipt.epoch, next.message.size());
            let is_held_back = held_back.contains(&epoch);
            if size > max_bytes && !is_held_back {
                return None;
            }
            let delivery = self.ready.pop_front()?;
            self.ready_bytes -= size;
            if !is_held_back {
                return Some(delivery);
            }
            let deliveries = self.held_back.entry(epoch).or_default();
            deliveries.push_back(delivery);
        }
    }

    /// Drops the deliveries of an assignment.
    pub(super) fn drop_all_of(&mut self, epoch: u64) {
        self.held_back.remove(&epoch);
        self.ready.retain(|it| it.receipt.epoch != epoch);
        self.ready_bytes = self.ready.iter().map(|it| it.message.size()).sum();
    }

    /// Whether the delivery with this offset is ready or held back.
    pub(super) fn is_ready(&self, epoch: u64, offset: i64) -> bool {
        let held_back = self.held_back.values().flatten();
        let mut all = self.ready.iter().chain(held_back).map(|it| &it.receipt);
        all.any(|it| it.epoch == epoch && it.position == offset as u64)
    }
}

pub(super) fn delivery(record: ConsumerRecord, epoch: u64) -> Delivery {
    let ConsumerRecord {
        topic,
        partition,
        offset,
        sent_at,
        key,
        headers,
        body,
    } = record;
    let origin = Origin::new(topic)
        .with_position(Position::Offset { partition, offset })
        .with_system("kafka");
    let mut message = Message::received(origin, body);
    (message.key, message.headers, message.sent_at) = (key, headers, sent_at);
    // Lossless: partition and offset of a delivered message are not negative.
    let receipt = Receipt::new(epoch, offset as u64).with_partition(partition as u32);
    Delivery::new(message, receipt)
}

#[cfg(test)]
impl DeliveryBuffer {
    /// The size of the ready deliveries in bytes: the counter, and the sum of the sizes.
    pub(super) fn ready_bytes(&self) -> (usize, usize) {
        let sum = self.ready.iter().map(|it| it.message.size()).sum();
        (self.ready_bytes, sum)
    }
}
