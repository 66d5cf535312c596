//! Executes the commands of the delivery lifecycle, from the receipt of a delivery to its
//! settlement.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::entry::{
    ClaimState, InFlightEntry, Occupancy, Phase, has_running_task, may_count_crash,
};
use super::executor::Executor;
use super::leases::Leases;
use super::reporter::Reporter;
use super::runs::{FinishedRun, RunKind, RunTicket, StartedRun};
use super::{Clock, Engine};

use crate::boot_time::BootTime;
use crate::clock::now;
use crate::context::{Context, SharedDelivery};
use crate::driver::DriverCommand;
use crate::fault;
use crate::id::{IdError, MessageId};
use crate::in_flight::InFlight;
use crate::lifecycle::{
    Action, ClaimTries, Event, Freshness, Grant, History, Isolation, Outcome, Policy, ProofKind,
    Settlement, Stage,
};
use crate::marker::{Attempts, Operation, OperationKind, Terms, Verdict};
use crate::message::Message;
use crate::message_age::age;
use crate::ordering::KeyState;
use crate::renewals::LostLease;
use crate::run::{RunResult, panic_text};
use crate::settings::Settings;
use crate::slots::Slot;
use crate::source::Delivery;
use crate::spans;

impl Engine {
    /// Adds a received delivery. Starts its lifecycle, or queues it if another delivery holds its
    /// ordering key.
    pub(super) fn on_delivery(&mut self, delivery: Delivery) {
        fault::point("delivery");
        let (id, terms) = self.identify(&delivery.message);
        let age = age(&delivery.message, self.clock.wall);
        let history = History {
            failures: delivery.failures,
            freshness: self.freshness(age),
        };
        self.reporter.received(
            &delivery.message,
            age,
            history.freshness,
            self.policy.guarantee,
        );
        let bytes = delivery.message.size();
        let ordering_key = self.intake.ordering_key(&delivery);
        let (arrival, id_error) = match &id {
            Ok(_) => (Event::Arrived, None),
            Err(IdError::Missing) => (Event::NoId, Some(self.id.missing_text())),
            Err(IdError::Unusable(error)) => (Event::UnusableId, Some(error.clone())),
        };
        let shared = self.intake.share(SharedDelivery {
            id: id.ok(),
            message: Some(delivery.message),
            terms,
            failures: delivery.failures,
            attempt: 0,
            lease: None,
        });
        let (slot, key_state) = self.intake.insert(InFlightEntry {
            in_flight: InFlight::new(shared, delivery.receipt, history),
            arrival,
            occupancy: Occupancy::InFlight,
            counted: Phase::OtherInFlight,
            claim: Cell::new(ClaimState::Absent),
            has_lease: false,
            ordering_key,
            store_span: None,
            task: None,
            began: None,
            arrived: self.clock.boot,
            generation: 0,
            bytes,
        });
        if id_error.is_some()
            && let Some(entry) = self.intake.at_mut(slot)
        {
            entry
                .in_flight
                .update_failures(|failure_history| failure_history.first_error = id_error);
        }
        if key_state == KeyState::Acquired && !self.claim_at_once(slot) {
            self.admit(slot);
        }
    }

    fn freshness(&self, age: Option<Duration>) -> Freshness {
        match age {
            Some(age) if age > self.settings.max_age() => Freshness::TooOld,
            _ => Freshness::Fresh,
        }
    }

    /// The id and the terms of a message. The user's functions for the id and the fingerprint run
    /// here: if one panics, the id is unusable.
    fn identify(&self, message: &Message) -> (Result<MessageId, IdError>, Terms) {
        let Settings {
            guarantee,
            dedup_window: window,
            ref fingerprints,
            ..
        } = self.settings;
        let read = || (fingerprints.of(message, guarantee), self.id.read(message));
        let caught = catch_unwind(AssertUnwindSafe(read));
        let (fingerprint, id) = caught.unwrap_or_else(|panic| {
            let error = format!(
                "the function that reads the id or the fingerprint {}",
                panic_text(panic)
            );
            tracing::error!(origin = %message.origin, "{error}");
            (None, Err(IdError::Unusable(error)))
        });
        let terms = Terms {
            guarantee,
            lease: self.leases.duration(),
            window,
            fingerprint,
        };
        (id, terms)
    }

