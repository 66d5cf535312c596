//! Publishes rejected deliveries, and knows when they stand.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use oncegate_core::road::Reason;
use oncegate_core::source::rejection_headers;
use oncegate_core::{Delivery, Headers, Story};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};

use crate::kafka::Destinations;
use crate::poll::Log;

/// Says on a dead letter that its body was left out, and how large it was: the broker takes no message of that size.
const BODY_OMITTED: &str = "oncegate-body-omitted";

type Publisher = FutureProducer<Log>;

/// The producer of dead letters and in-doubt messages: idempotent, confirmed by all replicas.
pub(crate) struct DeadLetters {
    config: ClientConfig,
    destinations: Destinations,
    /// Replaced when it fails for good.
    producer: Mutex<Option<Publisher>>,
}

/// What goes out of the body.
#[derive(Clone, Copy)]
enum Body {
    Whole,
    Omitted,
}

impl DeadLetters {
    /// Starts the producer.
    pub(crate) fn open(config: ClientConfig, destinations: Destinations) -> Result<Self, KafkaError> {
        let producer: Publisher = config.create_with_context(Log)?;
        Ok(Self { config, destinations, producer: Mutex::new(Some(producer)) })
    }

    /// Publishes one rejected delivery; when it returns `Ok`, all in-sync replicas have it.
    ///
    /// Key, headers and body are those of the message, with the headers of the rejection after them. A header name
    /// that is not UTF-8 has its odd bytes replaced. A body that the broker finds too large is left out, with a header
    /// that says so; the origin header says where it still stands.
    ///
    /// # Errors
    /// Nobody knows whether it stands: publish again; a second copy is harmless.
    pub(crate) async fn publish(&self, delivery: &Delivery, reason: &Reason, story: Option<&Story>) -> Result<(), KafkaError> {
        match self.send(delivery, reason, story, Body::Whole).await {
            Err(KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge)) => {
                tracing::warn!(
                    origin = %delivery.message.origin.name,
                    position = delivery.receipt.position,
                    bytes = delivery.message.body.len(),
                    "the dead-letter topic takes no message of this size; the body is left out"
                );
                self.send(delivery, reason, story, Body::Omitted).await
            }
            result => result,
        }
    }

    async fn send(&self, delivery: &Delivery, reason: &Reason, story: Option<&Story>, body: Body) -> Result<(), KafkaError> {
        let message = &delivery.message;
        let topic = self.destinations.of(&message.origin.name, reason);
        let mut headers = copied(&message.headers);
        for (name, value) in rejection_headers(delivery, reason, story) {
            headers = headers.insert(Header { key: name, value: Some(&value) });
        }
        if let Body::Omitted = body {
            headers = headers.insert(Header { key: BODY_OMITTED, value: Some(&message.body.len().to_string()) });
        }
        let mut record = FutureRecord::<[u8], [u8]>::to(&topic).headers(headers).payload(match body {
            Body::Whole => &message.body,
            Body::Omitted => &[],
        });
        record.key = message.key.as_deref();
        record.timestamp =
            message.sent_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).and_then(|age| i64::try_from(age.as_millis()).ok());
        let producer = self.producer()?;
        let sent = producer.send(record, Duration::from_secs(30)).await;
        if sent.is_err() && producer.client().fatal_error().is_some() {
            self.replace();
        }
        sent.map(|_| ()).map_err(|(error, _)| error)
    }

    fn producer(&self) -> Result<Publisher, KafkaError> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        match &*producer {
            Some(producer) => Ok(producer.clone()),
            None => Ok(producer.insert(self.config.create_with_context(Log)?).clone()),
        }
    }

    /// A fatal error of an idempotent producer stays: the next publish starts another one.
    fn replace(&self) {
        tracing::error!("the producer of dead letters failed for good; starting another one");
        drop_aside(self.producer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Drop for DeadLetters {
    fn drop(&mut self) {
        drop_aside(self.producer.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A producer joins its thread when it is dropped: not on an async thread.
fn drop_aside(producer: Option<Publisher>) {
    // Where no thread can be had, the closure is dropped here, and the producer with it.
    let _ = std::thread::Builder::new().name("oncegate-kafka-drop".into()).spawn(move || drop(producer));
}

fn copied(headers: &Headers) -> OwnedHeaders {
    headers.iter().fold(OwnedHeaders::new(), |copy, (name, value)| copy.insert(Header { key: &String::from_utf8_lossy(name), value }))
}
