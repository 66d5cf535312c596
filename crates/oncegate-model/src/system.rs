//! The transitions of a [`SystemState`]: the replies of the store and the actions of consumers.
//!
//! This module contains no rules. [`LifecycleDriver`] drives the consumers, as in production.

use std::time::Duration;

use oncegate_core::internal::driver::{DriverCommand, LifecycleDriver};
use oncegate_core::internal::lifecycle::{self, Action, Event, Freshness, History, Policy, Stage};
use oncegate_core::lifecycle::{Outage, Reason, Settlement};
use oncegate_core::marker::{
    self, Age, Change, Fingerprint, Guarantee, Marker, Operation, OperationKind, Terms, Token,
    Verdict,
};
use oncegate_core::{Key, MessageId};

use crate::state::{
    BrokerMessage, Budget, CommandState, EffectState, LeaseState, ModelConsumer, ModelDeadLetter,
    ModelDelivery, ModelDestination, ModelReceipt, SentCommand, SystemState,
};

/// The values of the durations do not matter: the age of a marker is either 0 or twice the lease.
const LEASE: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(100);

/// The rules under test; by default the correct ones.
#[derive(Clone, Copy)]
pub struct Rules {
    /// The rules of the store for one key.
    pub apply: fn(Marker, Age, &Operation) -> (Change, Verdict),
    /// The rules of the consumer for one delivery.
    pub transition: fn(Stage, Event, &Policy) -> (Stage, Action),
    /// The token of a claim, from the token of the previous claim of the delivery and a new token.
    pub token: fn(Token, Token) -> Token,
    /// The highest attempt that the sink refuses after `reconcile` or the operator states for
    /// an attempt that nothing happened.
    pub voids: fn(u32) -> u32,
    /// The order in which a consumer sends commands when the store is available again.
    pub recovery_order: RecoveryOrder,
}

/// The order in which a consumer sends commands when the store is available again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryOrder {
    /// First the completions of ids that were handled without the store.
    LateCompletions,
    /// Any order.
    Any,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            apply: marker::apply,
            transition: lifecycle::transition,
            token: |_, new| new,
            voids: |attempt| attempt,
            recovery_order: RecoveryOrder::LateCompletions,
        }
    }
}

/// The settings of the two consumers, and the fault budget.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The guarantee of each consumer.
    pub guarantees: [Guarantee; 2],
    /// How often each fault may occur.
    pub budget: Budget,
    /// `max_attempts` of a message.
    pub attempts: u32,
    /// Where deliveries wait for their next attempt.
    pub retries: RetriesWait,
    /// What consumers do while the store is unavailable.
    pub outage: Outage,
    /// Where effects happen.
    pub effects: EffectsIn,
}

/// Where effects happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EffectsIn {
    /// In an external system, which may refuse lower attempts.
    Sink,
    /// In the database of an inbox: an effect is a commit, and a second commit for the id finds the
    /// record of the first. The markers are only in the memory of the consumers, and may be lost at
    /// any time.
    Inbox,
}

/// Where a delivery waits for its next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetriesWait {
    /// In its source, which delivers it again to any consumer.
    InSource,
    /// In its consumer.
    InConsumer,
}

impl Setup {
    /// Both consumers with these guarantees, three attempts, retries in the source, no
    /// pass-through.
    pub fn of(guarantees: [Guarantee; 2], budget: Budget) -> Self {
        Self {
            guarantees,
            budget,
            attempts: 3,
            retries: RetriesWait::InSource,
            outage: Outage::Hold,
            effects: EffectsIn::Sink,
        }
    }
}

/// The system that is explored: a setup and the rules under test.
pub struct SystemModel {
    pub(crate) setup: Setup,
    pub(crate) rules: Rules,
    key: Key,
    /// The prefix of the one property to check; empty for all.
    pub(crate) only: &'static str,
}

