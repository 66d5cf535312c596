//! The librdkafka properties of each client.

use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use super::{GroupProtocol, Kafka, OutOfRange, StartAt};
use crate::client::statistics;

/// Maximum pause before a client reconnects to a broker: the default of Kafka's Java clients. With
/// librdkafka's default, a client may wait 10 s after a broker has restarted.
const RECONNECT_BACKOFF_MAX: Duration = Duration::from_secs(1);
/// librdkafka's properties for the longest and the first reconnect backoff.
const RECONNECT_BACKOFF_MAX_MS: &str = "reconnect.backoff.max.ms";
const RECONNECT_BACKOFF_MS: &str = "reconnect.backoff.ms";
/// The default of librdkafka's `session.timeout.ms` and of Kafka's
/// `group.consumer.session.timeout.ms`.
const SESSION_TIMEOUT: Duration = Duration::from_secs(45);
/// The default of librdkafka's `max.poll.interval.ms`.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(300);

/// The time without a heartbeat after which the group coordinator removes a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionTimeout {
    /// The setting that defines the value, and its owner.
    setting: &'static str,
    pub(crate) value: Duration,
    /// Whether the value is the default of the setting: always for a setting of the broker, which a
    /// client cannot read.
    is_default: bool,
}

impl fmt::Display for SessionTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = if self.is_default { " by default" } else { "" };
        write!(f, "{:?}{default}, {}", self.value, self.setting)
    }
}

impl Kafka {
    /// How long a rebalance waits for unsettled deliveries, at most a third of
    /// `max.poll.interval.ms`.
    pub(crate) fn revoke_drain_timeout(&self) -> Duration {
        self.revoke_drain_timeout.min(self.rebalance_step_limit())
    }

    /// Time limit for each of the two slow parts of a rebalance, requests and draining: a third of
    /// `max.poll.interval.ms`, so that both together stay below it.
    pub(crate) fn rebalance_step_limit(&self) -> Duration {
        let interval = self
            .property_value("max.poll.interval.ms")
            .and_then(|it| it.parse().ok());
        interval.map_or(MAX_POLL_INTERVAL, Duration::from_millis) / 3
    }

    /// The session timeout of a member with these settings. With `GroupProtocol::Consumer`, which
    /// leaves it to the broker, the broker's default.
    pub(crate) fn session_timeout(&self) -> SessionTimeout {
        if self.group_protocol == GroupProtocol::Consumer {
            return SessionTimeout {
                setting: "group.consumer.session.timeout.ms of the broker",
                value: SESSION_TIMEOUT,
                is_default: true,
            };
        }
        // Read from librdkafka, which parses the property and has its default.
        let effective = self
            .consumer_config()
            .create_native_config()
            .and_then(|config| config.get("session.timeout.ms"))
            .ok()
            .and_then(|value| value.parse().ok());
        SessionTimeout {
            setting: "session.timeout.ms",
            value: effective.map_or(SESSION_TIMEOUT, Duration::from_millis),
            is_default: self.property_value("session.timeout.ms").is_none(),
        }
    }

    /// Maximum pause before a client reconnects.
    pub(crate) fn reconnect_backoff_max(&self) -> Duration {
        let set = |key| {
            self.property_value(key)
                .and_then(|it| it.parse().ok())
                .map(Duration::from_millis)
        };
        // librdkafka rejects a maximum below the first backoff.
        set(RECONNECT_BACKOFF_MAX_MS).unwrap_or_else(|| {
            set(RECONNECT_BACKOFF_MS)
                .unwrap_or_default()
                .max(RECONNECT_BACKOFF_MAX)
        })
    }

    /// The policy for an offset that is out of range: [`StartAt::Error`] implies
    /// [`OutOfRange::Error`].
    pub(crate) fn out_of_range_policy(&self) -> OutOfRange {
        match self.start {
            StartAt::Earliest => self.out_of_range,
            StartAt::Error => OutOfRange::Error,
        }
    }

