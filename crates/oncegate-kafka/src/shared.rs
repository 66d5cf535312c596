//! The state that the polling thread and the consumer share: records that were read, deliveries
//! that were handed out, and released ones.
//!
//! All of it is behind one lock and none of it is an atomic or a cell, so no thread sees half of a
//! change. What remains is the order of whole calls: `model_tests` draws random orders, and
//! `shuttle_tests` lets shuttle schedule the threads at each lock.

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
/// The same in bytes.
const MAX_READY_BYTES: usize = 32 << 20;
/// Maximum number of messages that are released or being published to dead-letter topics. Above it,
/// a partition that holds its share of them is not read.
const MAX_HELD: usize = 10_000;
/// The same in bytes.
const MAX_HELD_BYTES: usize = 128 << 20;
/// Maximum number of messages between the lowest unsettled offset of a partition and the last one
/// read. Above it, the partition is not read. Each costs 8 bytes, and a crash redelivers up to this
/// many.
const MAX_SPAN: usize = 1 << 20;

/// The state behind one lock, and what wakes each side.
#[derive(Default)]
pub(crate) struct SharedState<M = StdLock> {
    /// Wakes the polling thread when there is room again, or when the last delivery of a revoked
    /// partition is settled.
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
    assigned: HashMap<u64, AssignedPartition>,
    last_epoch: u64,
    ready: VecDeque<Delivery>,
    ready_bytes: usize,
    /// Average size of a message of the last batch, in bytes.
    size: usize,
    revoked: Vec<u64>,
    /// Released deliveries, by the time that they are due.
    released: BTreeMap<(Instant, u64), Delivery>,
    releases: u64,
    /// How many dead letters are not confirmed yet.
    publishing: usize,
    /// The size of `released` and of the unconfirmed dead letters.
    held: HeldMessages,
    phase: SourcePhase,
    fault: Option<SourceError>,
    /// Why the client is to be replaced.
    replace: Option<String>,
    replaced: u64,
    /// Since when the client reports that it does not reach its group coordinator.
    without_group_since: Option<Instant>,
    /// Since when fresh clients have reached it for long enough.
    suspected: Option<Instant>,
    /// When the client last reported it.
    reported_at: Option<Instant>,
    expired: u64,
    progress: ReadProgress,
    /// Whether the polling thread was woken since its last wait.
    has_changed: bool,
}

