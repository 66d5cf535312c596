//! Constructed ledgers with committed offsets.

use super::*;

fn committed(partition: i32, offset: i64) -> What {
    What::Committed { partition, offset }
}

/// Adds the settlement of a position.
fn settled(ledger: LedgerBuilder, ms: u64, how: SettlementKind, position: &str) -> LedgerBuilder {
    ledger.at(
        ms,
        "c0.1",
        What::Settled {
            id: "u-1".into(),
            position: position.into(),
            how,
            why: "completed".into(),
        },
    )
}

fn violations_among(ledger: LedgerBuilder, wanted: [Invariant; 2]) -> Vec<Invariant> {
    let found = ledger
        .violations(&RULES)
        .into_iter()
        .map(|(invariant, _)| invariant);
    found
        .filter(|invariant| wanted.contains(invariant))
        .collect()
}

#[test]
fn i6_a_decreasing_committed_offset_is_a_violation() {
    let done = |ledger| {
        settled(
            settled(ledger, 5, SettlementKind::Rejected, "1/0@1"),
            6,
            SettlementKind::Rejected,
            "1/1@2",
        )
    };
    let (well, back) = (
        done(LedgerBuilder::default()).at(8, "harness", committed(1, 1)),
        |ledger: LedgerBuilder| ledger.at(10, "harness", committed(1, 0)),
    );
    assert_eq!(
        violations_among(
            done(LedgerBuilder::default()).at(8, "harness", committed(1, 2)),
            [Invariant::I6, Invariant::I7]
        ),
        []
    );
    assert_eq!(
        violations_among(
            back(well.at(9, "harness", committed(1, 2))),
            [Invariant::I6, Invariant::I7]
        ),
        [Invariant::I6]
    );
}

#[test]
fn i6_a_thawed_broker_may_apply_an_earlier_commit_late() {
    let back = |woken: u64| {
        let both = settled(
            settled(
                LedgerBuilder::default(),
                5,
                SettlementKind::Rejected,
                "1/0@1",
            ),
            6,
            SettlementKind::Rejected,
            "1/1@2",
        );
        let went = both
            .at(9_000, "harness", committed(1, 2))
            .at(9_500, "harness", committed(1, 1));
        went.fault("freeze-kafka", None, 1_000, woken).check(&RULES)
    };
    let violates_i6 = |woken| {
        back(woken)
            .violations
            .iter()
            .any(|it| it.invariant == Invariant::I6)
    };
    assert_eq!(
        (violates_i6(5_000), back(5_000).counts.commits_applied_late),
        (false, 1)
    );
    assert!(violates_i6(4_000), "long before");
    assert!(violates_i6(9_800), "Kafka was still frozen");
}

#[test]
fn i6_after_a_late_commit_the_next_member_continues_from_its_offset() {
    let both = [Invariant::I6, Invariant::I7];
    let first = || {
        let settled = ["1/0@1", "1/1@1", "1/2@1"]
            .iter()
            .fold(LedgerBuilder::default(), |ledger, it| {
                settled(ledger, 5, SettlementKind::Rejected, it)
            });
        settled
            .at(6_000, "harness", committed(1, 3))
            .fault("freeze-kafka", None, 1_000, 5_000)
    };
    let overtaken = || first().at(7_000, "harness", committed(1, 1));
    // These offsets were settled and may be committed again, in increasing order.
    let again = || overtaken().at(30_500, "harness", committed(1, 2));
    assert_eq!(violations_among(again(), both), []);
    assert_eq!(
        violations_among(again().at(31_000, "harness", committed(1, 1)), both),
        [Invariant::I6]
    );
    assert_eq!(
        violations_among(overtaken().at(30_500, "harness", committed(1, 4)), both),
        [Invariant::I7],
        "the fourth is not settled"
    );
    // After a new assignment of the partition Kafka refuses earlier commits.
    let received = |ledger: LedgerBuilder, ms, position: &str| {
        ledger.at(
            ms,
            "c0.1",
            What::Received {
                id: "u-1".into(),
                position: position.into(),
            },
        )
    };
    let assigned = |ms| {
        received(received(first(), 4, "1/0@1"), ms, "1/3@2").at(7_000, "harness", committed(1, 1))
    };
    assert_eq!(violations_among(assigned(5_500), both), [Invariant::I6]);
    assert_eq!(
        violations_among(assigned(6_500), both),
        [],
        "the harness may observe it late"
    );
    assert_eq!(
        violations_among(assigned(4_500), both),
        [],
        "Kafka was frozen then"
    );
}

#[test]
fn i7_a_commit_above_an_unsettled_message_is_a_violation() {
    // The second message is settled. The first is not settled, settled too late, released, or on
    // another partition.
    let second = || {
        settled(
            LedgerBuilder::default(),
            5,
            SettlementKind::Rejected,
            "1/1@1",
        )
        .at(8, "harness", committed(1, 2))
    };
    let both = [Invariant::I6, Invariant::I7];
    assert_eq!(violations_among(second(), both), [Invariant::I7]);
    assert_eq!(
        violations_among(
            settled(second(), 9, SettlementKind::Rejected, "1/0@1"),
            both
        ),
        [Invariant::I7]
    );
    assert_eq!(
        violations_among(
            settled(second(), 4, SettlementKind::Released, "1/0@1"),
            both
        ),
        [Invariant::I7]
    );
    assert_eq!(
        violations_among(
            settled(second(), 4, SettlementKind::Rejected, "2/0@1"),
            both
        ),
        [Invariant::I7]
    );
    assert_eq!(
        violations_among(
            settled(second(), 4, SettlementKind::Rejected, "1/0@1"),
            both
        ),
        []
    );
}

#[test]
fn i6_and_i7_start_again_in_a_recreated_topic() {
    let first = |ledger: LedgerBuilder| {
        settled(ledger, 5, SettlementKind::Rejected, "1/0@1").at(8, "harness", committed(1, 1))
    };
    let recreated = |ledger: LedgerBuilder| {
        let ledger =
            first(ledger)
                .at(9, "harness", What::TopicRecreated)
                .at(12, "harness", committed(1, 1));
        ledger.at(20, "harness", committed(1, 2))
    };
    let both = [Invariant::I6, Invariant::I7];
    // Earlier settlements do not count, and Kafka reports the old committed offset for a while.
    assert_eq!(
        violations_among(recreated(LedgerBuilder::default()), both),
        [Invariant::I7, Invariant::I7]
    );
    let one = settled(
        recreated(LedgerBuilder::default()),
        15,
        SettlementKind::Rejected,
        "1/0@2",
    );
    assert_eq!(
        violations_among(settled(one, 16, SettlementKind::Rejected, "1/1@2"), both),
        []
    );
}
