//! The inbox: the rows of a handler and the record of its message are committed together.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use oncegate_core::inbox::{BeginResult, CommitError, InTransaction, InboxStore};
use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::marker::{Guarantee, Marker, Operation, OperationKind, Verdict};
use oncegate_core::{
    BatchItem, BatchTransactionalHandler, Builder, Consumer, Context, Error, Failure, FailureExt,
    Fingerprints, IdSource, Inbox, Json, MemoryBroker, MemorySource, Message, Persistence,
    TransactionalHandler,
};
use oncegate_sql::{SqliteInbox, SqliteTransaction, Synchronous};
use rusqlite::{Connection, Transaction};

use crate::support::{Directory, Random, SECOND, key, operation, terms};

const FILE: &str = "ONCEGATE_TEST_SQLITE_FILE";
const STEP: &str = "ONCEGATE_TEST_STEP";

const INSERT: &str = "INSERT INTO ledger (id, cents) VALUES (?1, ?2)";

/// What a run does after it has inserted its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Succeed,
    Fail,
    Refuse,
    Panic,
    PanicInClosure,
    TimeOut,
    /// A statement that does not end by itself.
    TimeOutInStatement,
    /// Drops the future of a closure, and succeeds.
    DropACall,
    /// Executes an invalid statement, and returns `Ok`.
    HideAnError,
    /// Executes a statement whose failure rolls back the transaction, inserts another row, and
    /// returns `Ok`.
    HideARollback,
    Execute(&'static str),
    /// Undoes its second row with a savepoint.
    UseASavepoint,
}

/// Inserts a row for each run. The first run of a message fails as `first` says.
#[derive(Clone)]
struct InsertsRows {
    first: Then,
    /// Whether all runs fail like the first one.
    always: bool,
    runs: Arc<AtomicUsize>,
    pause: Duration,
}

impl InsertsRows {
    fn new(first: Then) -> Self {
        Self {
            first,
            always: false,
            runs: Arc::default(),
            pause: Duration::ZERO,
        }
    }
}

impl TransactionalHandler<SqliteInbox> for InsertsRows {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut SqliteTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        let id = cx.id().to_owned();
        let insert =
            move |sqlite: &mut Transaction<'_>| sqlite.execute(INSERT, (&id, cents)).map(drop);
        transaction.call(insert.clone()).await.retry()?;
        tokio::time::sleep(self.pause).await;
        match self.first {
            _ if run > 0 && !self.always => {}
            Then::Succeed => {}
            Then::Fail => return Err("out of paper").retry(),
            Then::Refuse => return Err("a closed account").reject(),
            Then::Panic => panic!("a bug"),
            Then::PanicInClosure => transaction.call(|_| panic!("a bug")).await,
            Then::TimeOut => tokio::time::sleep(60 * SECOND).await,
            Then::TimeOutInStatement => {
                let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n";
                let count = move |sqlite: &mut Transaction<'_>| {
                    sqlite.query_row(endless, [], |row| row.get::<_, i64>(0))
                };
                transaction.call(count).await.retry()?;
            }
            Then::DropACall => {
                let slow = move |sqlite: &mut Transaction<'_>| {
                    std::thread::sleep(Duration::from_millis(50));
                    insert(sqlite)
                };
                let second = transaction.call(slow).now_or_never();
                assert!(second.is_none(), "it was called at once");
            }
            Then::HideAnError => {
                let invalid = transaction.call(|sqlite| sqlite.execute("INSERT INTO nowhere", []));
                assert!(invalid.await.is_err());
            }
            Then::HideARollback => {
                let conflict = |sqlite: &mut Transaction<'_>| {
                    sqlite.execute("INSERT OR ROLLBACK INTO accounts VALUES (1)", [])
                };
                assert!(transaction.call(conflict).await.is_err());
                assert!(transaction.call(insert).await.is_err(), "it is committed");
            }
            Then::Execute(sql) => {
                let refused = transaction.call(move |sqlite| sqlite.execute_batch(sql));
                assert!(refused.await.is_err(), "{sql}");
            }
            Then::UseASavepoint => {
                let undo = move |sqlite: &mut Transaction<'_>| {
                    let mut savepoint = sqlite.savepoint()?;
                    savepoint.execute(INSERT, ("undone", 1))?;
                    savepoint.rollback()
                };
                transaction.call(undo).await.retry()?;
            }
        }
        Ok(())
    }
}

