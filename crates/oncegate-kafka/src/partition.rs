//! A partition that is assigned to this member: which offset may be committed, and from which
//! offset it is read. [`Partition::apply`] decides both, as a table of states and events, without
//! clock, I/O, locks and librdkafka. The caller performs the action that `apply` returns.

use std::ops::Range;
use std::time::{Duration, Instant};

#[cfg(test)]
mod interleaving_tests;
mod log_identity;
mod offsets;
mod start;
#[cfg(test)]
mod tests;

pub(crate) use log_identity::{LogIdentity, PositionIds, TopicIdentity, TopicMatch};
use offsets::DeliveredOffsets;
use start::LOG_START;
pub(crate) use start::{CommittedOffset, StartPosition};

/// Maximum number of offset gaps (see `add_gap`) that are kept until the log start offset is known.
const MAX_GAPS: usize = 1_000;
/// An immediate commit that the broker has not confirmed within this time is repeated.
const UNCONFIRMED_COMMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// An assigned partition.
///
/// Each assignment has a number, its *assignment epoch*, which is in the receipts of its deliveries
/// ([`Receipt::epoch`](oncegate_core::Receipt::epoch)), so that a settlement never counts for
/// another assignment. If the log is truncated or the topic recreated, the assignment ends and
/// another one starts, because an offset then names another message than before.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Partition {
    epoch: u64,
    state: AssignmentState,
    start: StartPosition,
    log: LogIdentity,
    offsets: DeliveredOffsets,
    position_trust: PositionTrust,
    /// The offset of the last commit, or before the first commit, the offset at which the
    /// assignment starts.
    last_commit: Option<i64>,
    next_commit: NextCommit,
    /// How many deliveries were handed out and are neither settled nor released.
    handed_out: usize,
    /// Offset gaps since the last [`PartitionEvent::LogStart`] with an offset, whose expired
    /// messages are not counted yet. At most [`MAX_GAPS`].
    gaps: Vec<Range<i64>>,
    /// How many gaps were found since the last [`PartitionEvent::LogStart`].
    new_gaps: u64,
    /// The committable offset at the last [`PartitionEvent::CommitDue`], and since when it is the
    /// same.
    committable_since: Option<(i64, Instant)>,
}

/// Something that happened to a partition.
#[derive(Clone, Debug)]
pub(crate) enum PartitionEvent {
    /// librdkafka returned the record at `offset`. If the log was truncated, the next assignment
    /// has the epoch `next_epoch`.
    Fetched { offset: i64, next_epoch: u64 },
    /// librdkafka reports its position, which also advances past transaction markers; `None` before
    /// librdkafka has read anything.
    PositionReported(Option<i64>),
    /// librdkafka's position is too high: librdkafka counts errors as messages, and does not
    /// decrease its position when a log is truncated. `fallback` is the correct position if no
    /// message was read.
    PositionWrong { fallback: Option<i64> },
    /// librdkafka has accepted a seek.
    Sought,
    /// The log start offset of a partition without a committed offset. Reading starts at this
    /// offset, and the assignment commits it.
    StartFound(i64),
    /// The log start offset; `None` while librdkafka does not know it.
    LogStart(Option<i64>),
    /// The topic was deleted and created again, unless this assignment already belongs to the new
    /// topic.
    TopicRecreated {
        identity: Option<TopicIdentity>,
        next_epoch: u64,
    },
    /// The source ends with an error: a part of the log is unreadable, or the policy is
    /// `OutOfRange::Error` and the committed offset belongs, or may belong, to a deleted topic.
    Halted,
    /// A delivery was taken from the queue of the source: for the consumer, or for the dead letters
    /// if it exceeds `body_limit`.
    HandedOut,
    /// A delivery of this assignment is settled.
    Settled(i64),
    /// A delivery of this assignment was released.
    Released,
    /// The caller commits offsets, at this time.
    CommitDue(Instant),
    /// A commit failed. The next one, from this time on, is immediate.
    CommitFailed { retry_at: Instant },
    /// The broker has committed this offset, for this or an earlier assignment.
    CommitConfirmed(i64),
    /// The partition is being revoked.
    Revoked,
}

