//! A counterexample, told.

use oncegate_core::marker::{Effect, Marker};
use stateright::Path;

use crate::world::{Action, ClaimReply, Person, Shelf, Then, World, name};

/// The way into trouble, a line for each step.
pub(crate) fn tell(path: Path<World, Action>) -> Vec<String> {
    let steps = path.into_vec();
    let after = |index: usize| steps.get(index + 1).map(|(world, _)| world);
    steps
        .iter()
        .enumerate()
        .filter_map(|(index, (world, action))| Some(step(world, action.as_ref()?, after(index))))
        .collect()
}

fn step(world: &World, action: &Action, after: Option<&World>) -> String {
    let asked = |who: usize| match world.consumers[who]
        .delivery
        .as_ref()
        .and_then(|it| it.asked)
    {
        Some(ClaimReply::Sent(ask) | ClaimReply::Answered(ask, ..)) => name(&ask),
        None => "nothing",
    };
    let who = |who: usize| ["A", "B"][who];
    let marker = after.map_or(String::new(), |after| {
        format!(" [{}]", marker(&after.marker))
    });
    match *action {
        Action::Deliver(at, message) if message.body == 0 => format!(
            "the message is delivered to {}, which asks to claim it",
            who(at)
        ),
        Action::Deliver(at, _) => format!(
            "the message with the other body is delivered to {}, which asks to claim it",
            who(at)
        ),
        Action::SendTwice => "the producer sends the message once more".into(),
        Action::SendOther => "a producer sends a message with the same id and another body".into(),
        Action::DeliverAgain(at) => {
            format!(
                "the broker delivers {}'s message again, and takes no settlement from {} any more",
                who(at),
                who(at)
            )
        }
        Action::Apply(at) => format!("the store applies {}'s {}{marker}", who(at), asked(at)),
        Action::ApplyLate(place) => format!(
            "a {} that was given up arrives late{marker}",
            name(&world.late[place].ask)
        ),
        Action::Answer(at) => match world.consumers[at]
            .delivery
            .as_ref()
            .and_then(|it| it.asked)
        {
            Some(ClaimReply::Answered(ask, verdict, _)) => {
                format!("{} hears of its {}: {verdict:?}", who(at), name(&ask))
            }
            _ => format!("{} hears of its command", who(at)),
        },
        Action::LoseCommand(at) => format!("{}'s {} does not arrive", who(at), asked(at)),
        Action::LateCommand(at) => format!(
            "{} gives up waiting for its {}, which is still under way",
            who(at),
            asked(at)
        ),
        Action::LoseAnswer(at) => format!("the answer to {}'s {} is lost", who(at), asked(at)),
        Action::Wake(at) => format!("{} goes on after its pause", who(at)),
        Action::EffectHappens(at) => format!("{}'s effect happens", who(at)),
        Action::OrphanHappens(_) => "the effect of a handler that is gone happens".into(),
        Action::OrphanDies(_) => "the request of a handler that is gone is lost".into(),
        Action::Return(at, outcome) => format!("{}'s handler ends: {outcome:?}", who(at)),
        Action::FindsOut(at) => format!("{} finds out that it happened", who(at)),
        Action::FindsNothing(at) => format!(
            "{} finds out that it did not happen, and nothing still can",
            who(at)
        ),
        Action::LeaseEnds => "the lease ends".into(),
        Action::LeaseFeared(at) => format!("{} cannot tell whether its lease lives", who(at)),
        Action::HearsLeaseOver(at) => format!("{} notices that its lease is over", who(at)),
        Action::Renew(at) => format!("{} renews its lease{marker}", who(at)),
        Action::LateRenewal(at) => format!(
            "{} gives up waiting for a renewal, which is still under way",
            who(at)
        ),
        Action::Crash(at) => format!(
            "{} crashes; the broker hands its delivery out again",
            who(at)
        ),
        Action::Drain(at) => format!("{} is told to stop", who(at)),
        Action::Yield(at) => format!(
            "another message runs alone, and {} withdraws its grant",
            who(at)
        ),
        Action::DrainOver(at) => format!("{}'s drain timeout is over: it drops what runs", who(at)),
        Action::StopNow(at) => format!("{} stops without waiting any longer", who(at)),
        Action::CompleteLate(at) => format!(
            "{} tells the store of what it handled without the gate{marker}",
            who(at)
        ),
        Action::Forget => "the store forgets the marker".into(),
        Action::LoseClaim => format!("the store forgets the last claim{marker}"),
        Action::Decides(place) => match after.map(|after| &after.person) {
            Some(Person::Decided(_, sent, Then::Publish)) => {
                format!(
                    "a person {}; {} is to be asked",
                    looks(world, place),
                    name(&sent.ask)
                )
            }
            Some(Person::Decided(_, sent, Then::TakeOut)) => {
                format!(
                    "a person {}, and it happened; {} is to be asked",
                    looks(world, place),
                    name(&sent.ask)
                )
            }
            _ => format!("a person {}", looks(world, place)),
        },
        Action::Asks => format!(
            "the store does what the person asks for, if the marker still is what was seen{marker}"
        ),
        Action::AsksLate => "the person's command is cut off, and still under way".into(),
        Action::Publishes => "the person publishes a copy".into(),
        Action::TakesOut => "the person takes the letter out".into(),
        Action::Stops => "the person is cut off".into(),
        Action::ForgetsWhatIsDone => {
            format!("a person lets it be handled again, and it is sent once more{marker}")
        }
    }
}

fn looks(world: &World, place: usize) -> &'static str {
    match world.letters[place].shelf {
        Shelf::DeadLetters => "looks at the dead letter and at the marker",
        Shelf::InDoubt => "looks at the message in doubt and at the marker, and finds out",
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
