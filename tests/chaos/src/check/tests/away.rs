//! Constructed ledgers with store outages, and with late recoveries.

use super::*;

/// I11 violations of a ledger in which the store is unavailable from 2 s to 10 s.
fn away(story: Story) -> Vec<Invariant> {
    let found = story
        .fault("dark-redis", None, 2_000, 10_000)
        .breaks(&RULES);
    found
        .into_iter()
        .map(|(invariant, _)| invariant)
        .filter(|invariant| *invariant == Invariant::I11)
        .collect()
}

#[test]
fn i11_a_handler_that_starts_while_the_store_is_away() {
    let one = |ms| {
        Story::default()
            .start(ms, "c0.1", "u-1", 1)
            .end(ms + 1, "c0.1", "u-1", Ending::Ok)
    };
    assert_eq!(away(one(1_900)), []);
    // Within its lease.
    assert_eq!(away(one(4_900)), []);
    assert_eq!(away(one(5_100)), [Invariant::I11]);
    assert_eq!(away(one(10_100)), []);
    // It was told before, and did not run in between.
    assert_eq!(
        away(one(5_200).at(5_190, "c0.1", What::Stalled { ms: 3_500 })),
        []
    );
    let granted = |ms| Story::default().answer(ms, "c0.1", "u-1", Asked::Claim, "granted 1");
    assert_eq!(away(granted(2_900)), []);
    assert_eq!(away(granted(3_100)), [Invariant::I11]);
    // It answers before anybody has written down that it does.
    assert_eq!(away(granted(9_400)), [Invariant::I11]);
    assert_eq!(away(granted(9_600)), []);
}

#[test]
fn i11_a_store_that_takes_nothing_grants_nothing() {
    let while_it = |kind, story: Story| {
        let found = story.fault(kind, None, 2_000, 10_000).breaks(&RULES);
        found
            .into_iter()
            .filter(|(invariant, _)| *invariant == Invariant::I11)
            .count()
    };
    for kind in [
        "fill-redis",
        "fill-disk",
        "demote-redis",
        "strand-redis",
        "load-redis",
    ] {
        let granted = Story::default().answer(3_100, "c0.1", "u-1", Asked::Claim, "granted 1");
        let started =
            Story::default()
                .start(5_100, "c0.1", "u-1", 1)
                .end(5_101, "c0.1", "u-1", Ending::Ok);
        // It says so at once, and each message may ask.
        let asked = (0..100).fold(Story::default(), |story, time| {
            story.answer(
                3_000 + time * 10,
                "c0.1",
                "u-1",
                Asked::Claim,
                "not applied",
            )
        });
        assert_eq!(
            (while_it(kind, granted), while_it(kind, asked)),
            (1, 0),
            "{kind}"
        );
        // Where there is no memory, a lease is renewed: that takes none.
        assert_eq!(
            while_it(kind, started),
            usize::from(kind != "fill-redis"),
            "{kind}"
        );
    }
    assert_eq!(
        while_it(
            "kill-redis",
            Story::default().answer(3_100, "c0.1", "u-1", Asked::Claim, "granted 1")
        ),
        0
    );
}

#[test]
fn i11_a_store_that_is_away_and_asked_often() {
    let asked = |every: u64, times| {
        (0..times).fold(Story::default(), |story, time| {
            story.answer(3_000 + time * every, "c0.1", "u-1", Asked::Claim, "unknown")
        })
    };
    assert_eq!(away(asked(50, 100)), []);
    assert_eq!(away(asked(40, 100)).first(), Some(&Invariant::I11));
    // In one question.
    assert_eq!(away(asked(0, 100)), []);
}

#[test]
fn i11_memory_and_handlers_without_bound() {
    let sampled = |story: Story, ms, resident| {
        story.at(
            ms,
            "player",
            What::Sampled {
                consumer: "c0.1".into(),
                resident,
            },
        )
    };
    let grown = |by: u64| sampled(sampled(Story::default(), 1_900, 40_000), 9_000, 40_000 + by);
    assert_eq!(away(grown(50 * 1_024)), []);
    assert_eq!(away(grown(50 * 1_024 + 1)), [Invariant::I11]);
    let start = |run: u64| What::Started {
        id: format!("u-{run}"),
        attempt: 1,
        run,
    };
    let handlers = |count| {
        (0..count).fold(Story::default(), |story, run| {
            story.at(run, "c0.1", start(run))
        })
    };
    assert_eq!(away(handlers(2)), []);
    assert_eq!(away(handlers(3)), [Invariant::I11]);
    // One that is cancelled at that moment is not there any more; one that is cancelled later is.
    let end = |how| What::Ended {
        id: "u-0".into(),
        run: 0,
        how,
    };
    assert_eq!(away(handlers(3).at(300, "c0.1", end(Ending::Dropped))), []);
    assert_eq!(
        away(handlers(3).at(300, "c0.1", end(Ending::Ok))),
        [Invariant::I11]
    );
    assert_eq!(
        away(handlers(3).at(900, "c0.1", end(Ending::Dropped))),
        [Invariant::I11]
    );
}

#[test]
fn i10_effects_that_come_again_too_late() {
    let messages = |story: Story| {
        (0..20).fold(story, |story, number| {
            story.at(
                1_200,
                "player",
                What::Confirmed {
                    id: format!("u-{number}"),
                },
            )
        })
    };
    let again = |kind, ms| {
        let story = messages(Story::default().fault(kind, None, 1_000, 1_100));
        story
            .at(0, "player", What::Attempted { id: "u-1".into() })
            .effect(ms, "c0.1", "u-1", 1, Unique::Accepted)
    };
    let late = |story: Story| story.check(&RULES).violations_of(Invariant::I10);
    assert_eq!(
        (
            late(again("kill-rabbit", 6_100)),
            late(again("kill-rabbit", 6_101))
        ),
        (0, 1)
    );
    assert_eq!(
        (
            late(again("kill-kafka", 31_100)),
            late(again("kill-kafka", 31_101))
        ),
        (0, 1)
    );
    assert_eq!(
        again("kill-kafka", 31_100).check(&RULES).counts.again_ms["kill-kafka"],
        30_000
    );
    // While another fault lasts, while nothing ran, and where nothing came in, nothing is late.
    assert_eq!(
        late(again("kill-rabbit", 7_000).fault("freeze-redis", None, 900, 6_900)),
        0
    );
    assert_eq!(
        late(again("kill-rabbit", 7_000).at(3_000, "c0.1", What::Stalled { ms: 1_000 })),
        0
    );
    assert_eq!(
        late(Story::default().fault("kill-rabbit", None, 1_000, 1_100)),
        0
    );
    assert_eq!(
        late(messages(Story::default().fault(
            "kill-rabbit",
            None,
            1_000,
            1_100
        ))),
        1
    );
    assert_eq!(
        (
            late(again("rolling-restart", 11_100)),
            late(again("rolling-restart", 11_101))
        ),
        (0, 1)
    );
    // What was over before may take its time, too; and two stalls at once are one.
    let killed = |ms| again("kill-rabbit", ms).fault("kill-consumer", Some("c0.1"), 500, 900);
    assert_eq!((late(killed(10_900)), late(killed(10_901))), (0, 1));
    let stalls = |ms| {
        again("kill-rabbit", ms)
            .at(3_000, "c0.1", What::Stalled { ms: 1_000 })
            .at(3_100, "c1.1", What::Stalled { ms: 1_000 })
    };
    assert_eq!((late(stalls(7_200)), late(stalls(7_201))), (0, 1));
}
