//! What the polling thread and the consumer share: what was read, what was handed out, what was
//! released.
//!
//! All of it stands behind one lock, and nothing in it is an atomic or a cell: two threads never
//! see half of a change. What is left is the order of whole calls: `histories` draws it, and
//! `threads` has a tool choose at each lock who goes on.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{
    Delivery, HeadersBuilder, Incoming, Limit, Message, Origin, Position, Receipt, SourceError,
};
use tokio::sync::Notify;

use crate::batch::Record;
use crate::watermark::{Sequence, Settling, Watermark};

mod anew;
mod assigned;
mod committing;
mod leaving;
mod missing;
mod monitor;
mod settling;
mod telling;

use assigned::{Assigned, BEGINNING, Backlog, Keeps, ReadTo};
pub(crate) use assigned::{Begins, Commit, Findings, Ids, Jump, Log, Way};
pub(crate) use leaving::Leave;
use missing::Missing;
use monitor::{Monitor, Threads};
pub(crate) use settling::Rejected;
pub(crate) use telling::Reading;

/// Read ahead of the consumer: messages.
const READY: usize = 2_048;
/// Read ahead of the consumer: bytes.
const READY_BYTES: usize = 32 << 20;
/// Released or on their way to the dead letters: messages. Past it a partition that has its share
/// of them is not read.
const HELD: usize = 10_000;
/// The same in bytes.
const HELD_BYTES: usize = 128 << 20;
/// From the lowest unsettled offset of a partition to the last one read: messages. Past it the
/// partition is not read. It costs 8 bytes each, and a crash brings so many back.
const SPAN: usize = 1 << 20;

/// The state behind one lock, held for a batch at a time, and what wakes either side.
#[derive(Default)]
pub(crate) struct Shared<M = Threads> {
    /// Wakes the polling thread: there is room, or the last delivery of a revoked partition is
    /// back.
    monitor: M,
    /// Wakes the consumer.
    news: Notify,
}

/// What the source is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Hands out deliveries.
    #[default]
    Running,
    /// Hands out no new ones; settlements still count.
    Stopped,
    /// Leaves the group.
    Closing,
    /// Has left.
    Ended,
}

#[derive(Default)]
pub(crate) struct State {
    assigned: HashMap<u64, Assigned>,
    last_epoch: u64,
    ready: VecDeque<Delivery>,
    ready_bytes: usize,
    /// Bytes of a message, on average of what was read last.
    size: usize,
    revoked: Vec<u64>,
    held: BTreeMap<(Instant, u64), Delivery>,
    held_bytes: usize,
    releases: u64,
    publishing: usize,
    publishing_bytes: usize,
    phase: Phase,
    fault: Option<SourceError>,
    /// Why the client is to be replaced by another one.
    replace: Option<String>,
    replaced: u64,
    /// Since when the client says that it is not with its group.
    alone: Option<Instant>,
    /// Since when it is known that it should be.
    suspected: Option<Instant>,
    /// When it said anything of it last.
    heard: Option<Instant>,
    missed: u64,
    reading: Reading,
    /// Whether the polling thread was woken since it waited last.
    has_changed: bool,
}

impl<M: Monitor> Shared<M> {
    pub(crate) fn lock(&self) -> M::Guard<'_> {
        self.monitor.lock()
    }

    /// Waits, on the polling thread, until something was settled or handed out since the last wait,
    /// or for so long.
    pub(crate) fn wait(&self, bound: Duration) {
        let mut state = self.lock();
        if !state.has_changed {
            state = self.monitor.wait(state, bound);
        }
        state.has_changed = false;
    }

    /// Wakes the polling thread; also one that looked before, and is about to wait.
    pub(crate) fn wake_poller(&self) {
        self.lock().has_changed = true;
        self.monitor.notify();
    }

    /// Wakes the consumer.
    pub(crate) fn wake_consumer(&self) {
        self.news.notify_one();
    }

    /// Waits, on the consumer's side. Cancel-safe, and woken by what happened since the last wait.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }

    /// Enters a phase; there is no way back to an earlier one.
    pub(crate) fn enter(&self, phase: Phase) {
        let mut state = self.lock();
        state.phase = state.phase.max(phase);
        drop(state);
        self.wake_poller();
        self.wake_consumer();
    }

    /// The source cannot go on.
    pub(crate) fn fail(&self, error: SourceError) {
        self.lock().fault.get_or_insert(error);
        self.wake_consumer();
    }

    /// A partition is ours from now on.
    pub(crate) fn assign(&self, topic: &str, partition: i32, begins: Begins, log: Log) {
        self.lock().begin(Arc::from(topic), partition, begins, log);
    }

    /// These partitions are about to go: hands out nothing more of them, and says so.
    pub(crate) fn revoke(&self, leaving: &[(String, i32)]) -> Vec<u64> {
        let epochs = self.lock().revoke(leaving);
        self.wake_consumer();
        epochs
    }

    /// Takes in what was read.
    pub(crate) fn take_in(&self, records: Vec<Record>) -> Findings {
        if records.is_empty() {
            return Findings::default();
        }
        let findings = self.lock().take_in(records);
        self.wake_consumer();
        findings
    }
}

