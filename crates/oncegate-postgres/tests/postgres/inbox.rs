//! The inbox: the rows of a handler and the record of its message are committed together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use oncegate_core::inbox::{BeginResult, InTransaction, InboxStore};
use oncegate_core::lifecycle::Reason;
use oncegate_core::marker::OperationKind;
use oncegate_core::{
    Builder, Consumer, Context, Error, Failure, FailureExt, Fingerprints, Guarantee, Handler,
    IdSource, Inbox, Json, MemoryBroker, MemorySource, Message, TransactionalHandler,
};
use oncegate_postgres::{Postgres, PostgresInbox, PostgresTransaction};
use oncegate_testkit::proxy::{Proxy, RequestFault, contains};
use oncegate_testkit::servers::PostgresServer;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, Executor, PgPool, Row, query};

use crate::support::{
    DONE, GRANTED, SECOND, kill_repeatedly, new_schema, new_schema_at, operation, raw, store_at,
    terminate_sessions, terms, verdicts,
};

const CONNECTIONS: u32 = 8;

/// What a run does after it has inserted its row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    Succeed,
    Fail,
    Refuse,
    Panic,
    TimeOut,
    /// Executes an invalid statement, and returns `Ok`.
    HideAnError,
    Commit,
    RollBack,
    /// Commits, and begins another transaction.
    BeginAnother,
    /// Undoes its row with a savepoint, and inserts another.
    UseASavepoint,
}

/// Inserts a row for each run. The first run of a message fails as `first` says.
pub(crate) struct InsertsRows {
    pub(crate) first: Then,
    /// Whether all runs fail like the first one.
    pub(crate) always: bool,
    pub(crate) runs: Arc<AtomicUsize>,
    pub(crate) pause: Duration,
}

impl InsertsRows {
    pub(crate) fn new(first: Then) -> Self {
        Self {
            first,
            always: false,
            runs: Arc::default(),
            pause: Duration::ZERO,
        }
    }
}

impl TransactionalHandler<PostgresInbox> for InsertsRows {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        let insert = || {
            query("INSERT INTO ledger (id, cents) VALUES ($1, $2)")
                .bind(cx.id().to_owned())
                .bind(cents)
        };
        let connection = transaction.connection();
        insert().execute(&mut *connection).await.retry()?;
        tokio::time::sleep(self.pause).await;
        match self.first {
            _ if run > 0 && !self.always => {}
            Then::Succeed => {}
            Then::Fail => return Err("out of paper").retry(),
            Then::Refuse => return Err("a closed account").reject(),
            Then::Panic => panic!("a bug"),
            Then::TimeOut => tokio::time::sleep(60 * SECOND).await,
            Then::HideAnError => drop(connection.execute("SELECT 1 / 0").await),
            Then::Commit => {
                connection.execute("COMMIT").await.retry()?;
            }
            Then::RollBack => {
                connection.execute("ROLLBACK").await.retry()?;
                insert().execute(connection).await.retry()?;
            }
            Then::BeginAnother => {
                connection.execute("COMMIT").await.retry()?;
                connection.execute("BEGIN").await.retry()?;
                insert().execute(connection).await.retry()?;
            }
            Then::UseASavepoint => {
                let mut savepoint = connection.begin().await.retry()?;
                insert().execute(&mut *savepoint).await.retry()?;
                savepoint.rollback().await.retry()?;
            }
        }
        Ok(())
    }
}

pub(crate) async fn pool_at(url: &str) -> PgPool {
    let pool = PgPoolOptions::new()
        .max_connections(CONNECTIONS)
        .acquire_timeout(2 * SECOND)
        .connect(url)
        .await
        .expect("a pool");
    let ledger = "CREATE TABLE IF NOT EXISTS ledger (id text, cents int8)";
    pool.execute(ledger).await.expect("a ledger");
    pool
}

pub(crate) fn broker(ids: impl IntoIterator<Item = usize>) -> MemoryBroker {
    let broker = MemoryBroker::new("transfers");
    for id in ids {
        broker.publish(Message::new("1").with_message_id(format!("t-{id}")));
    }
    broker
}

type InboxConsumer<H> =
    Builder<MemorySource, InboxStore<PostgresInbox>, InTransaction<H, PostgresInbox>, Json>;

fn consumer<H: TransactionalHandler<PostgresInbox>>(
    broker: &MemoryBroker,
    pool: &PgPool,
    handler: H,
) -> InboxConsumer<H> {
    Consumer::builder()
        .source(broker.source())
        .inbox(PostgresInbox::new(pool.clone()).create_tables())
        .transactional_handler(handler)
        .id(IdSource::message_id())
        .backoff(SECOND / 100, SECOND / 10)
}

