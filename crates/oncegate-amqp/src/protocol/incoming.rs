//! Converts the broker's deliveries to the core's.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery as RawDelivery;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_core::message::{Headers, HeadersBuilder, Message, Origin, Position};
use oncegate_core::source::{Delivery, Receipt, headers};

use crate::protocol::queue_settings::QueueSettings;
use crate::protocol::topology::DELAYS;

/// The header of a copy with the routing key of the original. The copy's own routing key is the name
/// of its queue: a delay, dead-letter or in-doubt queue.
pub(crate) const ROUTING_KEY: &str = "oncegate-routing-key";

/// AMQP's limit for a routing key. A longer [`ROUTING_KEY`] header is ignored, because oncegate does
/// not write one.
const MAX_ROUTING_KEY_BYTES: usize = 255;

/// The header of a delayed copy with the end of its delay, in milliseconds since 1970. A copy has it
/// if its delay is longer than the TTL of its delay queue, so that it needs another one.
pub(crate) const NOT_BEFORE: &str = "oncegate-not-before";

/// The longest accepted delay: a [`NOT_BEFORE`] header further in the future is ignored as forged.
const MAX_DELAY: Duration = Duration::from_secs(366 * 86_400);

/// The largest accepted number of failures. A larger one is ignored as forged and counts as 0.
const MAX_FAILURES: u32 = 100_000;

/// The character that replaces each byte of a short string that is not UTF-8. Two such strings may look
/// the same, so a string with this character must not be used as an id.
pub(crate) const INVALID_UTF8_MARK: char = '\u{1a}';

/// The parts of a message that a copy needs in addition to the delivery.
#[derive(Clone, Debug, Default)]
pub(crate) struct OriginalProperties {
    pub(crate) properties: BasicProperties,
    /// The routing key, if the key header's value is the message's key instead.
    pub(crate) routing_key: Option<Bytes>,
    /// When the delivery was received, since 1970 by the system clock.
    pub(crate) received: Duration,
}

/// Converts a delivery, and returns the parts that a copy needs in addition. Does not copy the body.
/// `received` is the time since 1970.
pub(crate) fn parse_delivery(
    raw: RawDelivery,
    settings: &QueueSettings,
    epoch: u64,
    received: Duration,
) -> (Delivery, OriginalProperties) {
    let RawDelivery {
        delivery_tag,
        routing_key,
        properties,
        data,
        ..
    } = raw;
    let table = properties.headers().as_ref();
    let original_key = table
        .and_then(|table| long_string(table, ROUTING_KEY))
        .filter(|key| key.len() <= MAX_ROUTING_KEY_BYTES);
    let routing_key = original_key.unwrap_or_else(|| Bytes::from(String::from(routing_key)));
    let headers = table.map(read_headers).unwrap_or_default();
    let key = settings
        .key_header
        .as_ref()
        .and_then(|name| headers.last(name))
        .map(Bytes::copy_from_slice);
    let (key, routing_key) = match key {
        Some(key) => (key, Some(routing_key)),
        None => (routing_key, None),
    };
    let queue = &settings.name;
    let message = Message {
        origin: Origin {
            name: Arc::clone(queue),
            position: Position::Queue,
            system: Some("rabbitmq"),
        },
        key: Some(key),
        message_id: properties
            .message_id()
            .as_ref()
            .map(|id| Bytes::copy_from_slice(id.as_str().as_bytes())),
        headers,
        body: Bytes::from(data),
        sent_at: properties
            .timestamp()
            .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
    };
    let failures = table.map_or(0, |table| {
        // With `Rejects::Published` the broker adds no `x-death` for this source's rejections, so the
        // header may be forged by a producer.
        let rejections = settings
            .counts_rejections()
            .then(|| rejections(table, queue));
        failures_at_release(table).max(rejections.unwrap_or(0))
    });
    (
        Delivery {
            message,
            receipt: Receipt {
                epoch,
                partition: 0,
                position: delivery_tag,
            },
            failures,
        },
        OriginalProperties {
            properties,
            routing_key,
            received,
        },
    )
}

