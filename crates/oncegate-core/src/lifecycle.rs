//! The consumer's side of the guarantee: what one delivery does next.
//!
//! `transition` maps a stage and an event to a stage and an action, without a clock, I/O or
//! randomness. The consumer's engine, [`Gate`](crate::Gate) and the model checker execute its
//! actions. A delivery ends with a [`Settlement`], or is abandoned by a stop; it never ends with an
//! error.

pub(crate) mod action;
pub(crate) mod event;
pub(crate) mod policy;
mod settlement;
pub(crate) mod stage;

use std::time::Duration;

pub(crate) use action::Action;
pub(crate) use event::{Event, Outcome};
pub use policy::Outage;
pub(crate) use policy::{Isolation, Policy};
pub(crate) use settlement::ProofKind;
pub use settlement::{Proof, Reason, Settlement};
pub use stage::DoubtCause;
pub(crate) use stage::{
    AfterDoubt, AfterWithdrawal, ClaimReply, ClaimTries, Freshness, Grant, History, Stage, Tries,
};

use crate::marker::{Effect, Finding, Guarantee, Verdict};

/// The next stage and action of a delivery. Total: an event that does not apply to a stage changes
/// nothing and returns [`Action::Wait`].
#[inline(always)]
pub(crate) fn transition(stage: Stage, event: Event, policy: &Policy) -> (Stage, Action) {
    use {Event::*, Stage::*, Verdict as V};
    let at_most_once = policy.guarantee == Guarantee::AtMostOnce;
    let wake = |tries| Action::Wake(policy.pause(tries));
    match (stage, event) {
        // Arrival.
        (New(_), NoId) => reject(Reason::MissingId),
        (New(_), UnusableId) => reject(Reason::UnusableId),
        (New(history), Arrived) => (Claiming(history, ClaimTries(0)), Action::NewClaim),

        // The claim was answered.
        (Claiming(history, _), Answer(V::Granted(attempts))) => {
            granted(history.grant(attempts), history, policy)
        }
        (Claiming(history, _), Answer(V::InDoubt(attempts)))
            if policy.has_too_many_crashes(attempts) =>
        {
            doubt(
                history.grant(attempts),
                DoubtCause::Interrupted,
                AfterDoubt::Reject,
            )
        }
        (Claiming(history, _), Answer(V::InDoubt(attempts))) => {
            // An operator redrove the id when it had no marker, so it is unknown whether it ever
            // ran.
            let too_old = history.freshness == Freshness::TooOld && attempts.crashes == 0;
            let cause = if too_old {
                DoubtCause::TooOld
            } else {
                DoubtCause::Interrupted
            };
            (
                Reconciling(history.grant(attempts), Tries(0), cause),
                Action::Reconcile,
            )
        }
        (Claiming(history, tries), Answer(V::Busy { remaining })) => {
            // The wait is not longer than the rest of the lease, so that the id of a crashed holder
            // is claimed within two leases.
            let wait = remaining.min(policy.pause(tries.0)) + CLOCK_MARGIN;
            match tries.0 >= policy.max_claim_retries {
                true => release(wait, history.failures),
                false => (
                    AwaitingClaim(history, ClaimTries(tries.0 + 1), ClaimReply::Answered),
                    Action::Wake(wait),
                ),
            }
        }
        (Claiming(..), Answer(V::Duplicate)) => accept(ProofKind::Duplicate),
        (Claiming(..), Answer(V::Conflict)) => reject(Reason::Conflict),
        (Claiming(..), Answer(V::Rejected { .. })) => reject(Reason::RejectedBefore),
        (Claiming(history, _), Unavailable) if passes_through(policy) => {
            (WithoutClaim(history), Action::Run)
        }
        (Claiming(history, tries), Unavailable) => (
            AwaitingClaim(history, ClaimTries(tries.0 + 1), ClaimReply::Unknown),
            wake(tries.0),
        ),
        (AwaitingClaim(history, tries, _), Woke) => (Claiming(history, tries), Action::Apply),

        // The handler: it runs only while its lease is valid.
        (Ready(grant), MayRun) => (Running(grant, Tries(0)), Action::Run),
        // The claim is withdrawn, so that this message counts no crash if an isolated message
        // crashes the process.
        (Ready(grant), IsolationFull) => withdraw(grant, AfterWithdrawal::AwaitIsolation),
        (Withdrawing(grant, then), Answer(_)) => withdrawn(grant, then, policy),
        (Pausing(grant, tries), Woke) => (Running(grant, tries), Action::Run),
        (Running(grant, _), Returned(Outcome::Done)) => (Completing(grant), Action::Apply),
        (Running(grant, tries), Returned(Outcome::Retry)) => retry_or_clear(grant, tries, policy),
        (Running(grant, _), Returned(Outcome::Reject)) => {
            rejecting(grant, Reason::Refused, Effect::Nothing)
        }
        (Running(grant, _), Returned(Outcome::Unreadable)) => {
            rejecting(grant, Reason::Unreadable, Effect::Nothing)
        }
        (Running(grant, _), Returned(Outcome::NoRoute)) => {
            rejecting(grant, Reason::NoRoute, Effect::Nothing)
        }
        (Running(grant, _), Returned(Outcome::Recorded)) => {
            withdraw(grant, AfterWithdrawal::ClaimAgain)
        }
        // The transaction of the inbox did not begin, or it is unknown whether it is committed: the
        // next transaction finds out. No attempt is counted, so that an outage of the database
        // rejects no message.
        (Running(grant, Tries(0)), Returned(Outcome::Unavailable)) => {
            withdraw(grant, AfterWithdrawal::ReleaseLater)
        }
        // An earlier run of this attempt failed, so the attempt counts.
        (Running(grant, _), Returned(Outcome::Unavailable)) => {
            clear(grant.failed(), Effect::Nothing, policy.pause(3))
        }
        (Running(grant, _), Returned(Outcome::Unknown(cause))) if at_most_once => {
            doubt(grant, cause, AfterDoubt::Reconcile)
        }
        (Running(grant, _), Returned(Outcome::Unknown(_))) if policy.is_last_attempt(grant) => {
            rejecting(grant, Reason::AttemptsSpent, Effect::Unknown)
        }
        (Running(grant, _), Returned(Outcome::Unknown(_))) => clear(
            grant.failed(),
            Effect::Unknown,
            policy.pause(grant.attempts.spent()),
        ),

        // The outcome is unknown: reconcile.
        (Doubting(grant, cause, AfterDoubt::Reconcile), Answer(V::Applied)) => {
            (Reconciling(grant, Tries(0), cause), Action::Reconcile)
        }
        (Doubting(grant, _, AfterDoubt::Release), Answer(_)) => {
            release(policy.pause(0), grant.failures)
        }
        (Doubting(grant, _, AfterDoubt::ReleaseAtOnce), Answer(_)) => {
            release(Duration::ZERO, grant.failures)
        }
        (Doubting(_, cause, AfterDoubt::Reject), Answer(V::Applied)) => {
            reject(Reason::InDoubt(cause))
        }
        (Reconciling(grant, _, _), Reconciled(Some(finding))) => {
            (Resolving(grant, finding), Action::Apply)
        }
        // The outcome cannot be determined: end the lease, so that an operator can resolve the id
        // at once.
        (Reconciling(grant, _, cause), CannotReconcile) => doubt(grant, cause, AfterDoubt::Reject),
        (Reconciling(grant, tries, cause), Reconciled(None))
            if tries.0 + 1 >= policy.max_reconciles =>
        {
            doubt(grant, cause, AfterDoubt::Reject)
        }
        (Reconciling(grant, tries, cause), Reconciled(None)) => (
            ReconcilePausing(grant, Tries(tries.0 + 1), cause),
            wake(tries.0),
        ),
        (ReconcilePausing(grant, tries, cause), Woke) => {
            (Reconciling(grant, tries, cause), Action::Reconcile)
        }
        (Resolving(_, Finding::Happened), Answer(V::Done { .. })) => accept(ProofKind::Resolved),
        // After a run that returned, the next attempt waits, as after any failure. After a crash
        // (`spent()` is 0), it does not wait. After the last attempt, this delivery claims the id
        // again at once and is rejected, so that the dead letter has the errors of its runs.
        (Resolving(grant, Finding::DidNotHappen), Answer(V::Applied)) => {
            match grant.attempts.spent() {
                0 => claim_again(grant),
                spent if spent >= policy.max_attempts => claim_again(grant),
                spent => release(policy.pause(spent), grant.failures),
            }
        }

        // The store has recorded the outcome: settle.
        (Completing(_), Answer(V::Done { .. })) => accept(ProofKind::Completed),
        (Clearing(grant, _, after), Answer(_)) => release(after, grant.failures),
        (Rejecting(_, reason, _), Answer(V::Applied)) => reject(reason),

        // The store is unavailable and the handler ran without a claim: at least once.
        (WithoutClaim(_), Returned(Outcome::Done)) => accept(ProofKind::PassedWithoutStore),
        (WithoutClaim(_), Returned(Outcome::Reject)) => reject(Reason::Refused),
        (WithoutClaim(_), Returned(Outcome::Unreadable)) => reject(Reason::Unreadable),
        (WithoutClaim(_), Returned(Outcome::NoRoute)) => reject(Reason::NoRoute),
        (WithoutClaim(history), Returned(_))
            if history.failures.saturating_add(1) >= policy.max_attempts =>
        {
            reject(Reason::AttemptsSpent)
        }
        (WithoutClaim(history), Returned(_)) => release(
            policy.pause(history.failures),
            history.failures.saturating_add(1),
        ),

        // The marker has changed or has another holder: a new claim finds out its state.
        (
            Doubting(grant, ..) | Resolving(grant, _) | Completing(grant) | Rejecting(grant, ..),
            Answer(_),
        ) => claim_again(grant),

        // The lease may have ended. A running handler is dropped. A stage that records an outcome
        // ignores this event (last arm) and continues to repeat its operation.
        (Ready(grant), LeaseOver) => (Claiming(grant.history(), ClaimTries(0)), Action::Apply),
        (Running(grant, _), LeaseOver) if at_most_once => {
            doubt(grant, DoubtCause::Interrupted, AfterDoubt::Release)
        }
        (Running(grant, _), LeaseOver) => release(policy.pause(0), grant.failures),
        (Pausing(grant, _), LeaseOver) => clear(grant.failed(), Effect::Nothing, policy.pause(0)),
        (Reconciling(grant, ..) | ReconcilePausing(grant, ..), LeaseOver) => {
            release(policy.pause(0), grant.failures)
        }
        // Does not occur: a handler without a claim has no lease.
        (WithoutClaim(history), LeaseOver) => release(policy.pause(0), history.failures),

        // Another program wrote the value under the key, and it is not overwritten. Only this id is
        // affected.
        (Rejecting(_, reason, _), UnreadableMarker) => reject(reason),
        (Clearing(grant, _, after), UnreadableMarker) => release(after, grant.failures),
        (ClaimingInDrain(history), UnreadableMarker) => release(Duration::ZERO, history.failures),
        (Withdrawing(grant, then), UnreadableMarker) => withdrawn(grant, then, policy),
        (Doubting(grant, _, AfterDoubt::Release), UnreadableMarker) => {
            release(policy.pause(0), grant.failures)
        }
        (Doubting(grant, _, AfterDoubt::ReleaseAtOnce), UnreadableMarker) => {
            release(Duration::ZERO, grant.failures)
        }
        (Claiming(..) | Doubting(..) | Resolving(..) | Completing(_), UnreadableMarker) => {
            reject(Reason::InDoubt(DoubtCause::UnreadableMarker))
        }

        // With [`Outage::PassThrough`] the release does not wait for the store: if the store
        // applied the claim, another delivery takes it over when its lease ends.
        (ClaimingInDrain(history), Unavailable) if passes_through(policy) => {
            release(Duration::ZERO, history.failures)
        }

        // The store is unavailable: the operation is repeated with the same token, after eight
        // times the first backoff (`pause(3)`).
        (
            ClaimingInDrain(_) | Withdrawing(..) | Doubting(..) | Resolving(..) | Completing(_)
            | Clearing(..) | Rejecting(..),
            Unavailable,
        ) => (stage, wake(3)),
        (
            ClaimingInDrain(_) | Withdrawing(..) | Doubting(..) | Resolving(..) | Completing(_)
            | Clearing(..) | Rejecting(..),
            Woke,
        ) => (stage, Action::Apply),

        // The consumer drains: deliveries that have not started are released, running handlers may
        // finish.
        (New(history) | AwaitingClaim(history, _, ClaimReply::Answered), Drain) => {
            release(Duration::ZERO, history.failures)
        }
        (Claiming(history, _), Drain) => (ClaimingInDrain(history), Action::Wait),
        (AwaitingClaim(history, _, ClaimReply::Unknown), Drain) => {
            (ClaimingInDrain(history), Action::Apply)
        }
        (ClaimingInDrain(history), Answer(V::Granted(attempts))) => {
            withdraw(history.grant(attempts), AfterWithdrawal::Release)
        }
        (ClaimingInDrain(history), Answer(V::InDoubt(attempts))) => doubt(
            history.grant(attempts),
            DoubtCause::Interrupted,
            AfterDoubt::ReleaseAtOnce,
        ),
        (ClaimingInDrain(history), ClaimNotSent) => release(Duration::ZERO, history.failures),
        (ClaimingInDrain(_), Answer(V::Duplicate)) => accept(ProofKind::Duplicate),
        (ClaimingInDrain(history), Answer(_)) => release(Duration::ZERO, history.failures),
        (Ready(grant), Drain) => withdraw(grant, AfterWithdrawal::Release),
        (Pausing(grant, _), Drain) => clear(grant, Effect::Nothing, Duration::ZERO),
        (ReconcilePausing(grant, _, cause), Drain) => {
            doubt(grant, cause, AfterDoubt::ReleaseAtOnce)
        }
        (Settled, _) => (Settled, Action::Wait),
        (stage, DrainOver) => drain_over(stage, policy),
        (_, StopNow) => (Settled, Action::Abandon),

        // All other events change nothing, such as an alarm of an earlier stage, or a drain while
        // the handler runs.
        (stage, _) => (stage, Action::Wait),
    }
}

