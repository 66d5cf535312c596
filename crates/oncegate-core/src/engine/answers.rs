//! Sends operations to the store and processes its answers.

use std::time::Instant;

use super::Engine;
use super::entry::ClaimState;
use super::intake::Intake;
use super::late::LateCompletions;
use super::store_batcher::AnsweredBatch;
use super::suspects::Suspects;
use crate::boot_time::BootTime;
use crate::clock::now;
use crate::id::{MessageId, Scope};
use crate::lease::Lease;
use crate::lifecycle::{ClaimTries, Event, Outage, Stage};
use crate::lost_claim::LostClaim;
use crate::marker::{Operation, OperationKind, Verdict};
use crate::slots::Slot;
use crate::store::{BoxError, StoreError};

impl Engine {
    /// Sends the operations that are due to the store. While the store is unavailable, messages are
    /// handled without it if the user chose [`Outage::PassThrough`].
    pub(super) fn send_batches(&mut self) {
        if self.batcher.is_misconfigured() {
            // A misconfigured store grants no claim, and the consumer stops.
            for slot in self.batcher.take_claims() {
                self.handle_event(slot, Event::StopNow);
            }
        }
        if std::mem::take(&mut self.drops_unsent_claims) {
            self.drop_unsent_claims();
        }
        let now = now();
        let Some(max_batches) = self.batcher.max_batches(now) else {
            if self.policy.outage == Outage::PassThrough {
                for slot in self.batcher.take_claims() {
                    self.handle_event(slot, Event::Unavailable);
                }
            }
            return;
        };
        let (intake, scope) = (&self.intake, &self.settings.scope);
        let may_claim = claim_filter(intake, &self.executor.suspects, scope);
        self.batcher.send(max_batches, now, may_claim, |slot| {
            let entry = intake.at(slot)?;
            entry.claim.set(entry.claim.get().sent());
            entry.operation(scope)
        });
    }

    /// When to try again to send the queued operations: see
    /// [`StoreBatcher::next_try_at`](super::store_batcher::StoreBatcher::next_try_at).
    pub(super) fn next_try_at(&self) -> Option<Instant> {
        let (suspects, scope) = (&self.executor.suspects, &self.settings.scope);
        self.batcher
            .next_try_at(claim_filter(&self.intake, suspects, scope))
    }

    /// Drops the queued claims of draining deliveries, unless an earlier request may have applied
    /// them.
    fn drop_unsent_claims(&mut self) {
        for slot in self.batcher.take_claims() {
            let unsent = self.intake.at(slot).is_some_and(|entry| {
                entry.claim.get() == ClaimState::Absent && entry.in_flight.driver().is_draining()
            });
            if unsent {
                self.handle_event(slot, Event::ClaimNotSent);
            } else {
                self.batcher.enqueue_claim(slot);
            }
        }
    }

    /// Processes the answers of one batch: first all leases, then the state of the store, then the
    /// event of each delivery.
    pub(super) async fn on_batch_answered(&mut self, mut batch: AnsweredBatch) {
        self.read_clocks();
        let now = self.clock.monotonic;
        let took = now.saturating_duration_since(batch.began);
        self.reporter.metrics.answered(&batch.operations, took);
        let summary = self.record_answers(&batch);
        self.record_store_state(&batch, summary);
        for (index, (slot, answer)) in batch.slots.iter().zip(&batch.answers).enumerate() {
            match *slot {
                Some(slot) => match *answer {
                    Ok(Verdict::Granted(attempts)) => self.on_granted(slot, attempts),
                    Ok(Verdict::Done { marker_lost }) => self.on_done(slot, marker_lost),
                    _ => {
                        let event = self.event_of(slot, answer);
                        self.handle_event(slot, event);
                    }
                },
                None => {
                    let (operation, pause) =
                        (&batch.operations[index], self.policy.longest_backoff);
                    self.batcher.on_late_answer(operation, answer, now, pause);
                }
            }
        }
        let misconfigured = summary
            .misconfigured
            .and_then(|index| batch.answers.swap_remove(index).err());
        // After the events above, which decide which grants are withdrawn: a suspect starts only
        // when no claim is unanswered and no grant is being withdrawn.
        self.batcher.finish_batch(batch);
        if let Some((slot, event)) = self.next_runnable() {
            self.handle_event(slot, event);
        }
        if let Some(error) = misconfigured
            && self.batcher.set_misconfigured()
        {
            tracing::error!(%error, "store misconfigured, stopping: running handlers may finish; correct what the error names and start again");
            self.begin_drain(Some(error.into())).await;
        }
    }

