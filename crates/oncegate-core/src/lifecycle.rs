//! The consumer's side of the guarantee: what one delivery does next.
//!
//! [`transition`] is all of it: it maps a state and an event to a state and an action, without a
//! clock, I/O or randomness. The consumer's engine and [`Gate`](crate::Gate) carry its actions out
//! and decide nothing themselves, so the model checker explores the same code that runs. Every
//! delivery ends with a [`Settlement`], never with an error.

use std::time::Duration;

use crate::marker::{Ask, Attempts, Effect, Finding, Guarantee, Verdict};

/// Where a delivery stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Handed over by the source, or its grant was withdrawn: nothing is asked.
    New(History),
    /// A claim was asked.
    Claiming(History, ClaimTries),
    /// Waits to ask its claim again: the id is held elsewhere, or the store was not there.
    AwaitingHolder(History, ClaimTries, ClaimReply),
    /// A claim was asked, and its grant will be withdrawn: the consumer drains.
    Leaving(History),
    /// ClaimReply to withdraw a grant: its handler was not started.
    Withdrawing(Grant, AfterWithdrawal),
    /// Granted, not started.
    Ready(Grant),
    /// The handler runs.
    Running(Grant, Tries),
    /// The handler said that nothing happened; it runs again after a pause.
    Pausing(Grant, Tries),
    /// ClaimReply to mark that nobody knows whether it happened.
    Doubting(Grant, DoubtCause, AfterDoubt),
    /// `reconcile` runs.
    Reconciling(Grant, Tries, DoubtCause),
    /// `reconcile` did not find out; it runs again after a pause.
    ReconcilePausing(Grant, Tries, DoubtCause),
    /// ClaimReply to record what `reconcile` found.
    Resolving(Grant, Finding),
    /// ClaimReply to record that it happened.
    Completing(Grant),
    /// ClaimReply to free the id for another attempt.
    Clearing(Grant, Effect, Duration),
    /// ClaimReply to keep the id from running again.
    Rejecting(Grant, Reason, Effect),
    /// The handler runs without the gate, because the store is away and the user chose so.
    Ungated(History),
    /// Left the road.
    Settled,
}

/// What the source knows of a delivery before the gate does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct History {
    /// How many attempts failed before and were released.
    pub failures: u32,
    /// Whether the dedup window can still speak for it.
    pub freshness: Freshness,
}

/// Whether a message is young enough that an absent marker means that it was never handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Freshness {
    /// Younger than `max_age`, or of unknown age.
    Fresh,
    /// Older: its marker may have expired.
    TooOld,
}

/// How often a claim was asked in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClaimTries(pub u32);

/// What became of the claim of a parked delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClaimReply {
    /// It was answered: someone else holds the id.
    Answered,
    /// It may have been applied.
    Unknown,
}

/// How often a handler was run again in place, or a reconcile was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tries(pub u32);

/// The right to handle one id now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The attempt that the store granted, whose number is the fence, and how many count.
    pub attempts: Attempts,
    /// How many attempts of this delivery failed before and were released: the marker forgets those
    /// that did nothing.
    pub failures: u32,
}

/// Why nobody knows whether it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DoubtCause {
    /// The handler said so.
    Said,
    /// The handler panicked.
    Panicked,
    /// The handler did not return in time.
    TimedOut,
    /// An earlier holder crashed or lost its lease.
    HolderGone,
    /// The message is older than `max_age`, and its marker is absent.
    TooOld,
    /// What the store holds under its id is no marker.
    UnreadableMarker,
}

/// What follows a doubt that was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterDoubt {
    /// Find out now.
    Reconcile,
    /// The lease is lost: let whoever claims next find out, after a pause.
    Release,
    /// The consumer stops: let whoever claims next find out.
    ReleaseAtOnce,
    /// `reconcile` has tried in vain: to the in-doubt destination, and free for a person to
    /// resolve.
    Reject,
}

/// What follows a grant that was withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterWithdrawal {
    /// It goes back to its source.
    Release,
    /// It waits, unclaimed, until it may run alone.
    AwaitTurn,
    /// It goes to the dead letters: this delivery failed too often, whatever becomes of others of
    /// its id.
    Reject,
}