impl<M: StateLock> SharedState<M> {
    pub(crate) fn lock(&self) -> M::Guard<'_> {
        self.state_lock.lock()
    }

    /// Waits, on the polling thread, until something was settled or handed out since the last wait,
    /// or for `limit`.
    pub(crate) fn wait(&self, limit: Duration) {
        let mut state = self.lock();
        if !state.has_changed {
            state = self.state_lock.wait(state, limit);
        }
        state.has_changed = false;
    }

    /// Wakes the polling thread, also if it is just about to wait.
    pub(crate) fn wake_poller(&self) {
        self.lock().has_changed = true;
        self.state_lock.notify();
    }

    pub(crate) fn wake_consumer(&self) {
        self.consumer_wakeup.notify_one();
    }

    /// Waits on the consumer's side. Cancel-safe; returns at once if there was a change since the
    /// last wait.
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

    /// Ends the source with an error.
    pub(crate) fn fail(&self, error: SourceError) {
        self.lock().fault.get_or_insert(error);
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
    /// Returns their epochs.
    pub(crate) fn revoke(&self, leaving: &[(String, i32)]) -> Vec<u64> {
        let epochs = self.lock().revoke(leaving);
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

    pub(crate) fn take_fault(&mut self) -> Option<SourceError> {
        self.fault.take()
    }

    pub(crate) fn publishing(&self) -> usize {
        self.publishing
    }

    /// How many messages may be read now, of partitions that are not [full](Self::full).
    pub(crate) fn room(&self) -> usize {
        let is_open = self.assigned.is_empty() || self.readable().any(|it| !self.is_full(it));
        if self.phase != SourcePhase::Running || self.ready_bytes >= MAX_READY_BYTES || !is_open {
            return 0;
        }
        let fitting = (MAX_READY_BYTES - self.ready_bytes) / self.size.max(1) + 1;
        fitting.min(MAX_READY.saturating_sub(self.ready.len()))
    }

    /// The partitions that are not read for now, while others are.
    pub(crate) fn full(&self) -> Vec<(Arc<str>, i32)> {
        self.readable()
            .filter(|it| self.is_full(it))
            .map(|it| (it.topic.clone(), it.partition))
            .collect()
    }

    fn readable(&self) -> impl Iterator<Item = &AssignedPartition> {
        self.assigned
            .values()
            .filter(|it| it.state != AssignmentState::Revoking)
    }

    /// Whether too many messages follow its lowest unsettled one, or too many messages are held in
    /// total and it has its share of them. A partition with less is read on, so that none waits for
    /// the dead letters of another.
    ///
    /// So the assigned partitions hold at most twice the limit, plus the messages that were read
    /// or fetched before they became full, which are still delivered: `MAX_READY` messages, and for
    /// each partition `queued.min.messages` and one fetch (`fetch.message.max.bytes`, but at least
    /// one record batch). With messages of a few bytes, one fetch has 20,000 of them. The dead
    /// letters of revoked partitions are not included.
    fn is_full(&self, partition: &AssignedPartition) -> bool {
        let (all, own) = (
            self.held.total(),
            self.held.of(&partition.topic, partition.partition),
        );
        let has_share = |of: fn(Backlog) -> usize, limit: usize| {
            of(all) >= limit && of(own) >= (limit / self.assigned.len()).max(1)
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
        let (mut watermark, send_from) = (Watermark::default(), Some(now));
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
            send_from,
            expiry: ExpiryLog::default(),
        };
        self.assigned.insert(self.last_epoch, assigned);
        self.last_epoch
    }

    /// A partition without a committed offset is read from this offset, which is committed even if
    /// the partition is empty.
    pub(crate) fn start_at(&mut self, topic: &str, partition: i32, offset: i64) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.watermark.start_at(offset);
        }
    }

    fn revoke(&mut self, leaving: &[(String, i32)]) -> Vec<u64> {
        let is_leaving = |it: &AssignedPartition| {
            leaving
                .iter()
                .any(|(topic, partition)| *partition == it.partition && **topic == *it.topic)
        };
        let epochs: Vec<u64> = self
            .assigned
            .iter()
            .filter(|(_, it)| is_leaving(it))
            .map(|(epoch, _)| *epoch)
            .collect();
        for epoch in &epochs {
            self.withdraw(*epoch);
        }
        epochs
    }

    /// Stops handing out messages of an assignment.
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
            let stays = delivery.receipt.epoch != epoch;
            if !stays {
                held.remove(delivery);
            }
            stays
        });
        self.revoked.push(epoch);
    }

    /// Adds no more records of a partition, part of which is unreadable, so that no offset after
    /// that is ever committed.
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
            let same = last.as_ref().filter(|(topic, partition, _)| {
                *partition == record.partition && *topic == record.topic
            });
            let epoch = match same {
                Some((_, _, epoch)) => *epoch,
                // Read before its partition was revoked; the next owner reads it again.
                None => match self.epoch_of(&record.topic, record.partition) {
                    Some(epoch) => epoch,
                    None => continue,
                },
            };
            let Some(epoch) = self.sequence(epoch, &record, &mut intake) else {
                continue;
            };
            last = Some((record.topic.clone(), record.partition, epoch));
            let delivery = delivery(record, epoch);
            bytes += delivery.message.size();
            self.ready_bytes += delivery.message.size();
            self.ready.push_back(delivery);
        }
        self.size = bytes / count;
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
            (PositionTrust::Trusted, Some(offset)) => assigned.pass(offset),
            (PositionTrust::Unconfirmed, None) => {
                assigned.position_trust = PositionTrust::Trusted;
                None
            }
            _ => None,
        }
    }

    /// librdkafka's position in this partition is wrong. Returns the offset to seek to: after the
    /// last message that was read, or `position` if none was read.
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

    /// librdkafka has accepted a seek.
    pub(crate) fn seek_succeeded(&mut self, topic: &str, partition: i32) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.position_trust = PositionTrust::Unconfirmed;
        }
    }

    fn epoch_of(&self, topic: &str, partition: i32) -> Option<u64> {
        let ours = |it: &AssignedPartition| {
            it.state == AssignmentState::Active && it.partition == partition && *it.topic == *topic
        };
        self.assigned
            .iter()
            .find(|(_, it)| ours(it))
            .map(|(epoch, _)| *epoch)
    }

    /// Handles the offset of a record. If it is below the last one (the log was truncated, or
    /// librdkafka went back), the assignment is revoked and a new epoch starts at this record, or
    /// at the lowest unsettled offset if that is lower. In the latter case the record is dropped
    /// and read again: with it, the offsets in between would count as settled.
    fn sequence(
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
    /// revocations only. Deliveries with a body larger than `largest` go to `oversize`, to be
    /// rejected.
    pub(crate) fn hand_out(
        &mut self,
        limit: Limit,
        largest: usize,
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
                .filter(|held| held.key().0 <= now);
            let next = due.as_ref().map(|held| held.get()).or(self.ready.front());
            let Some(size) = next.map(|delivery| delivery.message.size()) else {
                break;
            };
            if count > 0 && bytes.saturating_add(size) > limit.bytes {
                break;
            }
            let released = due.map(|held| held.remove());
            match &released {
                Some(delivery) => self.held.remove(delivery),
                None => self.ready_bytes -= size,
            }
            let Some(delivery) = released.or_else(|| self.ready.pop_front()) else {
                break;
            };
            (count, bytes) = (count + 1, bytes + size);
            let is_oversize = delivery.message.body.len() > largest;
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
        // Offsets come from an `i64`.
        if assigned.watermark.settle(receipt.position as i64) == OffsetChange::Settled {
            assigned.handed_out = assigned.handed_out.saturating_sub(1);
        }
        SettlementEffect::Counted
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
            self.releases += 1;
            // Bounds the delay, so that the addition cannot overflow.
            let due = Instant::now() + after.min(Duration::from_secs(86_400));
            self.released.insert((due, self.releases), delivery);
        }
        SettlementEffect::Counted
    }

    /// A dead letter for this delivery is being published.
    pub(crate) fn reject(&mut self, delivery: &Delivery) -> SettlementEffect {
        if !self.assigned.contains_key(&delivery.receipt.epoch) {
            return SettlementEffect::Stale;
        }
        self.publishing += 1;
        self.held.add(delivery);
        SettlementEffect::Counted
    }

    /// The dead letter is confirmed.
    pub(crate) fn published(&mut self, delivery: &Delivery) -> SettlementEffect {
        self.publishing = self.publishing.saturating_sub(1);
        self.held.remove(delivery);
        self.accept(&delivery.receipt)
    }
}

/// Whether a settlement applies to the current assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettlementEffect {
    Counted,
    /// The partition is not assigned to this member any more, or under another epoch.
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
        // Neither is negative in a delivered message.
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
