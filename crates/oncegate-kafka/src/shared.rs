//! The state that the polling thread and the consumer share: assigned partitions, records that were
//! read, deliveries that were handed out, and rejected ones.
//!
//! All state is behind one lock, without atomics or cells, so no thread sees half of a change. Only
//! the order of calls varies: `model_tests` draws random orders, and `shuttle_tests` runs the threads
//! in many schedules. [`Partition`] decides what follows from an event; this module performs it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::source::QueueLevel;
use oncegate_core::{Delivery, Incoming, Limit, Receipt, SourceError};
use tokio::sync::Notify;

use crate::client::batch::ConsumerRecord;
use crate::partition::{
    LogIdentity, Partition, PartitionAction, PartitionEvent, RestartCause, SendMode, StartPosition,
    TopicIdentity,
};

mod capacity;
mod client_health;
mod deliveries;
mod lock;
mod offset_gaps;
mod settlement;
mod status;
mod unconfirmed;

pub(crate) use client_health::{ClientHealth, ReadProgress};
use deliveries::DeliveryBuffer;
use lock::{StateLock, StdLock};
use offset_gaps::GapLog;
pub(crate) use settlement::{RejectedDelivery, count_if_stale};

/// The pause before a failed commit is repeated.
const COMMIT_RETRY_PAUSE: Duration = Duration::from_secs(1);

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
    /// The assigned partitions, by assignment epoch.
    assigned: BTreeMap<u64, AssignedPartition>,
    last_epoch: u64,
    /// Assignment epochs whose revocation is to be reported to the consumer.
    revoked: Vec<u64>,
    deliveries: DeliveryBuffer,
    /// How full the consumer's queue is.
    queue_level: QueueLevel,
    pub(crate) client: ClientHealth,
    phase: SourcePhase,
    /// The error that ends the source.
    error: Option<SourceError>,
    /// How many offsets expired before they were read.
    expired: u64,
    /// Whether the polling thread was woken since its last wait.
    has_changed: bool,
}

/// An assigned partition, and what is reported of it.
struct AssignedPartition {
    topic: Arc<str>,
    number: i32,
    partition: Partition,
    /// The log end that the broker returned last.
    log_end: Option<i64>,
    /// Whether the line about repeated ids was logged for this assignment.
    is_repetition_logged: bool,
    gap_log: GapLog,
}

impl AssignedPartition {
    fn new(topic: Arc<str>, number: i32, partition: Partition) -> Self {
        Self {
            topic,
            number,
            partition,
            log_end: None,
            is_repetition_logged: false,
            gap_log: GapLog::default(),
        }
    }

    fn is(&self, topic: &str, number: i32) -> bool {
        self.number == number && *self.topic == *topic
    }
}

/// An offset to commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OffsetCommit {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) mode: SendMode,
    /// The topic that the offset belongs to, if it is known: the metadata of the commit.
    pub(crate) identity: Option<TopicIdentity>,
}

