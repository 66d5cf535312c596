//! What was configured.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oncegate::{Guarantee, defaults};

use crate::settings::{SETTINGS, Setting, find};
use crate::value::{Value, time};

/// What a file and variables say: each value is of the kind that its key wants.
///
/// [`Config::load`] reads it, [`Config::check`] says whether keys contradict each other. `Debug`
/// shows keys and where they come from, and no value.
#[derive(Clone, Default)]
pub struct Config {
    /// By key.
    pub(crate) set: BTreeMap<&'static str, Set>,
    /// The file, where there is one.
    pub(crate) file: Option<PathBuf>,
}

/// One key that was set.
#[derive(Clone, Debug)]
pub struct Set {
    /// Its setting.
    pub setting: &'static Setting,
    /// Its value, which may be a secret.
    pub value: Value,
    /// The file or the variable that it comes from.
    pub origin: String,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map()
            .entries(self.set.iter().map(|(key, set)| (key, &set.origin)))
            .finish()
    }
}

impl Config {
    /// The file that was read, where there is one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// All that was set, in the order of [`SETTINGS`].
    pub fn set(&self) -> impl Iterator<Item = &Set> {
        SETTINGS
            .iter()
            .filter_map(|setting| self.set.get(setting.key))
    }

    /// Whether a key was set.
    pub fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// A text; `None` where it was not set.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number; `None` where it was not set.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            Value::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// A time; `None` where it was not set.
    pub fn time(&self, key: &str) -> Option<Duration> {
        // It was read before it was taken in.
        time(self.text(key)?).ok()
    }

    /// Several texts; none where they were not set.
    pub fn list(&self, key: &str) -> &[String] {
        match self.value(key) {
            Some(Value::List(list)) => list,
            _ => &[],
        }
    }

    /// Names and texts; none where they were not set.
    pub fn names(&self, key: &str) -> &[(String, String)] {
        match self.value(key) {
            Some(Value::Names(names)) => names,
            _ => &[],
        }
    }

    fn value(&self, key: &str) -> Option<&Value> {
        debug_assert!(find(key).is_some(), "{key} is no setting");
        self.set.get(key).map(|set| &set.value)
    }

    /// `gate.guarantee`, or its default.
    pub fn guarantee(&self) -> Guarantee {
        match self.text("gate.guarantee") {
            Some("at-most-once") => Guarantee::AtMostOnce,
            Some("bare") => Guarantee::Bare,
            _ => Guarantee::EffectivelyOnce,
        }
    }

    /// `gate.dedup-window`, or its default.
    pub fn window(&self) -> Duration {
        self.time("gate.dedup-window").unwrap_or(defaults::WINDOW)
    }

    /// `gate.max-age`, or half the window.
    pub fn max_age(&self) -> Duration {
        self.time("gate.max-age").unwrap_or(self.window() / 2)
    }

    /// `gate.lease`, or its default.
    pub fn lease(&self) -> Duration {
        self.time("gate.lease").unwrap_or(defaults::LEASE)
    }

    /// `gate.handler-timeout`, or its default.
    pub fn handler_timeout(&self) -> Duration {
        self.time("gate.handler-timeout")
            .unwrap_or(defaults::HANDLER_TIMEOUT)
    }

    /// `gate.max-in-flight`, or its default.
    pub fn in_flight(&self) -> u64 {
        self.number("gate.max-in-flight")
            .unwrap_or(defaults::IN_FLIGHT as u64)
    }

    /// `rabbitmq.consumer-timeout`, or RabbitMQ's default.
    pub fn consumer_timeout(&self) -> Duration {
        self.time("rabbitmq.consumer-timeout")
            .unwrap_or(Duration::from_secs(1_800))
    }
}
