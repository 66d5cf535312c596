//! The actions that are possible in a [`SystemState`], and the state after each.

use oncegate_core::internal::lifecycle::{Event, Outcome, Stage};
use oncegate_core::lifecycle::DoubtCause;
use oncegate_core::marker::{Attempts, Effect, Finding, Guarantee, Marker, OperationKind, Verdict};
use stateright::{Model, Property};

use crate::properties;
use crate::state::{
    BrokerMessage, CommandState, EffectState, LeaseState, ModelAction, ModelDelivery, ModelReceipt,
    Operator, SentCommand, SystemState,
};
use crate::system::{EffectsIn, RecoveryOrder, SystemModel};

impl Model for SystemModel {
    type State = SystemState;
    type Action = ModelAction;

    fn init_states(&self) -> Vec<SystemState> {
        let looks_up = SystemState::new(self.setup.budget);
        let mut states = vec![looks_up.clone()];
        if self.setup.effects == EffectsIn::Inbox {
            states.push(SystemState {
                looks_up: false,
                ..looks_up
            });
        }
        states
    }

    fn actions(&self, state: &SystemState, actions: &mut Vec<ModelAction>) {
        for consumer_index in 0..state.consumers.len() {
            self.actions_of_consumer(state, consumer_index, actions);
        }
        self.actions_of_store_and_broker(state, actions);
        self.actions_of_operator(state, actions);
    }

    fn next_state(&self, before: &SystemState, action: ModelAction) -> Option<SystemState> {
        let mut state = before.clone();
        self.act(&mut state, action)?;
        // Sorting would exchange the consumers' names in a trace, and consumers with different
        // guarantees are not interchangeable.
        if self.only.is_empty() && self.setup.guarantees[0] == self.setup.guarantees[1] {
            state.sort_consumers();
        }
        state.normalize();
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::of(self)
    }
}

impl SystemModel {
    fn actions_of_consumer(
        &self,
        state: &SystemState,
        consumer_index: usize,
        actions: &mut Vec<ModelAction>,
    ) {
        use ModelAction::*;
        let (remaining, consumer) = (&state.remaining, &state.consumers[consumer_index]);
        if consumer.late_completion.is_some() {
            actions.push(CompleteLate(consumer_index));
        }
        let Some(delivery) = &consumer.delivery else {
            // Two idle consumers with the same guarantee and no pending completion are
            // interchangeable.
            let same_guarantee = self.setup.guarantees[0] == self.setup.guarantees[1];
            let other_is_idle = state.consumers[0].delivery.is_none()
                && state.consumers[0].late_completion.is_none();
            if consumer_index == 0 || !same_guarantee || !other_is_idle {
                let mut waiting = state.queue.clone();
                waiting.dedup();
                actions.extend(
                    waiting
                        .into_iter()
                        .map(|message| Deliver(consumer_index, message)),
                );
            }
            return;
        };
        match delivery.command {
            Some(CommandState::Sent(kind)) => {
                // Late completions are sent before claims of the same id.
                if kind != OperationKind::Claim
                    || consumer.late_completion.is_none()
                    || self.rules.recovery_order == RecoveryOrder::Any
                {
                    actions.push(Apply(consumer_index));
                }
                if remaining.lost_replies > 0 {
                    actions.extend([LoseCommand(consumer_index), DelayCommand(consumer_index)]);
                }
            }
            Some(CommandState::Replied(..)) => {
                actions.push(ReceiveReply(consumer_index));
                if remaining.lost_replies > 0 {
                    actions.push(LoseReply(consumer_index));
                }
            }
            None => {}
        }
        self.actions_of_run(state, consumer_index, delivery, actions);
        if delivery.lease == LeaseState::Expired {
            actions.push(NoticeExpiry(consumer_index));
        }
        if remaining.expiries > 0 && delivery.lease == LeaseState::Valid {
            actions.push(SuspectLease(consumer_index));
        }
        if remaining.renewals > 0 && delivery.lease != LeaseState::None {
            actions.push(Renew(consumer_index));
            if remaining.lost_replies > 0 {
                actions.push(DelayRenewal(consumer_index));
            }
        }
        if remaining.redeliveries > 0 && delivery.receipt == ModelReceipt::Valid {
            actions.push(Redeliver(consumer_index));
        }
        if remaining.crashes > 0 {
            actions.push(Crash(consumer_index));
        }
        if remaining.drains > 0 && !delivery.driver.is_draining() {
            actions.push(Drain(consumer_index));
        }
        if remaining.withdrawn_grants > 0 && matches!(delivery.driver.stage(), Stage::Ready(_)) {
            actions.push(WithdrawGrant(consumer_index));
        }
        if delivery.driver.is_draining() {
            // The outcome of a handler that is dropped is unknown.
            if remaining.unknown_outcomes > 0 || delivery.run.is_none() {
                actions.push(DrainOver(consumer_index));
            }
            actions.push(StopNow(consumer_index));
        }
    }

