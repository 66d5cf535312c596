//! Executes the actions of the delivery lifecycle, from the receipt of a delivery to its
//! settlement.

use std::cmp::Reverse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use tracing::Span;

use super::entry::{
    AbortOnDrop, ClaimState, FinishedRun, InFlightEntry, Occupancy, RunKind, RunReport,
    has_running_task, may_count_crash, occupies_run,
};
use super::{Engine, Mode};

use crate::boot_time::BootTime;
use crate::context::Context;
use crate::decode::Decode;
use crate::driver::{DriverCommand, OnRelease};
use crate::fault;
use crate::handler::Handler;
use crate::id::{MessageId, NoId};
use crate::in_flight::{InFlight, Progress};
use crate::lease::Lease;
use crate::lifecycle::{ClaimTries, Event, Freshness, History, Isolation, Settlement, Stage};
use crate::marker::{Ask, Guarantee, Operation, Terms};
use crate::message::Message;
use crate::message_age::age;
use crate::ordering::KeyState;
use crate::renewals::LostLease;
use crate::run::{RunResult, panic_text};
use crate::settings::{Execution, Settings};
use crate::slots::Slot;
use crate::source::Delivery;
use crate::spans;

impl<H: Handler, D: Decode> Engine<H, D> {
    /// Registers a delivery that was received, and admits or queues it.
    pub(super) fn on_delivery(&mut self, delivery: Delivery) {
        fault::point("delivery");
        let (id, terms) = self.identify(&delivery.message);
        let age = age(&delivery.message, self.wall);
        let freshness = self.freshness(age);
        match age {
            None => self.warn_unknown_age(&delivery.message),
            Some(_) if freshness == Freshness::TooOld => self.outcomes.too_old(),
            Some(_) => {}
        }
        let bytes = delivery.message.size();
        let ordering_key = self.ordering.of(&delivery);
        let history = History {
            failures: delivery.failures,
            freshness,
        };
        let on_release = if ordering_key.is_some() {
            OnRelease::KeepPlace
        } else {
            OnRelease::ReturnToSource
        };
        let mut in_flight = InFlight::new(delivery, history, on_release);
        let (arrival, id_error) = match &id {
            Ok(_) => (Event::Arrived, None),
            Err(NoId::Missing) => (Event::NoId, Some(self.id.missing_text())),
            Err(NoId::Unusable(error)) => (Event::UnusableId, Some(error.clone())),
        };
        if id_error.is_some() {
            in_flight.update_failures(|failure_history| failure_history.first_error = id_error);
        }
        let id = id.ok();
        let entry = InFlightEntry {
            in_flight,
            key: id.as_ref().map(|id| self.settings.scope.key(id)),
            id,
            arrival,
            terms,
            ask: Ask::Claim,
            claim: ClaimState::Unsent,
            ordering_key,
            lease: None,
            store_span: Span::none(),
            task: None,
            began: None,
            arrived: self.clock,
            occupancy: Occupancy::InFlight,
            turn: 0,
            bytes,
        };
        self.bytes += bytes;
        let slot = self.entries.insert(Box::new(entry));
        match ordering_key.map_or(KeyState::Acquired, |ordering_key| {
            self.ordering.acquire(ordering_key, slot)
        }) {
            KeyState::Acquired => self.admit(slot),
            KeyState::Queued => self.enqueue(slot),
        }
    }

