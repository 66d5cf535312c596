//! Constructed ledgers with store outages, and with late recoveries.

use super::*;

/// I11 violations of a ledger in which the store is unavailable from 2 s to 10 s.
fn outage_violations(ledger: LedgerBuilder) -> Vec<Invariant> {
    let found = ledger
        .fault("dark-redis", None, 2_000, 10_000)
        .violations(&RULES);
    found
        .into_iter()
        .map(|(invariant, _)| invariant)
        .filter(|invariant| *invariant == Invariant::I11)
        .collect()
}

#[test]
fn i11_no_handler_starts_after_its_lease_while_the_store_is_unavailable() {
    let one = |ms| {
        LedgerBuilder::default().start(ms, "c0.1", "u-1", 1).end(
            ms + 1,
            "c0.1",
            "u-1",
            HandlerEnd::Ok,
        )
    };
    assert_eq!(outage_violations(one(1_900)), []);
    // Within its lease.
    assert_eq!(outage_violations(one(4_900)), []);
    assert_eq!(outage_violations(one(5_100)), [Invariant::I11]);
    assert_eq!(outage_violations(one(10_100)), []);
    // It read the reply before, and was not scheduled meanwhile.
    assert_eq!(
        outage_violations(one(5_200).at(5_190, "c0.1", What::Stalled { ms: 3_500 })),
        []
    );
    let granted =
        |ms| LedgerBuilder::default().answer(ms, "c0.1", "u-1", StoreOperation::Claim, "granted 1");
    assert_eq!(outage_violations(granted(2_900)), []);
    assert_eq!(outage_violations(granted(3_100)), [Invariant::I11]);
    // The store replies before the end of the fault is recorded.
    assert_eq!(outage_violations(granted(9_400)), [Invariant::I11]);
    assert_eq!(outage_violations(granted(9_600)), []);
}

#[test]
fn i11_a_store_that_refuses_writes_grants_nothing() {
    let while_it = |kind, ledger: LedgerBuilder| {
        let found = ledger.fault(kind, None, 2_000, 10_000).violations(&RULES);
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
        let granted = LedgerBuilder::default().answer(
            3_100,
            "c0.1",
            "u-1",
            StoreOperation::Claim,
            "granted 1",
        );
        let started = LedgerBuilder::default().start(5_100, "c0.1", "u-1", 1).end(
            5_101,
            "c0.1",
            "u-1",
            HandlerEnd::Ok,
        );
        // It refuses at once, so the number of requests is not limited.
        let asked = (0..100).fold(LedgerBuilder::default(), |ledger, time| {
            ledger.answer(
                3_000 + time * 10,
                "c0.1",
                "u-1",
                StoreOperation::Claim,
                "not applied",
            )
        });
        assert_eq!(
            (while_it(kind, granted), while_it(kind, asked)),
            (1, 0),
            "{kind}"
        );
        // Without memory Redis still renews leases.
        assert_eq!(
            while_it(kind, started),
            usize::from(kind != "fill-redis"),
            "{kind}"
        );
    }
    assert_eq!(
        while_it(
            "kill-redis",
            LedgerBuilder::default().answer(
                3_100,
                "c0.1",
                "u-1",
                StoreOperation::Claim,
                "granted 1"
            )
        ),
        0
    );
}

#[test]
fn i11_requests_to_an_unavailable_store_are_limited() {
    let asked = |every: u64, times| {
        (0..times).fold(LedgerBuilder::default(), |ledger, time| {
            ledger.answer(
                3_000 + time * every,
                "c0.1",
                "u-1",
                StoreOperation::Claim,
                "unknown",
            )
        })
    };
    assert_eq!(outage_violations(asked(50, 100)), []);
    assert_eq!(
        outage_violations(asked(40, 100)).first(),
        Some(&Invariant::I11)
    );
    // All in one request.
    assert_eq!(outage_violations(asked(0, 100)), []);
}

#[test]
fn i11_memory_and_concurrent_handlers_are_bounded() {
    let sampled = |ledger: LedgerBuilder, ms, resident| {
        ledger.at(
            ms,
            "harness",
            What::Sampled {
                consumer: "c0.1".into(),
                resident,
            },
        )
    };
    let grown = |by: u64| {
        sampled(
            sampled(LedgerBuilder::default(), 1_900, 40_000),
            9_000,
            40_000 + by,
        )
    };
    assert_eq!(outage_violations(grown(50 * 1_024)), []);
    assert_eq!(outage_violations(grown(50 * 1_024 + 1)), [Invariant::I11]);
    let start = |run: u64| What::Started {
        id: format!("u-{run}"),
        attempt: 1,
        run,
    };
    let handlers = |count| {
        (0..count).fold(LedgerBuilder::default(), |ledger, run| {
            ledger.at(run, "c0.1", start(run))
        })
    };
    assert_eq!(outage_violations(handlers(2)), []);
    assert_eq!(outage_violations(handlers(3)), [Invariant::I11]);
    // A handler that is cancelled at that moment does not count; one that is cancelled later does.
    let end = |how| What::Ended {
        id: "u-0".into(),
        run: 0,
        how,
    };
    assert_eq!(
        outage_violations(handlers(3).at(300, "c0.1", end(HandlerEnd::Dropped))),
        []
    );
    assert_eq!(
        outage_violations(handlers(3).at(300, "c0.1", end(HandlerEnd::Ok))),
        [Invariant::I11]
    );
    assert_eq!(
        outage_violations(handlers(3).at(900, "c0.1", end(HandlerEnd::Dropped))),
        [Invariant::I11]
    );
}

#[test]
fn i10_effects_must_resume_within_the_bound() {
    let messages = |ledger: LedgerBuilder| {
        (0..20).fold(ledger, |ledger, number| {
            ledger.at(
                1_200,
                "harness",
                What::Confirmed {
                    id: format!("u-{number}"),
                },
            )
        })
    };
    let again = |kind, ms| {
        let ledger = messages(LedgerBuilder::default().fault(kind, None, 1_000, 1_100));
        ledger
            .at(0, "harness", What::Attempted { id: "u-1".into() })
            .effect(ms, "c0.1", "u-1", 1, Unique::First)
    };
    let late = |ledger: LedgerBuilder| ledger.check(&RULES).violations_of(Invariant::I10);
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
        again("kill-kafka", 31_100)
            .check(&RULES)
            .counts
            .first_effect_ms["kill-kafka"],
        30_000
    );
    // Not a violation while another fault lasts, during stalls, and without confirmed messages.
    assert_eq!(
        late(again("kill-rabbit", 7_000).fault("freeze-redis", None, 900, 6_900)),
        0
    );
    assert_eq!(
        late(again("kill-rabbit", 7_000).at(3_000, "c0.1", What::Stalled { ms: 1_000 })),
        0
    );
    assert_eq!(
        late(LedgerBuilder::default().fault("kill-rabbit", None, 1_000, 1_100)),
        0
    );
    assert_eq!(
        late(messages(LedgerBuilder::default().fault(
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
    // An earlier fault has its own bound; concurrent stalls count once.
    let killed = |ms| again("kill-rabbit", ms).fault("kill-consumer", Some("c0.1"), 500, 900);
    assert_eq!((late(killed(10_900)), late(killed(10_901))), (0, 1));
    let stalls = |ms| {
        again("kill-rabbit", ms)
            .at(3_000, "c0.1", What::Stalled { ms: 1_000 })
            .at(3_100, "c1.1", What::Stalled { ms: 1_000 })
    };
    assert_eq!((late(stalls(7_200)), late(stalls(7_201))), (0, 1));
}
