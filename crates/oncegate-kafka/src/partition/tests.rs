use std::collections::{BTreeMap, BTreeSet};

use super::*;
use OffsetCommitMode::{Immediate, Stored};
use PartitionAction as A;
use PartitionEvent as E;

/// Shorthands for the tests of this module.
impl Partition {
    fn at(start: StartPosition) -> Self {
        Self::new(1, start, LogIdentity::default())
    }

    /// A partition without a committed offset, of which these offsets were delivered.
    fn delivered(offsets: impl IntoIterator<Item = i64>) -> Self {
        let mut partition = Self::at(StartPosition::Unknown);
        for offset in offsets {
            assert_eq!(partition.fetch(offset), ENQUEUE);
        }
        partition
    }

    fn fetch(&mut self, offset: i64) -> A {
        let next_epoch = self.epoch + 1;
        self.apply(E::Fetched { offset, next_epoch })
    }

    fn settle_all(&mut self, offsets: impl IntoIterator<Item = i64>) {
        for offset in offsets {
            assert_eq!(self.apply(E::Settled(offset)), A::Nothing);
        }
    }

    fn report_position(&mut self, offset: Option<i64>) {
        assert_eq!(self.apply(E::PositionReported(offset)), A::Nothing);
    }

    fn commit_at(&mut self, now: Instant) -> Option<(i64, OffsetCommitMode)> {
        match self.apply(E::CommitDue(now)) {
            A::Nothing => None,
            A::Commit { offset, mode } => Some((offset, mode)),
            other => panic!("{other:?}"),
        }
    }

    fn committed(&mut self) -> Option<(i64, OffsetCommitMode)> {
        self.commit_at(Instant::now())
    }

    fn may_repeat(&self) -> Vec<i64> {
        (0..15)
            .filter(|it| self.log.position_ids.may_repeat(*it))
            .collect()
    }
}

const ENQUEUE: A = A::Enqueue {
    truncated_from: None,
};

fn identity(topic_id: &str) -> Option<TopicIdentity> {
    Some(TopicIdentity {
        topic_id: topic_id.into(),
        cluster_id: None,
    })
}

#[test]
fn an_assignment_commits_its_start_at_once_and_then_the_lowest_unsettled_offset() {
    let mut partition = Partition::at(StartPosition::Unknown);
    assert_eq!(partition.committed(), None);
    (5..9).for_each(|offset| drop(partition.fetch(offset)));
    assert_eq!(partition.committed(), Some((5, Immediate)));
    partition.settle_all([6]);
    assert_eq!(partition.committed(), None);
    partition.settle_all([5]);
    assert_eq!(partition.committed(), Some((7, Stored)));
    assert_eq!(partition.committed(), None);
    partition.settle_all([8, 7]);
    assert_eq!(partition.committed(), Some((9, Stored)));
    assert_eq!((partition.span(), partition.blocked_by()), (0, None));
}

#[test]
fn gaps_count_as_settled() {
    let mut partition = Partition::delivered([3, 1_000_000_000_000, 1_000_000_000_007]);
    partition.settle_all([1_000_000_000_000, 3]);
    assert_eq!(partition.committed(), Some((1_000_000_000_007, Immediate)));
}

#[test]
fn settling_twice_or_an_undelivered_offset_changes_nothing() {
    let mut partition = Partition::delivered([1, 3]);
    (0..2).for_each(|_| drop(partition.apply(E::HandedOut)));
    partition.settle_all([2, 0, -1, i64::MAX]);
    assert_eq!(partition.handed_out(), 2);
    partition.settle_all([3, 3]);
    assert_eq!(partition.handed_out(), 1);
    partition.settle_all([1, 1]);
    assert_eq!(
        (partition.handed_out(), partition.committed()),
        (0, Some((4, Immediate)))
    );
}

#[test]
fn a_failed_commit_is_repeated_after_a_pause() {
    let (mut partition, now) = (Partition::delivered([7, 8]), Instant::now());
    assert_eq!(partition.commit_at(now), Some((7, Immediate)));
    let retry_at = now + Duration::from_secs(1);
    partition.apply(E::CommitFailed { retry_at });
    assert_eq!(partition.commit_at(now), None, "not at once");
    assert_eq!(partition.commit_at(retry_at), Some((7, Immediate)));
    assert_eq!(partition.commit_at(retry_at), None);
}

