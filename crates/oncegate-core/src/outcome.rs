//! A counter for each outcome, through the `metrics` facade.

use metrics::{Counter, counter};

use crate::marker::{Finding, Verdict};
use crate::road::{Event, Outcome, Settlement};

/// `oncegate_deliveries_total{outcome=…}`: what the gate said, and what became of deliveries.
pub const DELIVERIES: &str = "oncegate_deliveries_total";

macro_rules! outcomes {
    ($($name:ident),* $(,)?) => {
        /// The counters of one consumer, looked up once.
        pub(crate) struct Outcomes { $($name: Counter),* }

        impl Outcomes {
            pub(crate) fn new() -> Self {
                Self { $($name: counter!(DELIVERIES, "outcome" => stringify!($name))),* }
            }
        }
    };
}

outcomes!(
    first,
    reclaimed,
    duplicate,
    busy,
    conflict,
    fenced,
    unavailable,
    retried,
    reconciled_happened,
    reconciled_did_not_happen,
    marker_lost,
    completed,
    released,
    rejected,
    in_doubt,
    passed_without_gate,
    too_old,
    dropped,
);

impl Outcomes {
    /// Counts what happened to a delivery.
    pub(crate) fn happened(&self, event: Event) {
        match event {
            Event::Answer(Verdict::Granted { attempt: 1 }) => self.first.increment(1),
            Event::Answer(Verdict::Granted { .. } | Verdict::InDoubt { .. }) => self.reclaimed.increment(1),
            Event::Answer(Verdict::Busy { .. }) => self.busy.increment(1),
            Event::Answer(Verdict::Conflict) => self.conflict.increment(1),
            Event::Answer(Verdict::Lost) | Event::LeaseOver => self.fenced.increment(1),
            Event::Answer(Verdict::Done { marker_lost: true }) => self.marker_lost.increment(1),
            Event::Unavailable => self.unavailable.increment(1),
            Event::Returned(Outcome::Retry) => self.retried.increment(1),
            Event::Found(Some(Finding::Happened)) => self.reconciled_happened.increment(1),
            Event::Found(Some(Finding::DidNotHappen)) => self.reconciled_did_not_happen.increment(1),
            _ => {}
        }
    }

    /// Counts how a delivery left the road.
    pub(crate) fn settled(&self, settlement: &Settlement) {
        match settlement {
            Settlement::Accept(proof) => match proof.as_str() {
                "duplicate" => self.duplicate.increment(1),
                "passed_without_gate" => self.passed_without_gate.increment(1),
                _ => self.completed.increment(1),
            },
            Settlement::Release { .. } => self.released.increment(1),
            Settlement::Reject(reason) if reason.is_in_doubt() => self.in_doubt.increment(1),
            Settlement::Reject(_) => self.rejected.increment(1),
        }
    }

    /// Counts a message that is older than `max_age`.
    pub(crate) fn too_old(&self) {
        self.too_old.increment(1);
    }

    /// Counts a delivery that was let go at the end of a drain.
    pub(crate) fn dropped(&self) {
        self.dropped.increment(1);
    }
}
