//! Properties and headers of messages in destinations and of their copies.

use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable};
use oncegate::source::headers;

use super::super::{CopyAge, DeadLetter, ROUTING_KEY, is_omitted_from_copies};
use super::{DestinationQueueKind, REPLACED_BY};
use crate::output::now_ms;

/// The properties that every copy keeps: all except headers, timestamp, expiration and user id. The
/// delivery mode is persistent.
fn kept_properties(original: &BasicProperties) -> BasicProperties {
    let mut kept_properties = BasicProperties::default().with_delivery_mode(2);
    macro_rules! keep {
        ($($get:ident $set:ident),*) => { $(if let Some(value) = original.$get() { kept_properties = kept_properties.$set(value.clone()); })* };
    }
    keep!(content_type with_content_type, content_encoding with_content_encoding, priority with_priority);
    keep!(correlation_id with_correlation_id, reply_to with_reply_to, message_id with_message_id);
    keep!(kind with_type, app_id with_app_id, cluster_id with_cluster_id);
    kept_properties
}

/// The properties of a redriven copy, without those that record earlier deliveries.
pub(super) fn redriven_properties(original: &BasicProperties, age: CopyAge) -> BasicProperties {
    let mut kept_properties = kept_properties(original);
    if original.timestamp().is_some() {
        // With the original timestamp the consumer could treat the copy as older than the window.
        kept_properties = kept_properties.with_timestamp(now_ms() / 1_000);
    }
    let mut table = FieldTable::default();
    for (name, value) in original
        .headers()
        .as_ref()
        .into_iter()
        .flat_map(|table| table.inner())
    {
        if !is_omitted_from_copies(name.as_str()) {
            table.insert(name.clone(), value.clone());
        }
    }
    if let Some(first_seen) = age.first_seen_header() {
        table.insert(
            headers::FIRST_SEEN.into(),
            AMQPValue::LongString(first_seen.into()),
        );
    }
    kept_properties.with_headers(table)
}

/// The properties of a copy that replaces a message in its queue: those of the message without its
/// delivery count and `CC`/`BCC`, plus headers with its routing key and the id of this reader.
pub(super) fn replacement_properties(
    delivery: &Delivery,
    queue: &str,
    reader_id: &str,
) -> BasicProperties {
    let mut copy = kept_properties(&delivery.properties);
    if let Some(sent) = delivery.properties.timestamp() {
        copy = copy.with_timestamp(*sent);
    }
    let dropped = ["x-delivery-count", "x-acquired-count", "CC", "BCC"];
    let mut headers = FieldTable::default();
    for (name, value) in delivery
        .properties
        .headers()
        .as_ref()
        .into_iter()
        .flat_map(|table| table.inner())
    {
        if !dropped.contains(&name.as_str()) {
            headers.insert(name.clone(), value.clone());
        }
    }
    if delivery.routing_key.as_str() != queue && !headers.inner().contains_key(ROUTING_KEY) {
        headers.insert(
            ROUTING_KEY.into(),
            AMQPValue::LongString(delivery.routing_key.as_str().into()),
        );
    }
    headers.insert(REPLACED_BY.into(), AMQPValue::LongString(reader_id.into()));
    copy.with_headers(headers)
}

/// The header `x-death` that RabbitMQ writes when it dead-letters a message.
///
/// Only RabbitMQ can set it: RabbitMQ overwrites the header of a producer, and oncegate removes it
/// from messages that it dead-letters. So the `oncegate-*` headers of a message with `x-death` were
/// written by its producer, or by oncegate in a delayed copy.
pub(super) struct XDeath {
    /// The queue that the message was dead-lettered from.
    pub(super) queue: Option<String>,
    /// When it was dead-lettered, in milliseconds since 1970.
    pub(super) at_ms: Option<u64>,
}

impl XDeath {
    /// Reads the first entry of the header, which describes the last dead-lettering.
    pub(super) fn of(table: &FieldTable) -> Option<Self> {
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

/// The delivery count of a message, if its queue counts deliveries. A classic queue does not: there
/// an earlier quorum queue set the header, which is ignored.
pub(super) fn delivery_count(table: &FieldTable, queue_kind: DestinationQueueKind) -> Option<u64> {
    if queue_kind == DestinationQueueKind::Classic {
        return None;
    }
    let counted = table
        .inner()
        .get("x-delivery-count")
        .and_then(AMQPValue::as_long_long_int)
        .and_then(|count| u64::try_from(count).ok());
    // A queue that counts sets no header on the first delivery.
    counted.or((queue_kind == DestinationQueueKind::UnlimitedQuorum).then_some(0))
}

/// AMQP's limit for a routing key. The consumer ignores a longer [`ROUTING_KEY`] header.
const MAX_ROUTING_KEY_BYTES: usize = 255;

/// The ordering key that the consumer gives a message: `rabbitmq.key-header`, else the original
/// routing key.
pub(super) fn ordering_key(
    table: &FieldTable,
    routing_key: &str,
    key_header: Option<&str>,
) -> Vec<u8> {
    let original_routing_key = || match table.inner().get(ROUTING_KEY) {
        Some(AMQPValue::LongString(key)) if key.as_bytes().len() <= MAX_ROUTING_KEY_BYTES => {
            key.as_bytes().to_vec()
        }
        _ => routing_key.as_bytes().to_vec(),
    };
    key_header
        .and_then(|name| table.inner().get(name))
        .map_or_else(original_routing_key, |key| text(key).into_bytes())
}

/// A header value as text.
pub(super) fn text(value: &AMQPValue) -> String {
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

/// The message as a consumer receives it, from which `gate.id` reads the id.
pub(super) fn as_message(dead_letter: &DeadLetter) -> oncegate::Message {
    let mut message = oncegate::Message::new(dead_letter.bytes().to_vec());
    for (name, value) in &dead_letter.headers {
        message = message.with_header(name, value);
    }
    if let Some(key) = &dead_letter.key {
        message = message.with_key(key.clone());
    }
    let id = dead_letter
        .delivery
        .as_ref()
        .and_then(|unacked| unacked.properties.message_id().as_ref());
    match id {
        Some(id) => message.with_message_id(id.as_str().as_bytes().to_vec()),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ordering_key_is_that_of_the_consumer() {
        let mut table = FieldTable::default();
        let key = |table: &FieldTable, key_header| {
            let key = ordering_key(table, "payments.dead-letters", key_header);
            String::from_utf8(key).expect("UTF-8")
        };
        assert_eq!(key(&table, Some("customer")), "payments.dead-letters");
        let long = "k".repeat(MAX_ROUTING_KEY_BYTES + 1);
        table.insert(ROUTING_KEY.into(), AMQPValue::LongString(long.into()));
        assert_eq!(key(&table, None), "payments.dead-letters", "too long");
        table.insert(ROUTING_KEY.into(), AMQPValue::LongString("eu".into()));
        assert_eq!(key(&table, Some("customer")), "eu");
        table.insert("customer".into(), AMQPValue::LongString("c7".into()));
        assert_eq!(key(&table, Some("customer")), "c7");
        assert_eq!(key(&table, None), "eu");
    }
}
