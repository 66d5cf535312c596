//! Which deliveries are handled one after the other, by their ordering key.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashMap;

use crate::message::Position;
use crate::slots::Slot;
use crate::source::{Delivery, Order};

/// The queue of each ordering key. A delivery holds its key from its receipt to its settlement; the
/// next one of that key waits.
#[derive(Debug)]
pub(crate) struct Lanes {
    order: Order,
    hasher: RandomState,
    waiting: HashMap<Lane, VecDeque<Slot>>,
}

/// The hash of an ordering key. Keys with the same hash wait for each other, which is harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lane(u64);

impl Lanes {
    pub(crate) fn new(order: Order) -> Self {
        Self {
            order,
            hasher: RandomState::new(),
            waiting: HashMap::new(),
        }
    }

    /// The ordering key of a delivery; `None` if it is unordered.
    pub(crate) fn of(&self, delivery: &Delivery) -> Option<Lane> {
        let origin = &delivery.message.origin;
        match (self.order, origin.position) {
            (Order::Unordered, _) => None,
            (Order::ByKey, _) => delivery
                .message
                .key
                .as_ref()
                .map(|key| Lane(self.hasher.hash_one((&*origin.name, &key[..])))),
            (Order::ByPartition, Position::Offset { partition, .. }) => {
                Some(Lane(self.hasher.hash_one((&*origin.name, partition))))
            }
            (Order::ByPartition, Position::Queue) => {
                Some(Lane(self.hasher.hash_one(&*origin.name)))
            }
        }
    }

    /// Takes the ordering key for a delivery, or queues the delivery behind the one that holds it.
    pub(crate) fn enter(&mut self, lane: Lane, slot: Slot) -> Turn {
        match self.waiting.entry(lane) {
            hashbrown::hash_map::Entry::Vacant(free) => {
                free.insert(VecDeque::new());
                Turn::Now
            }
            hashbrown::hash_map::Entry::Occupied(mut taken) => {
                taken.get_mut().push_back(slot);
                Turn::Later
            }
        }
    }

    /// Releases an ordering key. Returns the next delivery, which now holds it.
    pub(crate) fn leave(&mut self, lane: Lane) -> Option<Slot> {
        let next = self.waiting.get_mut(&lane)?.pop_front();
        if next.is_none() {
            self.waiting.remove(&lane);
        }
        next
    }

    /// Removes a delivery from the queue of its key. Returns whether it was queued.
    pub(crate) fn withdraw(&mut self, lane: Lane, slot: Slot) -> Waited {
        let Some(waiting) = self.waiting.get_mut(&lane) else {
            return Waited::No;
        };
        let Some(place) = waiting.iter().position(|it| *it == slot) else {
            return Waited::No;
        };
        waiting.remove(place);
        Waited::Yes
    }
}

/// Whether a delivery may proceed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It holds its ordering key.
    Now,
    /// Another delivery holds the key.
    Later,
}

/// Whether a delivery was queued.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// It was queued, and is removed.
    Yes,
    /// It holds its key, or has none.
    No,
}
