//! Everything there is in the small world, and what may still go wrong in it.

use std::hash::{DefaultHasher, Hash, Hasher};

use oncegate_core::driver::LifecycleDriver;
use oncegate_core::lifecycle::Outcome;
use oncegate_core::marker::{
    Ask, Doubt, Effect as Left, Finding, Guarantee, Marker, Token, Verdict,
};

/// What may still go wrong, and how often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Budget {
    /// Consumers that end without a word.
    pub crashes: u8,
    /// Commands to the store that get no answer, whether they arrive, arrive late, or never.
    pub losses: u8,
    /// Leases that end while someone still counts on them.
    pub expiries: u8,
    /// Leases that are renewed.
    pub renewals: u8,
    /// Handlers that say that nothing happened.
    pub failures: u8,
    /// Handlers that panic, have no end, or say that they do not know.
    pub unknowns: u8,
    /// Messages that are sent twice, or delivered again while their first delivery is handled.
    pub copies: u8,
    /// Messages with the same id and another body.
    pub others: u8,
    /// Consumers that are told to stop, or lose their assignment.
    pub drains: u8,
    /// Grants that are withdrawn because another message runs alone. Where this is not 0, a handler
    /// waits for its place.
    pub yields: u8,
    /// Markers that the store forgets.
    pub forgotten: u8,
    /// Claims that the store forgets, so that the marker is what it was before: a failover to a
    /// replica that lagged behind.
    pub lost_claims: u8,
    /// What a person does about a message that was set aside, or about an id that is done.
    pub people: u8,
}

impl Budget {
    /// Nothing goes wrong.
    pub const NONE: Self = Self {
        crashes: 0,
        losses: 0,
        expiries: 0,
        renewals: 0,
        failures: 0,
        unknowns: 0,
        copies: 0,
        others: 0,
        drains: 0,
        yields: 0,
        forgotten: 0,
        lost_claims: 0,
        people: 0,
    };
}

/// Everything there is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub(crate) marker: Marker,
    /// Whether the marker's lease is over by the store's clock.
    pub(crate) over: bool,
    /// What waits at the broker.
    pub(crate) queue: Vec<Message>,
    pub(crate) consumers: [Consumer; 2],
    /// Commands whose senders gave them up, and that may still arrive.
    pub(crate) late: Vec<Sent>,
    pub(crate) provider: Provider,
    /// What was set aside: one for each kind, and the one that a person deals with.
    pub(crate) letters: Vec<Letter>,
    pub(crate) person: Person,
    pub(crate) seen: Seen,
    pub(crate) left: Budget,
}

/// A message at the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// Two messages with the same id may have different bodies, 0 and 1.
    pub(crate) body: usize,
    /// How many of its attempts failed.
    pub(crate) failures: u32,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Consumer {
    pub(crate) delivery: Option<ModelDelivery>,
    /// A completion of what passed without the gate, with the attempt once its claim was granted.
    pub(crate) late_completion: Option<(Token, Option<u32>)>,
}

/// One delivery on its way through a consumer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelDelivery {
    /// As the broker knows it, should it come back.
    pub(crate) message: Message,
    pub(crate) receipt: Receipt,
    pub(crate) dispatch: LifecycleDriver,
    pub(crate) asked: Option<ClaimReply>,
    pub(crate) lease: Lease,
    pub(crate) run: Option<Effect>,
}

impl ModelDelivery {
    /// The fence that its handler hands to the provider.
    pub(crate) fn attempt(&self) -> u32 {
        self.dispatch.attempts.number.max(1)
    }
}

/// Whether the broker still takes a settlement for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Receipt {
    /// It does.
    Valid,
    /// It was delivered again since, to someone else or to the same.
    Stale,
}

/// A command on its way to the store and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClaimReply {
    /// It has not been applied yet.
    Sent(Ask),
    /// It was applied; the answer is on its way. Whether a lease that it gives has ended meanwhile.
    Answered(Ask, Verdict, Lease),
}

/// A command that nobody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sent {
    pub(crate) ask: Ask,
    pub(crate) guarantee: Guarantee,
    pub(crate) body: usize,
    pub(crate) token: Token,
    pub(crate) attempt: u32,
}

