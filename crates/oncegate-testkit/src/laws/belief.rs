//! What a key may hold, as far as those can tell who ask from outside.
//!
//! An operation is applied at some moment between its question and its answer, by the store's
//! clock. Where that decides nothing there is one possibility; at the end of a lease or of a window
//! there are two, and the verdict tells which. So no law has to wait a safe distance away from
//! either, and a slow machine makes no law red.

use std::time::{Duration, Instant};

use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};

use super::ask::SLACK;

/// Some moment in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}

/// One possibility.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Entry {
    pub(crate) marker: Marker,
    written: Span,
    /// How long after it was written it expires. Means nothing where the marker is absent.
    expiry: Duration,
}

impl Entry {
    pub(crate) fn absent(now: Instant) -> Self {
        Self {
            marker: Marker::Absent,
            written: Span { from: now, to: now },
            expiry: Duration::MAX,
        }
    }

    /// What this may have become, if an operation was applied within the span and answered like
    /// that; nothing where it cannot have been. An answer that nobody heard may have been any.
    pub(crate) fn after(
        &self,
        operation: &Operation,
        during: Span,
        heard: Option<Verdict>,
    ) -> Vec<Self> {
        let mut possible = Vec::with_capacity(2);
        for (marker, youngest, oldest) in self.ages(during) {
            let of = |age| marker::apply(marker, Age::Of(age), operation);
            let ((young, most), (old, least)) = (of(youngest), of(oldest));
            let fits = |verdict: Verdict| match (heard, verdict) {
                (None, _) => true,
                // What remains lies between what the two ages leave.
                (Some(Verdict::Busy { remaining }), Verdict::Busy { .. }) => {
                    let left = |verdict| {
                        if let Verdict::Busy { remaining } = verdict {
                            remaining
                        } else {
                            Duration::ZERO
                        }
                    };
                    remaining <= left(most) + SLACK && remaining + SLACK >= left(least)
                }
                (Some(heard), verdict) => heard == verdict,
            };
            for (change, _) in [(young, most), (old, least)]
                .into_iter()
                .filter(|(_, verdict)| fits(*verdict))
            {
                let entry = match change {
                    Change::Keep if marker == Marker::Absent => Self::absent(self.written.from),
                    Change::Keep => *self,
                    Change::Write(marker, expiry) => Self {
                        marker,
                        written: during,
                        expiry,
                    },
                    Change::Delete => Self::absent(self.written.from),
                };
                if !possible.contains(&entry) {
                    possible.push(entry);
                }
            }
        }
        possible
    }

    /// The markers that may be there within the span, each with the least and the greatest age that
    /// it may have.
    fn ages(&self, during: Span) -> impl Iterator<Item = (Marker, Duration, Duration)> {
        let youngest = during
            .from
            .saturating_duration_since(self.written.to)
            .saturating_sub(SLACK);
        let oldest = during.to.saturating_duration_since(self.written.from) + SLACK;
        let alive = youngest < self.expiry || self.marker == Marker::Absent;
        let expired = oldest >= self.expiry && self.marker != Marker::Absent;
        let there = alive.then_some((self.marker, youngest, oldest.min(self.expiry)));
        there
            .into_iter()
            .chain(expired.then_some((Marker::Absent, Duration::ZERO, Duration::ZERO)))
    }
}

/// All possibilities of one key.
#[derive(Clone, Debug)]
pub(crate) struct Belief(Vec<Entry>);

/// A verdict that none of the possibilities gives.
#[derive(Clone, Debug)]
pub(crate) struct Surprise {
    pub(crate) heard: Verdict,
    pub(crate) expected: Vec<Verdict>,
    pub(crate) believed: Vec<Marker>,
}

impl Belief {
    /// Nobody has used this key yet.
    pub(crate) fn new(now: Instant) -> Self {
        Self(vec![Entry::absent(now)])
    }

