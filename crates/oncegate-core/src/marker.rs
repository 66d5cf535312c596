//! The store's side of the promise: what one key may become.
//!
//! [`apply`] is the whole of it. The memory store is this function on a map; every other store is held against it by
//! the laws of stores; the model checker explores it. It has no clock: the store says how old the marker is.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::id::Key;

/// What the user chose to hold when nobody knows whether the handler's effect happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Guarantee {
    /// The handler never starts a second time for an id unless it said itself that nothing happened, or `reconcile`
    /// found that nothing happened and nothing still can. What stays unknown goes to the in-doubt queue.
    AtMostOnce,
    /// The handler runs again after a crash or a lost lease; a completed id is never handled again within the window.
    #[default]
    EffectivelyOnce,
    /// `SET processed:<id> 1 EX <window> NX` before the handler, `DEL` after any failure, and nothing more. Loses
    /// messages on a crash, on a duplicate of a message that then fails, and on a lost reply.
    Bare,
}

/// Names one claim. Made anew for each claim, before its first command is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u128);

impl Token {
    /// 128 random bits from the operating system.
    pub fn random() -> Self {
        Tokens::default().token()
    }
}

/// Makes tokens, many from one call to the operating system.
#[derive(Default)]
pub struct Tokens(Vec<Token>);

impl Tokens {
    /// A token that nobody had before.
    pub fn token(&mut self) -> Token {
        if let Some(token) = self.0.pop() {
            return token;
        }
        let mut bits = [0; 16 * 64];
        // Without randomness no claim can be told from another: there is nothing safe to go on with.
        getrandom::fill(&mut bits).expect("the operating system gives random bytes");
        let (tokens, _) = bits.as_chunks::<16>();
        self.0.extend(tokens.iter().map(|bits| Token(u128::from_le_bytes(*bits))));
        self.0.swap_remove(0)
    }
}

impl std::fmt::Debug for Tokens {
    /// A token that is still to be given out is nobody's business.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tokens")
    }
}

/// Tells the same id with another body. Below 10^18, so that a done marker stays an integer to Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// One more than the largest fingerprint.
    pub const LIMIT: u64 = 1_000_000_000_000_000_000;

    /// A fingerprint from a number, reduced below [`Fingerprint::LIMIT`].
    pub const fn new(number: u64) -> Self {
        Self(number % Self::LIMIT)
    }

    /// The fingerprint of a body: the beginning of its SHA-256.
    pub fn of(body: &[u8]) -> Self {
        let digest = Sha256::digest(body);
        Self::new(digest[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What a store remembers under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Marker {
    /// Never seen, cleared for retry, or forgotten.
    Absent,
    /// Free to claim; the attempt is kept because an earlier run may not be over.
    Cleared {
        /// The last attempt that was granted.
        attempt: u32,
    },
    /// Someone holds the permit.
    InProgress(Hold),
    /// Nobody knows whether it happened.
    InDoubt(Hold, Doubt),
    /// At most once only: dead-lettered, not to be run again until redriven.
    Rejected(Option<Fingerprint>),
    /// Handled. Without a fingerprint it matches any body.
    Done(Option<Fingerprint>),
}

/// Who holds a marker, and on which terms. A marker knows its own lease and horizon, so that readers with another
/// configuration judge it by what its writer meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The claim that holds it.
    pub token: Token,
    /// Which attempt this is, from 1. Never goes backwards while an earlier run may not be over.
    pub attempt: u32,
    /// How long after its last write the marker belongs to its holder alone.
    pub lease: Duration,
    /// How long after its last write the marker expires.
    pub horizon: Duration,
    /// What the writer promised.
    pub guarantee: Guarantee,
    /// The body that it stands for.
    pub fingerprint: Option<Fingerprint>,
}

/// Whether someone is finding out what happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// Nobody: free to take over.
    Waiting,
    /// The holder, while its lease lives.
    Reconciling,
}

/// How old a marker is by the store's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Age {
    /// This long since its last write.
    Of(Duration),
    /// It has no expiry, or more than its horizon: it was not written by this protocol alone.
    Unknown,
}

/// One request to a store: atomic on its key, and safe to ask again after a lost reply.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    /// The key that it is about.
    pub key: Key,
    /// What is asked.
    pub ask: Ask,
    /// The claim that asks. "Mine" is this token and this attempt.
    pub token: Token,
    /// The attempt that was granted; 0 in a claim.
    pub attempt: u32,
    /// On which terms.
    pub terms: Terms,
}

/// What an [`Operation`] asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// May I handle this id now?
    Claim,
    /// I still hold it: let the lease begin anew.
    Renew,
    /// It happened.
    Complete,
    /// It failed; free it for another attempt.
    Clear(Effect),
    /// It will never work, or has failed too often: keep it from running until it is redriven.
    Reject(Effect),
    /// Nobody knows whether it happened.
    Doubt,
    /// It is known now.
    Resolve(Finding),
    /// An operator or a redrive frees it, if it still is what was seen.
    Forget {
        /// The marker as the operator saw it.
        seen: Marker,
    },
}

