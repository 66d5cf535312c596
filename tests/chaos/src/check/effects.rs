//! I2, I3 and I5: the effects at the sink.

use std::collections::HashMap;

use super::ends::REPLICATION_LAG;
use super::{ClaimDurability, Finder, Invariant, Ordered, TestedGuarantee, micros};
use crate::ledger::{Record, StoreOperation, Unique, What};

/// One effect at the sink.
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
        .filter(|it| it.unique == Unique::First)
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
    if applied.len() > 1 && finder.rules.store == ClaimDurability::Kept {
        finder.report_violation(
            Invariant::I2,
            Some(id),
            format!("{} effects", applied.len()),
        );
    }
    if !applied.is_empty() && unique != 1 {
        finder.report_violation(Invariant::I3, Some(id), format!("{unique} unique effects"));
    }
    for pair in applied.windows(2) {
        let [before, again] = pair else { continue };
        match cause(finder, id, before, again) {
            Ok(cause) => *finder.checked.counts.explained.entry(cause).or_default() += 1,
            Err(why) => {
                let why = format!(
                    "a second effect by {} after one by {}: {why}",
                    again.consumer, before.consumer
                );
                // If a failover may lose claims, a second effect only needs a cause.
                let invariant = if finder.rules.store == ClaimDurability::MayBeLost {
                    Invariant::I2
                } else {
                    Invariant::I3
                };
                finder.report_violation(
                    if finder.rules.guarantee == TestedGuarantee::AtMostOnce {
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

/// The fault that caused a second effect: one that may have interrupted the run that started first,
/// before its completion was recorded and before the other run started.
///
/// # Errors
/// Why there is none.
fn cause(
    finder: &Finder<'_>,
    id: &str,
    before: &Applied<'_>,
    again: &Applied<'_>,
) -> Result<String, String> {
    let (windows, rules) = (finder.windows, finder.rules);
    let nothing = || "no fault in the fault log can have interrupted the first run".to_owned();
    let mut runs = [
        (start_time(finder, id, before), before),
        (start_time(finder, id, again), again),
    ];
    if rules.store == ClaimDurability::MayBeLost {
        let from = runs[0].0.min(runs[1].0);
        let cause = windows.cause(
            from,
            again.at,
            &[before.consumer, again.consumer],
            rules.aftermath,
        );
        return cause.map(str::to_owned).ok_or_else(nothing);
    }
    runs.sort_by_key(|(start_time, _)| *start_time);
    let [(from, first), (to, _)] = runs;
    let recorded = |record: &&Record| {
        let done = matches!(&record.what, What::Answered { operation: StoreOperation::Complete, verdict, .. } if verdict == "done");
        done && record.by == first.consumer
            && (from..to).contains(&record.at)
            && !windows.may_lose(record.at, REPLICATION_LAG)
    };
    if finder.history(id).any(|record| recorded(&record)) {
        return Err(
            "the completion of the first run was recorded before the other run started".to_owned(),
        );
    }
    if (before.consumer, before.attempt) == (again.consumer, again.attempt) {
        return Err("both effects have the same attempt".to_owned());
    }
    // The lease may have been lost by a fault before the handler started.
    let interruption = windows.interruption(
        first.consumer,
        from.saturating_sub(micros(rules.lease)),
        to,
        rules,
    );
    interruption.map(str::to_owned).ok_or_else(nothing)
}

/// I5. An id that starts with `k` has a key: the part before its last `-`. In a queue, a message
/// that was not confirmed is published again and may follow later ones; there, the order is checked
/// only against messages published after its confirmation.
pub(super) fn check_order(finder: &mut Finder<'_>) {
    let mut latest: HashMap<&str, (u64, &str)> = HashMap::new();
    let mut broken = Vec::new();
    for record in finder.ledger.records() {
        let What::Effect {
            id,
            unique: Unique::First,
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
            && !was_confirmed_before(finder, id, of)
        {
            continue;
        }
        if number < *highest {
            broken.push((
                id,
                format!(
                    "its effect followed that of {of}, which was published later with the same key"
                ),
            ));
        } else {
            (*highest, *of) = (number, id);
        }
    }
    for (id, why) in broken {
        finder.report_violation(Invariant::I5, Some(id), why);
    }
}

/// Whether one message was confirmed before the other was published.
fn was_confirmed_before(finder: &Finder<'_>, one: &str, other: &str) -> bool {
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

/// The start time of the handler that had an effect.
fn start_time(finder: &Finder<'_>, id: &str, effect: &Applied<'_>) -> u64 {
    let started = finder
        .history(id)
        .filter(|record| record.by == effect.consumer && record.at <= effect.at);
    let started = started.filter(
        |record| matches!(record.what, What::Started { attempt, .. } if attempt == effect.attempt),
    );
    started.last().map_or(effect.at, |record| record.at)
}
