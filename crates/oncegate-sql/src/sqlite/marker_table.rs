//! Reads and writes markers in the two tables that [`recent`](super::recent) describes, and applies operations to
//! them.

use std::time::Duration;

use oncegate_core::internal::{MarkerColumns, UnreadableRow};
use oncegate_core::marker::{
    Age, Attempts, Change, Effect, Fingerprint, Hold, Marker, Operation, OperationKind, Terms,
    Verdict, apply,
};
use oncegate_core::{Completion, Key};
use rusqlite::{CachedStatement, Connection, OptionalExtension, Params, Row, params};

use super::clock::ClockReading;
use super::failure::StoreFailure;
use super::recent::RecentMarkers;
use super::results;
use oncegate_core::internal::milliseconds;

const SELECT_RECENT: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee
    FROM oncegate_recent_markers WHERE number = ?1";

const SELECT_MERGED: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee
    FROM oncegate_merged_markers WHERE key = ?1";

const IS_MERGED: &str = "SELECT 1 FROM oncegate_merged_markers WHERE key = ?1";

const WRITE_RECENT: &str = "INSERT OR REPLACE INTO oncegate_recent_markers
    (number, key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";

/// Has the parameters of [`WRITE_RECENT`]; the first, the number, is not used.
const WRITE_MERGED: &str = "INSERT OR REPLACE INTO oncegate_merged_markers VALUES (?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";

/// Writes nothing if the key has a row, even an expired one.
const WRITE_NEW_MERGED: &str = "INSERT OR IGNORE INTO oncegate_merged_markers VALUES (?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";

/// Completes a claim whose row has the number ?1. Writes nothing unless the row is in progress with
/// this token and attempt, and has not expired.
const COMPLETE_RECENT_CLAIM: &str = "UPDATE oncegate_recent_markers SET expires = ?2, state = 0, fingerprint = ?3, attempt = NULL, base = NULL,
        crashes = NULL, effect = NULL, token = NULL, lease = NULL, horizon = NULL, guarantee = NULL
    WHERE number = ?1 AND state = 2 AND token = ?4 AND attempt = ?5 AND expires > ?6";

/// The same for a claim in `oncegate_merged_markers`, by its key.
const COMPLETE_MERGED_CLAIM: &str = "UPDATE oncegate_merged_markers SET expires = ?2, state = 0, fingerprint = ?3, attempt = NULL, base = NULL,
        crashes = NULL, effect = NULL, token = NULL, lease = NULL, horizon = NULL, guarantee = NULL
    WHERE key = ?1 AND state = 2 AND token = ?4 AND attempt = ?5 AND expires > ?6";

const DELETE_MERGED: &str = "DELETE FROM oncegate_merged_markers WHERE key = ?1";

/// Writes an expired recent row. Until it is merged, readers ignore the row of its key in
/// `oncegate_merged_markers`.
const HIDE: &str = "INSERT OR REPLACE INTO oncegate_recent_markers (number, key, expires, state) VALUES (?1, ?2, ?3, 0)";

/// The expiry of a deleted row: in the past, however far the clock has jumped.
pub(super) const EXPIRED: i64 = i64::MIN;

/// The markers as one transaction reads and writes them, with its prepared statements.
pub(crate) struct MarkerTable<'transaction> {
    select_recent: CachedStatement<'transaction>,
    select_merged: CachedStatement<'transaction>,
    is_merged: CachedStatement<'transaction>,
    write_recent: CachedStatement<'transaction>,
    write_merged: CachedStatement<'transaction>,
    write_new_merged: CachedStatement<'transaction>,
    complete_recent_claim: CachedStatement<'transaction>,
    complete_merged_claim: CachedStatement<'transaction>,
    delete_merged: CachedStatement<'transaction>,
    hide: CachedStatement<'transaction>,
    connection: &'transaction Connection,
    recent: &'transaction mut RecentMarkers,
    now: ClockReading,
}

/// A marker and its age.
pub(crate) struct StoredMarker {
    pub(crate) marker: Marker,
    age: Age,
    /// The expiry of a done row, also of one that has expired.
    done_until: Option<i64>,
}

