//! I9: nothing is accepted without a verdict of its own. `Busy` is none.

use std::collections::HashMap;

use super::{Finder, Invariant};
use crate::ledger::{Asked, Settling, What};

/// What an acceptance may rest on, and has not been used for one yet.
#[derive(Default)]
struct Verdicts {
    completed: u32,
    duplicate: u32,
    resolved: u32,
}

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    let mut of_consumer: HashMap<&str, Verdicts> = HashMap::new();
    for record in finder.history(id) {
        let verdicts = of_consumer.entry(&record.by).or_default();
        match &record.what {
            What::Answered { ask, verdict, .. } => match (ask, verdict.as_str()) {
                (Asked::Complete, "done") => verdicts.completed += 1,
                (Asked::Claim, "duplicate") => verdicts.duplicate += 1,
                (Asked::Resolve, "done") => verdicts.resolved += 1,
                (Asked::Claim, "busy") => finder.checked.counts.busy += 1,
                _ => {}
            },
            What::Settled {
                how: Settling::Accepted,
                why,
                position,
                ..
            } => {
                let left = match why.as_str() {
                    "completed" => &mut verdicts.completed,
                    "duplicate" => &mut verdicts.duplicate,
                    "resolved" => &mut verdicts.resolved,
                    _ => &mut 0,
                };
                finder.checked.counts.duplicates_stopped += u64::from(why == "duplicate");
                if *left == 0 {
                    let why = format!(
                        "{} accepted {position} as {why}, and no verdict says so",
                        record.by
                    );
                    finder.found(Invariant::I9, Some(id), why);
                } else {
                    *left -= 1;
                }
            }
            _ => {}
        }
    }
}
