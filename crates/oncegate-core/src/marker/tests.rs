//! Tests of all transitions of a marker.

use std::time::Duration;

use super::*;
use crate::id::{Key, MessageId};

const LEASE: Duration = Duration::from_secs(30);
const WINDOW: Duration = Duration::from_secs(3600);
/// The age of a marker whose lease has not ended, and of a marker whose lease has ended.
const VALID: Age = Age::Of(Duration::from_secs(1));
const EXPIRED: Age = Age::Of(Duration::from_secs(31));
/// The token of the operation, and that of another claim.
const OWN: Token = Token(1);
const OTHER: Token = Token(2);
const AT_MOST_ONCE: Guarantee = Guarantee::AtMostOnce;
const EFFECTIVELY_ONCE: Guarantee = Guarantee::EffectivelyOnce;

fn operation(guarantee: Guarantee, kind: OperationKind, attempt: u32) -> Operation {
    let terms = Terms {
        guarantee,
        lease: LEASE,
        window: WINDOW,
        fingerprint: None,
    };
    Operation {
        key: Key::new(&MessageId::new("id").expect("an id")),
        kind,
        token: OWN,
        attempt,
        terms,
    }
}

fn with_body(mut operation: Operation, body: u64) -> Operation {
    operation.terms.fingerprint = Some(Fingerprint::new(body));
    operation
}

/// Two attempts, of which one counts towards `max_attempts`: the second one was granted in doubt,
/// to reconcile the first.
const DOUBTED_ONCE: Attempts = Attempts {
    number: 2,
    base: 1,
    crashes: 0,
};
const NOTHING: Effect = Effect::Nothing;
const UNKNOWN: Effect = Effect::Unknown;

fn hold(guarantee: Guarantee, token: Token, attempts: Attempts, earlier: Effect) -> Hold {
    let horizon = if guarantee == AT_MOST_ONCE {
        UNRESOLVED_AT_MOST_ONCE
    } else {
        WINDOW
    };
    Hold {
        token,
        attempts,
        earlier,
        lease: LEASE,
        horizon,
        guarantee,
        fingerprint: None,
    }
}

fn running(guarantee: Guarantee, token: Token, attempt: u32) -> Marker {
    Marker::InProgress(hold(guarantee, token, Attempts::new(attempt), NOTHING))
}

fn in_doubt_marker(token: Token, attempts: Attempts, doubt: Doubt) -> Marker {
    Marker::InDoubt(hold(AT_MOST_ONCE, token, attempts, UNKNOWN), doubt)
}

fn cleared(attempts: Attempts, effect: Effect) -> Marker {
    Marker::Cleared { attempts, effect }
}

fn rejected(attempt: u32) -> Marker {
    Marker::Rejected {
        attempt,
        fingerprint: None,
    }
}

fn write(marker: Marker) -> Change {
    let expiry = match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.horizon,
        _ => WINDOW,
    };
    Change::Write(marker, expiry)
}

/// Checks rows of (marker, age, change, verdict) for one operation.
fn check(operation: &Operation, rows: &[(Marker, Age, Change, Verdict)]) {
    for (marker, age, change, verdict) in rows {
        assert_eq!(
            apply(*marker, *age, operation),
            (*change, *verdict),
            "{:?} on {marker:?}, {age:?}",
            operation.kind
        );
    }
}

