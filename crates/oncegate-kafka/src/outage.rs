//! Says that no broker answers: at once, and not over and over.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::error::RDKafkaErrorCode;

/// How often it is said while it lasts.
const EVERY: Duration = Duration::from_secs(10);

/// What the clients of one source say together of brokers that do not answer. librdkafka retries by
/// itself, and would say so with each attempt at each broker.
pub(crate) struct Outage {
    brokers: String,
    said: Mutex<Option<Instant>>,
}

impl Outage {
    /// Nothing said yet.
    pub(crate) fn of(brokers: &str) -> Self {
        Self {
            brokers: brokers.to_owned(),
            said: Mutex::default(),
        }
    }

    /// Whether this says that a broker cannot be reached, and nothing else.
    pub(crate) fn is(code: RDKafkaErrorCode) -> bool {
        use RDKafkaErrorCode as E;
        matches!(
            code,
            E::AllBrokersDown
                | E::BrokerTransportFailure
                | E::Resolve
                | E::SSL
                | E::OperationTimedOut
        )
    }

    /// Says it, unless it was said a moment ago.
    pub(crate) fn tell(&self, reason: &str) {
        if self.is_due(Instant::now()) {
            tracing::warn!(
                "brokers: {} cannot be reached ({reason}); {} Trying again",
                self.brokers,
                advice(reason)
            );
        } else {
            tracing::debug!(brokers = self.brokers, reason, "still no broker");
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = said.is_none_or(|at| now.duration_since(at) >= EVERY);
        if is_due {
            *said = Some(now);
        }
        is_due
    }
}

/// What to look at. Of a certificate that does not bear the host's name OpenSSL says no more than
/// of one that nobody signed. An alert is what the broker says of ours, or of none: `bad
/// certificate`, or `certificate required`.
fn advice(reason: &str) -> &'static str {
    if reason.contains("certificate verify failed") {
        "is its certificate made out to the very host that stands in .brokers(…) or that it advertises, signed by the authority of \
         .ca_certificate(…) or one of the system's, and valid today?"
    } else if reason.contains("certificate") && reason.contains("alert") {
        "does it ask for a certificate, and is that of .client_certificate(…) signed by an authority that it knows, and valid today?"
    } else {
        "is Kafka running, and are host, port and security.protocol right?"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_at_once_and_then_every_ten_seconds() {
        let (outage, begun) = (Outage::of("b"), Instant::now());
        let said: Vec<u64> = (0..30)
            .filter(|second| outage.is_due(begun + Duration::from_secs(*second)))
            .collect();
        assert_eq!(said, [0, 10, 20]);
    }
}
