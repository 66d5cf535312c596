//! Keys held against each other: what contradicts itself, and what is missing.

use crate::config::Config;
use crate::error::{Broker, Error};
use crate::settings::{SETTINGS, Setting, find};
use crate::store::{Place, no_store};

/// Numbers that the library keeps in fewer bits.
const AT_MOST: [(&str, u64); 8] = [
    ("store.replicas", u32::MAX as u64),
    ("gate.max-attempts", u32::MAX as u64),
    ("gate.max-crashes", u32::MAX as u64),
    ("gate.max-inline-retries", u32::MAX as u64),
    ("gate.max-reconciles", u32::MAX as u64),
    ("kafka.create-partitions", u16::MAX as u64),
    ("kafka.create-replicas", u16::MAX as u64),
    ("rabbitmq.prefetch", u16::MAX as u64),
];

/// What says something to Redis alone.
const OF_REDIS: [&str; 6] = [
    "store.prefix",
    "store.replicas",
    "store.replicas-timeout",
    "store.ca-certificate",
    "store.client-certificate",
    "store.client-key",
];

impl Config {
    /// Checks what was set, whatever it is for. Asks no server.
    ///
    /// # Errors
    /// [`Error::Misconfigured`]: a value that means nothing, or keys that contradict each other.
    pub fn check(&self) -> Result<(), Error> {
        self.check_store()?;
        self.scope()?;
        self.id_source()?;
        self.pairs(&[
            ("kafka.create-partitions", "kafka.create-replicas"),
            ("kafka.create-replicas", "kafka.create-partitions"),
            ("rabbitmq.client-certificate", "rabbitmq.client-key"),
            ("rabbitmq.client-key", "rabbitmq.client-certificate"),
        ])?;
        for (key, most) in AT_MOST {
            if let Some(number) = self.number(key).filter(|number| *number > most) {
                return Err(Error::misconfigured(format!(
                    "{key}: {number} is too large; write at most {most}"
                )));
            }
        }
        self.listens_at().map(drop)
    }

    /// One store at the most, and nothing said to it that it does not know.
    pub(crate) fn check_store(&self) -> Result<(), Error> {
        let named = ["store.url", "store.sentinels", "store.cluster"]
            .into_iter()
            .filter(|key| self.has(key))
            .count();
        if named > 1 {
            return Err(Error::misconfigured(
                "set one of store.url, store.sentinels and store.cluster",
            ));
        }
        for key in ["store.sentinels", "store.cluster"] {
            if self.has(key) && self.list(key).is_empty() {
                return Err(Error::misconfigured(format!(
                    "{key} names nobody; write at least one, or leave it out"
                )));
            }
        }
        if let Some(Place::Sqlite(_) | Place::Memory) = self.place()?
            && let Some(key) = OF_REDIS.into_iter().find(|key| self.has(key))
        {
            return Err(Error::misconfigured(format!(
                "{key} is Redis's, and store.url names another store; leave one of them out"
            )));
        }
        self.pairs(&[
            ("store.sentinels", "store.sentinel-name"),
            ("store.sentinel-name", "store.sentinels"),
            ("store.replicas-timeout", "store.replicas"),
            ("store.client-certificate", "store.client-key"),
            ("store.client-key", "store.client-certificate"),
        ])
    }

    /// The first needs the second.
    fn pairs(&self, pairs: &[(&str, &str)]) -> Result<(), Error> {
        match pairs
            .iter()
            .find(|(one, other)| self.has(one) && !self.has(other))
        {
            Some((one, other)) => Err(Error::misconfigured(format!(
                "{one} needs {other}; set both, or leave {one} out"
            ))),
            None => Ok(()),
        }
    }

    /// Checks, besides, that a consumer can be wired from it: a store, one broker, an id. Asks no
    /// server.
    ///
    /// # Errors
    /// [`Error::Misconfigured`]: the key that is missing, and what to write; or as for [`Config::check`].
    pub fn check_for_consumer(&self) -> Result<(), Error> {
        self.check()?;
        self.place()?.ok_or_else(no_store)?;
        if !self.has("gate.id") {
            return Err(missing(
                "gate.id",
                "where ids are read, such as \"header payment-id\"; a wrong guess would skip messages",
            ));
        }
        let needed: &[(&str, &str)] = match self.broker()? {
            Broker::Kafka => &[
                ("kafka.brokers", "host:port of one or, with commas, several"),
                ("kafka.topic", "the topic to consume"),
                (
                    "kafka.group",
                    "the consumer group, whose members share the partitions",
                ),
            ],
            Broker::RabbitMq => &[
                (
                    "rabbitmq.url",
                    "say amqp://user:password@localhost:5672/%2f",
                ),
                ("rabbitmq.queue", "the queue to consume"),
            ],
        };
        match needed.iter().find(|(key, _)| !self.has(key)) {
            Some((key, what)) => Err(missing(key, what)),
            None => Ok(()),
        }
    }

    /// Which broker a consumer reads.
    pub(crate) fn broker(&self) -> Result<Broker, Error> {
        let has = |broker: Broker| {
            SETTINGS
                .iter()
                .any(|it| it.key.starts_with(&format!("{}.", broker.section())) && self.has(it.key))
        };
        match (
            self.text("gate.broker"),
            has(Broker::Kafka),
            has(Broker::RabbitMq),
        ) {
            (Some("kafka"), ..) | (None, true, false) => Ok(Broker::Kafka),
            (Some(_), ..) | (None, false, true) => Ok(Broker::RabbitMq),
            (None, true, true) => Err(Error::misconfigured(
                "[kafka] and [rabbitmq] are both configured, and one consumer reads one of them; leave one out, or say which with gate.broker",
            )),
            (None, false, false) => Err(Error::misconfigured(
                "no broker: set kafka.brokers, kafka.topic and kafka.group, or rabbitmq.url and rabbitmq.queue",
            )),
        }
    }
}

fn missing(key: &str, what: &str) -> Error {
    let variable = find(key).map(Setting::variable).unwrap_or_default();
    Error::misconfigured(format!("{key} is missing; set it, or {variable}: {what}"))
}
