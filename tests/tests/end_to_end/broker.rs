//! Publishes messages and inspects queues with the plain clients of the brokers.

use std::collections::BTreeMap;

use crate::{kafka, rabbitmq};

/// The broker of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broker {
    Kafka,
    RabbitMq,
}

/// A message to publish.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    /// Its header `id`, if it has one.
    pub(crate) id: Option<String>,
    pub(crate) body: String,
}

impl Sent {
    /// A message that asks the handler for this action.
    pub(crate) fn new(id: impl Into<String>, action: &str) -> Self {
        Self::raw(Some(id.into()), format!(r#"{{"do":"{action}"}}"#))
    }

    /// A message that takes the handler some time.
    pub(crate) fn slow(id: impl Into<String>, ms: u64) -> Self {
        Self::raw(Some(id.into()), format!(r#"{{"do":"slow","ms":{ms}}}"#))
    }

    pub(crate) fn raw(id: Option<String>, body: impl Into<String>) -> Self {
        Self {
            id,
            body: body.into(),
        }
    }
}

/// A dead letter or an in-doubt message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RejectedMessage {
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl RejectedMessage {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub(crate) fn reason(&self) -> &str {
        self.header("oncegate-reason")
    }
}

impl Broker {
    /// The name in the arguments of the consumer.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::RabbitMq => "rabbitmq",
        }
    }

    /// The address of the server.
    pub(crate) fn url(self) -> String {
        match self {
            Self::Kafka => oncegate_testkit::kafka_brokers(),
            Self::RabbitMq => oncegate_testkit::rabbitmq_url(),
        }
        .unwrap_or_else(|missing| panic!("{missing}"))
    }

    /// Creates the topic or the queue.
    pub(crate) async fn create(self, name: &str) {
        match self {
            Self::Kafka => kafka::create(&self.url(), name).await,
            Self::RabbitMq => rabbitmq::create(&self.url(), name).await,
        }
    }

    /// Publishes, and returns when the broker has confirmed all.
    pub(crate) async fn publish(self, name: &str, messages: &[Sent]) {
        match self {
            Self::Kafka => kafka::publish(&self.url(), name, messages).await,
            Self::RabbitMq => rabbitmq::publish(&self.url(), name, messages).await,
        }
    }

    /// The messages in a topic or queue; leaves them there.
    pub(crate) async fn rejected_messages(self, name: &str) -> Vec<RejectedMessage> {
        match self {
            Self::Kafka => kafka::rejected_messages(&self.url(), name).await,
            Self::RabbitMq => rabbitmq::rejected_messages(&self.url(), name).await,
        }
    }

    /// The number of unsettled messages: on Kafka those above the committed offset, on RabbitMQ the
    /// ready ones.
    pub(crate) async fn left(self, name: &str) -> u64 {
        match self {
            Self::Kafka => kafka::left(&self.url(), name).await,
            Self::RabbitMq => rabbitmq::left(&self.url(), name).await,
        }
    }

    /// Deletes the topic or queue and the related ones.
    pub(crate) async fn remove(self, name: &str) {
        match self {
            Self::Kafka => kafka::remove(&self.url(), name).await,
            Self::RabbitMq => rabbitmq::remove(&self.url(), name).await,
        }
    }
}
