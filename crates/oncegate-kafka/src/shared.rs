//! The state that the polling thread and the consumer share: assigned partitions, records that were
//! read, deliveries that were handed out, and rejected deliveries. The polling thread is that of
//! `client::poll`. *The consumer* is the loop of oncegate-core that calls `receive` and `settle` of
//! the source; a delivery is *handed out* when `receive` returns it.
//!
//! All state is behind one lock, without atomics or cells, so no thread sees half of a change. Only
//! the order of calls varies: `model_tests` calls in random orders, and `shuttle_tests` runs the
//! threads in many schedules. [`Partition`] decides what follows from an event.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::source::QueueLevel;
use oncegate_core::{Delivery, Incoming, Limit, Receipt, SourceError};
use tokio::sync::Notify;

use crate::client::batch::ConsumerRecord;
use crate::partition::{
    LogIdentity, OffsetCommitMode, Partition, PartitionAction, PartitionEvent, RestartCause,
    StartPosition, TopicIdentity,
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

/// The state behind one lock, and the wake-ups of the polling thread and the consumer.
#[derive(Default)]
pub(crate) struct SharedState<M = StdLock> {
    /// The lock. Its condition variable wakes the polling thread, for example after a settlement.
    state_lock: M,
    /// Wakes the consumer.
    consumer_wakeup: Notify,
}

/// The phase of the source. Phases only advance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SourcePhase {
    /// Hands out deliveries.
    #[default]
    Running,
    /// Hands out no deliveries; settlements still count.
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
    /// Whether the consumer's queue of waiting deliveries is at least half full.
    queue_level: QueueLevel,
    pub(crate) client: ClientHealth,
    phase: SourcePhase,
    /// The error that ends the source.
    error: Option<SourceError>,
    /// How many offsets expired before they were read: see `offset_gaps`.
    expired: u64,
    /// Whether the polling thread was woken since its last wait.
    is_poller_woken: bool,
}

/// An assigned partition, and what its status and log lines need.
struct AssignedPartition {
    topic: Arc<str>,
    number: i32,
    partition: Partition,
    /// The log end that the broker returned last.
    log_end: Option<i64>,
    /// Whether this assignment has logged that message ids repeat: see `check_repeated_id`.
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

    fn is_partition(&self, topic: &str, number: i32) -> bool {
        self.number == number && *self.topic == *topic
    }
}

/// An offset to commit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OffsetCommit {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) mode: OffsetCommitMode,
    /// The topic that the offset belongs to, if it is known. It is committed as the offset's
    /// metadata.
    pub(crate) identity: Option<TopicIdentity>,
}

/// Whether the partitions still belong to this member when they are revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RevocationKind {
    /// They do: no other member is assigned them before the revocation ends.
    Revoked,
    /// They do not: another member may be assigned them already, and a commit would overwrite its
    /// offsets.
    Lost,
}