/// What happened to a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The delivery has an id.
    Arrived,
    /// The delivery has no id.
    NoId,
    /// What the delivery has for an id cannot be used.
    UnusableId,
    /// The store answered the operation that was asked last.
    Answer(Verdict),
    /// The store did not answer, or its answer was lost.
    Unavailable,
    /// The claim that was to be asked was never sent.
    NotAsked,
    /// The store holds something under the id that is no marker: another program wrote there.
    UnreadableMarker,
    /// The handler may start.
    Slot,
    /// The handler may not start: another message runs alone, because it may be the one that ends
    /// processes.
    OtherRunsAlone,
    /// The handler is over.
    Returned(Outcome),
    /// `reconcile` is over; `None` if it did not find out.
    Found(Option<Finding>),
    /// The lease may have ended, or the store said that it has.
    LeaseOver,
    /// The pause is over.
    Woke,
    /// The consumer stops, or the delivery belongs to someone else soon.
    Drain,
    /// The drain timeout is over: what still runs is dropped, and the store is asked to record that
    /// its outcome is unknown.
    DrainOver,
    /// The consumer stops now, whatever the store has not answered: the delivery is abandoned.
    StopNow,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It happened.
    Done,
    /// Nothing happened: run again.
    Retry,
    /// Nothing happened, and nothing ever will: dead letters.
    Reject,
    /// The payload does not parse.
    Unreadable,
    /// It may have happened.
    Unknown(DoubtCause),
}

/// What the loop does next.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Ask the store for a claim, with a token made for it.
    ClaimAnew,
    /// Ask the store, with the token and the attempt of the current claim.
    Ask(Ask),
    /// Say [`Event::Slot`] when the handler may start.
    Queue,
    /// Start the handler.
    Run,
    /// Start `reconcile`.
    Reconcile,
    /// Say [`Event::Woke`] after about this long.
    Wake(Duration),
    /// Say [`Event::Arrived`] when no other message runs alone.
    AwaitTurn,
    /// Hand this to the source.
    Settle(Settlement),
    /// Nothing: an answer is still to come.
    Wait,
    /// Let go of the delivery without settling it; it comes back after its lease.
    Abandon,
}

/// What becomes of a delivery at the broker.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Settlement {
    /// It is done with.
    Accept(Proof),
    /// It comes back, not before this delay.
    Release {
        /// How long the source keeps it back.
        after: Duration,
        /// How many attempts have failed by now: what the delivery says of itself when it is back.
        failures: u32,
    },
    /// It goes to the dead-letter or the in-doubt destination.
    Reject(Reason),
}

/// Shows that a delivery may be accepted. Only the road makes one, out of a verdict.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Proof(By);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum By {
    Completed,
    Duplicate,
    Resolved,
    PassedWithoutGate,
}

impl Proof {
    /// What the proof rests on, as metrics and logs name it.
    pub fn as_str(&self) -> &'static str {
        match self.0 {
            By::Completed => "completed",
            By::Duplicate => "duplicate",
            By::Resolved => "resolved",
            By::PassedWithoutGate => "passed_without_gate",
        }
    }
}

/// Why a delivery was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It has no id.
    MissingId,
    /// What stands where its id is read from cannot be one, or it has two.
    UnusableId,
    /// Its payload does not parse.
    Unreadable,
    /// Its id was used for another body.
    Conflict,
    /// The handler said that it will never work.
    Refused,
    /// It failed too often.
    AttemptsSpent,
    /// Too many processes ended while they handled it.
    CrashesSpent,
    /// It was rejected before, and not redriven since.
    RejectedBefore,
    /// It is larger than the source's limit.
    TooLarge,
    /// Nobody could find out whether it happened.
    InDoubt(DoubtCause),
}

