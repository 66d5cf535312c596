//! Converts the deliveries of lapin to those of `oncegate_core`. For *copies* see `message_copy`.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery as RawDelivery;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate_core::message::{Headers, HeadersBuilder, Message, Origin, ReplyAddress};
use oncegate_core::source::{Delivery, Receipt, headers};

use crate::protocol::queue_settings::QueueSettings;

/// In a copy, the header that has the routing key of the original. The copy's own routing key is
/// the name of its queue: a delay, dead-letter or in-doubt queue.
pub(crate) const ROUTING_KEY: &str = "oncegate-routing-key";

/// AMQP's limit for a routing key. A longer [`ROUTING_KEY`] header is ignored: oncegate did not
/// write it.
const MAX_ROUTING_KEY_BYTES: usize = 255;

/// In a delayed copy, the header that has the end of the delay, in milliseconds since 1970. A copy
/// has it if its delay is longer than the TTL of its delay queue, so that the source must delay it
/// again.
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

/// The `x-delivery-count` of a quorum queue: how often the message was requeued, or, since RabbitMQ 4.3,
/// how often it was requeued otherwise than by `basic.nack`.
pub(crate) fn delivery_count(message: &Message) -> Option<u32> {
    let count = message.headers.last("x-delivery-count")?;
    std::str::from_utf8(count).ok()?.parse().ok()
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
    let origin = Origin::new(Arc::clone(queue)).with_system("rabbitmq");
    let mut message = Message::received(origin, data);
    message.key = Some(key);
    message.message_id = properties
        .message_id()
        .as_ref()
        .map(|id| Bytes::copy_from_slice(id.as_str().as_bytes()));
    message.headers = headers;
    let text = |text: &ShortString| text.as_str().to_owned();
    let reply_queue = properties.reply_to().as_ref();
    message.reply_to = reply_queue
        .filter(|it| !it.as_str().is_empty())
        .map(|queue| {
            Box::new(ReplyAddress {
                destination: text(queue),
                correlation_id: properties.correlation_id().as_ref().map(text),
            })
        });
    message.sent_at = properties
        .timestamp()
        .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    let failures = table.map_or(0, |table| {
        // With `Rejects::Published` the broker adds no `x-death` for this source's rejections, so the
        // header may be forged by a producer.
        let rejections = settings
            .counts_rejections()
            .then(|| rejections(table, queue));
        failures_at_release(table).max(rejections.unwrap_or(0))
    });
    (
        Delivery::new(message, Receipt::new(epoch, delivery_tag)).with_failures(failures),
        OriginalProperties {
            properties,
            routing_key,
            received,
        },
    )
}

/// Whether a short string of the message was not UTF-8. The frame sanitizer has replaced its bytes,
/// so two different ids, for example, may look the same. True also for a valid string that contains
/// [`INVALID_UTF8_MARK`].
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

/// The remaining delay of a delayed copy; `None` if it is over, if the header is missing or invalid, or
/// if the source uses no delay queues (the header is then from before a change of the settings).
/// `unix` is the time since 1970.
pub(crate) fn remaining_delay(
    delivery: &Delivery,
    settings: &QueueSettings,
    unix: Duration,
) -> Option<Duration> {
    let text = std::str::from_utf8(delivery.message.headers.last(NOT_BEFORE)?).ok()?;
    Duration::from_millis(text.parse().ok()?)
        .checked_sub(unix)
        .filter(|remaining| *remaining > Duration::ZERO && *remaining <= MAX_DELAY)
        .filter(|_| settings.uses_delay_queues())
}

fn read_headers(table: &FieldTable) -> Headers {
    let mut builder = HeadersBuilder::default();
    for (name, value) in table {
        let name = name.as_str().as_bytes();
        match value {
            AMQPValue::LongString(value) => builder.push(name, Some(value.as_bytes())),
            AMQPValue::ByteArray(value) => builder.push(name, Some(value.as_slice())),
            AMQPValue::ShortString(value) => builder.push(name, Some(value.as_str().as_bytes())),
            value => builder.push(name, scalar_text(value).as_deref().map(str::as_bytes)),
        }
    }
    builder.finish()
}

/// A number or a boolean as text; `None` for null, decimals, tables and arrays, such as `x-death`.
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

