//! Derives the verdict of `oncegate explain` from the [`Evidence`].

use oncegate::Guarantee;
use oncegate::source::headers;
use serde::Serialize;

use super::Evidence;
use crate::audit::{ActionStage, AuditEntry, AuditedAction};
use crate::destination::{DeadLetter, DeadLetterState, Destination, redrive_policy};
use crate::marker::description::MarkerState;
use crate::output::{ms, now_ms};

/// The verdict in JSON output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HandlingVerdict {
    /// Recorded as handled.
    Handled,
    /// Recorded as handled, and the topic has several messages with this id.
    HandledWithDuplicates,
    /// Recorded as handled, and handled before an operator forgot its marker, or by a consumer in
    /// shadow mode, which blocks no duplicate.
    HandledPerhapsAgain,
    /// Claimed; `Guarantee::Bare` does not record whether it was handled.
    Claimed,
    /// A consumer is handling it.
    InProgress,
    /// The lease of its last claim expired, and no delivery has claimed it since.
    Abandoned,
    /// Whether its effect happened is unknown.
    InDoubt,
    /// It was not handled, and its message is or was in the dead letters.
    DeadLettered,
    /// Its message is in the dead letters, and an attempt may have had an effect.
    EffectUnknown,
    /// Like [`Self::EffectUnknown`], but if the consumer has an inbox, it rolled back each attempt.
    #[serde(rename = "effect-unknown")]
    EffectUnknownWithoutInbox,
    /// The id has only a dead letter with the reason `conflict`, whose body differs from that of
    /// the first message with the id, and the marker of that message is absent.
    Conflict,
    /// It is not recorded as handled, and an operator dropped its message.
    Dropped,
    /// An operator sent its message back to the consumer, and it was not handled since.
    SentBack,
    /// An attempt failed or may have had its effect, and it will run again if the broker still has
    /// its message.
    WillRunAgain,
    /// The topic has messages with this id, and nothing else is known.
    NotRecorded,
    /// Nothing about the id was found.
    Unknown,
    /// Nothing about the id was found, and not everything was checked.
    Unchecked,
    /// The value of its key in the store is not a marker.
    UnreadableMarker,
    /// The store could not be read.
    StoreUnreadable,
}

impl HandlingVerdict {
    /// Whether nothing about the id was found.
    pub(crate) fn is_unknown(self) -> bool {
        matches!(self, Self::Unknown | Self::Unchecked)
    }

    /// The verdict as the first line of the text output.
    pub(crate) fn label(self, guarantee: Guarantee) -> &'static str {
        match (self, guarantee) {
            (Self::Handled, Guarantee::AtMostOnce) => return "handled, once",
            (Self::HandledWithDuplicates, Guarantee::AtMostOnce) => {
                return "handled once; there were duplicates";
            }
            _ => {}
        }
        match self {
            // Not "once": an interrupted attempt may have had an effect, too.
            Self::Handled => "handled",
            Self::HandledWithDuplicates => "handled; there were duplicates",
            Self::HandledPerhapsAgain => "handled, perhaps more than once",
            Self::Claimed => "claimed; whether it was handled is not recorded",
            Self::InProgress => "being handled",
            Self::Abandoned => "abandoned by its holder",
            Self::InDoubt => "in doubt",
            Self::DeadLettered => "not handled; in the dead letters",
            Self::EffectUnknown => "not recorded as handled, effect unknown; in the dead letters",
            Self::EffectUnknownWithoutInbox => {
                "not recorded as handled, effect unknown (with an inbox: rolled back); in the dead letters"
            }
            Self::Conflict => "unknown; another body with this id is in the dead letters",
            Self::Dropped => "not recorded as handled; dropped by an operator",
            Self::SentBack => "sent back by an operator; not handled yet",
            Self::WillRunAgain => {
                "not recorded as handled; will run again if its message is in the broker"
            }
            Self::NotRecorded => "not recorded as handled; the topic has messages with this id",
            Self::Unknown => "unknown",
            Self::Unchecked => "unknown; not everything was checked",
            Self::UnreadableMarker => "unknown; the value of its key is not a marker",
            Self::StoreUnreadable => "unknown; the store could not be read",
        }
    }
}