#[test]
fn claim() {
    use Change::Keep;
    use Marker::*;
    for guarantee in [AT_MOST_ONCE, EFFECTIVELY_ONCE] {
        let granted = |attempts, earlier| {
            let hold = hold(guarantee, OWN, attempts, earlier);
            (write(InProgress(hold)), Verdict::Granted(attempts))
        };
        let (first, fourth) = (
            granted(Attempts::new(1), NOTHING),
            granted(Attempts::new(4), NOTHING),
        );
        let redriven = granted(
            Attempts {
                number: 8,
                base: 7,
                crashes: 0,
            },
            NOTHING,
        );
        let busy = |seconds| Verdict::Busy {
            remaining: Duration::from_secs(seconds),
        };
        let granted_in_doubt = |attempts| {
            (
                write(in_doubt_marker(OWN, attempts, Doubt::Reconciling)),
                Verdict::InDoubt(attempts),
            )
        };
        let (waiting, crashed) = (
            granted_in_doubt(Attempts {
                number: 3,
                base: 1,
                crashes: 0,
            }),
            granted_in_doubt(Attempts {
                number: 3,
                base: 1,
                crashes: 1,
            }),
        );
        let own = in_doubt_marker(OWN, DOUBTED_ONCE, Doubt::Reconciling);
        check(
            &operation(guarantee, OperationKind::Claim, 0),
            &[
                (Absent, VALID, first.0, first.1),
                (
                    cleared(Attempts::new(3), NOTHING),
                    VALID,
                    fourth.0,
                    fourth.1,
                ),
                (
                    cleared(Attempts::none_counted(7), NOTHING),
                    VALID,
                    redriven.0,
                    redriven.1,
                ), // redriven by an operator
                (
                    running(guarantee, OWN, 4),
                    EXPIRED,
                    write(running(guarantee, OWN, 4)),
                    fourth.1,
                ), // the claim is repeated: the lease is renewed, and the attempt is the same
                (running(guarantee, OTHER, 1), VALID, Keep, busy(29)),
                (running(guarantee, OTHER, 1), Age::Of(LEASE), Keep, busy(0)), // the lease ends after exactly its duration
                (
                    running(guarantee, OTHER, 1),
                    Age::Unknown,
                    write(running(guarantee, OTHER, 1)),
                    busy(30),
                ),
                (own, VALID, write(own), Verdict::InDoubt(DOUBTED_ONCE)),
                (
                    in_doubt_marker(OTHER, Attempts::new(2), Doubt::Reconciling),
                    VALID,
                    Keep,
                    busy(29),
                ),
                (
                    in_doubt_marker(OTHER, Attempts::new(2), Doubt::Waiting),
                    VALID,
                    waiting.0,
                    waiting.1,
                ),
                (
                    in_doubt_marker(OTHER, Attempts::new(2), Doubt::Reconciling),
                    EXPIRED,
                    crashed.0,
                    crashed.1,
                ),
                (rejected(3), VALID, Keep, Verdict::Rejected { attempt: 3 }),
                (Done(None), VALID, Keep, Verdict::Duplicate),
            ],
        );
    }
}

#[test]
fn an_ended_lease_is_taken_over_or_in_doubt_by_the_stricter_guarantee() {
    // Neither the attempt that crashed nor the one that reconciles is counted.
    let attempts = Attempts {
        number: 2,
        base: 2,
        crashes: 1,
    };
    let in_doubt = (
        write(in_doubt_marker(OWN, attempts, Doubt::Reconciling)),
        Verdict::InDoubt(attempts),
    );
    for (record, claimant) in [
        (AT_MOST_ONCE, AT_MOST_ONCE),
        (AT_MOST_ONCE, EFFECTIVELY_ONCE),
        (EFFECTIVELY_ONCE, AT_MOST_ONCE),
    ] {
        assert_eq!(
            apply(
                running(record, OTHER, 1),
                EXPIRED,
                &operation(claimant, OperationKind::Claim, 0)
            ),
            in_doubt,
            "{record:?} {claimant:?}"
        );
    }
    let attempts = Attempts {
        number: 2,
        base: 1,
        crashes: 1,
    };
    let taken = apply(
        running(EFFECTIVELY_ONCE, OTHER, 1),
        EXPIRED,
        &operation(EFFECTIVELY_ONCE, OperationKind::Claim, 0),
    );
    assert_eq!(
        taken,
        (
            write(Marker::InProgress(hold(
                EFFECTIVELY_ONCE,
                OWN,
                attempts,
                UNKNOWN
            ))),
            Verdict::Granted(attempts)
        )
    );
}

