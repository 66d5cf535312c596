//! Questions to the store, and its answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Span;

use super::Running;
use crate::breaker::Judgement;
use crate::decode::Decode;
use crate::fault;
use crate::handler::Handler;
use crate::lease::Lease;
use crate::marker::{Ask, Operation, Verdict};
use crate::moment::Moment;
use crate::road::{Event, Outage};
use crate::slots::Slot;
use crate::spans;
use crate::store::StoreError;

/// A batch that came back from the store.
pub(super) struct Applied {
    slots: Vec<Option<Slot>>,
    operations: Vec<Operation>,
    sent: Moment,
    began: Instant,
    answers: Vec<Result<Verdict, StoreError>>,
}

/// How many completions of deliveries that passed without the gate wait for the store at the most.
pub(super) const LATE_COMPLETIONS: usize = 100_000;

impl<H: Handler, D: Decode> Running<H, D> {
    /// Asks the store: verdicts that are due and claims of what has arrived share one apply.
    pub(super) fn ask_the_store(&mut self) {
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
                let (sent, began) = (Moment::now(), Instant::now());
                fault::before(&operations);
                let answers = store.apply(&operations).await;
                fault::after(&operations);
                Applied { slots, operations, sent, began, answers }
            }));
        }
    }

    /// While the store is not asked, claims that may pass without it do so at once.
    pub(super) fn pass_claims_by(&mut self) {
        if self.policy.outage != Outage::PassThrough {
            return;
        }
        for slot in std::mem::take(&mut self.claims) {
            self.happens(slot, Event::Unavailable);
        }
    }

    /// A batch came back.
    pub(super) async fn answered(&mut self, applied: Applied) {
        let Applied { slots, operations, sent, began, mut answers } = applied;
        self.read_clocks();
        self.measures.answered(&operations, self.clock.saturating_duration_since(began));
        let now = Moment::now();
        if answers.len() != operations.len() {
            answers.clear();
            answers.resize_with(operations.len(), || Err(StoreError::Unknown("the store answered with another number of verdicts".into())));
        }
        crate::wrong_version!("accept-a-busy", {
            answers
                .iter_mut()
                .filter(|answer| matches!(answer, Ok(Verdict::Busy { .. })))
                .for_each(|answer| *answer = Ok(Verdict::Duplicate));
        });
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
                    if let (Ask::Complete, Verdict::Done { .. }) = (operation.ask, verdict)
                        && let Some(lease) = self.flights.at(slot).and_then(|it| it.lease.as_ref())
                    {
                        self.measures.completed(lease.sent.ago_at(now));
                    }
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
            if event == Event::Unavailable
                && let Some(flight) = self.flights.at_mut(slot)
            {
                spans::answered(std::mem::replace(&mut flight.asked, Span::none()), &"unavailable", None);
            }
            events.push((slot, event));
        }
        // What was given up before in these places is not what is held there now.
        self.let_leases_go();
        if let Some(renewals) = &self.renewals {
            renewals.hold(granted.into_iter());
        }
        let now = self.clock;
        for error in misconfigured.iter().chain(&unavailable) {
            self.saw_of_store(|seen| seen.failed(error, now));
        }
        if let Some(error) = unavailable
            && let Some(kept_back) = self.says.unavailable.due(now)
        {
            tracing::warn!(%error, in_flight = self.flights.len(), kept_back, "the store does not answer: deliveries wait");
        }
        if events.iter().any(|(_, event)| *event != Event::Unavailable) {
            self.saw_of_store(|seen| seen.answered(now));
            if let Some(away) = self.breaker.answered(now) {
                tracing::info!(?away, "the store answers again");
            }
        } else if !events.is_empty() {
            self.saw_of_store(|seen| seen.silent(now));
            self.breaker.silent(now);
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
    pub(super) fn answered_late(&mut self, operation: Operation, answer: Result<Verdict, StoreError>) {
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
    pub(super) fn note(
        &mut self,
        slot: Slot,
        operation: &Operation,
        verdict: Verdict,
        sent: Moment,
        granted: &mut Vec<(usize, Arc<Lease>)>,
    ) {
        let Some(flight) = self.flights.at_mut(slot) else { return };
        let granted_now = match verdict {
            Verdict::Granted { attempt } | Verdict::InDoubt { attempt } => Some(attempt),
            _ => None,
        };
        spans::answered(std::mem::replace(&mut flight.asked, Span::none()), &verdict, granted_now);
        let Some(attempt) = granted_now else { return };
        flight.attempt = attempt;
        if self.renewals.is_some() {
            let lease = Arc::new(Lease::new(operation, attempt, sent, sent + self.longest_hold));
            flight.lease = Some(lease.clone());
            granted.push((slot.place, lease));
        }
    }
}
