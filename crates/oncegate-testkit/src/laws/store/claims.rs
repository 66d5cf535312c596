//! The verdicts of a claim, row by row.

use std::sync::Arc;

use oncegate_core::Store;
use oncegate_core::marker::{
    Attempts, Effect, Fingerprint, Guarantee, Marker, Operation, OperationKind, Token, Verdict,
};

use crate::laws::fixtures::{
    AT_MOST_ONCE, BOTH_GUARANTEES, CRASHED_ONCE, Claimant, DOUBTED_ONCE, EFFECTIVELY_ONCE,
    LONG_LEASE, OTHER_TOKEN, OWN_TOKEN, TAKEN_OVER, cleared, doubted, fingerprint, granted, hold,
    key, reconciling, reconciling_attempt, rejected, running, verdicts, with_expired_lease,
    with_fingerprint,
};
use crate::laws::rows::{check_rows, row};

fn claim(guarantee: Guarantee) -> (Claimant, OperationKind) {
    (Claimant::new(guarantee, OWN_TOKEN, 0), OperationKind::Claim)
}

const BUSY: Verdict = Verdict::Busy {
    remaining: LONG_LEASE,
};

/// The verdict of a claim that takes over the doubt of the previous attempt.
fn in_doubt(attempt: u32) -> Verdict {
    Verdict::InDoubt(Attempts {
        number: attempt,
        ..DOUBTED_ONCE
    })
}

/// A new id is granted as attempt 1.
pub async fn a_new_id_is_granted(store: Arc<dyn Store>) {
    let rows = BOTH_GUARANTEES.map(|guarantee| {
        row(
            "claim: absent",
            Marker::Absent,
            claim(guarantee),
            granted(1),
            running(guarantee, OWN_TOKEN, 1),
        )
    });
    check_rows(&*store, &rows).await;
}

/// A cleared id is granted with the next attempt; the highest possible attempt is not exceeded.
pub async fn a_cleared_id_is_granted_its_next_attempt(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for (before, next) in [(1, 2), (3, 4), (9, 10), (u32::MAX, u32::MAX)] {
            let given = cleared(before, Effect::Nothing);
            rows.push(row(
                "claim: cleared",
                given,
                claim(guarantee),
                granted(next),
                running(guarantee, OWN_TOKEN, next),
            ));
        }
        // After a redrive by an operator the attempt number continues, and all of `max_attempts`
        // are left.
        let attempts = Attempts {
            number: 6,
            base: 5,
            crashes: 0,
        };
        let given = Marker::Cleared {
            attempts: Attempts::none_counted(5),
            effect: Effect::Nothing,
        };
        let becomes = Marker::InProgress(hold(guarantee, OWN_TOKEN, attempts, Effect::Nothing));
        rows.push(row(
            "claim: cleared, redriven",
            given,
            claim(guarantee),
            Verdict::Granted(attempts),
            becomes,
        ));
    }
    check_rows(&*store, &rows).await;
}

/// The marker keeps an unknown outcome under both guarantees: a claim in at most once receives
/// `InDoubt`, and a grant in effectively once keeps the outcome unknown.
pub async fn an_unknown_outcome_is_in_doubt_in_at_most_once(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for (before, base) in [(1, 0), (4, 0), (5, 5), (5, 2)] {
        let given = Marker::Cleared {
            attempts: Attempts {
                number: before,
                base,
                crashes: 0,
            },
            effect: Effect::Unknown,
        };
        let doubt = Attempts {
            number: before + 1,
            base: base + 1,
            crashes: 0,
        };
        let name = "claim: cleared, outcome unknown, at most once";
        rows.push(row(
            name,
            given,
            claim(AT_MOST_ONCE),
            Verdict::InDoubt(doubt),
            reconciling(OWN_TOKEN, doubt),
        ));
        let grant = Attempts {
            number: before + 1,
            base,
            crashes: 0,
        };
        let becomes = Marker::InProgress(hold(EFFECTIVELY_ONCE, OWN_TOKEN, grant, Effect::Unknown));
        let name = "claim: cleared, outcome unknown, effectively once";
        rows.push(row(
            name,
            given,
            claim(EFFECTIVELY_ONCE),
            Verdict::Granted(grant),
            becomes,
        ));
    }
    check_rows(&*store, &rows).await;
}

