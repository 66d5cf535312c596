//! Constructed ledgers that violate each invariant, and some that violate none.

mod again;
mod aside;
mod away;
mod commits;
mod order;
mod story;

use super::*;
use crate::ledger::{Asked, Ending, Found, Place, Sent, Settling, Unique};
use story::Story;

const RULES: Rules = Rules {
    promise: Promise::EffectivelyOnce,
    order: Ordered::ByKey,
    lease: Duration::from_secs(2),
    grace: Duration::from_millis(500),
    aftermath: Duration::from_secs(10),
    drain: Duration::from_secs(10),
    store: Remembers::Claims,
    in_flight: 2,
    attempts: 3,
    looked: Looked::Everywhere,
};
const AT_MOST_ONCE: Rules = Rules {
    promise: Promise::AtMostOnce,
    ..RULES
};
const BARE: Rules = Rules {
    promise: Promise::Bare,
    ..RULES
};

fn violation_of(invariant: Invariant, id: &str) -> Vec<(Invariant, Option<String>)> {
    vec![(invariant, Some(id.to_owned()))]
}

/// A consumer is frozen in a handler; another takes over; the first wakes and is cancelled.
fn zombie(cancelled: u64) -> Story {
    Story::default()
        .sent("u-1")
        .start(10, "c0.1", "u-1", 1)
        .fault("freeze-consumer", Some("c0.1"), 20, 5_000)
        .start(2_100, "c1.1", "u-1", 2)
        .effect(2_150, "c1.1", "u-1", 2, Unique::Accepted)
        .end(5_200, "c1.1", "u-1", Ending::Ok)
        .end(cancelled, "c0.1", "u-1", Ending::Dropped)
}

#[test]
fn a_run_in_which_all_went_well_breaks_nothing() {
    let story = || {
        Story::default()
            .sent("k1-1")
            .handled(10, "c0.1", "k1-1")
            .sent("k1-2")
            .handled(30, "c0.1", "k1-2")
    };
    for rules in [RULES, AT_MOST_ONCE, BARE] {
        assert_eq!(story().breaks(&rules), []);
    }
    let counts = story().check(&RULES).counts;
    assert_eq!(
        (
            counts.attempted,
            counts.acknowledged,
            counts.raw_effects,
            counts.unique_effects
        ),
        (2, 2, 2, 2)
    );
}

#[test]
fn i1_a_confirmed_message_without_an_effect_is_lost() {
    let lost = || {
        Story::default()
            .sent("u-1")
            .sent("u-2")
            .handled(10, "c0.1", "u-2")
            .accept(20, "c0.1", "u-1", "duplicate")
    };
    for rules in [RULES, AT_MOST_ONCE, BARE] {
        assert!(
            lost()
                .breaks(&rules)
                .contains(&(Invariant::I1, Some("u-1".into())))
        );
        assert_eq!(lost().check(&rules).counts.lost, 1);
    }
    let violation = lost().check(&BARE).violations.remove(0);
    assert_eq!(violation.history.len(), 4, "{violation:?}");
    assert!(
        violation.history[3].contains("c0.1") && violation.history[3].contains("why=duplicate"),
        "{violation:?}"
    );
}

#[test]
fn i1_what_is_set_aside_or_was_never_confirmed_is_not_lost() {
    for place in [Place::DeadLetters, Place::InDoubt] {
        let aside = What::Aside {
            id: "fail-1".into(),
            place,
            reason: "attempts-spent".into(),
        };
        assert_eq!(
            Story::default()
                .sent("fail-1")
                .at(50, "player", aside)
                .breaks(&RULES),
            []
        );
    }
    let unconfirmed = Story::default().at(0, "player", What::Attempted { id: "u-1".into() });
    assert_eq!(unconfirmed.breaks(&RULES), []);
}

