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

/// One delivery, queued or in flight, in the slab of [`Intake`](super::intake::Intake).
pub(super) struct InFlightEntry {
    pub(super) in_flight: InFlight,
    /// The first event of its lifecycle: [`Event::Arrived`], [`Event::NoId`] or
    /// [`Event::UnusableId`].
    pub(super) arrival: Event,
    pub(super) occupancy: Occupancy,
    /// The phase in which [`Intake`](super::intake::Intake) counts it.
    pub(super) counted: Phase,
    pub(super) claim: Cell<ClaimState>,
    /// Whether a lease is registered for it with the renewals.
    pub(super) has_lease: bool,
    pub(super) ordering_key: Option<OrderingKey>,
    /// The span of the operation that the store has not answered yet.
    pub(super) store_span: Option<Box<Span>>,
    /// The task of its handler or `reconcile`, if one runs in a task.
    pub(super) task: Option<RunningTask>,
    /// When its handler or `reconcile` started.
    pub(super) began: Option<BootTime>,
    /// When it was received.
    pub(super) arrived: BootTime,
    /// Increases with each run, alarm and operation: the engine ignores the result of a run, and an
    /// alarm, of an earlier generation.
    pub(super) generation: u32,
    /// The size of its message.
    pub(super) bytes: usize,
}

/// Whether the store may have a claim of this delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// No claim was sent, or the store did not apply it: the delivery can be released without the
    /// store.
    Absent,
    /// A claim was sent and is not answered, and the store did not apply an earlier one.
    Sent,
    /// The store has applied a claim, or the answer to one was lost.
    MayExist,
}

impl ClaimState {
    /// The state after an operation is sent.
    #[inline]
    pub(super) fn sent(self) -> Self {
        match self {
            Self::Absent => Self::Sent,
            state => state,
        }
    }

    /// The state after the store returned an error for an operation, which it may have applied or
    /// not.
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

/// The phase in which the engine counts a delivery. Each delivery is in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// [`Occupancy::Queued`].
    Queued,
    /// In flight, and in none of the phases below.
    OtherInFlight,
    /// It waits before it repeats its claim.
    AwaitingClaim,
    /// Its grant is being withdrawn. A suspect starts only when no delivery is in this phase.
    Withdrawing,
    /// A run of it is in progress, or it pauses between two inline runs: it counts towards the
    /// limit of concurrent runs.
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
            _ => Self::OtherInFlight,
        }
    }
}

/// Whether a handler or `reconcile` runs in this stage. A task that still runs in another stage is
/// dropped.
#[inline]
pub(super) fn has_running_task(stage: Stage) -> bool {
    matches!(
        stage,
        Stage::Running(..) | Stage::Reconciling(..) | Stage::WithoutClaim(_)
    )
}

/// Whether a delivery in this stage holds a claim, or may be granted one: if another message
/// crashes the process, its marker counts a crash, too.
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

    /// The operation whose answer its stage waits for; `None` if it waits for no answer.
    #[inline]
    pub(super) fn operation(&self, scope: &Scope) -> Option<Operation> {
        let shared = self.in_flight.shared();
        Some(Operation {
            key: scope.key(shared.id.as_ref()?),
            kind: self.stage().pending_operation()?,
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