/// Whether a short string of the message was not UTF-8. The frame sanitizer has replaced its bytes, so
/// two different ids, for example, may look the same.
pub(crate) fn has_invalid_utf8(raw: &RawDelivery) -> bool {
    let properties = &raw.properties;
    let short_strings = [
        properties.content_type(),
        properties.content_encoding(),
        properties.correlation_id(),
        properties.reply_to(),
        properties.expiration(),
        properties.message_id(),
        properties.kind(),
        properties.user_id(),
        properties.app_id(),
        properties.cluster_id(),
    ];
    let header_names = properties
        .headers()
        .iter()
        .flat_map(|table| table.inner().keys());
    short_strings
        .into_iter()
        .flatten()
        .chain(header_names)
        .chain([&raw.routing_key])
        .any(|text| text.as_str().contains(INVALID_UTF8_MARK))
}

/// The remaining delay of a delayed copy; `None` if it is over, or if the header is missing or invalid.
/// Without delay queues the delivery waits in memory, unacknowledged, so the result is at most the
/// longest of [`DELAYS`]. `unix` is the time since 1970.
pub(crate) fn remaining_delay(
    delivery: &Delivery,
    settings: &QueueSettings,
    unix: Duration,
) -> Option<Duration> {
    let text = std::str::from_utf8(delivery.message.headers.last(NOT_BEFORE)?).ok()?;
    Duration::from_millis(text.parse().ok()?)
        .checked_sub(unix)
        .filter(|remaining| *remaining > Duration::ZERO && *remaining <= MAX_DELAY)
        .map(|remaining| {
            if settings.uses_delay_queues() {
                remaining
            } else {
                remaining.min(DELAYS[DELAYS.len() - 1])
            }
        })
}

fn read_headers(table: &FieldTable) -> Headers {
    let mut builder = HeadersBuilder::default();
    for (name, value) in table {
        let name = name.as_str().as_bytes();
        match value {
            AMQPValue::LongString(value) => builder.push(name, Some(value.as_bytes())),
            AMQPValue::ByteArray(value) => builder.push(name, Some(value.as_slice())),
            AMQPValue::ShortString(value) => builder.push(name, Some(value.as_str().as_bytes())),
            AMQPValue::Void => builder.push(name, None),
            value => {
                if let Some(text) = scalar_text(value) {
                    builder.push(name, Some(text.as_bytes()));
                }
            }
        }
    }
    builder.finish()
}

/// A number or a boolean as text; `None` for tables and arrays, such as `x-death`.
fn scalar_text(value: &AMQPValue) -> Option<String> {
    Some(match value {
        AMQPValue::Boolean(value) => value.to_string(),
        AMQPValue::ShortShortInt(value) => value.to_string(),
        AMQPValue::ShortShortUInt(value) => value.to_string(),
        AMQPValue::ShortInt(value) => value.to_string(),
        AMQPValue::ShortUInt(value) => value.to_string(),
        AMQPValue::LongInt(value) => value.to_string(),
        AMQPValue::LongUInt(value) => value.to_string(),
        AMQPValue::LongLongInt(value) => value.to_string(),
        AMQPValue::Float(value) => value.to_string(),
        AMQPValue::Double(value) => value.to_string(),
        AMQPValue::Timestamp(value) => value.to_string(),
        _ => return None,
    })
}

fn long_string(table: &FieldTable, name: &str) -> Option<Bytes> {
    match table.inner().get(name)? {
        AMQPValue::LongString(value) => Some(Bytes::copy_from_slice(value.as_bytes())),
        _ => None,
    }
}

/// The number of failed attempts, from the header that the last release wrote into the copy.
///
/// The broker's `x-delivery-count` and `x-acquired-count` are ignored: they increase with every lost
/// connection, also for prefetched messages that no handler received. The store counts attempts that
/// ended with a crash.
fn failures_at_release(table: &FieldTable) -> u32 {
    accepted_failures(table.inner().get(headers::FAILURES).and_then(integer))
}

