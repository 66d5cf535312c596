//! The engine's record of one delivery.

use std::cell::Cell;

use tracing::Span;

use super::runs::RunningTask;
use crate::boot_time::BootTime;
use crate::id::{MessageId, Scope};
use crate::in_flight::InFlight;
use crate::lifecycle::{Event, Stage};
use crate::marker::Operation;
use crate::ordering::OrderingKey;
use crate::run::RunResult;
use crate::spans;

/// One delivery, queued or in flight: plain data in the slab of [`Intake`](super::intake::Intake).
pub(super) struct InFlightEntry {
    pub(super) in_flight: InFlight,
    /// The first event of its lifecycle, which says whether it has an id.
    pub(super) arrival: Event,
    pub(super) occupancy: Occupancy,
    /// The phase that it is counted in.
    pub(super) counted: Phase,
    pub(super) claim: Cell<ClaimState>,
    /// Whether a lease is registered for it with the renewals.
    pub(super) has_lease: bool,
    pub(super) ordering_key: Option<OrderingKey>,
    /// The span of the operation that the store has not answered yet.
    pub(super) store_span: Option<Box<Span>>,
    pub(super) task: Option<RunningTask>,
    /// When its handler or `reconcile` started.
    pub(super) began: Option<BootTime>,
    /// When it was received.
    pub(super) arrived: BootTime,
    /// Counts runs, alarms and operations: the results of earlier runs and earlier alarms are
    /// ignored.
    pub(super) turn: u32,
    pub(super) bytes: usize,
}

/// Whether the store may have a claim of this delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// It was not sent, or the store did not apply it: the delivery can be released without the store.
    Absent,
    /// It was sent for the first time, or again after the store did not apply it, and is not answered.
    Sent,
    /// The store has applied it, or the answer was lost.
    MayExist,
}

impl ClaimState {
    /// An operation is sent.
    #[inline]
    pub(super) fn sent(self) -> Self {
        match self {
            Self::Absent => Self::Sent,
            state => state,
        }
    }

    /// The store returned an error, after it may have applied the operation or not.
    pub(super) fn failed(self, may_be_applied: bool) -> Self {
        match self {
            Self::Absent | Self::Sent if !may_be_applied => Self::Absent,
            _ => Self::MayExist,
        }
    }
}

/// Which limit a delivery counts towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occupancy {
    /// `max_in_flight`.
    InFlight,
    /// `max_queued`: it waits behind another of its ordering key, or for its next attempt. It holds
    /// no claim.
    Queued,
}

/// What the engine counts a delivery as. Each delivery is in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// [`Occupancy::Queued`].
    Queued,
    /// In flight, and in none of the phases below.
    Open,
    /// It waits before it repeats its claim.
    AwaitingClaim,
    /// Its grant is being withdrawn. A suspect starts when there is none.
    Withdrawing,
    /// It counts towards the limit of concurrent runs, in the pause between two runs, too.
    Running,
    /// Its handler has returned, and its completion is not answered yet. It no longer counts
    /// towards `max_in_flight`.
    Completing,
}

impl Phase {
    pub(super) const COUNT: usize = 6;

    #[inline]
    fn of(occupancy: Occupancy, stage: Stage) -> Self {
        match (occupancy, stage) {
            (Occupancy::Queued, _) => Self::Queued,
            (_, Stage::AwaitingClaim(..)) => Self::AwaitingClaim,
            (_, Stage::Withdrawing(..)) => Self::Withdrawing,
            (_, Stage::Completing(_)) => Self::Completing,
            (_, stage) if has_running_task(stage) || stage.waits_on_lease() => Self::Running,
            _ => Self::Open,
        }
    }
}

/// Whether a handler or `reconcile` may run in this stage; in any other it is dropped.
#[inline]
pub(super) fn has_running_task(stage: Stage) -> bool {
    matches!(
        stage,
        Stage::Running(..) | Stage::Reconciling(..) | Stage::WithoutClaim(_)
    )
}

/// Whether a delivery in this stage holds a claim or may do so soon: a crash that another message
/// causes would be counted for it, too.
pub(super) fn may_count_crash(stage: Stage) -> bool {
    use Stage::*;
    matches!(
        stage,
        Claiming(..)
            | Ready(_)
            | Running(..)
            | Pausing(..)
            | Completing(_)
            | Clearing(..)
            | Rejecting(..)
    )
}

impl InFlightEntry {
    #[inline]
    pub(super) fn stage(&self) -> Stage {
        self.in_flight.stage()
    }

    #[inline]
    pub(super) fn phase(&self) -> Phase {
        Phase::of(self.occupancy, self.stage())
    }

    pub(super) fn id(&self) -> Option<&MessageId> {
        self.in_flight.shared().id.as_ref()
    }

    /// The number of the granted attempt; 0 before the grant.
    #[inline]
    pub(super) fn attempt(&self) -> u32 {
        self.in_flight.driver().attempts.number
    }

    /// The operation that its stage waits for; `None` if it waits for none.
    #[inline]
    pub(super) fn operation(&self, scope: &Scope) -> Option<Operation> {
        let shared = self.in_flight.shared();
        Some(Operation {
            key: scope.key(shared.id.as_ref()?),
            ask: self.stage().pending_ask()?,
            token: self.in_flight.driver().token,
            attempt: self.attempt(),
            terms: shared.terms,
        })
    }

    /// Ends the span of the operation that was answered.
    #[inline]
    pub(super) fn end_operation(&mut self, outcome: &dyn std::fmt::Debug, attempt: Option<u32>) {
        if let Some(span) = self.store_span.take() {
            spans::end_operation(*span, outcome, attempt);
        }
    }

    pub(super) fn lease_is_over(&self, now: BootTime) -> bool {
        let lease = self.in_flight.shared().lease.as_ref();
        lease.is_some_and(|lease| !lease.is_live(now))
    }

    /// Records the error of a run for the headers of a dead letter, cut to 1,000 characters.
    #[inline]
    pub(super) fn record_error(&mut self, finished: &RunResult) {
        let Some(error) = &finished.error else { return };
        let error: String = error.chars().take(1000).collect();
        self.in_flight.update_failures(|failure_history| {
            failure_history
                .first_error
                .get_or_insert_with(|| error.clone());
            failure_history.last_error = Some(error);
        });
    }
}
