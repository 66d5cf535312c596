//! Publishes rejected deliveries, and knows when they stand.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{kept_headers, rejection_headers};
use oncegate_core::{Delivery, FailureHistory, LogThrottle};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use crate::kafka::Destinations;
use crate::log::Log;
use crate::outage::Outage;
use crate::shared::Rejected;

/// Says on a dead letter that its body was left out, and how large it was: the broker takes no
/// message of that size.
const BODY_OMITTED: &str = "oncegate-body-omitted";
/// The same of the key.
const KEY_OMITTED: &str = "oncegate-key-omitted";
/// Says that the message's own headers were left out, and how many there were.
const HEADERS_OMITTED: &str = "oncegate-headers-omitted";

/// How long a producer that was confirmed nothing has to name a broker.
const ASKED: Duration = Duration::from_secs(5);

/// How often it is logged of one topic that dead letters cannot be published to it.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

type Publisher = FutureProducer<Log>;

/// Publishes dead letters and in-doubt messages: idempotent, confirmed by all replicas.
pub(crate) struct DeadLetters {
    destinations: Destinations,
    batches: Producer,
    /// One message a request. The broker answers for a batch as a whole, so only of what is
    /// published alone is it known which message it refuses.
    singles: Producer,
    throttles: Mutex<HashMap<(String, &'static str), LogThrottle>>,
}

/// A dead letter that is to be published, and what the attempts so far have shown.
pub(crate) struct DeadLetter {
    pub(crate) rejected: Rejected,
    extent: Extent,
    grouping: Grouping,
}

/// What a dead letter shares its request with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grouping {
    /// Others for the same partition.
    Batch,
    /// Nothing: a batch that it was in was refused.
    Alone,
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

impl DeadLetter {
    pub(crate) fn new(rejected: Rejected) -> Self {
        Self {
            rejected,
            extent: Extent::Whole,
            grouping: Grouping::Batch,
        }
    }
}

impl DeadLetters {
    /// Starts the producer.
    pub(crate) fn open(
        config: ClientConfig,
        destinations: Destinations,
        outage: Arc<Outage>,
    ) -> Result<Self, KafkaError> {
        let mut alone = config.clone();
        alone.set("batch.num.messages", "1");
        let batches = Producer {
            config,
            outage: outage.clone(),
            current: Mutex::default(),
        };
        drop(batches.current()?);
        let singles = Producer {
            config: alone,
            outage,
            current: Mutex::default(),
        };
        Ok(Self {
            destinations,
            batches,
            singles,
            throttles: Mutex::default(),
        })
    }

    /// The topic to which messages of this one are rejected.
    pub(crate) fn destination(&self, topic: &str, reason: &Reason) -> String {
        self.destinations.of(topic, reason)
    }

    /// Publishes one rejected delivery; when it returns `Ok`, all in-sync replicas have it.
    ///
    /// Key, headers and body are those of the message, with the headers of the rejection after
    /// them. Inbound `oncegate-*` headers are removed. A header name that is not UTF-8 has its odd
    /// bytes replaced, and a tombstone has an empty body. The record is as old as its publishing,
    /// so that no broker takes it for expired or for one from the future; when the message itself
    /// was sent stands in the header `oncegate-first-seen`. What the broker finds too large goes
    /// without its body, and then without key and headers, and headers say so; the origin header
    /// says where it still stands.
    ///
    /// # Errors
    /// Nobody knows whether it stands: publish again; a second copy is harmless.
    pub(crate) async fn publish(&self, letter: &mut DeadLetter) -> Result<(), KafkaError> {
        loop {
            let Err(error) = self.send(letter).await else {
                return Ok(());
            };
            let KafkaError::MessageProduction(code) = error else {
                return Err(error);
            };
            match (letter.grouping, letter.extent.smaller()) {
                (Grouping::Batch, _) if is_refusal(code) => letter.grouping = Grouping::Alone,
                (Grouping::Alone, Some(smaller))
                    if code == RDKafkaErrorCode::MessageSizeTooLarge =>
                {
                    self.warn_of_size(letter);
                    letter.extent = smaller;
                }
                _ => return Err(error),
            }
        }
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), KafkaError> {
        let DeadLetter {
            rejected:
                Rejected {
                    delivery,
                    reason,
                    story,
                },
            extent,
            grouping,
        } = letter;
        let (message, topic) = (&delivery.message, self.topic_of(&letter.rejected));
        let mut record = FutureRecord::<[u8], [u8]>::to(&topic).headers(written(
            delivery,
            reason,
            story.as_deref(),
            *extent,
        ));
        record.payload = Some(if *extent == Extent::Whole {
            &message.body
        } else {
            &[]
        });
        record.key = message.key.as_deref().filter(|_| *extent != Extent::Note);
        match grouping {
            Grouping::Batch => self.batches.send(record).await,
            Grouping::Alone => self.singles.send(record).await,
        }
    }

