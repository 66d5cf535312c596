//! Publishes rejected deliveries to dead-letter topics.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::internal::Lock;
use oncegate_core::internal::LogThrottle;
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{kept_headers, rejection_headers};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::FutureRecord;

use super::connection_errors::ConnectionErrors;
use super::restarting_producer::{ProducerPair, is_rejection};
use crate::settings::Destinations;
use crate::shared::RejectedDelivery;

/// The header of a dead letter without the message's body, which made it too large for the broker.
/// The value is the size of the body in bytes.
const BODY_OMITTED: &str = "oncegate-body-omitted";
/// The header of a dead letter without the message's key. The value is the size of the key in
/// bytes.
const KEY_OMITTED: &str = "oncegate-key-omitted";
/// The header of a dead letter without the message's own headers. The value is the number of these
/// headers.
const HEADERS_OMITTED: &str = "oncegate-headers-omitted";

/// How often a failure is logged per topic.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// After this time without a confirm, a dead letter is logged. librdkafka gives up after
/// `delivery.timeout.ms`: 30 s by default.
const DELAY_WARNING_AFTER: Duration = Duration::from_secs(5);

/// Publishes dead letters and in-doubt messages with idempotent producers and `acks=all`.
pub(crate) struct DeadLetters {
    destinations: Destinations,
    producers: ProducerPair,
    /// The throttle of each kind of log line, by dead-letter topic and kind.
    throttles: Lock<HashMap<(String, &'static str), LogThrottle>>,
}

/// A dead letter that is not confirmed yet, and how the next attempt sends it.
pub(crate) struct UnpublishedDeadLetter {
    pub(crate) rejected: RejectedDelivery,
    topic: String,
    parts: PublishedParts,
    grouping: RequestGrouping,
}

/// Whether a request with the dead letter may contain other messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestGrouping {
    /// It may contain other messages for the same partition.
    Batch,
    /// It may not, because the broker rejected a batch with this message.
    Alone,
}

/// The parts of the rejected message that the dead letter contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PublishedParts {
    /// Key, headers and body.
    Whole,
    /// Key and headers.
    WithoutBody,
    /// None: the dead letter has only the headers that oncegate adds.
    RejectionHeaders,
}

impl PublishedParts {
    /// The parts to publish next if these were too large; `None` if nothing more can be omitted.
    fn smaller(self) -> Option<Self> {
        match self {
            Self::Whole => Some(Self::WithoutBody),
            Self::WithoutBody => Some(Self::RejectionHeaders),
            Self::RejectionHeaders => None,
        }
    }
}

impl DeadLetters {
    pub(crate) fn open(
        config: ClientConfig,
        destinations: Destinations,
        connection_errors: Arc<ConnectionErrors>,
    ) -> Result<Self, KafkaError> {
        Ok(Self {
            destinations,
            producers: ProducerPair::start(config, connection_errors)?,
            throttles: Lock::default(),
        })
    }

    /// Makes a dead letter of this delivery. The message is copied, so that it does not keep the
    /// memory of the whole batch that it was read in.
    pub(crate) fn prepare(&self, mut rejected: RejectedDelivery) -> UnpublishedDeadLetter {
        let message = &mut rejected.delivery.message;
        message.detach();
        UnpublishedDeadLetter {
            topic: self.destination(&message.origin.name, &rejected.reason),
            rejected,
            parts: PublishedParts::Whole,
            grouping: RequestGrouping::Batch,
        }
    }

    /// The topic to which messages of `topic` are rejected.
    pub(crate) fn destination(&self, topic: &str, reason: &Reason) -> String {
        self.destinations.of(topic, reason)
    }

