//! Handles messages in batches, each in one transaction of the inbox.

use std::collections::HashSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, oneshot};

use super::{
    CommitError, Inbox, InboxUnavailable, Lookups, RecordFound, begin, end, is_unavailable,
};
use crate::context::Context;
use crate::defaults;
use crate::fault;
use crate::handler::{Failure, Handler};
use crate::id::{Key, Scope};
use crate::internal::Lock;
use crate::log_throttle::LogThrottle;
use crate::marker::{Operation, Verdict};
use crate::run_context::RunContext;

/// How many batches run at once: while one waits for its commit, the next one is handled, and the
/// messages of a third collect.
const BATCHES_AT_ONCE: usize = 2;

/// The maximum size of [`InBatches::excluded`].
const MAX_EXCLUDED: usize = 10_000;

/// What the log says of the messages of a batch that did not begin or was rolled back.
const HANDLED_ALONE: &str = "its messages are handled in transactions of their own";

/// How often the failure of a batch is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Handles batches of messages, each in one transaction of a database. The transaction also inserts
/// the records of its messages, so the changes of each message are committed exactly once.
///
/// A batch has at most [`max_in_flight`](crate::Builder::max_in_flight) messages: those that
/// arrived while earlier batches ran. No message waits for a batch to fill.
///
/// If a batch fails, panics, or takes longer than half of the handler timeout, it is rolled back,
/// and each of its messages is handled in a transaction of its own, as a batch of one. The failure
/// of such a batch is the failure of its message, so a message that always fails costs the others
/// time, but no attempt.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler for batches in transactions of `{I}`",
    label = "this is not a `BatchTransactionalHandler<{I}>`",
    note = "implement it: `impl BatchTransactionalHandler<{I}> for … {{ type Payload = …; async fn handle(&self, batch: &[BatchItem<Self::Payload>], transaction: &mut …) -> Result<(), Failure> {{ … }} }}`"
)]
pub trait BatchTransactionalHandler<I: Inbox>: Send + Sync + 'static {
    /// The type into which the bodies are decoded.
    type Payload: DeserializeOwned + Send + Sync;

    /// Does the work for all messages of the batch. `Ok` means that the consumer commits the
    /// transaction. Two messages of a batch have different ids. Their order is not specified;
    /// messages that [`Order`](crate::Order) requires to be handled one after the other are never in
    /// the same batch.
    ///
    /// # Errors
    /// A [`Failure`]: the transaction is rolled back, and nothing of the batch happened.
    fn handle(
        &self, // in the impl: `async fn handle(&self, …)`, without `#[async_trait]`
        batch: &[BatchItem<Self::Payload>],
        transaction: &mut I::Transaction,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// A message of a batch.
#[derive(Debug)]
#[non_exhaustive]
pub struct BatchItem<P> {
    /// The decoded body.
    pub payload: P,
    /// The id, the message and its origin.
    pub context: Context,
}

/// A transaction that has inserted the records of several messages.
#[derive(Debug)]
pub struct BatchTransaction<T> {
    /// The open transaction; `None` if there was no record to insert.
    pub transaction: Option<T>,
    /// For each claim in order: `None` if the transaction has inserted its record, otherwise the
    /// verdict of the record that exists. [`Verdict::Granted`] means that a transaction of its own
    /// may replace that record.
    pub recorded: Vec<Option<Verdict>>,
}

/// A handler whose runs join batches.
#[derive(Debug)]
pub struct InBatches<H: BatchTransactionalHandler<I>, I: Inbox> {
    handler: H,
    inbox: Arc<I>,
    lookups: Arc<Lookups>,
    waiting: Lock<Vec<WaitingRun<H::Payload>>>,
    /// A permit for each batch that runs.
    batches: Semaphore,
    /// A permit for each open transaction.
    transactions: Semaphore,
    /// The keys of messages whose own transaction, after a failed batch, was cut off by the handler
    /// timeout. Their runs join no batch, so they have the whole timeout, until one of them ends
    /// before it.
    excluded: Lock<HashSet<Key>>,
    failure_log: Lock<LogThrottle>,
}

/// A run that waits for its batch.
#[derive(Debug)]
struct WaitingRun<P> {
    item: BatchItem<P>,
    claim: Operation,
    end: oneshot::Sender<BatchEnd<P>>,
}

/// How a batch ended for one of its messages.
#[derive(Debug)]
enum BatchEnd<P> {
    /// The run ends with this result: of the batch, or of the record that the message has.
    Run(Result<(), Failure>),
    /// The batch was not begun or was rolled back, or the message has a record that only a
    /// transaction of its own may replace: it runs alone.
    Alone(BatchItem<P>),
}

impl<H: BatchTransactionalHandler<I>, I: Inbox> InBatches<H, I> {
    pub(super) fn new(handler: H, inbox: Arc<I>, lookups: Arc<Lookups>) -> Self {
        let transactions = inbox.max_transactions().clamp(1, Semaphore::MAX_PERMITS);
        Self {
            handler,
            inbox,
            lookups,
            waiting: Lock::default(),
            batches: Semaphore::new(BATCHES_AT_ONCE.min(transactions)),
            transactions: Semaphore::new(transactions),
            excluded: Lock::default(),
            failure_log: Lock::new(LogThrottle::every(LOG_INTERVAL)),
        }
    }

    /// Takes the runs that wait, if that of this claim is one of them.
    fn take_batch_with(&self, claim: &Operation) -> Vec<WaitingRun<H::Payload>> {
        let mut waiting = self.waiting.lock();
        waiting.retain(|run| !run.end.is_closed());
        if waiting.iter().any(|run| run.claim.key == claim.key) {
            std::mem::take(&mut *waiting)
        } else {
            Vec::new()
        }
    }

    /// Remembers messages whose next run must join no batch.
    fn exclude<'a>(&self, claims: impl IntoIterator<Item = &'a Operation>) {
        let mut excluded = self.excluded.lock();
        // Entries accumulate only for messages that were rejected, or that other processes have
        // handled since.
        if excluded.len() >= MAX_EXCLUDED {
            excluded.clear();
        }
        excluded.extend(claims.into_iter().map(|claim| claim.key.clone()));
    }

    fn log_failure(&self, error: &dyn std::fmt::Display, messages: usize, follows: &str) {
        if let Some(suppressed_lines) = self.failure_log.lock().due(std::time::Instant::now()) {
            let inbox = self.inbox.described();
            tracing::warn!(
                %error, %inbox, messages, suppressed_lines,
                "batch of an inbox not committed, {follows}; see `error`"
            );
        }
    }

    /// Handles a message in a transaction of its own.
    async fn run_alone(
        &self,
        item: BatchItem<H::Payload>,
        claim: &Operation,
        run: &RunContext,
    ) -> Result<(), Failure> {
        run.set_waits_for_database(true);
        let _permit = self.transactions.acquire().await;
        let mut transaction = begin(&*self.inbox, claim, run).await?;
        let items = [item];
        let handle = async { self.handler.handle(&items, &mut transaction).await };
        let handled = AssertUnwindSafe(handle).catch_unwind().await;
        end(&*self.inbox, transaction, handled, run).await
    }

    /// Handles a message in a transaction of its own. Its later runs join batches again, unless the
    /// handler timeout ends this one.
    async fn run_excluded(
        &self,
        item: BatchItem<H::Payload>,
        claim: &Operation,
        run: &RunContext,
    ) -> Result<(), Failure> {
        let result = self.run_alone(item, claim, run).await;
        if !is_unavailable(&result) {
            self.excluded.lock().remove(&claim.key);
        }
        result
    }

    /// Handles a batch in one transaction, and sends each run its result.
    async fn run_batch(&self, batch: Vec<WaitingRun<H::Payload>>, run: &RunContext) {
        let _permit = self.transactions.acquire().await;
        let claims: Vec<Operation> = batch.iter().map(|run| run.claim.clone()).collect();
        fault::point("inbox.batch.begin.before");
        let begun = self.inbox.begin_batch(&claims, run.longest_run()).await;
        fault::point("inbox.batch.begin.after");
        let (mut items, mut ends) = (Vec::new(), Vec::new());
        let BatchTransaction {
            transaction,
            recorded,
        } = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.log_failure(&error, batch.len(), HANDLED_ALONE);
                for run in batch {
                    let _ = run.end.send(BatchEnd::Alone(run.item)); // fails if the run was dropped
                }
                return;
            }
        };
        for (run, recorded) in batch.into_iter().zip(recorded) {
            let end = match recorded {
                None => {
                    items.push(run.item);
                    ends.push(run.end);
                    continue;
                }
                Some(Verdict::Granted(_)) => BatchEnd::Alone(run.item),
                Some(_) => BatchEnd::Run(Err(Failure::Retry(RecordFound.into()))),
            };
            let _ = run.end.send(end);
        }
        let Some(mut transaction) = transaction else {
            return;
        };
        let handled =
            AssertUnwindSafe(async { self.handler.handle(&items, &mut transaction).await });
        let handled = tokio::time::timeout(run.longest_run() / 2, handled.catch_unwind()).await;
        let outcome = match handled {
            Ok(Ok(Ok(()))) => {
                fault::point("inbox.batch.commit.before");
                let committed = self.inbox.commit(transaction).await;
                fault::point("inbox.batch.commit.after");
                committed
            }
            failed => {
                let cause = match failed {
                    Ok(Ok(Err(failure))) => failure.to_string(),
                    Ok(Err(_)) => "the handler panicked".to_owned(),
                    _ => "it took longer than half of the handler timeout".to_owned(),
                };
                // The rollback waits for a statement that still runs. If the runs time out before
                // its end, their next runs join no batch.
                self.exclude(&claims);
                fault::point("inbox.batch.rollback.before");
                let rolled_back = self.inbox.rollback(transaction).await;
                fault::point("inbox.batch.rollback.after");
                rolled_back.and(Err(CommitError::RolledBack(cause.into())))
            }
        };
        if let Err(error) = &outcome {
            let follows = match error {
                CommitError::RolledBack(_) => HANDLED_ALONE,
                CommitError::Unknown(_) => {
                    "or its commit was not confirmed: its messages are claimed again, and skipped if they have records"
                }
                CommitError::EndedByHandler(_) => {
                    "because its handler ended the transaction: its messages are dead-lettered, and their changes may be committed; check their rows before a redrive"
                }
            };
            self.log_failure(error, items.len(), follows);
        }
        for (item, end) in items.into_iter().zip(ends) {
            let result = match &outcome {
                Ok(()) => BatchEnd::Run(Ok(())),
                Err(CommitError::RolledBack(_)) => BatchEnd::Alone(item),
                // Its record shows whether it was committed.
                Err(error @ CommitError::Unknown(_)) => {
                    BatchEnd::Run(Err(InboxUnavailable::failure(error.to_string())))
                }
                // Its changes may be committed without the record, so it must not run again.
                Err(CommitError::EndedByHandler(cause)) => {
                    BatchEnd::Run(Err(Failure::Reject(cause.to_string().into())))
                }
            };
            let _ = end.send(result);
        }
    }
}

