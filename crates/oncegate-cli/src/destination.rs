//! Reads and changes messages in dead-letter and in-doubt destinations, on Kafka and RabbitMQ.

pub(crate) mod bulk;
pub(crate) mod filter;
#[cfg(feature = "kafka")]
pub(crate) mod kafka;
pub(crate) mod listing;
#[cfg(feature = "rabbitmq")]
pub(crate) mod rabbitmq;
pub(crate) mod redrive_policy;

use std::collections::HashMap;
use std::convert::Infallible;

use oncegate::lifecycle::Reason;
use oncegate::source::{headers, is_reserved};
use serde::Serialize;

use crate::CliContext;
use crate::audit::{ActionStage, AuditEntry, AuditedAction, MessageLocation};
use crate::error::CliError;
use crate::output::{Unchecked, utc_text};

/// The original routing key of a message that was copied to a destination.
const ROUTING_KEY: &str = "oncegate-routing-key";

/// The delivery count from which a RabbitMQ message is replaced by a copy. A policy with a lower
/// delivery limit drops messages before the tool can detect it.
const REPLACED_FROM_COUNT: u64 = 5;

/// Whether to read RabbitMQ queues that count each read towards a delivery limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeliveryCountPolicy {
    Refused,
    Accepted,
}

/// A destination of messages that the consumer does not handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    DeadLetters,
    InDoubt,
}

impl Destination {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::DeadLetters => "dead-letter",
            Self::InDoubt => "in-doubt",
        }
    }
}

/// The broker that holds the source and its destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Broker {
    Kafka,
    Rabbitmq,
}

impl Broker {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Rabbitmq => "rabbitmq",
        }
    }

    /// The error for a broker that this build does not include.
    pub(crate) fn feature_missing(self) -> CliError {
        match self {
            Self::Kafka => CliError::feature_missing("Kafka", "kafka"),
            Self::Rabbitmq => CliError::feature_missing("RabbitMQ", "rabbitmq"),
        }
    }

    /// Whether any broker setting is present.
    pub(crate) fn any_configured(context: &CliContext) -> bool {
        context.config.set().any(|set| {
            ["kafka.", "rabbitmq."]
                .iter()
                .any(|section| set.setting.key.starts_with(section))
        })
    }

    /// The settings that this broker requires.
    fn required_keys(self) -> [&'static str; 2] {
        match self {
            Self::Kafka => ["kafka.brokers", "kafka.topic"],
            Self::Rabbitmq => ["rabbitmq.url", "rabbitmq.queue"],
        }
    }

    /// The fully configured brokers, or only the chosen one.
    pub(crate) fn configured(
        context: &CliContext,
        chosen: Option<Self>,
    ) -> Result<Vec<Self>, CliError> {
        let is_complete = |broker: &Self| {
            broker
                .required_keys()
                .iter()
                .all(|key| context.config.has(key))
        };
        let found: Vec<Self> = [Self::Kafka, Self::Rabbitmq]
            .into_iter()
            .filter(is_complete)
            .filter(|it| chosen.is_none_or(|c| c == *it))
            .collect();
        if found.is_empty() {
            return Err(CliError::usage(
                "no broker: set kafka.brokers and kafka.topic, or rabbitmq.url and rabbitmq.queue",
            ));
        }
        Ok(found)
    }

    /// Like [`Self::configured`], and notes every partly configured broker as unchecked.
    pub(crate) fn selected(
        context: &CliContext,
        chosen: Option<Self>,
        unchecked: &mut Unchecked,
    ) -> Result<Vec<Self>, CliError> {
        let found = Self::configured(context, chosen)?;
        if chosen.is_none() {
            let _ = Self::note_incomplete(context, unchecked);
        }
        Ok(found)
    }

    /// Notes every partly configured broker as unchecked. Returns whether there was one.
    pub(crate) fn note_incomplete(context: &CliContext, unchecked: &mut Unchecked) -> bool {
        let mut any = false;
        for broker in [Self::Kafka, Self::Rabbitmq] {
            let section = format!("{}.", broker.name());
            let is_named = context
                .config
                .set()
                .any(|set| set.setting.key.starts_with(&section));
            let missing = broker
                .required_keys()
                .into_iter()
                .find(|key| !context.config.has(key));
            if let (true, Some(missing)) = (is_named, missing) {
                let text = format!(
                    "{missing} is missing; set it, or leave [{}] out",
                    broker.name()
                );
                unchecked.note(broker.name(), CliError::usage(text));
                any = true;
            }
        }
        any
    }
}

