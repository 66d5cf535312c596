//! The results of completed runs, each beside the done marker that was written with it. A result
//! counts only while its marker is done and has the same expiry, and its row is deleted when the
//! row of the marker is overwritten or deleted.

use rusqlite::{Connection, OptionalExtension, params};

use super::clock::ClockReading;

/// Created also in a file that an earlier release wrote. The trigger belongs to the view of all
/// markers. SQLite keeps the comments in the file.
pub(crate) const TABLE: &str = "
CREATE TABLE IF NOT EXISTS oncegate_results ( -- what completed runs returned
    key     TEXT PRIMARY KEY, -- that of the marker
    expires INTEGER NOT NULL, -- that of the marker
    result  BLOB NOT NULL
) STRICT;
CREATE TRIGGER IF NOT EXISTS oncegate_delete_result INSTEAD OF DELETE ON oncegate_markers BEGIN
    DELETE FROM oncegate_results WHERE key = old.key;
END";

/// Stores the result of a done marker that is written in this transaction.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn write(
    transaction: &Connection,
    key: &str,
    expires: i64,
    result: &[u8],
) -> rusqlite::Result<()> {
    transaction
        .prepare_cached(
            "INSERT OR REPLACE INTO oncegate_results (key, expires, result) VALUES (?1, ?2, ?3)",
        )?
        .execute(params![key, expires, result])?;
    Ok(())
}

/// The result of the done marker of a key with this expiry.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn read(
    connection: &Connection,
    key: &str,
    expires: i64,
) -> rusqlite::Result<Option<Vec<u8>>> {
    connection
        .prepare_cached("SELECT result FROM oncegate_results WHERE key = ?1 AND expires = ?2")?
        .query_row(params![key, expires], |row| row.get(0))
        .optional()
}

/// Deletes the result of a key whose done marker is overwritten or deleted in this transaction.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn delete(transaction: &Connection, key: &str) -> rusqlite::Result<()> {
    transaction
        .prepare_cached("DELETE FROM oncegate_results WHERE key = ?1")?
        .execute([key])?;
    Ok(())
}

/// Deletes the results of the expired done markers in `oncegate_merged_markers` with keys after
/// `first`, up to `last`. A result of a newer marker of such a key is kept.
///
/// # Errors
/// If SQLite fails.
pub(crate) fn delete_expired(
    transaction: &Connection,
    first: &str,
    last: &str,
    now: ClockReading,
) -> rusqlite::Result<()> {
    let mut any = transaction.prepare_cached("SELECT 1 FROM oncegate_results")?;
    if any.exists([])? {
        transaction
            .prepare_cached(
                "DELETE FROM oncegate_results WHERE expires <= ?3 AND key IN
                    (SELECT key FROM oncegate_merged_markers WHERE key > ?1 AND key <= ?2 AND expires <= ?3 AND state = 0)",
            )?
            .execute(params![first, last, now.expired_until])?;
    }
    Ok(())
}
