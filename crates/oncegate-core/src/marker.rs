//! The store's side of the guarantee: the transitions of the marker under one key.
//!
//! A marker is the record of an id in the store. [`apply`] decides all its transitions. The memory
//! store calls this function on the values of a map; a test suite compares every other store with
//! it; the model checker explores it. The function reads no clock: the store passes the age of the
//! marker.

mod attempts;
mod fingerprint;
mod operation;
mod token;

use std::time::Duration;

pub use attempts::Attempts;
pub use fingerprint::Fingerprint;
pub use operation::{
    Change, Effect, Finding, Operation, OperationKind, Terms, UNKNOWN_ATTEMPT,
    UNRESOLVED_AT_MOST_ONCE, Verdict,
};
pub use token::{Token, Tokens};

/// The guarantee that the user chooses. It decides whether a handler runs again when it is unknown
/// whether its effect happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Guarantee {
    /// The handler never starts a second time for an id, unless it reported that nothing happened,
    /// or `reconcile` found that nothing happened and nothing can happen later. Messages whose
    /// outcome stays unknown go to the in-doubt queue.
    AtMostOnce,
    /// The handler runs again after a crash or a lost lease; a completed id is never handled again
    /// within the window.
    #[default]
    EffectivelyOnce,
    /// `SET processed:<id> 1 EX <window> NX` before the handler, `DEL` after any failure: the usual
    /// code, for comparison. Loses messages on a crash, on a duplicate of a message that then
    /// fails, and on a lost reply.
    Bare,
}

/// The record of a store under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Marker {
    /// No record: the id was never claimed, was cleared, or has expired.
    Absent,
    /// An attempt failed, and the id can be claimed again. The marker keeps the attempts, because
    /// an earlier run may have its effect later, so the next one needs a higher number.
    Cleared {
        /// The attempts up to the last grant.
        attempts: Attempts,
        /// What these attempts may have done. If it is [`Effect::Unknown`], an at-most-once claim
        /// is granted in doubt.
        effect: Effect,
    },
    /// A claim is held.
    InProgress(Hold),
    /// It is unknown whether the effect happened.
    InDoubt(Hold, Doubt),
    /// At most once only: dead-lettered, and not run again until it is redriven.
    Rejected {
        /// The number of the last attempt.
        attempt: u32,
        /// The body that was rejected.
        fingerprint: Option<Fingerprint>,
    },
    /// Handled. Without a fingerprint, every body matches.
    Done(Option<Fingerprint>),
}

impl Marker {
    /// Whether the id is done and the fingerprints do not differ; an unknown one matches.
    pub fn is_done_for(&self, fingerprint: Option<Fingerprint>) -> bool {
        match (self, fingerprint) {
            (Self::Done(Some(stored)), Some(own)) => *stored == own,
            (Self::Done(_), _) => true,
            _ => false,
        }
    }
}

/// The holder of a marker, and the terms of its claim. The marker contains the lease and the
/// horizon, so that processes with another configuration apply those of its writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The token of the claim that holds the id.
    pub token: Token,
    /// The attempts, including this one.
    pub attempts: Attempts,
    /// What the attempts before this one may have done.
    pub earlier: Effect,
    /// The time after the last write of the marker in which no other claim is granted.
    pub lease: Duration,
    /// The time after its last write at which the marker expires.
    pub horizon: Duration,
    /// The guarantee of the writer.
    pub guarantee: Guarantee,
    /// The fingerprint of the body.
    pub fingerprint: Option<Fingerprint>,
}

/// Whether a holder reconciles an unknown outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// No holder reconciles it: any claim takes it over.
    Waiting,
    /// The holder reconciles it until its lease ends.
    Reconciling,
}

/// The age of a marker by the store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Age {
    /// The time since its last write.
    Of(Duration),
    /// Unknown, because the key has no expiry, or one that is later than the horizon allows:
    /// another program changed it, or the clock of the store was set back. The next claim is `Busy`
    /// and restarts the lease.
    Unknown,
}

