//! A transaction of an inbox, on the thread of its connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use oncegate_core::StoreError;
use oncegate_core::inbox::{BatchTransaction, CommitError};
use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::store::BoxError;
use rusqlite::{DropBehavior, ErrorCode, Transaction};
use tokio::sync::oneshot;

use super::clock::ClockReading;
use super::failure::{FailureStage, StoreFailure};
use super::inbox::SqliteTransaction;
use super::marker_table::MarkerTable;
use super::windows;
use super::writer_thread::{BegunTransaction, OpenWriter};

/// How many rows a transaction scans for expired ones, for each message. At least 2, so that they
/// are scanned faster than they are inserted.
const ROWS_TO_SCAN: u32 = 4;

/// A request for a transaction that records these claims.
#[derive(Debug)]
pub(crate) struct BeginRequest {
    pub(crate) claims: Vec<Operation>,
    pub(crate) longest_run: Duration,
    pub(crate) reply: BeginReply,
}

/// Receives the transaction, or the verdicts if no claim was granted.
pub(crate) type BeginReply =
    oneshot::Sender<Result<BatchTransaction<SqliteTransaction>, StoreFailure>>;

/// A closure of the handler, which also sends its result to the caller.
/// Returns false if it panicked and the caller has stopped waiting.
pub(crate) type HandlerCall = Box<dyn FnOnce(&mut Transaction<'_>) -> bool + Send>;

/// A request to the thread while it executes a transaction. If the sender is dropped, the
/// transaction is rolled back.
pub(crate) enum TransactionRequest {
    Call(HandlerCall),
    Commit(oneshot::Sender<Result<(), CommitError>>),
    Rollback(oneshot::Sender<Result<(), CommitError>>),
}

/// Whether a connection can begin another transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionReuse {
    Allowed,
    /// It must be closed.
    Refused,
}

/// An open transaction that has recorded messages.
pub(crate) struct InboxTransaction<'writer> {
    transaction: Transaction<'writer>,
    now: ClockReading,
    writer: OpenWriter<'writer>,
    /// How many rows to scan for expired ones.
    rows_to_scan: u32,
}

impl<'writer> InboxTransaction<'writer> {
    /// Begins a transaction and records the messages whose claims are granted. Returns the verdicts
    /// of the others, too.
    ///
    /// # Errors
    /// Nothing was changed.
    pub(crate) fn begin(
        mut writer: OpenWriter<'writer>,
        claims: &[Operation],
        longest_run: Duration,
    ) -> Result<(Self, Vec<Option<Verdict>>), StoreFailure> {
        writer.file.guard.reset();
        let BegunTransaction {
            transaction,
            now,
            longest_window,
        } = writer.begin()?;
        let window = claims.iter().map(|claim| claim.terms.window).max();
        let time_to_live = window.unwrap_or_default().saturating_add(longest_run);
        let working = writer.config.failure(FailureStage::Working);
        let mut rows = MarkerTable::new(&transaction, writer.recent, now).map_err(&working)?;
        let mut recorded = Vec::with_capacity(claims.len());
        for claim in claims {
            let verdict = rows.record(claim, time_to_live).map_err(&working)??;
            recorded.push(match verdict {
                Verdict::Granted(_) => None,
                verdict => Some(verdict),
            });
        }
        drop(rows);
        windows::record(&transaction, time_to_live, longest_window).map_err(&working)?;
        let begun = Self {
            transaction,
            now,
            writer,
            rows_to_scan: ROWS_TO_SCAN.saturating_mul(claims.len().try_into().unwrap_or(u32::MAX)),
        };
        Ok((begun, recorded))
    }

