//! How the program ends.

use std::fmt;
use std::process::ExitCode;

use oncegate::StoreError;
use oncegate_config::settings::nearest;

/// The exit codes, as `--help` tells them.
pub(crate) const CODES: &str = "Exit codes:
  0  done, and nothing to object to
  1  not all of it could be done, or something was found (see what it says)
  2  the command line or the configuration is wrong
  3  a server could not be asked, or refused
  4  nothing was done: it showed what it would do, and wants --yes
  5  a filter names nothing that is known
  6  this program was built without the broker or the store that it takes";

/// Why the program ends with something else than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    NotAll = 1,
    Usage = 2,
    Server = 3,
    NotConfirmed = 4,
    UnknownWord = 5,
    LeftOut = 6,
}

/// What is told on the way out.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    text: String,
    /// Whether what was asked for would fail in the same way again.
    lasting: Lasting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasting {
    Perhaps,
    /// The store refuses to say anything else of this key.
    Yes,
}

impl Failure {
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self {
            code: Code::Usage,
            text: text.into(),
            lasting: Lasting::Perhaps,
        }
    }

    pub(crate) fn server(text: impl Into<String>) -> Self {
        Self {
            code: Code::Server,
            text: text.into(),
            lasting: Lasting::Perhaps,
        }
    }

    pub(crate) fn not_all(text: impl Into<String>) -> Self {
        Self {
            code: Code::NotAll,
            text: text.into(),
            lasting: Lasting::Perhaps,
        }
    }

    /// A filter that would let nothing through, because nothing has that name.
    pub(crate) fn unknown_word(filter: &str, word: &str, known: &[&str]) -> Self {
        let meant = nearest(word, known.iter().copied())
            .map(|near| format!(", did you mean {near:?}?"))
            .unwrap_or_default();
        let text = format!("{filter}: {word:?} is not known{meant}; known are {known:?}");
        Self {
            code: Code::UnknownWord,
            text,
            lasting: Lasting::Perhaps,
        }
    }

    /// What it takes is no part of this build.
    pub(crate) fn left_out(what: &str, feature: &str) -> Self {
        let remedy = format!(
            "install it with the feature `{feature}` of oncegate-cli (all are on by default)"
        );
        Self::left_out_as(format!("this oncegate was built without {what}; {remedy}"))
    }

    /// The same, once it was said.
    pub(crate) fn left_out_as(text: String) -> Self {
        Self {
            code: Code::LeftOut,
            text,
            lasting: Lasting::Perhaps,
        }
    }

    /// The plan was shown.
    pub(crate) fn not_confirmed() -> Self {
        Self {
            code: Code::NotConfirmed,
            text: "nothing was done; say --yes to do it".into(),
            lasting: Lasting::Perhaps,
        }
    }

    /// As a reason to leave one letter where it is, if it concerns that letter alone: a marker that
    /// cannot be read.
    pub(crate) fn of_one_letter(self) -> Self {
        match self.lasting {
            Lasting::Yes => Self::not_all(format!("left: {}", self.text)),
            Lasting::Perhaps => self,
        }
    }

    pub(crate) fn exit(&self) -> ExitCode {
        ExitCode::from(self.code as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<oncegate_config::Error> for Failure {
    fn from(error: oncegate_config::Error) -> Self {
        match &error {
            oncegate_config::Error::Misconfigured(_) => Self::usage(error.to_string()),
            oncegate_config::Error::Consumer(_) => Self::server(error.to_string()),
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let lasting = if matches!(
            error,
            StoreError::Misconfigured(_) | StoreError::UnreadableMarker(_)
        ) {
            Lasting::Yes
        } else {
            Lasting::Perhaps
        };
        Self {
            lasting,
            ..Self::server(error.to_string())
        }
    }
}

#[cfg(feature = "kafka")]
impl From<rdkafka::error::KafkaError> for Failure {
    fn from(error: rdkafka::error::KafkaError) -> Self {
        Self::server(format!("Kafka: {error}"))
    }
}

#[cfg(feature = "rabbitmq")]
impl From<lapin::Error> for Failure {
    fn from(error: lapin::Error) -> Self {
        Self::server(format!("RabbitMQ: {error}"))
    }
}
