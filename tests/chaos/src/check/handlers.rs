//! I4: no two concurrent handlers of one id.

use super::{Finder, Invariant, micros};
use crate::ledger::{Record, What};

/// One run of a handler.
struct HandlerRun<'a> {
    by: &'a str,
    attempt: u32,
    from: u64,
    to: u64,
}

pub(super) fn check(finder: &mut Finder<'_>, id: &str) {
    let runs = runs(finder, id);
    for (index, earlier) in runs.iter().enumerate() {
        for later in runs[index + 1..]
            .iter()
            .filter(|later| later.from < earlier.to)
        {
            pair(finder, id, earlier, later);
        }
    }
}

fn pair(finder: &mut Finder<'_>, id: &str, earlier: &HandlerRun<'_>, later: &HandlerRun<'_>) {
    let concurrent_time = finder.windows.awake(earlier.by, later.from, earlier.to);
    let lease = micros(finder.rules.lease);
    let had_its_lease = later.from - earlier.from < lease
        && finder
            .windows
            .interruption(
                earlier.by,
                earlier.from.saturating_sub(lease),
                later.from,
                finder.rules,
            )
            .is_none();
    let why = if later.attempt <= earlier.attempt {
        format!(
            "attempt {} is not higher than {}",
            later.attempt, earlier.attempt
        )
    } else if had_its_lease {
        "the earlier handler still had its lease".to_owned()
    } else if concurrent_time > micros(finder.rules.grace) {
        format!(
            "the earlier handler continued for {} ms",
            concurrent_time / 1_000
        )
    } else {
        let counts = &mut finder.checked.counts;
        counts.fenced += 1;
        counts.fenced_longest_ms = counts.fenced_longest_ms.max(concurrent_time / 1_000);
        return;
    };
    finder.report_violation(
        Invariant::I4,
        Some(id),
        format!(
            "concurrent handlers of {} and {}: {why}",
            earlier.by, later.by
        ),
    );
}

/// The runs of an id in the order of their starts.
fn runs<'a>(finder: &Finder<'a>, id: &str) -> Vec<HandlerRun<'a>> {
    let history = finder.history(id);
    let started = history.clone().filter_map(|record| match &record.what {
        What::Started { attempt, run, .. } => Some((record, *attempt, *run)),
        _ => None,
    });
    let run = |(record, attempt, run): (&'a Record, u32, u64)| {
        let ends = |end: &&Record| {
            end.by == record.by
                && matches!(end.what, What::Ended { run: ended, .. } if ended == run)
        };
        let to = history
            .clone()
            .find(ends)
            .map_or_else(|| finder.windows.end_of_process(&record.by), |end| end.at);
        HandlerRun {
            by: &record.by,
            attempt,
            from: record.at,
            to,
        }
    };
    started.map(run).collect()
}