    fn actions_of_run(
        &self,
        state: &SystemState,
        consumer_index: usize,
        delivery: &ModelDelivery,
        actions: &mut Vec<ModelAction>,
    ) {
        use ModelAction::*;
        let remaining = &state.remaining;
        let is_inbox = self.setup.effects == EffectsIn::Inbox;
        match delivery.driver.stage() {
            Stage::Running(..) | Stage::WithoutClaim(_) => {
                match delivery.run {
                    // The transaction finds the record, and the handler does not run.
                    Some(EffectState::Pending) if is_inbox && state.effects() > 0 => {
                        actions.push(Return(consumer_index, Outcome::Recorded))
                    }
                    Some(EffectState::Pending) if state.is_accepted(delivery.attempt()) => {
                        actions.push(EffectHappens(consumer_index));
                        if remaining.failures > 0 {
                            actions.extend([
                                Return(consumer_index, Outcome::Retry),
                                Return(consumer_index, Outcome::Reject),
                            ]);
                        }
                    }
                    Some(EffectState::Pending) => {
                        actions.push(Return(consumer_index, Outcome::Retry))
                    } // the sink refuses the request
                    Some(EffectState::Happened) => {
                        actions.push(Return(consumer_index, Outcome::Done))
                    }
                    None => {}
                }
                // With an inbox: the transaction does not begin, or its commit is not confirmed.
                if is_inbox && remaining.lost_replies > 0 && delivery.run.is_some() {
                    actions.push(Return(consumer_index, Outcome::Unavailable));
                }
                if remaining.unknown_outcomes > 0 && delivery.run.is_some() {
                    actions.push(Return(
                        consumer_index,
                        Outcome::Unknown(DoubtCause::Panicked),
                    ));
                }
            }
            Stage::Reconciling(..) => {
                // `reconcile` reads the number of effects, or does not find it out (`Wake`).
                actions.push(if state.effects() > 0 {
                    ReconcileHappened(consumer_index)
                } else {
                    ReconcileDidNotHappen(consumer_index)
                });
                actions.push(Wake(consumer_index));
            }
            _ if delivery.command.is_none() => actions.push(Wake(consumer_index)),
            _ => {}
        }
    }

    fn actions_of_store_and_broker(&self, state: &SystemState, actions: &mut Vec<ModelAction>) {
        use ModelAction::*;
        let remaining = &state.remaining;
        if remaining.expiries > 0
            && !state.lease_expired
            && matches!(state.marker, Marker::InProgress(_) | Marker::InDoubt(..))
        {
            actions.push(ExpireLease);
        }
        if remaining.redeliveries > 0 {
            actions.push(PublishAgain);
        }
        if remaining.other_bodies > 0 {
            actions.push(PublishOtherBody);
        }
        if remaining.lost_markers > 0 && state.marker != Marker::Absent {
            actions.push(LoseMarker);
        }
        if remaining.lost_claims > 0 && matches!(state.marker, Marker::InProgress(_)) {
            actions.push(LoseClaim);
        }
        actions.extend((0..state.delayed_commands.len()).map(ApplyDelayed));
        for (index, (attempt, _)) in state.sink.orphans.iter().enumerate() {
            actions.push(LoseOrphan(index));
            if state.is_accepted(*attempt) {
                actions.push(OrphanEffectHappens(index));
            }
        }
    }

