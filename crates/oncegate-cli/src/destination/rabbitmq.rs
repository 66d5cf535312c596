//! Reads a queue with `basic.get`, holds the messages unacknowledged, and requeues them at the end.
//!
//! AMQP has no other way to read a queue. A classic queue requeues a message unchanged except for
//! the `redelivered` flag. A quorum queue may count it in `x-delivery-count`, and drops or
//! dead-letters messages above its delivery limit. RabbitMQ 3.10 counts every kind of requeue; 4.3
//! counts neither `basic.nack` nor `basic.recover`, so all messages are requeued by `basic.nack`
//! before the channel closes. Queues that oncegate declares have an unreachable limit. A policy may
//! set a lower one, which no client can see, so a message with a high count is replaced by a copy
//! that counts from zero. Other queues are only read if the operator accepts it.

mod properties;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
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

use self::properties::{
    XDeath, as_message, delivery_count, redriven_properties, replacement_properties, text,
};
use super::{
    AuditedStates, Broker, CopyAge, DeadLetter, DeadLetterState, DeliveryCountPolicy, Destination,
    PublishError, REPLACED_FROM_COUNT, ROUTING_KEY,
};
use crate::CliContext;
use crate::audit::MessageLocation;
use crate::config::Config;
use crate::error::CliError;
use crate::output::now_ms;

/// When a message was moved to its destination, in milliseconds since 1970.
const MOVED_AT: &str = "oncegate-rejected-at";

/// Names of headers that were too large for the copy in the destination.
const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// Marks a copy that replaces a message, with the reader that published it.
const REPLACED_BY: &str = "oncegate-replaced-by";

/// The time limit of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// How long to wait for requeued messages; another consumer may have taken them.
const REQUEUE_TIMEOUT: Duration = Duration::from_secs(2);

/// The delivery limit of destinations that oncegate declares.
const UNREACHABLE_DELIVERY_LIMIT: i32 = i32::MAX;

/// A delivery that is not acknowledged yet.
#[derive(Clone, Debug)]
pub(crate) struct UnackedDelivery {
    tag: u64,
    properties: BasicProperties,
}

/// The AMQP reply code of an error.
pub(crate) fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// A connection with the configuration of the consumer.
pub(crate) async fn connect(config: &Config) -> Result<Connection, CliError> {
    let connected = config.rabbitmq()?.client("oncegate-cli").await;
    connected.map_err(|error| {
        oncegate_config::Error::of_source(oncegate_config::Broker::RabbitMq, error).into()
    })
}

/// The consumed queue.
pub(crate) fn queue(config: &Config) -> Result<String, CliError> {
    let queue = config.text("rabbitmq.queue").map(str::to_owned);
    queue.ok_or_else(|| CliError::usage("no queue: set rabbitmq.queue, or ONCEGATE_RABBITMQ_QUEUE"))
}

pub(crate) fn destination_queue(
    config: &Config,
    destination: Destination,
) -> Result<String, CliError> {
    let queue = queue(config)?;
    let (named, suffix) = match destination {
        Destination::DeadLetters => (config.text("rabbitmq.dead-letters"), "dead-letters"),
        Destination::InDoubt => (config.text("rabbitmq.in-doubt"), "in-doubt"),
    };
    Ok(named.map_or_else(|| format!("{queue}.{suffix}"), str::to_owned))
}

/// The type of a queue, as far as a client can detect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DestinationQueueKind {
    Missing,
    /// A durable classic queue without arguments: reading changes nothing.
    Classic,
    /// A quorum queue as oncegate declares destinations: its limit is unreachable.
    Unlimited,
    /// Any other queue: it may drop messages that are read often, or by itself.
    Other,
}

pub(crate) async fn declare_passively(channel: &Channel, queue: &str) -> lapin::Result<u32> {
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    Ok(channel
        .queue_declare(queue.into(), options, FieldTable::default())
        .await?
        .message_count())
}

