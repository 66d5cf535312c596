//! The consumer's side of the guarantee: what one delivery does next.
//!
//! [`transition`] maps a stage and an event to a stage and an action, without a clock, I/O or
//! randomness. The consumer's engine and [`Gate`](crate::Gate) execute its actions and decide
//! nothing themselves, so the model checker explores the same code that runs in production. A
//! delivery ends with a [`Settlement`], or is abandoned by a stop; it never ends with an error.

use std::time::Duration;

use crate::marker::{Ask, Attempts, Effect, Finding, Guarantee, Verdict};

/// The stage of a delivery in its lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Received from the source, or its grant was withdrawn. No claim was sent.
    New(History),
    /// Sent a claim to the store.
    Claiming(History, ClaimTries),
    /// Waits before it repeats its claim: another holder has the id, or the store did not answer.
    AwaitingHolder(History, ClaimTries, ClaimReply),
    /// Sent a claim to the store and drains: if the claim is granted, it is withdrawn.
    Leaving(History),
    /// Asked the store to withdraw a grant whose handler was not started.
    Withdrawing(Grant, AfterWithdrawal),
    /// The claim was granted; the handler has not started.
    Ready(Grant),
    /// The handler runs.
    Running(Grant, Tries),
    /// The handler reported that nothing happened; it runs again after a pause.
    Pausing(Grant, Tries),
    /// Asked the store to record that the outcome is unknown.
    Doubting(Grant, DoubtCause, AfterDoubt),
    /// `reconcile` runs.
    Reconciling(Grant, Tries, DoubtCause),
    /// `reconcile` did not determine the outcome; it runs again after a pause.
    ReconcilePausing(Grant, Tries, DoubtCause),
    /// Asked the store to record what `reconcile` found.
    Resolving(Grant, Finding),
    /// Asked the store to record that the effect happened.
    Completing(Grant),
    /// Asked the store to free the id for another attempt.
    Clearing(Grant, Effect, Duration),
    /// Asked the store to record the id as rejected, so that it does not run again.
    Rejecting(Grant, Reason, Effect),
    /// The handler runs without a claim: the store is unavailable, and the user chose
    /// [`Outage::PassThrough`].
    Ungated(History),
    /// Settled or abandoned; no event changes it.
    Settled,
}

/// What is known of a delivery before its claim is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct History {
    /// How many earlier attempts failed and were released.
    pub failures: u32,
    /// Whether the message is younger than `max_age`.
    pub freshness: Freshness,
}

/// Whether a message is so young that an absent marker proves that it was never handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Freshness {
    /// Younger than `max_age`, or of unknown age.
    Fresh,
    /// Older: its marker may have expired.
    TooOld,
}

/// How many claims were sent without being granted.
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

/// The number of inline retries of a handler, or of calls of `reconcile`.
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
    /// The lease is lost: release with a delay; the next claimant reconciles.
    Release,
    /// The consumer stops: release without a delay; the next claimant reconciles.
    ReleaseAtOnce,
    /// `reconcile` did not determine the outcome: send to the in-doubt queue. The marker has no
    /// holder, so an operator can resolve it at once.
    Reject,
}

/// What follows once the store has withdrawn a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterWithdrawal {
    /// The delivery is released to its source.
    Release,
    /// The delivery waits without a claim until it may run apart from others.
    AwaitTurn,
    /// The delivery is dead-lettered, because it failed too often. Other deliveries of its id may
    /// still run.
    Reject,
}

