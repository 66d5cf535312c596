//! Copies of messages, which are published to the dead-letter queue, the in-doubt queue or a delay
//! queue.

use std::time::Duration;

use lapin::BasicProperties;
use lapin::protocol::basic::gen_properties;
use lapin::types::generation::gen_value;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{Delivery, FailureHistory, first_seen, headers, rejection_headers};

use crate::protocol::incoming::{NOT_BEFORE, OriginalProperties, ROUTING_KEY};
use crate::protocol::queue_settings::QueueSettings;
use crate::protocol::topology::delay_queue_step;

/// The header with the names of headers that were too large for this copy or an earlier one.
pub(crate) const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// The header with the time when a dead letter or in-doubt message was published, in milliseconds
/// since 1970.
pub(crate) const REJECTED_AT: &str = "oncegate-rejected-at";

/// The headers that the source writes. [`MessageCopy::drop_oversized_headers`] keeps their values
/// of at most twice [`MAX_TEXT_BYTES`].
const OWN_HEADERS: [&str; 14] = [
    headers::REASON,
    headers::ID,
    headers::ATTEMPTS,
    headers::CRASHES,
    headers::LAST_ATTEMPT,
    headers::FIRST_ERROR,
    headers::LAST_ERROR,
    headers::ORIGIN,
    headers::FAILURES,
    headers::FIRST_SEEN,
    DROPPED_HEADERS,
    ROUTING_KEY,
    NOT_BEFORE,
    REJECTED_AT,
];

/// The limit for error texts and lists of names in headers, in bytes.
const MAX_TEXT_BYTES: usize = 1_000;

/// Bytes of a header frame that are kept free for headers that the broker adds, such as `x-death`.
const BROKER_HEADER_RESERVE: usize = 8 * 1024;

/// A copy to be published to a queue. Its confirm settles the original.
#[derive(Clone, Debug)]
pub(crate) struct MessageCopy {
    /// The consuming channel that delivered the original (`Receipt::epoch`).
    pub(crate) epoch: u64,
    /// The delivery tag of the original.
    pub(crate) tag: u64,
    /// The name of the queue to publish to.
    pub(crate) destination: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: bytes::Bytes,
}

impl MessageCopy {
    /// A dead letter or in-doubt message: the original's properties and headers, and the headers of
    /// the rejection. Inbound `oncegate-*` headers are removed, except [`DROPPED_HEADERS`] and a
    /// valid [`headers::FIRST_SEEN`]. `unix` is the time since 1970.
    pub(crate) fn rejected(
        delivery: &Delivery,
        reason: &Reason,
        failure_history: Option<&FailureHistory>,
        original: &OriginalProperties,
        settings: &QueueSettings,
        unix: Duration,
    ) -> Self {
        let destination = if reason.is_in_doubt() {
            &settings.in_doubt
        } else {
            &settings.dead_letters
        };
        // The header with the failed attempts is removed, so that a message which an operator or a
        // shovel requeues starts without failures. `x-death` is removed to distinguish the copy from a
        // message that the broker dead-lettered.
        let mut table = copied_headers(&original.properties, &[headers::PREFIX, "x-death"]);
        for (name, value) in rejection_headers(delivery, reason, failure_history) {
            let is_error = [headers::FIRST_ERROR, headers::LAST_ERROR].contains(&name);
            let value = if is_error {
                truncate(&value, MAX_TEXT_BYTES).to_owned()
            } else {
                value
            };
            table.insert(name.into(), AMQPValue::LongString(value.into()));
        }
        // RabbitMQ does not record when a message was published.
        table.insert(
            REJECTED_AT.into(),
            AMQPValue::LongString(unix.as_millis().to_string().into()),
        );
        if let Some(names) = previously_dropped(&original.properties) {
            table.insert(DROPPED_HEADERS.into(), AMQPValue::LongString(names.into()));
        }
        insert_routing_key(&mut table, delivery, original, settings);
        Self::new(delivery, destination.clone(), table, &original.properties)
    }

