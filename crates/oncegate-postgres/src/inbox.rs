//! The inbox: a transaction of a handler inserts the records (done markers) of its messages.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use oncegate_core::inbox::{BatchTransaction, BeginResult, CommitError};
use oncegate_core::internal::{MarkerColumns, StoreFailure, fault, milliseconds};
use oncegate_core::marker::{Age, Marker, Operation, Verdict, apply};
use oncegate_core::outbox::{Outgoing, OutgoingError};
use oncegate_core::store::BoxError;
use oncegate_core::{Guarantee, Inbox, Persistence, Store, StoreError};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, PgPool, Row, Transaction, query};

use crate::apply::{time_to_live_ms, unreadable};
use crate::dropped_begin;
use crate::failure;
use crate::outbox::{self, SentMessages};
use crate::preflight;
use crate::savepoint_depth;
use crate::statement::{SelectedRow, decode_row};
use crate::store::Postgres;

/// How long a transaction waits for another one with the same record before it fails and its
/// connection returns to the pool.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Added to the handler timeout: the server ends a transaction that has been idle for longer, for
/// example after the machine of its client failed.
const IDLE_MARGIN: Duration = Duration::from_secs(10);

/// Inserts the record, or replaces one that has expired; with $4, replaces any. Waits for another
/// transaction with the same key. Sets `lock_timeout` to $5 until a record is inserted, and
/// `idle_in_transaction_session_timeout` to $6. Returns the id of this transaction and the table;
/// no row if there is a live record.
const INSERT: &str = "
WITH settings AS MATERIALIZED (
    SELECT set_config('oncegate.lock_timeout',
            coalesce(nullif(current_setting('oncegate.lock_timeout', true), ''), current_setting('lock_timeout')), true),
        set_config('lock_timeout', $5, true), set_config('idle_in_transaction_session_timeout', $6, true)
)
INSERT INTO oncegate_markers AS m (key, expires, state, fingerprint)
SELECT $1, floor(extract(epoch FROM statement_timestamp()) * 1000)::int8 + $2, 0, $3 FROM settings
ON CONFLICT (key) DO UPDATE SET expires = excluded.expires, state = 0, fingerprint = excluded.fingerprint, attempt = NULL,
    base = NULL, crashes = NULL, effect = NULL, token = NULL, lease = NULL, horizon = NULL, guarantee = NULL
WHERE m.expires <= excluded.expires - $2 OR $4
RETURNING pg_current_xact_id()::text, m.tableoid::int8, set_config('lock_timeout', current_setting('oncegate.lock_timeout'), true)";

/// Returns the id of the current transaction, or an error if a statement of it has failed.
const CURRENT: &str = "SELECT pg_current_xact_id_if_assigned()::text";

/// [`CURRENT`] before a commit. Sets `synchronous_commit` to `on` if it is `off`, so that the commit
/// survives a crash of the server.
const BEFORE_COMMIT: &str = "
SELECT pg_current_xact_id_if_assigned()::text,
    set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), true)";

/// Whether a transaction committed the record of a key, and the status of the transaction.
const OUTCOME: &str = "
SELECT EXISTS (SELECT FROM oncegate_markers WHERE key = $1 AND xmin::text = $2::xid8::xid::text), pg_xact_status($2::xid8)";

/// The rows of some keys.
const LOOK_UP: &str = "
WITH clock AS MATERIALIZED (SELECT floor(extract(epoch FROM statement_timestamp()) * 1000)::int8 AS now)
SELECT m.key, m.xmin::text, greatest(m.expires, 0) - now, m.state, m.fingerprint, m.attempt, m.base, m.crashes, m.effect, m.token,
    m.lease, m.horizon, m.guarantee
FROM clock, unnest($1::text[]) AS wanted (key) JOIN oncegate_markers AS m ON m.key = wanted.key";

