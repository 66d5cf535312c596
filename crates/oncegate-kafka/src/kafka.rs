//! The description of a Kafka source: what a user writes.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::lifecycle::Reason;
use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use crate::brokers;
use crate::security::{self, KafkaLogin, Security};
use crate::statistics;
use crate::status::KafkaStatus;

/// How long a partition may stand still while its log grows, by default.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// How long revoked deliveries are waited for by default.
const DRAIN: Duration = Duration::from_secs(10);
/// How long a client that reaches no broker waits at the most until it tries again. As Kafka's own
/// clients: with librdkafka's ten seconds a broker that is back is left alone for as long.
const TRIES_AGAIN: Duration = Duration::from_secs(1);
/// What librdkafka calls that, and the pause that it begins with, in milliseconds.
const LONGEST_PAUSE: &str = "reconnect.backoff.max.ms";
const FIRST_PAUSE: &str = "reconnect.backoff.ms";
/// librdkafka's own `session.timeout.ms`, and Kafka's `group.consumer.session.timeout.ms`.
const SESSION_TIMEOUT: Duration = Duration::from_secs(45);
/// librdkafka's own `max.poll.interval.ms`.
const POLL_INTERVAL: Duration = Duration::from_secs(300);

/// Describes a Kafka source: a member of a consumer group, reading one topic or several.
///
/// ```
/// use oncegate_kafka::Kafka;
///
/// let source = Kafka::topic("payments").brokers("localhost:9092").group("ledger");
/// ```
///
/// Rejected deliveries go to `<topic>.dead-letters` and `<topic>.in-doubt`, which have to exist
/// unless [`create_topics`](Kafka::create_topics) says otherwise, and have to keep what stands
/// there without limit unless [`accept_limited_retention`](Kafka::accept_limited_retention) says
/// otherwise. `Debug` shows the names of properties, never their values.
#[derive(Clone)]
#[must_use]
pub struct Kafka {
    pub(crate) topics: Vec<String>,
    pub(crate) brokers: String,
    pub(crate) group: String,
    pub(crate) destinations: Destinations,
    pub(crate) creation: TopicCreation,
    pub(crate) retention: Retention,
    /// For how long the consumer remembers what it has handled, where there is one.
    pub(crate) window: Option<Duration>,
    pub(crate) body_limit: usize,
    pub(crate) start: StartAt,
    pub(crate) out_of_range: OutOfRange,
    drain: Duration,
    pub(crate) stalled_after: Duration,
    pub(crate) status: KafkaStatus,
    security: Security,
    properties: Vec<(String, String)>,
}

/// Where a group begins that has no offset yet.
///
/// There is no `Latest`: it skips messages without a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartAt {
    /// At the earliest message that is still there.
    #[default]
    Earliest,
    /// Nowhere: the consumer ends with an error, and a person decides; so it does where the offset
    /// is [out of range](OutOfRange), whatever is said of that. A partition that was added to a
    /// topic which the group reads already is read from its beginning all the same: nothing of it
    /// was ever read.
    Error,
}

/// What to do where the log does not have the offset any more that the group stands at: messages
/// were removed before they were read, the topic was made anew, or the log lost its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutOfRange {
    /// Reads on at the earliest message that is there. What was missed is counted
    /// (`oncegate_kafka_messages_missed_total`, `oncegate_kafka_logs_cut_total`) and logged as an
    /// error with the offsets.
    #[default]
    Earliest,
    /// The consumer ends with an error that names the offset, and a person decides. So it does
    /// where the topic has another id than the committed offset names and no cluster id says
    /// whether it is a replica, whose offset would be kept.
    Error,
}

/// Whether the dead-letter and in-doubt topics are created where they are missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopicCreation {
    /// A missing topic is an error when the source is opened.
    #[default]
    Never,
    /// A missing topic is created, and keeps its messages without limit (`retention.ms=-1`,
    /// `retention.bytes=-1`, `cleanup.policy=delete`).
    Create {
        /// Partitions of the new topic, at least 1.
        partitions: u16,
        /// Replicas of each partition, at least 1; 3 where there are three brokers.
        replication: u16,
    },
}

