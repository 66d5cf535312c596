//! The text of a counterexample.

use oncegate_core::marker::{Effect, Marker};
use stateright::Path;

use crate::state::{
    CommandState, ModelAction, ModelDestination, NextStep, Operator, SystemState, name,
};

/// The path to a violation, one line for each step.
pub(crate) fn lines(path: Path<SystemState, ModelAction>) -> Vec<String> {
    let steps = path.into_vec();
    let after = |index: usize| steps.get(index + 1).map(|(state, _)| state);
    steps
        .iter()
        .enumerate()
        .filter_map(|(index, (state, action))| Some(step(state, action.as_ref()?, after(index))))
        .collect()
}

fn step(state: &SystemState, action: &ModelAction, after: Option<&SystemState>) -> String {
    let command = |who: usize| match state.consumers[who]
        .delivery
        .as_ref()
        .and_then(|it| it.command)
    {
        Some(CommandState::Sent(ask) | CommandState::Replied(ask, ..)) => name(&ask),
        None => "nothing",
    };
    let who = |who: usize| ["A", "B"][who];
    let marker = after.map_or(String::new(), |after| {
        format!(" [{}]", marker(&after.marker))
    });
    match *action {
        ModelAction::Deliver(at, message) if message.body == 0 => format!(
            "the message is delivered to {}, which asks to claim it",
            who(at)
        ),
        ModelAction::Deliver(at, _) => format!(
            "the message with the other body is delivered to {}, which asks to claim it",
            who(at)
        ),
        ModelAction::PublishAgain => "the producer publishes the message again".into(),
        ModelAction::PublishOtherBody => {
            "a producer publishes a message with the same id and another body".into()
        }
        ModelAction::Redeliver(at) => {
            format!(
                "the broker delivers {}'s message again; {} can no longer settle it",
                who(at),
                who(at)
            )
        }
        ModelAction::Apply(at) => {
            format!("the store applies {}'s {}{marker}", who(at), command(at))
        }
        ModelAction::ApplyDelayed(place) => format!(
            "a {} whose sender gave up arrives{marker}",
            name(&state.late[place].ask)
        ),
        ModelAction::ReceiveReply(at) => match state.consumers[at]
            .delivery
            .as_ref()
            .and_then(|it| it.command)
        {
            Some(CommandState::Replied(ask, verdict, _)) => {
                format!("{} hears of its {}: {verdict:?}", who(at), name(&ask))
            }
            _ => format!("{} hears of its command", who(at)),
        },
        ModelAction::LoseCommand(at) => format!("{}'s {} does not arrive", who(at), command(at)),
        ModelAction::DelayCommand(at) => format!(
            "{} gives up waiting for its {}, which is still in flight",
            who(at),
            command(at)
        ),
        ModelAction::LoseReply(at) => format!("the reply to {}'s {} is lost", who(at), command(at)),
        ModelAction::Wake(at) => format!("{} resumes after a pause", who(at)),
        ModelAction::EffectHappens(at) => format!("{}'s effect happens", who(at)),
        ModelAction::OrphanEffectHappens(_) => "the effect of a dropped handler happens".into(),
        ModelAction::LoseOrphan(_) => "the request of a dropped handler is lost".into(),
        ModelAction::Return(at, outcome) => format!("{}'s handler ends: {outcome:?}", who(at)),
        ModelAction::ReconcileHappened(at) => format!("{} reconciles: it happened", who(at)),
        ModelAction::ReconcileDidNotHappen(at) => format!(
            "{} reconciles: it did not happen, and later requests are refused",
            who(at)
        ),
        ModelAction::ExpireLease => "the lease ends".into(),
        ModelAction::SuspectLease(at) => {
            format!("{} cannot know whether its lease is still valid", who(at))
        }
        ModelAction::NoticeExpiry(at) => format!("{} notices that its lease has expired", who(at)),
        ModelAction::Renew(at) => format!("{} renews its lease{marker}", who(at)),
        ModelAction::DelayRenewal(at) => format!(
            "{} gives up waiting for a renewal, which is still in flight",
            who(at)
        ),
        ModelAction::Crash(at) => format!(
            "{} crashes; the broker hands its delivery out again",
            who(at)
        ),
        ModelAction::Drain(at) => format!("{} begins to drain", who(at)),
        ModelAction::WithdrawGrant(at) => format!(
            "other messages run apart, and {} withdraws its grant",
            who(at)
        ),
        ModelAction::DrainOver(at) => format!(
            "{}'s drain timeout expires: its handlers are dropped",
            who(at)
        ),
        ModelAction::StopNow(at) => format!("{} stops without waiting any longer", who(at)),
        ModelAction::CompleteLate(at) => format!(
            "{} records what it handled without the gate{marker}",
            who(at)
        ),
        ModelAction::LoseMarker => "the store loses the marker".into(),
        ModelAction::LoseClaim => format!("the store loses the last claim{marker}"),
        ModelAction::OperatorDecides(place) => match after.map(|after| &after.operator) {
            Some(Operator::Decided(_, sent, NextStep::Publish)) => {
                format!(
                    "the operator {}; next: {}",
                    reads(state, place),
                    name(&sent.ask)
                )
            }
            Some(Operator::Decided(_, sent, NextStep::Remove)) => {
                format!(
                    "the operator {}, and it happened; next: {}",
                    reads(state, place),
                    name(&sent.ask)
                )
            }
            _ => format!("the operator {}", reads(state, place)),
        },
        ModelAction::OperatorRequests => {
            format!("the store applies the operator's request if the marker is unchanged{marker}")
        }
        ModelAction::DelayOperatorRequest => {
            "the operator's command is interrupted; its request is still in flight".into()
        }
        ModelAction::OperatorPublishes => "the operator publishes a copy".into(),
        ModelAction::OperatorRemoves => "the operator removes the dead letter".into(),
        ModelAction::OperatorStops => "the operator's command is interrupted".into(),
        ModelAction::OperatorForgets => {
            format!(
                "the operator allows the completed id to run again, and it is published again{marker}"
            )
        }
    }
}

fn reads(state: &SystemState, place: usize) -> &'static str {
    match state.dead_letters[place].destination {
        ModelDestination::DeadLetters => "reads the dead letter and the marker",
        ModelDestination::InDoubt => {
            "reads the in-doubt message and the marker, and finds out the outcome"
        }
    }
}

fn marker(marker: &Marker) -> String {
    match marker {
        Marker::Absent => "absent".into(),
        Marker::Cleared {
            attempts,
            effect: Effect::Nothing,
        } => format!(
            "cleared, attempt {} from {}",
            attempts.number, attempts.base
        ),
        Marker::Cleared {
            attempts,
            effect: Effect::Unknown,
        } => {
            format!(
                "cleared, attempt {} from {}, outcome unknown",
                attempts.number, attempts.base
            )
        }
        Marker::InProgress(hold) => format!(
            "in progress, attempt {} from {}",
            hold.attempts.number, hold.attempts.base
        ),
        Marker::InDoubt(hold, _) => format!(
            "in doubt, attempt {} from {}",
            hold.attempts.number, hold.attempts.base
        ),
        Marker::Rejected { attempt, .. } => format!("rejected, attempt {attempt}"),
        Marker::Done(_) => "done".into(),
    }
}
