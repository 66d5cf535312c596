//! A small world: one id, two consumers, one key in the store, a broker, and a provider that keeps count.

use std::hash::{DefaultHasher, Hash, Hasher};

use oncegate_core::marker::{Ask, Guarantee, Marker, Token, Verdict};
use oncegate_core::road::{Outcome, Stage};

/// What may still go wrong, and how often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Budget {
    /// Consumers that end without a word.
    pub(crate) crashes: u8,
    /// Commands to the store that get no answer, whether they arrive, arrive late, or never.
    pub(crate) losses: u8,
    /// Leases that end while someone still counts on them.
    pub(crate) expiries: u8,
    /// Handlers that say that nothing happened.
    pub(crate) failures: u8,
    /// Handlers that panic, have no end, or say that they do not know.
    pub(crate) unknowns: u8,
    /// Messages that are sent twice, or delivered again while their first delivery is handled.
    pub(crate) copies: u8,
    /// Consumers that are told to stop, or lose their assignment.
    pub(crate) drains: u8,
    /// Markers that the store forgets.
    pub(crate) forgotten: u8,
}

/// Everything there is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) marker: Marker,
    /// Whether the marker's lease is over by the store's clock.
    pub(crate) over: bool,
    /// Deliveries that wait at the broker: how many of their attempts failed.
    pub(crate) queue: Vec<u32>,
    pub(crate) consumers: [Consumer; 2],
    /// Commands whose senders gave them up, and that may still arrive.
    pub(crate) late: Vec<Sent>,
    pub(crate) provider: Provider,
    /// Whether a copy stands in the dead letters or the in-doubt queue.
    pub(crate) dead_letter: bool,
    pub(crate) seen: Seen,
    pub(crate) left: Budget,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Consumer {
    pub(crate) delivery: Option<Flight>,
    pub(crate) draining: bool,
}

/// One delivery on the road.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Flight {
    /// What the broker knows of it, should it come back.
    pub(crate) failures: u32,
    pub(crate) receipt: Receipt,
    pub(crate) stage: Stage,
    pub(crate) token: Token,
    pub(crate) attempt: u32,
    pub(crate) asked: Option<Asked>,
    pub(crate) lease: Lease,
    pub(crate) run: Option<Effect>,
}

/// Whether the broker still takes a settlement for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Receipt {
    Valid,
    /// It was delivered again since, to someone else or to the same.
    Stale,
}

/// A command on its way to the store and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Asked {
    /// It has not been applied yet.
    Sent(Ask),
    /// It was applied; the answer is on its way. Whether a lease that it gives has ended meanwhile.
    Answered(Ask, Verdict, Lease),
}

/// A command that nobody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sent {
    pub(crate) ask: Ask,
    pub(crate) guarantee: Guarantee,
    pub(crate) token: Token,
    pub(crate) attempt: u32,
}

/// A lease as its holder counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lease {
    None,
    Lives,
    Over,
}

/// What a handler has asked of the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Effect {
    /// The request is under way.
    Pending,
    /// It happened.
    Happened,
}

/// The world outside, in which effects happen. It refuses what comes under an attempt below its fence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Provider {
    /// How often it happened; two stands for more.
    pub(crate) effects: u8,
    /// Requests under way whose handlers are gone, by attempt.
    pub(crate) orphans: Vec<u32>,
    pub(crate) fence: u32,
}

/// What must never be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Seen {
    /// The id was done.
    pub(crate) done: bool,
    /// A handler started although the id was done.
    pub(crate) start_after_done: bool,
    /// A handler started although an earlier run had, or may still have, an effect.
    pub(crate) start_on_a_guess: bool,
    /// A handler started with an attempt that an earlier reconcile had fenced off: the attempt went backwards.
    pub(crate) start_below_the_fence: bool,
    /// Two handlers ran at the same time, and each counted on its lease.
    pub(crate) two_at_once: bool,
}

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    Deliver(usize, u32),
    SendTwice,
    DeliverAgain(usize),
    Apply(usize),
    ApplyLate(usize),
    Answer(usize),
    LoseCommand(usize),
    LateCommand(usize),
    LoseAnswer(usize),
    Wake(usize),
    EffectHappens(usize),
    OrphanHappens(usize),
    OrphanDies(usize),
    Return(usize, Outcome),
    FindsOut(usize),
    FindsNothing(usize),
    LeaseEnds,
    LeaseFeared(usize),
    HearsLeaseOver(usize),
    Crash(usize),
    Drain(usize),
    DrainOver(usize),
    Forget,
}