/// Inserts records as [`INSERT`] does, of the keys $1 with the fingerprints $3, in the order of the
/// keys, so that two batches wait for each other in one direction only. Returns one row: the keys of
/// the records that it inserted, the id of the transaction and the table; of nulls if it inserted
/// none. The aggregates are complete, and `lock_timeout` is set back, when no row waits any more.
const INSERT_BATCH: &str = "
WITH settings AS MATERIALIZED (
    SELECT set_config('oncegate.lock_timeout',
            coalesce(nullif(current_setting('oncegate.lock_timeout', true), ''), current_setting('lock_timeout')), true),
        set_config('lock_timeout', $4, true), set_config('idle_in_transaction_session_timeout', $5, true)
), inserted AS (
INSERT INTO oncegate_markers AS m (key, expires, state, fingerprint)
SELECT wanted.key, floor(extract(epoch FROM statement_timestamp()) * 1000)::int8 + $2, 0, wanted.fingerprint
FROM settings, unnest($1::text[], $3::int8[]) AS wanted (key, fingerprint) ORDER BY wanted.key
ON CONFLICT (key) DO UPDATE SET expires = excluded.expires, state = 0, fingerprint = excluded.fingerprint, attempt = NULL,
    base = NULL, crashes = NULL, effect = NULL, token = NULL, lease = NULL, horizon = NULL, guarantee = NULL
WHERE m.expires <= excluded.expires - $2
RETURNING m.key, m.tableoid::int8 AS found
)
SELECT array_agg(key), pg_current_xact_id_if_assigned()::text, max(found),
    set_config('lock_timeout', current_setting('oncegate.lock_timeout'), true) FROM inserted";

/// Locks and returns the row because of which [`INSERT`] inserted no record.
const LOCK: &str = "
SELECT m.key, m.xmin::text, greatest(m.expires, 0) - floor(extract(epoch FROM clock_timestamp()) * 1000)::int8, m.state, m.fingerprint,
    m.attempt, m.base, m.crashes, m.effect, m.token, m.lease, m.horizon, m.guarantee
FROM oncegate_markers AS m WHERE m.key = $1 FOR UPDATE";

/// Records messages in the transactions of their handlers, in the table `oncegate_markers` of a
/// PostgreSQL database, version 14 or newer: the changes of a message are committed exactly once.
///
/// Each message or batch has a transaction on a connection of the pool, in its default isolation level. A
/// second copy of a message waits until the transaction of the first has ended. Records are looked
/// up over up to three connections that do not count as the pool's.
///
/// Expired records are deleted in the background.
///
/// ```no_run
/// # use oncegate_core::{Consumer, Context, Failure, FailureExt, IdSource, MemoryBroker, TransactionalHandler};
/// use oncegate_postgres::{PostgresInbox, PostgresTransaction};
///
/// struct Book;
///
/// impl TransactionalHandler<PostgresInbox> for Book {
///     type Payload = i64;
///
///     async fn handle(&self, cents: i64, transaction: &mut PostgresTransaction, cx: &Context) -> Result<(), Failure> {
///         let insert = sqlx::query("INSERT INTO ledger (id, cents) VALUES ($1, $2)").bind(cx.id()).bind(cents);
///         insert.execute(transaction.connection()).await.retry()?;
///         Ok(())
///     }
/// }
///
/// # async fn example(broker: MemoryBroker) -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::PgPool::connect("postgres://ledger:secret@localhost/ledger").await?;
/// Consumer::builder()
///     .source(broker.source())
///     .inbox(PostgresInbox::new(pool).create_tables())
///     .transactional_handler(Book)
///     .id(IdSource::message_id())
///     .run_until(oncegate_core::shutdown_signal())
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresInbox {
    pool: PgPool,
    store: Postgres,
    /// The oid of `oncegate_markers` that the preflight found.
    table: Arc<OnceLock<i64>>,
    /// The name of `oncegate_outbox` with its schema, which the preflight found: a handler may
    /// change the `search_path` of its transaction.
    outbox: Arc<OnceLock<String>>,
}

/// The transaction of a message or a batch, with its records. The consumer commits it; if it is dropped, it
/// is rolled back.
pub struct PostgresTransaction {
    inner: Transaction<'static, sqlx::Postgres>,
    /// The id that PostgreSQL gave the transaction.
    id: String,
    key: String,
    sent: SentMessages,
    /// Whether [`connection`](Self::connection) found that a dropped `begin()` has rolled it back,
    /// before any statement was committed without the record.
    was_rolled_back_by_begin: bool,
}

impl PostgresInbox {
    /// The inbox in the database of this pool. The tables are searched in the schemas of the
    /// user's `search_path`, as by [`Postgres::url`].
    pub fn new(pool: PgPool) -> Self {
        let store = Postgres::pool(&pool);
        Self {
            pool,
            store,
            table: Arc::default(),
            outbox: Arc::default(),
        }
    }

    /// Creates the tables at the start: [`Postgres::create_tables`].
    #[must_use]
    pub fn create_tables(mut self) -> Self {
        self.store = self.store.create_tables();
        self
    }

