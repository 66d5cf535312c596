//! The state that the polling thread and the consumer share: records that were read, deliveries
//! that were handed out, and released ones.
//!
//! Each assignment of a partition has a number, its *assignment epoch*, which the receipts of its
//! deliveries contain ([`Receipt::epoch`]). A settlement with another epoch is stale.
//!
//! All state is behind one lock, without atomics or cells, so no thread sees half of a change. Only
//! the order of calls varies: `model_tests` draws random orders, and `shuttle_tests` runs the threads
//! in many schedules.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{
    Delivery, HeadersBuilder, Incoming, Limit, Message, Origin, Position, Receipt, SourceError,
};
use tokio::sync::Notify;

use crate::client::batch::ConsumerRecord;
use crate::watermark::{OffsetChange, OffsetOrder, Watermark};

mod assignment;
mod backlog;
mod commits;
mod expired;
mod health;
mod lock;
mod revocation;
mod settlement;
mod topic_recreated;

use assignment::{AssignedPartition, AssignmentState, LOG_START, PositionTrust};
pub(crate) use assignment::{
    IntakeResult, LogIdentity, OffsetCommit, OffsetGap, PositionIds, SendMode, StartPosition,
};
use backlog::{Backlog, HeldMessages};
use expired::ExpiryLog;
pub(crate) use health::ReadProgress;
use lock::{StateLock, StdLock};
pub(crate) use revocation::RevocationKind;
pub(crate) use settlement::RejectedDelivery;

/// Maximum number of messages that are read ahead of the consumer.
const MAX_READY: usize = 2_048;
/// Maximum size of the messages that are read ahead of the consumer, in bytes.
const MAX_READY_BYTES: usize = 32 << 20;
/// Maximum number of held messages: released, or being published to dead-letter topics. From this
/// number on, a partition that holds its share of them is not read.
const MAX_HELD: usize = 10_000;
/// Maximum size of the held messages, in bytes.
const MAX_HELD_BYTES: usize = 128 << 20;
/// Maximum number of messages from the lowest unsettled offset of a partition to the last one read.
/// From this number on, the partition is not read. Each costs 8 bytes, and a crash redelivers up to
/// this many.
const MAX_SPAN: usize = 1 << 20;
/// Maximum delay of a release, so that adding it to the current time cannot overflow.
const MAX_RELEASE_DELAY: Duration = Duration::from_secs(86_400);

/// The state behind one lock, and the wake-ups of both threads.
#[derive(Default)]
pub(crate) struct SharedState<M = StdLock> {
    /// Its condition variable wakes the polling thread after each settlement, and after deliveries
    /// were handed out.
    state_lock: M,
    /// Wakes the consumer.
    consumer_wakeup: Notify,
}

/// The phase of the source's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SourcePhase {
    /// Hands out deliveries.
    #[default]
    Running,
    /// Hands out no new deliveries; settlements still count.
    Stopped,
    /// Leaves the group.
    Closing,
    /// Has left the group.
    Ended,
}

#[derive(Default)]
pub(crate) struct SourceState {
    /// The assignments, by assignment epoch.
    assigned: HashMap<u64, AssignedPartition>,
    last_epoch: u64,
    /// Whether an error said that a topic or partition does not exist.
    topic_may_be_missing: bool,
    /// Deliveries that were read and not handed out yet.
    ready: VecDeque<Delivery>,
    ready_bytes: usize,
    /// Average size of a message of the last batch, in bytes.
    average_size: usize,
    /// Assignment epochs whose revocation is to be reported to the consumer.
    revoked: Vec<u64>,
    /// Released deliveries, by the time when they are due and the number of their release.
    released: BTreeMap<(Instant, u64), Delivery>,
    release_count: u64,
    /// How many dead letters are not confirmed yet.
    publishing: usize,
    /// The size of `released` and of the unconfirmed dead letters.
    held: HeldMessages,
    phase: SourcePhase,
    /// The error that ends the source.
    error: Option<SourceError>,
    /// Why the client is to be replaced, once that is requested.
    replacement_reason: Option<String>,
    /// How often the client was replaced.
    replacements: u64,
    /// Since when the client reports that it does not reach its group coordinator.
    without_group_since: Option<Instant>,
    /// Since when the client is suspected to have lost its broker metadata: fresh clients reach the
    /// coordinator.
    suspected_since: Option<Instant>,
    /// When the client last reported whether it reaches its group coordinator.
    reported_at: Option<Instant>,
    /// How many offsets expired before they were read.
    expired: u64,
    progress: ReadProgress,
    /// Whether the polling thread was woken since its last wait.
    has_changed: bool,
}