/// Decides how an operation changes the marker under its key, and which verdict the operation gets.
#[inline]
pub fn apply(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let Operation { kind, terms, .. } = operation;
    if terms.guarantee == Guarantee::Bare {
        return apply_bare(marker, operation);
    }
    let is_own =
        |hold: &Hold| hold.token == operation.token && hold.attempts.number == operation.attempt;
    let done = Write(Done(terms.fingerprint), terms.window);
    let cleared = |attempts, effect| {
        (
            Write(Cleared { attempts, effect }, terms.window),
            Verdict::Applied,
        )
    };
    let write_hold = |marker, hold: Hold| Write(marker, hold.horizon);
    // No earlier attempt may have an effect: if this one has none, no marker is needed.
    let nothing_before = |hold: &Hold| hold.attempts.number == 1 && hold.earlier == Effect::Nothing;
    match (kind, marker) {
        (OperationKind::Claim, _) => claim(marker, age, operation),

        (OperationKind::Renew, InProgress(hold) | InDoubt(hold, _)) if is_own(&hold) => {
            (write_hold(marker, hold), Verdict::Applied)
        }

        (OperationKind::Complete, InProgress(hold)) if is_own(&hold) => {
            (done, Verdict::Done { marker_lost: false })
        }
        // Also if another claim is in doubt: only a holder whose handler succeeded completes, and a
        // known outcome replaces an unknown one.
        (OperationKind::Complete, InDoubt(..)) => (done, Verdict::Done { marker_lost: false }),
        (OperationKind::Complete, Done(_)) => (Keep, Verdict::Done { marker_lost: false }),
        (OperationKind::Complete, Absent | Cleared { .. }) => {
            (done, Verdict::Done { marker_lost: true })
        }

        (OperationKind::Clear(effect), InProgress(hold)) if is_own(&hold) => {
            match (effect, terms.guarantee) {
                (Effect::Nothing, _) if nothing_before(&hold) => (Delete, Verdict::Applied),
                // Does not occur: at most once records an unknown outcome with
                // `OperationKind::Doubt`.
                (Effect::Unknown, Guarantee::AtMostOnce) => (Keep, Verdict::Lost),
                _ => cleared(hold.attempts, hold.earlier.and(*effect)),
            }
        }
        (OperationKind::Withdraw, InProgress(hold)) if is_own(&hold) && nothing_before(&hold) => {
            (Delete, Verdict::Applied)
        }
        (OperationKind::Withdraw, InProgress(hold)) if is_own(&hold) => {
            cleared(hold.attempts.uncounted(), hold.earlier)
        }
        (OperationKind::Clear(_) | OperationKind::Withdraw, Absent | Cleared { .. }) => {
            (Keep, Verdict::Applied)
        }

        (OperationKind::Reject(effect), InProgress(hold)) if is_own(&hold) => {
            match (effect, terms.guarantee) {
                (_, Guarantee::AtMostOnce) => {
                    let rejected = Rejected {
                        attempt: hold.attempts.number,
                        fingerprint: hold.fingerprint,
                    };
                    (Write(rejected, terms.window), Verdict::Applied)
                }
                (Effect::Nothing, _) if nothing_before(&hold) => (Delete, Verdict::Applied),
                _ => cleared(hold.attempts, hold.earlier.and(*effect)),
            }
        }
        (OperationKind::Reject(_), Absent | Cleared { .. })
            if terms.guarantee != Guarantee::AtMostOnce =>
        {
            (Keep, Verdict::Applied)
        }

        (OperationKind::Doubt, InProgress(hold) | InDoubt(hold, _)) if is_own(&hold) => (
            write_hold(InDoubt(hold, Doubt::Waiting), hold),
            Verdict::Applied,
        ),
        (OperationKind::Doubt, Absent) => {
            write_doubt(operation, Attempts::none_counted(operation.attempt))
        }
        // The operation arrives late or was repeated: since then, the outcome was determined, or an
        // operator freed the id.
        (OperationKind::Doubt, Cleared { attempts, .. }) if operation.attempt <= attempts.base => {
            (Keep, Verdict::Lost)
        }
        // The fencing token never decreases.
        (OperationKind::Doubt, Cleared { attempts, .. }) => write_doubt(
            operation,
            Attempts {
                number: attempts.number.max(operation.attempt),
                ..attempts
            },
        ),

        (OperationKind::Resolve(Finding::Happened), InDoubt(hold, _)) if is_own(&hold) => {
            (done, Verdict::Done { marker_lost: false })
        }
        (OperationKind::Resolve(Finding::DidNotHappen), InDoubt(hold, _)) if is_own(&hold) => {
            cleared(hold.attempts, Effect::Nothing)
        }

        (OperationKind::Redrive { seen, .. } | OperationKind::Forget { seen }, _) => {
            free(marker, age, operation, *seen)
        }

        _ => (Keep, Verdict::Lost),
    }
}

