//! One delivery in flight: its message, its stage and its history of failures.

use std::sync::Arc;

use crate::context::SharedDelivery;
use crate::driver::{DriverCommand, LifecycleDriver};
use crate::id::MessageId;
use crate::lifecycle::{DoubtCause, Event, History, Policy, Reason, Settlement, Stage};
use crate::marker::Token;
use crate::message::Message;
use crate::source::{Delivery, FailureHistory, Receipt, Settled};

/// One delivery in flight. An event changes it in place. It is never copied, and
/// [`settle`](Self::settle) consumes it: it cannot be settled twice.
#[derive(Debug)]
pub struct InFlight {
    shared: Arc<SharedDelivery>,
    receipt: Receipt,
    driver: LifecycleDriver,
    /// `None` until an attempt fails.
    failure_history: Option<Box<FailureHistory>>,
}

impl InFlight {
    /// A delivery that was just received, whose message is in `shared`.
    #[inline(always)]
    pub(crate) fn new(shared: Arc<SharedDelivery>, receipt: Receipt, history: History) -> Self {
        Self {
            shared,
            receipt,
            driver: LifecycleDriver::new(history),
            failure_history: None,
        }
    }

    /// Processes an event as [`LifecycleDriver::handle`] does. The caller passes the settlement of
    /// [`DriverCommand::Settle`] to [`settle`](Self::settle).
    #[inline]
    pub fn handle(
        &mut self,
        event: Event,
        policy: &Policy,
        new_token: impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        self.driver.handle(event, policy, new_token)
    }

    /// Turns the delivery and its settlement into what
    /// [`Source::settle`](crate::source::Source::settle) consumes.
    pub fn settle(mut self, settlement: Settlement, policy: &Policy) -> Settled {
        self.settle_in_place(settlement, policy)
    }

    /// As [`settle`](Self::settle), but does not consume `self`, because moving a delivery would
    /// copy it; the caller drops it. Moves the message out of the shared record, or copies it if a
    /// handler kept its context.
    #[inline(always)]
    pub(crate) fn settle_in_place(&mut self, settlement: Settlement, policy: &Policy) -> Settled {
        let (receipt, failures) = (self.receipt.take(), self.shared.failures);
        let failure_history = match settlement {
            Settlement::Reject(reason) => Some(self.complete_failure_history(reason, policy)),
            Settlement::Accept(_) | Settlement::Release { .. } => None,
        };
        let message = self.shared_mut().message.take();
        Settled {
            delivery: Delivery {
                message: message.expect("a delivery is settled once"),
                receipt,
                failures,
            },
            settlement,
            failure_history,
        }
    }

    /// Completes the failure history of a rejected delivery with its id and its counts.
    #[cold]
    fn complete_failure_history(&mut self, reason: Reason, policy: &Policy) -> Box<FailureHistory> {
        let attempts = self.driver.attempts;
        // The marker does not count attempts without an effect; `failures` does.
        let failures = self.shared.failures;
        let granted = attempts
            .spent()
            .max(failures.saturating_add(u32::from(attempts.spent() > 0)));
        let mut failure_history = self.failure_history.take().unwrap_or_default();
        failure_history.id = self.shared.id.as_ref().map(MessageId::to_string);
        failure_history.attempts = match reason {
            // The handler did not run, or not with a readable payload, after the last grant.
            Reason::CrashesSpent
            | Reason::Unreadable
            | Reason::NoRoute
            | Reason::InDoubt(DoubtCause::TooOld) => granted.saturating_sub(1),
            Reason::AttemptsSpent if granted > policy.max_attempts => granted - 1,
            _ => granted,
        };
        failure_history.crashes = attempts.crashes;
        failure_history.last_attempt = attempts.number;
        failure_history
    }

    /// The record that the delivery shares with its handler and the renewals.
    pub(crate) fn shared(&self) -> &Arc<SharedDelivery> {
        &self.shared
    }