/// Processes [`Event::DrainOver`]: the drain timeout is over. A running handler is dropped, and its
/// outcome is recorded as unknown, as after a handler timeout, so that no later claim counts a
/// crash. An operation that is not answered yet remains pending.
#[cold]
fn drain_over(stage: Stage, policy: &Policy) -> (Stage, Action) {
    use Stage::*;
    match stage {
        // The handler has not started: the same transitions as for [`Event::Drain`].
        New(history) | AwaitingClaim(history, _, ClaimReply::Answered) => {
            release(Duration::ZERO, history.failures)
        }
        Claiming(history, _) => (ClaimingInDrain(history), Action::Wait),
        AwaitingClaim(history, _, ClaimReply::Unknown) => (ClaimingInDrain(history), Action::Apply),
        Ready(grant) => withdraw(grant, AfterWithdrawal::Release),
        Pausing(grant, _) => clear(grant, Effect::Nothing, Duration::ZERO),

        // The handler is dropped. Even after its last attempt the message is released, and the next
        // claim dead-letters it, so that a stop waits for the store only, and not for the
        // confirmation of a dead letter.
        Running(grant, _) => match policy.guarantee {
            Guarantee::AtMostOnce => {
                doubt(grant, DoubtCause::Interrupted, AfterDoubt::ReleaseAtOnce)
            }
            Guarantee::EffectivelyOnce | Guarantee::Bare => {
                clear(grant.failed(), Effect::Unknown, Duration::ZERO)
            }
        },
        WithoutClaim(history) => release(Duration::ZERO, history.failures.saturating_add(1)),

        // `reconcile` is dropped, or not started: the delivery with the next claim reconciles.
        Reconciling(grant, _, cause) | ReconcilePausing(grant, _, cause) => {
            doubt(grant, cause, AfterDoubt::ReleaseAtOnce)
        }
        Doubting(grant, cause, AfterDoubt::Reconcile) => (
            Doubting(grant, cause, AfterDoubt::ReleaseAtOnce),
            Action::Wait,
        ),

        // The store has not answered yet.
        ClaimingInDrain(_)
        | Withdrawing(..)
        | Doubting(_, _, AfterDoubt::Release | AfterDoubt::ReleaseAtOnce | AfterDoubt::Reject)
        | Resolving(..)
        | Completing(_)
        | Clearing(..)
        | Rejecting(..)
        | Settled => (stage, Action::Wait),
    }
}