/// What a failed attempt may have left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing happened, and nothing still can.
    Nothing,
    /// Something may have happened, or may still: the next attempt needs a higher number.
    Unknown,
}

/// What `reconcile` or an operator found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// The effect happened.
    Happened,
    /// It did not, and nothing still can.
    DidNotHappen,
}

/// The claimer's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Terms {
    /// What is promised.
    pub guarantee: Guarantee,
    /// How long a claim holds without renewal.
    pub lease: Duration,
    /// How long a done id is remembered.
    pub window: Duration,
    /// The body, where bodies are compared.
    pub fingerprint: Option<Fingerprint>,
}

/// Ten years: an unknown on Friday must not be a first delivery on Monday.
pub const UNRESOLVED_AT_MOST_ONCE: Duration = Duration::from_secs(3650 * 24 * 3600);

impl Terms {
    /// How long an unresolved marker is kept.
    pub fn horizon(&self) -> Duration {
        match self.guarantee {
            Guarantee::AtMostOnce => {
                crate::wrong_version!("unresolved-expires-with-the-window", {
                    return self.window;
                });
                UNRESOLVED_AT_MOST_ONCE
            }
            Guarantee::EffectivelyOnce | Guarantee::Bare => self.window,
        }
    }
}

/// A store's answer to one [`Operation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The claim holds; this is the attempt.
    Granted {
        /// From 1.
        attempt: u32,
    },
    /// Nobody knows whether it happened, and the asker is the one to find out.
    InDoubt {
        /// From 1.
        attempt: u32,
    },
    /// Someone else holds it.
    Busy {
        /// How long until that lease is over.
        remaining: Duration,
    },
    /// It was handled before.
    Duplicate,
    /// It was dead-lettered before, and is not to be run.
    Rejected,
    /// The same id was used for another body.
    Conflict,
    /// Done as asked: renewed, cleared, rejected, doubted, resolved or forgotten.
    Kept,
    /// It is done now.
    Done {
        /// The marker had gone in the meantime: the store forgot, or the window was too short.
        marker_lost: bool,
    },
    /// The marker is not the asker's any more. Drop the handler, do not accept, look again.
    Lost,
}

/// What a store has to do to a key. Every write starts the expiry anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// Nothing: the marker and its expiry stay as they are.
    Keep,
    /// Write this marker, to expire after this long.
    Write(Marker, Duration),
    /// Delete the key.
    Delete,
}

/// What one key becomes, and what the asker is told.
pub fn apply(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let Operation { ask, terms, .. } = operation;
    if terms.guarantee == Guarantee::Bare {
        return apply_bare(marker, operation);
    }
    let mine = |hold: &Hold| hold.token == operation.token && hold.attempt == operation.attempt;
    let done = |marker_lost| (Write(Done(terms.fingerprint), terms.window), Verdict::Done { marker_lost });
    let cleared = |attempt| (Write(Cleared { attempt }, terms.window), Verdict::Kept);
    let held = |marker, hold: Hold| Write(marker, hold.horizon);
    crate::wrong_version!("clear-without-comparing", {
        if let (Ask::Clear(_), InProgress(_)) = (ask, marker) {
            return (Delete, Verdict::Kept);
        }
    });
    crate::wrong_version!("resolve-compares-nothing", {
        if let (Ask::Resolve(Finding::DidNotHappen), InProgress(hold) | InDoubt(hold, _)) = (ask, marker) {
            return cleared(hold.attempt);
        }
    });
    crate::wrong_version!("complete-before-the-handler", {
        if let (Ask::Claim, Absent) = (ask, marker) {
            return (Write(Done(None), terms.window), Verdict::Granted { attempt: 1 });
        }
    });
    match (ask, marker) {
        (Ask::Claim, _) => claim(marker, age, operation),

        (Ask::Renew, InProgress(hold) | InDoubt(hold, _)) if mine(&hold) => (held(marker, hold), Verdict::Kept),

        (Ask::Complete, InProgress(hold)) if mine(&hold) => done(false),
        (Ask::Complete, InDoubt(..)) => done(false), // whoever's: only a holder completes, and knowing beats doubting
        (Ask::Complete, Done(_)) => (Keep, Verdict::Done { marker_lost: false }),
        (Ask::Complete, Absent | Cleared { .. }) => done(true),

        (Ask::Clear(effect), InProgress(hold)) if mine(&hold) => match (effect, terms.guarantee) {
            (Effect::Nothing, _) if hold.attempt == 1 => (Delete, Verdict::Kept),
            (Effect::Unknown, Guarantee::AtMostOnce) => (Keep, Verdict::Lost), // never: what is unknown is doubted
            _ => cleared(hold.attempt),
        },
        (Ask::Clear(_), Absent | Cleared { .. }) => (Keep, Verdict::Kept),

        (Ask::Reject(effect), InProgress(hold)) if mine(&hold) => match (effect, terms.guarantee) {
            (_, Guarantee::AtMostOnce) => (Write(Rejected(hold.fingerprint), terms.window), Verdict::Kept),
            (Effect::Nothing, _) if hold.attempt == 1 => (Delete, Verdict::Kept),
            _ => cleared(hold.attempt),
        },
        (Ask::Reject(_), Absent | Cleared { .. }) if terms.guarantee != Guarantee::AtMostOnce => (Keep, Verdict::Kept),

        (Ask::Doubt, InProgress(hold) | InDoubt(hold, _)) if mine(&hold) => (held(InDoubt(hold, Doubt::Waiting), hold), Verdict::Kept),
        (Ask::Doubt, Absent) => doubted(operation, operation.attempt),
        (Ask::Doubt, Cleared { attempt }) => doubted(operation, attempt.max(operation.attempt)), // the fence never steps back

        (Ask::Resolve(Finding::Happened), InDoubt(hold, _)) if mine(&hold) => done(false),
        (Ask::Resolve(Finding::DidNotHappen), InDoubt(hold, _)) if mine(&hold) => cleared(hold.attempt),

        (Ask::Forget { seen }, Rejected(_) | Done(_) | InDoubt(..)) if *seen == marker => (Delete, Verdict::Kept),

        _ => (Keep, Verdict::Lost),
    }
}

