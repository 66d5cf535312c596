//! Markers as rows, and what an operation does to one.

use std::time::Duration;

use oncegate_core::Key;
use oncegate_core::marker::{
    Age, Ask, Attempts, Change, Doubt, Effect, Fingerprint, Guarantee, Hold, Marker, Operation,
    Terms, Token, Verdict, apply,
};
use rusqlite::{CachedStatement, Connection, OptionalExtension, Params, Row, params};

use super::clock::{Now, milliseconds};
use super::failure::Failure;

const READ: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee FROM markers
    WHERE key = ?1";

const WRITE: &str =
    "INSERT INTO markers (key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
    ON CONFLICT (key) DO UPDATE SET expires = ?2, state = ?3, fingerprint = ?4, attempt = ?5, base = ?6, crashes = ?7, effect = ?8,
        token = ?9, lease = ?10, horizon = ?11, guarantee = ?12";

/// Writes nothing where there is a row, expired or not.
const WRITE_NEW: &str =
    "INSERT INTO markers (key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
    ON CONFLICT (key) DO NOTHING";

/// Writes nothing unless this attempt of this claim is in progress, and is not forgotten.
const COMPLETE_OWN: &str = "UPDATE markers SET expires = ?2, state = 0, fingerprint = ?3, attempt = NULL, base = NULL, crashes = NULL,
        effect = NULL, token = NULL, lease = NULL, horizon = NULL, guarantee = NULL
    WHERE key = ?1 AND state = 2 AND token = ?4 AND attempt = ?5 AND expires > ?6";

const DELETE: &str = "DELETE FROM markers WHERE key = ?1";

/// The statements, for one transaction.
pub(crate) struct Rows<'connection> {
    read: CachedStatement<'connection>,
    write: CachedStatement<'connection>,
    write_new: CachedStatement<'connection>,
    complete_own: CachedStatement<'connection>,
    delete: CachedStatement<'connection>,
    now: Now,
}

/// A row that this release cannot have written.
#[derive(Debug)]
pub(crate) struct Unreadable;

/// A marker with what is known of its time.
pub(crate) struct Found {
    pub(crate) marker: Marker,
    age: Age,
}

const ABSENT: Found = Found {
    marker: Marker::Absent,
    age: Age::Of(Duration::ZERO),
};

impl<'connection> Rows<'connection> {
    pub(crate) fn new(connection: &'connection Connection, now: Now) -> rusqlite::Result<Self> {
        let [read, write, write_new, complete_own, delete] =
            [READ, WRITE, WRITE_NEW, COMPLETE_OWN, DELETE]
                .map(|sql| connection.prepare_cached(sql));
        Ok(Self {
            read: read?,
            write: write?,
            write_new: write_new?,
            complete_own: complete_own?,
            delete: delete?,
            now,
        })
    }

    /// Does to the row of its key what the operation asks. A row that cannot be read is left as it
    /// is.
    ///
    /// # Errors
    /// If SQLite fails: then the whole transaction does.
    pub(crate) fn apply(
        &mut self,
        operation: &Operation,
    ) -> rusqlite::Result<Result<Verdict, Failure>> {
        if let Some(verdict) = self.apply_to_the_usual(operation)? {
            return Ok(Ok(verdict));
        }
        let found = match self.find(&operation.key)? {
            Ok(found) => found,
            Err(Unreadable) => return Ok(Err(unreadable(operation.key.as_str()))),
        };
        let (change, verdict) = apply(found.marker, found.age, operation);
        match change {
            Change::Keep => {}
            Change::Delete => {
                self.delete.execute([operation.key.as_str()])?;
            }
            Change::Write(marker, after) => {
                self.write
                    .execute(self.now.columns(&operation.key, marker, after))?;
            }
        }
        Ok(Ok(verdict))
    }

