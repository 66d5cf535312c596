//! The SQL stores of oncegate. Feature `sqlite`: `Sqlite::file`, a durable store in one
//! file, and `SqliteInbox::file`, which records messages in the transactions of their handlers.
//! The store keeps the results of `Gate::run_stored`: a result is committed with its completion.
//! Terms such as claim and marker: <https://github.com/oncegate/oncegate/blob/main/docs/src/promises.md#terms>.
#![forbid(unsafe_code)]

#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(feature = "sqlite")]
pub use sqlite::{
    SQLITE_METRICS, Sqlite, SqliteBrowse, SqliteInbox, SqliteListed, SqliteTransaction, Synchronous,
};
