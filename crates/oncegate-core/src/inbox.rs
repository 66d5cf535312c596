//! The inbox: the record of a message is committed in the transaction of its handler.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::defaults;
use crate::handler::{Failure, Handler};
use crate::id::Scope;
use crate::marker::{Ask, Guarantee, Operation, Verdict};
use crate::memory::MemoryStore;
use crate::run_context::RunContext;
use crate::store::{BoxError, Persistence, Store, StoreError};

/// Handles messages in transactions of a database. Each transaction contains the record of its
/// message, so its changes are committed exactly once. Nothing outside of this database is covered.
///
/// The handler changes rows, and returns; then the consumer commits. After a failure, a timeout or a
/// crash the transaction is rolled back, and the message is handled again.
///
/// [`Failure::InDoubt`] is for effects elsewhere: the transaction is rolled back and the message
/// handled again, like [`Failure::Retry`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler for transactions of `{I}`",
    label = "this is no `TransactionalHandler<{I}>`",
    note = "implement it: `impl TransactionalHandler<{I}> for … {{ type Payload = …; async fn handle(&self, payload: Self::Payload, transaction: &mut …, cx: &Context) -> Result<(), Failure> {{ … }} }}`"
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

/// A database that records the messages of its transactions.
///
/// # The contract
/// - Of all transactions with the record of one key, at most one is committed before the record
///   expires. [`begin`](Self::begin) waits until another transaction with the record has ended.
/// - A transaction that is dropped is rolled back, unless its commit was already sent.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an inbox",
    label = "this is no `Inbox`",
    note = "pass `PostgresInbox::new(pool)` of the crate `oncegate-postgres`"
)]
pub trait Inbox: Send + Sync + 'static {
    /// A transaction that contains the record of a message.
    type Transaction: Send;

    /// The database and its address, without secrets, for status pages.
    fn described(&self) -> String;

    /// How many transactions may be open at once: the default of
    /// [`max_in_flight`](crate::Builder::max_in_flight), and its maximum.
    fn max_transactions(&self) -> usize;

    /// Checks the database at the start, as [`Store::preflight`] does.
    ///
    /// # Errors
    /// What is wrong, and what to do.
    fn preflight(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Whether committed transactions survive a crash of the database.
    ///
    /// # Errors
    /// As for [`preflight`](Self::preflight).
    fn persistence(&self) -> impl Future<Output = Result<Persistence, StoreError>> + Send;

    /// What the records say about these claims, in their order: [`Verdict::Granted`] if there is no
    /// record. Changes nothing. With an empty slice, it only checks that the database answers.
    ///
    /// # Errors
    /// The database does not answer. A record that cannot be read is an error of its claim alone.
    fn look_up(
        &self,
        claims: &[Operation],
    ) -> impl Future<Output = Result<Vec<Result<Verdict, StoreError>>, StoreError>> + Send;

    /// Begins a transaction, and inserts the record of this claim's key, which expires after the window
    /// of the claim plus `longest_run`, the handler timeout.
    ///
    /// # Errors
    /// The database is unavailable, no connection is free, or a copy of the message runs for too long.
    /// Nothing was changed.
    fn begin(
        &self,
        claim: &Operation,
        longest_run: Duration,
    ) -> impl Future<Output = Result<BeginResult<Self::Transaction>, BoxError>> + Send;

    /// Commits a transaction.
    ///
    /// # Errors
    /// [`CommitError`] says whether it may be committed.
    fn commit(
        &self,
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;

    /// Rolls a transaction back, after a failure of the handler. If the connection is lost, the database
    /// does that.
    ///
    /// # Errors
    /// [`CommitError::EndedByHandler`].
    fn rollback(
        &self,
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;
}

/// The result of [`Inbox::begin`].
#[derive(Debug)]
#[non_exhaustive]
pub enum BeginResult<T> {
    /// A transaction with the record.
    Transaction(T),
    /// There is a live record. No transaction was left open.
    Recorded(Verdict),
}

/// Why a transaction was not committed, as far as is known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// It was rolled back.
    #[error("{0} (the transaction was rolled back)")]
    RolledBack(#[source] BoxError),
    /// It may be committed: the reply was lost.
    #[error("{0} (the transaction may be committed)")]
    Unknown(#[source] BoxError),
    /// The handler ended it, so its changes and the record may have been separated.
    #[error("{0}")]
    EndedByHandler(#[source] BoxError),
}

/// The transaction did not begin, or the reply to its commit was lost.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct InboxUnavailable(#[source] BoxError);

impl InboxUnavailable {
    /// The failure of a run, which is repeated and not counted.
    fn failure(error: impl Into<BoxError>) -> Failure {
        Failure::Retry(Self(error.into()).into())
    }
}

/// A handler, each run in a transaction of the inbox.
#[derive(Debug)]
pub struct InTransaction<H, I> {
    handler: H,
    inbox: Arc<I>,
}

impl<H: Clone, I> Clone for InTransaction<H, I> {
    fn clone(&self) -> Self {
        Self {
            handler: self.handler.clone(),
            inbox: self.inbox.clone(),
        }
    }
}

impl<H: TransactionalHandler<I>, I: Inbox> Handler for InTransaction<H, I> {
    type Payload = H::Payload;

    async fn handle(&self, payload: H::Payload, cx: &Context) -> Result<(), Failure> {
        // Only `run` is called.
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
            return Err(Failure::Reject("the message has no id".into())); // does not occur: it was claimed
        };
        run.wait_for_database(true);
        let mut transaction = match self.inbox.begin(&claim, run.longest_run()).await {
            Ok(BeginResult::Transaction(transaction)) => transaction,
            Ok(BeginResult::Recorded(verdict)) => return result_of_record(verdict),
            Err(error) => return Err(InboxUnavailable::failure(error)),
        };
        run.wait_for_database(false);
        if let Err(failure) = self.handler.handle(payload, &mut transaction, cx).await {
            return Err(match self.inbox.rollback(transaction).await {
                Err(CommitError::EndedByHandler(cause)) => Failure::Reject(cause),
                _ => failure,
            });
        }
        run.wait_for_database(true);
        let committed = self.inbox.commit(transaction).await;
        committed.map_err(|error| match error {
            CommitError::RolledBack(cause) => Failure::Retry(cause),
            CommitError::Unknown(_) => InboxUnavailable::failure(error),
            CommitError::EndedByHandler(cause) => Failure::Reject(cause),
        })
    }
}

/// The result of a run, if another run committed the record after the claim of this one.
fn result_of_record(verdict: Verdict) -> Result<(), Failure> {
    match verdict {
        Verdict::Duplicate => Ok(()),
        Verdict::Conflict => Err(Failure::Reject(
            "its id was used for another body, in a transaction that was committed after this message was claimed".into(),
        )),
        // The next claim returns what the record says.
        _ => Err(InboxUnavailable::failure(
            "another consumer recorded this id while it was claimed",
        )),
    }
}

/// The store of a consumer with an inbox. A claim is answered by the records of the inbox, and if there
/// is none, by the memory of this process, in which deliveries of one id wait for each other. A restart
/// forgets only how often messages failed.
#[derive(Debug)]
pub struct InboxStore<I> {
    inbox: Arc<I>,
    claims: MemoryStore,
    /// Whether the last lookup of records failed.
    is_down: Arc<AtomicBool>,
}

impl<I> Clone for InboxStore<I> {
    fn clone(&self) -> Self {
        Self {
            inbox: self.inbox.clone(),
            claims: self.claims.clone(),
            is_down: self.is_down.clone(),
        }
    }
}

impl<I: Inbox> InboxStore<I> {
    pub(crate) fn new(inbox: I) -> Self {
        Self {
            inbox: Arc::new(inbox),
            claims: MemoryStore::new(),
            is_down: Arc::default(),
        }
    }

    async fn apply_in_memory(&self, operation: &Operation) -> Result<Verdict, StoreError> {
        let mut in_memory = operation.clone();
        let completes = operation.ask == Ask::Complete;
        if completes {
            in_memory.ask = Ask::Withdraw; // the inbox has the record
        }
        let answer = self.claims.apply(&[in_memory]).await.pop();
        // The dead letter has the counts. If it is sent again, its attempts are counted from 0.
        let ends = completes || matches!(operation.ask, Ask::Reject(_));
        if ends && matches!(answer, Some(Ok(Verdict::Applied))) {
            self.claims.forget(&operation.key);
        }
        match answer {
            Some(Ok(_)) if completes => Ok(Verdict::Done { marker_lost: false }),
            Some(answer) => answer,
            None => Err(StoreError::NotApplied(
                "the memory returned no answer".into(),
            )),
        }
    }

    /// The handler, in transactions of this inbox.
    pub(crate) fn in_transaction<H>(&self, handler: H) -> InTransaction<H, I> {
        InTransaction {
            handler,
            inbox: self.inbox.clone(),
        }
    }
}

#[async_trait]
impl<I: Inbox> Store for InboxStore<I> {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let is_claim = |operation: &&Operation| operation.ask == Ask::Claim;
        let claims: Vec<Operation> = operations.iter().filter(is_claim).cloned().collect();
        // Renewals need no database: a run whose transaction is open keeps its claim.
        let only_renews = operations.iter().all(|it| it.ask == Ask::Renew);
        let looks = !claims.is_empty() || self.is_down.load(Ordering::Relaxed) && !only_renews;
        let mut found = Vec::new().into_iter();
        if looks {
            let records = self.inbox.look_up(&claims).await;
            self.is_down.store(records.is_err(), Ordering::Relaxed);
            found = match records {
                Ok(records) => records.into_iter(),
                // Operations in memory fail, too: an answer would make the store look available.
                Err(error) => return unanswered(error, operations.len()),
            };
        }
        let mut answers = Vec::with_capacity(operations.len());
        for operation in operations {
            let recorded = is_claim(&operation).then(|| found.next());
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

/// The error for each operation of a batch.
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

    /// Has no records. Answers until it is down.
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

    fn operation(id: &str, ask: Ask) -> Operation {
        Operation {
            key: Scope::none().key(&MessageId::new(id).expect("an id")),
            token: Token(1),
            attempt: u32::from(ask != Ask::Claim),
            ask,
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: defaults::LEASE,
                window: defaults::DEDUP_WINDOW,
                fingerprint: None,
            },
        }
    }

    #[tokio::test]
    async fn claims_are_renewed_while_the_database_answers_no_lookup() {
        let inbox = EmptyInbox::default();
        let store = InboxStore::new(inbox.clone());
        let apply = async |id, ask| store.apply(&[operation(id, ask)]).await.remove(0);
        assert!(apply("a", Ask::Claim).await.is_ok());
        inbox.0.store(true, Ordering::Relaxed);
        assert!(apply("b", Ask::Claim).await.is_err());
        let renewed = apply("a", Ask::Renew).await;
        assert!(matches!(renewed, Ok(Verdict::Applied)), "{renewed:?}");
        // The store is not available again: completions wait.
        assert!(apply("a", Ask::Complete).await.is_err());
        inbox.0.store(false, Ordering::Relaxed);
        assert!(apply("a", Ask::Complete).await.is_ok());
        assert!(store.claims.is_empty(), "the inbox has the record");
    }

    #[tokio::test]
    async fn a_rejected_message_begins_anew_if_it_is_sent_again() {
        let store = InboxStore::new(EmptyInbox::default());
        let apply = async |ask| store.apply(&[operation("a", ask)]).await.remove(0);
        for _ in 0..2 {
            assert!(matches!(apply(Ask::Claim).await, Ok(Verdict::Granted(_))));
            let rejected = apply(Ask::Reject(Effect::Unknown)).await;
            assert!(matches!(rejected, Ok(Verdict::Applied)), "{rejected:?}");
            assert!(store.claims.is_empty());
        }
    }
}
