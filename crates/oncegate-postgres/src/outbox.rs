//! The outbox: messages that transactions send, and the session of the leader, the relay that
//! publishes them. A row is parked, which means not published, while its column `error` is set.

use std::collections::HashSet;
use std::fmt;
use std::time::{Duration, Instant};

use oncegate_core::internal::{Lock, StoreFailure};
use oncegate_core::outbox::{
    Outbox, OutboxLevel, OutboxMessage, OutboxRow, OutboxSession, Outgoing, OutgoingError,
    UnsentQuery,
};
use oncegate_core::{MessageId, StoreError};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor, PgPool, QueryBuilder, Row, query};
use tokio::sync::Mutex;

use crate::failure::{self, StatementStage};
use crate::store::Postgres;

/// The table, for sessions whose `search_path` finds it.
pub(crate) const TABLE: &str = "oncegate_outbox";

/// The limits of one transaction, because its messages are in memory until the commit.
const MAX_SENT: usize = 10_000;
const MAX_SENT_BYTES: usize = 64 * 1024 * 1024;

/// The timeout of an attempt to connect and to become the leader.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Inserts messages in their order, if the current transaction has the id $1. Otherwise the
/// handler has ended the transaction of its message, which the commit finds out.
fn insert_statement(table: &str) -> AssertSqlSafe<String> {
    AssertSqlSafe(format!(
        "INSERT INTO {table} (id, exchange, destination, key, headers, body)
        SELECT sent.id, sent.exchange, sent.destination, sent.key, sent.headers, sent.body
        FROM unnest($2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::bytea[])
            WITH ORDINALITY AS sent (id, exchange, destination, key, headers, body, position)
        WHERE pg_current_xact_id_if_assigned()::text = $1 ORDER BY sent.position"
    ))
}

/// The settings of the leader's session. The server ends the session, and with it the lock, within
/// 20 s after the machine of the leader failed or was cut off; by then a leader that was cut off
/// begins no further message. A commit waits for no standby: a change that a failover loses only
/// repeats a message with its id, and a missing standby would block the leader for ever.
const SESSION: &str = "SET synchronous_commit = local; SET statement_timeout = 30000; SET idle_session_timeout = 0; SET enable_seqscan = off; SET jit = off;
    SET default_transaction_isolation = 'read committed';
    SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; SET tcp_user_timeout = 20000";

/// Takes the lock of the leader, without waiting: a statement that waits would keep the server from
/// removing deleted rows. The number is arbitrary; the oid is that of the table, so that each
/// outbox of a database has a lock of its own.
const LEAD: &str =
    "SELECT pg_try_advisory_lock(1702060386, to_regclass('oncegate_outbox')::oid::int4)";

/// How many destinations a read considers. The next read continues after the last one.
const MAX_ADDRESSES: usize = 1_000;

/// For this time, a read that finds nothing continues with the next destinations.
const MAX_PASS: Duration = Duration::from_secs(1);

/// The first exchanges and destinations of unsent rows after those of the parameters. They are found
/// one after the other in the index, so that the rows of a failing one, of which there may be
/// millions, are not read. With 1,000,000 destinations, 1,000 take 9 ms, and all 31 s.
const ADDRESSES: &str = "
WITH RECURSIVE address AS (
    (SELECT exchange, destination FROM oncegate_outbox
    WHERE error IS NULL AND (exchange, destination) > ($1, $2) ORDER BY exchange, destination LIMIT 1)
    UNION ALL
    SELECT next.exchange, next.destination FROM address CROSS JOIN LATERAL (
        SELECT o.exchange, o.destination FROM oncegate_outbox AS o
        WHERE o.error IS NULL AND (o.exchange, o.destination) > (address.exchange, address.destination)
        ORDER BY o.exchange, o.destination LIMIT 1
    ) AS next
)
SELECT exchange, destination FROM address LIMIT $3";

