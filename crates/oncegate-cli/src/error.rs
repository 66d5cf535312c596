//! Exit codes and error messages.

use std::fmt;
use std::process::ExitCode;

use oncegate::StoreError;
use oncegate_config::settings::nearest;
use oncegate_config::with_store_keys;

/// The exit codes in `--help`.
pub(crate) const CODES: &str = "Exit codes:
  0  success
  1  incomplete (also the output, if it cannot be written), or errors were found; warnings of `doctor` alone are 0
  2  invalid command line or configuration
  3  a server is unreachable or refused the request; for `doctor` this is a finding, code 1
  4  nothing was done: this was a preview, --yes applies it
  5  the value of an option is unknown, such as of --reason
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
    /// Whether repeating the request would fail again.
    permanence: Permanence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Permanence {
    Unknown,
    /// The marker of this key cannot be read.
    Permanent,
}

impl CliError {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self {
            code: CliErrorCode::Usage,
            text: text.into(),
            permanence: Permanence::Unknown,
        }
    }

    pub(crate) fn server(text: impl Into<String>) -> Self {
        Self {
            code: CliErrorCode::Server,
            text: text.into(),
            permanence: Permanence::Unknown,
        }
    }

    pub(crate) fn incomplete(text: impl Into<String>) -> Self {
        Self {
            code: CliErrorCode::Incomplete,
            text: text.into(),
            permanence: Permanence::Unknown,
        }
    }

    /// The value under the key of one id is not a marker. Other ids are not affected.
    pub(crate) fn unreadable_marker(text: String) -> Self {
        Self {
            permanence: Permanence::Permanent,
            ..Self::incomplete(text)
        }
    }

    /// A value of an option that is none of the known ones.
    pub(crate) fn unknown_value(option: &str, word: &str, known: &[&str]) -> Self {
        let suggestion = nearest(word, known.iter().copied())
            .map(|near| format!(", did you mean {near:?}?"))
            .unwrap_or_default();
        let known: Vec<&str> = known
            .iter()
            .map(|value| if value.is_empty() { "\"\"" } else { value })
            .collect();
        let text = format!(
            "{option}: {word:?} is unknown{suggestion}; known values: {}",
            known.join(", ")
        );
        Self {
            code: CliErrorCode::UnknownOptionValue,
            text,
            permanence: Permanence::Unknown,
        }
    }

    /// The command needs a feature that this build does not include.
    pub(crate) fn feature_missing(what: &str, feature: &str) -> Self {
        let remedy = format!(
            "install it with the feature `{feature}` of oncegate-cli (all are on by default)"
        );
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
            permanence: Permanence::Unknown,
        }
    }

    /// A preview was shown, and nothing was changed.
    pub(crate) fn not_confirmed() -> Self {
        Self {
            code: CliErrorCode::NotConfirmed,
            text: "nothing was done; pass --yes to apply it".into(),
            permanence: Permanence::Unknown,
        }
    }

    /// Turns a failure that concerns a single message, such as an unreadable marker, into a reason
    /// to skip it.
    pub(crate) fn for_one_message(self) -> Self {
        match self.permanence {
            Permanence::Permanent => Self::incomplete(format!("skipped: {}", self.text)),
            Permanence::Unknown => self,
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
        let permanence = if matches!(
            error,
            StoreError::Misconfigured(_) | StoreError::UnreadableMarker(_)
        ) {
            Permanence::Permanent
        } else {
            Permanence::Unknown
        };
        Self {
            permanence,
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
