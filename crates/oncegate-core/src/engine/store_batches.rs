//! Batches of operations to the store, and their answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Span;

use super::Engine;
use super::entry::ClaimState;
use crate::boot_time::BootTime;
use crate::breaker::BreakerDecision;
use crate::decode::Decode;
use crate::fault;
use crate::handler::Handler;
use crate::id::MessageId;
use crate::lease::Lease;
use crate::lifecycle::{ClaimTries, Event, Outage, Stage};
use crate::marker::{Ask, Operation, Verdict};
use crate::slots::Slot;
use crate::spans;
use crate::store::{BoxError, StoreError};

/// A batch that the store has answered.
pub(super) struct AnsweredBatch {
    slots: Vec<Option<Slot>>,
    operations: Vec<Operation>,
    /// How many operations are claims of deliveries.
    claims: usize,
    sent: BootTime,
    began: Instant,
    answers: Vec<Result<Verdict, StoreError>>,
}

impl<H: Handler, D: Decode> Engine<H, D> {
    /// Sends what is due to the store. Outcomes, late completions and claims share one `apply`, in
    /// this order.
    pub(super) fn send_batches(&mut self) {
        if self.store_misconfigured {
            self.drop_claims();
        }
        if std::mem::take(&mut self.drain_started) {
            self.drop_unsent_claims();
        }
        let max_batches = match self.breaker.decide(Instant::now()) {
            BreakerDecision::Ask if self.source_properties.overlapping_batches => {
                self.store.parallel_applies().max(1)
            }
            BreakerDecision::Ask | BreakerDecision::TryOnce => 1,
            BreakerDecision::Wait => return self.bypass_gate(),
        };
        let max_operations = self.source_properties.max_store_batch.max(1);
        while self.applies.len() < max_batches {
            let outcome_count = self.unsent_outcomes.len().min(max_operations);
            let claims = self.claims.len().min(max_operations);
            let late = if Instant::now() >= self.late_completions.due {
                self.late_completions.len().min(max_operations)
            } else {
                0
            };
            let mut slots = Vec::with_capacity(outcome_count + late + claims);
            let mut operations = Vec::with_capacity(outcome_count + late + claims);
            let outcomes: Vec<Slot> = self.unsent_outcomes.drain(..outcome_count).collect();
            for slot in outcomes {
                self.add_operation(slot, &mut slots, &mut operations);
            }
            for operation in self.late_completions.take(late) {
                slots.push(None);
                operations.push(operation);
            }
            let before_claims = operations.len();
            self.add_claims(claims, &mut slots, &mut operations);
            if operations.is_empty() {
                return;
            }
            let claims = operations.len() - before_claims;
            self.claims_sent += claims;
            let store = self.store.clone();
            self.applies.push(Box::pin(async move {
                let (sent, began) = (BootTime::now(), Instant::now());
                fault::before(&operations);
                let answers = store.apply(&operations).await;
                fault::after(&operations);
                AnsweredBatch {
                    slots,
                    operations,
                    claims,
                    sent,
                    began,
                    answers,
                }
            }));
        }
    }

    /// Adds the first claims that may be sent. The others stay in their order.
    fn add_claims(
        &mut self,
        limit: usize,
        slots: &mut Vec<Option<Slot>>,
        operations: &mut Vec<Operation>,
    ) {
        let all_may_claim = !self.suspects.any() && self.late_completions.is_settled();
        let candidates = if all_may_claim {
            limit
        } else {
            self.claims.len()
        };
        let mut remaining = limit;
        for _ in 0..candidates {
            let Some(slot) = self.claims.pop_front() else {
                break;
            };
            if all_may_claim || (remaining > 0 && self.may_claim(slot)) {
                remaining -= 1;
                self.add_operation(slot, slots, operations);
            } else {
                self.claims.push_back(slot);
            }
        }
    }

    /// Whether the claim of this delivery may be sent now.
    pub(super) fn may_claim(&self, slot: Slot) -> bool {
        let Some(entry) = self.entries.at(slot) else {
            return true;
        }; // settled since: `add_operation` skips it
        let excluded = self.suspects.exclude(slot) && !entry.in_flight.driver().is_draining();
        !excluded
            && !entry
                .key
                .as_ref()
                .is_some_and(|key| self.late_completions.hold_back(key))
    }

