//! The settings of a Kafka source.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::lifecycle::Reason;
use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use crate::brokers;
use crate::client::statistics;
use crate::security::{self, KafkaLogin, Security};
use crate::status::KafkaStatus;

/// After how long without progress, while its log grows, a partition counts as stalled, by default.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// How long a revocation waits for unsettled deliveries, by default.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum pause before a client reconnects to a broker, as in Kafka's own clients. With
/// librdkafka's default of 10 s, a client would ignore a restarted broker for as long.
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
    /// The setting that has the value.
    setting: &'static str,
    pub(crate) value: Duration,
    /// Whether the value is the default of the setting. A client cannot read a broker's setting.
    is_default: bool,
}

impl fmt::Display for SessionTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = if self.is_default { " by default" } else { "" };
        write!(f, "{:?}{default}, {}", self.value, self.setting)
    }
}

/// Describes a Kafka source: a member of a consumer group that reads one or several topics.
///
/// ```
/// use oncegate_kafka::Kafka;
///
/// let source = Kafka::topic("payments").brokers("localhost:9092").group("ledger");
/// ```
///
/// Rejected deliveries are published to `<topic>.dead-letters` and `<topic>.in-doubt`. These topics
/// must exist, unless [`create_topics`](Kafka::create_topics) creates them, and must retain
/// messages without limit, unless [`accept_limited_retention`](Kafka::accept_limited_retention) is
/// set. `Debug` shows the names of properties, never their values.
#[derive(Clone)]
#[must_use]
pub struct Kafka {
    pub(crate) topics: Vec<String>,
    pub(crate) brokers: String,
    pub(crate) group: String,
    pub(crate) destinations: Destinations,
    pub(crate) creation: TopicCreation,
    pub(crate) retention: Retention,
    /// The consumer's deduplication window; `None` for a source that is opened without a consumer.
    pub(crate) window: Option<Duration>,
    pub(crate) body_limit: usize,
    pub(crate) start: StartAt,
    pub(crate) out_of_range: OutOfRange,
    drain_timeout: Duration,
    pub(crate) stalled_after: Duration,
    pub(crate) status: KafkaStatus,
    security: Security,
    properties: Vec<(String, String)>,
}

/// Where a group without a committed offset starts.
///
/// There is no `Latest`, because it skips messages silently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StartAt {
    /// At the earliest message in the log.
    #[default]
    Earliest,
    /// The consumer ends with an error until an operator sets the group's offsets. It also does so if
    /// the committed offset is [out of range](OutOfRange), whatever that policy is. A partition that
    /// was added to a topic which the group already reads is always read from its beginning, because
    /// none of its messages was read.
    Error,
}

/// The policy for a committed offset that is not in the log: messages expired before they were read,
/// the topic was recreated, or the log was truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutOfRange {
    /// Continues at the earliest message in the log. The expired messages are counted
    /// (`oncegate_kafka_messages_expired_total`, `oncegate_kafka_logs_truncated_total`) and logged as an
    /// error with their offsets.
    #[default]
    Earliest,
    /// The consumer ends with an error that names the offset. It also does so if the topic's id
    /// differs from that of the committed offset and no cluster id shows whether the topic is a
    /// replica, for which the offset would be kept.
    Error,
}

/// Whether missing dead-letter and in-doubt topics are created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopicCreation {
    /// Opening the source fails if a topic is missing.
    #[default]
    Never,
    /// Creates a missing topic that retains messages without limit (`retention.ms=-1`,
    /// `retention.bytes=-1`, `cleanup.policy=delete`).
    Create {
        /// Partitions of the new topic, at least 1.
        partitions: u16,
        /// Replicas of each partition, at least 1; use 3 on clusters with three brokers or more.
        replication: u16,
    },
}

/// The retention that dead-letter and in-doubt topics must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Retention {
    /// Unlimited.
    #[default]
    Unlimited,
    /// Any.
    Any,
}

/// The topics of rejected deliveries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Destinations {
    dead_letters: Option<String>,
    in_doubt: Option<String>,
}

impl Destinations {
    /// The topic for a delivery of `topic` that was rejected for this reason.
    pub(crate) fn of(&self, topic: &str, reason: &Reason) -> String {
        if reason.is_in_doubt() {
            self.in_doubt(topic)
        } else {
            self.dead_letters(topic)
        }
    }

    pub(crate) fn dead_letters(&self, topic: &str) -> String {
        self.dead_letters
            .clone()
            .unwrap_or_else(|| format!("{topic}.dead-letters"))
    }

    pub(crate) fn in_doubt(&self, topic: &str) -> String {
        self.in_doubt
            .clone()
            .unwrap_or_else(|| format!("{topic}.in-doubt"))
    }
}

