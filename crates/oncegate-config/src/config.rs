//! The configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use oncegate::{Guarantee, defaults};

use crate::settings::{SETTINGS, Setting, find};
use crate::value::{SettingValue, time};

/// The settings from a file and from environment variables, each with a value of its kind.
///
/// [`Config::load`] reads it, [`Config::check`] validates it. `Debug` shows keys and their origin,
/// and no values.
#[derive(Clone, Default)]
pub struct Config {
    /// The values that are set, by key.
    pub(crate) set: BTreeMap<&'static str, ConfiguredValue>,
    /// The file that was read, if there is one.
    pub(crate) file: Option<PathBuf>,
    /// The sections of the file, including empty ones.
    pub(crate) sections: BTreeSet<String>,
}

/// A setting with its configured value.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConfiguredValue {
    /// The setting.
    pub setting: &'static Setting,
    /// The value, which may be a secret.
    pub value: SettingValue,
    /// The file or variable that it comes from.
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
    /// The file that was read, if there is one.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Whether the file has this section, such as `rabbitmq`, even if the section is empty.
    pub fn has_section(&self, section: &str) -> bool {
        self.sections.contains(section)
    }

    /// All keys that are set, in the order of [`SETTINGS`].
    pub fn configured_values(&self) -> impl Iterator<Item = &ConfiguredValue> {
        SETTINGS
            .iter()
            .filter_map(|setting| self.set.get(setting.key))
    }

    /// Whether a key is set.
    pub fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// The value of a key of the kind `Text`, `Time` or `Choice`; `None` if it is not set.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            SettingValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value of a key of the kind `Number`; `None` if it is not set.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            SettingValue::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The value of a key of the kind `Time`; `None` if it is not set.
    pub fn time(&self, key: &str) -> Option<Duration> {
        // Validated when it was read.
        time(self.text(key)?).ok()
    }

    /// The value of a key of the kind `List`; empty if it is not set.
    pub fn list(&self, key: &str) -> &[String] {
        match self.value(key) {
            Some(SettingValue::List(list)) => list,
            _ => &[],
        }
    }

    /// The value of a key of the kind `Pairs`, as pairs of name and text; empty if it is not set.
    pub fn pairs(&self, key: &str) -> &[(String, String)] {
        match self.value(key) {
            Some(SettingValue::Pairs(pairs)) => pairs,
            _ => &[],
        }
    }

    fn value(&self, key: &str) -> Option<&SettingValue> {
        debug_assert!(find(key).is_some(), "{key} is not a setting");
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
    pub fn dedup_window(&self) -> Duration {
        self.time("gate.dedup-window")
            .unwrap_or(defaults::DEDUP_WINDOW)
    }

    /// `gate.max-age`, or half the window.
    pub fn max_age(&self) -> Duration {
        self.time("gate.max-age").unwrap_or(self.dedup_window() / 2)
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
    pub fn max_in_flight(&self) -> u64 {
        self.number("gate.max-in-flight")
            .unwrap_or(defaults::MAX_IN_FLIGHT as u64)
    }

    /// `rabbitmq.consumer-timeout`, or RabbitMQ's default.
    pub fn consumer_timeout(&self) -> Duration {
        self.time("rabbitmq.consumer-timeout")
            .unwrap_or(Duration::from_secs(1_800))
    }
}
