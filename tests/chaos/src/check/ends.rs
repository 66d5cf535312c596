//! I8, I13, I14, and how processes end.

use super::{FREEZE_KAFKA, Finder, Invariant};
use crate::ledger::{Asked, Place, Record, Sent, What};
use oncegate::defaults::STOP_TIMEOUT;
use std::time::Duration;

/// How a process ends that aborts.
const ABORTED: &str = "signal 6";

/// How a process ends whose settings are refused, how long it takes to see that, and the fault in
/// which it is.
const REFUSED: &str = "exit 1";
const BEGUN: Duration = Duration::from_secs(3);
const DEMOTE: &str = "demote-redis";

/// The faults in which the broker answers nobody, and for how long a consumer tries to leave then,
/// after its drain.
const BROKER_AWAY: [&str; 5] = [
    "freeze-kafka",
    "kill-kafka",
    "kill-rabbit",
    "restart-rabbit",
    "dark-rabbit",
];
const LEAVE: Duration = Duration::from_secs(10);

/// After a freeze of Kafka its client may have forgotten it: for how long at the most, until
/// another one takes its place, and what a consumer says that is told to drain meanwhile.
const FORGOTTEN: Duration = Duration::from_secs(25);
const STAYS: &str = "did not leave the group in time";

/// How long before a failover begins its replicas may not have heard of what is said.
pub(super) const UNHEARD: Duration = Duration::from_secs(1);

pub(super) fn check(finder: &mut Finder<'_>) {
    let bound = (finder.rules.drain + STOP_TIMEOUT).as_millis() + 1_000;
    for record in finder.ledger.records() {
        match &record.what {
            What::Left { count } if *count > 0 => {
                finder.found(
                    Invariant::I14,
                    None,
                    format!("{count} deliveries were left when the run had to end"),
                );
            }
            // Its end was recorded, and that is what the failover has lost: nobody will ask again.
            What::Marker { id, .. } if end_lost(finder, id) => finder.checked.counts.ends_lost += 1,
            // Whoever gave up on finding out has let go of it, and the message waits for a person.
            What::Marker { id, record }
                if record.starts_with("v1 r ") && is_in_doubt(finder, id) => {}
            What::Marker { id, record }
                if record.starts_with("v1 p ") || record.starts_with("v1 r ") =>
            {
                finder.found(
                    Invariant::I14,
                    Some(id),
                    format!("its marker was left in progress: {record}"),
                );
            }
            What::Leaked { secret, place } => finder.found(
                Invariant::I13,
                None,
                format!("the password of {secret} stands in {place}"),
            ),
            What::ChannelRefused { line } => finder.found(Invariant::I8, None, line.clone()),
            // As a message told it to, whatever it was told by the player.
            What::Gone {
                consumer, status, ..
            } if status == ABORTED && finder.windows.aborted(consumer).is_some() => {}
            // At most once does not begin on a server that is a replica.
            What::Gone {
                after: Sent::Nothing,
                status,
                ..
            } if status == REFUSED && finder.windows.lasted(DEMOTE, record.at, BEGUN) => {
                finder.checked.counts.refused_to_begin += 1;
            }
            What::Gone {
                consumer,
                after: Sent::Nothing,
                status,
                ..
            } => {
                let error = error_of(finder, consumer);
                finder.found(
                    Invariant::Exit,
                    None,
                    format!("{consumer} ended by itself: {status}: {error}"),
                );
            }
            What::Gone {
                consumer,
                after: Sent::Terminate,
                status,
                took_ms,
            } => {
                // While its broker is away it can neither settle nor leave in good order, and says
                // so.
                let (took, error) = (Duration::from_millis(*took_ms), error_of(finder, consumer));
                let away = BROKER_AWAY
                    .iter()
                    .any(|kind| finder.windows.lasted(kind, record.at, took));
                let forgotten = error.contains(STAYS)
                    && finder
                        .windows
                        .lasted(FREEZE_KAFKA, record.at, took + FORGOTTEN);
                if (away || forgotten)
                    && status == REFUSED
                    && took.as_millis() <= bound + LEAVE.as_millis()
                {
                    finder.checked.counts.left_without_broker += 1;
                } else if status != "exit 0" {
                    finder.found(
                        Invariant::Exit,
                        None,
                        format!("{consumer} was told to drain, and ended with {status}: {error}"),
                    );
                } else if u128::from(*took_ms) > bound {
                    finder.found(
                        Invariant::Exit,
                        None,
                        format!("{consumer} took {took_ms} ms to drain, and may take {bound}"),
                    );
                }
            }
            _ => {}
        }
    }
}

/// A marker in progress that nobody holds: who was told `busy` is the only one that the id was ever
/// handed to, and has been granted nothing. What stands there can only be a claim of its own that
/// it does not know any more.
pub(super) fn check_id(finder: &mut Finder<'_>, id: &str) {
    let (mut handed_over, mut asked_otherwise) = (0, false);
    for record in finder.history(id) {
        match &record.what {
            What::Received { .. } => handed_over += 1,
            What::Answered {
                ask: Asked::Claim,
                verdict,
                ..
            } if verdict == "busy" && handed_over == 1 && !asked_otherwise => {
                let why = format!(
                    "{} was told that it is busy, and nobody else was ever handed it",
                    record.by
                );
                return finder.found(Invariant::I14, Some(id), why);
            }
            What::Answered {
                ask: Asked::Claim,
                verdict,
                ..
            } if matches!(verdict.as_str(), "unknown" | "not applied" | "busy") => {}
            What::Answered { .. } => asked_otherwise = true,
            _ => {}
        }
    }
}

/// What a consumer said when it ended with an error.
fn error_of(finder: &Finder<'_>, consumer: &str) -> String {
    let said = |record: &Record| match &record.what {
        What::Failed { error } if record.by == consumer => Some(error.clone()),
        _ => None,
    };
    finder
        .ledger
        .records()
        .iter()
        .find_map(said)
        .unwrap_or_else(|| "it has not said why".into())
}

/// Whether its message waits for a person who finds out.
fn is_in_doubt(finder: &Finder<'_>, id: &str) -> bool {
    finder.history(id).any(|record| {
        matches!(
            record.what,
            What::Aside {
                place: Place::InDoubt,
                ..
            }
        )
    })
}

/// Whether the store had recorded its end, and a failover followed in which that may be lost.
fn end_lost(finder: &Finder<'_>, id: &str) -> bool {
    let recorded = |record: &&Record| match &record.what {
        What::Answered { ask, verdict, .. } => {
            *ask != Asked::Claim && matches!(verdict.as_str(), "done" | "kept")
        }
        _ => false,
    };
    finder
        .history(id)
        .filter(recorded)
        .last()
        .is_some_and(|record| finder.windows.loses(record.at, UNHEARD))
}