    /// Registers the leases of all grants and gives up those of done ids, before any handler of the
    /// batch runs.
    fn record_answers(&mut self, batch: &AnsweredBatch) -> BatchSummary {
        let mut summary = BatchSummary::default();
        let renew_until = batch.sent + self.max_renewal_time;
        let operations = batch.slots.iter().zip(&batch.operations);
        for (index, ((slot, operation), answer)) in operations.zip(&batch.answers).enumerate() {
            let slot = *slot;
            summary.any_delivery |= slot.is_some();
            match (slot, answer) {
                (Some(slot), Ok(verdict)) => {
                    summary.any_answered = true;
                    summary.any_claim_answered |= operation.kind == OperationKind::Claim;
                    self.record_verdict(slot, operation, *verdict, batch.sent, renew_until);
                    continue;
                }
                (Some(_), Err(StoreError::UnreadableMarker(_))) => summary.any_answered = true,
                (_, Err(StoreError::Misconfigured(_))) => summary.misconfigured = Some(index),
                (Some(_), Err(_)) => summary.unavailable = Some(index),
                // A late completion: the store is available again, also if nothing else waits for it.
                (None, Ok(_)) => summary.any_answered = true,
                (None, Err(_)) => {}
            }
            if let Some(entry) = slot.and_then(|slot| self.intake.at_mut(slot)) {
                entry.end_operation(&"unavailable", None);
                let may_be_applied = !matches!(answer, Err(StoreError::NotApplied(_)));
                entry.claim.set(entry.claim.get().failed(may_be_applied));
            }
        }
        self.leases.update_renewals();
        summary
    }

    /// Updates the lease, the claim state and the span of a delivery, and logs takeovers, lost
    /// claims, duplicates and claims of ids that are held elsewhere.
    #[inline]
    fn record_verdict(
        &mut self,
        slot: Slot,
        operation: &Operation,
        verdict: Verdict,
        sent: BootTime,
        renew_until: BootTime,
    ) {
        let Some(entry) = self.intake.at_mut(slot) else {
            return;
        };
        if let Some(lost) = LostClaim::of(&operation.kind, &verdict) {
            self.reporter.logs.claim_lost(entry, lost);
        }
        match verdict {
            Verdict::Granted(attempts) | Verdict::InDoubt(attempts) => {
                if attempts.crashes > entry.in_flight.driver().attempts.crashes {
                    self.reporter.logs.taken_over(entry, attempts);
                }
                entry.end_operation(&verdict, Some(attempts.number));
                entry.claim.set(ClaimState::MayExist);
                if self.leases.are_renewed() {
                    let (token, duration) = (operation.token, operation.terms.lease);
                    let lease = Lease::new(token, duration, sent, renew_until);
                    let shared = entry.in_flight.shared_mut();
                    (shared.attempt, shared.lease) = (attempts.number, Some(lease));
                    entry.has_lease = true;
                    self.leases.register(slot, entry.in_flight.shared().clone());
                }
                return;
            }
            Verdict::Done { .. } => {
                if let Some(lease) = &entry.in_flight.shared().lease
                    && matches!(operation.kind, OperationKind::Complete)
                {
                    let age = lease.sent.elapsed_at(self.clock.boot);
                    self.reporter.metrics.completed(age);
                }
                if std::mem::take(&mut entry.has_lease) {
                    self.leases.unregister(slot);
                }
            }
            Verdict::Busy { remaining } => {
                if let Stage::Claiming(_, ClaimTries(0)) = entry.stage() {
                    self.reporter.logs.held_elsewhere(entry, remaining);
                }
            }
            Verdict::Duplicate => {
                let id = entry.id().map(MessageId::as_str);
                let origin = &entry.in_flight.message().origin;
                tracing::debug!(id, %origin, "duplicate skipped: its id was handled before");
            }
            _ => {}
        }
        entry.end_operation(&verdict, None);
    }

