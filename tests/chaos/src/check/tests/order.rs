//! Constructed ledgers with several messages of a key.

use super::*;

#[test]
fn i5_effects_of_a_key_out_of_order_are_a_violation() {
    let ledger = || {
        LedgerBuilder::default()
            .sent("k1-7")
            .sent("k1-9")
            .sent("k2-8")
            .handled(10, "c0.1", "k1-9")
            .handled(30, "c0.1", "k1-7")
    };
    let ledger = || ledger().handled(50, "c0.1", "k2-8");
    assert_eq!(
        ledger().violations(&RULES),
        violation_of(Invariant::I5, "k1-7")
    );
    assert_eq!(
        ledger().violations(&CheckRules {
            order: Ordered::Not,
            ..RULES
        }),
        []
    );
    let without_keys = LedgerBuilder::default()
        .sent("u-7")
        .sent("u-9")
        .handled(10, "c0.1", "u-9")
        .handled(30, "c0.1", "u-7");
    assert_eq!(without_keys.violations(&RULES), []);
}

#[test]
fn i5_in_a_queue_an_unconfirmed_message_may_follow_later_ones() {
    let ledger = |confirmed| {
        let sent = |ms: u64, id: &str, ledger: LedgerBuilder| {
            ledger.at(ms, "harness", What::Attempted { id: id.into() })
        };
        let ledger = sent(5, "k1-9", sent(0, "k1-7", LedgerBuilder::default())).at(
            confirmed,
            "harness",
            What::Confirmed { id: "k1-7".into() },
        );
        let ledger = ledger.at(6, "harness", What::Confirmed { id: "k1-9".into() });
        ledger
            .handled(10, "c0.1", "k1-9")
            .handled(30, "c0.1", "k1-7")
    };
    let queue = CheckRules {
        order: Ordered::ByKeyOfAQueue,
        ..RULES
    };
    assert_eq!(
        ledger(3).violations(&queue),
        violation_of(Invariant::I5, "k1-7")
    );
    assert_eq!(ledger(7).violations(&queue), []);
    assert_eq!(
        ledger(7).violations(&RULES),
        violation_of(Invariant::I5, "k1-7"),
        "a Kafka partition keeps the order"
    );
    // A queue has no offsets.
    let committed = || {
        LedgerBuilder::default().at(
            0,
            "harness",
            What::Committed {
                partition: 0,
                offset: 7,
            },
        )
    };
    assert_eq!(
        (
            committed().violations(&queue),
            committed().check(&RULES).violations.is_empty()
        ),
        (vec![], false)
    );
}