impl Kafka {
    /// Reads one topic.
    pub fn topic(name: impl Into<String>) -> Self {
        Self::topics([name])
    }

    /// Reads several topics.
    pub fn topics<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Self {
        Self {
            topics: names.into_iter().map(Into::into).collect(),
            brokers: String::new(),
            group: String::new(),
            destinations: Destinations::default(),
            creation: TopicCreation::default(),
            retention: Retention::default(),
            window: None,
            body_limit: usize::MAX,
            start: StartAt::default(),
            out_of_range: OutOfRange::default(),
            drain_timeout: DRAIN_TIMEOUT,
            stalled_after: STALLED_AFTER,
            status: KafkaStatus::new(),
            security: Security::default(),
            properties: Vec::new(),
        }
    }

    /// The bootstrap servers, as `host:port`, separated by commas.
    pub fn brokers(mut self, brokers: impl Into<String>) -> Self {
        self.brokers = brokers.into();
        self
    }

    /// The consumer group. Its members share the partitions.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// The topic for rejected messages; `<topic>.dead-letters` by default.
    pub fn dead_letters(mut self, topic: impl Into<String>) -> Self {
        self.destinations.dead_letters = Some(topic.into());
        self
    }

    /// The topic for messages whose outcome is unknown; `<topic>.in-doubt` by default.
    pub fn in_doubt(mut self, topic: impl Into<String>) -> Self {
        self.destinations.in_doubt = Some(topic.into());
        self
    }

    /// Where a group without a committed offset starts; at the earliest message by default.
    pub fn start(mut self, start: StartAt) -> Self {
        self.start = start;
        self
    }

    /// The policy for a committed offset that is not in the log. By default reading continues at the
    /// earliest message, and the expired messages are counted and logged.
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// Whether missing dead-letter and in-doubt topics are created; never by default.
    pub fn create_topics(mut self, creation: TopicCreation) -> Self {
        self.creation = creation;
        self
    }

    /// Accepts dead-letter and in-doubt topics with limited retention (time, size or compaction). A
    /// message that is not inspected before it expires is lost. Without this setting, opening the
    /// source rejects such topics, if it may read their configuration.
    pub fn accept_limited_retention(mut self) -> Self {
        self.retention = Retention::Any;
        self
    }

    /// The largest message body to deliver, in bytes; a message with a larger one is rejected to
    /// the dead-letter topic. Unlimited by default.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// How long a rebalance waits for in-flight deliveries before their partition is revoked; 10 s
    /// by default, and never more than a third of `max.poll.interval.ms`. Deliveries that are not
    /// settled by then are redelivered to another member.
    pub fn drain_on_revoke(mut self, bound: Duration) -> Self {
        self.drain_timeout = bound;
        self
    }

    /// How long a partition may make no progress, while its log grows and everything that the Kafka
    /// client fetches is read, before the client is replaced; 60 s by default, at least 1 s.
    /// Unsettled deliveries are redelivered. Each replacement that does not help doubles the time
    /// for the next one, up to 64 times.
    pub fn stalled_after(mut self, bound: Duration) -> Self {
        self.stalled_after = bound;
        self
    }

    /// The status that the source updates.
    pub fn status(mut self, status: KafkaStatus) -> Self {
        self.status = status;
        self
    }

    /// Connects with TLS, and trusts certificates that one of the system's authorities issued for
    /// the broker's host.
    pub fn tls(mut self) -> Self {
        self.security.tls();
        self
    }

    /// Connects with TLS, and trusts this certificate authority (a PEM file) instead of the
    /// system's.
    pub fn ca_certificate(mut self, file: impl Into<PathBuf>) -> Self {
        self.security.ca_certificate(file.into());
        self
    }

