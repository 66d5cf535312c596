//! librdkafka's log lines and errors.

use std::sync::Arc;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, KafkaResult};

use super::connection_errors::ConnectionErrors;
use super::error;

/// A client context that forwards log lines to `tracing` and connection errors to
/// [`ConnectionErrors`].
pub(crate) struct LogContext(pub(crate) Arc<ConnectionErrors>);

impl ClientContext for LogContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self::line(level, facility, line);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if error::is_connection(code) => self.0.log(reason),
            _ => {
                tracing::warn!(%error, reason, "kafka client error; librdkafka retries; if it persists, check the brokers' logs")
            }
        }
    }
}

/// Forwards one line of librdkafka's log to `tracing`.
pub(crate) fn line(level: RDKafkaLogLevel, facility: &str, line: &str) {
    match level {
        // The same properties are set on consumers and producers, and librdkafka warns of each
        // property that a client does not use.
        _ if facility == "CONFWARN" => tracing::debug!(facility, "{line}"),
        // librdkafka also passes each such failure to the error callback, which logs it.
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

/// Logs an error if the result is one. `what` is the text of the log line.
pub(crate) fn log_error(what: &str, result: KafkaResult<()>) {
    if let Err(error) = result {
        tracing::error!(%error, "{what}");
    }
}
