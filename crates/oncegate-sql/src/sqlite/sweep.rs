//! Clears out what has expired, a few rows at a time.

use rusqlite::{Connection, params};

/// A hand that goes round through the keys. It needs no index over the times, which would cost each write and double
/// the file: a transaction looks at as many rows as it has operations, and an id takes two operations or more. So the
/// hand is round before half as many ids have come as there are rows.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    /// The last key that was looked at.
    at: String,
}

/// The next rows of the round.
#[derive(Debug)]
pub(crate) struct Stretch {
    /// How many of them have expired.
    pub(crate) expired: u32,
    /// The last of them; none at the end of the round.
    last: Option<String>,
}

impl Sweep {
    /// Looks at the next rows, so many at the most, and changes nothing.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn look(&self, connection: &Connection, rows: u32, forgotten: i64) -> rusqlite::Result<Stretch> {
        let mut next = connection.prepare_cached(
            "SELECT count(*) FILTER (WHERE expires <= ?3), max(key) FROM (SELECT key, expires FROM markers WHERE key > ?1 ORDER BY key LIMIT ?2)",
        )?;
        next.query_row(params![self.at, rows, forgotten], |row| Ok(Stretch { expired: row.get(0)?, last: row.get(1)? }))
    }

    /// Deletes what has expired in the stretch.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn clear(&self, connection: &Connection, stretch: &Stretch, forgotten: i64) -> rusqlite::Result<()> {
        if let (1.., Some(last)) = (stretch.expired, &stretch.last) {
            let mut clear = connection.prepare_cached("DELETE FROM markers WHERE key > ?1 AND key <= ?2 AND expires <= ?3")?;
            let cleared = clear.execute(params![self.at, last, forgotten])?;
            metrics::counter!("oncegate_sqlite_markers_expired_total").increment(cleared as u64);
        }
        Ok(())
    }

    /// Goes on behind the stretch, or begins the next round.
    pub(crate) fn pass(&mut self, stretch: Stretch) {
        self.at = stretch.last.unwrap_or_default();
    }
}
