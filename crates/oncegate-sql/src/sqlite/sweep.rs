//! Clears out what has expired, a few rows at a time.

use rusqlite::{Connection, params};

use super::clock::Now;
use super::metric::MARKERS_EXPIRED;

/// A hand that goes round through the keys. It needs no index over the times, which each write
/// would have to keep too: a transaction looks at as many rows as it has operations, and an id
/// takes two operations or more. So the hand is round before half as many ids have come as there
/// are rows.
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
    pub(crate) fn look(
        &self,
        connection: &Connection,
        rows: u32,
        now: Now,
    ) -> rusqlite::Result<Stretch> {
        let mut next = connection.prepare_cached(
            "SELECT count(*) FILTER (WHERE expires <= CASE guarantee WHEN 0 THEN ?4 ELSE ?3 END), max(key)
                FROM (SELECT key, expires, guarantee FROM markers WHERE key > ?1 ORDER BY key LIMIT ?2)",
        )?;
        next.query_row(
            params![self.at, rows, now.forgotten, now.unresolved_forgotten],
            |row| {
                Ok(Stretch {
                    expired: row.get(0)?,
                    last: row.get(1)?,
                })
            },
        )
    }

    /// Deletes what has expired in the stretch.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn clear(
        &self,
        connection: &Connection,
        stretch: &Stretch,
        now: Now,
    ) -> rusqlite::Result<()> {
        if let (1.., Some(last)) = (stretch.expired, &stretch.last) {
            let mut clear = connection.prepare_cached(
                "DELETE FROM markers WHERE key > ?1 AND key <= ?2 AND expires <= CASE guarantee WHEN 0 THEN ?4 ELSE ?3 END",
            )?;
            let cleared = clear.execute(params![
                self.at,
                last,
                now.forgotten,
                now.unresolved_forgotten
            ])?;
            metrics::counter!(MARKERS_EXPIRED).increment(cleared as u64);
        }
        Ok(())
    }

    /// Goes on behind the stretch, or begins the next round.
    pub(crate) fn pass(&mut self, stretch: Stretch) {
        self.at = stretch.last.unwrap_or_default();
    }
}
