//! I10: after a fault effects come again within its bound.

use super::{Finder, Invariant, micros};
use crate::ledger::What;
use crate::schedule::Kind;

/// How many messages the broker has to have confirmed meanwhile, so that there was something to have an effect.
const SOMETHING: usize = 20;

pub(super) fn check(finder: &mut Finder<'_>) {
    let over: Vec<(String, u64)> = finder.windows.over().map(|(kind, ended)| (kind.to_owned(), ended)).collect();
    for (kind, ended) in over {
        let Some(of) = Kind::of(&kind) else { continue };
        // Where nothing was set, it is only told.
        let bound = of.recovery_bound();
        let latest = ended + micros(bound.unwrap_or(finder.rules.aftermath));
        // What did not run could not consume: on a machine that is too busy that is no fault of the consumers'.
        let latest = latest + finder.windows.stalled(ended, latest);
        let ledger = finder.ledger;
        let mut confirmed = 0;
        let effect = ledger.between(ended, u64::MAX).find(|record| {
            confirmed += usize::from(matches!(record.what, What::Confirmed { .. }) && record.at <= latest);
            matches!(record.what, What::Effect { .. })
        });
        let came = effect.map_or(u64::MAX, |record| record.at);
        // While another fault lasts, it is that one's.
        if finder.windows.another_lasts(ended, came.min(latest), micros(finder.rules.aftermath)) {
            continue;
        }
        if let Some(effect) = effect {
            let longest = finder.checked.counts.again_ms.entry(kind.clone()).or_default();
            *longest = (*longest).max((effect.at - ended) / 1_000);
        }
        if bound.is_some() && came > latest && confirmed >= SOMETHING {
            let ms = (latest - ended) / 1_000;
            finder.found(Invariant::I10, None, format!("no effect within {ms} ms of the end of {kind}, and {confirmed} messages came"));
        }
    }
}