impl<M: StateLock> SharedState<M> {
    pub(crate) fn lock(&self) -> M::Guard<'_> {
        self.state_lock.lock()
    }

    /// Waits on the polling thread until it is woken, or for `limit`. Returns at once if it was woken
    /// since the last wait.
    pub(crate) fn wait(&self, limit: Duration) {
        let mut state = self.lock();
        if !state.has_changed {
            state = self.state_lock.wait(state, limit);
        }
        state.has_changed = false;
    }

    /// Wakes the polling thread. If it is not waiting, its next wait returns at once.
    pub(crate) fn wake_poller(&self) {
        self.lock().has_changed = true;
        self.state_lock.notify();
    }

    pub(crate) fn wake_consumer(&self) {
        self.consumer_wakeup.notify_one();
    }

    /// Waits on the consumer's side until it is woken. Cancel-safe; returns at once if it was woken
    /// since the last wait.
    pub(crate) async fn wait_for_wakeup(&self) {
        self.consumer_wakeup.notified().await;
    }

    /// Enters a phase. Does not return to an earlier one.
    pub(crate) fn enter(&self, phase: SourcePhase) {
        let mut state = self.lock();
        state.phase = state.phase.max(phase);
        drop(state);
        self.wake_poller();
        self.wake_consumer();
    }

    /// Ends the source with an error. The first error is kept.
    pub(crate) fn fail(&self, error: SourceError) {
        self.lock().error.get_or_insert(error);
        self.wake_consumer();
    }

    /// A partition was assigned to this member.
    pub(crate) fn assign(
        &self,
        topic: &str,
        partition: i32,
        start: StartPosition,
        log: LogIdentity,
    ) {
        self.lock()
            .start_assignment(Arc::from(topic), partition, start, log);
    }

    /// Stops handing out messages of these partitions and reports the revocation to the consumer.
    /// Returns their assignment epochs.
    pub(crate) fn revoke(&self, partitions: &[(String, i32)]) -> Vec<u64> {
        let epochs = self.lock().revoke(partitions);
        self.wake_consumer();
        epochs
    }

    /// Adds records that were read.
    pub(crate) fn add_records(&self, records: Vec<ConsumerRecord>) -> IntakeResult {
        if records.is_empty() {
            return IntakeResult::default();
        }
        let intake = self.lock().add_records(records);
        self.wake_consumer();
        intake
    }
}

impl SourceState {
    pub(crate) fn phase(&self) -> SourcePhase {
        self.phase
    }

    pub(crate) fn take_error(&mut self) -> Option<SourceError> {
        self.error.take()
    }

    /// How many dead letters are not confirmed yet.
    pub(crate) fn publishing(&self) -> usize {
        self.publishing
    }

    /// How many messages may be read now, from the partitions that are not
    /// [full](Self::full_partitions).
    pub(crate) fn room(&self) -> usize {
        let is_any_readable =
            self.assigned.is_empty() || self.readable().any(|it| !self.is_full(it));
        if self.phase != SourcePhase::Running
            || self.ready_bytes >= MAX_READY_BYTES
            || !is_any_readable
        {
            return 0;
        }
        let fitting = (MAX_READY_BYTES - self.ready_bytes) / self.average_size.max(1) + 1;
        fitting.min(MAX_READY.saturating_sub(self.ready.len()))
    }

    /// The partitions that are not read until some of their messages are settled.
    pub(crate) fn full_partitions(&self) -> Vec<(Arc<str>, i32)> {
        self.readable()
            .filter(|it| self.is_full(it))
            .map(|it| (it.topic.clone(), it.partition))
            .collect()
    }

    /// The partitions that are not being revoked.
    fn readable(&self) -> impl Iterator<Item = &AssignedPartition> {
        self.assigned
            .values()
            .filter(|it| it.state != AssignmentState::Revoking)
    }