#[test]
fn an_unknown_outcome_stays_unknown_after_a_change_of_guarantee() {
    let unknown = cleared(Attempts::new(1), UNKNOWN);
    let in_doubt = (
        write(in_doubt_marker(OWN, DOUBTED_ONCE, Doubt::Reconciling)),
        Verdict::InDoubt(DOUBTED_ONCE),
    );
    assert_eq!(
        apply(
            unknown,
            EXPIRED,
            &operation(AT_MOST_ONCE, OperationKind::Claim, 0)
        ),
        in_doubt
    );
    // Effectively once runs the id again. A second run without an effect does not resolve the
    // outcome of the first.
    let second = Marker::InProgress(hold(EFFECTIVELY_ONCE, OWN, Attempts::new(2), UNKNOWN));
    assert_eq!(
        apply(
            unknown,
            EXPIRED,
            &operation(EFFECTIVELY_ONCE, OperationKind::Claim, 0)
        ),
        (write(second), Verdict::Granted(Attempts::new(2)))
    );
    for kind in [
        OperationKind::Clear(NOTHING),
        OperationKind::Clear(UNKNOWN),
        OperationKind::Reject(NOTHING),
        OperationKind::Reject(UNKNOWN),
    ] {
        let still_unknown = (write(cleared(Attempts::new(2), UNKNOWN)), Verdict::Applied);
        assert_eq!(
            apply(second, VALID, &operation(EFFECTIVELY_ONCE, kind, 2)),
            still_unknown,
            "{kind:?}"
        );
    }
    // An attempt number 1 that is not the first: the marker was lost, and an operator redrove the
    // id.
    let first = Marker::InProgress(hold(EFFECTIVELY_ONCE, OWN, Attempts::new(1), UNKNOWN));
    let kept = (write(cleared(Attempts::new(1), UNKNOWN)), Verdict::Applied);
    assert_eq!(
        apply(
            first,
            VALID,
            &operation(EFFECTIVELY_ONCE, OperationKind::Clear(NOTHING), 1)
        ),
        kept
    );
}

#[test]
fn a_claim_with_another_body() {
    let body = |number| Some(Fingerprint::new(number));
    let claim = with_body(operation(AT_MOST_ONCE, OperationKind::Claim, 0), 7);
    let other = Hold {
        fingerprint: body(8),
        ..hold(AT_MOST_ONCE, OTHER, Attempts::new(1), NOTHING)
    };
    check(
        &claim,
        &[
            (
                Marker::InProgress(other),
                VALID,
                Change::Keep,
                Verdict::Busy {
                    remaining: Duration::from_secs(29),
                },
            ),
            // The verdict is not `Busy`, because the holder may never claim again.
            (
                Marker::InProgress(other),
                EXPIRED,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::InDoubt(other, Doubt::Waiting),
                VALID,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::Rejected {
                    attempt: 1,
                    fingerprint: body(8),
                },
                VALID,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::Done(body(8)),
                VALID,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::Done(body(7)),
                VALID,
                Change::Keep,
                Verdict::Duplicate,
            ),
            (Marker::Done(None), VALID, Change::Keep, Verdict::Duplicate), // a marker without a fingerprint matches any body
        ],
    );
}

#[test]
fn crashes_and_reconciliations_do_not_count_towards_max_attempts() {
    let (mut marker, claim) = (
        running(AT_MOST_ONCE, OTHER, 1),
        operation(AT_MOST_ONCE, OperationKind::Claim, 0),
    );
    for copy in 1..=100 {
        let Verdict::InDoubt(attempts) = apply(marker, EXPIRED, &claim).1 else {
            panic!("in doubt")
        };
        assert_eq!(
            (attempts.number, attempts.spent()),
            (1 + copy, 0),
            "crashes do not count"
        );
        marker = in_doubt_marker(Token(2 + u128::from(copy)), attempts, Doubt::Waiting);
    }
}

/// Markers that do not belong to the claim of the operation: with another token, another attempt,
/// or no holder.
fn not_owned() -> Vec<Marker> {
    let holders = [(OTHER, 1), (OWN, 2)];
    let held = holders.into_iter().flat_map(|(token, attempt)| {
        [
            running(AT_MOST_ONCE, token, attempt),
            in_doubt_marker(token, Attempts::new(attempt), Doubt::Waiting),
        ]
    });
    held.chain([
        Marker::Absent,
        cleared(Attempts::new(1), NOTHING),
        rejected(1),
        Marker::Done(None),
    ])
    .collect()
}

/// Checks that the verdict is `Lost` on every marker of another claim, except those for which
/// `is_excepted` returns true.
fn check_lost_except(
    kind: OperationKind,
    guarantee: Guarantee,
    is_excepted: impl Fn(&Marker) -> bool,
) {
    for marker in not_owned()
        .into_iter()
        .filter(|marker| !is_excepted(marker))
    {
        assert_eq!(
            apply(marker, VALID, &operation(guarantee, kind, 1)),
            (Change::Keep, Verdict::Lost),
            "{kind:?} on {marker:?}"
        );
    }
}

