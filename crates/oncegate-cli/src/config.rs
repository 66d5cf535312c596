//! Configuration values as commands use them.

use std::time::Duration;

use oncegate::marker::{Fingerprint, Terms};
use oncegate::{Guarantee, Key, MessageId};
pub(crate) use oncegate_config::Config;

use crate::error::CliError;

/// A duration on the command line, such as `500ms`, `30s`, `5m`, `24h` or `7d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeArg(pub(crate) Duration);

impl std::str::FromStr for TimeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        oncegate_config::time(text).map(Self)
    }
}

/// Guarantee, lease, window and fingerprint of a marker that an operator changes. Replaces
/// `Guarantee::Bare`, which does not support such changes, by effectively once.
pub(crate) fn terms(config: &Config, fingerprint: Option<Fingerprint>) -> Terms {
    let guarantee = if config.guarantee() == Guarantee::Bare {
        Guarantee::EffectivelyOnce
    } else {
        config.guarantee()
    };
    Terms {
        guarantee,
        lease: config.lease(),
        window: config.dedup_window(),
        fingerprint,
    }
}

/// The dedup window as text, with ", the default" if it is not configured.
pub(crate) fn window_description(config: &Config) -> String {
    let window = crate::output::duration_text(config.dedup_window());
    if config.has("gate.dedup-window") {
        window
    } else {
        format!("{window}, the default")
    }
}

/// The store key of an id.
pub(crate) fn key(config: &Config, id: &MessageId) -> Result<Key, CliError> {
    Ok(config.scope()?.key(id))
}

/// An id from the command line: as a producer wrote it, or as keys and logs show it (a long id is
/// hashed there).
///
/// # Errors
/// The id is empty.
pub(crate) fn id(config: &Config, text: &str) -> Result<MessageId, CliError> {
    config
        .message_id(text)
        .ok_or_else(|| CliError::usage("the id is empty"))
}