    /// Publishes one dead letter. On `Ok`, all in-sync replicas have it.
    ///
    /// The dead letter has the message's key, body and headers, except inbound `oncegate-*`
    /// headers, and then the headers that describe the rejection. Invalid UTF-8 in a header name is
    /// replaced, and a tombstone gets an empty body. The record's timestamp is the time of
    /// publishing, so that the broker's timestamp check does not reject it and retention does not
    /// remove it early; the header `oncegate-first-seen` has the original timestamp. If the broker
    /// rejects the record as too large, it is sent without its body, then also without key and
    /// headers. Headers name the omitted parts; the header `oncegate-origin` has topic, partition
    /// and offset of the complete message.
    ///
    /// # Errors
    /// The dead letter is not confirmed, and may be in the topic. Publish it again; a second copy
    /// has no effect on processing.
    pub(crate) async fn publish(
        &self,
        dead_letter: &mut UnpublishedDeadLetter,
    ) -> Result<(), KafkaError> {
        loop {
            let Err(error) = self.send(dead_letter).await else {
                return Ok(());
            };
            let KafkaError::MessageProduction(code) = error else {
                return Err(error);
            };
            match (dead_letter.grouping, dead_letter.parts.smaller()) {
                (RequestGrouping::Batch, _) if is_rejection(code) => {
                    dead_letter.grouping = RequestGrouping::Alone
                }
                (RequestGrouping::Alone, Some(smaller))
                    if code == RDKafkaErrorCode::MessageSizeTooLarge =>
                {
                    self.warn_of_size(dead_letter);
                    dead_letter.parts = smaller;
                }
                _ => return Err(error),
            }
        }
    }

    /// Sends a dead letter once. Logs a warning if the confirm takes longer than
    /// [`DELAY_WARNING_AFTER`].
    async fn send(&self, dead_letter: &UnpublishedDeadLetter) -> Result<(), KafkaError> {
        let (rejected, parts) = (&dead_letter.rejected, dead_letter.parts);
        let message = &rejected.delivery.message;
        let mut record = FutureRecord::<[u8], [u8]>::to(&dead_letter.topic)
            .headers(dead_letter_headers(rejected, parts));
        let body = Some(&message.body[..]).filter(|_| parts == PublishedParts::Whole);
        record.payload = Some(body.unwrap_or_default());
        let key = message.key.as_deref();
        record.key = key.filter(|_| parts != PublishedParts::RejectionHeaders);
        let send = async {
            match dead_letter.grouping {
                RequestGrouping::Batch => self.producers.batches.send(record).await,
                RequestGrouping::Alone => self.producers.singles.send(record).await,
            }
        };
        let mut send = pin!(send);
        match tokio::time::timeout(DELAY_WARNING_AFTER, &mut send).await {
            Ok(sent) => sent,
            Err(_) => {
                self.warn_of_delay(dead_letter);
                send.await
            }
        }
    }

    /// Logs that the broker has not confirmed a dead letter for [`DELAY_WARNING_AFTER`].
    fn warn_of_delay(&self, dead_letter: &UnpublishedDeadLetter) {
        let (topic, delivery) = (&dead_letter.topic, &dead_letter.rejected.delivery);
        let Some(suppressed_lines) = self.due(topic, "delay", Instant::now()) else {
            return;
        };
        tracing::warn!(
            topic,
            origin = %delivery.message.origin.name,
            partition = delivery.receipt.partition,
            offset = delivery.receipt.position,
            waited = ?DELAY_WARNING_AFTER,
            suppressed_lines,
            "dead letter not confirmed yet; until it is, the offset of its message and higher offsets are not committed; check that the topic exists and that the brokers are reachable"
        );
    }

    /// Logs that a dead letter could not be published, at most once per [`LOG_INTERVAL`] and topic.
    pub(crate) fn warn_of_failure(&self, dead_letter: &UnpublishedDeadLetter, error: &KafkaError) {
        let (topic, rejected) = (&dead_letter.topic, &dead_letter.rejected);
        let Some(suppressed_lines) = self.due(topic, "failure", Instant::now()) else {
            return;
        };
        let delivery = &rejected.delivery;
        tracing::warn!(
            topic,
            %error,
            origin = %delivery.message.origin.name,
            partition = delivery.receipt.partition,
            offset = delivery.receipt.position,
            reason = rejected.reason.as_str(),
            suppressed_lines,
            "cannot publish to the dead-letter topic, retrying; until it succeeds, the message stays in memory, and its offset and higher offsets are not committed; check that the topic exists, is not compacted and has a sufficient max.message.bytes, and that this client has the right Write on it"
        );
    }

    /// Logs that a dead letter is too large for its topic.
    fn warn_of_size(&self, dead_letter: &UnpublishedDeadLetter) {
        let (topic, delivery) = (&dead_letter.topic, &dead_letter.rejected.delivery);
        let Some(suppressed_lines) = self.due(topic, "size", Instant::now()) else {
            return;
        };
        tracing::warn!(
            topic,
            origin = %delivery.message.origin.name,
            partition = delivery.receipt.partition,
            offset = delivery.receipt.position,
            bytes = delivery.message.size(),
            suppressed_lines,
            "message too large for the dead-letter topic; it is published without its body, and if it is still too large, without key and headers; raise max.message.bytes of the topic to keep them"
        );
    }