    /// A copy for the delay queue of [`delay_queue_step`]. If the delay is longer than that
    /// queue's, the header [`NOT_BEFORE`] has the end of the delay, and the source delays the
    /// message again. `unix` is the time since 1970.
    pub(crate) fn delayed(
        delivery: &Delivery,
        after: Duration,
        original: &OriginalProperties,
        settings: &QueueSettings,
        unix: Duration,
    ) -> Self {
        let delay = delay_queue_step(after);
        let mut table = copied_headers(
            &original.properties,
            &[
                "x-death",
                "x-first-death-",
                "x-last-death-",
                "x-delivery-count",
                "x-acquired-count",
                NOT_BEFORE,
            ],
        );
        let mut insert_number = |name: &str, number: u128| {
            table.insert(
                name.into(),
                AMQPValue::LongString(number.to_string().into()),
            );
        };
        insert_number(headers::FAILURES, delivery.failures.into());
        // The earliest known time, because attempts and a delay in the consumer precede the copy. A
        // time in the future is replaced by the current one: a producer may have written
        // milliseconds instead of seconds.
        let earliest = original.received.min(unix).as_millis();
        let first_seen = first_seen(&delivery.message).map_or(earliest, u128::from);
        insert_number(headers::FIRST_SEEN, first_seen.min(earliest));
        if after > delay {
            insert_number(NOT_BEFORE, (unix + after).as_millis());
        }
        insert_routing_key(&mut table, delivery, original, settings);
        Self::new(
            delivery,
            settings.delay_queue(delay),
            table,
            &original.properties,
        )
    }

    /// Drops headers, the largest first, until the others fit into one frame, with
    /// [space](BROKER_HEADER_RESERVE) for those that the broker adds. [`DROPPED_HEADERS`] names them.
    ///
    /// The broker would close the connection at each attempt to publish a larger content header.
    pub(crate) fn drop_oversized_headers(&mut self, frame_max: u32) {
        let (size, limit) = (
            header_frame_size(&self.properties),
            max_header_frame(frame_max),
        );
        if size <= limit {
            return;
        }
        let mut excess = size - limit + MAX_TEXT_BYTES + DROPPED_HEADERS.len();
        let table = self.properties.headers().clone().unwrap_or_default();
        let mut droppable: Vec<_> = table
            .inner()
            .iter()
            .filter(|(name, value)| {
                !OWN_HEADERS.contains(&name.as_str()) || value_size(value) > 2 * MAX_TEXT_BYTES
            })
            .collect();
        droppable.sort_by_key(|(_, value)| std::cmp::Reverse(value_size(value)));
        let mut dropped = Vec::new();
        for (name, value) in droppable {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(name.as_str().len() + value_size(value));
            dropped.push(name.clone());
        }
        let dropped_before = previously_dropped(&self.properties);
        let names: Vec<_> = dropped_before
            .as_deref()
            .into_iter()
            .chain(dropped.iter().map(ShortString::as_str))
            .collect();
        let names = names.join(", ");
        tracing::warn!(
            queue = self.destination.as_str(),
            size,
            frame_max,
            headers = truncate(&names, MAX_TEXT_BYTES),
            "headers dropped from a message copied to this queue: together they exceed the frame size; the copy's header `oncegate-dropped-headers` has the names; raise frame_max in rabbitmq.conf and in the URL, or let the producer send less"
        );
        let mut table = without(&table, |name| {
            dropped.iter().any(|dropped| dropped.as_str() == name)
        });
        table.insert(
            DROPPED_HEADERS.into(),
            AMQPValue::LongString(truncate(&names, MAX_TEXT_BYTES).into()),
        );
        self.properties = std::mem::take(&mut self.properties).with_headers(table);
    }

    fn new(
        delivery: &Delivery,
        destination: ShortString,
        table: FieldTable,
        original: &BasicProperties,
    ) -> Self {
        Self {
            epoch: delivery.receipt.epoch,
            tag: delivery.receipt.position,
            destination,
            properties: copied_properties(original).with_headers(table),
            body: delivery.message.body.clone(),
        }
    }
}

/// The original's properties, with persistent delivery, without expiration and user id: an expired copy
/// would be lost, and the broker refuses the id of another user.
fn copied_properties(original: &BasicProperties) -> BasicProperties {
    let mut kept = BasicProperties::default().with_delivery_mode(2);
    macro_rules! keep {
        ($($get:ident $set:ident),*) => { $(if let Some(value) = original.$get() { kept = kept.$set(value.clone()); })* };
    }
    keep!(content_type with_content_type, content_encoding with_content_encoding, priority with_priority);
    keep!(correlation_id with_correlation_id, reply_to with_reply_to, message_id with_message_id);
    keep!(timestamp with_timestamp, kind with_type, app_id with_app_id, cluster_id with_cluster_id);
    kept
}

/// The original's headers, except those with these prefixes, and except `CC` and `BCC`, with which the
/// broker would route the copy to other queues, too.
fn copied_headers(original: &BasicProperties, dropped_prefixes: &[&str]) -> FieldTable {
    let Some(table) = original.headers() else {
        return FieldTable::default();
    };
    without(table, |name| {
        ["CC", "BCC"].contains(&name)
            || dropped_prefixes
                .iter()
                .any(|prefix| name.starts_with(prefix))
    })
}

