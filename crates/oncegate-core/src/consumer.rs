//! The loop: it carries steps between the road and the world, and decides nothing.
//!
//! One event loop per consumer, in phases: take in what is ready, let the road say what each delivery does next, ask the
//! store in batches, settle in batches, wait. Nothing ever waits for a batch to fill.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;

use crate::breaker::{Breaker, Judgement};
use crate::builder::age;
use crate::context::Context;
use crate::decode::Decode;
use crate::error::Error;
use crate::handler::Handler;
use crate::id::{IdSource, Key, MessageId};
use crate::lanes::{Lane, Lanes, Turn, Waited};
use crate::lease::Lease;
use crate::marker::{Ask, Guarantee, Operation, Terms, Token, Tokens, Verdict};
use crate::message::Message;
use crate::outcome::Outcomes;
use crate::passage::{Onward, Passage};
use crate::renewals::{Over, Renewals};
use crate::road::{Event, Freshness, History, Outage, Policy, Settlement, Stage, Step};
use crate::run::{Finished, Runner, what_it_said};
use crate::settings::{Handlers, Settings};
use crate::slots::{Slot, Slots};
use crate::source::{Delivery, Incoming, Limit, Settled, Source};
use crate::store::{Store, StoreError};

/// A consumer that runs.
pub(crate) struct Running<H, D> {
    source: Box<dyn Source>,
    store: Arc<dyn Store>,
    runner: Arc<Runner<H, D>>,
    id: IdSource,
    settings: Settings,
    policy: Policy,
    outcomes: Outcomes,
    renewals: Option<Arc<Renewals>>,

    flights: Slots<Flight>,
    /// Those whose handler is over and whose completion is on its way: they hold no slot of a handler any more.
    completing: usize,
    bytes: usize,
    lanes: Lanes,
    /// A delivery that an earlier attempt may have crashed on runs alone among its kind, so that it does not spend the
    /// attempts of its neighbours.
    takeover: Option<usize>,
    takeovers: VecDeque<Slot>,
    /// Those whose turn has come because another left its place.
    next_up: VecDeque<(Slot, Event)>,

    claims: VecDeque<Slot>,
    verdicts: VecDeque<Slot>,
    /// Completions of what passed without the gate, for when the store is back, and when to try.
    late: VecDeque<Operation>,
    late_after: Instant,
    breaker: Breaker,
    applies: FuturesUnordered<BoxFuture<'static, Applied>>,
    settled: Vec<Settled>,
    alarms: BinaryHeap<Reverse<(Instant, Slot, u32)>>,

    /// How many handlers were spawned since they were last let run.
    spawned: usize,
    runs: UnboundedSender<Ran>,
    ran: UnboundedReceiver<Ran>,
    over: UnboundedReceiver<Over>,
    mode: Mode,
    tokens: Tokens,
    jitter: u64,
}

/// One delivery in flight.
struct Flight {
    passage: Passage,
    id: Option<MessageId>,
    key: Option<Key>,
    terms: Terms,
    token: Token,
    attempt: u32,
    ask: Ask,
    lane: Option<Lane>,
    lease: Option<Arc<Lease>>,
    task: Option<Task>,
    stays: Stays,
    /// Counts runs and alarms, so that what comes too late is told apart.
    turn: u32,
    bytes: usize,
}

/// Whether a delivery may still begin something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stays {
    Here,
    /// The consumer drains, or the delivery belongs to someone else soon.
    Leaves,
}

/// A batch that came back from the store.
struct Applied {
    slots: Vec<Option<Slot>>,
    operations: Vec<Operation>,
    sent: Instant,
    answers: Vec<Result<Verdict, StoreError>>,
}

/// A handler that is over: where, in which turn, and what it came to.
type Ran = (Slot, u32, Finished);

/// Whether new deliveries are taken in.
enum Mode {
    Taking,
    Draining { until: Instant, because: Option<Error> },
}

/// How many completions of deliveries that passed without the gate wait for the store at the most.
const LATE_COMPLETIONS: usize = 100_000;