#[test]
fn an_effect_of_an_unconfirmed_message_is_recovered_and_of_an_unknown_one_unexpected() {
    let recovered = Story::default()
        .at(0, "player", What::Attempted { id: "u-1".into() })
        .handled(10, "c0.1", "u-1")
        .check(&RULES);
    assert_eq!(
        (recovered.counts.recovered, recovered.violations.len()),
        (1, 0)
    );
    assert_eq!(
        Story::default().handled(10, "c0.1", "u-9").breaks(&RULES),
        violation_of(Invariant::Unexpected, "u-9")
    );
}

#[test]
fn i2_two_effects_of_one_id_whatever_the_cause() {
    let doubled = Story::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .fault("kill-consumer", Some("c0.1"), 30, 40)
        .effect(3_000, "c1.1", "u-1", 2, Unique::Known);
    assert_eq!(
        doubled.breaks(&AT_MOST_ONCE),
        violation_of(Invariant::I2, "u-1")
    );
}

#[test]
fn i2_an_effect_that_was_refused_is_none() {
    let looked = What::Looked {
        id: "u-1".into(),
        consumer: "c1.1".into(),
        attempt: 2,
        found: Found::Voided,
    };
    let late = What::Refused {
        id: "u-1".into(),
        consumer: "c0.1".into(),
        attempt: 1,
    };
    let story = Story::default()
        .sent("u-1")
        .at(5, "sink", looked)
        .handled(10, "c1.1", "u-1")
        .at(90, "sink", late)
        .check(&AT_MOST_ONCE);
    assert_eq!((story.violations, story.counts.refused), (vec![], 1));
}

/// Two effects of an id, with a fault or none.
fn run_again(fault: impl Fn(Story) -> Story) -> Story {
    fault(
        Story::default()
            .sent("u-1")
            .start(10, "c0.1", "u-1", 1)
            .effect(15, "c0.1", "u-1", 1, Unique::Accepted),
    )
    .end(18, "c0.1", "u-1", Ending::Dropped)
    .start(3_000, "c1.1", "u-1", 2)
    .effect(3_010, "c1.1", "u-1", 2, Unique::Known)
    .end(3_020, "c1.1", "u-1", Ending::Ok)
}

