//! I10: after a fault effects come again within its bound.

use super::{Finder, Invariant, Remembers, micros};
use crate::flow::SPAN;
use crate::ledger::What;
use crate::schedule::Kind;

/// How many messages the broker has to have confirmed meanwhile, so that there was something to
/// have an effect.
const SOMETHING: usize = 20;
/// How much of the processors' time nobody may have needed, in percent, so that what took long took
/// long for no want of that.
const TO_SPARE: u64 = 25;

pub(super) fn check(finder: &mut Finder<'_>) {
    first_effect(finder);
    rate(finder);
}

/// When effects came at nine tenths of their rate. After two faults at once both bounds may be
/// needed; after a message that ended a process nobody is held to those of a fault.
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
        let of: Option<Vec<Kind>> = kinds.iter().map(|kind| Kind::of(kind)).collect();
        let Some(of) = of.filter(|_| *idle >= TO_SPARE) else {
            continue;
        };
        if of.contains(&Kind::FailOverRedis) && finder.rules.store == Remembers::NotAll {
            continue;
        }
        let ended = record.at.saturating_sub(took_ms * 1_000 + micros(SPAN));
        let felt = |at: u64| at <= record.at && at + bound(Kind::KillConsumer) >= ended;
        if finder.windows.aborts().any(felt) {
            continue;
        }
        let bound = of.into_iter().map(bound).sum::<u64>();
        let bound_ms = (bound + finder.windows.stalled(ended, ended + bound)) / 1_000;
        let what = kinds.join(" + ");
        let counts = &mut finder.checked.counts;
        let longest = counts.rate_again_ms.entry(what.clone()).or_default();
        *longest = (*longest).max(*took_ms);
        *counts.rate_again_judged.entry(what.clone()).or_default() += 1;
        if *took_ms > bound_ms {
            let why = format!(
                "nine tenths of the rate were back {took_ms} ms after the end of {what}, and may take {bound_ms}"
            );
            finder.found(Invariant::I10, None, why);
        }
    }
}

fn first_effect(finder: &mut Finder<'_>) {
    let over: Vec<(String, u64)> = finder
        .windows
        .over()
        .map(|(kind, ended)| (kind.to_owned(), ended))
        .collect();
    // Until when effects may be away for what was over before.
    let mut excused: Vec<(u64, u64)> = over
        .iter()
        .filter_map(|(kind, ended)| Some((*ended, ended + bound(Kind::of(kind)?))))
        .collect();
    excused.extend(
        finder
            .windows
            .aborts()
            .map(|at| (at, at + bound(Kind::KillConsumer))),
    );
    for (kind, ended) in over {
        let Some(of) = Kind::of(&kind) else { continue };
        // A Redis that has forgotten lets at most once rest until a person says otherwise.
        if of == Kind::FailOverRedis && finder.rules.store == Remembers::NotAll {
            continue;
        }
        let before = excused
            .iter()
            .filter(|(over, _)| *over <= ended)
            .map(|(_, until)| *until)
            .max();
        let latest = before.unwrap_or_default().max(ended + bound(of));
        // What did not run could not consume: on a machine that is too busy that is no fault of the
        // consumers'.
        let latest = latest + finder.windows.stalled(ended, latest);
        let ledger = finder.ledger;
        let mut confirmed = 0;
        let effect = ledger.between(ended, u64::MAX).find(|record| {
            confirmed +=
                usize::from(matches!(record.what, What::Confirmed { .. }) && record.at <= latest);
            matches!(record.what, What::Effect { .. })
        });
        let came = effect.map_or(u64::MAX, |record| record.at);
        // While another fault lasts, it is that one's.
        if finder.windows.another_lasts(ended, came.min(latest)) {
            continue;
        }
        let counts = &mut finder.checked.counts;
        if let Some(effect) = effect {
            let longest = counts.again_ms.entry(kind.clone()).or_default();
            *longest = (*longest).max((effect.at - ended) / 1_000);
        }
        *counts.again_judged.entry(kind.clone()).or_default() += 1;
        if came > latest && confirmed >= SOMETHING {
            let ms = (latest - ended) / 1_000;
            finder.found(
                Invariant::I10,
                None,
                format!(
                    "no effect within {ms} ms of the end of {kind}, and {confirmed} messages came"
                ),
            );
        }
    }
}

fn bound(kind: Kind) -> u64 {
    micros(kind.recovery_bound())
}
