//! Which deliveries run apart from all others, because one of them may be the one that crashes the
//! process.

use std::collections::VecDeque;

use crate::lifecycle::Isolation;
use crate::slots::Slot;

/// The suspects, which are deliveries that at least two processes crashed with: those that run apart
/// from all others, and those that wait for it.
///
/// While any run apart, no other delivery is claimed, so that a crash is counted for these alone.
/// A process that crashes with n deliveries in flight leaves n suspects. After two crashes they run
/// in groups of √n. After three, the first one runs alone, and each group that finishes doubles the
/// size of the next: n suspects take the time of about log₂ n handlers if none of them crashes.
#[derive(Debug)]
pub(super) struct Suspects {
    /// Those that may claim and run.
    admitted: Vec<(Slot, Isolation)>,
    /// Those that wait. They hold no claim.
    waiting: VecDeque<Slot>,
    /// The maximum size of a group after two crashes.
    group: usize,
    /// The maximum size of a group after more crashes.
    growing_group: usize,
    /// How many suspects have finished since `growing_group` was raised.
    finished: usize,
}

impl Suspects {
    pub(super) fn new(max_in_flight: usize) -> Self {
        Self {
            admitted: Vec::new(),
            waiting: VecDeque::new(),
            group: max_in_flight.isqrt().max(1),
            growing_group: 1,
            finished: 0,
        }
    }

    /// Whether any delivery runs apart from the others.
    pub(super) fn any(&self) -> bool {
        !self.admitted.is_empty()
    }

    /// Those that may claim and run.
    pub(super) fn admitted(&self) -> impl Iterator<Item = Slot> {
        self.admitted.iter().map(|(slot, _)| *slot)
    }

    /// How many are admitted or wait. `still_waits` tells whether a delivery that waited still does.
    pub(super) fn count(&self, still_waits: impl Fn(Slot) -> bool) -> usize {
        let waiting = self.waiting.iter().filter(|slot| still_waits(**slot));
        self.admitted.len() + waiting.count()
    }

    /// Whether this delivery may not be claimed now.
    pub(super) fn exclude(&self, slot: Slot) -> bool {
        self.any() && !self.admitted().any(|it| it == slot)
    }

    /// Admits a delivery, if those that are admitted permit it.
    pub(super) fn admit(&mut self, slot: Slot, isolation: Isolation) -> bool {
        let others = self.admitted.iter().filter(|(it, _)| *it != slot);
        let limit = others
            .clone()
            .map(|(_, isolation)| self.limit(*isolation))
            .fold(self.limit(isolation), usize::min);
        let fits = others.count() < limit;
        if fits {
            self.admitted.retain(|(it, _)| *it != slot);
            self.admitted.push((slot, isolation));
        }
        fits
    }

    /// The maximum size of a group that includes such a suspect.
    fn limit(&self, isolation: Isolation) -> usize {
        match isolation {
            Isolation::Group => self.group.max(self.growing_group),
            Isolation::GrowingGroup => self.growing_group,
            Isolation::Alone => 1,
        }
    }

    /// Lets a delivery wait until those that are admitted have ended.
    pub(super) fn wait(&mut self, slot: Slot) {
        self.waiting.push_back(slot);
    }

    /// The first that waits.
    pub(super) fn first_waiting(&self) -> Option<Slot> {
        self.waiting.front().copied()
    }

    /// Removes the first that waits.
    pub(super) fn pop_waiting(&mut self) {
        self.waiting.pop_front();
    }

    /// Removes a delivery from the admitted ones. Returns whether it was one.
    pub(super) fn remove(&mut self, slot: Slot) -> bool {
        let before = self.admitted.len();
        self.admitted.retain(|(it, _)| *it != slot);
        if self.admitted.len() == before {
            return false;
        }
        self.finished += 1;
        if self.finished == self.growing_group {
            self.growing_group = self.growing_group.saturating_mul(2);
            self.finished = 0;
        }
        true
    }
}