fn is_free(marker: &Marker) -> bool {
    matches!(marker, Marker::Absent | Marker::Cleared { .. })
}

#[test]
fn renew() {
    for owned in [
        running(AT_MOST_ONCE, OWN, 1),
        in_doubt_marker(OWN, Attempts::new(1), Doubt::Reconciling),
    ] {
        check(
            &operation(AT_MOST_ONCE, OperationKind::Renew, 1),
            &[(owned, EXPIRED, write(owned), Verdict::Applied)],
        );
    }
    check_lost_except(OperationKind::Renew, AT_MOST_ONCE, |_| false);
}

#[test]
fn complete() {
    let done = |marker_lost| (write(Marker::Done(None)), Verdict::Done { marker_lost });
    let complete = operation(AT_MOST_ONCE, OperationKind::Complete, 1);
    for known in [
        running(AT_MOST_ONCE, OWN, 1),
        in_doubt_marker(OWN, Attempts::new(1), Doubt::Waiting),
        in_doubt_marker(OTHER, Attempts::new(5), Doubt::Reconciling),
    ] {
        assert_eq!(apply(known, EXPIRED, &complete), done(false), "{known:?}");
    }
    for lost in [Marker::Absent, cleared(Attempts::new(4), NOTHING)] {
        assert_eq!(apply(lost, VALID, &complete), done(true), "{lost:?}");
    }
    check(
        &complete,
        &[(
            Marker::Done(None),
            VALID,
            Change::Keep,
            Verdict::Done { marker_lost: false },
        )],
    );
    check_lost_except(OperationKind::Complete, AT_MOST_ONCE, |marker| {
        !matches!(marker, Marker::InProgress(_) | Marker::Rejected { .. })
    });
}

#[test]
fn clear() {
    for (guarantee, effect, attempt, change) in [
        (AT_MOST_ONCE, Effect::Nothing, 1, Change::Delete),
        (EFFECTIVELY_ONCE, Effect::Nothing, 1, Change::Delete),
        (
            AT_MOST_ONCE,
            Effect::Nothing,
            2,
            write(cleared(Attempts::new(2), NOTHING)),
        ),
        (
            EFFECTIVELY_ONCE,
            Effect::Unknown,
            1,
            write(cleared(Attempts::new(1), UNKNOWN)),
        ),
        (
            EFFECTIVELY_ONCE,
            Effect::Unknown,
            3,
            write(cleared(Attempts::new(3), UNKNOWN)),
        ),
    ] {
        let marker = running(guarantee, OWN, attempt);
        check(
            &operation(guarantee, OperationKind::Clear(effect), attempt),
            &[(marker, EXPIRED, change, Verdict::Applied)],
        );
    }
    let unknown = operation(AT_MOST_ONCE, OperationKind::Clear(Effect::Unknown), 1);
    check(
        &unknown,
        &[(
            running(AT_MOST_ONCE, OWN, 1),
            VALID,
            Change::Keep,
            Verdict::Lost,
        )],
    ); // an unknown outcome is recorded as in doubt, never cleared
    for marker in [Marker::Absent, cleared(Attempts::new(1), NOTHING)] {
        check(
            &operation(AT_MOST_ONCE, OperationKind::Clear(Effect::Nothing), 1),
            &[(marker, VALID, Change::Keep, Verdict::Applied)],
        );
    }
    check_lost_except(OperationKind::Clear(Effect::Nothing), AT_MOST_ONCE, is_free);
}

#[test]
fn withdraw() {
    for guarantee in [AT_MOST_ONCE, EFFECTIVELY_ONCE] {
        let withdraw = |attempt| operation(guarantee, OperationKind::Withdraw, attempt);
        check(
            &withdraw(1),
            &[(
                running(guarantee, OWN, 1),
                EXPIRED,
                Change::Delete,
                Verdict::Applied,
            )],
        );
        // The attempt does not count: neither the number of counted attempts nor the effect of
        // earlier attempts changes.
        for earlier in [NOTHING, UNKNOWN] {
            let granted = Marker::InProgress(hold(
                guarantee,
                OWN,
                Attempts {
                    number: 4,
                    base: 1,
                    crashes: 1,
                },
                earlier,
            ));
            let withdrawn = cleared(
                Attempts {
                    number: 4,
                    base: 2,
                    crashes: 1,
                },
                earlier,
            );
            check(
                &withdraw(4),
                &[
                    (granted, EXPIRED, write(withdrawn), Verdict::Applied),
                    (withdrawn, VALID, Change::Keep, Verdict::Applied),
                ],
            );
        }
        check(
            &withdraw(1),
            &[(Marker::Absent, VALID, Change::Keep, Verdict::Applied)],
        );
        check_lost_except(OperationKind::Withdraw, guarantee, is_free);
    }
}

