//! Letters on RabbitMQ: taken, held unacknowledged while they are looked at, and given back.
//!
//! There is no other way to look into a queue. A classic queue gives a message back as it was, but for the flag `redelivered`.
//! A quorum queue counts each return (measured on 3.10: `basic.nack`, `basic.reject`, `basic.recover`, the end of the channel
//! and of the connection, and cancelling all add one to `x-delivery-count`), and drops or dead-letters what goes over its
//! delivery limit. The queues that oncegate declares have a limit that nobody reaches; others are not looked into unless that
//! is accepted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ErrorKind};
use oncegate::IdSource;
use oncegate::source::headers;

use super::{Begins, Broker, Done, Letter, Shelf, State, Unsent, begins_without};
use crate::Context;
use crate::audit::Place;
use crate::config::Config;
use crate::failure::Failure;
use crate::say::now_ms;

/// The routing key that a message had before it was copied.
pub(crate) const ROUTING_KEY: &str = "oncegate-routing-key";

/// When a message was set aside, in milliseconds since 1970.
const SET_ASIDE_AT: &str = "oncegate-set-aside-at";

/// Headers that were too large for the copy that was set aside.
const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// So many times a message may have been given back until nobody looks at it without a word: a policy with a limit below that
/// drops letters before the tool can tell. RabbitMQ's own limit is 20.
const MANY_LOOKS: u64 = 5;

/// How long connecting, and one answer, may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long is waited for what was held: somebody else may have taken it.
const COMES_BACK: Duration = Duration::from_secs(2);

/// The delivery limit of the queues that oncegate declares for people to read.
const OUT_OF_REACH: i32 = i32::MAX;

/// Whether queues are looked into that count it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counts {
    Refused,
    Accepted,
}

/// A delivery that is held.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    tag: u64,
    properties: BasicProperties,
}

/// Why AMQP said no: its reply code.
pub(crate) fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// A connection as it is configured.
pub(crate) async fn connect(config: &Config) -> Result<Connection, Failure> {
    let url = config.text("rabbitmq.url").ok_or_else(|| Failure::usage("no RabbitMQ: set rabbitmq.url, or ONCEGATE_RABBITMQ_URL"))?;
    let shown = crate::show_config::without_password(url);
    let properties = ConnectionProperties::default().with_connection_name("oncegate-cli".into());
    let connecting = Connection::connect_with_config(url, properties, tls(config)?, lapin::runtime::default_runtime()?);
    match tokio::time::timeout(PATIENCE, connecting).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => {
            let said = error.to_string();
            let is_of_tls = said.contains("ertificate");
            let hint =
                if is_of_tls { "; rabbitmq.ca-certificate names whom to trust, rabbitmq.client-certificate what to show" } else { "" };
            Err(Failure::server(format!("RabbitMQ at {shown}: {said}{hint}")))
        }
        Err(_) => Err(Failure::server(format!("RabbitMQ at {shown} does not answer within {PATIENCE:?}"))),
    }
}

/// What is trusted over TLS, and what is shown of oneself.
fn tls(config: &Config) -> Result<OwnedTLSConfig, Failure> {
    let read = |key: &str| {
        let read = |path: &str| std::fs::read_to_string(path).map_err(|error| Failure::usage(format!("{key}: {path}: {error}")));
        config.text(key).map(read).transpose()
    };
    let identity = match (read("rabbitmq.client-certificate")?, read("rabbitmq.client-key")?) {
        (Some(certificate), Some(key)) => Some(OwnedIdentity::PKCS8 { pem: certificate.into_bytes(), key: key.into_bytes() }),
        _ => None,
    };
    Ok(OwnedTLSConfig { identity, cert_chain: read("rabbitmq.ca-certificate")? })
}

/// The queue that is consumed.
pub(crate) fn queue(config: &Config) -> Result<String, Failure> {
    let queue = config.text("rabbitmq.queue").map(str::to_owned);
    queue.ok_or_else(|| Failure::usage("no queue: set rabbitmq.queue, or ONCEGATE_RABBITMQ_QUEUE"))
}

pub(crate) fn destination(config: &Config, shelf: Shelf) -> Result<String, Failure> {
    let queue = queue(config)?;
    let (named, suffix) = match shelf {
        Shelf::DeadLetters => (config.text("rabbitmq.dead-letters"), "dead-letters"),
        Shelf::InDoubt => (config.text("rabbitmq.in-doubt"), "in-doubt"),
    };
    Ok(named.map_or_else(|| format!("{queue}.{suffix}"), str::to_owned))
}