    /// Nearly every claim finds nothing, and nearly every completion its own claim. Either takes
    /// one statement then, which writes nothing if it is otherwise.
    fn apply_to_the_usual(&mut self, operation: &Operation) -> rusqlite::Result<Option<Verdict>> {
        let Operation {
            key,
            ask,
            token,
            attempt,
            terms,
        } = operation;
        let (usual, age) = match ask {
            Ask::Claim => (ABSENT.marker, ABSENT.age),
            Ask::Complete => {
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
        let written = match (ask, apply(usual, age, operation)) {
            (Ask::Claim, (Change::Write(marker, after), verdict)) => (
                self.write_new
                    .execute(self.now.columns(key, marker, after))?,
                verdict,
            ),
            (_, (Change::Write(Marker::Done(fingerprint), after), verdict)) => {
                let fingerprint = fingerprint.map(|it| it.get() as i64); // below 10^18
                let (token, expires) = (token.0.to_be_bytes(), self.now.expires(after));
                let values = params![
                    key.as_str(),
                    expires,
                    fingerprint,
                    token,
                    attempt,
                    self.now.forgotten
                ];
                (self.complete_own.execute(values)?, verdict)
            }
            _ => return Ok(None),
        };
        Ok(Some(written)
            .filter(|(rows, _)| *rows == 1)
            .map(|(_, verdict)| verdict))
    }

    /// The marker under a key.
    pub(crate) fn look(&mut self, key: &Key) -> rusqlite::Result<Result<Marker, Failure>> {
        Ok(self
            .find(key)?
            .map(|found| found.marker)
            .map_err(|Unreadable| unreadable(key.as_str())))
    }

    fn find(&mut self, key: &Key) -> rusqlite::Result<Result<Found, Unreadable>> {
        let now = self.now;
        let found = self
            .read
            .query_row([key.as_str()], |row| Ok(read(row, now)))
            .optional()?;
        Ok(found.unwrap_or(Ok(ABSENT)))
    }
}

impl Now {
    /// When what is written now, to last for so long, expires.
    fn expires(&self, after: Duration) -> i64 {
        self.wall + milliseconds(after).max(1)
    }

    /// The columns of a row that is written now.
    fn columns<'key>(
        &self,
        key: &'key Key,
        marker: Marker,
        after: Duration,
    ) -> impl Params + use<'key> {
        let (state, fingerprint, hold) = match marker {
            Marker::Absent => unreachable!("a marker that is absent is deleted, not written"),
            Marker::Done(fingerprint) => (0, fingerprint, None),
            Marker::Cleared { .. } => (1, None, None),
            Marker::InProgress(hold) => (2, hold.fingerprint, Some(hold)),
            Marker::InDoubt(hold, Doubt::Waiting) => (3, hold.fingerprint, Some(hold)),
            Marker::InDoubt(hold, Doubt::Reconciling) => (4, hold.fingerprint, Some(hold)),
            Marker::Rejected { fingerprint, .. } => (5, fingerprint, None),
        };
        let tried = match marker {
            Marker::Cleared { attempts, effect } => Some((attempts, effect)),
            _ => hold.map(|hold| (hold.attempts, hold.earlier)),
        };
        let attempt = match marker {
            Marker::Rejected { attempt, .. } => Some(attempt),
            _ => tried.map(|(attempts, _)| attempts.number),
        };
        let [base, crashes] = [
            tried.map(|(attempts, _)| attempts.base),
            tried.map(|(attempts, _)| attempts.crashes),
        ];
        let effect = tried.map(|(_, effect)| match effect {
            Effect::Nothing => 0,
            Effect::Unknown => 1,
        });
        // Below 10^18.
        let fingerprint = fingerprint.map(|it| it.get() as i64);
        let token = hold.map(|hold| hold.token.0.to_be_bytes());
        let [lease, horizon] = [
            hold.map(|hold| milliseconds(hold.lease)),
            hold.map(|hold| milliseconds(hold.horizon).max(1)),
        ];
        let guarantee = hold.map(|hold| match hold.guarantee {
            Guarantee::AtMostOnce => 0,
            Guarantee::EffectivelyOnce => 1,
            Guarantee::Bare => 2,
        });
        (
            key.as_str(),
            self.expires(after),
            state,
            fingerprint,
            attempt,
            base,
            crashes,
            effect,
            token,
            lease,
            horizon,
            guarantee,
        )
    }
}

