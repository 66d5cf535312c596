//! Every setting, once: its key, how its value is written, and what it says.

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A text.
    Text,
    /// A text that is a time: `30s`.
    Time,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A whole number, 0 or more.
    Number,
    /// Several texts; in a variable with commas between them.
    List,
    /// Names and texts; in a variable `name=value`, with commas between them or one a line.
    Names,
}

/// What of a value nobody is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hides {
    /// All of it is shown.
    Nothing,
    /// What stands between the user and the host of a URL.
    Password,
    /// All of it.
    All,
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// `<section>.<name>`.
    pub key: &'static str,
    /// How its value is written.
    pub kind: Kind,
    /// What of it is a secret.
    pub hides: Hides,
    /// What it says, with its default.
    pub says: &'static str,
}

impl Setting {
    /// The variable that sets it, and wins over the file.
    pub fn variable(&self) -> String {
        format!(
            "ONCEGATE_{}",
            self.key.replace(['.', '-'], "_").to_uppercase()
        )
    }

    /// A secret may stand in a file of its own, which `<key>-file` names.
    pub fn is_secret(&self) -> bool {
        self.hides != Hides::Nothing && self.kind == Kind::Text
    }
}

const fn text(key: &'static str, says: &'static str) -> Setting {
    Setting {
        key,
        kind: Kind::Text,
        hides: Hides::Nothing,
        says,
    }
}

const fn time(key: &'static str, says: &'static str) -> Setting {
    Setting {
        key,
        kind: Kind::Time,
        hides: Hides::Nothing,
        says,
    }
}

const fn number(key: &'static str, says: &'static str) -> Setting {
    Setting {
        key,
        kind: Kind::Number,
        hides: Hides::Nothing,
        says,
    }
}

