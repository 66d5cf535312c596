//! Exit codes and error messages.

use std::fmt;
use std::process::ExitCode;

use oncegate::StoreError;
use oncegate_config::settings::nearest;
use oncegate_config::with_store_keys;

/// The description of the exit codes in `--help`.
pub(crate) const CODES: &str = "Exit codes:
  0  success
  1  incomplete, or the output cannot be written, or `doctor` found errors (warnings alone are 0)
  2  invalid command line or configuration
  3  a server is unreachable or refused the request; for `doctor` this is a finding, code 1
  4  nothing was done: this was a preview; pass --yes to do what it shows
  5  the value of an option such as --reason is unknown
  6  this build does not include the broker or store";

/// An exit code other than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CliErrorCode {
    Incomplete = 1,
    Usage = 2,
    Server = 3,
    NotConfirmed = 4,
    UnknownOptionValue = 5,
    FeatureMissing = 6,
}

/// The error that ends the program.
#[derive(Debug)]
pub(crate) struct CliError {
    pub(crate) code: CliErrorCode,
    text: String,
    affects: AffectedMessages,
}

/// The messages for which an error makes a command fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AffectedMessages {
    /// The same commands for other messages may fail, too.
    Any,
    /// The value of one message's key is not a marker.
    One,
}

impl CliError {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self {
            code: CliErrorCode::Usage,
            text: text.into(),
            affects: AffectedMessages::Any,
        }
    }

    pub(crate) fn server(text: impl Into<String>) -> Self {
        Self {
            code: CliErrorCode::Server,
            text: text.into(),
            affects: AffectedMessages::Any,
        }
    }

    pub(crate) fn incomplete(text: impl Into<String>) -> Self {
        Self {
            code: CliErrorCode::Incomplete,
            text: text.into(),
            affects: AffectedMessages::Any,
        }
    }

    /// The value under the key of one id is not a marker. Other ids are not affected.
    pub(crate) fn unreadable_marker(text: String) -> Self {
        Self {
            affects: AffectedMessages::One,
            ..Self::incomplete(text)
        }
    }

    /// The value of an option is none of the known ones. The text suggests the nearest.
    pub(crate) fn unknown_value(option: &str, value: &str, known: &[&str]) -> Self {
        let suggestion = nearest(value, known.iter().copied())
            .map(|near| format!(", did you mean {near:?}?"))
            .unwrap_or_default();
        let known: Vec<&str> = known
            .iter()
            .map(|value| if value.is_empty() { "\"\"" } else { value })
            .collect();
        let text = format!(
            "{option}: {value:?} is unknown{suggestion}; known values: {}",
            known.join(", ")
        );
        Self {
            code: CliErrorCode::UnknownOptionValue,
            text,
            affects: AffectedMessages::Any,
        }
    }

    /// The command needs a feature that this build does not include.
    pub(crate) fn feature_missing(what: &str, feature: &str) -> Self {
        let remedy = format!("install it with `cargo install … --features {feature}`");
        Self::feature_missing_text(format!("this oncegate was built without {what}; {remedy}"))
    }

    /// The configuration names a store of a kind that the command line does not support.
    pub(crate) fn unknown_store() -> Self {
        Self::usage("store.url: the command line does not support this kind of store")
    }

    /// Like [`Self::feature_missing`], with the complete text.
    pub(crate) fn feature_missing_text(text: String) -> Self {
        Self {
            code: CliErrorCode::FeatureMissing,
            text,
            affects: AffectedMessages::Any,
        }
    }

    /// A preview was shown, and nothing was changed.
    pub(crate) fn not_confirmed() -> Self {
        Self {
            code: CliErrorCode::NotConfirmed,
            text: "nothing was done; pass --yes to do what is shown above".into(),
            affects: AffectedMessages::Any,
        }
    }

    /// Turns the error of an unreadable marker into the reason why its message is skipped. Other
    /// errors stop the command.
    pub(crate) fn for_one_message(self) -> Self {
        match self.affects {
            AffectedMessages::One => Self::incomplete(format!("skipped: {}", self.text)),
            AffectedMessages::Any => self,
        }
    }

    /// Adds a clause to the text.
    pub(crate) fn with(mut self, clause: &str) -> Self {
        self.text = format!("{}; {clause}", self.text);
        self
    }

    pub(crate) fn exit(&self) -> ExitCode {
        ExitCode::from(self.code as u8)
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<oncegate_config::Error> for CliError {
    fn from(error: oncegate_config::Error) -> Self {
        match &error {
            oncegate_config::Error::Misconfigured(_) => Self::usage(error.to_string()),
            _ => Self::server(error.to_string()),
        }
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        // Not `Misconfigured`: the command would skip every message.
        let affects = if matches!(error, StoreError::UnreadableMarker(_)) {
            AffectedMessages::One
        } else {
            AffectedMessages::Any
        };
        Self {
            affects,
            ..Self::server(with_store_keys(&error.to_string()))
        }
    }
}

#[cfg(feature = "kafka")]
impl From<rdkafka::error::KafkaError> for CliError {
    fn from(error: rdkafka::error::KafkaError) -> Self {
        Self::server(format!("Kafka: {error}"))
    }
}

#[cfg(feature = "rabbitmq")]
impl From<lapin::Error> for CliError {
    fn from(error: lapin::Error) -> Self {
        Self::server(format!("RabbitMQ: {error}"))
    }
}
