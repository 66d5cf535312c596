//! What stands in dead-letter and in-doubt destinations, on Kafka and on RabbitMQ alike.

pub(crate) mod act;
pub(crate) mod filter;
pub(crate) mod judge;
#[cfg(feature = "kafka")]
pub(crate) mod kafka;
pub(crate) mod look;
#[cfg(feature = "rabbitmq")]
pub(crate) mod rabbitmq;

use std::collections::HashMap;
use std::convert::Infallible;

use oncegate::lifecycle::Reason;
use oncegate::source::{headers, is_reserved};
use serde::Serialize;

use crate::Context;
use crate::audit::{Deed, Entry, Place, Stage};
use crate::failure::Failure;
use crate::say::{NotLookedAt, utc};

/// The routing key that a message had before it was copied.
const ROUTING_KEY: &str = "oncegate-routing-key";

/// From which delivery count on a letter of RabbitMQ is replaced by a copy. A policy with a lower
/// limit drops letters before the tool can know.
const COUNTED_OFTEN: u64 = 5;

/// Whether queues are looked into of RabbitMQ that count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counts {
    Refused,
    Accepted,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shelf {
    DeadLetters,
    InDoubt,
}

impl Shelf {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::DeadLetters => "dead-letter",
            Self::InDoubt => "in-doubt",
        }
    }
}

/// Where messages are consumed and set aside.
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

    /// It is no part of this build.
    pub(crate) fn left_out(self) -> Failure {
        match self {
            Self::Kafka => Failure::left_out("Kafka", "kafka"),
            Self::Rabbitmq => Failure::left_out("RabbitMQ", "rabbitmq"),
        }
    }

    /// Whether anything is said of one.
    pub(crate) fn is_any(context: &Context) -> bool {
        context.config.set().any(|set| {
            ["kafka.", "rabbitmq."]
                .iter()
                .any(|section| set.setting.key.starts_with(section))
        })
    }

    /// What has to be set for it.
    fn keys(self) -> [&'static str; 2] {
        match self {
            Self::Kafka => ["kafka.brokers", "kafka.topic"],
            Self::Rabbitmq => ["rabbitmq.url", "rabbitmq.queue"],
        }
    }

    /// Those that are configured, or the one that was chosen.
    pub(crate) fn configured(
        context: &Context,
        chosen: Option<Self>,
    ) -> Result<Vec<Self>, Failure> {
        let is_whole = |broker: &Self| broker.keys().iter().all(|key| context.config.has(key));
        let found: Vec<Self> = [Self::Kafka, Self::Rabbitmq]
            .into_iter()
            .filter(is_whole)
            .filter(|it| chosen.is_none_or(|c| c == *it))
            .collect();
        if found.is_empty() {
            return Err(Failure::usage(
                "no broker: set kafka.brokers and kafka.topic, or rabbitmq.url and rabbitmq.queue",
            ));
        }
        Ok(found)
    }

    /// The same, and notes a broker of which a part alone is configured, so that nobody can ask it.
    pub(crate) fn wanted(
        context: &Context,
        chosen: Option<Self>,
        not_looked_at: &mut NotLookedAt,
    ) -> Result<Vec<Self>, Failure> {
        let found = Self::configured(context, chosen)?;
        if chosen.is_none() {
            let _ = Self::note_incomplete(context, not_looked_at);
        }
        Ok(found)
    }

    /// Notes each broker of which a part alone is configured, and says whether there was one.
    pub(crate) fn note_incomplete(context: &Context, not_looked_at: &mut NotLookedAt) -> bool {
        let mut any = false;
        for broker in [Self::Kafka, Self::Rabbitmq] {
            let section = format!("{}.", broker.name());
            let is_named = context
                .config
                .set()
                .any(|set| set.setting.key.starts_with(&section));
            let missing = broker
                .keys()
                .into_iter()
                .find(|key| !context.config.has(key));
            if let (true, Some(missing)) = (is_named, missing) {
                let says = format!(
                    "{missing} is missing; set it, or leave [{}] out",
                    broker.name()
                );
                not_looked_at.note(broker.name(), Failure::usage(says));
                any = true;
            }
        }
        any
    }
}

/// What has become of a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// Nobody has done anything about it.
    Waiting,
    /// An act on it was begun, and its end is not known: a copy may have been sent.
    Begun,
    Redriven,
    Dropped,
    Resolved,
}

impl State {
    /// Whether something is still to be done about it.
    pub(crate) fn waits(self) -> bool {
        matches!(self, Self::Waiting | Self::Begun)
    }
}

/// The reason of what the broker itself dead-lettered.
const SET_ASIDE_BY_THE_BROKER: &str = "set-aside-by-the-broker";

/// The reason of what says none.
const NO_REASON: &str = "unknown";

