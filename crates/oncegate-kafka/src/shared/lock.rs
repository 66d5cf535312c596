//! The lock around the state, and the condition to wait for a change.

use std::ops::DerefMut;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::SourceState;

/// A lock around the state and a condition variable: those of the standard library, or those of
/// shuttle.
pub(crate) trait StateLock: Default {
    /// The guard of the locked state.
    type Guard<'a>: DerefMut<Target = SourceState>
    where
        Self: 'a;

    fn lock(&self) -> Self::Guard<'_>;

    /// Unlocks until it is notified, or for `bound`.
    fn wait<'a>(&'a self, guard: Self::Guard<'a>, bound: Duration) -> Self::Guard<'a>;

    fn notify(&self);
}

/// The standard library's.
#[derive(Default)]
pub(crate) struct StdLock {
    state: Mutex<SourceState>,
    changed: Condvar,
}

impl StateLock for StdLock {
    type Guard<'a> = MutexGuard<'a, SourceState>;

    fn lock(&self) -> Self::Guard<'_> {
        // A panic under this lock is a defect. The state after it commits lower offsets, never
        // higher ones, so the lock stays in use.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, guard: Self::Guard<'a>, bound: Duration) -> Self::Guard<'a> {
        self.changed
            .wait_timeout(guard, bound)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    fn notify(&self) {
        self.changed.notify_one();
    }
}
