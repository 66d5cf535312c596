//! What can happen in the [`World`], and what it becomes.

use oncegate_core::lifecycle::{DoubtCause, Event, Outcome, Stage};
use oncegate_core::marker::{Ask, Attempts, Effect as Left, Finding, Guarantee, Marker, Verdict};
use stateright::{Model, Property};

use crate::properties;
use crate::trial::{First, Trial};
use crate::world::{
    Action, ClaimReply, Effect, Lease, Message, ModelDelivery, Person, Receipt, Sent, World,
};

impl Model for Trial {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.setup.budget)]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        for who in 0..world.consumers.len() {
            self.actions_of_consumer(world, who, actions);
        }
        self.actions_of_store_and_broker(world, actions);
        self.actions_of_person(world, actions);
    }

    fn next_state(&self, before: &World, action: Action) -> Option<World> {
        let mut world = before.clone();
        self.act(&mut world, action)?;
        // A story needs the names, and so does a world in which they promise different things.
        if self.only.is_empty() && self.setup.guarantees[0] == self.setup.guarantees[1] {
            world.forget_names();
        }
        world.tidy();
        (world != *before).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::of(self)
    }
}

impl Trial {
    fn actions_of_consumer(&self, world: &World, who: usize, actions: &mut Vec<Action>) {
        use Action::*;
        let (left, consumer) = (&world.left, &world.consumers[who]);
        if consumer.late_completion.is_some() {
            actions.push(CompleteLate(who));
        }
        let Some(flight) = &consumer.delivery else {
            // Two idle consumers are alike, if they promise the same and owe the store nothing.
            let alike = self.setup.guarantees[0] == self.setup.guarantees[1];
            let other_idles = world.consumers[0].delivery.is_none()
                && world.consumers[0].late_completion.is_none();
            if who == 0 || !alike || !other_idles {
                let mut waiting = world.queue.clone();
                waiting.dedup();
                actions.extend(waiting.into_iter().map(|message| Deliver(who, message)));
            }
            return;
        };
        match flight.asked {
            Some(ClaimReply::Sent(ask)) => {
                // Late completions go before the claims of their ids.
                if ask != Ask::Claim
                    || consumer.late_completion.is_none()
                    || self.rules.first == First::Any
                {
                    actions.push(Apply(who));
                }
                if left.losses > 0 {
                    actions.extend([LoseCommand(who), LateCommand(who)]);
                }
            }
            Some(ClaimReply::Answered(..)) => {
                actions.push(Answer(who));
                if left.losses > 0 {
                    actions.push(LoseAnswer(who));
                }
            }
            None => {}
        }
        self.actions_of_run(world, who, flight, actions);
        if flight.lease == Lease::Over {
            actions.push(HearsLeaseOver(who));
        }
        if left.expiries > 0 && flight.lease == Lease::Lives {
            actions.push(LeaseFeared(who));
        }
        if left.renewals > 0 && flight.lease != Lease::None {
            actions.push(Renew(who));
            if left.losses > 0 {
                actions.push(LateRenewal(who));
            }
        }
        if left.copies > 0 && flight.receipt == Receipt::Valid {
            actions.push(DeliverAgain(who));
        }
        if left.crashes > 0 {
            actions.push(Crash(who));
        }
        if left.drains > 0 && !flight.dispatch.leaves() {
            actions.push(Drain(who));
        }
        if left.yields > 0 && matches!(flight.dispatch.stage(), Stage::Ready(_)) {
            actions.push(Yield(who));
        }
        if flight.dispatch.leaves() {
            // A handler that is dropped is an unknown outcome.
            if left.unknowns > 0 || flight.run.is_none() {
                actions.push(DrainOver(who));
            }
            actions.push(StopNow(who));
        }
    }