impl State {
    pub(crate) fn phase(&self) -> Phase {
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
        if self.phase != Phase::Running || self.ready_bytes >= READY_BYTES || !is_open {
            return 0;
        }
        let fitting = (READY_BYTES - self.ready_bytes) / self.size.max(1) + 1;
        fitting.min(READY.saturating_sub(self.ready.len()))
    }

    /// The partitions of which nothing more is to be read for now, while others are.
    pub(crate) fn full(&self) -> Vec<(Arc<str>, i32)> {
        self.readable()
            .filter(|it| self.is_full(it))
            .map(|it| (it.topic.clone(), it.partition))
            .collect()
    }

    fn readable(&self) -> impl Iterator<Item = &Assigned> {
        self.assigned
            .values()
            .filter(|it| it.keeps != Keeps::Revoking)
    }

    /// Whether too much stands behind its lowest unsettled message, or too much is held in all and
    /// it has its share of that: a partition with less is read on, so that none waits for the dead
    /// letters of another. What is held is at most twice the bound for that.
    fn is_full(&self, partition: &Assigned) -> bool {
        let Backlog { count, bytes } = partition.backlog;
        let has_share = |all: usize, own: usize, bound: usize| {
            all >= bound && own >= (bound / self.assigned.len()).max(1)
        };
        partition.watermark.span() >= SPAN
            || has_share(self.held.len() + self.publishing, count, HELD)
            || has_share(self.held_bytes + self.publishing_bytes, bytes, HELD_BYTES)
    }

    fn begin(&mut self, topic: Arc<str>, partition: i32, begins: Begins, log: Log) -> u64 {
        self.last_epoch += 1;
        let now = Instant::now();
        let (mut watermark, send_from) = (Watermark::default(), Some(now));
        if begins == Begins::Anew {
            // Committed at once: whoever has the partition next must not begin where the log before
            // was left.
            watermark.begin(BEGINNING);
        }
        let assigned = Assigned {
            topic,
            partition,
            log,
            watermark,
            begins,
            read_to: ReadTo::Unproven,
            log_end: None,
            stood: (None, now),
            has_repeated: false,
            out: 0,
            backlog: Backlog::default(),
            keeps: Keeps::Assigned,
            send_from,
            missing: Missing::default(),
        };
        self.assigned.insert(self.last_epoch, assigned);
        self.last_epoch
    }

    fn revoke(&mut self, leaving: &[(String, i32)]) -> Vec<u64> {
        let gone = |it: &Assigned| {
            leaving
                .iter()
                .any(|(topic, partition)| *partition == it.partition && **topic == *it.topic)
        };
        let epochs: Vec<u64> = self
            .assigned
            .iter()
            .filter(|(_, it)| gone(it))
            .map(|(epoch, _)| *epoch)
            .collect();
        for epoch in &epochs {
            self.withdraw(*epoch);
        }
        epochs
    }

    /// Hands out nothing more of an assignment.
    fn withdraw(&mut self, epoch: u64) {
        if let Some(assigned) = self.assigned.get_mut(&epoch) {
            assigned.keeps = Keeps::Revoking;
        }
        self.ready
            .retain(|delivery| delivery.receipt.epoch != epoch);
        self.ready_bytes = self
            .ready
            .iter()
            .map(|delivery| delivery.message.size())
            .sum();
        self.held
            .retain(|_, delivery| delivery.receipt.epoch != epoch);
        self.held_bytes = self
            .held
            .values()
            .map(|delivery| delivery.message.size())
            .sum();
        self.revoked.push(epoch);
    }