/// The processing state of a message in a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum DeadLetterState {
    /// No operator has acted on it.
    Waiting,
    /// An action was started and its result is unknown: a copy may have been published.
    Begun,
    Redriven,
    Dropped,
    Resolved,
}

impl DeadLetterState {
    /// Whether it still needs a decision.
    pub(crate) fn is_pending(self) -> bool {
        matches!(self, Self::Waiting | Self::Begun)
    }
}

/// The reason of messages that the broker dead-lettered.
const DEAD_LETTERED_BY_BROKER: &str = "set-aside-by-the-broker";

/// The reason of messages without a reason header.
const NO_REASON: &str = "unknown";

/// Every reason that `--reason` accepts.
pub(crate) fn reasons() -> impl Iterator<Item = &'static str> {
    Reason::ALL
        .into_iter()
        .map(|reason| reason.as_str())
        .chain([DEAD_LETTERED_BY_BROKER, NO_REASON])
}

/// A message in a dead-letter or in-doubt destination.
#[derive(Clone, Debug)]
pub(crate) struct DeadLetter {
    pub(crate) place: MessageLocation,
    pub(crate) state: DeadLetterState,
    /// Names and values, in order; values as text. `oncegate-*` headers only where oncegate wrote
    /// them.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) key: Option<Vec<u8>>,
    /// `None` for a tombstone.
    pub(crate) body: Option<Vec<u8>>,
    /// The earlier of its timestamp and an inbound `oncegate-first-seen`.
    pub(crate) sent_ms: Option<u64>,
    pub(crate) dead_lettered_ms: Option<u64>,
    /// The topic or queue it was consumed from, if not the configured one.
    pub(crate) other_source: Option<String>,
    /// What a copy of it would be missing, as text.
    pub(crate) missing_parts: Option<String>,
    /// RabbitMQ: the unacknowledged delivery and its properties.
    #[cfg(feature = "rabbitmq")]
    pub(crate) delivery: Option<Box<rabbitmq::UnackedDelivery>>,
    /// Kafka: the headers as raw bytes.
    pub(crate) raw_headers: Vec<(String, Option<Vec<u8>>)>,
    /// The id that `gate.id` reads, where no header names one.
    pub(crate) read_id: Option<String>,
    /// The delivery count, on queues that count and may have a limit.
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

    pub(crate) fn id(&self) -> Option<&str> {
        self.header(headers::ID).or(self.read_id.as_deref())
    }

    /// The number of the last attempt of its id, as written when it was dead-lettered; 0 if
    /// unknown.
    pub(crate) fn fence(&self) -> u32 {
        self.header(headers::FENCE)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.body.as_deref().unwrap_or_default()
    }

    /// Why it was dead-lettered. Messages that the broker dead-lettered have no reason header.
    pub(crate) fn reason(&self) -> &str {
        self.header(headers::REASON)
            .unwrap_or(if self.header("x-death").is_some() {
                DEAD_LETTERED_BY_BROKER
            } else {
                NO_REASON
            })
    }

    /// When it was sent: the earliest known time, at most the time it was dead-lettered.
    pub(crate) fn first_seen_ms(&self) -> Option<u64> {
        let sent = self
            .header(headers::FIRST_SEEN)
            .and_then(|text| text.parse().ok())
            .into_iter()
            .chain(self.sent_ms)
            .min();
        sent.map(|at| {
            self.dead_lettered_ms
                .map_or(at, |dead_lettered| at.min(dead_lettered))
        })
    }

