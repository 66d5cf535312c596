//! Whether a consumer state messages, for those who ask from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a consumer state messages at this moment: for a readiness probe. Clones share it.
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
pub(crate) enum ReadinessState {
    Ready,
    NotReady,
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

    pub(crate) fn set(&self, state: ReadinessState) {
        self.0
            .store(state == ReadinessState::Ready, Ordering::Relaxed);
    }
}

/// Tells that nothing is taken any more when it is dropped, however the consumer ends.
pub(crate) struct NotReadyOnDrop(pub(crate) Readiness);

impl Drop for NotReadyOnDrop {
    fn drop(&mut self) {
        self.0.set(ReadinessState::NotReady);
    }
}
