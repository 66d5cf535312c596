//! All settings: key, kind of value, and description.

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ValueKind {
    /// A text.
    Text,
    /// A duration: `30s`.
    Time,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A whole number, 0 or more.
    Number,
    /// A list of texts; in a variable separated by commas.
    List,
    /// Pairs of name and text; in a variable `name=value`, separated by commas or one per line.
    Pairs,
}

/// Which part of a value is secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Redaction {
    /// None.
    Nothing,
    /// The part between the user and the host of a URL.
    Password,
    /// The whole value.
    All,
}

/// One setting.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Setting {
    /// `<section>.<name>`.
    pub key: &'static str,
    /// The kind of its value.
    pub kind: ValueKind,
    /// Which part is secret.
    pub redaction: Redaction,
    /// What it sets, and its default.
    pub description: &'static str,
}

impl Setting {
    /// The environment variable that sets it and overrides the file.
    pub fn variable(&self) -> String {
        format!(
            "ONCEGATE_{}",
            self.key.replace(['.', '-'], "_").to_uppercase()
        )
    }

    /// Whether the value is a secret, so that a separate file may contain it, which `<key>-file`
    /// names.
    pub fn is_secret(&self) -> bool {
        self.redaction != Redaction::Nothing && self.kind == ValueKind::Text
    }
}

const fn text(key: &'static str, description: &'static str) -> Setting {
    Setting {
        key,
        kind: ValueKind::Text,
        redaction: Redaction::Nothing,
        description,
    }
}

const fn time(key: &'static str, description: &'static str) -> Setting {
    Setting {
        key,
        kind: ValueKind::Time,
        redaction: Redaction::Nothing,
        description,
    }
}

const fn number(key: &'static str, description: &'static str) -> Setting {
    Setting {
        key,
        kind: ValueKind::Number,
        redaction: Redaction::Nothing,
        description,
    }
}

const fn choice(
    key: &'static str,
    words: &'static [&'static str],
    description: &'static str,
) -> Setting {
    Setting {
        key,
        kind: ValueKind::Choice(words),
        redaction: Redaction::Nothing,
        description,
    }
}

const fn redacted(
    key: &'static str,
    kind: ValueKind,
    redaction: Redaction,
    description: &'static str,
) -> Setting {
    Setting {
        key,
        kind,
        redaction,
        description,
    }
}

