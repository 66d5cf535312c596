//! Reads a queue with `basic.get`, keeps the messages unacknowledged, and requeues them at the end.
//! AMQP cannot read a queue otherwise without removing its messages. A classic queue requeues a
//! message unchanged except for the `redelivered` flag. A quorum queue may count the requeue in
//! `x-delivery-count`, and drops or dead-letters messages above its delivery limit. RabbitMQ 3.10
//! counts every kind of requeue; 4.3 counts neither `basic.nack` nor `basic.recover`, so the reader
//! requeues by `basic.nack` before it closes the channel. Queues that oncegate declares have an
//! unreachable limit. A policy may set a lower limit, which no client can read, so the reader
//! replaces a message with a high count by a copy that counts from zero. It reads a queue with
//! another type or other arguments only if the operator accepts that RabbitMQ may drop messages.

mod properties;
mod publish;
mod reply_timeout;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicNackOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ErrorKind};
use oncegate::IdSource;
use oncegate::marker::Token;
use oncegate::source::headers;

use self::properties::{XDeath, as_message, delivery_count, ordering_key, text};
use self::reply_timeout::within_limit;
use super::{
    AuditedStates, Broker, DeadLetter, DeadLetterState, DeliveryCountPolicy, Destination,
    REPLACE_AT_COUNT,
};
use crate::CliContext;
use crate::audit::MessageLocation;
use crate::config::Config;
use crate::error::CliError;

/// The header with the time at which the consumer put a message into its destination, in
/// milliseconds since 1970.
const REJECTED_AT: &str = "oncegate-rejected-at";

/// The header with the names of headers that were too large for the copy in the destination.
const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// The header of a copy that replaces a message in its queue: the id of the reader that published
/// the copy.
const REPLACED_BY: &str = "oncegate-replaced-by";

/// The time limit of publishing a copy, and of each step of closing.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// How long to wait until requeued messages are ready. Limited, since another consumer may have
/// received them.
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
    Ok(destination.topic_or_queue(config, "rabbitmq", &queue(config)?))
}

/// The type of a queue, as far as a client can detect it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DestinationQueueKind {
    Missing,
    /// A durable classic queue whose only argument is its type, if any: a read changes nothing
    /// except the `redelivered` flag.
    Classic,
    /// A quorum queue with the delivery limit [`UNREACHABLE_DELIVERY_LIMIT`], as oncegate declares
    /// dead-letter and in-doubt queues.
    UnlimitedQuorum,
    /// Any other queue, or one that the user may not declare. It may drop messages after a number
    /// of reads, or by its length or age limits.
    Other,
}

/// The number of ready messages in a queue.
///
/// # Errors
/// Reply code 404 if the queue does not exist; the error closes the channel.
pub(crate) async fn declare_passively(channel: &Channel, queue: &str) -> lapin::Result<u32> {
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let declared = channel.queue_declare(queue.into(), options, FieldTable::default());
    Ok(within_limit(declared).await?.message_count())
}