/// Rows of these destinations, in the order of their numbers, from all that are present. Numbers are
/// committed in any order, so `number > <the last one>` would lose rows. Of 1,000,000 rows of
/// 1,000,000 destinations, 512 take 30 ms.
///
/// `OFFSET 0` keeps the planner from joining each row with all parked ones of its destination, which
/// with 20,000 of them, before they were analyzed, took 8 s instead of 3 ms.
const READ: &str = "
WITH unsent AS MATERIALIZED (
    SELECT u.number, u.size FROM unnest($2::text[], $3::text[]) AS a (exchange, destination) CROSS JOIN LATERAL (
        SELECT o.number, octet_length(o.body) AS size FROM oncegate_outbox AS o
        WHERE o.error IS NULL AND o.exchange = a.exchange AND o.destination = a.destination AND o.number <> ALL ($1)
            AND NOT EXISTS (SELECT FROM oncegate_outbox AS parked WHERE parked.error IS NOT NULL AND parked.exchange = o.exchange
                AND parked.destination = o.destination AND parked.key = o.key AND parked.number < o.number OFFSET 0)
        ORDER BY o.number LIMIT $6
    ) AS u ORDER BY u.number LIMIT $4
)
SELECT number, id, exchange, destination, key, headers, body
FROM (SELECT number, sum(size) OVER (ORDER BY number) - size AS bytes_before FROM unsent) AS sized
    JOIN oncegate_outbox USING (number)
WHERE bytes_before < $5 ORDER BY number";

/// The rows of one destination that a read of many destinations considers at least.
const MIN_ROWS_OF_ADDRESS: usize = 16;

/// Those of these rows that are present and not parked.
const READ_AGAIN: &str = "
SELECT number, id, exchange, destination, key, headers, body FROM oncegate_outbox
WHERE number = ANY ($1) AND error IS NULL";

/// The level, and whether this session has the lock of [`LEAD`].
const LEVEL: &str = "
SELECT (SELECT count(*) FROM (SELECT FROM oncegate_outbox WHERE error IS NULL LIMIT 100000) AS unsent),
    (SELECT count(*) FROM (SELECT FROM oncegate_outbox WHERE error IS NOT NULL LIMIT 100000) AS parked),
    (SELECT extract(epoch FROM clock_timestamp() - created)::float8 FROM oncegate_outbox WHERE error IS NULL
        ORDER BY number LIMIT 1),
    EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND classid = 1702060386
        AND objid = to_regclass('oncegate_outbox')::oid AND granted)";

/// The messages that a transaction has sent, which its commit stores.
#[derive(Debug, Default)]
pub(crate) struct SentMessages {
    messages: Vec<OutboxMessage>,
    bytes: usize,
}

impl SentMessages {
    /// Adds a message, with the id of its number.
    pub(crate) fn add(&mut self, key: &str, message: Outgoing) -> Result<(), OutgoingError> {
        let number = self.messages.len() + 1;
        let message = message.with_id(outgoing_id(key, number))?;
        let bytes = self.bytes + message.size();
        if number > MAX_SENT || bytes > MAX_SENT_BYTES {
            return Err(OutgoingError::new(format!(
                "the handler has sent more than {MAX_SENT} messages or {MAX_SENT_BYTES} bytes: send fewer for one message"
            )));
        }
        self.bytes = bytes;
        self.messages.push(message);
        Ok(())
    }

    /// Inserts the messages into this table, unless the current transaction has another id. Does
    /// nothing without messages.
    pub(crate) async fn insert(
        &self,
        connection: &mut PgConnection,
        table: &str,
        transaction: &str,
    ) -> Result<(), sqlx::Error> {
        if self.messages.is_empty() {
            return Ok(());
        }
        fn column<'a, T>(
            messages: &'a [OutboxMessage],
            value: impl Fn(&'a OutboxMessage) -> T,
        ) -> Vec<T> {
            messages.iter().map(value).collect()
        }
        let messages = &self.messages;
        let headers = |message: &OutboxMessage| serde_json::to_string(&message.headers);
        let headers: Result<Vec<String>, _> = messages.iter().map(headers).collect();
        let headers = headers.map_err(|error| sqlx::Error::Encode(error.into()))?;
        query(insert_statement(table))
            .bind(transaction)
            .bind(column(messages, |message| message.id.as_str()))
            .bind(column(messages, |message| message.exchange.as_str()))
            .bind(column(messages, |message| message.destination.as_str()))
            .bind(column(messages, |message| message.key.as_deref()))
            .bind(headers)
            .bind(column(messages, |message| &message.body[..]))
            .execute(connection)
            .await?;
        Ok(())
    }
}

