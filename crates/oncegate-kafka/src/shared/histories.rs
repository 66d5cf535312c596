//! Random histories of one partition, held against a map of all its offsets.

use std::collections::{BTreeMap, BTreeSet};

use oncegate_core::{Headers, Receipt};
use proptest::prelude::*;

use super::*;

/// What may happen next.
#[derive(Clone, Debug)]
enum Event {
    /// So many messages are read, with a gap of so many offsets before each.
    Read { count: u8, gap: u8 },
    /// All that was read is handed out.
    HandOut,
    /// A delivery is settled that was handed out, whoever's it is now, counted back from the last
    /// one.
    Accept { back: u8 },
    /// A delivery comes back that was handed out and not settled, to be handed out again at once,
    /// or not in this history.
    Release { back: u8, again: bool },
    /// One goes to the dead letters.
    Reject { back: u8 },
    /// The dead letter that went there first stands.
    Publish,
    /// What there is to commit is committed.
    Commit,
    /// Markers are passed up to so far beyond what was read.
    Pass { beyond: u8 },
    /// The partition begins to go: nothing more of it is handed out, and what is settled counts.
    Revoke,
    /// It has gone: what is settled from now on moves nothing. With a last commit, or without,
    /// where it was lost.
    Forget { lost: bool },
    /// It comes back, and is read on where it was committed.
    Assign,
    /// The log loses its end, or begins anew: it is read on so far below what was read last.
    Cut { below: u8 },
    /// The topic was made anew, or is said once more to have been.
    Anew { said: bool },
    /// librdkafka goes back to where it is to begin, or fails to.
    GoBack { works: bool },
    /// The log cannot be read on.
    Bar,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1..20_u8, prop_oneof![Just(0), 0..6_u8]).prop_map(|(count, gap)| Event::Read { count, gap }),
        3 => Just(Event::HandOut),
        12 => (0..60_u8).prop_map(|back| Event::Accept { back }),
        2 => (0..30_u8, prop::bool::weighted(0.9)).prop_map(|(back, again)| Event::Release { back, again }),
        1 => (0..30_u8).prop_map(|back| Event::Reject { back }),
        1 => Just(Event::Publish),
        4 => Just(Event::Commit),
        1 => (0..9_u8).prop_map(|beyond| Event::Pass { beyond }),
        1 => Just(Event::Revoke),
        1 => any::<bool>().prop_map(|lost| Event::Forget { lost }),
        2 => Just(Event::Assign),
        1 => prop_oneof![1 => Just(u8::MAX), 3 => 1..40_u8].prop_map(|below| Event::Cut { below }),
        1 => prop::bool::weighted(0.3).prop_map(|said| Event::Anew { said }),
        2 => prop::bool::weighted(0.7).prop_map(|works| Event::GoBack { works }),
        1 => prop_oneof![3 => Just(Event::HandOut), 1 => Just(Event::Bar)],
    ]
}

/// What is known of the partition under one assignment, kept in the plainest way.
#[derive(Default)]
struct Naive {
    settled: BTreeMap<i64, bool>,
    passed: i64,
    /// Where it begins though nothing was read.
    begun: Option<i64>,
}

impl Naive {
    /// The lowest that is not settled, or the one after the last.
    fn committable(&self) -> Option<i64> {
        let lowest = self
            .settled
            .iter()
            .find(|(_, settled)| !**settled)
            .map(|(offset, _)| *offset);
        lowest
            .or(self
                .settled
                .keys()
                .next_back()
                .map(|last| (last + 1).max(self.passed)))
            .or(self.begun)
    }
}

/// Where a delivery is that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Out,
    Settled,
    /// Released: if it is handed out again, that is another one.
    Released,
    /// On its way to the dead letters.
    Rejected,
}

struct World {
    state: State,
    /// The assignment whose settlements count, if there is one.
    epoch: Option<u64>,
    /// Whether it stays, and is read.
    keeps: Keeps,
    naive: Naive,
    /// The next offset of the log.
    next: i64,
    /// What was committed last.
    committed: i64,
    /// All that was handed out.
    out: Vec<(Receipt, Is)>,
    /// What is on its way to the dead letters.
    letters: VecDeque<usize>,
    /// What was released for good, of this assignment.
    rests: BTreeSet<i64>,
    /// How often the topic was made anew, and as which the assigned one is known.
    made: u32,
    known: Option<u32>,
}

