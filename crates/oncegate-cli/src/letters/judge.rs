//! May a copy of this letter be sent, and how old does it have to say that it is?
//!
//! A letter stands for ever, and what keeps its id from being handled twice stands for a window. So a marker that says that
//! nothing happened is a proof, and one that is not there is a proof for the length of the window alone.

use std::time::Duration;

use clap::Args;
use oncegate::Guarantee;
use oncegate::source::headers;

use super::{Begins, Letter, State as LetterState};
use crate::Context;
use crate::config;
use crate::failure::Failure;
use crate::marker::told::State;
use crate::say::{ms, now_ms};

/// What an operator answers for.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct Accepts {
    /// Sends, to be run, what may have been handled before: its id is not known, and the letter is older than the window, so
    /// that the record of it may be gone.
    #[arg(long)]
    accept_forgotten: bool,
    /// Sends again what an earlier command may have sent: it was cut off.
    #[arg(long)]
    accept_unfinished: bool,
    /// Sends what lost headers when it was set aside, as it is.
    #[arg(long)]
    accept_lost_headers: bool,
}

/// Reasons for which the gate itself set a message aside: until then its id was held, and had not been handled.
const HELD_UNTIL_THEN: [&str; 7] =
    ["refused", "attempts-spent", "rejected-before", "in-doubt-said", "in-doubt-panicked", "in-doubt-timed-out", "in-doubt-holder-gone"];

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
        Some(from) => left(format!("it came from {from}, and {target} is what is configured here")),
    }
}

/// Whether a copy of it would be what was sent.
///
/// # Errors
/// It says what it would lack.
pub(crate) fn is_whole(letter: &Letter, accepts: Accepts) -> Result<(), Failure> {
    super::kafka::has_its_body(letter)?;
    match &letter.lacks {
        Some(what) if !accepts.accept_lost_headers => {
            left(format!("{what}, and a copy would be without them; --accept-lost-headers sends it as it is"))
        }
        _ => Ok(()),
    }
}

/// Whether the ids of messages say where they stand, so that a copy has another one.
fn is_known_by_its_place(letter: &Letter, context: &Context) -> bool {
    let by_place = context.config.text("gate.id").is_some_and(|text| text.split(' ').next() == Some("position"));
    by_place || (letter.id().is_some() && letter.id() == letter.header(headers::ORIGIN))
}

/// How long ago its id may have been handled without a marker that would tell now: `None` where nothing says so.
fn unguarded_ms(letter: &Letter) -> Option<u64> {
    let sent = letter.first_seen_ms().or(letter.set_aside_ms);
    let since = if HELD_UNTIL_THEN.contains(&letter.reason()) { letter.set_aside_ms.or(sent) } else { sent };
    since.map(|since| now_ms().saturating_sub(since))
}

/// Whether the record of its id may be gone already.
pub(crate) fn may_be_forgotten(letter: &Letter, window: Duration) -> bool {
    unguarded_ms(letter).is_none_or(|age| age >= ms(window))
}

/// How a copy begins, of a letter whose id has this state; `Absent` where nobody could be asked.
///
/// # Errors
/// It is left where it is, and why.
pub(crate) fn copy(letter: &Letter, state: State, named: bool, accepts: Accepts, context: &Context) -> Result<Begins, Failure> {
    if is_known_by_its_place(letter, context) && !accepts.accept_forgotten {
        return left(
            "its id is its place, so that a copy has another one, and nothing keeps it from being handled twice; --accept-forgotten sends it",
        );
    }
    let is_conflict = letter.reason() == "conflict";
    match state {
        State::Done if is_conflict => left("its id was handled with another body; give it an id of its own, or drop it"),
        State::Done => left("its id was handled meanwhile, so a copy would be a duplicate; drop it"),
        State::Rejected if is_conflict => left("its id belongs to another body, which was rejected: deal with that one first"),
        State::InDoubt => left("nobody knows whether its id happened: `oncegate in-doubt resolve` first"),
        State::InProgress => left("its id is being handled at this moment: try again later"),
        State::Unreadable => left("its marker cannot be read"),
        State::Absent | State::Cleared if is_conflict && !named => {
            left("its id was used for another body, which may have been handled; name it with --id if it is to be handled all the same")
        }
        // Nothing happened, or whoever claims it finds it in doubt: the gate decides.
        State::Rejected | State::Cleared | State::Lapsed => Ok(Begins::Afresh),
        State::Absent => absent(letter, accepts, context),
    }
}

fn absent(letter: &Letter, accepts: Accepts, context: &Context) -> Result<Begins, Failure> {
    if letter.state == LetterState::Begun && !accepts.accept_unfinished {
        return left(
            "an earlier command may have sent it, and was cut off: `oncegate audit` tells. --accept-unfinished sends it again, and `drop` gives it up",
        );
    }
    // What bears no id was never handled under one.
    if accepts.accept_forgotten || letter.reason() == "missing-id" || !may_be_forgotten(letter, context.config.window()) {
        return Ok(Begins::Afresh);
    }
    match context.config.guarantee() {
        // The consumer finds it too old, and reconciles.
        Guarantee::AtMostOnce => Ok(Begins::Aged(letter.age_from_ms().unwrap_or(0))),
        _ => left(format!(
            "its id is not known, and it may have been handled longer ago than the window of {}; find out, then drop it, or say --accept-forgotten",
            config::window_told(&context.config)
        )),
    }
}
