//! The settings of the consumer for one run in a transaction.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::id::Scope;

/// The scope and the handler timeout of the consumer for one run in a transaction, and whether the
/// run waits for the database.
#[derive(Debug)]
pub struct RunContext {
    scope: Scope,
    longest_run: Duration,
    /// Whether the run waits until a transaction begins or commits. A timeout then counts as an
    /// unavailable database, not as an unknown outcome.
    waits_for_database: AtomicBool,
}

impl RunContext {
    pub(crate) fn new(scope: &Scope, longest_run: Duration) -> Self {
        Self {
            scope: scope.clone(),
            longest_run,
            waits_for_database: AtomicBool::new(false),
        }
    }

    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }

    pub(crate) fn longest_run(&self) -> Duration {
        self.longest_run
    }

    pub(crate) fn set_waits_for_database(&self, waits: bool) {
        self.waits_for_database.store(waits, Ordering::Relaxed);
    }

    pub(crate) fn waits_for_database(&self) -> bool {
        self.waits_for_database.load(Ordering::Relaxed)
    }
}