/// What the caller has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PartitionAction {
    Nothing,
    /// Add the record to the queue of the source. `truncated_from` is the expected offset, if the
    /// log was truncated below it.
    Enqueue {
        truncated_from: Option<i64>,
    },
    /// The assignment with the epoch `ended` has ended, and another one has started: drop the
    /// records of the ended one that were not handed out, and report its revocation to the
    /// consumer.
    Restart {
        ended: u64,
        cause: RestartCause,
    },
    /// Drop the records of this assignment that were not handed out, and report its revocation to
    /// the consumer.
    DropQueued,
    /// Seek to this offset.
    Seek(i64),
    /// Hand the delivery out again.
    Redeliver,
    /// Count these expired messages.
    CountExpired(Vec<ExpiredGap>),
    /// Log that messages may have expired in `count` new gaps, of which `last` is the last one.
    WarnOfGaps {
        count: u64,
        last: Range<i64>,
    },
    Commit {
        offset: i64,
        mode: OffsetCommitMode,
    },
}

/// Why an assignment was replaced by another one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RestartCause {
    Recreated,
    /// The log was truncated below `expected`: add the record to the queue, under the new epoch.
    Truncated {
        expected: i64,
    },
    /// The log was truncated below `expected`: drop the record. It is read again after a seek to a
    /// lower unsettled offset. If it were handed out now, the offsets in between would count as
    /// settled.
    TruncatedAboveUnsettled {
        expected: i64,
    },
}

/// Messages that expired before they were read, in a gap between two offsets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpiredGap {
    /// From the expected offset to the offset of the next message.
    pub(crate) gap: Range<i64>,
    pub(crate) log_start: i64,
    /// How many offsets of the gap are below `log_start`.
    pub(crate) expired: u64,
}

/// The state of an assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
pub(crate) enum AssignmentState {
    /// Messages are read and handed out.
    Active,
    /// No message is read before librdkafka has sought to the start of the assignment.
    Seeking,
    /// No more messages are read. Those that were read before are handed out, and no offset above
    /// them is committed.
    Halted,
    /// The partition is being revoked: nothing is read or handed out, and settlements count.
    Revoking,
}

/// Whether librdkafka's position in a partition can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
enum PositionTrust {
    /// Not yet: it may be the position of an earlier assignment, until librdkafka reports that it
    /// has no position, or returns a message.
    Unconfirmed,
    Trusted,
    /// No: the position is too high, and no seek has corrected it yet.
    Wrong,
}

/// How the next offset is committed. librdkafka commits a stored offset only if it is above the
/// committed one, so after a truncation below the committed offset it would commit nothing of this
/// assignment. Hence the first commit of each assignment is immediate, and is repeated until the
/// broker has confirmed one; so is the commit after a failed one, or after a higher commit of an
/// earlier assignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(test, derive(Hash))]
enum NextCommit {
    Immediate,
    /// Immediate from this time on, or when the partition is revoked; stored until then.
    ImmediateFrom(Instant),
    Stored,
}

/// How an offset is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffsetCommitMode {
    /// librdkafka commits the offset within `auto.commit.interval.ms`, if it is above the committed
    /// one.
    Stored,
    /// A commit request is sent at once, also for an offset below the committed one.
    Immediate,
}

impl Partition {
    pub(crate) fn new(epoch: u64, start: StartPosition, log: LogIdentity) -> Self {
        let mut partition = Self {
            epoch,
            state: AssignmentState::Active,
            start,
            log,
            offsets: DeliveredOffsets::default(),
            position_trust: PositionTrust::Unconfirmed,
            last_commit: None,
            next_commit: NextCommit::Immediate,
            handed_out: 0,
            gaps: Vec::new(),
            new_gaps: 0,
            committable_since: None,
        };
        if start == StartPosition::Recreated {
            // Committed at once: the next owner of the partition must not start at an offset of the
            // deleted topic.
            partition.start_at(LOG_START);
        }
        partition
    }