/// How long dead-letter and in-doubt topics have to keep what stands there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Retention {
    /// Until somebody takes it out.
    #[default]
    Unlimited,
    /// As long as the topic happens to.
    Any,
}

/// Where rejected deliveries go.
#[derive(Clone, Debug, Default)]
pub(crate) struct Destinations {
    dead_letters: Option<String>,
    in_doubt: Option<String>,
}

impl Destinations {
    /// Where a delivery of this topic goes that was rejected for this reason.
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
            drain: DRAIN,
            stalled_after: STALLED_AFTER,
            status: KafkaStatus::new(),
            security: Security::default(),
            properties: Vec::new(),
        }
    }

    /// The brokers to ask first, as `host:port`, separated by commas.
    pub fn brokers(mut self, brokers: impl Into<String>) -> Self {
        self.brokers = brokers.into();
        self
    }

    /// The consumer group. Its members share the partitions.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// The topic for what was rejected; `<topic>.dead-letters` by default.
    pub fn dead_letters(mut self, topic: impl Into<String>) -> Self {
        self.destinations.dead_letters = Some(topic.into());
        self
    }

    /// The topic for what nobody knows whether it happened; `<topic>.in-doubt` by default.
    pub fn in_doubt(mut self, topic: impl Into<String>) -> Self {
        self.destinations.in_doubt = Some(topic.into());
        self
    }

    /// Where a group begins that has no offset yet; at the earliest message by default.
    pub fn start(mut self, start: StartAt) -> Self {
        self.start = start;
        self
    }

    /// What to do where the log does not have the group's offset any more; by default it is read on
    /// at the earliest message, and what was missed is counted and logged.
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// Whether missing dead-letter and in-doubt topics are created; never by default.
    pub fn create_topics(mut self, creation: TopicCreation) -> Self {
        self.creation = creation;
        self
    }

    /// Accepts dead-letter and in-doubt topics that forget: with a limit of time or size, or
    /// compacted. A message that nobody has looked at by then is lost. Without this, opening the
    /// source refuses such topics, as far as it may read their configuration.
    pub fn accept_limited_retention(mut self) -> Self {
        self.retention = Retention::Any;
        self
    }

    /// The largest body to hand over, in bytes; a larger one is rejected to the dead letters. No
    /// limit by default.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// How long a rebalance waits for deliveries that are being handled, before their partition is
    /// given back; 10 s by default, and never more than a third of `max.poll.interval.ms`. What is
    /// not settled by then is delivered again elsewhere.
    pub fn drain_on_revoke(mut self, bound: Duration) -> Self {
        self.drain = bound;
        self
    }

    /// How long a partition may stand still, while its log grows and all that the Kafka client
    /// fetches is read, until that is replaced by another one; 60 s by default, at least 1 s. What
    /// was not settled by then is delivered again. Each one that was replaced in vain gives the
    /// next one twice the time, up to 64 times as long.
    pub fn stalled_after(mut self, bound: Duration) -> Self {
        self.stalled_after = bound;
        self
    }

    /// Where to say what the source is doing.
    pub fn status(mut self, status: KafkaStatus) -> Self {
        self.status = status;
        self
    }

    /// Speaks TLS, and believes brokers whose certificate one of the system's authorities signed
    /// for their host.
    pub fn tls(mut self) -> Self {
        self.security.tls();
        self
    }

    /// Speaks TLS, and believes the authority of this certificate (a PEM file) instead of the
    /// system's.
    pub fn ca_certificate(mut self, file: impl Into<PathBuf>) -> Self {
        self.security.trust_authority(file.into());
        self
    }

    /// Speaks TLS, and shows the broker this certificate with this key (PEM files): mutual TLS.
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.security.present(certificate.into(), key.into());
        self
    }

    /// Logs in, inside TLS.
    pub fn login(mut self, login: KafkaLogin) -> Self {
        self.security.log_in(login);
        self
    }

    /// Speaks TLS to whoever answers: neither the certificate nor the host's name is looked at, and
    /// anybody in between may read and change everything, the password of [`KafkaLogin::plain`]
    /// too.
    pub fn danger_accept_any_certificate(mut self) -> Self {
        self.security.trust_anyone();
        self
    }

    /// Any other property of librdkafka, such as `session.timeout.ms`, for the consumer and for the
    /// producer of dead letters. Refused when the source is opened: what would break the promise,
    /// such as `enable.auto.commit`.
    pub fn property(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.push((key.into(), value.into()));
        self
    }

    /// Refuses what cannot work, before any broker is asked.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        let wrong = |setting: &str, problem: &str, remedy: &str| {
            Err(SourceError::misconfigured(setting, problem, remedy))
        };
        if self.topics.is_empty() || self.topics.iter().any(|topic| topic.trim().is_empty()) {
            return wrong(
                "topic",
                "is empty",
                "name the topic to read: Kafka::topic(\"payments\")",
            );
        }
        if let Some(pattern) = self.topics.iter().find(|topic| topic.starts_with('^')) {
            return wrong(
                "topic",
                &format!("`{pattern}` is a pattern"),
                "name each topic: Kafka::topics([\"a\", \"b\"])",
            );
        }
        self.check_access()?;
        if self.group.trim().is_empty() {
            return wrong(
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
                    return wrong(
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
            return wrong(
                "create_topics",
                "partitions or replication is 0",
                "use at least 1 of each",
            );
        }
        if self
            .property_value("auto.commit.interval.ms")
            .is_some_and(|value| value.trim().parse() == Ok(0))
        {
            return wrong(
                "auto.commit.interval.ms",
                "is 0, which ends all commits under way",
                "use at least 1; the default is 1000",
            );
        }
        if self.stalled_after < Duration::from_secs(1) {
            return wrong(
                "stalled_after",
                "is below a second",
                "use at least 1 s; the default is 60 s",
            );
        }
        Ok(())
    }

    /// Checks what every client of these brokers needs: addresses, TLS, login and properties.
    pub(crate) fn check_access(&self) -> Result<(), SourceError> {
        let wrong = |setting: &str, problem: &str, remedy: &str| {
            Err(SourceError::misconfigured(setting, problem, remedy))
        };
        if self.brokers.trim().is_empty() {
            return wrong(
                "brokers",
                "is empty",
                "name a broker: .brokers(\"localhost:9092\")",
            );
        }
        if let Err(problem) = brokers::check(&self.brokers) {
            return wrong(
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
            refused(key).map_or(Ok(()), |remedy| {
                wrong(key, "cannot be set as a property", remedy)
            })
        })
    }

    /// How long a rebalance may wait, well under the interval after which the group takes this
    /// member for dead.
    pub(crate) fn drain(&self) -> Duration {
        self.drain.min(self.bound())
    }

    /// How long one part of a rebalance may take at the most, so that all of it stays below the
    /// poll interval.
    pub(crate) fn bound(&self) -> Duration {
        let interval = self
            .property_value("max.poll.interval.ms")
            .and_then(|it| it.parse().ok());
        interval.map_or(POLL_INTERVAL, Duration::from_millis) / 3
    }

    /// After which silence the group takes this member for dead.
    pub(crate) fn session_timeout(&self) -> Duration {
        let set = self
            .property_value("session.timeout.ms")
            .and_then(|it| it.parse().ok());
        set.map_or(SESSION_TIMEOUT, Duration::from_millis)
    }

    /// How long a client that reaches no broker waits at the most until it tries again.
    pub(crate) fn tries_again(&self) -> Duration {
        let set = |key| {
            self.property_value(key)
                .and_then(|it| it.parse().ok())
                .map(Duration::from_millis)
        };
        // librdkafka refuses a longest pause that is shorter than the first.
        set(LONGEST_PAUSE).unwrap_or_else(|| set(FIRST_PAUSE).unwrap_or_default().max(TRIES_AGAIN))
    }

    /// What to do where the group's offset is out of range: who is to begin nowhere by itself does
    /// not begin again either.
    pub(crate) fn where_out_of_range(&self) -> OutOfRange {
        match self.start {
            StartAt::Earliest => self.out_of_range,
            StartAt::Error => OutOfRange::Error,
        }
    }

    pub(crate) fn consumer_config(&self) -> ClientConfig {
        let mut config = self.config();
        config
            .set("group.id", &self.group)
            // Read ahead of us, for each partition: so many messages and one fetch, or so many
            // bytes. librdkafka's own 100,000 messages, 64 MB and fetches of 1 MiB are memory and
            // no speed, so long as it soon looks again whether to fetch.
            .set("queued.min.messages", "5000")
            .set("queued.max.messages.kbytes", "16384")
            .set("fetch.queue.backoff.ms", "2")
            .set("isolation.level", "read_committed")
            .set("auto.commit.interval.ms", "1000");
        // The same property by another name; which of two would count is chance.
        if self.property_value("max.partition.fetch.bytes").is_none() {
            config.set("fetch.message.max.bytes", "262144");
        }
        if self.property_value("group.protocol") != Some("consumer") {
            config.set("partition.assignment.strategy", "cooperative-sticky");
        }
        self.set_properties(&mut config);
        // That a topic was made anew is said there alone.
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
            statistics::EVERY.as_millis().to_string(),
        );
        // Where the group has no offset the source says itself where to begin.
        config
            .set("enable.auto.offset.store", "false")
            .set("enable.auto.commit", "true")
            .set(
                "auto.offset.reset",
                match (self.start, self.where_out_of_range()) {
                    (StartAt::Earliest, OutOfRange::Earliest) => "earliest",
                    _ => "error",
                },
            );
        config
    }

    /// Of the client that watches: it joins no group.
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
        // Which size is too large is for the broker to say; this is the most that librdkafka
        // allows.
        config
            .set("linger.ms", "0")
            .set("delivery.timeout.ms", "30000")
            .set("message.max.bytes", "1000000000");
        // Small enough that few topics refuse a batch for its size alone.
        config.set("batch.size", "131072");
        self.set_properties(&mut config);
        config.set("enable.idempotence", "true").set("acks", "all");
        // A producer's question for a topic that was deleted would make it anew, and it would
        // forget its messages as any other.
        config.set("allow.auto.create.topics", "false");
        config
    }

    pub(crate) fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", "oncegate");
        config.set(LONGEST_PAUSE, self.tries_again().as_millis().to_string());
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

