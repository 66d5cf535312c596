//! What the demo asks of a broker beside consuming: to send, to look what was set aside, and how
//! much waits.

use clap::Args;

use super::{Error, Servers};
use crate::cli::Broker;
use crate::report::SetAside;
use crate::traffic::Outgoing;

/// Which topic or queue.
#[derive(Clone, Debug, Args)]
pub(crate) struct Queue {
    /// The topic or queue, and the scope of the ids in Redis.
    #[arg(long, default_value = "payments")]
    pub(crate) name: String,
    /// The consumer group, on Kafka.
    #[arg(long, default_value = "ledger")]
    pub(crate) group: String,
}

/// A broker, as the demo itself uses it.
pub(crate) enum Wire {
    #[cfg(feature = "kafka")]
    Kafka(super::kafka::Wire),
    #[cfg(feature = "rabbitmq")]
    RabbitMq(Box<super::rabbitmq::Wire>),
}

impl Wire {
    /// Connects, and sees to it that the topic or queue is there.
    ///
    /// # Errors
    /// If the broker is not in this build, not there, or does not let us.
    pub(crate) async fn open(
        broker: Broker,
        servers: &Servers,
        queue: &Queue,
    ) -> Result<Self, Error> {
        match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => Ok(Self::Kafka(
                super::kafka::Wire::open(servers.kafka()?, queue.clone()).await?,
            )),
            #[cfg(feature = "rabbitmq")]
            Broker::Rabbitmq => Ok(Self::RabbitMq(Box::new(
                super::rabbitmq::Wire::open(&servers.rabbitmq()?, &queue.name).await?,
            ))),
            broker => Err(not_in_this_build(broker)),
        }
    }

    /// Sends, and waits until the broker has confirmed all.
    ///
    /// # Errors
    /// If it does not confirm one.
    pub(crate) async fn send(&self, messages: &[Outgoing]) -> Result<(), Error> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(wire) => wire.send(messages).await,
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(wire) => wire.send(messages).await,
        }
    }

    /// How many messages wait. On RabbitMQ without those that a worker holds.
    ///
    /// # Errors
    /// If the broker does not say.
    pub(crate) async fn backlog(&self) -> Result<u64, Error> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(wire) => wire.backlog().await,
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(wire) => wire.backlog().await,
        }
    }

    /// What lies in the dead letters and in the in-doubt queue. Takes nothing away.
    ///
    /// # Errors
    /// If the broker does not say.
    pub(crate) async fn set_aside(&self) -> Result<SetAside, Error> {
        let (in_doubt, dead_letters) = match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(wire) => (
                wire.names(".in-doubt").await?,
                wire.names(".dead-letters").await?,
            ),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(wire) => (
                wire.names(".in-doubt").await?,
                wire.names(".dead-letters").await?,
            ),
        };
        Ok(SetAside {
            in_doubt,
            dead_letters,
        })
    }

    /// Removes what the run made.
    ///
    /// # Errors
    /// If the broker does not let us.
    pub(crate) async fn remove(&self) -> Result<(), Error> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(wire) => wire.remove().await,
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(wire) => wire.remove().await,
        }
    }
}

/// What to do when a broker was left out.
pub(crate) fn not_in_this_build(broker: Broker) -> Error {
    format!("--broker: {broker:?} is not in this build; add --features kafka,rabbitmq, and take one of the two").into()
}
