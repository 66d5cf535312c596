//! Selects the deliveries that run in isolation: apart from all that are not suspects.

use std::collections::VecDeque;

use crate::lifecycle::Isolation;
use crate::slots::Slot;

/// The suspects: deliveries of messages during whose handling at least two processes crashed, so
/// that one of them may be the cause. The admitted ones run in isolation, the others wait for that.
///
/// While suspects are admitted, no claim (the write to the store before a handler starts) of another
/// delivery is sent, unless that delivery drains. So a crash counts for the admitted ones, and for
/// handlers that ran before. [`Policy::isolation`](crate::lifecycle::Policy::isolation) selects the
/// size of a suspect's group. After two crashes it is √`max_in_flight`. After more it is 1 at first,
/// and doubles whenever that many suspects have finished, also beyond √`max_in_flight`: n suspects
/// take the time of about log₂ n handlers if no process crashes.
#[derive(Debug)]
pub(super) struct Suspects {
    /// The suspects that may claim and run.
    admitted: Vec<(Slot, Isolation)>,
    /// The suspects that wait until they are admitted. They hold no claim.
    waiting: VecDeque<Slot>,
    /// The maximum size of a group after two crashes, unless `growing_group` is larger.
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

    pub(super) fn has_admitted(&self) -> bool {
        !self.admitted.is_empty()
    }

    /// The suspects that may claim and run.
    pub(super) fn admitted(&self) -> impl Iterator<Item = Slot> {
        self.admitted.iter().map(|(slot, _)| *slot)
    }

    /// How many suspects are admitted or wait. `still_waits` returns whether a delivery that waited
    /// still does.
    pub(super) fn count(&self, still_waits: impl Fn(Slot) -> bool) -> usize {
        let waiting = self.waiting.iter().filter(|slot| still_waits(**slot));
        self.admitted.len() + waiting.count()
    }

    /// Whether this delivery must not be claimed now, because suspects are admitted and it is not
    /// one of them.
    pub(super) fn excludes(&self, slot: Slot) -> bool {
        self.has_admitted() && !self.admitted().any(|admitted| admitted == slot)
    }

    /// Admits a suspect, if fewer others are admitted than the limits of all of them allow. Returns
    /// whether it is admitted.
    pub(super) fn admit(&mut self, slot: Slot, isolation: Isolation) -> bool {
        let others = self
            .admitted
            .iter()
            .filter(|(admitted, _)| *admitted != slot);
        let limit = others
            .clone()
            .map(|(_, isolation)| self.limit(*isolation))
            .fold(self.limit(isolation), usize::min);
        let fits = others.count() < limit;
        if fits {
            self.admitted.retain(|(admitted, _)| *admitted != slot);
            self.admitted.push((slot, isolation));
        }
        fits
    }

    /// The maximum number of suspects that run together with one that has this isolation.
    fn limit(&self, isolation: Isolation) -> usize {
        match isolation {
            Isolation::Group => self.group.max(self.growing_group),
            Isolation::GrowingGroup => self.growing_group,
            Isolation::Alone => 1,
        }
    }

    /// Queues a suspect until the limits admit it.
    pub(super) fn queue(&mut self, slot: Slot) {
        self.waiting.push_back(slot);
    }

    pub(super) fn first_waiting(&self) -> Option<Slot> {
        self.waiting.front().copied()
    }

    pub(super) fn pop_waiting(&mut self) {
        self.waiting.pop_front();
    }

    /// Removes a suspect that has finished. Returns whether the delivery was an admitted suspect.
    pub(super) fn remove(&mut self, slot: Slot) -> bool {
        let before = self.admitted.len();
        self.admitted.retain(|(admitted, _)| *admitted != slot);
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
