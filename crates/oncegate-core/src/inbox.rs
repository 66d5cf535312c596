//! The inbox: commits the record of a message in the same transaction as the changes of its
//! handler.

mod batch;
mod function;
mod lookups;

use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
pub use batch::{BatchItem, BatchTransaction, BatchTransactionalHandler, InBatches};
pub use function::{TransactionFn, TransactionalFn, transactional_fn};
use futures_util::FutureExt as _;
use lookups::Lookups;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::defaults;
use crate::fault;
use crate::handler::{Failure, Handler};
use crate::id::Scope;
use crate::marker::{Guarantee, Operation, OperationKind, Verdict};
use crate::memory::MemoryStore;
use crate::run_context::RunContext;
use crate::store::{BoxError, Persistence, Store, StoreError};

/// Handles messages in transactions of a database. Each transaction also inserts the record of its
/// message, so its changes are committed exactly once. Effects outside of this database may be
/// repeated.
///
/// The handler changes rows and returns. Then the consumer commits the transaction. After a
/// failure, a timeout or a crash the transaction is rolled back, and the message is handled again,
/// unless the failure is [`Failure::Reject`].
///
/// [`Failure::InDoubt`] is for effects outside of the database. The transaction is rolled back and
/// the message handled again, as after [`Failure::Retry`].
///
/// A handler without state can be a function: [`transactional_fn`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler for transactions of `{I}`",
    label = "this is not a `TransactionalHandler<{I}>`",
    note = "pass a function in `transactional_fn(…)`, or implement it: `impl TransactionalHandler<{I}> for … {{ type Payload = …; async fn handle(&self, payload: Self::Payload, transaction: &mut …, cx: &Context) -> Result<(), Failure> {{ … }} }}`"
)]
pub trait TransactionalHandler<I: Inbox>: Send + Sync + 'static {
    /// The type into which the body is decoded.
    type Payload: DeserializeOwned + Send;

    /// Does the work. `Ok` means that the consumer commits the transaction.
    ///
    /// # Errors
    /// A [`Failure`]: the transaction is rolled back.
    fn handle(
        &self, // in the impl: `async fn handle(&self, …)`, without `#[async_trait]`
        payload: Self::Payload,
        transaction: &mut I::Transaction,
        cx: &Context,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// A database in which transactions record the messages that they handle.
///
/// # The contract
/// - Of all transactions with the record of one key, at most one is committed before the record
///   expires. [`begin`](Self::begin) waits until another open transaction with the same record has
///   ended.
/// - A transaction that is dropped is rolled back, unless its commit was already sent.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an inbox",
    label = "this is not an `Inbox`",
    note = "pass `SqliteInbox::file(path)`, or `PostgresInbox::new(pool)` of the crate `oncegate-postgres`"
)]
pub trait Inbox: Send + Sync + 'static {
    /// A transaction that contains the record of a message.
    type Transaction: Send;

    /// The database and its address, without secrets, for status pages.
    fn described(&self) -> String;

    /// The maximum number of transactions that may be open at once. With a
    /// [`TransactionalHandler`], [`max_in_flight`](crate::Builder::max_in_flight) is lowered to it.
    fn max_transactions(&self) -> usize;

    /// Checks the database at the start, as [`Store::preflight`] does.
    ///
    /// # Errors
    /// The database cannot be used. The text says what is wrong and what to do.
    fn preflight(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Whether committed transactions survive a crash of the database.
    ///
    /// # Errors
    /// As for [`preflight`](Self::preflight).
    fn persistence(&self) -> impl Future<Output = Result<Persistence, StoreError>> + Send;

    /// Looks up the records of the keys of these claims, without changes. Returns one verdict for
    /// each claim, in order: [`Verdict::Granted`] if there is no record. With an empty slice, only
    /// checks that the database answers.
    ///
    /// # Errors
    /// The database does not answer. For a record that cannot be read, only the result of its claim
    /// is an error.
    fn look_up(
        &self,
        claims: &[Operation],
    ) -> impl Future<Output = Result<Vec<Result<Verdict, StoreError>>, StoreError>> + Send;

    /// Begins a transaction, and inserts the record of this claim's key, which expires after the
    /// window of the claim plus `longest_run`, the handler timeout.
    ///
    /// # Errors
    /// The database is unavailable, no connection is free, or another transaction with the same
    /// record is open for too long. Nothing was changed.
    fn begin(
        &self,
        claim: &Operation,
        longest_run: Duration,
    ) -> impl Future<Output = Result<BeginResult<Self::Transaction>, BoxError>> + Send;

    /// Begins a transaction, and inserts a record for each of these claims that has none yet. No two
    /// of the claims have the same key. The records expire as those of [`begin`](Self::begin).
    ///
    /// By default an error: each message of a batch is handled in a transaction of its own.
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    fn begin_batch(
        &self,
        claims: &[Operation],
        longest_run: Duration,
    ) -> impl Future<Output = Result<BatchTransaction<Self::Transaction>, BoxError>> + Send {
        let _ = (claims, longest_run);
        async { Err("this inbox has no batches".into()) }
    }

    /// Commits a transaction.
    ///
    /// # Errors
    /// [`CommitError`] says whether the transaction may be committed.
    fn commit(
        &self,
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;

    /// Rolls back a transaction after a failure of the handler. If the connection is lost, the
    /// database rolls it back, and this is no error.
    ///
    /// # Errors
    /// [`CommitError::EndedByHandler`] if the handler has ended the transaction by itself.
    fn rollback(
        &self,
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;
}

/// The result of [`Inbox::begin`].
#[derive(Debug)]
#[non_exhaustive]
pub enum BeginResult<T> {
    /// An open transaction that has inserted the record.
    Transaction(T),
    /// There is a record that has not expired, with this verdict. No transaction is open.
    Recorded(Verdict),
}

/// Why a commit or rollback failed, and whether the transaction may be committed all the same.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// It was rolled back.
    #[error("{0} (the transaction was rolled back)")]
    RolledBack(#[source] BoxError),
    /// It may be committed, because the reply was lost.
    #[error("{0} (the transaction may be committed)")]
    Unknown(#[source] BoxError),
    /// The handler committed or rolled back the transaction by itself, or tried to, so its changes
    /// and the record may not have been committed together.
    #[error("{0}")]
    EndedByHandler(#[source] BoxError),
}

/// Why a run is repeated and does not count as an attempt: its transaction or batch did not begin or
/// was cancelled, or the reply to its commit was lost.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct InboxUnavailable(#[source] BoxError);

impl InboxUnavailable {
    fn failure(error: impl Into<BoxError>) -> Failure {
        Failure::Retry(Self(error.into()).into())
    }
}

/// Why a run did not start: its transaction found a record, whose verdict the next claim gets.
#[derive(Debug, thiserror::Error)]
#[error("the inbox has a record of the id")]
pub(crate) struct RecordFound;

impl RecordFound {
    fn is_cause_of(result: &Result<(), Failure>) -> bool {
        matches!(result, Err(Failure::Retry(cause)) if cause.is::<Self>())
    }
}

/// Whether a run failed with [`InboxUnavailable`].
fn is_unavailable(result: &Result<(), Failure>) -> bool {
    matches!(result, Err(Failure::Retry(cause)) if cause.is::<InboxUnavailable>())
}

/// A handler whose runs are transactions of the inbox.
#[derive(Debug)]
pub struct InTransaction<H, I> {
    handler: H,
    inbox: Arc<I>,
    lookups: Arc<Lookups>,
}

impl<H: Clone, I> Clone for InTransaction<H, I> {
    fn clone(&self) -> Self {
        Self {
            handler: self.handler.clone(),
            inbox: self.inbox.clone(),
            lookups: self.lookups.clone(),
        }
    }
}

impl<H: TransactionalHandler<I>, I: Inbox> Handler for InTransaction<H, I> {
    type Payload = H::Payload;

    async fn handle(&self, payload: H::Payload, cx: &Context) -> Result<(), Failure> {
        // The consumer calls `run`, never this method.
        let run = RunContext::new(&Scope::none(), defaults::HANDLER_TIMEOUT);
        self.run(payload, cx, &run).await
    }

    async fn run(
        &self,
        payload: H::Payload,
        cx: &Context,
        run: &RunContext,
    ) -> Result<(), Failure> {
        let Some(claim) = cx.claim(run.scope()) else {
            // Does not occur: a message without an id is not claimed.
            return Err(Failure::Reject("the message has no id".into()));
        };
        let handle = async {
            let mut transaction = begin(&*self.inbox, &claim, run).await?;
            let handle = async { self.handler.handle(payload, &mut transaction, cx).await };
            let handled = AssertUnwindSafe(handle).catch_unwind().await;
            end(&*self.inbox, transaction, handled, run).await
        };
        self.lookups.during(&claim, handle).await
    }
}

/// Begins the transaction of a message.
///
/// # Errors
/// [`InboxUnavailable`] or [`RecordFound`].
async fn begin<I: Inbox>(
    inbox: &I,
    claim: &Operation,
    run: &RunContext,
) -> Result<I::Transaction, Failure> {
    run.set_waits_for_database(true);
    fault::point("inbox.begin.before");
    let begun = inbox.begin(claim, run.longest_run()).await;
    match begun.map_err(InboxUnavailable::failure)? {
        BeginResult::Transaction(transaction) => {
            fault::point("inbox.begin.after");
            run.set_waits_for_database(false);
            Ok(transaction)
        }
        BeginResult::Recorded(_) => Err(Failure::Retry(RecordFound.into())),
    }
}

/// Commits the transaction of a message, or rolls it back if its handler failed or panicked.
///
/// # Panics
/// With the panic of the handler, unless it has ended the transaction.
async fn end<I: Inbox>(
    inbox: &I,
    transaction: I::Transaction,
    handled: std::thread::Result<Result<(), Failure>>,
    run: &RunContext,
) -> Result<(), Failure> {
    if !matches!(handled, Ok(Ok(()))) {
        fault::point("inbox.rollback.before");
        let rolled_back = inbox.rollback(transaction).await;
        fault::point("inbox.rollback.after");
        if let Err(CommitError::EndedByHandler(cause)) = rolled_back {
            return Err(Failure::Reject(cause));
        }
        return handled.unwrap_or_else(|panic| resume_unwind(panic));
    }
    run.set_waits_for_database(true);
    fault::point("inbox.commit.before");
    let committed = inbox.commit(transaction).await;
    fault::point("inbox.commit.after");
    committed.map_err(|error| match error {
        CommitError::RolledBack(cause) => Failure::Retry(cause),
        CommitError::Unknown(_) => InboxUnavailable::failure(error),
        CommitError::EndedByHandler(cause) => Failure::Reject(cause),
    })
}

/// The store of a consumer with an inbox. A claim gets the verdict of the record in the inbox. If
/// there is no record, it gets the verdict of a store in the memory of this process, in which
/// deliveries of one id wait for each other. A restart loses only the numbers of failed attempts.
#[derive(Debug)]
pub struct InboxStore<I> {
    inbox: Arc<I>,
    lookups: Arc<Lookups>,
    /// The claims of messages without a record.
    claims: MemoryStore,
    /// Whether the last lookup of records failed.
    is_down: Arc<AtomicBool>,
}

impl<I> Clone for InboxStore<I> {
    fn clone(&self) -> Self {
        Self {
            inbox: self.inbox.clone(),
            lookups: self.lookups.clone(),
            claims: self.claims.clone(),
            is_down: self.is_down.clone(),
        }
    }
}

impl<I: Inbox> InboxStore<I> {
    pub(crate) fn new(inbox: I) -> Self {
        Self {
            inbox: Arc::new(inbox),
            lookups: Arc::default(),
            claims: MemoryStore::new(),
            is_down: Arc::default(),
        }
    }

    /// Applies an operation to the store in memory. A completion removes the marker, because the
    /// inbox has the record.
    async fn apply_in_memory(&self, operation: &Operation) -> Result<Verdict, StoreError> {
        let mut in_memory = operation.clone();
        let completes = operation.kind == OperationKind::Complete;
        if completes {
            in_memory.kind = OperationKind::Withdraw;
        }
        let answer = self.claims.apply(&[in_memory]).await.pop();
        // A dead letter contains the numbers of its attempts. If it is sent again, they are counted
        // from 0.
        let removes_marker = completes || matches!(operation.kind, OperationKind::Reject(_));
        if removes_marker && matches!(answer, Some(Ok(Verdict::Applied))) {
            self.claims.forget(&operation.key);
        }
        match answer {
            Some(Ok(_)) if completes => Ok(Verdict::Done { marker_lost: false }),
            Some(answer) => answer,
            None => Err(StoreError::NotApplied(
                "the store in memory returned no answer".into(),
            )),
        }
    }

    pub(crate) fn max_transactions(&self) -> usize {
        self.inbox.max_transactions()
    }

    /// The handler, in transactions of this inbox.
    pub(crate) fn in_transaction<H>(&self, handler: H) -> InTransaction<H, I> {
        InTransaction {
            handler,
            inbox: self.inbox.clone(),
            lookups: self.lookups.clone(),
        }
    }

    /// The handler, with batches in transactions of this inbox.
    pub(crate) fn in_batches<H: BatchTransactionalHandler<I>>(
        &self,
        handler: H,
    ) -> InBatches<H, I> {
        InBatches::new(handler, self.inbox.clone(), self.lookups.clone())
    }
}

#[async_trait]
impl<I: Inbox> Store for InboxStore<I> {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let is_claim = |operation: &&Operation| operation.kind == OperationKind::Claim;
        let claims: Vec<Operation> = operations.iter().filter(is_claim).cloned().collect();
        // Renewals do not need the database, so a run with an open transaction keeps its claim
        // during an outage.
        let only_renews = operations
            .iter()
            .all(|operation| operation.kind == OperationKind::Renew);
        let is_down = self.is_down.load(Ordering::Relaxed);
        let looks_up = self.lookups.are_needed(&claims) || is_down && !only_renews;
        let mut found = Vec::new().into_iter();
        if looks_up {
            let records = self.inbox.look_up(&claims).await;
            self.is_down.store(records.is_err(), Ordering::Relaxed);
            found = match records {
                Ok(records) => {
                    self.lookups.looked_up(&claims, &records);
                    records.into_iter()
                }
                // The other operations of the batch fail, too: with an answer to one of them, the
                // store would count as available.
                Err(error) => return unanswered(error, operations.len()),
            };
        }
        let mut answers = Vec::with_capacity(operations.len());
        for operation in operations {
            let recorded = (looks_up && is_claim(&operation)).then(|| found.next());
            answers.push(match recorded {
                None | Some(Some(Ok(Verdict::Granted(_)))) => self.apply_in_memory(operation).await,
                Some(Some(answer)) => answer,
                Some(None) => {
                    let text = format!("{} returned no answer", self.inbox.described());
                    Err(StoreError::NotApplied(text.into()))
                }
            });
        }
        answers
    }

    fn described(&self) -> String {
        format!("inbox in {}", self.inbox.described())
    }

    async fn preflight(&self, _: Guarantee) -> Result<(), StoreError> {
        self.inbox.preflight().await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.inbox.persistence().await
    }

    fn parallel_applies(&self) -> usize {
        2
    }
}

/// One error for each operation of a batch, from the error of the lookup.
fn unanswered(error: StoreError, operations: usize) -> Vec<Result<Verdict, StoreError>> {
    let is_permanent = matches!(error, StoreError::Misconfigured(_));
    let (StoreError::NotApplied(cause)
    | StoreError::Unknown(cause)
    | StoreError::UnreadableMarker(cause)
    | StoreError::Misconfigured(cause)) = error;
    let text = cause.to_string();
    let each = || {
        Err(match is_permanent {
            true => StoreError::Misconfigured(text.clone().into()),
            false => StoreError::NotApplied(text.clone().into()),
        })
    };
    std::iter::repeat_with(each).take(operations).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MessageId;
    use crate::marker::{Effect, Terms, Token};

    /// An inbox without records, which does not answer once its flag is set.
    #[derive(Clone, Default)]
    struct EmptyInbox(Arc<AtomicBool>);

    impl Inbox for EmptyInbox {
        type Transaction = ();

        fn described(&self) -> String {
            "nothing".into()
        }

        fn max_transactions(&self) -> usize {
            1
        }

        async fn preflight(&self) -> Result<(), StoreError> {
            Ok(())
        }

        async fn persistence(&self) -> Result<Persistence, StoreError> {
            Ok(Persistence::Durable(String::new()))
        }

        async fn look_up(
            &self,
            claims: &[Operation],
        ) -> Result<Vec<Result<Verdict, StoreError>>, StoreError> {
            if self.0.load(Ordering::Relaxed) {
                return Err(StoreError::NotApplied("it is down".into()));
            }
            let granted = |_: &Operation| Ok(Verdict::Granted(crate::marker::Attempts::new(1)));
            Ok(claims.iter().map(granted).collect())
        }

        async fn begin(&self, _: &Operation, _: Duration) -> Result<BeginResult<()>, BoxError> {
            Ok(BeginResult::Transaction(()))
        }

        async fn commit(&self, (): ()) -> Result<(), CommitError> {
            Ok(())
        }

        async fn rollback(&self, (): ()) -> Result<(), CommitError> {
            Ok(())
        }
    }

    fn operation(id: &str, kind: OperationKind) -> Operation {
        Operation {
            key: Scope::none().key(&MessageId::new(id).expect("an id")),
            token: Token(1),
            attempt: u32::from(kind != OperationKind::Claim),
            kind,
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: defaults::LEASE,
                window: defaults::DEDUP_WINDOW,
                fingerprint: None,
            },
        }
    }

    #[tokio::test]
    async fn claims_are_renewed_while_the_database_does_not_answer() {
        let inbox = EmptyInbox::default();
        let store = InboxStore::new(inbox.clone());
        let apply = async |id, kind| store.apply(&[operation(id, kind)]).await.remove(0);
        assert!(apply("a", OperationKind::Claim).await.is_ok());
        inbox.0.store(true, Ordering::Relaxed);
        assert!(apply("b", OperationKind::Claim).await.is_err());
        let renewed = apply("a", OperationKind::Renew).await;
        assert!(matches!(renewed, Ok(Verdict::Applied)), "{renewed:?}");
        // The inbox still does not answer, so completions fail, too.
        assert!(apply("a", OperationKind::Complete).await.is_err());
        inbox.0.store(false, Ordering::Relaxed);
        assert!(apply("a", OperationKind::Complete).await.is_ok());
        assert!(store.claims.is_empty(), "the inbox has the record");
    }

    #[tokio::test]
    async fn a_rejected_message_begins_anew_if_it_is_sent_again() {
        let store = InboxStore::new(EmptyInbox::default());
        let apply = async |kind| store.apply(&[operation("a", kind)]).await.remove(0);
        for _ in 0..2 {
            assert!(matches!(
                apply(OperationKind::Claim).await,
                Ok(Verdict::Granted(_))
            ));
            let rejected = apply(OperationKind::Reject(Effect::Unknown)).await;
            assert!(matches!(rejected, Ok(Verdict::Applied)), "{rejected:?}");
            assert!(store.claims.is_empty());
        }
    }
}