impl SystemModel {
    /// A system in which the property whose name starts with `only` is checked, or all if it is
    /// empty.
    pub fn new(setup: Setup, rules: Rules, only: &'static str) -> Self {
        let id = MessageId::new("id").expect("the id is not empty");
        Self {
            setup,
            rules,
            key: Key::new(&id),
            only,
        }
    }

    fn policy(&self, consumer_index: usize) -> Policy {
        Policy {
            guarantee: self.setup.guarantees[consumer_index],
            max_attempts: self.setup.attempts,
            max_crashes: self.setup.attempts,
            max_inline_retries: 1,
            max_reconciles: 1,
            max_claim_retries: 1,
            backoff: Duration::from_millis(1),
            longest_backoff: Duration::from_millis(1),
            outage: self.setup.outage,
        }
    }

    /// Whether a consumer has this guarantee.
    pub(crate) fn has_guarantee(&self, guarantee: Guarantee) -> bool {
        self.setup.guarantees.contains(&guarantee)
    }

    /// Whether both consumers have this guarantee.
    pub(crate) fn all_have_guarantee(&self, guarantee: Guarantee) -> bool {
        self.setup.guarantees == [guarantee; 2]
    }

    /// Whether the model checks that no claim remains without a holder. It does so for drains, if
    /// the budget has no other fault that may cause that.
    pub(crate) fn checks_orphaned_claims(&self) -> bool {
        let Budget {
            crashes,
            lost_replies,
            expiries,
            lost_markers,
            lost_claims,
            drains,
            operator_actions,
            ..
        } = self.setup.budget;
        let other_faults = [
            crashes,
            lost_replies,
            expiries,
            lost_markers,
            lost_claims,
            operator_actions,
        ];
        drains > 0 && other_faults == [0; 6]
    }

    pub(crate) fn operation(&self, sent: &SentCommand) -> Operation {
        let SentCommand {
            kind,
            guarantee,
            body,
            token,
            attempt,
        } = *sent;
        let bodies_differ = self.setup.budget.other_bodies > 0;
        let fingerprint = bodies_differ.then(|| Fingerprint::new(body as u64));
        let terms = Terms {
            guarantee,
            lease: LEASE,
            window: WINDOW,
            fingerprint,
        };
        Operation {
            key: self.key.clone(),
            kind,
            token,
            attempt,
            terms,
        }
    }

    /// Lets the store apply a command, and returns its verdict.
    pub(crate) fn store(&self, state: &mut SystemState, sent: SentCommand) -> Verdict {
        let age = Age::Of(if state.lease_expired {
            LEASE * 2
        } else {
            Duration::ZERO
        });
        if self.setup.effects == EffectsIn::Inbox
            && sent.kind == OperationKind::Claim
            && state.looks_up
            && state.effects() > 0
        {
            return Verdict::Duplicate; // the store of the inbox finds the record
        }
        let before = state.marker;
        let (change, verdict) = (self.rules.apply)(before, age, &self.operation(&sent));
        state.observations.violations.busy_after_expiry |=
            state.lease_expired && matches!(verdict, Verdict::Busy { .. });
        match change {
            Change::Keep => {}
            Change::Write(marker, _) => (state.marker, state.lease_expired) = (marker, false),
            Change::Delete => (state.marker, state.lease_expired) = (Marker::Absent, false),
        }
        state.observations.done |=
            matches!(state.marker, Marker::Done(_)) && !self.has_guarantee(Guarantee::Bare);
        self.track_attempts(state, &sent, before, verdict);
        verdict
    }

