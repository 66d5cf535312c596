//! A marker as the columns of a row, which are the same in SQLite and PostgreSQL.

use std::time::Duration;

use crate::marker::{Age, Attempts, Doubt, Effect, Fingerprint, Guarantee, Hold, Marker, Token};

/// The columns of a marker other than its key and its expiry. A column that the state does not use
/// is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MarkerColumns {
    /// 0 done, 1 cleared, 2 in progress, 3 in doubt, 4 in doubt and being reconciled, 5 rejected.
    pub state: i16,
    /// The fingerprint of the body, from 0 to below 10^18.
    pub fingerprint: Option<i64>,
    /// The number of the last attempt.
    pub attempt: Option<i64>,
    /// How many attempts do not count towards `max_attempts`.
    pub base: Option<i64>,
    /// How many leases ended without a recorded outcome.
    pub crashes: Option<i64>,
    /// What the attempts, or those before the current one if there is one, may have done: 0 nothing,
    /// 1 unknown.
    pub effect: Option<i16>,
    /// The token of the claim that holds the id.
    pub token: Option<u128>,
    /// The lease of that claim, in milliseconds.
    pub lease: Option<i64>,
    /// The time from the last write to the expiry, in milliseconds.
    pub horizon: Option<i64>,
    /// The guarantee of that claim: 0 at most once, 1 effectively once, 2 bare. Only in states 2 to
    /// 4.
    pub guarantee: Option<i16>,
}

/// The error for a row that this release cannot have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadableRow;

impl MarkerColumns {
    /// The columns of a marker; `None` for [`Marker::Absent`], which has no row.
    pub fn of(marker: Marker) -> Option<Self> {
        let (state, fingerprint) = match marker {
            Marker::Absent => return None,
            Marker::Done(fingerprint) => (0, fingerprint),
            Marker::Cleared { .. } => (1, None),
            Marker::InProgress(hold) => (2, hold.fingerprint),
            Marker::InDoubt(hold, Doubt::Waiting) => (3, hold.fingerprint),
            Marker::InDoubt(hold, Doubt::Reconciling) => (4, hold.fingerprint),
            Marker::Rejected { fingerprint, .. } => (5, fingerprint),
        };
        let mut row = Self {
            state,
            fingerprint: fingerprint.map(|fingerprint| fingerprint.get() as i64),
            ..Self::default()
        };
        match marker {
            Marker::Absent | Marker::Done(_) => {}
            Marker::Rejected { attempt, .. } => row.attempt = Some(attempt.into()),
            Marker::Cleared { attempts, effect } => row.set_attempts(attempts, effect),
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => {
                row.set_attempts(hold.attempts, hold.earlier);
                row.token = Some(hold.token.0);
                row.lease = Some(milliseconds(hold.lease));
                row.horizon = Some(milliseconds(hold.horizon).max(1));
                row.guarantee = Some(match hold.guarantee {
                    Guarantee::AtMostOnce => 0,
                    Guarantee::EffectivelyOnce => 1,
                    Guarantee::Bare => 2,
                });
            }
        }
        Some(row)
    }

    fn set_attempts(&mut self, attempts: Attempts, effect: Effect) {
        self.attempt = Some(attempts.number.into());
        self.base = Some(attempts.base.into());
        self.crashes = Some(attempts.crashes.into());
        self.effect = Some(match effect {
            Effect::Nothing => 0,
            Effect::Unknown => 1,
        });
    }

    /// Reads the marker from the columns.
    ///
    /// # Errors
    /// [`UnreadableRow`] if this release cannot have written the columns.
    pub fn marker(&self) -> Result<Marker, UnreadableRow> {
        let fingerprint = match self.fingerprint.map(u64::try_from) {
            None => None,
            Some(Ok(number)) if number < Fingerprint::LIMIT => Some(Fingerprint::new(number)),
            Some(_) => return Err(UnreadableRow),
        };
        Ok(match self.state {
            0 => Marker::Done(fingerprint),
            1 => {
                let (attempts, effect) = self.attempts_and_effect()?;
                Marker::Cleared { attempts, effect }
            }
            2 => Marker::InProgress(self.hold(fingerprint)?),
            3 => Marker::InDoubt(self.hold(fingerprint)?, Doubt::Waiting),
            4 => Marker::InDoubt(self.hold(fingerprint)?, Doubt::Reconciling),
            5 => Marker::Rejected {
                attempt: count(self.attempt)?,
                fingerprint,
            },
            _ => return Err(UnreadableRow),
        })
    }

    /// The age of a marker that expires in `left` milliseconds. [`Age::Unknown`] if the expiry is
    /// later than the horizon allows, because the clock was set back or another program set the
    /// expiry. Zero in the states without a horizon.
    pub fn age(&self, left: i64) -> Age {
        match self.horizon {
            Some(horizon) if matches!(self.state, 2..=4) => {
                u64::try_from(horizon.saturating_sub(left))
                    .map_or(Age::Unknown, |age| Age::Of(Duration::from_millis(age)))
            }
            _ => Age::Of(Duration::ZERO),
        }
    }