impl World {
    fn new() -> Self {
        let mut state = State::default();
        let epoch = state.begin(Arc::from("t"), 0, Begins::At(0), Log::default());
        let (naive, out, letters, rests) = (
            Naive::default(),
            Vec::new(),
            VecDeque::new(),
            BTreeSet::new(),
        );
        let (epoch, keeps) = (Some(epoch), Keeps::Assigned);
        Self {
            state,
            epoch,
            keeps,
            naive,
            next: 0,
            committed: 0,
            out,
            letters,
            rests,
            made: 0,
            known: None,
        }
    }

    /// Whether what is read of the partition is taken in.
    fn is_read(&self) -> bool {
        self.epoch.is_some() && self.keeps == Keeps::Assigned
    }

    /// Whether what was read of it is handed out.
    fn is_handed_out(&self) -> bool {
        self.epoch.is_some() && self.keeps != Keeps::Revoking
    }

    /// Another assignment, of which nothing was read.
    fn begins(&mut self, epoch: Option<u64>, keeps: Keeps) {
        (self.epoch, self.keeps, self.naive) = (epoch, keeps, Naive::default());
        self.rests.clear();
    }

    /// The delivery that was handed out so long ago, if it is not settled.
    fn back(&self, back: u8) -> Option<usize> {
        let index = self.out.len().checked_sub(1 + usize::from(back))?;
        (self.out[index].1 == Is::Out).then_some(index)
    }

    fn delivery(&self, index: usize) -> Delivery {
        let Receipt {
            epoch, position, ..
        } = self.out[index].0;
        delivery(record(position as i64), epoch)
    }

    /// What is settled of an assignment counts if it is the one that is ours.
    fn fate(&self, index: usize) -> Fate {
        if Some(self.out[index].0.epoch) == self.epoch {
            Fate::Counted
        } else {
            Fate::Stale
        }
    }

