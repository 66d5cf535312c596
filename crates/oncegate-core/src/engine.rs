//! The event loop of one consumer. It executes the actions of [`crate::lifecycle`] and decides
//! nothing itself.
//!
//! Each iteration polls everything that is ready, advances each delivery, sends batches to the
//! store, settles in batches, and sleeps. It never waits for a batch to fill. This file has the
//! phases; `dispatch` executes actions, `store_batches` talks to the store, `drain` stops the consumer.

mod dispatch;
mod drain;
mod entry;
mod late;
mod reports;
mod store_batches;
mod suspects;

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

use self::entry::{FinishedRun, InFlightEntry};
use self::late::LateCompletions;
use self::reports::Reporter;
use self::store_batches::AnsweredBatch;
use self::suspects::Suspects;

use crate::breaker::Breaker;
use crate::consumer_metrics::{ConsumerMetrics, GaugeValues};
use crate::decode::Decode;
use crate::error::Error;
use crate::fault;
use crate::handler::Handler;
use crate::id::IdSource;
use crate::lifecycle::{Event, Policy, Stage};
use crate::marker::{Guarantee, Token, Tokens};
use crate::ordering::OrderingQueues;
use crate::outcome::Outcomes;
use crate::readiness::{NotReadyOnDrop, ReadinessState};
use crate::renewals::{LostLease, Renewals};
use crate::run::Runner;
use crate::runtime_estimator::RuntimeEstimator;
use crate::settings::Settings;
use crate::slots::{Slot, Slots};
use crate::source::{Incoming, Limit, Settled, Source, SourceProperties};
use crate::status::{DeliveryState, InFlightDelivery, PUBLISH_INTERVAL};
use crate::store::Store;
use crate::store_health::StoreHealth;

/// The state of one running consumer.
pub(crate) struct Engine<H, D> {
    source: Box<dyn Source>,
    source_properties: SourceProperties,
    store: Arc<dyn Store>,
    runner: Arc<Runner<H, D>>,
    id: IdSource,
    settings: Settings,
    policy: Policy,
    outcomes: Outcomes,
    metrics: ConsumerMetrics,
    renewals: Option<Arc<Renewals>>,

    /// The monotonic and the wall clock, read once for all events that are processed together.
    clock: Instant,
    wall: SystemTime,

    entries: Slots<Box<InFlightEntry>>,
    /// Deliveries whose handler has returned and whose completion is not answered yet. They no
    /// longer count towards `max_in_flight`.
    completing: usize,
    /// Deliveries that wait before they repeat their claim.
    awaiting_holder: usize,
    /// Bytes of all deliveries, queued ones included.
    bytes: usize,
    /// Deliveries that are queued behind their ordering key or are backing off. They do
    /// not count towards `max_in_flight`.
    queued: usize,
    queued_bytes: usize,
    ordering: OrderingQueues,
    suspects: Suspects,
    /// Claims that were sent and are not answered, and grants that are being withdrawn. A suspect
    /// starts when both are 0.
    claims_sent: usize,
    withdrawing: usize,
    /// Handlers that run or pause between two runs, and the deliveries that wait for one to end.
    running: usize,
    awaiting_run: VecDeque<Slot>,
    /// Slab indexes of ended leases. Their renewal is stopped before new leases use the same indexes.
    ended_leases: Vec<usize>,
    /// Events for deliveries that may proceed because another one was settled.
    follow_ups: VecDeque<(Slot, Event)>,
    /// Queued deliveries that may proceed as soon as there is capacity.
    resumable: VecDeque<Slot>,

    /// Deliveries whose claim is to be sent.
    claims: VecDeque<Slot>,
    /// Whether a delivery has started to drain since unsent claims were last dropped.
    drain_started: bool,
    /// Deliveries with an operation other than a claim that is to be sent to the store.
    unsent_outcomes: VecDeque<Slot>,
    /// Completions of messages that were handled without the gate.
    late_completions: LateCompletions,
    breaker: Breaker,
    /// Whether the store reported that it is misconfigured.
    store_misconfigured: bool,
    reporter: Reporter,
    /// When to publish the next status, if the user passed a [`ConsumerStatus`].
    ///
    /// [`ConsumerStatus`]: crate::ConsumerStatus
    next_status_at: Instant,
    runtimes: RuntimeEstimator,
    /// The lease of the next claim.
    lease: Duration,
    longest_hold: Duration,
    /// Batches that the store has not answered.
    applies: FuturesUnordered<BoxFuture<'static, AnsweredBatch>>,
    settled: Vec<Settled>,
    /// When to wake a delivery, with the turn for which the alarm was set.
    alarms: BinaryHeap<Reverse<(Instant, Slot, u32)>>,

