//! Configuration errors.

use oncegate::{SourceError, StoreError};

use crate::config::Config;

/// A consumer cannot be built from its configuration, or has failed. Each message names the remedy.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An unknown key, an invalid value, or a missing or contradictory setting.
    #[error("{0}")]
    Misconfigured(String),
    /// Any other failure of a consumer, source or connection.
    #[error(transparent)]
    Consumer(oncegate::Error),
}

impl std::fmt::Debug for Error {
    /// The same line as `Display`, because a `main` that returns an error prints its `Debug`
    /// output.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl Error {
    /// An error that requires a change of the configuration.
    pub(crate) fn misconfigured(text: impl Into<String>) -> Self {
        Self::Misconfigured(text.into())
    }

    /// Converts the error of a source, client or connection of this broker: names the configuration
    /// key instead of the builder method.
    pub fn of_source(broker: Broker, error: SourceError) -> Self {
        let by_key = |setting: &str, problem, remedy| {
            let text = with_source_keys(&format!("{problem}; {remedy}"));
            format!("{}: {text}", key(broker.section(), setting))
        };
        match error {
            SourceError::Misconfigured {
                setting,
                problem,
                remedy,
            } => Self::Misconfigured(by_key(&setting, problem, remedy)),
            SourceError::Unavailable(cause) => {
                let cause = match cause.downcast::<SourceError>().map(|cause| *cause) {
                    Ok(SourceError::Misconfigured {
                        setting,
                        problem,
                        remedy,
                    }) => by_key(&setting, problem, remedy).into(),
                    Ok(error) => error.into(),
                    Err(cause) => cause,
                };
                Self::Consumer(SourceError::Unavailable(cause).into())
            }
            error => Self::Consumer(error.into()),
        }
    }
}

/// A kind of broker, which has a section in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Broker {
    /// `[kafka]`.
    Kafka,
    /// `[rabbitmq]`.
    RabbitMq,
}

impl Broker {
    pub(crate) fn section(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::RabbitMq => "rabbitmq",
        }
    }
}

impl Config {
    /// Converts the error of a consumer: names the configuration key instead of the builder method.
    pub fn explain(&self, error: oncegate::Error) -> Error {
        match error {
            oncegate::Error::Misconfigured {
                setting,
                problem,
                remedy,
            } => Error::Misconfigured(format!("{}: {problem}; {remedy}", key("gate", setting))),
            oncegate::Error::Scope(error) => Error::Misconfigured(format!("store.scope: {error}")),
            oncegate::Error::VolatileStore(why) => Error::Misconfigured(format!(
                "gate.guarantee: at most once requires a durable store, and {why}; change that, or accept it with \
                 store.volatile = \"accepted\""
            )),
            oncegate::Error::Store(StoreError::Misconfigured(problem)) => {
                Error::Misconfigured(store_problem(&problem.to_string()))
            }
            oncegate::Error::Source(error) => match self.broker() {
                Ok(broker) => Error::of_source(broker, error),
                Err(_) => Error::Consumer(error.into()),
            },
            other => Error::Consumer(other),
        }
    }
}

/// The configuration key of a builder method, or of a librdkafka property, whose name contains
/// dots.
fn key(section: &str, setting: &str) -> String {
    match setting {
        // The upper bound is `gate.lease`.
        "adaptive_lease" => "gate.shortest-lease".into(),
        "id" => "gate.id".into(),
        "property" => format!("{section}.properties"),
        property if property.contains('.') => format!("{section}.properties: {property}"),
        setter => format!("{section}.{}", setter.replace('_', "-")),
    }
}

/// The text of an error of a store, with configuration keys instead of builder methods. Begins with
/// a key, or with the section.
fn store_problem(problem: &str) -> String {
    let text = with_store_keys(problem);
    if text.starts_with("store.") {
        text
    } else {
        format!("[store]: {text}")
    }
}

/// The text of an error of a source, with configuration keys instead of builder methods.
fn with_source_keys(text: &str) -> String {
    const KEYS: [(&str, &str); 27] = [
        ("IdSource::message_id()", "message-id"),
        ("IdSource::header(\"…\")", "header NAME"),
        ("IdSource::json_pointer(\"/…\")", "json /POINTER"),
        ("IdSource::key()", "key"),
        ("IdSource::body_hash()", "body-hash"),
        ("IdSource::position()", "position"),
        (".create_topics(…)", "kafka.create-partitions"),
        (
            ".accept_limited_retention()",
            "kafka.limited-retention = \"accepted\"",
        ),
        ("Kafka::topic(\"payments\")", "kafka.topic = \"payments\""),
        (".login(…)", "kafka.password"),
        (".group_protocol(…)", "kafka.group-protocol"),
        (".brokers(…)", "kafka.brokers"),
        (".group(…)", "kafka.group"),
        (".start(…)", "kafka.start"),
        (".out_of_range(…)", "kafka.out-of-range"),
        (
            ".queue_kind(QueueKind::Classic)",
            "rabbitmq.queue-kind = \"classic\"",
        ),
        (".queue_kind(…)", "rabbitmq.queue-kind"),
        ("Rejects::Published", "rabbitmq.rejects = \"published\""),
        ("Topology::Declare", "rabbitmq.topology = \"declare\""),
        ("Topology::Check", "rabbitmq.topology = \"check\""),
        (".ca_certificate(path)", "rabbitmq.ca-certificate"),
        (".scope(…)", "store.scope"),
        (".dedup_window(…)", "gate.dedup-window"),
        (
            "GroupProtocol::Classic",
            "kafka.group-protocol = \"classic\"",
        ),
        (
            "GroupProtocol::Consumer",
            "kafka.group-protocol = \"consumer\"",
        ),
        ("OutOfRange::Earliest", "kafka.out-of-range = \"earliest\""),
        ("StartAt::Earliest", "kafka.start = \"earliest\""),
    ];
    KEYS.iter()
        .fold(text.to_owned(), |text, (item, key)| text.replace(item, key))
}

