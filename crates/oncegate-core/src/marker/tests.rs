//! All transitions of a marker.

use std::time::Duration;

use super::*;
use crate::id::{Key, MessageId};

const LEASE: Duration = Duration::from_secs(30);
const WINDOW: Duration = Duration::from_secs(3600);
const ALIVE: Age = Age::Of(Duration::from_secs(1));
const OVER: Age = Age::Of(Duration::from_secs(31));
const OWN: Token = Token(1);
const OTHER: Token = Token(2);
const AMO: Guarantee = Guarantee::AtMostOnce;
const EO: Guarantee = Guarantee::EffectivelyOnce;

fn operation(guarantee: Guarantee, ask: Ask, attempt: u32) -> Operation {
    let terms = Terms {
        guarantee,
        lease: LEASE,
        window: WINDOW,
        fingerprint: None,
    };
    Operation {
        key: Key::new(&MessageId::new("id").expect("an id")),
        ask,
        token: OWN,
        attempt,
        terms,
    }
}

fn with_body(mut operation: Operation, body: u64) -> Operation {
    operation.terms.fingerprint = Some(Fingerprint::new(body));
    operation
}

/// The second attempt, one of which counts: the first one after it was recorded as in doubt.
const DOUBTED_ONCE: Attempts = Attempts {
    number: 2,
    base: 1,
    crashes: 0,
};
const NOTHING: Effect = Effect::Nothing;
const UNKNOWN: Effect = Effect::Unknown;