    fn actions_of_run(
        &self,
        world: &World,
        who: usize,
        flight: &ModelDelivery,
        actions: &mut Vec<Action>,
    ) {
        use Action::*;
        let left = &world.left;
        match flight.dispatch.stage() {
            Stage::Running(..) | Stage::Ungated(_) => {
                match flight.run {
                    Some(Effect::Pending) if world.is_taken(flight.attempt()) => {
                        actions.push(EffectHappens(who));
                        if left.failures > 0 {
                            actions.extend([
                                Return(who, Outcome::Retry),
                                Return(who, Outcome::Reject),
                            ]);
                        }
                    }
                    Some(Effect::Pending) => actions.push(Return(who, Outcome::Retry)), // the provider says that it refused
                    Some(Effect::Happened) => actions.push(Return(who, Outcome::Done)),
                    None => {}
                }
                if left.unknowns > 0 && flight.run.is_some() {
                    actions.push(Return(who, Outcome::Unknown(DoubtCause::Panicked)));
                }
            }
            Stage::Reconciling(..) => {
                // It looks, and it may not be able to tell.
                actions.push(if world.effects() > 0 {
                    FindsOut(who)
                } else {
                    FindsNothing(who)
                });
                actions.push(Wake(who));
            }
            _ if flight.asked.is_none() => actions.push(Wake(who)),
            _ => {}
        }
    }

    fn actions_of_store_and_broker(&self, world: &World, actions: &mut Vec<Action>) {
        use Action::*;
        let left = &world.left;
        if left.expiries > 0
            && !world.over
            && matches!(world.marker, Marker::InProgress(_) | Marker::InDoubt(..))
        {
            actions.push(LeaseEnds);
        }
        if left.copies > 0 {
            actions.push(SendTwice);
        }
        if left.others > 0 {
            actions.push(SendOther);
        }
        if left.forgotten > 0 && world.marker != Marker::Absent {
            actions.push(Forget);
        }
        if left.lost_claims > 0 && matches!(world.marker, Marker::InProgress(_)) {
            actions.push(LoseClaim);
        }
        actions.extend((0..world.late.len()).map(ApplyLate));
        for (place, (attempt, _)) in world.provider.orphans.iter().enumerate() {
            actions.push(OrphanDies(place));
            if world.is_taken(*attempt) {
                actions.push(OrphanHappens(place));
            }
        }
    }

    fn actions_of_person(&self, world: &World, actions: &mut Vec<Action>) {
        use Action::*;
        match world.person {
            Person::Idle if world.left.people > 0 => {
                let decides = |place: &usize| self.decides(world, world.letters[*place]).is_some();
                actions.extend((0..world.letters.len()).filter(decides).map(Decides));
                if self.may_forget(world) {
                    actions.push(ForgetsWhatIsDone);
                }
                return;
            }
            Person::Idle => return,
            Person::Decided(..) => {
                actions.push(Asks);
                if world.left.losses > 0 {
                    actions.push(AsksLate);
                }
            }
            Person::Publishes(_) => actions.push(Publishes),
            Person::TakesOut(_) => actions.push(TakesOut),
        }
        actions.push(Stops);
    }

