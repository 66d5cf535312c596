//! New markers are appended to the table `oncegate_recent_markers`, and merged into `oncegate_merged_markers` in the
//! order of their keys.
//!
//! In a table that is sorted by key, each random id changes another page, which is written twice
//! (to the write-ahead log, then to the file). The end of `oncegate_recent_markers` is a few pages for a
//! whole transaction, and a range of consecutive keys is in few pages of `oncegate_merged_markers`. Keys at
//! the end of `oncegate_merged_markers`, as ascending ids are, are written to it directly.
//!
//! A merge cycle copies the rows that exist when it starts, in the order of their keys, a few in
//! each transaction. A row is current in `oncegate_recent_markers` until it is merged, and in
//! `oncegate_merged_markers` afterwards.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension, params};

/// When recent markers are merged, and which markers are written to `oncegate_merged_markers` directly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeLimits {
    /// From this number of recent markers on, and while a merge cycle runs, each transaction merges
    /// as many as it has operations. The higher the number, the fewer pages a merge cycle changes
    /// for each marker.
    pub(crate) merge_from: usize,
    /// How many of the last rows of `oncegate_merged_markers` count as its end. They are in few pages.
    pub(crate) end_rows: u32,
}

impl Default for MergeLimits {
    /// About 20 MB of memory: a recent marker takes about 150 bytes.
    fn default() -> Self {
        Self {
            merge_from: 128 << 10,
            end_rows: 4096,
        }
    }
}

/// After this number of transactions the end of `oncegate_merged_markers` is looked up again.
const END_TRANSACTIONS: u32 = 64;

/// The table of [`MergeProgress`]. SQLite keeps the comments in the file.
pub(crate) const TABLE: &str = "
CREATE TABLE oncegate_merge_progress ( -- one row
    next_number  INTEGER NOT NULL, -- of the next row in oncegate_recent_markers
    merged_until INTEGER NOT NULL, -- rows of oncegate_recent_markers up to this number are merged
    cycle_end    INTEGER NOT NULL, -- rows up to this number are being merged, in the order of their keys
    cursor       TEXT NOT NULL     -- those up to this key are merged; '' before the first
) STRICT;
INSERT INTO oncegate_merge_progress VALUES (1, 0, 0, '')";

/// How far the recent markers are merged: the row of `oncegate_merge_progress`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct MergeProgress {
    next_number: i64,
    merged_until: i64,
    /// Equal to `merged_until` while nothing is being merged.
    cycle_end: i64,
    cursor: String,
}

impl MergeProgress {
    fn read(connection: &Connection) -> rusqlite::Result<Self> {
        connection
            .prepare_cached(
                "SELECT next_number, merged_until, cycle_end, cursor FROM oncegate_merge_progress",
            )?
            .query_row([], |row| {
                Ok(Self {
                    next_number: row.get(0)?,
                    merged_until: row.get(1)?,
                    cycle_end: row.get(2)?,
                    cursor: row.get(3)?,
                })
            })
    }

    /// Whether the row of this number is merged, so that its copy in `oncegate_merged_markers` is current.
    fn is_merged(&self, number: i64, key: &str) -> bool {
        number <= self.merged_until || number <= self.cycle_end && key <= self.cursor.as_str()
    }
}

/// The current rows of `oncegate_recent_markers` by key. The row of such a key in `oncegate_merged_markers`, if there
/// is one, is outdated.
#[derive(Debug)]
pub(crate) struct RecentMarkers {
    limits: MergeLimits,
    /// Keys above this one are at the end of `oncegate_merged_markers`. `None` if the table has at most
    /// `end_rows` rows: then every key is.
    end: Option<String>,
    /// After this number of transactions `end` is looked up again.
    end_known_for: u32,
    /// The number of the current row of each key that is not merged.
    numbers: HashMap<Box<str>, i64>,
    /// The keys that this merge cycle still has to merge, in descending order; `None` until they
    /// are sorted.
    unmerged: Option<Vec<Box<str>>>,
    /// Read by [`RecentMarkers::synchronize`], changed in memory, and written by
    /// [`RecentMarkers::save`].
    progress: MergeProgress,
    /// The progress that the file has.
    saved: MergeProgress,
}

impl RecentMarkers {
    pub(crate) fn new(limits: MergeLimits) -> Self {
        Self {
            limits,
            end: None,
            end_known_for: 0,
            numbers: HashMap::new(),
            unmerged: None,
            progress: MergeProgress::default(),
            saved: MergeProgress::default(),
        }
    }

