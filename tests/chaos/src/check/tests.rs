//! Constructed ledgers that violate each invariant, and some that violate none.

mod commits;
mod ledger_builder;
mod order;
mod outages;
mod recovery;
mod rejections;

use super::*;
use crate::ledger::{
    HandlerEnd, Lookup, RejectedTo, SentSignal, SettlementKind, StoreOperation, Unique,
};
use ledger_builder::LedgerBuilder;

const RULES: CheckRules = CheckRules {
    guarantee: TestedGuarantee::EffectivelyOnce,
    order: Ordered::ByKey,
    lease: Duration::from_secs(2),
    grace: Duration::from_millis(500),
    aftermath: Duration::from_secs(10),
    drain: Duration::from_secs(10),
    store: ClaimDurability::Kept,
    in_flight: 2,
    attempts: 3,
    scope: CheckScope::All,
};
const AT_MOST_ONCE: CheckRules = CheckRules {
    guarantee: TestedGuarantee::AtMostOnce,
    ..RULES
};
const BARE: CheckRules = CheckRules {
    guarantee: TestedGuarantee::Bare,
    ..RULES
};

fn violation_of(invariant: Invariant, id: &str) -> Vec<(Invariant, Option<String>)> {
    vec![(invariant, Some(id.to_owned()))]
}

/// A consumer is frozen in a handler; another takes over; the first wakes and is cancelled.
fn frozen_handler(cancelled: u64) -> LedgerBuilder {
    LedgerBuilder::default()
        .sent("u-1")
        .start(10, "c0.1", "u-1", 1)
        .fault("freeze-consumer", Some("c0.1"), 20, 5_000)
        .start(2_100, "c1.1", "u-1", 2)
        .effect(2_150, "c1.1", "u-1", 2, Unique::First)
        .end(5_200, "c1.1", "u-1", HandlerEnd::Ok)
        .end(cancelled, "c0.1", "u-1", HandlerEnd::Dropped)
}

