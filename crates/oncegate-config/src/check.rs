//! Checks for contradictory, missing and out-of-range keys.

use std::time::Duration;

#[cfg(any(feature = "kafka", feature = "rabbitmq"))]
use oncegate::source::Connect as _;
use oncegate::{Consumer, Guarantee};

use crate::config::Config;
use crate::error::{Broker, Error};
use crate::settings::{SETTINGS, Setting, find};
use crate::store::{StoreKind, no_store};

/// Upper bounds of numbers: the library or the protocol has 32 or 16 bits for them.
const UPPER_BOUNDS: [(&str, u64); 8] = [
    ("store.replicas", u32::MAX as u64),
    ("gate.max-attempts", u32::MAX as u64),
    ("gate.max-crashes", u32::MAX as u64),
    ("gate.max-inline-retries", u32::MAX as u64),
    ("gate.max-reconciles", u32::MAX as u64),
    ("kafka.create-partitions", u16::MAX as u64),
    ("kafka.create-replicas", u16::MAX as u64),
    ("rabbitmq.prefetch", u16::MAX as u64),
];

/// Settings of the store that must not be 0, each with its remedy.
const MUST_NOT_BE_ZERO: [(&str, &str); 3] = [
    (
        "store.timeout",
        "set at least a network round trip, such as 500ms",
    ),
    ("store.replicas", "set at least 1, or remove it"),
    (
        "store.replicas-timeout",
        "set at least a network round trip, such as 200ms",
    ),
];

/// Keys of the store that only Redis supports.
const REDIS_ONLY_KEYS: [&str; 6] = [
    "store.prefix",
    "store.replicas",
    "store.replicas-timeout",
    "store.ca-certificate",
    "store.client-certificate",
    "store.client-key",
];

impl Config {
    /// Validates all settings. Contacts no server.
    ///
    /// # Errors
    /// [`Error::Misconfigured`]: an invalid value, or contradictory keys.
    pub fn check(&self) -> Result<(), Error> {
        self.check_store()?;
        self.scope()?;
        self.check_id()?;
        self.check_pairs(&[
            ("kafka.create-partitions", "kafka.create-replicas"),
            ("kafka.create-replicas", "kafka.create-partitions"),
            ("rabbitmq.client-certificate", "rabbitmq.client-key"),
            ("rabbitmq.client-key", "rabbitmq.client-certificate"),
        ])?;
        for (key, remedy) in MUST_NOT_BE_ZERO {
            if self.number(key) == Some(0) || self.time(key) == Some(Duration::ZERO) {
                return Err(Error::misconfigured(format!("{key}: it is 0; {remedy}")));
            }
        }
        for (key, max) in UPPER_BOUNDS {
            if let Some(number) = self.number(key).filter(|number| *number > max) {
                return Err(Error::misconfigured(format!(
                    "{key}: {number} is too large; write at most {max}"
                )));
            }
        }
        self.admin_address().map(drop)
    }