    /// Checks that a session finds the table that the preflight found.
    fn check_table(&self, table: i64) -> Result<(), BoxError> {
        if self.table.get().is_some_and(|found| *found != table) {
            return Err(
                "this session finds another table oncegate_markers than at the start: use SET LOCAL search_path in the handler".into(),
            );
        }
        Ok(())
    }

    /// The state of the server and the table, as a connection of the pool sees it.
    async fn inspect_pool(&self) -> Result<preflight::PostgresState, StoreFailure> {
        let inspect = async {
            let mut connection = self.pool.acquire().await?;
            preflight::inspect(&mut connection).await
        };
        inspect.await.map_err(|error| {
            failure::of(
                error,
                failure::StatementStage::Connecting,
                &self.store.connections().server(),
            )
        })
    }
}

impl PostgresTransaction {
    fn new(inner: Transaction<'static, sqlx::Postgres>, id: String, key: String) -> Self {
        Self {
            inner,
            id,
            key,
            sent: SentMessages::default(),
            was_rolled_back_by_begin: false,
        }
    }

    /// The connection, whose statements belong to the transaction. A savepoint is
    /// `transaction.connection().begin()`.
    ///
    /// Call it for each statement, and do not drop that `begin()` before it has ended, for example
    /// by a timeout: sqlx then rolls back the whole transaction, and later statements would be
    /// committed one by one, without the record of the message.
    ///
    /// Do not execute `COMMIT` or `ROLLBACK`: the consumer then finds that its transaction has
    /// ended, and dead-letters the message. Do not execute `SET`, which would outlast the
    /// transaction; use `SET LOCAL`.
    ///
    /// # Panics
    /// A `begin()` that failed or was dropped has rolled the transaction back. The message is
    /// handled again. If this method is not called after such a `begin()`, the message is
    /// dead-lettered, because a statement may have been committed without the record.
    pub fn connection(&mut self) -> &mut PgConnection {
        self.was_rolled_back_by_begin = !self.inner.is_in_transaction();
        dropped_begin::assert_in_transaction(&self.inner);
        &mut self.inner
    }

    /// Sends a message when the transaction is committed: it is stored in the table
    /// `oncegate_outbox` by the same commit, from where a [`Relay`](oncegate_core::Relay) publishes
    /// it. If the transaction is rolled back, nothing is sent. The rollback of a savepoint does not
    /// take it back.
    ///
    /// Its id is that of the handled message, after the consumer's scope if it has one, and the
    /// number of the message in this run: `order-7/1`, `ledger/order-7/2`. It is `h:` and a SHA-256
    /// if it has more than 200 bytes, if the scope has a `/`, or if the id of a consumer without a
    /// scope has one. So the next consumer recognizes copies. Consumers of one message that send to
    /// one destination need different scopes, or they send the same id. In a batch, all messages have the id of one of the handled ones.
    ///
    /// # Errors
    /// [`OutgoingError`]: the message can never be published, or the run has sent more than 10,000
    /// messages or 64 MiB. `?` rejects the message that is handled.
    pub fn send(&mut self, message: Outgoing) -> Result<(), OutgoingError> {
        self.sent.add(&self.key, message)
    }
}

impl Inbox for PostgresInbox {
    type Transaction = PostgresTransaction;

    fn described(&self) -> String {
        self.store.described()
    }

    fn max_transactions(&self) -> usize {
        usize::try_from(self.pool.options().get_max_connections()).unwrap_or(usize::MAX)
    }

    async fn preflight(&self) -> Result<(), StoreError> {
        self.store.preflight(Guarantee::EffectivelyOnce).await?;
        let server = self.store.connections().server();
        let of_pool = self.inspect_pool().await?;
        of_pool.check_server(&server)?;
        let of_store = self
            .store
            .connections()
            .read(self.store.timeout_setting(), preflight::inspect)
            .await?;
        let table = of_pool.check_same_table(&of_store, &server)?;
        let _ = self.table.set(table); // fails if a clone has set it
        if let Some(name) = of_store.outbox() {
            let _ = self.outbox.set(name.to_owned());
        }
        Ok(())
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(self.inspect_pool().await?.persistence())
    }

    async fn look_up(
        &self,
        claims: &[Operation],
    ) -> Result<Vec<Result<Verdict, StoreError>>, StoreError> {
        self.store.count_operations(claims.len());
        let read = async |connection: &mut PgConnection| rows_of(connection, claims).await;
        let rows = self
            .store
            .connections()
            .read(self.store.timeout_setting(), read)
            .await?;
        Ok(claims
            .iter()
            .map(|claim| verdict(claim, rows.get(claim.key.as_str())))
            .collect())
    }