/// The number of failed attempts, from the header that the source wrote into the delayed copy when
/// the consumer released the message.
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
    use crate::{RabbitMq, Rejects, Topology};

    /// The time since 1970 at which the tests run.
    const NOW: Duration = Duration::from_secs(1_800_000_000);

    fn text(value: impl AsRef<[u8]>) -> AMQPValue {
        AMQPValue::LongString(value.as_ref().into())
    }

    fn table<const N: usize>(entries: [(&str, AMQPValue); N]) -> FieldTable {
        let mut table = FieldTable::default();
        for (name, value) in entries {
            table.insert(name.into(), value);
        }
        table
    }

    fn settings(change: impl Fn(RabbitMq) -> RabbitMq) -> SourceContext {
        change(RabbitMq::queue("q")).check().expect("settings")
    }

    fn parse_with(
        properties: BasicProperties,
        settings: &QueueSettings,
    ) -> (Delivery, OriginalProperties) {
        let body = b"body".to_vec();
        let mut raw = RawDelivery::mock(7, "".into(), "a.key".into(), false, body);
        raw.properties = properties;
        parse_delivery(raw, settings, 3, NOW)
    }

    /// A message with these headers, to a source that leaves rejections to the queue.
    fn parse_headers(headers: FieldTable) -> Delivery {
        let settings = settings(|source| source.rejects(Rejects::ByQueue));
        parse_with(BasicProperties::default().with_headers(headers), &settings).0
    }

    #[test]
    fn properties_and_headers_are_converted_to_text() {
        let headers = table([
            ("text", text("as it is")),
            ("bytes", AMQPValue::ByteArray(vec![0xff, 0].into())),
            ("number", AMQPValue::LongLongInt(-5)),
            ("truth", AMQPValue::Boolean(true)),
            ("null", AMQPValue::Void),
            ("nested", AMQPValue::FieldTable(FieldTable::default())),
        ]);
        let properties = BasicProperties::default()
            .with_headers(headers)
            .with_message_id("m-1".into())
            .with_timestamp(1_000)
            .with_expiration("5".into());
        let (delivery, original) = parse_with(properties, &settings(|source| source));
        let message = &delivery.message;
        for (name, value) in [
            ("text", Some(&b"as it is"[..])),
            ("bytes", Some(&[0xff, 0][..])),
            ("number", Some(b"-5")),
            ("truth", Some(b"true")),
            ("nested", None),
        ] {
            assert_eq!(message.headers.last(name), value, "{name}");
        }
        assert!(message.headers.iter().any(|it| it == (&b"null"[..], None)));
        let sent_at = UNIX_EPOCH + Duration::from_secs(1_000);
        assert_eq!(
            (
                message.message_id.as_deref(),
                message.sent_at,
                &message.body[..]
            ),
            (Some(&b"m-1"[..]), Some(sent_at), &b"body"[..])
        );
        assert_eq!(
            (&*message.origin.name, message.origin.system),
            ("q", Some("rabbitmq"))
        );
        let receipt = Receipt::new(3, 7);
        assert_eq!((delivery.receipt, original.received), (receipt, NOW));
        assert!(original.properties.expiration().is_some());
        let out_of_range = BasicProperties::default().with_timestamp(u64::MAX);
        let delivery = parse_with(out_of_range, &settings(|source| source)).0;
        assert_eq!(delivery.message.sent_at, None);
    }

    fn death(queue: AMQPValue, reason: &str, count: AMQPValue) -> AMQPValue {
        AMQPValue::FieldTable(table([
            ("queue", queue),
            ("reason", text(reason)),
            ("count", count),
        ]))
    }

    fn deaths(deaths: Vec<AMQPValue>) -> (&'static str, AMQPValue) {
        ("x-death", AMQPValue::FieldArray(deaths.into()))
    }

    #[test]
    fn the_larger_number_of_releases_and_rejections_from_this_queue_is_the_number_of_failures() {
        let from =
            |queue: &str, reason, count| death(text(queue), reason, AMQPValue::LongLongInt(count));
        let three = || {
            deaths(vec![
                from("q", "rejected", 3),
                from("q", "expired", 90),
                from("another", "rejected", 80),
            ])
        };
        let released = |count| (headers::FAILURES, AMQPValue::LongLongInt(count));
        for (headers, failures) in [
            (table([]), 0),
            (table([(headers::FAILURES, text("3"))]), 3),
            (table([(headers::FAILURES, AMQPValue::LongInt(4))]), 4),
            (table([three()]), 3),
            (table([three(), released(2)]), 3),
            (table([three(), released(4)]), 4),
            (table([deaths(vec![from("q", "rejected", i64::MAX); 3])]), 0),
            (table([("x-death", text("not an array"))]), 0),
            // Redeliveries after a lost connection are not failures.
            (table([("x-delivery-count", AMQPValue::LongLongInt(50))]), 0),
            (table([("x-acquired-count", AMQPValue::LongLongInt(50))]), 0),
        ] {
            assert_eq!(
                parse_headers(headers.clone()).failures,
                failures,
                "{headers:?}"
            );
        }
        let properties = BasicProperties::default().with_headers(table([three()]));
        let (delivery, _) = parse_with(properties, &settings(|source| source));
        assert_eq!(delivery.failures, 0, "a producer may have forged x-death");
    }

    #[test]
    fn forged_counts_count_as_zero() {
        let queue = || text("q");
        for count in [
            text("-1"),
            text("4294967295"),
            text("9999999999999999999999"),
            text("many"),
            text(""),
            AMQPValue::LongLongInt(-7),
            AMQPValue::LongLongInt(i64::MAX),
            AMQPValue::Double(f64::INFINITY),
            AMQPValue::FieldTable(FieldTable::default()),
            AMQPValue::Void,
            AMQPValue::ByteArray(vec![0xff; 40].into()),
        ] {
            let rejected = table([deaths(vec![death(queue(), "rejected", count.clone())])]);
            assert_eq!(parse_headers(rejected).failures, 0, "{count:?}");
            let released = table([(headers::FAILURES, count.clone())]);
            assert_eq!(parse_headers(released).failures, 0, "{count:?}");
        }
        let of_no_queue = death(AMQPValue::Boolean(true), "rejected", AMQPValue::LongInt(1));
        let invalid = table([deaths(vec![AMQPValue::Void, of_no_queue])]);
        assert_eq!(parse_headers(invalid).failures, 0);
    }

    #[test]
    fn a_copy_whose_delay_is_not_over_is_delayed_again() {
        let (now, day) = (NOW.as_millis(), 86_400_000);
        let (seconds, declare, trust) = (
            |count| Some(Duration::from_secs(count)),
            Topology::Declare,
            Topology::Trust,
        );
        for (not_before, topology, remaining) in [
            (Some((now + 60_000).to_string()), declare, seconds(60)),
            (Some((now + day).to_string()), declare, seconds(86_400)),
            (Some((now + 60_000).to_string()), trust, None),
            (Some((now - 1).to_string()), declare, None),
            (Some(u64::MAX.to_string()), declare, None),
            (Some("soon".into()), declare, None),
            (Some(String::new()), declare, None),
            (None, declare, None),
        ] {
            let headers = not_before
                .as_ref()
                .map_or_else(FieldTable::default, |at| table([(NOT_BEFORE, text(at))]));
            let settings = settings(|source| source.topology(topology));
            let found = remaining_delay(&parse_headers(headers), &settings, NOW);
            assert_eq!(found, remaining, "{not_before:?}, {topology:?}");
        }
    }

    #[test]
    fn the_key_is_the_key_header_or_the_routing_key() {
        let settings = settings(|source| source.key_header("customer"));
        for (headers, key, routing_key) in [
            (table([("customer", text("c-1"))]), "c-1", Some("a.key")),
            (
                table([("customer", AMQPValue::LongInt(7))]),
                "7",
                Some("a.key"),
            ),
            (table([("customer", AMQPValue::Void)]), "a.key", None),
            (table([]), "a.key", None),
            // The key of a delayed copy's original, of at most 255 bytes.
            (table([(ROUTING_KEY, text("orders.eu"))]), "orders.eu", None),
            (table([(ROUTING_KEY, text("k".repeat(256)))]), "a.key", None),
        ] {
            let properties = BasicProperties::default().with_headers(headers.clone());
            let (delivery, original) = parse_with(properties, &settings);
            assert_eq!(
                (
                    delivery.message.key.as_deref(),
                    original.routing_key.as_deref()
                ),
                (Some(key.as_bytes()), routing_key.map(str::as_bytes)),
                "{headers:?}"
            );
        }
    }
}