    /// Updates the observations about grants, spent attempts and crashes after a reply of the
    /// store.
    fn track_attempts(
        &self,
        state: &mut SystemState,
        sent: &SentCommand,
        before: Marker,
        verdict: Verdict,
    ) {
        let same_claim = matches!(before, Marker::InProgress(hold) if hold.token == sent.token);
        let taken_over = !same_claim
            && matches!(
                (before, verdict),
                (
                    Marker::InProgress(_),
                    Verdict::Granted(_) | Verdict::InDoubt(_)
                )
            );
        let withdrawn = sent.kind == OperationKind::Withdraw
            && same_claim
            && !matches!(state.marker, Marker::InProgress(_));
        if self.counts_grants() && (taken_over || withdrawn) {
            state.observations.attempts.unspent_grants += 1;
        }
        if let Verdict::Granted(attempts) | Verdict::InDoubt(attempts) = verdict
            && self.setup.budget.operator_actions > 0
        {
            let crashes = match before {
                Marker::Cleared { attempts, .. } => attempts.crashes,
                Marker::InProgress(hold) | Marker::InDoubt(hold, _) => hold.attempts.crashes,
                _ => 0,
            };
            state.observations.freed.crashes += attempts.crashes - crashes;
            // If so, the marker still counts crashes from before the operator freed the id.
            state.observations.violations.redriven_not_run |=
                attempts.crashes > state.observations.freed.crashes;
        }
        match verdict {
            Verdict::Granted(attempts) if !same_claim => {
                // A message that the operator redrives is granted with all of `max_attempts` left,
                // unless it is rejected for crashes since then, which would also happen without
                // the operator.
                let rejected_for_crashes = state.observations.freed.crashes > self.setup.attempts;
                state.observations.violations.redriven_not_run |=
                    state.observations.freed.awaits_run
                        && attempts.spent() > self.setup.attempts
                        && !rejected_for_crashes;
                state.observations.freed.without_effect = false;
                if self.counts_grants() {
                    state.observations.attempts.grants += 1;
                    state.observations.violations.spent_too_soon |= attempts.spent()
                        + state.observations.freed.spent_before
                        > state.observations.attempts.spent();
                }
            }
            Verdict::InDoubt(_) => {
                state.observations.violations.redriven_not_run |=
                    state.observations.freed.without_effect
            }
            Verdict::Rejected { .. } => {
                state.observations.violations.redriven_not_run |=
                    state.observations.freed.awaits_run
            }
            _ => {}
        }
    }

    /// The command that a consumer sends for its delivery.
    pub(crate) fn sent(
        &self,
        state: &SystemState,
        consumer_index: usize,
        kind: OperationKind,
    ) -> Option<SentCommand> {
        let delivery = state.consumers[consumer_index].delivery.as_ref()?;
        let LifecycleDriver {
            token, attempts, ..
        } = delivery.driver;
        Some(SentCommand {
            kind,
            guarantee: self.setup.guarantees[consumer_index],
            body: delivery.message.body,
            token,
            attempt: attempts.number,
        })
    }

    /// Delivers a message to a consumer.
    pub(crate) fn deliver(
        &self,
        state: &mut SystemState,
        consumer_index: usize,
        message: BrokerMessage,
    ) {
        let history = History {
            failures: message.failures,
            freshness: Freshness::Fresh,
        };
        let driver = LifecycleDriver::new(history);
        let delivery = ModelDelivery {
            message,
            receipt: ModelReceipt::Valid,
            driver,
            command: None,
            lease: LeaseState::None,
            run: None,
        };
        state.consumers[consumer_index].delivery = Some(delivery);
        self.handle_event(state, consumer_index, Event::Arrived);
    }

