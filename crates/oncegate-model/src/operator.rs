//! The operator's commands on dead letters and in-doubt messages, in the steps of the command line:
//! read the marker, apply an operation to that marker, publish a copy, remove the dead letter. Any
//! other action may happen between two steps.

use oncegate_core::internal::lifecycle::Stage;
use oncegate_core::marker::{
    Doubt, Effect, Finding, Guarantee, Marker, OperationKind, Token, UNKNOWN_ATTEMPT, Verdict,
};

use crate::state::{
    BrokerMessage, ModelDeadLetter, ModelDestination, NextStep, Operator, SentCommand, SinceFreed,
    SystemState,
};
use crate::system::SystemModel;

impl SystemModel {
    /// What the operator's command does with a dead letter, depending on the marker; `None` if the
    /// command refuses. The second value is the attempt up to which the sink must refuse requests,
    /// if the operator has found out that nothing happened.
    pub(crate) fn operator_decision(
        &self,
        state: &SystemState,
        dead_letter: ModelDeadLetter,
    ) -> Option<(Operator, Option<u32>)> {
        // The operator's tool has the configuration of the first consumer.
        let guarantee = self.setup.guarantees[0];
        let marker = state.marker;
        let sent = |kind, attempt| SentCommand {
            kind,
            guarantee,
            body: dead_letter.body,
            token: Token(0),
            attempt,
        };
        let redrive = |effect| {
            Operator::Decided(
                dead_letter,
                sent(
                    OperationKind::Redrive {
                        seen: marker,
                        effect,
                    },
                    dead_letter.last_attempt,
                ),
                NextStep::Publish,
            )
        };
        match (dead_letter.destination, marker) {
            (ModelDestination::DeadLetters, Marker::Done(_) | Marker::InDoubt(..)) => None,
            (ModelDestination::DeadLetters, Marker::InProgress(_)) if !state.lease_expired => None,
            // The command only publishes a copy, because the copy's claim receives `InDoubt`.
            (ModelDestination::DeadLetters, Marker::InProgress(hold))
                if [hold.guarantee, guarantee].contains(&Guarantee::AtMostOnce) =>
            {
                Some((Operator::Publishing(dead_letter), None))
            }
            (ModelDestination::DeadLetters, Marker::Absent) if dead_letter.last_attempt == 0 => {
                Some((Operator::Publishing(dead_letter), None))
            }
            // Without a marker there is no unknown effect to keep; only the attempt is written.
            (ModelDestination::DeadLetters, Marker::Absent) => {
                Some((redrive(Effect::Nothing), None))
            }
            (ModelDestination::DeadLetters, _) => Some((redrive(Effect::Unknown), None)),

            (ModelDestination::InDoubt, Marker::InDoubt(_, Doubt::Reconciling))
                if !state.lease_expired =>
            {
                None
            }
            (ModelDestination::InDoubt, Marker::InProgress(_) | Marker::Rejected { .. }) => None,
            (ModelDestination::InDoubt, Marker::Done(_)) => {
                Some((Operator::Removing(dead_letter), None))
            }
            (ModelDestination::InDoubt, Marker::InDoubt(hold, _)) if state.effects() > 0 => {
                let resolve = SentCommand {
                    token: hold.token,
                    ..sent(
                        OperationKind::Resolve(Finding::Happened),
                        hold.attempts.number,
                    )
                };
                Some((
                    Operator::Decided(dead_letter, resolve, NextStep::Remove),
                    None,
                ))
            }
            (ModelDestination::InDoubt, _) if state.effects() > 0 => Some((
                Operator::Decided(
                    dead_letter,
                    sent(OperationKind::Complete, dead_letter.last_attempt),
                    NextStep::Remove,
                ),
                None,
            )),
            (ModelDestination::InDoubt, Marker::InDoubt(hold, _)) => {
                Some((redrive(Effect::Nothing), Some(hold.attempts.number)))
            }
            (ModelDestination::InDoubt, Marker::Cleared { attempts, .. }) => {
                Some((redrive(Effect::Nothing), Some(attempts.number)))
            }
            (ModelDestination::InDoubt, Marker::Absent) => {
                Some((redrive(Effect::Nothing), Some(dead_letter.last_attempt)))
            }
        }
    }