impl Reason {
    /// Every reason there is, in the order of the enum.
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
        Self::InDoubt(DoubtCause::Said),
        Self::InDoubt(DoubtCause::Panicked),
        Self::InDoubt(DoubtCause::TimedOut),
        Self::InDoubt(DoubtCause::HolderGone),
        Self::InDoubt(DoubtCause::TooOld),
        Self::InDoubt(DoubtCause::UnreadableMarker),
    ];

    /// The reason as it stands in headers, metrics and logs.
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
            Self::InDoubt(DoubtCause::Said) => "in-doubt-said",
            Self::InDoubt(DoubtCause::Panicked) => "in-doubt-panicked",
            Self::InDoubt(DoubtCause::TimedOut) => "in-doubt-timed-out",
            Self::InDoubt(DoubtCause::HolderGone) => "in-doubt-holder-gone",
            Self::InDoubt(DoubtCause::TooOld) => "in-doubt-too-old",
            Self::InDoubt(DoubtCause::UnreadableMarker) => "in-doubt-unreadable-marker",
        }
    }

    /// Whether it goes to the in-doubt destination (a person has to find out) instead of the dead
    /// letters.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::InDoubt(_))
    }
}

/// What the consumer does while its store is away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Outage {
    /// Take nothing in, and go on when the store is back.
    #[default]
    Hold,
    /// Effectively once only: run without the gate, at least once meanwhile, and count it.
    PassThrough,
}

/// The numbers that the road goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// What is promised.
    pub guarantee: Guarantee,
    /// How many attempts a message gets before it is dead-lettered.
    pub attempts: u32,
    /// How many holders of a message may crash before it is dead-lettered.
    pub crashes: u32,
    /// How often a handler is run again in place within one attempt.
    pub retries: u32,
    /// How often `reconcile` is tried.
    pub reconciles: u32,
    /// How often a claim that met a holder is asked again before its delivery is released.
    pub parks: u32,
    /// The first pause.
    pub backoff: Duration,
    /// The longest pause.
    pub longest_backoff: Duration,
    /// What to do while the store is away.
    pub outage: Outage,
}

impl Policy {
    /// The pause before the retry that follows `tries` tries: doubling, bounded.
    pub fn pause(&self, tries: u32) -> Duration {
        self.backoff
            .saturating_mul(1 << tries.min(20))
            .min(self.longest_backoff)
    }

    fn spent(&self, permit: Grant) -> bool {
        permit.spent() >= self.attempts
    }

    /// Whether so many holders crashed that it would probably take this process with it, too.
    fn gives_up_on(&self, attempts: Attempts) -> bool {
        attempts.crashes > self.crashes
    }
}

impl Stage {
    /// Whether it pauses while it holds a lease, which may end before the pause does.
    pub fn waits_on_lease(&self) -> bool {
        matches!(self, Self::Pausing(..) | Self::ReconcilePausing(..))
    }
}