    fn actions_of_operator(&self, state: &SystemState, actions: &mut Vec<ModelAction>) {
        use ModelAction::*;
        match state.operator {
            Operator::Idle if state.remaining.operator_actions > 0 => {
                let actionable = |index: &usize| {
                    self.operator_decision(state, state.dead_letters[*index])
                        .is_some()
                };
                actions.extend(
                    (0..state.dead_letters.len())
                        .filter(actionable)
                        .map(OperatorDecides),
                );
                if self.may_forget(state) {
                    actions.push(OperatorForgets);
                }
                return;
            }
            Operator::Idle => return,
            Operator::Decided(..) => {
                actions.push(OperatorRequests);
                if state.remaining.lost_replies > 0 {
                    actions.push(DelayOperatorRequest);
                }
            }
            Operator::Publishing(_) => actions.push(OperatorPublishes),
            Operator::Removing(_) => actions.push(OperatorRemoves),
        }
        actions.push(OperatorStops);
    }

    /// Executes an action; `None` if it is not possible.
    fn act(&self, state: &mut SystemState, action: ModelAction) -> Option<()> {
        match action {
            ModelAction::Deliver(consumer_index, message) => {
                let index = state.queue.iter().position(|queued| *queued == message)?;
                state.queue.remove(index);
                self.deliver(state, consumer_index, message);
            }
            ModelAction::PublishAgain => {
                state.remaining.redeliveries -= 1;
                state.queue.push(BrokerMessage {
                    body: 0,
                    failures: 0,
                });
            }
            ModelAction::PublishOtherBody => {
                state.remaining.other_bodies -= 1;
                state.observations.other_body = true;
                state.queue.push(BrokerMessage {
                    body: 1,
                    failures: 0,
                });
            }
            ModelAction::Redeliver(consumer_index) => {
                state.remaining.redeliveries -= 1;
                let delivery = state.consumers[consumer_index].delivery.as_mut()?;
                delivery.receipt = ModelReceipt::Stale;
                state.queue.push(delivery.message);
            }
            ModelAction::Apply(consumer_index) => {
                let Some(CommandState::Sent(kind)) =
                    state.consumers[consumer_index].delivery.as_ref()?.command
                else {
                    return None;
                };
                let verdict = self.store(state, self.sent(state, consumer_index, kind)?);
                state.consumers[consumer_index].delivery.as_mut()?.command =
                    Some(CommandState::Replied(kind, verdict, LeaseState::Valid));
            }
            ModelAction::ApplyDelayed(index) => {
                let sent = state.delayed_commands.remove(index);
                let verdict = self.store(state, sent);
                if let (OperationKind::Redrive { .. }, Verdict::Applied) = (sent.kind, verdict) {
                    state.record_freed();
                }
            }
            ModelAction::ReceiveReply(consumer_index) => {
                self.receive_reply(state, consumer_index)?
            }
            ModelAction::LoseCommand(consumer_index)
            | ModelAction::DelayCommand(consumer_index)
            | ModelAction::LoseReply(consumer_index) => {
                state.remaining.lost_replies -= 1;
                let command = state.consumers[consumer_index]
                    .delivery
                    .as_mut()?
                    .command
                    .take()?;
                if let (ModelAction::DelayCommand(_), CommandState::Sent(kind)) = (action, command)
                {
                    let sent = self.sent(state, consumer_index, kind)?;
                    state.delayed_commands.push(sent);
                }
                self.handle_event(state, consumer_index, Event::Unavailable);
            }
            ModelAction::Wake(consumer_index) => {
                let delivery = state.consumers[consumer_index].delivery.as_ref()?;
                let event = match delivery.driver.stage() {
                    Stage::Reconciling(..) => Event::Reconciled(None),
                    Stage::New(_) if delivery.driver.is_draining() => Event::Drain,
                    Stage::New(_) => Event::Arrived, // it waited for a retry, or for isolation
                    Stage::Ready(_) if delivery.lease == LeaseState::Expired => Event::LeaseOver,
                    Stage::Ready(_) => Event::MayRun,
                    stage if stage.waits_on_lease() && delivery.lease == LeaseState::Expired => {
                        Event::LeaseOver
                    }
                    _ => Event::Woke,
                };
                self.handle_event(state, consumer_index, event);
            }
            ModelAction::EffectHappens(consumer_index) => {
                let delivery = state.consumers[consumer_index].delivery.as_mut()?;
                delivery.run = Some(EffectState::Happened);
                let body = delivery.message.body;
                self.let_effect_happen(state, body);
            }
            ModelAction::OrphanEffectHappens(index) => {
                let (_, body) = state.sink.orphans.remove(index);
                self.let_effect_happen(state, body);
            }
            ModelAction::LoseOrphan(index) => {
                state.sink.orphans.remove(index);
            }
            ModelAction::Return(consumer_index, outcome) => {
                self.handler_returned(state, consumer_index, outcome)?
            }
            ModelAction::ReconcileHappened(consumer_index) => {
                self.reconciled(state, consumer_index, Finding::Happened)
            }
            ModelAction::ReconcileDidNotHappen(consumer_index) => {
                self.reconciled(state, consumer_index, Finding::DidNotHappen)
            }
            ModelAction::ExpireLease => {
                state.remaining.expiries -= 1;
                state.lease_expired = true;
                let (Marker::InProgress(hold) | Marker::InDoubt(hold, _)) = state.marker else {
                    return None;
                };
                let deliveries = state
                    .consumers
                    .iter_mut()
                    .filter_map(|consumer| consumer.delivery.as_mut());
                deliveries
                    .filter(|delivery| delivery.driver.token == hold.token)
                    .for_each(expire_lease);
            }
            ModelAction::SuspectLease(consumer_index) => {
                state.remaining.expiries -= 1;
                expire_lease(state.consumers[consumer_index].delivery.as_mut()?);
            }
            ModelAction::NoticeExpiry(consumer_index) => {
                self.handle_event(state, consumer_index, Event::LeaseOver)
            }
            ModelAction::Renew(consumer_index) => {
                state.remaining.renewals -= 1;
                let verdict = self.store(
                    state,
                    self.sent(state, consumer_index, OperationKind::Renew)?,
                );
                let delivery = state.consumers[consumer_index].delivery.as_mut()?;
                delivery.lease = if verdict == Verdict::Applied {
                    LeaseState::Valid
                } else {
                    LeaseState::Expired
                };
            }
            ModelAction::DelayRenewal(consumer_index) => {
                (state.remaining.renewals, state.remaining.lost_replies) = (
                    state.remaining.renewals - 1,
                    state.remaining.lost_replies - 1,
                );
                let sent = self.sent(state, consumer_index, OperationKind::Renew)?;
                state.delayed_commands.push(sent);
            }
            ModelAction::Crash(consumer_index) => {
                state.remaining.crashes -= 1;
                self.crash(state, consumer_index);
            }
            ModelAction::Drain(consumer_index) => {
                state.remaining.drains -= 1;
                state.consumers[consumer_index]
                    .delivery
                    .as_mut()?
                    .driver
                    .begin_drain();
                self.handle_event(state, consumer_index, Event::Drain);
            }
            ModelAction::WithdrawGrant(consumer_index) => {
                state.remaining.withdrawn_grants -= 1;
                self.handle_event(state, consumer_index, Event::IsolationFull);
            }
            ModelAction::DrainOver(consumer_index) => {
                let runs = state.consumers[consumer_index]
                    .delivery
                    .as_ref()?
                    .run
                    .is_some();
                state.remaining.unknown_outcomes -= u8::from(runs);
                self.handle_event(state, consumer_index, Event::DrainOver);
            }
            ModelAction::StopNow(consumer_index) => {
                state.observations.stopped_now |= self.checks_orphaned_claims();
                self.handle_event(state, consumer_index, Event::StopNow);
            }
            ModelAction::CompleteLate(consumer_index) => {
                self.complete_late(state, consumer_index)?
            }
            ModelAction::LoseMarker => {
                state.remaining.lost_markers -= 1;
                (state.marker, state.lease_expired) = (Marker::Absent, false);
            }
            ModelAction::LoseClaim => {
                state.remaining.lost_claims -= 1;
                (state.marker, state.lease_expired) = (before_claim(&state.marker)?, false);
            }
            ModelAction::OperatorDecides(index) => {
                let (operator, voids) =
                    self.operator_decision(state, *state.dead_letters.get(index)?)?;
                state.remaining.operator_actions -= 1;
                state.operator = operator;
                if let Some(attempt) = voids {
                    state.void_attempts((self.rules.voids)(attempt));
                }
            }
            ModelAction::OperatorRequests | ModelAction::DelayOperatorRequest => {
                let Operator::Decided(dead_letter, sent, then) = state.operator else {
                    return None;
                };
                if action == ModelAction::OperatorRequests {
                    self.operator_request(state, dead_letter, sent, then);
                } else {
                    state.remaining.lost_replies -= 1;
                    state.delayed_commands.push(sent);
                    state.operator = Operator::Idle;
                }
            }
            ModelAction::OperatorPublishes => {
                let Operator::Publishing(dead_letter) = state.operator else {
                    return None;
                };
                state.publish(dead_letter);
            }
            ModelAction::OperatorRemoves => {
                let Operator::Removing(dead_letter) = state.operator else {
                    return None;
                };
                state.remove_dead_letter(dead_letter);
            }
            ModelAction::OperatorStops => state.operator = Operator::Idle,
            ModelAction::OperatorForgets => {
                state.remaining.operator_actions -= 1;
                self.operator_forgets(state);
            }
        }
        Some(())
    }

