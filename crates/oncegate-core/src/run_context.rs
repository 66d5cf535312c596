//! What one run of a handler shares with its inbox. With an inbox, the transaction of a run is that
//! of its message alone, or that of a batch of messages.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::id::Scope;
use crate::internal::Lock;

/// The scope and the handler timeout of one run, and whether a timeout is the fault of its handler.
#[derive(Debug)]
pub struct RunContext {
    scope: Scope,
    longest_run: Duration,
    /// Whether the run waits until a transaction begins or commits, or for its batch. A timeout then
    /// counts as an unavailable database, not as an unknown outcome.
    waits_for_database: AtomicBool,
    /// When the handler of this message alone began, if it runs.
    handler_began: Lock<Option<Instant>>,
    /// Whether a batch that failed has used a part of the timeout of this run, so that a timeout
    /// does not mean that its handler takes too long.
    timeout_shared: AtomicBool,
}

impl RunContext {
    pub(crate) fn new(scope: &Scope, longest_run: Duration) -> Self {
        Self {
            scope: scope.clone(),
            longest_run,
            waits_for_database: AtomicBool::new(false),
            handler_began: Lock::default(),
            timeout_shared: AtomicBool::new(false),
        }
    }

    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }

    pub(crate) fn longest_run(&self) -> Duration {
        self.longest_run
    }

    pub(crate) fn set_waits_for_database(&self, waits: bool) {
        *self.handler_began.lock() = (!waits).then(Instant::now);
        self.waits_for_database.store(waits, Ordering::Relaxed);
    }

    pub(crate) fn set_timeout_shared(&self) {
        self.timeout_shared.store(true, Ordering::Relaxed);
    }

    /// Whether a timeout now is not the fault of the handler: the run waits for the database, has
    /// waited for so long that the handler had less than a quarter of the timeout, or a batch that
    /// failed has used a part of it.
    pub(crate) fn waits_for_database(&self) -> bool {
        let began = *self.handler_began.lock();
        self.waits_for_database.load(Ordering::Relaxed)
            || self.timeout_shared.load(Ordering::Relaxed)
            || began.is_some_and(|began| began.elapsed() < self.longest_run / 4)
    }
}
