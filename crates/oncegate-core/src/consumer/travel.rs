//! From arrival to settlement: what the road says is carried out here.

use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use tracing::Span;

use super::asking::LATE_COMPLETIONS;
use super::flight::{Flight, Ran, Report, Stands, Stays, Task, Work, holds_a_run, runs};
use super::{Mode, Running};

use crate::builder::age;
use crate::context::Context;
use crate::decode::Decode;
use crate::fault;
use crate::handler::Handler;
use crate::id::MessageId;
use crate::lanes::Turn;
use crate::lease::Lease;
use crate::marker::{Ask, Operation, Terms, Token};
use crate::message::Message;
use crate::moment::Moment;
use crate::passage::{Onward, Passage};
use crate::renewals::Over;
use crate::road::{Event, Freshness, History, Settlement, Stage, Step};
use crate::run::{Finished, what_it_said};
use crate::settings::{Handlers, Settings};
use crate::slots::Slot;
use crate::source::{Delivery, Settled};
use crate::spans;

impl<H: Handler, D: Decode> Running<H, D> {
    /// A delivery takes its slot.
    pub(super) fn arrived(&mut self, delivery: Delivery) {
        fault::point("delivery");
        let (id, terms, said) = self.identify(&delivery.message);
        let freshness = self.freshness(&delivery.message);
        if freshness == Freshness::TooOld {
            self.outcomes.too_old();
        }
        let bytes = delivery.message.size();
        let lane = self.lanes.of(&delivery);
        let history = History { failures: delivery.failures, freshness };
        let mut passage = Passage::new(delivery, history);
        if said.is_some() {
            passage.tell(|story| story.first_error = said);
        }
        let flight = Flight {
            passage,
            key: id.as_ref().map(|id| self.settings.scope.key(id)),
            id,
            terms,
            token: Token(0),
            attempt: 0,
            ask: Ask::Claim,
            lane,
            lease: None,
            asked: Span::none(),
            task: None,
            began: None,
            arrived: self.clock,
            stays: Stays::Here,
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

    fn freshness(&self, message: &Message) -> Freshness {
        match age(message, self.wall) {
            Some(age) if age > self.settings.max_age() => Freshness::TooOld,
            _ => Freshness::Fresh,
        }
    }

    /// The id and the terms of a message. The user's functions run here: one that panics has found no id.
    pub(super) fn identify(&self, message: &Message) -> (Option<MessageId>, Terms, Option<String>) {
        let read = || (self.id.read(message), Terms { lease: self.lease, ..self.settings.terms(message) });
        match catch_unwind(AssertUnwindSafe(read)) {
            Ok((id, terms)) => (id, terms, None),
            Err(panic) => {
                let said = format!("the function that reads the id or the fingerprint {}", what_it_said(panic));
                tracing::error!(origin = ?message.origin, "{said}");
                let Settings { guarantee, lease, window, .. } = self.settings;
                (None, Terms { guarantee, lease, window, fingerprint: None }, Some(said))
            }
        }
    }

    /// It is this delivery's turn.
    pub(super) fn enter_road(&mut self, slot: Slot) {
        if let Some(event) = self.first_event(slot) {
            self.happens(slot, event);
        }
    }

    pub(super) fn first_event(&self, slot: Slot) -> Option<Event> {
        let flight = self.flights.at(slot)?;
        Some(match flight.stays {
            Stays::Leaves => Event::Drain,
            Stays::Here if matches!(self.mode, Mode::Draining { .. }) => Event::Drain,
            Stays::Here if flight.id.is_some() => Event::Arrived,
            Stays::Here => Event::NoId,
        })
    }

    /// Something happened to a delivery, and to those that waited for it to leave.
    pub(super) fn happens(&mut self, slot: Slot, event: Event) {
        let mut next = Some((slot, event));
        // In a loop of its own: a lane of thousands that leaves at once must not be as many calls deep.
        while let Some((slot, event)) = next {
            self.advance(slot, event);
            next = self.next_up.pop_front().or_else(|| self.next_that_may_run());
        }
    }

    /// The next that waits for a run to end, once one has.
    fn next_that_may_run(&mut self) -> Option<(Slot, Event)> {
        while self.running < self.settings.in_flight {
            let slot = self.may_run_next.pop_front()?;
            let Some(flight) = self.flights.at(slot) else { continue };
            if let Stage::Ready(_) = flight.passage.stage() {
                return Some((slot, self.may_begin(flight)));
            }
        }
        None
    }

    /// There is a place for its handler. The claim is held for as long as a run may take from now on: it may have waited for that
    /// place longer than that.
    fn may_begin(&self, flight: &Flight) -> Event {
        let Some(lease) = &flight.lease else { return Event::Slot };
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
            let Some(mut flight) = self.flights.take(slot) else { return };
            self.outcomes.happened(event);
            if flight.stands == Stands::Aside {
                flight.stands = Stands::OnTheRoad;
                self.aside -= 1;
                self.aside_bytes -= flight.bytes;
            }
            self.completing -= usize::from(matches!(flight.passage.stage(), Stage::Completing(_)));
            self.parked -= usize::from(matches!(flight.passage.stage(), Stage::Parked(..)));
            self.running -= usize::from(holds_a_run(flight.passage.stage()));
            let rests = flight.lane.is_some() && flight.stays == Stays::Here && matches!(self.mode, Mode::Taking);
            match flight.passage.next(event, &self.policy) {
                Onward::Travels(passage, step) => {
                    self.completing += usize::from(matches!(passage.stage(), Stage::Completing(_)));
                    self.parked += usize::from(matches!(passage.stage(), Stage::Parked(..)));
                    self.running += usize::from(holds_a_run(passage.stage()));
                    flight.passage = passage;
                    if !runs(flight.passage.stage()) {
                        flight.task = None;
                    }
                    next = self.carry_out(slot, &mut flight, step);
                    let runs_no_more = !matches!(flight.passage.stage(), Stage::Ready(_) | Stage::Running(..));
                    self.flights.put_back(slot, flight);
                    if runs_no_more {
                        self.end_takeover(slot);
                    }
                }
                Onward::Left(Settled { mut delivery, settlement: Settlement::Release { after, failures }, .. }) if rests => {
                    delivery.failures = failures;
                    self.outcomes.settled(&Settlement::Release { after, failures });
                    let history = History { failures, freshness: self.freshness(&delivery.message) };
                    flight.passage = Passage::new(delivery, history);
                    self.rest(slot, flight, after);
                }
                Onward::Left(mut settled) => {
                    let Flight { id, key, terms, token, attempt, lane, lease, task, bytes, arrived, .. } = *flight;
                    drop(task);
                    self.measures.settled(self.clock.saturating_duration_since(arrived));
                    if let Settlement::Reject(_) = settled.settlement {
                        let story = settled.story.get_or_insert_default();
                        story.id = id.as_ref().map(MessageId::to_string);
                        // The marker forgets attempts that did nothing; the delivery does not.
                        story.attempts = attempt.max(settled.delivery.failures + u32::from(attempt > 0));
                    }
                    self.say_if_set_aside(&settled);
                    spans::settles(&settled.delivery, id.as_ref(), attempt, &settled.settlement)
                        .in_scope(|| self.outcomes.settled(&settled.settlement));
                    if let (Settlement::Accept(proof), Some(key)) = (&settled.settlement, key)
                        && proof.as_str() == "passed_without_gate"
                    {
                        self.remember_later(Operation { key, ask: Ask::Claim, token, attempt: 0, terms });
                    }
                    self.settled.push(settled);
                    self.left(slot, lane, lease, bytes);
                }
                Onward::Dropped(_) => {
                    drop(flight.task);
                    self.outcomes.dropped();
                    self.left(slot, flight.lane, flight.lease, flight.bytes);
                }
            }
        }
    }

    /// A message that a person will have to look at is named in the log, though not each of many.
    fn say_if_set_aside(&mut self, settled: &Settled) {
        let Settlement::Reject(reason) = settled.settlement else { return };
        let seldom = if reason.is_in_doubt() { &mut self.says.in_doubt } else { &mut self.says.rejected };
        let Some(kept_back) = seldom.due(Instant::now()) else { return };
        let story = settled.story.as_deref();
        let (id, error) =
            (story.and_then(|it| it.id.as_deref()), story.and_then(|it| it.last_error.as_deref().or(it.first_error.as_deref())));
        let (reason, origin) = (reason.as_str(), &settled.delivery.message.origin);
        tracing::warn!(reason, id, ?origin, error, kept_back, "a message is set aside for a person");
    }

    /// A delivery that is ordered keeps its lane after an attempt that failed, so that none of its lane overtakes it.
    fn rest(&mut self, slot: Slot, mut flight: Box<Flight>, after: Duration) {
        (flight.task, flight.began) = (None, None);
        flight.turn += 1;
        self.give_up_lease(slot, &mut flight);
        let after = self.jittered(after);
        self.alarms.push(Reverse((Instant::now() + after, slot, flight.turn)));
        self.flights.put_back(slot, flight);
        self.step_aside(slot);
        self.end_takeover(slot);
    }

    /// A delivery counts as in flight no more, until something happens to it.
    fn step_aside(&mut self, slot: Slot) {
        let Some(flight) = self.flights.at_mut(slot) else { return };
        flight.stands = Stands::Aside;
        self.aside += 1;
        self.aside_bytes += flight.bytes;
    }

    /// What passed without the gate is claimed when the store is back, with the token of its lost claim, and completed.
    fn remember_later(&mut self, claim: Operation) {
        if self.late.len() < LATE_COMPLETIONS {
            self.late.push_back(claim);
        } else if let Some(kept_back) = self.says.not_remembered.due(Instant::now()) {
            tracing::warn!(kept_back, "too much passed without the gate: a copy of a message may run again");
        }
    }

    /// Does what the road said; what follows at once, if something does.
    pub(super) fn carry_out(&mut self, slot: Slot, flight: &mut Flight, step: Step) -> Option<Event> {
        let leaves = flight.stays == Stays::Leaves;
        match step {
            Step::ClaimAnew => {
                flight.turn += 1;
                flight.token = fault::token(flight.token, self.tokens.token());
                flight.attempt = 0;
                self.give_up_lease(slot, flight);
                flight.asks(Ask::Claim);
                self.claims.push_back(slot);
                return leaves.then_some(Event::Drain);
            }
            Step::Ask(ask) => {
                flight.turn += 1; // an alarm that was set before must not ask a second time: it would come after the answer
                crate::wrong_version!("new-token-on-a-retried-claim", {
                    if ask == Ask::Claim {
                        flight.token = self.tokens.token();
                    }
                });
                crate::wrong_version!("accept-before-complete", {
                    if let (Ask::Complete, Some(key)) = (ask, flight.key.clone()) {
                        let (store, ask, terms) = (self.store.clone(), Ask::Complete, flight.terms);
                        let completion = [Operation { key, ask, token: flight.token, attempt: flight.attempt, terms }];
                        tokio::spawn(async move {
                            fault::before(&completion);
                            store.apply(&completion).await
                        });
                        return Some(Event::Answer(crate::marker::Verdict::Done { marker_lost: false }));
                    }
                });
                flight.asks(ask);
                if ask == Ask::Claim { self.claims.push_back(slot) } else { self.verdicts.push_back(slot) }
            }
            Step::Queue if leaves => return Some(Event::Drain),
            Step::Queue => {
                let alone = matches!(flight.passage.stage(), Stage::Ready(permit) if permit.follows_a_crash());
                if alone && self.takeover.is_some_and(|other| other != slot.place) {
                    self.takeovers.push_back(slot);
                    return None;
                }
                if alone {
                    self.takeover = Some(slot.place);
                }
                // Its slot may have gone to another while its completion was on the way, which turned out to be lost.
                if self.running >= self.settings.in_flight {
                    self.may_run_next.push_back(slot);
                    return None;
                }
                return Some(self.may_begin(flight));
            }
            Step::Run => {
                if let Stage::Ungated(_) = flight.passage.stage() {
                    self.give_up_lease(slot, flight);
                }
                return self.start(slot, flight, Work::Handle);
            }
            Step::Reconcile => return self.start(slot, flight, Work::Reconcile),
            Step::Wake(after) => {
                flight.turn += 1;
                let after = self.jittered(after);
                self.alarms.push(Reverse((Instant::now() + after, slot, flight.turn)));
                return leaves.then_some(Event::Drain);
            }
            Step::Wait => {}
            Step::Settle(_) | Step::Drop => unreachable!("a passage that leaves the road does not travel"),
        }
        None
    }

    /// Holds no lease any more, and renews none.
    pub(super) fn give_up_lease(&mut self, slot: Slot, flight: &mut Flight) {
        if flight.lease.take().is_some() {
            self.given_up.push(slot.place);
        }
    }

    /// Starts the handler or `reconcile`; what it came to, if it was ready at once.
    pub(super) fn start(&mut self, slot: Slot, flight: &mut Flight, work: Work) -> Option<Event> {
        let id = flight.id.clone()?;
        flight.turn += 1;
        let turn = flight.turn;
        let delivery = flight.passage.delivery();
        let (message, failures) = (delivery.message.clone(), delivery.failures);
        let cx = Context { id, attempt: flight.attempt.max(1), failures, message, lease: flight.lease.clone() };
        let began = Instant::now();
        flight.began = Some(began);
        let runner = self.runner.clone();
        let mut run: BoxFuture<'static, Finished> = match work {
            Work::Handle => Box::pin(runner.handle(cx, began)),
            Work::Reconcile => Box::pin(runner.reconcile(cx, began)),
        };
        if self.settings.handlers == Handlers::InPlace {
            // Polled without a waker: if it is not ready, its task polls it again before it sleeps.
            if let Some(finished) = (&mut run).now_or_never() {
                flight.tell(&finished);
                self.measure(flight.began.take());
                return Some(finished.event);
            }
        }
        let report = Report { runs: self.runs.clone(), slot, turn, finished: None };
        let task = tokio::spawn(async move { report.tell(run.await) });
        flight.task = Some(Task(task.abort_handle()));
        self.spawned += 1;
        None
    }