    pub(crate) fn consumer_config(&self) -> ClientConfig {
        let mut config = self.config();
        config
            .set("group.id", &self.group)
            // How much librdkafka fetches ahead, per partition: a number of messages plus one
            // fetch, or a number of bytes. Its defaults (100,000 messages, 64 MB, fetches of 1 MiB)
            // take more memory and are no faster, as long as `fetch.queue.backoff.ms` is short.
            .set("queued.min.messages", "5000")
            .set("queued.max.messages.kbytes", "16384")
            .set("fetch.queue.backoff.ms", "2")
            .set("isolation.level", "read_committed")
            .set("auto.commit.interval.ms", "1000");
        // `max.partition.fetch.bytes` is an alias of `fetch.message.max.bytes`. If both were set,
        // it would be undefined which of them applies.
        if self.property_value("max.partition.fetch.bytes").is_none() {
            config.set("fetch.message.max.bytes", "262144");
        }
        match self.group_protocol {
            GroupProtocol::Classic => config
                .set("group.protocol", "classic")
                .set("partition.assignment.strategy", "cooperative-sticky"),
            GroupProtocol::Consumer => config.set("group.protocol", "consumer"),
        };
        self.set_properties(&mut config);
        // librdkafka reports a changed topic id only by a debug log line of the context `metadata`.
        config.set_log_level(RDKafkaLogLevel::Debug);
        config.set(
            "debug",
            self.property_value("debug").map_or_else(
                || "metadata".to_owned(),
                |debug| format!("{debug},metadata"),
            ),
        );
        config.set(
            "statistics.interval.ms",
            statistics::INTERVAL.as_millis().to_string(),
        );
        // `auto.offset.reset` applies to an offset that is not in the log, and to a partition
        // without a committed offset if the source sets no start offset.
        config
            .set("enable.auto.offset.store", "false")
            .set("enable.auto.commit", "true")
            .set(
                "auto.offset.reset",
                match (self.start, self.out_of_range_policy()) {
                    (StartAt::Earliest, OutOfRange::Earliest) => "earliest",
                    _ => "error",
                },
            );
        config
    }

    /// The configuration of the second client, which measures lag and joins no group.
    pub(crate) fn watch_config(&self) -> ClientConfig {
        let mut config = self.config();
        config.set("isolation.level", "read_committed");
        self.set_properties(&mut config);
        config
            .set("group.id", &self.group)
            .remove("group.instance.id")
            .set("enable.auto.commit", "false");
        config
    }

    pub(crate) fn producer_config(&self) -> ClientConfig {
        let mut config = self.config();
        // `message.max.bytes` is librdkafka's maximum, so that the broker and not librdkafka
        // rejects a message as too large.
        config
            .set("linger.ms", "0")
            .set("delivery.timeout.ms", "30000")
            .set("message.max.bytes", "1000000000");
        // Below the default `max.message.bytes` of topics (1 MiB), so that most topics reject a
        // batch only because of a single large message.
        config.set("batch.size", "131072");
        self.set_properties(&mut config);
        config.set("enable.idempotence", "true").set("acks", "all");
        // Otherwise a metadata request for a deleted topic would create the topic again, with the
        // broker's default retention.
        config.set("allow.auto.create.topics", "false");
        config
    }

    pub(crate) fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", "oncegate");
        config.set(
            RECONNECT_BACKOFF_MAX_MS,
            self.reconnect_backoff_max().as_millis().to_string(),
        );
        let debug = self.property_value("debug").is_some();
        self.security.set(&mut config);
        config.set_log_level(if debug {
            RDKafkaLogLevel::Debug
        } else {
            RDKafkaLogLevel::Info
        });
        config
    }

    pub(crate) fn set_properties(&self, config: &mut ClientConfig) {
        for (key, value) in &self.properties {
            config.set(key, value);
        }
    }

    pub(super) fn property_value(&self, key: &str) -> Option<&str> {
        self.properties
            .iter()
            .rev()
            .find(|(it, _)| it == key)
            .map(|(_, value)| value.as_str())
    }
}
