//! Derives the states of messages from the audit.

use std::collections::HashMap;

use super::{DeadLetter, DeadLetterState};
use crate::audit::{ActionStage, AuditEntry, AuditedAction, MessageLocation};

/// The states of messages. Kafka keeps messages that were redriven, dropped or resolved,
/// so only the audit distinguishes them from pending ones. RabbitMQ removes such messages; of a
/// message still in its queue the audit can only show that an action was interrupted.
pub(crate) struct AuditedStates(HashMap<DeadLetterIdentity, DeadLetterState>);

/// Identifies a message: on Kafka by topic, partition, offset and timestamp, on RabbitMQ by its
/// queue, its id and the time at which it was dead-lettered.
#[derive(PartialEq, Eq, Hash)]
struct DeadLetterIdentity {
    location: MessageLocation,
    id: Option<String>,
}

impl DeadLetterIdentity {
    /// `None` if the message has neither an offset nor an id.
    fn of(location: &MessageLocation, id: Option<&str>) -> Option<Self> {
        let has_position = location.partition.is_some() && location.offset.is_some();
        let id = id.filter(|_| !has_position).map(str::to_owned);
        (has_position || id.is_some()).then(|| Self {
            location: location.clone(),
            id,
        })
    }
}

impl AuditedStates {
    pub(crate) fn of(actions: &[AuditEntry]) -> Self {
        let mut states = HashMap::new();
        for action in actions {
            let Some(identity) = action
                .location
                .as_ref()
                .and_then(|location| DeadLetterIdentity::of(location, action.id.as_deref()))
            else {
                continue;
            };
            // An identity without an id has an offset, which only Kafka has.
            let is_on_kafka = identity.id.is_none();
            let state = match (action.what.as_str(), action.stage) {
                // RabbitMQ removes a redriven message. If it is still in its queue, the removal was
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
        DeadLetterIdentity::of(&message.location, message.id())
            .and_then(|identity| self.0.get(&identity))
            .copied()
            .unwrap_or(DeadLetterState::Waiting)
    }
}