    /// A part of a partition's log cannot be read: takes in nothing more of it, so that nothing
    /// past it is ever committed.
    pub(crate) fn bar(&mut self, topic: &str, partition: i32) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.keeps = Keeps::Barred;
        }
    }

    /// How many deliveries of these assignments are not back yet.
    pub(crate) fn out(&self, epochs: &[u64]) -> usize {
        epochs
            .iter()
            .filter_map(|epoch| self.assigned.get(epoch))
            .map(|it| it.out)
            .sum()
    }

    /// These assignments are over: what is settled of them from now on moves nothing.
    pub(crate) fn forget(&mut self, epochs: &[u64]) {
        for epoch in epochs {
            self.assigned.remove(epoch);
        }
    }

    fn take_in(&mut self, records: Vec<Record>) -> Findings {
        let (count, mut bytes, mut findings) = (records.len(), 0, Findings::default());
        let mut last: Option<(Arc<str>, i32, u64)> = None;
        for record in records {
            let same = last.as_ref().filter(|(topic, partition, _)| {
                *partition == record.partition && *topic == record.topic
            });
            let epoch = match same {
                Some((_, _, epoch)) => *epoch,
                // Read before it was revoked: whoever owns the partition next reads it again.
                None => match self.epoch_of(&record.topic, record.partition) {
                    Some(epoch) => epoch,
                    None => continue,
                },
            };
            let Some(epoch) = self.sequence(epoch, &record, &mut findings) else {
                continue;
            };
            last = Some((record.topic.clone(), record.partition, epoch));
            let delivery = delivery(record, epoch);
            bytes += delivery.message.size();
            self.ready_bytes += delivery.message.size();
            self.ready.push_back(delivery);
        }
        self.size = bytes / count;
        findings
    }

    /// A partition was read up to this offset, as librdkafka says, or nothing of it was: the
    /// markers of transactions below it are passed. Answers where something may be missing.
    pub(crate) fn reached(
        &mut self,
        topic: &str,
        partition: i32,
        offset: Option<i64>,
    ) -> Option<Jump> {
        let epoch = self.epoch_of(topic, partition)?;
        let assigned = self.assigned.get_mut(&epoch)?;
        match (assigned.read_to, offset) {
            (ReadTo::Known, Some(offset)) => assigned.pass(offset),
            (ReadTo::Unproven, None) => {
                assigned.read_to = ReadTo::Known;
                None
            }
            _ => None,
        }
    }

    /// What librdkafka takes for its position in this partition is not to be believed; answers
    /// where it is to read on instead: after what was read, or where it `stood` if nothing was.
    pub(crate) fn distrust(
        &mut self,
        topic: &str,
        partition: i32,
        stood: Option<i64>,
    ) -> Option<i64> {
        let epoch = self.epoch_of(topic, partition)?;
        let assigned = self.assigned.get_mut(&epoch)?;
        assigned.read_to = ReadTo::Unknown;
        assigned.watermark.end().or(stood)
    }

    /// librdkafka was told where to read on.
    pub(crate) fn told_where(&mut self, topic: &str, partition: i32) {
        let epoch = self.epoch_of(topic, partition);
        if let Some(assigned) = epoch.and_then(|epoch| self.assigned.get_mut(&epoch)) {
            assigned.read_to = ReadTo::Unproven;
        }
    }

    fn epoch_of(&self, topic: &str, partition: i32) -> Option<u64> {
        let ours = |it: &Assigned| {
            it.keeps == Keeps::Assigned && it.partition == partition && *it.topic == *topic
        };
        self.assigned
            .iter()
            .find(|(_, it)| ours(it))
            .map(|(epoch, _)| *epoch)
    }

    /// Takes note of a record. If it comes again below what was delivered (the log was cut, or
    /// librdkafka went back), what was delivered is revoked, and a new epoch begins: with this
    /// record, or with the lowest that is not settled yet if that lies before. Then this one is not
    /// taken in, and comes again too: with it, what lies between would count as passed.
    fn sequence(&mut self, epoch: u64, record: &Record, findings: &mut Findings) -> Option<u64> {
        let assigned = self.assigned.get_mut(&epoch)?;
        findings.jumps.extend(assigned.arrive(record.offset));
        if assigned.watermark.deliver(record.offset) == Sequence::Ascending {
            if assigned.read_to == ReadTo::Unproven {
                assigned.read_to = ReadTo::Known;
            }
            return Some(epoch);
        }
        assigned.is_shorter(assigned.watermark.end(), record.offset);
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
        let begins = unsettled.unwrap_or(record.offset);
        let epoch = self.begin(
            record.topic.clone(),
            record.partition,
            Begins::At(begins),
            log,
        );
        let assigned = self.assigned.get_mut(&epoch)?;
        if unsettled.is_some() {
            assigned.watermark.begin(begins);
            assigned.keeps = Keeps::GoingBack;
            return None;
        }
        assigned.watermark.deliver(record.offset);
        findings
            .restarted
            .push((record.topic.clone(), record.partition));
        Some(epoch)
    }

    /// Hands out revocations, releases whose delay is over, and what was read, within the limit: of
    /// 0, revocations alone. What has a body larger than `largest` goes to `oversize` instead, to
    /// be rejected.
    pub(crate) fn hand_out(
        &mut self,
        limit: Limit,
        largest: usize,
        into: &mut Vec<Incoming>,
        oversize: &mut Vec<Delivery>,
    ) {
        into.extend(self.revoked.drain(..).map(Incoming::Revoked));
        if self.phase != Phase::Running {
            return;
        }
        let (now, mut count, mut bytes) = (Instant::now(), 0, 0_usize);
        while count < limit.count {
            let due = self.held.first_entry().filter(|held| held.key().0 <= now);
            let next = due.as_ref().map(|held| held.get()).or(self.ready.front());
            let Some(size) = next.map(|delivery| delivery.message.size()) else {
                break;
            };
            if count > 0 && bytes.saturating_add(size) > limit.bytes {
                break;
            }
            let held = due.map(|held| held.remove());
            let was_held = held.is_some();
            match was_held {
                true => self.held_bytes -= size,
                false => self.ready_bytes -= size,
            }
            let Some(delivery) = held.or_else(|| self.ready.pop_front()) else {
                break;
            };
            (count, bytes) = (count + 1, bytes + size);
            let is_oversize = delivery.message.body.len() > largest;
            if let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) {
                assigned.out += 1;
                match (was_held, is_oversize) {
                    (true, false) => assigned.backlog.remove(size),
                    (false, true) => assigned.backlog.add(size),
                    _ => {}
                }
            }
            if is_oversize {
                self.publishing += 1;
                self.publishing_bytes += size;
                oversize.push(delivery);
            } else {
                into.push(Incoming::Delivery(delivery));
            }
        }
    }

    /// When the next release is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.held
            .first_key_value()
            .map(|((due, _), _)| *due)
            .filter(|_| self.phase == Phase::Running)
    }

    /// A delivery is settled for good.
    pub(crate) fn accept(&mut self, receipt: &Receipt) -> Fate {
        let Some(assigned) = self.assigned.get_mut(&receipt.epoch) else {
            return Fate::Stale;
        };
        // Offsets came from an `i64`.
        if assigned.watermark.settle(receipt.position as i64) == Settling::Now {
            assigned.out = assigned.out.saturating_sub(1);
        }
        Fate::Counted
    }

    /// A delivery comes back after a delay, unless its partition is leaving.
    pub(crate) fn release(&mut self, delivery: Delivery, after: Duration) -> Fate {
        let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) else {
            return Fate::Stale;
        };
        assigned.out = assigned.out.saturating_sub(1);
        if assigned.keeps != Keeps::Revoking {
            let delivery = Delivery {
                message: detached(&delivery.message),
                ..delivery
            };
            assigned.backlog.add(delivery.message.size());
            self.held_bytes += delivery.message.size();
            self.releases += 1;
            // No delay of a century ever ends: it is cut to a day.
            let due = Instant::now() + after.min(Duration::from_secs(86_400));
            self.held.insert((due, self.releases), delivery);
        }
        Fate::Counted
    }

    /// A delivery is on its way to the dead letters.
    pub(crate) fn reject(&mut self, delivery: &Delivery) -> Fate {
        let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) else {
            return Fate::Stale;
        };
        assigned.backlog.add(delivery.message.size());
        self.publishing += 1;
        self.publishing_bytes += delivery.message.size();
        Fate::Counted
    }

    /// A dead letter stands.
    pub(crate) fn published(&mut self, delivery: &Delivery) -> Fate {
        self.publishing = self.publishing.saturating_sub(1);
        self.publishing_bytes = self
            .publishing_bytes
            .saturating_sub(delivery.message.size());
        if let Some(assigned) = self.assigned.get_mut(&delivery.receipt.epoch) {
            assigned.backlog.remove(delivery.message.size());
        }
        self.accept(&delivery.receipt)
    }
}

/// Whether a settlement counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Counted,
    /// Its partition is not ours any more, or not under the same assignment.
    Stale,
}

impl Fate {
    /// Counts what was settled in vain.
    pub(crate) fn count(self) {
        if self == Self::Stale {
            metrics::counter!(crate::metric::STALE_SETTLEMENTS).increment(1);
        }
    }
}

fn delivery(record: Record, epoch: u64) -> Delivery {
    let Record {
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
        // Neither is ever negative in a message that was delivered.
        receipt: Receipt {
            epoch,
            partition: partition as u32,
            position: offset as u64,
        },
        failures: 0,
    }
}

/// The same message in memory of its own, so that what is kept does not keep its whole batch.
pub(crate) fn detached(message: &Message) -> Message {
    Message {
        key: message.key.as_ref().map(|key| key.to_vec().into()),
        headers: HeadersBuilder::from(&message.headers).finish(),
        body: message.body.to_vec().into(),
        ..message.clone()
    }
}

#[cfg(test)]
mod histories;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod threads;