/// Detects the type by declaring the queue: an existing queue with other arguments stays unchanged
/// and returns an error.
pub(crate) async fn queue_kind(
    connection: &Connection,
    queue: &str,
) -> Result<DestinationQueueKind, CliError> {
    match declare_passively(&connection.create_channel().await?, queue).await {
        Ok(_) => {}
        Err(error) if reply_code(&error) == Some(404) => return Ok(DestinationQueueKind::Missing),
        // An exclusive queue of another connection, or no permission.
        Err(error) => {
            return Err(CliError::server(format!(
                "RabbitMQ: the queue `{queue}`: {error}"
            )));
        }
    }
    let mut unlimited = FieldTable::default();
    unlimited.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    unlimited.insert(
        "x-delivery-limit".into(),
        AMQPValue::LongInt(UNREACHABLE_DELIVERY_LIMIT),
    );
    let mut classic = FieldTable::default();
    classic.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("classic".into()),
    );
    for (arguments, queue_kind) in [
        (unlimited, DestinationQueueKind::Unlimited),
        (classic, DestinationQueueKind::Classic),
        (FieldTable::default(), DestinationQueueKind::Classic),
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
                return Ok(queue_kind);
            }
            Err(error) if matches!(reply_code(&error), Some(403 | 405 | 406)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(DestinationQueueKind::Other)
}

/// Limits the search for the copies that a reader published to the end of its queue: other messages
/// arrive before and behind them, and another reader may take them.
#[derive(Clone, Copy, Debug)]
struct TailSearch {
    /// New messages that may be in front of the last copy.
    new: u64,
    /// Messages that another reader may return to the front of the queue.
    returned: u64,
}

impl TailSearch {
    /// Counts one message. Returns whether it may be read.
    fn allows_another(&mut self, redelivered: bool) -> bool {
        let left = if redelivered {
            &mut self.returned
        } else {
            &mut self.new
        };
        *left = left.saturating_sub(1);
        *left > 0
    }
}

/// Reads one queue.
pub(crate) struct QueueReader {
    pub(crate) total: u64,
    pub(crate) target: String,
    name: String,
    connection: Connection,
    consuming: Channel,
    publishing: Option<Channel>,
    received: u64,
    acknowledged: AtomicU64,
    /// Identifies this reader on the copies that it publishes.
    reader_id: String,
    /// How many of those copies are not read yet.
    unread_copies: u64,
    /// The limit of the search for those copies, from when all messages of the start are read.
    tail: Option<TailSearch>,
    /// The messages that this reader published, with the time before the first was sent.
    sent: HashMap<u64, u64>,
    ids: Option<IdSource>,
    done: AuditedStates,
    count_policy: DeliveryCountPolicy,
    queue_kind: DestinationQueueKind,
}

impl QueueReader {
    pub(crate) async fn open(
        context: &CliContext,
        destination: Destination,
        done: AuditedStates,
        count_policy: DeliveryCountPolicy,
    ) -> Result<Self, CliError> {
        let config = &context.config;
        let (name, target) = (destination_queue(config, destination)?, queue(config)?);
        let connection = connect(config).await?;
        let queue_kind = queue_kind(&connection, &name).await?;
        match (queue_kind, count_policy) {
            (DestinationQueueKind::Missing, _) => {
                return Err(CliError::server(format!(
                    "RabbitMQ: the queue `{name}` does not exist"
                )));
            }
            (DestinationQueueKind::Other, DeliveryCountPolicy::Refused) => {
                return Err(CliError::server(format!(
                    "RabbitMQ: the arguments of the queue `{name}` differ from those oncegate declares. A quorum queue counts each read of a \
                     message and drops it at its delivery limit; if that limit is high enough, pass --accept-delivery-counts"
                )));
            }
            _ => {}
        }
        let consuming = connection.create_channel().await?;
        let total = u64::from(declare_passively(&consuming, &name).await?);
        let mut reader = Self {
            total,
            target,
            name,
            connection,
            consuming,
            publishing: None,
            received: 0,
            acknowledged: AtomicU64::new(0),
            reader_id: format!("{:032x}", Token::random().0),
            unread_copies: 0,
            tail: None,
            sent: HashMap::new(),
            ids: config.id_source()?,
            done,
            count_policy,
            queue_kind,
        };
        if total > 0 && reader.replaces_counted() {
            reader.check_may_publish().await?;
        }
        Ok(reader)
    }

