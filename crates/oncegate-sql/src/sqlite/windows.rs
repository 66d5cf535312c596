//! The longest dedup window of all processes that write to the file.

use std::time::Duration;

use rusqlite::Connection;

use oncegate_core::internal::milliseconds;

/// A window is added only if it is longer than all others, so the table has few rows. The longest
/// counts.
pub(crate) const TABLE: &str = "
CREATE TABLE IF NOT EXISTS oncegate_windows (longest INTEGER PRIMARY KEY -- a window of some marker, in milliseconds
) STRICT";

/// The longest window ever written to the file, in milliseconds; `None` before the first write.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn longest(connection: &Connection) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached("SELECT max(longest) FROM oncegate_windows")?
        .query_row([], |row| row.get(0))
}

/// Records the longest window of a transaction's operations, in that transaction, if it exceeds
/// `longest`.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn record(
    transaction: &Connection,
    window: Duration,
    longest: Option<i64>,
) -> rusqlite::Result<()> {
    let window = milliseconds(window);
    if longest.is_none_or(|longest| longest < window) {
        transaction.execute(
            "INSERT OR IGNORE INTO oncegate_windows (longest) VALUES (?1)",
            [window],
        )?;
    }
    Ok(())
}
