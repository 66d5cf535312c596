//! Clients for tools that work beside the source.

use oncegate_core::SourceError;
use rdkafka::config::FromClientConfig;

use crate::kafka::Kafka;
use crate::{refusal, security};

impl Kafka {
    /// An rdkafka client of these brokers, say a `BaseConsumer` or an `AdminClient`, for a tool
    /// that reads or repairs what the source writes. It connects as the source does: same brokers,
    /// TLS, login and properties. `settings` are properties of librdkafka, too, and win over the
    /// others. The client creates no topic by asking for one.
    ///
    /// No broker is asked yet. The secrets stay in this description: there is no configuration to
    /// print.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`]: what the source refuses of brokers, TLS, login and properties, what librdkafka refuses, or a setting
    /// that turns off the verification of certificates.
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
        config.create().map_err(refusal::of_setting)
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::ClientConfig;
    use rdkafka::error::KafkaResult;

    use super::*;

    /// A client that only keeps its configuration.
    struct Shown(ClientConfig);

    impl FromClientConfig for Shown {
        fn from_config(config: &ClientConfig) -> KafkaResult<Self> {
            Ok(Self(config.clone()))
        }
    }

    #[test]
    fn a_client_for_tools_has_the_settings_and_the_refusals_of_the_source() {
        let kafka = |key: &str, value: &str| {
            Kafka::topic("")
                .brokers("localhost:9092")
                .property(key, value)
        };
        let whole = kafka("reconnect.backoff.ms", "500")
            .login(crate::KafkaLogin::plain("ledger", "canary"));
        let Shown(config) = whole
            .client(&[("reconnect.backoff.ms", "600"), ("group.id", "tool")])
            .expect("no group is needed");
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
            let refused = kafka(key, value)
                .client::<Shown>(&[])
                .err()
                .expect("refused")
                .to_string();
            let source = Kafka::topic("t")
                .brokers("localhost:9092")
                .group("g")
                .property(key, value)
                .check();
            assert_eq!(refused, source.expect_err("refused").to_string());
        }
        let by_a_setting = Kafka::topic("t")
            .brokers("localhost:9092")
            .client::<Shown>(&[("enable.ssl.certificate.verification", "false")]);
        assert!(by_a_setting.is_err());
        assert!(
            Kafka::topic("t").client::<Shown>(&[]).is_err(),
            "no brokers"
        );
    }
}
