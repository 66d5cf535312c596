//! For how long what stands in the file is remembered at the most, by whoever wrote it.

use std::time::Duration;

use rusqlite::Connection;

use super::clock::milliseconds;

/// Each of them was the longest once; so there are few, and the last one counts.
pub(crate) const TABLE: &str = "
CREATE TABLE IF NOT EXISTS windows (longest INTEGER PRIMARY KEY -- for so long, in milliseconds, some marker was to be remembered
) STRICT";

/// The longest window of all who ever wrote to the file, in milliseconds; none before the first.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn longest(connection: &Connection) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached("SELECT max(longest) FROM windows")?
        .query_row([], |row| row.get(0))
}

/// Notes the window of who writes, in the transaction in which it is written.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn note(
    transaction: &Connection,
    window: Duration,
    longest: Option<i64>,
) -> rusqlite::Result<()> {
    let window = milliseconds(window);
    if longest.is_none_or(|longest| longest < window) {
        transaction.execute(
            "INSERT OR IGNORE INTO windows (longest) VALUES (?1)",
            [window],
        )?;
    }
    Ok(())
}
