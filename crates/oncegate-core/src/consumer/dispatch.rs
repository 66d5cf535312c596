//! From arrival to settlement: what the road says is carried out here.

use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use tracing::Span;

use super::entry::{
    Claim, FinishedRun, InFlightEntry, Report, Stands, Task, Work, holds_a_run, may_be_blamed, runs,
};
use super::{Engine, Mode};

use crate::builder::age;
use crate::context::Context;
use crate::decode::Decode;
use crate::driver::{DriverCommand, OnRelease};
use crate::fault;
use crate::handler::Handler;
use crate::id::{MessageId, NoId};
use crate::in_flight::{InFlight, Progress};
use crate::lanes::Turn;
use crate::lease::Lease;
use crate::lifecycle::{ClaimTries, Event, Freshness, History, Settlement, Stage};
use crate::marker::{Ask, Guarantee, Operation, Terms};
use crate::message::Message;
use crate::moment::Moment;
use crate::renewals::Over;
use crate::run::{Finished, what_it_said};
use crate::settings::{Execution, Settings};
use crate::slots::Slot;
use crate::source::Delivery;
use crate::spans;

impl<H: Handler, D: Decode> Engine<H, D> {
    /// A delivery takes its slot.
    pub(super) fn arrived(&mut self, delivery: Delivery) {
        fault::point("delivery");
        let (id, terms) = self.identify(&delivery.message);
        let age = age(&delivery.message, self.wall);
        let freshness = self.freshness(age);
        match age {
            None => self.note_unknown_age(&delivery.message),
            Some(_) if freshness == Freshness::TooOld => self.outcomes.too_old(),
            Some(_) => {}
        }
        let bytes = delivery.message.size();
        let lane = self.lanes.of(&delivery);
        let history = History {
            failures: delivery.failures,
            freshness,
        };
        let keeps = if lane.is_some() {
            OnRelease::KeepPlace
        } else {
            OnRelease::ReturnToSource
        };
        let mut passage = InFlight::new(delivery, history, keeps);
        let (arrival, said) = match &id {
            Ok(_) => (Event::Arrived, None),
            Err(NoId::Missing) => (Event::NoId, None),
            Err(NoId::Unusable(found)) => (Event::UnusableId, Some(found.clone())),
        };
        if said.is_some() {
            passage.tell(|story| story.first_error = said);
        }
        let id = id.ok();
        let flight = InFlightEntry {
            passage,
            key: id.as_ref().map(|id| self.settings.scope.key(id)),
            id,
            arrival,
            terms,
            ask: Ask::Claim,
            claim: Claim::Unsent,
            lane,
            lease: None,
            asked: Span::none(),
            task: None,
            began: None,
            arrived: self.clock,
            stands: Stands::OnTheRoad,
            turn: 0,
            bytes,
        };
        self.bytes += bytes;
        let slot = self.flights.insert(Box::new(flight));
        match lane.map_or(Turn::Now, |lane| self.lanes.enter(lane, slot)) {
            Turn::Now => self.enter_road(slot),
            Turn::Later => self.step_aside(slot),
        }
    }

    /// At most once rests on `max_age`, which nobody can check of a message without a timestamp.
    fn note_unknown_age(&mut self, message: &Message) {
        self.outcomes.unknown_age();
        if self.policy.guarantee == Guarantee::AtMostOnce
            && let Some(suppressed_lines) = self.says.unknown_age.due(Instant::now())
        {
            tracing::warn!(
                origin = %message.origin,
                suppressed_lines,
                "message without a timestamp: max_age is not checked, so a copy older than the dedup window would run again; \
                 set a timestamp in the producer (RabbitMQ: the property `timestamp`, in seconds)"
            );
        }
    }

    fn freshness(&self, age: Option<Duration>) -> Freshness {
        match age {
            Some(age) if age > self.settings.max_age() => Freshness::TooOld,
            _ => Freshness::Fresh,
        }
    }

    /// The id and the terms of a message. The user's functions run here: one that panics has found
    /// no id that can be used.
    pub(super) fn identify(&self, message: &Message) -> (Result<MessageId, NoId>, Terms) {
        let read = || {
            (
                self.id.read(message),
                Terms {
                    lease: self.lease,
                    ..self.settings.terms(message)
                },
            )
        };
        match catch_unwind(AssertUnwindSafe(read)) {
            Ok(it) => it,
            Err(panic) => {
                let said = format!(
                    "the function that reads the id or the fingerprint {}",
                    what_it_said(panic)
                );
                tracing::error!(origin = %message.origin, "{said}");
                let Settings {
                    guarantee,
                    lease,
                    window,
                    ..
                } = self.settings;
                (
                    Err(NoId::Unusable(said)),
                    Terms {
                        guarantee,
                        lease,
                        window,
                        fingerprint: None,
                    },
                )
            }
        }
    }

