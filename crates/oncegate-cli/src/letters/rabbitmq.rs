//! Letters on RabbitMQ: taken, held unacknowledged while they are looked at, and given back.
//!
//! There is no other way to look into a queue. A classic queue gives a message back as it was, but
//! for the flag `redelivered`. A quorum queue may count that in `x-delivery-count`, and drops or
//! dead-letters what goes over its delivery limit. RabbitMQ 3.10 counts each way to give a message
//! back; 4.3 counts neither `basic.nack` nor `basic.recover`, so that all that is held is given
//! back by `basic.nack` before the channel is closed. The queues that oncegate declares have a
//! limit that nobody reaches. A policy may set a lower one, and no client is told: so what was
//! counted often is replaced by a copy, which is counted from zero. Other queues are not looked
//! into unless that is accepted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ErrorKind};
use oncegate::IdSource;
use oncegate::marker::Token;
use oncegate::source::headers;

use super::{
    Begins, Broker, COUNTED_OFTEN, Counts, Done, Letter, ROUTING_KEY, Shelf, State, Unsent,
    begins_without,
};
use crate::Context;
use crate::audit::Place;
use crate::config::Config;
use crate::failure::Failure;
use crate::say::now_ms;

/// When a message was set aside, in milliseconds since 1970.
const SET_ASIDE_AT: &str = "oncegate-set-aside-at";

/// Headers that were too large for the copy that was set aside.
const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// Marks a copy that replaces a letter, with the reader that wrote it.
const REPLACED_BY: &str = "oncegate-replaced-by";

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// How long is waited for what was held: somebody else may have taken it.
const COMES_BACK: Duration = Duration::from_secs(2);

/// The delivery limit of the queues that oncegate declares for people to read.
const OUT_OF_REACH: i32 = i32::MAX;

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

/// A connection to the broker that is configured, made as the consumer makes its own.
pub(crate) async fn connect(config: &Config) -> Result<Connection, Failure> {
    let connected = config.rabbitmq()?.connect("oncegate-cli").await;
    connected.map_err(|error| {
        oncegate_config::Error::of_source(oncegate_config::Broker::RabbitMq, error).into()
    })
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
    /// A quorum queue as oncegate declares it for people: its limit is out of reach.
    Unlimited,
    /// Anything else: it may drop what was looked at too often, or lose messages by itself.
    Other,
}

pub(crate) async fn passively(channel: &Channel, queue: &str) -> lapin::Result<u32> {
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    Ok(channel
        .queue_declare(queue.into(), options, FieldTable::default())
        .await?
        .message_count())
}

