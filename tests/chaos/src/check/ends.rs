//! I8, I13, I14, and how processes end.

use super::{FREEZE_KAFKA, Finder, Invariant};
use crate::ledger::{Record, RejectedTo, SentSignal, StoreOperation, What};
use oncegate::defaults::STOP_TIMEOUT;
use std::time::Duration;

/// The status of a process that aborted.
const ABORTED: &str = "signal 6";

/// The status of a process that failed at start, the time that the failure may take, and the fault
/// that causes it.
const REFUSED: &str = "exit 1";
const START_TIME: Duration = Duration::from_secs(3);
const DEMOTE: &str = "demote-redis";

/// The faults during which the broker does not reply, and how long a consumer then tries to leave
/// after its drain timeout.
const BROKER_UNAVAILABLE: [&str; 5] = [
    "freeze-kafka",
    "kill-kafka",
    "kill-rabbit",
    "restart-rabbit",
    "dark-rabbit",
];
const LEAVE_TIME: Duration = Duration::from_secs(10);

/// How long after a freeze of Kafka its client may lack the broker's metadata before it is
/// replaced, and the error of a consumer that drains meanwhile.
const LOST_METADATA: Duration = Duration::from_secs(25);
const NOT_LEFT: &str = "did not leave the group in time";

/// How long before the recorded start of a failover replication may already be interrupted.
pub(super) const REPLICATION_LAG: Duration = Duration::from_secs(1);

pub(super) fn check(finder: &mut Finder<'_>) {
    let bound = (finder.rules.drain + STOP_TIMEOUT).as_millis() + 1_000;
    for record in finder.ledger.records() {
        match &record.what {
            What::Unsettled { count } if *count > 0 => {
                finder.report_violation(
                    Invariant::I14,
                    None,
                    format!("{count} messages were not settled at the end of the run"),
                );
            }
            // The failover lost the recorded completion, and no delivery claims the id again.
            What::Marker { id, .. } if completion_lost(finder, id) => {
                finder.checked.counts.completions_lost += 1
            }
            // `v1 r`: in doubt and being reconciled, `v1 p`: in progress (the format of Redis). The
            // message is in the in-doubt queue; no consumer reconciles it.
            What::Marker { id, record }
                if record.starts_with("v1 r ") && is_in_doubt(finder, id) => {}
            What::Marker { id, record }
                if record.starts_with("v1 p ") || record.starts_with("v1 r ") =>
            {
                finder.report_violation(
                    Invariant::I14,
                    Some(id),
                    format!("its marker remained in progress: {record}"),
                );
            }
            What::Leaked { secret, place } => finder.report_violation(
                Invariant::I13,
                None,
                format!("the password of {secret} is in {place}"),
            ),
            What::ChannelRefused { line } => {
                finder.report_violation(Invariant::I8, None, line.clone())
            }
            // A message made it abort, whatever signal it received.
            What::ProcessEnded {
                consumer, status, ..
            } if status == ABORTED && finder.windows.aborted(consumer).is_some() => {}
            // A consumer with at most once refuses to start on a replica.
            What::ProcessEnded {
                after: SentSignal::Nothing,
                status,
                ..
            } if status == REFUSED && finder.windows.was_active(DEMOTE, record.at, START_TIME) => {
                finder.checked.counts.refused_to_start += 1;
            }
            What::ProcessEnded {
                consumer,
                after: SentSignal::Nothing,
                status,
                ..
            } => {
                let error = error_of(finder, consumer);
                finder.report_violation(
                    Invariant::Exit,
                    None,
                    format!("{consumer} ended without a signal: {status}: {error}"),
                );
            }
            What::ProcessEnded {
                consumer,
                after: SentSignal::Terminate,
                status,
                took_ms,
            } => {
                // Without its broker it can neither settle nor leave the group, and ends with an
                // error.
                let (took, error) = (Duration::from_millis(*took_ms), error_of(finder, consumer));
                let unavailable = BROKER_UNAVAILABLE
                    .iter()
                    .any(|kind| finder.windows.was_active(kind, record.at, took));
                let lost_metadata = error.contains(NOT_LEFT)
                    && finder
                        .windows
                        .was_active(FREEZE_KAFKA, record.at, took + LOST_METADATA);
                if (unavailable || lost_metadata)
                    && status == REFUSED
                    && took.as_millis() <= bound + LEAVE_TIME.as_millis()
                {
                    finder.checked.counts.stopped_without_broker += 1;
                } else if status != "exit 0" {
                    finder.report_violation(
                        Invariant::Exit,
                        None,
                        format!("{consumer} received SIGTERM and ended with {status}: {error}"),
                    );
                } else if u128::from(*took_ms) > bound {
                    finder.report_violation(
                        Invariant::Exit,
                        None,
                        format!("{consumer} took {took_ms} ms to drain; the bound is {bound} ms"),
                    );
                }
            }
            _ => {}
        }
    }
}

/// I14: a `Busy` verdict for an id that only this consumer received, and without a granted claim.
/// The marker can only be an earlier claim of the same delivery whose reply was lost.
pub(super) fn check_id(finder: &mut Finder<'_>, id: &str) {
    let (mut received, mut has_other_verdict) = (0, false);
    for record in finder.history(id) {
        match &record.what {
            What::Received { .. } => received += 1,
            What::Answered {
                operation: StoreOperation::Claim,
                verdict,
                ..
            } if verdict == "busy" && received == 1 && !has_other_verdict => {
                let why = format!(
                    "{} got the verdict busy, but no other consumer received the message",
                    record.by
                );
                return finder.report_violation(Invariant::I14, Some(id), why);
            }
            What::Answered {
                operation: StoreOperation::Claim,
                verdict,
                ..
            } if matches!(verdict.as_str(), "unknown" | "not applied" | "busy") => {}
            What::Answered { .. } => has_other_verdict = true,
            _ => {}
        }
    }
}

/// The error with which a consumer ended.
fn error_of(finder: &Finder<'_>, consumer: &str) -> String {
    let text = |record: &Record| match &record.what {
        What::Failed { error } if record.by == consumer => Some(error.clone()),
        _ => None,
    };
    finder
        .ledger
        .records()
        .iter()
        .find_map(text)
        .unwrap_or_else(|| "no error was logged".into())
}

/// Whether its message is in the in-doubt queue.
fn is_in_doubt(finder: &Finder<'_>, id: &str) -> bool {
    finder.history(id).any(|record| {
        matches!(
            record.what,
            What::Rejected {
                place: RejectedTo::InDoubt,
                ..
            }
        )
    })
}

/// Whether the store recorded its completion and a failover may have lost that.
fn completion_lost(finder: &Finder<'_>, id: &str) -> bool {
    let recorded = |record: &&Record| match &record.what {
        What::Answered {
            operation, verdict, ..
        } => *operation != StoreOperation::Claim && matches!(verdict.as_str(), "done" | "kept"),
        _ => false,
    };
    finder
        .history(id)
        .filter(recorded)
        .last()
        .is_some_and(|record| finder.windows.may_lose(record.at, REPLICATION_LAG))
}