fn hold(guarantee: Guarantee, token: Token, attempts: Attempts, earlier: Effect) -> Hold {
    let horizon = if guarantee == AMO {
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

fn doubted(token: Token, attempts: Attempts, doubt: Doubt) -> Marker {
    Marker::InDoubt(hold(AMO, token, attempts, UNKNOWN), doubt)
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
fn rows(operation: &Operation, rows: &[(Marker, Age, Change, Verdict)]) {
    for (marker, age, change, verdict) in rows {
        assert_eq!(
            apply(*marker, *age, operation),
            (*change, *verdict),
            "{:?} on {marker:?}, {age:?}",
            operation.ask
        );
    }
}

#[test]
fn claim() {
    use Change::Keep;
    use Marker::*;
    for guarantee in [AMO, EO] {
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
        let taken = |attempts| {
            (
                write(doubted(OWN, attempts, Doubt::Reconciling)),
                Verdict::InDoubt(attempts),
            )
        };
        let (waiting, crashed) = (
            taken(Attempts {
                number: 3,
                base: 1,
                crashes: 0,
            }),
            taken(Attempts {
                number: 3,
                base: 1,
                crashes: 1,
            }),
        );
        let own = doubted(OWN, DOUBTED_ONCE, Doubt::Reconciling);
        rows(
            &operation(guarantee, Ask::Claim, 0),
            &[
                (Absent, ALIVE, first.0, first.1),
                (
                    cleared(Attempts::new(3), NOTHING),
                    ALIVE,
                    fourth.0,
                    fourth.1,
                ),
                (
                    cleared(Attempts::none_counted(7), NOTHING),
                    ALIVE,
                    redriven.0,
                    redriven.1,
                ), // redriven by an operator
                (
                    running(guarantee, OWN, 4),
                    OVER,
                    write(running(guarantee, OWN, 4)),
                    fourth.1,
                ), // renewed, the same attempt
                (running(guarantee, OTHER, 1), ALIVE, Keep, busy(29)),
                (running(guarantee, OTHER, 1), Age::Of(LEASE), Keep, busy(0)), // until the lease ends
                (
                    running(guarantee, OTHER, 1),
                    Age::Unknown,
                    write(running(guarantee, OTHER, 1)),
                    busy(30),
                ),
                (own, ALIVE, write(own), Verdict::InDoubt(DOUBTED_ONCE)),
                (
                    doubted(OTHER, Attempts::new(2), Doubt::Reconciling),
                    ALIVE,
                    Keep,
                    busy(29),
                ),
                (
                    doubted(OTHER, Attempts::new(2), Doubt::Waiting),
                    ALIVE,
                    waiting.0,
                    waiting.1,
                ),
                (
                    doubted(OTHER, Attempts::new(2), Doubt::Reconciling),
                    OVER,
                    crashed.0,
                    crashed.1,
                ),
                (rejected(3), ALIVE, Keep, Verdict::Rejected { attempt: 3 }),
                (Done(None), ALIVE, Keep, Verdict::Duplicate),
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
        write(doubted(OWN, attempts, Doubt::Reconciling)),
        Verdict::InDoubt(attempts),
    );
    for (record, claimant) in [(AMO, AMO), (AMO, EO), (EO, AMO)] {
        assert_eq!(
            apply(
                running(record, OTHER, 1),
                OVER,
                &operation(claimant, Ask::Claim, 0)
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
    let taken = apply(running(EO, OTHER, 1), OVER, &operation(EO, Ask::Claim, 0));
    assert_eq!(
        taken,
        (
            write(Marker::InProgress(hold(EO, OWN, attempts, UNKNOWN))),
            Verdict::Granted(attempts)
        )
    );
}

#[test]
fn an_unknown_outcome_stays_unknown_after_a_change_of_guarantee() {
    let left_behind = cleared(Attempts::new(1), UNKNOWN);
    let in_doubt = (
        write(doubted(OWN, DOUBTED_ONCE, Doubt::Reconciling)),
        Verdict::InDoubt(DOUBTED_ONCE),
    );
    assert_eq!(
        apply(left_behind, OVER, &operation(AMO, Ask::Claim, 0)),
        in_doubt
    );
    // Effectively once runs the id again. A second run without an effect does not resolve the first.
    let second = Marker::InProgress(hold(EO, OWN, Attempts::new(2), UNKNOWN));
    assert_eq!(
        apply(left_behind, OVER, &operation(EO, Ask::Claim, 0)),
        (write(second), Verdict::Granted(Attempts::new(2)))
    );
    for ask in [
        Ask::Clear(NOTHING),
        Ask::Clear(UNKNOWN),
        Ask::Reject(NOTHING),
        Ask::Reject(UNKNOWN),
    ] {
        let still_unknown = (write(cleared(Attempts::new(2), UNKNOWN)), Verdict::Applied);
        assert_eq!(
            apply(second, ALIVE, &operation(EO, ask, 2)),
            still_unknown,
            "{ask:?}"
        );
    }
    // An attempt 1 that is not the first: the record was lost, and an operator redrove the id.
    let first = Marker::InProgress(hold(EO, OWN, Attempts::new(1), UNKNOWN));
    let kept = (write(cleared(Attempts::new(1), UNKNOWN)), Verdict::Applied);
    assert_eq!(
        apply(first, ALIVE, &operation(EO, Ask::Clear(NOTHING), 1)),
        kept
    );
}

#[test]
fn a_claim_with_another_body() {
    let body = |number| Some(Fingerprint::new(number));
    let claim = with_body(operation(AMO, Ask::Claim, 0), 7);
    let other = Hold {
        fingerprint: body(8),
        ..hold(AMO, OTHER, Attempts::new(1), NOTHING)
    };
    rows(
        &claim,
        &[
            (
                Marker::InProgress(other),
                ALIVE,
                Change::Keep,
                Verdict::Busy {
                    remaining: Duration::from_secs(29),
                },
            ),
            // Does not wait for a holder that may never claim again.
            (
                Marker::InProgress(other),
                OVER,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::InDoubt(other, Doubt::Waiting),
                ALIVE,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::Rejected {
                    attempt: 1,
                    fingerprint: body(8),
                },
                ALIVE,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::Done(body(8)),
                ALIVE,
                Change::Keep,
                Verdict::Conflict,
            ),
            (
                Marker::Done(body(7)),
                ALIVE,
                Change::Keep,
                Verdict::Duplicate,
            ),
            (Marker::Done(None), ALIVE, Change::Keep, Verdict::Duplicate), // a bare `1` matches any body
        ],
    );
}

#[test]
fn only_grants_count_towards_max_attempts() {
    let (mut marker, claim) = (running(AMO, OTHER, 1), operation(AMO, Ask::Claim, 0));
    for copy in 1..=100 {
        let Verdict::InDoubt(attempts) = apply(marker, OVER, &claim).1 else {
            panic!("in doubt")
        };
        assert_eq!(
            (attempts.number, attempts.spent()),
            (1 + copy, 0),
            "a crash spends nothing either"
        );
        marker = doubted(Token(2 + u128::from(copy)), attempts, Doubt::Waiting);
    }
}

/// Every marker that does not belong to the operation: another token, another attempt, or no holder.
fn not_owned() -> Vec<Marker> {
    let holders = [(OTHER, 1), (OWN, 2)];
    let held = holders.into_iter().flat_map(|(token, attempt)| {
        [
            running(AMO, token, attempt),
            doubted(token, Attempts::new(attempt), Doubt::Waiting),
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

/// Checks that the verdict is `Lost` on every marker of another claim, except where `but` applies.
fn is_lost_except(ask: Ask, guarantee: Guarantee, but: impl Fn(&Marker) -> bool) {
    for marker in not_owned().into_iter().filter(|marker| !but(marker)) {
        assert_eq!(
            apply(marker, ALIVE, &operation(guarantee, ask, 1)),
            (Change::Keep, Verdict::Lost),
            "{ask:?} on {marker:?}"
        );
    }
}

fn is_free(marker: &Marker) -> bool {
    matches!(marker, Marker::Absent | Marker::Cleared { .. })
}

#[test]
fn renew() {
    for owned in [
        running(AMO, OWN, 1),
        doubted(OWN, Attempts::new(1), Doubt::Reconciling),
    ] {
        rows(
            &operation(AMO, Ask::Renew, 1),
            &[(owned, OVER, write(owned), Verdict::Applied)],
        );
    }
    is_lost_except(Ask::Renew, AMO, |_| false);
}

#[test]
fn complete() {
    let done = |marker_lost| (write(Marker::Done(None)), Verdict::Done { marker_lost });
    let complete = operation(AMO, Ask::Complete, 1);
    for known in [
        running(AMO, OWN, 1),
        doubted(OWN, Attempts::new(1), Doubt::Waiting),
        doubted(OTHER, Attempts::new(5), Doubt::Reconciling),
    ] {
        assert_eq!(apply(known, OVER, &complete), done(false), "{known:?}");
    }
    for lost in [Marker::Absent, cleared(Attempts::new(4), NOTHING)] {
        assert_eq!(apply(lost, ALIVE, &complete), done(true), "{lost:?}");
    }
    rows(
        &complete,
        &[(
            Marker::Done(None),
            ALIVE,
            Change::Keep,
            Verdict::Done { marker_lost: false },
        )],
    );
    is_lost_except(Ask::Complete, AMO, |marker| {
        !matches!(marker, Marker::InProgress(_) | Marker::Rejected { .. })
    });
}

#[test]
fn clear() {
    for (guarantee, effect, attempt, change) in [
        (AMO, Effect::Nothing, 1, Change::Delete),
        (EO, Effect::Nothing, 1, Change::Delete),
        (
            AMO,
            Effect::Nothing,
            2,
            write(cleared(Attempts::new(2), NOTHING)),
        ),
        (
            EO,
            Effect::Unknown,
            1,
            write(cleared(Attempts::new(1), UNKNOWN)),
        ),
        (
            EO,
            Effect::Unknown,
            3,
            write(cleared(Attempts::new(3), UNKNOWN)),
        ),
    ] {
        let marker = running(guarantee, OWN, attempt);
        rows(
            &operation(guarantee, Ask::Clear(effect), attempt),
            &[(marker, OVER, change, Verdict::Applied)],
        );
    }
    let unknown = operation(AMO, Ask::Clear(Effect::Unknown), 1);
    rows(
        &unknown,
        &[(running(AMO, OWN, 1), ALIVE, Change::Keep, Verdict::Lost)],
    ); // an unknown outcome is recorded as in doubt, never cleared
    for marker in [Marker::Absent, cleared(Attempts::new(1), NOTHING)] {
        rows(
            &operation(AMO, Ask::Clear(Effect::Nothing), 1),
            &[(marker, ALIVE, Change::Keep, Verdict::Applied)],
        );
    }
    is_lost_except(Ask::Clear(Effect::Nothing), AMO, is_free);
}

#[test]
fn withdraw() {
    for guarantee in [AMO, EO] {
        let ask = |attempt| operation(guarantee, Ask::Withdraw, attempt);
        rows(
            &ask(1),
            &[(
                running(guarantee, OWN, 1),
                OVER,
                Change::Delete,
                Verdict::Applied,
            )],
        );
        // As if it had not been granted: neither the budget nor what is unknown of earlier attempts
        // changes.
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
            let before = cleared(
                Attempts {
                    number: 4,
                    base: 2,
                    crashes: 1,
                },
                earlier,
            );
            rows(
                &ask(4),
                &[
                    (granted, OVER, write(before), Verdict::Applied),
                    (before, ALIVE, Change::Keep, Verdict::Applied),
                ],
            );
        }
        rows(
            &ask(1),
            &[(Marker::Absent, ALIVE, Change::Keep, Verdict::Applied)],
        );
        is_lost_except(Ask::Withdraw, guarantee, is_free);
    }
}

#[test]
fn reject() {
    for effect in [Effect::Nothing, Effect::Unknown] {
        let ask = Ask::Reject(effect);
        rows(
            &operation(AMO, ask, 1),
            &[(
                running(AMO, OWN, 1),
                OVER,
                write(rejected(1)),
                Verdict::Applied,
            )],
        );
        rows(
            &operation(EO, ask, 2),
            &[(
                running(EO, OWN, 2),
                OVER,
                write(cleared(Attempts::new(2), effect)),
                Verdict::Applied,
            )],
        );
        is_lost_except(ask, AMO, |_| false);
        is_lost_except(ask, EO, is_free);
    }
    rows(
        &operation(EO, Ask::Reject(Effect::Nothing), 1),
        &[(running(EO, OWN, 1), OVER, Change::Delete, Verdict::Applied)],
    );
    // The run may still have an effect: a run after a redrive needs a higher attempt number.
    rows(
        &operation(EO, Ask::Reject(Effect::Unknown), 1),
        &[(
            running(EO, OWN, 1),
            OVER,
            write(cleared(Attempts::new(1), UNKNOWN)),
            Verdict::Applied,
        )],
    );
}

#[test]
fn doubt() {
    let waiting = |attempts, earlier| {
        write(Marker::InDoubt(
            hold(AMO, OWN, attempts, earlier),
            Doubt::Waiting,
        ))
    };
    let ask = operation(AMO, Ask::Doubt, 1);
    rows(
        &ask,
        &[
            (
                running(AMO, OWN, 1),
                OVER,
                waiting(Attempts::new(1), NOTHING),
                Verdict::Applied,
            ),
            (
                doubted(OWN, Attempts::new(1), Doubt::Reconciling),
                OVER,
                waiting(Attempts::new(1), UNKNOWN),
                Verdict::Applied,
            ),
            (
                Marker::Absent,
                ALIVE,
                waiting(Attempts::none_counted(1), UNKNOWN),
                Verdict::Applied,
            ),
            (
                cleared(Attempts::new(1), NOTHING),
                ALIVE,
                waiting(Attempts::new(1), UNKNOWN),
                Verdict::Applied,
            ),
            (
                cleared(Attempts::new(0), NOTHING),
                ALIVE,
                waiting(Attempts::new(1), UNKNOWN),
                Verdict::Applied,
            ),
            // The attempt number never decreases.
            (
                cleared(Attempts::new(3), NOTHING),
                ALIVE,
                waiting(Attempts::new(3), UNKNOWN),
                Verdict::Applied,
            ),
            // Delayed or repeated: the outcome was determined since, or an operator has freed the id.
            (
                cleared(DOUBTED_ONCE, NOTHING),
                ALIVE,
                Change::Keep,
                Verdict::Lost,
            ),
            (
                cleared(Attempts::none_counted(1), NOTHING),
                ALIVE,
                Change::Keep,
                Verdict::Lost,
            ),
        ],
    );
    is_lost_except(Ask::Doubt, AMO, is_free);
}

#[test]
fn resolve() {
    let owned = doubted(OWN, Attempts::new(1), Doubt::Reconciling);
    let happened = operation(AMO, Ask::Resolve(Finding::Happened), 1);
    rows(
        &happened,
        &[(
            owned,
            OVER,
            write(Marker::Done(None)),
            Verdict::Done { marker_lost: false },
        )],
    );
    let did_not = operation(AMO, Ask::Resolve(Finding::DidNotHappen), 1);
    rows(
        &did_not,
        &[(
            owned,
            OVER,
            write(cleared(Attempts::new(1), NOTHING)),
            Verdict::Applied,
        )],
    );
    for finding in [Finding::Happened, Finding::DidNotHappen] {
        is_lost_except(Ask::Resolve(finding), AMO, |_| false);
        rows(
            &operation(AMO, Ask::Resolve(finding), 1),
            &[(running(AMO, OWN, 1), ALIVE, Change::Keep, Verdict::Lost)],
        );
    }
}

#[test]
fn redrive() {
    let in_doubt = doubted(OTHER, DOUBTED_ONCE, Doubt::Waiting);
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
        (AMO, rejected(5), UNKNOWN, Some(freed(5, NOTHING))),
        (AMO, rejected(5), NOTHING, Some(freed(5, NOTHING))),
        (EO, unknown, UNKNOWN, Some(freed(5, UNKNOWN))),
        (EO, unknown, NOTHING, Some(freed(5, NOTHING))),
        (EO, known, UNKNOWN, Some(freed(5, NOTHING))),
        (
            EO,
            cleared(crashed, UNKNOWN),
            UNKNOWN,
            Some(freed(12, UNKNOWN)),
        ),
        (
            AMO,
            doubted(OTHER, crashed, Doubt::Waiting),
            NOTHING,
            Some(freed(12, NOTHING)),
        ),
        (AMO, in_doubt, NOTHING, Some(freed(2, NOTHING))),
        (AMO, in_doubt, UNKNOWN, None), // freed only if the operator states that nothing happened
        (EO, running(EO, OTHER, 5), UNKNOWN, Some(freed(5, UNKNOWN))),
        (AMO, running(EO, OTHER, 5), UNKNOWN, None),
        (EO, running(AMO, OTHER, 5), UNKNOWN, None),
        (
            AMO,
            running(AMO, OTHER, 5),
            NOTHING,
            Some(freed(5, NOTHING)),
        ),
        (AMO, Marker::Absent, UNKNOWN, Some(freed(0, UNKNOWN))),
        (AMO, Marker::Done(None), NOTHING, None), // freed with `Forget`, not with `SendBack`
    ] {
        let ask = Ask::Redrive {
            seen,
            effect: stated,
        };
        let expected = free.map_or((Change::Keep, Verdict::Lost), |free| {
            (write(free), Verdict::Applied)
        });
        rows(
            &operation(guarantee, ask, 0),
            &[(seen, OVER, expected.0, expected.1)],
        );
        is_lost_except(ask, guarantee, |marker| {
            *marker == seen || Some(*marker) == free
        });
        if let Some(free) = free {
            // Repeated after a lost reply. The dead letter may have a higher attempt number than
            // the marker.
            rows(
                &operation(guarantee, ask, 0),
                &[(free, OVER, write(free), Verdict::Applied)],
            );
            let Marker::Cleared { effect, .. } = free else {
                panic!("{free:?} is not cleared")
            };
            rows(
                &operation(guarantee, ask, 99),
                &[(seen, OVER, write(freed(99, effect)), Verdict::Applied)],
            );
        }
        if let Marker::InProgress(_) = seen {
            rows(
                &operation(guarantee, ask, 0),
                &[(seen, ALIVE, Change::Keep, Verdict::Lost)],
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
        apply(seen, ALIVE, &operation(AMO, Ask::Forget { seen }, 7)),
        free(7),
        "the operator knows the attempt"
    );
    assert_eq!(
        apply(seen, ALIVE, &operation(AMO, Ask::Forget { seen }, 0)),
        free(UNKNOWN_ATTEMPT),
        "the attempt is unknown"
    );
    let repeated = operation(AMO, Ask::Forget { seen }, 7);
    rows(
        &repeated,
        &[(
            cleared(Attempts::none_counted(7), NOTHING),
            ALIVE,
            free(7).0,
            Verdict::Applied,
        )],
    ); // after a lost reply
    is_lost_except(Ask::Forget { seen }, AMO, |marker| *marker == seen);
    for other in [
        rejected(1),
        doubted(OWN, Attempts::new(1), Doubt::Waiting),
        running(AMO, OTHER, 1),
    ] {
        rows(
            &operation(AMO, Ask::Forget { seen: other }, 0),
            &[(other, ALIVE, Change::Keep, Verdict::Lost)],
        );
    }
}

#[test]
fn an_operation_repeated_after_a_lost_reply_has_the_same_verdict_or_leads_to_a_new_claim() {
    for guarantee in [AMO, EO] {
        for (marker, ask) in [
            (Marker::Absent, Ask::Claim),
            (cleared(Attempts::new(1), NOTHING), Ask::Claim),
            (running(guarantee, OWN, 1), Ask::Renew),
            (running(guarantee, OWN, 1), Ask::Complete),
            (running(guarantee, OWN, 1), Ask::Clear(Effect::Nothing)),
            (running(guarantee, OWN, 1), Ask::Doubt),
            (Marker::Absent, Ask::Doubt),
        ] {
            let asked = operation(guarantee, ask, 1);
            let (change, first) = apply(marker, ALIVE, &asked);
            let after = match change {
                Change::Write(marker, _) => marker,
                Change::Delete => Marker::Absent,
                Change::Keep => marker,
            };
            let (_, second) = apply(after, ALIVE, &asked);
            assert_eq!(first, second, "{ask:?} on {marker:?}");
        }
    }
}

#[test]
fn bare_writes_at_the_claim_and_deletes_after_a_failure() {
    let bare = |ask| operation(Guarantee::Bare, ask, 1);
    rows(
        &bare(Ask::Claim),
        &[(
            Marker::Absent,
            ALIVE,
            write(Marker::Done(None)),
            Verdict::Granted(Attempts::new(1)),
        )],
    );
    for marker in [Marker::Done(None), running(AMO, OTHER, 1)] {
        rows(
            &bare(Ask::Claim),
            &[(marker, ALIVE, Change::Keep, Verdict::Duplicate)],
        );
    }
    for ask in [
        Ask::Clear(Effect::Nothing),
        Ask::Clear(Effect::Unknown),
        Ask::Reject(Effect::Unknown),
        Ask::Doubt,
    ] {
        rows(
            &bare(ask),
            &[(Marker::Done(None), ALIVE, Change::Delete, Verdict::Applied)],
        );
    }
    rows(
        &bare(Ask::Complete),
        &[(
            Marker::Done(None),
            ALIVE,
            Change::Keep,
            Verdict::Done { marker_lost: false },
        )],
    );
}
