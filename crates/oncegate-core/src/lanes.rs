//! What is handled one after the other.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashMap;

use crate::message::Position;
use crate::slots::Slot;
use crate::source::{Delivery, Order};

/// Which deliveries wait for which. A lane is held from the delivery's arrival to its settlement.
#[derive(Debug)]
pub(crate) struct Lanes {
    order: Order,
    hasher: RandomState,
    waiting: HashMap<Lane, VecDeque<Slot>>,
}

/// Two keys that share a hash share a lane: they wait for each other, and nothing else changes.
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

    /// The lane of a delivery; `None` if it waits for nobody.
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

    /// Enters a lane; whether it was free. If not, the slot waits its turn.
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

    /// Leaves a lane; the slot whose turn it is now.
    pub(crate) fn leave(&mut self, lane: Lane) -> Option<Slot> {
        let next = self.waiting.get_mut(&lane)?.pop_front();
        if next.is_none() {
            self.waiting.remove(&lane);
        }
        next
    }

    /// Takes a slot that waits out of its lane; whether it waited there.
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

/// Whose turn it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The lane was free.
    Now,
    /// Another delivery is in it.
    Later,
}

/// Whether a slot waited in a lane.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// It did, and does not any more.
    Yes,
    /// It holds the lane, or never entered it.
    No,
}