/// The id of a message: the key of the handled message, with `/` after the scope, and the number of
/// the message.
///
/// It is hashed if it would have another meaning for another scope (`/` in the scope, or in an id
/// without one), or if [`MessageId`] does not use it unchanged: the property `message_id` of AMQP
/// has at most 255 bytes.
fn outgoing_id(key: &str, number: usize) -> String {
    let key_and_number = format!("{key}/{number}");
    let (scope, readable) = match key.split_once('|') {
        Some((scope, id)) => (scope, format!("{scope}/{id}/{number}")),
        None => (key, key_and_number.clone()),
    };
    if !scope.contains('/') && MessageId::stored(&readable).is_some() {
        return readable;
    }
    let hashed = MessageId::new(key_and_number).map(MessageId::hashed);
    hashed.map_or(readable, |id| id.to_string())
}

/// The outbox in the table `oncegate_outbox` of a PostgreSQL database, version 14 or newer: what a
/// [`Relay`](oncegate_core::Relay) reads. Handlers write to it with
/// [`PostgresTransaction::send`](crate::PostgresTransaction::send).
///
/// The relay that publishes has a connection of its own, with a session advisory lock. A connection
/// pooler must be in session mode.
pub struct PostgresOutbox {
    store: Postgres,
    /// The connection of a relay that waits to become the leader.
    waiting: Lock<Option<PgConnection>>,
}

impl PostgresOutbox {
    /// The outbox in the database of this pool, over a connection that does not count as the
    /// pool's.
    pub fn new(pool: &PgPool) -> Self {
        Self {
            store: Postgres::pool(pool),
            waiting: Lock::default(),
        }
    }

    /// Creates the tables at the start: [`Postgres::create_tables`].
    #[must_use]
    pub fn create_tables(mut self) -> Self {
        self.store = self.store.create_tables();
        self
    }

    fn failure(&self, error: sqlx::Error) -> StoreFailure {
        let server = self.store.connections().server();
        failure::of(error, StatementStage::Connecting, &server)
    }

    async fn connect(&self) -> Result<PgConnection, StoreFailure> {
        let options = match self.store.connections().options() {
            Ok(options) => options.clone().application_name("oncegate relay"),
            Err(problem) => return Err(StoreFailure::Misconfigured(problem.clone())),
        };
        let connect = async {
            let mut connection = PgConnection::connect_with(&options).await?;
            connection.execute(SESSION).await?;
            Ok(connection)
        };
        connect.await.map_err(|error| self.failure(error))
    }

    async fn try_lock(&self) -> Result<Option<PostgresOutboxSession>, StoreFailure> {
        let waiting = self.waiting.lock().take();
        let mut connection = match waiting {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let locked = query(LEAD).fetch_one(&mut connection).await;
        let locked = locked.and_then(|row| row.try_get::<Option<bool>, _>(0));
        match locked.map_err(|error| self.failure(error))? {
            Some(true) => Ok(Some(PostgresOutboxSession {
                connection: Mutex::new(connection),
                read_until: Lock::default(),
                server: self.store.connections().server(),
            })),
            Some(false) => {
                *self.waiting.lock() = Some(connection);
                Ok(None)
            }
            None => Err(StoreFailure::misconfigured(
                "the table oncegate_outbox does not exist: create it with PostgresOutbox::create_tables or Postgres::migrate",
            )),
        }
    }
}

impl Outbox for PostgresOutbox {
    type Session = PostgresOutboxSession;

    fn described(&self) -> String {
        format!("PostgreSQL at {}", self.store.connections().server())
    }

    async fn preflight(&self) -> Result<(), StoreError> {
        let state = self.store.prepare_tables().await?;
        let connections = self.store.connections();
        let user = connections.options().as_ref();
        let user = user.map_or("", |options| options.get_username());
        Ok(state.check_relay_rights(&connections.server(), user)?)
    }

