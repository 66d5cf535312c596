//! Reads and changes messages in dead-letter and in-doubt destinations, on Kafka and RabbitMQ.

mod audited_states;
mod broker;
pub(crate) mod bulk;
mod dead_letter;
pub(crate) mod filter;
#[cfg(feature = "kafka")]
pub(crate) mod kafka;
pub(crate) mod listing;
#[cfg(feature = "rabbitmq")]
pub(crate) mod rabbitmq;
mod reader;
pub(crate) mod redrive_policy;

pub(crate) use audited_states::AuditedStates;
pub(crate) use broker::Broker;
pub(crate) use dead_letter::{
    DeadLetter, DeadLetterState, DeadLetterSummary, is_dropped_from_copies, reasons,
};
pub(crate) use reader::{DestinationReader, PublishError};

/// The original routing key of a message that was copied to a destination.
const ROUTING_KEY: &str = "oncegate-routing-key";

/// The delivery count from which a RabbitMQ message is replaced by a copy. A policy with a lower
/// delivery limit drops messages before the tool can detect it.
const REPLACED_FROM_COUNT: u64 = 5;

/// Whether to read RabbitMQ queues that count each read towards a delivery limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeliveryCountPolicy {
    Refused,
    Accepted,
}

/// A destination of messages that the consumer does not handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    DeadLetters,
    InDoubt,
}

impl Destination {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::DeadLetters => "dead-letter",
            Self::InDoubt => "in-doubt",
        }
    }
}

/// The age that a copy declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyAge {
    /// The copy counts as a new message.
    New,
    /// First seen at this time, in milliseconds since 1970: at most once treats it as in doubt and
    /// reconciles instead of running it.
    FirstSeen(u64),
}

impl CopyAge {
    /// The value of its `oncegate-first-seen` header.
    pub(crate) fn first_seen_header(self) -> Option<String> {
        match self {
            Self::New => None,
            Self::FirstSeen(ms) => Some(ms.to_string()),
        }
    }
}