/// The verdict and its explanation.
pub(crate) fn of(evidence: &Evidence) -> (HandlingVerdict, String) {
    let Some(marker) = &evidence.marker else {
        let text = "The store could not be read, and only the store records which ids were handled. Dead letters, messages in doubt and audited actions are listed below.";
        return (HandlingVerdict::StoreUnreadable, text.into());
    };
    // A pending message that this consumer dead-lettered: one from another source belongs to
    // another consumer.
    let pending = |messages: &[DeadLetter], with: &dyn Fn(&DeadLetter) -> bool| {
        messages
            .iter()
            .find(|it| it.state.is_pending() && it.other_source.is_none() && with(it))
            .cloned()
    };
    // A message with the reason `conflict` has the id of another message, and proves nothing about
    // that one.
    let (conflict, own, doubt) = (
        pending(&evidence.dead_letters, &is_conflict),
        pending(&evidence.dead_letters, &|it| !is_conflict(it)),
        pending(&evidence.in_doubt, &|_| true),
    );
    let dead = pending(&evidence.dead_letters, &|_| true);
    let (verdict, mut text) = match marker.state {
        MarkerState::Done if evidence.guarantee == Guarantee::Bare && completed_by_operator(evidence).is_none() => (
            HandlingVerdict::Claimed,
            "A consumer with Guarantee::Bare claimed it, and the marker remains: the handler succeeded, still runs, or its process ended \
             meanwhile, in which case the message is lost. Further messages with this id are skipped until the marker expires."
                .into(),
        ),
        MarkerState::Done => handled(evidence, dead.as_ref(), doubt.as_ref()),
        MarkerState::InProgress => (
            HandlingVerdict::InProgress,
            "A consumer is handling it right now. Other messages with this id wait until it has finished."
                .into(),
        ),
        MarkerState::Lapsed => (HandlingVerdict::Abandoned, lapsed(&marker.text, own.as_ref())),
        MarkerState::InDoubt => (HandlingVerdict::InDoubt, in_doubt(evidence, doubt.as_ref(), marker.state)),
        MarkerState::Unreadable => (
            HandlingVerdict::UnreadableMarker,
            match doubt.as_ref().or(dead.as_ref()) {
                Some(message) => format!("{} A message with this id is in {}.", marker.text, message.location),
                None => marker.text.clone(),
            },
        ),
        MarkerState::Rejected | MarkerState::Absent | MarkerState::Cleared => match (own, doubt, &conflict) {
            (Some(message), ..) => dead_lettered(evidence, &message, marker.state),
            (None, Some(message), _) => (HandlingVerdict::InDoubt, in_doubt(evidence, Some(&message), marker.state)),
            (None, None, Some(_)) if marker.state == MarkerState::Absent => (HandlingVerdict::Conflict, first_use_unknown(evidence)),
            (None, None, _) => without_messages(evidence, marker.state),
        },
    };
    let elsewhere = evidence.dead_letters.iter().chain(&evidence.in_doubt);
    if let Some((message, source)) = elsewhere
        .filter(|it| it.state.is_pending())
        .find_map(|it| Some((it, it.other_source.as_ref()?)))
    {
        text.push_str(&format!(
            " A message with this id in {} was consumed from {source}, which is not configured here, so this verdict does not cover it.",
            message.location
        ));
    }
    if let Some(conflict) = conflict.filter(|_| marker.state != MarkerState::Done) {
        text.push_str(&other_body(&conflict));
    }
    if evidence
        .actions
        .iter()
        .any(|entry| entry.stage == ActionStage::Begun)
    {
        text.push_str(
            " The result of an operator action is unknown: see below, and repeat it if necessary.",
        );
    }
    (verdict, text)
}

/// The tolerated difference between the clocks of this machine and the store, in milliseconds.
const CLOCK_SKEW_MS: u64 = 60_000;

/// The last completed operator action that affects the next delivery.
fn last_action(evidence: &Evidence) -> Option<(&AuditEntry, AuditedAction)> {
    let mut done = evidence
        .actions
        .iter()
        .filter(|entry| entry.stage == ActionStage::Done)
        .map(|entry| (entry, entry.action()));
    done.rfind(|(_, action)| *action != AuditedAction::Other)
}

/// Whether no claim was granted since an operator cleared the marker, which resets the number of
/// counted attempts to 0.
fn nothing_ran_since(evidence: &Evidence) -> bool {
    evidence
        .marker
        .as_ref()
        .is_some_and(|marker| marker.state == MarkerState::Cleared && marker.attempts == Some(0))
}

/// Whether an action is older than the dedup window, so that a marker that was written after it may
/// have expired.
fn is_older_than_window(entry: &AuditEntry, evidence: &Evidence) -> bool {
    now_ms().saturating_sub(entry.at_ms) >= ms(evidence.window)
}

/// The operator action that recorded the id as done, unless a consumer wrote the marker later.
fn completed_by_operator(evidence: &Evidence) -> Option<&AuditEntry> {
    let written = evidence
        .marker
        .as_ref()
        .and_then(|marker| marker.written_at_ms);
    let (entry, action) = last_action(evidence)?;
    (action == AuditedAction::Completed
        && written.is_none_or(|written| written <= entry.at_ms.saturating_add(CLOCK_SKEW_MS)))
    .then_some(entry)
}