    /// How many handlers were spawned since the loop last yielded to them.
    spawned: usize,
    run_sender: UnboundedSender<FinishedRun>,
    finished_runs: UnboundedReceiver<FinishedRun>,
    lost_leases: UnboundedReceiver<LostLease>,
    mode: Mode,
    tokens: Tokens,
    /// The state of the generator of [`Engine::jittered`].
    jitter: u64,
}

/// Whether the consumer receives.
enum Mode {
    Receiving,
    Draining {
        until: Instant,
        because: Option<Error>,
        phase: DrainPhase,
    },
}

/// What the drain waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainPhase {
    /// Running handlers and the store.
    Handlers,
    /// Only the store, which records the outcomes of dropped handlers: the drain timeout is over.
    Outcomes,
}

/// What a drain does next.
enum DrainStep {
    Wait,
    /// The drain timeout is over, and deliveries are still in flight.
    DropHandlers,
    /// Close the source and end.
    Close,
}

impl<H: Handler, D: Decode> Engine<H, D> {
    pub(crate) fn new(
        source: Box<dyn Source>,
        store: Arc<dyn Store>,
        runner: Arc<Runner<H, D>>,
        id: IdSource,
        settings: Settings,
    ) -> Result<Self, Error> {
        let (run_sender, finished_runs) = unbounded_channel();
        let (lost_lease_sender, lost_leases) = unbounded_channel();
        let renewals = match settings.guarantee {
            Guarantee::Bare => None,
            _ => Some(
                Renewals::start(
                    store.clone(),
                    settings.shortest_lease(),
                    lost_lease_sender,
                    tokio::runtime::Handle::try_current().ok(),
                )
                .map_err(Error::renewal_thread)?,
            ),
        };
        let source_properties = source.properties();
        Ok(Self {
            ordering: OrderingQueues::new(
                settings.order.unwrap_or(source_properties.default_order),
            ),
            policy: settings.policy(),
            outcomes: Outcomes::new(),
            metrics: ConsumerMetrics::new(),
            clock: Instant::now(),
            wall: SystemTime::now(),
            entries: Slots::new(settings.max_in_flight),
            source_properties,
            source,
            store,
            runner,
            id,
            lease: settings.lease,
            longest_hold: settings.longest_hold(),
            suspects: Suspects::new(settings.max_in_flight),
            settings,
            renewals,
            completing: 0,
            awaiting_holder: 0,
            bytes: 0,
            queued: 0,
            queued_bytes: 0,
            claims_sent: 0,
            withdrawing: 0,
            running: 0,
            awaiting_run: VecDeque::new(),
            ended_leases: Vec::new(),
            follow_ups: VecDeque::new(),
            resumable: VecDeque::new(),
            claims: VecDeque::new(),
            drain_started: false,
            unsent_outcomes: VecDeque::new(),
            late_completions: LateCompletions::new(),
            breaker: Breaker::closed(),
            store_misconfigured: false,
            reporter: Reporter::new(),
            next_status_at: Instant::now(),
            runtimes: RuntimeEstimator::new(),
            applies: FuturesUnordered::new(),
            settled: Vec::new(),
            alarms: BinaryHeap::new(),
            spawned: 0,
            run_sender,
            finished_runs,
            lost_leases,
            mode: Mode::Receiving,
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
        let _not_ready_on_drop = NotReadyOnDrop(self.settings.readiness.clone());
        loop {
            self.poll_ready(&mut incoming).await;
            self.yield_to_handlers().await;
            self.resume_queued();
            self.send_batches();
            self.settle().await;
            if let Mode::Draining { until, phase, .. } = self.mode {
                match self.drain_step(until, phase) {
                    DrainStep::Wait => {}
                    DrainStep::DropHandlers => {
                        self.drop_handlers().await;
                        continue;
                    }
                    DrainStep::Close => break,
                }
            }
            self.settings.readiness.set(self.readiness());
            self.warn_if_queue_is_full();
            self.publish_status();
            self.update_gauges();
            self.wait(&mut incoming, shutdown.as_mut()).await;
        }
        self.close().await
    }

    /// Yields once to the handlers that were just spawned, so that the operations of handlers that
    /// return at once share a batch.
    async fn yield_to_handlers(&mut self) {
        if std::mem::take(&mut self.spawned) == 0 {
            return;
        }
        tokio::task::yield_now().await;
        while let Ok(finished) = self.finished_runs.try_recv() {
            self.on_run_finished(finished);
        }
    }

    /// Sleeps until the next event, and processes it.
    async fn wait(
        &mut self,
        incoming: &mut Vec<Incoming>,
        shutdown: Pin<&mut impl Future<Output = ()>>,
    ) {
        let limit = self.receive_limit();
        let alarm = self.next_alarm();
        let mut answered = None;
        let mut finished = None;
        let mut lost_lease = None;
        let mut source_error = None;
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
                biased; // results before lost leases; the source last, because it may always be ready
                () = shutdown, if !draining => stopping = true,
                run = self.finished_runs.recv() => finished = run,
                answer = self.applies.next(), if !self.applies.is_empty() => answered = answer,
                lost = self.lost_leases.recv(), if self.renewals.is_some() => lost_lease = Some(lost),
                () = sleep => {}
                received = self.source.receive(limit, incoming), if !draining => source_error = received.err(),
            }
        }
        self.read_clocks();
        if let Some(error) = source_error {
            self.drain(Some(error.into()), self.settings.drain_timeout)
                .await;
        }
        if stopping {
            self.drain(None, self.settings.drain_timeout).await;
        }
        if let Some(answered) = answered {
            self.on_batch_answered(answered).await;
        }
        if let Some(finished) = finished {
            self.on_run_finished(finished);
        }
        match lost_lease {
            Some(Some(lost)) => self.on_lease_lost(lost),
            Some(None) => {
                self.renewals = None; // the thread ended and closed the channel
                self.drain(Some(Error::Renewals), self.settings.drain_timeout)
                    .await;
            }
            None => {}
        }
    }

