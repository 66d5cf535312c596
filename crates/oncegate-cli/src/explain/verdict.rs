//! What all of it comes to.

use serde::Serialize;

use super::Known;
use crate::audit::Stage;
use crate::letters::{Letter, State as LetterState};
use crate::marker::told::State;

/// The answer in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
    /// Once.
    Handled,
    /// Once, and there were several messages.
    HandledWithDuplicates,
    InProgress,
    /// Its holder is gone, and nobody has looked yet.
    LeftByItsHolder,
    InDoubt,
    DeadLettered,
    /// A person gave it up.
    Dropped,
    /// A person sent it back, and it was not handled yet.
    SentBack,
    /// It failed, and will be run again.
    WillRunAgain,
    /// Nothing is known of it.
    Unknown,
    /// The store could not be asked.
    NotSeen,
}

impl Verdict {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Handled => "handled, once",
            Self::HandledWithDuplicates => "handled once; there were duplicates",
            Self::InProgress => "being handled",
            Self::LeftByItsHolder => "left by its holder",
            Self::InDoubt => "in doubt",
            Self::DeadLettered => "not handled; in the dead letters",
            Self::Dropped => "not handled; dropped by a person",
            Self::SentBack => "sent back by a person; not handled yet",
            Self::WillRunAgain => "not handled yet; will be run again",
            Self::Unknown => "unknown",
            Self::NotSeen => "not known: the store could not be asked",
        }
    }
}

/// The word, and the whole in sentences.
pub(crate) fn of(known: &Known) -> (Verdict, String) {
    let Some(marker) = &known.marker else {
        let says = "The store could not be asked, and it alone knows what was handled. What else was found stands below.";
        return (Verdict::NotSeen, says.into());
    };
    let waits = |letters: &[Letter]| letters.iter().find(|letter| letter.state == LetterState::Waiting).cloned();
    let (dead, doubt) = (waits(&known.dead_letters), waits(&known.in_doubt));
    let (verdict, mut says) = match marker.state {
        State::Done => handled(known, dead.as_ref(), doubt.as_ref()),
        State::InProgress => (
            Verdict::InProgress,
            "A consumer holds it at this moment. Every other message with this id waits until that has ended; none is accepted before."
                .into(),
        ),
        State::Lapsed => (Verdict::LeftByItsHolder, marker.says.clone()),
        State::InDoubt => (Verdict::InDoubt, in_doubt(doubt.as_ref())),
        State::Unreadable => (Verdict::NotSeen, marker.says.clone()),
        State::Rejected | State::Absent | State::Cleared => match (dead, doubt) {
            (Some(letter), _) => (Verdict::DeadLettered, dead_lettered(&letter, marker.state)),
            (None, Some(letter)) => (Verdict::InDoubt, in_doubt(Some(&letter))),
            (None, None) => without_letters(known, marker.state),
        },
    };
    if known.acts.iter().any(|act| act.stage == Stage::Begun) {
        says.push_str(" An operator began something of which the end is not known: look at it below, and do it again if need be.");
    }
    (verdict, says)
}

fn handled(known: &Known, dead: Option<&Letter>, doubt: Option<&Letter>) -> (Verdict, String) {
    let copies = known.copies.as_ref().map_or(0, Vec::len);
    let by_a_person = known.acts.iter().rev().find(|act| act.stage == Stage::Done && act.after.starts_with("done"));
    let mut says = match by_a_person {
        Some(act) => format!("It counts as handled: {} said so on {} (`{}`).", act.who, act.at, act.what),
        None => "It was handled, and that was recorded.".to_owned(),
    };
    says.push_str(" Not twice, because every further message with this id finds the record, and is accepted without a run, for as long as the record stands.");
    match (copies, dead.map(Letter::reason)) {
        (2.., _) => says.push_str(&format!(" The topic holds {copies} messages with this id: one was handled, the others were duplicates.")),
        (_, Some("conflict")) => {}
        _ if known.copies.is_none() => says.push_str(" A duplicate leaves no trace of its own in the store; the counter `oncegate_deliveries_total{outcome=\"duplicate\"}` counts them."),
        _ => {}
    }
    match dead {
        Some(letter) if letter.reason() == "conflict" => {
            says.push_str(" Another message came with the same id and ANOTHER BODY. It was not handled, and stands in the dead letters: its producer used the id twice.");
        }
        Some(_) => says
            .push_str(" What stands in the dead letters under this id was handled after all: `oncegate dead-letters drop` clears it away."),
        None => {}
    }
    if doubt.is_some() {
        says.push_str(" What stands in doubt under this id is settled by that: `oncegate in-doubt resolve --happened` clears it away.");
    }
    (if copies > 1 { Verdict::HandledWithDuplicates } else { Verdict::Handled }, says)
}

