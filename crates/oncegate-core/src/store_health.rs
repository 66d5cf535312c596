//! Whether the store of a consumer is available, as its status reports it.

use std::time::{Duration, Instant};

use crate::store::StoreError;

/// The state of a consumer's store, derived from the operations of its messages: the consumer sends
/// no additional requests for it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreSnapshot {
    /// The store and its address, from [`Store::described`](crate::Store::described): without
    /// secrets.
    pub name: String,
    /// Whether the store is available.
    pub state: StoreState,
    /// The last error of the store since the consumer started.
    pub last_error: Option<LastStoreError>,
}

/// Whether a store is available, by the last batch of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreState {
    /// No batch was sent yet: the consumer has just started.
    Unused,
    /// The store answered the last batch.
    Available {
        /// How long ago the store answered. Without messages no operations are sent, so this grows.
        last_answer: Duration,
    },
    /// The store did not answer the last batch. The consumer retries a few times a second, as long
    /// as deliveries wait for the store.
    Unavailable {
        /// How long ago the first unanswered batch failed.
        elapsed: Duration,
    },
}

/// The last error of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LastStoreError {
    /// How long ago it occurred.
    pub elapsed: Duration,
    /// The text of the error, as in the log.
    pub text: String,
}

/// The last answer and the last error of a store, each with its time.
#[derive(Debug)]
pub(crate) struct StoreHealth {
    name: String,
    answered: Option<Instant>,
    unavailable_since: Option<Instant>,
    error: Option<(Instant, String)>,
}

impl StoreHealth {
    /// A store to which no batch was sent yet.
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            answered: None,
            unavailable_since: None,
            error: None,
        }
    }

    pub(crate) fn answered(&mut self, now: Instant) {
        (self.answered, self.unavailable_since) = (Some(now), None);
    }

    pub(crate) fn not_answered(&mut self, now: Instant) {
        self.unavailable_since.get_or_insert(now);
    }

    /// One operation failed; others of the same batch may have succeeded.
    pub(crate) fn failed(&mut self, error: &StoreError, now: Instant) {
        self.error = Some((now, error.to_string()));
    }

    pub(crate) fn snapshot(&self, now: Instant) -> StoreSnapshot {
        let elapsed_since = |at: Instant| now.saturating_duration_since(at);
        let state = match (self.unavailable_since, self.answered) {
            (Some(since), _) => StoreState::Unavailable {
                elapsed: elapsed_since(since),
            },
            (None, Some(last)) => StoreState::Available {
                last_answer: elapsed_since(last),
            },
            (None, None) => StoreState::Unused,
        };
        let last_error = self.error.as_ref().map(|(at, text)| LastStoreError {
            elapsed: elapsed_since(*at),
            text: text.clone(),
        });
        StoreSnapshot {
            name: self.name.clone(),
            state,
            last_error,
        }
    }
}
