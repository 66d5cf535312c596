//! Messages in destinations.

use oncegate::MessageId;
use oncegate::lifecycle::Reason;
use oncegate::source::{headers, is_reserved};
use serde::Serialize;

#[cfg(feature = "rabbitmq")]
use super::rabbitmq;
use super::{Destination, ROUTING_KEY};
use crate::audit::MessageLocation;
use crate::output::utc_text;

/// What operators did with a message in a destination, according to the audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeadLetterState {
    /// No operator action was started.
    Waiting,
    /// An action was started and its result is unknown: a copy may have been published.
    Begun,
    Redriven,
    Dropped,
    Resolved,
}

impl DeadLetterState {
    /// Whether an operator still has to act on the message.
    pub(crate) fn is_pending(self) -> bool {
        matches!(self, Self::Waiting | Self::Begun)
    }
}

/// The reason of messages that the broker dead-lettered.
const DEAD_LETTERED_BY_BROKER: &str = "dead-lettered-by-broker";

/// How many characters of the hash a handle contains.
const HANDLE_DIGITS: usize = 16;

/// The reason of messages without a reason header.
const NO_REASON: &str = "unknown";

/// Every reason of messages in this destination. The broker and other programs may put messages
/// into either.
pub(crate) fn reasons(destination: Destination) -> impl Iterator<Item = &'static str> {
    Reason::ALL
        .into_iter()
        .filter(move |reason| reason.is_in_doubt() == (destination == Destination::InDoubt))
        .map(|reason| reason.as_str())
        .chain([DEAD_LETTERED_BY_BROKER, NO_REASON])
}

/// A message in a dead-letter or in-doubt destination; with `explain --copies` also a record of the
/// consumed topic.
#[derive(Clone, Debug)]
pub(crate) struct DeadLetter {
    pub(crate) location: MessageLocation,
    pub(crate) state: DeadLetterState,
    /// Names and values in order; values as text. Includes `oncegate-*` headers only if oncegate
    /// wrote them.
    pub(crate) headers: Vec<(String, String)>,
    /// Kafka: the record key. RabbitMQ: the ordering key.
    pub(crate) key: Option<Vec<u8>>,
    /// `None` for a tombstone.
    pub(crate) body: Option<Vec<u8>>,
    /// RabbitMQ: the earlier of the message's timestamp and its header `oncegate-first-seen`, in
    /// milliseconds since 1970. `None` on Kafka.
    pub(crate) sent_ms: Option<u64>,
    /// When the message was put into its destination, in milliseconds since 1970.
    pub(crate) rejected_at_ms: Option<u64>,
    /// The topic or queue from which the message was consumed, if it is not the configured one.
    pub(crate) other_source: Option<String>,
    /// Which headers a copy would lack, and why, as text; `None` if it would lack none.
    pub(crate) lost_headers: Option<String>,
    /// RabbitMQ: the unacknowledged delivery and its properties.
    #[cfg(feature = "rabbitmq")]
    pub(crate) delivery: Option<Box<rabbitmq::UnackedDelivery>>,
    /// Kafka: the headers as raw bytes.
    pub(crate) raw_headers: Vec<(String, Option<Vec<u8>>)>,
    /// The id that `gate.id` extracts, if any. The header `oncegate-id` takes precedence.
    pub(crate) extracted_id: Option<String>,
    /// RabbitMQ: the delivery count, if the queue counts deliveries.
    pub(crate) delivery_count: Option<u64>,
}