    /// Connects with TLS, and presents this client certificate and key (PEM files): mutual TLS.
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.security
            .client_certificate(certificate.into(), key.into());
        self
    }

    /// Authenticates with SASL over TLS.
    pub fn login(mut self, login: KafkaLogin) -> Self {
        self.security.log_in(login);
        self
    }

    /// Connects with TLS without verifying the broker's certificate or host name. Anyone on the
    /// network path can read and change everything, including the password of
    /// [`KafkaLogin::plain`].
    pub fn danger_accept_any_certificate(mut self) -> Self {
        self.security.disable_verification();
        self
    }

    /// Any other librdkafka property, such as `session.timeout.ms`, for the consumer and for the
    /// producer of dead letters. Opening the source rejects properties that would break its
    /// guarantees, such as `enable.auto.commit`.
    pub fn property(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.push((key.into(), value.into()));
        self
    }

    /// Checks all settings as opening the source does, and connects to no broker.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`] names the setting, or the property that librdkafka rejects.
    pub fn check_settings(&self) -> Result<(), SourceError> {
        self.check()?;
        for config in [self.consumer_config(), self.producer_config()] {
            config
                .create_native_config()
                .map_err(crate::client::error::from_config)?;
        }
        Ok(())
    }

    /// Rejects settings that cannot work, before connecting to a broker.
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
        self.check_access()?;
        if self.group.trim().is_empty() {
            return invalid(
                "group",
                "is empty",
                "name the consumer group: .group(\"ledger\")",
            );
        }
        for topic in &self.topics {
            for (setting, destination) in [
                ("dead_letters", self.destinations.dead_letters(topic)),
                ("in_doubt", self.destinations.in_doubt(topic)),
            ] {
                if destination.trim().is_empty() || self.topics.contains(&destination) {
                    return invalid(
                        setting,
                        &format!("`{destination}` is empty, or is a topic that is read"),
                        "name another topic",
                    );
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
        if self.stalled_after < Duration::from_secs(1) {
            return invalid(
                "stalled_after",
                "is below 1 s",
                "use at least 1 s; the default is 60 s",
            );
        }
        Ok(())
    }

    /// Checks what every client of these brokers needs: addresses, TLS, login and properties.
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
        })
    }

    /// How long a rebalance waits for unsettled deliveries, at most a third of
    /// `max.poll.interval.ms`.
    pub(crate) fn drain_timeout(&self) -> Duration {
        self.drain_timeout.min(self.rebalance_step_limit())
    }

    /// Time limit for each of the two slow parts of a rebalance, requests and draining: a third of
    /// `max.poll.interval.ms`, so that both together stay below it.
    pub(crate) fn rebalance_step_limit(&self) -> Duration {
        let interval = self
            .property_value("max.poll.interval.ms")
            .and_then(|it| it.parse().ok());
        interval.map_or(MAX_POLL_INTERVAL, Duration::from_millis) / 3
    }

    /// After how long without a heartbeat the group coordinator removes a member with these
    /// settings. If the broker has the setting, the default is assumed.
    pub(crate) fn session_timeout(&self) -> SessionTimeout {
        if self.property_value("group.protocol") == Some("consumer") {
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

    /// The policy for an offset out of range. A source with [`StartAt::Error`] does not restart at
    /// another offset either.
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
            // The prefetch limits per partition: messages and one fetch, or bytes. librdkafka's
            // defaults (100,000 messages, 64 MB, fetches of 1 MiB) cost memory and are no faster,
            // as long as `fetch.queue.backoff.ms` is short.
            .set("queued.min.messages", "5000")
            .set("queued.max.messages.kbytes", "16384")
            .set("fetch.queue.backoff.ms", "2")
            .set("isolation.level", "read_committed")
            .set("auto.commit.interval.ms", "1000");
        // An alias of `fetch.message.max.bytes`; if both were set, the effective one would be
        // undefined.
        if self.property_value("max.partition.fetch.bytes").is_none() {
            config.set("fetch.message.max.bytes", "262144");
        }
        if self.property_value("group.protocol") != Some("consumer") {
            config.set("partition.assignment.strategy", "cooperative-sticky");
        }
        self.set_properties(&mut config);
        // A changed topic id is reported only in the log, at this level.
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
        // `auto.offset.reset` applies to an offset that is not in the log, and to a partition without
        // a committed offset if the source sets no start offset.
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

    /// The configuration of the watching client, which joins no group.
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
        // librdkafka's maximum for `message.max.bytes`: only the broker rejects a message as too large.
        config
            .set("linger.ms", "0")
            .set("delivery.timeout.ms", "30000")
            .set("message.max.bytes", "1000000000");
        // Below the default `max.message.bytes` of topics (1 MiB), so that most topics reject a batch
        // only because of a single large message.
        config.set("batch.size", "131072");
        self.set_properties(&mut config);
        config.set("enable.idempotence", "true").set("acks", "all");
        // A metadata request for a deleted topic would create it again, with the broker's default
        // retention.
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

    fn property_value(&self, key: &str) -> Option<&str> {
        self.properties
            .iter()
            .rev()
            .find(|(it, _)| it == key)
            .map(|(_, value)| value.as_str())
    }
}

/// The alternative to a property that may not be set.
fn forbidden_property(key: &str) -> Option<&'static str> {
    match key.trim() {
        "enable.auto.commit"
        | "auto.commit.enable"
        | "enable.auto.offset.store"
        | "offset.store.method" => Some("remove it: the source commits only settled offsets"),
        "group.id" => Some("use .group(…)"),
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

impl fmt::Debug for Kafka {
    /// Shows properties by name only: their values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka")
            .field("topics", &self.topics)
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("start", &self.start)
            .field(
                "properties",
                &self
                    .properties
                    .iter()
                    .map(|(key, _)| key)
                    .collect::<Vec<_>>(),
            )
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
