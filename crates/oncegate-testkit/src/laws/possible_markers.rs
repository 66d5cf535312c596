//! The markers that a key may have, given the verdicts that clients have received.
//!
//! An operation is applied at some moment between its request and its reply, by the store's clock.
//! Usually one marker is possible; near the end of a lease or a window two are, and the verdict
//! decides which. So laws need no safety margins, and do not fail on a slow machine.

use std::time::{Duration, Instant};

use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};
use oncegate_core::{Store, StoreError};

use super::fixtures::{CLOCK_TOLERANCE, answers};

/// A time interval, for example between a request and its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}

/// The results of one batch, and the span between its request and its reply.
pub(crate) async fn timed_answers(
    store: &dyn Store,
    operations: &[Operation],
) -> (Vec<Result<Verdict, StoreError>>, Span) {
    let from = Instant::now();
    let answers = answers(store, operations).await;
    let to = Instant::now();
    (answers, Span { from, to })
}

/// One possible marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PossibleEntry {
    pub(crate) marker: Marker,
    /// When the marker was written.
    written: Span,
    /// The time to live after the marker was written. Unused if the marker is absent.
    expiry: Duration,
}

impl PossibleEntry {
    pub(crate) fn absent(now: Instant) -> Self {
        Self {
            marker: Marker::Absent,
            written: Span { from: now, to: now },
            expiry: Duration::MAX,
        }
    }

