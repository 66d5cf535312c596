//! I2, I3 and I5: what happened at the sink.

use std::collections::HashMap;

use super::ends::UNHEARD;
use super::{Finder, Invariant, Ordered, Promise, Remembers, micros};
use crate::ledger::{Asked, Record, Unique, What};

/// One application at the sink.
struct Applied<'a> {
    at: u64,
    consumer: &'a str,
    attempt: u32,
    unique: Unique,
}

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    let applied: Vec<Applied<'_>> = finder.history(id).filter_map(applied).collect();
    let unique = applied
        .iter()
        .filter(|it| it.unique == Unique::Accepted)
        .count();
    let refused = finder
        .history(id)
        .filter(|record| matches!(record.what, What::Refused { .. }))
        .count();

    let counts = &mut finder.checked.counts;
    counts.raw_effects += applied.len() as u64;
    counts.unique_effects += unique as u64;
    counts.refused += refused as u64;
    counts.duplicated += u64::from(applied.len() > 1);
    if applied.len() > 1 && finder.rules.store == Remembers::Claims {
        finder.found(
            Invariant::I2,
            Some(id),
            format!("{} effects", applied.len()),
        );
    }
    if !applied.is_empty() && unique != 1 {
        finder.found(Invariant::I3, Some(id), format!("{unique} unique effects"));
    }
    for pair in applied.windows(2) {
        let [before, again] = pair else { continue };
        match cause(finder, id, before, again) {
            Ok(cause) => *finder.checked.counts.explained.entry(cause).or_default() += 1,
            Err(why) => {
                let why = format!(
                    "a second effect by {} after one by {}, and {why}",
                    again.consumer, before.consumer
                );
                // Where the store may forget, at most once is held to no more than that.
                let invariant = if finder.rules.store == Remembers::NotAll {
                    Invariant::I2
                } else {
                    Invariant::I3
                };
                finder.found(
                    if finder.rules.promise == Promise::AtMostOnce {
                        invariant
                    } else {
                        Invariant::I3
                    },
                    Some(id),
                    why,
                );
            }
        }
    }
}

/// Which fault a second effect comes from: one that can have cut off the run that began first,
/// before its end was recorded and before the other one began. Else what is wrong.
fn cause(
    finder: &Finder<'_>,
    id: &str,
    before: &Applied<'_>,
    again: &Applied<'_>,
) -> Result<String, String> {
    let (windows, rules) = (finder.windows, finder.rules);
    let nothing = || "nothing in the fault log can have cut off the first run".to_owned();
    let mut runs = [
        (begun(finder, id, before), before),
        (begun(finder, id, again), again),
    ];
    if rules.store == Remembers::NotAll {
        let from = runs[0].0.min(runs[1].0);
        let cause = windows.cause(
            from,
            again.at,
            &[before.consumer, again.consumer],
            rules.aftermath,
        );
        return cause.map(str::to_owned).ok_or_else(nothing);
    }
    runs.sort_by_key(|(begun, _)| *begun);
    let [(from, first), (to, _)] = runs;
    let recorded = |record: &&Record| {
        let done = matches!(&record.what, What::Answered { ask: Asked::Complete, verdict, .. } if verdict == "done");
        done && record.by == first.consumer
            && (from..to).contains(&record.at)
            && !windows.loses(record.at, UNHEARD)
    };
    if finder.history(id).any(|record| recorded(&record)) {
        return Err("the end of the first was recorded before the other one began".to_owned());
    }
    if (before.consumer, before.attempt) == (again.consumer, again.attempt) {
        return Err("both are of one attempt".to_owned());
    }
    // The lease may have been lost by what was felt before the handler began.
    let cut_off = windows.cut_off(
        first.consumer,
        from.saturating_sub(micros(rules.lease)),
        to,
        rules,
    );
    cut_off.map(str::to_owned).ok_or_else(nothing)
}

/// The keys of ids are what stands before their last `-`; only ids that begin with `k` were sent
/// with a key. Into a queue what is not confirmed is sent again, and may come to stand behind what
/// was sent later: there it is in its place only if it was confirmed before the later one was sent.
pub(super) fn check_order(finder: &mut Finder<'_>) {
    let mut latest: HashMap<&str, (u64, &str)> = HashMap::new();
    let mut broken = Vec::new();
    for record in finder.ledger.records() {
        let What::Effect {
            id,
            unique: Unique::Accepted,
            ..
        } = &record.what
        else {
            continue;
        };
        let Some((key, number)) = id.strip_prefix('k').and_then(|id| id.rsplit_once('-')) else {
            continue;
        };
        let Ok(number) = number.parse::<u64>() else {
            continue;
        };
        let (highest, of) = latest.entry(key).or_insert((number, id));
        if number < *highest
            && finder.rules.order == Ordered::ByKeyOfAQueue
            && !stood_before(finder, id, of)
        {
            continue;
        }
        if number < *highest {
            broken.push((
                id,
                format!(
                    "its effect came after that of {of}, which was sent later with the same key"
                ),
            ));
        } else {
            (*highest, *of) = (number, id);
        }
    }
    for (id, why) in broken {
        finder.found(Invariant::I5, Some(id), why);
    }
}

/// Whether one was confirmed before the other was sent.
fn stood_before(finder: &Finder<'_>, one: &str, other: &str) -> bool {
    let confirmed = finder
        .history(one)
        .find(|record| matches!(record.what, What::Confirmed { .. }));
    let sent = finder
        .history(other)
        .find(|record| matches!(record.what, What::Attempted { .. }));
    confirmed
        .zip(sent)
        .is_some_and(|(confirmed, sent)| confirmed.at <= sent.at)
}

fn applied(record: &Record) -> Option<Applied<'_>> {
    match &record.what {
        What::Effect {
            consumer,
            attempt,
            unique,
            ..
        } => Some(Applied {
            at: record.at,
            consumer,
            attempt: *attempt,
            unique: *unique,
        }),
        _ => None,
    }
}

/// When the handler behind an effect was started.
fn begun(finder: &Finder<'_>, id: &str, effect: &Applied<'_>) -> u64 {
    let started = finder
        .history(id)
        .filter(|record| record.by == effect.consumer && record.at <= effect.at);
    let started = started.filter(
        |record| matches!(record.what, What::Started { attempt, .. } if attempt == effect.attempt),
    );
    started.last().map_or(effect.at, |record| record.at)
}
