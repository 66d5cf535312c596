//! Short forms of operations and markers for the laws.

use std::time::Duration;

use oncegate_core::marker::{
    Attempts, Doubt, Effect, Finding, Fingerprint, Guarantee, Hold, Marker, Operation,
    OperationKind, Terms, Token, UNRESOLVED_AT_MOST_ONCE, Verdict,
};
use oncegate_core::{Key, MessageId, Store, StoreError};

pub(crate) const AT_MOST_ONCE: Guarantee = Guarantee::AtMostOnce;
pub(crate) const EFFECTIVELY_ONCE: Guarantee = Guarantee::EffectivelyOnce;
pub(crate) const BOTH_GUARANTEES: [Guarantee; 2] = [AT_MOST_ONCE, EFFECTIVELY_ONCE];

/// A lease that does not expire during a law.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(300);
/// A lease whose expiry a law waits for.
pub(crate) const SHORT_LEASE: Duration = Duration::from_millis(60);
/// A window that does not expire during a law.
pub(crate) const WINDOW: Duration = Duration::from_secs(3600);
/// The tolerated difference between the clocks of store and client, including late timers.
pub(crate) const CLOCK_TOLERANCE: Duration = Duration::from_millis(10);

/// The token of the tested claim.
pub(crate) const OWN_TOKEN: Token = Token(1);
/// The token of another claim.
pub(crate) const OTHER_TOKEN: Token = Token(2);

/// The verdict of a completion by the holder.
pub(crate) const DONE: Verdict = Verdict::Done { marker_lost: false };
/// The verdict of a completion that finds no marker.
pub(crate) const DONE_WITH_LOST_MARKER: Verdict = Verdict::Done { marker_lost: true };

pub(crate) const fn granted(attempt: u32) -> Verdict {
    Verdict::Granted(Attempts::new(attempt))
}

/// The attempts after a claim has taken over the doubt of a first attempt.
pub(crate) const DOUBTED_ONCE: Attempts = Attempts {
    number: 2,
    base: 1,
    crashes: 0,
};
/// The attempts after the lease of a first attempt expired and a claim received `InDoubt`.
pub(crate) const CRASHED_ONCE: Attempts = Attempts {
    number: 2,
    base: 2,
    crashes: 1,
};
/// The attempts after the lease of a first attempt expired and a claim received `Granted`.
pub(crate) const TAKEN_OVER: Attempts = Attempts {
    number: 2,
    base: 1,
    crashes: 1,
};

pub(crate) fn key(id: impl AsRef<[u8]>) -> Key {
    Key::new(&MessageId::new(id).expect("no law uses an empty id"))
}

pub(crate) fn terms(guarantee: Guarantee) -> Terms {
    Terms {
        guarantee,
        lease: LONG_LEASE,
        window: WINDOW,
        fingerprint: None,
    }
}

/// The fingerprint of a body; different numbers stand for different bodies.
pub(crate) fn fingerprint(number: u64) -> Option<Fingerprint> {
    Some(Fingerprint::new(number))
}

/// A claim with its granted attempt and terms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claimant {
    pub(crate) token: Token,
    pub(crate) attempt: u32,
    pub(crate) terms: Terms,
}

impl Claimant {
    pub(crate) fn new(guarantee: Guarantee, token: Token, attempt: u32) -> Self {
        Self {
            token,
            attempt,
            terms: terms(guarantee),
        }
    }

    pub(crate) fn lease(mut self, lease: Duration) -> Self {
        self.terms.lease = lease;
        self
    }

    pub(crate) fn window(mut self, window: Duration) -> Self {
        self.terms.window = window;
        self
    }

    pub(crate) fn fingerprint(mut self, fingerprint: Option<Fingerprint>) -> Self {
        self.terms.fingerprint = fingerprint;
        self
    }

    pub(crate) fn operation(&self, kind: OperationKind, key: &Key) -> Operation {
        let attempt = if kind == OperationKind::Claim {
            0
        } else {
            self.attempt
        };
        Operation {
            key: key.clone(),
            kind,
            token: self.token,
            attempt,
            terms: self.terms,
        }
    }

    pub(crate) fn claim(&self, key: &Key) -> Operation {
        self.operation(OperationKind::Claim, key)
    }
}