/// A lease as its holder counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lease {
    /// There is none.
    None,
    /// Its holder counts on it.
    Lives,
    /// It may have ended.
    Over,
}

/// What a handler has asked of the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// The request is under way.
    Pending,
    /// It happened.
    Happened,
}

/// The world outside, in which effects happen. It refuses what comes under an attempt that was
/// voided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Provider {
    /// How often it happened, for each body; two stands for more.
    pub(crate) effects: [u8; 2],
    /// Requests under way whose handlers are gone: attempt and body.
    pub(crate) orphans: Vec<(u32, usize)>,
    /// Attempts up to and including this one are refused.
    pub(crate) voided: u32,
}

/// A message that was set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Letter {
    pub(crate) body: usize,
    pub(crate) shelf: Shelf,
    /// The last attempt, as it was written beside it.
    pub(crate) fence: u32,
}

/// Where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Shelf {
    /// Dead letters.
    DeadLetters,
    /// The in-doubt queue.
    InDoubt,
}

/// What a person is about to do. Between two steps anything may happen, and a tool that is cut off
/// does no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Person {
    /// Nothing.
    #[default]
    Idle,
    /// To ask the store for this, of the marker as it was seen, and then to publish a copy or to
    /// take the letter out.
    Decided(Letter, Sent, Then),
    /// To publish a copy of it.
    Publishes(Letter),
    /// To take it out.
    TakesOut(Letter),
}

impl Person {
    /// The letter that is dealt with.
    fn letter(self) -> Option<Letter> {
        match self {
            Self::Idle => None,
            Self::Decided(letter, ..) | Self::Publishes(letter) | Self::TakesOut(letter) => {
                Some(letter)
            }
        }
    }
}

/// What follows once the store has done as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Then {
    /// A copy is published.
    Publish,
    /// The letter is taken out.
    TakeOut,
}

/// What was seen, and what must never be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seen {
    /// The id was done.
    pub(crate) done: bool,
    /// A message with another body was sent.
    pub(crate) other_body: bool,
    /// A person sent it back, and no handler was started since.
    pub(crate) owed: bool,
    /// A person freed it as known to have done nothing, and no claim was granted since.
    pub(crate) known: bool,
    /// The highest attempt that a handler was started with. Counted where a person acts.
    pub(crate) highest: u32,
    /// What that was when a person last freed the id.
    pub(crate) floor: u32,
    /// How many grants there were. Counted where a person acts, or where there are copies.
    pub(crate) grants: u32,
    /// How many of them spend nothing of the budget: they were withdrawn or taken over.
    pub(crate) spared: u32,
    /// How many had been spent when a person last freed the id.
    pub(crate) forgiven: u32,
    /// How many holders crashed since a person last freed the id. Counted where a person acts.
    pub(crate) crashes: u32,
    /// A handler started although the id was done.
    pub(crate) start_after_done: bool,
    /// A handler started at most once although an earlier run had, or may still have, an effect.
    pub(crate) start_on_a_guess: bool,
    /// A handler started with an attempt that was voided, or that was used before a person freed
    /// the id.
    pub(crate) start_below_the_fence: bool,
    /// A handler started before the store was asked to complete a copy that had passed without the
    /// gate.
    pub(crate) start_before_late: bool,
    /// Two handlers ran at the same time, and each counted on its lease.
    pub(crate) two_at_once: bool,
    /// A claim was told to wait for a lease that is over.
    pub(crate) waits_for_nobody: bool,
    /// A message went to the in-doubt queue while its own doubt says that somebody reconciles.
    pub(crate) doubt_kept: bool,
    /// What a person sent back was rejected, or is in doubt once more, without a run.
    pub(crate) not_run: bool,
    /// Attempts were spent that were never granted.
    pub(crate) spent_too_soon: bool,
    /// A consumer stopped without the store's answer. Noted where claims left behind are looked
    /// for.
    pub(crate) stopped_now: bool,
}

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is told in words by the story")]
pub enum Action {
    Deliver(usize, Message),
    SendTwice,
    SendOther,
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
    Renew(usize),
    LateRenewal(usize),
    Crash(usize),
    Drain(usize),
    Yield(usize),
    DrainOver(usize),
    StopNow(usize),
    CompleteLate(usize),
    Forget,
    LoseClaim,
    Decides(usize),
    Asks,
    AsksLate,
    Publishes,
    TakesOut,
    Stops,
    ForgetsWhatIsDone,
}