/// The rows of a claim.
fn claim(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let terms = &operation.terms;
    let grant = |attempt| {
        let hold = own_hold(operation, attempt);
        (Write(InProgress(hold), hold.horizon), Verdict::Granted { attempt })
    };
    let take_doubt = |attempt| {
        let hold = Hold { guarantee: Guarantee::AtMostOnce, horizon: UNRESOLVED_AT_MOST_ONCE, ..own_hold(operation, attempt) };
        (Write(InDoubt(hold, Doubt::Reconciling), hold.horizon), Verdict::InDoubt { attempt })
    };
    let other_body = |it: Option<Fingerprint>| matches!((it, terms.fingerprint), (Some(theirs), Some(mine)) if theirs != mine);
    let busy = |hold: &Hold| match age {
        Age::Of(age) => (Keep, Verdict::Busy { remaining: hold.lease.saturating_sub(age) }),
        Age::Unknown => (Write(marker, hold.horizon), Verdict::Busy { remaining: hold.lease }),
    };
    let over = |hold: &Hold| matches!(age, Age::Of(age) if age > hold.lease);
    match marker {
        Absent => grant(1),
        Cleared { attempt } => grant(attempt.saturating_add(1)),
        InProgress(hold) if hold.token == operation.token => (Write(marker, hold.horizon), Verdict::Granted { attempt: hold.attempt }),
        InProgress(hold) if other_body(hold.fingerprint) => busy(&hold), // the first may yet fail
        InProgress(hold) if !over(&hold) => busy(&hold),
        InProgress(hold) if strict(hold.guarantee, terms.guarantee) => take_doubt(hold.attempt.saturating_add(1)),
        InProgress(hold) => grant(hold.attempt.saturating_add(1)),
        InDoubt(hold, _) if hold.token == operation.token => (Write(marker, hold.horizon), Verdict::InDoubt { attempt: hold.attempt }),
        InDoubt(hold, _) if other_body(hold.fingerprint) => (Keep, Verdict::Conflict),
        InDoubt(hold, Doubt::Reconciling) if !over(&hold) => busy(&hold),
        InDoubt(hold, _) => take_doubt(hold.attempt.saturating_add(1)),
        Rejected(it) | Done(it) if other_body(it) => (Keep, Verdict::Conflict),
        Rejected(_) => (Keep, Verdict::Rejected),
        Done(_) => (Keep, Verdict::Duplicate),
    }
}

/// The literal gate: a claim writes done, any failure deletes.
fn apply_bare(marker: Marker, operation: &Operation) -> (Change, Verdict) {
    match (operation.ask, marker) {
        (Ask::Claim, Marker::Absent) => (Change::Write(Marker::Done(None), operation.terms.window), Verdict::Granted { attempt: 1 }),
        (Ask::Claim, _) => (Change::Keep, Verdict::Duplicate),
        (Ask::Renew, _) => (Change::Keep, Verdict::Kept),
        (Ask::Complete, _) => (Change::Keep, Verdict::Done { marker_lost: false }),
        (Ask::Clear(_) | Ask::Reject(_) | Ask::Doubt | Ask::Resolve(_) | Ask::Forget { .. }, _) => (Change::Delete, Verdict::Kept),
    }
}

/// In doubt without having been in progress: nobody finds out yet.
fn doubted(operation: &Operation, attempt: u32) -> (Change, Verdict) {
    let hold = own_hold(operation, attempt);
    (Change::Write(Marker::InDoubt(hold, Doubt::Waiting), hold.horizon), Verdict::Kept)
}

fn own_hold(operation: &Operation, attempt: u32) -> Hold {
    let Terms { guarantee, lease, fingerprint, .. } = operation.terms;
    Hold { token: operation.token, attempt, lease, horizon: operation.terms.horizon(), guarantee, fingerprint }
}

/// Where the record's guarantee and the claimer's differ, the stricter decides.
fn strict(record: Guarantee, claimer: Guarantee) -> bool {
    record == Guarantee::AtMostOnce || claimer == Guarantee::AtMostOnce
}

#[cfg(test)]
mod tests;