    /// Whether the partition has [`MAX_SPAN`] messages from its lowest unsettled one on, or the source
    /// holds [`MAX_HELD`] messages (or [`MAX_HELD_BYTES`]) and the partition has its share of them. A
    /// partition with fewer is read, so that none waits for the dead letters of another.
    ///
    /// The assigned partitions hold at most twice the limit, plus the messages that were read or
    /// fetched before they became full: [`MAX_READY`] messages, and for each partition
    /// `queued.min.messages` and one fetch (`fetch.message.max.bytes`, but at least one record
    /// batch). One fetch may have 20,000 messages of a few bytes. The dead letters of revoked
    /// partitions are not included.
    fn is_full(&self, partition: &AssignedPartition) -> bool {
        let (total, own) = (
            self.held.total(),
            self.held.of(&partition.topic, partition.partition),
        );
        let has_share = |of: fn(Backlog) -> usize, limit: usize| {
            of(total) >= limit && of(own) >= (limit / self.assigned.len()).max(1)
        };
        partition.watermark.span() >= MAX_SPAN
            || has_share(|it| it.count, MAX_HELD)
            || has_share(|it| it.bytes, MAX_HELD_BYTES)
    }

    fn start_assignment(
        &mut self,
        topic: Arc<str>,
        partition: i32,
        start: StartPosition,
        log: LogIdentity,
    ) -> u64 {
        self.last_epoch += 1;
        let now = Instant::now();
        let mut watermark = Watermark::default();
        if start == StartPosition::Recreated {
            // Committed at once: the next owner of the partition must not start at an offset of the
            // deleted topic.
            watermark.start_at(LOG_START);
        }
        let assigned = AssignedPartition {
            topic,
            partition,
            log,
            watermark,
            start,
            position_trust: PositionTrust::Unconfirmed,
            log_end: None,
            lowest_since: (None, now),
            repetition_logged: false,
            handed_out: 0,
            state: AssignmentState::Active,
            commit_immediately_from: Some(now),
            expiry: ExpiryLog::default(),
        };
        self.assigned.insert(self.last_epoch, assigned);
        self.last_epoch
    }

