//! I12: the metrics of consumers equal the counts in the ledger.
//!
//! A process that ended with success wrote its final counters; each must equal the ledger. A
//! process that was killed lost the counters of its last second; the written ones must not exceed
//! the ledger.

use std::collections::{BTreeMap, HashMap};

use super::{Finder, Invariant};
use crate::ledger::{SettlementKind, StoreOperation, What};

/// The counter of claim results and of settlements.
const DELIVERIES: &str = "oncegate_deliveries_total";
/// Outcomes of claims: the ledger has them before the consumer counts them.
const CLAIM_OUTCOMES: [&str; 4] = ["first", "reclaimed", "busy", "conflict"];
/// Outcomes of settlements: the consumer counts them just before the ledger has them.
const SETTLEMENT_OUTCOMES: [&str; 5] =
    ["duplicate", "completed", "released", "rejected", "in_doubt"];

/// The records and counters of one process.
#[derive(Default)]
struct ProcessRecords<'a> {
    seen: HashMap<&'static str, u64>,
    counted: Option<&'a BTreeMap<String, u64>>,
    ended_well: bool,
}

pub(super) fn check(finder: &mut Finder<'_>) {
    let mut processes: BTreeMap<&str, ProcessRecords<'_>> = BTreeMap::new();
    for record in finder.ledger.records() {
        let outcome = match &record.what {
            What::Answered {
                operation: StoreOperation::Claim,
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

fn compare(finder: &mut Finder<'_>, name: &str, process: &ProcessRecords<'_>) {
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
    // Replies for deliveries that were abandoned at the end of a drain are not counted.
    let unread = of("dropped");
    for outcome in CLAIM_OUTCOMES.into_iter().chain(SETTLEMENT_OUTCOMES) {
        let (counted, seen) = (
            of(outcome),
            process.seen.get(outcome).copied().unwrap_or_default(),
        );
        // A failed message may wait in the consumer: it counts as released, without a settlement.
        let waits_in_consumer = outcome == "released";
        let most = match (process.ended_well, CLAIM_OUTCOMES.contains(&outcome)) {
            _ if waits_in_consumer => u64::MAX,
            (true, _) | (false, true) => seen,
            // It may have been killed between counting a batch and the record of it.
            (false, false) => seen + u64::from(finder.rules.in_flight),
        };
        let least = if process.ended_well {
            seen.saturating_sub(unread)
        } else {
            0
        };
        if counted < least || counted > most {
            let why = format!(
                "{name} counted the outcome {outcome} {counted} times, the ledger has it {seen} times"
            );
            finder.report_violation(Invariant::I12, None, why);
        }
    }
}

/// The outcome of a claim with this verdict.
fn answer(verdict: &str) -> Option<&'static str> {
    match verdict {
        "granted 1" => Some("first"),
        "busy" => Some("busy"),
        "conflict" => Some("conflict"),
        other if other.starts_with("granted") || other.starts_with("in-doubt") => Some("reclaimed"),
        _ => None,
    }
}

/// The outcome of a settlement.
fn end(how: SettlementKind, why: &str) -> &'static str {
    match (how, why) {
        (SettlementKind::Accepted, "duplicate") => "duplicate",
        (SettlementKind::Accepted, _) => "completed",
        (SettlementKind::Released, _) => "released",
        (SettlementKind::Rejected, why) if why.starts_with("in-doubt") => "in_doubt",
        (SettlementKind::Rejected, _) => "rejected",
    }
}
