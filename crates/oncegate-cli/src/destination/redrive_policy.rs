//! Decides whether a copy of a message may be sent, and with which age.
//!
//! Messages stay in destinations for longer than markers stay in the store: markers expire after
//! the dedup window. A marker that records no effect proves that the message was not handled. An
//! absent marker proves that only within the window.

use std::time::Duration;

use clap::Args;
use oncegate::Guarantee;
use oncegate::marker::Fingerprint;
use oncegate::marker::{Effect, Marker};
use oncegate::source::headers;

use super::{CopyAge, DeadLetter, DeadLetterState};
use crate::CliContext;
use crate::config;
use crate::error::CliError;
use crate::marker::change::ObservedMarker;
use crate::marker::description::MarkerState;
use crate::output::{ms, now_ms};

/// The header of a message whose body was omitted because it exceeds the record limit of the
/// broker: the size of the body in bytes.
const BODY_OMITTED: &str = "oncegate-body-omitted";

/// Risks that the operator accepts.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct AcceptedRisks {
    /// Send messages that may have been handled before: without a marker, and older than the
    /// window, so that the marker may have expired. With --id also a conflict, whose id was used
    /// for another body
    #[arg(long)]
    accept_forgotten: bool,
    /// Send messages again that an interrupted command may have sent
    #[arg(long)]
    accept_unfinished: bool,
    /// Send messages that lost headers when they were dead-lettered
    #[arg(long)]
    accept_lost_headers: bool,
}

/// Reasons that a consumer assigns after the store has answered a claim of the id. The answer
/// proves that the id was not recorded as handled before the message was put into its destination.
const NOT_DONE_WHEN_DEAD_LETTERED: [&str; 9] = [
    "no-route",
    "refused",
    "attempts-spent",
    "crashes-spent",
    "rejected-before",
    "in-doubt-handler-reported",
    "in-doubt-panicked",
    "in-doubt-timed-out",
    "in-doubt-interrupted",
];

/// The error that skips one message.
fn skip<T>(why: impl std::fmt::Display) -> Result<T, CliError> {
    Err(CliError::incomplete(format!("skipped: {why}")))
}

/// Checks that the message comes from the configured source.
///
/// # Errors
/// It was consumed from another topic or queue.
pub(crate) fn check_source(message: &DeadLetter, target: &str) -> Result<(), CliError> {
    match &message.other_source {
        None => Ok(()),
        Some(from) => skip(format!(
            "it was consumed from {from}, and {target} is configured here"
        )),
    }
}

/// Checks that a copy would equal the original.
///
/// # Errors
/// The copy would lack its body or headers.
pub(crate) fn check_complete(
    message: &DeadLetter,
    accepted: AcceptedRisks,
) -> Result<(), CliError> {
    check_body(message)?;
    match &message.lost_headers {
        Some(what) if !accepted.accept_lost_headers => skip(format!(
            "{what}, so a copy would lack them; --accept-lost-headers sends it without them"
        )),
        _ => Ok(()),
    }
}

/// Checks that no marker can block a copy. For commands without a configured store, which cannot
/// clear a marker.
///
/// # Errors
/// A marker may block a copy.
pub(crate) fn check_without_store(message: &DeadLetter) -> Result<(), CliError> {
    let may_have_marker = NOT_DONE_WHEN_DEAD_LETTERED.contains(&message.reason())
        || matches!(message.reason(), "unreadable" | "conflict");
    if message.id().is_some() && may_have_marker {
        return skip(
            "the marker of its id may block a copy, and no store is configured in which to clear it; set store.url",
        );
    }
    Ok(())
}

/// Checks that the body is present.
///
/// # Errors
/// The body was omitted. The error names the partition and offset, or queue, of the original.
fn check_body(message: &DeadLetter) -> Result<(), CliError> {
    match message.header(BODY_OMITTED) {
        None => Ok(()),
        Some(bytes) => Err(CliError::incomplete(format!(
            "skipped: its body of {bytes} bytes was too large for this destination; the only complete message is {}",
            message
                .header(headers::ORIGIN)
                .unwrap_or("at an unknown position")
        ))),
    }
}

/// Whether the id of a message is its topic, partition and offset. A copy then has another id.
fn id_is_position(message: &DeadLetter, context: &CliContext) -> bool {
    let by_config = context
        .config
        .id_source()
        .is_ok_and(|id| id.is_some_and(|id| id.reads_position()));
    by_config || (message.id().is_some() && message.id() == message.header(headers::ORIGIN))
}

/// Milliseconds since the earliest time at which the id of a message may have been handled; `None`
/// if that time is unknown.
fn ms_since_possibly_handled(message: &DeadLetter) -> Option<u64> {
    let sent_ms = message.sent_or_rejected_ms();
    let since = if NOT_DONE_WHEN_DEAD_LETTERED.contains(&message.reason()) {
        message.rejected_at_ms.or(sent_ms)
    } else {
        sent_ms
    };
    since.map(|since| now_ms().saturating_sub(since))
}

/// Whether the marker of the message's id may have expired; true if the age is unknown.
pub(crate) fn marker_may_have_expired(message: &DeadLetter, window: Duration) -> bool {
    ms_since_possibly_handled(message).is_none_or(|age| age >= ms(window))
}

/// The age of a copy, and the change of its marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyPlan {
    pub(crate) age: CopyAge,
    /// What the cleared marker records about the effect of earlier attempts.
    pub(crate) effect: Effect,
}

const NEW_COPY: CopyPlan = CopyPlan {
    age: CopyAge::New,
    effect: Effect::Nothing,
};