const ABSENT: StoredMarker = StoredMarker {
    marker: Marker::Absent,
    age: Age::Of(Duration::ZERO),
    done_until: None,
};

impl<'transaction> MarkerTable<'transaction> {
    pub(crate) fn new(
        connection: &'transaction Connection,
        recent: &'transaction mut RecentMarkers,
        now: ClockReading,
    ) -> rusqlite::Result<Self> {
        let prepare = |sql| connection.prepare_cached(sql);
        Ok(Self {
            select_recent: prepare(SELECT_RECENT)?,
            select_merged: prepare(SELECT_MERGED)?,
            is_merged: prepare(IS_MERGED)?,
            write_recent: prepare(WRITE_RECENT)?,
            write_merged: prepare(WRITE_MERGED)?,
            write_new_merged: prepare(WRITE_NEW_MERGED)?,
            complete_recent_claim: prepare(COMPLETE_RECENT_CLAIM)?,
            complete_merged_claim: prepare(COMPLETE_MERGED_CLAIM)?,
            delete_merged: prepare(DELETE_MERGED)?,
            hide: prepare(HIDE)?,
            connection,
            recent,
            now,
        })
    }

    /// Applies the operation to the row of its key. An unreadable row is not changed.
    ///
    /// # Errors
    /// If SQLite fails, which fails the whole transaction.
    pub(crate) fn apply(
        &mut self,
        operation: &Operation,
    ) -> rusqlite::Result<Result<Verdict, StoreFailure>> {
        if let Some(verdict) = self.apply_fast_path(operation)? {
            return Ok(Ok(verdict));
        }
        let key = &operation.key;
        let found = match self.read(key)? {
            Ok(found) => found,
            Err(UnreadableRow) => return Ok(Err(unreadable(key.as_str()))),
        };
        let (change, verdict) = apply(found.marker, found.age, operation);
        if found.done_until.is_some() && !matches!(change, Change::Keep) {
            results::delete(self.connection, key.as_str())?;
        }
        match change {
            Change::Keep => {}
            Change::Delete => self.delete(key)?,
            Change::Write(marker, time_to_live) => {
                let number = self.recent_number(key);
                let columns = self.now.columns(number, key, marker, time_to_live);
                match number {
                    Some(_) => self.write_recent.execute(columns)?,
                    None => self.write_merged.execute(columns)?,
                };
            }
        }
        Ok(Ok(verdict))
    }

    /// Applies a completion. If it writes the done marker, stores the result, too.
    ///
    /// # Errors
    /// If SQLite fails, which fails the whole transaction.
    pub(crate) fn complete(
        &mut self,
        completion: &Operation,
        result: &[u8],
    ) -> rusqlite::Result<Result<Completion, StoreFailure>> {
        let key = &completion.key;
        let before = self.done(key)?;
        let verdict = match self.apply(completion)? {
            Ok(verdict) => verdict,
            Err(failure) => return Ok(Err(failure)),
        };
        let mut earlier = None;
        match (before, self.done(key)?) {
            (Some((marker, expires)), _) => {
                if marker.is_done_for(completion.terms.fingerprint) {
                    earlier = results::read(self.connection, key.as_str(), expires)?;
                }
            }
            (None, Some((_, expires))) => {
                results::write(self.connection, key.as_str(), expires, result)?
            }
            (None, None) => {}
        }
        Ok(Ok(Completion { verdict, earlier }))
    }

    /// The result of a done id, unless its body is another one.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn result(
        &mut self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> rusqlite::Result<Option<Vec<u8>>> {
        match self.done(key)? {
            Some((marker, expires)) if marker.is_done_for(fingerprint) => {
                results::read(self.connection, key.as_str(), expires)
            }
            _ => Ok(None),
        }
    }

    /// A marker that is done, and its expiry.
    fn done(&mut self, key: &Key) -> rusqlite::Result<Option<(Marker, i64)>> {
        Ok(match self.read(key)? {
            Ok(StoredMarker {
                marker: marker @ Marker::Done(_),
                done_until,
                ..
            }) => done_until.map(|expires| (marker, expires)),
            Ok(_) | Err(UnreadableRow) => None,
        })
    }

