//! Dead letters whose handler would have worked.

use super::{Finder, Invariant};
use crate::ledger::{RejectedTo, StoreOperation, What};
use crate::message::HandlerBehavior;

/// The reasons of messages whose attempts are exhausted, each by a failure, a crash or a lost
/// lease, and of their copies.
const SPENT: [&str; 3] = ["attempts-spent", "crashes-spent", "rejected-before"];

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    if HandlerBehavior::of(id) != HandlerBehavior::Work {
        return;
    }
    let mut granted = 0;
    for record in finder.history(id) {
        match &record.what {
            What::Answered {
                operation: StoreOperation::Claim,
                verdict,
                ..
            } => granted = granted.max(attempt(verdict)),
            What::Rejected {
                place: RejectedTo::DeadLetters,
                reason,
                ..
            } if !SPENT.contains(&reason.as_str()) || granted < finder.rules.attempts => {
                let why = format!(
                    "dead-lettered as {reason} after {granted} attempts, although its handler works"
                );
                return finder.report_violation(Invariant::RejectedTooSoon, Some(id), why);
            }
            _ => {}
        }
    }
}

/// The attempt number in a verdict; 0 if the claim was not granted.
fn attempt(verdict: &str) -> u32 {
    let number = verdict
        .strip_prefix("granted ")
        .or_else(|| verdict.strip_prefix("in-doubt "));
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_default()
}
