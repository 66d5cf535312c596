//! Reads a destination, and publishes copies of its messages to the consumed topic or queue.

use std::convert::Infallible;

#[cfg(feature = "kafka")]
use super::kafka;
#[cfg(feature = "rabbitmq")]
use super::rabbitmq;
use super::{AuditedStates, Broker, CopyAge, DeadLetter, DeliveryCountPolicy, Destination};
use crate::CliContext;
use crate::error::CliError;

/// Why a copy was not confirmed.
#[derive(Debug)]
pub(crate) enum PublishError {
    /// The copy was not published, or the broker rejected it: no copy exists.
    Refused(CliError),
    /// No confirmation arrived: a copy may exist.
    Unconfirmed(CliError),
}

impl From<PublishError> for CliError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Refused(failure) | PublishError::Unconfirmed(failure) => failure,
        }
    }
}

/// Reads one destination, up to the end that it had when the reader was opened.
pub(crate) enum DestinationReader {
    #[cfg(feature = "kafka")]
    Kafka(kafka::TopicReader),
    #[cfg(feature = "rabbitmq")]
    Rabbitmq(Box<rabbitmq::QueueReader>),
    /// For builds without a broker.
    #[allow(dead_code)]
    None(Infallible),
}

impl DestinationReader {
    pub(crate) async fn open(
        context: &CliContext,
        broker: Broker,
        destination: Destination,
        audited_states: AuditedStates,
        count_policy: DeliveryCountPolicy,
    ) -> Result<Self, CliError> {
        Ok(match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => {
                Self::Kafka(kafka::TopicReader::open(context, destination, audited_states).await?)
            }
            #[cfg(feature = "rabbitmq")]
            Broker::Rabbitmq => Self::Rabbitmq(Box::new(
                rabbitmq::QueueReader::open(context, destination, audited_states, count_policy)
                    .await?,
            )),
            #[allow(unreachable_patterns)]
            broker => return Err(broker.missing_feature_error()),
        })
    }

    /// The number of messages when the reader was opened. On Kafka an upper bound, since offsets
    /// may have no record.
    pub(crate) fn total(&self) -> u64 {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.total,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.total,
            Self::None(never) => match *never {},
        }
    }

    /// The next message, or `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<DeadLetter>, CliError> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.next().await,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.next().await,
            Self::None(never) => match *never {},
        }
    }

    /// The consumed topic or queue, to which messages are redriven.
    pub(crate) fn source(&self) -> &str {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => &reader.source_topic,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => &reader.source_queue,
            Self::None(never) => match *never {},
        }
    }

    /// Publishes a copy to the consumed topic or queue, and waits for the broker's confirmation.
    pub(crate) async fn publish(
        &mut self,
        message: &DeadLetter,
        age: CopyAge,
    ) -> Result<(), PublishError> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.publish(message, age).await,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.publish(message, age).await,
            Self::None(never) => match *never {},
        }
    }

    /// Removes a message from its RabbitMQ queue. Does nothing on Kafka, which cannot remove single
    /// messages; the audit records their state.
    pub(crate) async fn remove(&self, message: &DeadLetter) -> Result<(), CliError> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => Ok(()),
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.remove(message).await,
            Self::None(never) => match *never {},
        }
    }

    /// Requeues unacknowledged messages (RabbitMQ), and closes the connection.
    pub(crate) async fn close(self) {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => {}
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.close().await,
            Self::None(never) => match never {},
        }
    }
}