    /// Removes the `oncegate-*` headers of a message that oncegate did not dead-letter: its
    /// producer wrote them.
    pub(crate) fn remove_reserved_headers(&mut self) {
        self.headers
            .retain(|(name, _)| !is_reserved(name.as_bytes()));
    }

    /// When it was sent, or if unknown, when it was dead-lettered.
    pub(crate) fn age_from_ms(&self) -> Option<u64> {
        self.first_seen_ms().or(self.dead_lettered_ms)
    }

    /// The entry of a list.
    pub(crate) fn summary(&self) -> DeadLetterSummary<'_> {
        DeadLetterSummary {
            broker: &self.place.broker,
            name: &self.place.name,
            partition: self.place.partition,
            offset: self.place.offset,
            id: self.id(),
            reason: self.reason(),
            attempts: self
                .header(headers::ATTEMPTS)
                .and_then(|text| text.parse().ok()),
            fence: self
                .header(headers::FENCE)
                .and_then(|text| text.parse().ok()),
            first_error: self.header(headers::FIRST_ERROR),
            last_error: self.header(headers::LAST_ERROR),
            origin: self.header(headers::ORIGIN),
            from: self.age_from_ms().map(utc_text),
            from_ms: self.age_from_ms(),
            dead_lettered_ms: self.dead_lettered_ms,
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
    pub(crate) reason: &'a str,
    /// Runs that count towards the attempt budget.
    pub(crate) attempts: Option<u32>,
    /// The fencing token: the number of the last attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fence: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) origin: Option<&'a str>,
    /// When it was sent, or if unknown, when it was dead-lettered.
    pub(crate) from: Option<String>,
    from_ms: Option<u64>,
    #[serde(rename = "set_aside_ms")]
    dead_lettered_ms: Option<u64>,
    pub(crate) state: DeadLetterState,
    #[serde(rename = "looks", skip_serializing_if = "Option::is_none")]
    delivery_count: Option<u64>,
    bytes: usize,
}

/// Whether a copy of a message omits this header: `oncegate-*` headers and those that record
/// earlier deliveries, which would make the copy too old or exhausted before it is handled.
pub(crate) fn is_dropped_from_copies(header: &str) -> bool {
    // The original key stays the key of the copy.
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

/// The states of messages, from the audit. Kafka keeps handled messages, so only the audit knows
/// their state. RabbitMQ removes them, so the audit adds only interrupted actions.
pub(crate) struct AuditedStates(HashMap<DeadLetterIdentity, DeadLetterState>);

/// Identifies a message: its position on Kafka, its id and time on RabbitMQ.
#[derive(PartialEq, Eq, Hash)]
struct DeadLetterIdentity {
    place: MessageLocation,
    id: Option<String>,
}

impl DeadLetterIdentity {
    fn of(place: &MessageLocation, id: Option<&str>) -> Option<Self> {
        let has_position = place.partition.is_some() && place.offset.is_some();
        let id = id.filter(|_| !has_position).map(str::to_owned);
        (has_position || id.is_some()).then(|| Self {
            place: place.clone(),
            id,
        })
    }
}

impl AuditedStates {
    pub(crate) fn of(actions: &[AuditEntry]) -> Self {
        let mut done = HashMap::new();
        for action in actions {
            let Some(identity) = action
                .place
                .as_ref()
                .and_then(|place| DeadLetterIdentity::of(place, action.id.as_deref()))
            else {
                continue;
            };
            let is_kept = identity.id.is_none();
            let state = match (action.what.as_str(), action.stage) {
                // RabbitMQ removes completed messages, so a message that is present was
                // interrupted.
                (
                    "dead-letters redrive" | "in-doubt resolve",
                    ActionStage::Begun | ActionStage::Done,
                ) if !is_kept && action.action() == AuditedAction::SentBack => {
                    DeadLetterState::Begun
                }
                ("dead-letters redrive" | "in-doubt resolve", ActionStage::Begun)
                    if action.action() == AuditedAction::SentBack =>
                {
                    DeadLetterState::Begun
                }
                ("dead-letters redrive", ActionStage::Done) if is_kept => DeadLetterState::Redriven,
                ("dead-letters drop", ActionStage::Done) if is_kept => DeadLetterState::Dropped,
                ("in-doubt resolve", ActionStage::Done) if is_kept => DeadLetterState::Resolved,
                _ => continue,
            };
            done.insert(identity, state);
        }
        Self(done)
    }

    fn state(&self, message: &DeadLetter) -> DeadLetterState {
        DeadLetterIdentity::of(&message.place, message.id())
            .and_then(|identity| self.0.get(&identity))
            .copied()
            .unwrap_or(DeadLetterState::Waiting)
    }
}

/// The age that a copy declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyAge {
    /// The copy counts as a new message.
    New,
    /// First seen at this time, in milliseconds since 1970: at most once treats it as in doubt and
    /// reconciles instead of running it.
    FirstSeen(u64),
}

impl CopyAge {
    /// The value of its `oncegate-first-seen` header.
    pub(crate) fn first_seen_header(self) -> Option<String> {
        match self {
            Self::New => None,
            Self::FirstSeen(ms) => Some(ms.to_string()),
        }
    }
}

/// Why a copy was not confirmed.
#[derive(Debug)]
pub(crate) enum PublishError {
    /// The broker rejected it: no copy exists.
    Refused(CliError),
    /// No confirmation arrived: a copy may exist.
    Unconfirmed(CliError),
}

impl From<PublishError> for CliError {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Refused(failure) | PublishError::Unconfirmed(failure) => failure,
        }
    }
}