    fn add_operation(
        &mut self,
        slot: Slot,
        slots: &mut Vec<Option<Slot>>,
        operations: &mut Vec<Operation>,
    ) {
        let Some(entry) = self.entries.at_mut(slot) else {
            return;
        };
        let Some(key) = entry.key.clone() else {
            return;
        };
        entry.claim = ClaimState::Sent;
        let (token, attempt) = (entry.in_flight.driver().token, entry.attempt());
        slots.push(Some(slot));
        operations.push(Operation {
            key,
            ask: entry.ask,
            token,
            attempt,
            terms: entry.terms,
        });
    }

    /// Handles messages without the gate while the store is unavailable, if the user chose
    /// [`Outage::PassThrough`].
    pub(super) fn bypass_gate(&mut self) {
        if self.policy.outage != Outage::PassThrough {
            return;
        }
        for slot in std::mem::take(&mut self.claims) {
            self.handle_event(slot, Event::Unavailable);
        }
    }

    /// Processes the answers of one batch.
    pub(super) async fn on_batch_answered(&mut self, applied: AnsweredBatch) {
        let AnsweredBatch {
            slots,
            operations,
            claims,
            sent,
            began,
            mut answers,
        } = applied;
        self.read_clocks();
        self.metrics
            .answered(&operations, self.clock.saturating_duration_since(began));
        let now = BootTime::now();
        if answers.len() != operations.len() {
            answers.clear();
            answers.resize_with(operations.len(), || {
                Err(StoreError::Unknown(
                    "the store returned a different number of verdicts than operations; correct its `apply`".into(),
                ))
            });
        }
        let mut granted = Vec::new();
        let mut misconfigured = None;
        let mut unavailable = None;
        let mut events = Vec::with_capacity(slots.len());
        for ((slot, operation), answer) in slots.into_iter().zip(operations).zip(answers) {
            let Some(slot) = slot else {
                misconfigured = self.on_late_completion(operation, answer).or(misconfigured);
                continue;
            };
            let event = match answer {
                Ok(verdict) => {
                    if let (Ask::Complete, Verdict::Done { .. }) = (operation.ask, verdict)
                        && let Some(lease) = self.entries.at(slot).and_then(|it| it.lease.as_ref())
                    {
                        self.metrics.completed(lease.sent.elapsed_at(now));
                    }
                    self.record_answer(slot, &operation, verdict, sent, &mut granted);
                    Event::Answer(verdict)
                }
                Err(error @ StoreError::Misconfigured(_)) => {
                    misconfigured = Some(error);
                    Event::StopNow
                }
                Err(StoreError::UnreadableMarker(why)) => {
                    self.report_unreadable_marker(slot, &why);
                    Event::UnreadableMarker
                }
                Err(error) => {
                    unavailable = Some(error);
                    Event::Unavailable
                }
            };
            if !matches!(event, Event::Answer(_))
                && let Some(entry) = self.entries.at_mut(slot)
            {
                spans::end_operation(
                    std::mem::replace(&mut entry.store_span, Span::none()),
                    &"unavailable",
                    None,
                );
            }
            events.push((slot, event));
        }
        // Before the new grants: they may reuse slots whose old lease is still registered.
        self.stop_renewals();
        if let Some(renewals) = &self.renewals {
            renewals.start_renewing(granted.into_iter());
        }
        let now = self.clock;
        for error in misconfigured.iter().chain(&unavailable) {
            self.record_store_health(|health| health.failed(error, now));
        }
        if let Some(error) = unavailable
            && let Some(suppressed_lines) = self.reporter.unavailable.due(now)
        {
            tracing::warn!(%error, in_flight = self.entries.len(), suppressed_lines, "store unavailable, requests are retried until it answers; check the store and its network");
        }
        if events
            .iter()
            .any(|(_, event)| matches!(event, Event::Answer(_) | Event::UnreadableMarker))
        {
            self.record_store_health(|health| health.answered(now));
            if let Some(unavailable_for) = self.breaker.answered(now) {
                tracing::info!(?unavailable_for, "store available again");
            }
        } else if !events.is_empty() {
            self.record_store_health(|health| health.not_answered(now));
            self.breaker.not_answered(now);
        }
        for (slot, event) in events {
            self.handle_event(slot, event);
        }
        // After the events above, which decide which of these grants are withdrawn: a suspect starts
        // when no claim is unanswered and no grant is being withdrawn.
        self.claims_sent -= claims;
        if let Some((slot, event)) = self.next_runnable() {
            self.handle_event(slot, event);
        }
        if let Some(error) = misconfigured
            && !std::mem::replace(&mut self.store_misconfigured, true)
        {
            tracing::error!(%error, "store misconfigured, stopping: running handlers may finish; correct what the error names and start again");
            self.drain(Some(error.into()), self.settings.drain_timeout)
                .await;
        }
    }