/// Whether the partitions still belong to this member when they are revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RevocationKind {
    /// Yes: no other member is assigned them before the revocation ends.
    Revoked,
    /// No: another member may be assigned them already, and a commit would overwrite its offsets.
    Lost,
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

    /// The consumer's queue has reached this level.
    pub(crate) fn set_queue_level(&self, level: QueueLevel) {
        self.lock().queue_level = level;
        self.wake_poller();
    }

    /// Ends the source with an error. The first error is kept.
    pub(crate) fn fail(&self, error: SourceError) {
        self.lock().error.get_or_insert(error);
        self.wake_consumer();
    }

    /// Adds records that were read. Returns the partitions that continue at a lower offset, so that
    /// librdkafka's position is wrong.
    pub(crate) fn add_records(&self, records: Vec<ConsumerRecord>) -> Vec<(Arc<str>, i32)> {
        if records.is_empty() {
            return Vec::new();
        }
        let restarted = self.lock().add_records(records);
        self.wake_consumer();
        restarted
    }

    /// Restarts a recreated topic: ends its assignments and starts new ones, to which no records are
    /// added before librdkafka has sought to the beginning. Partitions that were assigned after the
    /// topic was recreated have started there. Returns the number of partitions.
    pub(crate) fn restart_topic(&self, topic: &str, identity: Option<TopicIdentity>) -> usize {
        let partitions = self.lock().restart_topic(topic, identity);
        self.wake_consumer();
        partitions
    }

    /// Stops handing out messages of these partitions and reports the revocation to the consumer.
    /// Returns their assignment epochs.
    pub(crate) fn revoke(&self, partitions: &[(String, i32)]) -> Vec<u64> {
        let mut state = self.lock();
        let epochs: Vec<u64> = partitions
            .iter()
            .filter_map(|(topic, partition)| state.epoch_of(topic, *partition))
            .collect();
        for epoch in &epochs {
            state.apply_to(*epoch, PartitionEvent::Revoked);
        }
        drop(state);
        self.wake_consumer();
        epochs
    }

    /// Ends assignments: waits for deliveries with `drain`, stores the offsets with `store`, and
    /// removes the assignments. Both are skipped for lost partitions. Returns the number of unsettled
    /// deliveries.
    pub(crate) fn end_assignments(
        &self,
        partitions: &[(String, i32)],
        kind: RevocationKind,
        drain: impl FnOnce(&[u64]),
        store: impl FnOnce(),
    ) -> usize {
        let epochs = self.revoke(partitions);
        if kind == RevocationKind::Revoked {
            drain(&epochs);
            store();
        }
        let mut state = self.lock();
        let unsettled = state.handed_out(&epochs);
        state.forget(&epochs);
        unsettled
    }
}

impl SourceState {
    pub(crate) fn phase(&self) -> SourcePhase {
        self.phase
    }

    pub(crate) fn take_error(&mut self) -> Option<SourceError> {
        self.error.take()
    }

    /// How many offsets expired before they were read.
    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// How many dead letters are not confirmed yet.
    pub(crate) fn publishing(&self) -> usize {
        self.deliveries.unconfirmed.total().count
    }

    /// A partition was assigned to this member. An earlier assignment of it ends.
    pub(crate) fn assign(
        &mut self,
        topic: &str,
        partition: i32,
        start: StartPosition,
        log: LogIdentity,
    ) -> u64 {
        if let Some(epoch) = self.epoch_of(topic, partition) {
            self.apply_to(epoch, PartitionEvent::Revoked);
            self.forget(&[epoch]);
        }
        self.last_epoch += 1;
        let assigned = Partition::new(self.last_epoch, start, log);
        self.assigned.insert(
            self.last_epoch,
            AssignedPartition::new(Arc::from(topic), partition, assigned),
        );
        self.last_epoch
    }

    /// Applies an event to a partition, if it is assigned.
    pub(crate) fn apply(
        &mut self,
        topic: &str,
        partition: i32,
        event: PartitionEvent,
    ) -> PartitionAction {
        match self.epoch_of(topic, partition) {
            Some(epoch) => self.apply_to(epoch, event),
            None => PartitionAction::Nothing,
        }
    }

    fn apply_to(&mut self, epoch: u64, event: PartitionEvent) -> PartitionAction {
        let Some(assigned) = self.assigned.get_mut(&epoch) else {
            return PartitionAction::Nothing;
        };
        let action = assigned.partition.apply(event);
        match &action {
            PartitionAction::DropQueued => self.withdraw(epoch),
            PartitionAction::Restart { ended, .. } => {
                self.withdraw(*ended);
                if let Some(it) = self.assigned.remove(&epoch) {
                    self.last_epoch = it.partition.epoch();
                    let restarted = AssignedPartition::new(it.topic, it.number, it.partition);
                    self.assigned.insert(self.last_epoch, restarted);
                }
            }
            _ => {}
        }
        action
    }

