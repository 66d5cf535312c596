//! Broken variants of `marker::apply`, each with one wrong row. `main.rs` describes each of them in
//! one sentence.

use oncegate_core::marker::{
    Age, Attempts, Change, Doubt, Effect, Finding, Guarantee, Hold, Marker, Operation,
    OperationKind, Verdict, apply,
};

/// The change of the store, and its verdict.
type Answer = (Change, Verdict);

const LOST: Answer = (Change::Keep, Verdict::Lost);

/// The same operation with the token and attempt of the marker's holder.
fn by_holder(marker: &Marker, operation: &Operation) -> Operation {
    match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Operation {
            token: hold.token,
            attempt: hold.attempts.number,
            ..operation.clone()
        },
        _ => operation.clone(),
    }
}

/// The same answer, with `write` applied to the marker that it writes.
fn with_written(answer: Answer, write: impl FnOnce(Marker) -> Marker) -> Answer {
    match answer {
        (Change::Write(marker, expiry), verdict) => (Change::Write(write(marker), expiry), verdict),
        answer => answer,
    }
}

pub(crate) fn compares_only_tokens(marker: Marker, age: Age, operation: &Operation) -> Answer {
    let same_token = matches!(marker, Marker::InProgress(hold) | Marker::InDoubt(hold, _) if hold.token == operation.token);
    let is_by_holder = !matches!(
        operation.kind,
        OperationKind::Claim | OperationKind::Redrive { .. } | OperationKind::Forget { .. }
    );
    if same_token && is_by_holder {
        return apply(marker, age, &by_holder(&marker, operation));
    }
    apply(marker, age, operation)
}