    /// Writes the record of a message that is handled in this transaction, a done marker, if the
    /// claim is granted. Returns the verdict of the claim. Changes nothing in memory, because the
    /// transaction may be rolled back.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn record(
        &mut self,
        claim: &Operation,
        time_to_live: Duration,
    ) -> rusqlite::Result<Result<Verdict, StoreFailure>> {
        let found = match self.read(&claim.key)? {
            Ok(found) => found,
            Err(UnreadableRow) => return Ok(Err(unreadable(claim.key.as_str()))),
        };
        let (_, verdict) = apply(found.marker, found.age, claim);
        if let Verdict::Granted(_) = verdict {
            if found.done_until.is_some() {
                results::delete(self.connection, claim.key.as_str())?;
            }
            let number = self.recent.number(claim.key.as_str());
            let done = Marker::Done(claim.terms.fingerprint);
            let columns = self.now.columns(number, &claim.key, done, time_to_live);
            match number {
                Some(_) => self.write_recent.execute(columns)?,
                None => self.write_merged.execute(columns)?,
            };
        }
        Ok(Ok(verdict))
    }

    /// The verdict of a claim, without changes.
    pub(crate) fn look_up(
        &mut self,
        claim: &Operation,
    ) -> rusqlite::Result<Result<Verdict, StoreFailure>> {
        Ok(match self.read(&claim.key)? {
            Ok(found) => Ok(apply(found.marker, found.age, claim).1),
            Err(UnreadableRow) => Err(unreadable(claim.key.as_str())),
        })
    }

    /// The number of the recent row of a key, or the number for a new one; `None` if the row is
    /// to be written to `oncegate_merged_markers`.
    fn recent_number(&mut self, key: &Key) -> Option<i64> {
        let key = key.as_str();
        match self.recent.number(key) {
            None if self.recent.is_at_end(key) => None,
            None => Some(self.recent.add(key)),
            number => number,
        }
    }

    fn delete(&mut self, key: &Key) -> rusqlite::Result<()> {
        match self.recent_number(key) {
            Some(number) => self.hide.execute(params![number, key.as_str(), EXPIRED])?,
            None => self.delete_merged.execute([key.as_str()])?,
        };
        Ok(())
    }

    /// Applies a claim of an absent key or the completion of an unchanged claim, the most frequent
    /// cases, without reading the row. In other cases returns `None` and writes nothing.
    fn apply_fast_path(&mut self, operation: &Operation) -> rusqlite::Result<Option<Verdict>> {
        let Operation {
            key,
            kind,
            token,
            attempt,
            terms,
        } = operation;
        let (expected, age) = match kind {
            OperationKind::Claim => (ABSENT.marker, ABSENT.age),
            OperationKind::Complete => {
                let Terms {
                    guarantee,
                    lease,
                    fingerprint,
                    ..
                } = *terms;
                let (attempts, earlier, horizon) =
                    (Attempts::new(*attempt), Effect::Nothing, terms.horizon());
                let hold = Hold {
                    token: *token,
                    attempts,
                    earlier,
                    lease,
                    horizon,
                    guarantee,
                    fingerprint,
                };
                (Marker::InProgress(hold), ABSENT.age)
            }
            _ => return Ok(None),
        };
        match (kind, apply(expected, age, operation)) {
            (OperationKind::Claim, (Change::Write(marker, time_to_live), verdict)) => {
                let text = key.as_str();
                let is_at_end = self.recent.is_at_end(text);
                if self.recent.number(text).is_some()
                    || !is_at_end && self.is_merged.exists([text])?
                {
                    return Ok(None);
                }
                let number = (!is_at_end).then(|| self.recent.add(text));
                let columns = self.now.columns(number, key, marker, time_to_live);
                let rows = match number {
                    Some(_) => self.write_recent.execute(columns)?,
                    None => self.write_new_merged.execute(columns)?,
                };
                Ok((rows == 1).then_some(verdict))
            }
            (_, (Change::Write(Marker::Done(fingerprint), time_to_live), verdict)) => {
                let fingerprint = fingerprint.map(|it| it.get() as i64); // below 10^18
                let (token, expires) = (token.0.to_be_bytes(), self.now.expires(time_to_live));
                let expired_until = self.now.expired_until;
                let rows = match self.recent.number(key.as_str()) {
                    Some(number) => self.complete_recent_claim.execute(params![
                        number,
                        expires,
                        fingerprint,
                        token,
                        attempt,
                        expired_until
                    ])?,
                    None => self.complete_merged_claim.execute(params![
                        key.as_str(),
                        expires,
                        fingerprint,
                        token,
                        attempt,
                        expired_until
                    ])?,
                };
                Ok((rows == 1).then_some(verdict))
            }
            _ => Ok(None),
        }
    }

    fn read(&mut self, key: &Key) -> rusqlite::Result<Result<StoredMarker, UnreadableRow>> {
        let now = self.now;
        let read = |row: &Row<'_>| Ok(read(row, now));
        let found = match self.recent.number(key.as_str()) {
            Some(number) => self.select_recent.query_row([number], read),
            None => self.select_merged.query_row([key.as_str()], read),
        };
        Ok(found.optional()?.unwrap_or(Ok(ABSENT)))
    }
}

