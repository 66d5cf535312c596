//! The messages: payments, some of them twice, and malformed messages. Sends them to the broker,
//! and reads dead letters and messages in doubt.

use futures_util::future::try_join_all;
use oncegate::{MemoryBroker, Message};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::report::Rejected;
#[cfg(feature = "real")]
use crate::servers::{Queue, Topic, publish};

/// The header with the id of a payment.
pub(crate) const ID_HEADER: &str = "payment-id";
/// The prefix of the ids of malformed messages, which must be dead-lettered.
pub(crate) const MALFORMED: &str = "broken-";

#[derive(Serialize, Deserialize)]
pub(crate) struct Payment {
    pub(crate) id: String,
    pub(crate) card: String,
    /// In cents.
    pub(crate) amount: u32,
}

pub(crate) struct DemoMessage {
    pub(crate) id: String,
    pub(crate) body: String,
}

/// The messages of this many payments. About 10% are sent twice, half of these in immediate
/// succession; a malformed message is added for about 1%.
pub(crate) fn messages(payments: usize, prefix: &str, seed: u64) -> Vec<DemoMessage> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut positioned = Vec::new();
    for place in 0..payments {
        let (id, amount) = (format!("{prefix}-{:06}", place + 1), rng.u32(100..50_000));
        let card = format!("card-{:04}", rng.u16(0..10_000));
        let payment = Payment { id, card, amount };
        let body = serde_json::to_string(&payment).expect("text and numbers are JSON");
        let mut add_message = |place, id, body| positioned.push((place, DemoMessage { id, body }));
        if rng.u8(0..100) == 0 {
            let id = MALFORMED.to_owned() + &payment.id;
            add_message(place, id, body[..body.len() / 2].to_owned());
        }
        if rng.u8(0..10) == 0 {
            let distance = if rng.bool() { 0 } else { rng.usize(50..500) };
            add_message(place + distance, payment.id.clone(), body.clone());
        }
        add_message(place, payment.id, body);
    }
    positioned.sort_by_key(|(place, _)| *place);
    positioned.into_iter().map(|(_, message)| message).collect()
}

pub(crate) enum Broker {
    Memory(MemoryBroker),
    #[cfg(feature = "real")]
    Kafka(Box<Topic>),
    #[cfg(feature = "real")]
    RabbitMq(Box<Queue>),
}

impl Broker {
    /// Sends messages, and waits until the broker has confirmed all.
    pub(crate) async fn send(&self, messages: &[DemoMessage]) -> Result<()> {
        let sent = messages.iter().map(async |message| match self {
            Self::Memory(broker) => {
                let body = Message::new(message.body.clone());
                broker.publish(body.with_header(ID_HEADER, &message.id));
                Ok(())
            }
            #[cfg(feature = "real")]
            Self::Kafka(it) => publish(&it.publisher, &it.name, message).await,
            #[cfg(feature = "real")]
            Self::RabbitMq(it) => publish(&it.publisher, &it.name, message).await,
        });
        try_join_all(sent).await.map(drop)
    }

    /// Reads the ids of all dead letters and of all messages in doubt, which remain there.
    pub(crate) async fn rejected(&self) -> Result<Rejected> {
        Ok(Rejected {
            in_doubt: self.ids(".in-doubt").await?,
            dead_letters: self.ids(".dead-letters").await?,
        })
    }

    async fn ids(&self, suffix: &str) -> Result<Vec<String>> {
        let messages = match self {
            Self::Memory(broker) if suffix == ".in-doubt" => broker.in_doubt(),
            Self::Memory(broker) => broker.dead_letters(),
            #[cfg(feature = "real")]
            Self::Kafka(topic) => return topic.ids(suffix).await,
            #[cfg(feature = "real")]
            Self::RabbitMq(queue) => return queue.ids(suffix).await,
        };
        let ids = messages.iter().map(|it| it.message.headers.last(ID_HEADER));
        Ok(ids.map(text).collect())
    }
}

/// An id as text; empty if the message has no id.
pub(crate) fn text(id: Option<&[u8]>) -> String {
    String::from_utf8_lossy(id.unwrap_or_default()).into_owned()
}