    /// The possible markers after an operation with this verdict; empty if the verdict is
    /// impossible. `received` is `None` if the reply was lost; then every verdict is possible.
    ///
    /// The operation took effect within the span `during`. The time from which its marker expires
    /// is within `requested`, the span from its request to its reply, because a database may read
    /// the clock first and commit later.
    pub(crate) fn after(
        &self,
        operation: &Operation,
        during: Span,
        requested: Span,
        received: Option<Verdict>,
    ) -> Vec<Self> {
        let mut possible = Vec::with_capacity(2);
        for (marker, youngest, oldest) in self.ages(during) {
            let apply_at = |age| marker::apply(marker, Age::Of(age), operation);
            let (of_youngest, of_oldest) = (apply_at(youngest), apply_at(oldest));
            let (most, least) = (of_youngest.1, of_oldest.1);
            let fits = |verdict: Verdict| match (received, verdict) {
                (None, _) => true,
                // The remaining time lies between those of the two ages.
                (Some(Verdict::Busy { remaining }), Verdict::Busy { .. }) => {
                    let remaining_of = |verdict| {
                        if let Verdict::Busy { remaining } = verdict {
                            remaining
                        } else {
                            Duration::ZERO
                        }
                    };
                    remaining <= remaining_of(most) + CLOCK_TOLERANCE
                        && remaining + CLOCK_TOLERANCE >= remaining_of(least)
                }
                (Some(received), verdict) => received == verdict,
            };
            for (change, _) in [of_youngest, of_oldest]
                .into_iter()
                .filter(|(_, verdict)| fits(*verdict))
            {
                let entry = match change {
                    Change::Keep if marker == Marker::Absent => Self::absent(self.written.from),
                    Change::Keep => *self,
                    Change::Write(marker, expiry) => Self {
                        marker,
                        written: requested,
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

    /// The markers that may exist within the span, each with its minimum and maximum age.
    fn ages(&self, during: Span) -> impl Iterator<Item = (Marker, Duration, Duration)> {
        let youngest = during
            .from
            .saturating_duration_since(self.written.to)
            .saturating_sub(CLOCK_TOLERANCE);
        let oldest = during.to.saturating_duration_since(self.written.from) + CLOCK_TOLERANCE;
        let alive = youngest < self.expiry || self.marker == Marker::Absent;
        let expired = oldest >= self.expiry && self.marker != Marker::Absent;
        let existing = alive.then_some((self.marker, youngest, oldest.min(self.expiry)));
        existing.into_iter().chain(expired.then_some((
            Marker::Absent,
            Duration::ZERO,
            Duration::ZERO,
        )))
    }
}

/// All possible markers of one key.
#[derive(Clone, Debug)]
pub(crate) struct PossibleMarkers(Vec<PossibleEntry>);

/// A verdict that [`marker::apply`] gives for none of the possible markers.
#[derive(Clone, Debug)]
pub(crate) struct UnexpectedVerdict {
    pub(crate) received: Verdict,
    pub(crate) expected: Vec<Verdict>,
    pub(crate) possible: Vec<Marker>,
}

impl PossibleMarkers {
    /// The state of a key that was not used yet.
    pub(crate) fn new(now: Instant) -> Self {
        Self(vec![PossibleEntry::absent(now)])
    }

    /// The last of the possible markers.
    pub(crate) fn marker(&self) -> Marker {
        // The list is never empty: a law ends after an `UnexpectedVerdict`.
        self.0.last().map_or(Marker::Absent, |entry| entry.marker)
    }

    /// Updates the possible markers after an operation with this verdict.
    ///
    /// # Errors
    /// [`UnexpectedVerdict`] if [`marker::apply`] gives the verdict for none of the possible
    /// markers.
    pub(crate) fn observe(
        &mut self,
        operation: &Operation,
        during: Span,
        received: Verdict,
    ) -> Result<(), UnexpectedVerdict> {
        let mut after: Vec<PossibleEntry> = Vec::with_capacity(1);
        for entry in self
            .0
            .iter()
            .flat_map(|entry| entry.after(operation, during, during, Some(received)))
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
            return Err(UnexpectedVerdict {
                received,
                expected,
                possible: self.0.iter().map(|entry| entry.marker).collect(),
            });
        }
        self.0 = after;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laws::fixtures::{
        Claimant, EFFECTIVELY_ONCE, OTHER_TOKEN, OWN_TOKEN, TAKEN_OVER, granted, key,
    };

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
        let first = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 0)
            .lease(LEASE)
            .claim(&key);
        let second = Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 0).claim(&key);
        let is_possible = |during: Span, verdict| {
            let mut markers = PossibleMarkers::new(start);
            markers
                .observe(&first, at(0, 5), granted(1))
                .expect("the key is new");
            markers.observe(&second, during, verdict).is_ok()
        };
        assert!(
            is_possible(at(50, 52), busy(50))
                && !is_possible(at(50, 52), taken)
                && !is_possible(at(50, 52), busy(20))
                && !is_possible(at(50, 52), busy(90))
        );
        assert!(
            is_possible(at(200, 202), taken)
                && !is_possible(at(200, 202), busy(0))
                && !is_possible(at(200, 202), granted(1))
        );
        assert!(
            is_possible(at(80, 130), taken)
                && is_possible(at(80, 130), busy(20))
                && is_possible(at(80, 130), busy(0))
                && !is_possible(at(80, 130), busy(60))
        );
    }

    #[test]
    fn an_expired_marker_is_absent() {
        let (start, key) = (Instant::now(), key("k"));
        let at = |ms: u64| Span {
            from: start + Duration::from_millis(ms),
            to: start + Duration::from_millis(ms + 1),
        };
        let claimant = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1).window(2 * LEASE);
        for (when, verdict) in [
            (100, Verdict::Duplicate),
            (300, granted(1)),
            (200, granted(1)),
            (200, Verdict::Duplicate),
        ] {
            let mut markers = PossibleMarkers::new(start);
            markers
                .observe(
                    &claimant.operation(marker::OperationKind::Complete, &key),
                    at(0),
                    Verdict::Done { marker_lost: true },
                )
                .expect("the key is new");
            assert!(
                markers
                    .observe(&claimant.claim(&key), at(when), verdict)
                    .is_ok(),
                "{verdict:?} after {when} ms"
            );
        }
    }
}
