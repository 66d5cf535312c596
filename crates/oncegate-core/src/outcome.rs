//! The counters of the metric [`DELIVERIES`], through the `metrics` facade.

use metrics::{Counter, counter};

use crate::lifecycle::{Event, Outcome, ProofKind, Settlement};
use crate::marker::{Attempts, Finding, Verdict};

/// `oncegate_deliveries_total{outcome=…}`: the verdicts for deliveries, the results of their runs,
/// and their settlements.
pub const DELIVERIES: &str = "oncegate_deliveries_total";

macro_rules! outcomes {
    ($($name:ident: $description:literal,)*) => {
        /// The values of the label `outcome` and their descriptions. One delivery can count under
        /// several of them.
        pub const OUTCOMES: &[(&str, &str)] = &[$((stringify!($name), $description)),*];

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
    first: "a claim was granted as attempt 1: no attempt ran before, or all of them failed without an effect",
    reclaimed: "a claim was granted, or found in doubt, after an attempt whose outcome is unknown, or whose holder crashed or lost its lease",
    after_crash: "a claim was granted, or found in doubt, for a message during whose handling a process had crashed",
    duplicate: "the id was done before: accepted without a run",
    busy: "another delivery holds the id: the claim is repeated later",
    conflict: "the id was used before for another body: the message is dead-lettered",
    fenced: "the lease was lost: the result of the run is discarded",
    unavailable: "the store did not answer an operation, or the transaction of an inbox was not begun or not confirmed",
    retried: "a run reported that nothing happened, and asked for a retry",
    reconciled_happened: "reconcile found that an effect in doubt had happened",
    reconciled_did_not_happen: "reconcile found that an effect in doubt had not happened",
    marker_lost: "when the id was recorded as done, the store had lost its claim: another attempt may have run at the same time",
    completed: "settled: handled, and recorded as done",
    released: "waits in the consumer for its next attempt, or is returned to the source",
    rejected: "settled: passed to the source, to be published to the dead letters",
    in_doubt: "settled: passed to the source, to be published to the in-doubt destination for an operator",
    passed_without_store: "handled without the store while the store was unavailable (Outage::PassThrough)",
    too_old: "older than max_age when it was received: its marker may have expired",
    unknown_age: "without a timestamp, so max_age could not be checked: treated as new",
    dropped: "not settled, because the consumer stopped before the store answered: redelivered, and claimed again after its lease",
);

impl Outcomes {
    #[inline]
    pub(crate) fn count_event(&self, event: Event) {
        if let Event::Answer(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) = event
            && attempts.crashes > 0
        {
            self.after_crash.increment(1);
        }
        match event {
            Event::Answer(Verdict::Granted(Attempts { number: 1, .. })) => self.first.increment(1),
            Event::Answer(Verdict::Granted(_) | Verdict::InDoubt(_)) => self.reclaimed.increment(1),
            Event::Answer(Verdict::Busy { .. }) => self.busy.increment(1),
            Event::Answer(Verdict::Conflict) => self.conflict.increment(1),
            Event::Answer(Verdict::Lost) | Event::LeaseOver => self.fenced.increment(1),
            Event::Answer(Verdict::Done { marker_lost: true }) => self.marker_lost.increment(1),
            Event::Unavailable | Event::Returned(Outcome::Unavailable) => {
                self.unavailable.increment(1)
            }
            Event::Returned(Outcome::Retry) => self.retried.increment(1),
            Event::Reconciled(Some(Finding::Happened)) => self.reconciled_happened.increment(1),
            Event::Reconciled(Some(Finding::DidNotHappen)) => {
                self.reconciled_did_not_happen.increment(1)
            }
            _ => {}
        }
    }

    /// Counts a settlement, or a release that the consumer executes itself as a delay.
    #[inline]
    pub(crate) fn settled(&self, settlement: &Settlement) {
        match settlement {
            Settlement::Accept(proof) => match proof.kind() {
                ProofKind::Duplicate => self.duplicate.increment(1),
                ProofKind::PassedWithoutStore => self.passed_without_store.increment(1),
                ProofKind::Completed | ProofKind::Resolved => self.completed.increment(1),
            },
            Settlement::Release { .. } => self.released.increment(1),
            Settlement::Reject(reason) if reason.is_in_doubt() => self.in_doubt.increment(1),
            Settlement::Reject(_) => self.rejected.increment(1),
        }
    }

    pub(crate) fn too_old(&self) {
        self.too_old.increment(1);
    }

    /// Counts a message without a timestamp.
    pub(crate) fn unknown_age(&self) {
        self.unknown_age.increment(1);
    }

    /// Counts a delivery that was abandoned because the consumer stopped.
    pub(crate) fn dropped(&self) {
        self.dropped.increment(1);
    }
}