/// What to do instead of setting this property, where it may not be set.
fn refused(key: &str) -> Option<&'static str> {
    match key.trim() {
        "enable.auto.commit"
        | "auto.commit.enable"
        | "enable.auto.offset.store"
        | "offset.store.method" => {
            Some("leave it away: only what is settled is committed, and the source sees to that")
        }
        "group.id" => Some("use .group(…)"),
        "bootstrap.servers" | "metadata.broker.list" => Some("use .brokers(…)"),
        "auto.offset.reset" => Some("use .start(…) and .out_of_range(…)"),
        "allow.auto.create.topics" => Some(
            "leave it away, and use .create_topics(…): what a broker creates by itself forgets its messages",
        ),
        "statistics.interval.ms" => {
            Some("leave it away: the source reads there whether it is with its group")
        }
        "enable.partition.eof" => Some(
            "leave it away: librdkafka would count each end as a message, and skip one after a rebalance",
        ),
        "isolation.level" => Some(
            "leave it away: what a transaction aborted was never sent, and must not be handled",
        ),
        "enable.idempotence" | "acks" | "request.required.acks" | "transactional.id" => {
            Some("leave it away: a dead letter counts only when all replicas have it")
        }
        _ => None,
    }
}

impl fmt::Debug for Kafka {
    /// Properties by name only: their values may be secrets.
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
