//! How a delivery is settled at its broker, and the reasons of a rejection.

use std::time::Duration;

use super::DoubtCause;

/// How a delivery is settled at the broker.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Settlement {
    /// Acknowledged: it is not redelivered.
    Accept(Proof),
    /// Redelivered, after this delay at the earliest.
    Release {
        /// The minimum delay of the redelivery.
        after: Duration,
        /// How many attempts have failed so far. The redelivery carries this number.
        failures: u32,
    },
    /// Sent to the dead-letter queue or the in-doubt queue.
    Reject(Reason),
}

/// Proves that a delivery may be accepted. Only `transition` creates one, from a verdict of the
/// store or from a run without the store.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Proof(pub(super) ProofKind);

/// Why a delivery may be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ProofKind {
    /// The store recorded the id as done after a run of this delivery.
    Completed,
    /// The id was done before.
    Duplicate,
    /// `reconcile` found that the effect had happened, and the store recorded the id as done.
    Resolved,
    /// The handler succeeded without the store
    /// ([`Outage::PassThrough`](super::Outage::PassThrough)).
    PassedWithoutStore,
}

impl Proof {
    #[inline]
    pub(crate) fn kind(&self) -> ProofKind {
        self.0
    }

    /// Why the delivery may be accepted, as one word.
    pub fn as_str(&self) -> &'static str {
        match self.0 {
            ProofKind::Completed => "completed",
            ProofKind::Duplicate => "duplicate",
            ProofKind::Resolved => "resolved",
            ProofKind::PassedWithoutStore => "passed_without_store",
        }
    }
}

/// Why a delivery was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The message has no id.
    MissingId,
    /// The value from which its id is read cannot be an id, or there are two different values.
    UnusableId,
    /// The body cannot be decoded. On RabbitMQ also: a property, header name or routing key is not
    /// UTF-8.
    Unreadable,
    /// The [`Router`](crate::handler::Router) has no route for the message.
    NoRoute,
    /// The id was used for another body.
    Conflict,
    /// The handler rejected the message.
    Refused,
    /// All of its `max_attempts` attempts failed.
    AttemptsSpent,
    /// More than `max_crashes` processes crashed or lost the lease while they handled the message.
    CrashesSpent,
    /// A message with this id was rejected before by a consumer with at most once, and not redriven
    /// since.
    RejectedBefore,
    /// The body is larger than the limit of the source.
    TooLarge,
    /// It is unknown whether the effect happened.
    InDoubt(DoubtCause),
}

impl Reason {
    /// All reasons, in the order of the enum.
    pub const ALL: [Self; 16] = [
        Self::MissingId,
        Self::UnusableId,
        Self::Unreadable,
        Self::NoRoute,
        Self::Conflict,
        Self::Refused,
        Self::AttemptsSpent,
        Self::CrashesSpent,
        Self::RejectedBefore,
        Self::TooLarge,
        Self::InDoubt(DoubtCause::HandlerReported),
        Self::InDoubt(DoubtCause::Panicked),
        Self::InDoubt(DoubtCause::TimedOut),
        Self::InDoubt(DoubtCause::Interrupted),
        Self::InDoubt(DoubtCause::TooOld),
        Self::InDoubt(DoubtCause::UnreadableMarker),
    ];

    /// The reason as headers, metrics and logs name it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::MissingId => "missing-id",
            Self::UnusableId => "unusable-id",
            Self::Unreadable => "unreadable",
            Self::NoRoute => "no-route",
            Self::Conflict => "conflict",
            Self::Refused => "refused",
            Self::AttemptsSpent => "attempts-spent",
            Self::CrashesSpent => "crashes-spent",
            Self::RejectedBefore => "rejected-before",
            Self::TooLarge => "too-large",
            Self::InDoubt(DoubtCause::HandlerReported) => "in-doubt-handler-reported",
            Self::InDoubt(DoubtCause::Panicked) => "in-doubt-panicked",
            Self::InDoubt(DoubtCause::TimedOut) => "in-doubt-timed-out",
            Self::InDoubt(DoubtCause::Interrupted) => "in-doubt-interrupted",
            Self::InDoubt(DoubtCause::TooOld) => "in-doubt-too-old",
            Self::InDoubt(DoubtCause::UnreadableMarker) => "in-doubt-unreadable-marker",
        }
    }

    /// The reason as a clause about the message, such as `its handler panicked`.
    pub fn description(&self) -> &'static str {
        match self {
            Self::MissingId => "it has no id",
            Self::UnusableId => "its id is not valid",
            Self::Unreadable => "its body cannot be read",
            Self::NoRoute => "its handler has no route for it",
            Self::Conflict => "its id was used for another body",
            Self::Refused => "its handler rejected it",
            Self::AttemptsSpent => "its attempts are exhausted",
            Self::CrashesSpent => {
                "too many processes crashed while they handled it, so that it may have taken effect"
            }
            Self::RejectedBefore => {
                "a message with this id was rejected before and not redriven since"
            }
            Self::TooLarge => "it exceeds the body limit of the source",
            Self::InDoubt(DoubtCause::HandlerReported) => {
                "its handler reported that it may have happened"
            }
            Self::InDoubt(DoubtCause::Panicked) => "its handler panicked",
            Self::InDoubt(DoubtCause::TimedOut) => "its handler timed out",
            Self::InDoubt(DoubtCause::Interrupted) => {
                "another delivery of it ended before its outcome was found out, or its process crashed or lost its lease; the log of that process may have the error of its handler"
            }
            Self::InDoubt(DoubtCause::TooOld) => {
                "it is older than max_age, so it may have been handled before"
            }
            Self::InDoubt(DoubtCause::UnreadableMarker) => {
                "the value of its key in the store is not a marker"
            }
        }
    }

    /// Whether the message goes to the in-doubt queue, for an operator to resolve, and not to the
    /// dead-letter queue.
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::InDoubt(_))
    }
}
