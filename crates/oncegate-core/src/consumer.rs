//! The loop: it carries steps between the road and the world, and decides nothing.
//!
//! One event loop per consumer, in phases: take in what is ready, let the road say what each
//! delivery does next, ask the store in batches, settle in batches, wait. Nothing ever waits for a
//! batch to fill. The phases stand here; what a phase does with a delivery stands in `travel`, with
//! the store in `asking`, at the end in `leaving`.

mod asking;
mod dispatch;
mod entry;
mod late;
mod leaving;
mod reports;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::asking::Applied;
use self::entry::{FinishedRun, InFlightEntry};
use self::late::LateCompletions;
use self::reports::Reporter;

use crate::breaker::Breaker;
use crate::decode::Decode;
use crate::error::Error;
use crate::fault;
use crate::handler::Handler;
use crate::id::IdSource;
use crate::lanes::Lanes;
use crate::lifecycle::{Event, Policy, Stage};
use crate::marker::{Guarantee, Token, Tokens};
use crate::measures::{Holds, Measures};
use crate::outcome::Outcomes;
use crate::readiness::{Takes, Telling};
use crate::renewals::{Over, Renewals};
use crate::run::Runner;
use crate::runtime_estimator::RuntimeEstimator;
use crate::seen::Seen;
use crate::settings::Settings;
use crate::slots::{Slot, Slots};
use crate::source::{Incoming, Limit, Settled, Source};
use crate::status::{DeliveryState, InFlightDelivery, TELLS_EVERY};
use crate::store::Store;

/// A consumer that runs.
pub(crate) struct Engine<H, D> {
    source: Box<dyn Source>,
    store: Arc<dyn Store>,
    runner: Arc<Runner<H, D>>,
    id: IdSource,
    settings: Settings,
    policy: Policy,
    outcomes: Outcomes,
    measures: Measures,
    renewals: Option<Arc<Renewals>>,

    /// About now, by both clocks: read once for all that happens together.
    clock: Instant,
    wall: SystemTime,

    flights: Slots<Box<InFlightEntry>>,
    /// Those whose handler is over and whose completion is on its way: they hold no slot of a
    /// handler any more.
    completing: usize,
    parked: usize,
    bytes: usize,
    /// Those that wait behind another of their lane, or rest: they are not in flight.
    aside: usize,
    aside_bytes: usize,
    lanes: Lanes,
    /// The delivery that runs alone, because it may be the one that ends processes. Until it is
    /// over nothing else is claimed, so that no other is blamed for what it does to this one.
    alone: Option<Slot>,
    /// Those that wait to run alone. They hold no claim.
    alone_next: VecDeque<Slot>,
    /// How many claims the store is asked for, and how many grants are being withdrawn: what runs
    /// alone begins when there are none.
    claims_asked: usize,
    withdrawing: usize,
    /// How many handlers run, or pause between two runs, and who waits for one of them to end.
    running: usize,
    may_run_next: VecDeque<Slot>,
    /// Places whose lease is not to be renewed any more, for when the next are held.
    given_up: Vec<usize>,
    /// Those whose turn has come because another left its place.
    next_up: VecDeque<(Slot, Event)>,
    /// Those that stood aside and may go on the road, for when there is room on it.
    turns: VecDeque<Slot>,

    claims: VecDeque<Slot>,
    /// Whether a delivery has left since claims were last looked through for those that need not be
    /// asked for any more.
    some_left: bool,
    verdicts: VecDeque<Slot>,
    /// Completions of what passed without the gate.
    late: LateCompletions,
    breaker: Breaker,
    /// Whether the store said that it will never work as it is set up.
    refused: bool,
    says: Reporter,
    /// When to tell what is held, if anybody asked.
    tells_at: Instant,
    pace: RuntimeEstimator,
    /// What a claim asks for now.
    lease: Duration,
    longest_hold: Duration,
    applies: FuturesUnordered<BoxFuture<'static, Applied>>,
    settled: Vec<Settled>,
    alarms: BinaryHeap<Reverse<(Instant, Slot, u32)>>,

    /// How many handlers were spawned since they were last let run.
    spawned: usize,
    runs: UnboundedSender<FinishedRun>,
    ran: UnboundedReceiver<FinishedRun>,
    over: UnboundedReceiver<Over>,
    mode: Mode,
    tokens: Tokens,
    jitter: u64,
}

/// Whether new deliveries are taken in.
enum Mode {
    Taking,
    Draining {
        until: Instant,
        because: Option<Error>,
        phase: DrainPhase,
    },
}

/// What a drain waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainPhase {
    /// The handlers that run.
    Handlers,
    /// The store alone, which records the outcomes of what was dropped: the drain timeout is over.
    Outcomes,
}

