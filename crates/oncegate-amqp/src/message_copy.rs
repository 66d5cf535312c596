//! Copies of messages, which are published to the dead-letter queue, the in-doubt queue or a delay
//! queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::protocol::basic::gen_properties;
use lapin::types::generation::gen_value;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{Delivery, FailureHistory, first_seen, headers, rejection_headers};

use crate::incoming::{NOT_BEFORE, OriginalProperties, ROUTING_KEY};
use crate::queue_settings::{DELAYS, QueueSettings};

/// The header with the names of headers that were too large for this copy or an earlier one.
pub(crate) const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// The header with the time when a dead letter or in-doubt message was published, in milliseconds
/// since 1970.
pub(crate) const REJECTED_AT: &str = "oncegate-rejected-at";

/// The headers that the source writes. A value of at most twice [`MAX_TEXT_BYTES`] is never dropped.
const OWN_HEADERS: [&str; 14] = [
    headers::REASON,
    headers::ID,
    headers::ATTEMPTS,
    headers::CRASHES,
    headers::FENCE,
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
    /// The name of the queue.
    pub(crate) destination: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: bytes::Bytes,
    /// Set if the original waits in memory and may be redelivered from there instead.
    pub(crate) cancellation: Option<PublishCancellation>,
}

/// Cancels the publishing of a copy. A copy that is not published yet will not be published; if it is
/// published already, its confirm has no effect. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct PublishCancellation(Arc<AtomicBool>);

impl PublishCancellation {
    pub(crate) fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl MessageCopy {
    /// A dead letter or in-doubt message: the original's properties and headers, and the headers of the
    /// rejection. Inbound `oncegate-*` headers are removed, except [`DROPPED_HEADERS`].
    pub(crate) fn rejected(
        delivery: &Delivery,
        reason: &Reason,
        failure_history: Option<&FailureHistory>,
        original: &OriginalProperties,
        settings: &QueueSettings,
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
            AMQPValue::LongString(unix_time().as_millis().to_string().into()),
        );
        if let Some(names) = previously_dropped(&original.properties) {
            table.insert(DROPPED_HEADERS.into(), AMQPValue::LongString(names.into()));
        }
        insert_routing_key(&mut table, delivery, original, settings);
        Self::new(delivery, destination.clone(), table, &original.properties)
    }