    fn happens(&mut self, event: &Event) -> Result<(), TestCaseError> {
        match *event {
            Event::Read { count, gap } => {
                let (mut records, next) = (Vec::new(), self.next);
                for _ in 0..count {
                    self.next += i64::from(gap);
                    // What was read of it before it went, or before it is back at its beginning, is
                    // not taken in.
                    if self.is_read() {
                        self.naive.settled.insert(self.next, false);
                    }
                    records.push(record(self.next));
                    self.next += 1;
                }
                self.state.take_in(records);
                self.next = if self.is_read() { self.next } else { next };
            }
            Event::HandOut => {
                let (mut incoming, all) = (
                    Vec::new(),
                    Limit {
                        count: usize::MAX,
                        bytes: usize::MAX,
                    },
                );
                self.state
                    .hand_out(all, usize::MAX, &mut incoming, &mut Vec::new());
                for it in incoming {
                    if let Incoming::Delivery(Delivery { receipt, .. }) = it {
                        prop_assert!(self.is_handed_out() && Some(receipt.epoch) == self.epoch);
                        prop_assert_eq!(
                            self.naive.settled.get(&(receipt.position as i64)),
                            Some(&false),
                            "settled, or never read"
                        );
                        self.out.push((receipt, Is::Out));
                    }
                }
                self.nothing_is_lost()?;
            }
            Event::Accept { back } => {
                let Some(index) = self.out.len().checked_sub(1 + usize::from(back)) else {
                    return Ok(());
                };
                // One that was accepted may be accepted again, and that is to change nothing.
                let (receipt, Is::Out | Is::Settled) = &self.out[index] else {
                    return Ok(());
                };
                let fate = self.state.accept(receipt);
                prop_assert_eq!(fate, self.fate(index));
                if fate == Fate::Counted {
                    self.naive.settled.insert(receipt.position as i64, true);
                }
                self.out[index].1 = Is::Settled;
            }
            Event::Release { back, again } => {
                let Some(index) = self.back(back) else {
                    return Ok(());
                };
                let after = if again {
                    Duration::ZERO
                } else {
                    Duration::from_secs(86_400)
                };
                let fate = self.state.release(self.delivery(index), after);
                prop_assert_eq!(fate, self.fate(index));
                self.out[index].1 = Is::Released;
                if fate == Fate::Counted && !again {
                    self.rests.insert(self.out[index].0.position as i64);
                }
            }
            Event::Reject { back } => {
                let Some(index) = self.back(back) else {
                    return Ok(());
                };
                let fate = self.state.reject(&self.delivery(index));
                prop_assert_eq!(fate, self.fate(index));
                self.out[index].1 = if fate == Fate::Counted {
                    Is::Rejected
                } else {
                    Is::Settled
                };
                self.letters
                    .extend((fate == Fate::Counted).then_some(index));
            }
            Event::Publish => {
                let Some(index) = self.letters.pop_front() else {
                    return Ok(());
                };
                let fate = self.state.published(&self.delivery(index));
                prop_assert_eq!(fate, self.fate(index));
                if fate == Fate::Counted {
                    self.naive
                        .settled
                        .insert(self.out[index].0.position as i64, true);
                }
                self.out[index].1 = Is::Settled;
            }
            Event::Commit => self.commit()?,
            Event::Pass { beyond } => {
                let known = self
                    .state
                    .assigned
                    .values()
                    .all(|it| it.read_to == ReadTo::Known);
                self.state
                    .reached("t", 0, Some(self.next + i64::from(beyond)));
                if self.is_read() && known && !self.naive.settled.is_empty() {
                    self.naive.passed = self.next + i64::from(beyond);
                    self.next = self.naive.passed;
                }
            }
            Event::Revoke => {
                let epochs = self.state.revoke(&[("t".to_owned(), 0)]);
                prop_assert_eq!(epochs, Vec::from_iter(self.epoch));
                self.keeps = Keeps::Revoking;
            }
            Event::Forget { lost } => {
                let Some(epoch) = self.epoch.filter(|_| self.keeps == Keeps::Revoking) else {
                    return Ok(());
                };
                if !lost {
                    self.commit()?;
                }
                self.state.forget(&[epoch]);
                self.begins(None, Keeps::Revoking);
                prop_assert_eq!(self.state.commits(), []);
            }
            Event::Assign => {
                if self.epoch.is_some() {
                    return Ok(());
                }
                let epoch = self.state.begin(
                    Arc::from("t"),
                    0,
                    Begins::At(self.committed),
                    Log::default(),
                );
                self.begins(Some(epoch), Keeps::Assigned);
                (self.next, self.known) = (self.committed, None);
            }
            Event::Cut { below } => {
                let Some(last) = self
                    .naive
                    .settled
                    .keys()
                    .next_back()
                    .copied()
                    .filter(|_| self.is_read())
                else {
                    return Ok(());
                };
                // One after the last is what comes next anyway.
                let at = (self.next - i64::from(below)).clamp(0, last);
                self.state.take_in(vec![record(at), record(at + 1)]);
                // It is read again from where the first lies that is not settled. What has come is
                // not taken in then: all below it would count as passed.
                let unsettled = self
                    .naive
                    .settled
                    .iter()
                    .find(|(_, settled)| !**settled)
                    .map(|(offset, _)| *offset);
                let Some(lowest) = unsettled.filter(|lowest| *lowest < at) else {
                    self.begins(Some(self.state.last_epoch), Keeps::Assigned);
                    self.naive.settled.extend([(at, false), (at + 1, false)]);
                    (self.next, self.committed) = (at + 2, self.committed.min(at));
                    return self.is_counted();
                };
                self.begins(Some(self.state.last_epoch), Keeps::GoingBack);
                self.naive.begun = Some(lowest);
                self.next = lowest;
            }
            Event::Anew { said } => {
                self.made += u32::from(!said);
                let begun = self
                    .state
                    .begin_anew("t", Some(tests::identity(&self.made.to_string())));
                let is_another = self.is_handed_out() && self.known != Some(self.made);
                prop_assert_eq!(begun, usize::from(is_another));
                if is_another {
                    self.begins(Some(self.state.last_epoch), Keeps::GoingBack);
                    self.naive.begun = Some(BEGINNING);
                    (self.next, self.committed, self.known) =
                        (BEGINNING, BEGINNING, Some(self.made));
                }
            }
            Event::GoBack { works } => {
                let going_back = self.state.going_back();
                let expected = self.epoch.filter(|_| self.keeps == Keeps::GoingBack);
                prop_assert_eq!(
                    going_back.iter().map(|it| it.0).collect::<Vec<_>>(),
                    Vec::from_iter(expected)
                );
                if let (true, Some(epoch)) = (works, expected) {
                    self.state.is_back(epoch);
                    self.keeps = Keeps::Assigned;
                }
            }
            Event::Bar => {
                self.state.bar("t", 0);
                if self.is_read() {
                    self.keeps = Keeps::Barred;
                }
            }
        }
        self.is_counted()
    }