    /// It is this delivery's turn.
    pub(super) fn enter_road(&mut self, slot: Slot) {
        let drains = matches!(self.mode, Mode::Draining { .. });
        let Some(flight) = self.flights.at_mut(slot) else {
            return;
        };
        if drains {
            flight.passage.leave();
        }
        let event = if flight.passage.dispatch().leaves() {
            Event::Drain
        } else {
            flight.arrival
        };
        self.happens(slot, event);
    }

    /// Something happened to a delivery, and to those that waited for it to leave.
    pub(super) fn happens(&mut self, slot: Slot, event: Event) {
        let mut next = Some((slot, event));
        // In a loop of its own: a lane of thousands that leaves at once must not be as many calls
        // deep.
        while let Some((slot, event)) = next {
            self.advance(slot, event);
            next = self.next_up.pop_front();
            if next.is_none() && (self.alone.is_some() || !self.may_run_next.is_empty()) {
                next = self.next_that_may_run();
            }
        }
    }

    /// The one that runs alone, once nothing else is about to be claimed; or the next that waits
    /// for a run to end, once one has.
    pub(super) fn next_that_may_run(&mut self) -> Option<(Slot, Event)> {
        if let Some(slot) = self.alone.filter(|_| {
            self.claims_asked == 0
                && self.withdrawing == 0
                && self.running < self.settings.in_flight
        }) && let Some(flight) = self.flights.at(slot)
            && let Stage::Ready(_) = flight.passage.stage()
        {
            return Some((slot, self.may_begin(flight)));
        }
        while self.running < self.settings.in_flight {
            let slot = self.may_run_next.pop_front()?;
            let Some(flight) = self.flights.at(slot) else {
                continue;
            };
            if let Stage::Ready(_) = flight.passage.stage() {
                return Some((slot, self.may_begin(flight)));
            }
        }
        None
    }

    /// There is a place for its handler. The claim is held for as long as a run may take from now
    /// on: it may have waited for that place longer than that.
    fn may_begin(&self, flight: &InFlightEntry) -> Event {
        let Some(lease) = &flight.lease else {
            return Event::Slot;
        };
        let now = Moment::now();
        if !lease.lives(now) {
            return Event::LeaseOver;
        }
        lease.hold_until(now + self.longest_hold);
        Event::Slot
    }

