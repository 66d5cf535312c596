//! Every setting, once: its key, how its value is written, and what it says.

/// How a value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Number,
    /// Several texts; in a variable with commas between them.
    List,
    /// Names and texts; not to be had in a variable.
    Names,
}

/// What of a value nobody is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hides {
    Nothing,
    /// What stands between the user and the host of a URL.
    Password,
    /// All of it.
    All,
}

/// One setting.
pub(crate) struct Setting {
    pub(crate) key: &'static str,
    pub(crate) kind: Kind,
    pub(crate) hides: Hides,
    pub(crate) says: &'static str,
}

impl Setting {
    /// The variable that sets it, and wins over the file.
    pub(crate) fn variable(&self) -> Option<String> {
        (self.kind != Kind::Names).then(|| format!("ONCEGATE_{}", self.key.replace(['.', '-'], "_").to_uppercase()))
    }

    /// A secret may stand in a file of its own, which `<key>-file` names.
    pub(crate) fn is_secret(&self) -> bool {
        self.hides != Hides::Nothing && self.kind == Kind::Text
    }
}

const fn setting(key: &'static str, kind: Kind, says: &'static str) -> Setting {
    Setting { key, kind, hides: Hides::Nothing, says }
}

const fn hiding(key: &'static str, kind: Kind, hides: Hides, says: &'static str) -> Setting {
    Setting { key, kind, hides, says }
}

/// All of them, section by section.
pub(crate) const SETTINGS: &[Setting] = &[
    hiding("store.url", Kind::Text, Hides::Password, "the Redis server: redis://[user[:password]@]host[:port][/database], or rediss://"),
    hiding("store.sentinels", Kind::List, Hides::Password, "instead: the Sentinels that know the primary"),
    setting("store.sentinel-name", Kind::Text, "the name by which the Sentinels know the primary"),
    hiding("store.cluster", Kind::List, Hides::Password, "instead: nodes of a Redis Cluster"),
    setting("store.prefix", Kind::Text, "what stands before each key; processed: by default"),
    setting("store.scope", Kind::Text, "the scope of the consumer whose markers these are; none by default"),
    setting("store.timeout", Kind::Text, "how long a reply may take; 5s by default"),
    setting("store.replicas", Kind::Number, "how many replicas have to know of a claim; none by default"),
    setting("store.replicas-timeout", Kind::Text, "how long they have for it; 200ms by default"),
    setting("store.ca-certificate", Kind::Text, "the authority that is trusted over TLS (PEM)"),
    setting("store.client-certificate", Kind::Text, "the certificate to show over TLS (PEM)"),
    setting("store.client-key", Kind::Text, "its key (PEM)"),
    setting("gate.guarantee", Kind::Text, "at-most-once, effectively-once (the default) or bare"),
    setting("gate.window", Kind::Text, "how long a done id is remembered; 24h by default"),
    setting("gate.max-age", Kind::Text, "how old a message may be and be taken for new; half the window by default"),
    setting("gate.lease", Kind::Text, "how long a claim holds without renewal; 30s by default"),
    setting("gate.handler-timeout", Kind::Text, "how long a handler may run; 5m by default"),
    setting("gate.in-flight", Kind::Number, "how many deliveries one process has in flight; 512 by default"),
    setting("gate.id", Kind::Text, "where ids are read: header NAME, message-id, key, json POINTER, body-hash or position"),
    setting("gate.rate", Kind::Number, "new ids a second, for judging the memory of the store"),
    setting("kafka.brokers", Kind::Text, "host:port of one broker or, with commas, several"),
    setting("kafka.topic", Kind::Text, "the topic that is consumed"),
    setting("kafka.dead-letters", Kind::Text, "its dead letters; `<topic>.dead-letters` by default"),
    setting("kafka.in-doubt", Kind::Text, "its messages in doubt; `<topic>.in-doubt` by default"),
    hiding("kafka.password", Kind::Text, Hides::All, "sasl.password"),
    hiding("kafka.properties", Kind::Names, Hides::All, "properties of librdkafka, such as security.protocol and sasl.username"),
    hiding("rabbitmq.url", Kind::Text, Hides::Password, "the broker: amqp://user:password@host:port/vhost, or amqps://"),
    setting("rabbitmq.queue", Kind::Text, "the queue that is consumed"),
    setting("rabbitmq.dead-letters", Kind::Text, "its dead letters; `<queue>.dead-letters` by default"),
    setting("rabbitmq.in-doubt", Kind::Text, "its messages in doubt; `<queue>.in-doubt` by default"),
    setting("rabbitmq.consumer-timeout", Kind::Text, "how long the broker lets a delivery stay open; 30m by default"),
    setting("audit.file", Kind::Text, "a file for the audit, instead of the stream `<prefix>!audit` on the store"),
];

/// The setting of a key.
pub(crate) fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

/// The one that somebody may have meant, of those that can be named.
pub(crate) fn nearest<'a>(wrong: &str, right: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = |name: &&str| strsim::damerau_levenshtein(wrong, name);
    right.into_iter().min_by_key(near).filter(|name| near(name) <= (wrong.len() / 2).max(2))
}
