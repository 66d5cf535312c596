//! Publishes messages and inspects queues with the plain client of the broker.

mod kafka;
mod rabbit;

use std::sync::Arc;

pub(crate) use kafka::set_rejected_writes;

use crate::Error;
use crate::ledger::{Log, RejectedTo};
use crate::message::OutgoingMessage;
use crate::run::ConsumerMode;
use crate::worker::Broker;

/// The name suffixes of the destinations of rejected messages.
const DESTINATION_SUFFIXES: [(&str, RejectedTo); 2] = [
    (".dead-letters", RejectedTo::DeadLetters),
    (".in-doubt", RejectedTo::InDoubt),
];

/// A topic or queue of a run.
#[derive(Debug)]
pub enum BrokerClient {
    /// On Kafka.
    Kafka(kafka::KafkaClient),
    /// On RabbitMQ.
    Rabbit(Box<rabbit::RabbitClient>),
}

/// A dead letter or an in-doubt message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMessage {
    /// Its id.
    pub id: String,
    /// The destination.
    pub place: RejectedTo,
    /// The reason header.
    pub reason: String,
}

impl BrokerClient {
    /// Creates the topic on Kafka; on RabbitMQ the consumers declare the queue.
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn open(
        broker: Broker,
        url: &str,
        name: &str,
        consumer_mode: ConsumerMode,
    ) -> Result<Self, Error> {
        Ok(match broker {
            Broker::Kafka => Self::Kafka(kafka::KafkaClient::open(url, name).await?),
            Broker::Rabbitmq => Self::Rabbit(Box::new(rabbit::RabbitClient::new(
                url,
                name,
                consumer_mode,
            ))),
        })
    }

    /// Publishes messages, also while the broker is unavailable, and records attempts and
    /// confirmations. May return before all are confirmed; see [`flush`](Self::flush).
    ///
    /// # Errors
    /// A permanent error.
    pub async fn publish(
        &self,
        messages: Vec<OutgoingMessage>,
        log: &Arc<Log>,
    ) -> Result<(), Error> {
        match self {
            Self::Kafka(client) => client.publish(messages, log).await,
            Self::Rabbit(client) => client.publish(messages, log).await,
        }
    }

    /// Waits until each message is confirmed or has failed.
    pub async fn flush(&self) {
        match self {
            Self::Kafka(client) => client.flush().await,
            Self::Rabbit(_) => {}
        }
    }

    /// The number of unsettled messages: on Kafka those above the committed offset, on RabbitMQ the
    /// ready ones.
    ///
    /// # Errors
    /// The broker does not reply.
    pub async fn unsettled(&self) -> Result<u64, Error> {
        match self {
            Self::Kafka(client) => client.unsettled().await,
            Self::Rabbit(client) => client.unsettled().await,
        }
    }

    /// Deletes and recreates the Kafka topic.
    ///
    /// # Errors
    /// The error of the broker, or it is RabbitMQ.
    pub async fn recreate_topic(&self) -> Result<(), Error> {
        match self {
            Self::Kafka(client) => client.recreate_topic().await,
            Self::Rabbit(_) => Err("only Kafka has topics".into()),
        }
    }

    /// A client for the committed offsets of the consumer group; none on RabbitMQ.
    pub fn group(&self) -> Option<kafka::GroupOffsets> {
        match self {
            Self::Kafka(client) => client.group(),
            Self::Rabbit(_) => None,
        }
    }

    /// The dead letters and in-doubt messages; leaves them in their destinations.
    ///
    /// # Errors
    /// The broker does not reply.
    pub async fn rejected_messages(&self) -> Result<Vec<RejectedMessage>, Error> {
        let mut rejected = Vec::new();
        for (suffix, place) in DESTINATION_SUFFIXES {
            rejected.extend(match self {
                Self::Kafka(client) => client.rejected_in(suffix, place).await?,
                Self::Rabbit(client) => client.rejected_in(suffix, place).await?,
            });
        }
        Ok(rejected)
    }
}
