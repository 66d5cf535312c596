//! The lines of the audit.

use oncegate::MessageId;
use serde::{Deserialize, Serialize};

/// The progress of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ActionStage {
    /// The action was started. If no later line of the action has another stage, its result is
    /// unknown.
    Begun,
    Done,
    /// The store refused the marker change: nothing was changed.
    NotDone,
    /// No copy of the message was published. The marker may already be cleared.
    NotSent,
}

impl ActionStage {
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Begun => "begun, result unknown",
            Self::Done => "done",
            Self::NotDone => "not done",
            Self::NotSent => "not sent",
        }
    }
}

/// Where a message is: broker, topic or queue, and on Kafka partition and offset.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MessageLocation {
    pub(crate) broker: String,
    /// The topic or queue.
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) offset: Option<i64>,
    /// Kafka: the timestamp of the record, which distinguishes it from a record with the same
    /// offset in a topic of the same name that was deleted. RabbitMQ: when the message was
    /// dead-lettered, if a header has that time. In milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) written_ms: Option<u64>,
}

impl std::fmt::Display for MessageLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.partition, self.offset) {
            (Some(partition), Some(offset)) => {
                write!(f, "{} {}/{partition}/{offset}", self.broker, self.name)
            }
            _ => write!(f, "{} {}", self.broker, self.name),
        }
    }
}

/// [`AuditEntry::after`] of a dropped message with the reason `conflict`.
pub(crate) const DROPPED_CONFLICT: &str = "another body of this id dropped";

/// One line of the audit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AuditEntry {
    /// Identifies the action. Both lines of an action have it.
    pub(crate) action_id: String,
    /// When the line was written, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    /// `at_ms` as RFC 3339.
    pub(crate) at: String,
    /// The operator.
    pub(crate) who: String,
    /// The action, named by its command, such as `marker forget`.
    pub(crate) what: String,
    pub(crate) stage: ActionStage,
    /// The configured `store.scope`: services with other scopes may use the same ids.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) id: Option<String>,
    /// The name that commands accept in place of the id, if the message has none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) handle: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) location: Option<MessageLocation>,
    /// The state of the message or marker before the action, as text.
    pub(crate) before: String,
    /// The intended state after the action, as text.
    pub(crate) after: String,
    /// The highest known attempt number of the id, which is its fencing token. No later action may
    /// clear the marker with a lower number.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) attempt: Option<u32>,
    /// The reason that the operator gave.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) why: Option<String>,
    /// Why the action was not done, or why its result is unknown.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) failure: Option<String>,
}

/// The intended change of the id. [`AuditEntry::stage`] says whether it was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuditedAction {
    /// A copy of the message is published to the topic or queue that the consumer reads.
    SentBack,
    /// The marker no longer blocks the id; another entry records whether its message was sent.
    MarkerCleared,
    /// The dead letter is dropped.
    Dropped,
    /// The marker of a done or rejected id is cleared.
    Forgotten,
    /// The id counts as handled.
    Completed,
    /// No effect on the next delivery.
    Other,
}

impl AuditEntry {
    /// Whether the action concerns this id. The audit records forgotten ids as hashes.
    pub(crate) fn concerns(&self, id: &MessageId) -> bool {
        self.id.as_deref().is_some_and(|recorded| {
            recorded == id.as_str() || recorded == id.clone().hashed().as_str()
        })
    }

    /// Whether the action concerns a message without an id that has this handle.
    pub(crate) fn concerns_handle(&self, handle: &str) -> bool {
        self.id.is_none() && self.handle.as_deref() == Some(handle)
    }

    /// Whether the action dropped a message whose body differs from that of the first message with
    /// the same id.
    pub(crate) fn dropped_a_conflict(&self) -> bool {
        self.after == DROPPED_CONFLICT
    }

    /// The intended change, derived from `what` and `after`. The prefixes of `after` are part of
    /// the audit format.
    pub(crate) fn action(&self) -> AuditedAction {
        match self.what.as_str() {
            _ if self.after.starts_with("sent to ") => AuditedAction::SentBack,
            _ if self.after.starts_with("done") => AuditedAction::Completed,
            "in-doubt resolve" if self.after.starts_with("free ") => AuditedAction::MarkerCleared,
            // The dropped message is not the one that the marker of this id is about.
            "dead-letters drop" if self.dropped_a_conflict() => AuditedAction::Other,
            "dead-letters drop" => AuditedAction::Dropped,
            "marker forget" => AuditedAction::Forgotten,
            _ => AuditedAction::Other,
        }
    }
}

/// An action before it starts.
pub(crate) struct PlannedAction {
    pub(crate) what: &'static str,
    pub(crate) id: Option<String>,
    pub(crate) handle: Option<String>,
    pub(crate) location: Option<MessageLocation>,
    pub(crate) before: String,
    pub(crate) after: String,
    pub(crate) attempt: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line as an earlier release wrote it, with more fields.
    fn entry(more: &str) -> AuditEntry {
        let line = format!(
            r#"{{"action_id":"1","at_ms":1,"at":"-","who":"ann","what":"dead-letters drop","stage":"done","before":"dead-lettered","after":"dropped"{more}}}"#
        );
        serde_json::from_str(&line).expect("an entry")
    }

    #[test]
    fn a_message_without_an_id_is_found_by_its_handle() {
        let named = entry(r#","handle":"letter-1""#);
        assert!(named.concerns_handle("letter-1") && !named.concerns_handle("letter-2"));
        let id = MessageId::new("letter-1").expect("an id");
        assert!(!named.concerns(&id), "a handle is not an id");
        assert!(!entry("").concerns_handle("letter-1"));
        assert!(entry(r#","id":"letter-1""#).concerns(&id));
        let written = serde_json::to_string(&named).expect("JSON");
        assert!(written.contains(r#""handle":"letter-1""#), "{written}");
    }
}
