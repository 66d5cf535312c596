//! What is refused: settings by librdkafka, clients by the broker.

use oncegate_core::SourceError;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// A setting that librdkafka refuses. Its text may repeat the value, which may be a secret.
pub(crate) fn of_setting(error: KafkaError) -> SourceError {
    match error {
        KafkaError::ClientConfig(_, text, key, _) => {
            let secret = [
                "password", "secret", "key", "pem", "jaas", "token", "config",
            ]
            .iter()
            .any(|part| key.contains(part));
            let problem = if secret {
                "is refused by librdkafka".to_owned()
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
            SourceError::misconfigured("property", text, "change the property that it names")
        }
        other => SourceError::misconfigured(
            "property",
            other.to_string(),
            "change the property that it names",
        ),
    }
}

/// Whether this says that the broker does not let the client in.
pub(crate) fn is_of_the_broker(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(
        code,
        E::Authentication | E::SaslAuthenticationFailed | E::UnsupportedSASLMechanism
    )
}
