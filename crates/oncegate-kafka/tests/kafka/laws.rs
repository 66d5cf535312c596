//! The laws of sources.

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Message, async_trait};
use oncegate_kafka::KafkaSource;
use oncegate_testkit::laws::source::{Destination, TestQueue};
use rdkafka::Message as _;
use rdkafka::message::{Header, Headers, OwnedHeaders};

use crate::fixture::Topic;

#[async_trait]
impl TestQueue for Topic {
    type Source = KafkaSource;

    async fn source(&self) -> KafkaSource {
        self.source()
            .connect(ConnectOptions::default())
            .await
            .expect("a source")
    }

    async fn publish(&self, message: Message) {
        let headers = message
            .headers
            .iter()
            .fold(OwnedHeaders::new(), |headers, (name, value)| {
                headers.insert(Header {
                    key: std::str::from_utf8(name).expect("the laws use text"),
                    value,
                })
            });
        self.send(message.key.as_deref(), Some(&message.body), headers)
            .await;
    }

    async fn rejected_messages(&self, destination: Destination) -> Vec<Message> {
        let topic = match destination {
            Destination::DeadLetters => self.dead_letters(),
            Destination::InDoubt => self.in_doubt(),
        };
        let count = self.end_of(&topic).await;
        self.read(topic, count, |record| {
            let message = Message::new(record.payload().unwrap_or_default().to_vec());
            let headers = record
                .headers()
                .into_iter()
                .flat_map(|headers| headers.iter());
            headers.fold(message, |message, header| {
                message.with_header(header.key, header.value.unwrap_or_default())
            })
        })
        .await
    }
}

oncegate_testkit::source_laws!(async || Topic::new(1).await);
