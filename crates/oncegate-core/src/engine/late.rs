//! Late completions: completions of messages that were handled without the store while it was
//! unavailable, which are recorded when it is available again.

use std::collections::VecDeque;
use std::time::Instant;

use hashbrown::HashMap;

use crate::clock::now;
use crate::id::Key;
use crate::marker::Operation;

/// Late completions that the store has not confirmed yet. Until then no claim of their ids is sent,
/// because a copy of the message would run again.
#[derive(Debug)]
pub(super) struct LateCompletions {
    /// Unsent operations: claims, and the completions that follow them.
    queue: VecDeque<Operation>,
    /// The number of unconfirmed completions of each id, sent and unsent.
    pending: HashMap<Key, u32>,
    /// When to send the next operations.
    pub(super) due: Instant,
}

/// The maximum number of unsent operations, which bounds their memory in a long outage.
const CAPACITY: usize = 100_000;

impl LateCompletions {
    pub(super) fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            pending: HashMap::new(),
            due: now(),
        }
    }

    /// The number of unsent operations.
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the store has confirmed all late completions, so that no claim has to wait.
    pub(super) fn all_confirmed(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether a claim of this key has to wait for a late completion.
    pub(super) fn must_wait(&self, key: &Key) -> bool {
        !self.all_confirmed() && self.pending.contains_key(key)
    }

    /// Adds the claim of a message that was handled without the store, with the token of its
    /// unanswered claim.
    ///
    /// # Errors
    /// The limit is reached: a redelivery of this message may run again.
    pub(super) fn add(&mut self, claim: Operation) -> Result<(), TooMany> {
        if self.queue.len() >= CAPACITY {
            return Err(TooMany);
        }
        *self.pending.entry(claim.key.clone()).or_default() += 1;
        self.queue.push_back(claim);
        Ok(())
    }

    /// Takes the next operations to send, at most `count`. Their ids stay unconfirmed until
    /// [`LateCompletions::finish`].
    pub(super) fn take(&mut self, count: usize) -> impl Iterator<Item = Operation> {
        self.queue.drain(..count.min(self.queue.len()))
    }

    /// Queues an operation again after an error, or the completion that follows a claim.
    pub(super) fn put_back(&mut self, operation: Operation) {
        self.queue.push_back(operation);
    }

    /// Ends one late completion of this key, after the final answer of the store.
    pub(super) fn finish(&mut self, key: &Key) {
        if let Some(count) = self.pending.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.pending.remove(key);
            }
        }
    }
}

/// The limit of [`LateCompletions`] is reached.
pub(super) struct TooMany;
