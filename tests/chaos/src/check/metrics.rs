//! I12: what consumers count of themselves is what their source and their store have written down
//! of them.
//!
//! A process that ended well has written its counters down when it counted nothing any more: there
//! each has to be the same. One that was killed takes the last second of them with it: what it had
//! written before must not be more than the ledger has.

use std::collections::{BTreeMap, HashMap};

use super::{Finder, Invariant, Ordered};
use crate::ledger::{Asked, Settling, What};

/// The counter of what the gate said, and of what became of deliveries.
const DELIVERIES: &str = "oncegate_deliveries_total";
/// What the store answered: it stands in the ledger before anybody can count it.
const ANSWERS: [&str; 4] = ["first", "reclaimed", "busy", "conflict"];
/// How deliveries were settled: counted just before it stands in the ledger.
const ENDS: [&str; 5] = ["duplicate", "completed", "released", "rejected", "in_doubt"];

/// What one process is known to have done.
#[derive(Default)]
struct Process<'a> {
    seen: HashMap<&'static str, u64>,
    counted: Option<&'a BTreeMap<String, u64>>,
    ended_well: bool,
}

pub(super) fn check(finder: &mut Finder<'_>) {
    let mut processes: BTreeMap<&str, Process<'_>> = BTreeMap::new();
    for record in finder.ledger.records() {
        let outcome = match &record.what {
            What::Answered {
                ask: Asked::Claim,
                verdict,
                ..
            } => answer(verdict),
            What::Settled { how, why, .. } => Some(end(*how, why)),
            What::Counted { values, last } => {
                let process = processes.entry(&record.by).or_default();
                (process.counted, process.ended_well) = (Some(values), *last);
                None
            }
            _ => None,
        };
        if let Some(outcome) = outcome {
            *processes
                .entry(&record.by)
                .or_default()
                .seen
                .entry(outcome)
                .or_default() += 1;
        }
    }
    for (name, process) in processes {
        compare(finder, name, &process);
    }
}

fn compare(finder: &mut Finder<'_>, name: &str, process: &Process<'_>) {
    let Some(counted) = process.counted else {
        return;
    };
    let of = |outcome: &str| {
        counted
            .get(&format!("{DELIVERIES}{{outcome={outcome}}}"))
            .copied()
            .unwrap_or_default()
    };
    let counts = &mut finder.checked.counts;
    let compared = if process.ended_well {
        &mut counts.metrics_exact
    } else {
        &mut counts.metrics_bounded
    };
    *compared += 1;
    // The answer to what was abandoned at the end of a stop is read by nobody.
    let unread = of("dropped");
    for outcome in ANSWERS.into_iter().chain(ENDS) {
        let (counted, seen) = (
            of(outcome),
            process.seen.get(outcome).copied().unwrap_or_default(),
        );
        // In order, what failed rests in the consumer: released it is, and never settled.
        let rests = outcome == "released" && finder.rules.order != Ordered::Not;
        let most = match (process.ended_well, ANSWERS.contains(&outcome)) {
            _ if rests => u64::MAX,
            (true, _) | (false, true) => seen,
            // It may have been killed between counting a batch and writing it down.
            (false, false) => seen + u64::from(finder.rules.in_flight),
        };
        let least = if process.ended_well {
            seen.saturating_sub(unread)
        } else {
            0
        };
        if counted < least || counted > most {
            let why = format!(
                "{name} counted {counted} times that it was {outcome}, and the ledger has that {seen} times"
            );
            finder.found(Invariant::I12, None, why);
        }
    }
}

/// By what it counts as, that the store has answered this to a claim.
fn answer(verdict: &str) -> Option<&'static str> {
    match verdict {
        "granted 1" => Some("first"),
        "busy" => Some("busy"),
        "conflict" => Some("conflict"),
        other if other.starts_with("granted") || other.starts_with("in-doubt") => Some("reclaimed"),
        _ => None,
    }
}

/// By what it counts as, that a delivery was settled like this.
fn end(how: Settling, why: &str) -> &'static str {
    match (how, why) {
        (Settling::Accepted, "duplicate") => "duplicate",
        (Settling::Accepted, _) => "completed",
        (Settling::Released, _) => "released",
        (Settling::Rejected, why) if why.starts_with("in-doubt") => "in_doubt",
        (Settling::Rejected, _) => "rejected",
    }
}
