//! [`SqliteInbox`]: a transaction of a handler inserts the records (done markers) of its messages.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use oncegate_core::inbox::{BatchTransaction, BeginResult, CommitError};
use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::store::{APPLY_TIMEOUT, BoxError};
use oncegate_core::{Inbox, Persistence, Store, StoreError};
use rusqlite::{InterruptHandle, Transaction};
use tokio::sync::oneshot;

use super::file::FileConfig;
use super::inbox_transaction::{BeginRequest, TransactionRequest};
use super::writer_thread::WriterRequest;
use super::{Sqlite, Synchronous};

/// How long a transaction waits for others, of this and other processes, before it fails.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// How many messages are in flight without batches: one has the transaction, the others wait for it,
/// so that the next one begins at once.
const MAX_TRANSACTIONS: usize = 4;

/// Records messages in the transactions of their handlers, in an SQLite database: the changes of a
/// message are committed exactly once.
///
/// The database may be one that a program has already; the inbox adds tables whose names begin with
/// `oncegate_`, and enables the write-ahead log. A missing file is created; its directory must
/// exist, on a local disk.
///
/// SQLite executes one writing transaction at a time, of all processes. It has the write lock from
/// before the handler starts until the commit, so handlers should be short. Without batches, up to
/// three further messages wait in this process. A transaction that cannot begin within 5 s fails, and its message
/// is handled again; no attempt is counted.
///
/// Expired records are deleted in later transactions.
///
/// ```no_run
/// # use oncegate_core::{Consumer, Context, Failure, FailureExt, IdSource, MemoryBroker, TransactionalHandler};
/// use oncegate_sql::{SqliteInbox, SqliteTransaction};
///
/// struct Book;
///
/// impl TransactionalHandler<SqliteInbox> for Book {
///     type Payload = i64;
///
///     async fn handle(&self, cents: i64, transaction: &mut SqliteTransaction, cx: &Context) -> Result<(), Failure> {
///         let id = cx.id().to_owned();
///         let insert = "INSERT INTO ledger (id, cents) VALUES (?1, ?2)";
///         transaction.call(move |sqlite| sqlite.execute(insert, (id, cents))).await.retry()?;
///         Ok(())
///     }
/// }
///
/// # async fn example(broker: MemoryBroker) -> Result<(), Box<dyn std::error::Error>> {
/// Consumer::builder()
///     .source(broker.source())
///     .inbox(SqliteInbox::file("ledger.db"))
///     .transactional_handler(Book)
///     .id(IdSource::message_id())
///     .run_until(oncegate_core::shutdown_signal())
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SqliteInbox {
    /// Executes the transactions, one after another.
    writer: Sqlite,
    /// Looks up records; does not wait for transactions.
    reader: Sqlite,
}

impl SqliteInbox {
    /// The inbox in this database. Does not open it yet: errors are returned at the start of the
    /// consumer.
    pub fn file(path: impl AsRef<Path>) -> Self {
        Self::with_config(FileConfig {
            shares_database: true,
            ..Sqlite::file(path).0.config.clone()
        })
    }

    /// Which commits a power cut may lose: none, by default. A consumer starts with
    /// [`Synchronous::Normal`] only if a volatile store is allowed, because a power cut then loses
    /// changes of acknowledged messages.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self::with_config(FileConfig {
            synchronous,
            ..self.reader.0.config.clone()
        })
    }

    fn with_config(config: FileConfig) -> Self {
        let writer = FileConfig {
            busy_timeout: LOCK_TIMEOUT,
            ..config.clone()
        };
        Self {
            writer: Sqlite::with_config(writer, LOCK_TIMEOUT),
            reader: Sqlite::with_config(config, APPLY_TIMEOUT),
        }
    }
}

/// The transaction of a message or a batch, with its records. The consumer commits it; if it is
/// dropped, it is rolled back.
pub struct SqliteTransaction {
    requests: Sender<TransactionRequest>,
    interrupt: InterruptHandle,
    /// Set before a rollback: closures that have not begun are skipped.
    is_ended: Arc<AtomicBool>,
    /// Whether a closure may be running.
    is_calling: bool,
}

impl SqliteTransaction {
    pub(super) fn new(
        requests: Sender<TransactionRequest>,
        interrupt: InterruptHandle,
        is_ended: Arc<AtomicBool>,
    ) -> Self {
        Self {
            requests,
            interrupt,
            is_ended,
            is_calling: false,
        }
    }