/// The number of messages with the id in the topic, without those whose copy is in a destination;
/// `None` if the topic was not read.
fn copies_outside_destinations(evidence: &Evidence) -> Option<usize> {
    let in_destinations: Vec<&str> = evidence
        .dead_letters
        .iter()
        .chain(&evidence.in_doubt)
        .filter_map(|message| message.header(headers::ORIGIN))
        .collect();
    let copies = evidence.copies.as_ref()?.iter();
    // A copy is printed as broker and location; an origin has no broker.
    Some(
        copies
            .filter(|copy| {
                !in_destinations.iter().any(|origin| {
                    copy.split_once(' ')
                        .is_some_and(|(_, location)| location == *origin)
                })
            })
            .count(),
    )
}

/// The verdict and explanation of a done marker.
fn handled(
    evidence: &Evidence,
    dead: Option<&DeadLetter>,
    doubt: Option<&DeadLetter>,
) -> (HandlingVerdict, String) {
    let copies = copies_outside_destinations(evidence).unwrap_or(0);
    let mut text = match completed_by_operator(evidence) {
        Some(entry) => format!(
            "It counts as handled: {} recorded that on {} (`{}`).",
            entry.who, entry.at, entry.what
        ),
        None => "It was handled and recorded.".to_owned(),
    };
    if evidence.guarantee != Guarantee::AtMostOnce {
        text.push_str(
            " Before that it may have run more than once, if a run was interrupted: this consumer does not guarantee at most once",
        );
        text.push_str(match evidence.may_have_inbox {
            true => ", unless it has an inbox, which rolled back each interrupted run.",
            false => ".",
        });
    }
    let forgotten = evidence.actions.iter().rfind(|entry| {
        entry.stage == ActionStage::Done
            && entry.action() == AuditedAction::Forgotten
            && entry.before.starts_with("done")
    });
    if let Some(entry) = forgotten {
        text.push_str(&format!(
            " It may have been handled before, too: {} forgot its done marker on {}.",
            entry.who, entry.at
        ));
    }
    text.push_str(if evidence.is_shadow {
        " With gate.mode = \"shadow\" the handler is called for every further message with this id."
    } else {
        " Every further message with this id is accepted without calling the handler, until the marker expires."
    });
    match (copies, dead.map(DeadLetter::reason)) {
        (2.., _) => text.push_str(&format!(" The topic has {copies} messages with this id outside the destinations: one was handled, the others are duplicates.")),
        (_, Some("conflict")) => {}
        _ if evidence.copies.is_none() => text.push_str(" A duplicate is not recorded in the store; the counter `oncegate_deliveries_total{outcome=\"duplicate\"}` counts duplicates."),
        _ => {}
    }
    match dead {
        Some(message) if message.reason() == "conflict" => {
            text.push_str(" Another message had the same id and ANOTHER BODY. It was not handled and is dead-lettered: its producer used the id twice.");
        }
        Some(_) => text.push_str(
            " A dead letter with this id remains although the id was handled: `oncegate dead-letters drop` drops it.",
        ),
        None => {}
    }
    if doubt.is_some() {
        text.push_str(" Its message in doubt is therefore resolved: `oncegate in-doubt resolve --happened` removes it.");
    }
    (
        if forgotten.is_some() || evidence.is_shadow {
            HandlingVerdict::HandledPerhapsAgain
        } else if copies > 1 {
            HandlingVerdict::HandledWithDuplicates
        } else {
            HandlingVerdict::Handled
        },
        text,
    )
}

/// The explanation of an id in doubt, with its message if one was found.
fn in_doubt(evidence: &Evidence, message: Option<&DeadLetter>, state: MarkerState) -> String {
    let why = message.map(|message| match message.errors() {
        Some(errors) => format!("{} ({errors})", message.reason_text()),
        None => message.reason_text().to_owned(),
    });
    match (message, why) {
        (Some(message), Some(why)) => format!(
            "Its effect is unknown: {why}. {} The message waits in {} for an operator to find out and run `oncegate in-doubt resolve`.",
            what_blocks_a_message_in_doubt(evidence, message, state),
            message.location
        ),
        _ if evidence.incomplete.contains(&Destination::InDoubt) => {
            "Its effect is unknown. It does not run again without a decision; whether the in-doubt destination has a message is unknown."
                .into()
        }
        _ => "Its effect is unknown. It does not run again without a decision; the in-doubt destination shows no message (on RabbitMQ \
              another reader may have received it), so a delivery may still reconcile it, or an operator runs `oncegate in-doubt resolve`."
            .into(),
    }
}