    /// Forgets everything that was read, because the transaction was rolled back.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.limits);
    }

    /// Reads what other processes have written. Must be the first call in a transaction.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn synchronize(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        self.look_up_end(connection)?;
        let found = MergeProgress::read(connection)?;
        if found == self.progress {
            return Ok(());
        }
        let known_until = self.progress.next_number - 1;
        let is_same_cycle = (found.merged_until, found.cycle_end)
            == (self.progress.merged_until, self.progress.cycle_end);
        match &mut self.unmerged {
            Some(unmerged) if is_same_cycle => {
                while let Some(key) = unmerged.pop_if(|key| **key <= *found.cursor) {
                    self.numbers.remove(&key);
                }
            }
            None if is_same_cycle && found.cycle_end == found.merged_until => {}
            _ => {
                self.unmerged = None;
                self.numbers
                    .retain(|key, number| !found.is_merged(*number, key));
            }
        }
        let mut newer = connection.prepare_cached(
            "SELECT number, key FROM oncegate_recent_markers WHERE number > ?1 ORDER BY number",
        )?;
        let mut rows = newer.query([known_until.max(found.merged_until)])?;
        while let Some(row) = rows.next()? {
            let (number, key) = (row.get(0)?, row.get_ref(1)?.as_str()?);
            if !found.is_merged(number, key) {
                self.numbers.insert(key.into(), number);
            }
        }
        self.saved = found.clone();
        self.progress = found;
        Ok(())
    }

    /// Looks up the end of `oncegate_merged_markers`, every [`END_TRANSACTIONS`] transactions. An outdated
    /// end is harmless, because any key may be written to either table.
    fn look_up_end(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.end_known_for == 0 {
            let mut end = connection.prepare_cached(
                "SELECT key FROM oncegate_merged_markers ORDER BY key DESC LIMIT 1 OFFSET ?1",
            )?;
            let found = end.query_row([self.limits.end_rows], |row| row.get(0));
            self.end = found.optional()?;
            self.end_known_for = END_TRANSACTIONS;
        }
        self.end_known_for -= 1;
        Ok(())
    }

    /// Whether a key that has no recent row is written to `oncegate_merged_markers` directly.
    pub(crate) fn is_at_end(&self, key: &str) -> bool {
        self.end.as_ref().is_none_or(|end| key > end.as_str())
    }

    /// The number of the current row of a key in `oncegate_recent_markers`; `None` if the key has no row
    /// there that is not merged.
    pub(crate) fn number(&self, key: &str) -> Option<i64> {
        self.numbers.get(key).copied()
    }

    /// Assigns the number of a new row to a key that has no current row in `oncegate_recent_markers`.
    pub(crate) fn add(&mut self, key: &str) -> i64 {
        let number = self.progress.next_number;
        self.progress.next_number += 1;
        self.numbers.insert(key.into(), number);
        number
    }

    /// The first `limit` keys after this one, in order, with their numbers.
    pub(crate) fn after(&self, key: &str, limit: usize) -> Vec<(&str, i64)> {
        let mut after: Vec<(&str, i64)> = self
            .numbers
            .iter()
            .map(|(key, number)| (&**key, *number))
            .filter(|(it, _)| *it > key)
            .collect();
        if limit < after.len() {
            after.select_nth_unstable(limit);
            after.truncate(limit);
        }
        after.sort_unstable();
        after
    }

    /// Whether each transaction has to merge rows.
    pub(crate) fn must_merge(&self) -> bool {
        self.progress.cycle_end > self.progress.merged_until
            || self.numbers.len() >= self.limits.merge_from
    }

    /// Whether all rows are merged.
    pub(crate) fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Merges at most this many rows: copies them to `oncegate_merged_markers`. Starts a merge cycle if none
    /// is in progress.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn merge(&mut self, connection: &Connection, limit: u32) -> rusqlite::Result<()> {
        if self.progress.cycle_end == self.progress.merged_until {
            self.progress.cycle_end = self.progress.next_number - 1;
            self.unmerged = None;
        }
        let cycle_end = self.progress.cycle_end;
        let numbers = &mut self.numbers;
        let unmerged = self.unmerged.get_or_insert_with(|| {
            let in_cycle = numbers.iter().filter(|(_, number)| **number <= cycle_end);
            let mut keys: Vec<Box<str>> = in_cycle.map(|(key, _)| key.clone()).collect();
            keys.sort_unstable_by(|one, other| other.cmp(one));
            keys
        });
        let mut copy = connection.prepare_cached(
            "INSERT OR REPLACE INTO oncegate_merged_markers SELECT key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon,
                guarantee FROM oncegate_recent_markers WHERE number = ?1",
        )?;
        let mut last = None;
        for _ in 0..limit {
            let Some(key) = unmerged.pop() else { break };
            if let Some(number) = numbers.remove(&key) {
                copy.execute([number])?;
            }
            last = Some(key);
        }
        if let Some(last) = last {
            self.progress.cursor = last.into();
        }
        if unmerged.is_empty() {
            self.progress.merged_until = cycle_end;
            self.progress.cursor.clear();
            self.unmerged = None;
        }
        Ok(())
    }

    /// Deletes at most this many merged rows from `oncegate_recent_markers`.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn delete_merged(
        &self,
        connection: &Connection,
        limit: u32,
    ) -> rusqlite::Result<()> {
        let mut oldest =
            connection.prepare_cached("SELECT min(number) FROM oncegate_recent_markers")?;
        let oldest: Option<i64> = oldest.query_row([], |row| row.get(0))?;
        let merged_until = self.progress.merged_until;
        let Some(oldest) = oldest.filter(|oldest| *oldest <= merged_until) else {
            return Ok(());
        };
        let until = merged_until.min(oldest + i64::from(limit) - 1);
        connection
            .prepare_cached("DELETE FROM oncegate_recent_markers WHERE number <= ?1")?
            .execute([until])?;
        Ok(())
    }

    /// Writes the progress to the file. Must be the last call in a transaction.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn save(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        if self.saved == self.progress {
            return Ok(());
        }
        let MergeProgress {
            next_number,
            merged_until,
            cycle_end,
            cursor,
        } = &self.progress;
        let mut write = connection.prepare_cached(
            "UPDATE oncegate_merge_progress SET next_number = ?1, merged_until = ?2, cycle_end = ?3, cursor = ?4",
        )?;
        write.execute(params![next_number, merged_until, cycle_end, cursor])?;
        self.saved = self.progress.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::time::Duration;

    use oncegate_core::marker::{
        self, Age, Attempts, Change, Effect, Guarantee, Marker, OperationKind,
    };
    use oncegate_core::marker::{Operation, Terms, Token, Verdict};
    use oncegate_core::{Key, MessageId};
    use rusqlite::Connection;

    use super::super::file::FileConfig;
    use super::super::writer_thread::WriterThread;
    use super::*;

    const KEYS: u64 = 32;
    const STEPS: u64 = 300;

    fn writer(directory: &Path) -> WriterThread {
        WriterThread::new(FileConfig {
            path: directory.join("markers.db"),
            synchronous: crate::Synchronous::Normal,
            busy_timeout: Duration::from_secs(10),
            merge: MergeLimits {
                merge_from: 10,
                end_rows: 1,
            },
            shares_database: false,
        })
    }

    /// A number below `bound`; the same seed repeats the same numbers (a shortened SplitMix64).
    fn below(seed: &mut u64, bound: u64) -> u64 {
        *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((bits ^ (bits >> 27)) >> 8) % bound
    }

    fn operation(seed: &mut u64) -> Operation {
        let id = format!("id-{:02}", below(seed, KEYS));
        Operation {
            key: Key::new(&MessageId::new(id).expect("an id")),
            kind: [
                OperationKind::Claim,
                OperationKind::Claim,
                OperationKind::Complete,
                OperationKind::Clear(Effect::Nothing),
                OperationKind::Doubt,
                OperationKind::Forget {
                    seen: Marker::Done(None),
                },
            ][below(seed, 6) as usize],
            token: Token(u128::from(below(seed, 2))),
            attempt: 1,
            terms: Terms {
                guarantee: [Guarantee::EffectivelyOnce, Guarantee::Bare][below(seed, 2) as usize],
                lease: Duration::from_secs(3600),
                window: Duration::from_secs(7200),
                fingerprint: None,
            },
        }
    }

    /// Random operations by three processes that merge all the time, one of which is restarted
    /// repeatedly: each process reads and lists, and the view shows, the markers that
    /// `marker::apply` returns.
    #[test]
    fn markers_are_the_same_before_and_after_they_are_merged() {
        let mut merged_rows = 0;
        for first in 0..4 {
            let directory = tempfile::tempdir().expect("a temporary directory");
            let mut writers = [(); 3].map(|()| writer(directory.path()));
            let mut model: BTreeMap<Key, Marker> = BTreeMap::new();
            let mut seed = first;
            for step in 0..STEPS {
                let batch: Vec<Operation> = (0..1 + below(&mut seed, 2))
                    .map(|_| operation(&mut seed))
                    .collect();
                for operation in &batch {
                    let marker = model.entry(operation.key.clone()).or_insert(Marker::Absent);
                    match marker::apply(*marker, Age::Of(Duration::ZERO), operation).0 {
                        Change::Keep => {}
                        Change::Delete => *marker = Marker::Absent,
                        Change::Write(written, _) => *marker = written,
                    }
                }
                let at = below(&mut seed, 3) as usize;
                writers[at]
                    .apply(
                        [batch.as_slice()].into_iter(),
                        std::iter::empty(),
                        batch.len(),
                    )
                    .expect("the transaction commits");
                match below(&mut seed, 8) {
                    0 => writers[at].idle(),
                    1 => writers[0] = writer(directory.path()),
                    2 => writers[at].close_after_failure(),
                    _ => {}
                }
                let reader = &mut writers[below(&mut seed, 3) as usize];
                for (key, marker) in &model {
                    assert_eq!(
                        reader.read_marker(key).expect("a marker").0,
                        *marker,
                        "seed {first}, step {step}: {key:?}"
                    );
                }
                let present: Vec<&str> = model
                    .iter()
                    .filter(|(_, marker)| **marker != Marker::Absent)
                    .map(|(key, _)| key.as_str())
                    .collect();
                assert_eq!(listed(reader), present, "seed {first}, step {step}");
                let raw = Connection::open(directory.path().join("markers.db")).expect("opens");
                assert_eq!(shown(&raw), present, "seed {first}, step {step}");
                let merged = "SELECT count(*) FROM oncegate_merged_markers WHERE key NOT IN (SELECT key FROM oncegate_recent_markers)";
                merged_rows += raw
                    .query_row(merged, [], |row| row.get::<_, u32>(0))
                    .expect("a number");
            }
        }
        assert!(merged_rows > 1000, "{merged_rows}: hardly any were merged");
    }

    /// Deletes markers with SQL, as an operator may.
    fn delete(directory: &Path, keys: &str) {
        let raw = Connection::open(directory.join("markers.db")).expect("opens");
        raw.execute("DELETE FROM oncegate_markers WHERE key LIKE ?1", [keys])
            .expect("deletes");
        let shown = shown(&raw);
        assert!(!shown.iter().any(|key| key == keys), "{shown:?}");
    }

    /// Two processes, one of which has not read the recent markers when an operator deletes one of
    /// them.
    #[test]
    fn after_an_operator_deletes_a_recent_marker_its_next_claim_is_seen_by_all_processes() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let claim = |writer: &mut WriterThread, id: &str, token| {
            let claim = Operation {
                key: Key::new(&MessageId::new(id).expect("an id")),
                kind: OperationKind::Claim,
                token: Token(token),
                attempt: 0,
                terms: Terms {
                    guarantee: Guarantee::AtMostOnce,
                    lease: Duration::from_secs(3600),
                    window: Duration::from_secs(7200),
                    fingerprint: None,
                },
            };
            let batch: &[Operation] = &[claim];
            let (answers, _) = writer
                .apply([batch].into_iter(), std::iter::empty(), 1)
                .expect("commits");
            answers[0][0].clone().expect("a verdict")
        };
        let mut first = writer(directory.path());
        for id in ["id-90", "id-91"] {
            claim(&mut first, id, 1);
        }
        let mut first = writer(directory.path());
        for id in ["id-50", "id-51", "id-52", "id-53"] {
            claim(&mut first, id, 1);
        }
        let raw = Connection::open(directory.path().join("markers.db")).expect("opens");
        let recent: u32 = raw
            .query_row(
                "SELECT count(*) FROM oncegate_unmerged_markers",
                [],
                |row| row.get(0),
            )
            .expect("a number");
        assert_eq!(recent, 4);
        delete(directory.path(), "id-51");
        assert_eq!(
            listed(&mut first),
            ["id-50", "id-52", "id-53", "id-90", "id-91"],
            "the listing continues after the deleted marker"
        );

        for id in ["id-50", "id-9%"] {
            delete(directory.path(), id);
        }
        let granted = Verdict::Granted(Attempts::new(1));
        assert_eq!(claim(&mut writer(directory.path()), "id-50", 2), granted);
        let second = claim(&mut first, "id-50", 3);
        assert!(matches!(second, Verdict::Busy { .. }), "{second:?}");
    }

    /// All keys, by pages.
    fn listed(writer: &mut WriterThread) -> Vec<String> {
        let (mut keys, mut after) = (Vec::new(), Some(String::new()));
        while let Some(from) = after {
            let page = writer.page(&from, 3).expect("a page");
            keys.extend(page.keys());
            after = page.next;
        }
        keys
    }

    /// The keys that the view shows.
    fn shown(raw: &Connection) -> Vec<String> {
        let mut select = raw
            .prepare("SELECT key FROM oncegate_markers ORDER BY key")
            .expect("the view");
        let keys = select.query_map([], |row| row.get(0)).expect("rows");
        keys.collect::<Result<_, _>>().expect("texts")
    }
}
