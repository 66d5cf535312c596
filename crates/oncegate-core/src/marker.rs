//! The store's side of the guarantee: the transitions of the marker under one key.
//!
//! [`apply`] decides all of them. The memory store is this function on a map; a test suite compares
//! every other store with it; the model checker explores it. It has no clock: the store passes the
//! age of the marker.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::id::Key;

/// The guarantee that the user chooses: what follows when it is unknown whether the effect of a
/// handler happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Guarantee {
    /// The handler never starts a second time for an id, unless it reported that nothing happened,
    /// or `reconcile` found that nothing happened and nothing still can. Messages whose outcome
    /// stays unknown go to the in-doubt queue.
    AtMostOnce,
    /// The handler runs again after a crash or a lost lease; a completed id is never handled again
    /// within the window.
    #[default]
    EffectivelyOnce,
    /// `SET processed:<id> 1 EX <window> NX` before the handler, `DEL` after any failure, for
    /// comparison. Loses messages on a crash, on a duplicate of a message that then fails, and on
    /// a lost reply.
    Bare,
}

/// Identifies one claim. Each claim gets a new token before its first operation is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u128);

impl Token {
    /// 128 random bits from the operating system.
    pub fn random() -> Self {
        Tokens::default().token()
    }
}

/// Generates tokens, 64 with one call to the operating system.
#[derive(Default)]
pub struct Tokens(Vec<Token>);

impl Tokens {
    /// A new, unique token.
    pub fn token(&mut self) -> Token {
        if let Some(token) = self.0.pop() {
            return token;
        }
        let mut bits = [0; 16 * 64];
        // Without unique tokens claims cannot be distinguished, so that no operation is safe.
        getrandom::fill(&mut bits).expect("the operating system provides random bytes");
        let (tokens, _) = bits.as_chunks::<16>();
        self.0
            .extend(tokens.iter().map(|bits| Token(u128::from_le_bytes(*bits))));
        self.0.swap_remove(0)
    }
}

impl std::fmt::Debug for Tokens {
    /// Hides the unused tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens")
    }
}

/// A hash of a body, which detects that an id was used for another body. Below 10^18, so that a
/// done marker is an integer in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// One more than the largest fingerprint.
    pub const LIMIT: u64 = 1_000_000_000_000_000_000;

    /// A fingerprint from a number, modulo [`Fingerprint::LIMIT`].
    pub const fn new(number: u64) -> Self {
        Self(number % Self::LIMIT)
    }

    /// The fingerprint of a body: the beginning of its SHA-256.
    pub fn of(body: &[u8]) -> Self {
        let digest = Sha256::digest(body);
        Self::new(
            digest[..8]
                .iter()
                .fold(0, |number, byte| number << 8 | u64::from(*byte)),
        )
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The record of a store under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Marker {
    /// No record: the id was never claimed, was cleared, or has expired.
    Absent,
    /// Free to claim. The attempts are kept because an earlier run may still have an effect.
    Cleared {
        /// The attempts up to the last grant.
        attempts: Attempts,
        /// What these attempts may have done. An at-most-once claim of [`Effect::Unknown`] is in
        /// doubt.
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

/// The attempts of an id: the number of the last one, how many of them `max_attempts` does not
/// count, and how many ended in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempts {
    /// The number of the last attempt, from 1: the fencing token that a handler passes to its sink.
    /// Later attempts have higher numbers, also after an unknown outcome and after an operator has
    /// freed the id.
    pub number: u32,
    /// How many attempts `max_attempts` does not count: an unknown outcome, a crash and a withdrawn
    /// grant add one each, and a redrive excludes all earlier ones.
    pub base: u32,
    /// How many leases ended without a recorded outcome since the last redrive: the process crashed,
    /// or lost its connection to the store.
    pub crashes: u32,
}

impl Attempts {
    /// The attempts up to this number, all counted.
    pub const fn new(number: u32) -> Self {
        Self {
            number,
            base: 0,
            crashes: 0,
        }
    }

    /// The attempts up to this number, none counted: all of `max_attempts` are left.
    pub const fn all_forgiven(number: u32) -> Self {
        Self {
            number,
            base: number,
            crashes: 0,
        }
    }

    /// How many attempts count towards `max_attempts`.
    pub const fn spent(self) -> u32 {
        self.number.saturating_sub(self.base)
    }

    /// One more grant.
    const fn granted(self) -> Self {
        Self {
            number: self.number.saturating_add(1),
            ..self
        }
    }

    /// A higher fencing token for the holder that reconciles. It is not a run, so it is not
    /// counted.
    const fn doubted(self) -> Self {
        self.granted().forgiven()
    }

    /// The holder's lease ended without an outcome.
    const fn crashed(self) -> Self {
        Self {
            crashes: self.crashes.saturating_add(1),
            ..self
        }
    }

    /// Excludes the last attempt from the count.
    const fn forgiven(self) -> Self {
        Self {
            base: self.base.saturating_add(1),
            ..self
        }
    }
}

/// The holder of a marker, and its terms. A marker contains its own lease and horizon, so that
/// readers with another configuration apply those of its writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The claim that holds it.
    pub token: Token,
    /// The attempts, including this one.
    pub attempts: Attempts,
    /// What the attempts before this one may have done.
    pub earlier: Effect,
    /// How long after its last write no other claim is granted.
    pub lease: Duration,
    /// How long after its last write the marker expires.
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
    /// Unknown, because its expiry is absent or longer than its horizon: another program changed
    /// it.
    Unknown,
}

/// One request to a store: atomic on its key, and safe to repeat after a lost reply.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    /// The key.
    pub key: Key,
    /// What to do.
    pub ask: Ask,
    /// The token of the claim. A marker belongs to the operation if token and attempt are equal.
    pub token: Token,
    /// The number of the granted attempt; 0 in a claim. In [`Ask::SendBack`] and [`Ask::Forget`] the
    /// highest attempt number that the operator knows of, 0 if none: every later attempt has a
    /// higher one.
    pub attempt: u32,
    /// The terms of the claim.
    pub terms: Terms,
}

