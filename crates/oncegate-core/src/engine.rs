//! The event loop of one consumer. [`crate::lifecycle`] decides what happens to a delivery; the
//! engine decides when, within limits, order, isolation and shutdown.
//!
//! This file has the loop. `dispatch` executes the commands of the lifecycle, `answers` sends
//! operations to the store and processes the answers. Each part has its own state, and only
//! `reporter` reads that of others. A *run* is one call of `handle` or `reconcile`; a *suspect* is
//! defined in `suspects`.

mod answers;
mod dispatch;
mod drain;
mod entry;
mod executor;
mod intake;
mod late;
mod leases;
mod log_kind;
mod logs;
mod reporter;
mod runs;
mod store_batcher;
mod suspects;
mod timers;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;

use self::drain::{Drain, DrainStep, Unfinished};
use self::entry::Phase;
use self::executor::Executor;
use self::intake::Intake;
use self::leases::Leases;
use self::reporter::Reporter;
use self::runs::FinishedRun;
use self::store_batcher::StoreBatcher;
use self::timers::Timers;

use crate::boot_time::BootTime;
use crate::clock::now;
use crate::decode::Decode;
use crate::error::Error;
use crate::fault;
use crate::handler::Handler;
use crate::id::IdSource;
use crate::lifecycle::{Event, Policy};
use crate::marker::Tokens;
use crate::readiness::{NotReadyOnDrop, ReadinessState};
use crate::run::Runner;
use crate::settings::Settings;
use crate::slots::Slot;
use crate::source::{Incoming, Limit, QueueLevel, Settled, Source};
use crate::store::Store;

/// One running consumer: its parts, and the events and settlements that they exchange.
pub(crate) struct Engine {
    source: Box<dyn Source>,
    intake: Intake,
    batcher: StoreBatcher,
    executor: Executor,
    leases: Leases,
    timers: Timers,
    reporter: Reporter,
    drain: Drain,

    id: IdSource,
    settings: Settings,
    policy: Policy,
    /// See [`Settings::max_renewal_time`].
    max_renewal_time: Duration,
    /// The queue level that was last reported to the source.
    queue_level: QueueLevel,

    clock: Clock,
    tokens: Tokens,
    /// Events of deliveries that may proceed because another delivery ended its run in isolation.
    follow_ups: VecDeque<(Slot, Event)>,
    /// Settled deliveries that are not passed to the source yet.
    settled: Vec<Settled>,
    /// Whether to drop the unsent claims of draining deliveries before the next batch, because a
    /// delivery has begun to drain.
    drops_unsent_claims: bool,
    /// Empty between uses of [`Engine::on_finished_runs`], which uses its memory again.
    finished: Vec<FinishedRun>,
}

/// The times of the three clocks, read once for all events that are processed together. `boot` is
/// also read at the end of each run.
struct Clock {
    /// For leases.
    boot: BootTime,
    /// For pauses and durations.
    monotonic: Instant,
    /// For the age of messages.
    wall: SystemTime,
}

impl Clock {
    fn now() -> Self {
        Self {
            boot: BootTime::now(),
            monotonic: now(),
            wall: SystemTime::now(),
        }
    }
}

