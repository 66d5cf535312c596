//! Publishes messages and inspects queues with the plain client of the broker.

mod kafka;
mod rabbit;

use std::sync::Arc;

pub(crate) use kafka::refuse_letters;

use crate::Error;
use crate::ledger::{Log, Place};
use crate::message::Outgoing;
use crate::play::Taken;
use crate::worker::Broker;

/// The name suffixes of the destinations of rejected messages.
const DESTINATION_SUFFIXES: [(&str, Place); 2] = [
    (".dead-letters", Place::DeadLetters),
    (".in-doubt", Place::InDoubt),
];

/// A topic or queue of a run.
#[derive(Debug)]
pub enum Wire {
    /// On Kafka.
    Kafka(kafka::Wire),
    /// On RabbitMQ.
    Rabbit(Box<rabbit::Wire>),
}

/// A dead letter or an in-doubt message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMessage {
    /// Its id.
    pub id: String,
    /// The destination.
    pub place: Place,
    /// The reason header.
    pub reason: String,
}

impl Wire {
    /// Creates the topic on Kafka; on RabbitMQ the consumers declare the queue.
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn open(broker: Broker, url: &str, name: &str, taken: Taken) -> Result<Self, Error> {
        Ok(match broker {
            Broker::Kafka => Self::Kafka(kafka::Wire::open(url, name).await?),
            Broker::Rabbitmq => Self::Rabbit(Box::new(rabbit::Wire::new(url, name, taken))),
        })
    }

    /// Publishes messages, also while the broker is unavailable, and records attempts and
    /// confirmations. May return before all are confirmed; see [`flush`](Self::flush).
    ///
    /// # Errors
    /// A permanent error.
    pub async fn publish(&self, messages: Vec<Outgoing>, log: &Arc<Log>) -> Result<(), Error> {
        match self {
            Self::Kafka(wire) => wire.publish(messages, log).await,
            Self::Rabbit(wire) => wire.publish(messages, log).await,
        }
    }

    /// Waits until each message is confirmed or has failed.
    pub async fn flush(&self) {
        match self {
            Self::Kafka(wire) => wire.flush().await,
            Self::Rabbit(_) => {}
        }
    }

    /// The number of unsettled messages: on Kafka those above the committed offset, on RabbitMQ the
    /// ready ones.
    ///
    /// # Errors
    /// The broker does not reply.
    pub async fn left(&self) -> Result<u64, Error> {
        match self {
            Self::Kafka(wire) => wire.left().await,
            Self::Rabbit(wire) => wire.left().await,
        }
    }

    /// Deletes and recreates the Kafka topic.
    ///
    /// # Errors
    /// The error of the broker, or it is RabbitMQ.
    pub async fn recreate_topic(&self) -> Result<(), Error> {
        match self {
            Self::Kafka(wire) => wire.recreate_topic().await,
            Self::Rabbit(_) => Err("only Kafka has topics".into()),
        }
    }

    /// A client for the committed offsets of the consumer group; none on RabbitMQ.
    pub fn group(&self) -> Option<kafka::Group> {
        match self {
            Self::Kafka(wire) => wire.group(),
            Self::Rabbit(_) => None,
        }
    }

    /// The dead letters and in-doubt messages; leaves them in their destinations.
    ///
    /// # Errors
    /// The broker does not reply.
    pub async fn rejected_messages(&self) -> Result<Vec<RejectedMessage>, Error> {
        let mut rejected_in = Vec::new();
        for (suffix, place) in DESTINATION_SUFFIXES {
            rejected_in.extend(match self {
                Self::Kafka(wire) => wire.rejected_in(suffix, place).await?,
                Self::Rabbit(wire) => wire.rejected_in(suffix, place).await?,
            });
        }
        Ok(rejected_in)
    }
}
