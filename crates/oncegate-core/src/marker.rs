//! The store's side of the promise: what one key may become.
//!
//! [`apply`] is the whole of it. The memory store is this function on a map; every other store is
//! held against it by the laws of stores; the model checker explores it. It has no clock: the store
//! says how old the marker is.

use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::id::Key;

/// What follows when it is unknown whether the handler's effect happened, as the user chose.
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
    /// `SET processed:<id> 1 EX <window> NX` before the handler, `DEL` after any failure, and
    /// nothing more. Loses messages on a crash, on a duplicate of a message that then fails, and on
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

/// Generates tokens, many with one call to the operating system.
#[derive(Default)]
pub struct Tokens(Vec<Token>);

impl Tokens {
    /// A new, unique token.
    pub fn token(&mut self) -> Token {
        if let Some(token) = self.0.pop() {
            return token;
        }
        let mut bits = [0; 16 * 64];
        // Without randomness no claim can be told from another: there is nothing safe to go on
        // with.
        getrandom::fill(&mut bits).expect("the operating system gives random bytes");
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

/// Tells the same id with another body. Below 10^18, so that a done marker stays an integer to
/// Redis.
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
    /// Never seen, cleared for retry, or forgotten.
    Absent,
    /// Free to claim; the attempts are kept because an earlier run may not be over.
    Cleared {
        /// Up to the last that was granted.
        attempts: Attempts,
        /// What they may have left behind. Claimed at most once, [`Effect::Unknown`] is in doubt.
        effect: Effect,
    },
    /// A claim is held.
    InProgress(Hold),
    /// Nobody knows whether it happened.
    InDoubt(Hold, Doubt),
    /// At most once only: dead-lettered, not to be run again until it is sent back.
    Rejected {
        /// The number of the last attempt.
        attempt: u32,
        /// The body that was rejected.
        fingerprint: Option<Fingerprint>,
    },
    /// Handled. Without a fingerprint, any body matches.
    Done(Option<Fingerprint>),
}

/// The attempts of an id: the number of the last one, how many of them the budget does not count,
/// and how many ended in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempts {
    /// The number of the last attempt, from 1: the fencing token that a handler passes to its sink.
    /// Later attempts have higher numbers, also after a doubt and after an operator has freed the
    /// id.
    pub number: u32,
    /// How many attempts the budget does not count: a doubt, a crash and a grant that was withdrawn
    /// add one each, and sending the id back excludes all so far.
    pub base: u32,
    /// How many holders let their lease end without an outcome since the id was last sent back:
    /// their process crashed, or lost the store.
    pub crashes: u32,
}

impl Attempts {
    /// Up to the attempt with this number, all of which count.
    pub const fn new(number: u32) -> Self {
        Self {
            number,
            base: 0,
            crashes: 0,
        }
    }

    /// Up to the attempt with this number, none of which counts: the whole budget is left.
    pub const fn all_forgiven(number: u32) -> Self {
        Self {
            number,
            base: number,
            crashes: 0,
        }
    }

    /// How many attempts count towards the budget.
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

    /// A higher fence for whoever finds out what happened. It is no run, so it spends nothing of
    /// the budget.
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

    /// The last attempt spends nothing of the budget.
    const fn forgiven(self) -> Self {
        Self {
            base: self.base.saturating_add(1),
            ..self
        }
    }
}

/// Who holds a marker, and on which terms. A marker knows its own lease and horizon, so that
/// readers with another configuration judge it by what its writer meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The claim that holds it.
    pub token: Token,
    /// Which attempt this is, and how many count.
    pub attempts: Attempts,
    /// What the attempts before this one may have left behind.
    pub earlier: Effect,
    /// How long after its last write the marker belongs to its holder alone.
    pub lease: Duration,
    /// How long after its last write the marker expires.
    pub horizon: Duration,
    /// What the writer promised.
    pub guarantee: Guarantee,
    /// The body that it stands for.
    pub fingerprint: Option<Fingerprint>,
}

/// Whether a holder reconciles a doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// Nobody does: it may be taken over.
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
    /// The number of the attempt that was granted; 0 in a claim. In [`Ask::SendBack`] and
    /// [`Ask::Forget`] the highest number of an attempt that the operator knows of, 0 if none:
    /// every later attempt has a higher one.
    pub attempt: u32,
    /// On which terms.
    pub terms: Terms,
}

