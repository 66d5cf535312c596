//! A counter of effects.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};

use oncegate_core::internal::Lock;

/// Counts the effects of a handler by id. Use it instead of the database or provider of your
/// handler. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Effects(Arc<Lock<BTreeMap<String, usize>>>);

impl Effects {
    /// Counts one effect of this id.
    pub fn happened(&self, id: &str) {
        *self.lock().entry(id.to_owned()).or_default() += 1;
    }

    /// The number of effects of this id.
    pub fn count(&self, id: &str) -> usize {
        self.lock().get(id).copied().unwrap_or_default()
    }

    /// The number of effects of all ids.
    pub fn total(&self) -> usize {
        self.lock().values().sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock()
    }
}