    async fn try_lead(&self) -> Result<Option<PostgresOutboxSession>, StoreError> {
        let locked = tokio::time::timeout(TIMEOUT, self.try_lock()).await;
        let locked = locked.unwrap_or_else(|_| {
            Err(StoreFailure::not_applied(
                self.store.connections().no_answer(TIMEOUT),
            ))
        });
        Ok(locked?)
    }
}

impl fmt::Debug for PostgresOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOutbox")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// The session of the relay that publishes. The advisory lock is that of its connection, over which
/// all its statements go: once the lock is lost, they fail.
pub struct PostgresOutboxSession {
    connection: Mutex<PgConnection>,
    /// The last exchange and destination of the last read; empty if none were left.
    read_until: Lock<(String, String)>,
    server: String,
}

impl PostgresOutboxSession {
    fn failure(&self, error: sqlx::Error) -> StoreFailure {
        failure::of(error, StatementStage::Executing, &self.server)
    }

    async fn execute<'q>(
        &self,
        statement: sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>,
    ) -> Result<(), StoreError> {
        let mut connection = self.connection.lock().await;
        let executed = statement.execute(&mut *connection).await;
        Ok(executed.map(drop).map_err(|error| self.failure(error))?)
    }

    /// The messages of these rows. Parks unreadable ones, and then returns none, because later rows
    /// of their keys have to wait.
    async fn decode_all(&self, rows: &[PgRow]) -> Result<Vec<OutboxRow>, StoreError> {
        let mut messages = Vec::with_capacity(rows.len());
        let mut is_readable = true;
        for row in rows {
            let number = row.try_get(0).map_err(|error| self.failure(error))?;
            match decode(row) {
                Ok(message) => messages.push(OutboxRow { number, message }),
                Err(error) => {
                    tracing::error!(number, %error, "unreadable row of the table oncegate_outbox; it is parked; correct or delete it");
                    self.park(number, &format!("unreadable row: {error}"))
                        .await?;
                    is_readable = false;
                }
            }
        }
        if !is_readable {
            messages.clear();
        }
        Ok(messages)
    }
}

impl OutboxSession for PostgresOutboxSession {
    async fn read(&self, unsent: &UnsentQuery) -> Result<Vec<OutboxRow>, StoreError> {
        let started = Instant::now();
        let failing: HashSet<&(String, String)> = unsent.except_destinations.iter().collect();
        let mut connection = self.connection.lock().await;
        let rows = loop {
            let after = self.read_until.lock().clone();
            let addresses = addresses(&mut connection, &after).await;
            let addresses = addresses.map_err(|error| self.failure(error))?;
            let is_full = addresses.len() == MAX_ADDRESSES;
            let last = addresses.last().filter(|_| is_full).cloned();
            *self.read_until.lock() = last.unwrap_or_default();
            let open = addresses.iter().filter(|it| !failing.contains(it));
            let rows = read_rows(&mut connection, unsent, open).await;
            let rows = rows.map_err(|error| self.failure(error))?;
            if !rows.is_empty() || !is_full || started.elapsed() > MAX_PASS {
                break rows;
            }
        };
        drop(connection);
        self.decode_all(&rows).await
    }

    async fn read_again(&self, numbers: &[i64]) -> Result<Vec<OutboxRow>, StoreError> {
        let mut connection = self.connection.lock().await;
        let rows = query(READ_AGAIN)
            .bind(numbers)
            .fetch_all(&mut *connection)
            .await
            .map_err(|error| self.failure(error))?;
        drop(connection);
        self.decode_all(&rows).await
    }

    async fn remove(&self, numbers: &[i64]) -> Result<(), StoreError> {
        let delete = query("DELETE FROM oncegate_outbox WHERE number = ANY ($1)");
        self.execute(delete.bind(numbers)).await
    }

    async fn park(&self, number: i64, error: &str) -> Result<(), StoreError> {
        let update = query("UPDATE oncegate_outbox SET error = $2 WHERE number = $1");
        let error = error.replace('\0', "\u{fffd}"); // PostgreSQL stores no NUL
        self.execute(update.bind(number).bind(error)).await
    }