/// Applies [`OperationKind::Claim`].
fn claim(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let terms = &operation.terms;
    let grant = |attempts: Attempts, earlier| {
        let hold = new_hold(operation, attempts.granted(), earlier);
        (
            Write(InProgress(hold), hold.horizon),
            Verdict::Granted(hold.attempts),
        )
    };
    let grant_in_doubt = |attempts: Attempts| {
        let own = new_hold(operation, attempts.granted_in_doubt(), Effect::Unknown);
        let hold = Hold {
            guarantee: Guarantee::AtMostOnce,
            horizon: UNRESOLVED_AT_MOST_ONCE,
            ..own
        };
        (
            Write(InDoubt(hold, Doubt::Reconciling), hold.horizon),
            Verdict::InDoubt(hold.attempts),
        )
    };
    let other_body = |stored: Option<Fingerprint>| matches!((stored, terms.fingerprint), (Some(stored), Some(own)) if stored != own);
    let busy = |hold: &Hold| match age {
        Age::Of(age) => (
            Keep,
            Verdict::Busy {
                remaining: hold.lease.saturating_sub(age),
            },
        ),
        Age::Unknown => (
            Write(marker, hold.horizon),
            Verdict::Busy {
                remaining: hold.lease,
            },
        ),
    };
    match marker {
        Absent => grant(Attempts::new(0), Effect::Nothing),
        // An unknown outcome of an effectively-once attempt stays unknown if the guarantee is
        // changed.
        Cleared {
            attempts,
            effect: Effect::Unknown,
        } if terms.guarantee == Guarantee::AtMostOnce => grant_in_doubt(attempts),
        Cleared { attempts, effect } => grant(attempts, effect),
        InProgress(hold) if hold.token == operation.token => {
            (Write(marker, hold.horizon), Verdict::Granted(hold.attempts))
        }
        // Also with another body, because the holder may fail.
        InProgress(hold) if !lease_has_ended(&hold, age) => busy(&hold),
        // Not `Busy`: the holder may have crashed, and may never claim again.
        InProgress(hold) if other_body(hold.fingerprint) => (Keep, Verdict::Conflict),
        // A crash may have another cause than this message, so it is counted separately from failed
        // attempts.
        InProgress(hold) if is_at_most_once(hold.guarantee, terms.guarantee) => {
            grant_in_doubt(hold.attempts.crashed().uncounted())
        }
        InProgress(hold) => grant(hold.attempts.crashed().uncounted(), Effect::Unknown),
        InDoubt(hold, _) if hold.token == operation.token => {
            (Write(marker, hold.horizon), Verdict::InDoubt(hold.attempts))
        }
        InDoubt(hold, _) if other_body(hold.fingerprint) => (Keep, Verdict::Conflict),
        InDoubt(hold, Doubt::Reconciling) if !lease_has_ended(&hold, age) => busy(&hold),
        InDoubt(hold, Doubt::Reconciling) => grant_in_doubt(hold.attempts.crashed()),
        InDoubt(hold, Doubt::Waiting) => grant_in_doubt(hold.attempts),
        Rejected { fingerprint, .. } | Done(fingerprint) if other_body(fingerprint) => {
            (Keep, Verdict::Conflict)
        }
        Rejected { attempt, .. } => (Keep, Verdict::Rejected { attempt }),
        Done(_) => (Keep, Verdict::Duplicate),
    }
}

/// Applies [`OperationKind::Redrive`] or [`OperationKind::Forget`].
fn free(marker: Marker, age: Age, operation: &Operation, seen: Marker) -> (Change, Verdict) {
    let in_progress = matches!(marker, Marker::InProgress(hold) if !lease_has_ended(&hold, age));
    match freed(operation) {
        // Either the marker is as the operator saw it, or it is already freed, perhaps by this
        // operation before its reply was lost. The expiry restarts in both cases.
        Some(freed) if marker == freed || (marker == seen && !in_progress) => (
            Change::Write(freed, operation.terms.window),
            Verdict::Applied,
        ),
        _ => (Change::Keep, Verdict::Lost),
    }
}