    /// Does it; `None` if it cannot happen.
    fn act(&self, world: &mut World, action: Action) -> Option<()> {
        match action {
            Action::Deliver(who, message) => {
                let place = world.queue.iter().position(|it| *it == message)?;
                world.queue.remove(place);
                self.deliver(world, who, message);
            }
            Action::SendTwice => {
                world.left.copies -= 1;
                world.queue.push(Message {
                    body: 0,
                    failures: 0,
                });
            }
            Action::SendOther => {
                world.left.others -= 1;
                world.seen.other_body = true;
                world.queue.push(Message {
                    body: 1,
                    failures: 0,
                });
            }
            Action::DeliverAgain(who) => {
                world.left.copies -= 1;
                let flight = world.consumers[who].delivery.as_mut()?;
                flight.receipt = Receipt::Stale;
                world.queue.push(flight.message);
            }
            Action::Apply(who) => {
                let Some(ClaimReply::Sent(ask)) = world.consumers[who].delivery.as_ref()?.asked
                else {
                    return None;
                };
                let verdict = self.store(world, self.sent(world, who, ask)?);
                world.consumers[who].delivery.as_mut()?.asked =
                    Some(ClaimReply::Answered(ask, verdict, Lease::Lives));
            }
            Action::ApplyLate(place) => {
                let sent = world.late.remove(place);
                let verdict = self.store(world, sent);
                if let (Ask::SendBack { .. }, Verdict::Kept) = (sent.ask, verdict) {
                    world.freed();
                }
            }
            Action::Answer(who) => self.answer(world, who)?,
            Action::LoseCommand(who) | Action::LateCommand(who) | Action::LoseAnswer(who) => {
                world.left.losses -= 1;
                let asked = world.consumers[who].delivery.as_mut()?.asked.take()?;
                if let (Action::LateCommand(_), ClaimReply::Sent(ask)) = (action, asked) {
                    let sent = self.sent(world, who, ask)?;
                    world.late.push(sent);
                }
                self.happens(world, who, Event::Unavailable);
            }
            Action::Wake(who) => {
                let flight = world.consumers[who].delivery.as_ref()?;
                let event = match flight.dispatch.stage() {
                    Stage::Reconciling(..) => Event::Found(None),
                    Stage::New(_) if flight.dispatch.leaves() => Event::Drain,
                    Stage::New(_) => Event::Arrived, // it was held
                    Stage::Ready(_) if flight.lease == Lease::Over => Event::LeaseOver,
                    Stage::Ready(_) => Event::Slot,
                    stage if stage.waits_on_lease() && flight.lease == Lease::Over => {
                        Event::LeaseOver
                    }
                    _ => Event::Woke,
                };
                self.happens(world, who, event);
            }
            Action::EffectHappens(who) => {
                let flight = world.consumers[who].delivery.as_mut()?;
                flight.run = Some(Effect::Happened);
                let body = flight.message.body;
                world.happened(body);
            }
            Action::OrphanHappens(place) => {
                let (_, body) = world.provider.orphans.remove(place);
                world.happened(body);
            }
            Action::OrphanDies(place) => {
                world.provider.orphans.remove(place);
            }
            Action::Return(who, outcome) => self.returns(world, who, outcome)?,
            Action::FindsOut(who) => self.finds(world, who, Finding::Happened),
            Action::FindsNothing(who) => self.finds(world, who, Finding::DidNotHappen),
            Action::LeaseEnds => {
                world.left.expiries -= 1;
                world.over = true;
                let (Marker::InProgress(hold) | Marker::InDoubt(hold, _)) = world.marker else {
                    return None;
                };
                let flights = world
                    .consumers
                    .iter_mut()
                    .filter_map(|it| it.delivery.as_mut());
                flights
                    .filter(|it| it.dispatch.token == hold.token)
                    .for_each(fear);
            }
            Action::LeaseFeared(who) => {
                world.left.expiries -= 1;
                fear(world.consumers[who].delivery.as_mut()?);
            }
            Action::HearsLeaseOver(who) => self.happens(world, who, Event::LeaseOver),
            Action::Renew(who) => {
                world.left.renewals -= 1;
                let verdict = self.store(world, self.sent(world, who, Ask::Renew)?);
                let flight = world.consumers[who].delivery.as_mut()?;
                flight.lease = if verdict == Verdict::Kept {
                    Lease::Lives
                } else {
                    Lease::Over
                };
            }
            Action::LateRenewal(who) => {
                (world.left.renewals, world.left.losses) =
                    (world.left.renewals - 1, world.left.losses - 1);
                let sent = self.sent(world, who, Ask::Renew)?;
                world.late.push(sent);
            }
            Action::Crash(who) => {
                world.left.crashes -= 1;
                self.crash(world, who);
            }
            Action::Drain(who) => {
                world.left.drains -= 1;
                world.consumers[who].delivery.as_mut()?.dispatch.leave();
                self.happens(world, who, Event::Drain);
            }
            Action::Yield(who) => {
                world.left.yields -= 1;
                self.happens(world, who, Event::OtherRunsAlone);
            }
            Action::DrainOver(who) => {
                let runs = world.consumers[who].delivery.as_ref()?.run.is_some();
                world.left.unknowns -= u8::from(runs);
                self.happens(world, who, Event::DrainOver);
            }
            Action::StopNow(who) => {
                world.seen.stopped_now |= self.counts_claims_left_behind();
                self.happens(world, who, Event::StopNow);
            }
            Action::CompleteLate(who) => self.complete_late(world, who)?,
            Action::Forget => {
                world.left.forgotten -= 1;
                (world.marker, world.over) = (Marker::Absent, false);
            }
            Action::LoseClaim => {
                world.left.lost_claims -= 1;
                (world.marker, world.over) = (before_claim(&world.marker)?, false);
            }
            Action::Decides(place) => {
                let (person, voids) = self.decides(world, *world.letters.get(place)?)?;
                world.left.people -= 1;
                world.person = person;
                if let Some(attempt) = voids {
                    world.void((self.rules.voids)(attempt));
                }
            }
            Action::Asks | Action::AsksLate => {
                let Person::Decided(letter, sent, then) = world.person else {
                    return None;
                };
                if action == Action::Asks {
                    self.person_asks(world, letter, sent, then);
                } else {
                    world.left.losses -= 1;
                    world.late.push(sent);
                    world.person = Person::Idle;
                }
            }
            Action::Publishes => {
                let Person::Publishes(letter) = world.person else {
                    return None;
                };
                world.publish(letter);
            }
            Action::TakesOut => {
                let Person::TakesOut(letter) = world.person else {
                    return None;
                };
                world.take_out(letter);
            }
            Action::Stops => world.person = Person::Idle,
            Action::ForgetsWhatIsDone => {
                world.left.people -= 1;
                self.person_forgets(world);
            }
        }
        Some(())
    }

