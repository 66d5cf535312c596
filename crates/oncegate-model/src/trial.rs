//! The rules at work in the [`World`]: what the store answers, and what a consumer does next.
//!
//! Nothing is decided here. Consumers are driven by [`LifecycleDriver`], as they are in production.

use std::time::Duration;

use oncegate_core::driver::{DriverCommand, LifecycleDriver, OnRelease};
use oncegate_core::lifecycle::{
    self, Action, Event, Freshness, History, Outage, Policy, Reason, Settlement, Stage,
};
use oncegate_core::marker::{
    self, Age, Ask, Change, Fingerprint, Guarantee, Marker, Operation, Terms, Token, Verdict,
};
use oncegate_core::{Key, MessageId};

use crate::world::{
    Budget, ClaimReply, Consumer, Effect, Lease, Letter, Message, ModelDelivery, Receipt, Sent,
    Shelf, World,
};

const LEASE: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(100);

/// The rules that are tried; the right ones by default.
#[derive(Clone, Copy)]
pub struct Rules {
    /// What may one key become?
    pub apply: fn(Marker, Age, &Operation) -> (Change, Verdict),
    /// What does one delivery do next?
    pub next: fn(Stage, Event, &Policy) -> (Stage, Action),
    /// The token of a claim: of the token of the delivery's claim before it, and of a new one.
    pub token: fn(Token, Token) -> Token,
    /// Up to and with which attempt the provider refuses what comes, once somebody has said that
    /// nothing can happen any more.
    pub voids: fn(u32) -> u32,
    /// What a consumer asks first once the store is back.
    pub first: First,
}

/// What goes first to a store that is back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// Completions of what passed without the gate.
    LateCompletions,
    /// Whatever there is.
    Any,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            apply: marker::apply,
            next: lifecycle::transition,
            token: |_, new| new,
            voids: |attempt| attempt,
            first: First::LateCompletions,
        }
    }
}

/// What two consumers promise, and under how much trouble.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Of each consumer.
    pub guarantees: [Guarantee; 2],
    /// What may go wrong.
    pub budget: Budget,
    /// How many attempts a message gets.
    pub attempts: u32,
    /// Whether deliveries that failed keep their place.
    pub keeps: OnRelease,
    /// What consumers do while the store does not answer.
    pub outage: Outage,
}

impl Setup {
    /// Both promise the same; three attempts, in no order, nothing passes without the gate.
    pub fn of(guarantees: [Guarantee; 2], budget: Budget) -> Self {
        Self {
            guarantees,
            budget,
            attempts: 3,
            keeps: OnRelease::ReturnToSource,
            outage: Outage::Hold,
        }
    }
}

/// Rules in a world.
pub struct Trial {
    pub(crate) setup: Setup,
    pub(crate) rules: Rules,
    key: Key,
    /// The one property to look at, by the beginning of its name; or all.
    pub(crate) only: &'static str,
}

impl Trial {
    /// Looks at the one property whose name begins so; at all, if nothing is said.
    pub fn new(setup: Setup, rules: Rules, only: &'static str) -> Self {
        // The id is not empty.
        let id = MessageId::new("id").expect("an id");
        Self {
            setup,
            rules,
            key: Key::new(&id),
            only,
        }
    }

    fn policy(&self, who: usize) -> Policy {
        Policy {
            guarantee: self.setup.guarantees[who],
            attempts: self.setup.attempts,
            crashes: self.setup.attempts,
            retries: 1,
            reconciles: 1,
            parks: 1,
            backoff: Duration::from_millis(1),
            longest_backoff: Duration::from_millis(1),
            outage: self.setup.outage,
        }
    }

    /// Whether anyone promises this.
    pub(crate) fn promises(&self, guarantee: Guarantee) -> bool {
        self.setup.guarantees.contains(&guarantee)
    }

    /// Whether both promise the same, and this.
    pub(crate) fn all_promise(&self, guarantee: Guarantee) -> bool {
        self.setup.guarantees == [guarantee; 2]
    }