/// An event of one delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The delivery has an id.
    Arrived,
    /// The delivery has no id.
    NoId,
    /// The id of the delivery is not usable.
    UnusableId,
    /// The store answered the last operation.
    Answer(Verdict),
    /// The store did not answer, or its answer was lost.
    Unavailable,
    /// The claim was not sent.
    NotAsked,
    /// The value under the key in the store is not a marker: another program wrote it.
    UnreadableMarker,
    /// The handler may start.
    Slot,
    /// The handler may not start: other messages run apart, because one of them may be the one that
    /// crashes processes.
    OthersRunApart,
    /// The handler ended.
    Returned(Outcome),
    /// `reconcile` ended; `None` if it did not determine the outcome.
    Found(Option<Finding>),
    /// The handler has no `reconcile`.
    CannotReconcile,
    /// The lease may have ended, or the store reported that it has.
    LeaseOver,
    /// The pause is over.
    Woke,
    /// The consumer stops, or the partition of the delivery is being revoked.
    Drain,
    /// The drain timeout is over: a handler that still runs is dropped, and the store is asked to
    /// record that its outcome is unknown.
    DrainOver,
    /// The consumer stops now, with operations unanswered: the delivery is abandoned.
    StopNow,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The effect happened.
    Done,
    /// Nothing happened: run again.
    Retry,
    /// Nothing happened, and a retry does not help: dead-letter.
    Reject,
    /// The payload does not parse.
    Unreadable,
    /// The effect may have happened.
    Unknown(DoubtCause),
}

/// What the owner of a delivery does next.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a claim with a new token.
    NewClaim,
    /// Send the operation that the stage waits for, [`Stage::pending_ask`], with the token and the
    /// attempt of the current claim.
    Apply,
    /// Report [`Event::Slot`] when the handler may start.
    Queue,
    /// Start the handler.
    Run,
    /// Start `reconcile`.
    Reconcile,
    /// Report [`Event::Woke`] after about this long.
    Wake(Duration),
    /// Report [`Event::Arrived`] when the message may run apart from others.
    AwaitTurn,
    /// Pass this settlement to the source.
    Settle(Settlement),
    /// Nothing: wait for the next event.
    Wait,
    /// Drop the delivery without settling it. The broker redelivers it; it can be claimed again when
    /// its lease has ended.
    Abandon,
}

/// How a delivery is settled at the broker.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Settlement {
    /// Acknowledged: it is not redelivered.
    Accept(Proof),
    /// Redelivered, after this delay at the earliest.
    Release {
        /// The minimum delay of the redelivery.
        after: Duration,
        /// How many attempts have failed so far. The redelivery carries this number.
        failures: u32,
    },
    /// Sent to the dead-letter queue or the in-doubt queue.
    Reject(Reason),
}

/// Proves that a delivery may be accepted. Only [`transition`] creates one, from a verdict of the
/// store or from a run without the gate.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Proof(ProofKind);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ProofKind {
    Completed,
    Duplicate,
    Resolved,
    PassedWithoutGate,
}

impl Proof {
    /// What the proof is based on, as metrics and logs name it.
    pub fn as_str(&self) -> &'static str {
        match self.0 {
            ProofKind::Completed => "completed",
            ProofKind::Duplicate => "duplicate",
            ProofKind::Resolved => "resolved",
            ProofKind::PassedWithoutGate => "passed_without_gate",
        }
    }
}

/// Why a delivery was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It has no id.
    MissingId,
    /// The value where its id is read from cannot be an id, or there are two different values.
    UnusableId,
    /// Its payload does not parse.
    Unreadable,
    /// Its id was used for another body.
    Conflict,
    /// The handler rejected it.
    Refused,
    /// It failed `max_attempts` times.
    AttemptsSpent,
    /// More than `max_crashes` processes crashed while they handled it.
    CrashesSpent,
    /// It was rejected before and has not been redriven since.
    RejectedBefore,
    /// It is larger than the source's limit.
    TooLarge,
    /// It could not be determined whether the effect happened.
    InDoubt(DoubtCause),
}

impl Reason {
    /// All reasons, in the order of the enum.
    pub const ALL: [Self; 15] = [
        Self::MissingId,
        Self::UnusableId,
        Self::Unreadable,
        Self::Conflict,
        Self::Refused,
        Self::AttemptsSpent,
        Self::CrashesSpent,
        Self::RejectedBefore,
        Self::TooLarge,
        Self::InDoubt(DoubtCause::HandlerReported),
        Self::InDoubt(DoubtCause::Panicked),
        Self::InDoubt(DoubtCause::TimedOut),
        Self::InDoubt(DoubtCause::Interrupted),
        Self::InDoubt(DoubtCause::TooOld),
        Self::InDoubt(DoubtCause::UnreadableMarker),
    ];

