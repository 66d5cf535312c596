//! Applies the keys of `[gate]` to a builder.

use std::net::SocketAddr;
use std::time::Duration;

use oncegate::{
    Builder, Execution, Fingerprints, IdSource, Message, MessageId, Order, Outage, defaults,
};

use crate::config::Config;
use crate::error::Error;

/// The suffix of `gate.id` with which ids are hashed.
const HASHED_SUFFIX: &str = " hashed";

impl Config {
    /// Applies `[gate]`, `store.scope` and `store.volatile` to a builder: guarantee, ids, window,
    /// lease, limits, order, retries. Keeps the builder's value of each key that is not set.
    ///
    /// # Errors
    /// [`Error::Misconfigured`], as for [`Config::check`]. The consumer checks bounds when it
    /// starts.
    pub fn consumer<S, T, H, D>(
        &self,
        consumer: Builder<S, T, H, D>,
    ) -> Result<Builder<S, T, H, D>, Error> {
        self.check()?;
        let mut consumer = consumer;
        macro_rules! set {
            ($($setter:ident: $value:expr,)*) => {
                $(if let Some(value) = $value {
                    consumer = consumer.$setter(value);
                })*
            };
        }
        // `check` has rejected larger numbers.
        let to_u32 = |key| {
            self.number(key)
                .map(|number| u32::try_from(number).unwrap_or(u32::MAX))
        };
        let to_usize = |key| {
            self.number(key)
                .map(|number| usize::try_from(number).unwrap_or(usize::MAX))
        };
        set! {
            guarantee: self.has("gate.guarantee").then(|| self.guarantee()),
            id: self.id_source()?,
            scope: self.text("store.scope"),
            dedup_window: self.time("gate.dedup-window"),
            max_age: self.time("gate.max-age"),
            lease: self.time("gate.lease"),
            handler_timeout: self.time("gate.handler-timeout"),
            max_attempts: to_u32("gate.max-attempts"),
            max_crashes: to_u32("gate.max-crashes"),
            max_inline_retries: to_u32("gate.max-inline-retries"),
            max_reconciles: to_u32("gate.max-reconciles"),
            max_in_flight: to_usize("gate.max-in-flight"),
            max_in_flight_bytes: to_usize("gate.max-in-flight-bytes"),
            max_queued: to_usize("gate.max-queued"),
            max_queued_bytes: to_usize("gate.max-queued-bytes"),
            drain_timeout: self.time("gate.drain-timeout"),
            order: self.text("gate.order").map(|order| match order {
                "by-key" => Order::ByKey,
                "by-partition" => Order::ByPartition,
                _ => Order::Unordered,
            }),
            execution: self.text("gate.execution").map(|handlers| match handlers {
                "inline" => Execution::Inline,
                _ => Execution::Spawned,
            }),
            outage: self.text("gate.outage").map(|outage| match outage {
                "pass-through" => Outage::PassThrough,
                _ => Outage::Hold,
            }),
            fingerprints: self.text("gate.fingerprints").map(|fingerprints| match fingerprints {
                "body" => Fingerprints::Body,
                "off" => Fingerprints::Off,
                _ => Fingerprints::ByGuarantee,
            }),
        }
        if let Some(shortest) = self.time("gate.shortest-lease") {
            if shortest > self.lease() {
                return Err(Error::misconfigured(
                    "gate.shortest-lease is longer than gate.lease; shorten it, or lengthen gate.lease",
                ));
            }
            consumer = consumer.adaptive_lease(shortest, self.lease());
        }
        if let Some((first, longest)) = self.backoff() {
            consumer = consumer.backoff(first, longest);
        }
        Ok(if self.allows_volatile_store() {
            consumer.allow_volatile_store()
        } else {
            consumer
        })
    }

    /// The first and the longest backoff, if at least one is configured.
    fn backoff(&self) -> Option<(Duration, Duration)> {
        let (first, longest) = (self.time("gate.backoff"), self.time("gate.longest-backoff"));
        first.or(longest)?;
        let first = first.unwrap_or(defaults::BACKOFF);
        Some((
            first,
            longest.unwrap_or(defaults::LONGEST_BACKOFF.max(first)),
        ))
    }

    /// The id source, if it is configured.
    ///
    /// # Errors
    /// `gate.id` is not valid.
    pub fn id_source(&self) -> Result<Option<IdSource>, Error> {
        let Some(setting) = self.text("gate.id") else {
            return Ok(None);
        };
        let text = setting.strip_suffix(HASHED_SUFFIX).unwrap_or(setting);
        let source = one_or_list(text, " or ", IdSource::first_of, |text| {
            one_or_list(text, " and ", IdSource::all_of, single_id_source)
        });
        let source = source.ok_or_else(|| {
            Error::misconfigured(format!(
                "gate.id: {setting:?} is not valid; write header NAME, json /POINTER, message-id, key, body-hash or position, or several with `or` or `and` between them"
            ))
        })?;
        Ok(Some(if self.hashes_ids() {
            source.hashed()
        } else {
            source
        }))
    }

    /// Parses an id from the command line, as a producer wrote it or as keys and logs show it.
    /// `None` if it is empty.
    pub fn message_id(&self, text: &str) -> Option<MessageId> {
        let id = MessageId::stored(text).or_else(|| MessageId::new(text))?;
        Some(if self.hashes_ids() { id.hashed() } else { id })
    }

    /// The id of a message whose body has this JSON number where `gate.id` reads the id, if the id
    /// differs from the text: `7` for `7.0`. `None` if `gate.id` reads no JSON, the text is no JSON
    /// number, or the id is the same text.
    pub fn id_of_json_number(&self, text: &str) -> Option<MessageId> {
        let setting = self.text("gate.id")?;
        if !setting.starts_with("json ")
            || setting.contains(" and ")
            || text.starts_with(['"', '{', '['])
        {
            return None;
        }
        let message = Message::new(format!("{{\"id\":{text}}}"));
        let id = IdSource::json_pointer("/id").read(&message).ok()?;
        (id.as_str() != text).then_some(id)
    }

    fn hashes_ids(&self) -> bool {
        self.text("gate.id")
            .is_some_and(|text| text.ends_with(HASHED_SUFFIX))
    }

    /// The address of the admin port; `None` if there is no such port.
    pub(crate) fn admin_address(&self) -> Result<Option<SocketAddr>, Error> {
        let Some(text) = self.text("admin.listen") else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|_| {
            Error::misconfigured(format!("admin.listen: {text:?} is not an address; write an IP address and a port, such as 127.0.0.1:9623"))
        })
    }
}

/// A source, or several with this word between them.
fn one_or_list(
    text: &str,
    word: &str,
    list: impl FnOnce(Vec<IdSource>) -> IdSource,
    parse: impl Fn(&str) -> Option<IdSource>,
) -> Option<IdSource> {
    if !text.contains(word) {
        return parse(text);
    }
    Some(list(text.split(word).map(parse).collect::<Option<_>>()?))
}

fn single_id_source(text: &str) -> Option<IdSource> {
    let (kind, name) = text
        .split_once(' ')
        .map_or((text, ""), |(kind, name)| (kind, name.trim()));
    Some(match (kind, name) {
        // `hashed` applies to the whole list, and is its last word.
        ("header", name) if !name.is_empty() && !name.contains(' ') => IdSource::header(name),
        ("json", pointer) if pointer.starts_with('/') => IdSource::json_pointer(pointer),
        ("message-id", "") => IdSource::message_id(),
        ("key", "") => IdSource::key(),
        ("body-hash", "") => IdSource::body_hash(),
        ("position", "") => IdSource::position(),
        _ => return None,
    })
}