fn in_doubt(letter: Option<&Letter>) -> String {
    let why = letter.map(|letter| match letter.reason() {
        "in-doubt-said" => "its handler said that it may have happened",
        "in-doubt-panicked" => "its handler panicked in the midst of it",
        "in-doubt-timed-out" => "its handler did not return in time",
        "in-doubt-holder-gone" => "the process that handled it is gone",
        "in-doubt-too-old" => "it is older than what the store remembers, so it may have been handled before",
        _ => "nobody could tell",
    });
    match (letter, why) {
        (Some(letter), Some(why)) => format!(
            "Nobody knows whether it happened: {why}. It is not run again on a guess. The message waits in {} for a person who finds out, \
             and says so with `oncegate in-doubt resolve`.",
            letter.place
        ),
        _ => "Nobody knows whether it happened. It is not run again on a guess; no message waits in the in-doubt destination, so a delivery may \
              still find out, or a person says so with `oncegate in-doubt resolve`."
            .into(),
    }
}

fn dead_lettered(letter: &Letter, state: State) -> String {
    let why = match letter.reason() {
        "missing-id" => "it bears no id",
        "unreadable" => "its body cannot be read",
        "conflict" => "its id was used for another body",
        "refused" => "its handler said that it will never work",
        "attempts-spent" => "it failed too often",
        "rejected-before" => "a message with this id was rejected before, and not redriven since",
        "too-large" => "it is larger than the source takes",
        "set-aside-by-the-broker" => "the broker itself gave it up, as at its delivery limit",
        _ => "nobody says why",
    };
    let last = letter.header(oncegate::source::headers::LAST_ERROR).map(|error| format!(" The last error: {error}.")).unwrap_or_default();
    let again = match state {
        State::Rejected => "A message with this id is not run until it is redriven",
        _ => "Another message with this id would be run",
    };
    format!("It was not handled: {why}.{last} It stands in {}. {again}; `oncegate dead-letters redrive` sends it back.", letter.place)
}

fn without_letters(known: &Known, state: State) -> (Verdict, String) {
    let done = |what: &str| known.acts.iter().rev().find(|act| act.stage == Stage::Done && act.what == what);
    if let Some(act) = done("dead-letters drop").filter(|_| done("dead-letters redrive").is_none()) {
        return (Verdict::Dropped, format!("It was not handled. {} dropped it from the dead letters on {}.", act.who, act.at));
    }
    let sent_back = known.acts.iter().rev().find(|act| act.stage == Stage::Done && act.after.starts_with("sent to"));
    if let Some(act) = sent_back.filter(|_| state != State::Rejected) {
        return (Verdict::SentBack, format!("{} sent it back on {}; no consumer has taken it since.", act.who, act.at));
    }
    match state {
        State::Rejected => (
            Verdict::DeadLettered,
            "It was not handled: it was rejected. Its letter does not stand in the dead letters that are configured here: it was taken out \
             without this tool, or is on its way there."
                .into(),
        ),
        State::Cleared => (
            Verdict::WillRunAgain,
            "An attempt has failed, and nothing of it counts. Its message is still at the broker, and will be run again.".into(),
        ),
        _ => {
            let forgotten = done("marker forget")
                .map(|act| format!("{} had it forgotten on {}; before, it was {}. ", act.who, act.at, act.before))
                .unwrap_or_default();
            let says = format!(
                "{forgotten}Nothing is known of this id. Either no message with it was ever taken, or a first attempt failed and had done \
                 nothing, or it was handled longer ago than the window. Look also whether the scope and the prefix are those of the consumer."
            );
            (Verdict::Unknown, says)
        }
    }
}
