//! What can happen in the [`World`], and what it becomes.
//!
//! Every decision is `road::next` and `marker::apply`, the functions that run in production. This file only plays
//! the rest of the world: a network that loses and delays, processes that die, clocks, a broker and a provider.

use std::time::Duration;

use oncegate_core::marker::{Age, Ask, Change, Finding, Guarantee, Marker, Operation, Terms, Token, Verdict, apply};
use oncegate_core::road::{self, Cause, Event, Freshness, History, Outcome, Policy, Settlement, Stage, Step};
use oncegate_core::{Key, MessageId};
use stateright::{Model, Property};

use crate::world::{Action, Asked, Budget, Effect, Flight, Lease, Receipt, Sent, World};

const LEASE: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(100);

/// A guarantee for each consumer, under one budget of trouble.
pub(crate) struct Trial {
    pub(crate) budget: Budget,
    guarantees: [Guarantee; 2],
    key: Key,
    /// The one property to look at, by the beginning of its name; or all.
    only: &'static str,
}

impl Trial {
    pub(crate) fn new(guarantees: [Guarantee; 2], budget: Budget, only: &'static str) -> Self {
        // The id is not empty.
        let id = MessageId::new("id").expect("an id");
        Self { budget, guarantees, key: Key::new(&id), only }
    }

    fn policy(&self, who: usize) -> Policy {
        Policy {
            guarantee: self.guarantees[who],
            attempts: 3,
            retries: 1,
            reconciles: 1,
            parks: 1,
            backoff: Duration::from_millis(1),
            longest_backoff: Duration::from_millis(1),
            outage: road::Outage::Hold,
        }
    }

    /// Whether both promise the same, and this.
    fn all_promise(&self, guarantee: Guarantee) -> bool {
        self.guarantees == [guarantee; 2]
    }

    fn operation(&self, ask: Ask, guarantee: Guarantee, token: Token, attempt: u32) -> Operation {
        let terms = Terms { guarantee, lease: LEASE, window: WINDOW, fingerprint: None };
        Operation { key: self.key.clone(), ask, token, attempt, terms }
    }

    /// The store applies a command.
    fn store(&self, world: &mut World, sent: Sent) -> Verdict {
        let Sent { ask, guarantee, token, attempt } = sent;
        let age = Age::Of(if world.over { LEASE * 2 } else { Duration::ZERO });
        let (change, verdict) = apply(world.marker, age, &self.operation(ask, guarantee, token, attempt));
        match change {
            Change::Keep => {}
            Change::Write(marker, _) => (world.marker, world.over) = (marker, false),
            Change::Delete => (world.marker, world.over) = (Marker::Absent, false),
        }
        world.seen.done |= matches!(world.marker, Marker::Done(_)) && !self.guarantees.contains(&Guarantee::Bare);
        verdict
    }