    /// The fast path of [`admit`](Self::admit): a delivery with an id claims it. Returns whether
    /// the claim was queued; if not, nothing has changed.
    #[inline(always)]
    fn claim_at_once(&mut self, slot: Slot) -> bool {
        if self.drain.has_begun() {
            return false;
        }
        let (policy, tokens) = (&self.policy, &mut self.tokens);
        let claimed = self.intake.update(slot, |entry| {
            if !matches!(entry.arrival, Event::Arrived) {
                return false;
            }
            let driver = entry.in_flight.driver_mut();
            let claim = |action: &Action| matches!(action, Action::NewClaim);
            let claimed = driver
                .handle_expected(Event::Arrived, policy, claim)
                .is_some();
            if claimed {
                driver.token = tokens.token();
            }
            claimed
        });
        let claimed = claimed == Some(true);
        if claimed {
            self.begin_operation(slot);
        }
        claimed
    }

    /// The fast path of a grant: the handler starts at once, and if it succeeds on its first poll,
    /// its completion is queued. Each step makes the same transition as
    /// [`handle_event`](Self::handle_event), which processes the event if another action follows.
    #[inline(always)]
    pub(super) fn on_granted(&mut self, slot: Slot, attempts: Attempts) {
        let granted = Event::Answer(Verdict::Granted(attempts));
        let running = self.intake.count(Phase::Running);
        if attempts.crashes > 0 || !self.executor.may_run_at_once(running) {
            return self.handle_event(slot, granted);
        }
        let (now, renew_until) = (self.clock.boot, self.clock.boot + self.max_renewal_time);
        let (policy, executor) = (&self.policy, &mut self.executor);
        let (reporter, leases, clock) = (&mut self.reporter, &mut self.leases, &mut self.clock);
        let next = self.intake.update(slot, |entry| {
            let driver = entry.in_flight.driver_mut();
            let await_run = |action: &Action| matches!(action, Action::AwaitRun);
            if driver.handle_expected(granted, policy, await_run).is_none() {
                return Err(granted);
            }
            driver.attempts = attempts;
            reporter.outcomes.count_event(granted);
            if let Some(lease) = &entry.in_flight.shared().lease {
                if !lease.is_live(now) {
                    return Err(Event::LeaseOver);
                }
                lease.allow_renewals_until(renew_until);
            }
            let run = |action: &Action| matches!(action, Action::Run);
            let driver = entry.in_flight.driver_mut();
            if driver.handle_expected(Event::MayRun, policy, run).is_none() {
                return Err(Event::MayRun);
            }
            match start_run(entry, executor, slot, RunKind::Handle, clock) {
                Some(result) => {
                    let event = record_run(entry, reporter, leases, clock, &result);
                    after_run(entry, policy, event)
                }
                None => Ok(DriverCommand::Nothing),
            }
        });
        self.continue_with(slot, next);
    }

    /// Continues after a fast path: with its command, or with an event that the fast path does not
    /// process.
    #[inline(always)]
    fn continue_with(&mut self, slot: Slot, next: Option<Result<DriverCommand, Event>>) {
        let event = match next {
            Some(Ok(DriverCommand::Apply)) => self.execute(slot, DriverCommand::Apply),
            Some(Err(event)) => Some(event),
            Some(Ok(_)) | None => None,
        };
        match event {
            Some(event) => self.handle_event(slot, event),
            None => self.follow_up(),
        }
    }

    /// The fast path of a recorded completion: the delivery is accepted.
    #[inline(always)]
    pub(super) fn on_done(&mut self, slot: Slot, marker_lost: bool) {
        let done = Event::Answer(Verdict::Done { marker_lost });
        if self.executor.suspects.has_admitted() {
            return self.handle_event(slot, done);
        }
        let (policy, reporter) = (&self.policy, &self.reporter);
        let settled = self.intake.update(slot, |entry| {
            let settle = |action: &Action| matches!(action, Action::Settle(_));
            let driver = entry.in_flight.driver_mut();
            let settled = driver.handle_expected(done, policy, settle)?;
            reporter.outcomes.count_event(done);
            Some(settled)
        });
        match settled {
            Some(Some(Action::Settle(settlement))) => self.settle_delivery(slot, settlement),
            Some(_) => return self.handle_event(slot, done),
            None => {}
        }
        self.follow_up();
    }