    /// Whether every claim has an end, as long as nobody stops without the store's answer.
    pub(crate) fn counts_claims_left_behind(&self) -> bool {
        let Budget {
            crashes,
            losses,
            expiries,
            forgotten,
            lost_claims,
            drains,
            people,
            ..
        } = self.setup.budget;
        let others = [crashes, losses, expiries, forgotten, lost_claims, people];
        drains > 0 && others == [0; 6]
    }

    pub(crate) fn operation(&self, sent: &Sent) -> Operation {
        let Sent {
            ask,
            guarantee,
            body,
            token,
            attempt,
        } = *sent;
        let bodies_differ = self.setup.budget.others > 0;
        let fingerprint = bodies_differ.then(|| Fingerprint::new(body as u64));
        let terms = Terms {
            guarantee,
            lease: LEASE,
            window: WINDOW,
            fingerprint,
        };
        Operation {
            key: self.key.clone(),
            ask,
            token,
            attempt,
            terms,
        }
    }

    /// The store applies a command.
    pub(crate) fn store(&self, world: &mut World, sent: Sent) -> Verdict {
        let age = Age::Of(if world.over {
            LEASE * 2
        } else {
            Duration::ZERO
        });
        let before = world.marker;
        let (change, verdict) = (self.rules.apply)(before, age, &self.operation(&sent));
        world.seen.waits_for_nobody |= world.over && matches!(verdict, Verdict::Busy { .. });
        match change {
            Change::Keep => {}
            Change::Write(marker, _) => (world.marker, world.over) = (marker, false),
            Change::Delete => (world.marker, world.over) = (Marker::Absent, false),
        }
        world.seen.done |=
            matches!(world.marker, Marker::Done(_)) && !self.promises(Guarantee::Bare);
        self.watch_budget(world, &sent, before, verdict);
        verdict
    }

    /// What the store answered spends the budget of attempts, or does not.
    fn watch_budget(&self, world: &mut World, sent: &Sent, before: Marker, verdict: Verdict) {
        let again = matches!(before, Marker::InProgress(hold) if hold.token == sent.token);
        let taken_over = !again
            && matches!(
                (before, verdict),
                (
                    Marker::InProgress(_),
                    Verdict::Granted(_) | Verdict::InDoubt(_)
                )
            );
        let withdrawn =
            sent.ask == Ask::Withdraw && again && !matches!(world.marker, Marker::InProgress(_));
        if self.counts_grants() && (taken_over || withdrawn) {
            world.seen.spared += 1;
        }
        if let Verdict::Granted(attempts) | Verdict::InDoubt(attempts) = verdict
            && self.setup.budget.people > 0
        {
            let crashes = match before {
                Marker::Cleared { attempts, .. } => attempts.crashes,
                Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.attempts.crashes,
                _ => 0,
            };
            world.seen.crashes += attempts.crashes - crashes;
            // It would be given up for crashes from which it was freed.
            world.seen.not_run |= attempts.crashes > world.seen.crashes;
        }
        match verdict {
            Verdict::Granted(attempts) if !again => {
                // What a person sends back is granted within the budget. It was given up for
                // crashes since, and nobody had started it: so it would be without a person.
                let given_up = world.seen.crashes > self.setup.attempts;
                world.seen.not_run |=
                    world.seen.owed && attempts.spent() > self.setup.attempts && !given_up;
                world.seen.known = false;
                if self.counts_grants() {
                    world.seen.grants += 1;
                    world.seen.spent_too_soon |= attempts.spent() + world.seen.forgiven
                        > world.seen.grants - world.seen.spared;
                }
            }
            Verdict::InDoubt(_) => world.seen.not_run |= world.seen.known,
            Verdict::Rejected { .. } => world.seen.not_run |= world.seen.owed,
            _ => {}
        }
    }

    pub(crate) fn sent(&self, world: &World, who: usize, ask: Ask) -> Option<Sent> {
        let flight = world.consumers[who].delivery.as_ref()?;
        let LifecycleDriver {
            token, attempts, ..
        } = flight.dispatch;
        Some(Sent {
            ask,
            guarantee: self.setup.guarantees[who],
            body: flight.message.body,
            token,
            attempt: attempts.number,
        })
    }