    /// Whether messages with a high delivery count are replaced.
    fn replaces_counted(&self) -> bool {
        self.queue_kind == DestinationQueueKind::Unlimited
            && self.count_policy == DeliveryCountPolicy::Refused
    }

    /// Checks that copies can be published before any message is taken, since requeueing counts. A
    /// message to a queue that does not exist is returned if the user may publish.
    async fn check_may_publish(&mut self) -> Result<(), CliError> {
        let missing_queue = format!("oncegate-nowhere-{}", self.reader_id);
        match self
            .send(&missing_queue, b"", BasicProperties::default())
            .await
        {
            Ok(()) | Err(PublishError::Refused(_)) => Ok(()),
            Err(PublishError::Unconfirmed(failure)) => Err(CliError::server(format!(
                "RabbitMQ: reads may count towards a delivery-limit that a policy sets for `{}`, and the user may not publish the copies that \
                 reset the count ({failure}). Let the user write to the default exchange (rabbitmqctl set_permissions); or, if `rabbitmqctl \
                 list_policies` shows no delivery-limit for this queue, pass --accept-delivery-counts or set \
                 rabbitmq.delivery-counts = \"accepted\"",
                self.name
            ))),
        }
    }

    /// Returns each message once. Messages that arrive after the start are not returned, for example
    /// redriven ones that fail again.
    pub(crate) async fn next(&mut self) -> Result<Option<DeadLetter>, CliError> {
        while let Some((delivery, table, delivery_count)) = self.next_delivery().await? {
            let dead_letter = self.dead_letter(delivery, table, delivery_count);
            if !self.was_sent_before(&dead_letter) {
                return Ok(Some(dead_letter));
            }
        }
        Ok(None)
    }

    /// The next delivery that was in the queue at the start, or a copy of one.
    async fn next_delivery(
        &mut self,
    ) -> Result<Option<(Delivery, FieldTable, Option<u64>)>, CliError> {
        loop {
            if self.received >= self.total && !self.may_read_on().await? {
                return Ok(None);
            }
            let Some(message) = self
                .consuming
                .basic_get(self.name.as_str().into(), BasicGetOptions::default())
                .await?
            else {
                return Ok(None);
            };
            self.received += 1;
            let delivery = message.delivery;
            let table = delivery.properties.headers().clone().unwrap_or_default();
            let replaced_by = table.inner().get(REPLACED_BY).map(text);
            if replaced_by.as_deref() == Some(self.reader_id.as_str()) {
                self.unread_copies = self.unread_copies.saturating_sub(1);
            }
            let delivery_count = delivery_count(&table, self.queue_kind);
            let is_near_a_limit = delivery_count.is_some_and(|count| count >= REPLACED_FROM_COUNT);
            if is_near_a_limit && self.replaces_counted() {
                self.replace(delivery, delivery_count).await?;
                continue;
            }
            let Some(tail) = &mut self.tail else {
                return Ok(Some((delivery, table, delivery_count)));
            };
            if !tail.allows_another(delivery.redelivered) {
                self.unread_copies = 0;
            }
            // A copy replaces an older message, whichever reader published it.
            if replaced_by.is_some() {
                return Ok(Some((delivery, table, delivery_count)));
            }
        }
    }

