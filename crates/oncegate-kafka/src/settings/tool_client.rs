//! Clients for tools that use the brokers of a source.

use oncegate_core::SourceError;
use rdkafka::config::FromClientConfig;

use super::{Kafka, security};
use crate::client;

impl Kafka {
    /// Creates an rdkafka client, such as a `BaseConsumer` or an `AdminClient`, with the brokers,
    /// TLS, login and properties of the source. `settings` are librdkafka properties that override
    /// these. A metadata request of this client creates no topic.
    ///
    /// Connects to no broker yet. Returns a client and not its configuration, whose `Debug` output
    /// would contain the secrets.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`] if the source or librdkafka rejects the brokers, TLS, login
    /// or properties, or if a setting disables certificate verification.
    pub fn client<C: FromClientConfig>(&self, settings: &[(&str, &str)]) -> Result<C, SourceError> {
        self.check_access()?;
        settings
            .iter()
            .try_for_each(|(key, value)| security::check_property(key, value))?;
        let mut config = self.config();
        self.set_properties(&mut config);
        config.set("allow.auto.create.topics", "false");
        for (key, value) in settings {
            config.set(*key, *value);
        }
        config.create().map_err(client::error::from_config)
    }

    /// The replication factor for a topic in a cluster of this size: one replica per broker, at most
    /// three.
    #[doc(hidden)]
    pub fn replicas(brokers: usize) -> usize {
        brokers.clamp(1, 3)
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::ClientConfig;
    use rdkafka::error::KafkaResult;

    use super::*;

    /// A client type that keeps its configuration, for the test.
    struct ConfigCapture(ClientConfig);

    impl FromClientConfig for ConfigCapture {
        fn from_config(config: &ClientConfig) -> KafkaResult<Self> {
            Ok(Self(config.clone()))
        }
    }

    #[test]
    fn a_client_for_tools_has_the_settings_and_checks_of_the_source() {
        let kafka = |key: &str, value: &str| {
            Kafka::topic("")
                .brokers("localhost:9092")
                .property(key, value)
        };
        let with_login = kafka("reconnect.backoff.ms", "500")
            .login(crate::KafkaLogin::plain("ledger", "canary"));
        let ConfigCapture(config) = with_login
            .client(&[("reconnect.backoff.ms", "600"), ("group.id", "tool")])
            .expect("a tool client needs no topic or group");
        for (key, value) in [
            ("bootstrap.servers", "localhost:9092"),
            ("security.protocol", "sasl_ssl"),
            ("sasl.password", "canary"),
            ("reconnect.backoff.ms", "600"),
            ("group.id", "tool"),
            ("allow.auto.create.topics", "false"),
        ] {
            assert_eq!(config.get(key), Some(value), "{key}");
        }
        for (key, value) in [
            ("enable.ssl.certificate.verification", "false"),
            ("ssl.endpoint.identification.algorithm", "none"),
            ("group.id", "g"),
        ] {
            let tool_error = kafka(key, value)
                .client::<ConfigCapture>(&[])
                .err()
                .expect("the property is rejected")
                .to_string();
            let source = Kafka::topic("t")
                .brokers("localhost:9092")
                .group("g")
                .property(key, value)
                .check();
            assert_eq!(
                tool_error,
                source.expect_err("the property is rejected").to_string()
            );
        }
        let with_forbidden_setting = Kafka::topic("t")
            .brokers("localhost:9092")
            .client::<ConfigCapture>(&[("enable.ssl.certificate.verification", "false")]);
        assert!(with_forbidden_setting.is_err());
        assert!(
            Kafka::topic("t").client::<ConfigCapture>(&[]).is_err(),
            "no brokers"
        );
    }
}
