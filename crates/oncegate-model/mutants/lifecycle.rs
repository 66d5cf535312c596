//! Wrong rules of the consumer, each the right ones but for one row.

use oncegate_core::lifecycle::{
    Action, AfterDoubt, Event, History, Outcome, Policy, Reason, Settlement, Stage, transition,
};
use oncegate_core::marker::{Guarantee, Verdict};

type Answer = (Stage, Action);

fn left(settlement: Settlement) -> Answer {
    (Stage::Settled, Action::Settle(settlement))
}

pub(crate) fn no_doubt_on_a_lost_lease(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match (stage, event) {
        (Stage::Running(permit, _), Event::LeaseOver) => left(Settlement::Release {
            after: policy.pause(0),
            failures: permit.failures,
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

pub(crate) fn keeps_its_doubt(stage: Stage, event: Event, policy: &Policy) -> Answer {
    match transition(stage, event, policy) {
        (Stage::Doubting(_, cause, AfterDoubt::Reject), _)
            if matches!(stage, Stage::Reconciling(..)) =>
        {
            left(Settlement::Reject(Reason::InDoubt(cause)))
        }
        answer => answer,
    }
}

pub(crate) fn reconciled_is_a_failure(stage: Stage, event: Event, policy: &Policy) -> Answer {
    debug_assert_ne!(policy.guarantee, Guarantee::Bare);
    match (stage, transition(stage, event, policy)) {
        (Stage::Resolving(..), (Stage::Claiming(history, parks), step)) => (
            Stage::Claiming(
                History {
                    failures: history.failures + 1,
                    ..history
                },
                parks,
            ),
            step,
        ),
        (_, answer) => answer,
    }
}
