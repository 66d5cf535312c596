//! The verdicts of all operations except the claim, from holders and others, row by row.

use std::sync::Arc;

use oncegate_core::Store;
use oncegate_core::marker::{
    Attempts, Doubt, Effect, Finding, Guarantee, Hold, Marker, OperationKind, UNKNOWN_ATTEMPT,
    Verdict,
};

use crate::laws::fixtures::{
    AT_MOST_ONCE, BOTH_GUARANTEES, Claimant, DONE, DONE_WITH_LOST_MARKER, DOUBTED_ONCE,
    EFFECTIVELY_ONCE, HOLDER_OPERATIONS, LONG_LEASE, OTHER_TOKEN, OWN_TOKEN, WINDOW, cleared,
    doubted, fingerprint, granted, hold, reconciling_attempt, rejected, running,
    with_expired_lease, with_fingerprint,
};
use crate::laws::rows::{OperationRow, check_rows, row};

const EFFECTS: [Effect; 2] = [Effect::Nothing, Effect::Unknown];
const FINDINGS: [Finding; 2] = [Finding::Happened, Finding::DidNotHappen];
/// Markers of ids that no claim holds and that are not settled.
const FREE: [Marker; 2] = [
    Marker::Absent,
    Marker::Cleared {
        attempts: Attempts::new(3),
        effect: Effect::Nothing,
    },
];

fn own_operation(
    guarantee: Guarantee,
    kind: OperationKind,
    attempt: u32,
) -> (Claimant, OperationKind) {
    (Claimant::new(guarantee, OWN_TOKEN, attempt), kind)
}

/// The operation of the holder of attempt 2 after its settings have changed. The marker must keep
/// the terms of the claim.
fn on_other_terms(kind: OperationKind) -> [(Claimant, OperationKind); 2] {
    BOTH_GUARANTEES.map(|guarantee| {
        (
            Claimant::new(guarantee, OWN_TOKEN, 2)
                .lease(LONG_LEASE / 2)
                .window(WINDOW / 2)
                .fingerprint(fingerprint(8)),
            kind,
        )
    })
}

/// The holder renews while it runs or reconciles, also after its lease has expired, as long as no
/// other claim has taken the id over.
pub async fn the_holder_renews(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            running(guarantee, OWN_TOKEN, 2),
            with_expired_lease(running(guarantee, OWN_TOKEN, 2)),
            doubted(guarantee, OWN_TOKEN, 2),
            reconciling_attempt(OWN_TOKEN, 2),
            with_expired_lease(reconciling_attempt(OWN_TOKEN, 2)),
        ] {
            rows.push(row(
                "renew: own token",
                given,
                own_operation(guarantee, OperationKind::Renew, 2),
                Verdict::Applied,
                given,
            ));
            rows.extend(on_other_terms(OperationKind::Renew).map(|operation| {
                row(
                    "renew: own token, on other terms",
                    given,
                    operation,
                    Verdict::Applied,
                    given,
                )
            }));
        }
    }
    check_rows(&*store, &rows).await;
}