    /// Whether to read on after the messages of the start: only for copies of them, and at most as
    /// many messages as the queue has now.
    async fn may_read_on(&mut self) -> Result<bool, CliError> {
        if self.unread_copies > 0 && self.tail.is_none() {
            let ready = u64::from(declare_passively(&self.consuming, &self.name).await?);
            self.tail = Some(TailSearch {
                new: ready,
                returned: self.total.max(ready),
            });
        }
        Ok(self.unread_copies > 0)
    }

    /// Whether this reader sent this message before: the copy was handled meanwhile and failed
    /// again. A duplicate that was dead-lettered earlier is another message.
    fn was_sent_before(&self, dead_letter: &DeadLetter) -> bool {
        let sent_ms = self.sent.get(&message_digest(dead_letter));
        sent_ms
            .zip(dead_letter.dead_lettered_ms)
            .is_some_and(|(sent, dead_lettered)| dead_lettered >= *sent)
    }

    fn dead_letter(
        &self,
        delivery: Delivery,
        table: FieldTable,
        delivery_count: Option<u64>,
    ) -> DeadLetter {
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
        let x_death = XDeath::of(&table);
        let (dead_lettered_ms, origin) = match &x_death {
            Some(x_death) => (x_death.at_ms, x_death.queue.clone()),
            None => (number(MOVED_AT), header(headers::ORIGIN)),
        };
        let timestamp = delivery
            .properties
            .timestamp()
            .map(|seconds| seconds.saturating_mul(1_000));
        let mut dead_letter = DeadLetter {
            place: MessageLocation {
                broker: Broker::Rabbitmq.name().to_owned(),
                name: self.name.clone(),
                written_ms: dead_lettered_ms,
                ..MessageLocation::default()
            },
            state: DeadLetterState::Waiting,
            // The consumer reads the key from the same header.
            key: Some(
                header(ROUTING_KEY)
                    .unwrap_or_else(|| delivery.routing_key.to_string())
                    .into_bytes(),
            ),
            body: Some(delivery.data),
            // Any producer can write it: an earlier time only makes redrive more careful.
            sent_ms: timestamp
                .into_iter()
                .chain(number(headers::FIRST_SEEN))
                .min(),
            dead_lettered_ms,
            other_source: origin.filter(|name| *name != self.target),
            // Any producer can write it: redrive then skips the message.
            missing_parts: header(DROPPED_HEADERS)
                .map(|names| format!("its headers ({names}) were too large for this destination")),
            delivery: Some(Box::new(UnackedDelivery {
                tag: delivery.delivery_tag,
                properties: delivery.properties,
            })),
            raw_headers: Vec::new(),
            read_id: None,
            delivery_count,
            headers,
        };
        dead_letter.read_id = self
            .ids
            .as_ref()
            .and_then(|ids| ids.read(&as_message(&dead_letter)).ok())
            .map(|id| id.to_string());
        if x_death.is_some() {
            dead_letter.remove_reserved_headers();
        }
        dead_letter.state = self.done.state(&dead_letter);
        dead_letter
    }

    /// Publishes a copy of a message to the end of its queue, and acknowledges the original once
    /// the copy is confirmed. A crash in between leaves both.
    async fn replace(
        &mut self,
        delivery: Delivery,
        delivery_count: Option<u64>,
    ) -> Result<(), CliError> {
        let name = self.name.clone();
        let properties = replacement_properties(&delivery, &name, &self.reader_id);
        if let Err(PublishError::Refused(failure) | PublishError::Unconfirmed(failure)) =
            self.send(&name, &delivery.data, properties).await
        {
            let times = delivery_count.unwrap_or(0);
            return Err(CliError::server(format!(
                "RabbitMQ: a message in `{name}` has delivery count {times}, and its replacement was not published: {failure}"
            )));
        }
        self.unread_copies += 1;
        self.acknowledge(delivery.delivery_tag).await
    }

    /// The channel for copies, in confirm mode.
    async fn publishing(&mut self) -> Result<Channel, CliError> {
        if let Some(channel) = &self.publishing {
            return Ok(channel.clone());
        }
        let channel = self.connection.create_channel().await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        Ok(self.publishing.insert(channel).clone())
    }

