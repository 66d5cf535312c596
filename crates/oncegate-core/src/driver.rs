//! Executes [`lifecycle::transition`](crate::lifecycle::transition) for one delivery, without I/O:
//! decides which token and attempt number its operations have, and what its owner has to do next.
//!
//! The owner is the consumer, [`Gate`](crate::Gate) or the model checker. They differ in how they
//! execute a [`DriverCommand`], never in which command follows.

use std::time::Duration;

use crate::lifecycle::{Action, Event, History, Policy, Settlement, Stage, transition};
use crate::marker::{Attempts, OperationKind, Token, Verdict};

/// The stage of one delivery, and its claim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LifecycleDriver {
    stage: Stage,
    /// The token of the current claim; 0 before the first.
    pub token: Token,
    /// The attempts that the store granted to this claim, or the last attempt of an id that was
    /// rejected before; number 0 until the claim is answered.
    pub attempts: Attempts,
    draining: bool,
}

/// A command to the owner of a delivery: what it does next.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum DriverCommand {
    /// Applies the operation that the stage waits for, [`Stage::pending_operation`], to the store
    /// with the delivery's token and attempt, and reports [`Event::Answer`] or
    /// [`Event::Unavailable`]. For a claim with a new token, the owner first gives up the lease of
    /// the claim before it.
    Apply,
    /// Reports [`Event::MayRun`] when the handler may start, [`Event::LeaseOver`] if the lease may
    /// have ended by then, or [`Event::IsolationFull`].
    AwaitRun,
    /// Starts the handler, and reports [`Event::Returned`], or [`Event::LeaseOver`] when it drops
    /// it.
    Run,
    /// Starts `reconcile`, and reports [`Event::Reconciled`], [`Event::CannotReconcile`], or
    /// [`Event::LeaseOver`] when it drops it.
    Reconcile,
    /// Reports [`Event::Woke`] after about this long, or [`Event::LeaseOver`] if
    /// [`Stage::waits_on_lease`] and the lease has ended by then.
    Wake(Duration),
    /// Reports [`Event::Arrived`] when the message may run in isolation.
    AwaitIsolation,
    /// Keeps the delivery without a claim for about this long, then calls
    /// [`LifecycleDriver::restart`] and reports [`Event::Arrived`]; or releases the delivery to a
    /// source that executes the delay.
    Retry {
        /// The delay.
        after: Duration,
        /// How many attempts have failed by now.
        failures: u32,
    },
    /// Passes this settlement to the source. It is a release only if the delivery drains; otherwise
    /// a release becomes [`Retry`](Self::Retry).
    Settle(Settlement),
    /// Drops the delivery without settling it. The broker redelivers the message, whose id can be
    /// claimed again when the lease has ended.
    Abandon,
    /// No command: the owner waits for the next event.
    Nothing,
}

impl LifecycleDriver {
    /// A delivery that was just received.
    #[inline]
    pub fn new(history: History) -> Self {
        Self {
            stage: Stage::New(history),
            token: Token(0),
            attempts: Attempts::new(0),
            draining: false,
        }
    }

    /// The stage of the delivery.
    #[inline]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether [`begin_drain`](Self::begin_drain) was called.
    #[inline]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// From now on the delivery starts no handler and waits for no pause. A run in progress, and a
    /// `reconcile` that follows it, may finish. The caller reports [`Event::Drain`] next.
    pub fn begin_drain(&mut self) {
        self.draining = true;
    }

    /// Resets a delivery that waits for a retry to the stage of one that was just received. Its
    /// next claim has a new token.
    pub fn restart(&mut self, history: History) {
        self.stage = Stage::New(history);
    }

    /// Processes an event. Returns what the owner of the delivery does next.
    ///
    /// `new_token` returns the token of a new claim. Its argument is the token of the previous
    /// claim, for tests that reuse it.
    #[inline]
    pub fn handle(
        &mut self,
        event: Event,
        policy: &Policy,
        new_token: impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        self.handle_by(transition, event, policy, new_token)
    }