    /// Whether the operator may allow a completed id to run again: no run and no completion of it
    /// is in flight. A repeated completion would complete the freed id again, and a handler that
    /// still runs would cause a second effect. With two bodies the model does not know which
    /// effects to ignore afterwards.
    pub(crate) fn may_forget(&self, state: &SystemState) -> bool {
        let completing = |stage| matches!(stage, Stage::Completing(_));
        matches!(state.marker, Marker::Done(_))
            && !state.observations.other_body
            && state.sink.orphans.is_empty()
            && !state
                .consumers
                .iter()
                .filter_map(|consumer| consumer.delivery.as_ref())
                .any(|delivery| delivery.run.is_some() || completing(delivery.driver.stage()))
            && !state
                .delayed_commands
                .iter()
                .any(|sent| sent.kind == OperationKind::Complete)
    }

    /// Applies the operator's request, which the store refuses if the marker has changed since.
    pub(crate) fn operator_request(
        &self,
        state: &mut SystemState,
        dead_letter: ModelDeadLetter,
        sent: SentCommand,
        then: NextStep,
    ) {
        let verdict = self.store(state, sent);
        state.operator = match (verdict, then) {
            (Verdict::Applied | Verdict::Done { .. }, NextStep::Publish) => {
                state.record_freed();
                Operator::Publishing(dead_letter)
            }
            (Verdict::Applied | Verdict::Done { .. }, NextStep::Remove) => {
                Operator::Removing(dead_letter)
            }
            _ => Operator::Idle,
        };
    }

    /// Lets the operator allow a completed id to run again, and a producer publish its message
    /// again.
    pub(crate) fn operator_forgets(&self, state: &mut SystemState) {
        let (marker, guarantee) = (state.marker, self.setup.guarantees[0]);
        // As `oncegate marker forget`: the next multiple of `UNKNOWN_ATTEMPT` above the highest
        // attempt, so that a late request never has the number of a new attempt. With 0, the store
        // takes `UNKNOWN_ATTEMPT` itself.
        let attempt = state.observations.attempts.highest / UNKNOWN_ATTEMPT * UNKNOWN_ATTEMPT;
        let attempt = if attempt == 0 {
            0
        } else {
            attempt + UNKNOWN_ATTEMPT
        };
        let sent = SentCommand {
            kind: OperationKind::Forget { seen: marker },
            guarantee,
            body: 0,
            token: Token(0),
            attempt,
        };
        if self.store(state, sent) == Verdict::Applied {
            state.record_freed();
            // The properties ignore effects from before the id was freed.
            (state.sink.effects, state.observations.done) = ([0, 0], false);
            state.queue.push(BrokerMessage {
                body: 0,
                failures: 0,
            });
        }
    }
}

impl SystemState {
    /// Records that the operator freed the id: later attempts must be higher than all earlier ones,
    /// and all of `max_attempts` are left.
    pub(crate) fn record_freed(&mut self) {
        let without_effect = matches!(
            self.marker,
            Marker::Cleared {
                effect: Effect::Nothing,
                ..
            }
        );
        self.observations.freed = SinceFreed {
            awaits_run: true,
            without_effect,
            highest_before: self.observations.attempts.highest,
            spent_before: self.observations.attempts.spent(),
            crashes: 0,
        };
    }

    /// Publishes a copy of a dead letter.
    pub(crate) fn publish(&mut self, dead_letter: ModelDeadLetter) {
        self.queue.push(BrokerMessage {
            body: dead_letter.body,
            failures: 0,
        });
        self.operator = Operator::Removing(dead_letter);
    }

    /// Removes a dead letter.
    pub(crate) fn remove_dead_letter(&mut self, dead_letter: ModelDeadLetter) {
        if let Some(index) = self
            .dead_letters
            .iter()
            .position(|other| *other == dead_letter)
        {
            self.dead_letters.remove(index);
        }
        self.operator = Operator::Idle;
    }
}
