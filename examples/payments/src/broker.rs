//! What the demo does at a broker beside the workers: sends messages, and reads what was rejected.

use oncegate::{MemoryBroker, Message};

use crate::Error;
use crate::payment::{ID_HEADER, Outgoing, name};
use crate::report::Rejected;
#[cfg(feature = "real")]
use crate::servers::{Queue, Topic};

pub(crate) enum Broker {
    Memory(MemoryBroker),
    #[cfg(feature = "real")]
    Kafka(Box<Topic>),
    #[cfg(feature = "real")]
    RabbitMq(Box<Queue>),
}

impl Broker {
    /// Sends messages, and waits until the broker has confirmed all.
    pub(crate) async fn send(&self, messages: &[Outgoing]) -> Result<(), Error> {
        match self {
            Self::Memory(broker) => {
                for message in messages {
                    let body = Message::new(message.body.clone());
                    broker.publish(match &message.id {
                        Some(id) => body.with_header(ID_HEADER, id),
                        None => body,
                    });
                }
                Ok(())
            }
            #[cfg(feature = "real")]
            Self::Kafka(topic) => topic.send(messages).await,
            #[cfg(feature = "real")]
            Self::RabbitMq(queue) => queue.send(messages).await,
        }
    }

    /// Reads the names of all dead letters and of all messages in doubt, which remain there.
    pub(crate) async fn rejected(&self) -> Result<Rejected, Error> {
        Ok(Rejected {
            in_doubt: self.names(".in-doubt").await?,
            dead_letters: self.names(".dead-letters").await?,
        })
    }

    async fn names(&self, suffix: &str) -> Result<Vec<String>, Error> {
        let messages = match self {
            Self::Memory(broker) if suffix == ".in-doubt" => broker.in_doubt(),
            Self::Memory(broker) => broker.dead_letters(),
            #[cfg(feature = "real")]
            Self::Kafka(topic) => return topic.names(suffix).await,
            #[cfg(feature = "real")]
            Self::RabbitMq(queue) => return queue.names(suffix).await,
        };
        let messages = messages.iter().map(|it| &it.message);
        Ok(messages
            .map(|it| name(it.headers.last(ID_HEADER), &it.body))
            .collect())
    }
}
