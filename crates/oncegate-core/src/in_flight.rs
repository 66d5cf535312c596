//! One delivery in flight: its message, its stage and its history of failures.

use crate::driver::{DriverCommand, LifecycleDriver, OnRelease};
use crate::lifecycle::{Event, History, Policy, Reason, Settlement, Stage};
use crate::marker::Token;
use crate::source::{Delivery, FailureHistory, Settled};

/// One delivery in flight. Each event consumes it, it is never copied, and it cannot be used after
/// it was settled.
#[derive(Debug)]
pub struct InFlight(Box<InFlightInner>);

/// Boxed, so that an event moves a pointer.
#[derive(Debug)]
struct InFlightInner {
    delivery: Delivery,
    driver: LifecycleDriver,
    /// `None` until an attempt fails.
    failure_history: Option<Box<FailureHistory>>,
}

/// The result of an event for an [`InFlight`].
#[derive(Debug)]
pub enum Progress {
    /// It is still in flight; this command follows, never [`DriverCommand::Settle`] or
    /// [`DriverCommand::Abandon`].
    InFlight(InFlight, DriverCommand),
    /// It has a settlement, for the source.
    Settled(Settled),
    /// It was abandoned without a settlement, and will be redelivered.
    Abandoned(Delivery),
}

impl InFlight {
    /// A delivery that was just received.
    pub fn new(delivery: Delivery, history: History, on_release: OnRelease) -> Self {
        Self(Box::new(InFlightInner {
            delivery,
            driver: LifecycleDriver::new(history, on_release),
            failure_history: None,
        }))
    }

    /// Processes an event as [`LifecycleDriver::handle`] does.
    pub fn handle(
        self,
        event: Event,
        policy: &Policy,
        new_token: impl FnMut(Token) -> Token,
    ) -> Progress {
        let Self(mut inner) = self;
        match inner.driver.handle(event, policy, new_token) {
            DriverCommand::Settle(settlement) => {
                let InFlightInner {
                    delivery,
                    driver,
                    failure_history,
                } = *inner;
                let attempts = driver.attempts;
                let failure_history = matches!(settlement, Settlement::Reject(_)).then(|| {
                    let mut failure_history = failure_history.unwrap_or_default();
                    // The marker does not count attempts without an effect; the delivery does.
                    let granted = attempts.spent().max(
                        delivery
                            .failures
                            .saturating_add(u32::from(attempts.spent() > 0)),
                    );
                    failure_history.attempts = match settlement {
                        // The handler is not run for the last grant.
                        Settlement::Reject(Reason::CrashesSpent) => granted.saturating_sub(1),
                        Settlement::Reject(Reason::AttemptsSpent)
                            if granted > policy.max_attempts =>
                        {
                            granted - 1
                        }
                        _ => granted,
                    };
                    failure_history.crashes = attempts.crashes;
                    failure_history.fence = attempts.number;
                    failure_history
                });
                Progress::Settled(Settled {
                    delivery,
                    settlement,
                    failure_history,
                })
            }
            DriverCommand::Abandon => Progress::Abandoned(inner.delivery),
            command => Progress::InFlight(Self(inner), command),
        }
    }

    /// The delivery.
    pub fn delivery(&self) -> &Delivery {
        &self.0.delivery
    }

    /// Its stage in the lifecycle.
    pub fn stage(&self) -> Stage {
        self.0.driver.stage()
    }

    /// Its stage and its claim.
    pub fn driver(&self) -> &LifecycleDriver {
        &self.0.driver
    }

    /// From now on it starts nothing new: [`LifecycleDriver::begin_drain`].
    pub fn begin_drain(&mut self) {
        self.0.driver.begin_drain();
    }

    /// Its backoff is over: [`LifecycleDriver::restart`].
    pub fn restart(&mut self, history: History) {
        self.0.delivery.failures = history.failures;
        self.0.driver.restart(history);
    }

    /// Updates the history of failures, which a dead letter carries in its headers.
    pub fn update_failures(&mut self, write: impl FnOnce(&mut FailureHistory)) {
        write(self.0.failure_history.get_or_insert_default());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lifecycle::{Freshness, Outage, Outcome};
    use crate::marker::{Ask, Attempts, Guarantee, Verdict};
    use crate::message::Message;
    use crate::source::Receipt;

    /// `max_attempts` was reached before this delivery, or is reached with it.
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
            let delivery = Delivery {
                message: Message::default(),
                receipt: Receipt {
                    epoch: 1,
                    partition: 0,
                    position: 0,
                },
                failures: 0,
            };
            let mut delivery_in_flight = InFlight::new(
                delivery,
                History {
                    failures: 0,
                    freshness: Freshness::Fresh,
                },
                OnRelease::ReturnToSource,
            );
            let mut settled = None;
            for event in [
                Event::Arrived,
                Event::Answer(Verdict::Granted(Attempts::new(number))),
            ]
            .iter()
            .chain(then)
            {
                match delivery_in_flight.handle(*event, &policy, |_| Token(1)) {
                    Progress::InFlight(next, command) => {
                        assert!(command != DriverCommand::Apply(Ask::Complete));
                        delivery_in_flight = next;
                    }
                    Progress::Settled(it) => {
                        settled = Some(it);
                        break;
                    }
                    Progress::Abandoned(_) => panic!("the delivery was abandoned"),
                }
            }
            let settled = settled.expect("the delivery is rejected");
            let failure_history = settled
                .failure_history
                .expect("a rejected delivery has a failure history");
            assert_eq!(
                settled.settlement,
                Settlement::Reject(Reason::AttemptsSpent)
            );
            assert_eq!(
                (failure_history.attempts, failure_history.fence),
                (5, number)
            );
        }
    }
}