    async fn begin(
        &self,
        claim: &Operation,
        longest_run: Duration,
    ) -> Result<BeginResult<PostgresTransaction>, BoxError> {
        let mut transaction = dropped_begin::begin(&self.pool).await?;
        let mut inserted = insert(&mut transaction, claim, longest_run, Replace::Expired).await?;
        if inserted.is_none() {
            let row = query(LOCK).bind(claim.key.as_str());
            let row = row.fetch_optional(&mut *transaction).await?;
            let row = row.map(|row| decode_row(&row, 1)).transpose()?;
            match verdict(claim, row.as_ref())? {
                Verdict::Granted(_) => {
                    inserted = insert(&mut transaction, claim, longest_run, Replace::Any).await?;
                }
                verdict => {
                    transaction.rollback().await?;
                    return Ok(BeginResult::Recorded(verdict));
                }
            }
        }
        let (id, table) = inserted.ok_or("PostgreSQL returned no id of the transaction")?;
        self.check_table(table)?;
        Ok(BeginResult::Transaction(PostgresTransaction::new(
            transaction,
            id,
            claim.key.as_str().to_owned(),
        )))
    }

    async fn begin_batch(
        &self,
        claims: &[Operation],
        longest_run: Duration,
    ) -> Result<BatchTransaction<PostgresTransaction>, BoxError> {
        let mut transaction = dropped_begin::begin(&self.pool).await?;
        let inserted = insert_batch(&mut transaction, claims, longest_run).await?;
        let keys = inserted.iter().flat_map(|(keys, ..)| keys);
        let keys: HashSet<&str> = keys.map(String::as_str).collect();
        let mut recorded = vec![None; claims.len()];
        if keys.len() < claims.len() {
            let rows = rows_of(&mut transaction, claims).await?;
            for (claim, recorded) in claims.iter().zip(&mut recorded) {
                let key = claim.key.as_str();
                if !keys.contains(key) {
                    *recorded = Some(verdict(claim, rows.get(key))?);
                }
            }
        }
        let Some((mut keys, id, table)) = inserted else {
            transaction.rollback().await?;
            return Ok(BatchTransaction {
                transaction: None,
                recorded,
            });
        };
        self.check_table(table)?;
        let transaction = PostgresTransaction::new(transaction, id, keys.swap_remove(0));
        Ok(BatchTransaction {
            transaction: Some(transaction),
            recorded,
        })
    }

    async fn commit(&self, mut transaction: PostgresTransaction) -> Result<(), CommitError> {
        if let Err(error) = self.store_sent(&mut transaction).await
            && !is_aborted(&error)
        {
            self.roll_back_and_check(transaction).await?;
            return Err(CommitError::RolledBack(error.into()));
        }
        match transaction.state(BEFORE_COMMIT).await {
            TransactionState::Current => {}
            TransactionState::Other => return Err(transaction.ended_by_handler().await),
            // A COMMIT would return no error: PostgreSQL rolls back a transaction in which a
            // statement failed, and reports success.
            TransactionState::Failed => {
                self.roll_back_and_check(transaction).await?;
                return Err(CommitError::RolledBack(
                    "a statement of the handler failed, and the handler returned Ok: return its error, or use a savepoint".into(),
                ));
            }
            TransactionState::Lost(error) => return Err(CommitError::RolledBack(error.into())),
        }
        if savepoint_depth::end_savepoints(&mut transaction.inner).await {
            return Err(transaction.ended_by_handler().await);
        }
        let PostgresTransaction { inner, id, key, .. } = transaction;
        fault::point("postgres.commit.before");
        let Err(error) = inner.commit().await else {
            return Ok(());
        };
        if failure::was_rolled_back(&error) {
            return Err(CommitError::RolledBack(error.into()));
        }
        // The connection is lost, before or after the server executed the COMMIT.
        match self.outcome(&key, &id).await {
            TransactionOutcome::Committed => Ok(()),
            TransactionOutcome::RolledBack => Err(CommitError::RolledBack(error.into())),
            TransactionOutcome::Unknown => Err(CommitError::Unknown(error.into())),
        }
    }