/// Every reason that a letter may have.
pub(crate) fn reasons() -> impl Iterator<Item = &'static str> {
    Reason::ALL
        .into_iter()
        .map(|reason| reason.as_str())
        .chain([SET_ASIDE_BY_THE_BROKER, NO_REASON])
}

/// One message that was set aside.
#[derive(Clone, Debug)]
pub(crate) struct Letter {
    pub(crate) place: Place,
    pub(crate) state: State,
    /// Name and value, in their order; values as text. Headers `oncegate-*` only where oncegate
    /// wrote them.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) key: Option<Vec<u8>>,
    /// `None` of a tombstone.
    pub(crate) body: Option<Vec<u8>>,
    /// By its own timestamp, or by an inbound `oncegate-first-seen` that is earlier.
    pub(crate) sent_ms: Option<u64>,
    pub(crate) set_aside_ms: Option<u64>,
    /// The topic or queue where it was consumed, if it is another than the one that is configured.
    pub(crate) elsewhere: Option<String>,
    /// What a copy of it would lack, in words.
    pub(crate) lacks: Option<String>,
    /// Of RabbitMQ: the delivery, and what a copy of it has to bear.
    #[cfg(feature = "rabbitmq")]
    pub(crate) delivery: Option<Box<rabbitmq::Held>>,
    /// Of Kafka: headers as they are on the wire.
    pub(crate) raw_headers: Vec<(String, Option<Vec<u8>>)>,
    /// Where no header says: as the configured `gate.id` reads it.
    pub(crate) read_id: Option<String>,
    /// How often it was looked at before, where the queue counts that and may have a limit.
    pub(crate) looks: Option<u64>,
}

impl Letter {
    /// The last header of a name.
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

    /// The number of the last attempt of its id, as oncegate wrote it when it was dead-lettered; 0
    /// if it does not say.
    pub(crate) fn fence(&self) -> u32 {
        self.header(headers::FENCE)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.body.as_deref().unwrap_or_default()
    }

    /// Why it was set aside; what the broker itself set aside has no header of ours.
    pub(crate) fn reason(&self) -> &str {
        self.header(headers::REASON)
            .unwrap_or(if self.header("x-death").is_some() {
                SET_ASIDE_BY_THE_BROKER
            } else {
                NO_REASON
            })
    }

    /// When it was sent: the earliest time that it says, and never later than it was set aside.
    pub(crate) fn first_seen_ms(&self) -> Option<u64> {
        let said = self
            .header(headers::FIRST_SEEN)
            .and_then(|text| text.parse().ok())
            .into_iter()
            .chain(self.sent_ms)
            .min();
        said.map(|at| self.set_aside_ms.map_or(at, |set_aside| at.min(set_aside)))
    }

    /// Removes the headers `oncegate-*` of a message that oncegate did not dead-letter: its
    /// producer wrote them.
    pub(crate) fn remove_reserved_headers(&mut self) {
        self.headers
            .retain(|(name, _)| !is_reserved(name.as_bytes()));
    }

    /// When it was sent, and where that is not known, when it was set aside.
    pub(crate) fn age_from_ms(&self) -> Option<u64> {
        self.first_seen_ms().or(self.set_aside_ms)
    }

    /// A row of the list.
    pub(crate) fn view(&self) -> View<'_> {
        View {
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
            from: self.age_from_ms().map(utc),
            from_ms: self.age_from_ms(),
            set_aside_ms: self.set_aside_ms,
            state: self.state,
            looks: self.looks,
            bytes: self.bytes().len(),
        }
    }
}

/// What machines are told of a letter; never its body.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct View<'a> {
    pub(crate) broker: &'a str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<i64>,
    pub(crate) id: Option<&'a str>,
    pub(crate) reason: &'a str,
    /// How many times it was run, by the count that the budget of attempts goes by.
    pub(crate) attempts: Option<u32>,
    /// The number of the last attempt that was granted: the fencing token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fence: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) last_error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) origin: Option<&'a str>,
    /// When the message was sent, as far as it is known, else when it was set aside.
    pub(crate) from: Option<String>,
    from_ms: Option<u64>,
    set_aside_ms: Option<u64>,
    pub(crate) state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    looks: Option<u64>,
    bytes: usize,
}

