//! Constructed ledgers with recovery times.

use super::*;

/// A ledger in which effects reached nine tenths of their rate this long after these faults, with
/// this much idle CPU time in percent.
fn recovered(kinds: &[&str], took_ms: u64, idle: u64) -> Story {
    let kinds = kinds.iter().map(|kind| (*kind).to_owned()).collect();
    Story::default().at(
        60_000,
        "player",
        What::Recovered {
            kinds,
            took_ms,
            idle,
        },
    )
}

#[test]
fn i10_at_nine_tenths_of_the_rate_where_the_machine_has_time_to_spare() {
    let late = [(Invariant::I10, None)];
    assert_eq!(recovered(&["kill-redis"], 5_100, 40).breaks(&RULES), late);
    assert_eq!(recovered(&["kill-redis"], 4_900, 40).breaks(&RULES), []);
    assert_eq!(
        recovered(&["kill-redis"], 5_100, 24).breaks(&RULES),
        [],
        "the machine was busy"
    );
    assert_eq!(recovered(&["kill-consumer"], 9_000, 40).breaks(&RULES), []);
    // Two at once may need the time of both.
    assert_eq!(
        recovered(&["drop-replies-5%", "kill-redis"], 9_900, 40).breaks(&RULES),
        []
    );
    assert_eq!(
        recovered(&["drop-replies-5%", "kill-redis"], 10_100, 40).breaks(&RULES),
        late
    );
    // A message that ended a process takes its own time, and what did not run could not consume.
    let aborting = |ms: u64| {
        recovered(&["kill-redis"], 5_100, 40).at(
            ms,
            "c0.1",
            What::Aborting {
                id: "abort-1".into(),
            },
        )
    };
    assert_eq!(
        aborting(57_000)
            .check(&RULES)
            .counts
            .rate_again_judged
            .len(),
        0
    );
    assert_eq!(
        aborting(30_000).check(&RULES).counts.rate_again_judged["kill-redis"],
        1
    );
    assert_eq!(
        recovered(&["kill-redis"], 5_100, 40)
            .at(57_000, "c1.1", What::Stalled { ms: 400 })
            .breaks(&RULES),
        []
    );
    let counts = recovered(&["kill-redis"], 4_900, 40).check(&RULES).counts;
    assert_eq!(
        (
            counts.rate_again_ms["kill-redis"],
            Invariant::I10.was_tried(&counts)
        ),
        (4_900, true)
    );
}