/// How often consumers of this queue rejected the message before it returned through a dead-letter
/// exchange, according to `x-death`.
fn rejections(table: &FieldTable, queue: &str) -> u32 {
    let Some(AMQPValue::FieldArray(deaths)) = table.inner().get("x-death") else {
        return 0;
    };
    let counts = deaths.as_slice().iter().filter_map(|death| match death {
        AMQPValue::FieldTable(death) => {
            let has_text = |name: &str, value: &str| {
                long_string(death, name).is_some_and(|text| text == value.as_bytes())
            };
            (has_text("queue", queue) && has_text("reason", "rejected"))
                .then(|| death.inner().get("count").and_then(integer))?
        }
        _ => None,
    });
    accepted_failures(Some(counts.fold(0, u64::saturating_add)))
}

/// An integer of any AMQP type, or as decimal text.
fn integer(value: &AMQPValue) -> Option<u64> {
    match value {
        AMQPValue::LongString(value) => std::str::from_utf8(value.as_bytes()).ok()?.parse().ok(),
        value => scalar_text(value)?.parse().ok(),
    }
}

/// The count, or 0 if it is missing or above [`MAX_FAILURES`].
fn accepted_failures(count: Option<u64>) -> u32 {
    count
        .and_then(|count| u32::try_from(count).ok())
        .filter(|count| *count <= MAX_FAILURES)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::context::SourceContext;
    use crate::{RabbitMq, Topology};

    /// The time since 1970 at which the tests run.
    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn raw(properties: BasicProperties) -> RawDelivery {
        let mut raw = RawDelivery::mock(7, "".into(), "a.key".into(), false, b"body".to_vec());
        raw.properties = properties;
        raw
    }

    fn settings() -> SourceContext {
        let source = RabbitMq::queue("q").rejects(crate::Rejects::ByQueue);
        source.check().expect("settings")
    }

    fn parse_headers(headers: FieldTable) -> Delivery {
        parse_delivery(
            raw(BasicProperties::default().with_headers(headers)),
            &settings(),
            3,
            NOW,
        )
        .0
    }

    #[test]
    fn properties_and_headers_are_converted_to_text() {
        let mut table = FieldTable::default();
        table.insert("text".into(), AMQPValue::LongString("as it is".into()));
        table.insert("bytes".into(), AMQPValue::ByteArray(vec![0xff, 0].into()));
        table.insert("number".into(), AMQPValue::LongLongInt(-5));
        table.insert("truth".into(), AMQPValue::Boolean(true));
        table.insert("null".into(), AMQPValue::Void);
        table.insert(
            "nested".into(),
            AMQPValue::FieldTable(FieldTable::default()),
        );
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_message_id("m-1".into())
            .with_timestamp(1_000)
            .with_expiration("5".into());
        let (delivery, original) = parse_delivery(raw(properties), &settings(), 3, NOW);
        let message = &delivery.message;
        assert_eq!(
            (message.key.as_deref(), message.message_id.as_deref()),
            (Some(&b"a.key"[..]), Some(&b"m-1"[..]))
        );
        assert_eq!(
            message.sent_at,
            Some(UNIX_EPOCH + Duration::from_secs(1_000))
        );
        assert_eq!(message.headers.last("text"), Some(&b"as it is"[..]));
        assert_eq!(message.headers.last("bytes"), Some(&[0xff, 0][..]));
        assert_eq!(message.headers.last("number"), Some(&b"-5"[..]));
        assert_eq!(message.headers.last("truth"), Some(&b"true"[..]));
        assert!(message.headers.iter().any(|it| it == (&b"null"[..], None)));
        assert_eq!(message.headers.last("nested"), None);
        assert_eq!(
            delivery.receipt,
            Receipt {
                epoch: 3,
                partition: 0,
                position: 7
            }
        );
        assert_eq!(
            (
                &message.body[..],
                &*message.origin.name,
                message.origin.system
            ),
            (&b"body"[..], "q", Some("rabbitmq"))
        );
        assert!(original.properties.expiration().is_some());
    }

    #[test]
    fn a_timestamp_out_of_range_is_ignored() {
        let delivery = parse_delivery(
            raw(BasicProperties::default().with_timestamp(u64::MAX)),
            &settings(),
            1,
            NOW,
        )
        .0;
        assert_eq!(delivery.message.sent_at, None);
    }

    #[test]
    fn an_invalid_number_of_failures_counts_as_zero() {
        let released = |value: AMQPValue| {
            let mut table = FieldTable::default();
            table.insert(headers::FAILURES.into(), value);
            parse_headers(table).failures
        };
        assert_eq!(released(AMQPValue::LongString("3".into())), 3);
        assert_eq!(released(AMQPValue::LongInt(4)), 4);
        for invalid in ["-1", "4294967295", "many", ""] {
            assert_eq!(
                released(AMQPValue::LongString(invalid.into())),
                0,
                "{invalid}"
            );
        }
        assert_eq!(parse_headers(FieldTable::default()).failures, 0);
    }

    fn death(queue: AMQPValue, reason: &str, count: AMQPValue) -> AMQPValue {
        let mut death = FieldTable::default();
        death.insert("queue".into(), queue);
        death.insert("reason".into(), AMQPValue::LongString(reason.into()));
        death.insert("count".into(), count);
        AMQPValue::FieldTable(death)
    }

    fn dead(deaths: Vec<AMQPValue>) -> FieldTable {
        let mut table = FieldTable::default();
        table.insert("x-death".into(), AMQPValue::FieldArray(deaths.into()));
        table
    }

    #[test]
    fn rejections_from_this_queue_count_and_the_larger_number_wins() {
        let queue = |name: &str| AMQPValue::LongString(name.into());
        let deaths = || {
            vec![
                death(queue("q"), "rejected", AMQPValue::LongLongInt(3)),
                death(queue("q"), "expired", AMQPValue::LongLongInt(90)),
                death(queue("another"), "rejected", AMQPValue::LongLongInt(80)),
            ]
        };
        assert_eq!(parse_headers(dead(deaths())).failures, 3);
        let published = RabbitMq::queue("q").check().expect("settings");
        let properties = BasicProperties::default().with_headers(dead(deaths()));
        let (delivery, _) = parse_delivery(raw(properties), &published, 3, NOW);
        assert_eq!(delivery.failures, 0, "a producer may have forged x-death");
        for (released, failures) in [(2, 3), (4, 4)] {
            let mut table = dead(deaths());
            table.insert(headers::FAILURES.into(), AMQPValue::LongLongInt(released));
            assert_eq!(parse_headers(table).failures, failures);
        }
    }

    #[test]
    fn forged_counts_of_other_types_count_as_zero() {
        let queue = || AMQPValue::LongString("q".into());
        for count in [
            AMQPValue::LongLongInt(-7),
            AMQPValue::LongLongInt(i64::MAX),
            AMQPValue::Double(f64::INFINITY),
            AMQPValue::LongString("9999999999999999999999".into()),
            AMQPValue::FieldTable(FieldTable::default()),
            AMQPValue::Void,
            AMQPValue::ByteArray(vec![0xff; 40].into()),
        ] {
            assert_eq!(
                parse_headers(dead(vec![death(queue(), "rejected", count.clone())])).failures,
                0,
                "{count:?}"
            );
            let mut own = FieldTable::default();
            own.insert(headers::FAILURES.into(), count.clone());
            assert_eq!(parse_headers(own).failures, 0, "{count:?}");
        }
        let mut ignored = FieldTable::default();
        ignored.insert(
            "x-death".into(),
            AMQPValue::LongString("not an array".into()),
        );
        ignored.insert("x-delivery-count".into(), AMQPValue::LongLongInt(50));
        ignored.insert("x-acquired-count".into(), AMQPValue::LongLongInt(50));
        assert_eq!(
            parse_headers(ignored).failures,
            0,
            "redeliveries after a lost connection are not failures"
        );
        let invalid = vec![
            AMQPValue::Void,
            death(AMQPValue::Boolean(true), "rejected", AMQPValue::LongInt(1)),
        ];
        assert_eq!(parse_headers(dead(invalid)).failures, 0);
        let overflow = vec![death(queue(), "rejected", AMQPValue::LongLongInt(i64::MAX)); 3];
        assert_eq!(parse_headers(dead(overflow)).failures, 0);
    }

    #[test]
    fn a_copy_whose_delay_is_not_over_is_delayed_again() {
        let remaining_under = |topology, text: String| {
            let mut table = FieldTable::default();
            table.insert(NOT_BEFORE.into(), AMQPValue::LongString(text.into()));
            remaining_delay(
                &parse_headers(table),
                &RabbitMq::queue("q")
                    .topology(topology)
                    .check()
                    .expect("settings"),
                NOW,
            )
        };
        let remaining = |text| remaining_under(Topology::Declare, text);
        let now = NOW.as_millis();
        let minute = remaining((now + 60_000).to_string()).expect("the delay is not over");
        assert_eq!(minute, Duration::from_secs(60));
        for over_or_invalid in [
            (now - 1).to_string(),
            u64::MAX.to_string(),
            "soon".into(),
            String::new(),
        ] {
            assert_eq!(remaining(over_or_invalid), None);
        }
        assert_eq!(
            remaining_delay(
                &parse_headers(FieldTable::default()),
                &RabbitMq::queue("q").check().expect("settings"),
                NOW
            ),
            None
        );
        let day = (now + 86_400_000).to_string();
        assert_eq!(remaining(day.clone()), Some(Duration::from_secs(86_400)));
        assert_eq!(
            remaining_under(Topology::Trust, day),
            Some(Duration::from_secs(600)),
            "a delivery must not occupy the prefetch for a day"
        );
    }

    #[test]
    fn the_key_is_the_key_header_or_the_routing_key() {
        let settings = RabbitMq::queue("q")
            .key_header("customer")
            .check()
            .expect("settings");
        let keys = |value: Option<AMQPValue>| {
            let mut table = FieldTable::default();
            if let Some(value) = value {
                table.insert("customer".into(), value);
            }
            let (delivery, original) = parse_delivery(
                raw(BasicProperties::default().with_headers(table)),
                &settings,
                1,
                NOW,
            );
            let text = |key: Bytes| String::from_utf8(key.to_vec()).expect("text");
            (
                delivery.message.key.map(text),
                original.routing_key.map(text),
            )
        };
        let both = |key: &str, routing_key: Option<&str>| {
            (Some(key.to_owned()), routing_key.map(str::to_owned))
        };
        assert_eq!(
            keys(Some(AMQPValue::LongString("c-1".into()))),
            both("c-1", Some("a.key"))
        );
        assert_eq!(keys(Some(AMQPValue::LongInt(7))), both("7", Some("a.key")));
        assert_eq!(keys(Some(AMQPValue::Void)), both("a.key", None));
        assert_eq!(keys(None), both("a.key", None));
    }

    #[test]
    fn a_delayed_copy_keeps_its_routing_key() {
        let mut table = FieldTable::default();
        table.insert(
            ROUTING_KEY.into(),
            AMQPValue::LongString("orders.eu".into()),
        );
        assert_eq!(
            parse_headers(table.clone()).message.key.as_deref(),
            Some(&b"orders.eu"[..])
        );
        table.insert(
            ROUTING_KEY.into(),
            AMQPValue::LongString("k".repeat(256).into()),
        );
        assert_eq!(
            parse_headers(table).message.key.as_deref(),
            Some(&b"a.key"[..]),
            "a routing key is at most 255 bytes long"
        );
    }
}
