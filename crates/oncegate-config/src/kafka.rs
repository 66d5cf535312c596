//! Builds a Kafka source from `[kafka]`.

use oncegate::{GroupProtocol, Kafka, OutOfRange, StartAt, TopicCreation};

use crate::config::Config;
use crate::error::Error;

impl Config {
    /// Builds the Kafka source from `[kafka]`. Connects to nothing.
    ///
    /// # Errors
    /// [`Error::Misconfigured`] if `kafka.topic` is missing; otherwise as for [`Config::check`].
    pub fn kafka(&self) -> Result<Kafka, Error> {
        self.check()?;
        let topic = self.text("kafka.topic").ok_or_else(|| {
            Error::misconfigured("no topic: set kafka.topic, or ONCEGATE_KAFKA_TOPIC")
        })?;
        let mut kafka = Kafka::topic(topic);
        macro_rules! set {
            ($($setter:ident: $value:expr,)*) => {
                $(if let Some(value) = $value {
                    kafka = kafka.$setter(value);
                })*
            };
        }
        set! {
            brokers: self.text("kafka.brokers"),
            group: self.text("kafka.group"),
            group_protocol: self.text("kafka.group-protocol").map(|protocol| if protocol == "consumer" { GroupProtocol::Consumer } else { GroupProtocol::Classic }),
            dead_letters: self.text("kafka.dead-letters"),
            in_doubt: self.text("kafka.in-doubt"),
            start: self.text("kafka.start").map(|start| if start == "error" { StartAt::Error } else { StartAt::Earliest }),
            out_of_range: self.text("kafka.out-of-range").map(|range| if range == "error" { OutOfRange::Error } else { OutOfRange::Earliest }),
            body_limit: self.number("kafka.body-limit").map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            drain_on_revoke: self.time("kafka.drain-on-revoke"),
            stalled_after: self.time("kafka.stalled-after"),
        }
        // `check` has rejected larger numbers.
        let count = |key| {
            self.number(key)
                .map(|number| u16::try_from(number).unwrap_or(u16::MAX))
        };
        if let (Some(partitions), Some(replication)) = (
            count("kafka.create-partitions"),
            count("kafka.create-replicas"),
        ) {
            kafka = kafka.create_topics(TopicCreation::Create {
                partitions,
                replication,
            });
        }
        if self.text("kafka.limited-retention") == Some("accepted") {
            kafka = kafka.accept_limited_retention();
        }
        for (name, value) in self.pairs("kafka.properties") {
            kafka = kafka.property(name, value);
        }
        Ok(match self.text("kafka.password") {
            Some(password) => kafka.property("sasl.password", password),
            None => kafka,
        })
    }
}