    /// Handles an event.
    pub(crate) fn apply(&mut self, event: PartitionEvent) -> PartitionAction {
        use AssignmentState as S;
        use PartitionAction as A;
        use PartitionEvent as E;
        match (self.state, event) {
            (S::Active, E::Fetched { offset, .. }) if self.offsets.end() <= Some(offset) => {
                self.deliver(offset)
            }
            (S::Active, E::Fetched { offset, next_epoch }) => {
                self.restart_truncated(offset, next_epoch)
            }
            // The record is dropped. The next owner of the partition reads it, or this assignment
            // reads it again after the seek.
            (S::Seeking | S::Halted | S::Revoking, E::Fetched { .. }) => A::Nothing,

            (S::Active, E::PositionReported(position)) => self.position_reported(position),
            (S::Active, E::PositionWrong { fallback }) => self.position_wrong(fallback),
            (S::Active | S::Seeking, E::Sought) => self.sought(),
            (_, E::PositionReported(_) | E::PositionWrong { .. } | E::Sought) => A::Nothing,

            (S::Active, E::StartFound(offset)) => self.start_at(offset),
            (_, E::StartFound(_)) => A::Nothing,
            (_, E::LogStart(Some(log_start))) => self.count_expired(log_start),
            (_, E::LogStart(None)) => self.warn_of_gaps(),

            (S::Revoking, E::TopicRecreated { .. }) => A::Nothing,
            (_, E::TopicRecreated { identity, .. }) if !self.is_outdated(identity.as_ref()) => {
                A::Nothing
            }
            (
                _,
                E::TopicRecreated {
                    identity,
                    next_epoch,
                },
            ) => self.restart_recreated(identity, next_epoch),

            (_, E::HandedOut) => self.count_handed_out(1, A::Nothing),
            (_, E::Settled(offset)) => self.settle(offset),
            (S::Revoking, E::Released) => self.count_handed_out(-1, A::Nothing),
            (_, E::Released) => self.count_handed_out(-1, A::Redeliver),

            (_, E::CommitDue(now)) => self.commit(now),
            (_, E::CommitFailed { retry_at }) => {
                self.commit_next(NextCommit::ImmediateFrom(retry_at))
            }
            // A retried commit of an earlier assignment, which the broker handled after the lower
            // commit of this assignment. librdkafka would commit nothing below `offset`, and a
            // crash would skip the messages below it, so this assignment commits at once. Of two
            // commits of the same assignment, librdkafka itself repeats the later one.
            (_, E::CommitConfirmed(offset))
                if self.last_commit.is_some_and(|last| last < offset) =>
            {
                self.commit_next(NextCommit::Immediate)
            }
            (_, E::CommitConfirmed(_))
                if self.last_commit.is_some()
                    && matches!(self.next_commit, NextCommit::ImmediateFrom(_)) =>
            {
                self.commit_next(NextCommit::Stored)
            }
            (_, E::CommitConfirmed(_)) => A::Nothing,

            (S::Active, E::Halted) => self.enter(S::Halted, A::Nothing),
            (_, E::Halted) => A::Nothing,
            (_, E::Revoked) => self.enter(S::Revoking, A::DropQueued),
        }
    }

    fn enter(&mut self, state: AssignmentState, action: PartitionAction) -> PartitionAction {
        self.state = state;
        action
    }

    fn count_handed_out(&mut self, change: isize, action: PartitionAction) -> PartitionAction {
        self.handed_out = self.handed_out.saturating_add_signed(change);
        action
    }

    fn settle(&mut self, offset: i64) -> PartitionAction {
        let change = if self.offsets.settle(offset) { -1 } else { 0 };
        self.count_handed_out(change, PartitionAction::Nothing)
    }

    fn commit_next(&mut self, next: NextCommit) -> PartitionAction {
        self.next_commit = next;
        PartitionAction::Nothing
    }

    fn position_reported(&mut self, position: Option<i64>) -> PartitionAction {
        match (self.position_trust, position) {
            (PositionTrust::Trusted, Some(offset)) => self.advance_to(offset),
            (PositionTrust::Unconfirmed, None) => self.position_trust = PositionTrust::Trusted,
            _ => {}
        }
        PartitionAction::Nothing
    }

    fn position_wrong(&mut self, fallback: Option<i64>) -> PartitionAction {
        self.position_trust = PositionTrust::Wrong;
        let target = self.offsets.end().or(fallback);
        target.map_or(PartitionAction::Nothing, PartitionAction::Seek)
    }

    fn sought(&mut self) -> PartitionAction {
        self.position_trust = PositionTrust::Unconfirmed;
        self.enter(AssignmentState::Active, PartitionAction::Nothing)
    }

