//! The laws of sources, on both kinds of queues.

use std::collections::HashMap;

use lapin::BasicProperties;
use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqSource};
use oncegate_core::{Message, async_trait};
use oncegate_testkit::laws::source::{Destination, TestQueue};
use tokio::sync::Mutex;

use super::rig::*;

struct Lawful {
    rig: Rig,
    kind: QueueKind,
    /// What was taken from a queue is not there any more.
    taken: Mutex<HashMap<Destination, Vec<Message>>>,
}

impl Lawful {
    async fn new(kind: QueueKind) -> Self {
        let rig = Rig::new().await;
        // It declares the queues, so that the laws may publish before they open a source.
        close(open(rig.source(kind)).await).await;
        Self {
            rig,
            kind,
            taken: Mutex::default(),
        }
    }
}

#[async_trait]
impl TestQueue for Lawful {
    type Source = RabbitMqSource;

    async fn source(&self) -> RabbitMqSource {
        *open(self.rig.source(self.kind)).await
    }

    async fn publish(&self, message: Message) {
        let mut headers = FieldTable::default();
        for (name, value) in message.headers.iter() {
            let name = std::str::from_utf8(name).expect("the laws use text");
            headers.insert(
                name.into(),
                AMQPValue::LongString(value.unwrap_or_default().into()),
            );
        }
        let properties = BasicProperties::default().with_headers(headers);
        assert!(
            self.rig.reaches(&message.body, properties).await,
            "the message reached no queue"
        );
    }

    async fn set_aside(&self, destination: Destination) -> Vec<Message> {
        let queue = match destination {
            Destination::DeadLetters => self.rig.dead_letters(),
            Destination::InDoubt => self.rig.in_doubt(),
        };
        let mut taken = self.taken.lock().await;
        let found = taken.entry(destination).or_default();
        let options = BasicGetOptions { no_ack: true };
        while let Some(letter) = self
            .rig
            .channel
            .basic_get(queue.as_str().into(), options)
            .await
            .expect("the queue exists")
        {
            found.push(as_a_message(letter.delivery));
        }
        found.clone()
    }
}

fn as_a_message(letter: lapin::message::Delivery) -> Message {
    let headers = letter.properties.headers().clone().unwrap_or_default();
    headers.inner().iter().fold(
        Message::new(letter.data),
        |message, (name, value)| match value {
            AMQPValue::LongString(value) => message.with_header(name.as_str(), value.as_bytes()),
            _ => message,
        },
    )
}

mod quorum {
    use super::*;

    oncegate_testkit::source_laws!(async || Lawful::new(QueueKind::Quorum).await);
}

mod classic {
    use super::*;

    oncegate_testkit::source_laws!(async || Lawful::new(QueueKind::Classic).await);
}