    pub(crate) async fn publish(
        &mut self,
        dead_letter: &DeadLetter,
        age: CopyAge,
    ) -> Result<(), PublishError> {
        let Some(unacked) = &dead_letter.delivery else {
            return Err(PublishError::Refused(CliError::server(
                "RabbitMQ: not a delivery",
            )));
        };
        let target = self.target.clone();
        self.sent
            .entry(message_digest(dead_letter))
            .or_insert_with(now_ms);
        self.send(
            &target,
            dead_letter.bytes(),
            redriven_properties(&unacked.properties, age),
        )
        .await
    }

    /// Publishes to a queue and waits for the confirmation.
    async fn send(
        &mut self,
        target: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> Result<(), PublishError> {
        let channel = self.publishing().await.map_err(PublishError::Refused)?;
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let published = channel.basic_publish("".into(), target.into(), options, body, properties);
        let confirmed =
            tokio::time::timeout(REQUEST_TIMEOUT, async { published.await?.await }).await;
        match confirmed {
            // A returned message is confirmed too.
            Ok(Ok(answer)) => match answer.is_ack() && answer.take_message().is_none() {
                true => Ok(()),
                false => {
                    let text = format!(
                        "RabbitMQ: the queue `{target}` does not exist or is full: the copy was not accepted"
                    );
                    Err(PublishError::Refused(CliError::server(text)))
                }
            },
            Ok(Err(error)) => Err(PublishError::Unconfirmed(CliError::server(format!(
                "RabbitMQ: the copy for `{target}` was not confirmed: {error}"
            )))),
            Err(_) => Err(PublishError::Unconfirmed(CliError::server(format!(
                "RabbitMQ: the copy for `{target}` was not confirmed within {REQUEST_TIMEOUT:?}"
            )))),
        }
    }

    pub(crate) async fn take_out(&self, dead_letter: &DeadLetter) -> Result<(), CliError> {
        let Some(unacked) = &dead_letter.delivery else {
            return Err(CliError::server("RabbitMQ: not a delivery"));
        };
        self.acknowledge(unacked.tag).await
    }

    async fn acknowledge(&self, tag: u64) -> Result<(), CliError> {
        self.consuming
            .basic_ack(tag, BasicAckOptions::default())
            .await?;
        if self.consuming.status().connected() {
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
            Ok(())
        } else {
            Err(CliError::server(
                "RabbitMQ: the channel closed before the message was acknowledged; it may still be in the queue",
            ))
        }
    }

    /// `basic.ack` has no reply, but closing the channel has one and comes after it. Requeued
    /// messages appear a moment later; waiting for them lets the next reader see them.
    pub(crate) async fn close(self) {
        let all = BasicNackOptions {
            multiple: true,
            requeue: true,
        };
        let _ = tokio::time::timeout(REQUEST_TIMEOUT, self.consuming.basic_nack(0, all)).await;
        let _ = tokio::time::timeout(REQUEST_TIMEOUT, self.consuming.close(200, "OK".into())).await;
        let unacked = self.received - self.acknowledged.load(Ordering::Relaxed);
        let _ = tokio::time::timeout(REQUEUE_TIMEOUT, self.until_requeued(unacked)).await;
        let _ =
            tokio::time::timeout(REQUEST_TIMEOUT, self.connection.close(200, "OK".into())).await;
    }

    async fn until_requeued(&self, unacked: u64) -> lapin::Result<()> {
        let channel = self.connection.create_channel().await?;
        while u64::from(declare_passively(&channel, &self.name).await?) < unacked {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

/// Identifies a message and its later dead letters, by id and body.
fn message_digest(dead_letter: &DeadLetter) -> u64 {
    let mut hasher = DefaultHasher::new();
    (dead_letter.id(), &dead_letter.body).hash(&mut hasher);
    hasher.finish()
}