    /// Starts the lifecycle of a delivery that was received, or that is removed from the queue.
    pub(super) fn admit(&mut self, slot: Slot) {
        let draining = self.drain.has_begun();
        let Some(entry) = self.intake.at_mut(slot) else {
            return;
        };
        if draining {
            entry.in_flight.begin_drain();
        }
        let event = if entry.in_flight.driver().is_draining() {
            Event::Drain
        } else {
            entry.arrival
        };
        self.handle_event(slot, event);
    }

    /// Processes an event of one delivery, and the events that follow for others.
    pub(super) fn handle_event(&mut self, slot: Slot, event: Event) {
        self.advance(slot, event);
        self.follow_up();
    }

    /// Processes the events that follow for other deliveries.
    #[inline(always)]
    fn follow_up(&mut self) {
        if self.follow_ups.is_empty() && self.executor.nothing_to_start() {
            return;
        }
        // A loop, because recursion could overflow the stack: an inline run that ends at once lets
        // the next waiting delivery start, thousands of times.
        while let Some((slot, event)) = self.follow_ups.pop_front().or_else(|| self.next_runnable())
        {
            self.advance(slot, event);
        }
    }

    /// The next delivery to run and its event, if a delivery waits for a run and fewer than
    /// `max_in_flight` handlers run. A delivery that has to run in isolation, because it may crash
    /// the process (see [`Suspects`](super::suspects::Suspects)), starts only when no claim and no
    /// withdrawal is unanswered.
    pub(super) fn next_runnable(&mut self) -> Option<(Slot, Event)> {
        if self.executor.nothing_to_start() {
            return None;
        }
        let (intake, batcher) = (&self.intake, &self.batcher);
        let nothing_claimed =
            || batcher.claims_sent() == 0 && intake.count(Phase::Withdrawing) == 0;
        let is_ready = |slot| {
            let stage = intake.at(slot).map(InFlightEntry::stage);
            matches!(stage, Some(Stage::Ready(_)))
        };
        let running = intake.count(Phase::Running);
        let slot = self
            .executor
            .next_runnable(running, nothing_claimed, is_ready)?;
        Some((slot, self.check_lease_before_run(slot)?))
    }

    /// [`Event::MayRun`], or [`Event::LeaseOver`] if the lease ended while the delivery waited. The
    /// maximum time of renewals counts from now, so that the time spent waiting does not shorten
    /// it.
    fn check_lease_before_run(&mut self, slot: Slot) -> Option<Event> {
        let Some(lease) = &self.intake.at(slot)?.in_flight.shared().lease else {
            return Some(Event::MayRun);
        };
        // Some time may have passed since the clock was read.
        self.clock.boot = BootTime::now();
        let now = self.clock.boot;
        if !lease.is_live(now) {
            return Some(Event::LeaseOver);
        }
        lease.allow_renewals_until(now + self.max_renewal_time);
        Some(Event::MayRun)
    }