#[test]
fn i3_a_second_effect_needs_a_cause() {
    assert_eq!(
        run_again(|story| story).breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    let strangers = run_again(|story| story.fault("kill-consumer", Some("c2.1"), 16, 500));
    assert_eq!(strangers.breaks(&RULES), violation_of(Invariant::I3, "u-1"));
    let later = run_again(|story| story.fault("kill-consumer", Some("c0.1"), 3_500, 4_000));
    assert_eq!(later.breaks(&RULES), violation_of(Invariant::I3, "u-1"));
    // What keeps nobody from its store and takes nothing away cannot have cut it off.
    assert_eq!(
        run_again(|story| story.fault("refuse-letters", None, 12, 2_000)).breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    assert_eq!(
        run_again(|story| story.fault("rebalance", None, 12, 2_000)).breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    assert_eq!(
        run_again(|story| story.at(2_400, "c0.1", What::Stalled { ms: 400 })).breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    let long_before = Story::default().fault("kill-redis", None, 0, 1).sent("u-1");
    let long_before = Story(
        long_before
            .0
            .into_iter()
            .chain(run_again(|story| story).0.into_iter().map(|mut record| {
                record.at += 20_000_000;
                record
            }))
            .collect(),
    );
    assert_eq!(
        long_before.breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
}

#[test]
fn i3_a_fault_of_its_consumer_or_of_a_server_is_a_cause() {
    let killed =
        run_again(|story| story.fault("kill-consumer", Some("c0.1"), 16, 500)).check(&RULES);
    assert_eq!(
        (killed.violations, killed.counts.explained["kill-consumer"]),
        (vec![], 1)
    );
    assert_eq!(
        run_again(|story| story.fault("dark-redis", None, 12, 2_000)).breaks(&RULES),
        []
    );
    assert_eq!(
        run_again(|story| story.at(2_400, "c0.1", What::Stalled { ms: 2_300 })).breaks(&RULES),
        []
    );
    // Of those that have no consumer of their own: the one that was told to end meanwhile, and what
    // was taken away from it.
    let ended = run_again(|story| {
        story.fault("rebalance", None, 12, 2_900).gone(
            2_000,
            "c0.1",
            Sent::Terminate,
            "exit 0",
            1_900,
        )
    });
    assert_eq!(ended.check(&RULES).counts.explained["rebalance"], 1);
    let revoked = |by| {
        run_again(|story| {
            story.fault("kill-consumer", Some("c2.1"), 12, 900).at(
                1_000,
                by,
                What::Revoked { epoch: 3 },
            )
        })
    };
    assert_eq!(
        revoked("c0.1").check(&RULES).counts.explained["kill-consumer"],
        1
    );
    assert_eq!(
        revoked("c1.1").breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
}

#[test]
fn i3_no_fault_explains_an_effect_after_an_end_that_was_recorded() {
    let recorded = |at| {
        run_again(|story| {
            story.fault("kill-redis", None, 12, 2_000).answer(
                at,
                "c0.1",
                "u-1",
                Asked::Complete,
                "done",
            )
        })
    };
    assert_eq!(
        recorded(2_990).breaks(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    assert_eq!(recorded(3_010).breaks(&RULES), []);
    let of_another = run_again(|story| {
        story.fault("kill-redis", None, 12, 2_000).answer(
            20,
            "c1.1",
            "u-1",
            Asked::Complete,
            "done",
        )
    });
    assert_eq!(of_another.breaks(&RULES), []);
}

#[test]
fn i3_two_unique_effects_are_one_too_many() {
    let story = Story::default()
        .sent("u-1")
        .fault("kill-redis", None, 0, 5)
        .start(10, "c0.1", "u-1", 1)
        .start(50, "c1.1", "u-1", 2);
    let twice = story.effect(15, "c0.1", "u-1", 1, Unique::Accepted).effect(
        55,
        "c1.1",
        "u-1",
        2,
        Unique::Accepted,
    );
    let twice = twice
        .end(49, "c0.1", "u-1", Ending::Dropped)
        .end(58, "c1.1", "u-1", Ending::Ok);
    assert_eq!(twice.breaks(&RULES), violation_of(Invariant::I3, "u-1"));
}

#[test]
fn i4_two_handlers_at_once() {
    let beside = Story::default()
        .sent("u-1")
        .start(10, "c0.1", "u-1", 1)
        .start(20, "c1.1", "u-1", 2)
        .end(30, "c0.1", "u-1", Ending::Dropped)
        .effect(40, "c1.1", "u-1", 2, Unique::Accepted)
        .end(50, "c1.1", "u-1", Ending::Ok);
    assert_eq!(beside.breaks(&RULES), violation_of(Invariant::I4, "u-1"));
}

#[test]
fn i4_a_zombie_that_is_not_cancelled_in_time_is_one_too_many() {
    let right = zombie(5_100).check(&RULES);
    assert_eq!(
        (
            right.violations,
            right.counts.fenced,
            right.counts.fenced_longest_ms
        ),
        (vec![], 1, 100)
    );
    assert_eq!(
        zombie(5_900).breaks(&RULES),
        violation_of(Invariant::I4, "u-1")
    );
}

#[test]
fn i4_an_attempt_that_does_not_rise_is_no_fence() {
    let story = Story(
        zombie(5_100)
            .0
            .into_iter()
            .map(|mut record| {
                if let What::Started { attempt, .. } = &mut record.what {
                    *attempt = 1;
                }
                record
            })
            .collect(),
    );
    assert_eq!(story.breaks(&RULES), violation_of(Invariant::I4, "u-1"));
}

#[test]
fn i4_a_handler_ends_with_its_process() {
    let story = |gone| {
        Story::default()
            .sent("u-1")
            .fault("kill-consumer", Some("c0.1"), 15, 40)
            .start(10, "c0.1", "u-1", 1)
            .gone(gone, "c0.1", Sent::Kill, "signal 9", 1)
            .start(2_100, "c1.1", "u-1", 2)
            .effect(2_150, "c1.1", "u-1", 2, Unique::Accepted)
            .end(2_200, "c1.1", "u-1", Ending::Ok)
    };
    assert_eq!(story(16).breaks(&RULES), []);
    assert_eq!(
        story(3_000).breaks(&RULES),
        violation_of(Invariant::I4, "u-1")
    );
}

#[test]
fn i13_a_secret_that_was_told() {
    let leaked = What::Leaked {
        secret: "Redis".into(),
        place: "c0.1.log, line 3".into(),
    };
    assert_eq!(
        Story::default().at(9, "player", leaked).breaks(&BARE),
        [(Invariant::I13, None)]
    );
}

#[test]
fn i8_a_refused_acknowledgement() {
    let story = Story::default().at(
        5,
        "player",
        What::ChannelRefused {
            line: "PRECONDITION_FAILED - unknown delivery tag 7".into(),
        },
    );
    assert_eq!(story.breaks(&RULES), [(Invariant::I8, None)]);
}

#[test]
fn i8_a_delivery_that_is_settled_twice() {
    let settled = || What::Settled {
        id: "u-1".into(),
        position: "0/1".into(),
        how: Settling::Released,
        why: "released".into(),
    };
    let once = || Story::default().sent("u-1").handled(10, "c0.1", "u-1");
    assert_eq!(
        once().at(30, "c0.1", settled()).breaks(&RULES),
        violation_of(Invariant::I8, "u-1")
    );
    assert_eq!(
        once().at(30, "c1.1", settled()).breaks(&RULES),
        violation_of(Invariant::I8, "u-1")
    );
    let again = What::Received {
        id: "u-1".into(),
        position: "0/1".into(),
    };
    assert_eq!(
        once()
            .at(30, "c0.1", again)
            .at(31, "c0.1", settled())
            .breaks(&RULES),
        []
    );
}

#[test]
fn i2_where_a_failover_may_forget_a_second_effect_has_its_cause() {
    let forgets = Rules {
        store: Remembers::NotAll,
        ..AT_MOST_ONCE
    };
    let twice = || {
        Story::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .handled(4_000, "c1.1", "u-1")
    };
    let twice = || {
        Story(twice().0.into_iter().filter(|it| it.by != "sink").collect())
            .effect(15, "c0.1", "u-1", 1, Unique::Accepted)
            .effect(4_005, "c1.1", "u-1", 1, Unique::Known)
    };
    assert_eq!(twice().breaks(&forgets), violation_of(Invariant::I2, "u-1"));
    let explained = twice()
        .fault("fail-over-redis", None, 20, 3_000)
        .check(&forgets);
    assert_eq!(
        (
            explained.violations,
            explained.counts.explained["fail-over-redis"]
        ),
        (vec![], 1)
    );
    assert_eq!(
        twice()
            .fault("fail-over-redis", None, 20, 3_000)
            .breaks(&AT_MOST_ONCE),
        violation_of(Invariant::I2, "u-1")
    );
}

#[test]
fn i14_an_end_that_a_failover_lost_leaves_its_marker() {
    let left = |done: u64| {
        let marker = What::Marker {
            id: "u-1".into(),
            record: "v1 p 00ff 1 2000 86400000 e -".into(),
        };
        Story::default()
            .sent("u-1")
            .handled(done - 10, "c0.1", "u-1")
            .fault("fail-over-redis", None, 5_000, 8_000)
            .at(20_000, "player", marker)
    };
    for lost in [4_000, 7_000] {
        let checked = left(lost).check(&RULES);
        assert_eq!((checked.violations, checked.counts.ends_lost), (vec![], 1));
    }
    for kept in [3_900, 8_100] {
        assert_eq!(
            left(kept).breaks(&RULES),
            violation_of(Invariant::I14, "u-1")
        );
    }
}

/// Counters as a consumer writes them, by outcome.
fn counted(last: bool, outcomes: &[(&str, u64)]) -> What {
    let values = outcomes.iter().map(|(outcome, times)| {
        (
            format!("oncegate_deliveries_total{{outcome={outcome}}}"),
            *times,
        )
    });
    What::Counted {
        values: values.collect(),
        last,
    }
}

#[test]
fn i12_counters_that_are_not_what_the_ledger_has() {
    let says = |last, outcomes: &[(&str, u64)]| {
        Story::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .at(99, "c0.1", counted(last, outcomes))
            .check(&RULES)
    };
    let wrong = |last, outcomes: &[(&str, u64)]| says(last, outcomes).violations_of(Invariant::I12);
    assert_eq!(wrong(true, &[("first", 1), ("completed", 1)]), 0);
    assert_eq!(wrong(true, &[("first", 1)]), 1);
    assert_eq!(wrong(true, &[("first", 1), ("duplicate", 1)]), 2);
    assert_eq!(wrong(true, &[("first", 2), ("completed", 1)]), 1);
    assert_eq!(
        wrong(true, &[("first", 1), ("completed", 1), ("busy", 1)]),
        1
    );
    // It was abandoned at the end of a stop, and nobody has read the answer.
    assert_eq!(wrong(true, &[("completed", 1), ("dropped", 1)]), 0);
    // What a killed process counted last is gone; what it had not seen it cannot have counted.
    assert_eq!(wrong(false, &[]), 0);
    assert_eq!(wrong(false, &[("first", 1)]), 0);
    assert_eq!(wrong(false, &[("first", 2)]), 1);
    assert_eq!(
        (
            wrong(false, &[("completed", 3)]),
            wrong(false, &[("completed", 4)])
        ),
        (0, 1)
    );
    let counts = says(true, &[("first", 1), ("completed", 1)]).counts;
    assert_eq!((counts.metrics_exact, counts.metrics_bounded), (1, 0));
    assert_eq!(says(false, &[]).counts.metrics_bounded, 1);
    // In order, what failed and rests counts as released, and is not settled.
    let rests = [("first", 1), ("completed", 1), ("released", 7)];
    assert_eq!(wrong(true, &rests), 0);
    let story = Story::default().sent("u-1").handled(10, "c0.1", "u-1").at(
        99,
        "c0.1",
        counted(true, &rests),
    );
    assert_eq!(
        story.breaks(&Rules {
            order: Ordered::Not,
            ..RULES
        }),
        [(Invariant::I12, None)]
    );
}

#[test]
fn i9_busy_is_never_accepted() {
    let busy = |story: Story| {
        story
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .answer(12, "c1.1", "u-1", Asked::Claim, "busy")
    };
    assert_eq!(
        busy(Story::default())
            .accept(13, "c1.1", "u-1", "duplicate")
            .breaks(&RULES),
        violation_of(Invariant::I9, "u-1")
    );
    let later = busy(Story::default())
        .answer(90, "c1.1", "u-1", Asked::Claim, "duplicate")
        .accept(91, "c1.1", "u-1", "duplicate");
    let later = later.check(&RULES);
    assert_eq!(
        (
            later.violations,
            later.counts.busy,
            later.counts.duplicates_stopped
        ),
        (vec![], 1, 1)
    );
}

#[test]
fn i9_one_verdict_is_not_enough_for_two_acceptances() {
    let twice = Story::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .accept(40, "c0.1", "u-1", "completed");
    assert_eq!(twice.breaks(&RULES), violation_of(Invariant::I9, "u-1"));
    let of_another = Story::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .accept(40, "c1.1", "u-1", "completed");
    assert_eq!(
        of_another.breaks(&RULES),
        violation_of(Invariant::I9, "u-1")
    );
    let ungated = Story::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .accept(40, "c1.1", "u-1", "passed_without_gate");
    assert_eq!(ungated.breaks(&RULES), violation_of(Invariant::I9, "u-1"));
}

#[test]
fn i14_what_is_left_and_what_is_left_in_progress() {
    let left = |count| {
        Story::default().sent("u-1").handled(10, "c0.1", "u-1").at(
            99,
            "player",
            What::Left { count },
        )
    };
    assert_eq!(left(0).breaks(&RULES), []);
    assert_eq!(left(3).breaks(&RULES), [(Invariant::I14, None)]);
    let marker = |record: &str| {
        let marker = What::Marker {
            id: "u-1".into(),
            record: record.into(),
        };
        Story::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .at(99, "player", marker)
    };
    assert_eq!(
        marker("v1 p 00ff 1 2000 86400000 e -").breaks(&RULES),
        violation_of(Invariant::I14, "u-1")
    );
    assert_eq!(
        marker("v1 r 00ff 2 2000 86400000 a -").breaks(&AT_MOST_ONCE),
        violation_of(Invariant::I14, "u-1")
    );
    let for_a_person = |record: &str| {
        let aside = What::Aside {
            id: "u-1".into(),
            place: Place::InDoubt,
            reason: "in-doubt-interrupted".into(),
        };
        let marker = What::Marker {
            id: "u-1".into(),
            record: record.into(),
        };
        Story::default()
            .sent("u-1")
            .at(98, "player", aside)
            .at(99, "player", marker)
    };
    assert_eq!(
        for_a_person("v1 r 00ff 7 2000 86400000 a -").breaks(&AT_MOST_ONCE),
        []
    );
    assert_eq!(
        for_a_person("v1 p 00ff 7 2000 86400000 a -").breaks(&AT_MOST_ONCE),
        violation_of(Invariant::I14, "u-1")
    );
    for at_rest in ["v1 c 3", "v1 x -", "v1 w 00ff 1 2000 86400000 a -"] {
        assert_eq!(marker(at_rest).breaks(&AT_MOST_ONCE), [], "{at_rest}");
    }
}

#[test]
fn i14_busy_where_nobody_else_can_hold_it() {
    let received = |story: Story, by| {
        story.at(
            3,
            by,
            What::Received {
                id: "u-1".into(),
                position: "0/1".into(),
            },
        )
    };
    let busy = |story: Story| {
        let story = story
            .answer(5, "c0.1", "u-1", Asked::Claim, "unknown")
            .answer(9, "c0.1", "u-1", Asked::Claim, "busy");
        story
            .breaks(&RULES)
            .into_iter()
            .filter(|(invariant, _)| *invariant == Invariant::I14)
            .count()
    };
    let sent = || received(Story::default().sent("u-1"), "c0.1");
    assert_eq!(busy(sent()), 1);
    assert_eq!(busy(received(sent(), "c1.1")), 0, "another has it");
    assert_eq!(busy(received(sent(), "c0.1")), 0, "it came twice");
    assert_eq!(
        busy(sent().answer(4, "c0.1", "u-1", Asked::Claim, "granted 1")),
        0,
        "its own attempt, of which it knows"
    );
    assert_eq!(
        busy(sent().answer(4, "c0.1", "u-1", Asked::Clear, "unknown")),
        0,
        "that was to be cleared"
    );
}

#[test]
fn faults_at_the_same_time_are_counted() {
    let overlapping = |from| {
        let story = Story::default()
            .fault("dark-redis", None, 1_000, 3_000)
            .fault("kill-consumer", Some("c0.1"), from, 3_500);
        story
            .fault("kill-redis", None, 9_000, 9_500)
            .check(&RULES)
            .counts
            .overlapping
    };
    assert_eq!((overlapping(2_900), overlapping(3_000)), (2, 0));
}

#[test]
fn a_consumer_ends_only_when_told_to_well_and_in_time() {
    let ended = |after, status: &str, took| {
        Story::default()
            .gone(20_000, "c0.1", after, status, took)
            .breaks(&RULES)
    };
    assert_eq!(ended(Sent::Kill, "signal 9", 1), []);
    assert_eq!(ended(Sent::Terminate, "exit 0", 13_000), []);
    assert_eq!(
        ended(Sent::Terminate, "exit 0", 13_001),
        [(Invariant::Exit, None)]
    );
    assert_eq!(
        ended(Sent::Terminate, "exit 1", 10),
        [(Invariant::Exit, None)]
    );
    assert_eq!(
        ended(Sent::Nothing, "exit 0", 10),
        [(Invariant::Exit, None)]
    );
}

#[test]
fn a_consumer_that_drains_while_its_broker_is_away_may_end_with_an_error() {
    let ended = |kind, at, took| {
        let story = Story::default()
            .fault(kind, None, 1_000, 20_000)
            .gone(at, "c0.1", Sent::Terminate, "exit 1", took)
            .check(&RULES);
        (story.violations.len(), story.counts.left_without_broker)
    };
    assert_eq!(
        (
            ended("freeze-kafka", 15_000, 12_000),
            ended("freeze-kafka", 22_000, 2_100)
        ),
        ((0, 1), (0, 1))
    );
    assert_eq!(
        (
            ended("freeze-kafka", 22_000, 1_900),
            ended("freeze-kafka", 27_000, 23_001)
        ),
        ((1, 0), (1, 0))
    );
    assert_eq!(ended("dark-redis", 15_000, 5_000), (1, 0));
}

#[test]
fn a_consumer_that_drains_right_after_its_broker_was_frozen_may_not_get_to_leave_its_group() {
    let ended = |kind, at, error: &str| {
        let story = Story::default().fault(kind, None, 1_000, 9_000).at(
            at,
            "c0.1",
            What::Failed {
                error: error.into(),
            },
        );
        let story = story
            .gone(at, "c0.1", Sent::Terminate, "exit 1", 10_000)
            .check(&RULES);
        (
            story.violations.first().map(|it| it.why.clone()),
            story.counts.left_without_broker,
        )
    };
    let stays = "the broker cannot be used: did not leave the group in time; messages that were settled last may be redelivered";
    assert_eq!(ended("freeze-kafka", 43_000, stays), (None, 1));
    let violation_of = |error| {
        (
            Some(format!(
                "c0.1 received SIGTERM and ended with exit 1: {error}"
            )),
            0,
        )
    };
    assert_eq!(ended("freeze-kafka", 45_000, stays), violation_of(stays));
    assert_eq!(ended("freeze-kafka", 43_000, "no"), violation_of("no"));
    assert_eq!(ended("rebalance", 43_000, stays), violation_of(stays));
}

#[test]
fn a_consumer_may_refuse_to_begin_on_a_replica_and_on_nothing_else() {
    let ended = |kind, at, status: &str| {
        let story = Story::default()
            .fault(kind, None, 1_000, 5_000)
            .gone(at, "c0.2", Sent::Nothing, status, 0)
            .check(&RULES);
        (story.violations.len(), story.counts.refused_to_begin)
    };
    assert_eq!(
        (
            ended("demote-redis", 6_000, "exit 1"),
            ended("demote-redis", 8_001, "exit 1")
        ),
        ((0, 1), (1, 0))
    );
    assert_eq!(
        (
            ended("demote-redis", 6_000, "signal 11"),
            ended("fill-disk", 6_000, "exit 1")
        ),
        ((1, 0), (1, 0))
    );
}

#[test]
fn a_consumer_that_a_message_makes_abort_is_the_cause_of_what_it_had_begun() {
    let story = |aborts: bool| {
        let story = Story::default()
            .sent("u-1")
            .start(10, "c0.1", "u-1", 1)
            .effect(15, "c0.1", "u-1", 1, Unique::Accepted);
        let story = if aborts {
            story.at(
                16,
                "c0.1",
                What::Aborting {
                    id: "abort-7".into(),
                },
            )
        } else {
            story
        };
        story
            .start(2_100, "c1.1", "u-1", 2)
            .effect(2_150, "c1.1", "u-1", 2, Unique::Known)
            .end(2_200, "c1.1", "u-1", Ending::Ok)
            .gone(9_000, "c0.1", Sent::Nothing, "signal 6", 0)
    };
    assert_eq!(story(true).breaks(&RULES), []);
    let without: Vec<Invariant> = story(false)
        .breaks(&RULES)
        .into_iter()
        .map(|(invariant, _)| invariant)
        .collect();
    assert_eq!(without, [Invariant::I3, Invariant::I4, Invariant::Exit]);
}

#[test]
fn bare_is_held_to_nothing_but_what_it_must_be_seen_to_break() {
    let story = Story::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .handled(12, "c1.1", "u-1")
        .at(99, "player", What::Left { count: 1 });
    assert_eq!(story.breaks(&BARE), []);
}