/// The database of a program, with a ledger.
fn ledger(directory: &Directory) -> Connection {
    let raw = directory.raw();
    raw.execute_batch(
        "PRAGMA user_version = 7; PRAGMA application_id = 1; CREATE TABLE ledger (id TEXT, cents INTEGER);
        CREATE TABLE accounts (id INTEGER PRIMARY KEY); INSERT INTO accounts VALUES (1)",
    )
    .expect("a ledger");
    raw
}

fn broker(ids: impl IntoIterator<Item = usize>) -> MemoryBroker {
    let broker = MemoryBroker::new("transfers");
    for id in ids {
        broker.publish(Message::new("1").with_message_id(format!("t-{id}")));
    }
    broker
}

type InboxConsumer =
    Builder<MemorySource, InboxStore<SqliteInbox>, InTransaction<InsertsRows, SqliteInbox>, Json>;

fn consumer(broker: &MemoryBroker, file: impl AsRef<Path>, handler: InsertsRows) -> InboxConsumer {
    Consumer::builder()
        .source(broker.source())
        .inbox(SqliteInbox::file(file))
        .transactional_handler(handler)
        .id(IdSource::message_id())
        .backoff(SECOND / 100, SECOND / 10)
}

/// Consumes until the broker has no message left.
async fn consume(broker: &MemoryBroker, file: impl AsRef<Path>, handler: InsertsRows) {
    run(broker, consumer(broker, file, handler).scope("ledger")).await;
}

async fn run(broker: &MemoryBroker, consumer: InboxConsumer) {
    let run = consumer
        .max_inline_retries(0)
        .run_until(broker.all_settled());
    tokio::time::timeout(90 * SECOND, run)
        .await
        .expect("it ends")
        .expect("no error");
}

/// The number of rows, of ids that have rows, and of records.
fn counts(raw: &Connection) -> (i64, i64, i64) {
    raw.query_row(
        "SELECT count(*), count(DISTINCT id), (SELECT count(*) FROM oncegate_markers WHERE state = 0) FROM ledger",
        [],
        |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
    )
    .expect("counts")
}

#[tokio::test(flavor = "multi_thread")]
async fn each_message_is_booked_once_and_copies_are_accepted() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    for _ in 0..2 {
        let broker = broker((0..500).map(|it| it % 100));
        consume(&broker, directory.file(), InsertsRows::new(Then::Succeed)).await;
        assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
        assert_eq!(counts(&raw), (100, 100, 100));
    }
    let number = |sql| raw.query_row(sql, [], |row| row.get::<_, i64>(0));
    assert_eq!(number("PRAGMA user_version"), Ok(7), "of the program");
    assert_eq!(number("PRAGMA application_id"), Ok(1), "of the program");
    // For operators.
    let scoped = oncegate_core::Scope::named("ledger").expect("a scope");
    let id = oncegate_core::MessageId::new("t-1").expect("an id");
    let marker = directory.store().read_marker(&scoped.key(&id)).await;
    assert_eq!(marker.expect("a marker"), Marker::Done(None));
}

/// Inserts a row for each message of a batch. Refuses a batch with the amount -1, and executes a
/// statement that does not end for one with -2.
#[derive(Clone, Default)]
struct InsertsBatches(Arc<AtomicUsize>);

impl BatchTransactionalHandler<SqliteInbox> for InsertsBatches {
    type Payload = i64;

