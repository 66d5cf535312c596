//! I11: what a process does while its store is away or takes nothing, and how much it holds.

use std::collections::{HashMap, HashSet, VecDeque};

use super::faults::Renewals;
use super::{Finder, Invariant, micros};
use crate::ledger::{Asked, Ending, What};

/// How long after the store went away an answer of it may still be read, by a process on a busy
/// machine, and how long a disk that has just been filled may still have room in its last block.
const NOTICED: u64 = 1_000_000;
/// How long before its end was written down the store may have answered again.
const ENDED: u64 = 500_000;
/// How often a process may ask a store that is away, in a second.
const QUESTIONS: usize = 20;
/// By how much its memory may grow meanwhile, in KiB.
const GROWTH: u64 = 50 * 1_024;
const SECOND: u64 = 1_000_000;

pub(super) fn check(finder: &mut Finder<'_>) {
    work_at_once(finder);
    let away: Vec<(u64, u64)> = finder.windows.store_away().collect();
    for (from, to) in away {
        finder.checked.counts.away_ms += (to - from) / 1_000;
        handlers(finder, from, to, Renewals::Refused);
        questions(finder, from, to);
        memory(finder, from, to);
    }
    // What refuses is fast, so it may be asked as often as messages come; what it refuses nobody
    // may run.
    let refuses: Vec<(u64, u64, Renewals)> = finder.windows.store_refuses().collect();
    for (from, to, renewals) in refuses {
        finder.checked.counts.refusing_ms += (to - from) / 1_000;
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

/// Handlers that run at once in one process. Those that are cancelled at that moment do not count:
/// what takes their places begins when they are told to end, and not when they have ended.
fn work_at_once(finder: &mut Finder<'_>) {
    let mut cancelled: HashMap<(&str, u64), u64> = HashMap::new();
    let ledger = finder.ledger;
    for record in ledger.records() {
        if let What::Ended {
            run,
            how: Ending::Dropped,
            ..
        } = record.what
        {
            cancelled.insert((&record.by, run), record.at);
        }
    }
    let mut running: HashMap<&str, HashSet<u64>> = HashMap::new();
    let mut most: HashMap<&str, usize> = HashMap::new();
    let may = finder.rules.in_flight as usize;
    for record in ledger.records() {
        match record.what {
            What::Started { run, .. } => {
                let now = running.entry(&record.by).or_default();
                now.insert(run);
                let mut count = now.len();
                if count > may {
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
        counts.at_once = counts.at_once.max(most as u64);
        if most > may {
            let why = format!("{consumer} ran {most} handlers at once, and may run {may}");
            finder.found(Invariant::I11, None, why);
        }
    }
}

/// A claim that was granted before may wait for its turn, say because what may have ended a process
/// runs alone; but for no longer than its lease, unless that is renewed.
fn handlers(finder: &mut Finder<'_>, from: u64, to: u64, renewals: Renewals) {
    let (ledger, windows, lease) = (finder.ledger, finder.windows, micros(finder.rules.lease));
    for record in ledger.between(from + NOTICED, to.saturating_sub(ENDED)) {
        // What a process that did not run had been told before, it may begin when it runs again.
        let ran =
            || windows.awake(&record.by, record.at.saturating_sub(NOTICED), record.at) >= NOTICED;
        let late = record.at - from;
        let did = match &record.what {
            What::Answered {
                ask: Asked::Claim,
                verdict,
                ..
            } if verdict.starts_with("granted") => "was granted a claim",
            What::Started { .. } if late > lease + NOTICED && renewals == Renewals::Refused => {
                "started a handler"
            }
            _ => continue,
        };
        if ran() {
            finder.found(
                Invariant::I11,
                record.what.id(),
                format!(
                    "{} {did} {} ms after the store went away or took nothing any more",
                    record.by,
                    late / 1_000
                ),
            );
        }
    }
}

/// Questions that got no answer: what was asked at once has the same time.
fn questions(finder: &mut Finder<'_>, from: u64, to: u64) {
    let mut latest: HashMap<&str, VecDeque<u64>> = HashMap::new();
    let ledger = finder.ledger;
    for record in ledger.between(from, to) {
        let What::Answered {
            ask: Asked::Claim,
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
        counts.away_questions = counts.away_questions.max(times.len() as u64);
        if times.len() == QUESTIONS + 1 {
            let why = format!(
                "{} put more than {QUESTIONS} questions a second to a store that was away",
                record.by
            );
            finder.found(Invariant::I11, None, why);
        }
    }
}

fn memory(finder: &mut Finder<'_>, from: u64, to: u64) {
    let mut first: HashMap<&str, u64> = HashMap::new();
    let ledger = finder.ledger;
    // As it was just before counts as the beginning.
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
        counts.away_growth = counts.away_growth.max(growth);
        if growth > GROWTH {
            finder.found(
                Invariant::I11,
                None,
                format!("{consumer} grew by {growth} KiB while the store was away"),
            );
        }
    }
}