#[test]
fn a_failed_commit_is_repeated_at_once_when_the_partition_is_revoked() {
    let (mut partition, now) = (Partition::delivered([7, 8]), Instant::now());
    assert_eq!(partition.commit_at(now), Some((7, Immediate)));
    let retry_at = now + Duration::from_secs(1);
    partition.apply(E::CommitFailed { retry_at });
    partition.apply(E::Revoked);
    assert_eq!(partition.commit_at(now), Some((7, Immediate)));
    assert_eq!(partition.commit_at(now), None, "once");
}

#[test]
fn an_immediate_commit_is_repeated_until_the_broker_confirms_it() {
    let (mut partition, now) = (Partition::delivered([7, 8]), Instant::now());
    assert_eq!(partition.commit_at(now), Some((7, Immediate)));
    let (later, last) = (
        now + UNCONFIRMED_COMMIT_TIMEOUT,
        now + Duration::from_secs(3600),
    );
    assert_eq!(partition.commit_at(later), Some((7, Immediate)));
    partition.settle_all([7]);
    assert_eq!(
        partition.commit_at(later),
        Some((8, Stored)),
        "librdkafka may commit it meanwhile"
    );
    partition.apply(E::CommitConfirmed(7));
    assert_eq!(partition.commit_at(last), None);
}

#[test]
fn a_higher_commit_that_arrives_after_a_truncation_is_overwritten_at_once() {
    let mut partition = Partition::delivered(5..60);
    partition.settle_all(5..60);
    assert_eq!(partition.committed(), Some((60, Immediate)));
    partition.fetch(0);
    partition.fetch(1);
    assert_eq!(partition.committed(), Some((0, Immediate)));
    partition.apply(E::CommitConfirmed(0));
    assert_eq!(partition.committed(), None);
    // The broker has applied a retried commit of offset 60 after the commit of offset 0. librdkafka
    // would never commit a stored offset below 60.
    partition.apply(E::CommitConfirmed(60));
    assert_eq!(partition.committed(), Some((0, Immediate)));
    partition.settle_all([0]);
    assert_eq!(partition.committed(), Some((1, Stored)));
    partition.apply(E::CommitConfirmed(0));
    assert_eq!(
        partition.committed(),
        None,
        "the commit of offset 1 is not confirmed yet"
    );
}

#[test]
fn a_record_below_the_last_one_restarts_the_assignment() {
    let mut partition = Partition::delivered(7..9);
    partition.settle_all(7..9);
    let cause = RestartCause::Truncated { expected: 9 };
    assert_eq!(partition.fetch(2), A::Restart { ended: 1, cause });
    assert_eq!((partition.epoch(), partition.fetch(3)), (2, ENQUEUE));
    assert_eq!(
        partition.apply(E::PositionWrong { fallback: None }),
        A::Seek(4)
    );
    assert_eq!(partition.committed(), Some((2, Immediate)));
}

#[test]
fn a_truncation_above_an_unsettled_offset_restarts_there_after_a_seek() {
    let mut partition = Partition::delivered(5..9);
    partition.settle_all([5, 8]);
    let cause = RestartCause::TruncatedAboveUnsettled { expected: 9 };
    assert_eq!(partition.fetch(7), A::Restart { ended: 1, cause });
    assert_eq!(partition.pending_seek(), Some(6));
    assert_eq!(
        partition.fetch(8),
        A::Nothing,
        "if 8 were delivered, 6 and 7 would count as settled"
    );
    assert_eq!(partition.committed(), Some((6, Immediate)));
    partition.apply(E::Sought);
    assert_eq!(
        (partition.pending_seek(), partition.fetch(6)),
        (None, ENQUEUE)
    );
}

#[test]
fn a_first_record_below_the_committed_offset_is_a_truncation() {
    let mut partition = Partition::at(StartPosition::Committed(50));
    let truncated_from = Some(50);
    assert_eq!(partition.fetch(10), A::Enqueue { truncated_from });
    assert_eq!(partition.committed(), Some((10, Immediate)));
}

#[test]
fn positions_may_repeat_between_a_truncation_and_the_last_read_offset() {
    let mut partition = Partition::delivered(5..10);
    assert_eq!(partition.may_repeat(), [0; 0]);
    partition.settle_all(5..10);
    partition.fetch(7);
    assert_eq!(partition.may_repeat(), [7, 8, 9]);
    // A second truncation.
    partition.fetch(6);
    assert_eq!(partition.may_repeat(), [6, 7, 8, 9]);

    let mut partition = Partition::at(StartPosition::Committed(5));
    partition.fetch(3);
    assert_eq!(partition.may_repeat(), [3, 4]);
}