/// What a drain does next.
enum DrainStep {
    Wait,
    /// The drain timeout is over, and something is still in flight.
    DropHandlers,
    /// Closes the source, and ends.
    Leave,
}

impl<H: Handler, D: Decode> Engine<H, D> {
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
            _ => Some(
                Renewals::start(store.clone(), settings.shortest_lease(), tell)
                    .map_err(Error::threads)?,
            ),
        };
        Ok(Self {
            lanes: Lanes::new(settings.order.unwrap_or(source.default_order())),
            policy: settings.policy(),
            outcomes: Outcomes::new(),
            measures: Measures::new(),
            clock: Instant::now(),
            wall: SystemTime::now(),
            flights: Slots::new(settings.in_flight),
            source,
            store,
            runner,
            id,
            lease: settings.lease,
            longest_hold: settings.longest_hold(),
            settings,
            renewals,
            completing: 0,
            parked: 0,
            bytes: 0,
            aside: 0,
            aside_bytes: 0,
            alone: None,
            alone_next: VecDeque::new(),
            claims_asked: 0,
            withdrawing: 0,
            running: 0,
            may_run_next: VecDeque::new(),
            given_up: Vec::new(),
            next_up: VecDeque::new(),
            turns: VecDeque::new(),
            claims: VecDeque::new(),
            some_left: false,
            verdicts: VecDeque::new(),
            late: LateCompletions::new(),
            breaker: Breaker::closed(),
            refused: false,
            says: Reporter::nothing_yet(),
            tells_at: Instant::now(),
            pace: RuntimeEstimator::new(),
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
    pub(crate) async fn run(
        mut self,
        mut shutdown: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<(), Error> {
        let mut incoming = Vec::new();
        let _telling = Telling(self.settings.readiness.clone());
        loop {
            self.take_in(&mut incoming).await;
            self.let_handlers_run().await;
            self.give_turns();
            self.ask_the_store();
            self.settle().await;
            if let Mode::Draining { until, phase, .. } = self.mode {
                match self.drain_step(until, phase) {
                    DrainStep::Wait => {}
                    DrainStep::DropHandlers => {
                        self.drop_handlers().await;
                        continue;
                    }
                    DrainStep::Leave => break,
                }
            }
            self.settings.readiness.tell(self.takes());
            self.say_if_crowded();
            self.tell_what_is_held();
            self.measure_what_is_held();
            self.wait(&mut incoming, shutdown.as_mut()).await;
        }
        self.leave().await
    }

    /// Steps back once for the handlers that were just spawned, so that the verdicts of those that
    /// are ready at once travel together. Waits for none that is not.
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
    async fn wait(
        &mut self,
        incoming: &mut Vec<Incoming>,
        shutdown: Pin<&mut impl Future<Output = ()>>,
    ) {
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
                    Some(at) => {
                        tokio::time::sleep(at.saturating_duration_since(Instant::now())).await
                    }
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
        self.read_clocks();
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

    /// Takes in all that is ready, without waiting, so that sources and stores that give one at a
    /// time batch too.
    async fn take_in(&mut self, incoming: &mut Vec<Incoming>) {
        // First what frees slots, so that what comes in next travels with the verdicts that freed
        // them.
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
        self.give_turns();
        loop {
            if !incoming.is_empty() {
                self.read_clocks();
            }
            for it in incoming.drain(..) {
                match it {
                    Incoming::Delivery(delivery) => self.arrived(delivery),
                    Incoming::Revoked(epoch) => self.revoked(epoch),
                }
            }
            if matches!(self.mode, Mode::Draining { .. })
                || self.settled.len() >= self.settings.in_flight
            {
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

    fn takes(&self) -> Takes {
        match self.mode {
            Mode::Taking if self.breaker.opens_at().is_none() => Takes::Messages,
            _ => Takes::Nothing,
        }
    }

    /// Whether nothing may come in because so much waits in order.
    fn is_crowded(&self) -> bool {
        self.aside >= self.settings.waiting || self.aside_bytes >= self.settings.waiting_bytes
    }

    /// One key that is stuck stops all others now: whoever is called at night should not have to
    /// guess.
    fn say_if_crowded(&mut self) {
        if !self.is_crowded() {
            return;
        }
        if let Some(suppressed_lines) = self.says.crowded.due(Instant::now()) {
            let (waiting, bytes) = (self.aside, self.aside_bytes);
            tracing::warn!(
                waiting,
                bytes,
                suppressed_lines,
                "so much waits behind others of its key or partition that nothing more is taken in; see what fails, or raise `waiting` or `waiting_bytes`"
            );
        }
    }

    /// Tells what was seen of the store, if anybody asked.
    fn saw_of_store(&self, what: impl FnOnce(&mut Seen)) {
        if let Some(status) = &self.settings.status {
            status.saw(what);
        }
    }

    fn tell_what_is_held(&mut self) {
        let (Some(status), now) = (&self.settings.status, Instant::now()) else {
            return;
        };
        if now < self.tells_at {
            return;
        }
        self.tells_at = now + TELLS_EVERY;
        let all: Vec<(Instant, Slot)> = self
            .flights
            .slots()
            .filter_map(|slot| Some((self.flights.at(slot)?.arrived, slot)))
            .collect();
        status.tell(self.flights.len() - self.aside, self.aside, all, |slot| {
            let flight = self.flights.at(slot)?;
            Some(InFlightDelivery {
                id: flight.id.clone(),
                origin: flight.passage.delivery().message.origin.clone(),
                since: Duration::ZERO,
                doing: DeliveryState::of(flight.passage.stage()),
                attempt: flight.attempt(),
                crashes: flight.passage.dispatch().attempts.crashes,
            })
        });
    }

    fn measure_what_is_held(&mut self) {
        let stores_away = usize::from(self.breaker.opens_at().is_some());
        let in_flight = self.flights.len() - self.aside;
        self.measures.holds(Holds {
            in_flight,
            waiting: self.aside,
            parked: self.parked,
            stores_away,
        });
    }

    /// How much more may come in. Where nothing may, revocations still do.
    fn room(&self) -> Limit {
        if self.is_crowded() {
            return Limit::NOTHING;
        }
        self.room_on_the_road()
    }

    /// How much more may go on the road, from outside or from aside.
    fn room_on_the_road(&self) -> Limit {
        let holding =
            self.flights.len() - self.aside - self.completing.min(self.settings.in_flight);
        let count = self.settings.in_flight.saturating_sub(holding);
        let bytes = self
            .settings
            .in_flight_bytes
            .saturating_sub(self.bytes - self.aside_bytes);
        if count > 0 && bytes > 0 {
            Limit { count, bytes }
        } else {
            Limit::NOTHING
        }
    }

    /// What stood aside goes on, before anything new comes in, as far as there is room.
    fn give_turns(&mut self) {
        while !self.turns.is_empty() && self.room_on_the_road() != Limit::NOTHING {
            if let Some(slot) = self.turns.pop_front() {
                self.enter_road(slot);
            }
        }
    }

    fn read_clocks(&mut self) {
        (self.clock, self.wall) = (Instant::now(), SystemTime::now());
    }

    /// Renews what was given up no more.
    fn let_leases_go(&mut self) {
        if let (Some(renewals), false) = (&self.renewals, self.given_up.is_empty()) {
            renewals.let_go(self.given_up.drain(..));
        }
    }

    /// Hands over what is settled.
    async fn settle(&mut self) {
        self.let_leases_go();
        if self.settled.is_empty() {
            return;
        }
        let mut settled = std::mem::take(&mut self.settled);
        fault::point("settle.before");
        let result = self.source.settle(&mut settled).await;
        fault::point("settle.after");
        settled.clear();
        self.settled = settled; // its allocation serves the next batch
        if let Err(error) = result {
            self.drain(Some(error.into()), self.settings.drain).await;
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
            let Some(flight) = self.flights.at(slot).filter(|flight| flight.turn == turn) else {
                continue;
            };
            let stage = flight.passage.stage();
            if let Stage::New(_) = stage {
                self.turns.push_back(slot);
                continue;
            }
            let too_late = stage.waits_on_lease() && flight.lease_is_over();
            self.happens(
                slot,
                if too_late {
                    Event::LeaseOver
                } else {
                    Event::Woke
                },
            );
        }
    }

    /// When to look again at the latest.
    fn next_alarm(&self) -> Option<Instant> {
        let alarm = self.alarms.peek().map(|Reverse((at, ..))| *at);
        let asks_at = |at: Instant| self.breaker.opens_at().map_or(at, |opens| opens.max(at));
        let late =
            (!self.late.is_empty() && self.applies.is_empty()).then(|| asks_at(self.late.due));
        let due =
            || !self.verdicts.is_empty() || self.claims.iter().any(|slot| self.may_claim(*slot));
        let breaker = self
            .breaker
            .opens_at()
            .filter(|_| self.applies.is_empty() && due());
        let over = match self.mode {
            Mode::Draining { until, .. } => Some(until),
            Mode::Taking => None,
        };
        let turns = (!self.turns.is_empty() && self.room_on_the_road() != Limit::NOTHING)
            .then(Instant::now);
        let tells = self.settings.status.is_some().then_some(self.tells_at);
        [alarm, late, breaker, over, turns, tells]
            .into_iter()
            .flatten()
            .min()
    }

    /// A pause, spread by a quarter to either side, so that what failed together does not return
    /// together.
    fn jittered(&mut self, pause: Duration) -> Duration {
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        pause.mul_f64(0.75 + (self.jitter >> 11) as f64 / (1u64 << 53) as f64 / 2.0)
    }
}