/// The marker after [`OperationKind::Redrive`] or [`OperationKind::Forget`]: it keeps the attempt
/// number, and no attempt counts towards `max_attempts`. `None` for any other operation, and for a
/// marker that the operation does not free.
pub fn freed(operation: &Operation) -> Option<Marker> {
    use Marker::*;
    let free = |number: u32, effect| {
        let attempts = Attempts::none_counted(number.max(operation.attempt));
        Some(Cleared { attempts, effect })
    };
    match (operation.kind, operation.terms.guarantee) {
        (OperationKind::Redrive { .. } | OperationKind::Forget { .. }, Guarantee::Bare) => {
            Some(Absent)
        } // deletes any marker
        (OperationKind::Forget { seen: Done(_) }, _) if operation.attempt == 0 => {
            free(UNKNOWN_ATTEMPT, Effect::Nothing)
        }
        (OperationKind::Forget { seen: Done(_) }, _) => free(0, Effect::Nothing),
        (
            OperationKind::Redrive {
                seen,
                effect: stated,
            },
            claimant,
        ) => match seen {
            Absent => free(0, stated),
            Rejected { attempt, .. } => free(attempt, Effect::Nothing),
            Cleared {
                attempts,
                effect: Effect::Unknown,
            } => free(attempts.number, stated),
            Cleared {
                attempts,
                effect: Effect::Nothing,
            } => free(attempts.number, Effect::Nothing),
            InDoubt(hold, _) if stated == Effect::Nothing => free(hold.attempts.number, stated),
            // The lease has ended without a recorded outcome, and no claim has taken over the
            // marker since.
            InProgress(hold)
                if stated == Effect::Nothing || !is_at_most_once(hold.guarantee, claimant) =>
            {
                free(hold.attempts.number, stated)
            }
            InDoubt(..) | InProgress(_) | Done(_) => None,
        },
        _ => None,
    }
}

/// Whether the lease of a holder has ended.
fn lease_has_ended(hold: &Hold, age: Age) -> bool {
    matches!(age, Age::Of(age) if age > hold.lease)
}

/// Applies an operation with [`Guarantee::Bare`]: a claim writes a done marker, any failure deletes
/// it.
fn apply_bare(marker: Marker, operation: &Operation) -> (Change, Verdict) {
    match (operation.kind, marker) {
        (OperationKind::Claim, Marker::Absent) => (
            Change::Write(Marker::Done(None), operation.terms.window),
            Verdict::Granted(Attempts::new(1)),
        ),
        (OperationKind::Claim, _) => (Change::Keep, Verdict::Duplicate),
        (OperationKind::Renew, _) => (Change::Keep, Verdict::Applied),
        (OperationKind::Complete, _) => (Change::Keep, Verdict::Done { marker_lost: false }),
        // All operations that report a failure or free the id.
        _ => (Change::Delete, Verdict::Applied),
    }
}

/// Replaces an absent or cleared marker by one in doubt, which no holder reconciles yet.
fn write_doubt(operation: &Operation, attempts: Attempts) -> (Change, Verdict) {
    let hold = new_hold(operation, attempts, Effect::Unknown);
    (
        Change::Write(Marker::InDoubt(hold, Doubt::Waiting), hold.horizon),
        Verdict::Applied,
    )
}

/// The holder of a marker that this operation writes.
fn new_hold(operation: &Operation, attempts: Attempts, earlier: Effect) -> Hold {
    let Terms {
        guarantee,
        lease,
        fingerprint,
        ..
    } = operation.terms;
    Hold {
        token: operation.token,
        attempts,
        earlier,
        lease,
        horizon: operation.terms.horizon(),
        guarantee,
        fingerprint,
    }
}

/// Whether the guarantee of the marker or of the claim is at most once: if they differ, the
/// stricter one applies.
fn is_at_most_once(marker: Guarantee, claim: Guarantee) -> bool {
    marker == Guarantee::AtMostOnce || claim == Guarantee::AtMostOnce
}

#[cfg(test)]
mod tests;
