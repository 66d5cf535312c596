//! I9: each acceptance has its own store verdict. `Busy` does not count.

use std::collections::HashMap;

use super::{Finder, Invariant};
use crate::ledger::{SettlementKind, StoreOperation, What};

/// Verdicts that permit an acceptance and are not used by one yet.
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
            What::Answered {
                operation, verdict, ..
            } => match (operation, verdict.as_str()) {
                (StoreOperation::Complete, "done") => verdicts.completed += 1,
                (StoreOperation::Claim, "duplicate") => verdicts.duplicate += 1,
                (StoreOperation::Resolve, "done") => verdicts.resolved += 1,
                (StoreOperation::Claim, "busy") => finder.checked.counts.busy += 1,
                _ => {}
            },
            What::Settled {
                how: SettlementKind::Accepted,
                why,
                position,
                ..
            } => {
                let unused = match why.as_str() {
                    "completed" => &mut verdicts.completed,
                    "duplicate" => &mut verdicts.duplicate,
                    "resolved" => &mut verdicts.resolved,
                    _ => &mut 0,
                };
                finder.checked.counts.duplicates_stopped += u64::from(why == "duplicate");
                if *unused == 0 {
                    let why = format!(
                        "{} accepted {position} as {why} without a store verdict",
                        record.by
                    );
                    finder.report_violation(Invariant::I9, Some(id), why);
                } else {
                    *unused -= 1;
                }
            }
            _ => {}
        }
    }
}