    fn receive_reply(&self, state: &mut SystemState, consumer_index: usize) -> Option<()> {
        let delivery = state.consumers[consumer_index].delivery.as_mut()?;
        let Some(CommandState::Replied(_, verdict, lease)) = delivery.command.take() else {
            return None;
        };
        if let Verdict::Granted(_) | Verdict::InDoubt(_) = verdict {
            delivery.lease = if self.setup.guarantees[consumer_index] == Guarantee::Bare {
                LeaseState::None
            } else {
                lease
            };
        }
        self.handle_event(state, consumer_index, Event::Answer(verdict));
        Some(())
    }

    /// Lets an effect happen, unless the inbox has a record of the id.
    fn let_effect_happen(&self, state: &mut SystemState, body: usize) {
        if self.setup.effects == EffectsIn::Sink || state.effects() == 0 {
            state.count_effect(body);
        }
    }

    fn handler_returned(
        &self,
        state: &mut SystemState,
        consumer_index: usize,
        outcome: Outcome,
    ) -> Option<()> {
        let refused =
            !state.is_accepted(state.consumers[consumer_index].delivery.as_ref()?.attempt());
        match outcome {
            Outcome::Retry | Outcome::Reject if !refused => state.remaining.failures -= 1,
            Outcome::Unknown(_) => state.remaining.unknown_outcomes -= 1,
            Outcome::Unavailable => state.remaining.lost_replies -= 1,
            _ => {}
        }
        let delivery = state.consumers[consumer_index].delivery.as_mut()?;
        state.looks_up |= matches!(outcome, Outcome::Recorded | Outcome::Unavailable);
        if let Outcome::Retry | Outcome::Reject | Outcome::Recorded = outcome {
            delivery.run = None; // nothing happened in this run
        }
        self.handle_event(state, consumer_index, Event::Returned(outcome));
        Some(())
    }