    /// Processes everything that is ready, without waiting, so that sources and stores that return
    /// one item at a time are batched, too.
    async fn poll_ready(&mut self, incoming: &mut Vec<Incoming>) {
        // Results first: they free capacity, and the operations that follow from them share a batch
        // with the claims of what is received next.
        while let Ok(finished) = self.finished_runs.try_recv() {
            self.on_run_finished(finished);
        }
        while let Some(Some(answered)) = self.applies.next().now_or_never() {
            self.on_batch_answered(answered).await;
        }
        while let Ok(lost) = self.lost_leases.try_recv() {
            self.on_lease_lost(lost);
        }
        self.fire_alarms();
        self.resume_queued();
        loop {
            if !incoming.is_empty() {
                self.read_clocks();
            }
            for it in incoming.drain(..) {
                match it {
                    Incoming::Delivery(delivery) => self.on_delivery(delivery),
                    Incoming::Revoked(epoch) => self.on_revoked(epoch),
                }
            }
            if matches!(self.mode, Mode::Draining { .. })
                || self.settled.len() >= self.settings.max_in_flight
            {
                break;
            }
            match self
                .source
                .receive(self.receive_limit(), incoming)
                .now_or_never()
            {
                None => break,
                Some(Ok(())) if incoming.is_empty() => break,
                Some(Ok(())) => {}
                Some(Err(error)) => {
                    self.drain(Some(error.into()), self.settings.drain_timeout)
                        .await
                }
            }
        }
    }

    fn readiness(&self) -> ReadinessState {
        match self.mode {
            Mode::Receiving if self.breaker.next_try_at().is_none() => ReadinessState::Ready,
            _ => ReadinessState::NotReady,
        }
    }

    /// Whether the limit of queued deliveries stops the consumer from receiving.
    fn is_queue_full(&self) -> bool {
        self.queued >= self.settings.max_queued
            || self.queued_bytes >= self.settings.max_queued_bytes
    }

    /// Reports that the consumer receives nothing: one blocked ordering key now blocks all others.
    fn warn_if_queue_is_full(&mut self) {
        if !self.is_queue_full() {
            return;
        }
        if let Some(suppressed_lines) = self.reporter.queue_full.due(Instant::now()) {
            let (waiting, bytes) = (self.queued, self.queued_bytes);
            tracing::warn!(
                waiting,
                bytes,
                suppressed_lines,
                "queue limit reached, receiving is paused: too many deliveries wait behind others of their key or partition; see which messages fail, or raise `max_queued` or `max_queued_bytes`"
            );
        }
    }

    /// Updates the state of the store in the status.
    fn record_store_health(&self, update: impl FnOnce(&mut StoreHealth)) {
        if let Some(status) = &self.settings.status {
            status.update_store(update);
        }
    }

    fn publish_status(&mut self) {
        let (Some(status), now) = (&self.settings.status, Instant::now()) else {
            return;
        };
        if now < self.next_status_at {
            return;
        }
        self.next_status_at = now + PUBLISH_INTERVAL;
        let all: Vec<(Instant, Slot)> = self
            .entries
            .slots()
            .filter_map(|slot| Some((self.entries.at(slot)?.arrived, slot)))
            .collect();
        status.publish(self.entries.len() - self.queued, self.queued, all, |slot| {
            let entry = self.entries.at(slot)?;
            Some(InFlightDelivery {
                id: entry.id.clone(),
                origin: entry.in_flight.delivery().message.origin.clone(),
                since: Duration::ZERO,
                state: DeliveryState::of(entry.in_flight.stage()),
                attempt: entry.attempt(),
                crashes: entry.in_flight.driver().attempts.crashes,
            })
        });
    }