/// Detects the type of a queue by declaring it with several sets of arguments: if the existing
/// queue has other arguments, it stays unchanged and the broker returns an error.
pub(crate) async fn queue_kind(
    connection: &Connection,
    queue: &str,
) -> Result<DestinationQueueKind, CliError> {
    match declare_passively(&within_limit(connection.create_channel()).await?, queue).await {
        Ok(_) => {}
        Err(error) if reply_code(&error) == Some(404) => return Ok(DestinationQueueKind::Missing),
        Err(error) => {
            return Err(CliError::server(format!(
                "RabbitMQ: cannot inspect the queue `{queue}`: {error}; it may be exclusive to another connection, or the user has no permission"
            )));
        }
    }
    let of_type = |queue_type: &str| {
        let mut arguments = FieldTable::default();
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString(queue_type.into()),
        );
        arguments
    };
    let mut unlimited = of_type("quorum");
    unlimited.insert(
        "x-delivery-limit".into(),
        AMQPValue::LongInt(UNREACHABLE_DELIVERY_LIMIT),
    );
    for (arguments, queue_kind) in [
        (unlimited, DestinationQueueKind::UnlimitedQuorum),
        // A quorum queue with the broker's default limit. Must precede the next two: such a queue
        // matches them, too, if the default queue type is quorum or the broker compares arguments
        // less strictly.
        (of_type("quorum"), DestinationQueueKind::Other),
        (of_type("classic"), DestinationQueueKind::Classic),
        (FieldTable::default(), DestinationQueueKind::Classic),
    ] {
        let channel = within_limit(connection.create_channel()).await?;
        let options = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        match within_limit(channel.queue_declare(queue.into(), options, arguments)).await {
            Ok(_) => {
                within_limit(channel.close(200, "OK".into())).await?;
                return Ok(queue_kind);
            }
            Err(error) if matches!(reply_code(&error), Some(403 | 405 | 406)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(DestinationQueueKind::Other)
}

/// How many messages beyond `total` a reader may read to find the copies that it appended to its
/// own queue. Without a limit it could read forever: producers append more messages, and another
/// reader may have received the copies.
#[derive(Clone, Copy, Debug)]
struct CopySearchBudget {
    /// Messages on their first delivery, which may precede the last copy.
    first_deliveries: u64,
    /// Redelivered messages, which another reader may have requeued at the front of the queue.
    redeliveries: u64,
}

impl CopySearchBudget {
    /// Counts a message that was read. Returns whether another one may be read.
    fn count_message(&mut self, redelivered: bool) -> bool {
        let left = if redelivered {
            &mut self.redeliveries
        } else {
            &mut self.first_deliveries
        };
        *left = left.saturating_sub(1);
        *left > 0
    }
}

/// Reads one queue.
pub(crate) struct QueueReader {
    /// The number of ready messages at open.
    pub(crate) total: u64,
    /// The consumed queue, to which messages are redriven.
    pub(crate) source_queue: String,
    /// The queue that is read.
    queue: String,
    connection: Connection,
    /// For copies. A separate connection, since RabbitMQ reads nothing more from a connection that
    /// has published during a resource alarm.
    publish_connection: Connection,
    read_channel: Channel,
    /// In confirm mode; opened for the first copy.
    publish_channel: Option<Channel>,
    received: u64,
    acknowledged: AtomicU64,
    /// Identifies this reader on the copies that it publishes.
    reader_id: String,
    /// The number of copies that this reader published to replace messages and has not read yet.
    unread_replacements: u64,
    /// Set when `total` messages are read and some replacements are still unread.
    copy_search: Option<CopySearchBudget>,
    /// The digest of each message that this reader redrove, with the time just before its first
    /// copy was published, in milliseconds since 1970.
    redriven_at_ms: HashMap<u64, u64>,
    id_source: Option<IdSource>,
    key_header: Option<String>,
    /// The state of each message according to the audit.
    audited_states: AuditedStates,
    count_policy: DeliveryCountPolicy,
    queue_kind: DestinationQueueKind,
}

impl QueueReader {
    pub(crate) async fn open(
        context: &CliContext,
        destination: Destination,
        audited_states: AuditedStates,
        count_policy: DeliveryCountPolicy,
    ) -> Result<Self, CliError> {
        let config = &context.config;
        let source_queue = queue(config)?;
        let queue = destination_queue(config, destination)?;
        let connection = connect(config).await?;
        let queue_kind = queue_kind(&connection, &queue).await?;
        match (queue_kind, count_policy) {
            (DestinationQueueKind::Missing, _) => {
                return Err(CliError::server(format!(
                    "RabbitMQ: the queue `{queue}` does not exist; check the name, or start the consumer, which declares it"
                )));
            }
            (DestinationQueueKind::Other, DeliveryCountPolicy::Refused) => {
                return Err(CliError::server(format!(
                    "RabbitMQ: reading the queue `{queue}` may drop messages: it is neither a quorum queue as oncegate declares it (with an \
                     unreachable delivery limit) nor a durable classic queue without arguments, or the user has no configure permission, which \
                     this check needs. If the queue has no delivery limit or one far above the number of reads, pass --accept-delivery-counts"
                )));
            }
            _ => {}
        }
        let publish_connection = connect(config).await?;
        let read_channel = within_limit(connection.create_channel()).await?;
        let total = u64::from(declare_passively(&read_channel, &queue).await?);
        let mut reader = Self {
            total,
            source_queue,
            queue,
            connection,
            publish_connection,
            read_channel,
            publish_channel: None,
            received: 0,
            acknowledged: AtomicU64::new(0),
            reader_id: format!("{:032x}", Token::random().0),
            unread_replacements: 0,
            copy_search: None,
            redriven_at_ms: HashMap::new(),
            id_source: config.id_source()?,
            key_header: config.text("rabbitmq.key-header").map(str::to_owned),
            audited_states,
            count_policy,
            queue_kind,
        };
        if total > 0 && reader.replaces_high_counts() {
            reader.check_can_publish().await?;
        }
        Ok(reader)
    }

    /// Whether messages whose delivery count is [`REPLACE_AT_COUNT`] or more are replaced.
    fn replaces_high_counts(&self) -> bool {
        self.queue_kind == DestinationQueueKind::UnlimitedQuorum
            && self.count_policy == DeliveryCountPolicy::Refused
    }

    /// The next message. Returns at most as many messages as the queue had at open, where a copy
    /// that replaces a message counts as that message. If another reader receives some of these
    /// messages, later ones are returned instead. Skips messages that this reader redrove and that
    /// failed again.
    pub(crate) async fn next(&mut self) -> Result<Option<DeadLetter>, CliError> {
        while let Some((delivery, table, delivery_count)) = self.next_delivery().await? {
            let dead_letter = self.dead_letter(delivery, table, delivery_count);
            if !self.was_redriven(&dead_letter) {
                return Ok(Some(dead_letter));
            }
        }
        Ok(None)
    }

    /// The next delivery, with its headers and delivery count. A message with a high count is
    /// replaced and returned as its copy later.
    async fn next_delivery(
        &mut self,
    ) -> Result<Option<(Delivery, FieldTable, Option<u64>)>, CliError> {
        loop {
            if self.received >= self.total && !self.may_read_another().await? {
                return Ok(None);
            }
            let queue = self.queue.as_str().into();
            let get = self
                .read_channel
                .basic_get(queue, BasicGetOptions::default());
            let Some(message) = within_limit(get).await? else {
                return Ok(None);
            };
            self.received += 1;
            let delivery = message.delivery;
            let table = delivery.properties.headers().clone().unwrap_or_default();
            let replaced_by = table.inner().get(REPLACED_BY).map(text);
            if replaced_by.as_deref() == Some(self.reader_id.as_str()) {
                self.unread_replacements = self.unread_replacements.saturating_sub(1);
            }
            let delivery_count = delivery_count(&table, self.queue_kind);
            let has_high_count = delivery_count.is_some_and(|count| count >= REPLACE_AT_COUNT);
            if has_high_count && self.replaces_high_counts() {
                self.replace(delivery, delivery_count).await?;
                continue;
            }
            let Some(copy_search) = &mut self.copy_search else {
                return Ok(Some((delivery, table, delivery_count)));
            };
            if !copy_search.count_message(delivery.redelivered) {
                self.unread_replacements = 0;
            }
            // A copy that any reader published replaces an older message, so it is returned. Other
            // messages are skipped: `total` messages have been read.
            if replaced_by.is_some() {
                return Ok(Some((delivery, table, delivery_count)));
            }
        }
    }

    /// Whether to read another message after `total`: only while replacements are unread, and
    /// within the [`CopySearchBudget`], which allows as many first deliveries as messages are ready
    /// now, and at least as many redeliveries.
    async fn may_read_another(&mut self) -> Result<bool, CliError> {
        if self.unread_replacements > 0 && self.copy_search.is_none() {
            let ready = u64::from(declare_passively(&self.read_channel, &self.queue).await?);
            self.copy_search = Some(CopySearchBudget {
                first_deliveries: ready,
                redeliveries: self.total.max(ready),
            });
        }
        Ok(self.unread_replacements > 0)
    }

    /// Whether this reader redrove the message, and it was dead-lettered again. A message with the
    /// same id and body that was dead-lettered before the redrive is another message.
    fn was_redriven(&self, dead_letter: &DeadLetter) -> bool {
        self.redriven_at_ms
            .get(&message_digest(dead_letter))
            .zip(dead_letter.rejected_at_ms)
            .is_some_and(|(redriven_at_ms, rejected_at_ms)| rejected_at_ms >= *redriven_at_ms)
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
        let (rejected_at_ms, origin) = match &x_death {
            Some(x_death) => (x_death.at_ms, x_death.queue.clone()),
            None => (number(REJECTED_AT), header(headers::ORIGIN)),
        };
        let timestamp = delivery
            .properties
            .timestamp()
            .map(|seconds| seconds.saturating_mul(1_000));
        let mut dead_letter = DeadLetter {
            location: MessageLocation {
                broker: Broker::Rabbitmq.name().to_owned(),
                name: self.queue.clone(),
                written_ms: rejected_at_ms,
                ..MessageLocation::default()
            },
            state: DeadLetterState::Waiting,
            key: Some(ordering_key(
                &table,
                delivery.routing_key.as_str(),
                self.key_header.as_deref(),
            )),
            body: Some(delivery.data),
            // A producer may forge `oncegate-first-seen`. The earlier time counts, so the message
            // can only appear older, and redrive has stricter conditions for older messages.
            sent_ms: timestamp
                .into_iter()
                .chain(number(headers::FIRST_SEEN))
                .min(),
            rejected_at_ms,
            other_source: origin.filter(|name| *name != self.source_queue),
            // A producer may forge `oncegate-dropped-headers`: redrive then skips the message, or
            // sends it with `--accept-lost-headers`.
            lost_headers: header(DROPPED_HEADERS).map(|names| {
                format!(
                    "its headers ({names}) were too large for the copy in `{}`",
                    self.queue
                )
            }),
            delivery: Some(Box::new(UnackedDelivery {
                tag: delivery.delivery_tag,
                properties: delivery.properties,
            })),
            raw_headers: Vec::new(),
            extracted_id: None,
            delivery_count,
            headers,
        };
        dead_letter.extracted_id = self
            .id_source
            .as_ref()
            .and_then(|source| source.read(&as_message(&dead_letter)).ok())
            .map(|id| id.to_string());
        if x_death.is_some() {
            dead_letter.remove_reserved_headers();
        }
        dead_letter.state = self.audited_states.state(&dead_letter);
        dead_letter
    }

    /// Removes a message from the queue.
    ///
    /// # Errors
    /// The channel closed; the message may still be in the queue.
    pub(crate) async fn remove(&self, dead_letter: &DeadLetter) -> Result<(), CliError> {
        let tag = unacked(dead_letter)?.tag;
        let message = match dead_letter.id() {
            Some(id) => format!("the message `{id}`"),
            None => "a message without an id".to_owned(),
        };
        self.acknowledge(tag, &message).await
    }

    /// Acknowledges a delivery; `message` names it in the error.
    async fn acknowledge(&self, tag: u64, message: &str) -> Result<(), CliError> {
        self.read_channel
            .basic_ack(tag, BasicAckOptions::default())
            .await?;
        if self.read_channel.status().connected() {
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
            Ok(())
        } else {
            Err(CliError::server(format!(
                "RabbitMQ: the channel closed before {message} was acknowledged; it may still be in the queue `{}`",
                self.queue
            )))
        }
    }

    /// Requeues unacknowledged messages and closes the connection. Waits for the reply to
    /// `channel.close`, since `basic.ack` has none, and until the requeued messages are ready, so
    /// that the next reader receives them.
    pub(crate) async fn close(self) {
        let all = BasicNackOptions {
            multiple: true,
            requeue: true,
        };
        let _ = tokio::time::timeout(REQUEST_TIMEOUT, self.read_channel.basic_nack(0, all)).await;
        let _ =
            tokio::time::timeout(REQUEST_TIMEOUT, self.read_channel.close(200, "OK".into())).await;
        let unacked = self.received - self.acknowledged.load(Ordering::Relaxed);
        let _ = tokio::time::timeout(REQUEUE_TIMEOUT, self.wait_until_requeued(unacked)).await;
        let _ =
            tokio::time::timeout(REQUEST_TIMEOUT, self.connection.close(200, "OK".into())).await;
        let publish_connection = &self.publish_connection;
        if !publish_connection.status().blocked() {
            let close = publish_connection.close(200, "OK".into());
            let _ = tokio::time::timeout(REQUEST_TIMEOUT, close).await;
        }
    }

    /// Waits until the queue has at least this many ready messages.
    async fn wait_until_requeued(&self, unacked: u64) -> lapin::Result<()> {
        let channel = within_limit(self.connection.create_channel()).await?;
        while u64::from(declare_passively(&channel, &self.queue).await?) < unacked {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

/// The delivery of a message that a [`QueueReader`] returned.
fn unacked(dead_letter: &DeadLetter) -> Result<&UnackedDelivery, CliError> {
    dead_letter.delivery.as_deref().ok_or_else(|| {
        CliError::server(format!(
            "bug in oncegate: the message at {} has no RabbitMQ delivery tag, so it can be neither redriven nor removed; report this",
            dead_letter.location
        ))
    })
}

/// A hash of id and body: equal for a message and for the dead letter of its copy.
fn message_digest(dead_letter: &DeadLetter) -> u64 {
    let mut hasher = DefaultHasher::new();
    (dead_letter.id(), &dead_letter.body).hash(&mut hasher);
    hasher.finish()
}