    /// Passes an event to the delivery of a consumer and executes the commands that follow.
    pub(crate) fn handle_event(
        &self,
        state: &mut SystemState,
        consumer_index: usize,
        event: Event,
    ) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let new = state.new_token();
            let Some(delivery) = state.consumers[consumer_index].delivery.as_mut() else {
                return;
            };
            let token = |earlier| (self.rules.token)(earlier, new);
            let command = delivery.driver.handle_by(
                self.rules.transition,
                event,
                &self.policy(consumer_index),
                token,
            );
            if !matches!(
                delivery.driver.stage(),
                Stage::Running(..) | Stage::WithoutClaim(_)
            ) {
                drop_handler(state, consumer_index);
            }
            next = self.execute(state, consumer_index, command);
        }
    }

    fn execute(
        &self,
        state: &mut SystemState,
        consumer_index: usize,
        command: DriverCommand,
    ) -> Option<Event> {
        let delivery = state.consumers[consumer_index].delivery.as_mut()?;
        match command {
            DriverCommand::Apply => {
                let kind = delivery.driver.stage().pending_operation()?;
                if kind == OperationKind::Claim && delivery.driver.attempts.number == 0 {
                    delivery.lease = LeaseState::None;
                }
                delivery.command = Some(CommandState::Sent(kind));
            }
            DriverCommand::AwaitRun if self.setup.budget.withdrawn_grants > 0 => {}
            DriverCommand::AwaitRun => {
                return Some(if delivery.lease == LeaseState::Expired {
                    Event::LeaseOver
                } else {
                    Event::MayRun
                });
            }
            // A handler is started and polled only while its lease is valid.
            DriverCommand::Run | DriverCommand::Reconcile
                if delivery.lease == LeaseState::Expired =>
            {
                return Some(Event::LeaseOver);
            }
            DriverCommand::Run => self.start(state, consumer_index),
            DriverCommand::AwaitIsolation => delivery.lease = LeaseState::None,
            DriverCommand::Reconcile | DriverCommand::Wake(_) | DriverCommand::Nothing => {}
            DriverCommand::Retry { after, failures }
                if self.setup.retries == RetriesWait::InSource =>
            {
                let release = Settlement::Release { after, failures };
                self.settle(state, consumer_index, release);
            }
            DriverCommand::Retry { failures, .. } => {
                delivery.lease = LeaseState::None;
                delivery.driver.restart(History {
                    failures,
                    freshness: Freshness::Fresh,
                });
            }
            DriverCommand::Settle(settlement) => self.settle(state, consumer_index, settlement),
            DriverCommand::Abandon => self.requeue_delivery(state, consumer_index),
        }
        None
    }

    fn settle(&self, state: &mut SystemState, consumer_index: usize, settlement: Settlement) {
        let Some(delivery) = state.consumers[consumer_index].delivery.take() else {
            return;
        };
        let BrokerMessage { body, .. } = delivery.message;
        let (token, last_attempt) = (delivery.driver.token, delivery.driver.attempts.number);
        match settlement {
            Settlement::Release { failures, .. } if delivery.receipt == ModelReceipt::Valid => {
                state.queue.push(BrokerMessage { body, failures })
            }
            Settlement::Release { .. } => {}
            Settlement::Accept(proof) if proof.as_str() == "passed_without_store" => {
                state.consumers[consumer_index].late_completion = Some((token, None));
            }
            Settlement::Accept(_) => {}
            Settlement::Reject(reason) => {
                let destination = if reason.is_in_doubt() {
                    ModelDestination::InDoubt
                } else {
                    ModelDestination::DeadLetters
                };
                // A delayed claim may be applied later and start to reconcile again for one lease.
                let reconciled_by_this_delivery = self.setup.budget.lost_replies == 0
                    && matches!(state.marker, Marker::InDoubt(hold, marker::Doubt::Reconciling) if hold.token == token);
                state.observations.violations.stale_reconciling_marker |=
                    destination == ModelDestination::InDoubt && reconciled_by_this_delivery;
                let never_granted = self.counts_grants()
                    && state.observations.attempts.grants < self.setup.attempts;
                state.observations.violations.spent_too_soon |=
                    reason == Reason::AttemptsSpent && never_granted;
                // Only the operator reads the attempt. Without an operator it is 0, so that fewer
                // states differ.
                let last_attempt = if self.setup.budget.operator_actions > 0 {
                    last_attempt
                } else {
                    0
                };
                state.add_dead_letter(ModelDeadLetter {
                    body,
                    destination,
                    last_attempt,
                });
            }
        }
    }

    fn counts_grants(&self) -> bool {
        self.setup.budget.operator_actions > 0 || self.setup.budget.redeliveries > 0
    }

    /// Starts the handler of a delivery and records the violations that its start shows.
    fn start(&self, state: &mut SystemState, consumer_index: usize) {
        let running = |delivery: &ModelDelivery| delivery.run.is_some();
        let others = || {
            state
                .consumers
                .iter()
                .enumerate()
                .filter(|(index, _)| *index != consumer_index)
                .filter_map(|(_, consumer)| consumer.delivery.as_ref())
        };
        let concurrent_handlers =
            others().any(|delivery| running(delivery) && delivery.lease != LeaseState::Expired);
        let may_happen =
            |delivery: &ModelDelivery| running(delivery) && state.is_accepted(delivery.attempt());
        let orphaned = state
            .sink
            .orphans
            .iter()
            .any(|(attempt, _)| state.is_accepted(*attempt));
        let effect_possible = state.effects() > 0 || orphaned || others().any(may_happen);
        let at_most_once = self.setup.guarantees[consumer_index] == Guarantee::AtMostOnce;
        let Some(delivery) = state.consumers[consumer_index].delivery.as_ref() else {
            return;
        };
        let (attempt, has_claim) = (
            delivery.attempt(),
            !matches!(delivery.driver.stage(), Stage::WithoutClaim(_)),
        );
        let below_fence =
            !state.is_accepted(attempt) || attempt <= state.observations.freed.highest_before;
        if has_claim {
            state.observations.violations.start_before_late_completion |=
                state.consumers[consumer_index].late_completion.is_some();
            state.observations.violations.start_below_fence |= below_fence;
            state.observations.violations.concurrent_handlers |= concurrent_handlers;
            state.observations.violations.start_with_possible_effect |=
                effect_possible && at_most_once;
            state.observations.violations.start_after_done |= state.observations.done;
        }
        if self.setup.budget.operator_actions > 0 {
            state.observations.attempts.highest = state.observations.attempts.highest.max(attempt);
        }
        if let Some(delivery) = state.consumers[consumer_index].delivery.as_mut() {
            delivery.run = Some(EffectState::Pending);
        }
        state.observations.freed.awaits_run = false;
    }

    /// Ends a delivery without settlement: the broker redelivers the message.
    pub(crate) fn requeue_delivery(&self, state: &mut SystemState, consumer_index: usize) {
        drop_handler(state, consumer_index);
        if let Some(delivery) = state.consumers[consumer_index].delivery.take()
            && delivery.receipt == ModelReceipt::Valid
        {
            state.queue.push(delivery.message);
        }
    }

    /// Crashes a consumer. The store may still apply a command that it has sent.
    pub(crate) fn crash(&self, state: &mut SystemState, consumer_index: usize) {
        if let Some(CommandState::Sent(kind)) = state.consumers[consumer_index]
            .delivery
            .as_ref()
            .and_then(|delivery| delivery.command)
            && let Some(sent) = self.sent(state, consumer_index, kind)
        {
            state.delayed_commands.push(sent);
        }
        self.requeue_delivery(state, consumer_index);
        state.consumers[consumer_index] = ModelConsumer::default();
    }

    /// Handles the result of `reconcile`.
    pub(crate) fn reconciled(
        &self,
        state: &mut SystemState,
        consumer_index: usize,
        finding: marker::Finding,
    ) {
        let Some(delivery) = state.consumers[consumer_index].delivery.as_ref() else {
            return;
        };
        if finding == marker::Finding::DidNotHappen {
            // From now on the sink refuses requests with this attempt or a lower one, as the
            // contract of `reconcile` requires.
            let voids = (self.rules.voids)(delivery.attempt());
            state.void_attempts(voids);
        }
        self.handle_event(state, consumer_index, Event::Reconciled(Some(finding)));
    }
}

/// Drops the handler; its request to the sink may still have its effect.
fn drop_handler(state: &mut SystemState, consumer_index: usize) {
    let Some(delivery) = state.consumers[consumer_index].delivery.as_mut() else {
        return;
    };
    let (run, attempt, body) = (
        delivery.run.take(),
        delivery.attempt(),
        delivery.message.body,
    );
    // A request that the sink refuses cannot have an effect.
    if run == Some(EffectState::Pending) && state.is_accepted(attempt) {
        state.sink.orphans.push((attempt, body));
    }
}