/// The sentence that says whether another message with the id of a message in doubt would run. Only
/// a marker prevents that.
fn what_blocks_a_message_in_doubt(
    evidence: &Evidence,
    message: &DeadLetter,
    state: MarkerState,
) -> String {
    match state {
        MarkerState::Absent
            if redrive_policy::marker_may_have_expired(message, evidence.window) =>
        {
            format!(
                "That was longer ago than the window of {}, and the store has no marker for it: another message with this id would run, and \
                 whether one was handled before or since is unknown.",
                evidence.window_description
            )
        }
        MarkerState::Absent => {
            "The store has no marker for it: another message with this id would run.".into()
        }
        MarkerState::Cleared => {
            "Its marker is cleared: another message with this id would run.".into()
        }
        _ => "It does not run again without a decision.".into(),
    }
}

fn is_conflict(message: &DeadLetter) -> bool {
    message.reason() == "conflict"
}

/// The explanation if the marker is absent and the only message is a conflict. The marker existed
/// when the conflicting message was received, so the id was used before.
fn first_use_unknown(evidence: &Evidence) -> String {
    format!(
        "Whether it was handled is unknown: the id was used by a message whose marker is absent (markers expire after the window of {}).",
        evidence.window_description
    )
}

/// The sentences about a message with the reason `conflict`.
fn other_body(conflict: &DeadLetter) -> String {
    format!(
        " Another message had the same id and ANOTHER BODY: it was not handled and is in {}. Its producer used the id twice. Send it again with \
         an id of its own, or drop it; `oncegate dead-letters redrive` would run it under this id, and reports what is needed.",
        conflict.location
    )
}

/// The explanation of a marker whose lease expired.
fn lapsed(marker: &str, dead: Option<&DeadLetter>) -> String {
    match dead {
        None => marker.to_owned(),
        // The broker may have dead-lettered it after repeated crashes.
        Some(message) => format!(
            "{marker} If no delivery is left, its message is in {}: `oncegate dead-letters redrive` sends it back to the consumer, which \
             continues from this marker.",
            message.location
        ),
    }
}

/// Whether an attempt of a dead letter may have had an effect. Always false in at most once, where
/// such a message is in doubt and not dead-lettered.
fn may_have_effect(evidence: &Evidence, message: &DeadLetter) -> bool {
    let crashes = message
        .header(headers::CRASHES)
        .is_some_and(|count| count != "0");
    let by_marker = evidence.marker.as_ref().map(|it| it.may_have_effect);
    evidence.guarantee != Guarantee::AtMostOnce
        && (crashes
            || message.reason() == "crashes-spent"
            || by_marker == Some(true)
            // The markers of `Bare` do not record effects.
            || evidence.guarantee == Guarantee::Bare && message.reason() == "attempts-spent"
            || evidence.has_no_marker() && may_have_unrecorded_effect(evidence, message))
}

/// Whether the consumer may have an inbox, which then rolled back each attempt of a dead letter. An
/// inbox writes no markers of attempts; the record of a commit may have expired.
fn inbox_may_have_rolled_back(evidence: &Evidence, message: &DeadLetter) -> bool {
    evidence.may_have_inbox
        && evidence.has_no_marker()
        && !redrive_policy::marker_may_have_expired(message, evidence.window)
}

/// Whether the last attempt of a dead letter had the number 1: a failure without an effect leaves
/// no marker, so the attempt after it has the number 1 again. The attempts of `Bare` and of a
/// shadow always have it.
fn restarted_at_one(evidence: &Evidence, message: &DeadLetter) -> bool {
    evidence.guarantee == Guarantee::EffectivelyOnce
        && !evidence.is_shadow
        && !evidence.passes_through
        && evidence.has_no_marker()
        && message.header(headers::LAST_ATTEMPT) == Some("1")
        // Otherwise the marker of an attempt with an effect may have expired.
        && match (message.first_seen_ms(), message.rejected_at_ms) {
            (Some(seen), Some(rejected)) => rejected.saturating_sub(seen) < ms(evidence.window),
            _ => false,
        }
}

/// Whether an attempt of a dead letter without a marker may have had an effect: the marker expired,
/// was lost, or was never written, because the store was unavailable.
fn may_have_unrecorded_effect(evidence: &Evidence, message: &DeadLetter) -> bool {
    let is_first = message.header(headers::ATTEMPTS) == Some("1");
    match message.reason() {
        // A first attempt that the handler refused had no effect, and leaves no marker.
        "refused" => !is_first,
        // An attempt that failed leaves no marker if it had no effect, and the next one has the
        // number 1 again; otherwise the marker may have expired.
        "attempts-spent" => {
            !is_first && !restarted_at_one(evidence, message)
                || redrive_policy::marker_may_have_expired(message, evidence.window)
        }
        // Such a message does not record how often the handler ran.
        "dead-lettered-by-broker" => {
            redrive_policy::marker_may_have_expired(message, evidence.window)
        }
        _ => false,
    }
}

