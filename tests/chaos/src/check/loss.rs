//! I1, and the counts of Jepsen's `total-queue`.

use super::{Finder, Invariant};
use crate::ledger::{RejectedTo, What};

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    let has = |wanted: fn(&What) -> bool| finder.history(id).any(|record| wanted(&record.what));
    let attempted = has(|what| matches!(what, What::Attempted { .. }));
    let confirmed = has(|what| matches!(what, What::Confirmed { .. }));
    let effect = has(|what| matches!(what, What::Effect { .. }));
    let dead = has(|what| {
        matches!(
            what,
            What::Rejected {
                place: RejectedTo::DeadLetters,
                ..
            }
        )
    });
    let doubted = has(|what| {
        matches!(
            what,
            What::Rejected {
                place: RejectedTo::InDoubt,
                ..
            }
        )
    });

    let counts = &mut finder.checked.counts;
    counts.attempted += u64::from(attempted);
    counts.acknowledged += u64::from(confirmed);
    counts.dead_letters += u64::from(dead);
    counts.in_doubt += u64::from(doubted);
    counts.recovered += u64::from(attempted && !confirmed && effect);
    if effect && !attempted {
        counts.unexpected += 1;
        finder.report_violation(
            Invariant::Unexpected,
            Some(id),
            "an effect of an id that was never sent".into(),
        );
    }
    if confirmed && !effect && !dead && !doubted {
        finder.checked.counts.lost += 1;
        finder.report_violation(
            Invariant::I1,
            Some(id),
            "confirmed, but without an effect, a dead letter or an in-doubt message".into(),
        );
    }
}