/// Reads a row, whose columns are those of [`READ`].
pub(crate) fn read(row: &Row<'_>, now: Now) -> Result<Found, Unreadable> {
    let expires: i64 = row.get(0).map_err(|_| Unreadable)?;
    // Of what a done marker lacks, its guarantee is one thing.
    let forgotten = if matches!(row.get(10), Ok(Some(0))) {
        now.unresolved_forgotten
    } else {
        now.forgotten
    };
    if expires <= forgotten {
        return Ok(ABSENT);
    }
    let fingerprint = match row
        .get::<_, Option<i64>>(2)
        .map_err(|_| Unreadable)?
        .map(u64::try_from)
    {
        None => None,
        Some(Ok(number)) if number < Fingerprint::LIMIT => Some(Fingerprint::new(number)),
        Some(_) => return Err(Unreadable),
    };
    let count = |column| row.get::<_, u32>(column).map_err(|_| Unreadable);
    let tried = || -> Result<(Attempts, Effect), Unreadable> {
        let effect = match row.get(6) {
            Ok(0) => Effect::Nothing,
            Ok(1) => Effect::Unknown,
            _ => return Err(Unreadable),
        };
        Ok((
            Attempts {
                number: count(3)?,
                base: count(4)?,
                crashes: count(5)?,
            },
            effect,
        ))
    };
    let hold = || -> Result<(Hold, Age), Unreadable> {
        let (attempts, earlier) = tried()?;
        let [lease, horizon] =
            [8, 9].map(|column| row.get::<_, i64>(column).ok().filter(|it| *it >= 0));
        let (lease, horizon) = (lease.ok_or(Unreadable)?, horizon.ok_or(Unreadable)?);
        let hold = Hold {
            token: Token(u128::from_be_bytes(row.get(7).map_err(|_| Unreadable)?)),
            attempts,
            earlier,
            lease: Duration::from_millis(lease.unsigned_abs()),
            horizon: Duration::from_millis(horizon.unsigned_abs()),
            guarantee: match row.get(10) {
                Ok(0) => Guarantee::AtMostOnce,
                Ok(1) => Guarantee::EffectivelyOnce,
                Ok(2) => Guarantee::Bare,
                _ => return Err(Unreadable),
            },
            fingerprint,
        };
        Ok((hold, age(expires.saturating_sub(horizon), now)))
    };
    let marker = match row.get(1) {
        Ok(0) => Marker::Done(fingerprint),
        Ok(1) => {
            let (attempts, effect) = tried()?;
            Marker::Cleared { attempts, effect }
        }
        Ok(5) => Marker::Rejected {
            attempt: count(3)?,
            fingerprint,
        },
        Ok(state @ 2..=4) => {
            let (hold, age) = hold()?;
            let marker = match state {
                2 => Marker::InProgress(hold),
                3 => Marker::InDoubt(hold, Doubt::Waiting),
                _ => Marker::InDoubt(hold, Doubt::Reconciling),
            };
            return Ok(Found { marker, age });
        }
        _ => return Err(Unreadable),
    };
    Ok(Found { marker, ..ABSENT })
}

/// How old a marker is that was written at this time; unknown if that is still to come.
fn age(written: i64, now: Now) -> Age {
    if written > now.wall {
        return Age::Unknown;
    }
    let old = now.wall.saturating_sub(written.max(now.held_since));
    Age::Of(Duration::from_millis(
        u64::try_from(old).unwrap_or_default(),
    )) // held_since is never after the wall clock
}

