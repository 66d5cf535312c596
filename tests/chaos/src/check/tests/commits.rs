//! Constructed ledgers with committed offsets.

use super::*;

fn committed(partition: i32, offset: i64) -> What {
    What::Committed { partition, offset }
}

/// Adds the settlement of a position.
fn settled(story: Story, ms: u64, how: Settling, position: &str) -> Story {
    story.at(
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

fn breaks_of(story: Story, wanted: [Invariant; 2]) -> Vec<Invariant> {
    let found = story
        .breaks(&RULES)
        .into_iter()
        .map(|(invariant, _)| invariant);
    found
        .filter(|invariant| wanted.contains(invariant))
        .collect()
}

#[test]
fn i6_what_is_committed_goes_back() {
    let done = |story| {
        settled(
            settled(story, 5, Settling::Rejected, "1/0@1"),
            6,
            Settling::Rejected,
            "1/1@2",
        )
    };
    let (well, back) = (
        done(Story::default()).at(8, "player", committed(1, 1)),
        |story: Story| story.at(10, "player", committed(1, 0)),
    );
    assert_eq!(
        breaks_of(
            done(Story::default()).at(8, "player", committed(1, 2)),
            [Invariant::I6, Invariant::I7]
        ),
        []
    );
    assert_eq!(
        breaks_of(
            back(well.at(9, "player", committed(1, 2))),
            [Invariant::I6, Invariant::I7]
        ),
        [Invariant::I6]
    );
}

#[test]
fn i6_a_broker_that_was_frozen_carries_out_an_earlier_commit_late() {
    let back = |woken: u64| {
        let both = settled(
            settled(Story::default(), 5, Settling::Rejected, "1/0@1"),
            6,
            Settling::Rejected,
            "1/1@2",
        );
        let went = both
            .at(9_000, "player", committed(1, 2))
            .at(9_500, "player", committed(1, 1));
        went.fault("freeze-kafka", None, 1_000, woken).check(&RULES)
    };
    let went_back = |woken| {
        back(woken)
            .violations
            .iter()
            .any(|it| it.invariant == Invariant::I6)
    };
    assert_eq!(
        (went_back(5_000), back(5_000).counts.commits_overtaken),
        (false, 1)
    );
    assert!(went_back(4_000), "long before");
    assert!(went_back(9_800), "it was frozen still");
}

#[test]
fn i6_after_a_commit_that_was_overtaken_the_next_member_goes_on_from_there() {
    let both = [Invariant::I6, Invariant::I7];
    let first = || {
        let settled = ["1/0@1", "1/1@1", "1/2@1"]
            .iter()
            .fold(Story::default(), |story, it| {
                settled(story, 5, Settling::Rejected, it)
            });
        settled
            .at(6_000, "player", committed(1, 3))
            .fault("freeze-kafka", None, 1_000, 5_000)
    };
    let overtaken = || first().at(7_000, "player", committed(1, 1));
    // Settled it was, so that it may be committed again; but only forwards.
    let again = || overtaken().at(30_500, "player", committed(1, 2));
    assert_eq!(breaks_of(again(), both), []);
    assert_eq!(
        breaks_of(again().at(31_000, "player", committed(1, 1)), both),
        [Invariant::I6]
    );
    assert_eq!(
        breaks_of(overtaken().at(30_500, "player", committed(1, 4)), both),
        [Invariant::I7],
        "nobody settled the fourth"
    );
    // Once the partition is assigned anew, nothing of the time before is carried out any more.
    let received = |story: Story, ms, position: &str| {
        story.at(
            ms,
            "c0.1",
            What::Received {
                id: "u-1".into(),
                position: position.into(),
            },
        )
    };
    let assigned = |ms| {
        received(received(first(), 4, "1/0@1"), ms, "1/3@2").at(7_000, "player", committed(1, 1))
    };
    assert_eq!(breaks_of(assigned(5_500), both), [Invariant::I6]);
    assert_eq!(
        breaks_of(assigned(6_500), both),
        [],
        "the player may see it late"
    );
    assert_eq!(breaks_of(assigned(4_500), both), [], "it was frozen then");
}

#[test]
fn i7_what_is_committed_before_it_is_settled() {
    // The second is settled, and the first is not, or too late, or only released, or on another
    // partition.
    let second = || {
        settled(Story::default(), 5, Settling::Rejected, "1/1@1").at(8, "player", committed(1, 2))
    };
    let both = [Invariant::I6, Invariant::I7];
    assert_eq!(breaks_of(second(), both), [Invariant::I7]);
    assert_eq!(
        breaks_of(settled(second(), 9, Settling::Rejected, "1/0@1"), both),
        [Invariant::I7]
    );
    assert_eq!(
        breaks_of(settled(second(), 4, Settling::Released, "1/0@1"), both),
        [Invariant::I7]
    );
    assert_eq!(
        breaks_of(settled(second(), 4, Settling::Rejected, "2/0@1"), both),
        [Invariant::I7]
    );
    assert_eq!(
        breaks_of(settled(second(), 4, Settling::Rejected, "1/0@1"), both),
        []
    );
}

#[test]
fn i6_and_i7_begin_again_with_a_topic_that_is_made_anew() {
    let first = |story: Story| {
        settled(story, 5, Settling::Rejected, "1/0@1").at(8, "player", committed(1, 1))
    };
    let anew = |story: Story| {
        let anew = first(story)
            .at(9, "player", What::MadeAnew)
            .at(12, "player", committed(1, 1));
        anew.at(20, "player", committed(1, 2))
    };
    let both = [Invariant::I6, Invariant::I7];
    // What was settled before says nothing, and what was committed before is told for a while.
    assert_eq!(
        breaks_of(anew(Story::default()), both),
        [Invariant::I7, Invariant::I7]
    );
    let one = settled(anew(Story::default()), 15, Settling::Rejected, "1/0@2");
    assert_eq!(
        breaks_of(settled(one, 16, Settling::Rejected, "1/1@2"), both),
        []
    );
}