    /// Hands the transaction to the caller, and executes its requests until the transaction has
    /// ended.
    pub(crate) fn execute(
        mut self,
        recorded: Vec<Option<Verdict>>,
        reply: BeginReply,
    ) -> ConnectionReuse {
        let (sender, requests) = channel();
        let is_ended = Arc::new(AtomicBool::new(false));
        let interrupt = self.transaction.get_interrupt_handle();
        let caller = SqliteTransaction::new(sender, interrupt, is_ended.clone());
        // If the caller has stopped waiting, `caller` is dropped, and the first receive fails.
        let _ = reply.send(Ok(BatchTransaction {
            transaction: Some(caller),
            recorded,
        }));
        loop {
            match requests.recv() {
                Ok(TransactionRequest::Call(_)) if is_ended.load(Ordering::Acquire) => {}
                Ok(TransactionRequest::Call(call)) => {
                    self.writer.file.guard.set_running(true);
                    if !call(&mut self.transaction) {
                        self.writer.file.guard.set_must_roll_back();
                    }
                    self.writer.file.guard.set_running(false);
                }
                Ok(TransactionRequest::Commit(reply)) => {
                    let (state, committed) = self.commit();
                    let _ = reply.send(committed); // fails if the caller has stopped waiting
                    return state;
                }
                Ok(TransactionRequest::Rollback(reply)) => {
                    let misuse = self.misuse();
                    let state = self.roll_back();
                    let _ = reply.send(misuse.map_or(Ok(()), Err));
                    return state;
                }
                Err(_) => return self.roll_back(),
            }
        }
    }

    fn commit(mut self) -> (ConnectionReuse, Result<(), CommitError>) {
        if let Some(misuse) = self.misuse() {
            return (self.roll_back(), Err(misuse));
        }
        if self.transaction.is_autocommit() || self.writer.file.guard.must_roll_back() {
            let text = "a statement of the handler failed, SQLite rolled back the transaction, and the handler returned Ok: return the error";
            return (self.roll_back(), Err(CommitError::RolledBack(text.into())));
        }
        let committed = self
            .delete_expired()
            .and_then(|()| self.transaction.execute_batch("COMMIT"));
        let Err(error) = committed else {
            return (ConnectionReuse::Allowed, Ok(()));
        };
        // By a violated constraint or an unfinished statement. After another error, the log may
        // contain the transaction, and whether it is committed is decided by the next transaction.
        let is_of_handler = matches!(
            error.sqlite_error_code(),
            Some(ErrorCode::ConstraintViolation | ErrorCode::DatabaseBusy)
        );
        let failure = self.writer.config.failure(FailureStage::Committing)(error);
        let cause = BoxError::from(StoreError::from(failure));
        self.roll_back();
        let error = match is_of_handler {
            true => CommitError::RolledBack(cause),
            false => CommitError::Unknown(cause),
        };
        (ConnectionReuse::Refused, Err(error))
    }

    /// Deletes some expired rows.
    fn delete_expired(&mut self) -> rusqlite::Result<()> {
        let sweep = &mut *self.writer.sweep;
        let range = sweep.scan(&self.transaction, self.rows_to_scan, self.now)?;
        sweep.delete_expired(&self.transaction, &range, self.now)?;
        sweep.advance(range); // a range that is not committed is scanned again in the next cycle
        Ok(())
    }

    /// Rolls back the transaction, unless SQLite has done so.
    pub(crate) fn roll_back(mut self) -> ConnectionReuse {
        // A handler may have set another one.
        self.transaction.set_drop_behavior(DropBehavior::Rollback);
        match self.transaction.finish() {
            Ok(()) => ConnectionReuse::Allowed,
            Err(_) => ConnectionReuse::Refused,
        }
    }

    /// The error for a handler that tried to end the transaction.
    fn misuse(&self) -> Option<CommitError> {
        let text = "the handler executed BEGIN, COMMIT, ROLLBACK or ATTACH, and nothing was committed: the consumer ends the transaction; \
            for a part of it, use a savepoint";
        let has_misused = self.writer.file.guard.has_misused_transaction();
        has_misused.then(|| CommitError::EndedByHandler(text.into()))
    }
}
