//! What commands make of the configuration.

use std::time::Duration;

use oncegate::marker::{Fingerprint, Terms};
use oncegate::{Guarantee, Key, MessageId};
pub(crate) use oncegate_config::Config;

use crate::failure::Failure;

/// A time on the command line, such as `500ms`, `30s`, `5m`, `24h` or `7d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        oncegate_config::time(text).map(Self)
    }
}

/// The terms on which an operator writes. Where a consumer is bare its markers are done or not
/// there, and are compared as others are.
pub(crate) fn terms(config: &Config, fingerprint: Option<Fingerprint>) -> Terms {
    let guarantee = if config.guarantee() == Guarantee::Bare {
        Guarantee::EffectivelyOnce
    } else {
        config.guarantee()
    };
    Terms {
        guarantee,
        lease: config.lease(),
        window: config.window(),
        fingerprint,
    }
}

/// The window by which acts go, and that nobody said which, where nobody did.
pub(crate) fn window_told(config: &Config) -> String {
    let window = crate::say::span(config.window());
    if config.has("gate.dedup-window") {
        window
    } else {
        format!("{window}, the default")
    }
}

/// The key of an id.
pub(crate) fn key(config: &Config, id: &MessageId) -> Result<Key, Failure> {
    Ok(config.scope()?.key(id))
}

/// An id as a person gives it: as a producer wrote it, or as it stands in keys and logs.
pub(crate) fn id(config: &Config, text: &str) -> Result<MessageId, Failure> {
    config
        .message_id(text)
        .ok_or_else(|| Failure::usage("an id is not empty"))
}