const fn choice(key: &'static str, words: &'static [&'static str], says: &'static str) -> Setting {
    Setting {
        key,
        kind: Kind::Choice(words),
        hides: Hides::Nothing,
        says,
    }
}

const fn hiding(key: &'static str, kind: Kind, hides: Hides, says: &'static str) -> Setting {
    Setting {
        key,
        kind,
        hides,
        says,
    }
}

/// All of them, section by section.
pub const SETTINGS: &[Setting] = &[
    hiding(
        "store.url",
        Kind::Text,
        Hides::Password,
        "the store: redis://[user[:password]@]host[:port][/database], rediss://, sqlite:FILE, or memory: for a test",
    ),
    hiding(
        "store.sentinels",
        Kind::List,
        Hides::Password,
        "instead: the Sentinels that know the primary",
    ),
    text(
        "store.sentinel-name",
        "the name by which the Sentinels know the primary",
    ),
    hiding(
        "store.cluster",
        Kind::List,
        Hides::Password,
        "instead: nodes of a Redis Cluster",
    ),
    text(
        "store.prefix",
        "what stands before each key; processed: by default",
    ),
    text(
        "store.scope",
        "the scope of the consumer whose markers these are; none by default",
    ),
    time(
        "store.timeout",
        "how long a reply may take; for a consumer 500ms with Redis and 2s with SQLite, for an operator 5s by default",
    ),
    number(
        "store.replicas",
        "how many replicas have to know of a claim; none by default",
    ),
    time(
        "store.replicas-timeout",
        "how long they have for it; 200ms by default",
    ),
    choice(
        "store.forgetful",
        &["refused", "accepted"],
        "whether at most once takes a store that may forget; refused by default",
    ),
    text(
        "store.ca-certificate",
        "the authority that is trusted over TLS (PEM)",
    ),
    text(
        "store.client-certificate",
        "the certificate to show over TLS (PEM)",
    ),
    text("store.client-key", "its key (PEM)"),
    choice(
        "gate.guarantee",
        &["at-most-once", "effectively-once", "bare"],
        "at-most-once, effectively-once (the default) or bare",
    ),
    choice(
        "gate.mode",
        &["on", "trial"],
        "on, or trial: stops nothing, and counts what it would have stopped; on by default",
    ),
    time(
        "gate.dedup-window",
        "how long a done id is remembered; 24h by default",
    ),
    time(
        "gate.max-age",
        "how old a message may be and be taken for new; half the window by default",
    ),
    time(
        "gate.lease",
        "how long a claim holds without renewal; 30s by default",
    ),
    time(
        "gate.shortest-lease",
        "lets the lease go by how long handlers run, between this and gate.lease; not by default",
    ),
    time(
        "gate.handler-timeout",
        "how long a handler may run; 5m by default",
    ),
    number(
        "gate.max-attempts",
        "how many attempts a message gets before it is dead-lettered; 5 by default",
    ),
    number(
        "gate.max-crashes",
        "how many processes may end while they handle a message before it is dead-lettered; 10 by default",
    ),
    number(
        "gate.max-inline-retries",
        "how often a handler is run again in place within one attempt; 3 by default",
    ),
    time(
        "gate.backoff",
        "the first pause before a retry, which doubles; 100ms by default",
    ),
    time(
        "gate.longest-backoff",
        "the longest pause before a retry; 10s by default",
    ),
    number(
        "gate.max-reconciles",
        "how often `reconcile` is tried before a message goes to those in doubt; 5 by default",
    ),
    number(
        "gate.max-in-flight",
        "how many deliveries one process has in flight; 512 by default",
    ),
    number(
        "gate.max-in-flight-bytes",
        "how many bytes they have together; 67108864 by default",
    ),
    number(
        "gate.max-queued",
        "how many deliveries wait in order behind others of their key or partition; 10000 by default",
    ),
    number(
        "gate.max-queued-bytes",
        "how many bytes they have together; 67108864 by default",
    ),
    time(
        "gate.drain-timeout",
        "how long a drain may take; 30s by default",
    ),
    choice(
        "gate.order",
        &["by-key", "by-partition", "unordered"],
        "what is handled one after the other: by-key (the default on Kafka), by-partition or unordered (the default on RabbitMQ)",
    ),
    choice(
        "gate.execution",
        &["spawned", "inline"],
        "where handlers run: spawned, each in a task of its own (the default), or inline",
    ),
    choice(
        "gate.outage",
        &["hold", "pass-through"],
        "what to do while the store is away: hold (the default) or pass-through",
    ),
    choice(
        "gate.fingerprints",
        &["by-guarantee", "body", "off"],
        "whether the same id with another body is told apart: by-guarantee (in at most once alone, the default), body or off",
    ),
    text(
        "gate.id",
        "where ids are read: header NAME, message-id, key, json POINTER, body-hash or position; with `hashed` behind it they are hashed",
    ),
    number(
        "gate.rate",
        "new ids a second, for judging the memory of the store",
    ),
    choice(
        "gate.broker",
        &["kafka", "rabbitmq"],
        "which one is consumed, where both are configured",
    ),
    text(
        "kafka.brokers",
        "host:port of one broker or, with commas, several",
    ),
    text("kafka.topic", "the topic that is consumed"),
    text("kafka.group", "the consumer group"),
    text(
        "kafka.dead-letters",
        "its dead letters; `<topic>.dead-letters` by default",
    ),
    text(
        "kafka.in-doubt",
        "its messages in doubt; `<topic>.in-doubt` by default",
    ),
    choice(
        "kafka.start",
        &["earliest", "error"],
        "where a group begins that has no offset yet: earliest (the default) or error",
    ),
    choice(
        "kafka.out-of-range",
        &["earliest", "error"],
        "what to do where the log does not have the group's offset any more: earliest (the default) or error",
    ),
    number(
        "kafka.create-partitions",
        "creates missing topics of letters, with so many partitions; they are not created by default",
    ),
    number("kafka.create-replicas", "and so many replicas"),
    choice(
        "kafka.limited-retention",
        &["refused", "accepted"],
        "whether topics of letters may forget what nobody has looked at; refused by default",
    ),
    number(
        "kafka.body-limit",
        "the largest body to hand over, in bytes; no limit by default",
    ),
    time(
        "kafka.drain-on-revoke",
        "how long a rebalance waits for what is being handled; 10s by default",
    ),
    time(
        "kafka.stalled-after",
        "how long a partition may stand still while its log grows; 60s by default",
    ),
    hiding("kafka.password", Kind::Text, Hides::All, "sasl.password"),
    hiding(
        "kafka.properties",
        Kind::Names,
        Hides::All,
        "properties of librdkafka, such as security.protocol and sasl.username",
    ),
    hiding(
        "rabbitmq.url",
        Kind::Text,
        Hides::Password,
        "the broker: amqp://user:password@host:port/vhost, or amqps://",
    ),
    text("rabbitmq.queue", "the queue that is consumed"),
    text(
        "rabbitmq.dead-letters",
        "its dead letters; `<queue>.dead-letters` by default",
    ),
    text(
        "rabbitmq.in-doubt",
        "its messages in doubt; `<queue>.in-doubt` by default",
    ),
    number(
        "rabbitmq.prefetch",
        "how many deliveries are handed over ahead of their acknowledgement; 512 by default",
    ),
    text(
        "rabbitmq.key-header",
        "the header that holds a message's key; its routing key by default",
    ),
    number(
        "rabbitmq.body-limit",
        "the largest body to hand over, in bytes; no limit by default",
    ),
    time(
        "rabbitmq.consumer-timeout",
        "how long the broker lets a delivery stay open; 30m by default",
    ),
    choice(
        "rabbitmq.topology",
        &["declare", "check", "trust"],
        "what to do about the queues: declare (the default), check or trust",
    ),
    choice(
        "rabbitmq.queue-kind",
        &["quorum", "classic"],
        "what kind of queue to create: quorum (the default) or classic",
    ),
    choice(
        "rabbitmq.consumers",
        &["competing", "single-active"],
        "who consumes a queue that is created: competing (the default) or single-active",
    ),
    choice(
        "rabbitmq.rejects",
        &["published", "by-queue"],
        "how what is rejected reaches the dead letters: published (the default) or by-queue",
    ),
    choice(
        "rabbitmq.delivery-counts",
        &["refused", "accepted"],
        "whether letters are left as they are that RabbitMQ counted often: refused (the default) replaces such a letter by a copy, accepted leaves it",
    ),
    text(
        "rabbitmq.ca-certificate",
        "an authority that is trusted over TLS beside the system's (PEM)",
    ),
    text(
        "rabbitmq.client-certificate",
        "the certificate to show over TLS (PEM)",
    ),
    text("rabbitmq.client-key", "its key (PEM)"),
    text(
        "admin.listen",
        "where a consumer answers /live, /ready, /status and /metrics, such as 127.0.0.1:9623; nowhere by default",
    ),
    text(
        "log.filter",
        "what a consumer logs, as RUST_LOG says it, which wins; info by default, without what RabbitMQ's client (lapin) says unless it is named",
    ),
    text(
        "audit.file",
        "a file for the audit, instead of the stream `<prefix>!audit` on the store",
    ),
];

/// The setting of a key.
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

/// The one that somebody may have meant, of those that can be named.
pub fn nearest<'a>(wrong: &str, right: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = |name: &&str| strsim::damerau_levenshtein(wrong, name);
    right
        .into_iter()
        .min_by_key(near)
        .filter(|name| near(name) <= (wrong.len() / 2).max(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_stands_in_one_place_and_each_key_once() {
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
    fn no_two_settings_have_one_variable() {
        let mut variables: Vec<String> = SETTINGS.iter().map(Setting::variable).collect();
        let count = variables.len();
        variables.sort_unstable();
        variables.dedup();
        assert_eq!(variables.len(), count);
    }
}