/// Headers that are oncegate's, or tell of earlier deliveries: a message that begins anew has none
/// of them, or it would be too old, or have failed too often, before it is handled.
pub(crate) fn begins_without(header: &str) -> bool {
    // The key that a message had before it was set aside is still its key.
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

/// What was done about letters, by the audit. On Kafka, where they stay, it alone knows. On
/// RabbitMQ what was dealt with is gone, and the audit knows of what was cut off before that.
pub(crate) struct Done(HashMap<Spot, State>);

/// What tells one letter from another. On RabbitMQ it is the id, and when it was set aside.
#[derive(PartialEq, Eq, Hash)]
struct Spot {
    place: Place,
    id: Option<String>,
}

impl Spot {
    fn of(place: &Place, id: Option<&str>) -> Option<Self> {
        let has_a_place = place.partition.is_some() && place.offset.is_some();
        let id = id.filter(|_| !has_a_place).map(str::to_owned);
        (has_a_place || id.is_some()).then(|| Self {
            place: place.clone(),
            id,
        })
    }
}

impl Done {
    pub(crate) fn of(acts: &[Entry]) -> Self {
        let mut done = HashMap::new();
        for act in acts {
            let Some(spot) = act
                .place
                .as_ref()
                .and_then(|place| Spot::of(place, act.id.as_deref()))
            else {
                continue;
            };
            let stays = spot.id.is_none();
            let state = match (act.what.as_str(), act.stage) {
                // Whatever is taken out is not there any more: one that is, was cut off in between.
                ("dead-letters redrive" | "in-doubt resolve", Stage::Begun | Stage::Done)
                    if !stays && act.deed() == Deed::SentBack =>
                {
                    State::Begun
                }
                ("dead-letters redrive" | "in-doubt resolve", Stage::Begun)
                    if act.deed() == Deed::SentBack =>
                {
                    State::Begun
                }
                ("dead-letters redrive", Stage::Done) if stays => State::Redriven,
                ("dead-letters drop", Stage::Done) if stays => State::Dropped,
                ("in-doubt resolve", Stage::Done) if stays => State::Resolved,
                _ => continue,
            };
            done.insert(spot, state);
        }
        Self(done)
    }

    fn state(&self, letter: &Letter) -> State {
        Spot::of(&letter.place, letter.id())
            .and_then(|spot| self.0.get(&spot))
            .copied()
            .unwrap_or(State::Waiting)
    }
}

/// How old a copy says that it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begins {
    /// Not at all: it begins anew.
    Afresh,
    /// As old as its message, in milliseconds since 1970: at most once doubts it, and reconciles,
    /// instead of running it.
    Aged(u64),
}

impl Begins {
    /// The header of the copy.
    pub(crate) fn first_seen(self) -> Option<String> {
        match self {
            Self::Afresh => None,
            Self::Aged(ms) => Some(ms.to_string()),
        }
    }
}

/// A copy that was not confirmed.
#[derive(Debug)]
pub(crate) enum Unsent {
    /// The broker refused it: it does not stand.
    Refused(Failure),
    /// Nobody knows.
    Unknown(Failure),
}

impl From<Unsent> for Failure {
    fn from(unsent: Unsent) -> Self {
        match unsent {
            Unsent::Refused(failure) | Unsent::Unknown(failure) => failure,
        }
    }
}

/// Goes through all letters of one destination, as many as there were when it began.
pub(crate) enum Reader {
    #[cfg(feature = "kafka")]
    Kafka(kafka::Reader),
    #[cfg(feature = "rabbitmq")]
    Rabbitmq(Box<rabbitmq::Reader>),
    /// In a build without a broker.
    #[allow(dead_code)]
    None(Infallible),
}

impl Reader {
    pub(crate) async fn open(
        context: &Context,
        broker: Broker,
        shelf: Shelf,
        done: Done,
        counts: Counts,
    ) -> Result<Self, Failure> {
        Ok(match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => Self::Kafka(kafka::Reader::open(context, shelf, done).await?),
            #[cfg(feature = "rabbitmq")]
            Broker::Rabbitmq => Self::Rabbitmq(Box::new(
                rabbitmq::Reader::open(context, shelf, done, counts).await?,
            )),
            #[allow(unreachable_patterns)]
            broker => return Err(broker.left_out()),
        })
    }

    /// How many there were when it began; more than there are where a log has gaps.
    pub(crate) fn total(&self) -> u64 {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.total,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.total,
            Self::None(never) => match *never {},
        }
    }

    /// The next, or `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Letter>, Failure> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.next().await,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.next().await,
            Self::None(never) => match *never {},
        }
    }

    /// Where messages of this destination are consumed.
    pub(crate) fn target(&self) -> &str {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => &reader.target,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => &reader.target,
            Self::None(never) => match *never {},
        }
    }

    /// Publishes a copy where it is consumed; when this returns `Ok`, the broker has confirmed it.
    pub(crate) async fn publish(&mut self, letter: &Letter, begins: Begins) -> Result<(), Unsent> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(reader) => reader.publish(letter, begins).await,
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.publish(letter, begins).await,
            Self::None(never) => match *never {},
        }
    }

    /// Takes a letter out, where that can be done: on Kafka the audit has said already what became
    /// of it.
    pub(crate) async fn take_out(&self, letter: &Letter) -> Result<(), Failure> {
        match self {
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => Ok(()),
            #[cfg(feature = "rabbitmq")]
            Self::Rabbitmq(reader) => reader.take_out(letter).await,
            Self::None(never) => match *never {},
        }
    }

    /// Gives back what it holds.
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