    /// The road says what a delivery does next, and this does it.
    pub(super) fn advance(&mut self, slot: Slot, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let Some(mut flight) = self.flights.take(slot) else {
                return;
            };
            self.outcomes.happened(event);
            if flight.stands == Stands::Aside {
                flight.stands = Stands::OnTheRoad;
                self.aside -= 1;
                self.aside_bytes -= flight.bytes;
            }
            self.completing -= usize::from(matches!(flight.passage.stage(), Stage::Completing(_)));
            self.parked -= usize::from(matches!(flight.passage.stage(), Stage::AwaitingHolder(..)));
            self.withdrawing -=
                usize::from(matches!(flight.passage.stage(), Stage::Withdrawing(..)));
            self.running -= usize::from(holds_a_run(flight.passage.stage()));
            let claim = (
                flight.passage.dispatch().token,
                flight.passage.dispatch().attempts,
            );
            let new_token = |earlier| fault::token(earlier, self.tokens.token());
            match flight.passage.handle(event, &self.policy, new_token) {
                Progress::InFlight(mut passage, DriverCommand::Hold { after, failures }) => {
                    self.outcomes
                        .settled(&Settlement::Release { after, failures });
                    let freshness = self.freshness(age(&passage.delivery().message, self.wall));
                    passage.restart(History {
                        failures,
                        freshness,
                    });
                    flight.passage = passage;
                    self.rest(slot, flight, after);
                }
                Progress::InFlight(passage, command) => {
                    self.completing += usize::from(matches!(passage.stage(), Stage::Completing(_)));
                    self.parked +=
                        usize::from(matches!(passage.stage(), Stage::AwaitingHolder(..)));
                    self.withdrawing +=
                        usize::from(matches!(passage.stage(), Stage::Withdrawing(..)));
                    self.running += usize::from(holds_a_run(passage.stage()));
                    flight.passage = passage;
                    if !runs(flight.passage.stage()) {
                        flight.task = None;
                    }
                    next = self.carry_out(slot, &mut flight, command);
                    let may_be_blamed = may_be_blamed(flight.passage.stage());
                    self.flights.put_back(slot, flight);
                    if next.is_none() && !may_be_blamed {
                        self.end_alone(slot);
                    }
                }
                Progress::Settled(mut settled) => {
                    let (token, attempts) = claim;
                    let InFlightEntry {
                        id,
                        key,
                        terms,
                        lane,
                        lease,
                        task,
                        bytes,
                        arrived,
                        ..
                    } = *flight;
                    drop(task);
                    self.measures
                        .settled(self.clock.saturating_duration_since(arrived));
                    if let Some(story) = &mut settled.story {
                        story.id = id.as_ref().map(MessageId::to_string);
                    }
                    if let Settlement::Reject(reason) = &settled.settlement {
                        self.says.rejected(
                            &settled,
                            self.source
                                .destination(&settled.delivery.message.origin, reason),
                        );
                    }
                    spans::settles(
                        &settled.delivery,
                        id.as_ref(),
                        attempts.number,
                        &settled.settlement,
                    )
                    .in_scope(|| self.outcomes.settled(&settled.settlement));
                    if let (Settlement::Accept(proof), Some(key)) = (&settled.settlement, key)
                        && proof.as_str() == "passed_without_gate"
                    {
                        self.remember_later(Operation {
                            key,
                            ask: Ask::Claim,
                            token,
                            attempt: 0,
                            terms,
                        });
                    }
                    self.settled.push(settled);
                    self.left(slot, lane, lease, bytes);
                }
                Progress::Abandoned(_) => {
                    drop(flight.task);
                    self.outcomes.dropped();
                    self.left(slot, flight.lane, flight.lease, flight.bytes);
                }
            }
        }
    }

    /// A delivery that is ordered keeps its lane after an attempt that failed, so that none of its
    /// lane overtakes it.
    fn rest(&mut self, slot: Slot, mut flight: Box<InFlightEntry>, after: Duration) {
        (flight.task, flight.began) = (None, None);
        flight.turn += 1;
        self.give_up_lease(slot, &mut flight);
        let after = self.jittered(after);
        self.alarms
            .push(Reverse((Instant::now() + after, slot, flight.turn)));
        self.flights.put_back(slot, flight);
        self.step_aside(slot);
        self.end_alone(slot);
    }

    /// A delivery counts as in flight no more, until something happens to it.
    fn step_aside(&mut self, slot: Slot) {
        let Some(flight) = self.flights.at_mut(slot) else {
            return;
        };
        flight.stands = Stands::Aside;
        self.aside += 1;
        self.aside_bytes += flight.bytes;
    }

    /// What passed without the gate is claimed when the store is back, with the token of its lost
    /// claim, and completed.
    fn remember_later(&mut self, claim: Operation) {
        if self.late.add(claim).is_err()
            && let Some(suppressed_lines) = self.says.not_remembered.due(Instant::now())
        {
            tracing::warn!(
                suppressed_lines,
                "too much passed without the gate: a copy of a message may run again"
            );
        }
    }

    /// Does what follows for a delivery; what happens at once, if something does.
    pub(super) fn carry_out(
        &mut self,
        slot: Slot,
        flight: &mut InFlightEntry,
        command: DriverCommand,
    ) -> Option<Event> {
        match command {
            DriverCommand::Apply(ask) => {
                if ask == Ask::Claim && flight.attempt() == 0 {
                    self.give_up_lease(slot, flight);
                }
                if let Stage::Claiming(_, ClaimTries(0)) = flight.passage.stage()
                    && flight.attempt() == 0
                {
                    flight.claim = Claim::Unsent; // its token is new
                }
                flight.turn += 1; // an alarm that was set before must not ask a second time: it would come after the answer
                crate::wrong_version!("new-token-on-a-retried-claim", {
                    if ask == Ask::Claim {
                        flight.passage.dispatch_mut().token = self.tokens.token();
                    }
                });
                crate::wrong_version!("accept-before-complete", {
                    if let (Ask::Complete, Some(key)) = (ask, flight.key.clone()) {
                        let (store, ask, terms) = (self.store.clone(), Ask::Complete, flight.terms);
                        let (token, attempt) = (flight.passage.dispatch().token, flight.attempt());
                        let completion = [Operation {
                            key,
                            ask,
                            token,
                            attempt,
                            terms,
                        }];
                        tokio::spawn(async move {
                            fault::before(&completion);
                            store.apply(&completion).await
                        });
                        return Some(Event::Answer(crate::marker::Verdict::Done {
                            marker_lost: false,
                        }));
                    }
                });
                flight.asks(ask);
                if ask == Ask::Claim {
                    self.claims.push_back(slot)
                } else {
                    self.verdicts.push_back(slot)
                }
            }
            DriverCommand::AwaitRun => {
                if let Stage::Ready(permit) = flight.passage.stage()
                    && permit.runs_alone()
                {
                    if self.alone.is_some_and(|other| other != slot) {
                        return Some(Event::OtherRunsAlone);
                    }
                    self.alone = Some(slot);
                    self.says
                        .runs_alone(flight, permit.attempts, self.policy.crashes);
                    return None;
                }
                // Its slot may have gone to another while its completion was on the way, which
                // turned out to be lost.
                if self.running >= self.settings.in_flight {
                    self.may_run_next.push_back(slot);
                    return None;
                }
                return Some(self.may_begin(flight));
            }
            DriverCommand::Run => {
                if let Stage::Ungated(_) = flight.passage.stage() {
                    self.give_up_lease(slot, flight);
                }
                return self.start(slot, flight, Work::Handle);
            }
            DriverCommand::Reconcile => return self.start(slot, flight, Work::Reconcile),
            DriverCommand::Wake(after) => {
                flight.turn += 1;
                let after = self.jittered(after);
                self.alarms
                    .push(Reverse((Instant::now() + after, slot, flight.turn)));
            }
            DriverCommand::AwaitTurn => {
                self.give_up_lease(slot, flight);
                if self.alone.is_none() {
                    self.alone = Some(slot);
                    return Some(Event::Arrived);
                }
                self.alone_next.push_back(slot);
            }
            DriverCommand::Nothing => {}
            DriverCommand::Hold { .. } | DriverCommand::Settle(_) | DriverCommand::Abandon => {
                unreachable!("a passage that leaves the road does not travel")
            }
        }
        None
    }

    /// Holds no lease any more, and renews none.
    pub(super) fn give_up_lease(&mut self, slot: Slot, flight: &mut InFlightEntry) {
        if flight.lease.take().is_some() {
            self.given_up.push(slot.place);
        }
    }

    /// Starts the handler or `reconcile`; what it came to, if it was ready at once.
    pub(super) fn start(
        &mut self,
        slot: Slot,
        flight: &mut InFlightEntry,
        work: Work,
    ) -> Option<Event> {
        let id = flight.id.clone()?;
        flight.turn += 1;
        let turn = flight.turn;
        let delivery = flight.passage.delivery();
        let (message, failures) = (delivery.message.clone(), delivery.failures);
        let cx = Context {
            id,
            attempt: flight.attempt().max(1),
            failures,
            message,
            lease: flight.lease.clone(),
        };
        let began = Instant::now();
        flight.began = Some(began);
        let runner = self.runner.clone();
        let mut run: BoxFuture<'static, Finished> = match work {
            Work::Handle => Box::pin(runner.handle(cx, began)),
            Work::Reconcile => Box::pin(runner.reconcile(cx, began)),
        };
        if self.settings.handlers == Execution::Inline {
            // Polled without a waker: if it is not ready, its task polls it again before it sleeps.
            if let Some(finished) = (&mut run).now_or_never() {
                flight.tell(&finished);
                self.says.ran(flight, &finished);
                self.measure(flight.began.take());
                return Some(finished.event);
            }
        }
        let report = Report {
            runs: self.runs.clone(),
            slot,
            turn,
            finished: None,
        };
        let task = tokio::spawn(async move { report.tell(run.await) });
        flight.task = Some(Task(task.abort_handle()));
        self.spawned += 1;
        None
    }

    /// One more run is known; the lease may go by how long they take.
    fn measure(&mut self, began: Option<Instant>) {
        let Some(took) = began.map(|began| began.elapsed()) else {
            return;
        };
        self.measures.handled(took);
        let Some(shortest) = self.settings.shortest_lease else {
            return;
        };
        self.pace.ran(took);
        if let Some(lease) = self.pace.lease() {
            self.lease = lease.clamp(shortest, self.settings.lease);
        }
    }

    /// A handler or `reconcile` is over.
    pub(super) fn finished(&mut self, (slot, turn, finished): FinishedRun) {
        let Some(flight) = self.flights.at_mut(slot) else {
            return;
        };
        if flight.turn != turn {
            return;
        }
        flight.tell(&finished);
        self.says.ran(flight, &finished);
        let began = flight.began.take();
        self.measure(began);
        self.happens(slot, finished.event);
    }

    /// The renewals say that a lease is over.
    pub(super) fn lease_over(&mut self, (place, token): Over) {
        let Some(slot) = self.flights.slot(place) else {
            return;
        };
        let now = Moment::now();
        let theirs = |lease: &Arc<Lease>| lease.token == token && !lease.lives(now); // not one that was granted again since
        if self
            .flights
            .at(slot)
            .is_some_and(|flight| flight.lease.as_ref().is_some_and(theirs))
        {
            self.happens(slot, Event::LeaseOver);
        }
    }
}
