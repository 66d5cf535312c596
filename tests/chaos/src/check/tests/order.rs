//! Constructed ledgers with several messages of a key.

use super::*;

#[test]
fn i5_effects_of_a_key_that_came_in_another_order() {
    let story = || {
        Story::default()
            .sent("k1-7")
            .sent("k1-9")
            .sent("k2-8")
            .handled(10, "c0.1", "k1-9")
            .handled(30, "c0.1", "k1-7")
    };
    let story = || story().handled(50, "c0.1", "k2-8");
    assert_eq!(story().breaks(&RULES), violation_of(Invariant::I5, "k1-7"));
    assert_eq!(
        story().breaks(&Rules {
            order: Ordered::Not,
            ..RULES
        }),
        []
    );
    let without_keys = Story::default()
        .sent("u-7")
        .sent("u-9")
        .handled(10, "c0.1", "u-9")
        .handled(30, "c0.1", "u-7");
    assert_eq!(without_keys.breaks(&RULES), []);
}

#[test]
fn i5_in_a_queue_what_was_not_confirmed_may_stand_behind_what_was_sent_later() {
    let story = |confirmed| {
        let sent = |ms: u64, id: &str, story: Story| {
            story.at(ms, "player", What::Attempted { id: id.into() })
        };
        let story = sent(5, "k1-9", sent(0, "k1-7", Story::default())).at(
            confirmed,
            "player",
            What::Confirmed { id: "k1-7".into() },
        );
        let story = story.at(6, "player", What::Confirmed { id: "k1-9".into() });
        story
            .handled(10, "c0.1", "k1-9")
            .handled(30, "c0.1", "k1-7")
    };
    let queue = Rules {
        order: Ordered::ByKeyOfAQueue,
        ..RULES
    };
    assert_eq!(story(3).breaks(&queue), violation_of(Invariant::I5, "k1-7"));
    assert_eq!(story(7).breaks(&queue), []);
    assert_eq!(
        story(7).breaks(&RULES),
        violation_of(Invariant::I5, "k1-7"),
        "a log has one order"
    );
    // A queue has no offsets.
    let committed = || {
        Story::default().at(
            0,
            "player",
            What::Committed {
                partition: 0,
                offset: 7,
            },
        )
    };
    assert_eq!(
        (
            committed().breaks(&queue),
            committed().check(&RULES).violations.is_empty()
        ),
        (vec![], false)
    );
}