    /// Something happens to the delivery of a consumer: the road says what it does next, and it is done.
    fn happens(&self, world: &mut World, who: usize, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let Some(flight) = world.consumers[who].delivery.as_mut() else { return };
            let (stage, step) = road::next(flight.stage, event, &self.policy(who));
            flight.stage = stage;
            if !matches!(stage, Stage::Running(..)) {
                abandon(world, who);
            }
            next = self.carry_out(world, who, step);
        }
    }

    fn carry_out(&self, world: &mut World, who: usize, step: Step) -> Option<Event> {
        let new_token = world.new_token();
        let leaves = world.consumers[who].draining;
        let flight = world.consumers[who].delivery.as_mut()?;
        match step {
            Step::ClaimAnew => {
                (flight.token, flight.attempt, flight.lease) = (new_token, 0, Lease::None);
                flight.asked = Some(Asked::Sent(Ask::Claim));
                return leaves.then_some(Event::Drain);
            }
            Step::Ask(ask) => flight.asked = Some(Asked::Sent(ask)),
            Step::Queue if leaves => return Some(Event::Drain),
            Step::Queue => return Some(if flight.lease == Lease::Over { Event::LeaseOver } else { Event::Slot }),
            // A handler is started and polled only while its lease lives.
            Step::Run if flight.lease == Lease::Over => return Some(Event::LeaseOver),
            Step::Run => self.start(world, who),
            Step::Reconcile if flight.lease == Lease::Over => return Some(Event::LeaseOver),
            Step::Reconcile | Step::Wait => {}
            Step::Wake(_) => return leaves.then_some(Event::Drain),
            Step::Settle(settlement) => {
                let valid = flight.receipt == Receipt::Valid;
                world.consumers[who].delivery = None;
                match settlement {
                    Settlement::Release { failures, .. } if valid => world.queue.push(failures),
                    Settlement::Accept(_) | Settlement::Release { .. } => {}
                    Settlement::Reject(_) => world.dead_letter = true,
                }
            }
            Step::Drop => self.comes_back(world, who),
        }
        None
    }

    fn start(&self, world: &mut World, who: usize) {
        let running = |it: &Flight| it.run.is_some();
        let others = || world.consumers.iter().enumerate().filter(|(place, _)| *place != who).filter_map(|(_, it)| it.delivery.as_ref());
        let two_at_once = others().any(|it| running(it) && it.lease != Lease::Over);
        let may_happen = |it: &Flight| running(it) && is_taken(world, it.attempt);
        let on_a_guess = world.provider.effects > 0 || !world.provider.orphans.is_empty() || others().any(may_happen);
        let attempt = world.consumers[who].delivery.as_ref().map_or(0, |it| it.attempt);
        world.seen.start_below_the_fence |= !is_taken(world, attempt);
        world.seen.two_at_once |= two_at_once;
        world.seen.start_on_a_guess |= on_a_guess;
        world.seen.start_after_done |= world.seen.done;
        if let Some(flight) = world.consumers[who].delivery.as_mut() {
            flight.run = Some(Effect::Pending);
        }
    }

    /// A consumer ends, or lets go: the broker hands the delivery out again.
    fn comes_back(&self, world: &mut World, who: usize) {
        abandon(world, who);
        if let Some(flight) = world.consumers[who].delivery.take()
            && flight.receipt == Receipt::Valid
        {
            world.queue.push(flight.failures);
        }
        world.consumers[who].draining = false;
    }

    fn reconcile_finds(&self, world: &mut World, who: usize, finding: Finding) {
        let Some(flight) = world.consumers[who].delivery.as_ref() else { return };
        if finding == Finding::DidNotHappen {
            // `find_or_void`: nothing under this id still can happen, and an older holder is refused from now on.
            world.provider.fence = world.provider.fence.max(flight.attempt);
            world.provider.orphans.clear();
        }
        self.happens(world, who, Event::Found(Some(finding)));
    }
}

/// The handler is dropped; what it has asked of the provider may still happen.
fn abandon(world: &mut World, who: usize) {
    let Some(flight) = world.consumers[who].delivery.as_mut() else { return };
    // What the provider refuses by now cannot happen any more.
    if flight.run.take() == Some(Effect::Pending) && flight.attempt >= world.provider.fence {
        world.provider.orphans.push(flight.attempt);
    }
}

/// Whether the provider still takes a request.
fn is_taken(world: &World, attempt: u32) -> bool {
    attempt >= world.provider.fence
}

