//! The settings of a Kafka source.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::lifecycle::Reason;

use crate::status::KafkaStatus;

mod brokers;
mod check;
mod client_config;
mod security;
mod tool_client;

pub(crate) use client_config::SessionTimeout;
pub use security::KafkaLogin;
use security::Security;

/// The default of [`Kafka::stalled_after`].
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// The default of [`Kafka::drain_on_revoke`].
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

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
    pub(crate) group_protocol: GroupProtocol,
    pub(crate) destinations: Destinations,
    pub(crate) creation: TopicCreation,
    pub(crate) retention: Retention,
    /// The consumer's deduplication window; `None` for a source that is opened without a consumer.
    pub(crate) window: Option<Duration>,
    pub(crate) body_limit: usize,
    pub(crate) start: StartAt,
    pub(crate) out_of_range: OutOfRange,
    revoke_drain_timeout: Duration,
    pub(crate) stalled_after: Duration,
    pub(crate) status: KafkaStatus,
    security: Security,
    properties: Vec<(String, String)>,
}

/// The protocol with which a member joins its consumer group and receives its partitions.
///
/// Stop all members of a group before you change its protocol. In a rolling restart, Kafka 4.3
/// refuses members with `Consumer` as long as several members with `Classic` use
/// `cooperative-sticky` (KAFKA-18134), so the new members wait. If the classic members have the
/// property `partition.assignment.strategy` set to `range`, Kafka admits the new members. But it
/// may then assign a partition to two members: no message is lost and ids are handled once, but out
/// of order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupProtocol {
    /// The protocol that all brokers support: one member of the group assigns the partitions, with
    /// the assignor `cooperative-sticky` by default.
    #[default]
    Classic,
    /// The protocol of KIP-848: the group coordinator assigns the partitions. Each moves as
    /// soon as its former member has released it. The brokers define session timeout and heartbeat
    /// interval. Requires Kafka 4.0 or later.
    ///
    /// A second member with the same `group.instance.id` waits until the first has left.
    Consumer,
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
    /// At no offset: the consumer ends with an error until an operator sets the group's offsets. It
    /// also ends if the committed offset is out of range, even with [`OutOfRange::Earliest`]. A
    /// partition that was added to a topic which the group already reads is always read from its
    /// beginning, because none of its messages was read.
    Error,
}

/// The policy for a committed offset that is not in the log: messages expired (retention or
/// `DeleteRecords` removed them) before they were read, the topic was recreated, or the log was
/// truncated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutOfRange {
    /// Continues at the earliest message in the log. Expired messages and truncated logs are
    /// counted (`oncegate_kafka_messages_expired_total`, `oncegate_kafka_logs_truncated_total`) and
    /// logged as errors with the offsets.
    #[default]
    Earliest,
    /// The consumer ends with an error that names the offset. The ids of topic and cluster are
    /// stored with each committed offset. The consumer also ends if the topic now has another id and
    /// the id of the cluster is missing: then the topic was recreated, or is a copy from another
    /// cluster. (With `Earliest`, it continues at the committed offset.)
    Error,
}

/// Whether opening the source creates missing dead-letter and in-doubt topics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopicCreation {
    /// It does not, and fails if a topic is missing.
    #[default]
    Never,
    /// It creates a missing topic, with unlimited retention (`retention.ms=-1`,
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

/// The topics to which rejected deliveries are published; `None` means the default name.
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
            group_protocol: GroupProtocol::default(),
            destinations: Destinations::default(),
            creation: TopicCreation::default(),
            retention: Retention::default(),
            window: None,
            body_limit: usize::MAX,
            start: StartAt::default(),
            out_of_range: OutOfRange::default(),
            revoke_drain_timeout: DRAIN_TIMEOUT,
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

    /// The protocol of the consumer group; [`GroupProtocol::Classic`] by default.
    pub fn group_protocol(mut self, protocol: GroupProtocol) -> Self {
        self.group_protocol = protocol;
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

    /// The policy for a committed offset that is not in the log. By default reading continues at
    /// the earliest message, and the expired messages are counted and logged.
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
    /// source rejects such topics, provided that it has the right to read their configuration.
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
    /// by default, and at most a third of `max.poll.interval.ms`. Deliveries that are not settled
    /// by then are redelivered.
    pub fn drain_on_revoke(mut self, bound: Duration) -> Self {
        self.revoke_drain_timeout = bound;
        self
    }

    /// How long a partition may make no progress, while its log grows and everything that the Kafka
    /// client fetches is read, before the client is replaced; 60 s by default, at least 1 s.
    /// Unsettled deliveries are redelivered. Each replacement after which the partition makes no
    /// progress doubles this time for that partition, up to 64 times the setting.
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
}

impl fmt::Debug for Kafka {
    /// Shows only the names of properties: their values may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka")
            .field("topics", &self.topics)
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("group_protocol", &self.group_protocol)
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