/// The verdict and explanation of an id with a dead letter that is not a conflict.
fn dead_lettered(
    evidence: &Evidence,
    message: &DeadLetter,
    state: MarkerState,
) -> (HandlingVerdict, String) {
    let why = message.reason_text();
    let error = message
        .errors()
        .map(|errors| format!(" The error: {errors}."))
        .unwrap_or_default();
    let may_have_effect = may_have_effect(evidence, message);
    let (verdict, outcome) = if may_have_effect && inbox_may_have_rolled_back(evidence, message) {
        (
            HandlingVerdict::EffectUnknownWithoutInbox,
            "No attempt is recorded as handled. If the consumer has an inbox, it rolled back the transaction of each attempt, unless the error \
             says that the handler ended it; otherwise one may have had its effect",
        )
    } else if may_have_effect {
        (
            HandlingVerdict::EffectUnknown,
            "No attempt is recorded as handled, and one may have had its effect",
        )
    } else if message.reason() == "attempts-spent" && restarted_at_one(evidence, message) {
        (
            HandlingVerdict::DeadLettered,
            "It was not handled: each attempt was numbered 1, so all failed without an effect, unless a marker expired or was lost between them",
        )
    } else {
        (HandlingVerdict::DeadLettered, "It was not handled")
    };
    let location = format!("{outcome}: {why}.{error} It is in {}.", message.location);
    if state == MarkerState::Rejected {
        let text = format!(
            "{location} A message with this id does not run until it is redriven; `oncegate dead-letters redrive` sends it back."
        );
        return (verdict, text);
    }
    let mut text = location;
    if message.state == DeadLetterState::Begun {
        text.push_str(" An interrupted command may have sent a copy of it back.");
    }
    if state == MarkerState::Absent
        && redrive_policy::marker_may_have_expired(message, evidence.window)
    {
        text.push_str(&format!(
            " That was longer ago than the window of {}: whether another message with its id was handled before or since is unknown. \
             Check its effect; `oncegate dead-letters redrive` reports what is needed to send it.",
            evidence.window_description
        ));
    } else {
        text.push_str(" Another message with this id would run; `oncegate dead-letters redrive` sends it back.");
    }
    (verdict, text)
}