impl<H: Handler, D: Decode> Running<H, D> {
    pub(crate) fn new(
        source: Box<dyn Source>,
        store: Arc<dyn Store>,
        runner: Arc<Runner<H, D>>,
        id: IdSource,
        settings: Settings,
    ) -> Result<Self, Error> {
        let (runs, ran) = unbounded_channel();
        let (tell, over) = unbounded_channel();
        let renewals = match settings.guarantee {
            Guarantee::Bare => None,
            _ => Some(Renewals::start(store.clone(), settings.lease, tell).map_err(Error::threads)?),
        };
        Ok(Self {
            lanes: Lanes::new(settings.order.unwrap_or(source.default_order())),
            policy: settings.policy(),
            outcomes: Outcomes::new(),
            flights: Slots::new(settings.in_flight),
            source,
            store,
            runner,
            id,
            settings,
            renewals,
            completing: 0,
            bytes: 0,
            takeover: None,
            takeovers: VecDeque::new(),
            next_up: VecDeque::new(),
            claims: VecDeque::new(),
            verdicts: VecDeque::new(),
            late: VecDeque::new(),
            late_after: Instant::now(),
            breaker: Breaker::closed(),
            applies: FuturesUnordered::new(),
            settled: Vec::new(),
            alarms: BinaryHeap::new(),
            spawned: 0,
            runs,
            ran,
            over,
            mode: Mode::Taking,
            tokens: Tokens::default(),
            jitter: Token::random().0 as u64 | 1,
        })
    }

    /// Runs until `shutdown`, then drains.
    pub(crate) async fn run(mut self, mut shutdown: Pin<&mut impl Future<Output = ()>>) -> Result<(), Error> {
        let mut incoming = Vec::new();
        loop {
            self.take_in(&mut incoming).await;
            self.let_handlers_run().await;
            self.ask_the_store();
            self.settle().await;
            if let Mode::Draining { until, .. } = self.mode
                && ((self.flights.is_empty() && self.late.is_empty() && self.applies.is_empty()) || Instant::now() >= until)
            {
                break;
            }
            self.wait(&mut incoming, shutdown.as_mut()).await;
        }
        self.leave().await
    }

    /// Steps back once for the handlers that were just spawned, so that the verdicts of those that are ready at once
    /// travel together. Waits for none that is not.
    async fn let_handlers_run(&mut self) {
        if std::mem::take(&mut self.spawned) == 0 {
            return;
        }
        tokio::task::yield_now().await;
        while let Ok(ran) = self.ran.try_recv() {
            self.finished(ran);
        }
    }

