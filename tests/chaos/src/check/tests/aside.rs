//! Constructed ledgers with dead letters.

use super::*;

#[test]
fn what_works_stands_in_the_dead_letters_only_after_its_attempts() {
    let aside = |id: &str, reason: &str| What::Aside {
        id: id.into(),
        place: Place::DeadLetters,
        reason: reason.into(),
    };
    let story = |granted: &str, id: &str, reason| {
        Story::default()
            .sent(id)
            .answer(10, "c0.1", id, Asked::Claim, granted)
            .at(50, "player", aside(id, reason))
            .breaks(&RULES)
    };
    assert_eq!(story("granted 3", "u-1", "attempts-spent"), []);
    assert_eq!(
        story("granted 2", "u-1", "attempts-spent"),
        violation_of(Invariant::Aside, "u-1")
    );
    assert_eq!(story("granted 3", "u-1", "crashes-spent"), []);
    assert_eq!(
        story("granted 2", "u-1", "crashes-spent"),
        violation_of(Invariant::Aside, "u-1")
    );
    assert_eq!(
        story("granted 4", "u-1", "rejected-before"),
        [],
        "a copy of one that had them"
    );
    assert_eq!(
        story("granted 3", "u-1", "unreadable"),
        violation_of(Invariant::Aside, "u-1")
    );
    assert_eq!(story("granted 1", "fail-1", "attempts-spent"), []);
}