    /// The number of suppressed log lines of this kind for the topic, if one is due.
    fn due(&self, topic: &str, line: &'static str, now: Instant) -> Option<u64> {
        let mut throttles = self.throttles.lock();
        let throttle = throttles
            .entry((topic.to_owned(), line))
            .or_insert_with(|| LogThrottle::every(LOG_INTERVAL));
        throttle.due(now)
    }
}

/// The headers of a dead letter: the headers of the message without inbound `oncegate-*` headers,
/// then the headers that describe the rejection.
fn dead_letter_headers(rejected: &RejectedDelivery, parts: PublishedParts) -> OwnedHeaders {
    let RejectedDelivery {
        delivery,
        reason,
        failure_history,
    } = rejected;
    let message = &delivery.message;
    let mut headers = OwnedHeaders::new();
    if parts != PublishedParts::RejectionHeaders {
        for (name, value) in kept_headers(message) {
            headers = headers.insert(Header {
                key: &String::from_utf8_lossy(name),
                value,
            });
        }
    }
    let mut added = rejection_headers(delivery, reason, failure_history.as_deref());
    added.extend(
        (parts != PublishedParts::Whole).then(|| (BODY_OMITTED, message.body.len().to_string())),
    );
    if parts == PublishedParts::RejectionHeaders {
        added.extend(
            message
                .key
                .as_ref()
                .map(|key| (KEY_OMITTED, key.len().to_string())),
        );
        added.push((HEADERS_OMITTED, message.headers.iter().count().to_string()));
    }
    added.iter().fold(headers, |headers, (name, value)| {
        headers.insert(Header {
            key: name,
            value: Some(value),
        })
    })
}

#[cfg(test)]
mod tests {
    use oncegate_core::message::HeadersBuilder;
    use oncegate_core::{Delivery, Message, Receipt};
    use rdkafka::message::Headers;

    use super::*;
    use crate::Kafka;

    #[test]
    fn failures_are_logged_at_a_bounded_rate_per_topic() {
        let config = Kafka::topic("t")
            .brokers("localhost:1")
            .group("g")
            .producer_config();
        let dead_letters = DeadLetters::open(
            config,
            Destinations::default(),
            Arc::new(ConnectionErrors::new("b")),
        )
        .expect("a producer");
        let started = Instant::now();
        let due = |topic, second| {
            dead_letters.due(topic, "failure", started + Duration::from_secs(second))
        };
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
        assert_eq!(dead_letters.due("a", "size", started), Some(0));
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
            "oncegate-rejected-at",
        ];
        forged
            .iter()
            .for_each(|name| builder.push(name.as_bytes(), Some(b"victim")));
        builder.push(b"oncegate-id\xff", Some(b"victim"));
        // Header names are case-sensitive.
        builder.push(b"Oncegate-Id", Some(b"mine"));
        let message = Message::new("body").with_headers(builder.finish());
        let receipt = Receipt::new(1, 0);
        let rejected = RejectedDelivery {
            delivery: Delivery::new(message, receipt),
            reason: Reason::TooLarge,
            failure_history: None,
        };
        let names = |parts| {
            let headers = dead_letter_headers(&rejected, parts);
            assert!(
                headers
                    .iter()
                    .all(|header| header.value.is_some_and(|value| value != b"victim")),
                "{parts:?}"
            );
            headers
                .iter()
                .map(|header| header.key.to_owned())
                .collect::<Vec<_>>()
        };
        let all_names = [
            "Oncegate-Id",
            "oncegate-reason",
            "oncegate-attempts",
            "oncegate-origin",
        ];
        assert_eq!(names(PublishedParts::Whole), all_names);
        assert_eq!(
            names(PublishedParts::WithoutBody),
            [&all_names[..], &[BODY_OMITTED]].concat()
        );
        assert_eq!(
            names(PublishedParts::RejectionHeaders),
            [&all_names[1..], &[BODY_OMITTED, HEADERS_OMITTED]].concat()
        );
    }
}