    /// Sleeps until something happens, and takes note of the first thing that did.
    async fn wait(&mut self, incoming: &mut Vec<Incoming>, shutdown: Pin<&mut impl Future<Output = ()>>) {
        let limit = self.room();
        let alarm = self.next_alarm();
        let mut applied = None;
        let mut ran = None;
        let mut over = None;
        let mut failed = None;
        let mut stopping = false;
        {
            let draining = matches!(self.mode, Mode::Draining { .. });
            let sleep = async {
                match alarm {
                    Some(at) => tokio::time::sleep(at.saturating_duration_since(Instant::now())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased; // what is over before what was lost meanwhile, and the source, which may never run dry, last
                () = shutdown, if !draining => stopping = true,
                finished = self.ran.recv() => ran = finished,
                answer = self.applies.next(), if !self.applies.is_empty() => applied = answer,
                lost = self.over.recv(), if self.renewals.is_some() => over = Some(lost),
                () = sleep => {}
                received = self.source.receive(limit, incoming), if !draining => failed = received.err(),
            }
        }
        if let Some(error) = failed {
            self.drain(Some(error.into()), self.settings.drain).await;
        }
        if stopping {
            self.drain(None, self.settings.drain).await;
        }
        if let Some(applied) = applied {
            self.answered(applied).await;
        }
        if let Some(ran) = ran {
            self.finished(ran);
        }
        match over {
            Some(Some(over)) => self.lease_over(over),
            Some(None) => {
                self.renewals = None; // nothing is heard from them any more
                self.drain(Some(Error::Renewals), self.settings.drain).await;
            }
            None => {}
        }
    }

    /// Takes in all that is ready, without waiting, so that sources and stores that give one at a time batch too.
    async fn take_in(&mut self, incoming: &mut Vec<Incoming>) {
        // First what frees slots, so that what comes in next travels with the verdicts that freed them.
        while let Ok(ran) = self.ran.try_recv() {
            self.finished(ran);
        }
        while let Some(Some(applied)) = self.applies.next().now_or_never() {
            self.answered(applied).await;
        }
        while let Ok(over) = self.over.try_recv() {
            self.lease_over(over);
        }
        self.ring();
        loop {
            for it in incoming.drain(..) {
                match it {
                    Incoming::Delivery(delivery) => self.arrived(delivery),
                    Incoming::Revoked(epoch) => self.revoked(epoch),
                }
            }
            if matches!(self.mode, Mode::Draining { .. }) || self.settled.len() >= self.settings.in_flight {
                break;
            }
            match self.source.receive(self.room(), incoming).now_or_never() {
                None => break,
                Some(Ok(())) if incoming.is_empty() => break,
                Some(Ok(())) => {}
                Some(Err(error)) => self.drain(Some(error.into()), self.settings.drain).await,
            }
        }
    }

    /// How much more may come in. Where nothing may, revocations still do.
    fn room(&self) -> Limit {
        let holding = self.flights.len() - self.completing.min(self.settings.in_flight);
        let count = self.settings.in_flight.saturating_sub(holding);
        let bytes = self.settings.in_flight_bytes.saturating_sub(self.bytes);
        if count > 0 && bytes > 0 { Limit { count, bytes } } else { Limit::NOTHING }
    }

    /// A delivery takes its slot.
    fn arrived(&mut self, delivery: Delivery) {
        let (id, terms, said) = self.identify(&delivery.message);
        let freshness = match age(&delivery.message) {
            Some(age) if age > self.settings.max_age() => {
                self.outcomes.too_old();
                Freshness::TooOld
            }
            _ => Freshness::Fresh,
        };
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
            task: None,
            stays: Stays::Here,
            turn: 0,
            bytes,
        };
        self.bytes += bytes;
        let slot = self.flights.insert(flight);
        match lane.map_or(Turn::Now, |lane| self.lanes.enter(lane, slot)) {
            Turn::Now => self.enter_road(slot),
            Turn::Later => {}
        }
    }

    /// The id and the terms of a message. The user's functions run here: one that panics has found no id.
    fn identify(&self, message: &Message) -> (Option<MessageId>, Terms, Option<String>) {
        let read = || (self.id.read(message), self.settings.terms(message));
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
    fn enter_road(&mut self, slot: Slot) {
        if let Some(event) = self.first_event(slot) {
            self.happens(slot, event);
        }
    }

    fn first_event(&self, slot: Slot) -> Option<Event> {
        let flight = self.flights.at(slot)?;
        Some(match flight.stays {
            Stays::Leaves => Event::Drain,
            Stays::Here if matches!(self.mode, Mode::Draining { .. }) => Event::Drain,
            Stays::Here if flight.id.is_some() => Event::Arrived,
            Stays::Here => Event::NoId,
        })
    }

    /// Something happened to a delivery, and to those that waited for it to leave.
    fn happens(&mut self, slot: Slot, event: Event) {
        self.advance(slot, event);
        // In a loop of its own: a lane of thousands that leaves at once must not be as many calls deep.
        while let Some((slot, event)) = self.next_up.pop_front() {
            self.advance(slot, event);
        }
    }

    /// The road says what a delivery does next, and this does it.
    fn advance(&mut self, slot: Slot, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let Some(flight) = self.flights.take(slot) else { return };
            self.outcomes.happened(event);
            let Flight { passage, id, key, terms, token, attempt, ask, lane, lease, task, stays, turn, bytes } = flight;
            let completed = usize::from(matches!(passage.stage(), Stage::Completing(_)));
            self.completing -= completed;
            match passage.next(event, &self.policy) {
                Onward::Travels(passage, step) => {
                    self.completing += usize::from(matches!(passage.stage(), Stage::Completing(_)));
                    let mut flight = Flight { passage, id, key, terms, token, attempt, ask, lane, lease, task, stays, turn, bytes };
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
                Onward::Left(mut settled) => {
                    drop(task);
                    if let Settlement::Reject(_) = settled.settlement {
                        let story = settled.story.get_or_insert_default();
                        story.id = id.as_ref().map(MessageId::to_string);
                        story.attempts = attempt;
                    }
                    tracing::debug_span!("oncegate.settle", id = id.as_ref().map(tracing::field::display), attempt, outcome = ?settled.settlement)
                        .in_scope(|| self.outcomes.settled(&settled.settlement));
                    if let (Settlement::Accept(proof), Some(key)) = (&settled.settlement, key)
                        && proof.as_str() == "passed_without_gate"
                        && self.late.len() < LATE_COMPLETIONS
                    {
                        // Whatever became of its claim: with the same token it is granted, and then completed.
                        self.late.push_back(Operation { key, ask: Ask::Claim, token, attempt: 0, terms });
                    }
                    self.settled.push(settled);
                    self.left(slot, lane, lease, bytes);
                }
                Onward::Dropped(_) => {
                    drop(task);
                    self.outcomes.dropped();
                    self.left(slot, lane, lease, bytes);
                }
            }
        }
    }

    /// Does what the road said; what follows at once, if something does.
    fn carry_out(&mut self, slot: Slot, flight: &mut Flight, step: Step) -> Option<Event> {
        let leaves = flight.stays == Stays::Leaves;
        match step {
            Step::ClaimAnew => {
                flight.turn += 1;
                flight.token = self.tokens.token();
                flight.attempt = 0;
                self.give_up_lease(slot, flight);
                flight.ask = Ask::Claim;
                self.claims.push_back(slot);
                return leaves.then_some(Event::Drain);
            }
            Step::Ask(ask) => {
                flight.turn += 1; // an alarm that was set before must not ask a second time: it would come after the answer
                flight.ask = ask;
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
                return Some(if flight.lease_is_over() { Event::LeaseOver } else { Event::Slot });
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
    fn give_up_lease(&self, slot: Slot, flight: &mut Flight) {
        if let (Some(renewals), Some(_)) = (&self.renewals, flight.lease.take()) {
            renewals.let_go(std::iter::once(slot.place));
        }
    }

    /// Starts the handler or `reconcile`; what it came to, if it was ready at once.
    fn start(&mut self, slot: Slot, flight: &mut Flight, work: Work) -> Option<Event> {
        let id = flight.id.clone()?;
        flight.turn += 1;
        let turn = flight.turn;
        let message = flight.passage.delivery().message.clone();
        let cx = Context { id, attempt: flight.attempt.max(1), message, lease: flight.lease.clone() };
        let runner = self.runner.clone();
        let runs = self.runs.clone();
        let mut run: BoxFuture<'static, Finished> = match work {
            Work::Handle => Box::pin(runner.handle(cx)),
            Work::Reconcile => Box::pin(runner.reconcile(cx)),
        };
        if self.settings.handlers == Handlers::InPlace {
            // Polled without a waker: if it is not ready, its task polls it again before it sleeps.
            if let Some(finished) = (&mut run).now_or_never() {
                flight.tell(&finished);
                return Some(finished.event);
            }
        }
        let report = Report { runs, slot, turn, finished: None };
        let task = tokio::spawn(async move { report.tell(run.await) });
        flight.task = Some(Task(task.abort_handle()));
        self.spawned += 1;
        None
    }

    /// A handler or `reconcile` is over.
    fn finished(&mut self, (slot, turn, finished): Ran) {
        let Some(flight) = self.flights.at_mut(slot) else { return };
        if flight.turn != turn {
            return;
        }
        flight.tell(&finished);
        self.happens(slot, finished.event);
    }

    /// The renewals say that a lease is over.
    fn lease_over(&mut self, (place, token): Over) {
        let Some(slot) = self.flights.slot(place) else { return };
        let now = Instant::now();
        let theirs = |lease: &Arc<Lease>| lease.token == token && !lease.lives(now); // not one that was granted again since
        if self.flights.at(slot).is_some_and(|flight| flight.lease.as_ref().is_some_and(theirs)) {
            self.happens(slot, Event::LeaseOver);
        }
    }

    /// Asks the store: verdicts that are due and claims of what has arrived share one apply.
    fn ask_the_store(&mut self) {
        let at_once = match self.breaker.judge(Instant::now()) {
            Judgement::Ask if self.source.overlap() => self.store.parallel_applies().max(1),
            Judgement::Ask | Judgement::TryOnce => 1,
            Judgement::Wait => return self.pass_claims_by(),
        };
        let chunk = self.source.chunk().max(1);
        while self.applies.len() < at_once {
            let verdicts = self.verdicts.len().min(chunk);
            let claims = self.claims.len().min(chunk);
            let late = if Instant::now() >= self.late_after { self.late.len().min(chunk) } else { 0 };
            if verdicts + claims + late == 0 {
                return;
            }
            let mut slots = Vec::with_capacity(verdicts + claims + late);
            let mut operations = Vec::with_capacity(verdicts + claims + late);
            for slot in self.verdicts.drain(..verdicts).chain(self.claims.drain(..claims)) {
                let Some(flight) = self.flights.at(slot) else { continue };
                let Some(key) = flight.key.clone() else { continue };
                slots.push(Some(slot));
                operations.push(Operation { key, ask: flight.ask, token: flight.token, attempt: flight.attempt, terms: flight.terms });
            }
            for operation in self.late.drain(..late) {
                slots.push(None);
                operations.push(operation);
            }
            if operations.is_empty() {
                continue;
            }
            let store = self.store.clone();
            self.applies.push(Box::pin(async move {
                let sent = Instant::now();
                let answers = store.apply(&operations).await;
                Applied { slots, operations, sent, answers }
            }));
        }
    }

    /// While the store is not asked, claims that may pass without it do so at once.
    fn pass_claims_by(&mut self) {
        if self.policy.outage != Outage::PassThrough {
            return;
        }
        for slot in std::mem::take(&mut self.claims) {
            self.happens(slot, Event::Unavailable);
        }
    }

    /// A batch came back.
    async fn answered(&mut self, applied: Applied) {
        let Applied { slots, operations, sent, mut answers } = applied;
        if answers.len() != operations.len() {
            answers.clear();
            answers.resize_with(operations.len(), || Err(StoreError::Unknown("the store answered with another number of verdicts".into())));
        }
        let mut granted = Vec::new();
        let mut misconfigured = None;
        let mut unavailable = None;
        let mut events = Vec::with_capacity(slots.len());
        for ((slot, operation), answer) in slots.into_iter().zip(operations).zip(answers) {
            let Some(slot) = slot else {
                self.answered_late(operation, answer);
                continue;
            };
            let event = match answer {
                Ok(verdict) => {
                    self.note(slot, &operation, verdict, sent, &mut granted);
                    Event::Answer(verdict)
                }
                Err(error @ StoreError::Misconfigured(_)) => {
                    misconfigured = Some(error);
                    Event::Unavailable
                }
                Err(error) => {
                    unavailable = Some(error);
                    Event::Unavailable
                }
            };
            events.push((slot, event));
        }
        if let Some(renewals) = &self.renewals {
            renewals.hold(granted.into_iter());
        }
        if let Some(error) = unavailable {
            tracing::warn!(%error, "the store does not answer: deliveries wait");
        }
        if events.iter().any(|(_, event)| *event != Event::Unavailable) {
            self.breaker.answered();
        } else if !events.is_empty() {
            self.breaker.silent(Instant::now());
        }
        for (slot, event) in events {
            self.happens(slot, event);
        }
        if let Some(error) = misconfigured {
            tracing::error!(%error, "stopping");
            self.drain(Some(error.into()), self.settings.drain).await;
        }
    }

    /// What passed without the gate is claimed and completed when the store is back.
    fn answered_late(&mut self, operation: Operation, answer: Result<Verdict, StoreError>) {
        match answer {
            Ok(Verdict::Granted { attempt } | Verdict::InDoubt { attempt }) => {
                self.late.push_back(Operation { ask: Ask::Complete, attempt, ..operation });
            }
            Ok(Verdict::Duplicate | Verdict::Done { .. }) => {}
            Ok(verdict) => tracing::warn!(key = operation.key.as_str(), ?verdict, "it ran without the gate, and someone else has its id"),
            Err(_) => {
                self.late_after = Instant::now() + self.policy.longest_backoff.min(Duration::from_secs(1));
                self.late.push_back(operation);
            }
        }
    }

    /// Writes down the permit that a verdict gives.
    fn note(&mut self, slot: Slot, operation: &Operation, verdict: Verdict, sent: Instant, granted: &mut Vec<(usize, Arc<Lease>)>) {
        let span = match operation.ask {
            Ask::Claim => {
                tracing::debug_span!("oncegate.claim", key = operation.key.as_str(), attempt = operation.attempt, outcome = ?verdict)
            }
            _ => {
                tracing::debug_span!("oncegate.complete", key = operation.key.as_str(), attempt = operation.attempt, ask = ?operation.ask, outcome = ?verdict)
            }
        };
        let _entered = span.enter();
        let (Verdict::Granted { attempt } | Verdict::InDoubt { attempt }) = verdict else { return };
        let ends = sent + self.settings.longest_hold();
        let Some(flight) = self.flights.at_mut(slot) else { return };
        flight.attempt = attempt;
        if self.renewals.is_some() {
            let lease = Arc::new(Lease::new(operation, attempt, sent, ends));
            flight.lease = Some(lease.clone());
            granted.push((slot.place, lease));
        }
    }

    /// Hands over what is settled.
    async fn settle(&mut self) {
        if self.settled.is_empty() {
            return;
        }
        let mut settled = std::mem::take(&mut self.settled);
        let result = self.source.settle(&mut settled).await;
        settled.clear();
        self.settled = settled; // its allocation serves the next batch
        if let Err(error) = result {
            self.drain(Some(error.into()), self.settings.drain).await;
        }
    }

    /// A delivery's place is free: its lane and the next takeover go on.
    fn left(&mut self, slot: Slot, lane: Option<Lane>, lease: Option<Arc<Lease>>, bytes: usize) {
        self.flights.remove(slot);
        self.bytes -= bytes;
        if let (Some(renewals), Some(_)) = (&self.renewals, lease) {
            renewals.let_go(std::iter::once(slot.place));
        }
        self.end_takeover(slot);
        let Some(lane) = lane else { return };
        if self.lanes.withdraw(lane, slot) == Waited::Yes {
            return;
        }
        if let Some(next) = self.lanes.leave(lane)
            && let Some(event) = self.first_event(next)
        {
            self.next_up.push_back((next, event));
        }
    }

    /// If this was the one that ran alone, the next delivery may start that an earlier attempt may have crashed on.
    fn end_takeover(&mut self, slot: Slot) {
        if self.takeover != Some(slot.place) {
            return;
        }
        self.takeover = None;
        while let Some(slot) = self.takeovers.pop_front() {
            let Some(flight) = self.flights.at(slot) else { continue };
            if let Stage::Ready(_) = flight.passage.stage() {
                self.takeover = Some(slot.place);
                self.next_up.push_back((slot, if flight.lease_is_over() { Event::LeaseOver } else { Event::Slot }));
                return;
            }
        }
    }

    /// Deliveries of this epoch belong to someone else soon.
    fn revoked(&mut self, epoch: u64) {
        let theirs: Vec<Slot> = self
            .flights
            .slots()
            .filter(|slot| self.flights.at(*slot).is_some_and(|it| it.passage.delivery().receipt.epoch == epoch))
            .collect();
        for slot in theirs {
            self.leaves(slot);
        }
    }

    /// A delivery begins nothing new from here on.
    fn leaves(&mut self, slot: Slot) {
        if let Some(flight) = self.flights.at_mut(slot) {
            flight.stays = Stays::Leaves;
            self.happens(slot, Event::Drain);
        }
    }

    /// Begins to drain: nothing new comes in, what has not started is given back.
    async fn drain(&mut self, because: Option<Error>, bound: Duration) {
        let until = Instant::now() + bound;
        match &mut self.mode {
            Mode::Draining { until: earlier, because: first } => {
                *earlier = until.min(*earlier);
                if first.is_none() {
                    *first = because;
                }
                return;
            }
            mode @ Mode::Taking => *mode = Mode::Draining { until, because },
        }
        tracing::info!(in_flight = self.flights.len(), "draining");
        self.source.stop().await;
        let all: Vec<Slot> = self.flights.slots().collect();
        for slot in all {
            self.leaves(slot);
        }
    }

    /// Lets go of what did not finish, and closes the source.
    async fn leave(mut self) -> Result<(), Error> {
        let left: Vec<Slot> = self.flights.slots().collect();
        if !left.is_empty() {
            tracing::warn!(in_flight = left.len(), "the drain is over; what did not finish comes back after its lease");
        }
        for slot in left {
            self.happens(slot, Event::DrainOver);
        }
        self.settle().await;
        let bound = Instant::now() + self.settings.drain.clamp(Duration::from_secs(1), Duration::from_secs(10));
        let closed = self.source.close(bound).await;
        match self.mode {
            Mode::Draining { because: Some(error), .. } => Err(error),
            _ => Ok(closed?),
        }
    }

    /// Wakes what has waited long enough.
    fn ring(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((at, slot, turn))) = self.alarms.peek().copied() {
            if at > now {
                return;
            }
            self.alarms.pop();
            let Some(flight) = self.flights.at(slot).filter(|flight| flight.turn == turn) else { continue };
            let too_late = flight.passage.stage().waits_on_lease() && flight.lease_is_over();
            self.happens(slot, if too_late { Event::LeaseOver } else { Event::Woke });
        }
    }

    /// When to look again at the latest.
    fn next_alarm(&self) -> Option<Instant> {
        let alarm = self.alarms.peek().map(|Reverse((at, ..))| *at);
        let late = (!self.late.is_empty() && self.applies.is_empty()).then_some(self.late_after);
        let due = !self.claims.is_empty() || !self.verdicts.is_empty();
        let breaker = self.breaker.opens_at().filter(|_| due && self.applies.is_empty());
        let over = match self.mode {
            Mode::Draining { until, .. } => Some(until),
            Mode::Taking => None,
        };
        [alarm, late, breaker, over].into_iter().flatten().min()
    }

    /// A pause, spread by a quarter to either side, so that what failed together does not return together.
    fn jittered(&mut self, pause: Duration) -> Duration {
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        pause.mul_f64(0.75 + (self.jitter >> 11) as f64 / (1u64 << 53) as f64 / 2.0)
    }
}

/// What to start.
enum Work {
    Handle,
    Reconcile,
}

/// Whether a handler or `reconcile` belongs to this stage; in any other it is dropped.
fn runs(stage: Stage) -> bool {
    matches!(stage, Stage::Running(..) | Stage::Reconciling(..) | Stage::Ungated(_))
}

/// A handler that runs: dropping this drops it.
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What is sent when a spawned handler is over, however it ends.
struct Report {
    runs: UnboundedSender<Ran>,
    slot: Slot,
    turn: u32,
    finished: Option<Finished>,
}

impl Report {
    fn tell(mut self, finished: Finished) {
        self.finished = Some(finished);
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let finished = self.finished.take().unwrap_or_else(Finished::lost);
        let _ = self.runs.send((self.slot, self.turn, finished)); // the loop is gone: nobody wants to know
    }
}

impl Flight {
    fn lease_is_over(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| !lease.lives(Instant::now()))
    }

    /// Keeps what a run said for whoever finds the message in the dead letters.
    fn tell(&mut self, finished: &Finished) {
        let Some(error) = &finished.error else { return };
        let error: String = error.chars().take(1000).collect();
        self.passage.tell(|story| {
            story.first_error.get_or_insert_with(|| error.clone());
            story.last_error = Some(error);
        });
    }
}