/// The holder completes, also after its lease has expired, as long as no other claim has taken the
/// id over. The marker keeps the fingerprint.
pub async fn the_holder_completes(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            running(guarantee, OWN_TOKEN, 2),
            with_expired_lease(running(guarantee, OWN_TOKEN, 2)),
        ] {
            rows.push(row(
                "complete: in progress, own token",
                given,
                own_operation(guarantee, OperationKind::Complete, 2),
                DONE,
                Marker::Done(None),
            ));
            let (claimant, kind) = own_operation(guarantee, OperationKind::Complete, 2);
            let operation = (claimant.fingerprint(fingerprint(7)), kind);
            rows.push(row(
                "complete: in progress, own token",
                with_fingerprint(given, fingerprint(7)),
                operation,
                DONE,
                Marker::Done(fingerprint(7)),
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// Any token completes a doubt: a completion comes only from a claim that was granted, and its
/// known outcome replaces the unknown one.
pub async fn any_token_completes_a_doubt(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            doubted(guarantee, OWN_TOKEN, 1),
            doubted(guarantee, OTHER_TOKEN, 5),
            reconciling_attempt(OWN_TOKEN, 2),
            reconciling_attempt(OTHER_TOKEN, 5),
            with_expired_lease(reconciling_attempt(OTHER_TOKEN, 5)),
        ] {
            rows.push(row(
                "complete: in doubt, any holder",
                given,
                own_operation(guarantee, OperationKind::Complete, 1),
                DONE,
                Marker::Done(None),
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// A repeated completion has the verdict `Done` and keeps the first fingerprint.
pub async fn completing_again_is_done(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [Marker::Done(None), Marker::Done(fingerprint(7))] {
            let (claimant, kind) = own_operation(guarantee, OperationKind::Complete, 1);
            rows.push(row(
                "complete: done",
                given,
                (claimant.fingerprint(fingerprint(8)), kind),
                DONE,
                given,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// Completing a free marker has the verdict `Done`, which reports that the claim's marker was lost.
pub async fn completing_a_lost_marker_reports_it(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let operation = own_operation(guarantee, OperationKind::Complete, 1);
        rows.extend(FREE.map(|given| {
            row(
                "complete: absent, cleared",
                given,
                operation,
                DONE_WITH_LOST_MARKER,
                Marker::Done(None),
            )
        }));
    }
    check_rows(&*store, &rows).await;
}

/// Clearing a first attempt of which nothing happened deletes the marker.
pub async fn clearing_a_first_attempt_deletes_it(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            running(guarantee, OWN_TOKEN, 1),
            with_expired_lease(running(guarantee, OWN_TOKEN, 1)),
        ] {
            let operation = own_operation(guarantee, OperationKind::Clear(Effect::Nothing), 1);
            rows.push(row(
                "clear: in progress, own token, nothing happened, attempt 1",
                given,
                operation,
                Verdict::Applied,
                Marker::Absent,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}

/// Clearing a later attempt, or one whose outcome is unknown, keeps its number, because the number
/// is a fencing token.
pub async fn clearing_keeps_the_attempt(store: Arc<dyn Store>) {
    let name = "clear: in progress, own token, attempt > 1 or unknown";
    let clears = |guarantee, effect, attempt| {
        let operation = own_operation(guarantee, OperationKind::Clear(effect), attempt);
        row(
            name,
            running(guarantee, OWN_TOKEN, attempt),
            operation,
            Verdict::Applied,
            cleared(attempt, effect),
        )
    };
    let rows = [
        clears(AT_MOST_ONCE, Effect::Nothing, 2),
        clears(AT_MOST_ONCE, Effect::Nothing, 3),
        clears(EFFECTIVELY_ONCE, Effect::Nothing, 2),
        clears(EFFECTIVELY_ONCE, Effect::Nothing, 3),
        clears(EFFECTIVELY_ONCE, Effect::Unknown, 1),
        clears(EFFECTIVELY_ONCE, Effect::Unknown, 2),
        clears(EFFECTIVELY_ONCE, Effect::Unknown, 4),
    ];
    check_rows(&*store, &rows).await;
}

/// Withdrawing a grant whose handler was not started leaves the same number of attempts as before
/// the grant, and keeps the unknown outcome of earlier attempts. It does not change a free marker.
pub async fn withdrawing_keeps_the_attempt_budget(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let first = running(guarantee, OWN_TOKEN, 1);
        rows.push(row(
            "withdraw: in progress, own token, attempt 1",
            first,
            own_operation(guarantee, OperationKind::Withdraw, 1),
            Verdict::Applied,
            Marker::Absent,
        ));
        // In at most once no claim of an id with an unknown outcome is granted.
        for earlier in EFFECTS
            .into_iter()
            .filter(|earlier| *earlier == Effect::Nothing || guarantee == EFFECTIVELY_ONCE)
        {
            let attempts = Attempts {
                number: 4,
                base: 2,
                crashes: 0,
            };
            let given = Marker::InProgress(hold(guarantee, OWN_TOKEN, attempts, earlier));
            let becomes = Marker::Cleared {
                attempts: Attempts {
                    base: 3,
                    ..attempts
                },
                effect: earlier,
            };
            rows.push(row(
                "withdraw: in progress, own token, attempt > 1",
                given,
                own_operation(guarantee, OperationKind::Withdraw, 4),
                Verdict::Applied,
                becomes,
            ));
        }
        let operation = own_operation(guarantee, OperationKind::Withdraw, 1);
        rows.extend(FREE.map(|given| {
            row(
                "withdraw: absent, cleared",
                given,
                operation,
                Verdict::Applied,
                given,
            )
        }));
    }
    check_rows(&*store, &rows).await;
}

/// In at most once a clear with an unknown outcome is refused: the holder must doubt the id
/// instead.
pub async fn an_unknown_outcome_is_not_cleared_in_at_most_once(store: Arc<dyn Store>) {
    let rows = [1, 4].map(|attempt| {
        let given = running(AT_MOST_ONCE, OWN_TOKEN, attempt);
        row(
            "clear: unknown, at most once",
            given,
            own_operation(AT_MOST_ONCE, OperationKind::Clear(Effect::Unknown), attempt),
            Verdict::Lost,
            given,
        )
    });
    check_rows(&*store, &rows).await;
}

/// Clearing a free marker is `Applied` and does not change it.
pub async fn clearing_a_free_marker_changes_nothing(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for effect in EFFECTS {
            let operation = own_operation(guarantee, OperationKind::Clear(effect), 1);
            rows.extend(FREE.map(|given| {
                row(
                    "clear: absent, cleared",
                    given,
                    operation,
                    Verdict::Applied,
                    given,
                )
            }));
        }
    }
    check_rows(&*store, &rows).await;
}

/// In at most once a rejection writes a rejected marker with the fingerprint of the body.
pub async fn a_rejection_is_kept_in_at_most_once(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for effect in EFFECTS {
        for fingerprint in [None, fingerprint(7)] {
            for attempt in [1, 2, 3] {
                let given =
                    with_fingerprint(running(AT_MOST_ONCE, OWN_TOKEN, attempt), fingerprint);
                let operation = own_operation(AT_MOST_ONCE, OperationKind::Reject(effect), attempt);
                rows.push(row(
                    "reject: in progress, own token, at most once",
                    given,
                    operation,
                    Verdict::Applied,
                    rejected(attempt, fingerprint),
                ));
            }
        }
        let operation = own_operation(AT_MOST_ONCE, OperationKind::Reject(effect), 1);
        rows.extend(FREE.map(|given| {
            row(
                "reject: absent, cleared, at most once",
                given,
                operation,
                Verdict::Lost,
                given,
            )
        }));
    }
    check_rows(&*store, &rows).await;
}

/// In effectively once a rejection changes the marker as a clear does.
pub async fn rejecting_clears_in_effectively_once(store: Arc<dyn Store>) {
    let name = "reject: in progress, own token, effectively once";
    let guarantee = EFFECTIVELY_ONCE;
    let rejects = |effect, attempt, becomes| {
        row(
            name,
            running(guarantee, OWN_TOKEN, attempt),
            own_operation(guarantee, OperationKind::Reject(effect), attempt),
            Verdict::Applied,
            becomes,
        )
    };
    let mut rows = vec![
        rejects(Effect::Nothing, 1, Marker::Absent),
        rejects(Effect::Nothing, 2, cleared(2, Effect::Nothing)),
        rejects(Effect::Nothing, 3, cleared(3, Effect::Nothing)),
        rejects(Effect::Unknown, 2, cleared(2, Effect::Unknown)),
        rejects(Effect::Unknown, 1, cleared(1, Effect::Unknown)),
        rejects(Effect::Unknown, 3, cleared(3, Effect::Unknown)),
    ];
    for effect in EFFECTS {
        let operation = own_operation(guarantee, OperationKind::Reject(effect), 1);
        rows.extend(FREE.map(|given| {
            row(
                "reject: absent, cleared, effectively once",
                given,
                operation,
                Verdict::Applied,
                given,
            )
        }));
    }
    check_rows(&*store, &rows).await;
}

/// The holder doubts an id that it runs or reconciles: the doubt then waits for a reconciler, and
/// the hold is unchanged.
pub async fn the_holder_marks_the_id_in_doubt(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let operation = own_operation(guarantee, OperationKind::Doubt, 2);
        for given in [
            running(guarantee, OWN_TOKEN, 2),
            doubted(guarantee, OWN_TOKEN, 2),
            with_fingerprint(running(guarantee, OWN_TOKEN, 2), fingerprint(7)),
        ] {
            let becomes = match given {
                Marker::InProgress(hold) | Marker::InDoubt(hold, _) => waiting(hold),
                _ => unreachable!("each of these has a hold"),
            };
            rows.push(row(
                "doubt: own token",
                given,
                operation,
                Verdict::Applied,
                becomes,
            ));
            rows.extend(on_other_terms(OperationKind::Doubt).map(|operation| {
                row(
                    "doubt: own token, on other terms",
                    given,
                    operation,
                    Verdict::Applied,
                    becomes,
                )
            }));
        }
        let waiting = waiting(hold(AT_MOST_ONCE, OWN_TOKEN, DOUBTED_ONCE, Effect::Unknown));
        rows.push(row(
            "doubt: in doubt, own token",
            reconciling_attempt(OWN_TOKEN, 2),
            operation,
            Verdict::Applied,
            waiting,
        ));
    }
    check_rows(&*store, &rows).await;
}

fn waiting(hold: Hold) -> Marker {
    Marker::InDoubt(hold, Doubt::Waiting)
}

/// A doubt on a free marker is recorded with the higher of both attempts: the fencing token never
/// decreases.
pub async fn a_free_marker_can_be_doubted(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for (given, attempt, last_attempt) in [
            (Marker::Absent, 1, Attempts::none_counted(1)),
            (Marker::Absent, 4, Attempts::none_counted(4)),
            (cleared(3, Effect::Nothing), 1, Attempts::new(3)),
            (cleared(3, Effect::Unknown), 3, Attempts::new(3)),
            (cleared(3, Effect::Nothing), 10, Attempts::new(10)),
            (cleared(10, Effect::Unknown), 9, Attempts::new(10)),
        ] {
            let becomes = waiting(hold(guarantee, OWN_TOKEN, last_attempt, Effect::Unknown));
            rows.push(row(
                "doubt: absent, cleared",
                given,
                own_operation(guarantee, OperationKind::Doubt, attempt),
                Verdict::Applied,
                becomes,
            ));
        }
        // A late or repeated doubt of an attempt that an operator has redriven since.
        let freed = Marker::Cleared {
            attempts: Attempts::none_counted(3),
            effect: Effect::Nothing,
        };
        rows.push(row(
            "doubt: cleared, an attempt that was freed",
            freed,
            own_operation(guarantee, OperationKind::Doubt, 3),
            Verdict::Lost,
            freed,
        ));
    }
    check_rows(&*store, &rows).await;
}

/// Resolving a doubt writes a done marker if the effect happened, and a cleared marker with the
/// same attempts if it did not.
pub async fn a_doubt_is_resolved_by_its_finding(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        for given in [
            doubted(guarantee, OWN_TOKEN, 2),
            reconciling_attempt(OWN_TOKEN, 2),
            with_expired_lease(reconciling_attempt(OWN_TOKEN, 2)),
        ] {
            let happened = own_operation(guarantee, OperationKind::Resolve(Finding::Happened), 2);
            rows.push(row(
                "resolve: happened",
                given,
                happened,
                DONE,
                Marker::Done(None),
            ));
            let did_not =
                own_operation(guarantee, OperationKind::Resolve(Finding::DidNotHappen), 2);
            let attempts = if matches!(given, Marker::InDoubt(_, Doubt::Waiting)) {
                Attempts::new(2)
            } else {
                DOUBTED_ONCE
            };
            let becomes = Marker::Cleared {
                attempts,
                effect: Effect::Nothing,
            };
            rows.push(row(
                "resolve: did not happen",
                given,
                did_not,
                Verdict::Applied,
                becomes,
            ));
        }
        // `Resolve` does not change a marker in progress. `Clear` and `Reject` do not change a
        // doubt, even if they come from its holder.
        let given = running(guarantee, OWN_TOKEN, 2);
        rows.extend(FINDINGS.map(|finding| {
            row(
                "resolve: in progress",
                given,
                own_operation(guarantee, OperationKind::Resolve(finding), 2),
                Verdict::Lost,
                given,
            )
        }));
        for kind in EFFECTS
            .into_iter()
            .flat_map(|effect| [OperationKind::Clear(effect), OperationKind::Reject(effect)])
        {
            for given in [
                doubted(guarantee, OWN_TOKEN, 2),
                reconciling_attempt(OWN_TOKEN, 2),
            ] {
                rows.push(row(
                    "clear, reject: in doubt",
                    given,
                    own_operation(guarantee, kind, 2),
                    Verdict::Lost,
                    given,
                ));
            }
        }
    }
    check_rows(&*store, &rows).await;
}

/// Every marker that an operator may have read.
fn all_seen() -> Vec<Marker> {
    vec![
        Marker::Absent,
        cleared(3, Effect::Nothing),
        cleared(3, Effect::Unknown),
        cleared(4, Effect::Unknown),
        Marker::Cleared {
            attempts: Attempts::none_counted(3),
            effect: Effect::Unknown,
        },
        running(AT_MOST_ONCE, OTHER_TOKEN, 3),
        running(EFFECTIVELY_ONCE, OTHER_TOKEN, 3),
        doubted(AT_MOST_ONCE, OTHER_TOKEN, 3),
        doubted(AT_MOST_ONCE, OTHER_TOKEN, 4),
        doubted(AT_MOST_ONCE, OWN_TOKEN, 3),
        doubted(EFFECTIVELY_ONCE, OTHER_TOKEN, 3),
        reconciling_attempt(OTHER_TOKEN, 3),
        with_fingerprint(reconciling_attempt(OTHER_TOKEN, 3), fingerprint(7)),
        rejected(3, None),
        rejected(4, None),
        rejected(3, fingerprint(7)),
        Marker::Done(None),
        Marker::Done(fingerprint(7)),
    ]
}

/// An operator redrives a rejected or cleared id and, after stating the outcome, an id in doubt, if
/// the marker is still the one that the operator has read. A redrive of an id in progress needs an
/// expired lease, and the stated outcome if a guarantee is at most once. A done id is not redriven.
/// The attempt number continues above every known number, and all of `max_attempts` are left.
pub async fn sending_back_requires_the_expected_marker(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for (guarantee, stated, known) in [
        (AT_MOST_ONCE, Effect::Nothing, 0),
        (EFFECTIVELY_ONCE, Effect::Unknown, 0),
        (AT_MOST_ONCE, Effect::Unknown, 9),
    ] {
        let freed = |marker: &Marker| {
            let (number, effect) = match marker {
                Marker::Absent => (0, stated),
                Marker::Cleared { attempts, effect } => (
                    attempts.number,
                    if stated == Effect::Nothing {
                        stated
                    } else {
                        *effect
                    },
                ),
                Marker::Rejected { attempt, .. } => (*attempt, Effect::Nothing),
                Marker::InDoubt(hold, _) if stated == Effect::Nothing => {
                    (hold.attempts.number, stated)
                }
                Marker::InProgress(hold)
                    if stated == Effect::Nothing
                        || (guarantee, hold.guarantee) == (EFFECTIVELY_ONCE, EFFECTIVELY_ONCE) =>
                {
                    (hold.attempts.number, stated)
                }
                _ => return None,
            };
            Some(Marker::Cleared {
                attempts: Attempts::none_counted(number.max(known)),
                effect,
            })
        };
        for given in all_seen() {
            for seen in all_seen() {
                let operation = own_operation(
                    guarantee,
                    OperationKind::Redrive {
                        seen,
                        effect: stated,
                    },
                    known,
                );
                rows.push(match freed(&seen) {
                    // `Redrive` refuses a marker whose lease is valid. It is also `Applied` if the
                    // marker already is the result.
                    Some(becomes)
                        if given == becomes
                            || (given == seen && !matches!(given, Marker::InProgress(_))) =>
                    {
                        row(
                            "redrive: as seen",
                            given,
                            operation,
                            Verdict::Applied,
                            becomes,
                        )
                    }
                    _ => row(
                        "redrive: anything else",
                        given,
                        operation,
                        Verdict::Lost,
                        given,
                    ),
                });
            }
        }
    }
    // The lease of the holder has expired, and no claim has taken it over.
    for (holder, guarantee, stated) in [
        (EFFECTIVELY_ONCE, EFFECTIVELY_ONCE, Some(Effect::Unknown)),
        (EFFECTIVELY_ONCE, AT_MOST_ONCE, None),
        (AT_MOST_ONCE, EFFECTIVELY_ONCE, None),
        (AT_MOST_ONCE, AT_MOST_ONCE, Some(Effect::Nothing)),
    ] {
        let seen = with_expired_lease(running(holder, OTHER_TOKEN, 3));
        let operation = own_operation(
            guarantee,
            OperationKind::Redrive {
                seen,
                effect: stated.unwrap_or(Effect::Unknown),
            },
            0,
        );
        rows.push(match stated {
            Some(effect) => {
                let becomes = Marker::Cleared {
                    attempts: Attempts::none_counted(3),
                    effect,
                };
                row(
                    "redrive: in progress, lease expired",
                    seen,
                    operation,
                    Verdict::Applied,
                    becomes,
                )
            }
            None => row(
                "redrive: in progress, lease expired, at most once, outcome not stated",
                seen,
                operation,
                Verdict::Lost,
                seen,
            ),
        });
    }
    check_rows(&*store, &rows).await;
}

/// An operator forgets only a completed id, and only if its marker is still the one that the
/// operator has read. The attempt number continues above the known attempt, or above
/// [`UNKNOWN_ATTEMPT`].
pub async fn forgetting_requires_the_expected_done_marker(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for (guarantee, known) in [(AT_MOST_ONCE, 0), (EFFECTIVELY_ONCE, 7)] {
        let last_attempt = if known == 0 { UNKNOWN_ATTEMPT } else { known };
        for given in all_seen() {
            for seen in all_seen() {
                let operation = own_operation(guarantee, OperationKind::Forget { seen }, known);
                rows.push(match given {
                    Marker::Done(_) if given == seen => {
                        let becomes = Marker::Cleared {
                            attempts: Attempts::none_counted(last_attempt),
                            effect: Effect::Nothing,
                        };
                        row(
                            "forget: as seen",
                            given,
                            operation,
                            Verdict::Applied,
                            becomes,
                        )
                    }
                    _ => row(
                        "forget: anything else",
                        given,
                        operation,
                        Verdict::Lost,
                        given,
                    ),
                });
            }
        }
    }
    check_rows(&*store, &rows).await;
}

/// The marker keeps the unknown outcome of an earlier attempt, although a later attempt reports
/// that nothing happened.
pub async fn an_unknown_outcome_stays_unknown(store: Arc<dyn Store>) {
    let guarantee = EFFECTIVELY_ONCE;
    let attempts = Attempts {
        number: 4,
        base: 2,
        crashes: 0,
    };
    let given = Marker::InProgress(hold(guarantee, OWN_TOKEN, attempts, Effect::Unknown));
    let becomes = Marker::Cleared {
        attempts,
        effect: Effect::Unknown,
    };
    let all = EFFECTS
        .into_iter()
        .flat_map(|effect| [OperationKind::Clear(effect), OperationKind::Reject(effect)]);
    let rows: Vec<OperationRow> = all
        .map(|kind| {
            row(
                "clear, reject: an earlier outcome is unknown",
                given,
                own_operation(guarantee, kind, 4),
                Verdict::Applied,
                becomes,
            )
        })
        .collect();
    check_rows(&*store, &rows).await;
}

/// An operation with another token and the same attempt, or with the same token and another
/// attempt, is refused and changes nothing. So is an operation of a holder on a settled id.
pub async fn another_token_or_attempt_changes_nothing(store: Arc<dyn Store>) {
    let mut rows = Vec::new();
    for guarantee in BOTH_GUARANTEES {
        let others = [
            (OTHER_TOKEN, 2),
            (OWN_TOKEN, 1),
            (OWN_TOKEN, 3),
            (OTHER_TOKEN, 1),
        ];
        let held = others.into_iter().flat_map(|(token, attempt)| {
            let doubts = [
                doubted(guarantee, token, attempt),
                reconciling_attempt(token, attempt.max(2)),
            ];
            [
                running(guarantee, token, attempt),
                with_expired_lease(running(guarantee, token, attempt)),
            ]
            .into_iter()
            .chain(doubts.into_iter().filter(|it| !is_own(it)))
        });
        let settled = [
            Marker::Absent,
            cleared(2, Effect::Nothing),
            rejected(2, None),
            Marker::Done(None),
        ];
        for given in held.chain(settled) {
            rows.extend(
                HOLDER_OPERATIONS
                    .into_iter()
                    .filter(|kind| !has_a_row_of_its_own(*kind, &given, guarantee))
                    .map(|kind| {
                        row(
                            "any of these: anything else",
                            given,
                            own_operation(guarantee, kind, 2),
                            Verdict::Lost,
                            given,
                        )
                    }),
            );
        }
    }
    check_rows(&*store, &rows).await;
}

/// Whether the claim with [`OWN_TOKEN`] and attempt 2 holds the marker.
fn is_own(marker: &Marker) -> bool {
    matches!(marker, Marker::InProgress(hold) | Marker::InDoubt(hold, _) if hold.token == OWN_TOKEN && hold.attempts.number == 2)
}

/// Whether another law has a row for this operation on this marker.
fn has_a_row_of_its_own(kind: OperationKind, given: &Marker, guarantee: Guarantee) -> bool {
    match given {
        Marker::Absent | Marker::Cleared { .. } => match kind {
            OperationKind::Complete
            | OperationKind::Clear(_)
            | OperationKind::Withdraw
            | OperationKind::Doubt => true,
            OperationKind::Reject(_) => guarantee == EFFECTIVELY_ONCE,
            _ => false,
        },
        Marker::InDoubt(..) | Marker::Done(_) => kind == OperationKind::Complete,
        Marker::InProgress(_) | Marker::Rejected { .. } => false,
    }
}

/// In [`Guarantee::Bare`] a claim of an absent id writes a done marker, the operation after a
/// failure deletes it, and no token is compared.
pub async fn bare_sets_and_deletes_a_done_marker(store: Arc<dyn Store>) {
    let bare = |kind| own_operation(Guarantee::Bare, kind, 1);
    let all = [
        Marker::Absent,
        cleared(1, Effect::Nothing),
        running(AT_MOST_ONCE, OTHER_TOKEN, 1),
        with_expired_lease(running(EFFECTIVELY_ONCE, OTHER_TOKEN, 1)),
        reconciling_attempt(OWN_TOKEN, 2),
        rejected(1, None),
        Marker::Done(None),
        Marker::Done(fingerprint(7)),
    ];
    let mut rows: Vec<OperationRow> = Vec::new();
    for given in all {
        rows.push(match given {
            Marker::Absent => row(
                "bare: claim, absent",
                given,
                bare(OperationKind::Claim),
                granted(1),
                Marker::Done(None),
            ),
            _ => row(
                "bare: claim, anything else",
                given,
                bare(OperationKind::Claim),
                Verdict::Duplicate,
                given,
            ),
        });
        rows.push(row(
            "bare: renew",
            given,
            bare(OperationKind::Renew),
            Verdict::Applied,
            given,
        ));
        rows.push(row(
            "bare: complete",
            given,
            bare(OperationKind::Complete),
            DONE,
            given,
        ));
        for kind in HOLDER_OPERATIONS
            .into_iter()
            .filter(|kind| !matches!(kind, OperationKind::Renew | OperationKind::Complete))
        {
            rows.push(row(
                "bare: failure",
                given,
                bare(kind),
                Verdict::Applied,
                Marker::Absent,
            ));
        }
    }
    check_rows(&*store, &rows).await;
}
