//! One delivery on the road.

use crate::driver::{DriverCommand, LifecycleDriver, OnRelease};
use crate::lifecycle::{Event, History, Policy, Reason, Settlement, Stage};
use crate::marker::Token;
use crate::source::{Delivery, FailureHistory, Settled};

/// One delivery on the road: moved by each step, never copied, and gone once it is settled.
#[derive(Debug)]
pub struct InFlight(Box<InFlightInner>);

/// It lies where it is while a passage moves: a step moves a pointer.
#[derive(Debug)]
struct InFlightInner {
    delivery: Delivery,
    dispatch: LifecycleDriver,
    /// Only what failed has one.
    story: Option<Box<FailureHistory>>,
}

/// What a step made of a [`InFlight`].
#[derive(Debug)]
pub enum Progress {
    /// It goes on; this is to be done. Never [`DriverCommand::Settle`] or [`DriverCommand::Abandon`].
    InFlight(InFlight, DriverCommand),
    /// It left the road, for the source to settle.
    Settled(Settled),
    /// It was let go without a settlement, and comes back by itself.
    Abandoned(Delivery),
}

impl InFlight {
    /// A delivery at the beginning of the road.
    pub fn new(delivery: Delivery, history: History, keeps: OnRelease) -> Self {
        Self(Box::new(InFlightInner {
            delivery,
            dispatch: LifecycleDriver::new(history, keeps),
            story: None,
        }))
    }

    /// Takes the passage one step on, as [`LifecycleDriver::handle`] says.
    pub fn handle(
        self,
        event: Event,
        policy: &Policy,
        new_token: impl FnMut(Token) -> Token,
    ) -> Progress {
        let Self(mut travelling) = self;
        match travelling.dispatch.handle(event, policy, new_token) {
            DriverCommand::Settle(settlement) => {
                let InFlightInner {
                    delivery,
                    dispatch,
                    story,
                } = *travelling;
                let attempts = dispatch.attempts;
                let story = matches!(settlement, Settlement::Reject(_)).then(|| {
                    let mut story = story.unwrap_or_default();
                    // The marker forgets attempts that did nothing; the delivery does not.
                    let granted = attempts.spent().max(
                        delivery
                            .failures
                            .saturating_add(u32::from(attempts.spent() > 0)),
                    );
                    story.attempts = match settlement {
                        // The last grant is never run.
                        Settlement::Reject(Reason::CrashesSpent) => {
                            granted.saturating_sub(1).saturating_add(attempts.crashes)
                        }
                        Settlement::Reject(Reason::AttemptsSpent) if granted > policy.attempts => {
                            granted - 1
                        }
                        _ => granted,
                    };
                    story.fence = attempts.number;
                    story
                });
                Progress::Settled(Settled {
                    delivery,
                    settlement,
                    story,
                })
            }
            DriverCommand::Abandon => Progress::Abandoned(travelling.delivery),
            command => Progress::InFlight(Self(travelling), command),
        }
    }

    /// The delivery.
    pub fn delivery(&self) -> &Delivery {
        &self.0.delivery
    }

    /// Where it stands.
    pub fn stage(&self) -> Stage {
        self.0.dispatch.stage()
    }

    /// Its stage and its claim.
    pub fn dispatch(&self) -> &LifecycleDriver {
        &self.0.dispatch
    }

    #[cfg(oncegate_chaos)]
    pub(crate) fn dispatch_mut(&mut self) -> &mut LifecycleDriver {
        &mut self.0.dispatch
    }

    /// From here on it starts nothing: [`LifecycleDriver::leave`].
    pub fn leave(&mut self) {
        self.0.dispatch.leave();
    }

    /// A delivery that was held comes back: [`LifecycleDriver::restart`].
    pub fn restart(&mut self, history: History) {
        self.0.delivery.failures = history.failures;
        self.0.dispatch.restart(history);
    }

    /// Writes down what a person will want to know if it is dead-lettered.
    pub fn tell(&mut self, write: impl FnOnce(&mut FailureHistory)) {
        write(self.0.story.get_or_insert_default());
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

    /// The budget was spent before this delivery, or is spent with it.
    #[test]
    fn a_letter_counts_runs_and_not_the_grant_over_the_budget() {
        let (pause, guarantee) = (Duration::from_millis(1), Guarantee::EffectivelyOnce);
        let policy = Policy {
            guarantee,
            attempts: 5,
            crashes: 10,
            retries: 0,
            reconciles: 1,
            parks: 1,
            backoff: pause,
            longest_backoff: pause,
            outage: Outage::Hold,
        };
        let failed = [
            Event::Slot,
            Event::Returned(Outcome::Retry),
            Event::Answer(Verdict::Kept),
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
            let mut passage = InFlight::new(
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
                match passage.handle(*event, &policy, |_| Token(1)) {
                    Progress::InFlight(onward, command) => {
                        assert!(command != DriverCommand::Apply(Ask::Complete));
                        passage = onward;
                    }
                    Progress::Settled(left) => {
                        settled = Some(left);
                        break;
                    }
                    Progress::Abandoned(_) => panic!("it was let go"),
                }
            }
            let settled = settled.expect("it is rejected");
            let story = settled.story.expect("it failed");
            assert_eq!(
                settled.settlement,
                Settlement::Reject(Reason::AttemptsSpent)
            );
            assert_eq!((story.attempts, story.fence), (5, number));
        }
    }
}
