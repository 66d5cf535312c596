//! Rejects settings with which the source cannot work.

use std::time::Duration;

use oncegate_core::SourceError;

use super::{GroupProtocol, Kafka, TopicCreation, brokers, security};

/// The maximum length of a topic's name.
const MAX_TOPIC_NAME: usize = 249;

impl Kafka {
    /// Rejects settings with which the source cannot work. Connects to no broker.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        let invalid = |setting: &str, problem: &str, remedy: &str| {
            Err(SourceError::misconfigured(setting, problem, remedy))
        };
        if self.topics.is_empty() || self.topics.iter().any(|topic| topic.trim().is_empty()) {
            return invalid(
                "topic",
                "is empty",
                "name the topic to read: Kafka::topic(\"payments\")",
            );
        }
        if let Some(pattern) = self.topics.iter().find(|topic| topic.starts_with('^')) {
            return invalid(
                "topic",
                &format!("`{pattern}` is a pattern"),
                "name each topic: Kafka::topics([\"a\", \"b\"])",
            );
        }
        if let Some(problem) = self.topics.iter().find_map(|name| topic_problem(name)) {
            return invalid("topic", &problem, "name a topic that Kafka allows");
        }
        self.check_access()?;
        for topic in &self.topics {
            let dead_letters = self.destinations.dead_letters(topic);
            let in_doubt = self.destinations.in_doubt(topic);
            if dead_letters == in_doubt {
                return invalid(
                    "in_doubt",
                    &format!("`{in_doubt}` is also the dead-letter topic"),
                    "name another topic: `oncegate dead-letters redrive` and `oncegate in-doubt resolve` need separate topics",
                );
            }
            for (setting, destination) in [("dead_letters", dead_letters), ("in_doubt", in_doubt)] {
                if destination.trim().is_empty() || self.topics.contains(&destination) {
                    return invalid(
                        setting,
                        &format!(
                            "`{destination}` is empty, or is also a topic that the source reads"
                        ),
                        "name another topic",
                    );
                }
                if let Some(problem) = topic_problem(&destination) {
                    return invalid(setting, &problem, "name a topic that Kafka allows");
                }
            }
        }
        if let TopicCreation::Create {
            partitions,
            replication,
        } = self.creation
            && (partitions == 0 || replication == 0)
        {
            return invalid(
                "create_topics",
                "partitions or replication is 0",
                "use at least 1 of each",
            );
        }
        if self
            .property_value("auto.commit.interval.ms")
            .is_some_and(|value| value.trim().parse() == Ok(0))
        {
            return invalid(
                "auto.commit.interval.ms",
                "is 0, which disables periodic commits",
                "use at least 1; the default is 1000",
            );
        }
        if let Some((key, problem, remedy)) = self
            .properties
            .iter()
            .find_map(|(key, _)| self.other_protocol_problem(key))
        {
            return invalid(key, problem, remedy);
        }
        if self.stalled_after < Duration::from_secs(1) {
            return invalid(
                "stalled_after",
                "is below 1 s",
                "use at least 1 s; the default is 60 s",
            );
        }
        if self.group.trim().is_empty() {
            return invalid(
                "group",
                "is empty",
                "name the consumer group: .group(\"ledger\")",
            );
        }
        Ok(())
    }

    /// Name, problem and remedy of a property that only the other group protocol has. librdkafka
    /// rejects properties of the classic protocol with `Consumer`, and ignores
    /// `group.remote.assignor` with `Classic`.
    fn other_protocol_problem(
        &self,
        key: &str,
    ) -> Option<(&'static str, &'static str, &'static str)> {
        const BROKER_SETTING: &str =
            "is a setting of the brokers with GroupProtocol::Consumer, not of a member";
        let problem = match (key.trim(), self.group_protocol) {
            ("session.timeout.ms", GroupProtocol::Consumer) => (
                "session.timeout.ms",
                BROKER_SETTING,
                "remove it, and set group.consumer.session.timeout.ms on the brokers, or consumer.session.timeout.ms for the group: kafka-configs.sh --entity-type groups",
            ),
            ("heartbeat.interval.ms", GroupProtocol::Consumer) => (
                "heartbeat.interval.ms",
                BROKER_SETTING,
                "remove it, and set group.consumer.heartbeat.interval.ms on the brokers, or consumer.heartbeat.interval.ms for the group: kafka-configs.sh --entity-type groups",
            ),
            ("partition.assignment.strategy", GroupProtocol::Consumer) => (
                "partition.assignment.strategy",
                "has no effect with GroupProtocol::Consumer: the group coordinator assigns the partitions",
                "remove it, and name one of the brokers' assignors with the property group.remote.assignor, if the default does not fit",
            ),
            ("group.protocol.type", GroupProtocol::Consumer) => (
                "group.protocol.type",
                "has no effect with GroupProtocol::Consumer",
                "remove it",
            ),
            ("group.remote.assignor", GroupProtocol::Classic) => (
                "group.remote.assignor",
                "has no effect with GroupProtocol::Classic: a member assigns the partitions",
                "use GroupProtocol::Consumer, or the property partition.assignment.strategy",
            ),
            _ => return None,
        };
        Some(problem)
    }

    /// Checks the settings that every client of these brokers needs: addresses, TLS, login and
    /// properties.
    pub(crate) fn check_access(&self) -> Result<(), SourceError> {
        let invalid = |setting: &str, problem: &str, remedy: &str| {
            Err(SourceError::misconfigured(setting, problem, remedy))
        };
        if self.brokers.trim().is_empty() {
            return invalid(
                "brokers",
                "is empty",
                "name a broker: .brokers(\"localhost:9092\")",
            );
        }
        if let Err(problem) = brokers::check(&self.brokers) {
            return invalid(
                "brokers",
                &problem,
                "write host:port, and commas between several: .brokers(\"a:9092,b:9092\")",
            );
        }
        self.security.check()?;
        self.properties
            .iter()
            .try_for_each(|(key, value)| security::check_property(key, value))?;
        self.properties.iter().try_for_each(|(key, _)| {
            forbidden_property(key).map_or(Ok(()), |remedy| {
                invalid(key, "cannot be set as a property", remedy)
            })
        })?;
        let uses_sasl = self.security.has_login()
            || self
                .property_value("security.protocol")
                .is_some_and(|protocol| protocol.to_ascii_lowercase().contains("sasl"));
        for key in ["sasl.password", "sasl.username"] {
            if !uses_sasl && self.property_value(key).is_some() {
                return invalid(
                    key,
                    "is ignored, because `security.protocol` does not use SASL",
                    "set the properties security.protocol (SASL_SSL) and sasl.mechanism, too",
                );
            }
        }
        Ok(())
    }
}