    fn update_gauges(&mut self) {
        let unavailable_stores = usize::from(self.breaker.next_try_at().is_some());
        let in_flight = self.entries.len() - self.queued;
        self.metrics.set_gauges(GaugeValues {
            in_flight,
            waiting: self.queued,
            awaiting_holder: self.awaiting_holder,
            unavailable_stores,
        });
    }

    /// How much may be received. With [`Limit::NOTHING`] the source still reports revocations.
    fn receive_limit(&self) -> Limit {
        if self.is_queue_full() {
            return Limit::NOTHING;
        }
        self.free_capacity()
    }

    /// How much more may be in flight, newly received or from the queue.
    fn free_capacity(&self) -> Limit {
        let occupied =
            self.entries.len() - self.queued - self.completing.min(self.settings.max_in_flight);
        let count = self.settings.max_in_flight.saturating_sub(occupied);
        let bytes = self
            .settings
            .max_in_flight_bytes
            .saturating_sub(self.bytes - self.queued_bytes);
        if count > 0 && bytes > 0 {
            Limit { count, bytes }
        } else {
            Limit::NOTHING
        }
    }

    /// Admits queued deliveries, as far as there is capacity, before new ones are received.
    fn resume_queued(&mut self) {
        while !self.resumable.is_empty() && self.free_capacity() != Limit::NOTHING {
            if let Some(slot) = self.resumable.pop_front() {
                self.admit(slot);
            }
        }
    }

    fn read_clocks(&mut self) {
        (self.clock, self.wall) = (Instant::now(), SystemTime::now());
    }

    /// Stops renewing abandoned leases.
    fn stop_renewals(&mut self) {
        if let (Some(renewals), false) = (&self.renewals, self.ended_leases.is_empty()) {
            renewals.stop(self.ended_leases.drain(..));
        }
    }

    /// Passes settlements to the source.
    async fn settle(&mut self) {
        self.stop_renewals();
        if self.settled.is_empty() {
            return;
        }
        let mut settled = std::mem::take(&mut self.settled);
        fault::point("settle.before");
        let result = self.source.settle(&mut settled).await;
        fault::point("settle.after");
        settled.clear();
        self.settled = settled; // reuses the allocation
        if let Err(error) = result {
            self.drain(Some(error.into()), self.settings.drain_timeout)
                .await;
        }
    }

    /// Delivers the events of the alarms that are due.
    fn fire_alarms(&mut self) {
        let now = Instant::now();
        while let Some(Reverse((at, slot, turn))) = self.alarms.peek().copied() {
            if at > now {
                return;
            }
            self.alarms.pop();
            let Some(entry) = self.entries.at(slot).filter(|entry| entry.turn == turn) else {
                continue;
            };
            let stage = entry.in_flight.stage();
            if let Stage::New(_) = stage {
                self.resumable.push_back(slot);
                continue;
            }
            let too_late = stage.waits_on_lease() && entry.lease_is_over();
            self.handle_event(
                slot,
                if too_late {
                    Event::LeaseOver
                } else {
                    Event::Woke
                },
            );
        }
    }

    /// When the loop has to wake up at the latest.
    fn next_alarm(&self) -> Option<Instant> {
        let alarm = self.alarms.peek().map(|Reverse((at, ..))| *at);
        let try_at = |at: Instant| self.breaker.next_try_at().map_or(at, |next| next.max(at));
        let late_completions = (!self.late_completions.is_empty() && self.applies.is_empty())
            .then(|| try_at(self.late_completions.due));
        let may_send = || {
            !self.unsent_outcomes.is_empty() || self.claims.iter().any(|slot| self.may_claim(*slot))
        };
        let retry = self
            .breaker
            .next_try_at()
            .filter(|_| self.applies.is_empty() && may_send());
        let drain_deadline = match self.mode {
            Mode::Draining { until, .. } => Some(until),
            Mode::Receiving => None,
        };
        let resume = (!self.resumable.is_empty() && self.free_capacity() != Limit::NOTHING)
            .then(Instant::now);
        let status = self
            .settings
            .status
            .is_some()
            .then_some(self.next_status_at);
        [
            alarm,
            late_completions,
            retry,
            drain_deadline,
            resume,
            status,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// A pause with 25 % jitter, so that deliveries that failed together are not retried together.
    fn jittered(&mut self, pause: Duration) -> Duration {
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        pause.mul_f64(0.75 + (self.jitter >> 11) as f64 / (1u64 << 53) as f64 / 2.0)
    }
}