    async fn handle(
        &self,
        batch: &[BatchItem<i64>],
        transaction: &mut SqliteTransaction,
    ) -> Result<(), Failure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let row = |item: &BatchItem<i64>| (item.context.id().to_owned(), item.payload);
        let rows: Vec<(String, i64)> = batch.iter().map(row).collect();
        let has = |wanted| rows.iter().any(|(_, cents)| *cents == wanted);
        let (is_refused, never_ends) = (has(-1), has(-2));
        let insert = move |sqlite: &mut Transaction<'_>| {
            let mut insert = sqlite.prepare_cached(INSERT)?;
            rows.into_iter()
                .try_for_each(|row| insert.execute(row).map(drop))
        };
        transaction.call(insert).await.retry()?;
        if never_ends {
            let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";
            let endless = |sqlite: &mut Transaction<'_>| sqlite.query_row(endless, [], |_| Ok(()));
            transaction.call(endless).await.retry()?;
        }
        match is_refused {
            true => Err("a closed account").reject(),
            false => Ok(()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_book_each_message_once_and_a_refused_one_alone_is_a_dead_letter() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let handler = InsertsBatches::default();
    for _ in 0..2 {
        let broker = broker((0..4_000).map(|it| it % 2_000));
        broker.publish(Message::new("-1").with_message_id("refused"));
        let consumer = Consumer::builder()
            .source(broker.source())
            .inbox(SqliteInbox::file(directory.file()))
            .batch_transactional_handler(handler.clone())
            .id(IdSource::message_id())
            .run_until(broker.all_settled());
        let consumed = tokio::time::timeout(90 * SECOND, consumer).await;
        consumed.expect("it ends").expect("no error");
        let dead = broker.dead_letters();
        assert_eq!(dead.len(), 1);
        assert_eq!(dead[0].reason, Reason::Refused);
        assert_eq!(counts(&raw), (2_000, 2_000, 2_000));
    }
    // The messages of the batch with the refused one run one by one.
    let runs = handler.0.load(Ordering::Relaxed);
    assert!(runs < 1_200, "{runs} transactions");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_does_not_end_is_interrupted_when_its_batch_is_rolled_back() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let broker = broker(0..20);
    broker.publish(Message::new("-2").with_message_id("endless"));
    let consumer = Consumer::builder()
        .source(broker.source())
        .inbox(SqliteInbox::file(directory.file()))
        .batch_transactional_handler(InsertsBatches::default())
        .id(IdSource::message_id())
        .handler_timeout(2 * SECOND)
        .max_attempts(2)
        .backoff(SECOND / 100, SECOND / 10)
        .run_until(broker.all_settled());
    let consumed = tokio::time::timeout(90 * SECOND, consumer).await;
    consumed.expect("it ends").expect("no error");
    assert_eq!(broker.dead_letters().len(), 1);
    assert_eq!(counts(&raw), (20, 20, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_file_is_created() {
    let directory = Directory::new();
    let inbox = SqliteInbox::file(directory.file());
    inbox.preflight().await.expect("created");
    let persistence = inbox.persistence().await.expect("a persistence");
    assert!(matches!(persistence, Persistence::Durable(_)));
    let normal = inbox.synchronous(Synchronous::Normal).persistence().await;
    assert!(matches!(normal, Ok(Persistence::Volatile(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_consumers_never_commit_copies_that_run_at_the_same_time() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let runs = Arc::new(AtomicUsize::new(1)); // none fails
    let book = || InsertsRows {
        runs: runs.clone(),
        pause: SECOND / 100,
        ..InsertsRows::new(Then::Succeed)
    };
    let (first, second) = (broker(0..100), broker(0..100));
    tokio::join!(
        consume(&first, directory.file(), book()),
        consume(&second, directory.file(), book())
    );
    assert!(first.dead_letters().is_empty() && second.dead_letters().is_empty());
    assert_eq!(counts(&raw), (100, 100, 100));
    // A copy waits for the record of the other, and finds it.
    assert_eq!(runs.load(Ordering::Relaxed), 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_does_not_succeed_leaves_nothing_and_is_repeated() {
    for first in [
        Then::Fail,
        Then::Panic,
        Then::PanicInClosure,
        Then::HideARollback,
    ] {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let broker = broker(0..1);
        let book = InsertsRows::new(first);
        let runs = book.runs.clone();
        consume(&broker, directory.file(), book).await;
        assert!(broker.dead_letters().is_empty(), "{first:?}");
        assert_eq!(runs.load(Ordering::Relaxed), 2, "{first:?}");
        assert_eq!(counts(&raw), (1, 1, 1), "{first:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_dropped_at_its_timeout_leaves_nothing() {
    for first in [Then::TimeOut, Then::TimeOutInStatement] {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let broker = broker(0..1);
        let consumer = consumer(&broker, directory.file(), InsertsRows::new(first));
        run(&broker, consumer.handler_timeout(SECOND)).await;
        assert!(broker.dead_letters().is_empty(), "{first:?}");
        assert_eq!(counts(&raw), (1, 1, 1), "{first:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_dropped_at_the_end_of_the_drain_leaves_nothing() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let broker = broker(0..1);
    let handler = InsertsRows::new(Then::TimeOut);
    let has_begun = {
        let runs = handler.runs.clone();
        async move {
            while runs.load(Ordering::Relaxed) == 0 {
                tokio::time::sleep(SECOND / 100).await;
            }
        }
    };
    let stopped = consumer(&broker, directory.file(), handler.clone()).drain_timeout(SECOND / 2);
    stopped.run_until(has_begun).await.expect("no error");
    assert_eq!(counts(&raw), (0, 0, 0));
    run(&broker, consumer(&broker, directory.file(), handler)).await;
    assert_eq!(counts(&raw), (1, 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_run_undoes_or_hides_is_no_failure() {
    for (first, rows) in [
        (Then::HideAnError, 1),
        (Then::UseASavepoint, 1),
        (Then::DropACall, 2),
    ] {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let broker = broker(0..1);
        let book = InsertsRows::new(first);
        let runs = book.runs.clone();
        consume(&broker, directory.file(), book).await;
        assert!(broker.dead_letters().is_empty(), "{first:?}");
        assert_eq!(runs.load(Ordering::Relaxed), 1, "{first:?}");
        assert_eq!(counts(&raw), (rows, 1, 1), "{first:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_always_fails_is_a_dead_letter_without_a_row() {
    for (first, reason) in [
        (Then::Fail, Reason::AttemptsSpent),
        (Then::HideARollback, Reason::AttemptsSpent),
        (Then::Refuse, Reason::Refused),
        (Then::Execute("COMMIT"), Reason::Refused),
        (Then::Execute("ROLLBACK"), Reason::Refused),
        (Then::Execute("COMMIT; BEGIN"), Reason::Refused),
        (Then::Execute("END"), Reason::Refused),
        (Then::Execute("ATTACH ':memory:' AS other"), Reason::Refused),
    ] {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let broker = broker(0..1);
        let book = InsertsRows {
            always: true,
            ..InsertsRows::new(first)
        };
        consume(&broker, directory.file(), book).await;
        let [dead] = &broker.dead_letters()[..] else {
            panic!("{first:?}: one dead letter");
        };
        assert_eq!(dead.reason, reason, "{first:?}");
        assert_eq!(counts(&raw), (0, 0, 0), "{first:?}");
        let failures = dead.failure_history.as_ref().expect("a history");
        let error = failures.last_error.as_deref().unwrap_or_default();
        if let Then::Execute(_) = first {
            assert!(error.contains("the handler executed BEGIN"), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deferred_constraint_that_is_violated_at_the_commit_counts_as_an_attempt() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let constraint = "DROP TABLE ledger; CREATE TABLE ledger (
        id TEXT REFERENCES accounts (id) DEFERRABLE INITIALLY DEFERRED, cents INTEGER)";
    raw.execute_batch(constraint).expect("a constraint");
    let broker = broker(0..1);
    consume(&broker, directory.file(), InsertsRows::new(Then::Succeed)).await;
    let [dead] = &broker.dead_letters()[..] else {
        panic!("one dead letter");
    };
    assert_eq!(dead.reason, Reason::AttemptsSpent);
    assert_eq!(counts(&raw), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_another_process_is_no_attempt() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let inbox = SqliteInbox::file(directory.file());
    inbox.preflight().await.expect("created");
    let broker = broker(0..1);
    let consumer = consumer(&broker, directory.file(), InsertsRows::new(Then::Succeed))
        .max_attempts(1)
        .max_inline_retries(0)
        .handler_timeout(SECOND / 4);
    raw.execute_batch("BEGIN IMMEDIATE").expect("locked");
    let released = async {
        tokio::time::sleep(2 * SECOND).await;
        raw.execute_batch("ROLLBACK").expect("released");
        broker.all_settled().await;
    };
    consumer.run_until(released).await.expect("no error");
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
    assert_eq!(counts(&raw), (1, 1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_with_another_body_is_a_conflict() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let broker = broker(0..1);
    let consumer = consumer(&broker, directory.file(), InsertsRows::new(Then::Succeed))
        .fingerprints(Fingerprints::Body);
    let other_body = async {
        broker.all_settled().await;
        broker.publish(Message::new("2").with_message_id("t-0"));
        broker.all_settled().await;
    };
    consumer.run_until(other_body).await.expect("no error");
    let [dead] = &broker.dead_letters()[..] else {
        panic!("one dead letter");
    };
    assert_eq!(dead.reason, Reason::Conflict);
    assert_eq!(counts(&raw), (1, 1, 1));
}

/// After so many messages without a record, claims are not looked up.
#[tokio::test(flavor = "multi_thread")]
async fn copies_are_found_after_many_messages_without_one() {
    for in_batches in [false, true] {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let broker = broker(0..1_200);
        let builder = Consumer::builder()
            .source(broker.source())
            .inbox(SqliteInbox::file(directory.file()))
            .id(IdSource::message_id())
            .fingerprints(Fingerprints::Body);
        let consumer = match in_batches {
            true => builder
                .batch_transactional_handler(InsertsBatches::default())
                .build(),
            false => builder
                .transactional_handler(InsertsRows::new(Then::Succeed))
                .build(),
        };
        let copies = async {
            broker.all_settled().await;
            let unreadable = "INSERT INTO oncegate_merged_markers (key, expires, state) VALUES ('other', 9e15, 99)";
            raw.execute(unreadable, []).expect("a record");
            for (id, body) in [("t-7", "1"), ("t-8", "2"), ("other", "1"), ("t-9", "1")] {
                broker.publish(Message::new(body).with_message_id(id));
            }
            broker.all_settled().await;
        };
        let run = consumer.expect("a consumer").run_until(copies);
        run.await.expect("no error");
        let [dead] = &broker.dead_letters()[..] else {
            panic!("one dead letter");
        };
        assert_eq!(dead.reason, Reason::Conflict);
        let [in_doubt] = &broker.in_doubt()[..] else {
            panic!("one message in doubt");
        };
        assert_eq!(
            in_doubt.reason,
            Reason::InDoubt(DoubtCause::UnreadableMarker)
        );
        assert_eq!(counts(&raw), (1_200, 1_200, 1_200));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_expires_after_its_window_and_is_deleted() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let broker = broker(0..1);
    let consumer = consumer(&broker, directory.file(), InsertsRows::new(Then::Succeed))
        .lease(SECOND / 2)
        .handler_timeout(SECOND / 2)
        .dedup_window(SECOND);
    let copy_later = async {
        broker.all_settled().await;
        let expires = "SELECT expires FROM oncegate_markers";
        let expires: i64 = raw.query_row(expires, [], |row| row.get(0)).expect("a row");
        let now = std::time::UNIX_EPOCH
            .elapsed()
            .expect("a clock")
            .as_millis();
        assert!(expires > now as i64, "it is kept for 1.5 s");
        tokio::time::sleep(2 * SECOND).await;
        broker.publish(Message::new("1").with_message_id("t-0"));
        broker.all_settled().await;
        tokio::time::sleep(4 * SECOND).await;
    };
    consumer.run_until(copy_later).await.expect("no error");
    assert_eq!(counts(&raw), (2, 1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_contradict_the_inbox_are_refused() {
    let directory = Directory::new();
    ledger(&directory);
    let consumer = || {
        consumer(
            &broker(0..0),
            directory.file(),
            InsertsRows::new(Then::Succeed),
        )
    };
    for (refused, text) in [
        (consumer().guarantee(Guarantee::AtMostOnce), "guarantee"),
        (
            consumer().max_in_flight(5),
            "5 messages at once need as many transactions, and the inbox allows 4; omit max_in_flight",
        ),
    ] {
        let error = refused.build().map(drop).expect_err(text);
        assert!(matches!(error, Error::Misconfigured { .. }), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    let other = directory.path().join("missing").join("ledger.db");
    let inbox = SqliteInbox::file(other);
    let error = inbox.preflight().await.expect_err("no directory");
    let text = "SqliteInbox::file: the directory";
    assert!(error.to_string().contains(text), "{error}");
}

fn a_claim(id: &str) -> Operation {
    let terms = terms(Guarantee::EffectivelyOnce);
    operation(id, OperationKind::Claim, 1, 0, terms)
}

/// Begins a transaction and inserts the row of its message.
async fn begun(inbox: &SqliteInbox, id: &'static str) -> SqliteTransaction {
    match inbox.begin(&a_claim(id), SECOND).await {
        Ok(BeginResult::Transaction(mut transaction)) => {
            let insert = move |sqlite: &mut Transaction<'_>| sqlite.execute(INSERT, (id, 1));
            transaction.call(insert).await.expect("inserted");
            transaction
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_looked_up_while_a_transaction_is_open() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let inbox = SqliteInbox::file(directory.file());
    inbox.preflight().await.expect("created");
    // The threads are idle after a second, find an expired row, and would wait for a second.
    raw.execute_batch(
        "INSERT INTO oncegate_merged_markers (key, expires, state) VALUES ('old', 1, 0)",
    )
    .expect("inserted");
    let open = begun(&inbox, "a").await;
    tokio::time::sleep(5 * SECOND / 4).await;
    let claims = [a_claim("a")];
    let looked_up = tokio::time::timeout(SECOND / 2, inbox.look_up(&claims)).await;
    let verdicts = looked_up.expect("it does not wait").expect("verdicts");
    assert!(matches!(verdicts[..], [Ok(Verdict::Granted(_))]));
    inbox.commit(open).await.expect("committed");
    let verdicts = inbox.look_up(&claims).await.expect("verdicts");
    assert!(matches!(verdicts[..], [Ok(Verdict::Duplicate)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_delete_expired_records() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let inbox = SqliteInbox::file(directory.file());
    let commit = async |id| inbox.commit(begun(&inbox, id).await).await;
    commit("a").await.expect("committed");
    raw.execute_batch(
        "INSERT INTO oncegate_merged_markers (key, expires, state) VALUES ('old-1', 1, 0), ('old-2', 1, 0)",
    )
    .expect("inserted");
    commit("b").await.expect("committed");
    assert_eq!(counts(&raw), (2, 2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_file_stops_the_consumer() {
    let directory = Directory::new();
    ledger(&directory);
    let inbox = SqliteInbox::file(directory.file());
    inbox
        .commit(begun(&inbox, "a").await)
        .await
        .expect("committed");
    std::fs::rename(directory.file(), directory.path().join("away.db")).expect("moved");
    let begun = inbox.begin(&a_claim("b"), SECOND).await;
    let error = begun.expect_err("its rows would be lost").to_string();
    assert!(error.contains("removed or replaced"), "{error}");
}

fn child(test: &str) -> Command {
    let mut child = Command::new("sh");
    // Blocks of 512 or 1,024 bytes: writes beyond the limit fail, as on a full disk.
    child
        .args(["-c", r#"trap '' XFSZ; ulimit -f "$BLOCKS"; exec "$0" "$@""#])
        .arg(std::env::current_exe().expect("this test"))
        .args([
            test,
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("BLOCKS", "unlimited")
        .stdout(Stdio::null());
    child
}

#[tokio::test]
#[ignore = "a process of the test below"]
async fn commits_until_the_disk_is_full() {
    let inbox = SqliteInbox::file(std::env::var_os(FILE).expect("a file"));
    let large = |sqlite: &mut Transaction<'_>| {
        sqlite.execute(
            "INSERT INTO ledger SELECT 'large', hex(zeroblob(100000))",
            [],
        )
    };
    for _ in 0..100 {
        let Ok(BeginResult::Transaction(mut transaction)) =
            inbox.begin(&a_claim("large"), SECOND).await
        else {
            panic!("it begins");
        };
        transaction.call(large).await.expect("in memory");
        // The same message again: it was not committed.
        match inbox.commit(transaction).await {
            Err(CommitError::Unknown(error)) => {
                let text = error.to_string();
                let is_disk = text.contains("SQLite failed on") || text.contains("is full");
                return assert!(is_disk, "{text}");
            }
            committed => committed.expect("committed"),
        }
        let forget = "DELETE FROM oncegate_merged_markers";
        let raw = Connection::open(std::env::var_os(FILE).expect("a file"));
        raw.and_then(|raw| raw.execute(forget, []))
            .expect("deleted");
    }
    panic!("the disk is never full");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_on_a_full_disk_is_found_out_by_its_record() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    SqliteInbox::file(directory.file())
        .preflight()
        .await
        .expect("created");
    let mut writer = child("inbox::commits_until_the_disk_is_full");
    let writer = writer.env(FILE, directory.file()).env("BLOCKS", "2000");
    let ended = writer.output().expect("it ran");
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{text}");
    raw.execute("DELETE FROM ledger", []).expect("deleted");
    // The disk has space again.
    let inbox = SqliteInbox::file(directory.file());
    inbox
        .commit(begun(&inbox, "large").await)
        .await
        .expect("committed");
    assert_eq!(counts(&raw), (1, 1, 1));
}

/// Aborts at a step of a transaction.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the test below"]
async fn aborts_at_a_step() {
    let inbox = SqliteInbox::file(std::env::var_os(FILE).expect("a file"));
    let step = std::env::var(STEP).expect("a step");
    let Ok(BeginResult::Transaction(transaction)) = inbox.begin(&a_claim("a"), SECOND).await else {
        panic!("it begins");
    };
    if step == "begun" {
        std::process::abort();
    }
    inbox.rollback(transaction).await.expect("rolled back");
    let transaction = begun(&inbox, "a").await;
    match step.strip_prefix("committing ") {
        _ if step == "row" => std::process::abort(),
        Some(microseconds) => {
            let after = Duration::from_micros(microseconds.parse().expect("a number"));
            std::thread::spawn(move || {
                std::thread::sleep(after);
                std::process::abort();
            });
        }
        None => {}
    }
    inbox.commit(transaction).await.expect("committed");
    std::process::abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_at_any_step_leaves_both_the_row_and_the_record_or_none() {
    let mut random = Random::seeded();
    let mut steps = vec!["begun".to_owned(), "row".to_owned(), "committed".to_owned()];
    steps.extend((0..30).map(|_| format!("committing {}", random.below(3_000))));
    let mut committed = 0;
    for step in &steps {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let inbox = SqliteInbox::file(directory.file());
        inbox.preflight().await.expect("created");
        let mut aborts = child("inbox::aborts_at_a_step");
        let aborts = aborts.env(FILE, directory.file()).env(STEP, step);
        let ended = aborts.output().expect("it ran");
        let text = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code().is_none(), "{step}: {text}");
        let (rows, _, records) = counts(&raw);
        assert_eq!(rows, records, "{step}");
        let is_known = step.starts_with("committing");
        assert!(is_known || rows == i64::from(step == "committed"), "{step}");
        // The message is handled again.
        match inbox.begin(&a_claim("a"), SECOND).await.expect("begun") {
            BeginResult::Recorded(Verdict::Duplicate) => committed += 1,
            BeginResult::Transaction(again) => {
                drop(again);
                assert_eq!(rows, 0, "{step}");
                let again = begun(&inbox, "a").await;
                inbox.commit(again).await.expect("committed");
            }
            other => panic!("{step}: {other:?}"),
        }
        assert_eq!(counts(&raw), (1, 1, 1), "{step}");
    }
    println!("{committed} of {} committed", steps.len());
}

const MESSAGES: usize = 400;

/// Handles all messages; killed by the test below.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the test below"]
async fn consumes_until_it_is_killed() {
    let broker = broker((0..MESSAGES).chain(0..MESSAGES));
    let book = InsertsRows {
        runs: Arc::new(AtomicUsize::new(1)),
        ..InsertsRows::new(Then::Succeed)
    };
    let file = std::env::var_os(FILE).expect("a file");
    consume(&broker, file, book).await;
    assert!(broker.dead_letters().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_booked_twice_while_processes_are_killed() {
    let directory = Directory::new();
    let raw = ledger(&directory);
    let mut random = Random::seeded();
    let mut kills = 0;
    // Two processes at once; each begins anew with all messages.
    let start = || {
        let mut child = child("inbox::consumes_until_it_is_killed");
        let child = child.env(FILE, directory.file()).spawn();
        child.expect("it starts")
    };
    let mut last = 0;
    while kills < 10 && last < MESSAGES as i64 {
        let mut children = [start(), start()];
        let before = last;
        while last == before {
            std::thread::sleep(Duration::from_millis(5));
            let rows = raw.query_row("SELECT count(*) FROM ledger", [], |row| row.get(0));
            last = rows.expect("a count");
        }
        std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
        for child in &mut children {
            child.kill().expect("killed");
            child.wait().expect("it ended");
        }
        let (rows, ids, records) = counts(&raw);
        assert!(rows == ids && ids == records, "{rows} {ids} {records}");
        kills += 1;
    }
    println!("{kills} kills, {last} rows");
    assert!(kills >= 3, "{kills}");
    let ended = start().wait().expect("it ended");
    assert!(ended.success());
    let all = MESSAGES as i64;
    assert_eq!(counts(&raw), (all, all, all));
    let whole: String = raw
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .expect("an answer");
    assert_eq!(whole, "ok");
    let other = directory.store().read_marker(&key("t-0")).await;
    assert_eq!(other.expect("a marker"), Marker::Absent, "another scope");
}

/// Inserts its row, and then does what `0` says.
struct EndsIrregularly(&'static str);

impl TransactionalHandler<SqliteInbox> for EndsIrregularly {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut SqliteTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let id = cx.id().to_owned();
        let insert = move |sqlite: &mut Transaction<'_>| sqlite.execute(INSERT, (id, cents));
        transaction.call(insert).await.retry()?;
        if self.0 == "drops a call that panics" {
            let call = transaction.call(|sqlite| {
                sqlite.execute(INSERT, ("half", 1)).expect("a row");
                panic!("in the middle");
            });
            assert!(call.now_or_never().is_none());
            return Ok(());
        }
        let roll_back = |sqlite: &mut Transaction<'_>| {
            sqlite.execute("INSERT OR ROLLBACK INTO accounts VALUES (1)", [])
        };
        assert!(transaction.call(roll_back).await.is_err());
        let script = "SAVEPOINT audit; INSERT INTO ledger VALUES ('audit', 1); INSERT INTO nowhere VALUES (1)";
        let script = |sqlite: &mut Transaction<'_>| sqlite.execute_batch(script);
        assert!(transaction.call(script).await.is_err());
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_committed_without_the_record_or_half_done() {
    for what in ["drops a call that panics", "hides a rollback"] {
        let directory = Directory::new();
        let raw = ledger(&directory);
        let broker = broker(0..1);
        let consumer = Consumer::builder()
            .source(broker.source())
            .inbox(SqliteInbox::file(directory.file()))
            .transactional_handler(EndsIrregularly(what))
            .id(IdSource::message_id())
            .max_attempts(2)
            .max_inline_retries(0)
            .backoff(SECOND / 100, SECOND / 10)
            .run_until(broker.all_settled());
        let consumed = tokio::time::timeout(60 * SECOND, consumer).await;
        consumed.expect("it ends").expect("no error");
        assert_eq!(broker.dead_letters().len(), 1, "{what}");
        assert_eq!(counts(&raw), (0, 0, 0), "{what}");
    }
}

/// A handler stops waiting for two closures and fails: the first is running, the second has not begun.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_skips_closures_that_have_not_begun() {
    let directory = Directory::new();
    let inbox = SqliteInbox::file(directory.file());
    let begun = inbox.begin(&a_claim("t-1"), SECOND).await.expect("begun");
    let BeginResult::Transaction(mut transaction) = begun else {
        panic!("it has no record: {begun:?}");
    };
    let slow = |_: &mut Transaction<'_>| std::thread::sleep(Duration::from_millis(300));
    let ran = Arc::new(AtomicUsize::new(0));
    let counted = ran.clone();
    let second = move |_: &mut Transaction<'_>| counted.fetch_add(1, Ordering::Relaxed);
    assert!(transaction.call(slow).now_or_never().is_none());
    assert!(transaction.call(second).now_or_never().is_none());
    inbox.rollback(transaction).await.expect("rolled back");
    assert_eq!(
        ran.load(Ordering::Relaxed),
        0,
        "a closure ran after the rollback was requested"
    );
}
