//! What a run asks of a broker beside consuming, with the broker's plain client: to send with
//! confirmation, to look what is left and what was set aside.

mod kafka;
mod rabbit;

use std::sync::Arc;

pub(crate) use kafka::refuse_letters;

use crate::Error;
use crate::ledger::{Log, Place};
use crate::message::Outgoing;
use crate::play::Taken;
use crate::worker::Broker;

/// Where what has failed is set aside, by the end of its name.
const ASIDE: [(&str, Place); 2] = [
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

/// A message that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    /// Its id.
    pub id: String,
    /// Where it stands.
    pub place: Place,
    /// Why.
    pub reason: String,
}

impl Wire {
    /// Makes the topic, on Kafka; on RabbitMQ the consumers declare the queue.
    ///
    /// # Errors
    /// What the broker said.
    pub async fn open(broker: Broker, url: &str, name: &str, taken: Taken) -> Result<Self, Error> {
        Ok(match broker {
            Broker::Kafka => Self::Kafka(kafka::Wire::open(url, name).await?),
            Broker::Rabbitmq => Self::Rabbit(Box::new(rabbit::Wire::new(url, name, taken))),
        })
    }

    /// Hands messages to the broker, whatever state it is in, and writes down which it was given
    /// and which it confirmed. May return before all are confirmed; see [`flush`](Self::flush).
    ///
    /// # Errors
    /// If that can never succeed.
    pub async fn publish(&self, messages: Vec<Outgoing>, log: &Arc<Log>) -> Result<(), Error> {
        match self {
            Self::Kafka(wire) => wire.publish(messages, log).await,
            Self::Rabbit(wire) => wire.publish(messages, log).await,
        }
    }

    /// Waits until each message is confirmed, or given up.
    pub async fn flush(&self) {
        match self {
            Self::Kafka(wire) => wire.flush().await,
            Self::Rabbit(_) => {}
        }
    }

    /// How much is left for consumers: on Kafka what is not committed, on RabbitMQ what no consumer
    /// holds.
    ///
    /// # Errors
    /// If the broker does not say.
    pub async fn left(&self) -> Result<u64, Error> {
        match self {
            Self::Kafka(wire) => wire.left().await,
            Self::Rabbit(wire) => wire.left().await,
        }
    }

    /// Deletes the topic and makes another of its name, on Kafka.
    ///
    /// # Errors
    /// What the broker said, or that it is no Kafka.
    pub async fn make_anew(&self) -> Result<(), Error> {
        match self {
            Self::Kafka(wire) => wire.make_anew().await,
            Self::Rabbit(_) => Err("only Kafka has topics".into()),
        }
    }

    /// The consumers' group, if the broker has such.
    pub fn group(&self) -> Option<kafka::Group> {
        match self {
            Self::Kafka(wire) => wire.group(),
            Self::Rabbit(_) => None,
        }
    }

    /// What was set aside. Takes nothing away.
    ///
    /// # Errors
    /// If the broker does not say.
    pub async fn aside(&self) -> Result<Vec<Letter>, Error> {
        let mut letters = Vec::new();
        for (suffix, place) in ASIDE {
            letters.extend(match self {
                Self::Kafka(wire) => wire.letters(suffix, place).await?,
                Self::Rabbit(wire) => wire.letters(suffix, place).await?,
            });
        }
        Ok(letters)
    }
}