/// Consumes until the broker has no message left.
pub(crate) async fn consume(broker: &MemoryBroker, pool: &PgPool, handler: InsertsRows) {
    let run = consumer(broker, pool, handler)
        .scope("ledger")
        .max_inline_retries(0)
        .handler_timeout(SECOND * 20)
        .run_until(broker.all_settled());
    tokio::time::timeout(90 * SECOND, run)
        .await
        .expect("it ends")
        .expect("no error");
}

/// The number of rows, and of ids that have rows.
pub(crate) async fn booked(pool: &PgPool) -> (i64, i64) {
    let count = query("SELECT count(*), count(DISTINCT id) FROM ledger");
    let row = count.fetch_one(pool).await.expect("a count");
    (row.get(0), row.get(1))
}

pub(crate) async fn records(pool: &PgPool) -> i64 {
    let count = query("SELECT count(*) FROM oncegate_markers WHERE state = 0");
    count.fetch_one(pool).await.expect("a count").get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_message_is_booked_once_and_copies_are_accepted() {
    let pool = pool_at(&new_schema().await).await;
    for _ in 0..2 {
        let broker = broker((0..500).map(|it| it % 100));
        consume(&broker, &pool, InsertsRows::new(Then::Succeed)).await;
        assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
        assert_eq!(
            (booked(&pool).await, records(&pool).await),
            ((100, 100), 100)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_consumers_never_commit_copies_that_run_at_the_same_time() {
    let url = new_schema().await;
    let (pool, other) = (pool_at(&url).await, pool_at(&url).await);
    let runs = Arc::new(AtomicUsize::new(1)); // none fails
    let book = || InsertsRows {
        runs: runs.clone(),
        pause: SECOND / 20,
        ..InsertsRows::new(Then::Succeed)
    };
    let (first, second) = (broker(0..100), broker(0..100));
    tokio::join!(
        consume(&first, &pool, book()),
        consume(&second, &other, book())
    );
    assert!(first.dead_letters().is_empty() && second.dead_letters().is_empty());
    assert_eq!(booked(&pool).await, (100, 100));
    // A copy waits for the record of the other, and finds it.
    assert_eq!(runs.load(Ordering::Relaxed), 101);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_does_not_succeed_leaves_nothing_and_is_repeated() {
    for first in [Then::Fail, Then::Panic, Then::HideAnError] {
        let pool = pool_at(&new_schema().await).await;
        let broker = broker(0..1);
        let book = InsertsRows::new(first);
        let runs = book.runs.clone();
        consume(&broker, &pool, book).await;
        assert!(broker.dead_letters().is_empty());
        assert_eq!(runs.load(Ordering::Relaxed), 2);
        assert_eq!((booked(&pool).await, records(&pool).await), ((1, 1), 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_dropped_at_its_timeout_leaves_nothing() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..1);
    let consumer =
        consumer(&broker, &pool, InsertsRows::new(Then::TimeOut)).handler_timeout(SECOND / 2);
    consumer
        .run_until(broker.all_settled())
        .await
        .expect("no error");
    assert_eq!((booked(&pool).await, records(&pool).await), ((1, 1), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_always_fails_is_a_dead_letter_without_a_row() {
    for (first, reason) in [
        (Then::Fail, Reason::AttemptsSpent),
        (Then::HideAnError, Reason::AttemptsSpent),
        (Then::Refuse, Reason::Refused),
    ] {
        let pool = pool_at(&new_schema().await).await;
        let broker = broker(0..1);
        let book = InsertsRows {
            always: true,
            ..InsertsRows::new(first)
        };
        consume(&broker, &pool, book).await;
        let [dead] = &broker.dead_letters()[..] else {
            panic!("one dead letter");
        };
        assert_eq!(dead.reason, reason);
        assert_eq!((booked(&pool).await, records(&pool).await), ((0, 0), 0));
    }
}

/// A second ROLLBACK would be a warning in the log of the server, and in that of the program.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_fails_is_rolled_back_once() {
    let logs = tempfile::tempdir().expect("a directory");
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(logs.path(), all).expect("permissions");
    let directory = logs.path().display().to_string();
    let settings = [
        ("logging_collector", "on"),
        ("log_directory", directory.as_str()),
        ("log_filename", "server.log"),
    ];
    let server = PostgresServer::start(&settings).expect("PostgreSQL");
    let pool = pool_at(&new_schema_at(&server.url()).await).await;
    for (id, first) in [Then::Fail, Then::Refuse, Then::HideAnError]
        .into_iter()
        .enumerate()
    {
        let broker = broker([id]);
        consume(&broker, &pool, InsertsRows::new(first)).await;
        assert_eq!(
            broker.dead_letters().len(),
            usize::from(first == Then::Refuse)
        );
    }
    let log = std::fs::read_to_string(logs.path().join("server.log")).expect("a log");
    assert!(log.contains("division by zero"), "it logs errors: {log}");
    assert!(!log.contains("there is no transaction"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_its_transaction_is_not_accepted() {
    // The rows that PostgreSQL has committed by then, and those of the next consumer.
    for (first, rows) in [
        (Then::Commit, 1),
        (Then::RollBack, 1),
        (Then::BeginAnother, 1),
    ] {
        let pool = pool_at(&new_schema().await).await;
        let broker = broker(0..1);
        let book = InsertsRows {
            always: true,
            ..InsertsRows::new(first)
        };
        consume(&broker, &pool, book).await;
        let [dead] = &broker.dead_letters()[..] else {
            panic!("one dead letter");
        };
        assert_eq!(dead.reason, Reason::Refused);
        let failures = dead.failure_history.as_ref().expect("a history");
        let error = failures.last_error.as_deref().unwrap_or_default();
        assert!(
            error.contains("the handler ended its transaction"),
            "{error}"
        );
        assert_eq!(booked(&pool).await.0, rows);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_savepoint_is_part_of_the_transaction() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..1);
    let book = InsertsRows::new(Then::UseASavepoint);
    consume(&broker, &pool, book).await;
    assert!(broker.dead_letters().is_empty());
    assert_eq!((booked(&pool).await, records(&pool).await), ((1, 1), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_commit_is_found_out_and_counts_as_no_attempt() {
    // Replies are lost more often than there are attempts. A reset before the server has read the
    // request may count.
    for (fault, times) in [(RequestFault::LoseReply, 20), (RequestFault::Reset, 3)] {
        let server = PostgresServer::start(&[]).expect("PostgreSQL");
        let proxy = Proxy::to(server.port()).expect("a proxy");
        let url = new_schema_at(&server.url()).await;
        let [direct, through] = [server.port(), proxy.port()].map(|port| format!(":{port}/"));
        let pool = pool_at(&url.replace(&direct, &through)).await;
        let lost = Arc::new(AtomicU32::new(0));
        let counted = lost.clone();
        proxy.inject_faults(move |request| {
            let is_commit = request.first() == Some(&b'Q') && contains(request, "COMMIT");
            match is_commit && counted.fetch_add(1, Ordering::Relaxed) < times {
                true => fault,
                false => RequestFault::Pass,
            }
        });
        let broker = broker(0..2);
        consume(&broker, &pool, InsertsRows::new(Then::Succeed)).await;
        assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
        assert!(lost.load(Ordering::Relaxed) >= 2);
        assert_eq!((booked(&pool).await, records(&pool).await), ((2, 2), 2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_booked_twice_while_sessions_are_terminated() {
    const MESSAGES: usize = 3_000;
    // Its own: sessions of other tests must not be terminated.
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let url = new_schema_at(&server.url()).await;
    let (pool, other) = (pool_at(&url).await, pool_at(&url).await);
    let (first, second) = (broker(0..MESSAGES), broker(0..MESSAGES));
    let done = AtomicUsize::new(0);
    let book = || InsertsRows {
        runs: Arc::new(AtomicUsize::new(1)),
        ..InsertsRows::new(Then::Succeed)
    };
    let terminate = terminate_sessions(&url, || done.load(Ordering::Relaxed) == 2);
    let consume = async |broker: &MemoryBroker, pool: PgPool| {
        // An error of a terminated session counts as an attempt.
        let consumer = consumer(broker, &pool, book())
            .max_attempts(1_000)
            .backoff(SECOND / 100, SECOND / 10);
        consumer
            .run_until(broker.all_settled())
            .await
            .expect("no error");
        done.fetch_add(1, Ordering::Relaxed);
    };
    let (terminated, ..) = tokio::join!(
        terminate,
        consume(&first, pool.clone()),
        consume(&second, other)
    );
    assert!(terminated >= 20, "{terminated}");
    assert!(first.dead_letters().is_empty() && second.dead_letters().is_empty());
    let all = MESSAGES as i64;
    assert_eq!(
        (booked(&pool).await, records(&pool).await),
        ((all, all), all)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_booked_twice_while_the_server_is_killed() {
    const MESSAGES: usize = 2_000;
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let pool = pool_at(&new_schema_at(&server.url()).await).await;
    let broker = broker((0..MESSAGES).chain(0..MESSAGES));
    let kills = kill_repeatedly(server);
    let book = InsertsRows {
        runs: Arc::new(AtomicUsize::new(1)),
        ..InsertsRows::new(Then::Succeed)
    };
    consume(&broker, &pool, book).await;
    let _server = kills.await.expect("killed");
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
    let all = MESSAGES as i64;
    assert_eq!(
        (booked(&pool).await, records(&pool).await),
        ((all, all), all)
    );
}

struct Plain;

impl Handler for Plain {
    type Payload = i64;

    async fn handle(&self, _: i64, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_contradict_the_inbox_are_refused() {
    let pool = pool_at(&new_schema().await).await;
    let inbox = || PostgresInbox::new(pool.clone()).create_tables();
    let builder = || {
        Consumer::builder()
            .source(broker(0..0).source())
            .id(IdSource::message_id())
            .inbox(inbox())
    };
    let in_transaction = || builder().transactional_handler(InsertsRows::new(Then::Succeed));
    let errors = [
        builder().handler(Plain).build().map(drop),
        in_transaction().handler(Plain).build().map(drop),
        in_transaction()
            .guarantee(Guarantee::AtMostOnce)
            .build()
            .map(drop),
        in_transaction()
            .max_in_flight(CONNECTIONS as usize + 1)
            .build()
            .map(drop),
    ];
    let texts = [
        "transactional_handler",
        "transactional_handler",
        "guarantee",
        "max_in_flight",
    ];
    for (error, text) in errors.into_iter().zip(texts) {
        let error = error.expect_err(text);
        assert!(matches!(error, Error::Misconfigured { .. }), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    drop(in_transaction().build().expect("a consumer"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_keep_the_promise_is_refused_at_the_start() {
    let start = async |pool: PgPool, create: bool| {
        let inbox = PostgresInbox::new(pool);
        let inbox = if create { inbox.create_tables() } else { inbox };
        let run = Consumer::builder()
            .source(broker(0..0).source())
            .inbox(inbox)
            .transactional_handler(InsertsRows::new(Then::Succeed))
            .id(IdSource::message_id())
            .run_until(std::future::pending::<()>());
        let ended = tokio::time::timeout(20 * SECOND, run).await;
        ended.expect("it ends").expect_err("refused").to_string()
    };
    let url = new_schema().await;
    let missing = start(pool_at(&url).await, false).await;
    assert!(missing.contains("create_tables"), "{missing}");

    let other = new_schema().await;
    let schema = other.rsplit('=').next().expect("a schema").to_owned();
    let elsewhere = PgPoolOptions::new().after_connect(move |connection, _| {
        let set = format!("SET search_path = {schema}");
        Box::pin(async move { connection.execute(sqlx::AssertSqlSafe(set)).await.map(drop) })
    });
    let elsewhere = elsewhere.connect(&url).await.expect("a pool");
    let refused = start(elsewhere, true).await;
    assert!(refused.contains("search_path"), "{refused}");
}

/// A handler that misuses its connection.
struct Misuse(&'static str);

impl TransactionalHandler<PostgresInbox> for Misuse {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let connection = transaction.connection();
        let insert = |id: &str| {
            query("INSERT INTO ledger (id, cents) VALUES ($1, $2)")
                .bind(id.to_owned())
                .bind(cents)
        };
        insert(cx.id()).execute(&mut *connection).await.retry()?;
        match self.0 {
            "COMMIT, then an error" => {
                connection.execute("COMMIT").await.retry()?;
                Err("the second row").retry()
            }
            "another transaction that fails" => {
                connection.execute("COMMIT; BEGIN").await.retry()?;
                let _ = connection.execute("SELECT 1 / 0").await;
                Ok(())
            }
            "a savepoint after a failed statement" => {
                let _ = connection.execute("SELECT 1 / 0").await;
                let savepoint = connection.begin().await.map(drop);
                assert!(savepoint.is_err(), "a statement has failed");
                // sqlx has rolled back, so this is committed at once.
                insert("outside").execute(connection).await.retry()?;
                Err("an error").retry()
            }
            "a session that ends" => {
                let end = "SELECT pg_terminate_backend(pg_backend_pid())";
                let _ = connection.execute(end).await;
                Ok(())
            }
            "SET LOCAL synchronous_commit" => {
                let set = "SET LOCAL synchronous_commit = off";
                connection.execute(set).await.map(drop).retry()
            }
            other => panic!("{other}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_ended_is_found_also_after_an_error() {
    for (misuse, rows) in [
        ("COMMIT, then an error", 1),
        ("another transaction that fails", 1),
        ("a savepoint after a failed statement", 1),
    ] {
        let pool = pool_at(&new_schema().await).await;
        let broker = broker(0..1);
        let consumer = consumer(&broker, &pool, Misuse(misuse));
        consumer
            .run_until(broker.all_settled())
            .await
            .expect("no error");
        let [dead] = &broker.dead_letters()[..] else {
            panic!("{misuse}: one dead letter");
        };
        assert_eq!(dead.reason, Reason::Refused, "{misuse}");
        assert_eq!(booked(&pool).await.0, rows, "{misuse}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_a_deferred_constraint_counts_as_an_attempt() {
    let pool = pool_at(&new_schema().await).await;
    let trigger = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not balanced'; END$$;
        CREATE CONSTRAINT TRIGGER balanced AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()";
    pool.execute(trigger).await.expect("a trigger");
    let broker = broker(0..1);
    consume(&broker, &pool, InsertsRows::new(Then::Succeed)).await;
    let [dead] = &broker.dead_letters()[..] else {
        panic!("one dead letter");
    };
    assert_eq!(dead.reason, Reason::AttemptsSpent);
    assert_eq!((booked(&pool).await, records(&pool).await), ((0, 0), 0));
}

/// Runs one message with a short handler timeout while `blocked` holds, for several such timeouts.
/// Returns the pool and the number of runs; the message is booked once, after the block has ended.
async fn one_message_behind<T>(blocked: impl AsyncFnOnce(&str, &PgPool) -> T) -> usize {
    let url = new_schema().await;
    let pool = pool_at(&url).await;
    Postgres::url(&url).migrate().await.expect("the tables");
    let block = blocked(&url, &pool).await;
    let broker = broker(0..1);
    let book = InsertsRows {
        runs: Arc::new(AtomicUsize::new(1)),
        ..InsertsRows::new(Then::Succeed)
    };
    let runs = book.runs.clone();
    let consumer = consumer(&broker, &pool, book)
        .max_attempts(2)
        .max_inline_retries(0)
        .backoff(SECOND / 100, SECOND / 10)
        .handler_timeout(SECOND / 4);
    let released = async {
        tokio::time::sleep(3 * SECOND).await;
        drop(block);
        broker.all_settled().await;
    };
    let run = consumer.run_until(released);
    let ended = tokio::time::timeout(60 * SECOND, run).await;
    ended.expect("it ends").expect("no error");
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
    assert_eq!((booked(&pool).await, records(&pool).await), ((1, 1), 1));
    runs.load(Ordering::Relaxed) - 1
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_copy_is_no_timeout_of_the_handler() {
    let runs = one_message_behind(async |url: &str, _: &PgPool| {
        let mut peer = raw(url).await;
        peer.execute("BEGIN").await.expect("begun");
        let insert =
            "INSERT INTO oncegate_markers (key, expires, state) VALUES ('t-0', 99999999999999, 0)";
        peer.execute(insert).await.expect("inserted");
        peer
    })
    .await;
    // A run that begins late may time out in the handler.
    assert!((1..=2).contains(&runs), "{runs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_a_connection_is_no_timeout_of_the_handler() {
    let runs = one_message_behind(async |_: &str, pool: &PgPool| {
        let pool = pool.clone();
        let (block, mut ended) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(async move {
            // The check at the start needs one.
            tokio::time::sleep(SECOND / 4).await;
            let all = futures_util::future::join_all((0..CONNECTIONS).map(|_| pool.acquire()));
            let _all = all.await;
            let _ = (&mut ended).await; // `block` was dropped
        });
        block
    })
    .await;
    assert!(runs <= 2, "{runs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_waits_for_a_replica_is_no_timeout_of_the_handler() {
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let url = new_schema_at(&server.url()).await;
    let pool = pool_at(&url).await;
    Postgres::url(&url).migrate().await.expect("the tables");
    let broker = broker(0..1);
    let consumer = consumer(
        &broker,
        &pool,
        InsertsRows {
            runs: Arc::new(AtomicUsize::new(1)),
            ..InsertsRows::new(Then::Succeed)
        },
    )
    .max_attempts(2)
    .handler_timeout(SECOND / 2)
    .backoff(SECOND / 100, SECOND / 10);
    let mut admin = raw(&server.url()).await;
    let replicas = async |admin: &mut sqlx::PgConnection, set: &'static str| {
        admin.execute(set).await.expect("set");
        admin
            .execute("SELECT pg_reload_conf()")
            .await
            .expect("reloaded");
    };
    replicas(
        &mut admin,
        "ALTER SYSTEM SET synchronous_standby_names = 'missing_replica'",
    )
    .await;
    let drained = async {
        tokio::time::sleep(4 * SECOND).await;
        assert!(broker.dead_letters().is_empty());
        replicas(&mut admin, "ALTER SYSTEM RESET synchronous_standby_names").await;
        broker.all_settled().await;
    };
    let ended = tokio::time::timeout(60 * SECOND, consumer.run_until(drained)).await;
    ended.expect("it ends").expect("no error");
    assert!(broker.dead_letters().is_empty());
    assert_eq!((booked(&pool).await, records(&pool).await), ((1, 1), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_kept_for_the_window_after_the_commit() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..1);
    let consumer = consumer(
        &broker,
        &pool,
        InsertsRows {
            pause: 2 * SECOND,
            ..InsertsRows::new(Then::Succeed)
        },
    )
    .lease(SECOND / 2)
    .dedup_window(2 * SECOND)
    .handler_timeout(4 * SECOND);
    let copy_later = async {
        broker.all_settled().await;
        tokio::time::sleep(SECOND).await;
        broker.publish(Message::new("1").with_message_id("t-0"));
        broker.all_settled().await;
    };
    consumer.run_until(copy_later).await.expect("no error");
    assert_eq!(booked(&pool).await, (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_row_says_decides_whether_its_message_runs() {
    let url = new_schema().await;
    let pool = pool_at(&url).await;
    Postgres::url(&url).migrate().await.expect("the tables");
    let insert = "INSERT INTO oncegate_markers (key, expires, state, attempt, base, crashes, effect)
        SELECT key, CASE key WHEN 't-0' THEN 1 ELSE 99999999999999 END, state, attempt, base, crashes, effect
        FROM (VALUES ('t-0', 0, NULL, NULL, NULL, NULL), ('t-1', 0, NULL, NULL, NULL, NULL), ('t-2', 1, 1, 0, 0, 0),
            ('t-3', 5, 2, NULL, NULL, NULL), ('t-4', 77, NULL, NULL, NULL, NULL))
        AS v (key, state, attempt, base, crashes, effect)";
    pool.execute(insert).await.expect("inserted");
    let broker = broker(0..5);
    let book = InsertsRows {
        runs: Arc::new(AtomicUsize::new(1)),
        ..InsertsRows::new(Then::Succeed)
    };
    let runs = book.runs.clone();
    let consumer = consumer(&broker, &pool, book);
    consumer
        .run_until(broker.all_settled())
        .await
        .expect("no error");
    // Expired, and cleared after a failure: they run. Done, rejected and unreadable: they do not.
    assert_eq!(runs.load(Ordering::Relaxed) - 1, 2);
    assert_eq!(booked(&pool).await, (2, 2));
    let rejected: Vec<Reason> = broker
        .dead_letters()
        .iter()
        .map(|dead| dead.reason)
        .collect();
    assert_eq!(rejected, [Reason::RejectedBefore]);
    assert_eq!(broker.in_doubt().len(), 1, "the unreadable one");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_with_another_body_is_a_conflict() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..1);
    let consumer =
        consumer(&broker, &pool, InsertsRows::new(Then::Succeed)).fingerprints(Fingerprints::Body);
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
    assert_eq!(booked(&pool).await, (1, 1));
}

/// sqlx leaves the connection of a `begin` that is dropped in its transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_begin_that_is_dropped_leaves_no_open_transaction_in_the_pool() {
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let url = new_schema_at(&server.url()).await;
    let [direct, through] = [server.port(), proxy.port()].map(|port| format!(":{port}/"));
    let pool = PgPoolOptions::new().max_connections(1);
    let pool = pool.connect(&url.replace(&direct, &through)).await;
    let pool = pool.expect("a pool");
    let inbox = PostgresInbox::new(pool.clone()).create_tables();
    inbox.preflight().await.expect("the tables");
    proxy.inject_faults(|request| {
        let is_begin = request.first() == Some(&b'Q') && contains(request, "BEGIN");
        match is_begin {
            true => RequestFault::Delay(SECOND / 4),
            false => RequestFault::Pass,
        }
    });
    let claim = operation(
        "t-0",
        OperationKind::Claim,
        1,
        0,
        terms(Guarantee::EffectivelyOnce),
    );
    let begin = inbox.begin(&claim, SECOND);
    let dropped = tokio::time::timeout(SECOND / 10, begin).await;
    assert!(dropped.is_err(), "it began in time");
    pool.execute("CREATE TABLE outside (id int)")
        .await
        .expect("created");
    let seen = "SELECT to_regclass('outside') IS NOT NULL";
    let seen = query(seen).fetch_one(&mut raw(&url).await).await;
    assert!(
        seen.expect("an answer").get::<bool, _>(0),
        "it is not committed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_ends_a_transaction_whose_process_is_gone() {
    let pool = pool_at(&new_schema().await).await;
    let inbox = PostgresInbox::new(pool).create_tables();
    inbox.preflight().await.expect("the tables");
    let claim = operation(
        "t-0",
        OperationKind::Claim,
        1,
        0,
        terms(Guarantee::EffectivelyOnce),
    );
    let begin = async || inbox.begin(&claim, SECOND / 10).await;
    let Ok(BeginResult::Transaction(abandoned)) = begin().await else {
        panic!("it begins");
    };
    let copy = async {
        let mut errors = 0;
        while !matches!(begin().await, Ok(BeginResult::Transaction(_))) {
            errors += 1;
        }
        errors
    };
    let errors = tokio::time::timeout(60 * SECOND, copy).await;
    let errors = errors.expect("the copy runs");
    assert!(errors > 0, "the copy kept its connection while it waited");
    drop(abandoned);
}

/// A session whose `search_path` was changed finds another table, in which the record is unknown.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_finds_another_table_begins_nothing() {
    let [url, other] = [new_schema().await, new_schema().await];
    let pool = PgPoolOptions::new().max_connections(1);
    let pool = pool.connect(&url).await.expect("a pool");
    let inbox = PostgresInbox::new(pool.clone()).create_tables();
    inbox.preflight().await.expect("the tables");
    let elsewhere = pool_at(&other).await;
    let prepared = PostgresInbox::new(elsewhere.clone()).create_tables();
    prepared.preflight().await.expect("the tables");
    let path: String = query("SHOW search_path")
        .fetch_one(&elsewhere)
        .await
        .and_then(|row| row.try_get(0))
        .expect("a search path");
    let set = format!("SET search_path TO {path}");
    pool.execute(sqlx::AssertSqlSafe(set)).await.expect("set");
    let claim = operation(
        "t-0",
        OperationKind::Claim,
        1,
        0,
        terms(Guarantee::EffectivelyOnce),
    );
    let Err(error) = inbox.begin(&claim, SECOND).await else {
        panic!("it began in another table");
    };
    assert!(error.to_string().contains("another table"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_lost_in_each_run_is_a_dead_letter_in_the_end() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..1);
    let run =
        consumer(&broker, &pool, Misuse("a session that ends")).run_until(broker.all_settled());
    tokio::time::timeout(60 * SECOND, run)
        .await
        .expect("it ends")
        .expect("no error");
    let [dead] = &broker.dead_letters()[..] else {
        panic!("one dead letter");
    };
    assert_eq!(dead.reason, Reason::AttemptsSpent);
    assert_eq!((booked(&pool).await, records(&pool).await), ((0, 0), 0));
}

/// A server that forgets the commits of the last ten seconds for which it did not wait.
struct ForgetfulServer {
    server: PostgresServer,
    url: String,
}

impl ForgetfulServer {
    async fn start() -> Self {
        let server = PostgresServer::start(&[("wal_writer_delay", "10s")]).expect("PostgreSQL");
        let url = new_schema_at(&server.url()).await;
        Self { server, url }
    }

    /// Sessions that have no setting of their own no longer wait for their commits.
    async fn turn_synchronous_commit_off(&self) {
        let mut admin = raw(&self.url).await;
        let set = "ALTER SYSTEM SET synchronous_commit = off";
        admin.execute(set).await.expect("set");
        let reload = "SELECT pg_reload_conf()";
        admin.execute(reload).await.expect("reloaded");
        loop {
            let row = query("SHOW synchronous_commit").fetch_one(&mut admin).await;
            if row.expect("a setting").get::<&str, _>(0) == "off" {
                break;
            }
        }
    }

    async fn crash(&mut self) -> PgPool {
        self.server.kill();
        let restarted = (0..5).any(|_| self.server.start_again().is_ok());
        assert!(restarted, "it starts again");
        pool_at(&self.url).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_of_an_inbox_survive_a_crash_without_synchronous_commit() {
    let mut server = ForgetfulServer::start().await;
    let pool = pool_at(&server.url).await;
    Postgres::url(&server.url)
        .migrate()
        .await
        .expect("the tables");
    server.turn_synchronous_commit_off().await;
    let broker = broker(0..20);
    let handler = Misuse("SET LOCAL synchronous_commit");
    let run = consumer(&broker, &pool, handler).run_until(broker.all_settled());
    run.await.expect("no error");
    let pool = server.crash().await;
    assert_eq!((booked(&pool).await, records(&pool).await), ((20, 20), 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn markers_survive_a_crash_without_synchronous_commit() {
    let mut server = ForgetfulServer::start().await;
    let store = store_at(&server.url).await;
    let claim = |id| operation(id, OperationKind::Claim, 1, 0, terms(Guarantee::AtMostOnce));
    let complete = |id| {
        operation(
            id,
            OperationKind::Complete,
            1,
            1,
            terms(Guarantee::AtMostOnce),
        )
    };
    assert_eq!(verdicts(&store, &[claim("a")]).await, [GRANTED]);
    server.turn_synchronous_commit_off().await;
    assert_eq!(verdicts(&store, &[complete("a")]).await, [DONE]);
    let pool = server.crash().await;
    assert_eq!(records(&pool).await, 1);
}

/// Panics until it is mended.
struct PanicsUntilMended {
    runs: Arc<AtomicUsize>,
    is_mended: Arc<AtomicBool>,
}

impl TransactionalHandler<PostgresInbox> for PanicsUntilMended {
    type Payload = i64;

    async fn handle(
        &self,
        _: i64,
        _: &mut PostgresTransaction,
        _: &Context,
    ) -> Result<(), Failure> {
        self.runs.fetch_add(1, Ordering::SeqCst);
        assert!(self.is_mended.load(Ordering::SeqCst), "not mended yet");
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_is_sent_back_is_handled_by_the_same_process() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..1);
    let (runs, is_mended) = (Arc::<AtomicUsize>::default(), Arc::default());
    let handler = PanicsUntilMended {
        runs: Arc::clone(&runs),
        is_mended: Arc::clone(&is_mended),
    };
    let sent_back = async {
        broker.all_settled().await;
        let dead_letters = broker.dead_letters();
        let reasons: Vec<Reason> = dead_letters.iter().map(|it| it.reason).collect();
        assert_eq!(reasons, [Reason::AttemptsSpent]);
        is_mended.store(true, Ordering::SeqCst);
        broker.publish(dead_letters[0].message.clone());
        broker.all_settled().await;
    };
    let consumer = consumer(&broker, &pool, handler);
    consumer.run_until(sent_back).await.expect("no error");
    let runs = runs.load(Ordering::SeqCst);
    assert_eq!(runs, 6, "five attempts, and one after the mend");
    assert_eq!(broker.dead_letters().len(), 1);
    assert_eq!(records(&pool).await, 1);
}

/// In its first run, drops the `begin` of a savepoint before it has ended, and executes another statement.
struct DropsASavepoint {
    runs: AtomicUsize,
    times_out: bool,
}

impl TransactionalHandler<PostgresInbox> for DropsASavepoint {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let is_first = self.runs.fetch_add(1, Ordering::SeqCst) == 0;
        if is_first {
            let savepoint = transaction.connection().begin().now_or_never();
            assert!(savepoint.is_none(), "it began at once");
        }
        query("INSERT INTO ledger (id, cents) VALUES ($1, $2)")
            .bind(cx.id().to_owned())
            .bind(cents)
            .execute(transaction.connection())
            .await
            .retry()?;
        if is_first && self.times_out {
            std::future::pending().await
        }
        Ok(())
    }
}

/// sqlx rolls back the whole transaction then; statements after it would be committed one by one.
#[tokio::test(flavor = "multi_thread")]
async fn a_savepoint_whose_begin_is_dropped_commits_nothing_without_the_record() {
    for times_out in [false, true] {
        let pool = pool_at(&new_schema().await).await;
        let broker = broker(0..1);
        let handler = DropsASavepoint {
            runs: AtomicUsize::new(0),
            times_out,
        };
        let consumer = consumer(&broker, &pool, handler).handler_timeout(SECOND);
        let run = consumer.run_until(broker.all_settled());
        run.await.expect("no error");
        assert_eq!(booked(&pool).await, (1, 1), "times out: {times_out}");
        assert_eq!(records(&pool).await, 1, "times out: {times_out}");
        assert!(broker.dead_letters().is_empty(), "times out: {times_out}");
    }
}

/// Inserts its row, and then does what `0` says, in the first run only.
#[derive(Clone)]
struct EndsIrregularly(&'static str, Arc<AtomicUsize>);

impl TransactionalHandler<PostgresInbox> for EndsIrregularly {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let insert = |id: &str| {
            query("INSERT INTO ledger (id, cents) VALUES ($1, $2)")
                .bind(id.to_owned())
                .bind(cents)
        };
        let connection = transaction.connection();
        insert(cx.id()).execute(&mut *connection).await.retry()?;
        if self.1.fetch_add(1, Ordering::Relaxed) > 0 {
            return Ok(());
        }
        match self.0 {
            "forgets a savepoint" => {
                std::mem::forget(connection.begin().await.retry()?);
            }
            "commits and panics" => {
                connection.execute("COMMIT").await.retry()?;
                panic!("after the commit");
            }
            "rolls back, inserts and panics" => {
                connection.execute("ROLLBACK").await.retry()?;
                insert("outside").execute(connection).await.retry()?;
                panic!("after the row");
            }
            what => unreachable!("{what}"),
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_ends_its_transaction_irregularly_is_not_accepted_or_repeated() {
    for (what, outside) in [
        ("forgets a savepoint", 0),
        ("commits and panics", 1),
        ("rolls back, inserts and panics", 1),
    ] {
        let url = new_schema().await;
        drop(pool_at(&url).await);
        // All runs on one connection.
        let pool = PgPoolOptions::new().max_connections(1);
        let pool = pool.connect(&url).await.expect("a pool");
        let broker = broker(0..20);
        let handler = EndsIrregularly(what, Arc::default());
        let run = consumer(&broker, &pool, handler).run_until(broker.all_settled());
        let ended = tokio::time::timeout(60 * SECOND, run).await;
        ended.expect("it ends").expect("no error");
        let dead = broker.dead_letters();
        assert_eq!(dead.len(), 1, "{what}");
        assert_eq!(dead[0].reason, Reason::Refused, "{what}");
        assert_eq!(booked(&pool).await.0, 19 + outside, "{what}");
    }
}
