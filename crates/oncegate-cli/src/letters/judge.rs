//! May a copy of this letter be sent, and how old does it have to say that it is?
//!
//! A letter stands for ever, and what keeps its id from being handled twice stands for a window. So
//! a marker that says that nothing happened is a proof, and one that is not there is a proof for
//! the length of the window alone.

use std::time::Duration;

use clap::Args;
use oncegate::marker::{Effect, Marker};
use oncegate::source::headers;
use oncegate::{Fingerprint, Guarantee};

use super::{Begins, Letter, State as LetterState};
use crate::Context;
use crate::config;
use crate::failure::Failure;
use crate::marker::change::Subject;
use crate::marker::told::State;
use crate::say::{ms, now_ms};

/// Says of a letter that its body was left out, since no broker takes a record of that size.
const BODY_OMITTED: &str = "oncegate-body-omitted";

/// What an operator answers for.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct Accepts {
    /// Sends, to be run, what may have been handled before: its id is not known, and the letter is
    /// older than the window, so that the record of it may be gone.
    #[arg(long)]
    accept_forgotten: bool,
    /// Sends again what an earlier command may have sent: it was cut off.
    #[arg(long)]
    accept_unfinished: bool,
    /// Sends what lost headers when it was set aside, as it is.
    #[arg(long)]
    accept_lost_headers: bool,
}

/// Reasons for which the gate itself set a message aside: until then its id was held, and had not
/// been handled.
const HELD_UNTIL_THEN: [&str; 8] = [
    "refused",
    "attempts-spent",
    "crashes-spent",
    "rejected-before",
    "in-doubt-said",
    "in-doubt-panicked",
    "in-doubt-timed-out",
    "in-doubt-holder-gone",
];

fn left<T>(why: impl std::fmt::Display) -> Result<T, Failure> {
    Err(Failure::not_all(format!("left: {why}")))
}

/// Whether it is ours to deal with.
///
/// # Errors
/// It was consumed elsewhere.
pub(crate) fn is_ours(letter: &Letter, target: &str) -> Result<(), Failure> {
    match &letter.elsewhere {
        None => Ok(()),
        Some(from) => left(format!(
            "it came from {from}, and {target} is what is configured here"
        )),
    }
}

/// Whether a copy of it would be what was sent.
///
/// # Errors
/// It says what it would lack.
pub(crate) fn is_whole(letter: &Letter, accepts: Accepts) -> Result<(), Failure> {
    has_its_body(letter)?;
    match &letter.lacks {
        Some(what) if !accepts.accept_lost_headers => left(format!(
            "{what}, and a copy would be without them; --accept-lost-headers sends it as it is"
        )),
        _ => Ok(()),
    }
}

/// Whether the marker of its id would let a copy run, where no marker can be looked at.
///
/// # Errors
/// The marker may keep it from running, and only the store can free it.
pub(crate) fn runs_without_a_look(letter: &Letter) -> Result<(), Failure> {
    let may_be_kept = HELD_UNTIL_THEN.contains(&letter.reason())
        || matches!(letter.reason(), "unreadable" | "conflict");
    if letter.id().is_some() && may_be_kept {
        return left(
            "the marker of its id may keep a copy from running, and no store is configured to free it; set store.url",
        );
    }
    Ok(())
}

/// Whether the body of the message is there.
///
/// # Errors
/// It says where the whole one stands.
fn has_its_body(letter: &Letter) -> Result<(), Failure> {
    match letter.header(BODY_OMITTED) {
        None => Ok(()),
        Some(bytes) => Err(Failure::not_all(format!(
            "left: its body of {bytes} bytes was too large to be set aside; it stands at {} alone",
            letter.header(headers::ORIGIN).unwrap_or("an unknown place")
        ))),
    }
}

/// Whether the ids of messages say where they stand, so that a copy has another one.
fn is_known_by_its_place(letter: &Letter, context: &Context) -> bool {
    let by_place = context
        .config
        .text("gate.id")
        .is_some_and(|text| text.split(' ').next() == Some("position"));
    by_place || (letter.id().is_some() && letter.id() == letter.header(headers::ORIGIN))
}

/// How long ago its id may have been handled without a marker that would tell now: `None` where
/// nothing says so.
fn unguarded_ms(letter: &Letter) -> Option<u64> {
    let sent = letter.first_seen_ms().or(letter.set_aside_ms);
    let since = if HELD_UNTIL_THEN.contains(&letter.reason()) {
        letter.set_aside_ms.or(sent)
    } else {
        sent
    };
    since.map(|since| now_ms().saturating_sub(since))
}