#[test]
fn reject() {
    for effect in [Effect::Nothing, Effect::Unknown] {
        let kind = OperationKind::Reject(effect);
        check(
            &operation(AT_MOST_ONCE, kind, 1),
            &[(
                running(AT_MOST_ONCE, OWN, 1),
                EXPIRED,
                write(rejected(1)),
                Verdict::Applied,
            )],
        );
        check(
            &operation(EFFECTIVELY_ONCE, kind, 2),
            &[(
                running(EFFECTIVELY_ONCE, OWN, 2),
                EXPIRED,
                write(cleared(Attempts::new(2), effect)),
                Verdict::Applied,
            )],
        );
        check_lost_except(kind, AT_MOST_ONCE, |_| false);
        check_lost_except(kind, EFFECTIVELY_ONCE, is_free);
    }
    check(
        &operation(EFFECTIVELY_ONCE, OperationKind::Reject(Effect::Nothing), 1),
        &[(
            running(EFFECTIVELY_ONCE, OWN, 1),
            EXPIRED,
            Change::Delete,
            Verdict::Applied,
        )],
    );
    // The run may have its effect later, so a run after a redrive needs a higher attempt number.
    check(
        &operation(EFFECTIVELY_ONCE, OperationKind::Reject(Effect::Unknown), 1),
        &[(
            running(EFFECTIVELY_ONCE, OWN, 1),
            EXPIRED,
            write(cleared(Attempts::new(1), UNKNOWN)),
            Verdict::Applied,
        )],
    );
}

#[test]
fn doubt() {
    let waiting = |attempts, earlier| {
        write(Marker::InDoubt(
            hold(AT_MOST_ONCE, OWN, attempts, earlier),
            Doubt::Waiting,
        ))
    };
    let doubt = operation(AT_MOST_ONCE, OperationKind::Doubt, 1);
    check(
        &doubt,
        &[
            (
                running(AT_MOST_ONCE, OWN, 1),
                EXPIRED,
                waiting(Attempts::new(1), NOTHING),
                Verdict::Applied,
            ),
            (
                in_doubt_marker(OWN, Attempts::new(1), Doubt::Reconciling),
                EXPIRED,
                waiting(Attempts::new(1), UNKNOWN),
                Verdict::Applied,
            ),
            (
                Marker::Absent,
                VALID,
                waiting(Attempts::none_counted(1), UNKNOWN),
                Verdict::Applied,
            ),
            (
                cleared(Attempts::new(1), NOTHING),
                VALID,
                waiting(Attempts::new(1), UNKNOWN),
                Verdict::Applied,
            ),
            (
                cleared(Attempts::new(0), NOTHING),
                VALID,
                waiting(Attempts::new(1), UNKNOWN),
                Verdict::Applied,
            ),
            // The attempt number never decreases.
            (
                cleared(Attempts::new(3), NOTHING),
                VALID,
                waiting(Attempts::new(3), UNKNOWN),
                Verdict::Applied,
            ),
            // The operation arrives late or was repeated: since then, the outcome was determined,
            // or an operator freed the id.
            (
                cleared(DOUBTED_ONCE, NOTHING),
                VALID,
                Change::Keep,
                Verdict::Lost,
            ),
            (
                cleared(Attempts::none_counted(1), NOTHING),
                VALID,
                Change::Keep,
                Verdict::Lost,
            ),
        ],
    );
    check_lost_except(OperationKind::Doubt, AT_MOST_ONCE, is_free);
}