/// The problem of a topic name that Kafka does not allow; `None` if it is allowed.
fn topic_problem(name: &str) -> Option<String> {
    let is_allowed = |it: char| it.is_ascii_alphanumeric() || matches!(it, '.' | '_' | '-');
    match name {
        "." | ".." => Some(format!("`{name}` is reserved")),
        _ if name.len() > MAX_TOPIC_NAME => Some(format!(
            "the name of {} bytes is longer than {MAX_TOPIC_NAME}: `{}…`",
            name.len(),
            name.chars().take(40).collect::<String>()
        )),
        _ => name.chars().find(|it| !is_allowed(*it)).map(|it| {
            format!(
                "`{name}` has the character {it:?}; letters, digits, `.`, `_` and `-` are allowed"
            )
        }),
    }
}

/// The remedy for a property that users may not set; `None` for any other property.
fn forbidden_property(key: &str) -> Option<&'static str> {
    match key.trim() {
        "enable.auto.commit"
        | "auto.commit.enable"
        | "enable.auto.offset.store"
        | "offset.store.method" => Some("remove it: the source commits only settled offsets"),
        "group.id" => Some("use .group(…)"),
        "group.protocol" => Some("use .group_protocol(…)"),
        "bootstrap.servers" | "metadata.broker.list" => Some("use .brokers(…)"),
        "auto.offset.reset" => Some("use .start(…) and .out_of_range(…)"),
        "allow.auto.create.topics" => Some(
            "remove it, and use .create_topics(…): topics that a broker creates by itself have limited retention",
        ),
        "statistics.interval.ms" => Some(
            "remove it: the source reads the state of the group coordinator from the statistics",
        ),
        "enable.partition.eof" => Some(
            "remove it: librdkafka counts each end of a partition as a message, and would skip one after a rebalance",
        ),
        "isolation.level" => {
            Some("remove it: messages of an aborted transaction must not be handled")
        }
        "enable.idempotence" | "acks" | "request.required.acks" | "transactional.id" => {
            Some("remove it: a dead letter is confirmed only when all in-sync replicas have it")
        }
        _ => None,
    }
}
