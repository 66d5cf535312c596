//! I11: bounds on handlers, requests and memory while the store is unavailable or refuses writes.

use std::collections::{HashMap, HashSet, VecDeque};

use super::faults::LeaseRenewals;
use super::{Finder, Invariant, micros};
use crate::ledger::{HandlerEnd, StoreOperation, What};

/// How long after the start of an outage a reply may still be read on a busy machine, in
/// microseconds. A disk that was just filled may also have room in its last block for a moment.
const START_TOLERANCE: u64 = 1_000_000;
/// How long before the recorded end of an outage the store may reply again, in microseconds.
const END_TOLERANCE: u64 = 500_000;
/// The maximum number of requests of a process to an unavailable store per second.
const MAX_REQUESTS: usize = 20;
/// The maximum growth of the memory of a process during an outage, in KiB.
const MAX_GROWTH: u64 = 50 * 1_024;
/// One second in microseconds.
const SECOND: u64 = 1_000_000;

pub(super) fn check(finder: &mut Finder<'_>) {
    concurrent_handlers(finder);
    let outages: Vec<(u64, u64)> = finder.windows.store_outages().collect();
    for (from, to) in outages {
        finder.checked.counts.store_unavailable_ms += (to - from) / 1_000;
        handlers(finder, from, to, LeaseRenewals::Refused);
        requests(finder, from, to);
        memory(finder, from, to);
    }
    // A store that refuses writes replies at once, so the number of requests is not bounded. But no
    // handler may start.
    let refuses: Vec<(u64, u64, LeaseRenewals)> = finder.windows.store_refusals().collect();
    for (from, to, renewals) in refuses {
        finder.checked.counts.store_refusing_ms += (to - from) / 1_000;
        handlers(finder, from, to, renewals);
    }
    let resident = finder
        .ledger
        .records()
        .iter()
        .filter_map(|record| match record.what {
            What::Sampled { resident, .. } => Some(resident),
            _ => None,
        });
    finder.checked.counts.resident = resident.max().unwrap_or_default();
}

/// Checks the number of concurrent handlers in a process. Handlers that are being cancelled do not
/// count: their successors start when they are cancelled, not when they have ended.
fn concurrent_handlers(finder: &mut Finder<'_>) {
    let mut cancelled: HashMap<(&str, u64), u64> = HashMap::new();
    let ledger = finder.ledger;
    for record in ledger.records() {
        if let What::Ended {
            run,
            how: HandlerEnd::Dropped,
            ..
        } = record.what
        {
            cancelled.insert((&record.by, run), record.at);
        }
    }
    let mut running: HashMap<&str, HashSet<u64>> = HashMap::new();
    let mut most: HashMap<&str, usize> = HashMap::new();
    let limit = finder.rules.in_flight as usize;
    for record in ledger.records() {
        match record.what {
            What::Started { run, .. } => {
                let now = running.entry(&record.by).or_default();
                now.insert(run);
                let mut count = now.len();
                if count > limit {
                    let ends = |run: &&u64| {
                        cancelled
                            .get(&(record.by.as_str(), **run))
                            .is_some_and(|at| at - record.at <= micros(finder.rules.grace))
                    };
                    count -= now.iter().filter(ends).count();
                }
                let most = most.entry(&record.by).or_default();
                *most = (*most).max(count);
            }
            What::Ended { run, .. } => drop(running.entry(&record.by).or_default().remove(&run)),
            _ => {}
        }
    }
    for (consumer, most) in most {
        let counts = &mut finder.checked.counts;
        counts.max_concurrent_handlers = counts.max_concurrent_handlers.max(most as u64);
        if most > limit {
            let why = format!("{consumer} ran {most} handlers at once; max_in_flight is {limit}");
            finder.report_violation(Invariant::I11, None, why);
        }
    }
}

/// A message that was claimed before may wait, for example while one that may have crashed a process
/// runs alone, but not longer than its lease unless the lease is renewed.
fn handlers(finder: &mut Finder<'_>, from: u64, to: u64, renewals: LeaseRenewals) {
    let (ledger, windows, lease) = (finder.ledger, finder.windows, micros(finder.rules.lease));
    for record in ledger.between(from + START_TOLERANCE, to.saturating_sub(END_TOLERANCE)) {
        // A process that was not scheduled may act late on an earlier reply.
        let ran = || {
            windows.awake(
                &record.by,
                record.at.saturating_sub(START_TOLERANCE),
                record.at,
            ) >= START_TOLERANCE
        };
        let late = record.at - from;
        let did = match &record.what {
            What::Answered {
                operation: StoreOperation::Claim,
                verdict,
                ..
            } if verdict.starts_with("granted") => "was granted a claim",
            What::Started { .. }
                if late > lease + START_TOLERANCE && renewals == LeaseRenewals::Refused =>
            {
                "started a handler"
            }
            _ => continue,
        };
        if ran() {
            finder.report_violation(
                Invariant::I11,
                record.what.id(),
                format!(
                    "{} {did} {} ms after the store became unavailable or refused writes",
                    record.by,
                    late / 1_000
                ),
            );
        }
    }
}

/// Counts requests without a reply. Operations of one request have the same time.
fn requests(finder: &mut Finder<'_>, from: u64, to: u64) {
    let mut latest: HashMap<&str, VecDeque<u64>> = HashMap::new();
    let ledger = finder.ledger;
    for record in ledger.between(from, to) {
        let What::Answered {
            operation: StoreOperation::Claim,
            verdict,
            ..
        } = &record.what
        else {
            continue;
        };
        let times = latest.entry(&record.by).or_default();
        if !matches!(verdict.as_str(), "unknown" | "not applied")
            || times.back() == Some(&record.at)
        {
            continue;
        }
        times.push_back(record.at);
        while times
            .front()
            .is_some_and(|first| *first + SECOND <= record.at)
        {
            times.pop_front();
        }
        let counts = &mut finder.checked.counts;
        counts.max_requests_while_unavailable = counts
            .max_requests_while_unavailable
            .max(times.len() as u64);
        if times.len() == MAX_REQUESTS + 1 {
            let why = format!(
                "{} sent more than {MAX_REQUESTS} requests per second to an unavailable store",
                record.by
            );
            finder.report_violation(Invariant::I11, None, why);
        }
    }
}

fn memory(finder: &mut Finder<'_>, from: u64, to: u64) {
    let mut first: HashMap<&str, u64> = HashMap::new();
    let ledger = finder.ledger;
    // The last sample before the outage is the reference.
    for record in ledger.between(from.saturating_sub(SECOND), to) {
        let What::Sampled { consumer, resident } = &record.what else {
            continue;
        };
        if record.at < from || !first.contains_key(consumer.as_str()) {
            first.insert(consumer, *resident);
            continue;
        }
        let growth = resident.saturating_sub(first[consumer.as_str()]);
        let counts = &mut finder.checked.counts;
        counts.max_growth_while_unavailable = counts.max_growth_while_unavailable.max(growth);
        if growth > MAX_GROWTH {
            finder.report_violation(
                Invariant::I11,
                None,
                format!("{consumer} grew by {growth} KiB while the store was unavailable"),
            );
        }
    }
}
