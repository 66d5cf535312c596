//! Questions to the store, and its answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Span;

use super::Engine;
use super::entry::Claim;
use crate::breaker::Judgement;
use crate::decode::Decode;
use crate::fault;
use crate::handler::Handler;
use crate::id::MessageId;
use crate::lease::Lease;
use crate::lifecycle::{ClaimTries, Event, Outage, Stage};
use crate::marker::{Ask, Operation, Verdict};
use crate::moment::Moment;
use crate::slots::Slot;
use crate::spans;
use crate::store::{BoxError, StoreError};

/// A batch that came back from the store.
pub(super) struct Applied {
    slots: Vec<Option<Slot>>,
    operations: Vec<Operation>,
    /// How many of them are claims of deliveries.
    claims: usize,
    sent: Moment,
    began: Instant,
    answers: Vec<Result<Verdict, StoreError>>,
}

impl<H: Handler, D: Decode> Engine<H, D> {
    /// Asks the store: verdicts that are due, late completions and claims of what has arrived share
    /// one apply, in this order.
    pub(super) fn ask_the_store(&mut self) {
        if self.refused {
            self.drop_claims();
        }
        if std::mem::take(&mut self.some_left) {
            self.drop_claims_of_those_that_leave();
        }
        let at_once = match self.breaker.judge(Instant::now()) {
            Judgement::Ask if self.source.overlap() => self.store.parallel_applies().max(1),
            Judgement::Ask | Judgement::TryOnce => 1,
            Judgement::Wait => return self.pass_claims_by(),
        };
        let chunk = self.source.chunk().max(1);
        while self.applies.len() < at_once {
            let verdicts = self.verdicts.len().min(chunk);
            let claims = self.claims.len().min(chunk);
            let late = if Instant::now() >= self.late.due {
                self.late.len().min(chunk)
            } else {
                0
            };
            let mut slots = Vec::with_capacity(verdicts + late + claims);
            let mut operations = Vec::with_capacity(verdicts + late + claims);
            let verdicts: Vec<Slot> = self.verdicts.drain(..verdicts).collect();
            for slot in verdicts {
                self.add_operation(slot, &mut slots, &mut operations);
            }
            for operation in self.late.take(late) {
                slots.push(None);
                operations.push(operation);
            }
            let others = operations.len();
            self.add_claims(claims, &mut slots, &mut operations);
            if operations.is_empty() {
                return;
            }
            let claims = operations.len() - others;
            self.claims_asked += claims;
            let store = self.store.clone();
            self.applies.push(Box::pin(async move {
                let (sent, began) = (Moment::now(), Instant::now());
                fault::before(&operations);
                let answers = store.apply(&operations).await;
                fault::after(&operations);
                Applied {
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

    /// Adds the first claims that may be asked for, and leaves the others in their order.
    fn add_claims(
        &mut self,
        most: usize,
        slots: &mut Vec<Option<Slot>>,
        operations: &mut Vec<Operation>,
    ) {
        let none_waits = self.alone.is_none() && self.late.is_settled();
        let looked_at = if none_waits { most } else { self.claims.len() };
        let mut left = most;
        for _ in 0..looked_at {
            let Some(slot) = self.claims.pop_front() else {
                break;
            };
            if none_waits || (left > 0 && self.may_claim(slot)) {
                left -= 1;
                self.add_operation(slot, slots, operations);
            } else {
                self.claims.push_back(slot);
            }
        }
    }

    /// Whether its claim may be asked for now.
    pub(super) fn may_claim(&self, slot: Slot) -> bool {
        let Some(flight) = self.flights.at(slot) else {
            return true;
        }; // it is gone, and so is its claim
        let others_turn =
            self.alone.is_some_and(|alone| alone != slot) && !flight.passage.dispatch().leaves();
        !others_turn
            && !flight
                .key
                .as_ref()
                .is_some_and(|key| self.late.hold_back(key))
    }

    fn add_operation(
        &mut self,
        slot: Slot,
        slots: &mut Vec<Option<Slot>>,
        operations: &mut Vec<Operation>,
    ) {
        let Some(flight) = self.flights.at_mut(slot) else {
            return;
        };
        let Some(key) = flight.key.clone() else {
            return;
        };
        flight.claim = Claim::Sent;
        let (token, attempt) = (flight.passage.dispatch().token, flight.attempt());
        slots.push(Some(slot));
        operations.push(Operation {
            key,
            ask: flight.ask,
            token,
            attempt,
            terms: flight.terms,
        });
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
        let Applied {
            slots,
            operations,
            claims,
            sent,
            began,
            mut answers,
        } = applied;
        self.read_clocks();
        self.measures
            .answered(&operations, self.clock.saturating_duration_since(began));
        let now = Moment::now();
        if answers.len() != operations.len() {
            answers.clear();
            answers.resize_with(operations.len(), || {
                Err(StoreError::Unknown(
                    "the store answered with another number of verdicts".into(),
                ))
            });
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
                misconfigured = self.answered_late(operation, answer).or(misconfigured);
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
                    Event::StopNow
                }
                Err(StoreError::UnreadableMarker(why)) => {
                    self.saw_unreadable_marker(slot, &why);
                    Event::UnreadableMarker
                }
                Err(error) => {
                    unavailable = Some(error);
                    Event::Unavailable
                }
            };
            if !matches!(event, Event::Answer(_))
                && let Some(flight) = self.flights.at_mut(slot)
            {
                spans::answered(
                    std::mem::replace(&mut flight.asked, Span::none()),
                    &"unavailable",
                    None,
                );
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
            && let Some(suppressed_lines) = self.says.unavailable.due(now)
        {
            tracing::warn!(%error, in_flight = self.flights.len(), suppressed_lines, "the store does not answer: deliveries wait");
        }
        if events
            .iter()
            .any(|(_, event)| matches!(event, Event::Answer(_) | Event::UnreadableMarker))
        {
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
        // Now it is known which of these grants are withdrawn.
        self.claims_asked -= claims;
        if let Some((slot, event)) = self.next_that_may_run() {
            self.happens(slot, event);
        }
        if let Some(error) = misconfigured
            && !std::mem::replace(&mut self.refused, true)
        {
            tracing::error!(%error, "stopping: the store asks for a change; handlers that run may finish");
            self.drain(Some(error.into()), self.settings.drain).await;
        }
    }

    /// A store that refuses its user answers no claim: what would ask comes back after its lease.
    fn drop_claims(&mut self) {
        for slot in std::mem::take(&mut self.claims) {
            self.happens(slot, Event::StopNow);
        }
    }

    /// What leaves needs no claim, unless one may have been sent already.
    fn drop_claims_of_those_that_leave(&mut self) {
        for slot in std::mem::take(&mut self.claims) {
            let unsent = self.flights.at(slot).is_some_and(|flight| {
                flight.claim == Claim::Unsent && flight.passage.dispatch().leaves()
            });
            if unsent {
                self.happens(slot, Event::NotAsked);
            } else {
                self.claims.push_back(slot);
            }
        }
    }

    /// Another program wrote under a message's id.
    fn saw_unreadable_marker(&mut self, slot: Slot, why: &BoxError) {
        let Some(flight) = self.flights.at_mut(slot) else {
            return;
        };
        let id = flight.id.as_ref().map(MessageId::as_str);
        tracing::error!(id, origin = %flight.passage.delivery().message.origin, error = %why, "unreadable marker: nothing is known of this message");
        flight
            .passage
            .tell(|story| story.last_error = Some(why.to_string()));
    }

    /// What passed without the gate is claimed and completed when the store is back. Reporter what the
    /// store asks to be changed, if it does.
    fn answered_late(
        &mut self,
        operation: Operation,
        answer: Result<Verdict, StoreError>,
    ) -> Option<StoreError> {
        match answer {
            Ok(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) => {
                self.late.put_back(Operation {
                    ask: Ask::Complete,
                    attempt: attempts.number,
                    ..operation
                });
            }
            Ok(Verdict::Duplicate | Verdict::Done { .. }) => self.late.finish(&operation.key),
            Ok(verdict) => {
                self.late.finish(&operation.key);
                let key = operation.key.as_str();
                tracing::warn!(
                    key,
                    ?verdict,
                    "message that passed without the gate could not be recorded as done; another delivery of it may run again"
                );
            }
            Err(StoreError::UnreadableMarker(why)) => {
                self.late.finish(&operation.key);
                tracing::error!(key = operation.key.as_str(), error = %why, "message that passed without the gate could not be recorded as done");
            }
            Err(error) => {
                self.late.due =
                    Instant::now() + self.policy.longest_backoff.min(Duration::from_secs(1));
                self.late.put_back(operation);
                return Some(error).filter(|error| matches!(error, StoreError::Misconfigured(_)));
            }
        }
        None
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
        let Some(flight) = self.flights.at_mut(slot) else {
            return;
        };
        let granted_now = match verdict {
            Verdict::Granted(attempts) | Verdict::InDoubt(attempts) => {
                if attempts.crashes > 0 {
                    self.says.taken_over(flight, attempts);
                }
                Some(attempts.number)
            }
            Verdict::Busy { remaining }
                if matches!(flight.passage.stage(), Stage::Claiming(_, ClaimTries(0))) =>
            {
                self.says.held_elsewhere(flight, remaining);
                None
            }
            _ => None,
        };
        spans::answered(
            std::mem::replace(&mut flight.asked, Span::none()),
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
            flight.lease = Some(lease.clone());
            granted.push((slot.place, lease));
        }
    }
}
