//! Completions of deliveries that passed without the gate, for when the store is back.

use std::collections::VecDeque;
use std::time::Instant;

use hashbrown::HashMap;

use crate::id::Key;
use crate::marker::Operation;

/// Completions that the store has not confirmed yet. While one is due for an id, no claim of that
/// id is sent: a copy of its message would run again.
#[derive(Debug)]
pub(super) struct LateCompletions {
    queue: VecDeque<Operation>,
    /// How many there are for each id, those that the store is being asked for among them.
    pending: HashMap<Key, u32>,
    /// When to ask for them again.
    pub(super) due: Instant,
}

/// How many are kept at the most.
const CAPACITY: usize = 100_000;

impl LateCompletions {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            pending: HashMap::new(),
            due: Instant::now(),
        }
    }

    /// How many wait to be asked for.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether no claim has to wait.
    pub(super) fn is_settled(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether a claim of this id has to wait.
    pub(super) fn hold_back(&self, key: &Key) -> bool {
        !self.is_settled() && self.pending.contains_key(key)
    }

    /// Adds the claim of a delivery that passed, with the token of its lost claim.
    ///
    /// # Errors
    /// There are too many: a copy of this message may run again.
    pub(super) fn add(&mut self, claim: Operation) -> Result<(), TooMany> {
        if self.queue.len() >= CAPACITY {
            return Err(TooMany);
        }
        *self.pending.entry(claim.key.clone()).or_default() += 1;
        self.queue.push_back(claim);
        Ok(())
    }

    /// The next ones to ask for, which stay pending until [`LateCompletions::finish`].
    pub(super) fn take(&mut self, count: usize) -> impl Iterator<Item = Operation> {
        self.queue.drain(..count.min(self.queue.len()))
    }

    /// Asks again, or asks for what follows.
    pub(super) fn put_back(&mut self, operation: Operation) {
        self.queue.push_back(operation);
    }

    /// The store has answered for good.
    pub(super) fn finish(&mut self, key: &Key) {
        if let Some(count) = self.pending.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.pending.remove(key);
            }
        }
    }
}

/// No more are kept.
pub(super) struct TooMany;
