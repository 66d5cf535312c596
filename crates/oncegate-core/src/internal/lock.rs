//! A mutex that ignores poisoning.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mutex that can still be locked after a thread panicked while it held the lock. Use it only for
/// data that is consistent wherever the holder may panic.
#[derive(Debug, Default)]
pub struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits until no other thread holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_can_be_taken_after_a_panic() {
        let lock = Lock::new(1);
        let panicked = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _guard = lock.lock();
                panic!("while the lock is held");
            });
            holder.join().is_err()
        });
        assert!(panicked);
        assert_eq!(*lock.lock(), 1);
    }
}
