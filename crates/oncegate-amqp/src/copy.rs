//! The copy of a message that goes to the dead letters, to the in-doubt messages or into a delay.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate_core::road::Reason;
use oncegate_core::source::{Delivery, Story, headers, rejection_headers};

use crate::incoming::{NOT_BEFORE, ROUTING_KEY};
use crate::settings::{DELAYS, Settings};

/// A copy on its way to a queue, in place of the delivery with this tag.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) epoch: u64,
    pub(crate) tag: u64,
    pub(crate) to: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: bytes::Bytes,
}

impl Copy {
    /// For a person: with the reason, and the original's properties and headers.
    pub(crate) fn rejected(
        delivery: &Delivery,
        reason: &Reason,
        story: Option<&Story>,
        original: &BasicProperties,
        settings: &Settings,
    ) -> Self {
        let to = if reason.is_in_doubt() { &settings.in_doubt } else { &settings.dead_letters };
        let mut table = kept_headers(original, &[]);
        for (name, value) in rejection_headers(delivery, reason, story) {
            table.insert(name.into(), AMQPValue::LongString(value.into()));
        }
        keep_routing_key(&mut table, delivery, settings);
        Self::new(delivery, to.clone(), table, original)
    }

    /// To come back after the shortest of [`DELAYS`] that is long enough. For a longer delay than they have it passes
    /// the longest several times: [`NOT_BEFORE`] says until when.
    pub(crate) fn delayed(delivery: &Delivery, after: Duration, original: &BasicProperties, settings: &Settings) -> Self {
        let delay = DELAYS.into_iter().find(|delay| *delay >= after).unwrap_or(DELAYS[DELAYS.len() - 1]);
        let mut table = kept_headers(original, &["x-death", "x-first-death-", "x-last-death-", "x-delivery-count", NOT_BEFORE]);
        let mut write = |name: &str, number: u128| {
            table.insert(name.into(), AMQPValue::LongString(number.to_string().into()));
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        write(headers::FAILURES, delivery.failures.into());
        if delivery.message.headers.last(headers::FIRST_SEEN).is_none() {
            write(headers::FIRST_SEEN, now.as_millis());
        }
        if after > delay {
            write(NOT_BEFORE, (now + after).as_millis());
        }
        keep_routing_key(&mut table, delivery, settings);
        Self::new(delivery, settings.delay_queue(delay), table, original)
    }

    fn new(delivery: &Delivery, to: ShortString, table: FieldTable, original: &BasicProperties) -> Self {
        Self {
            epoch: delivery.receipt.epoch,
            tag: delivery.receipt.position,
            to,
            properties: kept_properties(original).with_headers(table),
            body: delivery.message.body.clone(),
        }
    }
}

/// Persistent, and all of the original but two: an expiration would end the copy early, and the broker refuses a user
/// id that is not the publisher's.
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
    let mut kept = FieldTable::default();
    for (name, value) in original.headers().iter().flatten() {
        let drops = ["CC", "BCC"].contains(&name.as_str()) || dropped.iter().any(|dropped| name.as_str().starts_with(dropped));
        if !drops {
            kept.insert(name.clone(), value.clone());
        }
    }
    kept
}

fn keep_routing_key(table: &mut FieldTable, delivery: &Delivery, settings: &Settings) {
    if let Some(key) = delivery.message.key.as_ref().filter(|key| key[..] != *settings.name.as_bytes()) {
        table.insert(ROUTING_KEY.into(), AMQPValue::LongString(key.to_vec().into()));
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::message::Message;
    use oncegate_core::source::Receipt;

    use super::*;
    use crate::RabbitMq;

    fn original() -> BasicProperties {
        let mut table = FieldTable::default();
        for name in ["CC", "BCC", "x-death", "x-first-death-queue", "mine"] {
            table.insert(name.into(), AMQPValue::LongString("v".into()));
        }
        BasicProperties::default()
            .with_headers(table)
            .with_expiration("1000".into())
            .with_user_id("someone".into())
            .with_content_type("application/json".into())
            .with_message_id("m".into())
            .with_delivery_mode(1)
    }

    fn delivery() -> Delivery {
        let message = Message::new("body").with_key("orders.eu");
        Delivery { message, receipt: Receipt { epoch: 2, partition: 0, position: 9 }, failures: 4 }
    }

    fn settings() -> Settings {
        RabbitMq::queue("orders").check().expect("settings")
    }

    fn names(copy: &Copy) -> Vec<&str> {
        copy.properties.headers().as_ref().expect("headers").inner().keys().map(|name| name.as_str()).collect()
    }

    #[test]
    fn a_dead_letter_keeps_what_was_sent_and_says_why() {
        let copy = Copy::rejected(&delivery(), &Reason::Refused, None, &original(), &settings());
        assert_eq!((copy.to.as_str(), copy.tag, copy.epoch, &copy.body[..]), ("orders.dead-letters", 9, 2, &b"body"[..]));
        let names = names(&copy);
        for name in [headers::REASON, headers::ATTEMPTS, headers::ORIGIN, ROUTING_KEY, "mine", "x-death"] {
            assert!(names.contains(&name), "{name} in {names:?}");
        }
        assert!(!names.contains(&"CC") && !names.contains(&"BCC"));
        let properties = &copy.properties;
        assert_eq!((properties.expiration(), properties.user_id(), properties.delivery_mode()), (&None, &None, &Some(2)));
        assert!(properties.content_type().is_some() && properties.message_id().is_some());
        let doubt = Copy::rejected(&delivery(), &Reason::InDoubt(oncegate_core::road::Cause::Said), None, &original(), &settings());
        assert_eq!(doubt.to.as_str(), "orders.in-doubt");
    }

    #[test]
    fn a_delayed_copy_carries_its_failures_and_waits_long_enough() {
        let to = |after| Copy::delayed(&delivery(), Duration::from_millis(after), &original(), &settings()).to.to_string();
        assert_eq!(to(1), "orders.delay.1000");
        assert_eq!(to(1_001), "orders.delay.5000");
        assert_eq!(to(600_000), "orders.delay.600000");
        assert_eq!(to(9_000_000), "orders.delay.600000");
        let copy = Copy::delayed(&delivery(), Duration::from_secs(6), &original(), &settings());
        let names = names(&copy);
        assert!(names.contains(&headers::FIRST_SEEN) && names.contains(&ROUTING_KEY) && !names.iter().any(|name| name.starts_with("x-")));
        let failures = copy.properties.headers().as_ref().and_then(|table| table.inner().get(headers::FAILURES).cloned());
        assert_eq!(failures, Some(AMQPValue::LongString("4".into())));
    }

    #[test]
    fn a_delay_that_no_queue_has_is_written_down() {
        let says = |after| {
            let copy = Copy::delayed(&delivery(), Duration::from_secs(after), &original(), &settings());
            names(&copy).contains(&NOT_BEFORE)
        };
        assert!(!says(600) && says(601));
    }
}
