//! Prevents statements of handlers from ending their transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::Connection;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};

/// Prevents statements of handlers from ending the transaction of an inbox or committing anything
/// outside of it. Does not affect other statements of the connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct HandlerGuard(Arc<HandlerState>);

/// Read and written by the thread of the connection only.
#[derive(Debug, Default)]
struct HandlerState {
    /// Whether a statement is one of the handler.
    is_running: AtomicBool,
    has_misused_transaction: AtomicBool,
    /// Whether the transaction was rolled back during a statement of the handler, or must be.
    must_roll_back: AtomicBool,
}

impl HandlerGuard {
    /// A guard of this connection.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn install(connection: &Connection) -> rusqlite::Result<Self> {
        let guard = Self::default();
        let (authorizer, committer) = (guard.clone(), guard.clone());
        connection.authorizer(Some(move |context: AuthContext<'_>| {
            authorizer.authorize(context.action)
        }))?;
        // After some errors, such as a full disk, SQLite rolls back the whole transaction. It would
        // then commit each further statement of the handler. This turns the commit into a rollback.
        connection.commit_hook(Some(move || committer.is_running()))?;
        // A savepoint after such an error would begin another transaction, without the record.
        let state = guard.clone();
        connection.rollback_hook(Some(move || {
            if state.is_running() {
                state.set_must_roll_back();
            }
        }))?;
        Ok(guard)
    }

    /// Refuses statements that begin, commit or roll back a transaction, and those that attach a
    /// database, whose rows a crash may separate from the record. Savepoints are not affected.
    fn authorize(&self, action: AuthAction<'_>) -> Authorization {
        match action {
            AuthAction::Transaction { .. } | AuthAction::Attach { .. } if self.is_running() => {
                self.0
                    .has_misused_transaction
                    .store(true, Ordering::Relaxed);
                Authorization::Deny
            }
            _ => Authorization::Allow,
        }
    }

    /// Whether the following statements are those of the handler.
    pub(crate) fn set_running(&self, is_running: bool) {
        self.0.is_running.store(is_running, Ordering::Relaxed);
    }

    fn is_running(&self) -> bool {
        self.0.is_running.load(Ordering::Relaxed)
    }

    /// Prepares for another transaction.
    pub(crate) fn reset(&self) {
        self.set_running(false);
        self.0.must_roll_back.store(false, Ordering::Relaxed);
        self.0
            .has_misused_transaction
            .store(false, Ordering::Relaxed);
    }

    /// Prevents the commit of the transaction.
    pub(crate) fn set_must_roll_back(&self) {
        self.0.must_roll_back.store(true, Ordering::Relaxed);
    }

    /// Whether SQLite rolled back the transaction during a statement of the handler, or a closure
    /// panicked whose caller had stopped waiting.
    pub(crate) fn must_roll_back(&self) -> bool {
        self.0.must_roll_back.load(Ordering::Relaxed)
    }

    /// Whether the handler has executed a refused statement since the last reset.
    pub(crate) fn has_misused_transaction(&self) -> bool {
        self.0.has_misused_transaction.load(Ordering::Relaxed)
    }
}
