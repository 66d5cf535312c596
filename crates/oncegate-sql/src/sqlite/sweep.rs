//! Deletes expired rows of `oncegate_merged_markers`, a few at a time.

use rusqlite::{Connection, params};

use super::clock::ClockReading;
use super::metric::MARKERS_EXPIRED;
use super::results;

/// A cursor that cycles through the keys of `oncegate_merged_markers`, so that no index on the expiry is
/// needed, which each write would have to update. A transaction of the store scans as many rows as
/// it has operations. An id takes at least two operations, so during one cycle at most half as many
/// new ids arrive as there are rows.
#[derive(Debug, Default)]
pub(crate) struct ExpirySweep {
    /// The last key of the previous range.
    last_key: String,
}

/// A range of consecutive rows that were scanned.
#[derive(Debug)]
pub(crate) struct SweepRange {
    /// The number of expired rows.
    pub(crate) expired: u32,
    /// The last key; `None` at the end of the cycle.
    last: Option<String>,
}

impl ExpirySweep {
    /// Reads the next range of at most this many rows. Changes nothing.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn scan(
        &self,
        connection: &Connection,
        rows: u32,
        now: ClockReading,
    ) -> rusqlite::Result<SweepRange> {
        let mut next = connection.prepare_cached(
            "SELECT count(*) FILTER (WHERE expires <= CASE guarantee WHEN 0 THEN ?4 ELSE ?3 END), max(key)
                FROM (SELECT key, expires, guarantee FROM oncegate_merged_markers WHERE key > ?1 ORDER BY key LIMIT ?2)",
        )?;
        next.query_row(
            params![
                self.last_key,
                rows,
                now.expired_until,
                now.unresolved_expired_until
            ],
            |row| {
                Ok(SweepRange {
                    expired: row.get(0)?,
                    last: row.get(1)?,
                })
            },
        )
    }

    /// Deletes the expired rows of a range, and their results.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn delete_expired(
        &self,
        connection: &Connection,
        range: &SweepRange,
        now: ClockReading,
    ) -> rusqlite::Result<()> {
        if let (1.., Some(last)) = (range.expired, &range.last) {
            results::delete_expired(connection, &self.last_key, last, now)?;
            let mut delete = connection.prepare_cached(
                "DELETE FROM oncegate_merged_markers WHERE key > ?1 AND key <= ?2 AND expires <= CASE guarantee WHEN 0 THEN ?4 ELSE ?3 END",
            )?;
            let deleted = delete.execute(params![
                self.last_key,
                last,
                now.expired_until,
                now.unresolved_expired_until
            ])?;
            metrics::counter!(MARKERS_EXPIRED).increment(deleted as u64);
        }
        Ok(())
    }

    /// Continues after the range, or starts the next cycle.
    pub(crate) fn advance(&mut self, range: SweepRange) {
        self.last_key = range.last.unwrap_or_default();
    }
}
