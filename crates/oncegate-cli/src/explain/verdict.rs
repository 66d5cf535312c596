//! What all of it comes to.

use oncegate::Guarantee;
use oncegate::source::headers;
use serde::Serialize;

use super::Known;
use crate::audit::{Deed, Entry, Stage};
use crate::letters::{Letter, Shelf, State as LetterState, judge};
use crate::marker::told::State;
use crate::say::{ms, now_ms};

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
    /// The topic holds messages with it, and nothing else is known of it.
    NotRecorded,
    /// Nothing is known of it.
    Unknown,
    /// Nothing is known of it, and not all was looked at.
    NotLookedAt,
    /// The store could not be asked.
    NotSeen,
}

impl Verdict {
    pub(crate) fn word(self, guarantee: Guarantee) -> &'static str {
        match (self, guarantee) {
            (Self::Handled, Guarantee::AtMostOnce) => return "handled, once",
            (Self::HandledWithDuplicates, Guarantee::AtMostOnce) => {
                return "handled once; there were duplicates";
            }
            _ => {}
        }
        match self {
            // A run that a crash cut off may have had its effect, too.
            Self::Handled => "handled",
            Self::HandledWithDuplicates => "handled; there were duplicates",
            Self::InProgress => "being handled",
            Self::LeftByItsHolder => "left by its holder",
            Self::InDoubt => "in doubt",
            Self::DeadLettered => "not handled; in the dead letters",
            Self::Dropped => "not handled; dropped by a person",
            Self::SentBack => "sent back by a person; not handled yet",
            Self::WillRunAgain => "not handled yet; will be run again",
            Self::NotRecorded => "not recorded as handled; the topic holds messages with this id",
            Self::Unknown => "unknown",
            Self::NotLookedAt => "not known, since not all was looked at",
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
    // What came from elsewhere is another consumer's.
    let waits = |letters: &[Letter]| {
        letters
            .iter()
            .find(|letter| letter.state.waits() && letter.elsewhere.is_none())
            .cloned()
    };
    let (dead, doubt) = (waits(&known.dead_letters), waits(&known.in_doubt));
    let (verdict, mut says) = match marker.state {
        State::Done => handled(known, dead.as_ref(), doubt.as_ref()),
        State::InProgress => (
            Verdict::InProgress,
            "A consumer holds it at this moment. Every other message with this id waits until that has ended; none is accepted before."
                .into(),
        ),
        State::Lapsed => (Verdict::LeftByItsHolder, lapsed(&marker.says, dead.as_ref())),
        State::InDoubt => (Verdict::InDoubt, in_doubt(known, doubt.as_ref())),
        State::Unreadable => (Verdict::NotSeen, marker.says.clone()),
        State::Rejected | State::Absent | State::Cleared => match (dead, doubt) {
            (Some(letter), _) => (Verdict::DeadLettered, dead_lettered(known, &letter, marker.state)),
            (None, Some(letter)) => (Verdict::InDoubt, in_doubt(known, Some(&letter))),
            (None, None) => without_letters(known, marker.state),
        },
    };
    if known.acts.iter().any(|act| act.stage == Stage::Begun) {
        says.push_str(" An operator began something of which the end is not known: look at it below, and do it again if need be.");
    }
    (verdict, says)
}

/// How far the clock of the operator's machine and the store's may be apart.
const CLOCKS: u64 = 60_000;

/// What people did about it last, if it was done.
fn last(known: &Known) -> Option<(&Entry, Deed)> {
    let mut done = known
        .acts
        .iter()
        .filter(|act| act.stage == Stage::Done)
        .map(|act| (act, act.deed()));
    done.rfind(|(_, deed)| *deed != Deed::Other)
}

/// Whether no claim was granted since a person freed the id.
fn nothing_ran_since(known: &Known) -> bool {
    known
        .marker
        .as_ref()
        .is_some_and(|marker| marker.attempts == Some(0))
}

/// Whether an act is so long ago that a record of what came after it may be gone.
fn is_past(act: &Entry, known: &Known) -> bool {
    now_ms().saturating_sub(act.at_ms) >= ms(known.window)
}

/// The act by which it counts as handled, unless the record was written later, by a consumer.
fn by_a_person(known: &Known) -> Option<&Entry> {
    let written = known
        .marker
        .as_ref()
        .and_then(|marker| marker.written_at_ms);
    let (act, deed) = last(known)?;
    (deed == Deed::Completed
        && written.is_none_or(|written| written <= act.at_ms.saturating_add(CLOCKS)))
    .then_some(act)
}

/// The messages of the topic that were not set aside.
fn copies(known: &Known) -> Option<usize> {
    let aside: Vec<&str> = known
        .dead_letters
        .iter()
        .chain(&known.in_doubt)
        .filter_map(|letter| letter.header(headers::ORIGIN))
        .collect();
    let copies = known.copies.as_ref()?.iter();
    // A place has its broker before it.
    Some(
        copies
            .filter(|copy| {
                !aside.iter().any(|origin| {
                    copy.split_once(' ')
                        .is_some_and(|(_, place)| place == *origin)
                })
            })
            .count(),
    )
}

fn handled(known: &Known, dead: Option<&Letter>, doubt: Option<&Letter>) -> (Verdict, String) {
    let copies = copies(known).unwrap_or(0);
    let mut says = match by_a_person(known) {
        Some(act) => format!(
            "It counts as handled: {} said so on {} (`{}`).",
            act.who, act.at, act.what
        ),
        None => "It was handled, and that was recorded.".to_owned(),
    };
    if known.guarantee != Guarantee::AtMostOnce {
        says.push_str(
            " Before that it may have been run more than once, if a run was cut off: this consumer does not promise at most once.",
        );
    }
    says.push_str(" Not twice, because every further message with this id finds the record, and is accepted without a run, for as long as the record stands.");
    match (copies, dead.map(Letter::reason)) {
        (2.., _) => says.push_str(&format!(" The topic holds {copies} messages with this id that were not set aside: one was handled, the others are duplicates.")),
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
    (
        if copies > 1 {
            Verdict::HandledWithDuplicates
        } else {
            Verdict::Handled
        },
        says,
    )
}

fn in_doubt(known: &Known, letter: Option<&Letter>) -> String {
    let why = letter.map(|letter| match letter.reason() {
        "in-doubt-said" => "its handler said that it may have happened",
        "in-doubt-panicked" => "its handler panicked in the midst of it",
        "in-doubt-timed-out" => "its handler did not return in time",
        "in-doubt-unreadable-marker" => "what the store holds under its id is no marker",
        "in-doubt-holder-gone" => "the process that handled it is gone",
        "in-doubt-too-old" => {
            "it is older than what the store remembers, so it may have been handled before"
        }
        _ => "nobody could tell",
    });
    match (letter, why) {
        (Some(letter), Some(why)) => format!(
            "Nobody knows whether it happened: {why}. It is not run again on a guess. The message waits in {} for a person who finds out, \
             and says so with `oncegate in-doubt resolve`.",
            letter.place
        ),
        _ if known.unseen.contains(&Shelf::InDoubt) => {
            "Nobody knows whether it happened. It is not run again on a guess; whether a message waits in the in-doubt destination is not known."
                .into()
        }
        _ => "Nobody knows whether it happened. It is not run again on a guess; no message waits in the in-doubt destination, so a delivery may \
              still find out, or a person says so with `oncegate in-doubt resolve`."
            .into(),
    }
}

fn lapsed(marker: &str, dead: Option<&Letter>) -> String {
    match dead {
        None => marker.to_owned(),
        // The broker itself may have set it aside, after so many crashes.
        Some(letter) => format!(
            "{marker} Where no delivery is left, its message stands in {}: `oncegate dead-letters redrive` sends it back through the gate, which \
             goes on from there.",
            letter.place
        ),
    }
}

fn dead_lettered(known: &Known, letter: &Letter, state: State) -> String {
    let why = match letter.reason() {
        "missing-id" => "it bears no id",
        "unusable-id" => "what it bears for an id cannot be used as one",
        "unreadable" => "its body cannot be read",
        "conflict" => "its id was used for another body",
        "refused" => "its handler said that it will never work",
        "attempts-spent" => "it failed too often",
        "crashes-spent" => "too many processes ended while they handled it",
        "rejected-before" => "a message with this id was rejected before, and not redriven since",
        "too-large" => "it is larger than the source takes",
        "set-aside-by-the-broker" => "the broker itself gave it up, as at its delivery limit",
        _ => "nobody says why",
    };
    let error = letter
        .header(headers::LAST_ERROR)
        .map(|error| format!(" The last error: {error}."))
        .unwrap_or_default();
    let stands = format!(
        "It was not handled: {why}.{error} It stands in {}.",
        letter.place
    );
    if state == State::Rejected {
        return format!(
            "{stands} A message with this id is not run until it is redriven; `oncegate dead-letters redrive` sends it back."
        );
    }
    let mut says = stands;
    if letter.state == LetterState::Begun {
        says.push_str(" A command that was cut off may have sent a copy of it back.");
    }
    if state == State::Absent && judge::may_be_forgotten(letter, known.window) {
        says.push_str(&format!(
            " That was longer ago than the window of {}: whether another message with its id was handled before or since is not known any more. \
             Find out; `oncegate dead-letters redrive` says what it takes to send it.",
            known.window_told
        ));
    } else {
        says.push_str(" Another message with this id would be run; `oncegate dead-letters redrive` sends it back.");
    }
    says
}

fn without_letters(known: &Known, state: State) -> (Verdict, String) {
    let last = last(known);
    // A marker that says that nothing counts is known; one that is not there says so for the length
    // of the window alone.
    let is_known = |act: &Entry| state != State::Absent || !is_past(act, known);
    let gone = || {
        format!(
            " Whether a message with this id was handled since is unknown: that is longer ago than the window of {}, and a record would be gone. \
             Ask whoever was to see the effect before it is sent again.",
            known.window_told
        )
    };
    match (last, state) {
        (Some((act, Deed::Dropped)), _) if is_known(act) => {
            return (
                Verdict::Dropped,
                format!(
                    "It was not handled. {} dropped it from the dead letters on {}.",
                    act.who, act.at
                ),
            );
        }
        (Some((act, Deed::Dropped)), _) => {
            return (
                Verdict::Unknown,
                format!(
                    "{} dropped it from the dead letters on {}.{}",
                    act.who,
                    act.at,
                    gone()
                ),
            );
        }
        (Some((act, Deed::SentBack)), State::Absent | State::Cleared) => {
            let sent = format!("{} sent it back on {}", act.who, act.at);
            return match is_known(act) {
                true => (
                    Verdict::SentBack,
                    format!("{sent}; it was not handled since."),
                ),
                false => (Verdict::Unknown, format!("{sent}.{}", gone())),
            };
        }
        (Some((act, Deed::Forgotten)), State::Cleared) if nothing_ran_since(known) => {
            let says = format!(
                "{} had it forgotten on {}; before, it was {}. Nothing ran since; the next message with this id is handled.",
                act.who, act.at, act.before
            );
            return (Verdict::Unknown, says);
        }
        (Some((act, Deed::Completed)), State::Absent) => {
            return (
                Verdict::Unknown,
                format!(
                    "{} said on {} that it counts as handled.{}",
                    act.who,
                    act.at,
                    gone()
                ),
            );
        }
        _ => {}
    }
    match state {
        State::Rejected if !known.unseen.is_empty() => {
            (Verdict::DeadLettered, "It was not handled: it was rejected. Where its message is now is not known.".into())
        }
        State::Cleared if !known.unseen.is_empty() => (
            Verdict::NotLookedAt,
            "An attempt has failed, and nothing of it counts. Whether its message is still at the broker or was set aside is not known.".into(),
        ),
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
            let forgotten = last
                .filter(|(_, deed)| *deed == Deed::Forgotten)
                .map(|(act, _)| format!("{} had it forgotten on {}; before, it was {}. ", act.who, act.at, act.before))
                .unwrap_or_default();
            let copies = copies(known).unwrap_or(0);
            if copies > 0 {
                let says = format!(
                    "{forgotten}The topic holds {copies} messages with this id, and the store has no record of it: no consumer has taken them \
                     yet, or a first attempt failed and had done nothing, or they were handled longer ago than the window of {}. Look also \
                     whether the scope and the prefix are those of the consumer.",
                    known.window_told
                );
                return (Verdict::NotRecorded, says);
            }
            if !known.unseen.is_empty() {
                let says = format!("{forgotten}The store has no record of this id; its message may have been set aside.");
                return (Verdict::NotLookedAt, says);
            }
            let says = format!(
                "{forgotten}Nothing is known of this id. Either no message with it was ever taken, or a first attempt failed and had done \
                 nothing, or it was handled longer ago than the window. Look also whether the scope and the prefix are those of the consumer."
            );
            (Verdict::Unknown, says)
        }
    }
}