    /// Delivers the record at this offset, which is above the last record that was read.
    fn deliver(&mut self, offset: i64) -> PartitionAction {
        let expected = self.position();
        let truncated_from = expected.filter(|expected| offset < *expected);
        if let Some(expected) = truncated_from {
            self.log.position_ids = self.log.position_ids.after_truncation(offset, expected);
        } else if let Some(expected) = expected.filter(|expected| *expected < offset) {
            self.add_gap(expected..offset);
        }
        self.start_at(offset);
        self.offsets.deliver(offset);
        if self.position_trust == PositionTrust::Unconfirmed {
            self.position_trust = PositionTrust::Trusted;
        }
        PartitionAction::Enqueue { truncated_from }
    }

    /// Starts another assignment, because the record at this offset is not above the last one that
    /// was read. It starts at this record, or at the lowest unsettled offset if that is lower.
    fn restart_truncated(&mut self, offset: i64, next_epoch: u64) -> PartitionAction {
        let expected = self.offsets.end().unwrap_or(offset);
        let unsettled = self.offsets.lowest().filter(|lowest| *lowest < offset);
        let start = unsettled.unwrap_or(offset);
        let mut log = std::mem::take(&mut self.log);
        log.position_ids = log.position_ids.after_truncation(offset, expected);
        let gaps = std::mem::take(&mut self.gaps);
        let new_gaps = self.new_gaps;
        let ended = self.restart(next_epoch, StartPosition::Committed(start), log);
        (self.gaps, self.new_gaps) = (gaps, new_gaps);
        self.start_at(start);
        let cause = if unsettled.is_some() {
            self.state = AssignmentState::Seeking;
            RestartCause::TruncatedAboveUnsettled { expected }
        } else {
            self.offsets.deliver(offset);
            self.position_trust = PositionTrust::Wrong;
            RestartCause::Truncated { expected }
        };
        PartitionAction::Restart { ended, cause }
    }

    /// Starts another assignment at the beginning of the new topic. Nothing is read before a seek.
    fn restart_recreated(
        &mut self,
        identity: Option<TopicIdentity>,
        next_epoch: u64,
    ) -> PartitionAction {
        let position_ids = PositionIds::RECREATED;
        let log = LogIdentity {
            identity,
            position_ids,
        };
        let ended = self.restart(next_epoch, StartPosition::Recreated, log);
        let cause = RestartCause::Recreated;
        self.enter(
            AssignmentState::Seeking,
            PartitionAction::Restart { ended, cause },
        )
    }

    /// Starts another assignment, and returns the epoch of the one that has ended.
    fn restart(&mut self, epoch: u64, start: StartPosition, log: LogIdentity) -> u64 {
        std::mem::replace(self, Self::new(epoch, start, log)).epoch
    }

    /// Sets the start of the assignment to this offset: every offset below it counts as settled.
    /// Does nothing if the start is set already.
    fn start_at(&mut self, offset: i64) -> PartitionAction {
        if self.offsets.end().is_none() {
            self.offsets.advance_to(offset);
            self.last_commit = Some(offset);
        }
        PartitionAction::Nothing
    }

    /// Records that librdkafka has read the log up to this offset: every message below it was
    /// delivered, and the other offsets below it are gaps, such as transaction markers.
    fn advance_to(&mut self, offset: i64) {
        if self.offsets.end().is_none() {
            let expected = self.start.offset().unwrap_or(offset);
            if offset < expected {
                return;
            }
            if expected < offset {
                self.add_gap(expected..offset);
            }
            self.start_at(expected);
        }
        self.offsets.advance_to(offset);
    }

    /// Keeps a gap between two offsets until the log start offset shows what it is: compacted
    /// records or transaction markers, or messages that expired before they were read.
    fn add_gap(&mut self, gap: Range<i64>) {
        self.new_gaps += 1;
        if self.gaps.len() < MAX_GAPS {
            self.gaps.push(gap);
        }
    }

    /// Returns a warning about the gaps that were found since the last one, while the log start
    /// offset is unknown.
    fn warn_of_gaps(&mut self) -> PartitionAction {
        match (std::mem::take(&mut self.new_gaps), self.gaps.last()) {
            (count @ 1.., Some(last)) => PartitionAction::WarnOfGaps {
                count,
                last: last.clone(),
            },
            _ => PartitionAction::Nothing,
        }
    }

