//! Broken variants of `lifecycle::transition`, each with one wrong row. `main.rs` describes each of
//! them in one sentence.

use std::time::Duration;

use oncegate_core::internal::lifecycle::{
    Action, AfterDoubt, Event, History, Outcome, Policy, Stage, transition,
};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::marker::{Effect, Guarantee, Verdict};

/// The next stage and action.
type Answer = (Stage, Action);

fn settled(settlement: Settlement) -> Answer {
    (Stage::Settled, Action::Settle(settlement))
}

pub(crate) fn no_doubt_on_a_lost_lease(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match (stage, event) {
        (Stage::Running(grant, _), Event::LeaseOver) => settled(Settlement::Release {
            after: policy.pause(0),
            failures: grant.failures,
        }),
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn abandons_at_the_drain_timeout(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match event {
        Event::DrainOver => transition(stage, Event::StopNow, policy),
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn clears_at_the_drain_timeout(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match (stage, event) {
        (Stage::Running(grant, _), Event::DrainOver) => (
            Stage::Clearing(grant, Effect::Nothing, Duration::ZERO),
            Action::Apply,
        ),
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn releases_a_dropped_reconcile_without_doubt(
    stage: Stage,
    event: Event,
    policy: &Policy,
) -> Answer {
    match (stage, event) {
        (Stage::Reconciling(grant, ..), Event::DrainOver) => settled(Settlement::Release {
            after: Duration::ZERO,
            failures: grant.failures,
        }),
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn accepts_a_busy_claim(stage: Stage, event: Event, policy: &Policy) -> Answer {
    let busy = matches!(event, Event::Answer(Verdict::Busy { .. }));
    transition(
        stage,
        if busy {
            Event::Answer(Verdict::Duplicate)
        } else {
            event
        },
        policy,
    )
}

pub(crate) fn unknown_is_a_failure(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match event {
        Event::Returned(Outcome::Unknown(_)) => {
            transition(stage, Event::Returned(Outcome::Retry), policy)
        }
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn accepts_an_unconfirmed_commit(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match event {
        Event::Returned(Outcome::Unavailable) => {
            transition(stage, Event::Returned(Outcome::Done), policy)
        }
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn doubts_an_unconfirmed_commit(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match (stage, event) {
        (Stage::Running(grant, _), Event::Returned(Outcome::Unavailable)) => (
            Stage::Doubting(grant, DoubtCause::Interrupted, AfterDoubt::Reject),
            Action::Apply,
        ),
        _ => transition(stage, event, policy),
    }
}

pub(crate) fn keeps_the_holder_after_reconcile(
    stage: Stage,
    event: Event,
    policy: &Policy,
) -> Answer {
    match transition(stage, event, policy) {
        (Stage::Doubting(_, cause, AfterDoubt::Reject), _)
            if matches!(stage, Stage::Reconciling(..)) =>
        {
            settled(Settlement::Reject(Reason::InDoubt(cause)))
        }
        answer => answer,
    }
}

pub(crate) fn reconciled_is_a_failure(stage: Stage, event: Event, policy: &Policy) -> Answer {
    debug_assert_ne!(policy.guarantee, Guarantee::Bare);
    match (stage, transition(stage, event, policy)) {
        (Stage::Resolving(..), (Stage::Claiming(history, tries), step)) => (
            Stage::Claiming(
                History {
                    failures: history.failures + 1,
                    ..history
                },
                tries,
            ),
            step,
        ),
        (_, answer) => answer,
    }
}
