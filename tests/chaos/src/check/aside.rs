//! What stands in the dead letters though its handler would have worked.

use super::{Finder, Invariant};
use crate::ledger::{Asked, Place, What};
use crate::message::Fate;

/// Why a message is set aside that has had all its attempts, each of which failed or ended with its
/// process or its lease; and why its copy is.
const SPENT: [&str; 3] = ["attempts-spent", "crashes-spent", "rejected-before"];

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    if Fate::of(id) != Fate::Work {
        return;
    }
    let mut granted = 0;
    for record in finder.history(id) {
        match &record.what {
            What::Answered {
                ask: Asked::Claim,
                verdict,
                ..
            } => granted = granted.max(attempt(verdict)),
            What::Aside {
                place: Place::DeadLetters,
                reason,
                ..
            } if !SPENT.contains(&reason.as_str()) || granted < finder.rules.attempts => {
                let why = format!(
                    "in the dead letters as {reason}, though its handler works, after {granted} attempts"
                );
                return finder.found(Invariant::Aside, Some(id), why);
            }
            _ => {}
        }
    }
}

/// The attempt that a store granted.
fn attempt(verdict: &str) -> u32 {
    let number = verdict
        .strip_prefix("granted ")
        .or_else(|| verdict.strip_prefix("in-doubt "));
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}