    /// Calls a closure with the transaction, on the thread of its connection, and returns its
    /// result. The handler may call several closures, and await other futures between them.
    ///
    /// SQLite blocks its thread, so the connection has a thread of its own, and statements are
    /// executed in closures. They own what they use: move copies into them.
    ///
    /// A failed statement changes nothing, and the transaction usually remains open: return its error
    /// to undo the earlier ones. After some errors, such as a full disk, SQLite rolls it back; then
    /// `Ok` commits nothing, and the message is handled again. For an optional part use
    /// [`savepoint`](rusqlite::Transaction::savepoint).
    ///
    /// `BEGIN`, `COMMIT`, `ROLLBACK` and `ATTACH` are refused, and the message is dead-lettered. Do
    /// not set pragmas other than `defer_foreign_keys`, create temporary tables, or set an authorizer
    /// or hooks: they outlast the transaction. Do not write to the database on another connection, which would wait for this
    /// transaction.
    ///
    /// A closure continues if this future is dropped. If the transaction is dropped, as at the
    /// handler timeout, the current statement is interrupted.
    ///
    /// # Panics
    /// If the closure panics, with the same payload.
    pub async fn call<T, F>(&mut self, function: F) -> T
    where
        F: FnOnce(&mut Transaction<'_>) -> T + Send + 'static,
        T: Send + 'static,
    {
        let (reply, result) = oneshot::channel();
        let call = move |transaction: &mut Transaction<'_>| {
            let result = catch_unwind(AssertUnwindSafe(|| function(transaction)));
            // Fails if the caller has stopped waiting.
            !matches!(reply.send(result), Err(Err(_panic)))
        };
        self.is_calling = true;
        // Fails if the thread has panicked; then `result` has no sender.
        let _ = self.requests.send(TransactionRequest::Call(Box::new(call)));
        let result = result.await;
        self.is_calling = false;
        match result.expect("the SQLite thread does not panic") {
            Ok(result) => result,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Commits or rolls back. Before that it interrupts the closure that is running, if its caller has
    /// stopped waiting, and skips those that have not begun: after the request, the thread may
    /// execute another transaction.
    async fn end(
        mut self,
        request: fn(oneshot::Sender<Result<(), CommitError>>) -> TransactionRequest,
    ) -> Result<(), CommitError> {
        self.interrupt_closures();
        self.is_calling = false;
        let (reply, result) = oneshot::channel();
        let _ = self.requests.send(request(reply)); // as in `call`
        drop(self);
        match result.await {
            Ok(result) => result,
            Err(_) => Err(CommitError::Unknown("the SQLite thread panicked".into())),
        }
    }

    fn interrupt_closures(&self) {
        if self.is_calling {
            self.is_ended.store(true, Ordering::Release);
            self.interrupt.interrupt();
        }
    }
}

impl Drop for SqliteTransaction {
    /// Interrupts the closure that is running. Until `requests` is dropped, after this, the thread
    /// executes no other transaction.
    fn drop(&mut self) {
        self.interrupt_closures();
    }
}

impl Inbox for SqliteInbox {
    type Transaction = SqliteTransaction;

    fn described(&self) -> String {
        self.reader.described()
    }

    fn max_transactions(&self) -> usize {
        MAX_TRANSACTIONS
    }

    async fn preflight(&self) -> Result<(), StoreError> {
        self.reader.persistence().await.map(drop)
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.reader.persistence().await
    }

    async fn look_up(
        &self,
        claims: &[Operation],
    ) -> Result<Vec<Result<Verdict, StoreError>>, StoreError> {
        let verdicts = self
            .reader
            .request(|reply| WriterRequest::LookUp(claims.to_vec(), reply))
            .await??;
        let verdicts = verdicts.into_iter();
        Ok(verdicts.map(|it| it.map_err(StoreError::from)).collect())
    }

    async fn begin(
        &self,
        claim: &Operation,
        longest_run: Duration,
    ) -> Result<BeginResult<SqliteTransaction>, BoxError> {
        let claims = std::slice::from_ref(claim);
        let mut begun = self.begin_batch(claims, longest_run).await?;
        match (begun.transaction, begun.recorded.pop().flatten()) {
            (Some(transaction), _) => Ok(BeginResult::Transaction(transaction)),
            (None, Some(verdict)) => Ok(BeginResult::Recorded(verdict)),
            (None, None) => Err("the SQLite thread returned no verdict".into()),
        }
    }

    async fn begin_batch(
        &self,
        claims: &[Operation],
        longest_run: Duration,
    ) -> Result<BatchTransaction<SqliteTransaction>, BoxError> {
        let (claims, file) = (claims.to_vec(), self.writer.0.config.name());
        let (reply, begun) = oneshot::channel();
        let request = BeginRequest {
            claims,
            longest_run,
            reply,
        };
        let submitted = self.writer.0.submit(WriterRequest::Begin(request));
        submitted.map_err(StoreError::from)?;
        match tokio::time::timeout(LOCK_TIMEOUT, begun).await {
            Ok(Ok(begun)) => Ok(begun.map_err(StoreError::from)?),
            Ok(Err(_)) => Err(format!("the SQLite thread for {file} panicked").into()),
            Err(_) => Err(format!(
                "no transaction began on {file} within {LOCK_TIMEOUT:?}: another one, of this or another process, has the write lock, or the disk does not respond; look for other programs that use the file, and make handlers shorter"
            )
            .into()),
        }
    }

    async fn commit(&self, mut transaction: SqliteTransaction) -> Result<(), CommitError> {
        // A closure whose caller has stopped waiting belongs to the transaction.
        transaction.is_calling = false;
        transaction.end(TransactionRequest::Commit).await
    }

    async fn rollback(&self, transaction: SqliteTransaction) -> Result<(), CommitError> {
        transaction.end(TransactionRequest::Rollback).await
    }
}

impl fmt::Debug for SqliteTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteTransaction").finish_non_exhaustive()
    }
}