    /// The shared record, to change it. If a handler or the renewals also have a reference to it,
    /// it is cloned first, and they keep the old one.
    #[inline]
    pub(crate) fn shared_mut(&mut self) -> &mut SharedDelivery {
        Arc::make_mut(&mut self.shared)
    }

    /// The message.
    pub fn message(&self) -> &Message {
        self.shared.message()
    }

    /// The source's handle of the delivery.
    pub fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    /// Its stage in the lifecycle.
    #[inline]
    pub fn stage(&self) -> Stage {
        self.driver.stage()
    }

    /// Its stage and its claim.
    #[inline]
    pub fn driver(&self) -> &LifecycleDriver {
        &self.driver
    }

    /// Its stage and its claim, to change them.
    #[inline]
    pub(crate) fn driver_mut(&mut self) -> &mut LifecycleDriver {
        &mut self.driver
    }

    /// See [`LifecycleDriver::begin_drain`].
    pub fn begin_drain(&mut self) {
        self.driver.begin_drain();
    }

    /// Prepares the delivery for its next attempt: see [`LifecycleDriver::restart`].
    pub fn restart(&mut self, history: History) {
        self.shared_mut().failures = history.failures;
        self.driver.restart(history);
    }

    /// Copies the message out of the memory of its batch: see [`Message::detach`].
    pub(crate) fn detach_message(&mut self) {
        if let Some(message) = &mut self.shared_mut().message {
            message.detach();
        }
    }

    /// Updates the history of failures, which a dead letter carries in its headers.
    pub fn update_failures(&mut self, write: impl FnOnce(&mut FailureHistory)) {
        write(self.failure_history.get_or_insert_default());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lifecycle::{Freshness, Outage, Outcome};
    use crate::marker::{Attempts, Guarantee, Terms, Verdict};

    /// With attempt number 6 the handler does not run, because `max_attempts` is 5; attempt number
    /// 5 fails.
    #[test]
    fn a_dead_letter_counts_runs_and_not_the_grant_beyond_max_attempts() {
        let (pause, guarantee) = (Duration::from_millis(1), Guarantee::EffectivelyOnce);
        let policy = Policy {
            guarantee,
            max_attempts: 5,
            max_crashes: 10,
            max_inline_retries: 0,
            max_reconciles: 1,
            max_claim_retries: 1,
            backoff: pause,
            longest_backoff: pause,
            outage: Outage::Hold,
        };
        let failed = [
            Event::MayRun,
            Event::Returned(Outcome::Retry),
            Event::Answer(Verdict::Applied),
        ];
        for (number, then) in [(6, &failed[2..]), (5, &failed[..])] {
            let shared = Arc::new(SharedDelivery {
                id: None,
                message: Some(Message::default()),
                terms: Terms {
                    guarantee,
                    lease: pause,
                    window: pause,
                    fingerprint: None,
                },
                failures: 0,
                attempt: 0,
                lease: None,
            });
            let receipt = Receipt {
                epoch: 1,
                partition: 0,
                position: 0,
            };
            let history = History {
                failures: 0,
                freshness: Freshness::Fresh,
            };
            let mut in_flight = InFlight::new(shared, receipt, history);
            let settlement = [
                Event::Arrived,
                Event::Answer(Verdict::Granted(Attempts::new(number))),
            ]
            .iter()
            .chain(then)
            .find_map(
                |event| match in_flight.handle(*event, &policy, |_| Token(1)) {
                    DriverCommand::Settle(settlement) => Some(settlement),
                    command => {
                        assert!(!matches!(command, DriverCommand::Retry { .. }));
                        None
                    }
                },
            );
            let settled = settlement.map(|settlement| in_flight.settle(settlement, &policy));
            let settled = settled.expect("the delivery is rejected");
            let failure_history = settled
                .failure_history
                .expect("a rejected delivery has a failure history");
            assert_eq!(
                settled.settlement,
                Settlement::Reject(Reason::AttemptsSpent)
            );
            assert_eq!(
                (failure_history.attempts, failure_history.last_attempt),
                (5, number)
            );
        }
    }
}