/// Finds out by declaring it as it should be: a queue that has other arguments is left as it is,
/// and refuses.
pub(crate) async fn kind(connection: &Connection, queue: &str) -> Result<Kind, Failure> {
    match passively(&connection.create_channel().await?, queue).await {
        Ok(_) => {}
        Err(error) if reply_code(&error) == Some(404) => return Ok(Kind::Missing),
        // An exclusive queue of somebody else's, or no right to look.
        Err(error) => {
            return Err(Failure::server(format!(
                "RabbitMQ: the queue `{queue}`: {error}"
            )));
        }
    }
    let mut unlimited = FieldTable::default();
    unlimited.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    unlimited.insert("x-delivery-limit".into(), AMQPValue::LongInt(OUT_OF_REACH));
    let mut classic = FieldTable::default();
    classic.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("classic".into()),
    );
    for (arguments, kind) in [
        (unlimited, Kind::Unlimited),
        (classic, Kind::Classic),
        (FieldTable::default(), Kind::Classic),
    ] {
        let channel = connection.create_channel().await?;
        let options = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        match channel
            .queue_declare(queue.into(), options, arguments)
            .await
        {
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
    /// Names this reader on the copies that it writes in place of letters.
    mark: String,
    /// How many of those copies were not read yet.
    copies_ahead: u64,
    ids: Option<IdSource>,
    done: Done,
    counts: Counts,
    kind: Kind,
}

impl Reader {
    pub(crate) async fn open(
        context: &Context,
        shelf: Shelf,
        done: Done,
        counts: Counts,
    ) -> Result<Self, Failure> {
        let config = &context.config;
        let (name, target) = (destination(config, shelf)?, queue(config)?);
        let connection = connect(config).await?;
        let kind = kind(&connection, &name).await?;
        match (kind, counts) {
            (Kind::Missing, _) => {
                return Err(Failure::server(format!(
                    "RabbitMQ: the queue `{name}` does not exist"
                )));
            }
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
        let mut reader = Self {
            total,
            target,
            name,
            connection,
            holding,
            publishing: None,
            taken: 0,
            acknowledged: AtomicU64::new(0),
            mark: format!("{:032x}", Token::random().0),
            copies_ahead: 0,
            ids: config.id_source()?,
            done,
            counts,
            kind,
        };
        if total > 0 && reader.replaces() {
            reader.may_publish().await?;
        }
        Ok(reader)
    }

    /// Whether letters that were counted often are replaced.
    fn replaces(&self) -> bool {
        self.kind == Kind::Unlimited && self.counts == Counts::Refused
    }

    /// Whether copies may be written, before anything is taken: what is given back is counted. A
    /// message to a queue that does not exist comes back, where the user may publish it.
    async fn may_publish(&mut self) -> Result<(), Failure> {
        let nowhere = format!("oncegate-nowhere-{}", self.mark);
        match self.send(&nowhere, b"", BasicProperties::default()).await {
            Ok(()) | Err(Unsent::Refused(_)) => Ok(()),
            Err(Unsent::Unknown(failure)) => Err(Failure::server(format!(
                "RabbitMQ: looking may count towards a delivery-limit that a policy sets for `{}`, and the user may not write a copy in place of \
                 what was counted often ({failure}). Let the user write to the default exchange (rabbitmqctl set_permissions); or, if `rabbitmqctl \
                 list_policies` shows no delivery-limit for this queue, say --accept-delivery-counts, or once and for all \
                 rabbitmq.delivery-counts = \"accepted\"",
                self.name
            ))),
        }
    }

    /// Each message once: what comes in meanwhile, redriven messages that fail again among it, is
    /// left.
    pub(crate) async fn next(&mut self) -> Result<Option<Letter>, Failure> {
        let (delivery, table, looks) = loop {
            if self.taken >= self.total && self.copies_ahead == 0 {
                return Ok(None);
            }
            let Some(message) = self
                .holding
                .basic_get(self.name.as_str().into(), BasicGetOptions::default())
                .await?
            else {
                return Ok(None);
            };
            self.taken += 1;
            let delivery = message.delivery;
            let table = delivery.properties.headers().clone().unwrap_or_default();
            if table
                .inner()
                .get(REPLACED_BY)
                .is_some_and(|mark| text(mark) == self.mark)
            {
                self.copies_ahead = self.copies_ahead.saturating_sub(1);
            }
            let looks = looks(&table, self.kind);
            let is_near_a_limit = looks.is_some_and(|count| count >= COUNTED_OFTEN);
            if !is_near_a_limit || !self.replaces() {
                break (delivery, table, looks);
            }
            self.replace(delivery, looks).await?;
        };
        let headers: Vec<(String, String)> = table
            .inner()
            .iter()
            .map(|(name, value)| (name.to_string(), text(value)))
            .collect();
        let header = |name: &str| {
            headers
                .iter()
                .find(|(it, _)| it == name)
                .map(|(_, value)| value.clone())
        };
        let number = |name: &str| header(name).and_then(|text| text.parse::<u64>().ok());
        let death = Death::of(&table);
        let (set_aside_ms, origin) = match &death {
            Some(death) => (death.at_ms, death.queue.clone()),
            None => (number(SET_ASIDE_AT), header(headers::ORIGIN)),
        };
        let timestamp = delivery
            .properties
            .timestamp()
            .map(|seconds| seconds.saturating_mul(1_000));
        let mut letter = Letter {
            place: Place {
                broker: Broker::Rabbitmq.name().to_owned(),
                name: self.name.clone(),
                written_ms: set_aside_ms,
                ..Place::default()
            },
            state: State::Waiting,
            // The consumer reads the key from the same header.
            key: Some(
                header(ROUTING_KEY)
                    .unwrap_or_else(|| delivery.routing_key.to_string())
                    .into_bytes(),
            ),
            body: Some(delivery.data),
            // From any writer: an earlier time only makes redrive more careful.
            sent_ms: timestamp
                .into_iter()
                .chain(number(headers::FIRST_SEEN))
                .min(),
            set_aside_ms,
            elsewhere: origin.filter(|name| *name != self.target),
            // From any writer: redrive leaves such a message where it is.
            lacks: header(DROPPED_HEADERS)
                .map(|names| format!("headers of it ({names}) were too large to be set aside")),
            delivery: Some(Box::new(Held {
                tag: delivery.delivery_tag,
                properties: delivery.properties,
            })),
            raw_headers: Vec::new(),
            read_id: None,
            looks,
            headers,
        };
        letter.read_id = self
            .ids
            .as_ref()
            .and_then(|ids| ids.read(&as_message(&letter)).ok())
            .map(|id| id.to_string());
        if death.is_some() {
            letter.remove_reserved_headers();
        }
        letter.state = self.done.state(&letter);
        Ok(Some(letter))
    }

    /// Writes a copy of a letter to the end of its queue, and takes the letter out once the copy is
    /// confirmed. A crash in between leaves both.
    async fn replace(&mut self, delivery: Delivery, looks: Option<u64>) -> Result<(), Failure> {
        let name = self.name.clone();
        let properties = replacing(&delivery, &name, &self.mark);
        if let Err(Unsent::Refused(failure) | Unsent::Unknown(failure)) =
            self.send(&name, &delivery.data, properties).await
        {
            let times = looks.unwrap_or(0);
            return Err(Failure::server(format!(
                "RabbitMQ: a letter in `{name}` was given back {times} times, and a copy was not written: {failure}"
            )));
        }
        self.copies_ahead += 1;
        self.acknowledge(delivery.delivery_tag).await
    }

    /// A channel for copies, with confirmation.
    async fn publishing(&mut self) -> Result<Channel, Failure> {
        if let Some(channel) = &self.publishing {
            return Ok(channel.clone());
        }
        let channel = self.connection.create_channel().await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        Ok(self.publishing.insert(channel).clone())
    }

    pub(crate) async fn publish(&mut self, letter: &Letter, begins: Begins) -> Result<(), Unsent> {
        let Some(held) = &letter.delivery else {
            return Err(Unsent::Refused(Failure::server("RabbitMQ: not a delivery")));
        };
        let target = self.target.clone();
        self.send(&target, letter.bytes(), anew(&held.properties, begins))
            .await
    }

    /// Publishes to a queue, with confirmation.
    async fn send(
        &mut self,
        target: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> Result<(), Unsent> {
        let channel = self.publishing().await.map_err(Unsent::Refused)?;
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let published = channel.basic_publish("".into(), target.into(), options, body, properties);
        let confirmed = tokio::time::timeout(PATIENCE, async { published.await?.await }).await;
        match confirmed {
            // What was returned is confirmed too.
            Ok(Ok(answer)) => match answer.is_ack() && answer.take_message().is_none() {
                true => Ok(()),
                false => {
                    let says = format!(
                        "RabbitMQ: the queue `{target}` is not there, or is full: the copy was not taken"
                    );
                    Err(Unsent::Refused(Failure::server(says)))
                }
            },
            Ok(Err(error)) => Err(Unsent::Unknown(Failure::server(format!(
                "RabbitMQ: the copy for `{target}` was not confirmed: {error}"
            )))),
            Err(_) => Err(Unsent::Unknown(Failure::server(format!(
                "RabbitMQ: the copy for `{target}` was not confirmed within {PATIENCE:?}"
            )))),
        }
    }

    pub(crate) async fn take_out(&self, letter: &Letter) -> Result<(), Failure> {
        let Some(held) = &letter.delivery else {
            return Err(Failure::server("RabbitMQ: not a delivery"));
        };
        self.acknowledge(held.tag).await
    }

    async fn acknowledge(&self, tag: u64) -> Result<(), Failure> {
        self.holding
            .basic_ack(tag, BasicAckOptions::default())
            .await?;
        if self.holding.status().connected() {
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
            Ok(())
        } else {
            Err(Failure::server(
                "RabbitMQ: the channel ended before the letter was taken out; it may still be there",
            ))
        }
    }

    /// An acknowledgement has no answer: closing the channel in good order has, and comes after it.
    /// What was held comes back a moment later, which is waited for, so that who looks next sees
    /// it.
    pub(crate) async fn close(self) {
        let all = BasicNackOptions {
            multiple: true,
            requeue: true,
        };
        let _ = tokio::time::timeout(PATIENCE, self.holding.basic_nack(0, all)).await;
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

/// Persistent, and all of the original but its headers, its timestamp, and what would end it early
/// or have it refused.
fn kept(original: &BasicProperties) -> BasicProperties {
    let mut kept = BasicProperties::default().with_delivery_mode(2);
    macro_rules! keep {
        ($($get:ident $set:ident),*) => { $(if let Some(value) = original.$get() { kept = kept.$set(value.clone()); })* };
    }
    keep!(content_type with_content_type, content_encoding with_content_encoding, priority with_priority);
    keep!(correlation_id with_correlation_id, reply_to with_reply_to, message_id with_message_id);
    keep!(kind with_type, app_id with_app_id, cluster_id with_cluster_id);
    kept
}

/// The properties of a copy that begins anew: without what tells of earlier deliveries.
fn anew(original: &BasicProperties, begins: Begins) -> BasicProperties {
    let mut kept = kept(original);
    if original.timestamp().is_some() {
        // Else it may be too old to be taken for new, before it is handled.
        kept = kept.with_timestamp(now_ms() / 1_000);
    }
    let mut table = FieldTable::default();
    for (name, value) in original
        .headers()
        .as_ref()
        .into_iter()
        .flat_map(|table| table.inner())
    {
        if !begins_without(name.as_str()) {
            table.insert(name.clone(), value.clone());
        }
    }
    if let Some(first_seen) = begins.first_seen() {
        table.insert(
            headers::FIRST_SEEN.into(),
            AMQPValue::LongString(first_seen.into()),
        );
    }
    kept.with_headers(table)
}

/// The properties of a copy that replaces a letter in its queue: without what the broker counted,
/// and what would send it elsewhere too.
fn replacing(letter: &Delivery, queue: &str, mark: &str) -> BasicProperties {
    let mut copy = kept(&letter.properties);
    if let Some(sent) = letter.properties.timestamp() {
        copy = copy.with_timestamp(*sent);
    }
    let left_out = ["x-delivery-count", "x-acquired-count", "CC", "BCC"];
    let mut headers = FieldTable::default();
    for (name, value) in letter
        .properties
        .headers()
        .as_ref()
        .into_iter()
        .flat_map(|table| table.inner())
    {
        if !left_out.contains(&name.as_str()) {
            headers.insert(name.clone(), value.clone());
        }
    }
    if letter.routing_key.as_str() != queue && !headers.inner().contains_key(ROUTING_KEY) {
        headers.insert(
            ROUTING_KEY.into(),
            AMQPValue::LongString(letter.routing_key.as_str().into()),
        );
    }
    headers.insert(REPLACED_BY.into(), AMQPValue::LongString(mark.into()));
    copy.with_headers(headers)
}

/// What RabbitMQ wrote into `x-death` when it dead-lettered a message.
///
/// RabbitMQ always writes that header, whatever a producer put there, and oncegate's dead letters
/// never carry it. So oncegate did not dead-letter a message that has it, and its `oncegate-*`
/// headers come from its producer, or from a delayed copy.
struct Death {
    /// The queue that it lay in.
    queue: Option<String>,
    at_ms: Option<u64>,
}

impl Death {
    /// The last one: the broker writes it first.
    fn of(table: &FieldTable) -> Option<Self> {
        let deaths = table.inner().get("x-death")?;
        let last = deaths
            .as_array()
            .and_then(|deaths| deaths.as_slice().first()?.as_field_table());
        let entry = |name: &str| last.and_then(|last| last.inner().get(name));
        let at_ms = match entry("time") {
            Some(AMQPValue::Timestamp(seconds)) => Some(seconds.saturating_mul(1_000)),
            _ => None,
        };
        Some(Self {
            queue: entry("queue").map(text),
            at_ms,
        })
    }
}

/// How often a message was given back, where its queue counts that. In a classic queue such a
/// header tells of another queue.
fn looks(table: &FieldTable, kind: Kind) -> Option<u64> {
    if kind == Kind::Classic {
        return None;
    }
    let counted = table
        .inner()
        .get("x-delivery-count")
        .and_then(AMQPValue::as_long_long_int)
        .and_then(|count| u64::try_from(count).ok());
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
    let id = letter
        .delivery
        .as_ref()
        .and_then(|held| held.properties.message_id().as_ref());
    match id {
        Some(id) => message.with_message_id(id.as_str().as_bytes().to_vec()),
        None => message,
    }
}
