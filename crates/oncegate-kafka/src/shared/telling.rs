//! What the state tells those who watch, and what they ask of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::Delivery;

use super::State;
use super::assigned::{Assigned, Keeps};
use crate::partition::{Holder, PartitionStatus, Stuck};
use crate::statistics;

/// How far the polling thread is with what librdkafka has fetched, of all partitions in one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Messages that were read from it.
    read: u64,
    /// How much stood in it when it was looked at last.
    waiting: u64,
    /// How often it was looked at.
    looks: u64,
}

impl Reading {
    /// Whether all that stood in the queue then has been read by now. Some of that is never read as
    /// a message, so that an empty queue says it too.
    pub(crate) fn is_over(self, now: Self) -> bool {
        now.looks > self.looks && (now.waiting == 0 || now.read >= self.read + self.waiting)
    }
}

impl State {
    /// Takes note of how much stands in the queue.
    pub(crate) fn waits(&mut self, waiting: u64) {
        (self.reading.waiting, self.reading.looks) = (waiting, self.reading.looks + 1);
    }

    /// So many messages were read from the queue, and taken in.
    pub(crate) fn was_read(&mut self, count: u64) {
        self.reading.read += count;
    }

    /// How far the polling thread is.
    pub(crate) fn reading(&self) -> Reading {
        self.reading
    }

    /// The client is not to be trusted any more: another one takes its place.
    pub(crate) fn ask_for_another(&mut self, why: String) {
        self.replace.get_or_insert(why);
    }

    /// Why the client is to be replaced, if it is.
    pub(crate) fn wants_another(&self) -> bool {
        self.replace.is_some()
    }

    /// Takes note of whether the client is with its group, as it says itself. One that is suspected
    /// and still is not is replaced.
    pub(crate) fn hears_of_the_group(&mut self, is_with_it: bool, now: Instant) {
        let is_late = self
            .heard
            .replace(now)
            .is_some_and(|before| now.duration_since(before) > 2 * statistics::EVERY);
        if is_with_it {
            (self.alone, self.suspected) = (None, None);
            return;
        }
        // It waited to be heard, and the next one may say that it has come back.
        if is_late && self.suspected.is_some() {
            self.suspected = Some(now);
        }
        self.alone.get_or_insert(now);
        if self
            .suspected
            .is_some_and(|at| now.duration_since(at) >= statistics::EVERY)
        {
            self.ask_for_another("it does not get to its group, though others do".into());
        }
    }

    /// Since when the client is not with its group.
    pub(crate) fn alone(&self) -> Option<Instant> {
        self.alone
    }

    /// Takes note that others get to the group, and that one that is without it since then would
    /// have, too.
    pub(crate) fn suspect(&mut self, alone: Instant, now: Instant) {
        // It may have been replaced meanwhile.
        if self.alone == Some(alone) {
            self.suspected.get_or_insert(now);
        }
    }

    /// Whether it is without its group, and others are not.
    pub(crate) fn is_suspected(&self) -> bool {
        self.suspected.is_some()
    }

    /// Takes note that the client is being replaced; answers why.
    pub(crate) fn replacing(&mut self) -> Option<String> {
        let why = self.replace.take()?;
        self.replaced += 1;
        (self.alone, self.suspected) = (None, None);
        Some(why)
    }

    /// How often the client was replaced.
    pub(crate) fn replaced(&self) -> u64 {
        self.replaced
    }

    /// All partitions that are ours.
    pub(crate) fn partitions(&self) -> Vec<(String, i32)> {
        self.assigned
            .values()
            .map(|it| (it.topic.to_string(), it.partition))
            .collect()
    }

    /// Takes note of where a log ends.
    pub(crate) fn log_ends(&mut self, topic: &str, partition: i32, offset: i64) {
        for assigned in self
            .assigned
            .values_mut()
            .filter(|it| it.partition == partition && *it.topic == *topic)
        {
            assigned.log_end = Some(offset);
        }
    }

    /// How far each partition was read that is read at all.
    pub(crate) fn read_to(&self) -> Vec<(u64, Arc<str>, i32, Option<i64>)> {
        // One that does not get back to its beginning stands still too. One that is full is not
        // read, and is no stall.
        let is_read = |it: &Assigned| {
            matches!(it.keeps, Keeps::Assigned | Keeps::GoingBack) && !self.is_full(it)
        };
        let reading = self.assigned.iter().filter(|(_, it)| is_read(it));
        reading
            .map(|(epoch, it)| {
                (
                    *epoch,
                    it.topic.clone(),
                    it.partition,
                    it.watermark.end().or(it.begins.at()),
                )
            })
            .collect()
    }

    /// How far a partition was read, or where it is to begin.
    pub(crate) fn stands(&self, topic: &str, partition: i32) -> Option<i64> {
        let assigned = self.assigned.get(&self.epoch_of(topic, partition)?)?;
        assigned.watermark.end().or(assigned.begins.at())
    }

    /// What each partition is at, in order.
    pub(crate) fn status(&self) -> Vec<PartitionStatus> {
        let mut all: Vec<_> = self
            .assigned
            .iter()
            .map(|(epoch, it)| self.status_of(*epoch, it))
            .collect();
        all.sort_by(|one, other| (&one.topic, one.partition).cmp(&(&other.topic, other.partition)));
        all
    }

    fn status_of(&self, epoch: u64, assigned: &Assigned) -> PartitionStatus {
        let Assigned {
            topic,
            partition,
            watermark,
            begins,
            log_end,
            stood,
            out,
            ..
        } = assigned;
        let committable = watermark.position().or(begins.at());
        let held = self
            .held
            .iter()
            .filter(|(_, delivery)| delivery.receipt.epoch == epoch);
        let lowest = watermark.lowest().map(|offset| {
            let it_is = |delivery: &Delivery| {
                delivery.receipt.epoch == epoch && delivery.receipt.position == offset as u64
            };
            let delayed = self.held.iter().find(|(_, delivery)| it_is(delivery));
            let holder = match delayed {
                Some((_, delivery)) => Holder::Delay {
                    failures: delivery.failures,
                },
                None if self.ready.iter().any(it_is) => Holder::Queue,
                None => Holder::Consumer,
            };
            // Looked at once a turn: what has moved since then has not stood at all.
            let since = if stood.0 == Some(offset) {
                stood.1.elapsed()
            } else {
                Duration::ZERO
            };
            Stuck {
                offset,
                since,
                holder,
            }
        });
        PartitionStatus {
            topic: topic.clone(),
            partition: *partition,
            committable,
            log_end: *log_end,
            lag: committable
                .zip(*log_end)
                .map(|(at, end)| u64::try_from(end - at).unwrap_or(0)),
            handed_out: *out,
            delayed: held.count(),
            lowest,
        }
    }
}