    /// One more run is known; the lease may go by how long they take.
    fn measure(&mut self, began: Option<Instant>) {
        let Some(took) = began.map(|began| began.elapsed()) else { return };
        self.measures.handled(took);
        let Some(shortest) = self.settings.shortest_lease else { return };
        self.pace.ran(took);
        if let Some(lease) = self.pace.lease() {
            self.lease = lease.clamp(shortest, self.settings.lease);
        }
    }

    /// A handler or `reconcile` is over.
    pub(super) fn finished(&mut self, (slot, turn, finished): Ran) {
        let Some(flight) = self.flights.at_mut(slot) else { return };
        if flight.turn != turn {
            return;
        }
        flight.tell(&finished);
        let began = flight.began.take();
        self.measure(began);
        self.happens(slot, finished.event);
    }

    /// The renewals say that a lease is over.
    pub(super) fn lease_over(&mut self, (place, token): Over) {
        let Some(slot) = self.flights.slot(place) else { return };
        let now = Moment::now();
        let theirs = |lease: &Arc<Lease>| lease.token == token && !lease.lives(now); // not one that was granted again since
        if self.flights.at(slot).is_some_and(|flight| flight.lease.as_ref().is_some_and(theirs)) {
            self.happens(slot, Event::LeaseOver);
        }
    }
}
