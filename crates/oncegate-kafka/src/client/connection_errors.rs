//! Logs that no broker can be reached, at once and then at a bounded rate.

use std::time::{Duration, Instant};

use oncegate_core::internal::Lock;
use oncegate_core::internal::LogThrottle;

/// How often a connection error that continues is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Connection errors of all clients of one source. librdkafka retries by itself, and reports each
/// attempt at each broker.
pub(crate) struct ConnectionErrors {
    brokers: String,
    throttle: Lock<LogThrottle>,
}

impl ConnectionErrors {
    pub(crate) fn new(brokers: &str) -> Self {
        Self {
            brokers: brokers.to_owned(),
            throttle: Lock::new(LogThrottle::every(LOG_INTERVAL)),
        }
    }

    /// Logs a connection error, unless one was logged within [`LOG_INTERVAL`].
    pub(crate) fn log(&self, reason: &str) {
        if self.is_due(Instant::now()) {
            tracing::warn!(
                brokers = self.brokers,
                reason,
                "cannot reach the brokers, retrying; {}",
                advice(reason)
            );
        } else {
            tracing::debug!(brokers = self.brokers, reason, "cannot reach the brokers");
        }
    }

    /// Whether a line is due; if so, the next one is due after [`LOG_INTERVAL`].
    fn is_due(&self, now: Instant) -> bool {
        self.throttle.lock().due(now).is_some()
    }
}

/// A hint for the operator. OpenSSL reports the same error for a certificate with another host name
/// as for one without a trusted signature. A broker that rejects the client certificate sends a TLS
/// alert: `bad certificate` or `certificate required`.
fn advice(reason: &str) -> &'static str {
    if reason.contains("certificate verify failed") {
        "check that the broker's certificate is valid, names the host that is set in .brokers(…) or advertised, and is signed by the \
         authority of .ca_certificate(…) or one of the system's"
    } else if reason.contains("certificate") && reason.contains("alert") {
        "check whether the broker requires a client certificate, and that the one of .client_certificate(…) is valid and signed by an authority that the broker trusts"
    } else {
        "check that Kafka is running, and that host, port and security.protocol are correct"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_error_is_logged_at_once_and_then_every_ten_seconds() {
        let (connection_errors, started) = (ConnectionErrors::new("b"), Instant::now());
        let logged: Vec<u64> = (0..30)
            .filter(|second| connection_errors.is_due(started + Duration::from_secs(*second)))
            .collect();
        assert_eq!(logged, [0, 10, 20]);
    }
}
