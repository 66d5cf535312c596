//! The copy of a message that goes to the dead letters, to the in-doubt messages or into a delay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::protocol::basic::gen_properties;
use lapin::types::generation::gen_value;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{Delivery, FailureHistory, first_seen, headers, rejection_headers};

use crate::incoming::{NOT_BEFORE, Original, ROUTING_KEY};
use crate::settings::{DELAYS, Settings};

/// Which headers of the original were too large for the copy, or for a delayed copy before it.
pub(crate) const DROPPED_HEADERS: &str = "oncegate-dropped-headers";

/// When the copy was set aside for a person, in milliseconds since 1970.
pub(crate) const SET_ASIDE_AT: &str = "oncegate-set-aside-at";

/// What is ours in a copy is small, and is kept.
const OURS: [&str; 12] = [
    headers::REASON,
    headers::ID,
    headers::ATTEMPTS,
    headers::FIRST_ERROR,
    headers::LAST_ERROR,
    headers::ORIGIN,
    headers::FAILURES,
    headers::FIRST_SEEN,
    DROPPED_HEADERS,
    ROUTING_KEY,
    NOT_BEFORE,
    SET_ASIDE_AT,
];

/// The most bytes of a text for people.
const TEXT: usize = 1_000;

/// What the broker may add to a header frame: `x-death` and the like.
const BROKERS_SHARE: usize = 8 * 1024;

/// A copy on its way to a queue, in place of the delivery with this tag.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) epoch: u64,
    pub(crate) tag: u64,
    pub(crate) to: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: bytes::Bytes,
    /// Where its original is kept all the while, and may be handed over instead.
    pub(crate) withdrawal: Option<Withdrawal>,
}

/// Takes a copy back. One that is not published yet never will be; the confirmation of one that is
/// does not count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Withdrawal(Arc<AtomicBool>);