/// The kind of an [`Operation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// Claims the id.
    Claim,
    /// Renews the lease.
    Renew,
    /// Records that the effect happened.
    Complete,
    /// Records a failure, and frees the id for another attempt.
    Clear(Effect),
    /// The handler was not started: frees the id as if the attempt had not been granted.
    Withdraw,
    /// Records that the message is dead-lettered: in at most once the id does not run again until
    /// it is redriven.
    Reject(Effect),
    /// Records that it is unknown whether the effect happened.
    Doubt,
    /// Records what `reconcile` or an operator found out.
    Resolve(Finding),
    /// An operator redrives an id that was rejected, failed too often, or is in doubt: a
    /// compare-and-set, applied if the marker is still the one that was seen. The number of the
    /// last attempt is kept, and all of `max_attempts` are left. The next claim is granted; in at
    /// most once it is in doubt if an earlier effect is unknown.
    SendBack {
        /// The marker as the operator read it.
        seen: Marker,
        /// [`Effect::Nothing`]: the operator states that nothing happened and nothing still can.
        /// Otherwise an unknown effect stays unknown, and a marker in doubt is not freed.
        effect: Effect,
    },
    /// An operator frees a done id, to be handled again: a compare-and-set, applied if the marker
    /// is still the one that was seen.
    Forget {
        /// The marker as the operator read it.
        seen: Marker,
    },
}

/// The number that is assumed for the last attempt after [`Ask::Forget`], because a done marker does
/// not contain it. Higher than any `max_attempts` in use.
pub const UNKNOWN_ATTEMPT: u32 = 1_000_000;

/// What one or more attempts may have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing happened, and nothing still can.
    Nothing,
    /// Something may have happened, or still can: the next attempt needs a higher number.
    Unknown,
}

impl Effect {
    /// [`Effect::Unknown`] if either is.
    pub const fn and(self, other: Self) -> Self {
        match self {
            Self::Nothing => other,
            Self::Unknown => Self::Unknown,
        }
    }
}

/// What `reconcile` or an operator found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// The effect happened.
    Happened,
    /// It did not, and nothing still can.
    DidNotHappen,
}

/// The terms of a claim.
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

/// How long an unresolved marker is kept in at most once: ten years. Its expiry would let the id
/// run again although its outcome is unknown.
pub const UNRESOLVED_AT_MOST_ONCE: Duration = Duration::from_secs(3650 * 24 * 3600);