/// What a delivery does next.
pub fn transition(stage: Stage, event: Event, policy: &Policy) -> (Stage, Action) {
    use {Event::*, Stage::*, Verdict as V};
    let at_most_once = policy.guarantee == Guarantee::AtMostOnce;
    let wake = |tries| Action::Wake(policy.pause(tries));
    match (stage, event) {
        // In: to the gate.
        (New(_), NoId) => reject(Reason::MissingId),
        (New(_), UnusableId) => reject(Reason::UnusableId),
        (New(history), Arrived) => (Claiming(history, ClaimTries(0)), Action::ClaimAnew),

        // At the gate: the claim was answered.
        (Claiming(history, _), Answer(V::Granted(attempts))) => {
            granted(history.permit(attempts), history, policy)
        }
        (Claiming(history, _), Answer(V::InDoubt(attempts))) if policy.gives_up_on(attempts) => {
            doubt(
                history.permit(attempts),
                DoubtCause::HolderGone,
                AfterDoubt::Reject,
            )
        }
        (Claiming(history, _), Answer(V::InDoubt(attempts))) => {
            // A tool that sent it back found no marker that would tell.
            let too_old = history.freshness == Freshness::TooOld && attempts.crashes == 0;
            let cause = if too_old {
                DoubtCause::TooOld
            } else {
                DoubtCause::HolderGone
            };
            (
                Reconciling(history.permit(attempts), Tries(0), cause),
                Action::Reconcile,
            )
        }
        (Claiming(history, parks), Answer(V::Busy { remaining })) => {
            // Never longer than the lease, so that what a crashed holder has left is claimed within
            // two leases.
            let wait = remaining.min(policy.pause(parks.0)) + A_MOMENT;
            match parks.0 >= policy.parks {
                true => release(wait, history.failures),
                false => (
                    AwaitingHolder(history, ClaimTries(parks.0 + 1), ClaimReply::Answered),
                    Action::Wake(wait),
                ),
            }
        }
        (Claiming(..), Answer(V::Duplicate)) => accept(By::Duplicate),
        (Claiming(..), Answer(V::Conflict)) => reject(Reason::Conflict),
        (Claiming(..), Answer(V::Rejected { .. })) => reject(Reason::RejectedBefore),
        (Claiming(history, _), Unavailable) if passes_through(policy) => {
            (Ungated(history), Action::Run)
        }
        (Claiming(history, parks), Unavailable) => (
            AwaitingHolder(history, ClaimTries(parks.0 + 1), ClaimReply::Unknown),
            wake(parks.0),
        ),
        (AwaitingHolder(history, parks, _), Woke) => {
            (Claiming(history, parks), Action::Ask(Ask::Claim))
        }

        // The handler: it runs only while its lease lives.
        (Ready(permit), Slot) => (Running(permit, Tries(0)), Action::Run),
        // What holds no claim cannot be blamed for a crash of the one that runs alone.
        (Ready(permit), OtherRunsAlone) => withdraw(permit, AfterWithdrawal::AwaitTurn),
        (Withdrawing(permit, then), Answer(_)) => withdrawn(permit, then),
        (Pausing(permit, tries), Woke) => (Running(permit, tries), Action::Run),
        (Running(permit, _), Returned(Outcome::Done)) => {
            (Completing(permit), Action::Ask(Ask::Complete))
        }
        (Running(permit, tries), Returned(Outcome::Retry)) => again(permit, tries, policy),
        (Running(permit, _), Returned(Outcome::Reject)) => {
            rejecting(permit, Reason::Refused, Effect::Nothing)
        }
        (Running(permit, _), Returned(Outcome::Unreadable)) => {
            rejecting(permit, Reason::Unreadable, Effect::Nothing)
        }
        (Running(permit, _), Returned(Outcome::Unknown(cause))) if at_most_once => {
            doubt(permit, cause, AfterDoubt::Reconcile)
        }
        (Running(permit, _), Returned(Outcome::Unknown(_))) if policy.spent(permit) => {
            rejecting(permit, Reason::AttemptsSpent, Effect::Unknown)
        }
        (Running(permit, _), Returned(Outcome::Unknown(_))) => clear(
            permit.failed(),
            Effect::Unknown,
            policy.pause(permit.attempts.spent()),
        ),

        // Nobody knows: ask the world.
        (Doubting(permit, cause, AfterDoubt::Reconcile), Answer(V::Kept)) => {
            (Reconciling(permit, Tries(0), cause), Action::Reconcile)
        }
        (Doubting(permit, _, AfterDoubt::Release), Answer(_)) => {
            release(policy.pause(0), permit.failures)
        }
        (Doubting(permit, _, AfterDoubt::ReleaseAtOnce), Answer(_)) => {
            release(Duration::ZERO, permit.failures)
        }
        (Doubting(_, cause, AfterDoubt::Reject), Answer(V::Kept)) => reject(Reason::InDoubt(cause)),
        (Reconciling(permit, _, _), Found(Some(finding))) => (
            Resolving(permit, finding),
            Action::Ask(Ask::Resolve(finding)),
        ),
        // A doubt that nobody looks into any more is given back, so that a person may resolve it at
        // once.
        (Reconciling(permit, tries, cause), Found(None)) if tries.0 + 1 >= policy.reconciles => {
            doubt(permit, cause, AfterDoubt::Reject)
        }
        (Reconciling(permit, tries, cause), Found(None)) => (
            ReconcilePausing(permit, Tries(tries.0 + 1), cause),
            wake(tries.0),
        ),
        (ReconcilePausing(permit, tries, cause), Woke) => {
            (Reconciling(permit, tries, cause), Action::Reconcile)
        }
        (Resolving(_, Finding::Happened), Answer(V::Done { .. })) => accept(By::Resolved),
        // The marker counts the runs; a doubt that another left is none of this delivery's.
        (Resolving(permit, Finding::DidNotHappen), Answer(V::Kept)) => look_again(permit),

        // Out: the verdict stands before the settlement.
        (Completing(_), Answer(V::Done { .. })) => accept(By::Completed),
        (Clearing(permit, _, after), Answer(_)) => release(after, permit.failures),
        (Rejecting(_, reason, _), Answer(V::Kept)) => reject(reason),

        // Without the gate, at least once.
        (Ungated(_), Returned(Outcome::Done)) => accept(By::PassedWithoutGate),
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

        // The marker is not ours any more, or has become what a new claim has to read: look again.
        (
            Doubting(permit, ..)
            | Resolving(permit, _)
            | Completing(permit)
            | Rejecting(permit, ..),
            Answer(_),
        ) => look_again(permit),

        // The lease may be over. What has a verdict to record keeps asking; what runs is dropped.
        (Ready(permit), LeaseOver) => (
            Claiming(permit.history(), ClaimTries(0)),
            Action::Ask(Ask::Claim),
        ),
        (Running(permit, _), LeaseOver) if at_most_once => {
            doubt(permit, DoubtCause::HolderGone, AfterDoubt::Release)
        }
        (Running(permit, _), LeaseOver) => release(policy.pause(0), permit.failures),
        (Pausing(permit, _), LeaseOver) => clear(permit.failed(), Effect::Nothing, policy.pause(0)),
        (Reconciling(permit, ..) | ReconcilePausing(permit, ..), LeaseOver) => {
            release(policy.pause(0), permit.failures)
        }
        (Ungated(history), LeaseOver) => release(policy.pause(0), history.failures), // it holds none: never

        // Nothing is written over what another program may need: this id alone is out of order.
        (Rejecting(_, reason, _), UnreadableMarker) => reject(reason),
        (Clearing(permit, _, after), UnreadableMarker) => release(after, permit.failures),
        (Leaving(history), UnreadableMarker) => release(Duration::ZERO, history.failures),
        (Withdrawing(permit, then), UnreadableMarker) => withdrawn(permit, then),
        (Doubting(permit, _, AfterDoubt::Release), UnreadableMarker) => {
            release(policy.pause(0), permit.failures)
        }
        (Doubting(permit, _, AfterDoubt::ReleaseAtOnce), UnreadableMarker) => {
            release(Duration::ZERO, permit.failures)
        }
        (Claiming(..) | Doubting(..) | Resolving(..) | Completing(_), UnreadableMarker) => {
            reject(Reason::InDoubt(DoubtCause::UnreadableMarker))
        }

        // Nobody waits for the store: effectively once takes over what the claim may have left.
        (Leaving(history), Unavailable) if passes_through(policy) => {
            release(Duration::ZERO, history.failures)
        }

        // The store is away: whatever was asked is asked again, with the same token.
        (
            Leaving(_) | Withdrawing(..) | Doubting(..) | Resolving(..) | Completing(_)
            | Clearing(..) | Rejecting(..),
            Unavailable,
        ) => (stage, wake(3)),
        (Leaving(_), Woke) => (stage, Action::Ask(Ask::Claim)),
        (Withdrawing(..), Woke) => (stage, Action::Ask(Ask::Withdraw)),
        (Doubting(..), Woke) => (stage, Action::Ask(Ask::Doubt)),
        (Resolving(_, finding), Woke) => (stage, Action::Ask(Ask::Resolve(finding))),
        (Completing(_), Woke) => (stage, Action::Ask(Ask::Complete)),
        (Clearing(_, effect, _), Woke) => (stage, Action::Ask(Ask::Clear(effect))),
        (Rejecting(_, _, effect), Woke) => (stage, Action::Ask(Ask::Reject(effect))),

        // The consumer drains: what has not started is given back, what runs may finish.
        (New(history) | AwaitingHolder(history, _, ClaimReply::Answered), Drain) => {
            release(Duration::ZERO, history.failures)
        }
        (Claiming(history, _), Drain) => (Leaving(history), Action::Wait),
        (AwaitingHolder(history, _, ClaimReply::Unknown), Drain) => {
            (Leaving(history), Action::Ask(Ask::Claim))
        }
        (Leaving(history), Answer(V::Granted(attempts))) => {
            withdraw(history.permit(attempts), AfterWithdrawal::Release)
        }
        (Leaving(history), Answer(V::InDoubt(attempts))) => doubt(
            history.permit(attempts),
            DoubtCause::HolderGone,
            AfterDoubt::ReleaseAtOnce,
        ),
        (Leaving(history), NotAsked) => release(Duration::ZERO, history.failures),
        (Leaving(_), Answer(V::Duplicate)) => accept(By::Duplicate),
        (Leaving(history), Answer(_)) => release(Duration::ZERO, history.failures),
        (Ready(permit), Drain) => withdraw(permit, AfterWithdrawal::Release),
        (Pausing(permit, _), Drain) => clear(permit, Effect::Nothing, Duration::ZERO),
        (ReconcilePausing(permit, _, cause), Drain) => {
            doubt(permit, cause, AfterDoubt::ReleaseAtOnce)
        }
        (Settled, _) => (Settled, Action::Wait),
        (stage, DrainOver) => drain_over(stage, policy),
        (_, StopNow) => (Settled, Action::Abandon),

        // Anything else comes too late, or changes nothing: a stale wake, a renewal's answer, a
        // drain while running.
        (stage, _) => (stage, Action::Wait),
    }
}