impl Withdrawal {
    pub(crate) fn withdraw(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Copy {
    /// For a person: with the reason, and the original's properties and headers. Inbound
    /// `oncegate-*` headers are removed; the values that a delayed copy carried were parsed, and
    /// are written again.
    pub(crate) fn rejected(
        delivery: &Delivery,
        reason: &Reason,
        story: Option<&FailureHistory>,
        original: &Original,
        settings: &Settings,
    ) -> Self {
        let to = if reason.is_in_doubt() {
            &settings.in_doubt
        } else {
            &settings.dead_letters
        };
        // Put back into a queue, by a person or a shovel, it is to begin afresh. Without `x-death`
        // it can be told from what the broker dead-lettered.
        let mut table = kept_headers(&original.properties, &[headers::PREFIX, "x-death"]);
        for (name, value) in rejection_headers(delivery, reason, story) {
            let is_error = [headers::FIRST_ERROR, headers::LAST_ERROR].contains(&name);
            let value = if is_error {
                cut(&value, TEXT).to_owned()
            } else {
                value
            };
            table.insert(name.into(), AMQPValue::LongString(value.into()));
        }
        // A queue does not say when a message came.
        table.insert(
            SET_ASIDE_AT.into(),
            AMQPValue::LongString(now().as_millis().to_string().into()),
        );
        if let Some(names) = dropped_before(&original.properties) {
            table.insert(DROPPED_HEADERS.into(), AMQPValue::LongString(names.into()));
        }
        keep_routing_key(&mut table, delivery, original, settings);
        Self::new(delivery, to.clone(), table, &original.properties)
    }

    /// To come back after [`delay_step`]. Where that is shorter than the delay, [`NOT_BEFORE`] says
    /// until when the rest lasts, which the consumer waits for, or by another copy.
    pub(crate) fn delayed(
        delivery: &Delivery,
        after: Duration,
        original: &Original,
        settings: &Settings,
    ) -> Self {
        let delay = delay_step(after);
        let mut table = kept_headers(
            &original.properties,
            &[
                "x-death",
                "x-first-death-",
                "x-last-death-",
                "x-delivery-count",
                NOT_BEFORE,
            ],
        );
        let mut write = |name: &str, number: u128| {
            table.insert(
                name.into(),
                AMQPValue::LongString(number.to_string().into()),
            );
        };
        let now = now();
        write(headers::FAILURES, delivery.failures.into());
        write(
            headers::FIRST_SEEN,
            first_seen(&delivery.message)
                .map_or(now.as_millis(), |at| now.as_millis().min(at.into())),
        );
        if after > delay {
            write(NOT_BEFORE, (now + after).as_millis());
        }
        keep_routing_key(&mut table, delivery, original, settings);
        Self::new(
            delivery,
            settings.delay_queue(delay),
            table,
            &original.properties,
        )
    }

    /// Drops headers of the original, the largest first, until the rest fits into one frame, as the
    /// protocol asks of it, with room for what the broker adds. [`DROPPED_HEADERS`] names them.
    ///
    /// A header frame that is too large costs the connection, and would cost the next one too.
    pub(crate) fn fit(&mut self, frame_max: u32) {
        let (size, most) = (size(&self.properties), most(frame_max));
        if size <= most {
            return;
        }
        let mut excess = size - most + TEXT + DROPPED_HEADERS.len();
        let table = self.properties.headers().clone().unwrap_or_default();
        let mut largest: Vec<_> = table
            .inner()
            .iter()
            .filter(|(name, value)| !OURS.contains(&name.as_str()) || value_size(value) > 2 * TEXT)
            .collect();
        largest.sort_by_key(|(_, value)| std::cmp::Reverse(value_size(value)));
        let mut dropped = Vec::new();
        for (name, value) in largest {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(name.as_str().len() + value_size(value));
            dropped.push(name.clone());
        }
        let before = dropped_before(&self.properties);
        let names: Vec<_> = before
            .as_deref()
            .into_iter()
            .chain(dropped.iter().map(ShortString::as_str))
            .collect();
        let names = names.join(", ");
        tracing::warn!(
            to = self.to.as_str(),
            size,
            headers = cut(&names, TEXT),
            "the headers are too large for a copy; some are dropped"
        );
        let mut table = without(&table, |name| {
            dropped.iter().any(|dropped| dropped.as_str() == name)
        });
        table.insert(
            DROPPED_HEADERS.into(),
            AMQPValue::LongString(cut(&names, TEXT).into()),
        );
        self.properties = std::mem::take(&mut self.properties).with_headers(table);
    }

    /// Whether nothing of the original is left out of it, and its headers fit into one frame as
    /// they are. What the broker itself wrote into the original does not count.
    pub(crate) fn is_whole(&self, original: &Original, frame_max: u32) -> bool {
        let properties = &original.properties;
        let addressed = properties.headers().as_ref().is_some_and(|table| {
            ["CC", "BCC"]
                .iter()
                .any(|name| table.inner().contains_key(*name))
        });
        properties.expiration().is_none()
            && properties.user_id().is_none()
            && !addressed
            && self.fits(frame_max)
    }

    /// Whether its headers fit into one frame as they are.
    pub(crate) fn fits(&self, frame_max: u32) -> bool {
        size(&self.properties) <= most(frame_max)
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.withdrawal
            .as_ref()
            .is_some_and(Withdrawal::is_withdrawn)
    }

    fn new(
        delivery: &Delivery,
        to: ShortString,
        table: FieldTable,
        original: &BasicProperties,
    ) -> Self {
        Self {
            epoch: delivery.receipt.epoch,
            tag: delivery.receipt.position,
            to,
            properties: kept_properties(original).with_headers(table),
            body: delivery.message.body.clone(),
            withdrawal: None,
        }
    }
}

/// Which of [`DELAYS`] a copy waits for: the shortest that is long enough, unless that is more than
/// twice as long; then the longest that is shorter. So what waits for the rest of a lease comes
/// back within two leases, and few copies wait more than twice.
fn delay_step(after: Duration) -> Duration {
    let [shortest, ..] = DELAYS;
    let fits = |delay: &Duration| *delay >= after && *delay <= after * 2;
    let shorter = DELAYS.into_iter().rfind(|delay| *delay <= after);
    DELAYS
        .into_iter()
        .find(fits)
        .or(shorter)
        .unwrap_or(shortest)
}

/// Persistent, and all of the original but two: an expiration would end the copy early, and the
/// broker refuses a user id that is not the publisher's.
fn kept_properties(original: &BasicProperties) -> BasicProperties {
    let mut kept = BasicProperties::default().with_delivery_mode(2);
    macro_rules! keep {
        ($($get:ident $set:ident),*) => { $(if let Some(value) = original.$get() { kept = kept.$set(value.clone()); })* };
    }
    keep!(content_type with_content_type, content_encoding with_content_encoding, priority with_priority);
    keep!(correlation_id with_correlation_id, reply_to with_reply_to, message_id with_message_id);
    keep!(timestamp with_timestamp, kind with_type, app_id with_app_id, cluster_id with_cluster_id);
    kept
}

/// Without `CC` and `BCC`, by which the broker would send the copy to other queues too.
fn kept_headers(original: &BasicProperties, dropped: &[&str]) -> FieldTable {
    let Some(table) = original.headers() else {
        return FieldTable::default();
    };
    without(table, |name| {
        ["CC", "BCC"].contains(&name) || dropped.iter().any(|dropped| name.starts_with(dropped))
    })
}

fn without(table: &FieldTable, drops: impl Fn(&str) -> bool) -> FieldTable {
    let mut kept = FieldTable::default();
    for (name, value) in table.into_iter().filter(|(name, _)| !drops(name.as_str())) {
        kept.insert(name.clone(), value.clone());
    }
    kept
}

/// The time since 1970, by this machine's clock.
fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Which headers a delayed copy before this one was too large for.
fn dropped_before(properties: &BasicProperties) -> Option<String> {
    match properties
        .headers()
        .as_ref()?
        .inner()
        .get(DROPPED_HEADERS)?
    {
        AMQPValue::LongString(names) => {
            Some(cut(&String::from_utf8_lossy(names.as_bytes()), TEXT).to_owned())
        }
        _ => None,
    }
}

/// The beginning of a text, of at most so many bytes.
fn cut(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// The most bytes that a content header's frame may have from us.
fn most(frame_max: u32) -> usize {
    let frame_max = frame_max as usize;
    if frame_max == 0 {
        usize::MAX
    } else {
        frame_max.saturating_sub(BROKERS_SHARE).max(frame_max / 2)
    }
}

/// The bytes of a content header's frame: 20, and the properties.
fn size(properties: &BasicProperties) -> usize {
    let written = gen_properties(properties)(Vec::<u8>::new().into());
    // Writing into memory fails only on what cannot be published either.
    20 + written.map_or(0, |written| written.into_inner().1 as usize)
}

fn value_size(value: &AMQPValue) -> usize {
    let written = gen_value(value)(Vec::<u8>::new().into());
    written.map_or(0, |written| written.into_inner().1 as usize)
}

fn keep_routing_key(
    table: &mut FieldTable,
    delivery: &Delivery,
    original: &Original,
    settings: &Settings,
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

    fn original() -> Original {
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
        Original {
            properties,
            routing_key: None,
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

    fn settings() -> Settings {
        RabbitMq::queue("orders").check().expect("settings")
    }

    fn names(copy: &Copy) -> Vec<&str> {
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
    fn a_dead_letter_keeps_what_was_sent_and_says_why() {
        let copy = Copy::rejected(
            &delivery(),
            &Reason::Refused,
            None,
            &original(),
            &settings(),
        );
        assert_eq!(
            (copy.to.as_str(), copy.tag, copy.epoch, &copy.body[..]),
            ("orders.dead-letters", 9, 2, &b"body"[..])
        );
        let names = names(&copy);
        for name in [
            headers::REASON,
            headers::ATTEMPTS,
            headers::ORIGIN,
            SET_ASIDE_AT,
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
        let doubt = Copy::rejected(
            &delivery(),
            &Reason::InDoubt(oncegate_core::lifecycle::DoubtCause::Said),
            None,
            &original(),
            &settings(),
        );
        assert_eq!(doubt.to.as_str(), "orders.in-doubt");
    }

    #[test]
    fn a_delayed_copy_carries_its_failures_and_waits_long_enough() {
        let to = |after| {
            Copy::delayed(
                &delivery(),
                Duration::from_millis(after),
                &original(),
                &settings(),
            )
            .to
            .to_string()
        };
        assert_eq!(to(1), "orders.delay.1000");
        assert_eq!(to(5_000), "orders.delay.5000");
        assert_eq!(to(600_000), "orders.delay.600000");
        assert_eq!(to(9_000_000), "orders.delay.600000");
        let copy = Copy::delayed(
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
    fn a_copy_keeps_the_routing_key_whatever_the_key() {
        let kept = |routing_key: Option<&'static str>| {
            let original = Original {
                routing_key: routing_key.map(bytes::Bytes::from),
                ..original()
            };
            let copy = Copy::delayed(&delivery(), Duration::from_secs(6), &original, &settings());
            copy.properties
                .headers()
                .as_ref()
                .and_then(|table| table.inner().get(ROUTING_KEY).cloned())
        };
        let text = |text: &str| Some(AMQPValue::LongString(text.into()));
        assert_eq!(
            (kept(None), kept(Some("key.eu")), kept(Some("orders"))),
            (text("orders.eu"), text("key.eu"), None)
        );
    }

    #[test]
    fn a_copy_for_a_person_begins_afresh_when_it_is_put_back() {
        let rejected = |seen: &str| {
            let mut delivery = delivery();
            let mut table = FieldTable::default();
            let mut builder = oncegate_core::message::HeadersBuilder::default();
            for (name, value) in [
                (headers::FAILURES, "4"),
                (NOT_BEFORE, "1"),
                (headers::FIRST_SEEN, seen),
            ] {
                table.insert(name.into(), AMQPValue::LongString(value.into()));
                builder.push(name.as_bytes(), Some(value.as_bytes()));
            }
            delivery.message.headers = builder.finish();
            let original = Original {
                properties: BasicProperties::default().with_headers(table),
                routing_key: None,
            };
            let copy = Copy::rejected(&delivery, &Reason::Refused, None, &original, &settings());
            let delayed = Copy::delayed(&delivery, Duration::ZERO, &original, &settings());
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
        let (names, delayed) = rejected("1700000000000");
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
        let (names, delayed) = rejected("yesterday");
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
        for name in OURS.into_iter().chain([
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
        let original = Original {
            properties: BasicProperties::default().with_headers(table),
            routing_key: None,
        };
        for reason in [
            Reason::MissingId,
            Reason::TooLarge,
            Reason::InDoubt(oncegate_core::lifecycle::DoubtCause::Said),
        ] {
            let copy = Copy::rejected(&delivery, &reason, None, &original, &settings());
            let ours = [
                headers::ATTEMPTS,
                DROPPED_HEADERS,
                headers::ORIGIN,
                headers::REASON,
                ROUTING_KEY,
                SET_ASIDE_AT,
            ];
            assert_eq!(names(&copy), [&["Oncegate-Id"], &ours[..]].concat());
            let table = copy.properties.headers().as_ref().expect("headers").inner();
            let forged: Vec<_> = table
                .iter()
                .filter(|(_, value)| **value == AMQPValue::LongString("victim".into()))
                .collect();
            // Carried over even from a producer: it only makes redrive more careful.
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
        let original = Original {
            properties: BasicProperties::default().with_headers(table),
            routing_key: None,
        };
        for mut copy in [
            Copy::rejected(&delivery(), &Reason::Refused, None, &original, &settings()),
            Copy::delayed(&delivery(), Duration::ZERO, &original, &settings()),
        ] {
            copy.fit(131_072);
            let dropped = copy.properties.headers().as_ref().expect("headers").inner()
                [DROPPED_HEADERS]
                .clone();
            assert_eq!(dropped, AMQPValue::LongString("first, second".into()));
        }
    }

    #[test]
    fn headers_that_are_too_large_go_largest_first() {
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
        let original = Original {
            properties: BasicProperties::default().with_headers(table),
            routing_key: None,
        };
        let story = FailureHistory {
            last_error: Some("é".repeat(1_000)),
            ..FailureHistory::default()
        };
        let mut copy = Copy::rejected(
            &delivery(),
            &Reason::Refused,
            Some(&story),
            &original,
            &settings(),
        );
        let error = copy.properties.headers().as_ref().expect("headers").inner()
            [headers::LAST_ERROR]
            .clone();
        assert_eq!(error, AMQPValue::LongString("é".repeat(500).into()));
        copy.fit(0);
        assert!(names(&copy).contains(&"huge"));
        copy.fit(131_072);
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
        assert!(size(&copy.properties) <= 131_072 - BROKERS_SHARE);
    }

    #[test]
    fn a_copy_is_whole_if_it_has_all_of_the_original_that_the_broker_did_not_write() {
        let is_whole = |properties: BasicProperties, frame_max| {
            let original = Original {
                properties,
                routing_key: None,
            };
            Copy::delayed(&delivery(), Duration::ZERO, &original, &settings())
                .is_whole(&original, frame_max)
        };
        let with = |name: &str, bytes: usize| {
            let mut table = FieldTable::default();
            table.insert(name.into(), AMQPValue::LongString("v".repeat(bytes).into()));
            BasicProperties::default().with_headers(table)
        };
        assert!(is_whole(
            BasicProperties::default().with_message_id("m".into()),
            131_072
        ));
        assert!(
            is_whole(with("x-death", 1), 131_072)
                && is_whole(with("id", 120_000), 131_072)
                && is_whole(with("id", 999_999), 0)
        );
        assert!(
            !is_whole(with("id", 125_000), 131_072)
                && !is_whole(with("CC", 1), 131_072)
                && !is_whole(with("BCC", 1), 131_072)
        );
        assert!(!is_whole(
            BasicProperties::default().with_expiration("60000".into()),
            131_072
        ));
        assert!(!is_whole(
            BasicProperties::default().with_user_id("someone".into()),
            131_072
        ));
    }

    #[test]
    fn a_delay_that_no_queue_has_is_written_down() {
        let says = |after| {
            let copy = Copy::delayed(
                &delivery(),
                Duration::from_secs(after),
                &original(),
                &settings(),
            );
            names(&copy).contains(&NOT_BEFORE)
        };
        assert!(!says(600) && says(601));
        assert!(!says(30) && says(6), "one that is shorter than the delay");
    }

    #[test]
    fn no_copy_waits_more_than_twice_its_delay_but_for_the_shortest() {
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
                delay_step(Duration::from_millis(after)),
                Duration::from_millis(step),
                "{after} ms"
            );
        }
        // The rest of a lease, at whatever time of it the claim is given back: the step ends within
        // two leases.
        for lease in [1, 3, 10, 30, 90, 400, 1_200].map(Duration::from_secs) {
            for rest in (1..=100).map(|part| lease * part / 100) {
                let over = lease - rest + delay_step(rest);
                assert!(over <= lease * 2, "{rest:?} of {lease:?}");
            }
        }
    }
}
