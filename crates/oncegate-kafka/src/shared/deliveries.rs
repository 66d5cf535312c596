//! Deliveries that are in memory and not with the consumer: read ahead, or released.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use oncegate_core::{Delivery, HeadersBuilder, Message, Origin, Position, Receipt};

use super::held_messages::HeldMessages;
use crate::client::batch::ConsumerRecord;

/// Maximum number of messages that are read ahead of the consumer.
pub(super) const MAX_READY: usize = 2_048;
/// Maximum size of the messages that are read ahead of the consumer, in bytes.
pub(super) const MAX_READY_BYTES: usize = 32 << 20;
/// Maximum delay of a release, so that adding it to the current time cannot overflow.
const MAX_RELEASE_DELAY: Duration = Duration::from_secs(86_400);

#[derive(Default)]
pub(super) struct DeliveryBuffer {
    /// Deliveries that were read and not handed out yet.
    ready: VecDeque<Delivery>,
    ready_bytes: usize,
    /// Number and size of the messages of the last batch, for an estimate of the next one.
    last_batch: (usize, usize),
    /// Released deliveries, by the time when they are due and the number of their release.
    released: BTreeMap<(Instant, u64), Delivery>,
    release_count: u64,
    /// How many dead letters are not confirmed yet.
    publishing: usize,
    /// The size of `released` and of the unconfirmed dead letters.
    held: HeldMessages,
}

impl DeliveryBuffer {
    /// How many messages fit in.
    pub(super) fn room(&self) -> usize {
        if self.ready_bytes >= MAX_READY_BYTES {
            return 0;
        }
        let average_size = self.last_batch.1 / self.last_batch.0.max(1);
        let fitting = (MAX_READY_BYTES - self.ready_bytes) / average_size.max(1) + 1;
        fitting.min(MAX_READY.saturating_sub(self.ready.len()))
    }

    /// A batch of this many records follows.
    pub(super) fn start_batch(&mut self, records: usize) {
        self.last_batch = (records, 0);
    }

    /// Adds a record as a delivery of this assignment.
    pub(super) fn add(&mut self, record: ConsumerRecord, epoch: u64) {
        let delivery = delivery(record, epoch);
        let size = delivery.message.size();
        self.ready_bytes += size;
        self.last_batch.1 += size;
        self.ready.push_back(delivery);
    }

    /// Takes the first due release, or else the first record, if it has at most `max_bytes`.
    pub(super) fn take_next(&mut self, now: Instant, max_bytes: usize) -> Option<Delivery> {
        let fits = |it: &Delivery| it.message.size() <= max_bytes;
        let first = self.released.first_entry();
        if let Some(due) = first.filter(|entry| entry.key().0 <= now) {
            let delivery = fits(due.get()).then(|| due.remove())?;
            self.held.remove(&delivery);
            return Some(delivery);
        }
        self.ready.front().filter(|it| fits(it))?;
        let delivery = self.ready.pop_front()?;
        self.ready_bytes -= delivery.message.size();
        Some(delivery)
    }

    /// Keeps a released delivery until its delay is over.
    pub(super) fn hold(&mut self, delivery: Delivery, after: Duration) {
        let message = detached(&delivery.message);
        let delivery = Delivery {
            message,
            ..delivery
        };
        self.held.add(&delivery);
        self.release_count += 1;
        let due = Instant::now() + after.min(MAX_RELEASE_DELAY);
        self.released.insert((due, self.release_count), delivery);
    }

    /// Drops the deliveries of an assignment.
    pub(super) fn drop_all_of(&mut self, epoch: u64) {
        self.ready.retain(|it| it.receipt.epoch != epoch);
        self.ready_bytes = self.ready.iter().map(|it| it.message.size()).sum();
        let held = &mut self.held;
        self.released.retain(|_, it| {
            let is_kept = it.receipt.epoch != epoch;
            if !is_kept {
                held.remove(it);
            }
            is_kept
        });
    }

    /// Counts a dead letter that is being published.
    pub(super) fn start_publishing(&mut self, delivery: &Delivery) {
        self.publishing += 1;
        self.held.add(delivery);
    }

    /// A dead letter is confirmed.
    pub(super) fn end_publishing(&mut self, delivery: &Delivery) {
        self.publishing = self.publishing.saturating_sub(1);
        self.held.remove(delivery);
    }

    pub(super) fn publishing(&self) -> usize {
        self.publishing
    }

    pub(super) fn held(&self) -> &HeldMessages {
        &self.held
    }

    /// When the next release is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.released.first_key_value().map(|((due, _), _)| *due)
    }

    /// The released deliveries of an assignment.
    pub(super) fn released_of(&self, epoch: u64) -> impl Iterator<Item = &Delivery> {
        self.released
            .values()
            .filter(move |it| it.receipt.epoch == epoch)
    }

    /// Whether the delivery of this offset was read and not handed out yet.
    pub(super) fn is_ready(&self, epoch: u64, offset: i64) -> bool {
        let mut ready = self.ready.iter().map(|it| &it.receipt);
        ready.any(|it| it.epoch == epoch && it.position == offset as u64)
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
    let origin = Origin {
        name: topic,
        position: Position::Offset { partition, offset },
        system: Some("kafka"),
    };
    Delivery {
        message: Message {
            origin,
            key,
            message_id: None,
            headers,
            body,
            sent_at,
        },
        // Lossless: partition and offset of a delivered message are not negative.
        receipt: Receipt {
            epoch,
            partition: partition as u32,
            position: offset as u64,
        },
        failures: 0,
    }
}

/// A copy of the message, so that keeping it does not keep the memory of its whole batch.
pub(crate) fn detached(message: &Message) -> Message {
    Message {
        key: message.key.as_ref().map(|key| key.to_vec().into()),
        headers: HeadersBuilder::from(&message.headers).finish(),
        body: message.body.to_vec().into(),
        ..message.clone()
    }
}

#[cfg(test)]
impl DeliveryBuffer {
    /// Makes this many messages of partition 0 of topic `t` count as unconfirmed dead letters.
    pub(super) fn set_publishing(&mut self, count: usize, bytes: usize) {
        self.publishing = count;
        self.held
            .set("t", 0, super::held_messages::Backlog { count, bytes });
    }

    /// The size of the deliveries that were read and not handed out, as counted and as summed up.
    pub(super) fn ready_bytes(&self) -> (usize, usize) {
        let sum = self.ready.iter().map(|it| it.message.size()).sum();
        (self.ready_bytes, sum)
    }
}
