//! The store that is configured.

use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "redis")]
use std::time::Duration;

use async_trait::async_trait;
use oncegate::marker::{Guarantee, Operation, Verdict};
#[cfg(feature = "redis")]
use oncegate::{Durability, Redis};
use oncegate::{MemoryStore, Persistence, Scope, Store, StoreError};

use crate::config::Config;
use crate::error::Error;

/// Which store is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// A Redis server, a primary that Sentinels know, or a Cluster.
    Redis,
    /// An SQLite file.
    Sqlite(&'a Path),
    /// The memory of the consumer's process.
    Memory,
}

/// A store, whichever is configured.
#[derive(Clone)]
pub struct AnyStore(Arc<dyn Store>);

impl AnyStore {
    pub(crate) fn of(store: impl Store + 'static) -> Self {
        Self(Arc::new(store))
    }
}

impl std::fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AnyStore")
    }
}

#[async_trait]
impl Store for AnyStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.0.apply(operations).await
    }

    fn described(&self) -> String {
        self.0.described()
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.0.preflight(guarantee).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.0.persistence().await
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        self.0.for_renewals()
    }

    fn parallel_applies(&self) -> usize {
        self.0.parallel_applies()
    }
}

/// A store that was left out when the program was built.
#[cfg(not(all(feature = "redis", feature = "sqlite")))]
fn left_out(what: &str, feature: &str) -> Error {
    Error::misconfigured(format!(
        "store.url: this program was built without {what}: add the feature `{feature}` of oncegate-config, or name another store"
    ))
}

impl Config {
    /// Which store is configured; `None` where none is.
    ///
    /// # Errors
    /// `store.url` names something else.
    pub fn place(&self) -> Result<Option<Place<'_>>, Error> {
        let Some(url) = self.text("store.url") else {
            let is_named = self.has("store.sentinels") || self.has("store.cluster");
            return Ok(is_named.then_some(Place::Redis));
        };
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        match (scheme, rest) {
            ("memory", "" | "//") => Ok(Some(Place::Memory)),
            ("sqlite", file) => {
                let file = file.strip_prefix("//").unwrap_or(file);
                if file.is_empty() {
                    return Err(Error::misconfigured(
                        "store.url: sqlite: names no file; write sqlite:markers.db, or sqlite:/var/lib/markers.db",
                    ));
                }
                Ok(Some(Place::Sqlite(Path::new(file))))
            }
            // What is wrong with a URL of Redis's is said by Redis's own client. A scheme holds no
            // secret, and another text may.
            ("redis" | "rediss" | "redis+unix", _) => Ok(Some(Place::Redis)),
            _ => Err(Error::misconfigured(
                "store.url names no store; write redis://HOST:PORT, rediss://HOST:PORT, sqlite:FILE or memory:",
            )),
        }
    }

    /// The store as a consumer uses it, connected to when it is first used.
    ///
    /// # Errors
    /// None is configured, or it was left out when the program was built.
    pub fn store(&self) -> Result<AnyStore, Error> {
        self.check_store()?;
        match self.place()?.ok_or_else(no_store)? {
            Place::Memory => Ok(AnyStore::of(MemoryStore::new())),
            #[cfg(feature = "redis")]
            Place::Redis => {
                let redis = self.redis(None)?;
                Ok(AnyStore::of(if self.allows_volatile_store() {
                    redis.allow_volatile_store()
                } else {
                    redis
                }))
            }
            #[cfg(not(feature = "redis"))]
            Place::Redis => Err(left_out("Redis", "redis")),
            #[cfg(feature = "sqlite")]
            Place::Sqlite(file) => {
                let sqlite = oncegate::Sqlite::file(file);
                Ok(AnyStore::of(match self.time("store.timeout") {
                    Some(timeout) => sqlite.timeout(timeout),
                    None => sqlite,
                }))
            }
            #[cfg(not(feature = "sqlite"))]
            Place::Sqlite(_) => Err(left_out("SQLite", "sqlite")),
        }
    }

    /// Redis as it is configured. Where `store.timeout` says nothing, a reply may take this long,
    /// or as long as the store has it by default.
    ///
    /// # Errors
    /// Another store is configured, or none.
    #[cfg(feature = "redis")]
    pub fn redis(&self, patience: Option<Duration>) -> Result<Redis, Error> {
        self.check_store()?;
        if self.place()?.ok_or_else(no_store)? != Place::Redis {
            return Err(Error::misconfigured(
                "store.url names another store than Redis",
            ));
        }
        let mut redis = match (
            self.text("store.url"),
            self.list("store.sentinels"),
            self.text("store.sentinel-name"),
        ) {
            (Some(url), ..) => Redis::at(url),
            (None, sentinels @ [_, ..], Some(name)) => Redis::sentinel(sentinels, name),
            _ => Redis::cluster(self.list("store.cluster")),
        };
        redis = redis.prefix(self.prefix()).durability(self.durability());
        if let Some(timeout) = self.time("store.timeout").or(patience) {
            redis = redis.timeout(timeout);
        }
        if let Some(path) = self.text("store.ca-certificate") {
            redis = redis.ca_certificate(path);
        }
        if let (Some(certificate), Some(key)) = (
            self.text("store.client-certificate"),
            self.text("store.client-key"),
        ) {
            redis = redis.client_certificate(certificate, key);
        }
        Ok(redis)
    }

    /// `store.replicas`, or the primary alone.
    #[cfg(feature = "redis")]
    pub fn durability(&self) -> Durability {
        match self
            .number("store.replicas")
            .and_then(|count| u32::try_from(count).ok())
        {
            None => Durability::Primary,
            Some(count) => {
                let timeout = self
                    .time("store.replicas-timeout")
                    .unwrap_or(Duration::from_millis(200));
                Durability::Replicas { count, timeout }
            }
        }
    }

    /// `store.prefix`, or its default.
    pub fn prefix(&self) -> &str {
        self.text("store.prefix").unwrap_or("processed:")
    }

    /// `store.scope`, or none.
    ///
    /// # Errors
    /// It cannot stand in a key.
    pub fn scope(&self) -> Result<Scope, Error> {
        match self.text("store.scope") {
            None => Ok(Scope::none()),
            Some(name) => Scope::named(name)
                .map_err(|error| Error::misconfigured(format!("store.scope: {error}"))),
        }
    }

    pub(crate) fn allows_volatile_store(&self) -> bool {
        self.text("store.forgetful") == Some("accepted")
    }
}

pub(crate) fn no_store() -> Error {
    Error::misconfigured(
        "no store: set store.url in oncegate.toml, or ONCEGATE_STORE_URL, say redis://localhost:6379",
    )
}