/// Whether the record of its id may be gone already.
pub(crate) fn may_be_forgotten(letter: &Letter, window: Duration) -> bool {
    unguarded_ms(letter).is_none_or(|age| age >= ms(window))
}

/// How a copy is sent back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) begins: Begins,
    /// What is said of earlier attempts: nothing of them may have happened, or that is not known
    /// and stays so.
    pub(crate) word: Effect,
}

const AFRESH: Copy = Copy {
    begins: Begins::Afresh,
    word: Effect::Nothing,
};

/// Whether a marker with a fingerprint stands for another body than a letter has. Asked of letters
/// whose id oncegate did not write, such as those that a broker set aside: whoever can publish
/// could free the id of somebody else's message.
fn is_of_another_body(letter: &Letter, marker: &Marker) -> bool {
    let theirs = match marker {
        Marker::Rejected { fingerprint, .. } => *fingerprint,
        Marker::InProgress(hold) => hold.fingerprint,
        _ => None,
    };
    letter.header(headers::ID).is_none()
        && theirs.is_some_and(|theirs| theirs != Fingerprint::of(letter.bytes()))
}

/// How a copy is sent back, of a letter whose marker was seen; `None` where nobody could be asked.
///
/// # Errors
/// It is left where it is, and why.
pub(crate) fn copy(
    letter: &Letter,
    seen: Option<&Subject<'_>>,
    named: bool,
    accepts: Accepts,
    context: &Context,
) -> Result<Copy, Failure> {
    let state = seen.map_or(State::Absent, Subject::state);
    if let Some(subject) = seen.filter(|_| !named)
        && is_of_another_body(letter, &subject.standing.marker)
    {
        return left("its id was used for another body; name it with --id to send it all the same");
    }
    judge(letter, state, named, accepts, context)
}

/// The same of a letter whose id has this state; `Absent` where nobody could be asked.
pub(crate) fn judge(
    letter: &Letter,
    state: State,
    named: bool,
    accepts: Accepts,
    context: &Context,
) -> Result<Copy, Failure> {
    if is_known_by_its_place(letter, context) && !accepts.accept_forgotten {
        return left(
            "its id is its place, so that a copy has another one, and nothing keeps it from being handled twice; --accept-forgotten sends it",
        );
    }
    let is_conflict = letter.reason() == "conflict";
    match state {
        State::Done if is_conflict => {
            left("its id was handled with another body; give it an id of its own, or drop it")
        }
        State::Done => {
            left("its id was handled meanwhile, so a copy would be a duplicate; drop it")
        }
        State::Rejected if is_conflict => {
            left("its id belongs to another body, which was rejected: deal with that one first")
        }
        State::Lapsed if is_conflict => {
            left("its id belongs to another body, whose holder is gone: deal with that one first")
        }
        State::InDoubt => {
            left("nobody knows whether its id happened: `oncegate in-doubt resolve` first")
        }
        State::InProgress => left("its id is being handled at this moment: try again later"),
        State::Unreadable => left("its marker cannot be read"),
        State::Absent | State::Cleared if is_conflict && !named => left(
            "its id was used for another body, which may have been handled; name it with --id if it is to be handled all the same",
        ),
        State::Rejected => Ok(AFRESH),
        // What is unknown stays so: at most once finds it in doubt, and reconciles.
        State::Cleared | State::Lapsed => Ok(Copy {
            begins: Begins::Afresh,
            word: Effect::Unknown,
        }),
        State::Absent => absent(letter, accepts, context),
    }
}

fn absent(letter: &Letter, accepts: Accepts, context: &Context) -> Result<Copy, Failure> {
    if letter.state == LetterState::Begun && !accepts.accept_unfinished {
        return left(
            "an earlier command may have sent it, and was cut off: `oncegate audit` tells. --accept-unfinished sends it again, and `drop` gives it up",
        );
    }
    // What bears no id was never handled under one.
    if accepts.accept_forgotten
        || matches!(letter.reason(), "missing-id" | "unusable-id")
        || !may_be_forgotten(letter, context.config.window())
    {
        return Ok(AFRESH);
    }
    match context.config.guarantee() {
        // The consumer finds it too old, and reconciles.
        Guarantee::AtMostOnce => Ok(Copy {
            begins: Begins::Aged(letter.age_from_ms().unwrap_or(0)),
            word: Effect::Unknown,
        }),
        _ => left(format!(
            "its id is not known, and it may have been handled longer ago than the window of {}; find out, then drop it, or say --accept-forgotten",
            config::window_told(&context.config)
        )),
    }
}
