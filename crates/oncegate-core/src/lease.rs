//! A claim that is held: how long for, and who keeps it alive.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::id::Key;
use crate::marker::{Ask, Operation, Terms, Token};

/// One claim that was granted, shared by the loop, the handler's guard and the renewals.
///
/// Its deadline is measured from the moment the claim, or its last renewal that succeeded, was *sent*.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) attempt: u32,
    pub(crate) terms: Terms,
    /// No renewal after this: nothing is held for ever.
    pub(crate) ends: Instant,
    /// Microseconds since [`base`]; 0 once lost.
    deadline: AtomicU64,
}

impl Lease {
    pub(crate) fn new(operation: &Operation, attempt: u32, sent: Instant, ends: Instant) -> Self {
        let lease =
            Self { key: operation.key.clone(), token: operation.token, attempt, terms: operation.terms, ends, deadline: AtomicU64::new(1) };
        lease.extend(sent);
        lease
    }

    /// Counts the lease from `sent`, unless it was lost.
    pub(crate) fn extend(&self, sent: Instant) {
        let deadline = micros(sent + self.terms.lease);
        let _ = self.deadline.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| (old != 0).then(|| old.max(deadline)));
    }

    pub(crate) fn lose(&self) {
        self.deadline.store(0, Ordering::Release);
    }

    pub(crate) fn lives(&self, now: Instant) -> bool {
        micros(now) < self.deadline.load(Ordering::Acquire)
    }

    pub(crate) fn remaining(&self) -> Duration {
        Duration::from_micros(self.deadline.load(Ordering::Acquire).saturating_sub(micros(Instant::now())))
    }

    pub(crate) fn renewal(&self) -> Operation {
        Operation { key: self.key.clone(), ask: Ask::Renew, token: self.token, attempt: self.attempt, terms: self.terms }
    }
}

fn base() -> Instant {
    static BASE: OnceLock<Instant> = OnceLock::new();
    // One second back, so that no deadline is 0.
    *BASE.get_or_init(|| Instant::now().checked_sub(Duration::from_secs(1)).unwrap_or_else(Instant::now))
}

fn micros(at: Instant) -> u64 {
    at.saturating_duration_since(base()).as_micros() as u64
}
