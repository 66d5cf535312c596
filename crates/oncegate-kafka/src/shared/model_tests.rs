//! Applies random histories to the state of a source with one partition, and compares what is
//! handed out and counted with a map of all offsets. The histories of `partition::tests` have
//! further events, such as a recreated topic.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use oncegate_core::Receipt;
use proptest::prelude::*;

use super::deliveries::delivery;
use super::tests::assign;
use super::*;
use crate::partition::AssignmentState;

/// An event of a random history.
#[derive(Clone, Debug)]
enum HistoryEvent {
    /// `count` messages are read, each after a gap of `gap` offsets.
    Read { count: u8, gap: u8 },
    /// All messages that were read are handed out.
    HandOut,
    /// The delivery that was handed out `back` deliveries before the last one is accepted, whatever
    /// its assignment.
    Accept { back: u8 },
    /// Such a delivery is released, to be handed out again, if it is unsettled.
    Release { back: u8 },
    /// Such a delivery is rejected, if it is unsettled.
    Reject { back: u8 },
    /// The oldest unconfirmed dead letter is confirmed.
    ConfirmDeadLetter,
    /// Offsets are committed.
    Commit,
    /// The partition is being revoked: its messages are not handed out any more, and settlements
    /// count.
    Revoke,
    /// The assignment ends: settlements of its deliveries are stale from now on. Unless the
    /// assignment is lost, its offsets are committed first.
    EndAssignment { lost: bool },
    /// The partition is assigned again, at the committed offset.
    Assign,
    /// The log is truncated or starts again: the next record is `below` offsets below the expected
    /// one.
    Truncate { below: u8 },
    /// librdkafka seeks to the start position, or fails to.
    Seek { succeeds: bool },
}

fn event() -> impl Strategy<Value = HistoryEvent> {
    prop_oneof![
        4 => (1..20_u8, prop_oneof![Just(0), 0..6_u8]).prop_map(|(count, gap)| HistoryEvent::Read { count, gap }),
        3 => Just(HistoryEvent::HandOut),
        12 => (0..60_u8).prop_map(|back| HistoryEvent::Accept { back }),
        2 => (0..30_u8).prop_map(|back| HistoryEvent::Release { back }),
        1 => (0..30_u8).prop_map(|back| HistoryEvent::Reject { back }),
        1 => Just(HistoryEvent::ConfirmDeadLetter),
        4 => Just(HistoryEvent::Commit),
        1 => Just(HistoryEvent::Revoke),
        1 => any::<bool>().prop_map(|lost| HistoryEvent::EndAssignment { lost }),
        2 => Just(HistoryEvent::Assign),
        1 => prop_oneof![1 => Just(u8::MAX), 3 => 1..40_u8].prop_map(|below| HistoryEvent::Truncate { below }),
        2 => prop::bool::weighted(0.7).prop_map(|succeeds| HistoryEvent::Seek { succeeds }),
    ]
}

/// The offsets of one assignment, as a map: whether each is settled.
#[derive(Default)]
struct ReferenceOffsets {
    settled: BTreeMap<i64, bool>,
    /// The start position if nothing was read.
    started: Option<i64>,
}

impl ReferenceOffsets {
    fn unsettled(&self) -> impl Iterator<Item = i64> {
        let unsettled = self.settled.iter().filter(|(_, settled)| !**settled);
        unsettled.map(|(offset, _)| *offset)
    }

    /// The lowest unsettled offset, or the one after the last.
    fn committable(&self) -> Option<i64> {
        self.unsettled()
            .next()
            .or(self.settled.keys().next_back().map(|last| last + 1))
            .or(self.started)
    }
}

/// The state of a delivery that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandedOut {
    /// Not settled yet.
    Out,
    Settled,
    /// Released: if it is handed out again, that is another delivery.
    Released,
    /// Its dead letter is being published.
    Rejected,
}

struct PartitionModel {
    state: SourceState,
    /// The assignment whose settlements count, if there is one.
    epoch: Option<u64>,
    /// The state of that assignment.
    assignment: AssignmentState,
    reference: ReferenceOffsets,
    /// The next offset of the log.
    next: i64,
    /// The committed offset.
    committed: i64,
    /// All deliveries that were handed out.
    handed_out: Vec<(Receipt, HandedOut)>,
    /// Unconfirmed dead letters.
    unconfirmed: VecDeque<usize>,
}

impl PartitionModel {
    fn new() -> Self {
        let mut state = SourceState::default();
        let epoch = assign(&mut state, 0, StartPosition::Committed(0));
        Self {
            state,
            epoch: Some(epoch),
            assignment: AssignmentState::Active,
            reference: ReferenceOffsets::default(),
            next: 0,
            committed: 0,
            handed_out: Vec::new(),
            unconfirmed: VecDeque::new(),
        }
    }

    /// Whether records of the partition are added.
    fn is_read(&self) -> bool {
        self.epoch.is_some() && self.assignment == AssignmentState::Active
    }