    /// The reason as headers, metrics and logs name it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::MissingId => "missing-id",
            Self::UnusableId => "unusable-id",
            Self::Unreadable => "unreadable",
            Self::Conflict => "conflict",
            Self::Refused => "refused",
            Self::AttemptsSpent => "attempts-spent",
            Self::CrashesSpent => "crashes-spent",
            Self::RejectedBefore => "rejected-before",
            Self::TooLarge => "too-large",
            Self::InDoubt(DoubtCause::HandlerReported) => "in-doubt-handler-reported",
            Self::InDoubt(DoubtCause::Panicked) => "in-doubt-panicked",
            Self::InDoubt(DoubtCause::TimedOut) => "in-doubt-timed-out",
            Self::InDoubt(DoubtCause::Interrupted) => "in-doubt-interrupted",
            Self::InDoubt(DoubtCause::TooOld) => "in-doubt-too-old",
            Self::InDoubt(DoubtCause::UnreadableMarker) => "in-doubt-unreadable-marker",
        }
    }

    /// Whether the message goes to the in-doubt queue, for an operator to resolve, and not to the
    /// dead-letter queue.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::InDoubt(_))
    }
}

/// What the consumer does while its store is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outage {
    /// Receive nothing until the store is available again.
    #[default]
    Hold,
    /// Effectively once only: run handlers without the gate, which is at least once during the
    /// outage, and count these runs.
    PassThrough,
}

/// The settings that [`transition`] depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The guarantee.
    pub guarantee: Guarantee,
    /// The maximum number of attempts before a message is dead-lettered.
    pub attempts: u32,
    /// The maximum number of crashes before a message is dead-lettered.
    pub crashes: u32,
    /// The maximum number of inline retries within one attempt.
    pub retries: u32,
    /// The maximum number of `reconcile` calls.
    pub reconciles: u32,
    /// The maximum number of times that a claim of an id with another holder is repeated before its
    /// delivery is released.
    pub claim_retries: u32,
    /// The first pause before a retry; it doubles.
    pub backoff: Duration,
    /// The longest pause before a retry.
    pub longest_backoff: Duration,
    /// What to do while the store is unavailable.
    pub outage: Outage,
}

impl Policy {
    /// The pause before the retry that follows `tries` tries: it doubles up to 20 times, and is at most
    /// the longest.
    pub fn pause(&self, tries: u32) -> Duration {
        self.backoff
            .saturating_mul(1 << tries.min(20))
            .min(self.longest_backoff)
    }

    /// Whether a message runs apart from others, because it may be the cause of crashes. After a
    /// single crash it does not: any message that was in flight may be the cause. It runs alone if the
    /// next crash would dead-letter it.
    pub fn isolation(&self, attempts: Attempts) -> Option<Isolation> {
        match attempts.crashes {
            0 | 1 => None,
            crashes if crashes >= self.crashes => Some(Isolation::Alone),
            2 => Some(Isolation::Group),
            _ => Some(Isolation::GrowingGroup),
        }
    }

    fn spent(&self, grant: Grant) -> bool {
        grant.spent() >= self.attempts
    }

    /// Whether more processes crashed while they held the id than the policy allows.
    fn too_many_crashes(&self, attempts: Attempts) -> bool {
        attempts.crashes > self.crashes
    }
}

/// How a message runs that may be the cause of crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isolation {
    /// Together with a few other such messages only.
    Group,
    /// Together with other such messages only: as many as have finished without a crash.
    GrowingGroup,
    /// Alone in its process.
    Alone,
}