/// The drain timeout is over. Nothing runs from here on: what ran has an unknown outcome, as after
/// a handler timeout, so that no later claim takes it for a crash. What was asked stays asked.
#[cold]
fn drain_over(stage: Stage, policy: &Policy) -> (Stage, Action) {
    use Stage::*;
    match stage {
        // Nothing was started: as when the drain began.
        New(history) | AwaitingHolder(history, _, ClaimReply::Answered) => {
            release(Duration::ZERO, history.failures)
        }
        Claiming(history, _) => (Leaving(history), Action::Wait),
        AwaitingHolder(history, _, ClaimReply::Unknown) => {
            (Leaving(history), Action::Ask(Ask::Claim))
        }
        Ready(permit) => withdraw(permit, AfterWithdrawal::Release),
        Pausing(permit, _) => clear(permit, Effect::Nothing, Duration::ZERO),

        // The handler is dropped. A message whose last attempt this was is released all the same:
        // the next claim dead-letters it, and a stop waits for no other system than the store.
        Running(permit, _) => match policy.guarantee {
            Guarantee::AtMostOnce => {
                doubt(permit, DoubtCause::HolderGone, AfterDoubt::ReleaseAtOnce)
            }
            Guarantee::EffectivelyOnce | Guarantee::Bare => {
                clear(permit.failed(), Effect::Unknown, Duration::ZERO)
            }
        },
        Ungated(history) => release(Duration::ZERO, history.failures.saturating_add(1)),

        // `reconcile` is dropped, or is not started any more: whoever claims next finds out.
        Reconciling(permit, _, cause) | ReconcilePausing(permit, _, cause) => {
            doubt(permit, cause, AfterDoubt::ReleaseAtOnce)
        }
        Doubting(permit, cause, AfterDoubt::Reconcile) => (
            Doubting(permit, cause, AfterDoubt::ReleaseAtOnce),
            Action::Wait,
        ),

        // An answer is still to come.
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

/// A pause between a lease's end and the claim after it: both clocks count in milliseconds.
const A_MOMENT: Duration = Duration::from_millis(2);

fn granted(permit: Grant, history: History, policy: &Policy) -> (Stage, Action) {
    if policy.gives_up_on(permit.attempts) {
        return rejecting(permit, Reason::CrashesSpent, Effect::Nothing);
    }
    if permit.attempts.spent() > policy.attempts {
        return rejecting(permit, Reason::AttemptsSpent, Effect::Nothing);
    }
    // The delivery alone has failed too often: an operator may have freed the id since, for another
    // copy.
    if permit.spent() > policy.attempts {
        return withdraw(permit, AfterWithdrawal::Reject);
    }
    if policy.guarantee == Guarantee::AtMostOnce
        && permit.attempts.number == 1
        && history.freshness == Freshness::TooOld
    {
        return doubt(permit, DoubtCause::TooOld, AfterDoubt::Reconcile);
    }
    (Stage::Ready(permit), Action::Queue)
}

fn again(permit: Grant, tries: Tries, policy: &Policy) -> (Stage, Action) {
    if tries.0 < policy.retries && policy.guarantee != Guarantee::Bare {
        return (
            Stage::Pausing(permit, Tries(tries.0 + 1)),
            Action::Wake(policy.pause(tries.0)),
        );
    }
    if policy.spent(permit) {
        return rejecting(permit, Reason::AttemptsSpent, Effect::Nothing);
    }
    clear(
        permit.failed(),
        Effect::Nothing,
        policy.pause(permit.failures.saturating_add(tries.0)),
    )
}

fn passes_through(policy: &Policy) -> bool {
    policy.outage == Outage::PassThrough && policy.guarantee == Guarantee::EffectivelyOnce
}

fn accept(by: By) -> (Stage, Action) {
    (
        Stage::Settled,
        Action::Settle(Settlement::Accept(Proof(by))),
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

fn clear(permit: Grant, effect: Effect, after: Duration) -> (Stage, Action) {
    (
        Stage::Clearing(permit, effect, after),
        Action::Ask(Ask::Clear(effect)),
    )
}

fn withdraw(permit: Grant, then: AfterWithdrawal) -> (Stage, Action) {
    (Stage::Withdrawing(permit, then), Action::Ask(Ask::Withdraw))
}

fn withdrawn(permit: Grant, then: AfterWithdrawal) -> (Stage, Action) {
    match then {
        AfterWithdrawal::Release => release(Duration::ZERO, permit.failures),
        // Its next claim has a token of its own: a withdrawal that arrives late must not match it.
        AfterWithdrawal::Reject => reject(Reason::AttemptsSpent),
        AfterWithdrawal::AwaitTurn => (Stage::New(permit.history()), Action::AwaitTurn),
    }
}

fn rejecting(permit: Grant, reason: Reason, effect: Effect) -> (Stage, Action) {
    (
        Stage::Rejecting(permit, reason, effect),
        Action::Ask(Ask::Reject(effect)),
    )
}

fn doubt(permit: Grant, cause: DoubtCause, then: AfterDoubt) -> (Stage, Action) {
    (
        Stage::Doubting(permit, cause, then),
        Action::Ask(Ask::Doubt),
    )
}

fn look_again(permit: Grant) -> (Stage, Action) {
    (
        Stage::Claiming(permit.history(), ClaimTries(0)),
        Action::ClaimAnew,
    )
}

impl History {
    fn permit(self, attempts: Attempts) -> Grant {
        Grant {
            attempts,
            failures: self.failures,
        }
    }
}

impl Grant {
    /// Whether it may be this message that ends processes: two ended while they handled it. One
    /// that ended says little of the many messages that it had in flight.
    pub fn runs_alone(self) -> bool {
        self.attempts.crashes >= 2
    }

    /// How many attempts count towards the budget, this one among them.
    fn spent(self) -> u32 {
        self.attempts.spent().max(self.failures.saturating_add(1))
    }

    fn history(self) -> History {
        // It was judged for its age when it was granted.
        History {
            failures: self.failures,
            freshness: Freshness::Fresh,
        }
    }

    /// The same, with one more attempt that failed.
    fn failed(self) -> Self {
        Self {
            failures: self.failures.saturating_add(1),
            ..self
        }
    }
}

#[cfg(test)]
mod tests;
