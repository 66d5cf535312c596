//! Constructed ledgers with dead letters.

use super::*;

#[test]
fn a_message_whose_handler_works_is_dead_lettered_only_after_its_attempts() {
    let rejected = |id: &str, reason: &str| What::Rejected {
        id: id.into(),
        place: RejectedTo::DeadLetters,
        reason: reason.into(),
    };
    let ledger = |granted: &str, id: &str, reason| {
        LedgerBuilder::default()
            .sent(id)
            .answer(10, "c0.1", id, StoreOperation::Claim, granted)
            .at(50, "harness", rejected(id, reason))
            .violations(&RULES)
    };
    assert_eq!(ledger("granted 3", "u-1", "attempts-spent"), []);
    assert_eq!(
        ledger("granted 2", "u-1", "attempts-spent"),
        violation_of(Invariant::RejectedTooSoon, "u-1")
    );
    assert_eq!(ledger("granted 3", "u-1", "crashes-spent"), []);
    assert_eq!(
        ledger("granted 2", "u-1", "crashes-spent"),
        violation_of(Invariant::RejectedTooSoon, "u-1")
    );
    assert_eq!(
        ledger("granted 4", "u-1", "rejected-before"),
        [],
        "a copy of a rejected message"
    );
    assert_eq!(
        ledger("granted 3", "u-1", "unreadable"),
        violation_of(Invariant::RejectedTooSoon, "u-1")
    );
    assert_eq!(ledger("granted 1", "fail-1", "attempts-spent"), []);
}