impl Stage {
    /// The operation whose answer this stage waits for; `None` if it waits for none.
    #[inline]
    pub fn pending_ask(&self) -> Option<Ask> {
        use Stage::*;
        match *self {
            Claiming(..) | Leaving(_) => Some(Ask::Claim),
            Withdrawing(..) => Some(Ask::Withdraw),
            Doubting(..) => Some(Ask::Doubt),
            Resolving(_, finding) => Some(Ask::Resolve(finding)),
            Completing(_) => Some(Ask::Complete),
            Clearing(_, effect, _) => Some(Ask::Clear(effect)),
            Rejecting(_, _, effect) => Some(Ask::Reject(effect)),
            New(_) | AwaitingHolder(..) | Ready(_) | Running(..) | Pausing(..)
            | Reconciling(..) | ReconcilePausing(..) | Ungated(_) | Settled => None,
        }
    }

    /// Whether a delivery in this stage pauses while it holds a lease, which may end before the pause.
    #[inline]
    pub fn waits_on_lease(&self) -> bool {
        matches!(self, Self::Pausing(..) | Self::ReconcilePausing(..))
    }
}

/// The next stage and action of a delivery. Total: an event that does not apply to a stage changes
/// nothing and returns [`Action::Wait`].
#[inline(always)]
pub fn transition(stage: Stage, event: Event, policy: &Policy) -> (Stage, Action) {
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
            if policy.too_many_crashes(attempts) =>
        {
            doubt(
                history.grant(attempts),
                DoubtCause::Interrupted,
                AfterDoubt::Reject,
            )
        }
        (Claiming(history, _), Answer(V::InDoubt(attempts))) => {
            // Redriven by a tool that found no marker, so it is unknown whether it ever ran.
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
            // Never longer than the lease, so that the id of a crashed holder is claimed within two
            // leases.
            let wait = remaining.min(policy.pause(tries.0)) + CLOCK_MARGIN;
            match tries.0 >= policy.claim_retries {
                true => release(wait, history.failures),
                false => (
                    AwaitingHolder(history, ClaimTries(tries.0 + 1), ClaimReply::Answered),
                    Action::Wake(wait),
                ),
            }
        }
        (Claiming(..), Answer(V::Duplicate)) => accept(ProofKind::Duplicate),
        (Claiming(..), Answer(V::Conflict)) => reject(Reason::Conflict),
        (Claiming(..), Answer(V::Rejected { .. })) => reject(Reason::RejectedBefore),
        (Claiming(history, _), Unavailable) if passes_through(policy) => {
            (Ungated(history), Action::Run)
        }
        (Claiming(history, tries), Unavailable) => (
            AwaitingHolder(history, ClaimTries(tries.0 + 1), ClaimReply::Unknown),
            wake(tries.0),
        ),
        (AwaitingHolder(history, tries, _), Woke) => (Claiming(history, tries), Action::Apply),

        // The handler: it runs only while its lease is valid.
        (Ready(grant), Slot) => (Running(grant, Tries(0)), Action::Run),
        // Without a claim, a crash of the deliveries that run apart is not counted for this one.
        (Ready(grant), OthersRunApart) => withdraw(grant, AfterWithdrawal::AwaitTurn),
        (Withdrawing(grant, then), Answer(_)) => withdrawn(grant, then),
        (Pausing(grant, tries), Woke) => (Running(grant, tries), Action::Run),
        (Running(grant, _), Returned(Outcome::Done)) => (Completing(grant), Action::Apply),
        (Running(grant, tries), Returned(Outcome::Retry)) => retry_or_clear(grant, tries, policy),
        (Running(grant, _), Returned(Outcome::Reject)) => {
            rejecting(grant, Reason::Refused, Effect::Nothing)
        }
        (Running(grant, _), Returned(Outcome::Unreadable)) => {
            rejecting(grant, Reason::Unreadable, Effect::Nothing)
        }
        (Running(grant, _), Returned(Outcome::Unknown(cause))) if at_most_once => {
            doubt(grant, cause, AfterDoubt::Reconcile)
        }
        (Running(grant, _), Returned(Outcome::Unknown(_))) if policy.spent(grant) => {
            rejecting(grant, Reason::AttemptsSpent, Effect::Unknown)
        }
        (Running(grant, _), Returned(Outcome::Unknown(_))) => clear(
            grant.failed(),
            Effect::Unknown,
            policy.pause(grant.attempts.spent()),
        ),

        // The outcome is unknown: reconcile.
        (Doubting(grant, cause, AfterDoubt::Reconcile), Answer(V::Kept)) => {
            (Reconciling(grant, Tries(0), cause), Action::Reconcile)
        }
        (Doubting(grant, _, AfterDoubt::Release), Answer(_)) => {
            release(policy.pause(0), grant.failures)
        }
        (Doubting(grant, _, AfterDoubt::ReleaseAtOnce), Answer(_)) => {
            release(Duration::ZERO, grant.failures)
        }
        (Doubting(_, cause, AfterDoubt::Reject), Answer(V::Kept)) => reject(Reason::InDoubt(cause)),
        (Reconciling(grant, _, _), Found(Some(finding))) => {
            (Resolving(grant, finding), Action::Apply)
        }
        // The outcome cannot be determined: end the lease, so that an operator can resolve the id at
        // once.
        (Reconciling(grant, _, cause), CannotReconcile) => doubt(grant, cause, AfterDoubt::Reject),
        (Reconciling(grant, tries, cause), Found(None)) if tries.0 + 1 >= policy.reconciles => {
            doubt(grant, cause, AfterDoubt::Reject)
        }
        (Reconciling(grant, tries, cause), Found(None)) => (
            ReconcilePausing(grant, Tries(tries.0 + 1), cause),
            wake(tries.0),
        ),
        (ReconcilePausing(grant, tries, cause), Woke) => {
            (Reconciling(grant, tries, cause), Action::Reconcile)
        }
        (Resolving(_, Finding::Happened), Answer(V::Done { .. })) => accept(ProofKind::Resolved),
        // The marker counts the runs. After a run that returned, the next one waits, as after any
        // failure; after a crash it does not. After the last one, this delivery, which has the errors
        // of its runs, is rejected by its next claim.
        (Resolving(grant, Finding::DidNotHappen), Answer(V::Kept)) => {
            match grant.attempts.spent() {
                0 => claim_again(grant),
                spent if spent >= policy.attempts => claim_again(grant),
                spent => release(policy.pause(spent), grant.failures),
            }
        }

        // The store has recorded the outcome: settle.
        (Completing(_), Answer(V::Done { .. })) => accept(ProofKind::Completed),
        (Clearing(grant, _, after), Answer(_)) => release(after, grant.failures),
        (Rejecting(_, reason, _), Answer(V::Kept)) => reject(reason),

        // Without the gate, at least once.
        (Ungated(_), Returned(Outcome::Done)) => accept(ProofKind::PassedWithoutGate),
        (Ungated(_), Returned(Outcome::Reject)) => reject(Reason::Refused),
        (Ungated(_), Returned(Outcome::Unreadable)) => reject(Reason::Unreadable),
        (Ungated(history), Returned(_))
            if history.failures.saturating_add(1) >= policy.attempts =>
        {
            reject(Reason::AttemptsSpent)
        }
        (Ungated(history), Returned(_)) => release(
            policy.pause(history.failures),
            history.failures.saturating_add(1),
        ),

        // The marker changed or has another holder: a new claim reads what it is now.
        (
            Doubting(grant, ..) | Resolving(grant, _) | Completing(grant) | Rejecting(grant, ..),
            Answer(_),
        ) => claim_again(grant),

        // The lease may have ended. A stage that records an outcome repeats its operation; a running
        // handler is dropped.
        (Ready(grant), LeaseOver) => (Claiming(grant.history(), ClaimTries(0)), Action::Apply),
        (Running(grant, _), LeaseOver) if at_most_once => {
            doubt(grant, DoubtCause::Interrupted, AfterDoubt::Release)
        }
        (Running(grant, _), LeaseOver) => release(policy.pause(0), grant.failures),
        (Pausing(grant, _), LeaseOver) => clear(grant.failed(), Effect::Nothing, policy.pause(0)),
        (Reconciling(grant, ..) | ReconcilePausing(grant, ..), LeaseOver) => {
            release(policy.pause(0), grant.failures)
        }
        (Ungated(history), LeaseOver) => release(policy.pause(0), history.failures), // does not occur: without the gate there is no lease

        // The value of another program is not overwritten. Only this id is affected.
        (Rejecting(_, reason, _), UnreadableMarker) => reject(reason),
        (Clearing(grant, _, after), UnreadableMarker) => release(after, grant.failures),
        (Leaving(history), UnreadableMarker) => release(Duration::ZERO, history.failures),
        (Withdrawing(grant, then), UnreadableMarker) => withdrawn(grant, then),
        (Doubting(grant, _, AfterDoubt::Release), UnreadableMarker) => {
            release(policy.pause(0), grant.failures)
        }
        (Doubting(grant, _, AfterDoubt::ReleaseAtOnce), UnreadableMarker) => {
            release(Duration::ZERO, grant.failures)
        }
        (Claiming(..) | Doubting(..) | Resolving(..) | Completing(_), UnreadableMarker) => {
            reject(Reason::InDoubt(DoubtCause::UnreadableMarker))
        }

        // With pass-through the release does not wait for the store: if the claim was applied, another
        // delivery takes it over when its lease ends.
        (Leaving(history), Unavailable) if passes_through(policy) => {
            release(Duration::ZERO, history.failures)
        }

        // The store is unavailable: the operation is repeated with the same token, after eight times the
        // first backoff.
        (
            Leaving(_) | Withdrawing(..) | Doubting(..) | Resolving(..) | Completing(_)
            | Clearing(..) | Rejecting(..),
            Unavailable,
        ) => (stage, wake(3)),
        (
            Leaving(_) | Withdrawing(..) | Doubting(..) | Resolving(..) | Completing(_)
            | Clearing(..) | Rejecting(..),
            Woke,
        ) => (stage, Action::Apply),

        // The consumer drains: deliveries that have not started are released, running handlers may
        // finish.
        (New(history) | AwaitingHolder(history, _, ClaimReply::Answered), Drain) => {
            release(Duration::ZERO, history.failures)
        }
        (Claiming(history, _), Drain) => (Leaving(history), Action::Wait),
        (AwaitingHolder(history, _, ClaimReply::Unknown), Drain) => {
            (Leaving(history), Action::Apply)
        }
        (Leaving(history), Answer(V::Granted(attempts))) => {
            withdraw(history.grant(attempts), AfterWithdrawal::Release)
        }
        (Leaving(history), Answer(V::InDoubt(attempts))) => doubt(
            history.grant(attempts),
            DoubtCause::Interrupted,
            AfterDoubt::ReleaseAtOnce,
        ),
        (Leaving(history), NotAsked) => release(Duration::ZERO, history.failures),
        (Leaving(_), Answer(V::Duplicate)) => accept(ProofKind::Duplicate),
        (Leaving(history), Answer(_)) => release(Duration::ZERO, history.failures),
        (Ready(grant), Drain) => withdraw(grant, AfterWithdrawal::Release),
        (Pausing(grant, _), Drain) => clear(grant, Effect::Nothing, Duration::ZERO),
        (ReconcilePausing(grant, _, cause), Drain) => {
            doubt(grant, cause, AfterDoubt::ReleaseAtOnce)
        }
        (Settled, _) => (Settled, Action::Wait),
        (stage, DrainOver) => drain_over(stage, policy),
        (_, StopNow) => (Settled, Action::Abandon),

        // All other events are stale or change nothing: a stale wake-up, the answer to a renewal, a
        // drain while the handler runs.
        (stage, _) => (stage, Action::Wait),
    }
}