    /// Whether records of the partition are handed out.
    fn is_handed_out(&self) -> bool {
        self.epoch.is_some() && self.assignment != AssignmentState::Revoking
    }

    /// Starts another assignment.
    fn start(&mut self, epoch: Option<u64>, assignment: AssignmentState) {
        (self.epoch, self.assignment, self.reference) =
            (epoch, assignment, ReferenceOffsets::default());
    }

    /// The index of the delivery that was handed out `back` deliveries before the last one, if it
    /// is unsettled.
    fn unsettled_index(&self, back: u8) -> Option<usize> {
        let index = self.handed_out.len().checked_sub(1 + usize::from(back))?;
        (self.handed_out[index].1 == HandedOut::Out).then_some(index)
    }

    fn delivery(&self, index: usize) -> Delivery {
        let Receipt {
            epoch, position, ..
        } = self.handed_out[index].0;
        delivery(record(position as i64), epoch)
    }

    /// Whether a settlement of this delivery counts: it is stale if the assignment has ended.
    fn is_assigned(&self, index: usize) -> bool {
        Some(self.handed_out[index].0.epoch) == self.epoch
    }

    fn apply(&mut self, event: &HistoryEvent) -> Result<(), TestCaseError> {
        match *event {
            HistoryEvent::Read { count, gap } => {
                let (mut records, next) = (Vec::new(), self.next);
                for _ in 0..count {
                    self.next += i64::from(gap);
                    // Records are dropped while the partition is being revoked, or before the seek
                    // succeeded.
                    if self.is_read() {
                        self.reference.settled.insert(self.next, false);
                    }
                    records.push(record(self.next));
                    self.next += 1;
                }
                self.state.add_records(records);
                self.next = if self.is_read() { self.next } else { next };
            }
            HistoryEvent::HandOut => {
                let (mut incoming, all) = (Vec::new(), Limit::new(usize::MAX, usize::MAX));
                self.state
                    .hand_out(all, usize::MAX, &mut incoming, &mut Vec::new());
                for it in incoming {
                    if let Incoming::Delivery(Delivery { receipt, .. }) = it {
                        prop_assert!(self.is_handed_out() && Some(receipt.epoch) == self.epoch);
                        prop_assert_eq!(
                            self.reference.settled.get(&(receipt.position as i64)),
                            Some(&false),
                            "settled, or never read"
                        );
                        self.handed_out.push((receipt, HandedOut::Out));
                    }
                }
                self.check_nothing_is_lost()?;
            }
            HistoryEvent::Accept { back } => {
                let Some(index) = self.handed_out.len().checked_sub(1 + usize::from(back)) else {
                    return Ok(());
                };
                // Accepting a delivery twice must change nothing.
                let (receipt, HandedOut::Out | HandedOut::Settled) = &self.handed_out[index] else {
                    return Ok(());
                };
                let is_assigned = self.state.accept(receipt);
                prop_assert_eq!(is_assigned, self.is_assigned(index));
                if is_assigned {
                    self.reference.settled.insert(receipt.position as i64, true);
                }
                self.handed_out[index].1 = HandedOut::Settled;
            }
            HistoryEvent::Release { back } => {
                let Some(index) = self.unsettled_index(back) else {
                    return Ok(());
                };
                let is_assigned = self.state.release(self.delivery(index));
                prop_assert_eq!(is_assigned, self.is_assigned(index));
                self.handed_out[index].1 = HandedOut::Released;
            }
            HistoryEvent::Reject { back } => {
                let Some(index) = self.unsettled_index(back) else {
                    return Ok(());
                };
                let is_assigned = self.state.reject(&self.delivery(index));
                prop_assert_eq!(is_assigned, self.is_assigned(index));
                self.handed_out[index].1 = if is_assigned {
                    HandedOut::Rejected
                } else {
                    HandedOut::Settled
                };
                self.unconfirmed.extend((is_assigned).then_some(index));
            }
            HistoryEvent::ConfirmDeadLetter => {
                let Some(index) = self.unconfirmed.pop_front() else {
                    return Ok(());
                };
                let is_assigned = self.state.dead_letter_confirmed(&self.delivery(index));
                prop_assert_eq!(is_assigned, self.is_assigned(index));
                if is_assigned {
                    self.reference
                        .settled
                        .insert(self.handed_out[index].0.position as i64, true);
                }
                self.handed_out[index].1 = HandedOut::Settled;
            }
            HistoryEvent::Commit => self.commit()?,
            HistoryEvent::Revoke => {
                let action = self.state.apply("t", 0, PartitionEvent::Revoked);
                prop_assert_eq!(action == PartitionAction::DropQueued, self.epoch.is_some());
                self.assignment = AssignmentState::Revoking;
            }
            HistoryEvent::EndAssignment { lost } => {
                let Some(epoch) = self
                    .epoch
                    .filter(|_| self.assignment == AssignmentState::Revoking)
                else {
                    return Ok(());
                };
                if !lost {
                    self.commit()?;
                }
                self.state.remove_assignments(&[epoch]);
                self.start(None, AssignmentState::Revoking);
                prop_assert_eq!(self.state.commits(), []);
            }
            HistoryEvent::Assign => {
                if self.epoch.is_some() {
                    return Ok(());
                }
                let start = StartPosition::Committed(self.committed);
                let epoch = assign(&mut self.state, 0, start);
                self.start(Some(epoch), AssignmentState::Active);
                self.next = self.committed;
            }
            HistoryEvent::Truncate { below } => {
                let Some(last) = self
                    .reference
                    .settled
                    .keys()
                    .next_back()
                    .copied()
                    .filter(|_| self.is_read())
                else {
                    return Ok(());
                };
                // At most the last offset that was read: the offset after it is expected, and would
                // not show a truncation.
                let at = (self.next - i64::from(below)).clamp(0, last);
                self.state.add_records(vec![record(at), record(at + 1)]);
                // If a lower offset is unsettled, the new records are dropped, and reading
                // continues at that offset: if they were added, all offsets below them would count
                // as settled.
                let unsettled = self.reference.unsettled().next();
                let Some(lowest) = unsettled.filter(|lowest| *lowest < at) else {
                    self.start(Some(self.state.last_epoch), AssignmentState::Active);
                    self.reference
                        .settled
                        .extend([(at, false), (at + 1, false)]);
                    (self.next, self.committed) = (at + 2, self.committed.min(at));
                    return self.check_counters();
                };
                self.start(Some(self.state.last_epoch), AssignmentState::Seeking);
                self.reference.started = Some(lowest);
                self.next = lowest;
            }
            HistoryEvent::Seek { succeeds } => {
                let is_seeking =
                    self.epoch.is_some() && self.assignment == AssignmentState::Seeking;
                let expected = is_seeking.then_some((Arc::from("t"), 0, self.next));
                prop_assert_eq!(self.state.pending_seeks(), Vec::from_iter(expected));
                if succeeds && is_seeking {
                    self.state.apply("t", 0, PartitionEvent::Sought);
                    self.assignment = AssignmentState::Active;
                }
            }
        }
        self.check_counters()
    }