    /// A message is handed to a consumer.
    pub(crate) fn deliver(&self, world: &mut World, who: usize, message: Message) {
        let history = History {
            failures: message.failures,
            freshness: Freshness::Fresh,
        };
        let dispatch = LifecycleDriver::new(history, self.setup.keeps);
        let flight = ModelDelivery {
            message,
            receipt: Receipt::Valid,
            dispatch,
            asked: None,
            lease: Lease::None,
            run: None,
        };
        world.consumers[who].delivery = Some(flight);
        self.happens(world, who, Event::Arrived);
    }

    /// Something happens to the delivery of a consumer, and what follows is done.
    pub(crate) fn happens(&self, world: &mut World, who: usize, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let new = world.new_token();
            let Some(flight) = world.consumers[who].delivery.as_mut() else {
                return;
            };
            let token = |earlier| (self.rules.token)(earlier, new);
            let command =
                flight
                    .dispatch
                    .handle_by(self.rules.next, event, &self.policy(who), token);
            if !matches!(
                flight.dispatch.stage(),
                Stage::Running(..) | Stage::Ungated(_)
            ) {
                abandon(world, who);
            }
            next = self.carry_out(world, who, command);
        }
    }

    fn carry_out(&self, world: &mut World, who: usize, command: DriverCommand) -> Option<Event> {
        let flight = world.consumers[who].delivery.as_mut()?;
        match command {
            DriverCommand::Apply(ask) => {
                if ask == Ask::Claim && flight.dispatch.attempts.number == 0 {
                    flight.lease = Lease::None;
                }
                flight.asked = Some(ClaimReply::Sent(ask));
            }
            DriverCommand::AwaitRun if self.setup.budget.yields > 0 => {}
            DriverCommand::AwaitRun => {
                return Some(if flight.lease == Lease::Over {
                    Event::LeaseOver
                } else {
                    Event::Slot
                });
            }
            // A handler is started and polled only while its lease lives.
            DriverCommand::Run | DriverCommand::Reconcile if flight.lease == Lease::Over => {
                return Some(Event::LeaseOver);
            }
            DriverCommand::Run => self.start(world, who),
            DriverCommand::AwaitTurn => flight.lease = Lease::None,
            DriverCommand::Reconcile | DriverCommand::Wake(_) | DriverCommand::Nothing => {}
            DriverCommand::Hold { failures, .. } => {
                flight.lease = Lease::None;
                flight.dispatch.restart(History {
                    failures,
                    freshness: Freshness::Fresh,
                });
            }
            DriverCommand::Settle(settlement) => self.settle(world, who, settlement),
            DriverCommand::Abandon => self.comes_back(world, who),
        }
        None
    }

    fn settle(&self, world: &mut World, who: usize, settlement: Settlement) {
        let Some(flight) = world.consumers[who].delivery.take() else {
            return;
        };
        let Message { body, .. } = flight.message;
        let (token, fence) = (flight.dispatch.token, flight.dispatch.attempts.number);
        match settlement {
            Settlement::Release { failures, .. } if flight.receipt == Receipt::Valid => {
                world.queue.push(Message { body, failures })
            }
            Settlement::Release { .. } => {}
            Settlement::Accept(proof) if proof.as_str() == "passed_without_gate" => {
                world.consumers[who].late_completion = Some((token, None));
            }
            Settlement::Accept(_) => {}
            Settlement::Reject(reason) => {
                let shelf = if reason.is_in_doubt() {
                    Shelf::InDoubt
                } else {
                    Shelf::DeadLetters
                };
                // A claim that was given up may arrive late, and hold the doubt for a lease.
                let reconciled_by_me = self.setup.budget.losses == 0
                    && matches!(world.marker, Marker::InDoubt(hold, marker::Doubt::Reconciling) if hold.token == token);
                world.seen.doubt_kept |= shelf == Shelf::InDoubt && reconciled_by_me;
                let never_granted = self.counts_grants() && world.seen.grants < self.setup.attempts;
                world.seen.spent_too_soon |= reason == Reason::AttemptsSpent && never_granted;
                // Nobody looks at it where no person acts.
                let fence = if self.setup.budget.people > 0 {
                    fence
                } else {
                    0
                };
                world.add_letter(Letter { body, shelf, fence });
            }
        }
    }

    fn counts_grants(&self) -> bool {
        self.setup.budget.people > 0 || self.setup.budget.copies > 0
    }

    fn start(&self, world: &mut World, who: usize) {
        let running = |it: &ModelDelivery| it.run.is_some();
        let others = || {
            world
                .consumers
                .iter()
                .enumerate()
                .filter(|(place, _)| *place != who)
                .filter_map(|(_, it)| it.delivery.as_ref())
        };
        let two_at_once = others().any(|it| running(it) && it.lease != Lease::Over);
        let may_happen = |it: &ModelDelivery| running(it) && world.is_taken(it.attempt());
        let orphaned = world
            .provider
            .orphans
            .iter()
            .any(|(attempt, _)| world.is_taken(*attempt));
        let on_a_guess = world.effects() > 0 || orphaned || others().any(may_happen);
        let at_most_once = self.setup.guarantees[who] == Guarantee::AtMostOnce;
        let Some(flight) = world.consumers[who].delivery.as_ref() else {
            return;
        };
        let (attempt, gated) = (
            flight.attempt(),
            !matches!(flight.dispatch.stage(), Stage::Ungated(_)),
        );
        let below = !world.is_taken(attempt) || attempt <= world.seen.floor;
        if gated {
            world.seen.start_before_late |= world.consumers[who].late_completion.is_some();
            world.seen.start_below_the_fence |= below;
            world.seen.two_at_once |= two_at_once;
            world.seen.start_on_a_guess |= on_a_guess && at_most_once;
            world.seen.start_after_done |= world.seen.done;
        }
        if self.setup.budget.people > 0 {
            world.seen.highest = world.seen.highest.max(attempt);
        }
        if let Some(flight) = world.consumers[who].delivery.as_mut() {
            flight.run = Some(Effect::Pending);
        }
        world.seen.owed = false;
    }

    /// A consumer ends, or lets go: the broker hands the delivery out again.
    pub(crate) fn comes_back(&self, world: &mut World, who: usize) {
        abandon(world, who);
        if let Some(flight) = world.consumers[who].delivery.take()
            && flight.receipt == Receipt::Valid
        {
            world.queue.push(flight.message);
        }
    }

    /// A process ends without a word.
    pub(crate) fn crash(&self, world: &mut World, who: usize) {
        if let Some(ClaimReply::Sent(ask)) = world.consumers[who]
            .delivery
            .as_ref()
            .and_then(|flight| flight.asked)
            && let Some(sent) = self.sent(world, who, ask)
        {
            world.late.push(sent);
        }
        self.comes_back(world, who);
        world.consumers[who] = Consumer::default();
    }

    /// `reconcile` has found out.
    pub(crate) fn finds(&self, world: &mut World, who: usize, finding: marker::Finding) {
        let Some(flight) = world.consumers[who].delivery.as_ref() else {
            return;
        };
        if finding == marker::Finding::DidNotHappen {
            // `find_or_void`: nothing under this id still can happen, up to and including this
            // attempt.
            let voids = (self.rules.voids)(flight.attempt());
            world.void(voids);
        }
        self.happens(world, who, Event::Found(Some(finding)));
    }
}

/// The handler is dropped; what it has asked of the provider may still happen.
fn abandon(world: &mut World, who: usize) {
    let Some(flight) = world.consumers[who].delivery.as_mut() else {
        return;
    };
    let (run, attempt, body) = (flight.run.take(), flight.attempt(), flight.message.body);
    // What the provider refuses by now cannot happen any more.
    if run == Some(Effect::Pending) && world.is_taken(attempt) {
        world.provider.orphans.push((attempt, body));
    }
}