    /// Drops the deliveries of an assignment that were not handed out, and reports its revocation.
    fn withdraw(&mut self, epoch: u64) {
        self.deliveries.drop_all_of(epoch);
        self.revoked.push(epoch);
    }

    /// Ends these assignments: settlements of them are stale from now on.
    pub(crate) fn forget(&mut self, epochs: &[u64]) {
        for epoch in epochs {
            self.assigned.remove(epoch);
        }
    }

    /// The epoch of the partition's assignment.
    fn epoch_of(&self, topic: &str, partition: i32) -> Option<u64> {
        let mut all = self.assigned.iter();
        all.find(|(_, it)| it.is(topic, partition))
            .map(|(epoch, _)| *epoch)
    }

    /// How many deliveries of these assignments are not settled or released yet.
    pub(crate) fn handed_out(&self, epochs: &[u64]) -> usize {
        let assigned = epochs.iter().filter_map(|epoch| self.assigned.get(epoch));
        assigned.map(|it| it.partition.handed_out()).sum()
    }

    fn add_records(&mut self, records: Vec<ConsumerRecord>) -> Vec<(Arc<str>, i32)> {
        let (mut restarted, mut current) = (Vec::new(), None);
        self.deliveries.start_batch(records.len());
        for record in records {
            let epoch = match &current {
                Some((topic, partition, epoch))
                    if *partition == record.partition && *topic == record.topic =>
                {
                    *epoch
                }
                _ => match self.epoch_of(&record.topic, record.partition) {
                    Some(epoch) => epoch,
                    // Not assigned any more: the next owner of the partition reads the record.
                    None => continue,
                },
            };
            let next_epoch = self.last_epoch + 1;
            let offset = record.offset;
            let event = PartitionEvent::Fetched { offset, next_epoch };
            let (truncated_from, delivered_in) = match self.apply_to(epoch, event) {
                PartitionAction::Enqueue { truncated_from } => (truncated_from, Some(epoch)),
                PartitionAction::Restart { cause, .. } => match cause {
                    RestartCause::Truncated { expected } => {
                        restarted.push((record.topic.clone(), record.partition));
                        (Some(expected), Some(next_epoch))
                    }
                    RestartCause::TruncatedAboveUnsettled { expected } => (Some(expected), None),
                    RestartCause::Recreated => (None, None),
                },
                _ => (None, None),
            };
            if let Some(expected) = truncated_from {
                report_truncation(&record, expected);
            }
            current = delivered_in.map(|epoch| (record.topic.clone(), record.partition, epoch));
            if let Some(epoch) = delivered_in {
                self.deliveries.add(record, epoch);
            }
        }
        restarted
    }