/// Added to the remaining lease before a claim is repeated, because the clocks of the store and of
/// this process may have a resolution of milliseconds.
const CLOCK_MARGIN: Duration = Duration::from_millis(2);

#[inline(always)]
fn granted(grant: Grant, history: History, policy: &Policy) -> (Stage, Action) {
    if policy.has_too_many_crashes(grant.attempts) {
        return rejecting(grant, Reason::CrashesSpent, Effect::Nothing);
    }
    if grant.attempts.spent() > policy.max_attempts {
        return rejecting(grant, Reason::AttemptsSpent, Effect::Nothing);
    }
    // This delivery has failed too often, but the marker counts fewer attempts: an operator may
    // have redriven the id, for another delivery.
    if grant.spent() > policy.max_attempts {
        return withdraw(grant, AfterWithdrawal::Reject);
    }
    if policy.guarantee == Guarantee::AtMostOnce
        && grant.attempts.number == 1
        && history.freshness == Freshness::TooOld
    {
        return doubt(grant, DoubtCause::TooOld, AfterDoubt::Reconcile);
    }
    (Stage::Ready(grant), Action::AwaitRun)
}

fn retry_or_clear(grant: Grant, tries: Tries, policy: &Policy) -> (Stage, Action) {
    if tries.0 < policy.max_inline_retries && policy.guarantee != Guarantee::Bare {
        return (
            Stage::Pausing(grant, Tries(tries.0 + 1)),
            Action::Wake(policy.pause(tries.0)),
        );
    }
    if policy.is_last_attempt(grant) {
        return rejecting(grant, Reason::AttemptsSpent, Effect::Nothing);
    }
    clear(
        grant.failed(),
        Effect::Nothing,
        policy.pause(grant.failures.saturating_add(tries.0)),
    )
}