    fn topic_of(&self, rejected: &Rejected) -> String {
        self.destination(&rejected.delivery.message.origin.name, &rejected.reason)
    }

    /// Logs that a dead letter could not be published, once in a while for each topic.
    pub(crate) fn warn_of_failure(&self, letter: &DeadLetter, error: &KafkaError) {
        let (
            topic,
            Rejected {
                delivery, reason, ..
            },
        ) = (self.topic_of(&letter.rejected), &letter.rejected);
        let Some(suppressed_lines) = self.due(&topic, "failure", Instant::now()) else {
            return;
        };
        tracing::warn!(
            topic,
            %error,
            origin = %delivery.message.origin.name,
            partition = delivery.receipt.partition,
            offset = delivery.receipt.position,
            reason = reason.as_str(),
            suppressed_lines,
            "cannot publish to the dead-letter topic; the message is held, its offset is not committed, and publishing is tried again"
        );
    }

    fn warn_of_size(&self, letter: &DeadLetter) {
        let (topic, delivery) = (self.topic_of(&letter.rejected), &letter.rejected.delivery);
        let Some(suppressed_lines) = self.due(&topic, "size", Instant::now()) else {
            return;
        };
        tracing::warn!(
            topic,
            origin = %delivery.message.origin.name,
            partition = delivery.receipt.partition,
            offset = delivery.receipt.position,
            bytes = delivery.message.size(),
            suppressed_lines,
            "the dead-letter topic takes no message of this size; a part of it is left out"
        );
    }

    /// How many lines of this kind were suppressed for the topic, if one is due.
    fn due(&self, topic: &str, kind: &'static str, now: Instant) -> Option<u64> {
        let mut throttles = self
            .throttles
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let throttle = throttles
            .entry((topic.to_owned(), kind))
            .or_insert_with(|| LogThrottle::every(LOG_INTERVAL));
        throttle.due(now)
    }
}

/// Whether the broker refused the batch, for this message or for another one in it. Otherwise
/// nothing was heard of it.
fn is_refusal(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    !matches!(
        code,
        E::MessageTimedOut | E::QueueFull | E::PurgeQueue | E::PurgeInflight | E::Fatal
    )
}

/// A producer that is replaced when it fails for good.
struct Producer {
    config: ClientConfig,
    outage: Arc<Outage>,
    current: Mutex<Option<Publisher>>,
}

impl Producer {
    async fn send(&self, record: FutureRecord<'_, [u8], [u8]>) -> Result<(), KafkaError> {
        let (topic, producer) = (record.topic.to_owned(), self.current()?);
        let sent = producer.send(record, Duration::from_secs(30)).await;
        match &sent {
            Err(_) if producer.client().fatal_error().is_some() => {
                self.replace(&producer, "it failed for good")
            }
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::MessageTimedOut), _)) => {
                self.replace_if_alone(producer, topic).await
            }
            _ => {}
        }
        sent.map(|_| ()).map_err(|(error, _)| error)
    }

    fn current(&self) -> Result<Publisher, KafkaError> {
        let mut producer = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match &*producer {
            Some(producer) => Ok(producer.clone()),
            None => Ok(producer
                .insert(self.config.create_with_context(Log(self.outage.clone()))?)
                .clone()),
        }
    }

    /// It may be that it has forgotten its brokers, and would wait for them for ever: one that
    /// names none is replaced. If there are none, the next one finds none either, and nothing is
    /// lost by it.
    async fn replace_if_alone(&self, producer: Publisher, topic: String) {
        let asked = tokio::task::spawn_blocking(move || {
            let answer = producer.client().fetch_metadata(Some(&topic), ASKED);
            (
                answer.is_ok_and(|answer| !answer.brokers().is_empty()),
                producer,
            )
        });
        if let Ok((false, producer)) = asked.await {
            self.replace(&producer, "it reaches no broker");
            drop_aside(Some(producer));
        }
    }

    /// A fatal error of an idempotent producer stays: the next publish starts another one, unless
    /// it has begun already.
    fn replace(&self, failed: &Publisher, why: &str) {
        let mut producer = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if producer
            .as_ref()
            .is_some_and(|current| current.client().native_ptr() == failed.client().native_ptr())
        {
            tracing::warn!(
                why,
                "the producer of dead letters is replaced by another one"
            );
            drop_aside(producer.take());
        }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        drop_aside(
            self.current
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
    }
}