/// Whether the marker has the fingerprint of another body. Always false for a message with the
/// header `oncegate-id`. A message without it, such as one that a broker dead-lettered, has the id
/// that its producer wrote: without this check the producer could clear the marker of another
/// message.
fn has_other_body(message: &DeadLetter, marker: &Marker) -> bool {
    let fingerprint = match marker {
        Marker::Rejected { fingerprint, .. } => *fingerprint,
        Marker::InProgress(hold) => hold.fingerprint,
        _ => None,
    };
    message.header(headers::ID).is_none()
        && fingerprint.is_some_and(|it| it != Fingerprint::of(message.bytes()))
}

/// Plans the copy of a message from its marker; `seen` is `None` without a store or an id.
///
/// # Errors
/// No copy may be sent; the text has the reason. The message stays in its destination.
pub(crate) fn plan_copy(
    message: &DeadLetter,
    seen: Option<&ObservedMarker<'_>>,
    selected_by_id: bool,
    accepted: AcceptedRisks,
    context: &CliContext,
) -> Result<CopyPlan, CliError> {
    let state = seen.map_or(MarkerState::Absent, ObservedMarker::state);
    if let Some(observed) = seen.filter(|_| !selected_by_id)
        && has_other_body(message, &observed.stored.marker)
    {
        return skip("its id was used for another body; select it with --id to send it anyway");
    }
    plan_for_state(message, state, selected_by_id, accepted, context)
}

/// Plans the copy of a message from the state of its marker; `Absent` also if the marker was not
/// read.
pub(crate) fn plan_for_state(
    message: &DeadLetter,
    state: MarkerState,
    selected_by_id: bool,
    accepted: AcceptedRisks,
    context: &CliContext,
) -> Result<CopyPlan, CliError> {
    if id_is_position(message, context) && !accepted.accept_forgotten {
        return skip(
            "its id is its position, so a copy gets another id and may be handled twice; --accept-forgotten sends it",
        );
    }
    let is_conflict = message.reason() == "conflict";
    match state {
        MarkerState::Done if is_conflict => {
            skip("its id was handled with another body; give it an id of its own, or drop it")
        }
        MarkerState::Done => {
            skip("its id was handled meanwhile, so a copy would be a duplicate; drop it")
        }
        MarkerState::Rejected if is_conflict => skip(
            "its id belongs to a message with another body, which was rejected; process that one first",
        ),
        MarkerState::Lapsed if is_conflict => skip(
            "its id belongs to a message with another body, whose lease expired; process that one first",
        ),
        MarkerState::InDoubt => skip("its id is in doubt; run `oncegate in-doubt resolve` first"),
        MarkerState::InProgress => skip("its id is being handled right now; try again later"),
        MarkerState::Unreadable => skip("its marker cannot be read"),
        MarkerState::Absent if is_conflict && !(selected_by_id && accepted.accept_forgotten) => {
            skip(
                "its id was used for another body, whose marker is absent: whether that was handled is unknown. Check its effect; give this message \
                 another id, or drop it. --id with --accept-forgotten runs it under this id",
            )
        }
        MarkerState::Cleared if is_conflict && !selected_by_id => skip(
            "its id was used for another body, which may have been handled; select it with --id to send it anyway",
        ),
        MarkerState::Rejected => Ok(NEW_COPY),
        // An unknown effect stays unknown, so that a consumer with `AtMostOnce` finds the id in doubt and
        // reconciles it.
        MarkerState::Cleared | MarkerState::Lapsed => Ok(CopyPlan {
            age: CopyAge::New,
            effect: Effect::Unknown,
        }),
        MarkerState::Absent => plan_without_marker(message, accepted, context),
    }
}

/// A clause for a message whose rejection a consumer with at most once recorded in a marker that is
/// absent, although it has not expired; otherwise empty. The marker may exist under another key.
pub(crate) fn missing_marker_warning(
    message: &DeadLetter,
    state: Option<MarkerState>,
    context: &CliContext,
) -> &'static str {
    let config = &context.config;
    let is_missing = state == Some(MarkerState::Absent)
        && matches!(message.reason(), "refused" | "rejected-before")
        && config.guarantee() == Guarantee::AtMostOnce
        && !marker_may_have_expired(message, config.dedup_window());
    if is_missing {
        "; warning: the consumer recorded its rejection, and no such marker exists: store.scope or store.prefix differ from those of the consumer, \
         which then rejects the copy again as `rejected-before`, or the store lost data, or an operator cleared the marker"
    } else {
        ""
    }
}

/// Plans the copy of a message whose id has no marker.
fn plan_without_marker(
    message: &DeadLetter,
    accepted: AcceptedRisks,
    context: &CliContext,
) -> Result<CopyPlan, CliError> {
    if message.state == DeadLetterState::Begun && !accepted.accept_unfinished {
        return skip(
            "an interrupted command may have sent it; see `oncegate audit`. --accept-unfinished sends it again, `drop` drops it",
        );
    }
    // Without a valid id the message cannot have been handled.
    if accepted.accept_forgotten
        || matches!(message.reason(), "missing-id" | "unusable-id")
        || !marker_may_have_expired(message, context.config.dedup_window())
    {
        return Ok(NEW_COPY);
    }
    match context.config.guarantee() {
        // The consumer finds the copy older than the window and reconciles it.
        Guarantee::AtMostOnce => Ok(CopyPlan {
            age: CopyAge::FirstSeen(message.sent_or_rejected_ms().unwrap_or(0)),
            effect: Effect::Unknown,
        }),
        _ => skip(format!(
            "its id has no marker, and it may have been handled longer ago than the window of {}; find out, then drop it or pass --accept-forgotten",
            config::window_description(&context.config)
        )),
    }
}