#[test]
fn the_position_is_known_once_the_partition_has_started() {
    let mut unread = Partition::at(StartPosition::NoOffset);
    let mut committed = Partition::at(StartPosition::Committed(5));
    assert_eq!((unread.position(), committed.position()), (None, Some(5)));
    unread.fetch(3);
    committed.fetch(6);
    assert_eq!(
        (unread.position(), committed.position()),
        (Some(4), Some(7))
    );
}

#[test]
fn a_recreated_topic_is_read_from_offset_0_after_a_seek() {
    let mut partition = Partition::delivered(5..8);
    let recreated = |partition: &mut Partition, topic_id| {
        partition.apply(E::TopicRecreated {
            identity: identity(topic_id),
            next_epoch: partition.epoch + 1,
        })
    };
    let cause = RestartCause::Recreated;
    assert_eq!(
        recreated(&mut partition, "second"),
        A::Restart { ended: 1, cause }
    );
    assert_eq!(partition.pending_seek(), Some(0));
    assert_eq!(partition.fetch(8), A::Nothing);
    assert_eq!(partition.committed(), Some((0, Immediate)));
    assert_eq!(
        recreated(&mut partition, "second"),
        A::Nothing,
        "this assignment is one of the second topic"
    );
    partition.apply(E::Revoked);
    assert_eq!(recreated(&mut partition, "third"), A::Nothing);
}

#[test]
fn a_partition_that_is_not_active_reads_nothing() {
    for event in [E::Halted, E::Revoked] {
        let mut partition = Partition::delivered([5]);
        partition.apply(event.clone());
        partition.report_position(Some(20));
        assert_eq!(partition.fetch(6), A::Nothing, "{event:?}");
        assert_eq!(
            partition.apply(E::PositionWrong { fallback: Some(9) }),
            A::Nothing
        );
        assert_eq!(partition.committed(), Some((5, Immediate)), "{event:?}");
    }
}

#[test]
fn commits_advance_past_transaction_markers_if_librdkafkas_position_is_trusted() {
    let mut partition = Partition::delivered(5..8);
    partition.report_position(Some(10));
    assert_eq!(partition.committed(), Some((5, Immediate)));
    partition.settle_all(5..8);
    assert_eq!(partition.committed(), Some((10, Stored)));
    assert_eq!(
        partition.apply(E::PositionWrong { fallback: Some(15) }),
        A::Seek(10)
    );
    partition.report_position(Some(20));
    assert_eq!(
        partition.committed(),
        None,
        "librdkafka counted an error as a message"
    );
    partition.apply(E::Sought);
    partition.report_position(Some(20));
    assert_eq!(
        partition.committed(),
        None,
        "librdkafka may not have handled the seek yet"
    );
    partition.report_position(None);
    partition.report_position(Some(13));
    assert_eq!(partition.committed(), Some((13, Stored)));
}

#[test]
fn a_log_of_markers_only_is_committed_once_the_position_is_trusted() {
    let mut partition = Partition::at(StartPosition::Committed(5));
    partition.report_position(Some(100));
    assert_eq!(
        partition.committed(),
        None,
        "it may be the position of an earlier assignment"
    );
    partition.report_position(None);
    partition.report_position(Some(3));
    assert_eq!(
        partition.committed(),
        None,
        "it is below the committed offset"
    );
    partition.report_position(Some(9));
    assert_eq!(expired(&mut partition, 100), [(5..9, 4)]);
    assert_eq!(partition.committed(), Some((9, Immediate)));
    assert_eq!((partition.fetch(9), partition.has_gaps()), (ENQUEUE, false));

    // Without a committed offset it starts at the position.
    let mut partition = Partition::at(StartPosition::NoOffset);
    partition.report_position(None);
    partition.report_position(Some(9));
    assert_eq!(
        (partition.committed(), partition.has_gaps()),
        (Some((9, Immediate)), false)
    );
}

#[test]
fn a_partition_that_was_never_read_seeks_to_the_given_position() {
    let mut partition = Partition::at(StartPosition::NoOffset);
    assert_eq!(
        partition.apply(E::PositionWrong { fallback: None }),
        A::Nothing
    );
    assert_eq!(
        partition.apply(E::PositionWrong { fallback: Some(7) }),
        A::Seek(7)
    );
}