    /// Sets the start of a partition without a committed offset. It is committed even if the partition
    /// is empty.
    pub(crate) fn start_at(&mut self, topic: &str, partition: i32, offset: i64) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.watermark.start_at(offset);
        }
    }

    fn revoke(&mut self, partitions: &[(String, i32)]) -> Vec<u64> {
        let is_revoked = |it: &AssignedPartition| {
            partitions
                .iter()
                .any(|(topic, partition)| *partition == it.partition && **topic == *it.topic)
        };
        let epochs: Vec<u64> = self
            .assigned
            .iter()
            .filter(|(_, it)| is_revoked(it))
            .map(|(epoch, _)| *epoch)
            .collect();
        for epoch in &epochs {
            self.withdraw(*epoch);
        }
        epochs
    }

    /// Stops handing out messages of an assignment, and drops those that were not handed out.
    fn withdraw(&mut self, epoch: u64) {
        if let Some(assigned) = self.assigned.get_mut(&epoch) {
            assigned.state = AssignmentState::Revoking;
        }
        self.ready
            .retain(|delivery| delivery.receipt.epoch != epoch);
        self.ready_bytes = self
            .ready
            .iter()
            .map(|delivery| delivery.message.size())
            .sum();
        let held = &mut self.held;
        self.released.retain(|_, delivery| {
            let is_kept = delivery.receipt.epoch != epoch;
            if !is_kept {
                held.remove(delivery);
            }
            is_kept
        });
        self.revoked.push(epoch);
    }

    /// Adds no more records of a partition, because a part of its log is unreadable or its start
    /// position is an error. So no offset above the last one read is committed.
    pub(crate) fn halt(&mut self, topic: &str, partition: i32) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.state = AssignmentState::Halted;
        }
    }

    /// How many deliveries of these assignments are not settled or released yet.
    pub(crate) fn handed_out(&self, epochs: &[u64]) -> usize {
        epochs
            .iter()
            .filter_map(|epoch| self.assigned.get(epoch))
            .map(|it| it.handed_out)
            .sum()
    }

    /// Ends these assignments: settlements of them are stale from now on.
    pub(crate) fn forget(&mut self, epochs: &[u64]) {
        for epoch in epochs {
            self.assigned.remove(epoch);
        }
    }

    fn add_records(&mut self, records: Vec<ConsumerRecord>) -> IntakeResult {
        let (count, mut bytes, mut intake) = (records.len(), 0, IntakeResult::default());
        let mut last: Option<(Arc<str>, i32, u64)> = None;
        for record in records {
            let previous = last.as_ref().filter(|(topic, partition, _)| {
                *partition == record.partition && *topic == record.topic
            });
            let epoch = match previous {
                Some((_, _, epoch)) => *epoch,
                // Not assigned any more: the next owner of the partition reads the record.
                None => match self.epoch_of(&record.topic, record.partition) {
                    Some(epoch) => epoch,
                    None => continue,
                },
            };
            let Some(epoch) = self.track_offset(epoch, &record, &mut intake) else {
                continue;
            };
            last = Some((record.topic.clone(), record.partition, epoch));
            let delivery = delivery(record, epoch);
            bytes += delivery.message.size();
            self.ready_bytes += delivery.message.size();
            self.ready.push_back(delivery);
        }
        self.average_size = bytes / count;
        intake
    }

    /// Handles librdkafka's position in a partition, `None` before the first read. Transaction
    /// markers below it count as settled. Returns the offset gap if messages may have expired.
    pub(crate) fn advance_to(
        &mut self,
        topic: &str,
        partition: i32,
        offset: Option<i64>,
    ) -> Option<OffsetGap> {
        let epoch = self.epoch_of(topic, partition)?;
        let assigned = self.assigned.get_mut(&epoch)?;
        match (assigned.position_trust, offset) {
            (PositionTrust::Trusted, Some(offset)) => assigned.advance_to(offset),
            (PositionTrust::Unconfirmed, None) => {
                assigned.position_trust = PositionTrust::Trusted;
                None
            }
            _ => None,
        }
    }

    /// Ignores librdkafka's position in this partition, which is too high, until a seek succeeds.
    /// Returns the offset to seek to: after the last message that was read, or `position` if none was
    /// read.
    pub(crate) fn distrust_position(
        &mut self,
        topic: &str,
        partition: i32,
        position: Option<i64>,
    ) -> Option<i64> {
        let epoch = self.epoch_of(topic, partition)?;
        let assigned = self.assigned.get_mut(&epoch)?;
        assigned.position_trust = PositionTrust::Wrong;
        assigned.watermark.end().or(position)
    }

    /// librdkafka has accepted the seek that corrects its position.
    pub(crate) fn seek_succeeded(&mut self, topic: &str, partition: i32) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.position_trust = PositionTrust::Unconfirmed;
        }
    }

    /// The assignment epoch of the records that are added for this partition now.
    fn epoch_of(&self, topic: &str, partition: i32) -> Option<u64> {
        let is_match = |it: &AssignedPartition| {
            it.state == AssignmentState::Active && it.partition == partition && *it.topic == *topic
        };
        self.assigned
            .iter()
            .find(|(_, it)| is_match(it))
            .map(|(epoch, _)| *epoch)
    }

    /// Handles the offset of a record, and returns the assignment epoch of its delivery. If it is below
    /// the last one (the log was truncated, or librdkafka reads messages again), the assignment is
    /// revoked and another one starts at this record, or at the lowest unsettled offset if that is lower. In the
    /// latter case the record is dropped and read again; if it were added, the offsets in between would
    /// count as settled.
    fn track_offset(
        &mut self,
        epoch: u64,
        record: &ConsumerRecord,
        intake: &mut IntakeResult,
    ) -> Option<u64> {
        let assigned = self.assigned.get_mut(&epoch)?;
        intake.gaps.extend(assigned.record_arrived(record.offset));
        if assigned.watermark.deliver(record.offset) == OffsetOrder::Ascending {
            if assigned.position_trust == PositionTrust::Unconfirmed {
                assigned.position_trust = PositionTrust::Trusted;
            }
            return Some(epoch);
        }
        assigned.on_truncation(assigned.watermark.end(), record.offset);
        let unsettled = assigned
            .watermark
            .lowest()
            .filter(|lowest| *lowest < record.offset);
        self.withdraw(epoch);
        let log = self
            .assigned
            .remove(&epoch)
            .map(|it| it.log)
            .unwrap_or_default();
        let start = unsettled.unwrap_or(record.offset);
        let epoch = self.start_assignment(
            record.topic.clone(),
            record.partition,
            StartPosition::Committed(start),
            log,
        );
        let assigned = self.assigned.get_mut(&epoch)?;
        if unsettled.is_some() {
            assigned.watermark.start_at(start);
            assigned.state = AssignmentState::Seeking;
            return None;
        }
        assigned.watermark.deliver(record.offset);
        intake
            .restarted
            .push((record.topic.clone(), record.partition));
        Some(epoch)
    }

    /// Hands out revocations, due releases and records within the limit; a limit of 0 returns
    /// revocations only. Deliveries with a body larger than `body_limit` go to `oversize`, to be
    /// rejected.
    pub(crate) fn hand_out(
        &mut self,
        limit: Limit,
        body_limit: usize,
        into: &mut Vec<Incoming>,
        oversize: &mut Vec<Delivery>,
    ) {
        into.extend(self.revoked.drain(..).map(Incoming::Revoked));
        if self.phase != SourcePhase::Running {
            return;
        }
        let (now, mut count, mut bytes) = (Instant::now(), 0, 0_usize);
        while count < limit.count {
            let due = self
                .released
                .first_entry()
                .filter(|entry| entry.key().0 <= now);
            let next = due.as_ref().map(|entry| entry.get()).or(self.ready.front());
            let Some(size) = next.map(|delivery| delivery.message.size()) else {
                break;
            };
            if count > 0 && bytes.saturating_add(size) > limit.bytes {
                break;
            }
            let released = due.map(|entry| entry.remove());
            match &released {
                Some(delivery) => self.held.remove(delivery),
                None => self.ready_bytes -= size,
            }
            let Some(delivery) = released.or_else(|| self.ready.pop_front()) else {
                break;
            };
            (count, bytes) = (count + 1, bytes + size);
            let is_oversize = delivery.message.body.len() > body_limit;
            if let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) {
                assigned.handed_out += 1;
            }
            if is_oversize {
                self.publishing += 1;
                self.held.add(&delivery);
                oversize.push(delivery);
            } else {
                into.push(Incoming::Delivery(delivery));
            }
        }
    }

    /// When the next release is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.released
            .first_key_value()
            .map(|((due, _), _)| *due)
            .filter(|_| self.phase == SourcePhase::Running)
    }

    /// Settles a delivery.
    pub(crate) fn accept(&mut self, receipt: &Receipt) -> SettlementEffect {
        let Some(assigned) = self.assigned.get_mut(&receipt.epoch) else {
            return SettlementEffect::Stale;
        };
        // Lossless: `position` was converted from an `i64` offset.
        if assigned.watermark.settle(receipt.position as i64) == OffsetChange::Settled {
            assigned.handed_out = assigned.handed_out.saturating_sub(1);
        }
        SettlementEffect::Applied
    }

    /// Takes a delivery back to hand it out again after a delay, unless its partition is being
    /// revoked.
    pub(crate) fn release(&mut self, delivery: Delivery, after: Duration) -> SettlementEffect {
        let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) else {
            return SettlementEffect::Stale;
        };
        assigned.handed_out = assigned.handed_out.saturating_sub(1);
        if assigned.state != AssignmentState::Revoking {
            let delivery = Delivery {
                message: detached(&delivery.message),
                ..delivery
            };
            self.held.add(&delivery);
            self.release_count += 1;
            let due = Instant::now() + after.min(MAX_RELEASE_DELAY);
            self.released.insert((due, self.release_count), delivery);
        }
        SettlementEffect::Applied
    }

    /// Counts a dead letter of this delivery as being published.
    pub(crate) fn reject(&mut self, delivery: &Delivery) -> SettlementEffect {
        if !self.assigned.contains_key(&delivery.receipt.epoch) {
            return SettlementEffect::Stale;
        }
        self.publishing += 1;
        self.held.add(delivery);
        SettlementEffect::Applied
    }

    /// Settles a delivery whose dead letter is confirmed.
    pub(crate) fn published(&mut self, delivery: &Delivery) -> SettlementEffect {
        self.publishing = self.publishing.saturating_sub(1);
        self.held.remove(delivery);
        self.accept(&delivery.receipt)
    }
}

/// Whether a settlement applies to the current assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettlementEffect {
    Applied,
    /// The partition is not assigned to this member any more, or in another assignment.
    Stale,
}

impl SettlementEffect {
    /// Counts a stale settlement.
    pub(crate) fn count(self) {
        if self == Self::Stale {
            metrics::counter!(crate::metric::STALE_SETTLEMENTS).increment(1);
        }
    }
}

fn delivery(record: ConsumerRecord, epoch: u64) -> Delivery {
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
mod model_tests;
#[cfg(test)]
mod shuttle_tests;
#[cfg(test)]
mod tests;