impl World {
    /// One message waits, and nothing has happened.
    pub(crate) fn new(budget: Budget) -> Self {
        Self {
            marker: Marker::Absent,
            over: false,
            queue: vec![Message {
                body: 0,
                failures: 0,
            }],
            consumers: Default::default(),
            late: Vec::new(),
            provider: Provider::default(),
            letters: Vec::new(),
            person: Person::Idle,
            seen: Seen::default(),
            left: budget,
        }
    }

    /// Whether nothing is left to deliver or to wait for.
    pub(crate) fn is_quiet(&self) -> bool {
        self.queue.is_empty()
            && self
                .consumers
                .iter()
                .all(|it| it.delivery.is_none() && it.late_completion.is_none())
            && self.provider.orphans.is_empty()
            && self.late.is_empty()
            && self.person == Person::Idle
    }

    /// Whether the marker says that somebody holds it, and nobody does: whoever claims it next, once
    /// its lease is over, counts a crash.
    pub(crate) fn is_left_behind(&self) -> bool {
        let token = match self.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, Doubt::Reconciling) => hold.token,
            _ => return false,
        };
        let mut held = self.consumers.iter().filter_map(|it| it.delivery.as_ref());
        !held.any(|flight| flight.dispatch.token == token)
    }

    /// Whether the provider still takes a request.
    pub(crate) fn is_taken(&self, attempt: u32) -> bool {
        attempt > self.provider.voided
    }

    /// The provider refuses what comes under these attempts, whether it is under way or not.
    pub(crate) fn void(&mut self, up_to_and_with: u32) {
        let voided = self.provider.voided.max(up_to_and_with);
        self.provider.voided = voided;
        self.provider
            .orphans
            .retain(|(attempt, _)| *attempt > voided);
    }

    pub(crate) fn effects(&self) -> u8 {
        self.provider.effects.iter().sum()
    }

    pub(crate) fn happened(&mut self, body: usize) {
        self.provider.effects[body] = (self.provider.effects[body] + 1).min(2);
    }

    /// Sets a message aside.
    pub(crate) fn add_letter(&mut self, letter: Letter) {
        let handled = self
            .person
            .letter()
            .and_then(|handled| self.letters.iter().position(|it| *it == handled));
        let mut others = self
            .letters
            .iter_mut()
            .enumerate()
            .filter(|(place, _)| Some(*place) != handled)
            .map(|(_, it)| it);
        match others.find(|it| (it.body, it.shelf) == (letter.body, letter.shelf)) {
            Some(there) => there.fence = there.fence.max(letter.fence),
            None => self.letters.push(letter),
        }
    }

    /// Gives worlds that differ in the order of their consumers alone one form.
    pub(crate) fn forget_names(&mut self) {
        let holder = token_of(&self.marker).unwrap_or(Token(0));
        let rank = |it: &Consumer| {
            let mut hasher = DefaultHasher::new();
            let unnamed = it.delivery.clone().map(|mut flight| {
                let holds = flight.dispatch.token == holder;
                flight.dispatch.token = Token(0);
                (flight, holds)
            });
            (unnamed, it.late_completion.is_some()).hash(&mut hasher);
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
        self.letters.sort_unstable();
        let mut names: Vec<u128> = Vec::with_capacity(4);
        let mut rename = |token: &mut Token| {
            if token.0 == 0 {
                return;
            }
            let place = names
                .iter()
                .position(|name| *name == token.0)
                .unwrap_or_else(|| {
                    names.push(token.0);
                    names.len() - 1
                });
            token.0 = place as u128 + 1;
        };
        rename_in_marker(&mut self.marker, &mut rename);
        for consumer in &mut self.consumers {
            if let Some(flight) = &mut consumer.delivery {
                rename(&mut flight.dispatch.token);
            }
            if let Some((token, _)) = &mut consumer.late_completion {
                rename(token);
            }
        }
        if let Person::Decided(_, sent, _) = &mut self.person {
            rename_in_sent(sent, &mut rename);
        }
        for sent in &mut self.late {
            rename_in_sent(sent, &mut rename);
        }
        self.late
            .sort_unstable_by_key(|it| (it.token.0, it.attempt, name(&it.ask)));
    }

    /// A token that nobody has.
    pub(crate) fn new_token(&self) -> Token {
        let consumers = self.consumers.iter().flat_map(|it| {
            let delivery = it.delivery.as_ref().map(|flight| flight.dispatch.token);
            [delivery, it.late_completion.map(|(token, _)| token)]
        });
        let sent = self.late.iter().chain(match &self.person {
            Person::Decided(_, sent, _) => Some(sent),
            _ => None,
        });
        let sent = sent.flat_map(|it| {
            [
                Some(it.token),
                seen(&it.ask).and_then(|marker| token_of(&marker)),
            ]
        });
        let all = consumers
            .chain(sent)
            .chain([token_of(&self.marker)])
            .flatten();
        Token(all.map(|token| token.0).max().unwrap_or(0) + 1)
    }
}

