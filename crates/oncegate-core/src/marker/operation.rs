//! The operations on a marker, and their results.

use std::time::Duration;

use super::{Attempts, Fingerprint, Guarantee, Marker, Token};
use crate::id::Key;

/// One request to a store. It is atomic on its key, and safe to repeat after a lost reply.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    /// The key of the id, without the prefix of the store.
    pub key: Key,
    /// The kind of the operation.
    pub kind: OperationKind,
    /// The token of the claim. A marker belongs to the claim of this operation if its token and
    /// attempt number are equal.
    pub token: Token,
    /// The number of the granted attempt; 0 in a claim. In [`OperationKind::Redrive`] and
    /// [`OperationKind::Forget`] it is the highest attempt number that the operator knows, or 0:
    /// later attempts get higher numbers.
    pub attempt: u32,
    /// The terms of the claim.
    pub terms: Terms,
}

/// The kind of an [`Operation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationKind {
    /// Claims the id.
    Claim,
    /// Renews the lease.
    Renew,
    /// Records that the effect happened.
    Complete,
    /// Records a failure, and frees the id for another attempt.
    Clear(Effect),
    /// Frees the id because the handler was not started: the attempt counts neither as an attempt
    /// nor as a crash.
    Withdraw,
    /// Records that the message is dead-lettered: in at most once the id does not run again until
    /// it is redriven.
    Reject(Effect),
    /// Records that it is unknown whether the effect happened.
    Doubt,
    /// Records what `reconcile` or an operator found out.
    Resolve(Finding),
    /// An operator redrives an id that was rejected, failed too often, or is in doubt: a
    /// compare-and-set, applied only if the marker is still the one that the operator read. The
    /// number of the last attempt is kept, and no attempt counts towards `max_attempts`. The next
    /// claim is granted; in at most once it is granted in doubt if an earlier effect is unknown.
    Redrive {
        /// The marker as the operator read it.
        seen: Marker,
        /// [`Effect::Nothing`]: the operator states that nothing happened and nothing can happen
        /// later. [`Effect::Unknown`]: an unknown effect stays unknown, and a marker in doubt is
        /// not freed.
        effect: Effect,
    },
    /// An operator frees a done id, so that it is handled again: a compare-and-set, applied only if
    /// the marker is still the one that the operator read.
    Forget {
        /// The marker as the operator read it.
        seen: Marker,
    },
}

/// The number that [`OperationKind::Forget`] assumes for the last attempt if the operator does not
/// know it, because a done marker does not contain it. Higher than any attempt number in practice.
pub const UNKNOWN_ATTEMPT: u32 = 1_000_000;

/// What is known about the effect of one or more attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing happened, and nothing can happen later.
    Nothing,
    /// Something may have happened, or may happen later: the next attempt needs a higher number.
    Unknown,
}

impl Effect {
    /// [`Effect::Unknown`] if at least one of the two is.
    pub const fn and(self, other: Self) -> Self {
        match self {
            Self::Nothing => other,
            Self::Unknown => Self::Unknown,
        }
    }
}

/// What `reconcile` or an operator found out about an unknown outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// The effect happened.
    Happened,
    /// The effect did not happen, and cannot happen later.
    DidNotHappen,
}

/// The terms of a claim: those settings of its consumer that the store needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The guarantee.
    pub guarantee: Guarantee,
    /// How long a claim is valid without renewal.
    pub lease: Duration,
    /// How long a done id is remembered.
    pub window: Duration,
    /// The fingerprint of the body, if bodies are compared.
    pub fingerprint: Option<Fingerprint>,
}

/// How long the store keeps a marker in progress or in doubt in at most once: ten years. After its
/// expiry the id could run again although its outcome is unknown.
pub const UNRESOLVED_AT_MOST_ONCE: Duration = Duration::from_secs(3650 * 24 * 3600);

impl Terms {
    /// How long the store keeps a marker in progress or in doubt after its last write.
    pub fn horizon(&self) -> Duration {
        match self.guarantee {
            Guarantee::AtMostOnce => UNRESOLVED_AT_MOST_ONCE,
            Guarantee::EffectivelyOnce | Guarantee::Bare => self.window,
        }
    }
}

/// A store's answer to one [`Operation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The claim is granted, as this attempt.
    Granted(Attempts),
    /// The claim is granted to reconcile, as this attempt: it is unknown whether the effect
    /// happened.
    InDoubt(Attempts),
    /// Another claim holds the id.
    Busy {
        /// The time until the lease of that claim ends.
        remaining: Duration,
    },
    /// The id was handled before.
    Duplicate,
    /// The id was dead-lettered before, and must not run.
    Rejected {
        /// The number of its last attempt, which dead letters carry as the fencing token.
        attempt: u32,
    },
    /// The same id was used for another body.
    Conflict,
    /// The operation was applied, now or before: the marker is renewed, cleared, withdrawn,
    /// rejected, in doubt, resolved, redriven or forgotten.
    Applied,
    /// The id is recorded as done.
    Done {
        /// Whether the marker was absent or cleared: the store lost data, the dedup window was too
        /// short, or the lease ended and a later claim was cleared since.
        marker_lost: bool,
    },
    /// The marker no longer belongs to the claim. The delivery drops its handler, is not accepted,
    /// and claims again.
    Lost,
}

/// How a store changes the value of a key. Every write restarts the expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// Not at all: the marker and its expiry stay unchanged.
    Keep,
    /// Write this marker with this time to live.
    Write(Marker, Duration),
    /// Delete the key.
    Delete,
}