/// The headers for which `is_dropped` returns `false`.
fn without(table: &FieldTable, is_dropped: impl Fn(&str) -> bool) -> FieldTable {
    let mut kept = FieldTable::default();
    for (name, value) in table
        .into_iter()
        .filter(|(name, _)| !is_dropped(name.as_str()))
    {
        kept.insert(name.clone(), value.clone());
    }
    kept
}

/// The names in the [`DROPPED_HEADERS`] of an earlier copy.
fn previously_dropped(properties: &BasicProperties) -> Option<String> {
    match properties
        .headers()
        .as_ref()?
        .inner()
        .get(DROPPED_HEADERS)?
    {
        AMQPValue::LongString(names) => {
            Some(truncate(&String::from_utf8_lossy(names.as_bytes()), MAX_TEXT_BYTES).to_owned())
        }
        _ => None,
    }
}

/// The longest prefix of a text within this number of bytes.
fn truncate(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// The limit for a content header's frame, in bytes; `frame_max` 0 is unlimited.
pub(crate) fn max_header_frame(frame_max: u32) -> usize {
    let frame_max = frame_max as usize;
    if frame_max == 0 {
        usize::MAX
    } else {
        frame_max
            .saturating_sub(BROKER_HEADER_RESERVE)
            .max(frame_max / 2)
    }
}

/// The size of a content header's frame: 20 bytes and the properties.
pub(crate) fn header_frame_size(properties: &BasicProperties) -> usize {
    let written = gen_properties(properties)(Vec::<u8>::new().into());
    // Encoding fails only for properties that lapin cannot publish either.
    20 + written.map_or(0, |written| written.into_inner().1 as usize)
}

fn value_size(value: &AMQPValue) -> usize {
    let written = gen_value(value)(Vec::<u8>::new().into());
    written.map_or(0, |written| written.into_inner().1 as usize)
}

/// Inserts the routing key of the original, unless that is the name of the consumed queue.
fn insert_routing_key(
    table: &mut FieldTable,
    delivery: &Delivery,
    original: &OriginalProperties,
    settings: &QueueSettings,
) {
    if let Some(key) = original
        .routing_key
        .as_ref()
        .or(delivery.message.key.as_ref())
        .filter(|key| key[..] != *settings.name.as_bytes())
    {
        table.insert(
            ROUTING_KEY.into(),
            AMQPValue::LongString(key.to_vec().into()),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use oncegate_core::lifecycle::DoubtCause;
    use oncegate_core::message::{HeadersBuilder, Message};
    use oncegate_core::source::Receipt;

    use super::*;
    use crate::RabbitMq;

    const HOUR: Duration = Duration::from_secs(3_600);
    /// The time since 1970 at which the copies are made.
    const NOW: Duration = Duration::from_secs(1_800_000_000);
    const FRAME_MAX: u32 = 131_072;

    fn text(value: impl AsRef<[u8]>) -> AMQPValue {
        AMQPValue::LongString(value.as_ref().into())
    }

    fn with_headers(headers: &[(&str, &str)]) -> BasicProperties {
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert((*name).into(), text(value));
        }
        BasicProperties::default().with_headers(table)
    }

    /// A message received an hour ago.
    fn original(properties: BasicProperties) -> OriginalProperties {
        OriginalProperties {
            properties,
            routing_key: None,
            received: NOW - HOUR,
        }
    }

    /// Properties and headers of which some are not copied.
    fn original_of_many() -> OriginalProperties {
        let names = [
            "CC",
            "BCC",
            "x-death",
            "x-first-death-queue",
            "x-delivery-count",
            "x-acquired-count",
            "mine",
        ];
        let properties = with_headers(&names.map(|name| (name, "v")))
            .with_expiration("1000".into())
            .with_user_id("someone".into())
            .with_content_type("application/json".into())
            .with_message_id("m".into())
            .with_delivery_mode(1);
        original(properties)
    }

    fn delivery_with(headers: &[(&str, &str)]) -> Delivery {
        let mut builder = HeadersBuilder::default();
        for (name, value) in headers {
            builder.push(name.as_bytes(), Some(value.as_bytes()));
        }
        let mut message = Message::new("body").with_key("orders.eu");
        message.headers = builder.finish();
        Delivery::new(message, Receipt::new(2, 9)).with_failures(4)
    }

    fn rejected(delivery: &Delivery, reason: Reason, original: &OriginalProperties) -> MessageCopy {
        let settings = RabbitMq::queue("orders").check().expect("settings");
        MessageCopy::rejected(delivery, &reason, None, original, &settings, NOW)
    }

    fn delayed(delivery: &Delivery, after: Duration, original: &OriginalProperties) -> MessageCopy {
        let settings = RabbitMq::queue("orders").check().expect("settings");
        MessageCopy::delayed(delivery, after, original, &settings, NOW)
    }

    /// A copy of a message without headers of its own, with a delay in milliseconds.
    fn delayed_for(millis: u64) -> MessageCopy {
        let after = Duration::from_millis(millis);
        delayed(&delivery_with(&[]), after, &original_of_many())
    }

    fn header(copy: &MessageCopy, name: &str) -> Option<AMQPValue> {
        copy.properties
            .headers()
            .as_ref()?
            .inner()
            .get(name)
            .cloned()
    }

    fn names(copy: &MessageCopy) -> Vec<&str> {
        let table = copy.properties.headers().as_ref().expect("headers");
        table.inner().keys().map(|name| name.as_str()).collect()
    }

    fn in_doubt() -> Reason {
        Reason::InDoubt(DoubtCause::HandlerReported)
    }

    #[test]
    fn a_dead_letter_keeps_the_original_and_has_the_reason() {
        let copy = rejected(&delivery_with(&[]), Reason::Refused, &original_of_many());
        assert_eq!(
            (
                copy.destination.as_str(),
                copy.tag,
                copy.epoch,
                &copy.body[..]
            ),
            ("orders.dead-letters", 9, 2, &b"body"[..])
        );
        let properties = &copy.properties;
        assert_eq!(
            (
                properties.expiration(),
                properties.user_id(),
                properties.delivery_mode()
            ),
            (&None, &None, &Some(2))
        );
        assert!(properties.content_type().is_some() && properties.message_id().is_some());
        for (name, is_kept) in [
            (headers::REASON, true),
            (headers::ATTEMPTS, true),
            (headers::ORIGIN, true),
            (REJECTED_AT, true),
            (ROUTING_KEY, true),
            ("mine", true),
            ("x-first-death-queue", true),
            ("CC", false),
            ("BCC", false),
            ("x-death", false),
        ] {
            assert_eq!(header(&copy, name).is_some(), is_kept, "{name}");
        }
        let doubt = rejected(&delivery_with(&[]), in_doubt(), &original_of_many());
        assert_eq!(doubt.destination.as_str(), "orders.in-doubt");
    }

    #[test]
    fn a_delayed_copy_has_its_failures_the_matching_delay_queue_and_the_end_of_a_longer_delay() {
        for (millis, queue, has_end) in [
            (1, "orders.delay.1000", false),
            (5_000, "orders.delay.5000", false),
            (6_000, "orders.delay.5000", true),
            (30_000, "orders.delay.30000", false),
            (600_000, "orders.delay.600000", false),
            (601_000, "orders.delay.600000", true),
            (9_000_000, "orders.delay.600000", true),
        ] {
            let copy = delayed_for(millis);
            let end = NOW.as_millis() + u128::from(millis);
            assert_eq!(
                (copy.destination.as_str(), header(&copy, NOT_BEFORE)),
                (queue, has_end.then(|| text(end.to_string()))),
                "{millis} ms"
            );
        }
        let copy = delayed_for(6_000);
        assert_eq!(header(&copy, headers::FAILURES), Some(text("4")));
        assert!(!names(&copy).iter().any(|name| name.starts_with("x-")));
    }

    #[test]
    fn a_copy_keeps_the_routing_key_with_any_message_key() {
        for (routing_key, copied) in [
            (None, Some("orders.eu")),
            (Some("key.eu"), Some("key.eu")),
            (Some("orders"), None),
        ] {
            let original = OriginalProperties {
                routing_key: routing_key.map(bytes::Bytes::from),
                ..original_of_many()
            };
            let copy = delayed(&delivery_with(&[]), HOUR, &original);
            assert_eq!(header(&copy, ROUTING_KEY), copied.map(text));
        }
    }

    #[test]
    fn a_delayed_copy_was_first_seen_when_its_original_was_received_or_earlier() {
        let received = NOW - HOUR;
        for (sent_at, first_seen_header, expected) in [
            (None, None, received),
            (Some(received - HOUR), None, received - HOUR),
            // Milliseconds that a producer wrote as seconds.
            (
                Some(Duration::from_secs(received.as_millis() as u64)),
                None,
                received,
            ),
            (None, Some("1000"), Duration::from_secs(1)),
            (
                None,
                Some("1700000000000"),
                Duration::from_secs(1_700_000_000),
            ),
            (None, Some("yesterday"), received),
        ] {
            let headers = first_seen_header.map(|value| (headers::FIRST_SEEN, value));
            let mut delivery = delivery_with(headers.as_slice());
            delivery.message.sent_at = sent_at.map(|at| UNIX_EPOCH + at);
            let copy = delayed(&delivery, HOUR, &original(with_headers(headers.as_slice())));
            assert_eq!(
                header(&copy, headers::FIRST_SEEN),
                Some(text(expected.as_millis().to_string())),
                "{sent_at:?}, {first_seen_header:?}"
            );
        }
    }

    #[test]
    fn a_requeued_dead_letter_has_no_failures_and_keeps_when_it_was_first_seen() {
        for (first_seen, is_kept) in [("1700000000000", true), ("yesterday", false)] {
            let headers = [
                (headers::FAILURES, "4"),
                (NOT_BEFORE, "1"),
                (headers::FIRST_SEEN, first_seen),
            ];
            let original = original(with_headers(&headers));
            let copy = rejected(&delivery_with(&headers), Reason::Refused, &original);
            assert_eq!(
                (header(&copy, headers::FAILURES), header(&copy, NOT_BEFORE)),
                (None, None)
            );
            assert_eq!(
                header(&copy, headers::FIRST_SEEN).is_some(),
                is_kept,
                "{first_seen}"
            );
        }
    }

    #[test]
    fn forged_headers_are_stripped_from_dead_letters() {
        let others = [
            "oncegate-body-omitted",
            "oncegate-of-a-later-release",
            "x-death",
        ];
        let mut forged: Vec<_> = OWN_HEADERS
            .into_iter()
            .chain(others)
            .map(|name| (name, "victim"))
            .collect();
        let delivery = delivery_with(&forged);
        // Header names are case-sensitive.
        forged.push(("Oncegate-Id", "mine"));
        let original = original(with_headers(&forged));
        for reason in [Reason::MissingId, Reason::TooLarge, in_doubt()] {
            let copy = rejected(&delivery, reason, &original);
            let own_headers = [
                headers::ATTEMPTS,
                DROPPED_HEADERS,
                headers::ORIGIN,
                headers::REASON,
                REJECTED_AT,
                ROUTING_KEY,
            ];
            assert_eq!(names(&copy), [&["Oncegate-Id"], &own_headers[..]].concat());
            let forged: Vec<_> = names(&copy)
                .into_iter()
                .filter(|name| header(&copy, name) == Some(text("victim")))
                .collect();
            // Kept, even if a producer wrote it: redrive does not move a message with this header.
            assert_eq!(forged, [DROPPED_HEADERS]);
        }
    }

    #[test]
    fn names_of_dropped_headers_accumulate_over_copies() {
        let large = "s".repeat(130_000);
        let original = original(with_headers(&[
            (DROPPED_HEADERS, "first"),
            ("second", &large),
        ]));
        for mut copy in [
            rejected(&delivery_with(&[]), Reason::Refused, &original),
            delayed(&delivery_with(&[]), Duration::ZERO, &original),
        ] {
            copy.drop_oversized_headers(FRAME_MAX);
            assert_eq!(header(&copy, DROPPED_HEADERS), Some(text("first, second")));
        }
    }

    #[test]
    fn the_largest_headers_are_dropped_first() {
        let (huge, large) = ("h".repeat(70_000), "l".repeat(60_000));
        let original = original(with_headers(&[
            ("huge", &huge),
            ("large", &large),
            ("small", "s"),
        ]));
        let mut history = FailureHistory::default();
        history.last_error = Some("é".repeat(1_000));
        let settings = RabbitMq::queue("orders").check().expect("settings");
        let (delivery, reason) = (delivery_with(&[]), Reason::Refused);
        let history = Some(&history);
        let mut copy =
            MessageCopy::rejected(&delivery, &reason, history, &original, &settings, NOW);
        assert_eq!(
            header(&copy, headers::LAST_ERROR),
            Some(text("é".repeat(500)))
        );
        copy.drop_oversized_headers(0);
        assert!(names(&copy).contains(&"huge"), "frame_max 0 is unlimited");
        copy.drop_oversized_headers(FRAME_MAX);
        for (name, is_kept) in [
            ("huge", false),
            ("large", true),
            ("small", true),
            (headers::REASON, true),
            (DROPPED_HEADERS, true),
        ] {
            assert_eq!(header(&copy, name).is_some(), is_kept, "{name}");
        }
        assert!(header_frame_size(&copy.properties) <= 131_072 - BROKER_HEADER_RESERVE);
    }
}