pub(crate) fn unreadable(key: &str) -> Failure {
    Failure::unreadable_marker(format!(
        "the row of {} in the table markers holds no marker that this release can read: delete the row, or upgrade oncegate here; it is left \
         as it is",
        key
    ))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use oncegate_core::MessageId;

    use super::super::file::{OpenFile, Place};
    use super::*;

    const LEASE: i64 = 30_000;
    const WINDOW: i64 = 600_000;
    const START: i64 = 1_700_000_000_000;
    const HOUR: i64 = 3_600_000;
    const TAKEN_OVER: Attempts = Attempts {
        number: 2,
        base: 1,
        crashes: 1,
    };

    fn file(directory: &Path) -> OpenFile {
        let place = Place {
            path: directory.join("markers.db"),
            synchronous: Default::default(),
            patience: Duration::ZERO,
        };
        OpenFile::open(&place, None).expect("a new file")
    }

    fn ask(file: &OpenFile, now: Now, ask: Ask, token: u128) -> Verdict {
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
            ask,
            token: Token(token),
            attempt: 1,
            terms,
        };
        let mut rows = Rows::new(&file.connection, now).expect("a table");
        rows.apply(&operation)
            .expect("no error of SQLite's")
            .expect("a verdict")
    }

    /// Without a jump.
    fn at(wall: i64) -> Now {
        Now {
            wall,
            held_since: i64::MIN,
            forgotten: wall,
            unresolved_forgotten: wall,
        }
    }

    #[test]
    fn a_lease_and_a_window_end_when_they_are_over_and_not_before() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = file(directory.path());
        assert_eq!(
            ask(&file, at(START), Ask::Claim, 1),
            Verdict::Granted(Attempts::new(1))
        );
        assert_eq!(
            ask(&file, at(START + LEASE), Ask::Claim, 2),
            Verdict::Busy {
                remaining: Duration::ZERO
            }
        );
        assert_eq!(
            ask(&file, at(START + LEASE + 1), Ask::Claim, 2),
            Verdict::Granted(TAKEN_OVER)
        );
    }

    #[test]
    fn a_done_marker_is_forgotten_after_its_window() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = file(directory.path());
        assert_eq!(
            ask(&file, at(START), Ask::Complete, 1),
            Verdict::Done { marker_lost: true }
        );
        assert_eq!(
            ask(&file, at(START + WINDOW - 1), Ask::Claim, 2),
            Verdict::Duplicate
        );
        assert_eq!(
            ask(&file, at(START + WINDOW), Ask::Claim, 2),
            Verdict::Granted(Attempts::new(1))
        );
    }

    #[test]
    fn a_completion_knows_its_own_claim_from_any_other() {
        let claimed = || {
            let directory = tempfile::tempdir().expect("a directory");
            let file = file(directory.path());
            assert_eq!(
                ask(&file, at(START), Ask::Claim, 1),
                Verdict::Granted(Attempts::new(1))
            );
            (file, directory)
        };
        let (file, _directory) = claimed();
        assert_eq!(
            ask(&file, at(START), Ask::Complete, 2),
            Verdict::Lost,
            "of another token"
        );
        assert_eq!(
            ask(&file, at(START), Ask::Complete, 1),
            Verdict::Done { marker_lost: false }
        );
        assert_eq!(
            ask(&file, at(START + WINDOW - 1), Ask::Claim, 2),
            Verdict::Duplicate,
            "the window begins anew"
        );

        let (file, _directory) = claimed();
        file.connection
            .execute("UPDATE markers SET attempt = 2", [])
            .expect("written");
        assert_eq!(
            ask(&file, at(START), Ask::Complete, 1),
            Verdict::Lost,
            "of an earlier attempt"
        );

        let (file, _directory) = claimed();
        ask(&file, at(START), Ask::Doubt, 1);
        assert_eq!(
            ask(&file, at(START), Ask::Complete, 2),
            Verdict::Done { marker_lost: false },
            "whoever knows ends a doubt"
        );

        let (file, _directory) = claimed();
        assert_eq!(
            ask(&file, at(START + WINDOW), Ask::Complete, 1),
            Verdict::Done { marker_lost: true },
            "after its window"
        );
    }

    #[test]
    fn a_jump_forward_ends_no_lease_and_forgets_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = file(directory.path());
        ask(&file, at(START), Ask::Claim, 1);
        let jumped = |later: i64| {
            let forgotten = START + later;
            Now {
                wall: START + HOUR + later,
                held_since: START + HOUR,
                forgotten,
                unresolved_forgotten: forgotten,
            }
        };
        assert_eq!(
            ask(&file, jumped(LEASE), Ask::Claim, 2),
            Verdict::Busy {
                remaining: Duration::ZERO
            }
        );
        assert_eq!(
            ask(&file, jumped(LEASE + 1), Ask::Claim, 2),
            Verdict::Granted(TAKEN_OVER)
        );

        let directory = tempfile::tempdir().expect("a directory");
        let file = self::file(directory.path());
        ask(&file, at(START), Ask::Complete, 1);
        assert_eq!(
            ask(&file, jumped(WINDOW - 1), Ask::Claim, 2),
            Verdict::Duplicate
        );
    }

    #[test]
    fn after_a_jump_back_the_age_is_nothing_and_then_begins_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = file(directory.path());
        ask(&file, at(START + HOUR), Ask::Claim, 1);
        let lease = Duration::from_millis(LEASE.unsigned_abs());
        assert_eq!(
            ask(&file, at(START), Ask::Claim, 2),
            Verdict::Busy { remaining: lease }
        );
        // Not for an hour and a lease.
        assert_eq!(
            ask(&file, at(START + LEASE + 1), Ask::Claim, 2),
            Verdict::Granted(TAKEN_OVER)
        );
    }
}