impl Model for Trial {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.budget)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        use Action::*;
        let left = &world.left;
        let mut waiting = world.queue.clone();
        waiting.dedup();
        for (who, consumer) in world.consumers.iter().enumerate() {
            let Some(flight) = &consumer.delivery else {
                // Two idle consumers are alike, if they promise the same.
                let alike = self.guarantees[0] == self.guarantees[1];
                if !consumer.draining && (who == 0 || !alike || world.consumers[0].delivery.is_some()) {
                    actions.extend(waiting.iter().map(|failures| Deliver(who, *failures)));
                }
                continue;
            };
            match flight.asked {
                Some(Asked::Sent(_)) => {
                    actions.push(Apply(who));
                    if left.losses > 0 {
                        actions.extend([LoseCommand(who), LateCommand(who)]);
                    }
                }
                Some(Asked::Answered(..)) => {
                    actions.push(Answer(who));
                    if left.losses > 0 {
                        actions.push(LoseAnswer(who));
                    }
                }
                None => {}
            }
            match flight.stage {
                Stage::Running(permit, _) => match flight.run {
                    Some(Effect::Pending) => {
                        if is_taken(world, flight.attempt) {
                            actions.push(EffectHappens(who));
                        } else {
                            actions.push(Return(who, Outcome::Retry)); // the provider says that it refused
                        }
                        if left.failures > 0 && permit.attempt > 0 {
                            actions.extend([Return(who, Outcome::Retry), Return(who, Outcome::Reject)]);
                        }
                        if left.unknowns > 0 {
                            actions.push(Return(who, Outcome::Unknown(Cause::Panicked)));
                        }
                    }
                    Some(Effect::Happened) => {
                        actions.push(Return(who, Outcome::Done));
                        if left.unknowns > 0 {
                            actions.push(Return(who, Outcome::Unknown(Cause::Panicked)));
                        }
                    }
                    None => {}
                },
                Stage::Reconciling(..) => {
                    // It looks, and it may not be able to tell.
                    actions.push(if world.provider.effects > 0 { FindsOut(who) } else { FindsNothing(who) });
                    actions.push(Wake(who));
                }
                _ if flight.asked.is_none() => actions.push(Wake(who)),
                _ => {}
            }
            if flight.lease == Lease::Over {
                actions.push(HearsLeaseOver(who));
            }
            if left.expiries > 0 && flight.lease == Lease::Lives {
                actions.push(LeaseFeared(who));
            }
            if left.copies > 0 && flight.receipt == Receipt::Valid {
                actions.push(DeliverAgain(who));
            }
            if left.crashes > 0 {
                actions.push(Crash(who));
            }
            if left.drains > 0 && !consumer.draining {
                actions.push(Drain(who));
            }
            if consumer.draining {
                actions.push(DrainOver(who));
            }
        }
        if left.expiries > 0 && !world.over && matches!(world.marker, Marker::InProgress(_) | Marker::InDoubt(..)) {
            actions.push(LeaseEnds);
        }
        if left.copies > 0 {
            actions.push(SendTwice);
        }
        if left.forgotten > 0 && world.marker != Marker::Absent {
            actions.push(Forget);
        }
        actions.extend((0..world.late.len()).map(ApplyLate));
        for (place, attempt) in world.provider.orphans.iter().enumerate() {
            actions.push(OrphanDies(place));
            if is_taken(world, *attempt) {
                actions.push(OrphanHappens(place));
            }
        }
    }

    fn next_state(&self, before: &World, action: Action) -> Option<World> {
        let mut world = before.clone();
        let left = &mut world.left;
        match action {
            Action::Deliver(who, failures) => {
                let place = world.queue.iter().position(|it| *it == failures)?;
                world.queue.remove(place);
                let history = History { failures, freshness: Freshness::Fresh };
                let flight = Flight {
                    failures,
                    receipt: Receipt::Valid,
                    stage: Stage::New(history),
                    token: Token(0),
                    attempt: 0,
                    asked: None,
                    lease: Lease::None,
                    run: None,
                };
                world.consumers[who].delivery = Some(flight);
                self.happens(&mut world, who, Event::Arrived);
            }
            Action::SendTwice => {
                left.copies -= 1;
                world.queue.push(0);
            }
            Action::DeliverAgain(who) => {
                left.copies -= 1;
                let flight = world.consumers[who].delivery.as_mut()?;
                flight.receipt = Receipt::Stale;
                world.queue.push(flight.failures);
            }
            Action::Apply(who) => {
                let flight = world.consumers[who].delivery.as_ref()?;
                let Some(Asked::Sent(ask)) = flight.asked else { return None };
                let (token, attempt) = (flight.token, flight.attempt);
                let verdict = self.store(&mut world, Sent { ask, guarantee: self.guarantees[who], token, attempt });
                world.consumers[who].delivery.as_mut()?.asked = Some(Asked::Answered(ask, verdict, Lease::Lives));
            }
            Action::ApplyLate(place) => {
                let sent = world.late.remove(place);
                self.store(&mut world, sent);
            }
            Action::Answer(who) => {
                let flight = world.consumers[who].delivery.as_mut()?;
                let Some(Asked::Answered(_, verdict, lease)) = flight.asked.take() else { return None };
                if let Verdict::Granted { attempt } | Verdict::InDoubt { attempt } = verdict {
                    flight.attempt = attempt;
                    flight.lease = if self.guarantees[who] == Guarantee::Bare { Lease::None } else { lease };
                }
                self.happens(&mut world, who, Event::Answer(verdict));
            }
            Action::LoseCommand(who) | Action::LateCommand(who) | Action::LoseAnswer(who) => {
                left.losses -= 1;
                let flight = world.consumers[who].delivery.as_mut()?;
                let (ask, token, attempt) = (flight.asked.take()?, flight.token, flight.attempt);
                if let (Action::LateCommand(_), Asked::Sent(ask)) = (action, ask) {
                    world.late.push(Sent { ask, guarantee: self.guarantees[who], token, attempt });
                }
                self.happens(&mut world, who, Event::Unavailable);
            }
            Action::Wake(who) => {
                let flight = world.consumers[who].delivery.as_ref()?;
                let event = match flight.stage {
                    Stage::Reconciling(..) => Event::Found(None),
                    stage if stage.waits_on_lease() && flight.lease == Lease::Over => Event::LeaseOver,
                    _ => Event::Woke,
                };
                self.happens(&mut world, who, event);
            }
            Action::EffectHappens(who) => {
                world.consumers[who].delivery.as_mut()?.run = Some(Effect::Happened);
                world.provider.effects = (world.provider.effects + 1).min(2);
            }
            Action::OrphanHappens(place) => {
                world.provider.orphans.remove(place);
                world.provider.effects = (world.provider.effects + 1).min(2);
            }
            Action::OrphanDies(place) => {
                world.provider.orphans.remove(place);
            }
            Action::Return(who, outcome) => {
                let refused = !is_taken(before, before.consumers[who].delivery.as_ref()?.attempt);
                match outcome {
                    Outcome::Retry | Outcome::Reject if !refused => left.failures -= 1,
                    Outcome::Unknown(_) => left.unknowns -= 1,
                    _ => {}
                }
                let flight = world.consumers[who].delivery.as_mut()?;
                if let Outcome::Retry | Outcome::Reject = outcome {
                    flight.run = None; // it said that nothing happened, and that is so
                }
                self.happens(&mut world, who, Event::Returned(outcome));
            }
            Action::FindsOut(who) => self.reconcile_finds(&mut world, who, Finding::Happened),
            Action::FindsNothing(who) => self.reconcile_finds(&mut world, who, Finding::DidNotHappen),
            Action::LeaseEnds => {
                left.expiries -= 1;
                world.over = true;
                let (Marker::InProgress(hold) | Marker::InDoubt(hold, _)) = world.marker else { return None };
                for flight in world.consumers.iter_mut().filter_map(|it| it.delivery.as_mut()).filter(|it| it.token == hold.token) {
                    feared(flight);
                }
            }
            Action::LeaseFeared(who) => {
                left.expiries -= 1;
                feared(world.consumers[who].delivery.as_mut()?);
            }
            Action::HearsLeaseOver(who) => self.happens(&mut world, who, Event::LeaseOver),
            Action::Crash(who) => {
                left.crashes -= 1;
                let flight = world.consumers[who].delivery.as_ref()?;
                if let Some(Asked::Sent(ask)) = flight.asked {
                    let (token, attempt) = (flight.token, flight.attempt);
                    world.late.push(Sent { ask, guarantee: self.guarantees[who], token, attempt });
                }
                self.comes_back(&mut world, who);
            }
            Action::Drain(who) => {
                left.drains -= 1;
                world.consumers[who].draining = true;
                self.happens(&mut world, who, Event::Drain);
            }
            Action::DrainOver(who) => self.happens(&mut world, who, Event::DrainOver),
            Action::Forget => {
                left.forgotten -= 1;
                (world.marker, world.over) = (Marker::Absent, false);
            }
        }
        for consumer in &mut world.consumers {
            // Whoever has drained is started again.
            consumer.draining &= consumer.delivery.is_some();
        }
        // A story needs the names, and so does a world in which they promise different things.
        if self.only.is_empty() && self.guarantees[0] == self.guarantees[1] {
            world.forget_names();
        }
        world.tidy();
        (world != *before).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always(LOST, |_, world: &World| {
                !world.is_quiet() || world.provider.effects > 0 || world.dead_letter || !world.late.is_empty()
            }),
            Property::always(STUCK, |trial: &Trial, world: &World| {
                let mut actions = Vec::new();
                trial.actions(world, &mut actions);
                world.is_quiet() || !actions.is_empty()
            }),
        ];
        if self.all_promise(Guarantee::AtMostOnce) || self.all_promise(Guarantee::Bare) {
            properties.push(Property::always(TWICE, |_, world: &World| world.provider.effects < 2));
        }
        if self.all_promise(Guarantee::AtMostOnce) {
            properties.push(Property::always(GUESS, |_, world: &World| !world.seen.start_on_a_guess));
        }
        if !self.guarantees.contains(&Guarantee::Bare) {
            properties.push(Property::always(AFTER_DONE, |_, world: &World| !world.seen.start_after_done));
            properties.push(Property::always(BACKWARDS, |_, world: &World| !world.seen.start_below_the_fence));
            properties.push(Property::always(AT_ONCE, |_, world: &World| !world.seen.two_at_once));
        }
        properties.retain(|property| property.name.starts_with(self.only));
        properties
    }
}

/// The clock of a lease has run out for this delivery, also for a grant that it has not heard of yet.
fn feared(flight: &mut Flight) {
    if flight.lease == Lease::Lives {
        flight.lease = Lease::Over;
    }
    if let Some(Asked::Answered(_, _, lease)) = &mut flight.asked {
        *lease = Lease::Over;
    }
}

const LOST: &str = "lost: no effect, no dead letter, nothing left to deliver";
const STUCK: &str = "stuck: a delivery waits for nothing";
const TWICE: &str = "doubled: two effects";
const GUESS: &str = "started on a guess: an earlier run had, or may still have, an effect";
const AFTER_DONE: &str = "started after it was done";
const BACKWARDS: &str = "started with an attempt that was fenced off";
const AT_ONCE: &str = "two handlers at once, each with its lease";