impl Engine {
    pub(crate) fn new<H: Handler, D: Decode>(
        source: Box<dyn Source>,
        store: Arc<dyn Store>,
        runner: Runner<H, D>,
        id: IdSource,
        settings: Settings,
    ) -> Result<Self, Error> {
        let properties = source.properties();
        Ok(Self {
            source,
            intake: Intake::new(&settings, properties),
            leases: Leases::start(store.clone(), &settings)?,
            batcher: StoreBatcher::new(store, properties),
            executor: Executor::new(runner, &settings),
            timers: Timers::new(settings.jitter_seed),
            reporter: Reporter::new(settings.status.clone(), settings.inbox),
            drain: Drain::new(settings.drain_timeout),
            id,
            policy: settings.policy(),
            max_renewal_time: settings.max_renewal_time(),
            settings,
            queue_level: QueueLevel::Low,
            clock: Clock::now(),
            tokens: Tokens::default(),
            follow_ups: VecDeque::new(),
            settled: Vec::new(),
            drops_unsent_claims: false,
            finished: Vec::new(),
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
            self.process_results().await;
            self.receive_ready(&mut incoming).await;
            self.yield_to_handlers().await;
            self.resume_queued();
            self.send_batches();
            self.settle().await;
            match self.drain.next_step(now(), self.unfinished()) {
                DrainStep::Continue => {}
                DrainStep::DropHandlers => {
                    self.drop_handlers().await;
                    continue;
                }
                DrainStep::Close => return self.close().await,
            }
            self.report();
            self.wait(&mut incoming, shutdown.as_mut()).await;
        }
    }

    /// Processes all results that are ready: ended runs, answered batches, lost leases and due
    /// alarms. This is the first step, because results free capacity, and the operations that
    /// follow from them share a batch with the claims of the messages that are received next.
    async fn process_results(&mut self) {
        self.read_clocks();
        self.on_finished_runs();
        while let Some(answered) = self.batcher.try_answered() {
            self.on_batch_answered(answered).await;
        }
        while let Some(lost) = self.leases.try_lost() {
            self.on_lease_lost(lost);
        }
        self.fire_alarms();
        self.resume_queued();
    }

    /// Receives all messages that the source has, without waiting, so that the claims of a source
    /// that returns one message at a time are batched, too.
    async fn receive_ready(&mut self, incoming: &mut Vec<Incoming>) {
        loop {
            let any_received = !incoming.is_empty();
            if any_received {
                self.read_clocks();
            }
            for received in incoming.drain(..) {
                match received {
                    Incoming::Delivery(delivery) => self.on_delivery(delivery),
                    Incoming::Revoked(epoch) => self.on_revoked(epoch),
                }
            }
            if self.drain.has_begun() || self.settled.len() >= self.settings.max_in_flight {
                return;
            }
            let limit = self.intake.receive_limit();
            if any_received && limit == Limit::NOTHING {
                return; // the next call, for revocations alone, is that of `wait`
            }
            match self.source.receive(limit, incoming).now_or_never() {
                None => return,
                Some(Ok(())) if incoming.is_empty() => return,
                Some(Ok(())) => {}
                Some(Err(error)) => self.begin_drain(Some(error.into())).await,
            }
        }
    }

    /// Yields once to the tokio tasks of handlers that were just spawned, so that the operations of
    /// handlers that return at once share a batch.
    async fn yield_to_handlers(&mut self) {
        if self.executor.take_spawned() {
            tokio::task::yield_now().await;
            self.on_finished_runs();
        }
    }

    /// Admits queued deliveries, as far as there is capacity, before new ones are received.
    fn resume_queued(&mut self) {
        while let Some(slot) = self.intake.next_resumable() {
            self.admit(slot);
        }
    }

    /// Passes settlements to the source.
    async fn settle(&mut self) {
        self.leases.update_renewals();
        if self.settled.is_empty() {
            return;
        }
        fault::point("settle.before");
        let result = self.source.settle(&mut self.settled).await;
        fault::point("settle.after");
        self.settled.clear();
        if let Err(error) = result {
            self.begin_drain(Some(error.into())).await;
        }
    }

    /// Updates readiness, metrics and status, and reports the queue level to the source.
    fn report(&mut self) {
        let level = self.intake.queue_level();
        if std::mem::replace(&mut self.queue_level, level) != level {
            self.source.queue_level(level);
        }
        let store_unavailable = self.batcher.breaker.next_try_at().is_some();
        self.settings
            .readiness
            .set(match self.drain.has_begun() || store_unavailable {
                true => ReadinessState::NotReady,
                false => ReadinessState::Ready,
            });
        self.reporter.observe(
            now(),
            &self.intake,
            &self.executor.suspects,
            usize::from(store_unavailable),
        );
    }

    /// Sleeps until the next event.
    async fn wait(
        &mut self,
        incoming: &mut Vec<Incoming>,
        shutdown: Pin<&mut impl Future<Output = ()>>,
    ) {
        let (limit, alarm) = (self.intake.receive_limit(), self.next_alarm());
        let receiving = !self.drain.has_begun();
        let renewed = self.leases.are_renewed();
        let sleep = async {
            match alarm {
                Some(at) => tokio::time::sleep(at.saturating_duration_since(now())).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Results before lost leases; the source last, because it may always be ready.
            biased;
            () = shutdown, if receiving => self.begin_drain(None).await,
            () = self.executor.finished() => self.on_finished_runs(),
            batch = self.batcher.answered() => self.on_batch_answered(batch).await,
            lost = self.leases.lost(), if renewed => match lost {
                Some(lost) => self.on_lease_lost(lost),
                None => self.begin_drain(Some(Error::Renewals)).await,
            },
            () = sleep => {}
            // In a block, which calls `receive` only if nothing else is ready.
            received = async { self.source.receive(limit, incoming).await }, if receiving => {
                if let Err(error) = received {
                    self.begin_drain(Some(error.into())).await;
                }
            }
        }
    }

    /// When the loop has to wake up at the latest.
    fn next_alarm(&mut self) -> Option<Instant> {
        let resume = self.intake.may_resume().then(now);
        [
            self.timers.next(),
            self.next_try_at(),
            self.drain.deadline(),
            self.reporter.next_report_at(),
            resume,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn read_clocks(&mut self) {
        self.clock = Clock::now();
    }

    /// Drains the deliveries of an epoch that the source revokes.
    fn on_revoked(&mut self, epoch: u64) {
        for slot in self.intake.slots() {
            let entry = self.intake.at(slot);
            if entry.is_some_and(|entry| entry.in_flight.receipt().epoch == epoch) {
                self.drain_delivery(slot, Event::Drain);
            }
        }
    }

    /// Lets a delivery drain: from now on it starts no handler and waits for no pause. `event` is
    /// [`Event::Drain`] or [`Event::DrainOver`].
    fn drain_delivery(&mut self, slot: Slot, event: Event) {
        if let Some(entry) = self.intake.at_mut(slot) {
            entry.in_flight.begin_drain();
            self.drops_unsent_claims = true;
            self.handle_event(slot, event);
        }
    }

    /// Begins to drain: receives nothing more, and releases deliveries whose handler has not
    /// started. `cause` is the error that ends the consumer; `None` for a shutdown.
    async fn begin_drain(&mut self, cause: Option<Error>) {
        if !self.drain.begin(cause, now()) {
            return;
        }
        tracing::info!(
            in_flight = self.intake.len(),
            "draining: receiving stopped, running handlers may finish"
        );
        self.source.stop().await;
        fault::point("drain.begun");
        for slot in self.intake.slots() {
            self.drain_delivery(slot, Event::Drain);
        }
    }

    /// What has to finish before the consumer can end.
    fn unfinished(&self) -> Unfinished {
        if !self.intake.is_empty() {
            Unfinished::Deliveries
        } else if !self.batcher.has_recorded_late_completions() {
            Unfinished::Completions
        } else {
            Unfinished::Nothing
        }
    }

    /// Drops running handlers, because the drain timeout is over, and asks the store to record
    /// their outcomes as unknown.
    async fn drop_handlers(&mut self) {
        self.on_finished_runs(); // handlers that have returned by now have a known outcome
        let (handlers, in_flight) = (self.intake.count(Phase::Running), self.intake.len());
        if handlers > 0 {
            tracing::warn!(
                handlers,
                in_flight,
                "drain timeout over: handlers that still run are dropped, their outcome is unknown and counts as an attempt; \
                 set drain_timeout to more than the longest run of a handler"
            );
        }
        self.drain.handlers_dropped(now());
        for slot in self.intake.slots() {
            if let Some(entry) = self.intake.at(slot)
                && entry.counted == Phase::Running
            {
                self.reporter.logs.handler_dropped(entry);
            }
            self.drain_delivery(slot, Event::DrainOver);
        }
        // Lets the runtime drop the aborted tasks before the store records outcomes with which
        // other processes may run the ids.
        tokio::task::yield_now().await;
    }

    /// Abandons deliveries whose operation the store has not answered, and closes the source.
    async fn close(mut self) -> Result<(), Error> {
        let unsettled = self.intake.slots();
        if !unsettled.is_empty() {
            tracing::warn!(
                in_flight = unsettled.len(),
                "stopping before the store answered: these messages are redelivered; ids that are still claimed wait for the end of their lease, and their next claim may count a crash"
            );
        }
        if !self.batcher.late.is_empty() {
            let count = self.batcher.late.len();
            tracing::warn!(
                count,
                "completions not recorded: messages were handled without the store, and the store did not answer before the stop; redeliveries of them run again"
            );
        }
        for slot in unsettled {
            self.handle_event(slot, Event::StopNow);
        }
        self.settle().await;
        // Logs the suppressed lines now, before their periods are over, because there is no later
        // report.
        self.reporter
            .logs
            .log_suppressed(now() + log_kind::LONGEST_PERIOD);
        fault::point("drain.closing");
        let closed = self.source.close(self.drain.close_by(now())).await;
        fault::point("drain.closed");
        match self.drain.into_cause() {
            Some(error) => Err(error),
            None => Ok(closed?),
        }
    }
}
