//! Publishes messages of an outbox.

use std::fmt;
use std::sync::{Arc, OnceLock};

use oncegate_core::SourceError;
use oncegate_core::internal::fault;
use oncegate_core::outbox::{ID_HEADER, NotPublished, OutboxMessage, Publisher};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::FutureRecord;

use super::connection_errors::ConnectionErrors;
use super::error;
use super::restarting_producer::{ProducerPair, is_rejection};
use crate::settings::Kafka;

/// After this time a topic that is not in the metadata counts as missing. Its message is tried
/// again, so a topic that was just created need not be waited for.
const TOPIC_PROPAGATION_MS: &str = "3000";

/// Publishes messages of an outbox to Kafka with idempotent producers and `acks=all`. Created by
/// [`Kafka::publisher`].
///
/// The key is the record key, and the id is the header `message-id`: a consumer reads it with
/// `IdSource::header("message-id")`. Topics are not created: a message for a missing topic is
/// published once the topic exists.
///
/// A message that its topic rejects as too large (`max.message.bytes`) or as invalid is refused, and
/// so is one with an exchange.
pub struct KafkaPublisher {
    kafka: Kafka,
    producers: OnceLock<ProducerPair>,
}

impl Kafka {
    /// A publisher for a [`Relay`](oncegate_core::Relay), which uses the brokers, TLS, login and
    /// properties of this source. It publishes to any topic.
    pub fn publisher(&self) -> KafkaPublisher {
        KafkaPublisher {
            kafka: self.clone(),
            producers: OnceLock::new(),
        }
    }
}

impl KafkaPublisher {
    fn producers(&self) -> Result<&ProducerPair, SourceError> {
        if let Some(producers) = self.producers.get() {
            return Ok(producers);
        }
        self.kafka.check_access()?;
        let mut config = self.kafka.producer_config();
        if config.get(PROPAGATION).is_none() {
            config.set(PROPAGATION, TOPIC_PROPAGATION_MS);
        }
        let connection_errors = Arc::new(ConnectionErrors::new(&self.kafka.brokers));
        let producers =
            ProducerPair::start(config, connection_errors).map_err(error::from_config)?;
        Ok(self.producers.get_or_init(|| producers))
    }
}

/// librdkafka's property for [`TOPIC_PROPAGATION_MS`].
const PROPAGATION: &str = "topic.metadata.propagation.max.ms";

impl Publisher for KafkaPublisher {
    fn described(&self) -> String {
        format!("Kafka at {}", self.kafka.brokers)
    }

    async fn preflight(&self) -> Result<(), SourceError> {
        self.producers().map(drop)
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        if !message.exchange.is_empty() {
            return Err(NotPublished::Refused(
                "the message names a RabbitMQ exchange, which Kafka does not have".into(),
            ));
        }
        let producers = self
            .producers()
            .map_err(|error| NotPublished::NotConfirmed(error.into()))?;
        let sent = producers.batches.send(record(message));
        let result = match fault::when_pending("relay.publish.sent", sent).await {
            Err(KafkaError::MessageProduction(code)) if is_rejection(code) => {
                producers.singles.send(record(message)).await
            }
            result => result,
        };
        result.map_err(|error| match error {
            KafkaError::MessageProduction(code) if is_refusal(code) => {
                NotPublished::Refused(error.into())
            }
            // The name of the topic has a zero byte.
            KafkaError::Nul(_) => NotPublished::Refused(error.into()),
            KafkaError::MessageProduction(code) if is_missing(code) => {
                NotPublished::NoDestination(error.into())
            }
            error => NotPublished::NotConfirmed(error.into()),
        })
    }
}

/// Whether no later attempt to send this message alone can succeed.
fn is_refusal(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(
        code,
        E::MessageSizeTooLarge
            | E::MessageBatchTooLarge
            | E::InvalidMessageSize
            | E::InvalidRecord
            | E::InvalidTopic
            // The name of the topic is too long.
            | E::InvalidArgument
    )
}

/// Whether the topic does not exist, or the user may not write to it.
fn is_missing(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(
        code,
        E::UnknownTopic | E::UnknownTopicOrPartition | E::TopicAuthorizationFailed
    )
}

fn record(message: &OutboxMessage) -> FutureRecord<'_, [u8], [u8]> {
    let id = Header {
        key: ID_HEADER,
        value: Some(message.id.as_str()),
    };
    let headers =
        message
            .headers
            .iter()
            .fold(OwnedHeaders::new().insert(id), |headers, (name, value)| {
                headers.insert(Header {
                    key: name,
                    value: Some(value),
                })
            });
    let mut record = FutureRecord::to(&message.destination)
        .payload(&message.body[..])
        .headers(headers);
    record.key = message.key.as_deref();
    record
}

impl fmt::Debug for KafkaPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaPublisher")
            .field("kafka", &self.kafka)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_too_large_alone_is_refused() {
        use RDKafkaErrorCode as E;
        assert!(is_refusal(E::MessageSizeTooLarge) && is_refusal(E::MessageBatchTooLarge));
        assert!(!is_refusal(E::UnknownTopicOrPartition) && !is_refusal(E::MessageTimedOut));
    }
}