/// The text of an error of a store, with configuration keys instead of builder methods.
pub fn with_store_keys(text: &str) -> String {
    const KEYS: [(&str, &str); 16] = [
        (
            "Postgres::create_tables or Postgres::migrate",
            "`oncegate store migrate`",
        ),
        ("Postgres::url", "store.url"),
        ("Postgres::timeout", "store.timeout"),
        (
            "client_certificate(certificate, key)",
            "store.client-certificate",
        ),
        ("client_certificate: ", "store.client-certificate: "),
        ("ca_certificate(path)", "store.ca-certificate"),
        ("ca_certificate: ", "store.ca-certificate: "),
        // The problem of this setting names both the setter and the variant, for one key.
        ("Redis::durability: Durability::Replicas", "store.replicas:"),
        ("Durability::Replicas", "store.replicas"),
        ("Redis::sentinel", "store.sentinels"),
        ("Redis::cluster", "store.cluster"),
        ("Redis::prefix", "store.prefix"),
        ("Redis::timeout", "store.timeout"),
        ("Redis::at", "store.url"),
        ("Sqlite::timeout", "store.timeout"),
        ("Sqlite::file", "store.url"),
    ];
    KEYS.iter()
        .fold(text.to_owned(), |text, (item, key)| text.replace(item, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_library_name_the_key() {
        let topic = [("ONCEGATE_KAFKA_TOPIC".to_owned(), "payments".to_owned())];
        let config = Config::read(Some(std::path::Path::new("/dev/null")), topic).expect("one key");
        let message = |error| config.explain(error).to_string();
        let wrong = oncegate::Error::Misconfigured {
            setting: "max_age",
            problem: "it is long".into(),
            remedy: "shorten it",
        };
        assert_eq!(message(wrong), "gate.max-age: it is long; shorten it");
        let source = |setting: &str| {
            oncegate::Error::Source(SourceError::misconfigured(setting, "no", "yes"))
        };
        assert_eq!(
            message(source("dead_letters")),
            "kafka.dead-letters: no; yes"
        );
        assert_eq!(
            message(source("enable.auto.commit")),
            "kafka.properties: enable.auto.commit: no; yes"
        );
        assert_eq!(message(source("property")), "kafka.properties: no; yes");
        let unavailable = SourceError::Unavailable(
            SourceError::misconfigured("ca_certificate", "no", "yes").into(),
        );
        let unavailable = Error::of_source(Broker::RabbitMq, unavailable);
        assert!(matches!(unavailable, Error::Consumer(_)), "{unavailable}");
        assert_eq!(
            unavailable.to_string(),
            "the broker cannot be used: rabbitmq.ca-certificate: no; yes"
        );
        let classic = SourceError::misconfigured(
            "queue_kind",
            "no",
            "choose `.queue_kind(QueueKind::Classic)` or `Topology::Check`",
        );
        assert_eq!(
            Error::of_source(Broker::RabbitMq, classic).to_string(),
            "rabbitmq.queue-kind: no; choose `rabbitmq.queue-kind = \"classic\"` or `rabbitmq.topology = \"check\"`"
        );
        let recreated = SourceError::misconfigured(
            "out_of_range",
            "no",
            "take another .scope(…), or use OutOfRange::Earliest",
        );
        assert_eq!(
            Error::of_source(Broker::Kafka, recreated).to_string(),
            "kafka.out-of-range: no; take another store.scope, or use kafka.out-of-range = \"earliest\""
        );
        let redirected = "MOVED 1: Redis::at names a node of a Cluster; use Redis::cluster";
        assert_eq!(
            with_store_keys(redirected),
            "MOVED 1: store.url names a node of a Cluster; use store.cluster"
        );
        let replicas = "Redis::durability: Durability::Replicas count is 0";
        let misconfigured =
            |problem: &str| message(StoreError::Misconfigured(problem.to_owned().into()).into());
        assert_eq!(misconfigured(replicas), "store.replicas: count is 0");
        assert_eq!(misconfigured("too old"), "[store]: too old");
        let volatile = message(oncegate::Error::VolatileStore("it evicts".into()));
        assert!(
            volatile.contains("it evicts") && volatile.contains("store.volatile"),
            "{volatile}"
        );
        assert_eq!(
            format!("{:?}", Error::misconfigured("the text")),
            "the text"
        );
    }
}