impl DeadLetter {
    /// The last header with this name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .rev()
            .find(|(it, _)| it == name)
            .map(|(_, value)| value.as_str())
    }

    /// The id that oncegate wrote, or else the one that `gate.id` extracts.
    pub(crate) fn id(&self) -> Option<&str> {
        self.header(headers::ID).or(self.extracted_id.as_deref())
    }

    /// The name that commands accept in place of the id; `None` if the message has an id.
    ///
    /// On Kafka it is topic, partition and offset. On RabbitMQ it is `letter-` and a hash of queue,
    /// body, headers and the time of dead-lettering, so equal messages share it.
    pub(crate) fn handle(&self) -> Option<String> {
        if self.id().is_some() {
            return None;
        }
        if let (Some(partition), Some(offset)) = (self.location.partition, self.location.offset) {
            return Some(format!("{}/{partition}/{offset}", self.location.name));
        }
        let headers: Vec<_> = self
            .headers
            .iter()
            .filter(|(name, _)| !is_omitted_from_copies(name))
            .collect();
        let content = format!(
            "{} {:?} {headers:?} {:?}",
            self.location.name, self.rejected_at_ms, self.body
        );
        let hash = MessageId::new(content)?.hashed();
        let digits: String = hash
            .as_str()
            .chars()
            .skip("h:".len())
            .take(HANDLE_DIGITS)
            .collect();
        Some(format!("letter-{digits}"))
    }

    /// The number of the last attempt when the message was dead-lettered, which is the fencing
    /// token of the id; 0 if unknown.
    pub(crate) fn last_attempt(&self) -> u32 {
        self.header(headers::LAST_ATTEMPT)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    }

    /// The bytes of the body; none for a tombstone.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.body.as_deref().unwrap_or_default()
    }

    /// Why the message was dead-lettered: the header `oncegate-reason`. Messages that the broker
    /// dead-lettered do not have it.
    pub(crate) fn reason(&self) -> &str {
        self.header(headers::REASON)
            .unwrap_or(if self.header("x-death").is_some() {
                DEAD_LETTERED_BY_BROKER
            } else {
                NO_REASON
            })
    }

    /// The reason as a clause about the message, such as `its handler panicked`.
    pub(crate) fn reason_text(&self) -> &'static str {
        match self.reason() {
            "missing-id" => "it has no id",
            "unusable-id" => "its id is not valid",
            "unreadable" => "its body cannot be read",
            "no-route" => "its handler has no route for it",
            "conflict" => "its id was used for another body",
            "refused" => "its handler rejected it",
            "attempts-spent" => "its attempts are exhausted",
            "crashes-spent" => "too many processes crashed while they handled it",
            "rejected-before" => {
                "a message with this id was rejected before and not redriven since"
            }
            "too-large" => "it exceeds the body limit of the source",
            DEAD_LETTERED_BY_BROKER => {
                "the broker dead-lettered it, for example at its delivery limit"
            }
            "in-doubt-handler-reported" => "its handler reported that it may have happened",
            "in-doubt-panicked" => "its handler panicked",
            "in-doubt-timed-out" => "its handler timed out",
            "in-doubt-unreadable-marker" => "the value of its key in the store is not a marker",
            "in-doubt-interrupted" => {
                "another delivery of it ended before its outcome was found out, or its process crashed or lost its lease; the log of that process may \
                 have the error of its handler"
            }
            "in-doubt-too-old" => "it is older than max_age, so it may have been handled before",
            _ => "the reason is unknown",
        }
    }

    /// The first error, and the last one if it differs. In a message in doubt the last error may be
    /// that of `reconcile`.
    pub(crate) fn errors(&self) -> Option<String> {
        let [first, last] = [headers::FIRST_ERROR, headers::LAST_ERROR].map(|it| self.header(it));
        match (first, last) {
            (Some(first), Some(last)) if first != last => {
                Some(format!("{first}; last error: {last}"))
            }
            (first, last) => first.or(last).map(str::to_owned),
        }
    }

    /// When the message was sent, in milliseconds since 1970: the earliest known time, and at most
    /// the time of dead-lettering. `None` if no time is known except that of dead-lettering.
    pub(crate) fn first_seen_ms(&self) -> Option<u64> {
        let sent = self
            .header(headers::FIRST_SEEN)
            .and_then(|text| text.parse().ok())
            .into_iter()
            .chain(self.sent_ms)
            .min();
        sent.map(|sent_ms| {
            self.rejected_at_ms
                .map_or(sent_ms, |rejected_at_ms| sent_ms.min(rejected_at_ms))
        })
    }

    /// Removes the `oncegate-*` headers of a message that oncegate did not dead-letter: its
    /// producer wrote them.
    pub(crate) fn remove_reserved_headers(&mut self) {
        self.headers
            .retain(|(name, _)| !is_reserved(name.as_bytes()));
    }

    /// When the message was sent, or if that is unknown, when it was dead-lettered, in milliseconds
    /// since 1970.
    pub(crate) fn sent_or_rejected_ms(&self) -> Option<u64> {
        self.first_seen_ms().or(self.rejected_at_ms)
    }

    /// The message without its body, as lists show it.
    pub(crate) fn summary(&self) -> DeadLetterSummary<'_> {
        DeadLetterSummary {
            broker: &self.location.broker,
            name: &self.location.name,
            partition: self.location.partition,
            offset: self.location.offset,
            id: self.id(),
            handle: self.handle(),
            reason: self.reason(),
            reason_text: self.reason_text(),
            attempts: self
                .header(headers::ATTEMPTS)
                .and_then(|text| text.parse().ok()),
            crashes: self
                .header(headers::CRASHES)
                .and_then(|text| text.parse().ok())
                .unwrap_or(0),
            last_attempt: self
                .header(headers::LAST_ATTEMPT)
                .and_then(|text| text.parse().ok()),
            first_error: self.header(headers::FIRST_ERROR),
            last_error: self.header(headers::LAST_ERROR),
            origin: self.header(headers::ORIGIN),
            from: self.sent_or_rejected_ms().map(utc_text),
            from_ms: self.sent_or_rejected_ms(),
            rejected_at_ms: self.rejected_at_ms,
            state: self.state,
            delivery_count: self.delivery_count,
            bytes: self.bytes().len(),
        }
    }
}