/// A producer joins its thread when it is dropped: not on an async thread.
fn drop_aside(producer: Option<Publisher>) {
    // Where no thread can be had, the closure is dropped here, and the producer with it.
    let _ = std::thread::Builder::new()
        .name("oncegate-kafka-drop".into())
        .spawn(move || drop(producer));
}

/// All headers of a dead letter: those of the message's own that it keeps, then ours.
fn written(
    delivery: &Delivery,
    reason: &Reason,
    story: Option<&FailureHistory>,
    extent: Extent,
) -> OwnedHeaders {
    let message = &delivery.message;
    let mut written = OwnedHeaders::new();
    if extent != Extent::Note {
        for (name, value) in kept_headers(message) {
            written = written.insert(Header {
                key: &String::from_utf8_lossy(name),
                value,
            });
        }
    }
    let mut ours = rejection_headers(delivery, reason, story);
    ours.extend((extent != Extent::Whole).then(|| (BODY_OMITTED, message.body.len().to_string())));
    if extent == Extent::Note {
        ours.extend(
            message
                .key
                .as_ref()
                .map(|key| (KEY_OMITTED, key.len().to_string())),
        );
        ours.push((HEADERS_OMITTED, message.headers.iter().count().to_string()));
    }
    ours.iter().fold(written, |written, (name, value)| {
        written.insert(Header {
            key: name,
            value: Some(value),
        })
    })
}

#[cfg(test)]
mod tests {
    use oncegate_core::message::HeadersBuilder;
    use oncegate_core::{Message, Receipt};
    use rdkafka::message::Headers;

    use super::*;
    use crate::Kafka;

    #[test]
    fn of_each_topic_a_failure_is_logged_once_in_a_while_with_the_number_of_the_others() {
        let config = Kafka::topic("t")
            .brokers("localhost:1")
            .group("g")
            .producer_config();
        let letters = DeadLetters::open(config, Destinations::default(), Arc::new(Outage::of("b")))
            .expect("a producer");
        let begun = Instant::now();
        let due =
            |topic, second| letters.due(topic, "failure", begun + Duration::from_secs(second));
        assert_eq!(
            [
                due("a", 0),
                due("a", 1),
                due("b", 1),
                due("a", 2),
                due("a", 10)
            ],
            [Some(0), None, Some(0), None, Some(2)]
        );
        assert_eq!(letters.due("a", "size", begun), Some(0));
    }

    #[test]
    fn forged_headers_are_stripped_from_dead_letters() {
        let mut builder = HeadersBuilder::default();
        let forged = [
            "oncegate-id",
            "oncegate-id",
            "oncegate-reason",
            BODY_OMITTED,
            KEY_OMITTED,
            HEADERS_OMITTED,
            "oncegate-set-aside-at",
        ];
        forged
            .iter()
            .for_each(|name| builder.push(name.as_bytes(), Some(b"victim")));
        builder.push(b"oncegate-id\xff", Some(b"victim"));
        // Header names are case-sensitive.
        builder.push(b"Oncegate-Id", Some(b"mine"));
        let message = Message {
            headers: builder.finish(),
            ..Message::new("body")
        };
        let delivery = Delivery {
            message,
            receipt: Receipt {
                epoch: 1,
                partition: 0,
                position: 0,
            },
            failures: 0,
        };
        let names = |extent| {
            let all = written(&delivery, &Reason::TooLarge, None, extent);
            assert!(
                all.iter()
                    .all(|header| header.value.is_some_and(|value| value != b"victim")),
                "{extent:?}"
            );
            all.iter()
                .map(|header| header.key.to_owned())
                .collect::<Vec<_>>()
        };
        let whole = [
            "Oncegate-Id",
            "oncegate-reason",
            "oncegate-attempts",
            "oncegate-origin",
        ];
        assert_eq!(names(Extent::Whole), whole);
        assert_eq!(
            names(Extent::NoBody),
            [&whole[..], &[BODY_OMITTED]].concat()
        );
        assert_eq!(
            names(Extent::Note),
            [&whole[1..], &[BODY_OMITTED, HEADERS_OMITTED]].concat()
        );
    }
}