    async fn level(&self) -> Result<OutboxLevel, StoreError> {
        let mut connection = self.connection.lock().await;
        let row = query(LEVEL).fetch_one(&mut *connection).await;
        let level = row.and_then(|row| {
            let count = |index| row.try_get::<i64, _>(index).map(i64::unsigned_abs);
            let age: Option<f64> = row.try_get(2)?;
            let level = OutboxLevel {
                unsent: count(0)?,
                parked: count(1)?,
                oldest_age: Duration::try_from_secs_f64(age.unwrap_or(0.0)).unwrap_or_default(),
            };
            Ok((level, row.try_get(3)?))
        });
        match level.map_err(|error| self.failure(error))? {
            (level, true) => Ok(level),
            (_, false) => Err(StoreError::NotApplied(
                "this session has lost its advisory lock; a connection pooler must be in session mode".into(),
            )),
        }
    }

    async fn close(self) {
        let _ = self.connection.into_inner().close().await; // the server ends the session in any case
    }
}

impl fmt::Debug for PostgresOutboxSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOutboxSession")
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

async fn addresses(
    connection: &mut PgConnection,
    (exchange, destination): &(String, String),
) -> Result<Vec<(String, String)>, sqlx::Error> {
    let select = query(ADDRESSES).bind(exchange).bind(destination);
    let rows = select.bind(MAX_ADDRESSES as i64).fetch_all(connection);
    let rows = rows.await?;
    let of_row = |row: &PgRow| Ok((row.try_get(0)?, row.try_get(1)?));
    rows.iter().map(of_row).collect()
}

async fn read_rows(
    connection: &mut PgConnection,
    unsent: &UnsentQuery,
    open: impl Iterator<Item = &(String, String)>,
) -> Result<Vec<PgRow>, sqlx::Error> {
    let (exchanges, destinations): (Vec<&str>, Vec<&str>) = open
        .map(|(exchange, destination)| (exchange.as_str(), destination.as_str()))
        .unzip();
    let of_address = unsent.max_rows / exchanges.len().max(1);
    let limit = |rows| i64::try_from(rows).unwrap_or(i64::MAX);
    query(READ)
        .bind(&unsent.except)
        .bind(exchanges)
        .bind(destinations)
        .bind(limit(unsent.max_rows))
        .bind(limit(unsent.max_bytes))
        .bind(limit(of_address.max(MIN_ROWS_OF_ADDRESS)))
        .fetch_all(connection)
        .await
}

/// The message of a row of [`READ`] or [`READ_AGAIN`].
fn decode(row: &PgRow) -> Result<OutboxMessage, sqlx::Error> {
    let (id, destination): (String, String) = (row.try_get(1)?, row.try_get(3)?);
    let mut message = OutboxMessage::new(id, destination, row.try_get::<Vec<u8>, _>(6)?);
    message.exchange = row.try_get(2)?;
    message.key = row.try_get::<Option<Vec<u8>>, _>(4)?.map(Into::into);
    message.headers =
        serde_json::from_str(row.try_get(5)?).map_err(|error| sqlx::Error::Decode(error.into()))?;
    Ok(message)
}

/// The columns of [`ListedMessage`].
const LIST: &str = "
SELECT number, id, exchange, destination, floor(extract(epoch FROM created) * 1000)::int8, octet_length(body)::int8, error
FROM oncegate_outbox WHERE true";

/// Which messages of the outbox a command is for. The default is all parked ones: the relay does not
/// publish a row that has an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboxFilter {
    /// Also messages that are not parked.
    pub unsent: bool,
    /// Only this queue, topic or routing key.
    pub destination: Option<String>,
    /// Only these rows; empty for all.
    pub numbers: Vec<i64>,
}

/// A message of the outbox, without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedMessage {
    /// The number of the row.
    pub number: i64,
    /// The id.
    pub id: String,
    /// The RabbitMQ exchange; empty for the default exchange, and for Kafka.
    pub exchange: String,
    /// The queue, topic or routing key.
    pub destination: String,
    /// When it was sent, in milliseconds since 1970, by the server's clock.
    pub created_ms: u64,
    /// The size of the body.
    pub bytes: u64,
    /// Why it cannot be published or read; `None` if it is not parked.
    pub error: Option<String>,
}