impl<H: BatchTransactionalHandler<I>, I: Inbox> Handler for InBatches<H, I> {
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
        run.set_waits_for_database(true);
        let item = BatchItem {
            payload,
            context: cx.clone(),
        };
        let handle = self.run_in_batch(item, &claim, run);
        self.lookups.during(&claim, handle).await
    }
}

impl<H: BatchTransactionalHandler<I>, I: Inbox> InBatches<H, I> {
    /// Handles a message in a batch or, if that is not possible, in a transaction of its own.
    async fn run_in_batch(
        &self,
        item: BatchItem<H::Payload>,
        claim: &Operation,
        run: &RunContext,
    ) -> Result<(), Failure> {
        if self.excluded.lock().contains(&claim.key) {
            return self.run_excluded(item, claim, run).await;
        }
        let (end, mut ended) = oneshot::channel();
        self.waiting.lock().push(WaitingRun {
            item,
            claim: claim.clone(),
            end,
        });
        let end = tokio::select! {
            biased;
            end = &mut ended => end,
            permit = self.batches.acquire() => {
                let mut batch = self.take_batch_with(claim);
                if batch.len() == 1 && let Some(only) = batch.pop() {
                    let mut alone = pin!(self.run_alone(only.item, claim, run));
                    let half = run.longest_run() / 2;
                    if let Ok(result) = tokio::time::timeout(half, &mut alone).await {
                        return result;
                    }
                    drop(permit); // as at the end of a batch
                    return alone.await;
                }
                if !batch.is_empty() { // otherwise another run has taken it into its batch
                    self.run_batch(batch, run).await;
                }
                drop(permit);
                ended.await
            }
        };
        match end {
            Ok(BatchEnd::Run(result)) => result,
            Ok(BatchEnd::Alone(item)) => {
                if !self.excluded.lock().contains(&claim.key) {
                    self.exclude([claim]);
                }
                run.set_timeout_shared();
                self.run_excluded(item, claim, run).await
            }
            // The run that led the batch was dropped, and with it the transaction.
            Err(_) => Err(InboxUnavailable::failure(
                "the batch of this message was cancelled, because the run that executed it timed out or was dropped",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::marker::Attempts;
    use crate::store::{BoxError, Persistence, StoreError};
    use crate::{Consumer, IdSource, MemoryBroker, Message, inbox::BeginResult};

    /// A database whose transactions take 10 ms to commit.
    #[derive(Clone, Debug, Default)]
    struct Ledger(Arc<LedgerState>);

    #[derive(Debug, Default)]
    struct LedgerState {
        records: Lock<BTreeSet<Vec<u8>>>,
        /// The payloads of each committed transaction.
        committed: Lock<Vec<Vec<String>>>,
        /// How many transactions were rolled back, or dropped.
        rolled_back: Lock<usize>,
    }

    /// An open transaction; it is rolled back if it is dropped.
    #[derive(Debug)]
    struct LedgerTransaction {
        ledger: Ledger,
        keys: Vec<Vec<u8>>,
        rows: Vec<String>,
        is_committed: bool,
    }

    impl Drop for LedgerTransaction {
        fn drop(&mut self) {
            *self.ledger.0.rolled_back.lock() += usize::from(!self.is_committed);
        }
    }

    impl Ledger {
        fn open(&self, claims: &[Operation]) -> LedgerTransaction {
            let keys = claims.iter().map(|claim| claim.key.as_bytes().to_vec());
            LedgerTransaction {
                ledger: self.clone(),
                keys: keys.collect(),
                rows: Vec::new(),
                is_committed: false,
            }
        }

        fn recorded(&self, claim: &Operation) -> Option<Verdict> {
            let records = self.0.records.lock();
            let found = records.contains(claim.key.as_bytes());
            found.then_some(Verdict::Duplicate)
        }

        fn sizes(&self) -> Vec<usize> {
            self.0.committed.lock().iter().map(Vec::len).collect()
        }

        fn rows(&self) -> Vec<String> {
            let mut rows = self.0.committed.lock().concat();
            rows.sort();
            rows
        }
    }

    impl Inbox for Ledger {
        type Transaction = LedgerTransaction;

        fn described(&self) -> String {
            "a ledger".into()
        }

        fn max_transactions(&self) -> usize {
            4
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
            let granted = Verdict::Granted(Attempts::new(1));
            let verdict = |claim| Ok(self.recorded(claim).unwrap_or(granted));
            Ok(claims.iter().map(verdict).collect())
        }

        async fn begin(
            &self,
            claim: &Operation,
            _: Duration,
        ) -> Result<BeginResult<LedgerTransaction>, BoxError> {
            Ok(match self.recorded(claim) {
                Some(verdict) => BeginResult::Recorded(verdict),
                None => BeginResult::Transaction(self.open(std::slice::from_ref(claim))),
            })
        }

        async fn begin_batch(
            &self,
            claims: &[Operation],
            _: Duration,
        ) -> Result<BatchTransaction<LedgerTransaction>, BoxError> {
            let recorded: Vec<_> = claims.iter().map(|claim| self.recorded(claim)).collect();
            let of_claims = claims.iter().zip(&recorded);
            let inserted: Vec<_> = of_claims
                .filter(|(_, recorded)| recorded.is_none())
                .map(|(claim, _)| claim.clone())
                .collect();
            Ok(BatchTransaction {
                transaction: (!inserted.is_empty()).then(|| self.open(&inserted)),
                recorded,
            })
        }

        async fn commit(&self, mut transaction: LedgerTransaction) -> Result<(), CommitError> {
            tokio::time::sleep(Duration::from_millis(10)).await;
            if transaction.rows.iter().any(|row| row == "ends it") {
                let cause = "the handler ended the transaction".into();
                return Err(CommitError::EndedByHandler(cause));
            }
            transaction.is_committed = true;
            let keys = std::mem::take(&mut transaction.keys);
            self.0.records.lock().extend(keys);
            let rows = std::mem::take(&mut transaction.rows);
            self.0.committed.lock().push(rows);
            Ok(())
        }

        async fn rollback(&self, _: LedgerTransaction) -> Result<(), CommitError> {
            Ok(())
        }
    }

    /// Writes each payload; some of them make it fail, panic or hang.
    struct Write;

    impl BatchTransactionalHandler<Ledger> for Write {
        type Payload = String;

        async fn handle(
            &self,
            batch: &[BatchItem<String>],
            transaction: &mut LedgerTransaction,
        ) -> Result<(), Failure> {
            for item in batch {
                match item.payload.as_str() {
                    "fails" => return Err(Failure::Reject("never".into())),
                    "panics" => panic!("as the payload says"),
                    "hangs" => std::future::pending().await,
                    payload => transaction.rows.push(payload.to_owned()),
                }
            }
            Ok(())
        }
    }

    /// Handles the payloads, each with an id of its own, until all are settled.
    async fn handled(ledger: &Ledger, payloads: impl IntoIterator<Item = String>) -> MemoryBroker {
        let broker = MemoryBroker::new("transfers");
        for (number, payload) in payloads.into_iter().enumerate() {
            let body = serde_json::to_string(&payload).expect("text");
            broker.publish(Message::new(body).with_header("id", number.to_string()));
        }
        let all = broker.clone();
        Consumer::builder()
            .source(broker.source())
            .inbox(ledger.clone())
            .batch_transactional_handler(Write)
            .id(IdSource::header("id"))
            .handler_timeout(Duration::from_secs(10))
            .run_until(async move { all.all_settled().await })
            .await
            .expect("a clean end");
        broker
    }

    fn numbered(count: usize) -> impl Iterator<Item = String> {
        (0..count).map(|number| format!("row {number:04}"))
    }

    #[tokio::test(start_paused = true)]
    async fn messages_that_arrive_together_share_transactions() {
        let ledger = Ledger::default();
        handled(&ledger, numbered(2_000)).await;
        assert_eq!(ledger.rows(), numbered(2_000).collect::<Vec<_>>());
        assert_eq!(ledger.0.records.lock().len(), 2_000);
        let sizes = ledger.sizes();
        assert!(sizes.len() <= 20, "{sizes:?}");
        assert!(sizes.iter().all(|size| *size <= defaults::MAX_IN_FLIGHT));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_handled_before_is_not_handled_again() {
        let ledger = Ledger::default();
        handled(&ledger, numbered(100)).await;
        handled(&ledger, numbered(150)).await;
        assert_eq!(ledger.rows(), numbered(150).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_fails_costs_the_others_no_attempt() {
        for (poison, reason) in [
            ("fails", "never"),
            ("panics", "as the payload says"),
            ("hangs", "timed out"),
            ("ends it", "ended the transaction"),
        ] {
            let ledger = Ledger::default();
            let mut payloads: Vec<String> = numbered(50).collect();
            payloads.insert(25, poison.to_owned());
            let broker = handled(&ledger, payloads).await;
            let dead = broker.dead_letters();
            let texts: Vec<String> = dead.iter().map(|it| format!("{it:?}")).collect();
            if poison == "ends it" {
                // Nobody knows what was committed, so nothing of its batch runs again.
                assert!(dead.len() > 1 && dead.len() + ledger.rows().len() == 51);
            } else {
                assert_eq!(ledger.rows(), numbered(50).collect::<Vec<_>>(), "{poison}");
                assert_eq!(dead.len(), 1, "{poison}: {texts:?}");
            }
            assert!(texts.iter().all(|it| it.contains(reason)), "{texts:?}");
        }
    }

    /// Takes a time for each payload, and hangs or panics at some.
    struct WriteSlowly;

    impl BatchTransactionalHandler<Ledger> for WriteSlowly {
        type Payload = String;

        fn handle(
            &self,
            batch: &[BatchItem<String>],
            transaction: &mut LedgerTransaction,
        ) -> impl Future<Output = Result<(), Failure>> + Send {
            let has = |what| batch.iter().any(|item| item.payload.starts_with(what));
            assert!(!has("panics"), "as the payload says");
            async move {
                for item in batch {
                    if item.payload.starts_with("hangs") {
                        std::future::pending::<()>().await;
                    }
                    if item.payload.starts_with("long") {
                        tokio::time::sleep(Duration::from_secs(6)).await;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    transaction.rows.push(item.payload.clone());
                }
                Ok(())
            }
        }
    }

    /// Handles payloads that arrive at these times after the start. Returns the dead letters.
    async fn dead_letters_of(
        max_attempts: u32,
        arrivals: impl Iterator<Item = (Duration, String)>,
    ) -> Vec<String> {
        let (ledger, broker) = (Ledger::default(), MemoryBroker::new("transfers"));
        let publish = async {
            let start = tokio::time::Instant::now();
            for (number, (at, payload)) in arrivals.enumerate() {
                tokio::time::sleep_until(start + at).await;
                let body = serde_json::to_string(&payload).expect("text");
                broker.publish(Message::new(body).with_header("id", number.to_string()));
            }
            broker.all_settled().await;
        };
        Consumer::builder()
            .source(broker.source())
            .inbox(ledger.clone())
            .batch_transactional_handler(WriteSlowly)
            .id(IdSource::header("id"))
            .handler_timeout(Duration::from_secs(10))
            .max_attempts(max_attempts)
            .run_until(publish)
            .await
            .expect("a clean end");
        let dead = broker.dead_letters().into_iter();
        dead.map(|it| String::from_utf8_lossy(&it.message.body).into_owned())
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn messages_that_hang_or_panic_cost_no_others_their_only_attempt() {
        let second = Duration::from_secs(1);
        for poison in ["hangs", "panics"] {
            let first = (0..2).map(|number| (Duration::ZERO, format!("{poison} {number}")));
            let later = (0..20).map(|number| (second / 2, format!("row {number}")));
            let mut dead = dead_letters_of(1, first.chain(later)).await;
            dead.sort();
            assert_eq!(dead, [format!("\"{poison} 0\""), format!("\"{poison} 1\"")]);
        }
    }

    /// It takes more than the half of the timeout that a failed batch leaves.
    #[tokio::test(start_paused = true)]
    async fn a_long_message_is_not_charged_for_the_time_of_its_batch() {
        let first = (0..2).map(|number| (Duration::ZERO, format!("row {number}")));
        let later = ["hangs", "long", "row"].map(|it| (Duration::from_millis(1), it.to_owned()));
        let dead = dead_letters_of(1, first.chain(later)).await;
        assert_eq!(dead, ["\"hangs\""]);
    }

    #[tokio::test(start_paused = true)]
    async fn many_messages_that_hang_cost_no_others_their_attempts() {
        let arrivals = (0..3_000_u32).map(|number| {
            let poison = number % 25 == 0;
            let payload = format!("{} {number}", if poison { "hangs" } else { "row" });
            (Duration::from_millis(20) * number, payload)
        });
        let dead = dead_letters_of(2, arrivals).await;
        let innocent: Vec<_> = dead.iter().filter(|it| it.contains("row")).collect();
        assert_eq!((dead.len(), innocent), (120, vec![]));
    }
}