    /// What was read and is not settled is with the consumer, on its way to the dead letters, or
    /// rests, once all that can be handed out was.
    fn nothing_is_lost(&self) -> Result<(), TestCaseError> {
        if !self.is_handed_out() {
            return Ok(());
        }
        let theirs = self.out.iter().filter(|(receipt, is)| {
            Some(receipt.epoch) == self.epoch && matches!(is, Is::Out | Is::Rejected)
        });
        let mut held: BTreeSet<i64> = theirs.map(|(receipt, _)| receipt.position as i64).collect();
        held.extend(&self.rests);
        let unsettled: BTreeSet<i64> = self
            .naive
            .settled
            .iter()
            .filter(|(_, settled)| !**settled)
            .map(|(offset, _)| *offset)
            .collect();
        prop_assert_eq!(held, unsettled);
        Ok(())
    }

    /// What a rebalance waits for, and what bounds reading, are counted as they are.
    fn is_counted(&self) -> Result<(), TestCaseError> {
        let is_waited_for = |(receipt, is): &&(Receipt, Is)| {
            Some(receipt.epoch) == self.epoch && matches!(is, Is::Out | Is::Rejected)
        };
        let out = self.out.iter().filter(is_waited_for).count();
        prop_assert_eq!(self.state.out(&Vec::from_iter(self.epoch)), out);
        prop_assert_eq!(self.state.publishing, self.letters.len());
        for (epoch, assigned) in self
            .state
            .assigned
            .iter()
            .filter(|(_, it)| it.keeps != Keeps::Revoking)
        {
            let held = self
                .state
                .held
                .values()
                .filter(|it| it.receipt.epoch == *epoch)
                .count();
            let letters = self
                .letters
                .iter()
                .filter(|it| self.out[**it].0.epoch == *epoch)
                .count();
            prop_assert_eq!(assigned.backlog.count, held + letters);
        }
        prop_assert_eq!(
            self.state.held_bytes,
            self.state
                .held
                .values()
                .map(|it| it.message.size())
                .sum::<usize>()
        );
        prop_assert_eq!(
            self.state.ready_bytes,
            self.state
                .ready
                .iter()
                .map(|it| it.message.size())
                .sum::<usize>()
        );
        Ok(())
    }

    fn commit(&mut self) -> Result<(), TestCaseError> {
        let commits = self.state.commits();
        let expected = self.naive.committable();
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
        // What is not committed now is not above what was.
        prop_assert!(
            expected.is_none_or(|expected| expected == self.committed),
            "{expected:?} was left out at {}",
            self.committed
        );
        Ok(())
    }
}

fn record(offset: i64) -> Record {
    Record {
        topic: Arc::from("t"),
        partition: 0,
        offset,
        sent_at: None,
        key: None,
        headers: Headers::default(),
        body: "x".into(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_committed_is_the_lowest_unsettled_of_this_assignment_and_never_goes_back(
        events in prop::collection::vec(event(), 1..200),
    ) {
        let mut world = World::new();
        for event in &events {
            world.happens(event)?;
        }
        world.commit()?;
    }
}
