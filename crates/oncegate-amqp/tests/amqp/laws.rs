//! The laws of sources, with both types of queues.

use std::collections::HashMap;

use lapin::BasicProperties;
use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqSource};
use oncegate_core::{Message, async_trait};
use oncegate_testkit::laws::source::{Destination, TestQueue};
use tokio::sync::Mutex;

use super::fixture::*;

struct RabbitMqQueue {
    fixture: QueueFixture,
    kind: QueueKind,
    /// The messages that were taken from the queues so far.
    taken: Mutex<HashMap<Destination, Vec<Message>>>,
}

impl RabbitMqQueue {
    async fn new(kind: QueueKind) -> Self {
        let fixture = QueueFixture::new().await;
        // It declares the queues, so that the laws may publish before they open a source.
        close(open(fixture.source(kind)).await).await;
        Self {
            fixture,
            kind,
            taken: Mutex::default(),
        }
    }
}

#[async_trait]
impl TestQueue for RabbitMqQueue {
    type Source = RabbitMqSource;

    async fn source(&self) -> RabbitMqSource {
        *open(self.fixture.source(self.kind)).await
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
            self.fixture.try_publish(&message.body, properties).await,
            "the message was routed to no queue"
        );
    }

    async fn rejected_messages(&self, destination: Destination) -> Vec<Message> {
        let queue = match destination {
            Destination::DeadLetters => self.fixture.dead_letters(),
            Destination::InDoubt => self.fixture.in_doubt(),
        };
        let mut taken = self.taken.lock().await;
        let found = taken.entry(destination).or_default();
        let options = BasicGetOptions { no_ack: true };
        while let Some(dead_letter) = self
            .fixture
            .channel
            .basic_get(queue.as_str().into(), options)
            .await
            .expect("the queue exists")
        {
            found.push(to_message(dead_letter.delivery));
        }
        found.clone()
    }
}

fn to_message(dead_letter: lapin::message::Delivery) -> Message {
    let headers = dead_letter.properties.headers().clone().unwrap_or_default();
    headers.inner().iter().fold(
        Message::new(dead_letter.data),
        |message, (name, value)| match value {
            AMQPValue::LongString(value) => message.with_header(name.as_str(), value.as_bytes()),
            _ => message,
        },
    )
}

mod quorum {
    use super::*;

    oncegate_testkit::source_laws!(async || RabbitMqQueue::new(QueueKind::Quorum).await);
}

mod classic {
    use super::*;

    oncegate_testkit::source_laws!(async || RabbitMqQueue::new(QueueKind::Classic).await);
}
