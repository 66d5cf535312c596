//! One delivery in flight, and what runs for it.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::UnboundedSender;
use tokio::task::AbortHandle;
use tracing::Span;

use crate::id::{Key, MessageId};
use crate::in_flight::InFlight;
use crate::lanes::Lane;
use crate::lease::Lease;
use crate::lifecycle::{Event, Stage};
use crate::marker::{Ask, Terms};
use crate::moment::Moment;
use crate::run::Finished;
use crate::slots::Slot;
use crate::spans;

/// One delivery in flight.
pub(super) struct InFlightEntry {
    pub(super) passage: InFlight,
    pub(super) id: Option<MessageId>,
    /// What the road is told of it first: whether it has an id.
    pub(super) arrival: Event,
    pub(super) key: Option<Key>,
    pub(super) terms: Terms,
    pub(super) ask: Ask,
    pub(super) claim: Claim,
    pub(super) lane: Option<Lane>,
    pub(super) lease: Option<Arc<Lease>>,
    /// What was asked of the store, until it answers.
    pub(super) asked: Span,
    pub(super) task: Option<Task>,
    /// When its handler began.
    pub(super) began: Option<Instant>,
    /// When the source handed it over.
    pub(super) arrived: Instant,
    pub(super) stands: Stands,
    /// Counts runs and alarms, so that what comes too late is told apart.
    pub(super) turn: u32,
    pub(super) bytes: usize,
}

/// Whether the store may know of the token of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    Unsent,
    Sent,
}

/// Where a delivery is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stands {
    /// On the road: it counts as in flight.
    OnTheRoad,
    /// It waits behind another of its lane, or rests after an attempt that failed. It has claimed
    /// nothing.
    Aside,
}

/// A handler that is over: where, in which turn, and what it came to.
pub(super) type FinishedRun = (Slot, u32, Finished);

/// What to start.
pub(super) enum Work {
    Handle,
    Reconcile,
}

/// Whether a handler or `reconcile` belongs to this stage; in any other it is dropped.
pub(super) fn runs(stage: Stage) -> bool {
    matches!(
        stage,
        Stage::Running(..) | Stage::Reconciling(..) | Stage::Ungated(_)
    )
}

/// Whether a delivery in this stage takes one of the runs that there may be at once; between two of
/// its own, too.
pub(super) fn holds_a_run(stage: Stage) -> bool {
    runs(stage) || stage.waits_on_lease()
}

/// Whether a delivery in this stage holds its claim, or may do so soon: if another ended the
/// process, it would be blamed, too.
pub(super) fn may_be_blamed(stage: Stage) -> bool {
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

/// A handler that runs: dropping this drops it.
pub(super) struct Task(pub(super) AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What is sent when a spawned handler is over, however it ends.
pub(super) struct Report {
    pub(super) runs: UnboundedSender<FinishedRun>,
    pub(super) slot: Slot,
    pub(super) turn: u32,
    pub(super) finished: Option<Finished>,
}

impl Report {
    pub(super) fn tell(mut self, finished: Finished) {
        self.finished = Some(finished);
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let finished = self.finished.take().unwrap_or_else(Finished::lost);
        let _ = self.runs.send((self.slot, self.turn, finished)); // the loop is gone: nobody wants to know
    }
}

impl InFlightEntry {
    /// The number of the attempt that was granted to its claim; 0 until then.
    pub(super) fn attempt(&self) -> u32 {
        self.passage.dispatch().attempts.number
    }

    /// Asks the store next.
    pub(super) fn asks(&mut self, ask: Ask) {
        self.ask = ask;
        let attempt = self.attempt();
        self.asked = spans::asked(
            &ask,
            self.id.as_ref(),
            attempt,
            Some(self.passage.delivery()),
        );
    }

    pub(super) fn lease_is_over(&self) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| !lease.lives(Moment::now()))
    }

    /// OnRelease what a run said for whoever finds the message in the dead letters.
    pub(super) fn tell(&mut self, finished: &Finished) {
        let Some(error) = &finished.error else { return };
        let error: String = error.chars().take(1000).collect();
        self.passage.tell(|story| {
            story.first_error.get_or_insert_with(|| error.clone());
            story.last_error = Some(error);
        });
    }
}
