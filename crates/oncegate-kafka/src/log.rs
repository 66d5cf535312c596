//! What is said of librdkafka's own words: its log, and errors that change nothing.

use std::sync::Arc;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, KafkaResult};

use crate::outage::Outage;

/// Hands librdkafka's log lines to `tracing`, and what cannot be reached to whoever speaks of that.
pub(crate) struct Log(pub(crate) Arc<Outage>);

impl ClientContext for Log {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self::line(level, facility, line);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if Outage::is(code) => self.0.tell(reason),
            _ => tracing::warn!(%error, reason, "Kafka, dead letters"),
        }
    }
}

/// Hands one line of librdkafka's log to `tracing`.
pub(crate) fn line(level: RDKafkaLogLevel, facility: &str, line: &str) {
    match level {
        // Properties are given to consumer and producer alike; each warns of those that are the
        // other's.
        _ if facility == "CONFWARN" => tracing::debug!(facility, "{line}"),
        // A broker failed: each such line that is an error comes as an error of the client too,
        // which is told.
        _ if facility == "FAIL" => tracing::debug!(facility, "{line}"),
        RDKafkaLogLevel::Emerg
        | RDKafkaLogLevel::Alert
        | RDKafkaLogLevel::Critical
        | RDKafkaLogLevel::Error => {
            tracing::error!(facility, "{line}");
        }
        RDKafkaLogLevel::Warning => tracing::warn!(facility, "{line}"),
        RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => tracing::info!(facility, "{line}"),
        RDKafkaLogLevel::Debug => tracing::debug!(facility, "{line}"),
    }
}

/// Says what failed, where nothing else can be done about it.
pub(crate) fn complain(what: &str, result: KafkaResult<()>) {
    if let Err(error) = result {
        tracing::error!(%error, "{what}");
    }
}
