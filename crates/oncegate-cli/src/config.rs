//! The configuration: one file, variables, and what the library makes of them.

pub(crate) mod read;
pub(crate) mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use oncegate::marker::{Fingerprint, Terms};
use oncegate::{Durability, Guarantee, IdSource, Key, MessageId, Redis, Scope, defaults};
use serde::Deserialize;

use crate::failure::Failure;

/// What was configured.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) store: Store,
    pub(crate) gate: Gate,
    pub(crate) kafka: Kafka,
    pub(crate) rabbitmq: RabbitMq,
    pub(crate) audit: Audit,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Store {
    url: Option<Secret>,
    sentinels: Vec<Secret>,
    sentinel_name: Option<String>,
    cluster: Vec<Secret>,
    pub(crate) prefix: Option<String>,
    pub(crate) scope: Option<String>,
    timeout: Option<Span>,
    pub(crate) replicas: Option<u32>,
    replicas_timeout: Option<Span>,
    ca_certificate: Option<PathBuf>,
    client_certificate: Option<PathBuf>,
    client_key: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Gate {
    guarantee: Promise,
    window: Option<Span>,
    max_age: Option<Span>,
    lease: Option<Span>,
    handler_timeout: Option<Span>,
    in_flight: Option<u64>,
    id: Option<String>,
    pub(crate) rate: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Kafka {
    pub(crate) brokers: Option<String>,
    pub(crate) topic: Option<String>,
    pub(crate) dead_letters: Option<String>,
    pub(crate) in_doubt: Option<String>,
    pub(crate) password: Option<Secret>,
    pub(crate) properties: BTreeMap<String, Secret>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RabbitMq {
    pub(crate) url: Option<Secret>,
    pub(crate) queue: Option<String>,
    pub(crate) dead_letters: Option<String>,
    pub(crate) in_doubt: Option<String>,
    consumer_timeout: Option<Span>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Audit {
    pub(crate) file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Promise {
    AtMostOnce,
    #[default]
    EffectivelyOnce,
    Bare,
}

/// A text that is not shown.
#[derive(Clone, Deserialize)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn get(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// A time such as `500ms`, `30s`, `5m`, `24h` or `7d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Span(pub(crate) Duration);

impl TryFrom<String> for Span {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl std::str::FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no time; write a whole number and its unit: 500ms, 30s, 5m, 24h or 7d");
        let unit = text.find(|letter: char| !letter.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = text[..unit].parse().map_err(|_| wrong())?;
        let unit = match text[unit..].trim() {
            "ms" => return Ok(Self(Duration::from_millis(number))),
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3_600,
            "d" => 86_400,
            _ => return Err(wrong()),
        };
        Ok(Self(Duration::from_secs(number.checked_mul(unit).ok_or_else(wrong)?)))
    }
}

impl Config {
    /// Makes sense of what was read.
    ///
    /// # Errors
    /// A value that means nothing.
    pub(crate) fn of(read: &read::Read) -> Result<Self, Failure> {
        Self::deserialize(read.table.clone()).map_err(|error| {
            let said = error.to_string();
            let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            Failure::usage(format!("the configuration: {}", lines.join(" ")))
        })
    }

    pub(crate) fn guarantee(&self) -> Guarantee {
        match self.gate.guarantee {
            Promise::AtMostOnce => Guarantee::AtMostOnce,
            Promise::EffectivelyOnce => Guarantee::EffectivelyOnce,
            Promise::Bare => Guarantee::Bare,
        }
    }

    pub(crate) fn window(&self) -> Duration {
        self.gate.window.map_or(defaults::WINDOW, |it| it.0)
    }

    pub(crate) fn max_age(&self) -> Duration {
        self.gate.max_age.map_or(self.window() / 2, |it| it.0)
    }

    pub(crate) fn lease(&self) -> Duration {
        self.gate.lease.map_or(defaults::LEASE, |it| it.0)
    }

    pub(crate) fn handler_timeout(&self) -> Duration {
        self.gate.handler_timeout.map_or(defaults::HANDLER_TIMEOUT, |it| it.0)
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.gate.in_flight.unwrap_or(defaults::IN_FLIGHT as u64)
    }

    pub(crate) fn consumer_timeout(&self) -> Duration {
        self.rabbitmq.consumer_timeout.map_or(Duration::from_secs(1_800), |it| it.0)
    }

    pub(crate) fn durability(&self) -> Durability {
        match self.store.replicas {
            None => Durability::Primary,
            Some(count) => {
                let timeout = self.store.replicas_timeout.map_or(Duration::from_millis(200), |it| it.0);
                Durability::Replicas { count, timeout }
            }
        }
    }

    /// The terms on which an operator writes. Where a consumer is bare its markers are done or not there, and are compared as
    /// others are.
    pub(crate) fn terms(&self, fingerprint: Option<Fingerprint>) -> Terms {
        let guarantee = if self.guarantee() == Guarantee::Bare { Guarantee::EffectivelyOnce } else { self.guarantee() };
        Terms { guarantee, lease: self.lease(), window: self.window(), fingerprint }
    }

    /// The store, connected to when it is first used.
    ///
    /// # Errors
    /// None, or more than one, is configured.
    pub(crate) fn redis(&self) -> Result<Redis, Failure> {
        let store = &self.store;
        let texts = |secrets: &[Secret]| secrets.iter().map(|it| it.get().to_owned()).collect::<Vec<String>>();
        let mut redis = match (&store.url, &store.sentinels[..], &store.cluster[..]) {
            (Some(url), [], []) => Redis::at(url.get()),
            (None, sentinels @ [_, ..], []) => {
                let name = store.sentinel_name.as_deref();
                Redis::sentinel(texts(sentinels), name.ok_or_else(|| Failure::usage("store.sentinels needs store.sentinel-name"))?)
            }
            (None, [], cluster @ [_, ..]) => Redis::cluster(texts(cluster)),
            (None, [], []) => {
                return Err(Failure::usage("no store: set store.url in oncegate.toml, or ONCEGATE_STORE_URL, say redis://localhost:6379"));
            }
            _ => return Err(Failure::usage("set one of store.url, store.sentinels and store.cluster")),
        };
        redis = redis.prefix(store.prefix.as_deref().unwrap_or("processed:"));
        // A person waits longer than a consumer.
        redis = redis.timeout(store.timeout.map_or(Duration::from_secs(5), |it| it.0)).durability(self.durability());
        if let Some(path) = &store.ca_certificate {
            redis = redis.ca_certificate(path);
        }
        match (&store.client_certificate, &store.client_key) {
            (Some(certificate), Some(key)) => redis = redis.client_certificate(certificate, key),
            (None, None) => {}
            _ => return Err(Failure::usage("store.client-certificate and store.client-key need each other")),
        }
        Ok(redis)
    }

    /// Whether one server is named, rather than Sentinels or a Cluster.
    pub(crate) fn store_is_one_server(&self) -> bool {
        self.store.url.is_some()
    }

    pub(crate) fn has_store(&self) -> bool {
        self.store.url.is_some() || !self.store.sentinels.is_empty() || !self.store.cluster.is_empty()
    }

    pub(crate) fn scope(&self) -> Result<Scope, Failure> {
        match &self.store.scope {
            None => Ok(Scope::none()),
            Some(name) => Scope::named(name).map_err(|error| Failure::usage(format!("store.scope: {error}"))),
        }
    }

    pub(crate) fn key(&self, id: &MessageId) -> Result<Key, Failure> {
        Ok(self.scope()?.key(id))
    }

    /// Where ids are read, if it is said.
    pub(crate) fn id_source(&self) -> Result<Option<IdSource>, Failure> {
        let Some(text) = &self.gate.id else { return Ok(None) };
        let (kind, name) = text.split_once(' ').map_or((text.as_str(), ""), |(kind, name)| (kind, name.trim()));
        Ok(Some(match (kind, name) {
            ("header", name) if !name.is_empty() => IdSource::header(name),
            ("json", pointer) if pointer.starts_with('/') => IdSource::json_pointer(pointer),
            ("message-id", "") => IdSource::message_id(),
            ("key", "") => IdSource::key(),
            ("body-hash", "") => IdSource::body_hash(),
            ("position", "") => IdSource::position(),
            _ => {
                return Err(Failure::usage(format!(
                    "gate.id: {text:?} means nothing; write header NAME, json /POINTER, message-id, key, body-hash or position"
                )));
            }
        }))
    }
}

/// An id as a person gives it: as a producer wrote it, or as it stands in keys and logs.
pub(crate) fn id(text: &str) -> Result<MessageId, Failure> {
    MessageId::stored(text).or_else(|| MessageId::new(text)).ok_or_else(|| Failure::usage("an id is not empty"))
}
