//! How often something happened.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts by id what a handler did to the world: put one where your handler's database or provider
/// is. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Effects(Arc<Mutex<BTreeMap<String, usize>>>);

impl Effects {
    /// The effect of this id happened, once more.
    pub fn happened(&self, id: &str) {
        *self.lock().entry(id.to_owned()).or_default() += 1;
    }

    /// How often the effect of this id happened.
    pub fn count(&self, id: &str) -> usize {
        self.lock().get(id).copied().unwrap_or_default()
    }

    /// How many effects there were, of all ids.
    pub fn total(&self) -> usize {
        self.lock().values().sum()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