    async fn rollback(&self, mut transaction: PostgresTransaction) -> Result<(), CommitError> {
        if transaction.was_rolled_back_by_begin {
            let PostgresTransaction { inner, key, id, .. } = &mut transaction;
            return match outcome(inner, key, id).await {
                Ok(TransactionOutcome::Committed) => Err(transaction.ended_by_handler().await),
                _ => Ok(()),
            };
        }
        match transaction.state(CURRENT).await {
            TransactionState::Other => Err(transaction.ended_by_handler().await),
            TransactionState::Lost(_) => Ok(()), // the server rolls back
            TransactionState::Current | TransactionState::Failed => {
                self.roll_back_and_check(transaction).await
            }
        }
    }
}

/// Which transaction a connection is in.
enum TransactionState {
    /// The transaction of the message.
    Current,
    /// A transaction in which a statement failed.
    Failed,
    /// Another transaction than that of the message, or none.
    Other,
    /// The connection is lost, so the server rolls back.
    Lost(sqlx::Error),
}

impl PostgresTransaction {
    /// Asks the server which transaction the connection is in, by [`CURRENT`] or [`BEFORE_COMMIT`].
    async fn state(&mut self, statement: &'static str) -> TransactionState {
        let current = query(statement).fetch_one(&mut *self.inner).await;
        match current.and_then(|row| row.try_get::<Option<String>, _>(0)) {
            Ok(current) if current.as_ref() == Some(&self.id) => TransactionState::Current,
            // Also if an earlier statement and then a `begin` of the handler failed: sqlx has
            // rolled back the whole transaction.
            Ok(_) => TransactionState::Other,
            Err(error) if is_aborted(&error) => TransactionState::Failed,
            Err(error) => TransactionState::Lost(error),
        }
    }

    /// Rolls back the transaction that the handler has begun, if any, and returns the error.
    async fn ended_by_handler(mut self) -> CommitError {
        savepoint_depth::end_savepoints(&mut self.inner).await;
        let _ = self.inner.rollback().await; // fails if nothing is open
        CommitError::EndedByHandler(
            "the handler ended its transaction, so its changes and the record of the message may not have been committed \
             together: remove COMMIT and ROLLBACK from the handler, return the error of a statement before the next one, do not drop \
             the begin() of a savepoint, end each savepoint, and check the rows of this message"
                .into(),
        )
    }
}

/// The outcome of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransactionOutcome {
    Committed,
    RolledBack,
    /// The transaction is in progress, or the server does not know it, as after a failover.
    Unknown,
}

/// The outcome of the transaction with this id, by the record of its key.
async fn outcome(
    connection: &mut PgConnection,
    key: &str,
    id: &str,
) -> Result<TransactionOutcome, sqlx::Error> {
    let found = query(OUTCOME).bind(key).bind(id);
    let found = found.fetch_one(connection).await?;
    Ok(match (found.try_get(0)?, found.try_get(1)?) {
        (true, _) => TransactionOutcome::Committed,
        (false, Some("aborted")) => TransactionOutcome::RolledBack,
        (false, _) => TransactionOutcome::Unknown,
    })
}

impl PostgresInbox {
    /// Inserts the messages that the handler has sent, unless it has ended its transaction.
    async fn store_sent(&self, transaction: &mut PostgresTransaction) -> Result<(), sqlx::Error> {
        let table = self.outbox.get().map_or(outbox::TABLE, String::as_str);
        let PostgresTransaction {
            inner, id, sent, ..
        } = transaction;
        sent.insert(inner, table, id).await
    }

    /// Reads the outcome of a transaction on a connection of the store.
    async fn outcome(&self, key: &str, id: &str) -> TransactionOutcome {
        let timeout = self.store.timeout_setting();
        let read = async |connection: &mut PgConnection| outcome(connection, key, id).await;
        let outcome = self.store.connections().read(timeout, read).await;
        outcome.unwrap_or(TransactionOutcome::Unknown)
    }

    /// Rolls back, and checks that the record was not committed: the handler may have committed
    /// the transaction and begun another one, in which a statement failed.
    async fn roll_back_and_check(
        &self,
        mut transaction: PostgresTransaction,
    ) -> Result<(), CommitError> {
        savepoint_depth::end_savepoints(&mut transaction.inner).await;
        // The empty transaction that follows is that of the check, and the one that sqlx ends.
        let rolled_back = transaction.inner.execute("ROLLBACK AND CHAIN").await;
        if rolled_back.is_err() {
            return Ok(()); // the connection is lost: the server rolls back
        }
        let outcome = outcome(&mut transaction.inner, &transaction.key, &transaction.id).await;
        if let Ok(TransactionOutcome::Committed) = outcome {
            return Err(transaction.ended_by_handler().await);
        }
        let _ = transaction.inner.rollback().await;
        Ok(())
    }
}

