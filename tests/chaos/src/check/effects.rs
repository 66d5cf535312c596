//! I2, I3 and I5: what happened at the sink.

use std::collections::HashMap;

use super::{Finder, Invariant, Promise, Remembers};
use crate::ledger::{Record, Unique, What};

/// One application at the sink.
struct Applied<'a> {
    at: u64,
    consumer: &'a str,
    attempt: u32,
    unique: Unique,
}

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    let applied: Vec<Applied<'_>> = finder.history(id).filter_map(applied).collect();
    let unique = applied.iter().filter(|it| it.unique == Unique::Accepted).count();
    let refused = finder.history(id).filter(|record| matches!(record.what, What::Refused { .. })).count();

    let counts = &mut finder.checked.counts;
    counts.raw_effects += applied.len() as u64;
    counts.unique_effects += unique as u64;
    counts.refused += refused as u64;
    counts.duplicated += u64::from(applied.len() > 1);
    if applied.len() > 1 && finder.rules.store == Remembers::Claims {
        finder.found(Invariant::I2, Some(id), format!("{} effects", applied.len()));
    }
    if !applied.is_empty() && unique != 1 {
        finder.found(Invariant::I3, Some(id), format!("{unique} unique effects"));
    }
    for pair in applied.windows(2) {
        let [before, again] = pair else { continue };
        let begun = begun(finder, id, before).min(begun(finder, id, again));
        let cause = finder.windows.cause(begun, again.at, &[before.consumer, again.consumer], finder.rules.aftermath);
        match cause.map(str::to_owned) {
            Some(cause) => *finder.checked.counts.explained.entry(cause).or_default() += 1,
            None => {
                let why = format!("a second effect by {} after one by {}, and nothing in the fault log", again.consumer, before.consumer);
                // Where the store may forget, at most once is held to no more than that.
                let invariant = if finder.rules.store == Remembers::NotAll { Invariant::I2 } else { Invariant::I3 };
                finder.found(if finder.rules.promise == Promise::AtMostOnce { invariant } else { Invariant::I3 }, Some(id), why);
            }
        }
    }
}

/// The keys of ids are what stands before their last `-`; only ids that begin with `k` were sent with a key.
pub(super) fn check_order(finder: &mut Finder<'_>) {
    let mut latest: HashMap<&str, (u64, &str)> = HashMap::new();
    let mut broken = Vec::new();
    for record in finder.ledger.records() {
        let What::Effect { id, unique: Unique::Accepted, .. } = &record.what else { continue };
        let Some((key, number)) = id.strip_prefix('k').and_then(|id| id.rsplit_once('-')) else { continue };
        let Ok(number) = number.parse::<u64>() else { continue };
        let (highest, of) = latest.entry(key).or_insert((number, id));
        if number < *highest {
            broken.push((id, format!("its effect came after that of {of}, which was sent later with the same key")));
        } else {
            (*highest, *of) = (number, id);
        }
    }
    for (id, why) in broken {
        finder.found(Invariant::I5, Some(id), why);
    }
}

fn applied(record: &Record) -> Option<Applied<'_>> {
    match &record.what {
        What::Effect { consumer, attempt, unique, .. } => Some(Applied { at: record.at, consumer, attempt: *attempt, unique: *unique }),
        _ => None,
    }
}

/// When the handler behind an effect was started.
fn begun(finder: &Finder<'_>, id: &str, effect: &Applied<'_>) -> u64 {
    let started = finder.history(id).filter(|record| record.by == effect.consumer && record.at <= effect.at);
    let started = started.filter(|record| matches!(record.what, What::Started { attempt, .. } if attempt == effect.attempt));
    started.last().map_or(effect.at, |record| record.at)
}
