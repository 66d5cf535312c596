//! Queues of deliveries that have to be handled one after the other, because they have the same
//! ordering key.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashMap;

use crate::message::Position;
use crate::slots::Slot;
use crate::source::{Delivery, Order};

/// The queue of each ordering key. The first delivery of a key holds the key until it is settled;
/// the others wait in the queue, in the order of their receipt.
#[derive(Debug)]
pub(crate) struct OrderingQueues {
    order: Order,
    hasher: RandomState,
    /// The deliveries behind the one that holds the key; no entry for a key that no delivery holds.
    queues: HashMap<OrderingKey, VecDeque<Slot>>,
}

/// The hash of an ordering key. Deliveries whose keys have the same hash wait for each other even
/// if the keys differ; the order within each key is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OrderingKey(u64);

impl OrderingQueues {
    pub(crate) fn new(order: Order) -> Self {
        Self {
            order,
            hasher: RandomState::new(),
            queues: HashMap::new(),
        }
    }

    /// The ordering key of a delivery; `None` if it is unordered.
    pub(crate) fn of(&self, delivery: &Delivery) -> Option<OrderingKey> {
        let origin = &delivery.message.origin;
        match (self.order, origin.position) {
            (Order::Unordered, _) => None,
            (Order::ByKey, _) => delivery
                .message
                .key
                .as_ref()
                .map(|key| OrderingKey(self.hasher.hash_one((&*origin.name, &key[..])))),
            (Order::ByPartition, Position::Offset { partition, .. }) => Some(OrderingKey(
                self.hasher.hash_one((&*origin.name, partition)),
            )),
            (Order::ByPartition, Position::Queue) => {
                Some(OrderingKey(self.hasher.hash_one(&*origin.name)))
            }
        }
    }

    /// Gives the ordering key to a delivery, or queues the delivery if another one holds the key.
    pub(crate) fn acquire(&mut self, key: OrderingKey, slot: Slot) -> KeyState {
        match self.queues.entry(key) {
            hashbrown::hash_map::Entry::Vacant(free) => {
                free.insert(VecDeque::new());
                KeyState::Acquired
            }
            hashbrown::hash_map::Entry::Occupied(mut taken) => {
                taken.get_mut().push_back(slot);
                KeyState::Queued
            }
        }
    }

    /// Passes an ordering key on after its holder was settled. Returns the next delivery of its
    /// queue, which now holds the key.
    pub(crate) fn pass_on(&mut self, key: OrderingKey) -> Option<Slot> {
        let next = self.queues.get_mut(&key)?.pop_front();
        if next.is_none() {
            self.queues.remove(&key);
        }
        next
    }

    /// Removes a delivery from the queue of its key, if it is queued.
    pub(crate) fn remove_queued(&mut self, key: OrderingKey, slot: Slot) -> WasQueued {
        let Some(queue) = self.queues.get_mut(&key) else {
            return WasQueued::No;
        };
        let Some(index) = queue.iter().position(|queued| *queued == slot) else {
            return WasQueued::No;
        };
        queue.remove(index);
        WasQueued::Yes
    }
}

/// Whether a delivery holds its ordering key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum KeyState {
    /// It holds its ordering key.
    Acquired,
    /// Another delivery holds the key.
    Queued,
}

/// Whether a delivery was queued.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WasQueued {
    /// It was queued, and was removed from the queue.
    Yes,
    /// It was not queued: it holds its key.
    No,
}
