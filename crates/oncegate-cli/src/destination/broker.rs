//! The brokers that the configuration names.

use crate::CliContext;
use crate::error::CliError;
use crate::output::Unchecked;

/// The broker that holds the source and its destinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Broker {
    Kafka,
    Rabbitmq,
}

impl Broker {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Rabbitmq => "rabbitmq",
        }
    }

    /// The error for a broker that this build does not include.
    pub(crate) fn feature_missing(self) -> CliError {
        match self {
            Self::Kafka => CliError::feature_missing("Kafka", "kafka"),
            Self::Rabbitmq => CliError::feature_missing("RabbitMQ", "rabbitmq"),
        }
    }

    /// Whether the configuration names any broker.
    pub(crate) fn any_configured(context: &CliContext) -> bool {
        [Self::Kafka, Self::Rabbitmq]
            .into_iter()
            .any(|broker| broker.is_named(context))
    }

    /// Whether the configuration has a section or a key of this broker, or chooses it.
    fn is_named(self, context: &CliContext) -> bool {
        let config = &context.config;
        let section = format!("{}.", self.name());
        config.has_section(self.name())
            || config.text("gate.broker") == Some(self.name())
            || config
                .set()
                .any(|set| set.setting.key.starts_with(&section))
    }

    /// The settings that this broker requires.
    fn required_keys(self) -> [&'static str; 2] {
        match self {
            Self::Kafka => ["kafka.brokers", "kafka.topic"],
            Self::Rabbitmq => ["rabbitmq.url", "rabbitmq.queue"],
        }
    }

    /// The fully configured brokers, or only the chosen one.
    pub(crate) fn configured(
        context: &CliContext,
        chosen: Option<Self>,
    ) -> Result<Vec<Self>, CliError> {
        let is_complete = |broker: &Self| {
            broker
                .required_keys()
                .iter()
                .all(|key| context.config.has(key))
        };
        let found: Vec<Self> = [Self::Kafka, Self::Rabbitmq]
            .into_iter()
            .filter(is_complete)
            .filter(|it| chosen.is_none_or(|c| c == *it))
            .collect();
        if found.is_empty() {
            return Err(CliError::usage(
                "no broker: set kafka.brokers and kafka.topic, or rabbitmq.url and rabbitmq.queue",
            ));
        }
        Ok(found)
    }

    /// Like [`Self::configured`], and notes every partly configured broker as unchecked.
    pub(crate) fn selected(
        context: &CliContext,
        chosen: Option<Self>,
        unchecked: &mut Unchecked,
    ) -> Result<Vec<Self>, CliError> {
        let found = Self::configured(context, chosen)?;
        if chosen.is_none() {
            let _ = Self::note_incomplete(context, unchecked);
        }
        Ok(found)
    }

    /// Notes every partly configured broker as unchecked. Returns whether there was one.
    pub(crate) fn note_incomplete(context: &CliContext, unchecked: &mut Unchecked) -> bool {
        let mut any = false;
        for broker in [Self::Kafka, Self::Rabbitmq] {
            let is_named = broker.is_named(context);
            let missing = broker
                .required_keys()
                .into_iter()
                .find(|key| !context.config.has(key));
            if let (true, Some(missing)) = (is_named, missing) {
                let name = broker.name();
                let remove = if context.config.text("gate.broker") == Some(name) {
                    format!("remove [{name}] and gate.broker")
                } else {
                    format!("remove [{name}]")
                };
                let text = format!("{missing} is missing; set it, or {remove}");
                unchecked.note(broker.name(), CliError::usage(text));
                any = true;
            }
        }
        any
    }
}
