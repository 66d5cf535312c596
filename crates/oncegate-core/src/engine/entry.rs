//! The engine's record of one delivery, and the task that runs for it.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tracing::Span;

use crate::boot_time::BootTime;
use crate::id::{Key, MessageId};
use crate::in_flight::InFlight;
use crate::lease::Lease;
use crate::lifecycle::{Event, Stage};
use crate::marker::{Ask, Terms};
use crate::ordering::OrderingKey;
use crate::run::RunResult;
use crate::slots::Slot;
use crate::spans;

/// One delivery, queued or in flight.
pub(super) struct InFlightEntry {
    pub(super) in_flight: InFlight,
    pub(super) id: Option<MessageId>,
    /// The first event of its lifecycle, which says whether it has an id.
    pub(super) arrival: Event,
    pub(super) key: Option<Key>,
    pub(super) terms: Terms,
    pub(super) ask: Ask,
    pub(super) claim: ClaimState,
    pub(super) ordering_key: Option<OrderingKey>,
    pub(super) lease: Option<Arc<Lease>>,
    /// The span of the operation that the store has not answered yet.
    pub(super) store_span: Span,
    pub(super) task: Option<AbortOnDrop>,
    /// When its handler or `reconcile` started.
    pub(super) began: Option<Instant>,
    /// When it was received.
    pub(super) arrived: Instant,
    pub(super) occupancy: Occupancy,
    /// Counts runs and alarms, so that stale ones are ignored.
    pub(super) turn: u32,
    pub(super) bytes: usize,
}

/// Whether the claim of a delivery was sent to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimState {
    Unsent,
    Sent,
}

/// Which limit a delivery counts towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occupancy {
    /// `max_in_flight`.
    InFlight,
    /// `max_queued`: it waits behind another of its ordering key, or backs off after a failed
    /// attempt. It holds no claim.
    Queued,
}

/// The delivery of a spawned handler, the turn of its run, and the result.
pub(super) type FinishedRun = (Slot, u32, RunResult);

/// Which function of the handler runs.
pub(super) enum RunKind {
    Handle,
    Reconcile,
}

/// Whether a handler or `reconcile` may run in this stage; in any other it is dropped.
pub(super) fn has_running_task(stage: Stage) -> bool {
    matches!(
        stage,
        Stage::Running(..) | Stage::Reconciling(..) | Stage::Ungated(_)
    )
}

/// Whether a delivery in this stage counts towards the limit of concurrent runs. It does so in the
/// pause between two runs, too.
pub(super) fn occupies_run(stage: Stage) -> bool {
    has_running_task(stage) || stage.waits_on_lease()
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

/// Aborts the task of a handler on drop.
pub(super) struct AbortOnDrop(pub(super) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends the result of a spawned handler on drop, however its task ends.
pub(super) struct RunReport {
    pub(super) sender: UnboundedSender<FinishedRun>,
    pub(super) slot: Slot,
    pub(super) turn: u32,
    pub(super) finished: Option<RunResult>,
}

impl RunReport {
    pub(super) fn send(mut self, finished: RunResult) {
        self.finished = Some(finished);
    }
}

impl Drop for RunReport {
    fn drop(&mut self) {
        let finished = self.finished.take().unwrap_or_else(RunResult::lost);
        let _ = self.sender.send((self.slot, self.turn, finished)); // fails only after the engine was dropped
    }
}

impl InFlightEntry {
    /// The number of the granted attempt; 0 before the grant.
    pub(super) fn attempt(&self) -> u32 {
        self.in_flight.driver().attempts.number
    }

    /// Sets the next operation and opens its span.
    pub(super) fn begin_operation(&mut self, ask: Ask) {
        self.ask = ask;
        let attempt = self.attempt();
        self.store_span = spans::operation(
            &ask,
            self.id.as_ref(),
            attempt,
            Some(self.in_flight.delivery()),
        );
    }

    pub(super) fn lease_is_over(&self) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| !lease.is_live(BootTime::now()))
    }

    /// Records the error of a run for the headers of a dead letter, cut to 1,000 characters.
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