    /// Records an id that was handled without the store: the first call claims it, the second
    /// completes it.
    fn complete_late(&self, state: &mut SystemState, consumer_index: usize) -> Option<()> {
        let (token, granted) = state.consumers[consumer_index].late_completion?;
        let (kind, attempt) = granted.map_or((OperationKind::Claim, 0), |attempt| {
            (OperationKind::Complete, attempt)
        });
        let sent = SentCommand {
            kind,
            guarantee: self.setup.guarantees[consumer_index],
            body: 0,
            token,
            attempt,
        };
        state.consumers[consumer_index].late_completion = match self.store(state, sent) {
            Verdict::Granted(attempts) | Verdict::InDoubt(attempts) => {
                Some((token, Some(attempts.number)))
            }
            _ => None,
        };
        Some(())
    }
}

/// Marks the lease of a delivery as expired, also the lease in a reply that is not received yet.
fn expire_lease(delivery: &mut ModelDelivery) {
    if delivery.lease == LeaseState::Valid {
        delivery.lease = LeaseState::Expired;
    }
    if let Some(CommandState::Replied(_, _, lease)) = &mut delivery.command {
        *lease = LeaseState::Expired;
    }
}

/// The marker as it was before the last granted claim.
fn before_claim(marker: &Marker) -> Option<Marker> {
    let Marker::InProgress(hold) = marker else {
        return None;
    };
    let attempts = Attempts {
        number: hold.attempts.number - 1,
        ..hold.attempts
    };
    Some(match (attempts.number, hold.earlier) {
        (0, Effect::Nothing) => Marker::Absent,
        (_, effect) => Marker::Cleared { attempts, effect },
    })
}
