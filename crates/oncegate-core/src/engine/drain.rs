//! The end of deliveries, and the shutdown of the consumer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{DrainPhase, DrainStep, Engine, Mode};

use crate::decode::Decode;
use crate::defaults::STOP_TIMEOUT;
use crate::error::Error;
use crate::fault;
use crate::handler::Handler;
use crate::lease::Lease;
use crate::lifecycle::{Event, Isolation, Stage};
use crate::ordering::{OrderingKey, WasQueued};
use crate::slots::Slot;

impl<H: Handler, D: Decode> Engine<H, D> {
    /// Frees the slot of a delivery. The next delivery of its ordering key, and the next one that
    /// waits to run apart from others, may proceed.
    pub(super) fn remove(
        &mut self,
        slot: Slot,
        ordering_key: Option<OrderingKey>,
        lease: Option<Arc<Lease>>,
        bytes: usize,
    ) {
        self.entries.remove(slot);
        self.bytes -= bytes;
        if lease.is_some() {
            self.ended_leases.push(slot.index);
        }
        self.end_isolation(slot);
        let Some(ordering_key) = ordering_key else {
            return;
        };
        if self.ordering.withdraw(ordering_key, slot) == WasQueued::Yes {
            return;
        }
        self.resumable.extend(self.ordering.release(ordering_key));
    }

    /// If this delivery ran apart from others, the deliveries that wait for its end may claim.
    pub(super) fn end_isolation(&mut self, slot: Slot) {
        if !self.suspects.remove(slot) {
            return;
        }
        while let Some(next) = self.suspects.first_waiting() {
            let driver = self.entries.at(next).map(|entry| entry.in_flight.driver());
            let Some(driver) = driver.filter(|it| matches!(it.stage(), Stage::New(_))) else {
                self.suspects.pop_waiting(); // settled, or drained
                continue;
            };
            let isolation = self.policy.isolation(driver.attempts);
            if !self
                .suspects
                .admit(next, isolation.unwrap_or(Isolation::Group))
            {
                return;
            }
            self.suspects.pop_waiting();
            self.follow_ups.push_back((next, Event::Arrived));
        }
    }

    /// The source revokes the deliveries of this epoch.
    pub(super) fn on_revoked(&mut self, epoch: u64) {
        let revoked: Vec<Slot> = self
            .entries
            .slots()
            .filter(|slot| {
                self.entries
                    .at(*slot)
                    .is_some_and(|it| it.in_flight.delivery().receipt.epoch == epoch)
            })
            .collect();
        for slot in revoked {
            self.begin_drain_of(slot);
        }
    }

    /// From now on a delivery starts nothing new.
    pub(super) fn begin_drain_of(&mut self, slot: Slot) {
        if let Some(entry) = self.entries.at_mut(slot) {
            entry.in_flight.begin_drain();
            self.drain_started = true;
            self.handle_event(slot, Event::Drain);
        }
    }

    /// Begins to drain: receives nothing more, and releases deliveries that have not started.
    pub(super) async fn drain(&mut self, because: Option<Error>, bound: Duration) {
        let until = Instant::now() + bound;
        match &mut self.mode {
            Mode::Draining {
                until: earlier,
                because: first,
                phase: _,
            } => {
                *earlier = until.min(*earlier);
                if first.is_none() {
                    *first = because;
                }
                return;
            }
            mode @ Mode::Receiving => {
                let phase = DrainPhase::Handlers;
                *mode = Mode::Draining {
                    until,
                    because,
                    phase,
                };
            }
        }
        tracing::info!(
            in_flight = self.entries.len(),
            "draining: receiving stopped, running handlers may finish"
        );
        self.source.stop().await;
        fault::point("drain.begun");
        let all: Vec<Slot> = self.entries.slots().collect();
        for slot in all {
            self.begin_drain_of(slot);
        }
    }

    /// What a drain does next. After the drain timeout, handlers that still run are dropped, and the
    /// drain waits at most [`STOP_TIMEOUT`] until the store has recorded their outcomes.
    pub(super) fn drain_step(&self, until: Instant, phase: DrainPhase) -> DrainStep {
        let (is_empty, timed_out) = (self.entries.is_empty(), Instant::now() >= until);
        let all_recorded = (self.late_completions.is_empty() || self.store_misconfigured)
            && self.applies.is_empty();
        match phase {
            DrainPhase::Handlers if timed_out && !is_empty => DrainStep::DropHandlers,
            DrainPhase::Handlers if timed_out || (is_empty && all_recorded) => DrainStep::Close,
            DrainPhase::Outcomes if timed_out || is_empty => DrainStep::Close,
            DrainPhase::Handlers | DrainPhase::Outcomes => DrainStep::Wait,
        }
    }

    /// The drain timeout is over: drops handlers that run, and asks the store to record their
    /// outcome as unknown.
    pub(super) async fn drop_handlers(&mut self) {
        // The outcome of handlers that have returned by now is known.
        while let Ok(finished) = self.finished_runs.try_recv() {
            self.on_run_finished(finished);
        }
        let (handlers, in_flight) = (self.running, self.entries.len());
        if handlers > 0 {
            tracing::warn!(
                handlers,
                in_flight,
                "drain timeout over: handlers that still run are dropped, their outcome is unknown and counts as an attempt; \
                 set drain_timeout to more than the longest run of a handler"
            );
        }
        if let Mode::Draining { until, phase, .. } = &mut self.mode {
            (*until, *phase) = (Instant::now() + STOP_TIMEOUT, DrainPhase::Outcomes);
        }
        let all: Vec<Slot> = self.entries.slots().collect();
        for slot in all {
            if let Some(entry) = self.entries.at_mut(slot) {
                entry.in_flight.begin_drain();
                self.handle_event(slot, Event::DrainOver);
            }
        }
        // The runtime drops the aborted tasks before the store records that no handler runs.
        tokio::task::yield_now().await;
    }

    /// Abandons deliveries whose operation the store has not answered, and closes the source.
    pub(super) async fn close(mut self) -> Result<(), Error> {
        let left: Vec<Slot> = self.entries.slots().collect();
        if !left.is_empty() {
            tracing::warn!(
                in_flight = left.len(),
                "stopping without the store's answers: these messages are redelivered and can be claimed after their lease, and the next claim may count a crash"
            );
        }
        if !self.late_completions.is_empty() {
            let count = self.late_completions.len();
            tracing::warn!(
                count,
                "completions not recorded: messages were handled without the gate, and the store did not answer before the stop; redeliveries of them run again"
            );
        }
        for slot in left {
            self.handle_event(slot, Event::StopNow);
        }
        self.settle().await;
        fault::point("drain.closing");
        let deadline = self.close_by();
        let closed = self.source.close(deadline).await;
        fault::point("drain.closed");
        match self.mode {
            Mode::Draining {
                because: Some(error),
                ..
            } => Err(error),
            _ => Ok(closed?),
        }
    }

    /// The deadline for closing the source. The time that the store took to record outcomes is
    /// subtracted, so that a stop takes at most the drain timeout plus 10 s.
    fn close_by(&self) -> Instant {
        let now = Instant::now();
        let recording = match self.mode {
            Mode::Draining {
                until,
                phase: DrainPhase::Outcomes,
                ..
            } => STOP_TIMEOUT.saturating_sub(until.saturating_duration_since(now)),
            _ => Duration::ZERO,
        };
        let shortest = Duration::from_secs(1);
        let bound = self
            .settings
            .drain_timeout
            .clamp(shortest, Duration::from_secs(10));
        now + bound.saturating_sub(recording).max(shortest)
    }
}
