//! What a consumer has seen of its store, for those who ask from outside.

use std::time::{Duration, Instant};

use crate::store::StoreError;

/// What a consumer saw of its store when it asked for its messages. Nobody asks a store for this
/// alone.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreSnapshot {
    /// What it is and where, as [`Store::described`](crate::Store::described) says it: without
    /// secrets.
    pub name: String,
    /// Whether it answers.
    pub state: StoreState,
    /// What it said last instead of an answer, however long ago.
    pub last_error: Option<StoreTrouble>,
}

/// Whether a store answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreState {
    /// It was asked nothing yet, or has not said anything yet: the consumer has just started.
    Unasked,
    /// It answered what it was asked last.
    Answers {
        /// How long ago. While no message comes, nobody asks.
        last: Duration,
    },
    /// It did not answer what it was asked last. It is asked again a few times a second, for as
    /// long as anything waits for it.
    Away {
        /// How long ago it first did not.
        since: Duration,
    },
}

/// What a store said instead of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreTrouble {
    /// How long ago.
    pub since: Duration,
    /// As the log has it.
    pub text: String,
}

/// What was seen, with when.
#[derive(Debug)]
pub(crate) struct StoreHealth {
    name: String,
    answered: Option<Instant>,
    away: Option<Instant>,
    error: Option<(Instant, String)>,
}

impl StoreHealth {
    /// Of a store that was asked nothing yet.
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            answered: None,
            away: None,
            error: None,
        }
    }

    pub(crate) fn answered(&mut self, now: Instant) {
        (self.answered, self.away) = (Some(now), None);
    }

    pub(crate) fn silent(&mut self, now: Instant) {
        self.away.get_or_insert(now);
    }

    /// An error instead of one answer; others that were asked for beside it may have come.
    pub(crate) fn failed(&mut self, error: &StoreError, now: Instant) {
        self.error = Some((now, error.to_string()));
    }

    pub(crate) fn snapshot(&self, now: Instant) -> StoreSnapshot {
        let ago = |at: Instant| now.saturating_duration_since(at);
        let state = match (self.away, self.answered) {
            (Some(since), _) => StoreState::Away { since: ago(since) },
            (None, Some(last)) => StoreState::Answers { last: ago(last) },
            (None, None) => StoreState::Unasked,
        };
        let last_error = self.error.as_ref().map(|(at, text)| StoreTrouble {
            since: ago(*at),
            text: text.clone(),
        });
        StoreSnapshot {
            name: self.name.clone(),
            state,
            last_error,
        }
    }
}