    fn answer(&self, world: &mut World, who: usize) -> Option<()> {
        let flight = world.consumers[who].delivery.as_mut()?;
        let Some(ClaimReply::Answered(_, verdict, lease)) = flight.asked.take() else {
            return None;
        };
        if let Verdict::Granted(_) | Verdict::InDoubt(_) = verdict {
            flight.lease = if self.setup.guarantees[who] == Guarantee::Bare {
                Lease::None
            } else {
                lease
            };
        }
        self.happens(world, who, Event::Answer(verdict));
        Some(())
    }

    fn returns(&self, world: &mut World, who: usize, outcome: Outcome) -> Option<()> {
        let refused = !world.is_taken(world.consumers[who].delivery.as_ref()?.attempt());
        match outcome {
            Outcome::Retry | Outcome::Reject if !refused => world.left.failures -= 1,
            Outcome::Unknown(_) => world.left.unknowns -= 1,
            _ => {}
        }
        let flight = world.consumers[who].delivery.as_mut()?;
        if let Outcome::Retry | Outcome::Reject = outcome {
            flight.run = None; // it said that nothing happened, and that is so
        }
        self.happens(world, who, Event::Returned(outcome));
        Some(())
    }

    /// What passed without the gate is claimed, and completed.
    fn complete_late(&self, world: &mut World, who: usize) -> Option<()> {
        let (token, granted) = world.consumers[who].late_completion?;
        let (ask, attempt) = granted.map_or((Ask::Claim, 0), |attempt| (Ask::Complete, attempt));
        let sent = Sent {
            ask,
            guarantee: self.setup.guarantees[who],
            body: 0,
            token,
            attempt,
        };
        world.consumers[who].late_completion = match self.store(world, sent) {
            Verdict::Granted(attempts) | Verdict::InDoubt(attempts) => {
                Some((token, Some(attempts.number)))
            }
            _ => None,
        };
        Some(())
    }
}

/// The clock of a lease has run out for this delivery, also for a grant that it has not heard of
/// yet.
fn fear(flight: &mut ModelDelivery) {
    if flight.lease == Lease::Lives {
        flight.lease = Lease::Over;
    }
    if let Some(ClaimReply::Answered(_, _, lease)) = &mut flight.asked {
        *lease = Lease::Over;
    }
}

/// What the marker was before the claim that was granted last.
fn before_claim(marker: &Marker) -> Option<Marker> {
    let Marker::InProgress(hold) = marker else {
        return None;
    };
    let attempts = Attempts {
        number: hold.attempts.number - 1,
        ..hold.attempts
    };
    Some(match (attempts.number, hold.earlier) {
        (0, Left::Nothing) => Marker::Absent,
        (_, effect) => Marker::Cleared { attempts, effect },
    })
}
