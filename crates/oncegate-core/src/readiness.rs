//! Whether a consumer is ready, for readiness probes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a consumer has connected to its source, its store answers and it does not drain: for a
/// readiness probe. A consumer that receives nothing because its limits are reached is ready. Clones
/// report the same consumer.
///
/// Not ready until the source is connected and the store has answered, while the store is
/// unavailable, while the consumer drains, and after it ends. The consumer updates it as soon as it
/// notices a change.
///
/// ```
/// # use oncegate_core::{Consumer, Readiness};
/// let readiness = Readiness::new();
/// let consumer = Consumer::builder().readiness(readiness.clone());
/// assert!(!readiness.is_ready());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

/// Whether the consumer is ready, as [`Readiness`] defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadinessState {
    Ready,
    NotReady,
}

impl Readiness {
    /// Not ready, until a consumer that was given a clone is ready.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the consumer is ready.
    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, state: ReadinessState) {
        self.0
            .store(state == ReadinessState::Ready, Ordering::Relaxed);
    }
}

/// Sets "not ready" on drop, however the consumer ends.
pub(crate) struct NotReadyOnDrop(pub(crate) Readiness);

impl Drop for NotReadyOnDrop {
    fn drop(&mut self) {
        self.0.set(ReadinessState::NotReady);
    }
}