    /// Checks, after everything was handed out, that each unsettled message is handed out or its
    /// dead letter is being published.
    fn check_nothing_is_lost(&self) -> Result<(), TestCaseError> {
        if !self.is_handed_out() {
            return Ok(());
        }
        let unsettled_deliveries = self.handed_out.iter().filter(|(receipt, is)| {
            Some(receipt.epoch) == self.epoch && matches!(is, HandedOut::Out | HandedOut::Rejected)
        });
        let unsettled: BTreeSet<i64> = unsettled_deliveries
            .map(|(receipt, _)| receipt.position as i64)
            .collect();
        prop_assert_eq!(unsettled, self.reference.unsettled().collect());
        Ok(())
    }

    /// Checks the counters that a rebalance waits for and those that limit reading.
    fn check_counters(&self) -> Result<(), TestCaseError> {
        let is_waited_for = |(receipt, is): &&(Receipt, HandedOut)| {
            Some(receipt.epoch) == self.epoch && matches!(is, HandedOut::Out | HandedOut::Rejected)
        };
        let handed_out = self.handed_out.iter().filter(is_waited_for).count();
        prop_assert_eq!(
            self.state.handed_out(&Vec::from_iter(self.epoch)),
            handed_out
        );
        prop_assert_eq!(self.state.unconfirmed_count(), self.unconfirmed.len());
        // The deliveries of all assignments belong to the one partition of this model.
        let deliveries = &self.state.deliveries;
        let unconfirmed = deliveries.unconfirmed.total();
        prop_assert_eq!(deliveries.unconfirmed.of(&Arc::from("t"), 0), unconfirmed);
        let (ready_bytes, sum) = deliveries.ready_bytes();
        prop_assert_eq!(ready_bytes, sum);
        Ok(())
    }

    fn commit(&mut self) -> Result<(), TestCaseError> {
        let commits = self.state.commits();
        let expected = self.reference.committable();
        if let Some(commit) = commits.first() {
            prop_assert_eq!(Some(commit.offset), expected);
            prop_assert!(
                commit.offset >= self.committed,
                "{} after {}",
                commit.offset,
                self.committed
            );
            self.committed = commit.offset;
        }
        prop_assert_eq!(commits.len() <= 1, true);
        // If nothing is committed now, the committable offset was committed before.
        prop_assert!(
            expected.is_none_or(|expected| expected == self.committed),
            "{expected:?} is not committed at {}",
            self.committed
        );
        Ok(())
    }
}

fn record(offset: i64) -> ConsumerRecord {
    super::tests::record(0, offset)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_lowest_unsettled_offset_of_the_assignment_is_committed_and_never_decreases(
        events in prop::collection::vec(event(), 1..200),
    ) {
        let mut model = PartitionModel::new();
        for event in &events {
            model.apply(event)?;
        }
        model.commit()?;
    }
}