fn token_of(marker: &Marker) -> Option<Token> {
    match marker {
        Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold.token),
        _ => None,
    }
}

/// The marker that a person speaks of.
fn seen(ask: &Ask) -> Option<Marker> {
    match ask {
        Ask::SendBack { seen, .. } | Ask::Forget { seen } => Some(*seen),
        _ => None,
    }
}

fn rename_in_marker(marker: &mut Marker, rename: &mut impl FnMut(&mut Token)) {
    if let Marker::InProgress(hold) | Marker::InDoubt(hold, _) = marker {
        rename(&mut hold.token);
    }
}

fn rename_in_sent(sent: &mut Sent, rename: &mut impl FnMut(&mut Token)) {
    rename(&mut sent.token);
    if let Ask::SendBack { seen, .. } | Ask::Forget { seen } = &mut sent.ask {
        rename_in_marker(seen, rename);
    }
}

/// An ask in a word.
pub(crate) fn name(ask: &Ask) -> &'static str {
    match ask {
        Ask::Claim => "claim",
        Ask::Renew => "renewal",
        Ask::Complete => "completion",
        Ask::Clear(Left::Nothing) => "clear",
        Ask::Clear(Left::Unknown) => "clear, effect unknown",
        Ask::Withdraw => "withdrawal",
        Ask::Reject(_) => "rejection",
        Ask::Doubt => "doubt",
        Ask::Resolve(Finding::Happened) => "resolution: it happened",
        Ask::Resolve(Finding::DidNotHappen) => "resolution: it did not happen",
        Ask::SendBack {
            effect: Left::Nothing,
            ..
        } => "sending back, on a person's word that nothing happened",
        Ask::SendBack {
            effect: Left::Unknown,
            ..
        } => "sending back",
        Ask::Forget { .. } => "forgetting",
    }
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            crashes,
            losses,
            expiries,
            renewals,
            failures,
            unknowns,
            copies,
            others,
            drains,
            yields,
            forgotten,
            lost_claims,
            people,
        } = *self;
        let parts = [
            (crashes, "crash", "crashes"),
            (losses, "lost reply", "lost replies"),
            (expiries, "expiry", "expiries"),
            (renewals, "renewal", "renewals"),
            (failures, "failure", "failures"),
            (unknowns, "unknown outcome", "unknown outcomes"),
            (copies, "redelivery", "redeliveries"),
            (others, "other body", "other bodies"),
            (drains, "drain", "drains"),
            (yields, "withdrawn grant", "withdrawn grants"),
            (forgotten, "lost marker", "lost markers"),
            (lost_claims, "lost claim", "lost claims"),
            (people, "act of a person", "acts of a person"),
        ];
        let parts = parts.into_iter().filter(|(count, ..)| *count > 0);
        let named: Vec<String> = parts
            .map(|(count, one, many)| format!("{count} {}", if count == 1 { one } else { many }))
            .collect();
        f.pad(&if named.is_empty() {
            "none".into()
        } else {
            named.join(", ")
        })
    }
}