    fn attempts_and_effect(&self) -> Result<(Attempts, Effect), UnreadableRow> {
        let effect = match self.effect {
            Some(0) => Effect::Nothing,
            Some(1) => Effect::Unknown,
            _ => return Err(UnreadableRow),
        };
        let attempts = Attempts {
            number: count(self.attempt)?,
            base: count(self.base)?,
            crashes: count(self.crashes)?,
        };
        Ok((attempts, effect))
    }

    fn hold(&self, fingerprint: Option<Fingerprint>) -> Result<Hold, UnreadableRow> {
        let (attempts, earlier) = self.attempts_and_effect()?;
        let duration = |column: Option<i64>| {
            let number = column.and_then(|value| u64::try_from(value).ok());
            number.map(Duration::from_millis).ok_or(UnreadableRow)
        };
        Ok(Hold {
            token: Token(self.token.ok_or(UnreadableRow)?),
            attempts,
            earlier,
            lease: duration(self.lease)?,
            horizon: duration(self.horizon)?,
            guarantee: match self.guarantee {
                Some(0) => Guarantee::AtMostOnce,
                Some(1) => Guarantee::EffectivelyOnce,
                Some(2) => Guarantee::Bare,
                _ => return Err(UnreadableRow),
            },
            fingerprint,
        })
    }
}

/// The number in a column that must not be null.
fn count(column: Option<i64>) -> Result<u32, UnreadableRow> {
    column
        .and_then(|number| u32::try_from(number).ok())
        .ok_or(UnreadableRow)
}

/// A duration in milliseconds, rounded up; at most three thousand years, so that sums do not
/// overflow.
pub fn milliseconds(duration: Duration) -> i64 {
    const LONGEST: u128 = 100_000_000_000_000;
    i64::try_from(duration.as_nanos().div_ceil(1_000_000).min(LONGEST))
        .expect("LONGEST fits into an i64")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(guarantee: Guarantee, fingerprint: Option<Fingerprint>) -> Hold {
        Hold {
            token: Token(u128::MAX - 7),
            attempts: Attempts {
                number: u32::MAX,
                base: 2,
                crashes: 1,
            },
            earlier: Effect::Unknown,
            lease: Duration::from_secs(30),
            horizon: Duration::from_secs(600),
            guarantee,
            fingerprint,
        }
    }

    #[test]
    fn each_marker_is_read_as_it_was_written() {
        let mut markers = Vec::new();
        for fingerprint in [None, Some(Fingerprint::new(Fingerprint::LIMIT - 1))] {
            markers.push(Marker::Done(fingerprint));
            markers.push(Marker::Rejected {
                attempt: 3,
                fingerprint,
            });
            for guarantee in [
                Guarantee::AtMostOnce,
                Guarantee::EffectivelyOnce,
                Guarantee::Bare,
            ] {
                let hold = hold(guarantee, fingerprint);
                markers.push(Marker::InProgress(hold));
                markers.push(Marker::InDoubt(hold, Doubt::Waiting));
                markers.push(Marker::InDoubt(hold, Doubt::Reconciling));
            }
        }
        for effect in [Effect::Nothing, Effect::Unknown] {
            let attempts = Attempts::new(4);
            markers.push(Marker::Cleared { attempts, effect });
        }
        for marker in markers {
            let row = MarkerColumns::of(marker).expect("it is not absent");
            assert_eq!(row.marker(), Ok(marker));
        }
        assert_eq!(MarkerColumns::of(Marker::Absent), None);
    }

    #[test]
    fn a_row_with_a_wrong_column_is_unreadable() {
        let marker = Marker::InProgress(hold(Guarantee::AtMostOnce, None));
        let row = MarkerColumns::of(marker).expect("a row");
        let wrong: [fn(&mut MarkerColumns); 9] = [
            |row| row.state = 6,
            |row| row.fingerprint = Some(Fingerprint::LIMIT as i64),
            |row| row.attempt = Some(-1),
            |row| row.base = None,
            |row| row.crashes = Some(1 << 32),
            |row| row.effect = Some(2),
            |row| row.token = None,
            |row| row.lease = Some(-1),
            |row| row.guarantee = Some(3),
        ];
        for change in wrong {
            let mut row = row;
            change(&mut row);
            assert_eq!(row.marker(), Err(UnreadableRow), "{row:?}");
        }
    }

    #[test]
    fn the_age_is_the_horizon_without_what_is_left_of_it() {
        let marker = Marker::InProgress(hold(Guarantee::AtMostOnce, None));
        let row = MarkerColumns::of(marker).expect("a row");
        assert_eq!(row.age(599_000), Age::Of(Duration::from_secs(1)));
        assert_eq!(row.age(600_001), Age::Unknown);
    }
}