#[test]
fn resolve() {
    let owned = in_doubt_marker(OWN, Attempts::new(1), Doubt::Reconciling);
    let happened = operation(AT_MOST_ONCE, OperationKind::Resolve(Finding::Happened), 1);
    check(
        &happened,
        &[(
            owned,
            EXPIRED,
            write(Marker::Done(None)),
            Verdict::Done { marker_lost: false },
        )],
    );
    let did_not = operation(
        AT_MOST_ONCE,
        OperationKind::Resolve(Finding::DidNotHappen),
        1,
    );
    check(
        &did_not,
        &[(
            owned,
            EXPIRED,
            write(cleared(Attempts::new(1), NOTHING)),
            Verdict::Applied,
        )],
    );
    for finding in [Finding::Happened, Finding::DidNotHappen] {
        check_lost_except(OperationKind::Resolve(finding), AT_MOST_ONCE, |_| false);
        check(
            &operation(AT_MOST_ONCE, OperationKind::Resolve(finding), 1),
            &[(
                running(AT_MOST_ONCE, OWN, 1),
                VALID,
                Change::Keep,
                Verdict::Lost,
            )],
        );
    }
}

#[test]
fn redrive() {
    let in_doubt = in_doubt_marker(OTHER, DOUBTED_ONCE, Doubt::Waiting);
    let (unknown, known) = (
        cleared(Attempts::new(5), UNKNOWN),
        cleared(Attempts::new(5), NOTHING),
    );
    let freed = |number, effect| cleared(Attempts::none_counted(number), effect);
    // The crashes are reset, so that the message runs again before it is dead-lettered for them.
    let crashed = Attempts {
        number: 12,
        base: 11,
        crashes: 11,
    };
    for (guarantee, seen, stated, free) in [
        (AT_MOST_ONCE, rejected(5), UNKNOWN, Some(freed(5, NOTHING))),
        (AT_MOST_ONCE, rejected(5), NOTHING, Some(freed(5, NOTHING))),
        (EFFECTIVELY_ONCE, unknown, UNKNOWN, Some(freed(5, UNKNOWN))),
        (EFFECTIVELY_ONCE, unknown, NOTHING, Some(freed(5, NOTHING))),
        (EFFECTIVELY_ONCE, known, UNKNOWN, Some(freed(5, NOTHING))),
        (
            EFFECTIVELY_ONCE,
            cleared(crashed, UNKNOWN),
            UNKNOWN,
            Some(freed(12, UNKNOWN)),
        ),
        (
            AT_MOST_ONCE,
            in_doubt_marker(OTHER, crashed, Doubt::Waiting),
            NOTHING,
            Some(freed(12, NOTHING)),
        ),
        (AT_MOST_ONCE, in_doubt, NOTHING, Some(freed(2, NOTHING))),
        (AT_MOST_ONCE, in_doubt, UNKNOWN, None), // freed only if the operator states that nothing happened
        (
            EFFECTIVELY_ONCE,
            running(EFFECTIVELY_ONCE, OTHER, 5),
            UNKNOWN,
            Some(freed(5, UNKNOWN)),
        ),
        (
            AT_MOST_ONCE,
            running(EFFECTIVELY_ONCE, OTHER, 5),
            UNKNOWN,
            None,
        ),
        (
            EFFECTIVELY_ONCE,
            running(AT_MOST_ONCE, OTHER, 5),
            UNKNOWN,
            None,
        ),
        (
            AT_MOST_ONCE,
            running(AT_MOST_ONCE, OTHER, 5),
            NOTHING,
            Some(freed(5, NOTHING)),
        ),
        (
            AT_MOST_ONCE,
            Marker::Absent,
            UNKNOWN,
            Some(freed(0, UNKNOWN)),
        ),
        (AT_MOST_ONCE, Marker::Done(None), NOTHING, None), // freed with `Forget`, not with `Redrive`
    ] {
        let kind = OperationKind::Redrive {
            seen,
            effect: stated,
        };
        let expected = free.map_or((Change::Keep, Verdict::Lost), |free| {
            (write(free), Verdict::Applied)
        });
        check(
            &operation(guarantee, kind, 0),
            &[(seen, EXPIRED, expected.0, expected.1)],
        );
        check_lost_except(kind, guarantee, |marker| {
            *marker == seen || Some(*marker) == free
        });
        if let Some(free) = free {
            // Repeated after a lost reply. The dead letter may have a higher attempt number than
            // the marker.
            check(
                &operation(guarantee, kind, 0),
                &[(free, EXPIRED, write(free), Verdict::Applied)],
            );
            let Marker::Cleared { effect, .. } = free else {
                panic!("{free:?} is not cleared")
            };
            check(
                &operation(guarantee, kind, 99),
                &[(seen, EXPIRED, write(freed(99, effect)), Verdict::Applied)],
            );
        }
        if let Marker::InProgress(_) = seen {
            check(
                &operation(guarantee, kind, 0),
                &[(seen, VALID, Change::Keep, Verdict::Lost)],
            ); // a running message is not redriven
        }
    }
}