    /// Abandons deliveries whose claim was not sent: a misconfigured store grants none.
    fn drop_claims(&mut self) {
        for slot in std::mem::take(&mut self.claims) {
            self.handle_event(slot, Event::StopNow);
        }
    }

    /// Drops the claims of deliveries that drain, unless they were sent before.
    fn drop_unsent_claims(&mut self) {
        for slot in std::mem::take(&mut self.claims) {
            let unsent = self.entries.at(slot).is_some_and(|entry| {
                entry.claim == ClaimState::Unsent && entry.in_flight.driver().is_draining()
            });
            if unsent {
                self.handle_event(slot, Event::ClaimNotSent);
            } else {
                self.claims.push_back(slot);
            }
        }
    }

    /// Logs that the record under a message's key was not written by oncegate.
    fn report_unreadable_marker(&mut self, slot: Slot, why: &BoxError) {
        let Some(entry) = self.entries.at_mut(slot) else {
            return;
        };
        let id = entry.id.as_ref().map(MessageId::as_str);
        tracing::error!(id, origin = %entry.in_flight.delivery().message.origin, error = %why, "unreadable marker: cannot tell whether this message was handled, sending it to the in-doubt queue");
        entry
            .in_flight
            .update_failures(|failure_history| failure_history.last_error = Some(why.to_string()));
    }

    /// Processes the answer to an operation of a message that was handled without the gate: its
    /// claim is followed by its completion. Returns the error of a misconfigured store.
    fn on_late_completion(
        &mut self,
        operation: Operation,
        answer: Result<Verdict, StoreError>,
    ) -> Option<StoreError> {
        match answer {
            Ok(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) => {
                self.late_completions.put_back(Operation {
                    ask: Ask::Complete,
                    attempt: attempts.number,
                    ..operation
                });
            }
            Ok(Verdict::Duplicate | Verdict::Done { .. }) => {
                self.late_completions.finish(&operation.key)
            }
            Ok(verdict) => {
                self.late_completions.finish(&operation.key);
                let key = operation.key.as_str();
                tracing::warn!(
                    key,
                    ?verdict,
                    "completion not recorded: message was handled without the gate, and a redelivery of it may run again"
                );
            }
            Err(StoreError::UnreadableMarker(why)) => {
                self.late_completions.finish(&operation.key);
                tracing::error!(key = operation.key.as_str(), error = %why, "completion not recorded: message was handled without the gate, and its marker is unreadable");
            }
            Err(error) => {
                self.late_completions.due =
                    Instant::now() + self.policy.longest_backoff.min(Duration::from_secs(1));
                self.late_completions.put_back(operation);
                return Some(error).filter(|error| matches!(error, StoreError::Misconfigured(_)));
            }
        }
        None
    }

    /// Records the lease that a verdict grants, and ends the span of the operation.
    pub(super) fn record_answer(
        &mut self,
        slot: Slot,
        operation: &Operation,
        verdict: Verdict,
        sent: BootTime,
        granted: &mut Vec<(usize, Arc<Lease>)>,
    ) {
        let Some(entry) = self.entries.at_mut(slot) else {
            return;
        };
        let granted_now = match verdict {
            Verdict::Granted(attempts) | Verdict::InDoubt(attempts) => {
                if attempts.crashes > entry.in_flight.driver().attempts.crashes {
                    self.reporter.taken_over(entry, attempts);
                }
                Some(attempts.number)
            }
            Verdict::Busy { remaining }
                if matches!(entry.in_flight.stage(), Stage::Claiming(_, ClaimTries(0))) =>
            {
                self.reporter.held_elsewhere(entry, remaining);
                None
            }
            _ => None,
        };
        spans::end_operation(
            std::mem::replace(&mut entry.store_span, Span::none()),
            &verdict,
            granted_now,
        );
        let Some(attempt) = granted_now else { return };
        if self.renewals.is_some() {
            let lease = Arc::new(Lease::new(
                operation,
                attempt,
                sent,
                sent + self.longest_hold,
            ));
            entry.lease = Some(lease.clone());
            granted.push((slot.index, lease));
        }
    }
}
