//! What the audit says was done with the messages of a destination.

use std::collections::HashMap;

use super::{DeadLetter, DeadLetterState};
use crate::audit::{ActionStage, AuditEntry, AuditedAction, MessageLocation};

/// The states that the audit records for messages. Kafka keeps redriven, dropped and resolved
/// messages, so only the audit tells them from waiting ones. RabbitMQ removes them, so that the
/// audit adds only interrupted actions.
pub(crate) struct AuditedStates(HashMap<DeadLetterIdentity, DeadLetterState>);

/// Identifies a message: its position on Kafka, its id and the time of its rejection on RabbitMQ.
#[derive(PartialEq, Eq, Hash)]
struct DeadLetterIdentity {
    place: MessageLocation,
    id: Option<String>,
}

impl DeadLetterIdentity {
    /// `None` if neither is known.
    fn of(place: &MessageLocation, id: Option<&str>) -> Option<Self> {
        let has_position = place.partition.is_some() && place.offset.is_some();
        let id = id.filter(|_| !has_position).map(str::to_owned);
        (has_position || id.is_some()).then(|| Self {
            place: place.clone(),
            id,
        })
    }
}

impl AuditedStates {
    pub(crate) fn of(actions: &[AuditEntry]) -> Self {
        let mut states = HashMap::new();
        for action in actions {
            let Some(identity) = action
                .place
                .as_ref()
                .and_then(|place| DeadLetterIdentity::of(place, action.id.as_deref()))
            else {
                continue;
            };
            // Only Kafka has positions.
            let is_on_kafka = identity.id.is_none();
            let state = match (action.what.as_str(), action.stage) {
                // RabbitMQ removes completed messages, so a message that is present was
                // interrupted.
                (
                    "dead-letters redrive" | "in-doubt resolve",
                    ActionStage::Begun | ActionStage::Done,
                ) if !is_on_kafka && action.action() == AuditedAction::SentBack => {
                    DeadLetterState::Begun
                }
                ("dead-letters redrive" | "in-doubt resolve", ActionStage::Begun)
                    if action.action() == AuditedAction::SentBack =>
                {
                    DeadLetterState::Begun
                }
                ("dead-letters redrive", ActionStage::Done) if is_on_kafka => {
                    DeadLetterState::Redriven
                }
                ("dead-letters drop", ActionStage::Done) if is_on_kafka => DeadLetterState::Dropped,
                ("in-doubt resolve", ActionStage::Done) if is_on_kafka => DeadLetterState::Resolved,
                _ => continue,
            };
            states.insert(identity, state);
        }
        Self(states)
    }

    pub(super) fn state(&self, message: &DeadLetter) -> DeadLetterState {
        DeadLetterIdentity::of(&message.place, message.id())
            .and_then(|identity| self.0.get(&identity))
            .copied()
            .unwrap_or(DeadLetterState::Waiting)
    }
}
