//! The stages of a delivery in its lifecycle.

use std::time::Duration;

use super::Reason;
use crate::marker::{Attempts, Effect, Finding, OperationKind};

/// The stage of a delivery in its lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// It was received, or waits for its next attempt or for isolation. No claim was sent since.
    New(History),
    /// Waits for the answer to a claim.
    Claiming(History, ClaimTries),
    /// Waits before it repeats its claim: another holder has the id, or the store did not answer.
    AwaitingClaim(History, ClaimTries, ClaimReply),
    /// Waits for the answer to a claim that was sent before a drain began: if the claim is granted,
    /// it is withdrawn.
    ClaimingInDrain(History),
    /// Waits until the store has withdrawn a grant whose handler was not started.
    Withdrawing(Grant, AfterWithdrawal),
    /// The claim was granted; the handler has not started.
    Ready(Grant),
    /// The handler runs.
    Running(Grant, Tries),
    /// The handler reported that nothing happened; it runs again after a pause.
    Pausing(Grant, Tries),
    /// Waits until the store has recorded that the outcome is unknown.
    Doubting(Grant, DoubtCause, AfterDoubt),
    /// `reconcile` runs.
    Reconciling(Grant, Tries, DoubtCause),
    /// `reconcile` did not determine the outcome; it runs again after a pause.
    ReconcilePausing(Grant, Tries, DoubtCause),
    /// Waits until the store has recorded what `reconcile` found.
    Resolving(Grant, Finding),
    /// Waits until the store has recorded that the effect happened.
    Completing(Grant),
    /// Waits until the store has freed the id for another attempt. The delivery is then released
    /// with this delay.
    Clearing(Grant, Effect, Duration),
    /// Waits until the store has recorded the rejection. In at most once the id does not run again.
    Rejecting(Grant, Reason, Effect),
    /// The handler runs without a claim: the store is unavailable, and the user chose
    /// [`Outage::PassThrough`](super::Outage::PassThrough).
    WithoutClaim(History),
    /// Settled or abandoned; no event changes it.
    Settled,
}

/// What the consumer knows of a delivery before its claim is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct History {
    /// How many earlier attempts failed and were released.
    pub failures: u32,
    /// Whether the message is older than `max_age`.
    pub freshness: Freshness,
}

/// Whether a message is so young that its marker cannot have expired: an absent marker then means
/// that it was never handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Freshness {
    /// Not older than `max_age`, or of unknown age.
    Fresh,
    /// Older: its marker may have expired.
    TooOld,
}

/// How many claims of this delivery were not granted so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClaimTries(pub u32);

/// The reply to the last claim of a delivery that waits to repeat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClaimReply {
    /// The store replied that another holder has the id.
    Answered,
    /// No reply: the store may have applied the claim.
    Unknown,
}

/// The number of inline retries of a handler, or of calls of `reconcile`, so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tries(pub u32);

/// A granted claim: the right to handle one id until the lease ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The attempts of the id. The number of the last one is the fencing token.
    pub attempts: Attempts,
    /// How many earlier attempts of this delivery failed and were released. The marker does not
    /// count attempts without an effect.
    pub failures: u32,
}

/// Why it is unknown whether the effect happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DoubtCause {
    /// The handler reported it.
    HandlerReported,
    /// The handler panicked.
    Panicked,
    /// The handler did not return in time.
    TimedOut,
    /// An earlier holder crashed or lost its lease.
    Interrupted,
    /// The message is older than `max_age`, and its marker is absent.
    TooOld,
    /// The value under its key in the store is not a marker.
    UnreadableMarker,
}

/// What follows once the store has recorded that the outcome is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterDoubt {
    /// Call `reconcile`.
    Reconcile,
    /// The lease is lost: release with a delay. The delivery with the next claim reconciles.
    Release,
    /// The consumer drains: release without a delay. The delivery with the next claim reconciles.
    ReleaseAtOnce,
    /// `reconcile` did not determine the outcome, or too many processes crashed: send to the
    /// in-doubt queue. The marker has no holder, so an operator can resolve it at once.
    Reject,
}

/// What follows once the store has withdrawn a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterWithdrawal {
    /// The delivery is released to its source.
    Release,
    /// The database of the inbox is unavailable: the delivery is released with a delay.
    ReleaseLater,
    /// The inbox has a record of the id: the delivery claims again, and gets the verdict of the
    /// record.
    ClaimAgain,
    /// The delivery waits without a claim until it may run in isolation.
    AwaitIsolation,
    /// The delivery is dead-lettered, because it failed too often. Other deliveries of its id may
    /// still run.
    Reject,
}

impl Stage {
    /// The kind of the operation whose answer this stage waits for; `None` if it waits for no
    /// answer.
    #[inline]
    pub fn pending_operation(&self) -> Option<OperationKind> {
        use Stage::*;
        match *self {
            Claiming(..) | ClaimingInDrain(_) => Some(OperationKind::Claim),
            Withdrawing(..) => Some(OperationKind::Withdraw),
            Doubting(..) => Some(OperationKind::Doubt),
            Resolving(_, finding) => Some(OperationKind::Resolve(finding)),
            Completing(_) => Some(OperationKind::Complete),
            Clearing(_, effect, _) => Some(OperationKind::Clear(effect)),
            Rejecting(_, _, effect) => Some(OperationKind::Reject(effect)),
            New(_) | AwaitingClaim(..) | Ready(_) | Running(..) | Pausing(..) | Reconciling(..)
            | ReconcilePausing(..) | WithoutClaim(_) | Settled => None,
        }
    }

    /// Whether a delivery in this stage pauses between two runs while it holds a lease, which may
    /// end before the pause.
    #[inline]
    pub fn waits_on_lease(&self) -> bool {
        matches!(self, Self::Pausing(..) | Self::ReconcilePausing(..))
    }
}

impl History {
    /// The grant of a claim of this delivery.
    pub(super) fn grant(self, attempts: Attempts) -> Grant {
        Grant {
            attempts,
            failures: self.failures,
        }
    }
}

impl Grant {
    /// How many attempts count towards `max_attempts`, including this one.
    pub(super) fn spent(self) -> u32 {
        self.attempts.spent().max(self.failures.saturating_add(1))
    }

    /// The history of the delivery for another claim of its id.
    pub(super) fn history(self) -> History {
        // The age was checked when this claim was granted.
        History {
            failures: self.failures,
            freshness: Freshness::Fresh,
        }
    }

    /// This grant, with one more failed attempt.
    pub(super) fn failed(self) -> Self {
        Self {
            failures: self.failures.saturating_add(1),
            ..self
        }
    }
}