/// What a queue is, as far as a client can find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Missing,
    /// A durable classic queue without arguments: looking changes nothing.
    Classic,
    /// A quorum queue as oncegate declares it for people: looking counts, towards a limit out of reach.
    Unlimited,
    /// Anything else: it may drop what was looked at too often, or lose messages by itself.
    Other,
}

pub(crate) async fn passively(channel: &Channel, queue: &str) -> lapin::Result<u32> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    Ok(channel.queue_declare(queue.into(), options, FieldTable::default()).await?.message_count())
}

/// Finds out by declaring it as it should be: a queue that has other arguments is left as it is, and refuses.
pub(crate) async fn kind(connection: &Connection, queue: &str) -> Result<Kind, Failure> {
    match passively(&connection.create_channel().await?, queue).await {
        Ok(_) => {}
        Err(error) if reply_code(&error) == Some(404) => return Ok(Kind::Missing),
        // An exclusive queue of somebody else's, or no right to look.
        Err(error) => return Err(Failure::server(format!("RabbitMQ: the queue `{queue}`: {error}"))),
    }
    let mut unlimited = FieldTable::default();
    unlimited.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    unlimited.insert("x-delivery-limit".into(), AMQPValue::LongInt(OUT_OF_REACH));
    let mut classic = FieldTable::default();
    classic.insert("x-queue-type".into(), AMQPValue::LongString("classic".into()));
    for (arguments, kind) in [(unlimited, Kind::Unlimited), (classic, Kind::Classic), (FieldTable::default(), Kind::Classic)] {
        let channel = connection.create_channel().await?;
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        match channel.queue_declare(queue.into(), options, arguments).await {
            Ok(_) => {
                channel.close(200, "OK".into()).await?;
                return Ok(kind);
            }
            Err(error) if matches!(reply_code(&error), Some(403 | 405 | 406)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Kind::Other)
}

/// Goes through one queue.
pub(crate) struct Reader {
    pub(crate) total: u64,
    pub(crate) target: String,
    name: String,
    connection: Connection,
    holding: Channel,
    publishing: Option<Channel>,
    taken: u64,
    acknowledged: AtomicU64,
    ids: Option<IdSource>,
    done: Done,
    counts: Counts,
    kind: Kind,
}

impl Reader {
    pub(crate) async fn open(context: &Context, shelf: Shelf, done: Done, counts: Counts) -> Result<Self, Failure> {
        let config = &context.config;
        let (name, target) = (destination(config, shelf)?, queue(config)?);
        let connection = connect(config).await?;
        let kind = kind(&connection, &name).await?;
        match (kind, counts) {
            (Kind::Missing, _) => return Err(Failure::server(format!("RabbitMQ: the queue `{name}` does not exist"))),
            (Kind::Other, Counts::Refused) => {
                return Err(Failure::server(format!(
                    "RabbitMQ: the queue `{name}` has other arguments than oncegate gives such queues. A quorum queue counts each look at \
                     its messages, and drops them at its delivery limit; if that is far, say --accept-delivery-counts"
                )));
            }
            _ => {}
        }
        let holding = connection.create_channel().await?;
        let total = u64::from(passively(&holding, &name).await?);
        Ok(Self {
            total,
            target,
            name,
            connection,
            holding,
            publishing: None,
            taken: 0,
            acknowledged: AtomicU64::new(0),
            ids: config.id_source()?,
            done,
            counts,
            kind,
        })
    }

    /// Each message once: what comes in meanwhile, redriven messages that fail again among it, is left.
    pub(crate) async fn next(&mut self) -> Result<Option<Letter>, Failure> {
        if self.taken >= self.total {
            return Ok(None);
        }
        let Some(message) = self.holding.basic_get(self.name.as_str().into(), BasicGetOptions::default()).await? else { return Ok(None) };
        self.taken += 1;
        let delivery = message.delivery;
        let table = delivery.properties.headers().clone().unwrap_or_default();
        let headers: Vec<(String, String)> = table.inner().iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        let looks = looks(&table, self.kind);
        self.far_from_a_limit(looks)?;
        let death = Death::of(&table);
        let set_aside = headers.iter().find(|(name, _)| name == SET_ASIDE_AT).and_then(|(_, at)| at.parse().ok());
        let set_aside_ms = set_aside.or(death.as_ref().and_then(|death| death.at_ms));
        let origin =
            headers.iter().find(|(name, _)| name == headers::ORIGIN).map(|(_, name)| name.clone()).or(death.and_then(|it| it.queue));
        let dropped = headers.iter().find(|(name, _)| name == DROPPED_HEADERS).map(|(_, names)| names.clone());
        let key =
            headers.iter().find(|(name, _)| name == ROUTING_KEY).map_or_else(|| delivery.routing_key.to_string(), |(_, key)| key.clone());
        let mut letter = Letter {
            place: Place {
                broker: Broker::Rabbitmq.name().to_owned(),
                name: self.name.clone(),
                written_ms: set_aside_ms,
                ..Place::default()
            },
            state: State::Waiting,
            headers,
            key: Some(key.into_bytes()),
            body: Some(delivery.data),
            sent_ms: delivery.properties.timestamp().map(|seconds| seconds.saturating_mul(1_000)),
            set_aside_ms,
            elsewhere: origin.filter(|name| *name != self.target),
            lacks: dropped.map(|names| format!("headers of it ({names}) were too large to be set aside")),
            delivery: Some(Box::new(Held { tag: delivery.delivery_tag, properties: delivery.properties })),
            raw_headers: Vec::new(),
            read_id: None,
            looks,
        };
        letter.read_id = self.ids.as_ref().and_then(|ids| ids.read(&as_message(&letter))).map(|id| id.to_string());
        letter.state = self.done.state(&letter);
        Ok(Some(letter))
    }

    /// Looking counts, and a policy may set a limit that nobody is told of.
    fn far_from_a_limit(&self, looks: Option<u64>) -> Result<(), Failure> {
        let count = looks.unwrap_or(0);
        if self.counts == Counts::Accepted || count < MANY_LOOKS {
            return Ok(());
        }
        Err(Failure::server(format!(
            "RabbitMQ: a message in `{}` was given back {count} times. A policy may set a limit beyond which it is dropped, which no client is \
             told: see `rabbitmqctl list_policies`. If none gives this queue a delivery-limit, say --accept-delivery-counts, or once and for all rabbitmq.delivery-counts = \
             \"accepted\"",
            self.name
        )))
    }

    /// A channel for copies, with confirmation.
    async fn publishing(&mut self) -> Result<Channel, Failure> {
        if let Some(channel) = &self.publishing {
            return Ok(channel.clone());
        }
        let channel = self.connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(self.publishing.insert(channel).clone())
    }

    pub(crate) async fn publish(&mut self, letter: &Letter, begins: Begins) -> Result<(), Unsent> {
        let channel = self.publishing().await.map_err(Unsent::Refused)?;
        let Some(held) = &letter.delivery else { return Err(Unsent::Refused(Failure::server("RabbitMQ: not a delivery"))) };
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let published =
            channel.basic_publish("".into(), self.target.as_str().into(), options, letter.bytes(), anew(&held.properties, begins));
        let confirmed = tokio::time::timeout(PATIENCE, async { published.await?.await }).await;
        let target = &self.target;
        match confirmed {
            // What was returned is confirmed too.
            Ok(Ok(answer)) => match answer.is_ack() && answer.take_message().is_none() {
                true => Ok(()),
                false => {
                    let says = format!("RabbitMQ: the queue `{target}` is not there, or is full: the copy was not taken");
                    Err(Unsent::Refused(Failure::server(says)))
                }
            },
            Ok(Err(error)) => {
                Err(Unsent::Unknown(Failure::server(format!("RabbitMQ: the copy for `{target}` was not confirmed: {error}"))))
            }
            Err(_) => {
                Err(Unsent::Unknown(Failure::server(format!("RabbitMQ: the copy for `{target}` was not confirmed within {PATIENCE:?}"))))
            }
        }
    }

    pub(crate) async fn take_out(&self, letter: &Letter) -> Result<(), Failure> {
        let Some(held) = &letter.delivery else { return Err(Failure::server("RabbitMQ: not a delivery")) };
        self.holding.basic_ack(held.tag, BasicAckOptions::default()).await?;
        if self.holding.status().connected() {
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
            Ok(())
        } else {
            Err(Failure::server("RabbitMQ: the channel ended before the letter was taken out; it may still be there"))
        }
    }

    /// An acknowledgement has no answer: closing the channel in good order has, and comes after it. What was held comes back a
    /// moment later, which is waited for, so that who looks next sees it.
    pub(crate) async fn close(self) {
        let _ = tokio::time::timeout(PATIENCE, self.holding.close(200, "OK".into())).await;
        let held = self.taken - self.acknowledged.load(Ordering::Relaxed);
        let _ = tokio::time::timeout(COMES_BACK, self.until_there_are(held)).await;
        let _ = tokio::time::timeout(PATIENCE, self.connection.close(200, "OK".into())).await;
    }

    async fn until_there_are(&self, held: u64) -> lapin::Result<()> {
        let channel = self.connection.create_channel().await?;
        while u64::from(passively(&channel, &self.name).await?) < held {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

/// The properties of a copy that begins anew: persistent, and all of the letter but what would end it early, and what tells
/// of earlier deliveries.
fn anew(original: &BasicProperties, begins: Begins) -> BasicProperties {
    let mut kept = BasicProperties::default().with_delivery_mode(2);
    macro_rules! keep {
        ($($get:ident $set:ident),*) => { $(if let Some(value) = original.$get() { kept = kept.$set(value.clone()); })* };
    }
    keep!(content_type with_content_type, content_encoding with_content_encoding, priority with_priority);
    keep!(correlation_id with_correlation_id, reply_to with_reply_to, message_id with_message_id);
    keep!(kind with_type, app_id with_app_id, cluster_id with_cluster_id);
    if original.timestamp().is_some() {
        // Else it may be too old to be taken for new, before it is handled.
        kept = kept.with_timestamp(now_ms() / 1_000);
    }
    let mut table = FieldTable::default();
    for (name, value) in original.headers().as_ref().into_iter().flat_map(|table| table.inner()) {
        if !begins_without(name.as_str()) {
            table.insert(name.clone(), value.clone());
        }
    }
    if let Some(first_seen) = begins.first_seen() {
        table.insert(headers::FIRST_SEEN.into(), AMQPValue::LongString(first_seen.into()));
    }
    kept.with_headers(table)
}

/// What the broker itself wrote when it set a message aside.
struct Death {
    /// The queue that it lay in.
    queue: Option<String>,
    at_ms: Option<u64>,
}

impl Death {
    /// The last one: the broker writes it first.
    fn of(table: &FieldTable) -> Option<Self> {
        let last = table.inner().get("x-death")?.as_array()?.as_slice().first()?.as_field_table()?;
        let queue = last.inner().get("queue").map(text);
        let at_ms = match last.inner().get("time") {
            Some(AMQPValue::Timestamp(seconds)) => Some(seconds.saturating_mul(1_000)),
            _ => None,
        };
        Some(Self { queue, at_ms })
    }
}

/// How often a message was given back, where its queue counts that.
fn looks(table: &FieldTable, kind: Kind) -> Option<u64> {
    let counted = table.inner().get("x-delivery-count").and_then(AMQPValue::as_long_long_int).and_then(|count| u64::try_from(count).ok());
    // Of what was never given back a queue that counts says nothing.
    counted.or((kind == Kind::Unlimited).then_some(0))
}

fn text(value: &AMQPValue) -> String {
    match value {
        AMQPValue::LongString(text) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
        AMQPValue::ShortString(text) => text.to_string(),
        AMQPValue::Boolean(it) => it.to_string(),
        AMQPValue::LongLongInt(number) => number.to_string(),
        AMQPValue::LongInt(number) => number.to_string(),
        AMQPValue::LongUInt(number) => number.to_string(),
        AMQPValue::ShortInt(number) => number.to_string(),
        AMQPValue::ShortShortInt(number) => number.to_string(),
        other => format!("{other:?}"),
    }
}

/// As a consumer would read it.
fn as_message(letter: &Letter) -> oncegate::Message {
    let mut message = oncegate::Message::new(letter.bytes().to_vec());
    for (name, value) in &letter.headers {
        message = message.with_header(name, value);
    }
    if let Some(key) = &letter.key {
        message = message.with_key(key.clone());
    }
    let id = letter.delivery.as_ref().and_then(|held| held.properties.message_id().as_ref());
    match id {
        Some(id) => message.with_message_id(id.as_str().as_bytes().to_vec()),
        None => message,
    }
}