    /// Updates the breaker and the status from the summary of a batch.
    fn record_store_state(&mut self, batch: &AnsweredBatch, summary: BatchSummary) {
        let now = self.clock.monotonic;
        for index in summary.misconfigured.into_iter().chain(summary.unavailable) {
            if let Err(error) = &batch.answers[index] {
                self.reporter
                    .store_health(|health| health.failed(error, now));
            }
        }
        if let Some(Err(error)) = summary.unavailable.map(|index| &batch.answers[index]) {
            self.reporter.logs.unavailable(error, self.intake.len());
        }
        if summary.any_answered {
            self.reporter.store_health(|health| health.answered(now));
            let unavailable_for = self.batcher.breaker.answered(now);
            let logs = &mut self.reporter.logs;
            logs.answered(unavailable_for, summary.any_claim_answered);
        } else if summary.any_delivery {
            self.reporter
                .store_health(|health| health.not_answered(now));
            self.batcher.breaker.not_answered(now);
        }
    }

    /// The event that an answer means for its delivery.
    #[inline]
    fn event_of(&mut self, slot: Slot, answer: &Result<Verdict, StoreError>) -> Event {
        match answer {
            Ok(verdict) => Event::Answer(*verdict),
            Err(StoreError::Misconfigured(_)) => Event::StopNow,
            Err(StoreError::UnreadableMarker(why)) => {
                self.report_unreadable_marker(slot, why);
                Event::UnreadableMarker
            }
            Err(_) if self.may_release_without_store(slot) => Event::ClaimNotSent,
            Err(_) => Event::Unavailable,
        }
    }

    /// Whether a delivery drains and the store has no claim of it, so that its release does not
    /// have to wait for an unavailable store.
    fn may_release_without_store(&self, slot: Slot) -> bool {
        self.intake.at(slot).is_some_and(|entry| {
            entry.claim.get() == ClaimState::Absent
                && matches!(entry.stage(), Stage::ClaimingInDrain(_))
        })
    }

    /// Logs that the value under the key of a message is not a marker, and adds the reason to its
    /// failure history.
    #[cold]
    fn report_unreadable_marker(&mut self, slot: Slot, why: &BoxError) {
        let Some(entry) = self.intake.at_mut(slot) else {
            return;
        };
        let id = entry.id().map(MessageId::as_str);
        tracing::error!(id, origin = %entry.in_flight.message().origin, error = %why, "unreadable marker: the value under the key of this message is not a marker of this release, so it is unknown whether the message was handled; if another program wrote the value, use a separate key prefix, otherwise upgrade oncegate or delete the key");
        entry
            .in_flight
            .update_failures(|failure_history| failure_history.last_error = Some(why.to_string()));
    }
}

/// A summary of the answers to a batch.
#[derive(Clone, Copy, Default)]
struct BatchSummary {
    /// Whether an operation belongs to a delivery, and not to a late completion.
    any_delivery: bool,
    /// Whether the store answered an operation of a delivery.
    any_answered: bool,
    /// Whether the store answered a claim.
    any_claim_answered: bool,
    /// The index of the last operation of a delivery that the store did not answer; late
    /// completions do not count.
    unavailable: Option<usize>,
    /// The index of the last operation that the store refused as misconfigured.
    misconfigured: Option<usize>,
}

/// Which claims may be sent now: only those of suspects and of draining deliveries if suspects are
/// admitted, and none whose id has an unconfirmed late completion.
fn claim_filter(
    intake: &Intake,
    suspects: &Suspects,
    scope: &Scope,
) -> impl Fn(Slot, &LateCompletions) -> bool {
    move |slot, late| {
        if !suspects.has_admitted() && late.all_confirmed() {
            return true;
        }
        let Some(entry) = intake.at(slot) else {
            return true; // the delivery was settled since, so it has no operation
        };
        let excluded = suspects.excludes(slot) && !entry.in_flight.driver().is_draining();
        let key = || entry.id().map(|id| scope.key(id));
        !excluded && (late.all_confirmed() || !key().is_some_and(|key| late.must_wait(&key)))
    }
}