impl ClockReading {
    /// The expiry of a row that is written now and kept for this long.
    fn expires(&self, time_to_live: Duration) -> i64 {
        self.wall + milliseconds(time_to_live).max(1)
    }

    /// The columns of a row that is written now.
    fn columns<'key>(
        &self,
        number: Option<i64>,
        key: &'key Key,
        marker: Marker,
        time_to_live: Duration,
    ) -> impl Params + use<'key> {
        let row = MarkerColumns::of(marker).expect("an absent marker is deleted, not written");
        (
            number,
            key.as_str(),
            self.expires(time_to_live),
            row.state,
            row.fingerprint,
            row.attempt,
            row.base,
            row.crashes,
            row.effect,
            row.token.map(u128::to_be_bytes),
            row.lease,
            row.horizon,
            row.guarantee,
        )
    }
}

/// The marker of a row with the columns of [`SELECT_RECENT`]; absent if the row has expired.
pub(crate) fn read(row: &Row<'_>, now: ClockReading) -> Result<StoredMarker, UnreadableRow> {
    let expires: i64 = row.get(0).map_err(|_| UnreadableRow)?;
    // At most once. Only markers in progress or in doubt have a guarantee.
    let expired_until = if matches!(row.get(10), Ok(Some(0))) {
        now.unresolved_expired_until
    } else {
        now.expired_until
    };
    let done_until = matches!(row.get(1), Ok(0)).then_some(expires);
    if expires <= expired_until {
        return Ok(StoredMarker {
            done_until,
            ..ABSENT
        });
    }
    let columns = read_columns(row).map_err(|_| UnreadableRow)?;
    let marker = columns.marker()?;
    let age = match (marker, columns.horizon) {
        (Marker::InProgress(_) | Marker::InDoubt(..), Some(horizon)) => {
            age(expires.saturating_sub(horizon), now)
        }
        _ => ABSENT.age,
    };
    Ok(StoredMarker {
        marker,
        age,
        done_until,
    })
}

fn read_columns(row: &Row<'_>) -> rusqlite::Result<MarkerColumns> {
    Ok(MarkerColumns {
        state: row.get(1)?,
        fingerprint: row.get(2)?,
        attempt: row.get(3)?,
        base: row.get(4)?,
        crashes: row.get(5)?,
        effect: row.get(6)?,
        token: row.get::<_, Option<[u8; 16]>>(7)?.map(u128::from_be_bytes),
        lease: row.get(8)?,
        horizon: row.get(9)?,
        guarantee: row.get(10)?,
    })
}

/// The age of a marker that was written at this time; unknown if that time is in the future.
fn age(written: i64, now: ClockReading) -> Age {
    if written > now.wall {
        return Age::Unknown;
    }
    let old = now.wall.saturating_sub(written.max(now.lease_start_floor));
    Age::Of(Duration::from_millis(
        u64::try_from(old).unwrap_or_default(),
    )) // lease_start_floor is never after the wall clock
}