/// The hold of a claim with [`terms`].
pub(crate) fn hold(
    guarantee: Guarantee,
    token: Token,
    attempts: Attempts,
    earlier: Effect,
) -> Hold {
    let horizon = if guarantee == AT_MOST_ONCE {
        UNRESOLVED_AT_MOST_ONCE
    } else {
        WINDOW
    };
    Hold {
        token,
        attempts,
        earlier,
        lease: LONG_LEASE,
        horizon,
        guarantee,
        fingerprint: None,
    }
}

pub(crate) fn cleared(attempt: u32, effect: Effect) -> Marker {
    Marker::Cleared {
        attempts: Attempts::new(attempt),
        effect,
    }
}

pub(crate) fn rejected(attempt: u32, fingerprint: Option<Fingerprint>) -> Marker {
    Marker::Rejected {
        attempt,
        fingerprint,
    }
}

pub(crate) fn running(guarantee: Guarantee, token: Token, attempt: u32) -> Marker {
    Marker::InProgress(hold(
        guarantee,
        token,
        Attempts::new(attempt),
        Effect::Nothing,
    ))
}

pub(crate) fn doubted(guarantee: Guarantee, token: Token, attempt: u32) -> Marker {
    Marker::InDoubt(
        hold(guarantee, token, Attempts::new(attempt), Effect::Unknown),
        Doubt::Waiting,
    )
}

/// The doubt of the previous attempt, taken over by a claim.
pub(crate) fn reconciling_attempt(token: Token, attempt: u32) -> Marker {
    reconciling(
        token,
        Attempts {
            number: attempt,
            ..DOUBTED_ONCE
        },
    )
}

/// A doubt that the claim with this token reconciles.
pub(crate) fn reconciling(token: Token, attempts: Attempts) -> Marker {
    Marker::InDoubt(
        hold(AT_MOST_ONCE, token, attempts, Effect::Unknown),
        Doubt::Reconciling,
    )
}

/// The hold of a marker, if it has one.
pub(crate) fn hold_of(marker: &mut Marker) -> Option<&mut Hold> {
    match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold),
        Marker::Absent | Marker::Cleared { .. } | Marker::Rejected { .. } | Marker::Done(_) => None,
    }
}

/// The same marker with the lease [`SHORT_LEASE`], whose expiry a law waits for.
pub(crate) fn with_expired_lease(mut marker: Marker) -> Marker {
    if let Some(hold) = hold_of(&mut marker) {
        hold.lease = SHORT_LEASE;
    }
    marker
}

/// The same marker with a fingerprint.
pub(crate) fn with_fingerprint(mut marker: Marker, fingerprint: Option<Fingerprint>) -> Marker {
    if let Some(hold) = hold_of(&mut marker) {
        hold.fingerprint = fingerprint;
    }
    marker
}

/// Every operation except the claim and the operations of an operator.
pub(crate) const HOLDER_OPERATIONS: [OperationKind; 10] = [
    OperationKind::Renew,
    OperationKind::Complete,
    OperationKind::Clear(Effect::Nothing),
    OperationKind::Clear(Effect::Unknown),
    OperationKind::Withdraw,
    OperationKind::Reject(Effect::Nothing),
    OperationKind::Reject(Effect::Unknown),
    OperationKind::Doubt,
    OperationKind::Resolve(Finding::Happened),
    OperationKind::Resolve(Finding::DidNotHappen),
];

/// The results of one batch; panics unless there is one for each operation.
pub(crate) async fn answers(
    store: &dyn Store,
    operations: &[Operation],
) -> Vec<Result<Verdict, StoreError>> {
    let answers = store.apply(operations).await;
    assert_eq!(
        answers.len(),
        operations.len(),
        "one answer for each operation"
    );
    answers
}

/// The verdicts of one batch; panics if an operation fails.
pub(crate) async fn verdicts(store: &dyn Store, operations: &[Operation]) -> Vec<Verdict> {
    let answers = answers(store, operations).await;
    let verdict = |(answer, operation): (Result<Verdict, StoreError>, &Operation)| match answer {
        Ok(verdict) => verdict,
        Err(error) => panic!("{operation:?} failed: {error}"),
    };
    answers.into_iter().zip(operations).map(verdict).collect()
}

/// The verdict of one operation.
pub(crate) async fn verdict(store: &dyn Store, operation: Operation) -> Verdict {
    verdicts(store, &[operation]).await[0]
}