/// Reads all messages of one destination, up to the end at the time it was opened.
pub(crate) enum DestinationReader {
    #[cfg(feature = "kafka")]
    Kafka(kafka::TopicReader),
    #[cfg(feature = "rabbitmq")]
    Rabbitmq(Box<rabbitmq::QueueReader>),
    /// For builds without a broker.
    #[allow(dead_code)]
    None(Infallible),
}

impl DestinationReader {
    pub(crate) async fn open(
        context: &CliContext,
        broker: Broker,
        destination: Destination,
        done: AuditedStates,
        count_policy: DeliveryCountPolicy,
    ) -> Result<Self, CliError> {
        Ok(match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => {
                Self::Kafka(kafka::TopicReader::open(context, destination, done).await?)
            }
            #[cfg(feature = "rabbitmq")]
            Broker::Rabbitmq => Self::Rabbitmq(Box::new(
                rabbitmq::QueueReader::open(context, destination, done, count_policy).await?,
            )),
            #[allow(unreachable_patterns)]
            broker => return Err(broker.feature_missing()),
        })
    }

    /// The number of messages when it was opened; an upper bound where the log has gaps.
    pub(crate) fn total(&self) -> u64 {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.total,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.total,
            Self::None(never) => match *never {},
        }
    }

    /// The next message, or `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<DeadLetter>, CliError> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.next().await,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.next().await,
            Self::None(never) => match *never {},
        }
    }

    /// The topic or queue that messages are redriven to.
    pub(crate) fn target(&self) -> &str {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => &reader.target,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => &reader.target,
            Self::None(never) => match *never {},
        }
    }

    /// Publishes a copy to the source. `Ok` means that the broker confirmed it.
    pub(crate) async fn publish(
        &mut self,
        message: &DeadLetter,
        age: CopyAge,
    ) -> Result<(), PublishError> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.publish(message, age).await,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.publish(message, age).await,
            Self::None(never) => match *never {},
        }
    }

    /// Removes a message from its queue. On Kafka messages stay, and the audit records their state.
    pub(crate) async fn take_out(&self, message: &DeadLetter) -> Result<(), CliError> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => Ok(()),
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.take_out(message).await,
            Self::None(never) => match *never {},
        }
    }

    /// Returns unacknowledged messages and closes the connection.
    pub(crate) async fn close(self) {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => {}
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.close().await,
            Self::None(never) => match never {},
        }
    }
}