#[test]
fn a_run_without_faults_violates_nothing() {
    let ledger = || {
        LedgerBuilder::default()
            .sent("k1-1")
            .handled(10, "c0.1", "k1-1")
            .sent("k1-2")
            .handled(30, "c0.1", "k1-2")
    };
    for rules in [RULES, AT_MOST_ONCE, BARE] {
        assert_eq!(ledger().violations(&rules), []);
    }
    let counts = ledger().check(&RULES).counts;
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
        LedgerBuilder::default()
            .sent("u-1")
            .sent("u-2")
            .handled(10, "c0.1", "u-2")
            .accept(20, "c0.1", "u-1", "duplicate")
    };
    for rules in [RULES, AT_MOST_ONCE, BARE] {
        assert!(
            lost()
                .violations(&rules)
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
fn i1_rejected_and_unconfirmed_messages_are_not_lost() {
    for place in [RejectedTo::DeadLetters, RejectedTo::InDoubt] {
        let rejected = What::Rejected {
            id: "fail-1".into(),
            place,
            reason: "attempts-spent".into(),
        };
        assert_eq!(
            LedgerBuilder::default()
                .sent("fail-1")
                .at(50, "harness", rejected)
                .violations(&RULES),
            []
        );
    }
    let unconfirmed =
        LedgerBuilder::default().at(0, "harness", What::Attempted { id: "u-1".into() });
    assert_eq!(unconfirmed.violations(&RULES), []);
}

#[test]
fn an_effect_of_an_unconfirmed_message_is_recovered_and_of_an_unpublished_one_unexpected() {
    let recovered = LedgerBuilder::default()
        .at(0, "harness", What::Attempted { id: "u-1".into() })
        .handled(10, "c0.1", "u-1")
        .check(&RULES);
    assert_eq!(
        (recovered.counts.recovered, recovered.violations.len()),
        (1, 0)
    );
    assert_eq!(
        LedgerBuilder::default()
            .handled(10, "c0.1", "u-9")
            .violations(&RULES),
        violation_of(Invariant::Unexpected, "u-9")
    );
}

#[test]
fn i2_two_effects_of_one_id_are_a_violation_despite_a_fault() {
    let doubled = LedgerBuilder::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .fault("kill-consumer", Some("c0.1"), 30, 40)
        .effect(3_000, "c1.1", "u-1", 2, Unique::Repeated);
    assert_eq!(
        doubled.violations(&AT_MOST_ONCE),
        violation_of(Invariant::I2, "u-1")
    );
}

#[test]
fn i2_a_refused_effect_does_not_count() {
    let looked = What::Reconciled {
        id: "u-1".into(),
        consumer: "c1.1".into(),
        attempt: 2,
        found: Lookup::Voided,
    };
    let late = What::Refused {
        id: "u-1".into(),
        consumer: "c0.1".into(),
        attempt: 1,
    };
    let ledger = LedgerBuilder::default()
        .sent("u-1")
        .at(5, "sink", looked)
        .handled(10, "c1.1", "u-1")
        .at(90, "sink", late)
        .check(&AT_MOST_ONCE);
    assert_eq!((ledger.violations, ledger.counts.refused), (vec![], 1));
}

/// Two effects of an id, with a fault or none.
fn run_again(fault: impl Fn(LedgerBuilder) -> LedgerBuilder) -> LedgerBuilder {
    fault(
        LedgerBuilder::default()
            .sent("u-1")
            .start(10, "c0.1", "u-1", 1)
            .effect(15, "c0.1", "u-1", 1, Unique::First),
    )
    .end(18, "c0.1", "u-1", HandlerEnd::Dropped)
    .start(3_000, "c1.1", "u-1", 2)
    .effect(3_010, "c1.1", "u-1", 2, Unique::Repeated)
    .end(3_020, "c1.1", "u-1", HandlerEnd::Ok)
}

#[test]
fn i3_a_second_effect_needs_a_cause() {
    assert_eq!(
        run_again(|ledger| ledger).violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    let other_consumer = run_again(|ledger| ledger.fault("kill-consumer", Some("c2.1"), 16, 500));
    assert_eq!(
        other_consumer.violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    let later = run_again(|ledger| ledger.fault("kill-consumer", Some("c0.1"), 3_500, 4_000));
    assert_eq!(later.violations(&RULES), violation_of(Invariant::I3, "u-1"));
    // A fault that neither affects the store nor revokes deliveries cannot interrupt a run.
    assert_eq!(
        run_again(|ledger| ledger.fault("refuse-letters", None, 12, 2_000)).violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    assert_eq!(
        run_again(|ledger| ledger.fault("rebalance", None, 12, 2_000)).violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    assert_eq!(
        run_again(|ledger| ledger.at(2_400, "c0.1", What::Stalled { ms: 400 })).violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    let long_before = LedgerBuilder::default()
        .fault("kill-redis", None, 0, 1)
        .sent("u-1");
    let long_before = LedgerBuilder(
        long_before
            .0
            .into_iter()
            .chain(run_again(|ledger| ledger).0.into_iter().map(|mut record| {
                record.at += 20_000_000;
                record
            }))
            .collect(),
    );
    assert_eq!(
        long_before.violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
}

#[test]
fn i3_a_fault_of_its_consumer_or_of_a_server_is_a_cause() {
    let killed =
        run_again(|ledger| ledger.fault("kill-consumer", Some("c0.1"), 16, 500)).check(&RULES);
    assert_eq!(
        (killed.violations, killed.counts.explained["kill-consumer"]),
        (vec![], 1)
    );
    assert_eq!(
        run_again(|ledger| ledger.fault("dark-redis", None, 12, 2_000)).violations(&RULES),
        []
    );
    assert_eq!(
        run_again(|ledger| ledger.at(2_400, "c0.1", What::Stalled { ms: 2_300 }))
            .violations(&RULES),
        []
    );
    // A fault without a target explains the runs of consumers that it ended, and those whose
    // deliveries were revoked.
    let ended = run_again(|ledger| {
        ledger.fault("rebalance", None, 12, 2_900).process_ended(
            2_000,
            "c0.1",
            SentSignal::Terminate,
            "exit 0",
            1_900,
        )
    });
    assert_eq!(ended.check(&RULES).counts.explained["rebalance"], 1);
    let revoked = |by| {
        run_again(|ledger| {
            ledger.fault("kill-consumer", Some("c2.1"), 12, 900).at(
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
        revoked("c1.1").violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
}

#[test]
fn i3_no_fault_explains_an_effect_after_a_recorded_completion() {
    let recorded = |at| {
        run_again(|ledger| {
            ledger.fault("kill-redis", None, 12, 2_000).answer(
                at,
                "c0.1",
                "u-1",
                StoreOperation::Complete,
                "done",
            )
        })
    };
    assert_eq!(
        recorded(2_990).violations(&RULES),
        violation_of(Invariant::I3, "u-1")
    );
    assert_eq!(recorded(3_010).violations(&RULES), []);
    let of_another = run_again(|ledger| {
        ledger.fault("kill-redis", None, 12, 2_000).answer(
            20,
            "c1.1",
            "u-1",
            StoreOperation::Complete,
            "done",
        )
    });
    assert_eq!(of_another.violations(&RULES), []);
}

#[test]
fn i3_two_unique_effects_are_a_violation() {
    let ledger = LedgerBuilder::default()
        .sent("u-1")
        .fault("kill-redis", None, 0, 5)
        .start(10, "c0.1", "u-1", 1)
        .start(50, "c1.1", "u-1", 2);
    let twice = ledger.effect(15, "c0.1", "u-1", 1, Unique::First).effect(
        55,
        "c1.1",
        "u-1",
        2,
        Unique::First,
    );
    let twice =
        twice
            .end(49, "c0.1", "u-1", HandlerEnd::Dropped)
            .end(58, "c1.1", "u-1", HandlerEnd::Ok);
    assert_eq!(twice.violations(&RULES), violation_of(Invariant::I3, "u-1"));
}

#[test]
fn i4_two_concurrent_handlers_with_leases_are_a_violation() {
    let beside = LedgerBuilder::default()
        .sent("u-1")
        .start(10, "c0.1", "u-1", 1)
        .start(20, "c1.1", "u-1", 2)
        .end(30, "c0.1", "u-1", HandlerEnd::Dropped)
        .effect(40, "c1.1", "u-1", 2, Unique::First)
        .end(50, "c1.1", "u-1", HandlerEnd::Ok);
    assert_eq!(
        beside.violations(&RULES),
        violation_of(Invariant::I4, "u-1")
    );
}

#[test]
fn i4_a_frozen_handler_must_be_cancelled_within_the_grace_time() {
    let right = frozen_handler(5_100).check(&RULES);
    assert_eq!(
        (
            right.violations,
            right.counts.fenced,
            right.counts.fenced_longest_ms
        ),
        (vec![], 1, 100)
    );
    assert_eq!(
        frozen_handler(5_900).violations(&RULES),
        violation_of(Invariant::I4, "u-1")
    );
}

#[test]
fn i4_the_attempt_of_a_takeover_must_be_higher() {
    let ledger = LedgerBuilder(
        frozen_handler(5_100)
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
    assert_eq!(
        ledger.violations(&RULES),
        violation_of(Invariant::I4, "u-1")
    );
}

#[test]
fn i4_a_handler_ends_with_its_process() {
    let ledger = |gone| {
        LedgerBuilder::default()
            .sent("u-1")
            .fault("kill-consumer", Some("c0.1"), 15, 40)
            .start(10, "c0.1", "u-1", 1)
            .process_ended(gone, "c0.1", SentSignal::Kill, "signal 9", 1)
            .start(2_100, "c1.1", "u-1", 2)
            .effect(2_150, "c1.1", "u-1", 2, Unique::First)
            .end(2_200, "c1.1", "u-1", HandlerEnd::Ok)
    };
    assert_eq!(ledger(16).violations(&RULES), []);
    assert_eq!(
        ledger(3_000).violations(&RULES),
        violation_of(Invariant::I4, "u-1")
    );
}

#[test]
fn i13_a_leaked_secret_is_a_violation() {
    let leaked = What::Leaked {
        secret: "Redis".into(),
        place: "c0.1.log, line 3".into(),
    };
    assert_eq!(
        LedgerBuilder::default()
            .at(9, "harness", leaked)
            .violations(&BARE),
        [(Invariant::I13, None)]
    );
}

#[test]
fn i8_a_refused_acknowledgement_is_a_violation() {
    let ledger = LedgerBuilder::default().at(
        5,
        "harness",
        What::ChannelRefused {
            line: "PRECONDITION_FAILED - unknown delivery tag 7".into(),
        },
    );
    assert_eq!(ledger.violations(&RULES), [(Invariant::I8, None)]);
}

#[test]
fn i8_a_delivery_settled_twice_is_a_violation() {
    let settled = || What::Settled {
        id: "u-1".into(),
        position: "0/1".into(),
        how: SettlementKind::Released,
        why: "released".into(),
    };
    let once = || {
        LedgerBuilder::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
    };
    assert_eq!(
        once().at(30, "c0.1", settled()).violations(&RULES),
        violation_of(Invariant::I8, "u-1")
    );
    assert_eq!(
        once().at(30, "c1.1", settled()).violations(&RULES),
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
            .violations(&RULES),
        []
    );
}

#[test]
fn i2_if_a_failover_may_lose_claims_a_second_effect_needs_a_cause() {
    let forgets = CheckRules {
        store: ClaimDurability::MayBeLost,
        ..AT_MOST_ONCE
    };
    let twice = || {
        LedgerBuilder::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .handled(4_000, "c1.1", "u-1")
    };
    let twice = || {
        LedgerBuilder(twice().0.into_iter().filter(|it| it.by != "sink").collect())
            .effect(15, "c0.1", "u-1", 1, Unique::First)
            .effect(4_005, "c1.1", "u-1", 1, Unique::Repeated)
    };
    assert_eq!(
        twice().violations(&forgets),
        violation_of(Invariant::I2, "u-1")
    );
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
            .violations(&AT_MOST_ONCE),
        violation_of(Invariant::I2, "u-1")
    );
}

#[test]
fn i14_a_marker_may_remain_in_progress_if_a_failover_lost_its_completion() {
    let left = |done: u64| {
        let marker = What::Marker {
            id: "u-1".into(),
            record: "v1 p 00ff 1 2000 86400000 e -".into(),
        };
        LedgerBuilder::default()
            .sent("u-1")
            .handled(done - 10, "c0.1", "u-1")
            .fault("fail-over-redis", None, 5_000, 8_000)
            .at(20_000, "harness", marker)
    };
    for lost in [4_000, 7_000] {
        let checked = left(lost).check(&RULES);
        assert_eq!(
            (checked.violations, checked.counts.completions_lost),
            (vec![], 1)
        );
    }
    for kept in [3_900, 8_100] {
        assert_eq!(
            left(kept).violations(&RULES),
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
fn i12_counters_must_equal_the_ledger() {
    let says = |last, outcomes: &[(&str, u64)]| {
        LedgerBuilder::default()
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
    // A reply for a delivery that was abandoned at the end of a drain is not counted.
    assert_eq!(wrong(true, &[("completed", 1), ("dropped", 1)]), 0);
    // A killed process loses its last counts, but never counts more than the ledger has.
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
    // A failed message that waits in the consumer counts as released and is not settled.
    let backing_off = [("first", 1), ("completed", 1), ("released", 7)];
    assert_eq!(wrong(true, &backing_off), 0);
}

#[test]
fn i9_busy_is_never_accepted() {
    let busy = |ledger: LedgerBuilder| {
        ledger.sent("u-1").handled(10, "c0.1", "u-1").answer(
            12,
            "c1.1",
            "u-1",
            StoreOperation::Claim,
            "busy",
        )
    };
    assert_eq!(
        busy(LedgerBuilder::default())
            .accept(13, "c1.1", "u-1", "duplicate")
            .violations(&RULES),
        violation_of(Invariant::I9, "u-1")
    );
    let later = busy(LedgerBuilder::default())
        .answer(90, "c1.1", "u-1", StoreOperation::Claim, "duplicate")
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
    let twice = LedgerBuilder::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .accept(40, "c0.1", "u-1", "completed");
    assert_eq!(twice.violations(&RULES), violation_of(Invariant::I9, "u-1"));
    let of_another = LedgerBuilder::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .accept(40, "c1.1", "u-1", "completed");
    assert_eq!(
        of_another.violations(&RULES),
        violation_of(Invariant::I9, "u-1")
    );
    let ungated = LedgerBuilder::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .accept(40, "c1.1", "u-1", "passed_without_store");
    assert_eq!(
        ungated.violations(&RULES),
        violation_of(Invariant::I9, "u-1")
    );
}

#[test]
fn i14_unsettled_messages_and_markers_in_progress_are_violations() {
    let left = |count| {
        LedgerBuilder::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .at(99, "harness", What::Unsettled { count })
    };
    assert_eq!(left(0).violations(&RULES), []);
    assert_eq!(left(3).violations(&RULES), [(Invariant::I14, None)]);
    let marker = |record: &str| {
        let marker = What::Marker {
            id: "u-1".into(),
            record: record.into(),
        };
        LedgerBuilder::default()
            .sent("u-1")
            .handled(10, "c0.1", "u-1")
            .at(99, "harness", marker)
    };
    assert_eq!(
        marker("v1 p 00ff 1 2000 86400000 e -").violations(&RULES),
        violation_of(Invariant::I14, "u-1")
    );
    assert_eq!(
        marker("v1 r 00ff 2 2000 86400000 a -").violations(&AT_MOST_ONCE),
        violation_of(Invariant::I14, "u-1")
    );
    let with_in_doubt_message = |record: &str| {
        let rejected = What::Rejected {
            id: "u-1".into(),
            place: RejectedTo::InDoubt,
            reason: "in-doubt-interrupted".into(),
        };
        let marker = What::Marker {
            id: "u-1".into(),
            record: record.into(),
        };
        LedgerBuilder::default()
            .sent("u-1")
            .at(98, "harness", rejected)
            .at(99, "harness", marker)
    };
    assert_eq!(
        with_in_doubt_message("v1 r 00ff 7 2000 86400000 a -").violations(&AT_MOST_ONCE),
        []
    );
    assert_eq!(
        with_in_doubt_message("v1 p 00ff 7 2000 86400000 a -").violations(&AT_MOST_ONCE),
        violation_of(Invariant::I14, "u-1")
    );
    for unheld in ["v1 c 3", "v1 x -", "v1 w 00ff 1 2000 86400000 a -"] {
        assert_eq!(marker(unheld).violations(&AT_MOST_ONCE), [], "{unheld}");
    }
}

#[test]
fn i14_busy_without_another_holder_is_a_violation() {
    let received = |ledger: LedgerBuilder, by| {
        ledger.at(
            3,
            by,
            What::Received {
                id: "u-1".into(),
                position: "0/1".into(),
            },
        )
    };
    let busy = |ledger: LedgerBuilder| {
        let ledger = ledger
            .answer(5, "c0.1", "u-1", StoreOperation::Claim, "unknown")
            .answer(9, "c0.1", "u-1", StoreOperation::Claim, "busy");
        ledger
            .violations(&RULES)
            .into_iter()
            .filter(|(invariant, _)| *invariant == Invariant::I14)
            .count()
    };
    let sent = || received(LedgerBuilder::default().sent("u-1"), "c0.1");
    assert_eq!(busy(sent()), 1);
    assert_eq!(
        busy(received(sent(), "c1.1")),
        0,
        "another consumer received it"
    );
    assert_eq!(busy(received(sent(), "c0.1")), 0, "it was delivered twice");
    assert_eq!(
        busy(sent().answer(4, "c0.1", "u-1", StoreOperation::Claim, "granted 1")),
        0,
        "its own granted claim"
    );
    assert_eq!(
        busy(sent().answer(4, "c0.1", "u-1", StoreOperation::Clear, "unknown")),
        0,
        "a clear without a reply"
    );
}

#[test]
fn overlapping_faults_are_counted() {
    let overlapping = |from| {
        let ledger = LedgerBuilder::default()
            .fault("dark-redis", None, 1_000, 3_000)
            .fault("kill-consumer", Some("c0.1"), from, 3_500);
        ledger
            .fault("kill-redis", None, 9_000, 9_500)
            .check(&RULES)
            .counts
            .overlapping
    };
    assert_eq!((overlapping(2_900), overlapping(3_000)), (2, 0));
}

#[test]
fn a_consumer_ends_only_after_sigterm_with_exit_0_within_its_drain() {
    let ended = |after, status: &str, took| {
        LedgerBuilder::default()
            .process_ended(20_000, "c0.1", after, status, took)
            .violations(&RULES)
    };
    assert_eq!(ended(SentSignal::Kill, "signal 9", 1), []);
    assert_eq!(ended(SentSignal::Terminate, "exit 0", 13_000), []);
    assert_eq!(
        ended(SentSignal::Terminate, "exit 0", 13_001),
        [(Invariant::Exit, None)]
    );
    assert_eq!(
        ended(SentSignal::Terminate, "exit 1", 10),
        [(Invariant::Exit, None)]
    );
    assert_eq!(
        ended(SentSignal::Nothing, "exit 0", 10),
        [(Invariant::Exit, None)]
    );
}

#[test]
fn a_consumer_that_drains_while_its_broker_is_unavailable_may_end_with_an_error() {
    let ended = |kind, at, took| {
        let ledger = LedgerBuilder::default()
            .fault(kind, None, 1_000, 20_000)
            .process_ended(at, "c0.1", SentSignal::Terminate, "exit 1", took)
            .check(&RULES);
        (
            ledger.violations.len(),
            ledger.counts.stopped_without_broker,
        )
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
fn a_consumer_that_drains_just_after_a_freeze_of_kafka_may_fail_to_leave_its_group() {
    let ended = |kind, at, error: &str| {
        let ledger = LedgerBuilder::default().fault(kind, None, 1_000, 9_000).at(
            at,
            "c0.1",
            What::Failed {
                error: error.into(),
            },
        );
        let ledger = ledger
            .process_ended(at, "c0.1", SentSignal::Terminate, "exit 1", 10_000)
            .check(&RULES);
        (
            ledger.violations.first().map(|it| it.why.clone()),
            ledger.counts.stopped_without_broker,
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
fn a_consumer_may_refuse_to_start_only_on_a_replica() {
    let ended = |kind, at, status: &str| {
        let ledger = LedgerBuilder::default()
            .fault(kind, None, 1_000, 5_000)
            .process_ended(at, "c0.2", SentSignal::Nothing, status, 0)
            .check(&RULES);
        (ledger.violations.len(), ledger.counts.refused_to_start)
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
fn an_abort_by_a_message_explains_repeated_effects_of_its_process() {
    let ledger = |aborts: bool| {
        let ledger = LedgerBuilder::default()
            .sent("u-1")
            .start(10, "c0.1", "u-1", 1)
            .effect(15, "c0.1", "u-1", 1, Unique::First);
        let ledger = if aborts {
            ledger.at(
                16,
                "c0.1",
                What::Aborting {
                    id: "abort-7".into(),
                },
            )
        } else {
            ledger
        };
        ledger
            .start(2_100, "c1.1", "u-1", 2)
            .effect(2_150, "c1.1", "u-1", 2, Unique::Repeated)
            .end(2_200, "c1.1", "u-1", HandlerEnd::Ok)
            .process_ended(9_000, "c0.1", SentSignal::Nothing, "signal 6", 0)
    };
    assert_eq!(ledger(true).violations(&RULES), []);
    let without: Vec<Invariant> = ledger(false)
        .violations(&RULES)
        .into_iter()
        .map(|(invariant, _)| invariant)
        .collect();
    assert_eq!(without, [Invariant::I3, Invariant::I4, Invariant::Exit]);
}

#[test]
fn bare_is_only_checked_for_losses() {
    let ledger = LedgerBuilder::default()
        .sent("u-1")
        .handled(10, "c0.1", "u-1")
        .handled(12, "c1.1", "u-1")
        .at(99, "harness", What::Unsettled { count: 1 });
    assert_eq!(ledger.violations(&BARE), []);
}