/// A repeated claim receives the same grant with the same attempt, also after its lease has
/// expired.
pub async fn a_repeated_claim_is_the_same_grant(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            running(guarantee, OWN_TOKEN, 1),
            running(guarantee, OWN_TOKEN, 4),
            with_expired_lease(running(guarantee, OWN_TOKEN, 1)),
            with_expired_lease(running(guarantee, OWN_TOKEN, 4)),
        ] {
            let attempt = if given == running(guarantee, OWN_TOKEN, 1)
                || given == with_expired_lease(running(guarantee, OWN_TOKEN, 1))
            {
                1
            } else {
                4
            };
            rows.push(row(
                "claim: in progress, own token",
                given,
                claim(guarantee),
                granted(attempt),
                given,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// While a lease is valid, all other claims of the same body receive `Busy`, whatever the guarantees
/// are.
pub async fn a_live_lease_is_busy(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for holder in BOTH_GUARANTEES {
        for claimer in BOTH_GUARANTEES {
            for given in [
                running(holder, OTHER_TOKEN, 1),
                running(holder, OTHER_TOKEN, 4),
            ] {
                rows.push(row(
                    "claim: in progress, lease valid",
                    given,
                    claim(claimer),
                    BUSY,
                    given,
                ));
            }
        }
    }
    check_rows(&*store, &rows).await;
}

/// A claim takes over an expired lease with the next attempt if the guarantees of the holder and of
/// the claimer are both effectively once.
pub async fn an_ended_lease_is_taken_over_in_effectively_once(store: Arc<dyn Store>) {
    let guarantee = EFFECTIVELY_ONCE;
    let rows = [(1, 2), (4, 5), (u32::MAX, u32::MAX)].map(|(before, next)| {
        let given = with_expired_lease(running(guarantee, OTHER_TOKEN, before));
        let attempts = Attempts {
            number: next,
            ..TAKEN_OVER
        };
        let becomes = Marker::InProgress(hold(guarantee, OWN_TOKEN, attempts, Effect::Unknown));
        row(
            "claim: in progress, lease expired, effectively once",
            given,
            claim(guarantee),
            Verdict::Granted(attempts),
            becomes,
        )
    });
    check_rows(&*store, &rows).await;
}

/// If the guarantee of the holder or of the claimer is at most once, a claim of an id with an expired
/// lease receives `InDoubt`, and the doubt has the token of the claim and the next attempt.
pub async fn an_ended_lease_is_in_doubt_in_at_most_once(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for (holder, claimer) in [
        (AT_MOST_ONCE, AT_MOST_ONCE),
        (AT_MOST_ONCE, EFFECTIVELY_ONCE),
        (EFFECTIVELY_ONCE, AT_MOST_ONCE),
    ] {
        for (before, next) in [(1, 2), (4, 5)] {
            let given = with_expired_lease(running(holder, OTHER_TOKEN, before));
            let attempts = Attempts {
                number: next,
                ..CRASHED_ONCE
            };
            let (verdict, becomes) = (Verdict::InDoubt(attempts), reconciling(OWN_TOKEN, attempts));
            rows.push(row(
                "claim: in progress, lease expired, at most once",
                given,
                claim(claimer),
                verdict,
                becomes,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// A repeated claim of an id in doubt receives the same doubt with the same attempt.
pub async fn a_repeated_claim_is_the_same_doubt(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            reconciling_attempt(OWN_TOKEN, 2),
            with_expired_lease(reconciling_attempt(OWN_TOKEN, 2)),
        ] {
            rows.push(row(
                "claim: in doubt, own token",
                given,
                claim(guarantee),
                in_doubt(2),
                given,
            ));
        }
        for given in [
            doubted(AT_MOST_ONCE, OWN_TOKEN, 2),
            doubted(EFFECTIVELY_ONCE, OWN_TOKEN, 2),
        ] {
            rows.push(row(
                "claim: in doubt, own token",
                given,
                claim(guarantee),
                Verdict::InDoubt(Attempts::new(2)),
                given,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// A claim takes over, with the next attempt, a doubt that no consumer reconciles or whose
/// reconciler's lease has expired.
pub async fn a_claim_takes_over_a_doubt_without_reconciler(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let waiting = [
            doubted(AT_MOST_ONCE, OTHER_TOKEN, 2),
            doubted(EFFECTIVELY_ONCE, OTHER_TOKEN, 2),
        ];
        rows.extend(waiting.map(|given| {
            row(
                "claim: in doubt, no reconciler",
                given,
                claim(guarantee),
                in_doubt(3),
                reconciling_attempt(OWN_TOKEN, 3),
            )
        }));
        let given = with_expired_lease(reconciling_attempt(OTHER_TOKEN, 2));
        let attempts = Attempts {
            number: 3,
            base: 2,
            crashes: 1,
        };
        let name = "claim: in doubt, another reconciling, lease expired";
        rows.push(row(
            name,
            given,
            claim(guarantee),
            Verdict::InDoubt(attempts),
            reconciling(OWN_TOKEN, attempts),
        ));
        let given = doubted(AT_MOST_ONCE, OTHER_TOKEN, u32::MAX);
        rows.push(row(
            "claim: in doubt, last attempt",
            given,
            claim(guarantee),
            in_doubt(u32::MAX),
            reconciling_attempt(OWN_TOKEN, u32::MAX),
        ));
    }
    check_rows(&*store, &rows).await;
}

/// While a consumer reconciles, all other claims of the same body receive `Busy`.
pub async fn a_doubt_that_another_reconciles_is_busy(store: Arc<dyn Store>) {
    let rows = BOTH_GUARANTEES.map(|guarantee| {
        let given = reconciling_attempt(OTHER_TOKEN, 2);
        row(
            "claim: in doubt, another reconciling, lease valid",
            given,
            claim(guarantee),
            BUSY,
            given,
        )
    });
    check_rows(&*store, &rows).await;
}

/// A rejected id is not run again, and its verdict contains its last attempt.
pub async fn a_rejected_id_stays_rejected(store: Arc<dyn Store>) {
    let given = rejected(3, None);
    check_rows(
        &*store,
        &BOTH_GUARANTEES.map(|guarantee| {
            row(
                "claim: rejected",
                given,
                claim(guarantee),
                Verdict::Rejected { attempt: 3 },
                given,
            )
        }),
    )
    .await;
}

/// A completed id is a duplicate.
pub async fn a_done_id_is_a_duplicate(store: Arc<dyn Store>) {
    let given = Marker::Done(None);
    check_rows(
        &*store,
        &BOTH_GUARANTEES.map(|guarantee| {
            row(
                "claim: done",
                given,
                claim(guarantee),
                Verdict::Duplicate,
                given,
            )
        }),
    )
    .await;
}

/// A claim with another body receives `Busy` while the first body is in progress, because the first
/// may still fail. After the lease of the first has expired it receives `Conflict`, because the
/// first may never be delivered again.
pub async fn another_body_waits_for_the_first(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let (claimant, kind) = claim(guarantee);
        let operation = (claimant.fingerprint(fingerprint(7)), kind);
        let given = with_fingerprint(running(guarantee, OTHER_TOKEN, 1), fingerprint(8));
        rows.push(row(
            "claim: another fingerprint, in progress, lease valid",
            given,
            operation,
            BUSY,
            given,
        ));
        let expired = with_expired_lease(given);
        rows.push(row(
            "claim: another fingerprint, in progress, lease expired",
            expired,
            operation,
            Verdict::Conflict,
            expired,
        ));
    }
    check_rows(&*store, &rows).await;
}

/// Another body conflicts with an id that is in doubt, rejected or done.
pub async fn another_body_conflicts_with_an_in_doubt_rejected_or_done_id(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let (claimant, kind) = claim(guarantee);
        for given in [
            with_fingerprint(doubted(AT_MOST_ONCE, OTHER_TOKEN, 2), fingerprint(8)),
            with_fingerprint(reconciling_attempt(OTHER_TOKEN, 2), fingerprint(8)),
            with_expired_lease(with_fingerprint(
                reconciling_attempt(OTHER_TOKEN, 2),
                fingerprint(8),
            )),
            rejected(1, fingerprint(8)),
            Marker::Done(fingerprint(8)),
        ] {
            let operation = (claimant.fingerprint(fingerprint(7)), kind);
            rows.push(row(
                "claim: another fingerprint, in doubt, rejected or done",
                given,
                operation,
                Verdict::Conflict,
                given,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// A claim does not conflict if it has the same fingerprint as the marker, or if one of the two has
/// no fingerprint, such as the marker `1` of another program.
pub async fn a_missing_fingerprint_matches_any_body(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let (claimant, kind) = claim(guarantee);
        for (first, second) in [
            (fingerprint(7), fingerprint(7)),
            (None, fingerprint(7)),
            (fingerprint(7), None),
        ] {
            let operation = (claimant.fingerprint(second), kind);
            let taken = with_fingerprint(reconciling_attempt(OWN_TOKEN, 3), second);
            let doubted = with_fingerprint(doubted(AT_MOST_ONCE, OTHER_TOKEN, 2), first);
            rows.push(row(
                "claim: in doubt, no other fingerprint",
                doubted,
                operation,
                in_doubt(3),
                taken,
            ));
            rows.push(row(
                "claim: rejected, no other fingerprint",
                rejected(2, first),
                operation,
                Verdict::Rejected { attempt: 2 },
                rejected(2, first),
            ));
            rows.push(row(
                "claim: done, no other fingerprint",
                Marker::Done(first),
                operation,
                Verdict::Duplicate,
                Marker::Done(first),
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// Fingerprints from 0 to the largest are stored without truncation.
pub async fn all_fingerprints_are_distinguished(store: Arc<dyn Store>) {
    const LARGEST: u64 = Fingerprint::LIMIT - 1;
    let bodies = [0, 1, 42, 1 << 53, (1 << 53) + 1, LARGEST - 1, LARGEST].map(fingerprint);
    let done = key("done");
    for first in bodies {
        let claimant = |body| Claimant::new(AT_MOST_ONCE, Token(1), 1).fingerprint(body);
        assert!(matches!(
            verdicts(
                &*store,
                &[claimant(first).operation(OperationKind::Complete, &done)]
            )
            .await[0],
            Verdict::Done { .. }
        ));
        let claims: Vec<Operation> = bodies
            .iter()
            .map(|second| claimant(*second).claim(&done))
            .collect();
        for (second, received) in bodies.iter().zip(verdicts(&*store, &claims).await) {
            let expected = if *second == first {
                Verdict::Duplicate
            } else {
                Verdict::Conflict
            };
            assert_eq!(
                received, expected,
                "{second:?} on an id that is done with {first:?}"
            );
        }
        let forget = claimant(first).operation(
            OperationKind::Forget {
                seen: Marker::Done(first),
            },
            &done,
        );
        assert_eq!(verdicts(&*store, &[forget]).await, [Verdict::Applied]);
    }
}
