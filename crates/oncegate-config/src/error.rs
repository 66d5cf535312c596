//! Why a program cannot be wired, or ended.

use oncegate::{SourceError, StoreError};

use crate::config::Config;

/// Why a program cannot be wired as its configuration says, or why its consumer ended. Each says what to change.
#[derive(thiserror::Error)]
pub enum Error {
    /// A key that means nothing, a value that means nothing, a part that is missing or that contradicts another one.
    #[error("{0}")]
    Misconfigured(String),
    /// What a consumer says that no key of the configuration can change.
    #[error(transparent)]
    Consumer(oncegate::Error),
}

impl std::fmt::Debug for Error {
    /// The same line as `Display`: it is what a `main` that returns this error prints.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl Error {
    /// What a person has to change.
    pub(crate) fn misconfigured(text: impl Into<String>) -> Self {
        Self::Misconfigured(text.into())
    }
}

/// Which section the setting of a source stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broker {
    Kafka,
    RabbitMq,
}

impl Broker {
    pub(crate) fn section(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::RabbitMq => "rabbitmq",
        }
    }
}

impl Config {
    /// What a consumer ended with, by the key that changes it: the library itself names what stands in code.
    pub fn explain(&self, error: oncegate::Error) -> Error {
        match error {
            oncegate::Error::Misconfigured { setting, problem, remedy } => {
                Error::Misconfigured(format!("{}: {problem}; {remedy}", key("gate", setting)))
            }
            oncegate::Error::Scope(error) => Error::Misconfigured(format!("store.scope: {error}")),
            oncegate::Error::ForgetfulStore(why) => Error::Misconfigured(format!(
                "gate.guarantee: at most once needs a store that does not forget, and {why}; change that, or accept it with \
                 store.forgetful = \"accepted\""
            )),
            oncegate::Error::Store(error @ StoreError::Misconfigured(_)) => Error::Misconfigured(format!("[store]: {error}")),
            oncegate::Error::Source(SourceError::Misconfigured { setting, problem, remedy }) => {
                let section = self.broker().map_or("source", Broker::section);
                Error::Misconfigured(format!("{}: {problem}; {remedy}", key(section, &setting)))
            }
            other => Error::Consumer(other),
        }
    }
}

/// The key of a setter; a property of librdkafka's has dots of its own.
fn key(section: &str, setting: &str) -> String {
    match setting {
        // Both are one key here.
        "adaptive_lease" => "gate.shortest-lease".into(),
        property if property.contains('.') => format!("{section}.properties: {property}"),
        setter => format!("{section}.{}", setter.replace('_', "-")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_library_says_is_told_by_its_key() {
        let topic = [("ONCEGATE_KAFKA_TOPIC".to_owned(), "payments".to_owned())];
        let config = Config::read(Some(std::path::Path::new("/dev/null")), topic).expect("one key");
        let said = |error| config.explain(error).to_string();
        let wrong = oncegate::Error::Misconfigured { setting: "max_age", problem: "it is long".into(), remedy: "shorten it" };
        assert_eq!(said(wrong), "gate.max-age: it is long; shorten it");
        let source = |setting: &str| oncegate::Error::Source(SourceError::misconfigured(setting, "no", "yes"));
        assert_eq!(said(source("dead_letters")), "kafka.dead-letters: no; yes");
        assert_eq!(said(source("enable.auto.commit")), "kafka.properties: enable.auto.commit: no; yes");
        let forgets = said(oncegate::Error::ForgetfulStore("it evicts".into()));
        assert!(forgets.contains("it evicts") && forgets.contains("store.forgetful"), "{forgets}");
        assert_eq!(format!("{:?}", Error::misconfigured("as it is said")), "as it is said");
    }
}