/// A message as JSON, without its body.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeadLetterSummary<'a> {
    pub(crate) broker: &'a str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<i64>,
    pub(crate) id: Option<&'a str>,
    /// The name that commands accept in place of the id, if the message has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) handle: Option<String>,
    pub(crate) reason: &'a str,
    reason_text: &'static str,
    /// The number of attempts that count towards `max_attempts`.
    pub(crate) attempts: Option<u32>,
    /// The number of attempts whose lease expired without an outcome.
    pub(crate) crashes: u32,
    /// The number of the last attempt, which is its fencing token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_attempt: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) origin: Option<&'a str>,
    /// When the message was sent, or if that is unknown, when it was dead-lettered.
    pub(crate) from: Option<String>,
    from_ms: Option<u64>,
    rejected_at_ms: Option<u64>,
    pub(crate) state: DeadLetterState,
    #[serde(skip_serializing_if = "Option::is_none")]
    delivery_count: Option<u64>,
    bytes: usize,
}

/// Whether a redriven copy omits this header. If the copy had `oncegate-*` headers or those that
/// record earlier deliveries, the consumer could treat it as too old or its attempts as exhausted.
/// `CC` and `BCC` would route the copy to other queues, too.
pub(crate) fn is_omitted_from_copies(header: &str) -> bool {
    // The consumer derives the ordering key of the copy from it.
    if header == ROUTING_KEY {
        return false;
    }
    header.starts_with("oncegate-")
        || [
            "x-death",
            "x-first-death-",
            "x-last-death-",
            "x-delivery-count",
            "x-acquired-count",
        ]
        .iter()
        .any(|it| header.starts_with(it))
        || ["CC", "BCC"].contains(&header)
}

#[cfg(test)]
impl DeadLetter {
    /// A waiting message of a RabbitMQ queue with these headers.
    pub(crate) fn with_headers(headers: &[(&str, &str)]) -> Self {
        Self {
            location: MessageLocation {
                broker: "rabbitmq".into(),
                name: "payments.in-doubt".into(),
                ..MessageLocation::default()
            },
            state: DeadLetterState::Waiting,
            headers: headers
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            key: None,
            body: None,
            sent_ms: Some(crate::output::now_ms()),
            rejected_at_ms: Some(crate::output::now_ms()),
            other_source: None,
            lost_headers: None,
            #[cfg(feature = "rabbitmq")]
            delivery: None,
            raw_headers: Vec::new(),
            extracted_id: None,
            delivery_count: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_text_and_too_old_names_max_age() {
        let reasons = reasons(Destination::DeadLetters).chain(reasons(Destination::InDoubt));
        for reason in reasons.filter(|reason| *reason != NO_REASON) {
            let message = DeadLetter::with_headers(&[(headers::REASON, reason)]);
            assert_ne!(message.reason_text(), "the reason is unknown", "{reason}");
        }
        let too_old = DeadLetter::with_headers(&[(headers::REASON, "in-doubt-too-old")]);
        assert!(too_old.reason_text().contains("older than max_age"));
    }
}