impl Terms {
    /// How long an unresolved marker is kept.
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
    /// The operation was applied: renewed, cleared, withdrawn, rejected, recorded as in doubt,
    /// resolved, sent back or forgotten.
    Kept,
    /// The id is recorded as done.
    Done {
        /// Whether the marker was absent or cleared: the store lost data, or the window was too
        /// short.
        marker_lost: bool,
    },
    /// The marker does not belong to the claim any more. The claimant drops the handler, does not
    /// accept, and claims again.
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

/// The change of the marker under one key, and the verdict for the claimant.
pub fn apply(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let Operation { ask, terms, .. } = operation;
    if terms.guarantee == Guarantee::Bare {
        return apply_bare(marker, operation);
    }
    let is_own =
        |hold: &Hold| hold.token == operation.token && hold.attempts.number == operation.attempt;
    let done = |marker_lost| {
        (
            Write(Done(terms.fingerprint), terms.window),
            Verdict::Done { marker_lost },
        )
    };
    let cleared = |attempts, effect| {
        (
            Write(Cleared { attempts, effect }, terms.window),
            Verdict::Kept,
        )
    };
    let write_hold = |marker, hold: Hold| Write(marker, hold.horizon);
    // The first attempt: if it did nothing, no record is needed.
    let nothing_before = |hold: &Hold| hold.attempts.number == 1 && hold.earlier == Effect::Nothing;
    match (ask, marker) {
        (Ask::Claim, _) => claim(marker, age, operation),

        (Ask::Renew, InProgress(hold) | InDoubt(hold, _)) if is_own(&hold) => {
            (write_hold(marker, hold), Verdict::Kept)
        }

        (Ask::Complete, InProgress(hold)) if is_own(&hold) => done(false),
        (Ask::Complete, InDoubt(..)) => done(false), // of any claim: only a holder completes, and a known outcome replaces an unknown one
        (Ask::Complete, Done(_)) => (Keep, Verdict::Done { marker_lost: false }),
        (Ask::Complete, Absent | Cleared { .. }) => done(true),

        (Ask::Clear(effect), InProgress(hold)) if is_own(&hold) => {
            match (effect, terms.guarantee) {
                (Effect::Nothing, _) if nothing_before(&hold) => (Delete, Verdict::Kept),
                (Effect::Unknown, Guarantee::AtMostOnce) => (Keep, Verdict::Lost), // does not occur: an unknown outcome is recorded with `Doubt`
                _ => cleared(hold.attempts, hold.earlier.and(*effect)),
            }
        }
        (Ask::Withdraw, InProgress(hold)) if is_own(&hold) && nothing_before(&hold) => {
            (Delete, Verdict::Kept)
        }
        (Ask::Withdraw, InProgress(hold)) if is_own(&hold) => {
            cleared(hold.attempts.forgiven(), hold.earlier)
        }
        (Ask::Clear(_) | Ask::Withdraw, Absent | Cleared { .. }) => (Keep, Verdict::Kept),

        (Ask::Reject(effect), InProgress(hold)) if is_own(&hold) => match (effect, terms.guarantee)
        {
            (_, Guarantee::AtMostOnce) => {
                let rejected = Rejected {
                    attempt: hold.attempts.number,
                    fingerprint: hold.fingerprint,
                };
                (Write(rejected, terms.window), Verdict::Kept)
            }
            (Effect::Nothing, _) if nothing_before(&hold) => (Delete, Verdict::Kept),
            _ => cleared(hold.attempts, hold.earlier.and(*effect)),
        },
        (Ask::Reject(_), Absent | Cleared { .. }) if terms.guarantee != Guarantee::AtMostOnce => {
            (Keep, Verdict::Kept)
        }

        (Ask::Doubt, InProgress(hold) | InDoubt(hold, _)) if is_own(&hold) => (
            write_hold(InDoubt(hold, Doubt::Waiting), hold),
            Verdict::Kept,
        ),
        (Ask::Doubt, Absent) => doubted(operation, Attempts::all_forgiven(operation.attempt)),
        // Delayed or repeated: the outcome was determined since, or an operator has freed the id.
        (Ask::Doubt, Cleared { attempts, .. }) if operation.attempt <= attempts.base => {
            (Keep, Verdict::Lost)
        }
        // The fencing token never decreases.
        (Ask::Doubt, Cleared { attempts, .. }) => doubted(
            operation,
            Attempts {
                number: attempts.number.max(operation.attempt),
                ..attempts
            },
        ),

        (Ask::Resolve(Finding::Happened), InDoubt(hold, _)) if is_own(&hold) => done(false),
        (Ask::Resolve(Finding::DidNotHappen), InDoubt(hold, _)) if is_own(&hold) => {
            cleared(hold.attempts, Effect::Nothing)
        }

        (Ask::SendBack { seen, .. } | Ask::Forget { seen }, _) => {
            free(marker, age, operation, *seen)
        }

        _ => (Keep, Verdict::Lost),
    }
}

/// The transitions of a claim.
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
        let own = new_hold(operation, attempts.doubted(), Effect::Unknown);
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
    let other_body = |it: Option<Fingerprint>| matches!((it, terms.fingerprint), (Some(stored), Some(own)) if stored != own);
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
        // An unknown outcome stays unknown if the guarantee is changed.
        Cleared {
            attempts,
            effect: Effect::Unknown,
        } if terms.guarantee == Guarantee::AtMostOnce => grant_in_doubt(attempts),
        Cleared { attempts, effect } => grant(attempts, effect),
        InProgress(hold) if hold.token == operation.token => {
            (Write(marker, hold.horizon), Verdict::Granted(hold.attempts))
        }
        InProgress(hold) if !lease_has_ended(&hold, age) => busy(&hold), // also with another body: the holder may still fail
        InProgress(hold) if other_body(hold.fingerprint) => (Keep, Verdict::Conflict), // the holder may never claim again
        // A crash may have another cause than this message, so that it is counted separately from
        // failed attempts.
        InProgress(hold) if is_at_most_once(hold.guarantee, terms.guarantee) => {
            grant_in_doubt(hold.attempts.crashed().forgiven())
        }
        InProgress(hold) => grant(hold.attempts.crashed().forgiven(), Effect::Unknown),
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

/// The transitions of an operator's operations.
fn free(marker: Marker, age: Age, operation: &Operation, seen: Marker) -> (Change, Verdict) {
    let runs = matches!(marker, Marker::InProgress(hold) if !lease_has_ended(&hold, age));
    match freed(operation) {
        // Already freed, perhaps by this operation before its reply was lost. The expiry restarts in
        // any case.
        Some(freed) if marker == freed || (marker == seen && !runs) => {
            (Change::Write(freed, operation.terms.window), Verdict::Kept)
        }
        _ => (Change::Keep, Verdict::Lost),
    }
}

/// The marker after [`Ask::SendBack`] or [`Ask::Forget`]: the attempt number is kept, and no attempt
/// counts. `None` for any other operation, and for a marker that the operation does not free.
pub fn freed(operation: &Operation) -> Option<Marker> {
    use Marker::*;
    let free = |number: u32, effect| {
        let attempts = Attempts::all_forgiven(number.max(operation.attempt));
        Some(Cleared { attempts, effect })
    };
    match (operation.ask, operation.terms.guarantee) {
        (Ask::SendBack { .. } | Ask::Forget { .. }, Guarantee::Bare) => Some(Absent), // whatever the marker was
        (Ask::Forget { seen: Done(_) }, _) if operation.attempt == 0 => {
            free(UNKNOWN_ATTEMPT, Effect::Nothing)
        }
        (Ask::Forget { seen: Done(_) }, _) => free(0, Effect::Nothing),
        (
            Ask::SendBack {
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
            // Its lease has ended without an outcome, and no claim has taken it over since.
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

/// Whether its lease has ended.
fn lease_has_ended(hold: &Hold, age: Age) -> bool {
    matches!(age, Age::Of(age) if age > hold.lease)
}

/// The bare gate: a claim writes a done marker, any failure deletes it.
fn apply_bare(marker: Marker, operation: &Operation) -> (Change, Verdict) {
    match (operation.ask, marker) {
        (Ask::Claim, Marker::Absent) => (
            Change::Write(Marker::Done(None), operation.terms.window),
            Verdict::Granted(Attempts::new(1)),
        ),
        (Ask::Claim, _) => (Change::Keep, Verdict::Duplicate),
        (Ask::Renew, _) => (Change::Keep, Verdict::Kept),
        (Ask::Complete, _) => (Change::Keep, Verdict::Done { marker_lost: false }),
        // All operations after which the effect did not happen, or may not have.
        _ => (Change::Delete, Verdict::Kept),
    }
}

/// In doubt with a marker that was absent or cleared: no holder reconciles it yet.
fn doubted(operation: &Operation, attempts: Attempts) -> (Change, Verdict) {
    let hold = new_hold(operation, attempts, Effect::Unknown);
    (
        Change::Write(Marker::InDoubt(hold, Doubt::Waiting), hold.horizon),
        Verdict::Kept,
    )
}

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

/// Whether the marker or the claim is at most once. If they differ, the stricter applies.
fn is_at_most_once(record: Guarantee, claimant: Guarantee) -> bool {
    record == Guarantee::AtMostOnce || claimant == Guarantee::AtMostOnce
}

#[cfg(test)]
mod tests;
