//! Errors of librdkafka clients.

use oncegate_core::SourceError;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// The error of a property that librdkafka rejects. librdkafka's text may contain the value, so it
/// is omitted if the property may be a secret.
pub(crate) fn from_config(error: KafkaError) -> SourceError {
    match error {
        KafkaError::ClientConfig(_, text, key, _) => {
            let secret = [
                "password", "secret", "key", "pem", "jaas", "token", "config",
            ]
            .iter()
            .any(|part| key.contains(part));
            let problem = if secret {
                "is rejected by librdkafka".to_owned()
            } else {
                text
            };
            SourceError::misconfigured(
                key,
                problem,
                "see librdkafka's CONFIGURATION.md for its properties",
            )
        }
        KafkaError::ClientCreation(text) => {
            SourceError::misconfigured("property", text, "change the property that this text names")
        }
        other => SourceError::misconfigured(
            "property",
            other.to_string(),
            "change the property that this text names",
        ),
    }
}

/// Whether the broker rejected the client's credentials.
pub(crate) fn is_authentication(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(
        code,
        E::Authentication | E::SaslAuthenticationFailed | E::UnsupportedSASLMechanism
    )
}

/// Whether this error says that a broker cannot be reached.
pub(crate) fn is_connection(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(
        code,
        E::AllBrokersDown | E::BrokerTransportFailure | E::Resolve | E::SSL | E::OperationTimedOut
    )
}
