//! I10: after a fault, effects resume within its bound.

use super::{ClaimDurability, Finder, Invariant, micros};
use crate::flow::SPAN;
use crate::ledger::What;
use crate::schedule::FaultKind;

/// The minimum number of confirmed messages after a fault; with fewer, a missing effect proves
/// nothing.
const MIN_CONFIRMED: usize = 20;
/// The minimum idle CPU time in percent; with less, a slow recovery may be due to the load of the
/// machine.
const MIN_IDLE_PERCENT: u64 = 25;

pub(super) fn check(finder: &mut Finder<'_>) {
    first_effect(finder);
    rate(finder);
}

/// Checks when effects reached nine tenths of their rate. After two concurrent faults the bound is
/// the sum of both. Not checked if a message made a process abort meanwhile.
fn rate(finder: &mut Finder<'_>) {
    let ledger = finder.ledger;
    for record in ledger.records() {
        let What::Recovered {
            kinds,
            took_ms,
            idle,
        } = &record.what
        else {
            continue;
        };
        let of: Option<Vec<FaultKind>> = kinds.iter().map(|kind| FaultKind::of(kind)).collect();
        let Some(of) = of.filter(|_| *idle >= MIN_IDLE_PERCENT) else {
            continue;
        };
        if of.contains(&FaultKind::FailOverRedis)
            && finder.rules.store == ClaimDurability::MayBeLost
        {
            continue;
        }
        let ended = record.at.saturating_sub(took_ms * 1_000 + micros(SPAN));
        let may_affect = |at: u64| at <= record.at && at + bound(FaultKind::KillConsumer) >= ended;
        if finder.windows.aborts().any(may_affect) {
            continue;
        }
        let bound = of.into_iter().map(bound).sum::<u64>();
        let bound_ms = (bound + finder.windows.stalled(ended, ended + bound)) / 1_000;
        let what = kinds.join(" + ");
        let counts = &mut finder.checked.counts;
        let longest = counts.rate_recovery_ms.entry(what.clone()).or_default();
        *longest = (*longest).max(*took_ms);
        *counts.rate_recoveries.entry(what.clone()).or_default() += 1;
        if *took_ms > bound_ms {
            let why = format!(
                "effects reached nine tenths of their rate {took_ms} ms after the end of {what}; the bound is {bound_ms} ms"
            );
            finder.report_violation(Invariant::I10, None, why);
        }
    }
}

fn first_effect(finder: &mut Finder<'_>) {
    let over: Vec<(String, u64)> = finder
        .windows
        .ended_faults()
        .map(|(kind, ended)| (kind.to_owned(), ended))
        .collect();
    // The times until which earlier faults excuse missing effects.
    let mut excused: Vec<(u64, u64)> = over
        .iter()
        .filter_map(|(kind, ended)| Some((*ended, ended + bound(FaultKind::of(kind)?))))
        .collect();
    excused.extend(
        finder
            .windows
            .aborts()
            .map(|at| (at, at + bound(FaultKind::KillConsumer))),
    );
    for (kind, ended) in over {
        let Some(of) = FaultKind::of(&kind) else {
            continue;
        };
        // After Redis lost claims, at most once pauses until an operator resumes it.
        if of == FaultKind::FailOverRedis && finder.rules.store == ClaimDurability::MayBeLost {
            continue;
        }
        let before = excused
            .iter()
            .filter(|(over, _)| *over <= ended)
            .map(|(_, until)| *until)
            .max();
        let latest = before.unwrap_or_default().max(ended + bound(of));
        // Time in which an overloaded machine did not schedule the consumers does not count.
        let latest = latest + finder.windows.stalled(ended, latest);
        let ledger = finder.ledger;
        let mut confirmed = 0;
        let effect = ledger.between(ended, u64::MAX).find(|record| {
            confirmed +=
                usize::from(matches!(record.what, What::Confirmed { .. }) && record.at <= latest);
            matches!(record.what, What::Effect { .. })
        });
        let came = effect.map_or(u64::MAX, |record| record.at);
        // During another fault the delay may have that cause.
        if finder.windows.overlaps_another(ended, came.min(latest)) {
            continue;
        }
        let counts = &mut finder.checked.counts;
        if let Some(effect) = effect {
            let longest = counts.first_effect_ms.entry(kind.clone()).or_default();
            *longest = (*longest).max((effect.at - ended) / 1_000);
        }
        *counts.first_effects.entry(kind.clone()).or_default() += 1;
        if came > latest && confirmed >= MIN_CONFIRMED {
            let ms = (latest - ended) / 1_000;
            finder.report_violation(
                Invariant::I10,
                None,
                format!(
                    "no effect within {ms} ms of the end of {kind}, although {confirmed} messages were confirmed"
                ),
            );
        }
    }
}

fn bound(kind: FaultKind) -> u64 {
    micros(kind.recovery_bound())
}
