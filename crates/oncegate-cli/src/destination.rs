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
    DeadLetter, DeadLetterState, DeadLetterSummary, is_omitted_from_copies, reasons,
};
pub(crate) use reader::{DestinationReader, PublishError};

use crate::config::Config;

/// The header with the original routing key, in a copy that the consumer delays (RabbitMQ) and in a
/// copy that replaces a message of a destination.
const ROUTING_KEY: &str = "oncegate-routing-key";

/// The delivery count at which the reader replaces a RabbitMQ message by a copy, whose count starts
/// at zero. If a policy sets a lower delivery limit, RabbitMQ drops messages before they reach this
/// count; no client can read that limit.
const REPLACE_AT_COUNT: u64 = 5;

/// Whether to read RabbitMQ queues that may count each read towards a delivery limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeliveryCountPolicy {
    /// Reads classic queues without arguments and queues that oncegate declared, and replaces
    /// messages whose count reaches [`REPLACE_AT_COUNT`]. Refuses other queues.
    Refused,
    /// Reads any queue and replaces no message.
    Accepted,
}

/// The topic or queue to which the consumer moves messages that it does not retry: dead letters, or
/// messages in doubt.
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

    /// The topic or queue: the one that `<section>.dead-letters` or `<section>.in-doubt` names, or
    /// the consumed one with that suffix.
    fn topic_or_queue(self, config: &Config, section: &str, consumed: &str) -> String {
        let setting = match self {
            Self::DeadLetters => "dead-letters",
            Self::InDoubt => "in-doubt",
        };
        config
            .text(&format!("{section}.{setting}"))
            .map_or_else(|| format!("{consumed}.{setting}"), str::to_owned)
    }
}

/// Whether a redriven copy has the header `oncegate-first-seen`, from which the consumer computes
/// its age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyAge {
    /// No header: the copy counts as a new message.
    New,
    /// First seen at this time, in milliseconds since 1970. If the copy is then older than
    /// `max_age` and its id has no marker, a consumer with
    /// [`AtMostOnce`](oncegate::Guarantee::AtMostOnce) reconciles it before handling it.
    FirstSeen(u64),
}

impl CopyAge {
    /// The value of the header `oncegate-first-seen`, if the copy has one.
    pub(crate) fn first_seen_header(self) -> Option<String> {
        match self {
            Self::New => None,
            Self::FirstSeen(ms) => Some(ms.to_string()),
        }
    }
}