/// The failure of an operation whose row this release cannot read.
pub(crate) fn unreadable(key: &str) -> StoreFailure {
    StoreFailure::unreadable_marker(format!(
        "the row of {} in the view oncegate_markers holds no marker that this release can read: delete the row, or upgrade oncegate here; the row \
         is unchanged",
        key
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use oncegate_core::MessageId;

    use super::super::file::{FileConfig, OpenDatabase};
    use super::super::recent::MergeLimits;
    use super::*;
    use oncegate_core::marker::{Guarantee, Token};

    const LEASE: i64 = 30_000;
    const WINDOW: i64 = 600_000;
    const START: i64 = 1_700_000_000_000;
    const HOUR: i64 = 3_600_000;
    const TAKEN_OVER: Attempts = Attempts {
        number: 2,
        base: 1,
        crashes: 1,
    };

    fn file(directory: &Path) -> OpenDatabase {
        let config = FileConfig {
            path: directory.join("markers.db"),
            synchronous: Default::default(),
            busy_timeout: Duration::ZERO,
            merge: MergeLimits::default(),
            shares_database: false,
        };
        OpenDatabase::open(&config, None).expect("a new database opens")
    }

    fn apply_one(
        file: &OpenDatabase,
        now: ClockReading,
        kind: OperationKind,
        token: u128,
    ) -> Verdict {
        let [lease, window] = [LEASE, WINDOW].map(|it| Duration::from_millis(it.unsigned_abs()));
        let terms = Terms {
            guarantee: Guarantee::EffectivelyOnce,
            lease,
            window,
            fingerprint: None,
        };
        let key = Key::new(&MessageId::new("a").expect("an id"));
        let operation = Operation {
            key,
            kind,
            token: Token(token),
            attempt: 1,
            terms,
        };
        let mut recent = RecentMarkers::new(MergeLimits::default());
        recent.synchronize(&file.connection).expect("a row");
        let mut rows = MarkerTable::new(&file.connection, &mut recent, now)
            .expect("the statements are prepared");
        let verdict = rows
            .apply(&operation)
            .expect("SQLite does not fail")
            .expect("a verdict");
        drop(rows);
        recent.save(&file.connection).expect("saved");
        verdict
    }

    /// A reading without jumps.
    fn at(wall: i64) -> ClockReading {
        ClockReading {
            wall,
            lease_start_floor: i64::MIN,
            expired_until: wall,
            unresolved_expired_until: wall,
        }
    }

    #[test]
    fn a_lease_expires_after_its_last_millisecond() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = file(directory.path());
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Claim, 1),
            Verdict::Granted(Attempts::new(1))
        );
        assert_eq!(
            apply_one(&file, at(START + LEASE), OperationKind::Claim, 2),
            Verdict::Busy {
                remaining: Duration::ZERO
            }
        );
        assert_eq!(
            apply_one(&file, at(START + LEASE + 1), OperationKind::Claim, 2),
            Verdict::Granted(TAKEN_OVER)
        );
    }

    #[test]
    fn a_done_marker_expires_after_its_window() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = file(directory.path());
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Complete, 1),
            Verdict::Done { marker_lost: true }
        );
        assert_eq!(
            apply_one(&file, at(START + WINDOW - 1), OperationKind::Claim, 2),
            Verdict::Duplicate
        );
        assert_eq!(
            apply_one(&file, at(START + WINDOW), OperationKind::Claim, 2),
            Verdict::Granted(Attempts::new(1))
        );
    }

    #[test]
    fn a_completion_recognizes_only_its_own_claim() {
        let claimed = || {
            let directory = tempfile::tempdir().expect("a temporary directory");
            let file = file(directory.path());
            assert_eq!(
                apply_one(&file, at(START), OperationKind::Claim, 1),
                Verdict::Granted(Attempts::new(1))
            );
            (file, directory)
        };
        let (file, _directory) = claimed();
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Complete, 2),
            Verdict::Lost,
            "of another token"
        );
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Complete, 1),
            Verdict::Done { marker_lost: false }
        );
        assert_eq!(
            apply_one(&file, at(START + WINDOW - 1), OperationKind::Claim, 2),
            Verdict::Duplicate,
            "the window restarts"
        );

        let (file, _directory) = claimed();
        file.connection
            .execute("UPDATE oncegate_merged_markers SET attempt = 2", [])
            .expect("the row is updated");
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Complete, 1),
            Verdict::Lost,
            "of an earlier attempt"
        );

        let (file, _directory) = claimed();
        apply_one(&file, at(START), OperationKind::Doubt, 1);
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Complete, 2),
            Verdict::Done { marker_lost: false },
            "any token can resolve a doubt"
        );

        let (file, _directory) = claimed();
        assert_eq!(
            apply_one(&file, at(START + WINDOW), OperationKind::Complete, 1),
            Verdict::Done { marker_lost: true },
            "after its window"
        );
    }

    /// The inbox records a message whose former marker had a result.
    #[test]
    fn the_record_of_an_inbox_has_no_result() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = file(directory.path());
        let mut recent = RecentMarkers::new(MergeLimits::default());
        recent.synchronize(&file.connection).expect("a row");
        let mut rows = MarkerTable::new(&file.connection, &mut recent, at(START))
            .expect("the statements are prepared");
        let key = Key::new(&MessageId::new("a").expect("an id"));
        let window = Duration::from_millis(WINDOW.unsigned_abs());
        let completion = Operation {
            key: key.clone(),
            kind: OperationKind::Complete,
            token: Token(1),
            attempt: 1,
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: window,
                window,
                fingerprint: None,
            },
        };
        let stored = rows.complete(&completion, b"first").expect("it is stored");
        stored.expect("a verdict");
        assert!(rows.result(&key, None).expect("it is read").is_some());

        let claim = Operation {
            kind: OperationKind::Claim,
            ..completion
        };
        rows.now = at(START + WINDOW);
        let recorded = rows.record(&claim, window).expect("it is recorded");
        assert!(matches!(recorded, Ok(Verdict::Granted(_))));
        assert_eq!(rows.result(&key, None).expect("it is read"), None);
        let left: u32 = file
            .connection
            .query_row("SELECT count(*) FROM oncegate_results", [], |row| {
                row.get(0)
            })
            .expect("a number");
        assert_eq!(left, 0);
    }

    #[test]
    fn a_jump_forward_expires_no_lease_and_no_marker() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = file(directory.path());
        apply_one(&file, at(START), OperationKind::Claim, 1);
        let jumped = |later: i64| {
            let expired_until = START + later;
            ClockReading {
                wall: START + HOUR + later,
                lease_start_floor: START + HOUR,
                expired_until,
                unresolved_expired_until: expired_until,
            }
        };
        assert_eq!(
            apply_one(&file, jumped(LEASE), OperationKind::Claim, 2),
            Verdict::Busy {
                remaining: Duration::ZERO
            }
        );
        assert_eq!(
            apply_one(&file, jumped(LEASE + 1), OperationKind::Claim, 2),
            Verdict::Granted(TAKEN_OVER)
        );

        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = self::file(directory.path());
        apply_one(&file, at(START), OperationKind::Complete, 1);
        assert_eq!(
            apply_one(&file, jumped(WINDOW - 1), OperationKind::Claim, 2),
            Verdict::Duplicate
        );
    }

    #[test]
    fn after_a_jump_back_the_age_is_unknown_and_then_restarts() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = file(directory.path());
        apply_one(&file, at(START + HOUR), OperationKind::Claim, 1);
        let lease = Duration::from_millis(LEASE.unsigned_abs());
        assert_eq!(
            apply_one(&file, at(START), OperationKind::Claim, 2),
            Verdict::Busy { remaining: lease }
        );
        // The claim is not busy for an hour and a lease, although its write is an hour in the
        // future.
        assert_eq!(
            apply_one(&file, at(START + LEASE + 1), OperationKind::Claim, 2),
            Verdict::Granted(TAKEN_OVER)
        );
    }
}