    /// Processes an event with other rules than `lifecycle::transition`: for tests that verify that
    /// the model checker detects wrong rules.
    #[inline]
    pub fn handle_by(
        &mut self,
        rules: impl Fn(Stage, Event, &Policy) -> (Stage, Action),
        event: Event,
        policy: &Policy,
        mut new_token: impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        match event {
            Event::Answer(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) => {
                self.attempts = attempts;
            }
            // No handler runs for a rejected id, but the dead letter has the fencing token of its
            // last attempt.
            Event::Answer(Verdict::Rejected { attempt }) => {
                self.attempts = Attempts::none_counted(attempt);
            }
            _ => {}
        }
        let command = self.advance(&rules, event, policy, &mut new_token);
        if !self.draining || !self.must_drain_first(&command) {
            return command;
        }
        match self.advance(&rules, Event::Drain, policy, &mut new_token) {
            DriverCommand::Nothing => command,
            instead => instead,
        }
    }

    /// Processes an event if it leads to the expected action, which is returned; otherwise changes
    /// nothing, and the caller passes the same event to [`handle`](Self::handle).
    ///
    /// A fast path for the most common events: if the event is a constant, the compiler evaluates
    /// [`transition`].
    #[inline(always)]
    pub(crate) fn handle_expected(
        &mut self,
        event: Event,
        policy: &Policy,
        is_expected: impl FnOnce(&Action) -> bool,
    ) -> Option<Action> {
        if self.draining {
            return None;
        }
        let (stage, action) = transition(self.stage, event, policy);
        if !is_expected(&action) {
            return None;
        }
        self.stage = stage;
        Some(action)
    }

    /// Whether the command claims, or waits for something other than the store. A draining delivery
    /// then processes [`Event::Drain`], and the command is executed only if that event changes
    /// nothing.
    fn must_drain_first(&self, command: &DriverCommand) -> bool {
        match command {
            DriverCommand::Apply => {
                self.attempts.number == 0
                    && self.stage.pending_operation() == Some(OperationKind::Claim)
            }
            DriverCommand::AwaitRun | DriverCommand::Wake(_) | DriverCommand::AwaitIsolation => {
                true
            }
            _ => false,
        }
    }

    #[inline]
    fn advance(
        &mut self,
        rules: &impl Fn(Stage, Event, &Policy) -> (Stage, Action),
        event: Event,
        policy: &Policy,
        new_token: &mut impl FnMut(Token) -> Token,
    ) -> DriverCommand {
        let (stage, action) = rules(self.stage, event, policy);
        self.stage = stage;
        match action {
            Action::NewClaim => {
                (self.token, self.attempts) = (new_token(self.token), Attempts::new(0));
                DriverCommand::Apply
            }
            Action::Apply => DriverCommand::Apply,
            Action::AwaitRun => DriverCommand::AwaitRun,
            Action::Run => DriverCommand::Run,
            Action::Reconcile => DriverCommand::Reconcile,
            Action::Wake(after) => DriverCommand::Wake(after),
            Action::AwaitIsolation => DriverCommand::AwaitIsolation,
            Action::Settle(Settlement::Release { after, failures }) if !self.draining => {
                DriverCommand::Retry { after, failures }
            }
            Action::Settle(settlement) => DriverCommand::Settle(settlement),
            Action::Wait => DriverCommand::Nothing,
            Action::Abandon => DriverCommand::Abandon,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::{Freshness, Outcome};
    use crate::settings::Settings;

    /// In random sequences of events, `handle_expected` leads to the same stage as `handle`, or
    /// changes nothing.
    #[test]
    fn handle_expected_agrees_with_handle() {
        let policy = Settings::default().policy();
        let events = [
            Event::Arrived,
            Event::Answer(Verdict::Granted(Attempts::new(1))),
            Event::MayRun,
            Event::Returned(Outcome::Done),
            Event::Returned(Outcome::Retry),
            Event::Answer(Verdict::Done { marker_lost: false }),
            Event::Answer(Verdict::Lost),
            Event::Unavailable,
            Event::Woke,
            Event::LeaseOver,
        ];
        let history = History {
            failures: 0,
            freshness: Freshness::Fresh,
        };
        let mut compared = 0;
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut driver = LifecycleDriver::new(history);
            for _ in 0..20 {
                let event = events[random.usize(..events.len())];
                if random.u8(..20) == 0 {
                    driver.begin_drain();
                }
                let (before, mut fast) = (driver.clone(), driver.clone());
                let expects = random.bool();
                let action = fast.handle_expected(event, &policy, |_| expects);
                driver.handle(event, &policy, |_| Token(1));
                if expects && !before.draining {
                    assert!(action.is_some());
                    assert_eq!(fast.stage(), driver.stage(), "seed {seed}, {event:?}");
                    compared += 1;
                } else {
                    assert_eq!((action, fast), (None, before));
                }
            }
        }
        assert!(compared > 1000, "{compared}");
    }
}