    /// One of the markers that may be there.
    pub(crate) fn marker(&self) -> Marker {
        // There is always one: who is surprised does not go on.
        self.0.last().map_or(Marker::Absent, |entry| entry.marker)
    }

    /// Takes in what was answered to an operation.
    ///
    /// # Errors
    /// [`Surprise`], if the reference cannot have answered so.
    pub(crate) fn hear(
        &mut self,
        operation: &Operation,
        during: Span,
        heard: Verdict,
    ) -> Result<(), Surprise> {
        let mut after: Vec<Entry> = Vec::with_capacity(1);
        for entry in self
            .0
            .iter()
            .flat_map(|entry| entry.after(operation, during, Some(heard)))
        {
            if !after.contains(&entry) {
                after.push(entry);
            }
        }
        if after.is_empty() {
            let ages = self.0.iter().flat_map(|entry| entry.ages(during));
            let each =
                ages.flat_map(|(marker, youngest, oldest)| [(marker, youngest), (marker, oldest)]);
            let mut expected: Vec<Verdict> = each
                .map(|(marker, age)| marker::apply(marker, Age::Of(age), operation).1)
                .collect();
            expected.dedup();
            return Err(Surprise {
                heard,
                expected,
                believed: self.0.iter().map(|entry| entry.marker).collect(),
            });
        }
        self.0 = after;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laws::ask::{Asker, EFFECTIVELY_ONCE, MINE, TAKEN_OVER, THEIRS, granted, key};

    const LEASE: Duration = Duration::from_millis(100);

    #[test]
    fn far_from_the_end_of_a_lease_there_is_one_possibility_and_near_it_there_are_two() {
        let (start, key) = (Instant::now(), key("k"));
        let at = |from: u64, to: u64| Span {
            from: start + Duration::from_millis(from),
            to: start + Duration::from_millis(to),
        };
        let busy = |remaining: u64| Verdict::Busy {
            remaining: Duration::from_millis(remaining),
        };
        let taken = Verdict::Granted(TAKEN_OVER);
        let first = Asker::new(EFFECTIVELY_ONCE, MINE, 0)
            .lease(LEASE)
            .claims(&key);
        let second = Asker::new(EFFECTIVELY_ONCE, THEIRS, 0).claims(&key);
        let hear = |during: Span, verdict| {
            let mut belief = Belief::new(start);
            belief
                .hear(&first, at(0, 5), granted(1))
                .expect("it is new");
            belief.hear(&second, during, verdict).is_ok()
        };
        assert!(
            hear(at(50, 52), busy(50))
                && !hear(at(50, 52), taken)
                && !hear(at(50, 52), busy(20))
                && !hear(at(50, 52), busy(90))
        );
        assert!(
            hear(at(200, 202), taken)
                && !hear(at(200, 202), busy(0))
                && !hear(at(200, 202), granted(1))
        );
        assert!(
            hear(at(80, 130), taken)
                && hear(at(80, 130), busy(20))
                && hear(at(80, 130), busy(0))
                && !hear(at(80, 130), busy(60))
        );
    }

    #[test]
    fn what_has_expired_is_absent() {
        let (start, key) = (Instant::now(), key("k"));
        let at = |ms: u64| Span {
            from: start + Duration::from_millis(ms),
            to: start + Duration::from_millis(ms + 1),
        };
        let asker = Asker::new(EFFECTIVELY_ONCE, MINE, 1).window(2 * LEASE);
        for (when, verdict) in [
            (100, Verdict::Duplicate),
            (300, granted(1)),
            (200, granted(1)),
            (200, Verdict::Duplicate),
        ] {
            let mut belief = Belief::new(start);
            belief
                .hear(
                    &asker.asks(marker::Ask::Complete, &key),
                    at(0),
                    Verdict::Done { marker_lost: true },
                )
                .expect("it is new");
            assert!(
                belief.hear(&asker.claims(&key), at(when), verdict).is_ok(),
                "{verdict:?} after {when} ms"
            );
        }
    }
}