fn passes_through(policy: &Policy) -> bool {
    policy.outage == Outage::PassThrough && policy.guarantee == Guarantee::EffectivelyOnce
}

fn accept(kind: ProofKind) -> (Stage, Action) {
    (
        Stage::Settled,
        Action::Settle(Settlement::Accept(Proof(kind))),
    )
}

fn release(after: Duration, failures: u32) -> (Stage, Action) {
    (
        Stage::Settled,
        Action::Settle(Settlement::Release { after, failures }),
    )
}

fn reject(reason: Reason) -> (Stage, Action) {
    (Stage::Settled, Action::Settle(Settlement::Reject(reason)))
}

fn clear(grant: Grant, effect: Effect, after: Duration) -> (Stage, Action) {
    (Stage::Clearing(grant, effect, after), Action::Apply)
}

fn withdraw(grant: Grant, then: AfterWithdrawal) -> (Stage, Action) {
    (Stage::Withdrawing(grant, then), Action::Apply)
}

fn withdrawn(grant: Grant, then: AfterWithdrawal, policy: &Policy) -> (Stage, Action) {
    match then {
        AfterWithdrawal::Release => release(Duration::ZERO, grant.failures),
        AfterWithdrawal::ReleaseLater => release(policy.pause(3), grant.failures),
        AfterWithdrawal::ClaimAgain => claim_again(grant),
        AfterWithdrawal::Reject => reject(Reason::AttemptsSpent),
        // The next claim has a new token, so that a withdrawal that arrives late does not match it.
        AfterWithdrawal::AwaitIsolation => (Stage::New(grant.history()), Action::AwaitIsolation),
    }
}

fn rejecting(grant: Grant, reason: Reason, effect: Effect) -> (Stage, Action) {
    (Stage::Rejecting(grant, reason, effect), Action::Apply)
}

fn doubt(grant: Grant, cause: DoubtCause, then: AfterDoubt) -> (Stage, Action) {
    (Stage::Doubting(grant, cause, then), Action::Apply)
}

fn claim_again(grant: Grant) -> (Stage, Action) {
    (
        Stage::Claiming(grant.history(), ClaimTries(0)),
        Action::NewClaim,
    )
}

#[cfg(test)]
mod tests;