    /// Counts a message without a timestamp, and warns in at most once, which relies on `max_age`.
    fn warn_unknown_age(&mut self, message: &Message) {
        self.outcomes.unknown_age();
        if self.policy.guarantee == Guarantee::AtMostOnce
            && let Some(suppressed_lines) = self.reporter.unknown_age.due(Instant::now())
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

    /// The id and the terms of a message. The user's functions run here: if one panics, the id is
    /// unusable.
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
            Ok(id_and_terms) => id_and_terms,
            Err(panic) => {
                let error = format!(
                    "the function that reads the id or the fingerprint {}",
                    panic_text(panic)
                );
                tracing::error!(origin = %message.origin, "{error}");
                let Settings {
                    guarantee,
                    lease,
                    dedup_window,
                    ..
                } = self.settings;
                (
                    Err(NoId::Unusable(error)),
                    Terms {
                        guarantee,
                        lease,
                        window: dedup_window,
                        fingerprint: None,
                    },
                )
            }
        }
    }

    /// Starts the lifecycle of a delivery that was received, or that is removed from the queue.
    pub(super) fn admit(&mut self, slot: Slot) {
        let draining = matches!(self.mode, Mode::Draining { .. });
        let Some(entry) = self.entries.at_mut(slot) else {
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
        let mut next = Some((slot, event));
        // A loop, because recursion would overflow the stack: settling a delivery can start the next
        // of its ordering key, thousands of times.
        while let Some((slot, event)) = next {
            self.advance(slot, event);
            next = self.follow_ups.pop_front();
            if next.is_none() && (self.suspects.any() || !self.awaiting_run.is_empty()) {
                next = self.next_runnable();
            }
        }
    }

    /// The next delivery to run: a suspect if no claim or withdrawal awaits its reply, otherwise the
    /// first of `awaiting_run`. `None` if `max_in_flight` runs are active.
    pub(super) fn next_runnable(&mut self) -> Option<(Slot, Event)> {
        if self.claims_sent == 0
            && self.withdrawing == 0
            && self.running < self.settings.max_in_flight
        {
            let ready = self.suspects.admitted().find_map(|slot| {
                let entry = self.entries.at(slot)?;
                matches!(entry.in_flight.stage(), Stage::Ready(_)).then_some((slot, entry))
            });
            if let Some((slot, entry)) = ready {
                return Some((slot, self.check_lease_before_run(entry)));
            }
        }
        while self.running < self.settings.max_in_flight {
            let slot = self.awaiting_run.pop_front()?;
            let Some(entry) = self.entries.at(slot) else {
                continue;
            };
            if let Stage::Ready(_) = entry.in_flight.stage() {
                return Some((slot, self.check_lease_before_run(entry)));
            }
        }
        None
    }

    /// [`Event::MayRun`], or [`Event::LeaseOver`] if the lease expired while the delivery waited. The
    /// limit for renewals starts now, so that the time spent waiting does not shorten it.
    fn check_lease_before_run(&self, entry: &InFlightEntry) -> Event {
        let Some(lease) = &entry.lease else {
            return Event::MayRun;
        };
        let now = BootTime::now();
        if !lease.is_live(now) {
            return Event::LeaseOver;
        }
        lease.hold_until(now + self.longest_hold);
        Event::MayRun
    }

    /// Applies an event to a delivery and executes the resulting commands, until the next event must
    /// come from outside.
    pub(super) fn advance(&mut self, slot: Slot, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let Some(mut entry) = self.entries.take(slot) else {
                return;
            };
            self.outcomes.happened(event);
            if event == Event::LeaseOver && has_running_task(entry.in_flight.stage()) {
                self.reporter.lease_lost(&entry);
            }
            if entry.occupancy == Occupancy::Queued {
                entry.occupancy = Occupancy::InFlight;
                self.queued -= 1;
                self.queued_bytes -= entry.bytes;
            }
            self.completing -= usize::from(matches!(entry.in_flight.stage(), Stage::Completing(_)));
            self.awaiting_holder -=
                usize::from(matches!(entry.in_flight.stage(), Stage::AwaitingHolder(..)));
            self.withdrawing -=
                usize::from(matches!(entry.in_flight.stage(), Stage::Withdrawing(..)));
            self.running -= usize::from(occupies_run(entry.in_flight.stage()));
            let claim = (
                entry.in_flight.driver().token,
                entry.in_flight.driver().attempts,
            );
            let new_token = |_| self.tokens.token();
            match entry.in_flight.handle(event, &self.policy, new_token) {
                Progress::InFlight(mut in_flight, DriverCommand::Hold { after, failures }) => {
                    self.outcomes
                        .settled(&Settlement::Release { after, failures });
                    let freshness = self.freshness(age(&in_flight.delivery().message, self.wall));
                    in_flight.restart(History {
                        failures,
                        freshness,
                    });
                    entry.in_flight = in_flight;
                    self.back_off(slot, entry, after);
                }
                Progress::InFlight(in_flight, command) => {
                    self.completing +=
                        usize::from(matches!(in_flight.stage(), Stage::Completing(_)));
                    self.awaiting_holder +=
                        usize::from(matches!(in_flight.stage(), Stage::AwaitingHolder(..)));
                    self.withdrawing +=
                        usize::from(matches!(in_flight.stage(), Stage::Withdrawing(..)));
                    self.running += usize::from(occupies_run(in_flight.stage()));
                    entry.in_flight = in_flight;
                    if !has_running_task(entry.in_flight.stage()) {
                        entry.task = None;
                    }
                    next = self.execute(slot, &mut entry, command);
                    let may_count_crash = may_count_crash(entry.in_flight.stage());
                    self.entries.put_back(slot, entry);
                    if next.is_none() && !may_count_crash {
                        self.end_isolation(slot);
                    }
                }
                Progress::Settled(mut settled) => {
                    let (token, attempts) = claim;
                    let InFlightEntry {
                        id,
                        key,
                        terms,
                        ordering_key,
                        lease,
                        task,
                        bytes,
                        arrived,
                        ..
                    } = *entry;
                    drop(task);
                    self.metrics
                        .settled(self.clock.saturating_duration_since(arrived));
                    if let Some(failure_history) = &mut settled.failure_history {
                        failure_history.id = id.as_ref().map(MessageId::to_string);
                    }
                    if let Settlement::Reject(reason) = &settled.settlement {
                        self.reporter.rejected(
                            &settled,
                            self.source
                                .destination(&settled.delivery.message.origin, reason),
                        );
                    }
                    spans::settle(
                        &settled.delivery,
                        id.as_ref(),
                        attempts.number,
                        &settled.settlement,
                    )
                    .in_scope(|| self.outcomes.settled(&settled.settlement));
                    if let (Settlement::Accept(proof), Some(key)) = (&settled.settlement, key)
                        && proof.as_str() == "passed_without_gate"
                    {
                        self.record_completion_later(Operation {
                            key,
                            ask: Ask::Claim,
                            token,
                            attempt: 0,
                            terms,
                        });
                    }
                    self.settled.push(settled);
                    self.remove(slot, ordering_key, lease, bytes);
                }
                Progress::Abandoned(_) => {
                    drop(entry.task);
                    self.outcomes.dropped();
                    self.remove(slot, entry.ordering_key, entry.lease, entry.bytes);
                }
            }
        }
    }

    /// Backs off after a failed attempt. The delivery keeps its ordering key, so that no other
    /// message with that key overtakes it.
    fn back_off(&mut self, slot: Slot, mut entry: Box<InFlightEntry>, after: Duration) {
        (entry.task, entry.began) = (None, None);
        entry.turn += 1;
        self.release_lease(slot, &mut entry);
        let after = self.jittered(after);
        self.alarms
            .push(Reverse((Instant::now() + after, slot, entry.turn)));
        self.entries.put_back(slot, entry);
        self.enqueue(slot);
        self.end_isolation(slot);
    }

    /// Counts a delivery as queued, not in flight, until its next event.
    fn enqueue(&mut self, slot: Slot) {
        let Some(entry) = self.entries.at_mut(slot) else {
            return;
        };
        entry.occupancy = Occupancy::Queued;
        self.queued += 1;
        self.queued_bytes += entry.bytes;
    }

    /// Queues the claim and completion of a message that was handled without the gate. They are sent
    /// with the token of its lost claim when the store is available again.
    fn record_completion_later(&mut self, claim: Operation) {
        if self.late_completions.add(claim).is_err()
            && let Some(suppressed_lines) = self.reporter.late_completions_full.due(Instant::now())
        {
            tracing::warn!(
                suppressed_lines,
                "completion not recorded: too many messages were handled without the gate; a redelivery of this one runs again"
            );
        }
    }

    /// Executes a command. Returns the event that follows immediately, if any.
    pub(super) fn execute(
        &mut self,
        slot: Slot,
        entry: &mut InFlightEntry,
        command: DriverCommand,
    ) -> Option<Event> {
        match command {
            DriverCommand::Apply(ask) => {
                if ask == Ask::Claim && entry.attempt() == 0 {
                    self.release_lease(slot, entry);
                }
                if let Stage::Claiming(_, ClaimTries(0)) = entry.in_flight.stage()
                    && entry.attempt() == 0
                {
                    entry.claim = ClaimState::Unsent; // it has a new token
                }
                entry.turn += 1; // invalidates earlier alarms, which would send the operation twice
                entry.begin_operation(ask);
                if ask == Ask::Claim {
                    self.claims.push_back(slot)
                } else {
                    self.unsent_outcomes.push_back(slot)
                }
            }
            DriverCommand::AwaitRun => {
                if let Stage::Ready(grant) = entry.in_flight.stage()
                    && let Some(isolation) = self.policy.isolation(grant.attempts)
                {
                    if !self.suspects.admit(slot, isolation) {
                        return Some(Event::IsolationFull);
                    }
                    self.reporter
                        .runs_apart(entry, grant.attempts, self.policy.max_crashes);
                    return None;
                }
                // While its completion, which was lost, was unanswered, another delivery may have taken
                // its run.
                if self.running >= self.settings.max_in_flight {
                    self.awaiting_run.push_back(slot);
                    return None;
                }
                return Some(self.check_lease_before_run(entry));
            }
            DriverCommand::Run => {
                if let Stage::Ungated(_) = entry.in_flight.stage() {
                    self.release_lease(slot, entry);
                }
                return self.start(slot, entry, RunKind::Handle);
            }
            DriverCommand::Reconcile => return self.start(slot, entry, RunKind::Reconcile),
            DriverCommand::Wake(after) => {
                entry.turn += 1;
                let after = self.jittered(after);
                self.alarms
                    .push(Reverse((Instant::now() + after, slot, entry.turn)));
            }
            DriverCommand::AwaitIsolation => {
                self.release_lease(slot, entry);
                let isolation = self.policy.isolation(entry.in_flight.driver().attempts);
                if self
                    .suspects
                    .admit(slot, isolation.unwrap_or(Isolation::Group))
                {
                    return Some(Event::Arrived);
                }
                self.suspects.wait(slot);
            }
            DriverCommand::Nothing => {}
            DriverCommand::Hold { .. } | DriverCommand::Settle(_) | DriverCommand::Abandon => {
                unreachable!("a settled delivery has no command")
            }
        }
        None
    }

    /// Drops the lease of a delivery and stops its renewal.
    pub(super) fn release_lease(&mut self, slot: Slot, entry: &mut InFlightEntry) {
        if entry.lease.take().is_some() {
            self.ended_leases.push(slot.index);
        }
    }

    /// Starts the handler or `reconcile`. Returns its event if it ended on the first poll.
    pub(super) fn start(
        &mut self,
        slot: Slot,
        entry: &mut InFlightEntry,
        kind: RunKind,
    ) -> Option<Event> {
        let id = entry.id.clone()?;
        entry.turn += 1;
        let turn = entry.turn;
        let delivery = entry.in_flight.delivery();
        let (message, failures) = (delivery.message.clone(), delivery.failures);
        let cx = Context {
            id,
            attempt: entry.attempt().max(1),
            failures,
            message,
            lease: entry.lease.clone(),
        };
        let began = Instant::now();
        entry.began = Some(began);
        let runner = self.runner.clone();
        let mut run: BoxFuture<'static, RunResult> = match kind {
            RunKind::Handle => Box::pin(runner.handle(cx, began)),
            RunKind::Reconcile => Box::pin(runner.reconcile(cx, began)),
        };
        if self.settings.execution == Execution::Inline {
            // The waker of this poll may be ignored: a pending future is polled again by its task.
            if let Some(finished) = (&mut run).now_or_never() {
                entry.record_error(&finished);
                self.reporter.run_ended(entry, &finished);
                self.record_runtime(entry.began.take());
                return Some(finished.event);
            }
        }
        let report = RunReport {
            sender: self.run_sender.clone(),
            slot,
            turn,
            finished: None,
        };
        let task = tokio::spawn(async move { report.send(run.await) });
        entry.task = Some(AbortOnDrop(task.abort_handle()));
        self.spawned += 1;
        None
    }

    /// Records the duration of a run, and adapts the lease if `shortest_lease` is set.
    fn record_runtime(&mut self, began: Option<Instant>) {
        let Some(runtime) = began.map(|began| began.elapsed()) else {
            return;
        };
        self.metrics.handled(runtime);
        let Some(shortest) = self.settings.shortest_lease else {
            return;
        };
        self.runtimes.record(runtime);
        if let Some(lease) = self.runtimes.lease() {
            self.lease = lease.clamp(shortest, self.settings.lease);
        }
    }

    /// Handles the result of a spawned handler or `reconcile`; ignores it if the turn of the
    /// delivery has changed since.
    pub(super) fn on_run_finished(&mut self, (slot, turn, finished): FinishedRun) {
        let Some(entry) = self.entries.at_mut(slot) else {
            return;
        };
        if entry.turn != turn {
            return;
        }
        entry.record_error(&finished);
        self.reporter.run_ended(entry, &finished);
        let began = entry.began.take();
        self.record_runtime(began);
        self.handle_event(slot, finished.event);
    }

    /// Handles a report of the renewal thread that a lease expired.
    pub(super) fn on_lease_lost(&mut self, (index, token): LostLease) {
        let Some(slot) = self.entries.slot(index) else {
            return;
        };
        let now = BootTime::now();
        // A delivery may have a newer lease, with another token.
        let is_lost = |lease: &Arc<Lease>| lease.token == token && !lease.is_live(now);
        if self
            .entries
            .at(slot)
            .is_some_and(|entry| entry.lease.as_ref().is_some_and(is_lost))
        {
            self.handle_event(slot, Event::LeaseOver);
        }
    }
}