/// What an [`Operation`] asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask {
    /// May I handle this id now?
    Claim,
    /// Renews the lease.
    Renew,
    /// It happened.
    Complete,
    /// It failed; free it for another attempt.
    Clear(Effect),
    /// The handler was not started: free it, as if the attempt had not been granted.
    Withdraw,
    /// It will never work, or has failed too often: keep it from running until it is sent back.
    Reject(Effect),
    /// Nobody knows whether it happened.
    Doubt,
    /// It is known now.
    Resolve(Finding),
    /// An operator frees what was rejected, what failed too often, or what is in doubt: a
    /// compare-and-set, applied if the marker is still the one that was seen. The number of the
    /// last attempt is kept and the whole budget is left. The next claim is granted; in at most
    /// once it is in doubt if an earlier effect is unknown.
    SendBack {
        /// The marker as the operator read it.
        seen: Marker,
        /// [`Effect::Nothing`] says, on the operator's word, that nothing happened and nothing
        /// still can. Otherwise an unknown effect stays unknown, and a marker in doubt is not
        /// freed.
        effect: Effect,
    },
    /// An operator frees what is done, to be handled again: a compare-and-set, applied if the
    /// marker is still the one that was seen.
    Forget {
        /// The marker as the operator read it.
        seen: Marker,
    },
}

/// The number that is assumed of the last attempt where it is not recorded, as after
/// [`Ask::Forget`]: a done marker does not hold it. No budget of attempts reaches it.
pub const UNKNOWN_ATTEMPT: u32 = 1_000_000;

/// What one or more attempts may have left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing happened, and nothing still can.
    Nothing,
    /// Something may have happened, or may still: the next attempt needs a higher number.
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
    Granted(Attempts),
    /// It is unknown whether it happened, and the claimant has to reconcile it. This is the
    /// attempt.
    InDoubt(Attempts),
    /// Another claim holds it.
    Busy {
        /// How long until that lease is over.
        remaining: Duration,
    },
    /// It was handled before.
    Duplicate,
    /// It was dead-lettered before, and is not to be run.
    Rejected {
        /// The number of its last attempt, which its dead letters carry as the fencing token.
        attempt: u32,
    },
    /// The same id was used for another body.
    Conflict,
    /// Done as asked: renewed, cleared, rejected, doubted, resolved, sent back or forgotten.
    Kept,
    /// It is done now.
    Done {
        /// The marker had gone in the meantime: the store forgot, or the window was too short.
        marker_lost: bool,
    },
    /// The marker is not the asker's any more. Drop the handler, do not accept, look again.
    Lost,
}

/// What a store has to do with a key. Every write restarts the expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// Nothing: the marker and its expiry stay as they are.
    Keep,
    /// Write this marker, to expire after this long.
    Write(Marker, Duration),
    /// Delete the key.
    Delete,
}