    /// Hands out revocations, releases and records within the limit, but none of
    /// [crowded](Self::crowded) assignments; a limit of 0 returns revocations only. Deliveries with a body larger than `body_limit` go to `oversize`, to be
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
        let mut bytes = 0_usize;
        let held_back = self.crowded();
        self.deliveries.hold_back_only(&held_back);
        for count in 0..limit.count {
            // The first delivery may exceed the limit.
            let max_bytes = if count == 0 {
                usize::MAX
            } else {
                limit.bytes.saturating_sub(bytes)
            };
            let Some(delivery) = self.deliveries.take_next(max_bytes, &held_back) else {
                break;
            };
            bytes += delivery.message.size();
            self.apply_to(delivery.receipt.epoch, PartitionEvent::HandedOut);
            if delivery.message.body.len() > body_limit {
                self.deliveries.unconfirmed.add(&delivery);
                oversize.push(delivery);
            } else {
                into.push(Incoming::Delivery(delivery));
            }
        }
    }

    /// Settles a delivery. False if its assignment has ended.
    pub(crate) fn accept(&mut self, receipt: &Receipt) -> bool {
        let Some(assigned) = self.assigned.get_mut(&receipt.epoch) else {
            return false;
        };
        // Lossless: `position` was converted from an `i64` offset.
        let event = PartitionEvent::Settled(receipt.position as i64);
        assigned.partition.apply(event);
        true
    }

    /// Takes a delivery back to hand it out again, unless its partition is being revoked. False if its
    /// assignment has ended.
    pub(crate) fn release(&mut self, delivery: Delivery) -> bool {
        let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) else {
            return false;
        };
        if assigned.partition.apply(PartitionEvent::Released) == PartitionAction::Redeliver {
            self.deliveries.push(delivery);
        }
        true
    }

    /// Counts a dead letter of this delivery as being published. False if its assignment has ended.
    pub(crate) fn reject(&mut self, delivery: &Delivery) -> bool {
        let is_assigned = self.assigned.contains_key(&delivery.receipt.epoch);
        if is_assigned {
            self.deliveries.unconfirmed.add(delivery);
        }
        is_assigned
    }

    /// Settles a delivery whose dead letter is confirmed. False if its assignment has ended.
    pub(crate) fn published(&mut self, delivery: &Delivery) -> bool {
        self.deliveries.unconfirmed.remove(delivery);
        self.accept(&delivery.receipt)
    }

    /// Takes the offsets to commit that were not returned before.
    pub(crate) fn commits(&mut self) -> Vec<OffsetCommit> {
        let now = Instant::now();
        let commit = |it: &mut AssignedPartition| {
            let action = it.partition.apply(PartitionEvent::CommitDue(now));
            let PartitionAction::Commit { offset, mode } = action else {
                return None;
            };
            Some(OffsetCommit {
                topic: it.topic.clone(),
                partition: it.number,
                offset,
                mode,
                identity: it.partition.log().identity.clone(),
            })
        };
        self.assigned.values_mut().filter_map(commit).collect()
    }

    /// A commit of this partition failed. It is repeated after [`COMMIT_RETRY_PAUSE`].
    pub(crate) fn commit_again(&mut self, topic: &str, partition: i32) {
        let retry_at = Instant::now() + COMMIT_RETRY_PAUSE;
        self.apply(topic, partition, PartitionEvent::CommitFailed { retry_at });
    }

    fn restart_topic(&mut self, topic: &str, identity: Option<TopicIdentity>) -> usize {
        let of_topic = self.assigned.iter().filter(|(_, it)| *it.topic == *topic);
        let epochs: Vec<u64> = of_topic.map(|(epoch, _)| *epoch).collect();
        let mut restart = |epoch: &u64| {
            let event = PartitionEvent::TopicRecreated {
                identity: identity.clone(),
                next_epoch: self.last_epoch + 1,
            };
            self.apply_to(*epoch, event) != PartitionAction::Nothing
        };
        epochs.iter().filter(|epoch| restart(epoch)).count()
    }

    /// Whether an assignment of the topic was, or may have been, made while it had another id than
    /// `current`.
    pub(crate) fn is_outdated(&self, topic: &str, current: Option<&TopicIdentity>) -> bool {
        self.readable()
            .any(|it| *it.topic == *topic && it.partition.is_outdated(current))
    }

    /// Topic, partition and offset of each seek that must succeed before the partition is read.
    pub(crate) fn pending_seeks(&self) -> Vec<(Arc<str>, i32, i64)> {
        let seek = |it: &AssignedPartition| {
            Some((it.topic.clone(), it.number, it.partition.pending_seek()?))
        };
        self.assigned.values().filter_map(seek).collect()
    }
}

/// Counts and logs that the log continues at this record, below the `expected` offset.
fn report_truncation(record: &ConsumerRecord, expected: i64) {
    metrics::counter!(crate::metric::LOGS_TRUNCATED).increment(1);
    tracing::error!(
        topic = &*record.topic,
        partition = record.partition,
        expected,
        offset = record.offset,
        "log truncated: it ends below the expected offset, because the topic was recreated or the log lost its end; reading again from this offset, or from the first unsettled message below it; check the brokers' logs for an unclean leader election, and with IdSource::position(), give the consumer another .scope(…)"
    );
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod shuttle_tests;
#[cfg(test)]
pub(crate) mod tests;