impl<M: StateLock> SharedState<M> {
    pub(crate) fn lock(&self) -> M::Guard<'_> {
        self.state_lock.lock()
    }

    /// Blocks the polling thread until it is woken, at most for `limit`. Returns at once if it was
    /// woken since the last wait.
    pub(crate) fn wait(&self, limit: Duration) {
        let mut state = self.lock();
        if !state.is_poller_woken {
            state = self.state_lock.wait(state, limit);
        }
        state.is_poller_woken = false;
    }

    /// Wakes the polling thread. If it is not waiting, its next wait returns at once.
    pub(crate) fn wake_poller(&self) {
        self.lock().is_poller_woken = true;
        self.state_lock.notify();
    }

    pub(crate) fn wake_consumer(&self) {
        self.consumer_wakeup.notify_one();
    }

    /// Waits until the consumer is woken. Cancel-safe. Returns at once if it was woken since the
    /// last wait.
    pub(crate) async fn wait_for_wakeup(&self) {
        self.consumer_wakeup.notified().await;
    }

    /// Enters a phase, unless the source is in a later one, and wakes the polling thread and the
    /// consumer.
    pub(crate) fn enter(&self, phase: SourcePhase) {
        let mut state = self.lock();
        state.phase = state.phase.max(phase);
        drop(state);
        self.wake_poller();
        self.wake_consumer();
    }

    /// Records the level of the consumer's queue.
    pub(crate) fn set_queue_level(&self, level: QueueLevel) {
        self.lock().queue_level = level;
        self.wake_poller();
    }

    /// Ends the source with an error. If called again, keeps the first error.
    pub(crate) fn fail(&self, error: SourceError) {
        self.lock().error.get_or_insert(error);
        self.wake_consumer();
    }

    /// Adds records that were read. Returns the partitions that continue at a record below the last
    /// one, because their log was truncated: librdkafka's position in them is too high.
    pub(crate) fn add_records(&self, records: Vec<ConsumerRecord>) -> Vec<(Arc<str>, i32)> {
        if records.is_empty() {
            return Vec::new();
        }
        let restarted = self.lock().add_records(records);
        self.wake_consumer();
        restarted
    }

    /// Restarts a recreated topic: ends its assignments and starts new ones, to which no records
    /// are added before librdkafka has sought to the beginning. Skips partitions that are being
    /// revoked, and those whose assignment is known to have the new topic id. Returns the number of
    /// restarted partitions.
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

    /// Ends assignments: revokes them, waits for deliveries with `drain`, stores the offsets with
    /// `store` (neither for lost partitions), and removes them. Returns the number of deliveries that
    /// are still unsettled.
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
        state.remove_assignments(&epochs);
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

    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// How many dead letters the brokers have not confirmed yet.
    pub(crate) fn unconfirmed_count(&self) -> usize {
        self.deliveries.unconfirmed.total().count
    }

    /// Adds the assignment of a partition to this member, and returns its epoch. An earlier
    /// assignment of the partition ends.
    pub(crate) fn assign(
        &mut self,
        topic: &str,
        partition: i32,
        start: StartPosition,
        log: LogIdentity,
    ) -> u64 {
        if let Some(epoch) = self.epoch_of(topic, partition) {
            self.apply_to(epoch, PartitionEvent::Revoked);
            self.remove_assignments(&[epoch]);
        }
        self.last_epoch += 1;
        let assigned = Partition::new(self.last_epoch, start, log);
        self.assigned.insert(
            self.last_epoch,
            AssignedPartition::new(Arc::from(topic), partition, assigned),
        );
        self.last_epoch
    }

    /// Applies an event to a partition. Does nothing if the partition is not assigned.
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
            PartitionAction::DropQueued => self.drop_queued(epoch),
            PartitionAction::Restart { ended, .. } => {
                self.drop_queued(*ended);
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
    fn drop_queued(&mut self, epoch: u64) {
        self.deliveries.drop_all_of(epoch);
        self.revoked.push(epoch);
    }

    /// Removes these assignments. Settlements of their deliveries are stale from now on.
    pub(crate) fn remove_assignments(&mut self, epochs: &[u64]) {
        for epoch in epochs {
            self.assigned.remove(epoch);
        }
    }

    /// The epoch of the partition's assignment; `None` if it is not assigned.
    fn epoch_of(&self, topic: &str, partition: i32) -> Option<u64> {
        let mut all = self.assigned.iter();
        all.find(|(_, it)| it.is_partition(topic, partition))
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
                    // The partition is not assigned any more: its next owner reads the record.
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

    /// Appends all revocations to `into`, and then deliveries within the limit, except those of
    /// assignments [above the mean](Self::above_mean). A limit of 0 appends only revocations.
    /// Deliveries with a body larger than `body_limit` go to `oversize` instead, to be rejected.
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
        let held_back = self.above_mean();
        self.deliveries.make_ready_all_except(&held_back);
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

    /// Settles a delivery. Returns false, and does nothing, if its assignment has ended.
    pub(crate) fn accept(&mut self, receipt: &Receipt) -> bool {
        let Some(assigned) = self.assigned.get_mut(&receipt.epoch) else {
            return false;
        };
        // Lossless: `position` was converted from an `i64` offset.
        let event = PartitionEvent::Settled(receipt.position as i64);
        assigned.partition.apply(event);
        true
    }

    /// Takes a delivery back. It is handed out again, unless its partition is being revoked.
    /// Returns false, and drops the delivery, if its assignment has ended.
    pub(crate) fn release(&mut self, delivery: Delivery) -> bool {
        let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) else {
            return false;
        };
        if assigned.partition.apply(PartitionEvent::Released) == PartitionAction::Redeliver {
            self.deliveries.push(delivery);
        }
        true
    }

    /// Counts the dead letter of this delivery as unconfirmed. Returns false, and does nothing, if
    /// its assignment has ended.
    pub(crate) fn reject(&mut self, delivery: &Delivery) -> bool {
        let is_assigned = self.assigned.contains_key(&delivery.receipt.epoch);
        if is_assigned {
            self.deliveries.unconfirmed.add(delivery);
        }
        is_assigned
    }

    /// Settles a delivery whose dead letter is confirmed. Returns false if its assignment has
    /// ended.
    pub(crate) fn dead_letter_confirmed(&mut self, delivery: &Delivery) -> bool {
        self.deliveries.unconfirmed.remove(delivery);
        self.accept(&delivery.receipt)
    }

    /// Returns the offsets to commit. Skips an offset that an earlier call has returned, unless that
    /// commit failed or a commit of an earlier assignment overtook it.
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

    /// Repeats a failed commit of this partition after [`COMMIT_RETRY_PAUSE`].
    pub(crate) fn retry_commit(&mut self, topic: &str, partition: i32) {
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

    /// Topic, partition and target offset of each seek without which the partition is not read.
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
        "log truncated: it ends below the expected offset, because the topic was recreated or the log lost its end; reading continues at `offset`, or at the lowest unsettled offset below it; check the brokers' logs for an unclean leader election, and with IdSource::position(), give the consumer another .scope(…)"
    );
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod shuttle_tests;
#[cfg(test)]
pub(crate) mod tests;
