//! The checks at the start: whether the server and the table can be used, and whether answered
//! operations survive a crash of the server.

use oncegate_core::Persistence;
use oncegate_core::internal::StoreFailure;
use sqlx::Row;
use sqlx::postgres::PgConnection;

/// PostgreSQL 14: the first release that scans a range of `ctid`, which deletes expired rows.
const OLDEST_VERSION: i32 = 140_000;

/// The settings of the server and the properties of the table that the guarantees depend on.
#[derive(Clone, Debug)]
pub(crate) struct PostgresState {
    version: i32,
    is_replica: bool,
    is_read_only: bool,
    fsync: String,
    full_page_writes: String,
    is_unlogged: bool,
    has_rights: bool,
    /// The oid of `oncegate_markers`, by the `search_path` of the session.
    table: Option<i64>,
    /// The name of `oncegate_outbox` with its schema.
    outbox: Option<String>,
    /// Whether the user may read, change and delete rows of the outbox, as a relay does.
    has_relay_rights: bool,
}

const STATE: &str = "
SELECT current_setting('server_version_num')::int4, pg_is_in_recovery(), current_setting('fsync'),
    current_setting('full_page_writes'),
    coalesce((SELECT bool_or(relpersistence <> 'p') FROM pg_class
        WHERE oid IN (to_regclass('oncegate_markers'), to_regclass('oncegate_results'))), false),
    coalesce((SELECT bool_and(coalesce(has_table_privilege(to_regclass(table_name), right_name), false))
        FROM unnest(ARRAY['oncegate_markers', 'oncegate_results']) AS table_name,
            unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_name), false),
    current_setting('transaction_read_only') = 'on', to_regclass('oncegate_markers')::oid::int8,
    (SELECT format('%I.%I', nspname, relname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE pg_class.oid = to_regclass('oncegate_outbox')),
    coalesce((SELECT bool_and(has_table_privilege(to_regclass('oncegate_outbox'), right_name))
        FROM unnest(ARRAY['SELECT', 'UPDATE', 'DELETE']) AS right_name), false)";

/// Reads the state of the server.
///
/// # Errors
/// The query failed.
pub(crate) async fn inspect(connection: &mut PgConnection) -> Result<PostgresState, sqlx::Error> {
    let row = sqlx::query(STATE).fetch_one(connection).await?;
    Ok(PostgresState {
        version: row.try_get(0)?,
        is_replica: row.try_get(1)?,
        is_read_only: row.try_get(6)?,
        fsync: row.try_get(2)?,
        full_page_writes: row.try_get(3)?,
        is_unlogged: row.try_get(4)?,
        has_rights: row.try_get(5)?,
        table: row.try_get(7)?,
        outbox: row.try_get(8)?,
        has_relay_rights: row.try_get(9)?,
    })
}

impl PostgresState {
    /// Checks that the server has a supported version and accepts writes.
    ///
    /// # Errors
    /// It does not; the text has the remedy.
    pub(crate) fn check_server(&self, server: &str) -> Result<(), StoreFailure> {
        if self.version < OLDEST_VERSION {
            let (major, oldest) = (self.version / 10_000, OLDEST_VERSION / 10_000);
            return Err(StoreFailure::misconfigured(format!(
                "PostgreSQL at {server} has version {major}: use version {oldest} or newer"
            )));
        }
        if self.is_replica {
            return Err(StoreFailure::misconfigured(format!(
                "PostgreSQL at {server} is a read-only replica: use the address of the primary"
            )));
        }
        if self.is_read_only {
            return Err(StoreFailure::misconfigured(format!(
                "PostgreSQL at {server} has default_transaction_read_only = on for this user: ALTER ROLE … SET default_transaction_read_only = off"
            )));
        }
        Ok(())
    }

    /// Checks that the user has the rights on the tables that the store needs.
    ///
    /// # Errors
    /// A right is missing; the text has the `GRANT` of all of them.
    pub(crate) fn check_rights(&self, server: &str, user: &str) -> Result<(), StoreFailure> {
        if self.has_rights {
            return Ok(());
        }
        Err(StoreFailure::misconfigured(format!(
            "the user {user} of PostgreSQL at {server} may not use the tables oncegate_markers and oncegate_results: \
             GRANT SELECT, INSERT, UPDATE, DELETE ON oncegate_markers, oncegate_results TO {user}"
        )))
    }

    /// Checks that the user has the rights on the outbox that a relay needs.
    ///
    /// # Errors
    /// A right is missing; the text has the `GRANT` of all of them.
    pub(crate) fn check_relay_rights(&self, server: &str, user: &str) -> Result<(), StoreFailure> {
        if self.has_relay_rights {
            return Ok(());
        }
        Err(StoreFailure::misconfigured(format!(
            "the user {user} of PostgreSQL at {server} may not use the table oncegate_outbox: \
             GRANT SELECT, UPDATE, DELETE ON oncegate_outbox TO {user}"
        )))
    }

    /// The name of `oncegate_outbox` with its schema.
    pub(crate) fn outbox(&self) -> Option<&str> {
        self.outbox.as_deref()
    }

    /// Checks that the sessions of a pool, whose state is `self`, use the table that the store
    /// uses. Returns its oid.
    ///
    /// # Errors
    /// They find another table or none, or lack a right on it.
    pub(crate) fn check_same_table(&self, store: &Self, server: &str) -> Result<i64, StoreFailure> {
        if let Some(table) = self.table
            && self.table == store.table
            && self.has_rights
        {
            return Ok(table);
        }
        Err(StoreFailure::misconfigured(format!(
            "the connections of the pool to PostgreSQL at {server} find another table oncegate_markers than connections with the options of the \
             pool, or may not use it: set the user and the search_path in the options, not in after_connect"
        )))
    }

    /// Whether a crash of the server loses answered operations.
    pub(crate) fn persistence(&self) -> Persistence {
        let volatile = if self.is_unlogged {
            "the table oncegate_markers is unlogged, so a crash empties it: ALTER TABLE oncegate_markers SET LOGGED"
        } else if self.fsync != "on" {
            "the server has fsync = off, so a crash of the machine may corrupt it: set fsync = on"
        } else if self.full_page_writes != "on" {
            "the server has full_page_writes = off, so a power cut may corrupt it: set full_page_writes = on"
        } else {
            return Persistence::Durable("fsync and full_page_writes are on".into());
        };
        Persistence::Volatile(volatile.to_owned())
    }
}