    /// Processes an event of a delivery, executes the resulting command, and processes the event
    /// that follows immediately, until none does.
    fn advance(&mut self, slot: Slot, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            let (policy, tokens, reporter) = (&self.policy, &mut self.tokens, &mut self.reporter);
            let command = self.intake.update(slot, |entry| {
                reporter.event(entry, event);
                entry.occupancy = Occupancy::InFlight;
                let command = entry.in_flight.handle(event, policy, |_| tokens.token());
                if entry.task.is_some() && !has_running_task(entry.stage()) {
                    entry.task = None;
                }
                command
            });
            next = command.and_then(|command| self.execute(slot, command));
        }
        if self.executor.suspects.has_admitted()
            && !self
                .intake
                .at(slot)
                .is_some_and(|entry| may_count_crash(entry.stage()))
        {
            self.end_isolation(slot);
        }
    }

    /// Executes a command. Returns the event that follows immediately, if any.
    #[inline(always)]
    fn execute(&mut self, slot: Slot, command: DriverCommand) -> Option<Event> {
        match command {
            DriverCommand::Apply => self.begin_operation(slot),
            DriverCommand::AwaitRun => return self.await_run(slot),
            DriverCommand::Run => return self.start(slot, RunKind::Handle),
            DriverCommand::Reconcile => return self.start(slot, RunKind::Reconcile),
            DriverCommand::Wake(after) => self.wake(slot, after),
            DriverCommand::AwaitIsolation => return self.await_isolation(slot),
            DriverCommand::Retry { after, failures } => self.retry(slot, after, failures),
            DriverCommand::Settle(settlement) => self.settle_delivery(slot, settlement),
            DriverCommand::Abandon => {
                self.reporter.outcomes.dropped();
                if self.intake.remove(slot, |entry| entry.has_lease) == Some(true) {
                    self.leases.unregister(slot);
                }
            }
            DriverCommand::Nothing => {}
        }
        None
    }

    /// Queues the operation that the stage of a delivery waits for.
    #[inline(always)]
    fn begin_operation(&mut self, slot: Slot) {
        let Some(entry) = self.intake.at_mut(slot) else {
            return;
        };
        entry.generation += 1; // the engine then ignores earlier alarms, which would send it twice
        let (stage, attempt) = (entry.in_flight.driver().stage(), entry.attempt());
        let is_claim = matches!(stage, Stage::Claiming(..) | Stage::ClaimingInDrain(_));
        entry.store_span = spans::if_enabled(|| {
            let shared = entry.in_flight.shared();
            let kind = stage.pending_operation().unwrap_or(OperationKind::Claim);
            spans::operation(&kind, shared.id.as_ref(), attempt, Some(shared))
        });
        if !is_claim {
            return self.batcher.enqueue_outcome(slot);
        }
        if attempt == 0 {
            if let Stage::Claiming(_, ClaimTries(0)) = stage {
                entry.claim.set(ClaimState::Absent); // the claim has a new token
            }
            if entry.has_lease {
                self.drop_lease(slot);
            }
        }
        self.batcher.enqueue_claim(slot);
    }

    /// Decides when the handler of a granted delivery starts: at once, or when fewer than
    /// `max_in_flight` handlers run, or in isolation.
    #[inline]
    fn await_run(&mut self, slot: Slot) -> Option<Event> {
        let entry = self.intake.at(slot)?;
        if let Stage::Ready(Grant { attempts, .. }) = entry.stage()
            && let Some(isolation) = self.policy.isolation(attempts)
        {
            if !self.executor.suspects.admit(slot, isolation) {
                return Some(Event::IsolationFull);
            }
            self.reporter
                .logs
                .possible_crash_loop(entry, attempts, self.policy.max_crashes);
            return None;
        }
        let running = self.intake.count(Phase::Running);
        if self.executor.queue_if_full(slot, running) {
            return None;
        }
        self.check_lease_before_run(slot)
    }

    /// Sets an alarm for a delivery, which replaces its earlier one.
    fn wake(&mut self, slot: Slot, after: Duration) {
        if let Some(entry) = self.intake.at_mut(slot) {
            entry.generation += 1;
            self.timers.set(slot, entry.generation, now(), after);
        }
    }

    /// Lets a suspect claim when it may run in isolation.
    fn await_isolation(&mut self, slot: Slot) -> Option<Event> {
        self.drop_lease(slot);
        let attempts = self.intake.at(slot)?.in_flight.driver().attempts;
        let isolation = self.policy.isolation(attempts).unwrap_or(Isolation::Group);
        if self.executor.suspects.admit(slot, isolation) {
            return Some(Event::Arrived);
        }
        self.executor.suspects.queue(slot);
        None
    }

    /// Queues a delivery until its next attempt. It keeps its ordering key, so that no other
    /// message with that key overtakes it. Or releases it to a source that executes the delay.
    fn retry(&mut self, slot: Slot, after: Duration, failures: u32) {
        let release = Settlement::Release { after, failures };
        let Some(after) = self.intake.delay_in_consumer(slot, after) else {
            return self.settle_delivery(slot, release);
        };
        self.reporter.outcomes.settled(&release);
        self.drop_lease(slot);
        let Some(entry) = self.intake.at(slot) else {
            return;
        };
        let age = age(entry.in_flight.message(), self.clock.wall);
        let freshness = self.freshness(age);
        self.intake.update(slot, |entry| {
            entry.in_flight.restart(History {
                failures,
                freshness,
            });
            entry.in_flight.detach_message();
            (entry.task, entry.began) = (None, None);
        });
        self.wake(slot, after);
        self.intake.enqueue(slot);
    }

    /// Removes a delivery and adds its settlement to those that the engine passes to the source at
    /// the end of this iteration.
    #[inline]
    fn settle_delivery(&mut self, slot: Slot, settlement: Settlement) {
        if let Settlement::Accept(proof) = &settlement
            && proof.kind() == ProofKind::PassedWithoutStore
        {
            self.record_completion_later(slot);
        }
        let (policy, leases, now) = (&self.policy, &mut self.leases, self.clock.boot);
        let (reporter, source, into) = (&mut self.reporter, &self.source, &mut self.settled);
        let removed = self.intake.remove(slot, |entry| {
            entry.task = None;
            if entry.has_lease {
                leases.unregister(slot);
            }
            into.push(entry.in_flight.settle_in_place(settlement, policy));
            let (shared, after) = (entry.in_flight.shared(), entry.arrived.elapsed_at(now));
            if let Some(settled) = into.last() {
                reporter.settled(settled, shared, after, |reason| {
                    source.destination(&settled.delivery.message.origin, reason)
                });
            }
            shared.clone()
        });
        if let Some(shared) = removed {
            self.intake.recycle(shared);
        }
    }

    /// Queues the claim of a message that was handled without the store, which its completion
    /// follows. Both are sent with the token of its unanswered claim when the store is available
    /// again.
    #[cold]
    fn record_completion_later(&mut self, slot: Slot) {
        let Some(in_flight) = self.intake.at(slot).map(|entry| &entry.in_flight) else {
            return;
        };
        let shared = in_flight.shared();
        let Some(id) = &shared.id else { return };
        let claim = Operation {
            key: self.settings.scope.key(id),
            kind: OperationKind::Claim,
            token: in_flight.driver().token,
            attempt: 0,
            terms: shared.terms,
        };
        if self.batcher.late.add(claim).is_err() {
            self.reporter.logs.late_completions_full();
        }
    }

    /// Ends the isolation of a delivery, if it ran in isolation: suspects that wait for that may
    /// claim.
    #[cold]
    fn end_isolation(&mut self, slot: Slot) {
        let suspects = &mut self.executor.suspects;
        if !suspects.remove(slot) {
            return;
        }
        while let Some(next) = suspects.first_waiting() {
            let driver = self.intake.at(next).map(|entry| entry.in_flight.driver());
            let Some(driver) = driver.filter(|driver| matches!(driver.stage(), Stage::New(_)))
            else {
                suspects.pop_waiting(); // the delivery is settled, or drains
                continue;
            };
            let isolation = self.policy.isolation(driver.attempts);
            if !suspects.admit(next, isolation.unwrap_or(Isolation::Group)) {
                return;
            }
            suspects.pop_waiting();
            self.follow_ups.push_back((next, Event::Arrived));
        }
    }

    /// Drops the lease of a delivery and stops its renewal.
    fn drop_lease(&mut self, slot: Slot) {
        if let Some(entry) = self.intake.at_mut(slot)
            && std::mem::take(&mut entry.has_lease)
        {
            entry.in_flight.shared_mut().lease = None;
            self.leases.unregister(slot);
        }
    }

    /// Starts the handler or `reconcile`. Returns the event of the run if it ended on its first
    /// poll.
    fn start(&mut self, slot: Slot, kind: RunKind) -> Option<Event> {
        if let Stage::WithoutClaim(_) = self.intake.at(slot)?.stage() {
            self.drop_lease(slot);
        }
        let entry = self.intake.at_mut(slot)?;
        let result = start_run(entry, &mut self.executor, slot, kind, &mut self.clock)?;
        let (reporter, leases) = (&mut self.reporter, &mut self.leases);
        Some(record_run(
            entry,
            reporter,
            leases,
            &mut self.clock,
            &result,
        ))
    }

    /// Processes the results of spawned runs. Ignores a result if the generation of its delivery
    /// has changed since the run started.
    pub(super) fn on_finished_runs(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.executor.take_finished(&mut finished);
        for FinishedRun { ticket, result } in finished.drain(..) {
            let RunTicket { slot, generation } = ticket;
            let (policy, reporter) = (&self.policy, &mut self.reporter);
            let (leases, clock) = (&mut self.leases, &mut self.clock);
            let next = self.intake.update(slot, |entry| {
                if entry.generation != generation {
                    return Ok(DriverCommand::Nothing);
                }
                if let Some(task) = entry.task.take() {
                    task.finished();
                }
                let event = record_run(entry, reporter, leases, clock, &result);
                after_run(entry, policy, event)
            });
            self.continue_with(slot, next);
        }
        self.finished = finished; // keeps the allocation
    }

    /// Processes a report of the renewal thread that a lease has ended.
    pub(super) fn on_lease_lost(&mut self, (index, token): LostLease) {
        let Some(slot) = self.intake.slot(index) else {
            return;
        };
        let now = BootTime::now();
        // A delivery may have a newer lease, with another token.
        let is_lost = self.intake.at(slot).is_some_and(|entry| {
            let lease = entry.in_flight.shared().lease.as_ref();
            lease.is_some_and(|lease| lease.token == token) && entry.lease_is_over(now)
        });
        if is_lost {
            self.handle_event(slot, Event::LeaseOver);
        }
    }

    /// Processes the alarms that are due.
    pub(super) fn fire_alarms(&mut self) {
        let now = now();
        while let Some((slot, generation)) = self.timers.pop_due(now) {
            let Some(entry) = self
                .intake
                .at(slot)
                .filter(|entry| entry.generation == generation)
            else {
                continue;
            };
            self.clock.boot = BootTime::now();
            let stage = entry.stage();
            if let Stage::New(_) = stage {
                self.intake.resume(slot);
            } else if stage.waits_on_lease() && entry.lease_is_over(self.clock.boot) {
                self.handle_event(slot, Event::LeaseOver);
            } else {
                self.handle_event(slot, Event::Woke);
            }
        }
    }
}

