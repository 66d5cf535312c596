//! Random histories of one partition, held against a map of all its offsets.

use std::collections::BTreeMap;

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
    /// A delivery is settled that was handed out, whoever's it is now, counted back from the last one.
    Accept { back: u8 },
    /// What there is to commit is committed.
    Commit,
    /// Markers are passed up to so far beyond what was read.
    Pass { beyond: u8 },
    /// The partition begins to go: nothing more of it is handed out, and what is settled counts.
    Revoke,
    /// It has gone: what is settled from now on moves nothing. With a last commit, or without, where it was lost.
    Forget { lost: bool },
    /// It comes back, and is read on where it was committed.
    Assign,
    /// The log begins anew, and is read from its first offset.
    Cut,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1..20_u8, prop_oneof![Just(0), 0..6_u8]).prop_map(|(count, gap)| Event::Read { count, gap }),
        3 => Just(Event::HandOut),
        12 => (0..60_u8).prop_map(|back| Event::Accept { back }),
        4 => Just(Event::Commit),
        1 => (0..9_u8).prop_map(|beyond| Event::Pass { beyond }),
        1 => Just(Event::Revoke),
        1 => any::<bool>().prop_map(|lost| Event::Forget { lost }),
        2 => Just(Event::Assign),
        1 => Just(Event::Cut),
    ]
}

/// What is known of the partition under one assignment, kept in the plainest way.
#[derive(Default)]
struct Naive {
    settled: BTreeMap<i64, bool>,
    passed: i64,
}

impl Naive {
    /// The lowest that is not settled, or the one after the last.
    fn committable(&self) -> Option<i64> {
        let lowest = self.settled.iter().find(|(_, settled)| !**settled).map(|(offset, _)| *offset);
        lowest.or(self.settled.keys().next_back().map(|last| (last + 1).max(self.passed)))
    }
}

struct World {
    state: State,
    /// The assignment whose settlements count, if there is one.
    epoch: Option<u64>,
    /// Whether it is still handed out.
    is_ours: bool,
    naive: Naive,
    /// The next offset of the log.
    next: i64,
    /// What was committed last.
    committed: i64,
    /// What a crash now would begin with must not be above this: the lowest unsettled one.
    out: Vec<Receipt>,
}

impl World {
    fn new() -> Self {
        let mut state = State::default();
        let epoch = state.begin(Arc::from("t"), 0, Begins::At(0), Log::default());
        Self { state, epoch: Some(epoch), is_ours: true, naive: Naive::default(), next: 0, committed: 0, out: Vec::new() }
    }

    fn happens(&mut self, event: &Event) -> Result<(), TestCaseError> {
        match *event {
            Event::Read { count, gap } => {
                let (mut records, next) = (Vec::new(), self.next);
                for _ in 0..count {
                    self.next += i64::from(gap);
                    // What was read of it before it went is not taken in.
                    if self.is_ours {
                        self.naive.settled.insert(self.next, false);
                    }
                    records.push(record(self.next));
                    self.next += 1;
                }
                self.state.take_in(records);
                self.next = if self.is_ours { self.next } else { next };
            }
            Event::HandOut => {
                let (mut incoming, all) = (Vec::new(), Limit { count: usize::MAX, bytes: usize::MAX });
                self.state.hand_out(all, usize::MAX, &mut incoming, &mut Vec::new());
                for it in incoming {
                    if let Incoming::Delivery(delivery) = it {
                        self.out.push(delivery.receipt);
                    }
                }
            }
            Event::Accept { back } => {
                let Some(index) = self.out.len().checked_sub(1 + usize::from(back)) else { return Ok(()) };
                // It stays: it may be settled again, and that is to change nothing.
                let receipt = &self.out[index];
                let fate = self.state.accept(receipt);
                prop_assert_eq!(fate, if Some(receipt.epoch) == self.epoch { Fate::Counted } else { Fate::Stale });
                if fate == Fate::Counted {
                    self.naive.settled.insert(receipt.position as i64, true);
                }
            }
            Event::Commit => self.commit()?,
            Event::Pass { beyond } => {
                let known = self.state.assigned.values().all(|it| it.read_to == ReadTo::Known);
                self.state.reached("t", 0, Some(self.next + i64::from(beyond)));
                if self.is_ours && known && !self.naive.settled.is_empty() {
                    self.naive.passed = self.next + i64::from(beyond);
                    self.next = self.naive.passed;
                }
            }
            Event::Revoke => {
                let epochs = self.state.revoke(&[("t".to_owned(), 0)]);
                prop_assert_eq!(epochs, Vec::from_iter(self.epoch));
                self.is_ours = false;
            }
            Event::Forget { lost } => {
                let Some(epoch) = self.epoch.filter(|_| !self.is_ours) else { return Ok(()) };
                if !lost {
                    self.commit()?;
                }
                self.state.forget(&[epoch]);
                self.epoch = None;
                self.naive = Naive::default();
                prop_assert_eq!(self.state.commits(), []);
            }
            Event::Assign => {
                if self.epoch.is_some() {
                    return Ok(());
                }
                self.epoch = Some(self.state.begin(Arc::from("t"), 0, Begins::At(self.committed), Log::default()));
                (self.is_ours, self.naive, self.next) = (true, Naive::default(), self.committed);
            }
            Event::Cut => {
                // Nothing was read, or only the first offset: that is no log that begins anew.
                if !self.is_ours || self.naive.settled.keys().next_back().is_none_or(|last| *last == 0) {
                    return Ok(());
                }
                self.state.take_in(vec![record(0)]);
                self.epoch = Some(self.state.last_epoch);
                self.naive = Naive { settled: BTreeMap::from([(0, false)]), passed: 0 };
                (self.next, self.committed) = (1, 0);
            }
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), TestCaseError> {
        let commits = self.state.commits();
        let expected = self.naive.committable();
        if let Some(commit) = commits.first() {
            prop_assert_eq!(Some(commit.offset), expected);
            prop_assert!(commit.offset >= self.committed, "{} after {}", commit.offset, self.committed);
            self.committed = commit.offset;
        }
        prop_assert_eq!(commits.len() <= 1, true);
        // What is not committed now is not above what was.
        prop_assert!(expected.is_none_or(|expected| expected == self.committed), "{expected:?} was left out at {}", self.committed);
        Ok(())
    }
}

fn record(offset: i64) -> Record {
    Record { topic: Arc::from("t"), partition: 0, offset, sent_at: None, key: None, headers: Headers::default(), body: "x".into() }
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
