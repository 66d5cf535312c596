//! Which deliveries run apart from all others, because one of them may be the one that crashes the
//! process.

use std::collections::VecDeque;

use crate::lifecycle::Isolation;
use crate::slots::Slot;

/// The deliveries that run apart from all others, and those that wait for it.
///
/// While there are any, no other delivery is claimed, so that a crash is counted for these alone.
/// A process that crashes with n deliveries in flight leaves n suspects. In groups of √n, all of
/// them are finished in the time of about 2√n handlers: one crash of the group that has the cause
/// separates it from all others.
#[derive(Debug)]
pub(super) struct Suspects {
    /// Those that may claim and run.
    admitted: Vec<Slot>,
    /// Whether the admitted one runs alone.
    alone: bool,
    /// Those that wait. They hold no claim.
    waiting: VecDeque<Slot>,
    /// The maximum number of deliveries in a group.
    group: usize,
}

impl Suspects {
    pub(super) fn new(max_in_flight: usize) -> Self {
        Self {
            admitted: Vec::new(),
            alone: false,
            waiting: VecDeque::new(),
            group: max_in_flight.isqrt().max(1),
        }
    }

    /// Whether any delivery runs apart from the others.
    pub(super) fn any(&self) -> bool {
        !self.admitted.is_empty()
    }

    /// Those that may claim and run.
    pub(super) fn admitted(&self) -> &[Slot] {
        &self.admitted
    }

    /// Whether this delivery may not be claimed now.
    pub(super) fn exclude(&self, slot: Slot) -> bool {
        self.any() && !self.admitted.contains(&slot)
    }

    /// Admits a delivery, if those that are admitted permit it.
    pub(super) fn admit(&mut self, slot: Slot, isolation: Isolation) -> bool {
        let others = self.admitted.iter().filter(|it| **it != slot).count();
        let fits = match isolation {
            Isolation::Alone => others == 0,
            Isolation::Group => others == 0 || (!self.alone && others < self.group),
        };
        if fits {
            self.alone = isolation == Isolation::Alone;
            if self.admitted.len() == others {
                self.admitted.push(slot);
            }
        }
        fits
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
        self.admitted.retain(|it| *it != slot);
        self.admitted.len() < before
    }
}