/// Starts a run of the handler or of `reconcile`. Returns the result if the run ended on its first
/// poll.
#[inline]
fn start_run(
    entry: &mut InFlightEntry,
    executor: &mut Executor,
    slot: Slot,
    kind: RunKind,
    clock: &mut Clock,
) -> Option<RunResult> {
    let attempt = entry.attempt();
    if entry.in_flight.shared().attempt != attempt {
        entry.in_flight.shared_mut().attempt = attempt;
    }
    entry.generation += 1;
    entry.began = Some(clock.boot);
    let cx = Context(entry.in_flight.shared().clone());
    let generation = entry.generation;
    match executor.start(kind, cx, clock.boot, RunTicket { slot, generation }) {
        StartedRun::Finished(result) => Some(result),
        StartedRun::Task { task, now } => {
            entry.task = Some(task);
            clock.boot = clock.boot.max(now);
            None
        }
    }
}

/// Records the error and the duration of a run. Returns its event.
#[inline]
fn record_run(
    entry: &mut InFlightEntry,
    reporter: &mut Reporter,
    leases: &mut Leases,
    clock: &mut Clock,
    result: &RunResult,
) -> Event {
    entry.record_error(result);
    let took = entry
        .began
        .take()
        .map_or(Duration::ZERO, |began| began.elapsed_at(result.ended));
    reporter.run_ended(entry, result, took);
    leases.record_runtime(took);
    clock.boot = clock.boot.max(result.ended);
    result.event
}

/// The fast path of a handler that has succeeded: returns the command that records its completion.
/// For any other event, and if the transition returns another action, returns the event.
#[inline(always)]
fn after_run(
    entry: &mut InFlightEntry,
    policy: &Policy,
    event: Event,
) -> Result<DriverCommand, Event> {
    let apply = |action: &Action| matches!(action, Action::Apply);
    let driver = entry.in_flight.driver_mut();
    if let done @ Event::Returned(Outcome::Done) = event
        && driver.handle_expected(done, policy, apply).is_some()
    {
        Ok(DriverCommand::Apply)
    } else {
        Err(event)
    }
}