    /// A copy for the delay queue of [`delay_queue_step`]. If the delay is longer than that queue's, the
    /// header [`NOT_BEFORE`] has the end of the delay, and the consumer delays the message again.
    pub(crate) fn delayed(
        delivery: &Delivery,
        after: Duration,
        original: &OriginalProperties,
        settings: &QueueSettings,
    ) -> Self {
        let delay = delay_queue_step(after);
        let mut table = copied_headers(
            &original.properties,
            &[
                "x-death",
                "x-first-death-",
                "x-last-death-",
                "x-delivery-count",
                NOT_BEFORE,
            ],
        );
        let mut insert_number = |name: &str, number: u128| {
            table.insert(
                name.into(),
                AMQPValue::LongString(number.to_string().into()),
            );
        };
        let now = unix_time();
        insert_number(headers::FAILURES, delivery.failures.into());
        // The earliest known time, because attempts and a delay in memory precede the copy. A time in
        // the future is replaced by the current one: a producer may have written milliseconds instead of
        // seconds.
        let known_times = [first_seen(&delivery.message), original.received_ms];
        let earliest = known_times.into_iter().flatten().map(u128::from).min();
        insert_number(
            headers::FIRST_SEEN,
            earliest.map_or(now.as_millis(), |at| at.min(now.as_millis())),
        );
        if after > delay {
            insert_number(NOT_BEFORE, (now + after).as_millis());
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
    /// For a larger content header the broker would close the connection, at each attempt.
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

    /// Whether the copy has every property and header that the producer sent, within one frame.
    pub(crate) fn is_lossless(&self, original: &OriginalProperties, frame_max: u32) -> bool {
        let properties = &original.properties;
        let has_cc = properties.headers().as_ref().is_some_and(|table| {
            ["CC", "BCC"]
                .iter()
                .any(|name| table.inner().contains_key(*name))
        });
        properties.expiration().is_none()
            && properties.user_id().is_none()
            && !has_cc
            && self.fits_frame(frame_max)
    }

    /// Whether all headers fit into one frame.
    pub(crate) fn fits_frame(&self, frame_max: u32) -> bool {
        header_frame_size(&self.properties) <= max_header_frame(frame_max)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancellation
            .as_ref()
            .is_some_and(PublishCancellation::is_cancelled)
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
            cancellation: None,
        }
    }
}

/// The one of [`DELAYS`] for a copy: the shortest that is not below the delay, if it is at most twice
/// the delay; otherwise the longest that is not above it, after which another copy waits for the
/// remaining delay. So a message that waits for the end of a lease is redelivered within two leases,
/// and few messages need more than two copies.
fn delay_queue_step(after: Duration) -> Duration {
    let [shortest, ..] = DELAYS;
    let fits = |delay: &Duration| *delay >= after && *delay <= after * 2;
    let shorter = DELAYS.into_iter().rfind(|delay| *delay <= after);
    DELAYS
        .into_iter()
        .find(fits)
        .or(shorter)
        .unwrap_or(shortest)
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

/// The time since 1970, by the system clock.
fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
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
fn max_header_frame(frame_max: u32) -> usize {
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
fn header_frame_size(properties: &BasicProperties) -> usize {
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
    use oncegate_core::message::Message;
    use oncegate_core::source::Receipt;

    use super::*;
    use crate::RabbitMq;

    fn original() -> OriginalProperties {
        let mut table = FieldTable::default();
        for name in ["CC", "BCC", "x-death", "x-first-death-queue", "mine"] {
            table.insert(name.into(), AMQPValue::LongString("v".into()));
        }
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_expiration("1000".into())
            .with_user_id("someone".into())
            .with_content_type("application/json".into())
            .with_message_id("m".into())
            .with_delivery_mode(1);
        OriginalProperties {
            properties,
            routing_key: None,
            received_ms: None,
        }
    }

    fn delivery() -> Delivery {
        let message = Message::new("body").with_key("orders.eu");
        Delivery {
            message,
            receipt: Receipt {
                epoch: 2,
                partition: 0,
                position: 9,
            },
            failures: 4,
        }
    }

    fn settings() -> QueueSettings {
        RabbitMq::queue("orders").check().expect("settings")
    }

    fn names(copy: &MessageCopy) -> Vec<&str> {
        copy.properties
            .headers()
            .as_ref()
            .expect("headers")
            .inner()
            .keys()
            .map(|name| name.as_str())
            .collect()
    }

    #[test]
    fn a_dead_letter_keeps_the_original_and_has_the_reason() {
        let copy = MessageCopy::rejected(
            &delivery(),
            &Reason::Refused,
            None,
            &original(),
            &settings(),
        );
        assert_eq!(
            (
                copy.destination.as_str(),
                copy.tag,
                copy.epoch,
                &copy.body[..]
            ),
            ("orders.dead-letters", 9, 2, &b"body"[..])
        );
        let names = names(&copy);
        for name in [
            headers::REASON,
            headers::ATTEMPTS,
            headers::ORIGIN,
            REJECTED_AT,
            ROUTING_KEY,
            "mine",
            "x-first-death-queue",
        ] {
            assert!(names.contains(&name), "{name} in {names:?}");
        }
        assert!(!names.contains(&"CC") && !names.contains(&"BCC") && !names.contains(&"x-death"));
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
        let doubt = MessageCopy::rejected(
            &delivery(),
            &Reason::InDoubt(oncegate_core::lifecycle::DoubtCause::HandlerReported),
            None,
            &original(),
            &settings(),
        );
        assert_eq!(doubt.destination.as_str(), "orders.in-doubt");
    }

    #[test]
    fn a_delayed_copy_has_its_failures_and_the_matching_delay_queue() {
        let destination = |after| {
            MessageCopy::delayed(
                &delivery(),
                Duration::from_millis(after),
                &original(),
                &settings(),
            )
            .destination
            .to_string()
        };
        assert_eq!(destination(1), "orders.delay.1000");
        assert_eq!(destination(5_000), "orders.delay.5000");
        assert_eq!(destination(600_000), "orders.delay.600000");
        assert_eq!(destination(9_000_000), "orders.delay.600000");
        let copy = MessageCopy::delayed(
            &delivery(),
            Duration::from_secs(6),
            &original(),
            &settings(),
        );
        let names = names(&copy);
        assert!(
            names.contains(&headers::FIRST_SEEN)
                && names.contains(&ROUTING_KEY)
                && !names.iter().any(|name| name.starts_with("x-"))
        );
        let failures = copy
            .properties
            .headers()
            .as_ref()
            .and_then(|table| table.inner().get(headers::FAILURES).cloned());
        assert_eq!(failures, Some(AMQPValue::LongString("4".into())));
    }

    #[test]
    fn a_copy_keeps_the_routing_key_with_any_message_key() {
        let copied_key = |routing_key: Option<&'static str>| {
            let original = OriginalProperties {
                routing_key: routing_key.map(bytes::Bytes::from),
                ..original()
            };
            let copy =
                MessageCopy::delayed(&delivery(), Duration::from_secs(6), &original, &settings());
            copy.properties
                .headers()
                .as_ref()
                .and_then(|table| table.inner().get(ROUTING_KEY).cloned())
        };
        let text = |text: &str| Some(AMQPValue::LongString(text.into()));
        assert_eq!(
            (
                copied_key(None),
                copied_key(Some("key.eu")),
                copied_key(Some("orders"))
            ),
            (text("orders.eu"), text("key.eu"), None)
        );
    }

    #[test]
    fn a_delayed_copy_was_first_seen_when_its_original_was_received() {
        let hour = Duration::from_secs(3_600);
        let received = unix_time() - hour;
        let first_seen = |sent_at: Option<Duration>, header: Option<&str>| {
            let mut delivery = delivery();
            delivery.message.sent_at = sent_at.map(|at| UNIX_EPOCH + at);
            if let Some(value) = header {
                delivery.message = delivery.message.with_header(headers::FIRST_SEEN, value);
            }
            let original = OriginalProperties {
                received_ms: Some(received.as_millis() as u64),
                ..original()
            };
            let copy = MessageCopy::delayed(&delivery, hour, &original, &settings());
            copy.properties.headers().as_ref().expect("headers").inner()[headers::FIRST_SEEN]
                .clone()
        };
        let millis = |at: Duration| AMQPValue::LongString(at.as_millis().to_string().into());
        assert_eq!(first_seen(None, None), millis(received));
        let seconds_as_millis = Duration::from_secs(received.as_millis() as u64);
        assert_eq!(first_seen(Some(seconds_as_millis), None), millis(received));
        assert_eq!(
            first_seen(Some(received - hour), None),
            millis(received - hour)
        );
        assert_eq!(
            first_seen(None, Some("1000")),
            millis(Duration::from_secs(1))
        );
    }

    #[test]
    fn a_requeued_dead_letter_starts_with_no_failures() {
        let copies = |first_seen: &str| {
            let mut delivery = delivery();
            let mut table = FieldTable::default();
            let mut builder = oncegate_core::message::HeadersBuilder::default();
            for (name, value) in [
                (headers::FAILURES, "4"),
                (NOT_BEFORE, "1"),
                (headers::FIRST_SEEN, first_seen),
            ] {
                table.insert(name.into(), AMQPValue::LongString(value.into()));
                builder.push(name.as_bytes(), Some(value.as_bytes()));
            }
            delivery.message.headers = builder.finish();
            let original = OriginalProperties {
                properties: BasicProperties::default().with_headers(table),
                routing_key: None,
                received_ms: None,
            };
            let copy =
                MessageCopy::rejected(&delivery, &Reason::Refused, None, &original, &settings());
            let delayed = MessageCopy::delayed(&delivery, Duration::ZERO, &original, &settings());
            let delayed = delayed
                .properties
                .headers()
                .as_ref()
                .expect("headers")
                .inner()[headers::FIRST_SEEN]
                .clone();
            (
                names(&copy)
                    .iter()
                    .map(|name| (*name).to_owned())
                    .collect::<Vec<_>>(),
                delayed,
            )
        };
        let (names, delayed) = copies("1700000000000");
        assert!(
            !names
                .iter()
                .any(|name| name == headers::FAILURES || name == NOT_BEFORE),
            "{names:?}"
        );
        assert!(
            names.iter().any(|name| name == headers::FIRST_SEEN),
            "{names:?}"
        );
        assert_eq!(delayed, AMQPValue::LongString("1700000000000".into()));
        let (names, delayed) = copies("yesterday");
        assert!(
            !names.iter().any(|name| name == headers::FIRST_SEEN),
            "{names:?}"
        );
        assert_ne!(delayed, AMQPValue::LongString("yesterday".into()));
    }

    #[test]
    fn forged_headers_are_stripped_from_dead_letters() {
        let mut table = FieldTable::default();
        let mut builder = oncegate_core::message::HeadersBuilder::default();
        for name in OWN_HEADERS.into_iter().chain([
            "oncegate-body-omitted",
            "oncegate-of-a-later-release",
            "x-death",
        ]) {
            table.insert(name.into(), AMQPValue::LongString("victim".into()));
            builder.push(name.as_bytes(), Some(b"victim"));
        }
        // Header names are case-sensitive.
        table.insert("Oncegate-Id".into(), AMQPValue::LongString("mine".into()));
        let delivery = Delivery {
            message: Message {
                headers: builder.finish(),
                ..delivery().message
            },
            ..delivery()
        };
        let original = OriginalProperties {
            properties: BasicProperties::default().with_headers(table),
            routing_key: None,
            received_ms: None,
        };
        for reason in [
            Reason::MissingId,
            Reason::TooLarge,
            Reason::InDoubt(oncegate_core::lifecycle::DoubtCause::HandlerReported),
        ] {
            let copy = MessageCopy::rejected(&delivery, &reason, None, &original, &settings());
            let own_headers = [
                headers::ATTEMPTS,
                DROPPED_HEADERS,
                headers::ORIGIN,
                headers::REASON,
                REJECTED_AT,
                ROUTING_KEY,
            ];
            assert_eq!(names(&copy), [&["Oncegate-Id"], &own_headers[..]].concat());
            let table = copy.properties.headers().as_ref().expect("headers").inner();
            let forged: Vec<_> = table
                .iter()
                .filter(|(_, value)| **value == AMQPValue::LongString("victim".into()))
                .collect();
            // Kept, even if a producer wrote it: redrive does not move a message with this header.
            assert_eq!(
                forged
                    .iter()
                    .map(|(name, _)| name.as_str())
                    .collect::<Vec<_>>(),
                [DROPPED_HEADERS],
                "{reason:?}"
            );
        }
    }

    #[test]
    fn names_of_dropped_headers_accumulate_over_copies() {
        let mut table = FieldTable::default();
        table.insert(
            DROPPED_HEADERS.into(),
            AMQPValue::LongString("first".into()),
        );
        table.insert(
            "second".into(),
            AMQPValue::LongString("s".repeat(130_000).into()),
        );
        let original = OriginalProperties {
            properties: BasicProperties::default().with_headers(table),
            routing_key: None,
            received_ms: None,
        };
        for mut copy in [
            MessageCopy::rejected(&delivery(), &Reason::Refused, None, &original, &settings()),
            MessageCopy::delayed(&delivery(), Duration::ZERO, &original, &settings()),
        ] {
            copy.drop_oversized_headers(131_072);
            let dropped = copy.properties.headers().as_ref().expect("headers").inner()
                [DROPPED_HEADERS]
                .clone();
            assert_eq!(dropped, AMQPValue::LongString("first, second".into()));
        }
    }

    #[test]
    fn the_largest_headers_are_dropped_first() {
        let mut table = FieldTable::default();
        table.insert(
            "huge".into(),
            AMQPValue::LongString("h".repeat(70_000).into()),
        );
        table.insert(
            "large".into(),
            AMQPValue::LongString("l".repeat(60_000).into()),
        );
        table.insert("small".into(), AMQPValue::LongString("s".into()));
        let original = OriginalProperties {
            properties: BasicProperties::default().with_headers(table),
            routing_key: None,
            received_ms: None,
        };
        let failure_history = FailureHistory {
            last_error: Some("é".repeat(1_000)),
            ..FailureHistory::default()
        };
        let mut copy = MessageCopy::rejected(
            &delivery(),
            &Reason::Refused,
            Some(&failure_history),
            &original,
            &settings(),
        );
        let error = copy.properties.headers().as_ref().expect("headers").inner()
            [headers::LAST_ERROR]
            .clone();
        assert_eq!(error, AMQPValue::LongString("é".repeat(500).into()));
        copy.drop_oversized_headers(0);
        assert!(names(&copy).contains(&"huge"));
        copy.drop_oversized_headers(131_072);
        let names = names(&copy);
        assert!(
            names.contains(&"large")
                && names.contains(&"small")
                && names.contains(&headers::REASON),
            "{names:?}"
        );
        assert!(
            !names.contains(&"huge") && names.contains(&DROPPED_HEADERS),
            "{names:?}"
        );
        assert!(header_frame_size(&copy.properties) <= 131_072 - BROKER_HEADER_RESERVE);
    }

    #[test]
    fn a_copy_is_lossless_if_it_has_everything_that_the_producer_sent() {
        let is_lossless = |properties: BasicProperties, frame_max| {
            let original = OriginalProperties {
                properties,
                routing_key: None,
                received_ms: None,
            };
            MessageCopy::delayed(&delivery(), Duration::ZERO, &original, &settings())
                .is_lossless(&original, frame_max)
        };
        let with = |name: &str, bytes: usize| {
            let mut table = FieldTable::default();
            table.insert(name.into(), AMQPValue::LongString("v".repeat(bytes).into()));
            BasicProperties::default().with_headers(table)
        };
        assert!(is_lossless(
            BasicProperties::default().with_message_id("m".into()),
            131_072
        ));
        assert!(
            is_lossless(with("x-death", 1), 131_072)
                && is_lossless(with("id", 120_000), 131_072)
                && is_lossless(with("id", 999_999), 0)
        );
        assert!(
            !is_lossless(with("id", 125_000), 131_072)
                && !is_lossless(with("CC", 1), 131_072)
                && !is_lossless(with("BCC", 1), 131_072)
        );
        assert!(!is_lossless(
            BasicProperties::default().with_expiration("60000".into()),
            131_072
        ));
        assert!(!is_lossless(
            BasicProperties::default().with_user_id("someone".into()),
            131_072
        ));
    }

    #[test]
    fn a_delay_longer_than_its_queue_is_written_into_a_header() {
        let has_header = |after| {
            let copy = MessageCopy::delayed(
                &delivery(),
                Duration::from_secs(after),
                &original(),
                &settings(),
            );
            names(&copy).contains(&NOT_BEFORE)
        };
        assert!(!has_header(600) && has_header(601));
        assert!(
            !has_header(30) && has_header(6),
            "a delay of 6 s uses the queue with 5 s and the header"
        );
    }

    #[test]
    fn a_copy_waits_at_most_twice_its_delay_except_in_the_shortest_queue() {
        for (after, step) in [
            (1, 1_000),
            (999, 1_000),
            (1_001, 1_000),
            (2_499, 1_000),
            (2_500, 5_000),
            (6_400, 5_000),
            (10_000, 5_000),
            (14_999, 5_000),
            (15_000, 30_000),
            (59_999, 30_000),
            (60_000, 120_000),
            (299_999, 120_000),
            (600_000, 600_000),
            (9_000_000, 600_000),
        ] {
            assert_eq!(
                delay_queue_step(Duration::from_millis(after)),
                Duration::from_millis(step),
                "{after} ms"
            );
        }
        // A message whose lease has ended in part waits for the remaining time. Both together take at
        // most two leases.
        for lease in [1, 3, 10, 30, 90, 400, 1_200].map(Duration::from_secs) {
            for remaining in (1..=100).map(|percent| lease * percent / 100) {
                let total = lease - remaining + delay_queue_step(remaining);
                assert!(total <= lease * 2, "{remaining:?} of {lease:?}");
            }
        }
    }
}