/// For operators.
impl Postgres {
    /// The first messages of the outbox that this filter selects, in the order of their rows.
    ///
    /// # Errors
    /// As for [`Store::apply`](oncegate_core::Store::apply).
    pub async fn list_outbox(
        &self,
        filter: &OutboxFilter,
        limit: usize,
    ) -> Result<Vec<ListedMessage>, StoreError> {
        // A condition that depends on a parameter would keep a generic plan from using an index.
        let mut list = QueryBuilder::new(LIST);
        if !filter.unsent {
            list.push(" AND error IS NOT NULL");
        }
        if let Some(destination) = &filter.destination {
            list.push(" AND destination = ").push_bind(destination);
        }
        if !filter.numbers.is_empty() {
            let numbers = list.push(" AND number = ANY (");
            numbers.push_bind(&filter.numbers).push(")");
        }
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        list.push(" ORDER BY number LIMIT ").push_bind(limit);
        let read = async |connection: &mut PgConnection| {
            let rows = list.build().fetch_all(connection).await?;
            rows.iter().map(listed).collect()
        };
        let listed = self.connections().read(self.timeout_setting(), read);
        Ok(listed.await?)
    }

    /// Lets the relay publish a parked message again. Returns whether the row was parked.
    ///
    /// # Errors
    /// As for [`Store::apply`](oncegate_core::Store::apply).
    pub async fn retry_outbox(&self, number: i64) -> Result<bool, StoreError> {
        self.change_outbox(
            "UPDATE oncegate_outbox SET error = NULL WHERE number = $1 AND error IS NOT NULL",
            number,
        )
        .await
    }

    /// Deletes a listed message. If it is not parked, a relay may be publishing it. Returns whether
    /// the row existed, and is parked if it was when it was listed.
    ///
    /// # Errors
    /// As for [`Store::apply`](oncegate_core::Store::apply).
    pub async fn drop_outbox(&self, message: &ListedMessage) -> Result<bool, StoreError> {
        let sql = match message.error {
            Some(_) => "DELETE FROM oncegate_outbox WHERE number = $1 AND error IS NOT NULL",
            None => "DELETE FROM oncegate_outbox WHERE number = $1 AND error IS NULL",
        };
        self.change_outbox(sql, message.number).await
    }

    async fn change_outbox(&self, sql: &'static str, number: i64) -> Result<bool, StoreError> {
        let change =
            async |connection: &mut PgConnection| query(sql).bind(number).execute(connection).await;
        let (timeout, stage) = (self.timeout_setting(), StatementStage::Executing);
        let changed = self.connections().request(timeout, stage, change).await?;
        Ok(changed.rows_affected() > 0)
    }
}

fn listed(row: &PgRow) -> Result<ListedMessage, sqlx::Error> {
    Ok(ListedMessage {
        number: row.try_get(0)?,
        id: row.try_get(1)?,
        exchange: row.try_get(2)?,
        destination: row.try_get(3)?,
        created_ms: row.try_get::<i64, _>(4)?.unsigned_abs(),
        bytes: row.try_get::<i64, _>(5)?.unsigned_abs(),
        error: row.try_get(6)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_fits_into_the_property_of_amqp() {
        assert_eq!(outgoing_id("ledger|order-7", 1), "ledger/order-7/1");
        assert_eq!(outgoing_id("order-7", 2), "order-7/2");
        let longest = format!("{}|{}", "s".repeat(100), "i".repeat(200));
        let (first, second) = (outgoing_id(&longest, 1), outgoing_id(&longest, 2));
        assert_eq!((first.len(), second.len()), (66, 66));
        assert_ne!(first, second);
        assert_eq!(first, outgoing_id(&longest, 1));
    }

    #[test]
    fn different_keys_never_give_equal_ids() {
        let (long, in_scope) = ("i".repeat(200), "ledger|".to_owned());
        let keys = [
            "ledger|eu/7",
            "ledger/eu|7",
            "ledger/eu/7",
            "ledger|eu/7/1",
            "ledger/eu|7/1",
            "ledger/7",
            "ledger|7",
            "7",
            "h:7",
            &(in_scope + &long),
            &format!("ledger/{long}"),
        ];
        let ids: HashSet<String> = keys.iter().map(|key| outgoing_id(key, 1)).collect();
        assert_eq!(ids.len(), keys.len(), "{ids:?}");
        assert_eq!(outgoing_id("ledger|eu/7", 1), "ledger/eu/7/1");
    }
}