/// Which rows the record may replace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replace {
    Expired,
    Any,
}

/// The rows of the keys of these claims.
async fn rows_of(
    connection: &mut PgConnection,
    claims: &[Operation],
) -> Result<HashMap<String, SelectedRow>, sqlx::Error> {
    let keys: Vec<&str> = claims.iter().map(|claim| claim.key.as_str()).collect();
    let rows = query(LOOK_UP).bind(&keys).fetch_all(connection).await?;
    rows.iter()
        .map(|row| Ok((row.try_get::<String, _>(0)?, decode_row(row, 1)?)))
        .collect()
}

/// Inserts the records of claims whose keys have none. Returns these keys, the id of the transaction
/// and the oid of the table; `None` if it inserted none.
async fn insert_batch(
    connection: &mut PgConnection,
    claims: &[Operation],
    longest_run: Duration,
) -> Result<Option<(Vec<String>, String, i64)>, sqlx::Error> {
    let keys: Vec<&str> = claims.iter().map(|claim| claim.key.as_str()).collect();
    let fingerprints: Vec<Option<i64>> = claims.iter().map(fingerprint).collect();
    let window = claims.iter().map(|claim| claim.terms.window).max();
    let row = query(INSERT_BATCH)
        .bind(&keys)
        .bind(time_to_live_ms(
            window.unwrap_or_default().saturating_add(longest_run),
        ))
        .bind(&fingerprints)
        .bind(milliseconds(LOCK_TIMEOUT).to_string())
        .bind(idle_timeout(longest_run))
        .fetch_one(connection)
        .await?;
    match row.try_get::<Option<Vec<String>>, _>(0)? {
        Some(keys) => Ok(Some((keys, row.try_get(1)?, row.try_get(2)?))),
        None => Ok(None),
    }
}

/// The fingerprint in the record of a claim.
fn fingerprint(claim: &Operation) -> Option<i64> {
    MarkerColumns::of(Marker::Done(claim.terms.fingerprint)).and_then(|columns| columns.fingerprint)
}

/// `idle_in_transaction_session_timeout` of a transaction whose handler runs at most this long.
fn idle_timeout(longest_run: Duration) -> String {
    let idle = milliseconds(longest_run.saturating_add(IDLE_MARGIN)).min(i32::MAX.into());
    idle.to_string()
}

/// Inserts the record of a claim. Returns the id of the transaction and the oid of the table, or
/// `None` if the key has a row that may not be replaced.
async fn insert(
    connection: &mut PgConnection,
    claim: &Operation,
    longest_run: Duration,
    replace: Replace,
) -> Result<Option<(String, i64)>, sqlx::Error> {
    let time_to_live = claim.terms.window.saturating_add(longest_run);
    let inserted = query(INSERT)
        .bind(claim.key.as_str())
        .bind(time_to_live_ms(time_to_live))
        .bind(fingerprint(claim))
        .bind(replace == Replace::Any)
        .bind(milliseconds(LOCK_TIMEOUT).to_string())
        .bind(idle_timeout(longest_run))
        .fetch_optional(connection)
        .await?;
    inserted
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .transpose()
}

/// The verdict for a claim on a key with this row; without a row, or with an expired one, the key
/// is absent.
fn verdict(claim: &Operation, row: Option<&SelectedRow>) -> Result<Verdict, StoreError> {
    let key = claim.key.as_str();
    let (marker, age) = match row {
        Some(SelectedRow::Row { left, row, .. }) if *left > 0 => {
            let marker = row.marker().map_err(|_| unreadable(key))?;
            (marker, row.age(*left))
        }
        Some(SelectedRow::Unreadable) => return Err(unreadable(key).into()),
        Some(SelectedRow::Row { .. } | SelectedRow::Missing) | None => {
            (Marker::Absent, Age::Of(Duration::ZERO))
        }
    };
    Ok(apply(marker, age, claim).1)
}

/// Whether an earlier statement of the transaction failed.
fn is_aborted(error: &sqlx::Error) -> bool {
    let error = error.as_database_error().and_then(|error| error.code());
    error.as_deref() == Some("25P02")
}

impl fmt::Debug for PostgresInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresInbox")
            .field("store", &self.store)
            .field(
                "max_connections",
                &self.pool.options().get_max_connections(),
            )
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PostgresTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresTransaction")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}