/// All settings, by section.
pub const SETTINGS: &[Setting] = &[
    redacted(
        "store.url",
        ValueKind::Text,
        Redaction::Password,
        "the store: redis://[user[:password]@]host[:port][/database], rediss://, postgres://[user[:password]@]host[:port]/database, sqlite:FILE, or memory: for a test",
    ),
    redacted(
        "store.sentinels",
        ValueKind::List,
        Redaction::Password,
        "instead of store.url: the Sentinels that monitor the primary",
    ),
    text("store.sentinel-name", "the name of the primary in Sentinel"),
    redacted(
        "store.cluster",
        ValueKind::List,
        Redaction::Password,
        "instead of store.url: nodes of a Redis Cluster",
    ),
    text(
        "store.prefix",
        "the prefix of every key; processed: by default",
    ),
    text(
        "store.scope",
        "the scope of the consumer, part of each key; none by default",
    ),
    time(
        "store.timeout",
        "how long a reply may take; 5s for the command line; for a consumer 500ms with Redis and 2s with another store",
    ),
    number(
        "store.replicas",
        "how many replicas must acknowledge a claim; none by default",
    ),
    time(
        "store.replicas-timeout",
        "how long to wait for these replicas; 200ms by default",
    ),
    choice(
        "store.volatile",
        &["refused", "accepted"],
        "whether at most once accepts a store that may lose data, and does not pause after a loss: accepted, or refused (the default)",
    ),
    text("store.ca-certificate", "the CA certificate for TLS (PEM)"),
    text(
        "store.client-certificate",
        "the client certificate for TLS (PEM)",
    ),
    text(
        "store.client-key",
        "the key of the client certificate (PEM)",
    ),
    choice(
        "gate.guarantee",
        &["at-most-once", "effectively-once", "bare"],
        "at-most-once, effectively-once (the default) or bare",
    ),
    choice(
        "gate.mode",
        &["on", "shadow"],
        "on, or shadow: blocks no message and counts those it would have blocked; on by default",
    ),
    time(
        "gate.dedup-window",
        "how long a completed id is stored; 24h by default",
    ),
    time(
        "gate.max-age",
        "in at most once, the maximum age of a message that counts as new if the store does not know its id, otherwise only for a metric; half the window by default",
    ),
    time(
        "gate.lease",
        "how long a claim is valid without renewal; 30s by default",
    ),
    time(
        "gate.shortest-lease",
        "adapts the lease to the run time of handlers, between this and gate.lease; off by default",
    ),
    time(
        "gate.handler-timeout",
        "how long a handler may run; 5m by default",
    ),
    number(
        "gate.max-attempts",
        "attempts before a message is dead-lettered; 5 by default",
    ),
    number(
        "gate.max-crashes",
        "process crashes during handling before a message is dead-lettered, or in at most once is in doubt; 10 by default",
    ),
    number(
        "gate.max-inline-retries",
        "retries of a handler within one attempt, without redelivery; 3 by default",
    ),
    time(
        "gate.backoff",
        "the first backoff before a retry, which doubles; 100ms by default",
    ),
    time(
        "gate.longest-backoff",
        "the longest backoff before a retry; 10s by default",
    ),
    number(
        "gate.max-reconciles",
        "calls of `reconcile` before a message moves to the in-doubt destination; 5 by default",
    ),
    number(
        "gate.max-in-flight",
        "maximum deliveries in flight per process, plus as many whose completion is being recorded; 512 by default",
    ),
    number(
        "gate.max-in-flight-bytes",
        "maximum bytes of deliveries in flight; 67108864 by default",
    ),
    number(
        "gate.max-queued",
        "maximum deliveries that wait for a retry, or behind others of their key or partition; 10000 by default",
    ),
    number(
        "gate.max-queued-bytes",
        "maximum bytes of queued deliveries; 67108864 by default",
    ),
    time(
        "gate.drain-timeout",
        "how long handlers may continue to run after the consumer begins to stop; 30s by default",
    ),
    choice(
        "gate.order",
        &["by-key", "by-partition", "unordered"],
        "which messages are handled in order: by-key (the default on Kafka), by-partition or unordered (the default on RabbitMQ)",
    ),
    choice(
        "gate.execution",
        &["spawned", "inline"],
        "where handlers run: spawned, each in a task of its own (the default), or inline",
    ),
    choice(
        "gate.outage",
        &["hold", "pass-through"],
        "what to do while the store is unavailable: hold (the default) or pass-through",
    ),
    choice(
        "gate.fingerprints",
        &["by-guarantee", "body", "off"],
        "whether to detect the same id with another body: by-guarantee (only in at most once, the default), body or off",
    ),
    text(
        "gate.id",
        "where to read ids: header NAME, message-id, key, json POINTER, body-hash or position; several with `or` between them: the first that the message has; with `and`: all, joined by `/`; append `hashed` to hash them",
    ),
    number(
        "gate.rate",
        "new ids per second, to estimate the memory of the store",
    ),
    choice(
        "gate.broker",
        &["kafka", "rabbitmq"],
        "the broker to consume, if both are configured",
    ),
    text(
        "kafka.brokers",
        "host:port of one or more brokers, separated by commas",
    ),
    text("kafka.topic", "the consumed topic"),
    text("kafka.group", "the consumer group"),
    choice(
        "kafka.group-protocol",
        &["classic", "consumer"],
        "the group protocol: classic (the default) or consumer (KIP-848)",
    ),
    text(
        "kafka.dead-letters",
        "the dead-letter topic; `<topic>.dead-letters` by default",
    ),
    text(
        "kafka.in-doubt",
        "the in-doubt topic; `<topic>.in-doubt` by default",
    ),
    choice(
        "kafka.start",
        &["earliest", "error"],
        "where a group without a committed offset starts: earliest (the default) or error",
    ),
    choice(
        "kafka.out-of-range",
        &["earliest", "error"],
        "what to do if the committed offset is out of range: earliest (the default) or error (always, if kafka.start is error)",
    ),
    number(
        "kafka.create-partitions",
        "creates missing dead-letter and in-doubt topics, with this many partitions; not created by default",
    ),
    number(
        "kafka.create-replicas",
        "the replication factor of created topics",
    ),
    choice(
        "kafka.limited-retention",
        &["refused", "accepted"],
        "whether dead-letter and in-doubt topics may have limited retention; refused by default",
    ),
    number(
        "kafka.body-limit",
        "the maximum body size, in bytes; no limit by default",
    ),
    time(
        "kafka.drain-on-revoke",
        "how long a rebalance waits for messages in flight; 10s by default",
    ),
    time(
        "kafka.stalled-after",
        "how long a partition may make no progress while its log grows; 60s by default",
    ),
    redacted(
        "kafka.password",
        ValueKind::Text,
        Redaction::All,
        "the SASL password (sasl.password)",
    ),
    redacted(
        "kafka.properties",
        ValueKind::Pairs,
        Redaction::All,
        "properties of librdkafka, such as security.protocol and sasl.username",
    ),
    redacted(
        "rabbitmq.url",
        ValueKind::Text,
        Redaction::Password,
        "the broker: amqp://user:password@host:port/vhost, or amqps://",
    ),
    text("rabbitmq.queue", "the consumed queue"),
    text(
        "rabbitmq.dead-letters",
        "the dead-letter queue; `<queue>.dead-letters` by default",
    ),
    text(
        "rabbitmq.in-doubt",
        "the in-doubt queue; `<queue>.in-doubt` by default",
    ),
    number(
        "rabbitmq.prefetch",
        "the maximum number of unacknowledged deliveries; 512 by default",
    ),
    text(
        "rabbitmq.key-header",
        "the header with the key of a message; its routing key by default",
    ),
    number(
        "rabbitmq.body-limit",
        "the maximum body size, in bytes; no limit by default",
    ),
    time(
        "rabbitmq.consumer-timeout",
        "the consumer timeout of the broker; 30m by default",
    ),
    choice(
        "rabbitmq.topology",
        &["declare", "check", "trust"],
        "how to set up the queues: declare (the default), check or trust",
    ),
    choice(
        "rabbitmq.queue-kind",
        &["quorum", "classic"],
        "the type of created queues: quorum (the default) or classic",
    ),
    choice(
        "rabbitmq.consumers",
        &["competing", "single-active"],
        "the consumers of created queues: competing (the default) or single-active",
    ),
    choice(
        "rabbitmq.rejects",
        &["published", "by-queue"],
        "how rejected messages reach the dead letters: published (the default) or by-queue",
    ),
    choice(
        "rabbitmq.delivery-counts",
        &["refused", "accepted"],
        "whether the command line reads queues whose delivery limit its reads may reach: accepted (as --accept-delivery-counts), or refused (the default; in queues that oncegate declares, a copy without a count replaces a message after five deliveries)",
    ),
    text(
        "rabbitmq.ca-certificate",
        "an additional CA certificate for TLS (PEM)",
    ),
    text(
        "rabbitmq.client-certificate",
        "the client certificate for TLS (PEM)",
    ),
    text(
        "rabbitmq.client-key",
        "the key of the client certificate (PEM)",
    ),
    text(
        "admin.listen",
        "the address of /live, /ready, /status and /metrics, such as 127.0.0.1:9623; none by default",
    ),
    text(
        "log.filter",
        "the log filter, in the syntax of RUST_LOG, which overrides it; info by default, without lapin (the RabbitMQ client) unless named; a filter without a default level that names no oncegate crate also shows warnings of oncegate",
    ),
    text(
        "audit.file",
        "the file for the audit, the record of operators' changes; by default it is in the store, or beside the SQLite file",
    ),
];

/// The setting with this key.
pub fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

/// The sections, in order.
pub fn sections() -> impl Iterator<Item = &'static str> {
    let mut last = "";
    SETTINGS.iter().filter_map(move |setting| {
        let section = setting.key.split('.').next()?;
        (section != std::mem::replace(&mut last, section)).then_some(section)
    })
}

/// The known name that is most similar to an unknown one; `None` if no name is similar.
pub fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |name: &&str| strsim::damerau_levenshtein(unknown, name);
    known
        .into_iter()
        .min_by_key(distance)
        .filter(|name| distance(name) <= (unknown.len() / 2).max(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_contiguous_and_keys_unique() {
        let sections: Vec<&str> = sections().collect();
        let mut once = sections.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), sections.len(), "{sections:?}");
        let mut keys: Vec<&str> = SETTINGS.iter().map(|setting| setting.key).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), SETTINGS.len());
    }

    #[test]
    fn variables_are_unique() {
        let mut variables: Vec<String> = SETTINGS.iter().map(Setting::variable).collect();
        let count = variables.len();
        variables.sort_unstable();
        variables.dedup();
        assert_eq!(variables.len(), count);
    }
}