/// The gaps with expired messages, if the log starts at this offset.
fn expired(partition: &mut Partition, log_start: i64) -> Vec<(Range<i64>, u64)> {
    match partition.apply(E::LogStart(Some(log_start))) {
        A::Nothing => vec![],
        A::CountExpired(gaps) => gaps.into_iter().map(|it| (it.gap, it.expired)).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn expired_offsets_are_counted_however_late_the_log_start_is_known() {
    // The log start offset is below the gap, at its start, inside it, at its end, or above it.
    for (log_start, count) in [(0, 0), (5, 0), (6, 1), (9, 4), (12, 7), (13, 7), (900, 7)] {
        let mut partition = Partition::at(StartPosition::Committed(5));
        partition.fetch(12);
        let (count, last) = (count, 5..12);
        assert_eq!(
            partition.apply(E::LogStart(None)),
            A::WarnOfGaps {
                count: 1,
                last: last.clone()
            }
        );
        assert_eq!(
            partition.apply(E::LogStart(None)),
            A::Nothing,
            "the gap was logged"
        );
        let expected = if count > 0 {
            vec![(last, count)]
        } else {
            vec![]
        };
        assert_eq!(expired(&mut partition, log_start), expected);
        assert_eq!(expired(&mut partition, log_start), [], "counted once");
    }
}

#[test]
fn each_gap_is_kept_until_the_log_start_is_known() {
    let mut partition = Partition::at(StartPosition::Committed(5));
    for offset in [8, 9, 11, 12] {
        assert_eq!(partition.fetch(offset), ENQUEUE);
    }
    // A truncation does not discard them.
    partition.settle_all([8, 9, 11, 12]);
    partition.fetch(2);
    assert_eq!(expired(&mut partition, 20), [(5..8, 3), (10..11, 1)]);
}

/// A pseudorandom generator (xorshift) whose numbers are the same in every run.
struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[test]
fn any_history_agrees_with_a_map_of_all_offsets() {
    for seed in 1..=300 {
        let mut random = Xorshift(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let gaps = random.below(2) == 0;
        let mut partition = Partition::at(StartPosition::Unknown);
        let mut reference = BTreeMap::<i64, bool>::new();
        let mut next = random.below(100) as i64;
        let (mut last_commit, mut handed_out) = (None, 0);
        for _ in 0..400 {
            if random.below(5) < 2 {
                if gaps {
                    next += (random.below(4) * random.below(50)) as i64;
                }
                assert_eq!(partition.fetch(next), ENQUEUE);
                partition.apply(E::HandedOut);
                reference.insert(next, false);
                (next, handed_out) = (next + 1, handed_out + 1);
            } else {
                let offset = next - random.below(60) as i64;
                if let Some(settled) = reference.get_mut(&offset)
                    && !std::mem::replace(settled, true)
                {
                    handed_out -= 1;
                }
                partition.settle_all([offset]);
            }
            assert_eq!(partition.handed_out(), handed_out, "seed {seed}");
            if random.below(3) == 0 {
                let lowest = reference.iter().find(|(_, settled)| !**settled);
                let expected = lowest
                    .map(|(offset, _)| *offset)
                    .or(reference.keys().last().map(|last| last + 1))
                    .filter(|offset| last_commit.is_none_or(|last| *offset > last));
                let committed = partition.committed().map(|(offset, _)| offset);
                assert_eq!(committed, expected, "seed {seed}");
                last_commit = expected.or(last_commit);
            }
        }
    }
}

/// The offset that a broker has committed for the group, and what this member has delivered.
struct GroupOffset {
    partition: Partition,
    /// The offset that the broker has committed.
    committed: i64,
    unsettled: BTreeSet<i64>,
    /// The next offset of the log.
    next: i64,
    now: Instant,
}

impl GroupOffset {
    fn assign(committed: i64, epoch: u64) -> Self {
        let start = StartPosition::Committed(committed);
        Self {
            partition: Partition::new(epoch, start, LogIdentity::default()),
            committed,
            unsettled: BTreeSet::new(),
            next: committed,
            now: Instant::now(),
        }
    }

    fn fetch(&mut self, offset: i64) {
        let (state, action) = (self.partition.state(), self.partition.fetch(offset));
        match action {
            A::Nothing => assert_ne!(state, AssignmentState::Active),
            A::Enqueue { .. } => {
                assert_eq!(state, AssignmentState::Active);
                self.unsettled.insert(offset);
                self.next = offset + 1;
            }
            A::Restart { cause, .. } => {
                let lost = self.unsettled.range(..offset).next().copied();
                self.unsettled.clear();
                self.next = match cause {
                    RestartCause::Truncated { .. } => {
                        assert_eq!(lost, None, "{offset} is delivered");
                        self.unsettled.insert(offset);
                        offset + 1
                    }
                    _ => self.partition.pending_seek().expect("it seeks"),
                };
                assert!(
                    lost.is_none_or(|lost| lost == self.next),
                    "reads {lost:?} again"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    /// Commits, as librdkafka does: a stored offset only if it is above the committed one.
    fn commit(&mut self) {
        match self.partition.commit_at(self.now) {
            Some((offset, Immediate)) => self.committed = offset,
            Some((offset, Stored)) => self.committed = self.committed.max(offset),
            None => {}
        }
    }

    /// Commits, and checks that the committed offset is the lowest unsettled one, so that a crash
    /// redelivers every unsettled message and no message below the lowest one. Before the start
    /// there is nothing to commit.
    fn check(&mut self) {
        self.commit();
        let lowest = self.unsettled.first().copied();
        let has_started = self.partition.offsets.end().is_some();
        if has_started {
            let expected = lowest.or(self.partition.position());
            assert_eq!(Some(self.committed), expected);
        }
    }

    /// Applies a random event.
    fn step(&mut self, random: &mut Xorshift) {
        match random.below(40) {
            0..12 => self.fetch(self.next + random.below(2) as i64 * random.below(5) as i64),
            12..24 => {
                let index = random.below(8) as usize;
                if let Some(offset) = self.unsettled.iter().nth(index).copied() {
                    self.unsettled.remove(&offset);
                    self.partition.settle_all([offset]);
                }
            }
            24..28 => self.check(),
            28 => {
                let before = self.committed;
                self.commit();
                self.committed = before;
                let retry_at = self.now;
                self.partition.apply(E::CommitFailed { retry_at });
            }
            29 => {
                // A commit of an earlier assignment arrives late.
                self.committed = self.next + random.below(20) as i64;
                self.partition.apply(E::CommitConfirmed(self.committed));
            }
            30 | 31 => self.fetch((self.next - 1 - random.below(20) as i64).max(0)),
            32 => self.partition.report_position(None),
            33 | 34 => {
                let before = self.partition.position();
                // A position that is not trusted may be anywhere above the next message.
                let is_trusted = self.partition.is_position_trusted();
                let beyond = random.below(if is_trusted { 3 } else { 50 });
                let position = self.next + beyond as i64;
                self.partition.report_position(Some(position));
                if is_trusted && self.partition.state() == AssignmentState::Active {
                    self.next = position;
                } else {
                    assert_eq!(self.partition.position(), before);
                }
            }
            35 => drop(self.partition.apply(E::PositionWrong {
                fallback: Some(self.next),
            })),
            36 | 37 => drop(self.partition.apply(E::Sought)),
            38 => {
                let identity = identity(&random.below(3).to_string());
                let next_epoch = self.partition.epoch + 1;
                let event = E::TopicRecreated {
                    identity,
                    next_epoch,
                };
                if self.partition.apply(event) != A::Nothing {
                    self.unsettled.clear();
                    self.next = LOG_START;
                }
            }
            _ => {
                if random.below(2) == 0 {
                    self.partition.apply(E::Halted);
                }
                self.partition.apply(E::Revoked);
                self.check();
                *self = Self::assign(self.committed, self.partition.epoch + 1);
            }
        }
    }
}

#[test]
fn any_history_commits_the_lowest_unsettled_offset() {
    for seed in 1..=500 {
        let mut random = Xorshift(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut group = GroupOffset::assign(random.below(50) as i64, 1);
        for _ in 0..500 {
            group.step(&mut random);
        }
        group.check();
    }
}

#[test]
fn a_partition_uses_no_clock_no_lock_no_log_and_no_librdkafka() {
    for source in [
        include_str!("../partition.rs"),
        include_str!("log_identity.rs"),
        include_str!("offsets.rs"),
        include_str!("start.rs"),
    ] {
        for forbidden in [
            "crate::",
            "rdkafka::",
            "::now()",
            "async ",
            "Mutex",
            "tracing::",
            "metrics::",
        ] {
            assert!(!source.contains(forbidden), "{forbidden}");
        }
    }
}
