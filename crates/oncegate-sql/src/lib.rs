//! The SQL stores of oncegate. Feature `sqlite`: `Sqlite::file`, a durable store in one
//! file, and `SqliteInbox::file`, which records messages in the transactions of their handlers.
//! Terms such as claim and marker: <https://github.com/oncegate/oncegate/blob/main/docs/src/promises.md#terms>.
#![forbid(unsafe_code)]

#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(feature = "sqlite")]
pub use sqlite::{
    SQLITE_METRICS, Sqlite, SqliteBrowse, SqliteInbox, SqliteListed, SqliteTransaction, Synchronous,
};
