//! The SQL stores of oncegate. Feature `sqlite`: `Sqlite::file`, a durable store in one file.
#![forbid(unsafe_code)]

#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(feature = "sqlite")]
pub use sqlite::{SQLITE_METRICS, Sqlite, SqliteBrowse, SqliteListed, Synchronous};
