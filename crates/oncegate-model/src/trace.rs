//! The text of a path that violates a property.

use oncegate_core::internal::lifecycle::Stage;
use oncegate_core::marker::{Effect, Marker};
use stateright::Path;

use crate::state::{
    CommandState, ModelAction, ModelDestination, NextStep, Operator, SystemState, kind_name,
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
    let command = |index: usize| match state.consumers[index]
        .delivery
        .as_ref()
        .and_then(|delivery| delivery.command)
    {
        Some(CommandState::Sent(kind) | CommandState::Replied(kind, ..)) => kind_name(&kind),
        None => "nothing",
    };
    let consumer = |index: usize| ["A", "B"][index];
    let marker = after.map_or(String::new(), |after| {
        format!(" [{}]", marker(&after.marker))
    });
    match *action {
        ModelAction::Deliver(at, message) if message.body == 0 => format!(
            "the message is delivered to {}, which sends a claim",
            consumer(at)
        ),
        ModelAction::Deliver(at, _) => format!(
            "the message with the other body is delivered to {}, which sends a claim",
            consumer(at)
        ),
        ModelAction::PublishAgain => "the producer publishes the message again".into(),
        ModelAction::PublishOtherBody => {
            "a producer publishes a message with the same id and another body".into()
        }
        ModelAction::Redeliver(at) => {
            format!(
                "the broker delivers {}'s message again; {} can no longer settle it",
                consumer(at),
                consumer(at)
            )
        }
        ModelAction::Apply(at) => {
            format!(
                "the store applies {}'s {}{marker}",
                consumer(at),
                command(at)
            )
        }
        ModelAction::ApplyDelayed(index) => format!(
            "the store applies a delayed {}{marker}",
            kind_name(&state.delayed_commands[index].kind)
        ),
        ModelAction::ReceiveReply(at) => match state.consumers[at]
            .delivery
            .as_ref()
            .and_then(|delivery| delivery.command)
        {
            Some(CommandState::Replied(kind, verdict, _)) => {
                format!(
                    "{} receives the reply to its {}: {verdict:?}",
                    consumer(at),
                    kind_name(&kind)
                )
            }
            _ => format!("{} receives a reply", consumer(at)),
        },
        ModelAction::LoseCommand(at) => format!("{}'s {} is lost", consumer(at), command(at)),
        ModelAction::DelayCommand(at) => format!(
            "{} stops waiting for its {}, which is still in flight",
            consumer(at),
            command(at)
        ),
        ModelAction::LoseReply(at) => {
            format!("the reply to {}'s {} is lost", consumer(at), command(at))
        }
        ModelAction::Wake(at) => {
            let delivery = state.consumers[at].delivery.as_ref();
            if delivery.is_some_and(|it| matches!(it.driver.stage(), Stage::Reconciling(..))) {
                format!("{}'s reconcile does not find out the outcome", consumer(at))
            } else {
                format!("a pause of {} ends", consumer(at))
            }
        }
        ModelAction::EffectHappens(at) => format!("{}'s effect happens", consumer(at)),
        ModelAction::OrphanEffectHappens(_) => "the effect of a dropped handler happens".into(),
        ModelAction::LoseOrphan(_) => "the request of a dropped handler is lost".into(),
        ModelAction::Return(at, outcome) => format!("{}'s handler ends: {outcome:?}", consumer(at)),
        ModelAction::ReconcileHappened(at) => format!("{} reconciles: it happened", consumer(at)),
        ModelAction::ReconcileDidNotHappen(at) => format!(
            "{} reconciles: it did not happen, and later requests are refused",
            consumer(at)
        ),
        ModelAction::ExpireLease => "the lease expires".into(),
        ModelAction::SuspectLease(at) => {
            format!(
                "{} cannot know whether its lease is still valid",
                consumer(at)
            )
        }
        ModelAction::NoticeExpiry(at) => {
            format!("{} notices that its lease has expired", consumer(at))
        }
        ModelAction::Renew(at) => format!("{} renews its lease{marker}", consumer(at)),
        ModelAction::DelayRenewal(at) => format!(
            "{} stops waiting for a renewal, which is still in flight",
            consumer(at)
        ),
        ModelAction::Crash(at) => format!(
            "{} crashes; the broker redelivers its message",
            consumer(at)
        ),
        ModelAction::Drain(at) => format!("{} begins to drain", consumer(at)),
        ModelAction::WithdrawGrant(at) => format!(
            "the message has to wait for its run in isolation, and {} withdraws its grant",
            consumer(at)
        ),
        ModelAction::DrainOver(at) => format!(
            "{}'s drain timeout expires, and it drops its handler",
            consumer(at)
        ),
        ModelAction::StopNow(at) => format!(
            "{} stops without waiting for its handler or the store",
            consumer(at)
        ),
        ModelAction::CompleteLate(at) => format!(
            "{} sends the next command to record the id that it handled without the store{marker}",
            consumer(at)
        ),
        ModelAction::LoseMarker => "the store loses the marker".into(),
        ModelAction::LoseClaim => format!("the store loses the last claim{marker}"),
        ModelAction::OperatorDecides(index) => match after.map(|after| &after.operator) {
            Some(Operator::Decided(_, sent, NextStep::Publish)) => {
                format!(
                    "the operator {}; next: {}",
                    operator_reads(state, index),
                    kind_name(&sent.kind)
                )
            }
            Some(Operator::Decided(_, sent, NextStep::Remove)) => {
                format!(
                    "the operator {}, and it happened; next: {}",
                    operator_reads(state, index),
                    kind_name(&sent.kind)
                )
            }
            _ => format!("the operator {}", operator_reads(state, index)),
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

fn operator_reads(state: &SystemState, index: usize) -> &'static str {
    match state.dead_letters[index].destination {
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
            "cleared, attempt {}, {} not counted by max_attempts",
            attempts.number, attempts.base
        ),
        Marker::Cleared {
            attempts,
            effect: Effect::Unknown,
        } => {
            format!(
                "cleared, attempt {}, {} not counted by max_attempts, outcome unknown",
                attempts.number, attempts.base
            )
        }
        Marker::InProgress(hold) => format!(
            "in progress, attempt {}, {} not counted by max_attempts",
            hold.attempts.number, hold.attempts.base
        ),
        Marker::InDoubt(hold, _) => format!(
            "in doubt, attempt {}, {} not counted by max_attempts",
            hold.attempts.number, hold.attempts.base
        ),
        Marker::Rejected { attempt, .. } => format!("rejected, attempt {attempt}"),
        Marker::Done(_) => "done".into(),
    }
}
