//! Constructed ledgers with recovery times.

use super::*;

/// A ledger in which effects reached nine tenths of their rate this long after these faults, with
/// this much idle CPU time in percent.
fn recovered(kinds: &[&str], took_ms: u64, idle: u64) -> LedgerBuilder {
    let kinds = kinds.iter().map(|kind| (*kind).to_owned()).collect();
    LedgerBuilder::default().at(
        60_000,
        "harness",
        What::Recovered {
            kinds,
            took_ms,
            idle,
        },
    )
}

#[test]
fn i10_the_rate_must_recover_within_the_bound_unless_the_machine_is_overloaded() {
    let late = [(Invariant::I10, None)];
    assert_eq!(
        recovered(&["kill-redis"], 5_100, 40).violations(&RULES),
        late
    );
    assert_eq!(recovered(&["kill-redis"], 4_900, 40).violations(&RULES), []);
    assert_eq!(
        recovered(&["kill-redis"], 5_100, 24).violations(&RULES),
        [],
        "the machine was overloaded"
    );
    assert_eq!(
        recovered(&["kill-consumer"], 9_000, 40).violations(&RULES),
        []
    );
    // For two concurrent faults the bounds add up.
    assert_eq!(
        recovered(&["drop-replies-5%", "kill-redis"], 9_900, 40).violations(&RULES),
        []
    );
    assert_eq!(
        recovered(&["drop-replies-5%", "kill-redis"], 10_100, 40).violations(&RULES),
        late
    );
    // Aborts by messages, and stalls of consumers, are not attributed to the fault.
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
        aborting(57_000).check(&RULES).counts.rate_recoveries.len(),
        0
    );
    assert_eq!(
        aborting(30_000).check(&RULES).counts.rate_recoveries["kill-redis"],
        1
    );
    assert_eq!(
        recovered(&["kill-redis"], 5_100, 40)
            .at(57_000, "c1.1", What::Stalled { ms: 400 })
            .violations(&RULES),
        []
    );
    let counts = recovered(&["kill-redis"], 4_900, 40).check(&RULES).counts;
    assert_eq!(
        (
            counts.rate_recovery_ms["kill-redis"],
            Invariant::I10.was_tried(&counts)
        ),
        (4_900, true)
    );
}
