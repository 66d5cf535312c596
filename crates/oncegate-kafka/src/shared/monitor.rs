//! The lock that the state stands behind, and what wakes whoever waits for it to change.

use std::ops::DerefMut;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::State;

/// A lock around the state, and a condition to wait for: those of the standard library, or those of
/// a tool that tries many orders of threads.
pub(crate) trait Monitor: Default {
    /// The state, for as long as it is locked.
    type Guard<'a>: DerefMut<Target = State>
    where
        Self: 'a;

    fn lock(&self) -> Self::Guard<'_>;

    /// Gives the lock back until it is notified, or for so long.
    fn wait<'a>(&'a self, guard: Self::Guard<'a>, bound: Duration) -> Self::Guard<'a>;

    fn notify(&self);
}

/// That of the standard library.
#[derive(Default)]
pub(crate) struct Threads {
    state: Mutex<State>,
    changed: Condvar,
}

impl Monitor for Threads {
    type Guard<'a> = MutexGuard<'a, State>;

    fn lock(&self) -> Self::Guard<'_> {
        // A panic under this lock is a defect; what it leaves commits less, never more: go on.
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