/// What one key becomes, and the answer to the asker.
pub fn apply(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let Operation { ask, terms, .. } = operation;
    if terms.guarantee == Guarantee::Bare {
        return apply_bare(marker, operation);
    }
    let mine =
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
    let held = |marker, hold: Hold| Write(marker, hold.horizon);
    // The first attempt, and nothing to remember once it did nothing.
    let nothing_before = |hold: &Hold| hold.attempts.number == 1 && hold.earlier == Effect::Nothing;
    crate::wrong_version!("clear-without-comparing", {
        if let (Ask::Clear(_), InProgress(_)) = (ask, marker) {
            return (Delete, Verdict::Kept);
        }
    });
    crate::wrong_version!("resolve-compares-nothing", {
        if let (Ask::Resolve(Finding::DidNotHappen), InProgress(hold) | InDoubt(hold, _)) =
            (ask, marker)
        {
            return cleared(hold.attempts, Effect::Nothing);
        }
    });
    crate::wrong_version!("complete-before-the-handler", {
        if let (Ask::Claim, Absent) = (ask, marker) {
            return (
                Write(Done(None), terms.window),
                Verdict::Granted(Attempts::new(1)),
            );
        }
    });
    match (ask, marker) {
        (Ask::Claim, _) => claim(marker, age, operation),

        (Ask::Renew, InProgress(hold) | InDoubt(hold, _)) if mine(&hold) => {
            (held(marker, hold), Verdict::Kept)
        }

        (Ask::Complete, InProgress(hold)) if mine(&hold) => done(false),
        (Ask::Complete, InDoubt(..)) => done(false), // whoever's: only a holder completes, and knowing beats doubting
        (Ask::Complete, Done(_)) => (Keep, Verdict::Done { marker_lost: false }),
        (Ask::Complete, Absent | Cleared { .. }) => done(true),

        (Ask::Clear(effect), InProgress(hold)) if mine(&hold) => match (effect, terms.guarantee) {
            (Effect::Nothing, _) if nothing_before(&hold) => (Delete, Verdict::Kept),
            (Effect::Unknown, Guarantee::AtMostOnce) => (Keep, Verdict::Lost), // never: what is unknown is doubted
            _ => cleared(hold.attempts, hold.earlier.and(*effect)),
        },
        (Ask::Withdraw, InProgress(hold)) if mine(&hold) && nothing_before(&hold) => {
            (Delete, Verdict::Kept)
        }
        (Ask::Withdraw, InProgress(hold)) if mine(&hold) => {
            cleared(hold.attempts.forgiven(), hold.earlier)
        }
        (Ask::Clear(_) | Ask::Withdraw, Absent | Cleared { .. }) => (Keep, Verdict::Kept),

        (Ask::Reject(effect), InProgress(hold)) if mine(&hold) => match (effect, terms.guarantee) {
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

        (Ask::Doubt, InProgress(hold) | InDoubt(hold, _)) if mine(&hold) => {
            (held(InDoubt(hold, Doubt::Waiting), hold), Verdict::Kept)
        }
        (Ask::Doubt, Absent) => doubted(operation, Attempts::all_forgiven(operation.attempt)),
        // Asked late, or again: somebody has found out since, or an operator has freed the id.
        (Ask::Doubt, Cleared { attempts, .. }) if operation.attempt <= attempts.base => {
            (Keep, Verdict::Lost)
        }
        // The fence never steps back.
        (Ask::Doubt, Cleared { attempts, .. }) => doubted(
            operation,
            Attempts {
                number: attempts.number.max(operation.attempt),
                ..attempts
            },
        ),

        (Ask::Resolve(Finding::Happened), InDoubt(hold, _)) if mine(&hold) => done(false),
        (Ask::Resolve(Finding::DidNotHappen), InDoubt(hold, _)) if mine(&hold) => {
            cleared(hold.attempts, Effect::Nothing)
        }

        (Ask::SendBack { seen, .. } | Ask::Forget { seen }, _) => {
            free(marker, age, operation, *seen)
        }

        _ => (Keep, Verdict::Lost),
    }
}

/// The rows of a claim.
fn claim(marker: Marker, age: Age, operation: &Operation) -> (Change, Verdict) {
    use {Change::*, Marker::*};
    let terms = &operation.terms;
    let grant = |attempts: Attempts, earlier| {
        let hold = own_hold(operation, attempts.granted(), earlier);
        (
            Write(InProgress(hold), hold.horizon),
            Verdict::Granted(hold.attempts),
        )
    };
    let take_doubt = |attempts: Attempts| {
        let own = own_hold(operation, attempts.doubted(), Effect::Unknown);
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
    let other_body = |it: Option<Fingerprint>| matches!((it, terms.fingerprint), (Some(theirs), Some(mine)) if theirs != mine);
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
        // Unknown outlives the guarantee under which it arose.
        Cleared {
            attempts,
            effect: Effect::Unknown,
        } if terms.guarantee == Guarantee::AtMostOnce => take_doubt(attempts),
        Cleared { attempts, effect } => grant(attempts, effect),
        InProgress(hold) if hold.token == operation.token => {
            (Write(marker, hold.horizon), Verdict::Granted(hold.attempts))
        }
        InProgress(hold) if !over(&hold, age) => busy(&hold), // with another body, too: the first may yet fail
        InProgress(hold) if other_body(hold.fingerprint) => (Keep, Verdict::Conflict), // the first may never come back
        // A crash is weak evidence against a message: it is counted apart from the attempts that
        // failed.
        InProgress(hold) if strict(hold.guarantee, terms.guarantee) => {
            take_doubt(hold.attempts.crashed().forgiven())
        }
        InProgress(hold) => grant(hold.attempts.crashed().forgiven(), Effect::Unknown),
        InDoubt(hold, _) if hold.token == operation.token => {
            (Write(marker, hold.horizon), Verdict::InDoubt(hold.attempts))
        }
        InDoubt(hold, _) if other_body(hold.fingerprint) => (Keep, Verdict::Conflict),
        InDoubt(hold, Doubt::Reconciling) if !over(&hold, age) => busy(&hold),
        InDoubt(hold, Doubt::Reconciling) => take_doubt(hold.attempts.crashed()),
        InDoubt(hold, Doubt::Waiting) => take_doubt(hold.attempts),
        Rejected { fingerprint, .. } | Done(fingerprint) if other_body(fingerprint) => {
            (Keep, Verdict::Conflict)
        }
        Rejected { attempt, .. } => (Keep, Verdict::Rejected { attempt }),
        Done(_) => (Keep, Verdict::Duplicate),
    }
}

/// The rows of an operator's operations.
fn free(marker: Marker, age: Age, operation: &Operation, seen: Marker) -> (Change, Verdict) {
    let runs = matches!(marker, Marker::InProgress(hold) if !over(&hold, age));
    match freed(operation) {
        // Freed already, perhaps by this operation before its reply was lost; the expiry begins
        // anew all the same.
        Some(freed) if marker == freed || (marker == seen && !runs) => {
            (Change::Write(freed, operation.terms.window), Verdict::Kept)
        }
        _ => (Change::Keep, Verdict::Lost),
    }
}

/// What [`Ask::SendBack`] or [`Ask::Forget`] makes of the marker that was seen: the fence is kept,
/// nothing of the budget is spent. `None` of any other operation, and where the marker is none that
/// it frees.
pub fn freed(operation: &Operation) -> Option<Marker> {
    use Marker::*;
    let free = |number: u32, effect| {
        let attempts = Attempts::all_forgiven(number.max(operation.attempt));
        Some(Cleared { attempts, effect })
    };
    match (operation.ask, operation.terms.guarantee) {
        (Ask::SendBack { .. } | Ask::Forget { .. }, Guarantee::Bare) => Some(Absent), // whatever was there
        (Ask::Forget { seen: Done(_) }, _) if operation.attempt == 0 => {
            free(UNKNOWN_ATTEMPT, Effect::Nothing)
        }
        (Ask::Forget { seen: Done(_) }, _) => free(0, Effect::Nothing),
        (Ask::SendBack { seen, effect: word }, claimer) => match seen {
            Absent => free(0, word),
            Rejected { attempt, .. } => free(attempt, Effect::Nothing),
            Cleared {
                attempts,
                effect: Effect::Unknown,
            } => free(attempts.number, word),
            Cleared {
                attempts,
                effect: Effect::Nothing,
            } => free(attempts.number, Effect::Nothing),
            InDoubt(hold, _) if word == Effect::Nothing => free(hold.attempts.number, word),
            // Its lease is over, and nobody has noticed yet that its holder is gone.
            InProgress(hold) if word == Effect::Nothing || !strict(hold.guarantee, claimer) => {
                free(hold.attempts.number, word)
            }
            InDoubt(..) | InProgress(_) | Done(_) => None,
        },
        _ => None,
    }
}

/// Whether its lease has ended.
fn over(hold: &Hold, age: Age) -> bool {
    matches!(age, Age::Of(age) if age > hold.lease)
}

/// The literal gate: a claim writes done, any failure deletes.
fn apply_bare(marker: Marker, operation: &Operation) -> (Change, Verdict) {
    match (operation.ask, marker) {
        (Ask::Claim, Marker::Absent) => (
            Change::Write(Marker::Done(None), operation.terms.window),
            Verdict::Granted(Attempts::new(1)),
        ),
        (Ask::Claim, _) => (Change::Keep, Verdict::Duplicate),
        (Ask::Renew, _) => (Change::Keep, Verdict::Kept),
        (Ask::Complete, _) => (Change::Keep, Verdict::Done { marker_lost: false }),
        // Whatever says that it did not happen.
        _ => (Change::Delete, Verdict::Kept),
    }
}

/// In doubt without having been in progress: no holder reconciles it yet.
fn doubted(operation: &Operation, attempts: Attempts) -> (Change, Verdict) {
    let hold = own_hold(operation, attempts, Effect::Unknown);
    (
        Change::Write(Marker::InDoubt(hold, Doubt::Waiting), hold.horizon),
        Verdict::Kept,
    )
}

fn own_hold(operation: &Operation, attempts: Attempts, earlier: Effect) -> Hold {
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

/// Where the record's guarantee and the claimer's differ, the stricter decides.
fn strict(record: Guarantee, claimer: Guarantee) -> bool {
    record == Guarantee::AtMostOnce || claimer == Guarantee::AtMostOnce
}

#[cfg(test)]
mod tests;