pub(crate) fn clears_without_comparing(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match (operation.kind, marker) {
        (OperationKind::Clear(_), Marker::InProgress(_)) => {
            apply(marker, age, &by_holder(&marker, operation))
        }
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn resolves_without_comparing(
    marker: Marker,
    age: Age,
    operation: &Operation,
) -> Answer {
    match (operation.kind, marker) {
        (OperationKind::Resolve(Finding::DidNotHappen), Marker::InDoubt(..)) => {
            apply(marker, age, &by_holder(&marker, operation))
        }
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn renews_without_comparing(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match operation.kind {
        OperationKind::Renew => apply(marker, age, &by_holder(&marker, operation)),
        _ => apply(marker, age, operation),
    }
}

/// Decides the claim as if marker and claim were effectively once, and writes the grant with the
/// guarantee of the claim.
pub(crate) fn grants_expired_claim(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match (operation.kind, marker) {
        (OperationKind::Claim, Marker::InProgress(hold)) if hold.token != operation.token => {
            let mut effectively_once = operation.clone();
            effectively_once.terms.guarantee = Guarantee::EffectivelyOnce;
            let hold = Hold {
                guarantee: Guarantee::EffectivelyOnce,
                ..hold
            };
            let answer = apply(Marker::InProgress(hold), age, &effectively_once);
            with_written(answer, |marker| match marker {
                Marker::InProgress(hold) => Marker::InProgress(Hold {
                    guarantee: operation.terms.guarantee,
                    horizon: operation.terms.horizon(),
                    ..hold
                }),
                marker => marker,
            })
        }
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn withdrawals_spend_attempts(
    marker: Marker,
    age: Age,
    operation: &Operation,
) -> Answer {
    match operation.kind {
        OperationKind::Withdraw => apply(
            marker,
            age,
            &Operation {
                kind: OperationKind::Clear(Effect::Nothing),
                ..operation.clone()
            },
        ),
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn crashes_spend_attempts(marker: Marker, age: Age, operation: &Operation) -> Answer {
    let answer = apply(marker, age, operation);
    match (marker, answer) {
        (
            Marker::InProgress(before),
            (Change::Write(Marker::InProgress(hold), expiry), Verdict::Granted(_)),
        ) if before.token != operation.token => {
            let attempts = Attempts {
                base: before.attempts.base,
                ..hold.attempts
            };
            (
                Change::Write(Marker::InProgress(Hold { attempts, ..hold }), expiry),
                Verdict::Granted(attempts),
            )
        }
        _ => answer,
    }
}

/// Records the doubt of an attempt that the operator has freed since.
pub(crate) fn records_doubt_of_freed_attempt(
    marker: Marker,
    age: Age,
    operation: &Operation,
) -> Answer {
    match (operation.kind, marker) {
        (OperationKind::Doubt, Marker::Cleared { attempts, effect })
            if operation.attempt <= attempts.base =>
        {
            apply(
                Marker::Cleared {
                    attempts: Attempts {
                        base: 0,
                        ..attempts
                    },
                    effect,
                },
                age,
                operation,
            )
        }
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn no_doubt_on_absent(marker: Marker, age: Age, operation: &Operation) -> Answer {
    if (operation.kind, marker) == (OperationKind::Doubt, Marker::Absent) {
        LOST
    } else {
        apply(marker, age, operation)
    }
}

pub(crate) fn no_doubt_on_cleared(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match (operation.kind, marker) {
        (OperationKind::Doubt, Marker::Cleared { .. }) => LOST,
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn another_body_waits(marker: Marker, age: Age, operation: &Operation) -> Answer {
    let answer = apply(marker, age, operation);
    match (marker, answer) {
        (Marker::InProgress(hold), (_, Verdict::Conflict)) => {
            let Age::Of(age) = age else { return answer };
            (
                Change::Keep,
                Verdict::Busy {
                    remaining: hold.lease.saturating_sub(age),
                },
            )
        }
        _ => answer,
    }
}

pub(crate) fn clears_unknown_as_known(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match operation.kind {
        OperationKind::Clear(Effect::Unknown) | OperationKind::Reject(Effect::Unknown) => {
            with_written(apply(marker, age, operation), as_known)
        }
        _ => apply(marker, age, operation),
    }
}

/// A cleared marker without its unknown outcome.
fn as_known(marker: Marker) -> Marker {
    match marker {
        Marker::Cleared { attempts, .. } => Marker::Cleared {
            attempts,
            effect: Effect::Nothing,
        },
        marker => marker,
    }
}

pub(crate) fn fails_as_known(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match operation.kind {
        OperationKind::Clear(Effect::Nothing) | OperationKind::Reject(Effect::Nothing) => {
            with_written(apply(marker, age, operation), as_known)
        }
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn takes_over_as_known(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match (operation.kind, marker) {
        (OperationKind::Claim, Marker::InProgress(before)) => {
            with_written(apply(marker, age, operation), |after| match after {
                Marker::InProgress(hold) => Marker::InProgress(Hold {
                    earlier: before.earlier,
                    ..hold
                }),
                after => after,
            })
        }
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn grants_unknown_outcome(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match operation.kind {
        OperationKind::Claim => apply(as_known(marker), age, operation),
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn rejects_without_attempt(marker: Marker, age: Age, operation: &Operation) -> Answer {
    with_written(apply(marker, age, operation), |marker| match marker {
        Marker::Rejected { fingerprint, .. } => Marker::Rejected {
            attempt: 0,
            fingerprint,
        },
        marker => marker,
    })
}

pub(crate) fn forget_deletes(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match (operation.kind, apply(marker, age, operation)) {
        (OperationKind::Forget { .. }, (Change::Write(..), verdict)) => (Change::Delete, verdict),
        (_, answer) => answer,
    }
}

pub(crate) fn redrives_without_budget(marker: Marker, age: Age, operation: &Operation) -> Answer {
    let answer = apply(marker, age, operation);
    match (operation.kind, marker) {
        (
            OperationKind::Redrive { .. },
            Marker::Cleared {
                attempts: before, ..
            },
        ) => with_written(answer, |after| match after {
            Marker::Cleared { attempts, effect } => Marker::Cleared {
                attempts: Attempts {
                    base: before.base,
                    ..attempts
                },
                effect,
            },
            after => after,
        }),
        _ => answer,
    }
}

pub(crate) fn redrives_with_crashes(marker: Marker, age: Age, operation: &Operation) -> Answer {
    let crashes = match marker {
        Marker::Cleared { attempts, .. } => attempts.crashes,
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.attempts.crashes,
        _ => 0,
    };
    match operation.kind {
        OperationKind::Redrive { .. } => {
            with_written(apply(marker, age, operation), |after| match after {
                Marker::Cleared { attempts, effect } => Marker::Cleared {
                    attempts: Attempts {
                        crashes,
                        ..attempts
                    },
                    effect,
                },
                after => after,
            })
        }
        _ => apply(marker, age, operation),
    }
}

/// Answers that the redrive was applied, but writes nothing.
pub(crate) fn redrives_without_write(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match (operation.kind, apply(marker, age, operation)) {
        (OperationKind::Redrive { .. }, (_, verdict)) => (Change::Keep, verdict),
        (_, answer) => answer,
    }
}

pub(crate) fn redrives_without_comparing(
    marker: Marker,
    age: Age,
    operation: &Operation,
) -> Answer {
    match operation.kind {
        OperationKind::Redrive { seen, .. } => apply(seen, age, operation),
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn redrives_as_known(marker: Marker, age: Age, operation: &Operation) -> Answer {
    match operation.kind {
        OperationKind::Redrive { .. } => with_written(apply(marker, age, operation), as_known),
        _ => apply(marker, age, operation),
    }
}

pub(crate) fn doubts_spend_attempts(marker: Marker, age: Age, operation: &Operation) -> Answer {
    let lower = |hold: Hold| Hold {
        attempts: Attempts {
            base: hold.attempts.base - 1,
            ..hold.attempts
        },
        ..hold
    };
    match (operation.kind, apply(marker, age, operation)) {
        (
            OperationKind::Claim,
            (Change::Write(Marker::InDoubt(hold, Doubt::Reconciling), expiry), Verdict::InDoubt(_)),
        ) if !matches!(marker, Marker::InDoubt(before, _) if before.token == operation.token) => {
            let hold = lower(hold);
            (
                Change::Write(Marker::InDoubt(hold, Doubt::Reconciling), expiry),
                Verdict::InDoubt(hold.attempts),
            )
        }
        (_, answer) => answer,
    }
}