    /// Checks that messages of the configured broker have what `gate.id` reads: messages of Kafka
    /// have no `message_id`, and messages of RabbitMQ have no position. Checks nothing if the
    /// broker is not known.
    fn check_id(&self) -> Result<(), Error> {
        let (Some(id), Ok(broker)) = (self.id_source()?, self.broker()) else {
            return Ok(());
        };
        let checked = match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => oncegate::Kafka::topic("").check_id(&id),
            #[cfg(feature = "rabbitmq")]
            Broker::RabbitMq => oncegate::RabbitMq::queue("").check_id(&id),
            #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
            _ => {
                let _ = id;
                Ok(())
            }
        };
        checked.map_err(|error| Error::of_source(broker, error))
    }

    /// Checks that at most one store is configured, with only keys that it supports.
    pub(crate) fn check_store(&self) -> Result<(), Error> {
        let stores = ["store.url", "store.sentinels", "store.cluster"]
            .into_iter()
            .filter(|key| self.has(key))
            .count();
        if stores > 1 {
            return Err(Error::misconfigured(
                "set one of store.url, store.sentinels and store.cluster",
            ));
        }
        for key in ["store.sentinels", "store.cluster"] {
            if self.has(key) && self.list(key).is_empty() {
                return Err(Error::misconfigured(format!(
                    "{key} is empty; list at least one server, or remove it"
                )));
            }
        }
        if let Some(StoreKind::Sqlite(_) | StoreKind::Postgres | StoreKind::Memory) =
            self.store_kind()?
            && let Some(key) = REDIS_ONLY_KEYS.into_iter().find(|key| self.has(key))
        {
            return Err(Error::misconfigured(format!(
                "{key} requires Redis, and store.url names another store; remove one of them"
            )));
        }
        self.check_pairs(&[
            ("store.sentinels", "store.sentinel-name"),
            ("store.sentinel-name", "store.sentinels"),
            ("store.replicas-timeout", "store.replicas"),
            ("store.client-certificate", "store.client-key"),
            ("store.client-key", "store.client-certificate"),
        ])
    }

    /// Checks, for each pair, that the second key is set if the first is.
    fn check_pairs(&self, pairs: &[(&str, &str)]) -> Result<(), Error> {
        match pairs
            .iter()
            .find(|(key, required)| self.has(key) && !self.has(required))
        {
            Some((key, required)) => Err(Error::misconfigured(format!(
                "{key} requires {required}; set both, or remove {key}"
            ))),
            None => Ok(()),
        }
    }

    /// Checks as [`Config::check`] does, and also that a consumer can be built: that a store, one
    /// broker and an id are configured, and that the consumer accepts `[gate]`, the URL of the
    /// store, the source and `log.filter` at start. Contacts no server, so topics and queues are
    /// not checked.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] names the missing key and its format, or the invalid value as the
    /// consumer reports it; otherwise as for [`Config::check`].
    pub fn check_for_consumer(&self) -> Result<(), Error> {
        self.check()?;
        let store = self.store_kind()?.ok_or_else(no_store)?;
        if !self.has("gate.id") {
            return Err(missing(
                "gate.id",
                "where to read ids, such as \"header payment-id\"; there is no default, because with a wrong one messages would be skipped",
            ));
        }
        let broker = self.broker()?;
        let required: &[(&str, &str)] = match broker {
            Broker::Kafka => &[
                (
                    "kafka.brokers",
                    "host:port of one or more brokers, separated by commas",
                ),
                ("kafka.topic", "the topic to consume"),
                (
                    "kafka.group",
                    "the consumer group, whose members share the partitions",
                ),
            ],
            Broker::RabbitMq => &[
                (
                    "rabbitmq.url",
                    "for example amqp://user:password@localhost:5672/%2f",
                ),
                ("rabbitmq.queue", "the queue to consume"),
            ],
        };
        if let Some((key, what)) = required.iter().find(|(key, _)| !self.has(key)) {
            return Err(missing(key, what));
        }
        self.consumer(Consumer::builder())?
            .check()
            .map_err(|error| self.explain(error))?;
        self.check_guarantee(store)?;
        self.check_source(broker)?;
        #[cfg(feature = "redis")]
        if store == StoreKind::Redis {
            let checked = self.redis(None)?.check();
            checked.map_err(|error| self.explain(error.into()))?;
        }
        #[cfg(feature = "postgres")]
        if store == StoreKind::Postgres {
            let checked = self.postgres(None)?.check();
            checked.map_err(|error| self.explain(error.into()))?;
        }
        crate::log_filter::parse(self.text("log.filter")).map(drop)
    }

    /// Checks the section of this broker as the consumer does at its start. Connects to nothing.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] names the key.
    pub fn check_source(&self, broker: Broker) -> Result<(), Error> {
        let source = match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => self.kafka()?.check_settings(),
            #[cfg(feature = "rabbitmq")]
            Broker::RabbitMq => self.rabbitmq()?.check_settings(),
            #[cfg(not(all(feature = "kafka", feature = "rabbitmq")))]
            _ => Ok(()),
        };
        source.map_err(|error| Error::of_source(broker, error))
    }

    /// Rejects a mode and a store with which the consumer refuses at most once at start.
    fn check_guarantee(&self, store: StoreKind<'_>) -> Result<(), Error> {
        if self.guarantee() != Guarantee::AtMostOnce {
            return Ok(());
        }
        if self.text("gate.mode") == Some("shadow") {
            return Err(Error::misconfigured(
                "gate.mode: a shadow lets every message run, and in at most once no effect may happen twice; set gate.guarantee = \"effectively-once\" while the mode is shadow",
            ));
        }
        if store == StoreKind::Memory && !self.allows_volatile_store() {
            let why = "memory: is lost when the process ends".to_owned();
            return Err(self.explain(oncegate::Error::VolatileStore(why)));
        }
        Ok(())
    }

    /// The broker that the consumer reads: `gate.broker`, or the one that is configured.
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
                "[kafka] and [rabbitmq] are both configured, and a consumer reads only one; remove one, or choose with gate.broker",
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