/// The verdict and explanation of an id without a message in the destinations.
fn without_messages(evidence: &Evidence, state: MarkerState) -> (HandlingVerdict, String) {
    let last = last_action(evidence);
    // Whether it is known that nothing was handled after the action: the marker is present, or the
    // action is within the window, so that a later marker would not have expired.
    let is_known =
        |entry: &AuditEntry| state != MarkerState::Absent || !is_older_than_window(entry, evidence);
    let expired = || {
        format!(
            " Whether a message with this id was handled since is unknown: that is longer ago than the window of {}, and a marker would have expired. \
             Check the effect before sending it again.",
            evidence.window_description
        )
    };
    match (last, state) {
        (Some((entry, AuditedAction::Dropped)), _) if is_known(entry) => {
            return (
                HandlingVerdict::Dropped,
                format!(
                    "It is not recorded as handled. {} dropped it from the dead letters on {}.",
                    entry.who, entry.at
                ),
            );
        }
        (Some((entry, AuditedAction::Dropped)), _) => {
            return (
                HandlingVerdict::Unknown,
                format!(
                    "{} dropped it from the dead letters on {}.{}",
                    entry.who,
                    entry.at,
                    expired()
                ),
            );
        }
        (Some((entry, AuditedAction::SentBack)), MarkerState::Absent | MarkerState::Cleared) => {
            let sent = format!("{} sent it back on {}", entry.who, entry.at);
            let may_have_effect = evidence
                .marker
                .as_ref()
                .is_some_and(|marker| marker.may_have_effect);
            return match is_known(entry) {
                true if may_have_effect => (
                    HandlingVerdict::WillRunAgain,
                    format!(
                        "{sent}. It is not recorded as handled since, and an attempt may have had its effect. It will run again if its message \
                         is still in the broker."
                    ),
                ),
                true => (
                    HandlingVerdict::SentBack,
                    format!("{sent}; it was not handled since."),
                ),
                false => (HandlingVerdict::Unknown, format!("{sent}.{}", expired())),
            };
        }
        (Some((entry, AuditedAction::MarkerCleared)), MarkerState::Cleared)
            if nothing_ran_since(evidence) =>
        {
            let text = format!(
                "{} cleared its marker on {}, and the audit records no copy that was sent since. Nothing ran since. Whether the broker still has \
                 its message is unknown: RabbitMQ does not show a message that another reader has received.",
                entry.who, entry.at
            );
            return (HandlingVerdict::Unknown, text);
        }
        (Some((entry, AuditedAction::Forgotten)), MarkerState::Cleared)
            if nothing_ran_since(evidence) =>
        {
            let text = format!(
                "{} forgot it on {}; before, it was {}. Nothing ran since; the next message with this id is handled.",
                entry.who, entry.at, entry.before
            );
            return (HandlingVerdict::Unknown, text);
        }
        (Some((entry, AuditedAction::Completed)), MarkerState::Absent) => {
            return (
                HandlingVerdict::Unknown,
                format!(
                    "{} recorded it as done on {}.{}",
                    entry.who,
                    entry.at,
                    expired()
                ),
            );
        }
        _ => {}
    }
    match state {
        MarkerState::Rejected if evidence.is_incomplete() => {
            (HandlingVerdict::DeadLettered, "It was not handled: it was rejected. Where its message is now is unknown.".into())
        }
        MarkerState::Cleared if evidence.is_incomplete() => (
            HandlingVerdict::Unchecked,
            "Attempts failed, and none is recorded as handled. Whether the message is still in the broker or in a destination is unknown.".into(),
        ),
        MarkerState::Rejected => (
            HandlingVerdict::DeadLettered,
            "It was not handled: it was rejected. The configured dead letters do not show its message: it was removed \
             without this tool, has not arrived yet, or on RabbitMQ another reader has received it."
                .into(),
        ),
        MarkerState::Cleared => (
            HandlingVerdict::WillRunAgain,
            "Attempts failed, and none is recorded as handled. The message will run again if it is still in the broker. The configured dead \
             letters do not show it: if it was dead-lettered, it was removed without this tool, or on RabbitMQ another reader has received it."
                .into(),
        ),
        _ => {
            let forgotten = last
                .filter(|(_, action)| *action == AuditedAction::Forgotten)
                .map(|(entry, _)| format!("{} forgot it on {}; before, it was {}. ", entry.who, entry.at, entry.before))
                .unwrap_or_default();
            let conflict = evidence.actions.iter().find(|it| it.dropped_a_conflict());
            if let Some(entry) = conflict.filter(|_| forgotten.is_empty()) {
                let text = format!(
                    "{} {} dropped a message with this id and another body on {}.",
                    first_use_unknown(evidence),
                    entry.who,
                    entry.at
                );
                return (HandlingVerdict::Unknown, text);
            }
            let copies = copies_outside_destinations(evidence).unwrap_or(0);
            if copies > 0 {
                let text = format!(
                    "{forgotten}The topic has {copies} messages with this id, and the store has no marker for it: no consumer has claimed them \
                     yet, or a first attempt failed without an effect, or they were handled longer ago than the window of {}. Check also \
                     that the scope and the prefix are those of the consumer.",
                    evidence.window_description
                );
                return (HandlingVerdict::NotRecorded, text);
            }
            if evidence.is_incomplete() {
                let text = format!("{forgotten}The store has no marker for this id; its message may be in a destination, or an operator may have dropped it.");
                return (HandlingVerdict::Unchecked, text);
            }
            let text = format!(
                "{forgotten}Nothing is known about this id: no message with it was ever claimed, or it waits for a retry because its attempts \
                 failed without an effect (the consumer's log names them), or its dead letter was removed without this tool or received by another \
                 reader, or it was handled longer ago than the window, or the store has lost its markers. Check also that \
                 the scope and the prefix are those of the consumer."
            );
            (HandlingVerdict::Unknown, text)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::marker::description::MarkerDescription;

    /// The evidence of a marker in this state and of one message, with reason and crashes.
    fn evidence(
        state: MarkerState,
        destination: Destination,
        headers: &[(&str, &str)],
    ) -> Evidence {
        let mut marker = MarkerDescription::unreadable("a", String::new());
        marker.state = state;
        let (mut dead_letters, mut in_doubt) = (Vec::new(), Vec::new());
        match destination {
            Destination::DeadLetters => dead_letters.push(DeadLetter::with_headers(headers)),
            Destination::InDoubt => in_doubt.push(DeadLetter::with_headers(headers)),
        }
        Evidence {
            marker: Some(marker),
            dead_letters,
            in_doubt,
            copies: None,
            incomplete: Vec::new(),
            actions: Vec::new(),
            has_audit: true,
            guarantee: Guarantee::EffectivelyOnce,
            window: Duration::from_secs(86_400),
            window_description: "1 d".into(),
            is_shadow: false,
            passes_through: false,
            may_have_inbox: false,
        }
    }

    #[test]
    fn a_dead_letter_is_not_handled_only_if_no_attempt_may_have_had_an_effect() {
        use Guarantee::{AtMostOnce, Bare, EffectivelyOnce};
        for (reason, crashes, by_marker, guarantee, verdict) in [
            (
                "refused",
                "0",
                false,
                EffectivelyOnce,
                HandlingVerdict::DeadLettered,
            ),
            (
                "attempts-spent",
                "0",
                false,
                EffectivelyOnce,
                HandlingVerdict::DeadLettered,
            ),
            (
                "attempts-spent",
                "0",
                true,
                EffectivelyOnce,
                HandlingVerdict::EffectUnknown,
            ),
            (
                "refused",
                "1",
                false,
                EffectivelyOnce,
                HandlingVerdict::EffectUnknown,
            ),
            (
                "crashes-spent",
                "0",
                false,
                EffectivelyOnce,
                HandlingVerdict::EffectUnknown,
            ),
            (
                "attempts-spent",
                "0",
                false,
                Bare,
                HandlingVerdict::EffectUnknown,
            ),
            (
                "attempts-spent",
                "1",
                false,
                AtMostOnce,
                HandlingVerdict::DeadLettered,
            ),
        ] {
            let headers = [(headers::REASON, reason), (headers::CRASHES, crashes)];
            let mut evidence = evidence(MarkerState::Cleared, Destination::DeadLetters, &headers);
            evidence.guarantee = guarantee;
            if let Some(marker) = &mut evidence.marker {
                marker.may_have_effect = by_marker;
            }
            let (found, text) = of(&evidence);
            assert_eq!(found, verdict, "{reason}, {crashes} crashes: {text}");
            let says_not_handled = text.contains("It was not handled");
            assert_eq!(
                says_not_handled,
                verdict == HandlingVerdict::DeadLettered,
                "{text}"
            );
        }
    }

    #[test]
    fn without_a_marker_only_a_first_attempt_that_was_refused_had_no_effect() {
        use HandlingVerdict::{DeadLettered, EffectUnknown, EffectUnknownWithoutInbox};
        let day = Duration::from_secs(86_400);
        for (reason, attempts, window, verdict) in [
            ("refused", "1", day, DeadLettered),
            ("refused", "1", Duration::ZERO, DeadLettered),
            ("refused", "2", day, EffectUnknown),
            ("attempts-spent", "1", day, DeadLettered),
            ("attempts-spent", "1", Duration::ZERO, EffectUnknown),
            ("attempts-spent", "5", day, EffectUnknown),
            ("dead-lettered-by-broker", "", day, DeadLettered),
            ("dead-lettered-by-broker", "", Duration::ZERO, EffectUnknown),
            ("unusable-id", "0", Duration::ZERO, DeadLettered),
        ] {
            let headers = [(headers::REASON, reason), (headers::ATTEMPTS, attempts)];
            let mut evidence = evidence(MarkerState::Absent, Destination::DeadLetters, &headers);
            evidence.window = window;
            let (found, text) = of(&evidence);
            assert_eq!(found, verdict, "{reason}, {attempts} attempts: {text}");
            evidence.may_have_inbox = true;
            let (found, text) = of(&evidence);
            let rolled_back = verdict == EffectUnknown && !window.is_zero();
            assert_eq!(found == EffectUnknownWithoutInbox, rolled_back, "{text}");
            assert_eq!(text.contains("has an inbox"), rolled_back, "{text}");
            let label = found.label(evidence.guarantee);
            assert_eq!(label.contains("rolled back"), rolled_back, "{label}");
            if let Some(marker) = &mut evidence.marker {
                (marker.state, marker.may_have_effect) = (MarkerState::Cleared, true);
            }
            let (_, text) = of(&evidence);
            assert!(
                !text.contains("inbox"),
                "an inbox writes no such marker: {text}"
            );
            evidence.guarantee = Guarantee::AtMostOnce;
            assert_eq!(of(&evidence).0, DeadLettered, "{reason}");
        }
    }

    /// A failure without an effect deletes the marker, so each retry is attempt 1.
    #[test]
    fn attempts_that_restarted_at_one_had_no_effect_unless_a_marker_was_lost() {
        let an_hour_ago = (now_ms() - 3_600_000).to_string();
        let headers = [
            (headers::FIRST_SEEN, an_hour_ago.as_str()),
            (headers::REASON, "attempts-spent"),
            (headers::ATTEMPTS, "20"),
            (headers::LAST_ATTEMPT, "1"),
        ];
        let mut evidence = evidence(MarkerState::Absent, Destination::DeadLetters, &headers);
        let (verdict, text) = of(&evidence);
        assert_eq!(verdict, HandlingVerdict::DeadLettered);
        assert!(
            text.contains("unless a marker expired or was lost"),
            "{text}"
        );
        let window = std::mem::replace(&mut evidence.window, Duration::from_secs(60));
        assert_eq!(of(&evidence).0, HandlingVerdict::EffectUnknown);
        evidence.window = window;
        for change in [
            |evidence: &mut Evidence| evidence.passes_through = true,
            |evidence: &mut Evidence| evidence.is_shadow = true,
            |evidence: &mut Evidence| evidence.guarantee = Guarantee::Bare,
        ] {
            let before = (
                evidence.passes_through,
                evidence.is_shadow,
                evidence.guarantee,
            );
            change(&mut evidence);
            let (verdict, text) = of(&evidence);
            assert_eq!(verdict, HandlingVerdict::EffectUnknown);
            assert!(text.contains("one may have had its effect"), "{text}");
            (
                evidence.passes_through,
                evidence.is_shadow,
                evidence.guarantee,
            ) = before;
        }
    }

    #[test]
    fn an_id_is_not_handled_once_if_its_marker_was_forgotten_or_only_shadowed() {
        let mut evidence = evidence(MarkerState::Done, Destination::DeadLetters, &[]);
        evidence.dead_letters.clear();
        evidence.guarantee = Guarantee::AtMostOnce;
        let label = |evidence: &Evidence| of(evidence).0.label(Guarantee::AtMostOnce);
        assert_eq!(label(&evidence), "handled, once");
        let forget = r#"{"action_id":"1","at_ms":1,"at":"-","who":"ann","what":"marker forget","stage":"done","before":"done","after":"forgotten"}"#;
        evidence.actions = vec![serde_json::from_str(forget).expect("an entry")];
        assert_eq!(evidence.actions[0].action(), AuditedAction::Forgotten);
        assert_eq!(label(&evidence), "handled, perhaps more than once");
        evidence.actions.clear();
        evidence.is_shadow = true;
        assert_eq!(label(&evidence), "handled, perhaps more than once");
        assert!(of(&evidence).1.contains("the handler is called"));
    }

    /// With `Guarantee::Bare` a claim and a success leave the same marker.
    #[test]
    fn a_claim_without_a_record_of_success_is_not_called_handled() {
        let mut evidence = evidence(MarkerState::Done, Destination::DeadLetters, &[]);
        evidence.dead_letters.clear();
        assert_eq!(of(&evidence).0, HandlingVerdict::Handled);
        evidence.guarantee = Guarantee::Bare;
        let (verdict, text) = of(&evidence);
        assert_eq!(verdict, HandlingVerdict::Claimed);
        assert!(!text.contains("It was handled"), "{text}");
    }

    /// An operator action that could not be read, such as a drop, would change the verdict.
    #[test]
    fn an_id_is_not_unknown_if_the_audit_was_not_read() {
        for state in [MarkerState::Absent, MarkerState::Cleared] {
            let mut evidence = evidence(state, Destination::DeadLetters, &[]);
            evidence.dead_letters.clear();
            evidence.has_audit = false;
            assert_eq!(of(&evidence).0, HandlingVerdict::Unchecked, "{state:?}");
            evidence.has_audit = true;
            assert_ne!(of(&evidence).0, HandlingVerdict::Unchecked, "{state:?}");
        }
    }

    #[test]
    fn nothing_is_said_of_destinations_that_were_not_checked() {
        let mut evidence = evidence(MarkerState::InDoubt, Destination::InDoubt, &[]);
        evidence.in_doubt.clear();
        assert!(of(&evidence).1.contains("shows no message"));
        evidence.incomplete = vec![Destination::DeadLetters, Destination::InDoubt];
        let (_, text) = of(&evidence);
        assert!(
            !text.contains("shows no message") && text.contains("unknown"),
            "{text}"
        );
    }

    /// The explanation of a message in doubt whose marker is in this state.
    fn explained(state: MarkerState, window: Duration) -> String {
        let reason = [(headers::REASON, "in-doubt-panicked")];
        let mut evidence = evidence(state, Destination::InDoubt, &reason);
        evidence.window = window;
        let (verdict, text) = of(&evidence);
        assert_eq!(verdict, HandlingVerdict::InDoubt, "{state:?}: {text}");
        text
    }

    #[test]
    fn a_message_in_doubt_blocks_its_id_only_while_its_marker_exists() {
        let day = Duration::from_secs(86_400);
        let (blocked, runs) = (
            "It does not run again without a decision.",
            "another message with this id would run",
        );
        for (state, is_blocked) in [
            (MarkerState::InDoubt, true),
            (MarkerState::Rejected, true),
            (MarkerState::Absent, false),
            (MarkerState::Cleared, false),
        ] {
            let text = explained(state, day);
            assert_eq!(
                (text.contains(blocked), text.contains(runs)),
                (is_blocked, !is_blocked),
                "{state:?}: {text}"
            );
            assert!(!text.contains("longer ago"), "{text}");
        }
        let expired = explained(MarkerState::Absent, Duration::ZERO);
        assert!(
            expired.contains(runs) && expired.contains("longer ago than the window of 1 d"),
            "{expired}"
        );
    }
}
