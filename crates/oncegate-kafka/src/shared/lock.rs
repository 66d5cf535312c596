//! The lock around the state, and the condition variable that wakes the polling thread.

use std::ops::DerefMut;
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use super::SourceState;
use oncegate_core::internal::Lock;

/// A lock around the state and a condition variable: those of the standard library, or in tests
/// those of the crate shuttle, which runs threads in many schedules.
pub(crate) trait StateLock: Default {
    /// The guard of the locked state.
    type Guard<'a>: DerefMut<Target = SourceState>
    where
        Self: 'a;

    fn lock(&self) -> Self::Guard<'_>;

    /// Unlocks the state, waits for a notification or for `limit`, and locks it again.
    fn wait<'a>(&'a self, guard: Self::Guard<'a>, limit: Duration) -> Self::Guard<'a>;

    fn notify(&self);
}

/// The lock and condition variable of the standard library.
#[derive(Default)]
pub(crate) struct StdLock {
    state: Lock<SourceState>,
    changed: Condvar,
}

impl StateLock for StdLock {
    type Guard<'a> = MutexGuard<'a, SourceState>;

    fn lock(&self) -> Self::Guard<'_> {
        // A panic while the lock is held is a bug. An event that was applied incompletely can only
        // lower the offset to commit, so the state stays usable.
        self.state.lock()
    }

    fn wait<'a>(&'a self, guard: Self::Guard<'a>, limit: Duration) -> Self::Guard<'a> {
        self.changed
            .wait_timeout(guard, limit)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    fn notify(&self) {
        self.changed.notify_one();
    }
}
