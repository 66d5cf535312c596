//! Publishes rejected deliveries, and knows when they stand.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use oncegate_core::road::Reason;
use oncegate_core::source::{headers, rejection_headers};
use oncegate_core::{Delivery, Message, Story};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};

use crate::kafka::Destinations;
use crate::log::Log;
use crate::outage::Outage;

/// Says on a dead letter that its body was left out, and how large it was: the broker takes no message of that size.
const BODY_OMITTED: &str = "oncegate-body-omitted";
/// The same of the key.
const KEY_OMITTED: &str = "oncegate-key-omitted";
/// Says that the message's own headers were left out, and how many there were.
const HEADERS_OMITTED: &str = "oncegate-headers-omitted";

/// How long a producer that was confirmed nothing has to name a broker.
const ASKED: Duration = Duration::from_secs(5);

type Publisher = FutureProducer<Log>;

/// The producer of dead letters and in-doubt messages: idempotent, confirmed by all replicas.
pub(crate) struct DeadLetters {
    config: ClientConfig,
    destinations: Destinations,
    outage: Arc<Outage>,
    /// Replaced when it fails for good.
    producer: Mutex<Option<Publisher>>,
}

/// How much of a message goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// All of it.
    Whole,
    /// Key and headers.
    NoBody,
    /// What oncegate has to say of it.
    Note,
}

impl Extent {
    /// What to try when this was too large.
    fn smaller(self) -> Option<Self> {
        match self {
            Self::Whole => Some(Self::NoBody),
            Self::NoBody => Some(Self::Note),
            Self::Note => None,
        }
    }
}

impl DeadLetters {
    /// Starts the producer.
    pub(crate) fn open(config: ClientConfig, destinations: Destinations, outage: Arc<Outage>) -> Result<Self, KafkaError> {
        let producer: Publisher = config.create_with_context(Log(outage.clone()))?;
        Ok(Self { config, destinations, outage, producer: Mutex::new(Some(producer)) })
    }

    /// Publishes one rejected delivery; when it returns `Ok`, all in-sync replicas have it.
    ///
    /// Key, headers and body are those of the message, with the headers of the rejection after them. A header name
    /// that is not UTF-8 has its odd bytes replaced, and a tombstone has an empty body. The record is as old as its
    /// publishing, so that no broker takes it for expired or for one from the future; when the message itself was sent
    /// stands in the header `oncegate-first-seen`. What the broker finds too large goes without its body, and then
    /// without key and headers, and headers say so; the origin header says where it still stands.
    ///
    /// # Errors
    /// Nobody knows whether it stands: publish again; a second copy is harmless.
    pub(crate) async fn publish(&self, delivery: &Delivery, reason: &Reason, story: Option<&Story>) -> Result<(), KafkaError> {
        let mut extent = Extent::Whole;
        loop {
            let sent = self.send(delivery, reason, story, extent).await;
            let Err(KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge)) = sent else { return sent };
            let Some(smaller) = extent.smaller() else { return sent };
            tracing::warn!(
                origin = %delivery.message.origin.name,
                position = delivery.receipt.position,
                bytes = delivery.message.size(),
                "the dead-letter topic takes no message of this size; a part of it is left out"
            );
            extent = smaller;
        }
    }

    async fn send(&self, delivery: &Delivery, reason: &Reason, story: Option<&Story>, extent: Extent) -> Result<(), KafkaError> {
        let message = &delivery.message;
        let topic = self.destinations.of(&message.origin.name, reason);
        let mut record = FutureRecord::<[u8], [u8]>::to(&topic).headers(written(delivery, reason, story, extent));
        record.payload = Some(if extent == Extent::Whole { &message.body } else { &[] });
        record.key = message.key.as_deref().filter(|_| extent != Extent::Note);
        let producer = self.producer()?;
        let sent = producer.send(record, Duration::from_secs(30)).await;
        match &sent {
            Err(_) if producer.client().fatal_error().is_some() => self.replace(&producer, "it failed for good"),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::MessageTimedOut), _)) => self.replace_if_alone(producer, topic).await,
            _ => {}
        }
        sent.map(|_| ()).map_err(|(error, _)| error)
    }

    fn producer(&self) -> Result<Publisher, KafkaError> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        match &*producer {
            Some(producer) => Ok(producer.clone()),
            None => Ok(producer.insert(self.config.create_with_context(Log(self.outage.clone()))?).clone()),
        }
    }

    /// It may be that it has forgotten its brokers, and would wait for them for ever: one that names none is replaced. If there are none,
    /// the next one finds none either, and nothing is lost by it.
    async fn replace_if_alone(&self, producer: Publisher, topic: String) {
        let asked = tokio::task::spawn_blocking(move || {
            let answer = producer.client().fetch_metadata(Some(&topic), ASKED);
            (answer.is_ok_and(|answer| !answer.brokers().is_empty()), producer)
        });
        if let Ok((false, producer)) = asked.await {
            self.replace(&producer, "it reaches no broker");
            drop_aside(Some(producer));
        }
    }

    /// A fatal error of an idempotent producer stays: the next publish starts another one, unless it has begun already.
    fn replace(&self, failed: &Publisher, why: &str) {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if producer.as_ref().is_some_and(|current| current.client().native_ptr() == failed.client().native_ptr()) {
            tracing::warn!(why, "the producer of dead letters is replaced by another one");
            drop_aside(producer.take());
        }
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

/// All headers of a dead letter: the message's own, then ours.
fn written(delivery: &Delivery, reason: &Reason, story: Option<&Story>, extent: Extent) -> OwnedHeaders {
    let message = &delivery.message;
    let mut written = OwnedHeaders::new();
    if extent != Extent::Note {
        for (name, value) in message.headers.iter() {
            written = written.insert(Header { key: &String::from_utf8_lossy(name), value });
        }
    }
    let mut ours = rejection_headers(delivery, reason, story);
    ours.extend(first_seen(message, extent).map(|at| (headers::FIRST_SEEN, at.to_string())));
    ours.extend((extent != Extent::Whole).then(|| (BODY_OMITTED, message.body.len().to_string())));
    if extent == Extent::Note {
        ours.extend(message.key.as_ref().map(|key| (KEY_OMITTED, key.len().to_string())));
        ours.push((HEADERS_OMITTED, message.headers.iter().count().to_string()));
    }
    ours.iter().fold(written, |written, (name, value)| written.insert(Header { key: name, value: Some(value) }))
}

/// When the message was seen first, in milliseconds since 1970, where the headers that go out do not say so already.
fn first_seen(message: &Message, extent: Extent) -> Option<u64> {
    let told = message.headers.last(headers::FIRST_SEEN).and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
    match told {
        Some(told) => (extent == Extent::Note).then_some(told),
        None => u64::try_from(message.sent_at?.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok(),
    }
}
