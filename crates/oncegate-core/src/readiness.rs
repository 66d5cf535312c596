//! Whether a consumer takes messages, for those who ask from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a consumer takes messages at this moment: for a readiness probe. Clones share it.
///
/// Not ready before the source is open and the store was found, while the store does not answer,
/// while the consumer drains, and after its end. It changes by itself as soon as the consumer
/// notices.
///
/// ```
/// # use oncegate_core::{Consumer, Readiness};
/// let readiness = Readiness::new();
/// let consumer = Consumer::builder().readiness(readiness.clone());
/// assert!(!readiness.is_ready());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

/// What is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    Messages,
    Nothing,
}

impl Readiness {
    /// Of a consumer that has not started.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether messages are taken.
    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn tell(&self, takes: Takes) {
        self.0.store(takes == Takes::Messages, Ordering::Relaxed);
    }
}

/// Tells that nothing is taken any more when it is dropped, however the consumer ends.
pub(crate) struct Telling(pub(crate) Readiness);

impl Drop for Telling {
    fn drop(&mut self) {
        self.0.tell(Takes::Nothing);
    }
}