/// The drain timeout is over. Handlers that run are dropped, and their outcome is recorded as
/// unknown, as after a handler timeout, so that no later claim counts a crash. Operations that are
/// not answered yet remain pending.
#[cold]
fn drain_over(stage: Stage, policy: &Policy) -> (Stage, Action) {
    use Stage::*;
    match stage {
        // Not started: as at the beginning of the drain.
        New(history) | AwaitingHolder(history, _, ClaimReply::Answered) => {
            release(Duration::ZERO, history.failures)
        }
        Claiming(history, _) => (Leaving(history), Action::Wait),
        AwaitingHolder(history, _, ClaimReply::Unknown) => (Leaving(history), Action::Apply),
        Ready(grant) => withdraw(grant, AfterWithdrawal::Release),
        Pausing(grant, _) => clear(grant, Effect::Nothing, Duration::ZERO),

        // The handler is dropped. After its last attempt, too, the message is released and the next
        // claim dead-letters it, so that a stop waits for no other system than the store.
        Running(grant, _) => match policy.guarantee {
            Guarantee::AtMostOnce => {
                doubt(grant, DoubtCause::Interrupted, AfterDoubt::ReleaseAtOnce)
            }
            Guarantee::EffectivelyOnce | Guarantee::Bare => {
                clear(grant.failed(), Effect::Unknown, Duration::ZERO)
            }
        },
        Ungated(history) => release(Duration::ZERO, history.failures.saturating_add(1)),

        // `reconcile` is dropped or not started: the next claimant reconciles.
        Reconciling(grant, _, cause) | ReconcilePausing(grant, _, cause) => {
            doubt(grant, cause, AfterDoubt::ReleaseAtOnce)
        }
        Doubting(grant, cause, AfterDoubt::Reconcile) => (
            Doubting(grant, cause, AfterDoubt::ReleaseAtOnce),
            Action::Wait,
        ),

        // The store has not answered yet.
        Leaving(_)
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
/// this process count in milliseconds.
const CLOCK_MARGIN: Duration = Duration::from_millis(2);

fn granted(grant: Grant, history: History, policy: &Policy) -> (Stage, Action) {
    if policy.too_many_crashes(grant.attempts) {
        return rejecting(grant, Reason::CrashesSpent, Effect::Nothing);
    }
    if grant.attempts.spent() > policy.attempts {
        return rejecting(grant, Reason::AttemptsSpent, Effect::Nothing);
    }
    // This delivery has failed too often, but the id has not: an operator may have freed it since,
    // for another delivery.
    if grant.spent() > policy.attempts {
        return withdraw(grant, AfterWithdrawal::Reject);
    }
    if policy.guarantee == Guarantee::AtMostOnce
        && grant.attempts.number == 1
        && history.freshness == Freshness::TooOld
    {
        return doubt(grant, DoubtCause::TooOld, AfterDoubt::Reconcile);
    }
    (Stage::Ready(grant), Action::Queue)
}

fn retry_or_clear(grant: Grant, tries: Tries, policy: &Policy) -> (Stage, Action) {
    if tries.0 < policy.retries && policy.guarantee != Guarantee::Bare {
        return (
            Stage::Pausing(grant, Tries(tries.0 + 1)),
            Action::Wake(policy.pause(tries.0)),
        );
    }
    if policy.spent(grant) {
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

fn withdrawn(grant: Grant, then: AfterWithdrawal) -> (Stage, Action) {
    match then {
        AfterWithdrawal::Release => release(Duration::ZERO, grant.failures),
        AfterWithdrawal::Reject => reject(Reason::AttemptsSpent),
        // Its next claim has a new token: a delayed withdrawal must not match it.
        AfterWithdrawal::AwaitTurn => (Stage::New(grant.history()), Action::AwaitTurn),
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

impl History {
    fn grant(self, attempts: Attempts) -> Grant {
        Grant {
            attempts,
            failures: self.failures,
        }
    }
}

impl Grant {
    /// How many attempts count towards `max_attempts`, including this one.
    fn spent(self) -> u32 {
        self.attempts.spent().max(self.failures.saturating_add(1))
    }

    fn history(self) -> History {
        // The age was checked when the claim was granted.
        History {
            failures: self.failures,
            freshness: Freshness::Fresh,
        }
    }

    /// This grant, with one more failed attempt.
    fn failed(self) -> Self {
        Self {
            failures: self.failures.saturating_add(1),
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