    /// Counts the offsets of each gap that are below the log start offset. If the log start offset
    /// is above a gap, the whole gap counts, so that every loss is reported.
    fn count_expired(&mut self, log_start: i64) -> PartitionAction {
        self.new_gaps = 0;
        let expired = self.gaps.drain(..).filter_map(|gap| {
            let expired = u64::try_from(log_start.min(gap.end) - gap.start).unwrap_or(0);
            let counted = ExpiredGap {
                gap,
                log_start,
                expired,
            };
            (expired > 0).then_some(counted)
        });
        PartitionAction::CountExpired(expired.collect())
    }

    /// Commits the lowest unsettled offset or, if all offsets are settled, the one after the last.
    /// Skips an offset that was committed before, unless [`NextCommit`] is immediate.
    fn commit(&mut self, now: Instant) -> PartitionAction {
        let Some(offset) = self.offsets.committable() else {
            return PartitionAction::Nothing;
        };
        if self
            .committable_since
            .is_none_or(|(before, _)| before != offset)
        {
            self.committable_since = Some((offset, now));
        }
        let mode = match self.next_commit {
            NextCommit::Immediate => OffsetCommitMode::Immediate,
            NextCommit::ImmediateFrom(time)
                if time <= now || self.state == AssignmentState::Revoking =>
            {
                OffsetCommitMode::Immediate
            }
            _ if self.last_commit >= Some(offset) => return PartitionAction::Nothing,
            _ => OffsetCommitMode::Stored,
        };
        if mode == OffsetCommitMode::Immediate {
            // Until the broker confirms it: librdkafka need not report a request that it has lost.
            // After a revocation no commit follows.
            self.next_commit = match self.state {
                AssignmentState::Revoking => NextCommit::Stored,
                _ => NextCommit::ImmediateFrom(now + UNCONFIRMED_COMMIT_TIMEOUT),
            };
        }
        self.last_commit = Some(offset);
        PartitionAction::Commit { offset, mode }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn state(&self) -> AssignmentState {
        self.state
    }

    pub(crate) fn log(&self) -> &LogIdentity {
        &self.log
    }

    pub(crate) fn handed_out(&self) -> usize {
        self.handed_out
    }

    pub(crate) fn has_gaps(&self) -> bool {
        !self.gaps.is_empty()
    }

    /// The offset of the next message; `None` if it is unknown.
    pub(crate) fn position(&self) -> Option<i64> {
        self.offsets.end().or(self.start.offset())
    }

    /// The offset to commit next; `None` if it is unknown.
    pub(crate) fn committable(&self) -> Option<i64> {
        self.offsets.committable().or(self.start.offset())
    }

    /// The lowest unsettled offset, and since when it has blocked commits; `None` instead of the
    /// time if there was no [`PartitionEvent::CommitDue`] since it became the lowest.
    pub(crate) fn blocked_by(&self) -> Option<(i64, Option<Instant>)> {
        let lowest = self.offsets.lowest()?;
        let since = self
            .committable_since
            .filter(|(offset, _)| *offset == lowest);
        Some((lowest, since.map(|(_, since)| since)))
    }

    /// The number of delivered offsets from the lowest unsettled one on, settled or not.
    pub(crate) fn span(&self) -> usize {
        self.offsets.span()
    }

    /// The offset to seek to before anything is read; `None` if no seek is needed.
    pub(crate) fn pending_seek(&self) -> Option<i64> {
        let target = self.offsets.end().unwrap_or(LOG_START);
        (self.state == AssignmentState::Seeking).then_some(target)
    }

    #[cfg(test)]
    pub(crate) fn is_position_trusted(&self) -> bool {
        self.position_trust == PositionTrust::Trusted
    }

    /// Whether this assignment was, or may have been, made while the topic had another id than
    /// `current`.
    pub(crate) fn is_outdated(&self, current: Option<&TopicIdentity>) -> bool {
        match (&self.log.identity, current) {
            (Some(assigned), Some(current)) => assigned.topic_id != current.topic_id,
            (None, _) | (_, None) => true,
        }
    }
}