impl World {
    /// One message waits, and nothing has happened.
    pub(crate) fn new(budget: Budget) -> Self {
        Self {
            marker: Marker::Absent,
            over: false,
            queue: vec![0],
            consumers: Default::default(),
            late: Vec::new(),
            provider: Provider::default(),
            dead_letter: false,
            seen: Seen::default(),
            left: budget,
        }
    }

    /// Whether nothing is left to deliver or to wait for.
    pub(crate) fn is_quiet(&self) -> bool {
        self.queue.is_empty() && self.consumers.iter().all(|it| it.delivery.is_none()) && self.provider.orphans.is_empty()
    }

    /// Gives worlds that differ in the order of their consumers alone one form.
    pub(crate) fn forget_names(&mut self) {
        let holder = match &self.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.token,
            _ => Token(0),
        };
        let rank = |it: &Consumer| {
            let mut hasher = DefaultHasher::new();
            let unnamed = it.delivery.as_ref().map(|it| (Flight { token: Token(0), ..it.clone() }, it.token == holder));
            (unnamed, it.draining).hash(&mut hasher);
            (it.delivery.is_none(), hasher.finish())
        };
        if rank(&self.consumers[0]) > rank(&self.consumers[1]) {
            self.consumers.swap(0, 1);
        }
    }

    /// Gives equal worlds one form: tokens by their first appearance, heaps in order.
    pub(crate) fn tidy(&mut self) {
        self.queue.sort_unstable();
        self.provider.orphans.sort_unstable();
        let mut names: Vec<u128> = Vec::with_capacity(4);
        let mut rename = |token: &mut Token| {
            if token.0 == 0 {
                return;
            }
            let place = names.iter().position(|name| *name == token.0).unwrap_or_else(|| {
                names.push(token.0);
                names.len() - 1
            });
            token.0 = place as u128 + 1;
        };
        if let Marker::InProgress(hold) | Marker::InDoubt(hold, _) = &mut self.marker {
            rename(&mut hold.token);
        }
        for consumer in &mut self.consumers {
            if let Some(flight) = &mut consumer.delivery {
                rename(&mut flight.token);
            }
        }
        for sent in &mut self.late {
            rename(&mut sent.token);
        }
        self.late.sort_unstable_by_key(|it| (it.token.0, it.attempt, name(&it.ask)));
    }

    /// A token that nobody has.
    pub(crate) fn new_token(&self) -> Token {
        let held = match &self.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.token.0,
            _ => 0,
        };
        let flights = self.consumers.iter().filter_map(|it| it.delivery.as_ref()).map(|it| it.token.0);
        Token(flights.chain(self.late.iter().map(|it| it.token.0)).fold(held, u128::max) + 1)
    }
}

/// An ask in a word.
pub(crate) fn name(ask: &Ask) -> &'static str {
    use oncegate_core::marker::{Effect, Finding};
    match ask {
        Ask::Claim => "claim",
        Ask::Renew => "renew",
        Ask::Complete => "complete",
        Ask::Clear(Effect::Nothing) => "clear",
        Ask::Clear(Effect::Unknown) => "clear, effect unknown",
        Ask::Reject(_) => "reject",
        Ask::Doubt => "doubt",
        Ask::Resolve(Finding::Happened) => "resolve: it happened",
        Ask::Resolve(Finding::DidNotHappen) => "resolve: it did not happen",
        Ask::Forget { .. } => "forget",
    }
}

/// What the two promise, as the table prints it.
pub(crate) fn mode(guarantees: [Guarantee; 2]) -> &'static str {
    match guarantees {
        [Guarantee::AtMostOnce, Guarantee::AtMostOnce] => "at-most-once",
        [Guarantee::EffectivelyOnce, Guarantee::EffectivelyOnce] => "effectively-once",
        [Guarantee::Bare, Guarantee::Bare] => "bare",
        _ => "one of each",
    }
}
