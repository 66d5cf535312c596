//! The brokers that the configuration names.

use crate::CliContext;
use crate::error::CliError;
use crate::output::Unchecked;

/// The broker of the source and its destinations.
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

    /// The error for a broker that this build does not include; `None` if it does.
    pub(crate) fn missing_feature(self) -> Option<CliError> {
        let included = match self {
            Self::Kafka => cfg!(feature = "kafka"),
            Self::Rabbitmq => cfg!(feature = "rabbitmq"),
        };
        (!included).then(|| self.missing_feature_error())
    }

    /// The error for a broker that this build does not include.
    pub(crate) fn missing_feature_error(self) -> CliError {
        match self {
            Self::Kafka => CliError::feature_missing("Kafka", "kafka"),
            Self::Rabbitmq => CliError::feature_missing("RabbitMQ", "rabbitmq"),
        }
    }

    /// Whether the configuration names any broker.
    pub(crate) fn any_named(context: &CliContext) -> bool {
        [Self::Kafka, Self::Rabbitmq]
            .into_iter()
            .any(|broker| broker.is_named(context))
    }

    /// Whether the consumer uses this broker: `gate.broker` names it, or `gate.broker` is not set
    /// and the configuration has a section or a key of this broker.
    pub(crate) fn is_named(self, context: &CliContext) -> bool {
        let config = &context.config;
        if let Some(chosen) = config.text("gate.broker") {
            return chosen == self.name();
        }
        let section = format!("{}.", self.name());
        config.has_section(self.name())
            || config
                .configured_values()
                .any(|given| given.setting.key.starts_with(&section))
    }

    /// The settings that this broker requires.
    fn required_keys(self) -> [&'static str; 2] {
        match self {
            Self::Kafka => ["kafka.brokers", "kafka.topic"],
            Self::Rabbitmq => ["rabbitmq.url", "rabbitmq.queue"],
        }
    }

    /// The brokers whose required settings are given; with `chosen`, only that broker.
    ///
    /// # Errors
    /// No broker, or not the chosen one, has its required settings.
    pub(crate) fn configured(
        context: &CliContext,
        chosen: Option<Self>,
    ) -> Result<Vec<Self>, CliError> {
        if let Some(broker) = chosen {
            let missing = broker.missing_keys(context);
            return if missing.is_empty() {
                Ok(vec![broker])
            } else {
                Err(CliError::usage(format!(
                    "--broker {}: set {}",
                    broker.name(),
                    missing.join(" and ")
                )))
            };
        }
        let configured: Vec<Self> = [Self::Kafka, Self::Rabbitmq]
            .into_iter()
            .filter(|broker| broker.is_named(context) && broker.missing_keys(context).is_empty())
            .collect();
        if configured.is_empty() {
            return Err(CliError::usage(
                "no broker: set kafka.brokers and kafka.topic, or rabbitmq.url and rabbitmq.queue",
            ));
        }
        Ok(configured)
    }

    /// The required settings that are not given.
    fn missing_keys(self, context: &CliContext) -> Vec<&'static str> {
        self.required_keys()
            .into_iter()
            .filter(|key| !context.config.has(key))
            .collect()
    }

    /// Like [`Self::configured`]. Without a chosen broker it also adds every partly configured one
    /// to the items that the output lists as not checked.
    pub(crate) fn selected(
        context: &CliContext,
        chosen: Option<Self>,
        unchecked: &mut Unchecked,
    ) -> Result<Vec<Self>, CliError> {
        let configured = Self::configured(context, chosen)?;
        if chosen.is_none() {
            let _ = Self::note_incomplete(context, unchecked);
        }
        Ok(configured)
    }

    /// Adds every partly configured broker to the items that the output lists as not checked.
    /// Returns whether there was one.
    pub(crate) fn note_incomplete(context: &CliContext, unchecked: &mut Unchecked) -> bool {
        let mut any = false;
        for broker in [Self::Kafka, Self::Rabbitmq] {
            if broker.is_named(context)
                && let Some(missing) = broker.missing_keys(context).first()
            {
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