#[test]
fn forget() {
    let seen = Marker::Done(None);
    let free = |number| {
        (
            write(cleared(Attempts::none_counted(number), NOTHING)),
            Verdict::Applied,
        )
    };
    assert_eq!(
        apply(
            seen,
            VALID,
            &operation(AT_MOST_ONCE, OperationKind::Forget { seen }, 7)
        ),
        free(7),
        "the operator knows the attempt number"
    );
    assert_eq!(
        apply(
            seen,
            VALID,
            &operation(AT_MOST_ONCE, OperationKind::Forget { seen }, 0)
        ),
        free(UNKNOWN_ATTEMPT),
        "the attempt number is unknown"
    );
    let repeated = operation(AT_MOST_ONCE, OperationKind::Forget { seen }, 7);
    check(
        &repeated,
        &[(
            cleared(Attempts::none_counted(7), NOTHING),
            VALID,
            free(7).0,
            Verdict::Applied,
        )],
    ); // after a lost reply
    check_lost_except(OperationKind::Forget { seen }, AT_MOST_ONCE, |marker| {
        *marker == seen
    });
    for other in [
        rejected(1),
        in_doubt_marker(OWN, Attempts::new(1), Doubt::Waiting),
        running(AT_MOST_ONCE, OTHER, 1),
    ] {
        check(
            &operation(AT_MOST_ONCE, OperationKind::Forget { seen: other }, 0),
            &[(other, VALID, Change::Keep, Verdict::Lost)],
        );
    }
}

#[test]
fn an_operation_repeated_after_a_lost_reply_has_the_same_verdict() {
    for guarantee in [AT_MOST_ONCE, EFFECTIVELY_ONCE] {
        for (marker, kind) in [
            (Marker::Absent, OperationKind::Claim),
            (cleared(Attempts::new(1), NOTHING), OperationKind::Claim),
            (running(guarantee, OWN, 1), OperationKind::Renew),
            (running(guarantee, OWN, 1), OperationKind::Complete),
            (
                running(guarantee, OWN, 1),
                OperationKind::Clear(Effect::Nothing),
            ),
            (running(guarantee, OWN, 1), OperationKind::Doubt),
            (Marker::Absent, OperationKind::Doubt),
        ] {
            let operation = operation(guarantee, kind, 1);
            let (change, first) = apply(marker, VALID, &operation);
            let after = match change {
                Change::Write(marker, _) => marker,
                Change::Delete => Marker::Absent,
                Change::Keep => marker,
            };
            let (_, second) = apply(after, VALID, &operation);
            assert_eq!(first, second, "{kind:?} on {marker:?}");
        }
    }
}

#[test]
fn bare_writes_at_the_claim_and_deletes_after_a_failure() {
    let bare = |kind| operation(Guarantee::Bare, kind, 1);
    check(
        &bare(OperationKind::Claim),
        &[(
            Marker::Absent,
            VALID,
            write(Marker::Done(None)),
            Verdict::Granted(Attempts::new(1)),
        )],
    );
    for marker in [Marker::Done(None), running(AT_MOST_ONCE, OTHER, 1)] {
        check(
            &bare(OperationKind::Claim),
            &[(marker, VALID, Change::Keep, Verdict::Duplicate)],
        );
    }
    for kind in [
        OperationKind::Clear(Effect::Nothing),
        OperationKind::Clear(Effect::Unknown),
        OperationKind::Reject(Effect::Unknown),
        OperationKind::Doubt,
    ] {
        check(
            &bare(kind),
            &[(Marker::Done(None), VALID, Change::Delete, Verdict::Applied)],
        );
    }
    check(
        &bare(OperationKind::Complete),
        &[(
            Marker::Done(None),
            VALID,
            Change::Keep,
            Verdict::Done { marker_lost: false },
        )],
    );
}
