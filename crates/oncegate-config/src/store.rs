//! Builds the configured store.

use std::path::Path;
use std::sync::Arc;
#[cfg(any(feature = "redis", feature = "postgres"))]
use std::time::Duration;

use async_trait::async_trait;
use oncegate::marker::{Guarantee, Operation, Verdict};
#[cfg(feature = "redis")]
use oncegate::{Durability, Redis};
use oncegate::{MemoryStore, Persistence, ResultStore, Scope, Store, StoreError};
#[cfg(feature = "postgres")]
use oncegate_postgres::Postgres;

use crate::config::Config;
use crate::error::Error;

/// The kind of the configured store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreKind<'a> {
    /// A Redis server, a primary that Sentinel monitors, or a Cluster.
    Redis,
    /// An SQLite file.
    Sqlite(&'a Path),
    /// A PostgreSQL database.
    Postgres,
    /// The memory of the consumer process.
    Memory,
}

/// The configured store, of any kind.
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

    fn results(&self) -> Option<&dyn ResultStore> {
        self.0.results()
    }
}

/// The error for a store that this build does not include.
#[cfg(not(all(feature = "redis", feature = "sqlite", feature = "postgres")))]
fn feature_missing(what: &str, feature: &str) -> Error {
    Error::misconfigured(format!(
        "store.url: this program was built without {what}; add the feature `{feature}` of oncegate-config, or configure another store"
    ))
}

impl Config {
    /// The kind of the configured store; `None` if no store is configured.
    ///
    /// # Errors
    /// `store.url` is not valid.
    pub fn store_kind(&self) -> Result<Option<StoreKind<'_>>, Error> {
        let Some(url) = self.text("store.url") else {
            let is_redis = self.has("store.sentinels") || self.has("store.cluster");
            return Ok(is_redis.then_some(StoreKind::Redis));
        };
        let (scheme, location) = url.split_once(':').unwrap_or((url, ""));
        match (scheme, location) {
            ("memory", "" | "//") => Ok(Some(StoreKind::Memory)),
            ("sqlite", file) => {
                let file = file.strip_prefix("//").unwrap_or(file);
                if file.is_empty() {
                    return Err(Error::misconfigured(
                        "store.url: sqlite: has no file; write sqlite:markers.db, or sqlite:/var/lib/markers.db",
                    ));
                }
                // SQLite would open a database in memory, and each process would have its own.
                if file == ":memory:" {
                    return Err(Error::misconfigured(
                        "store.url: sqlite::memory: is no file; write sqlite:FILE, or memory: for a test",
                    ));
                }
                Ok(Some(StoreKind::Sqlite(Path::new(file))))
            }
            // Redis and PostgreSQL check the rest of their URLs themselves.
            ("redis" | "rediss" | "redis+unix", _) => Ok(Some(StoreKind::Redis)),
            ("postgres" | "postgresql", _) => Ok(Some(StoreKind::Postgres)),
            // The error does not show the URL, which may contain a password.
            _ => Err(Error::misconfigured(
                "store.url is not valid; write redis://HOST:PORT, rediss://HOST:PORT, postgres://HOST/DATABASE, sqlite:FILE or memory:",
            )),
        }
    }

    /// Creates the store for a consumer. The store connects on first use.
    ///
    /// # Errors
    /// No store is configured, or this build does not include it.
    pub fn store(&self) -> Result<AnyStore, Error> {
        self.check_store()?;
        match self.store_kind()?.ok_or_else(no_store)? {
            StoreKind::Memory => Ok(AnyStore::of(MemoryStore::new())),
            #[cfg(feature = "redis")]
            StoreKind::Redis => {
                let redis = self.redis(None)?;
                Ok(AnyStore::of(if self.allows_volatile_store() {
                    redis.allow_volatile_store()
                } else {
                    redis
                }))
            }
            #[cfg(not(feature = "redis"))]
            StoreKind::Redis => Err(feature_missing("Redis", "redis")),
            #[cfg(feature = "sqlite")]
            StoreKind::Sqlite(file) => {
                let sqlite = oncegate::Sqlite::file(file);
                Ok(AnyStore::of(match self.time("store.timeout") {
                    Some(timeout) => sqlite.timeout(timeout),
                    None => sqlite,
                }))
            }
            #[cfg(not(feature = "sqlite"))]
            StoreKind::Sqlite(_) => Err(feature_missing("SQLite", "sqlite")),
            #[cfg(feature = "postgres")]
            StoreKind::Postgres => Ok(AnyStore::of(self.postgres(None)?)),
            #[cfg(not(feature = "postgres"))]
            StoreKind::Postgres => Err(feature_missing("PostgreSQL", "postgres")),
        }
    }

    /// Creates the PostgreSQL store. Without `store.timeout` the timeout is `default_timeout`;
    /// without both it is the default of [`Postgres`].
    ///
    /// # Errors
    /// Another store is configured, or none.
    #[cfg(feature = "postgres")]
    pub fn postgres(&self, default_timeout: Option<Duration>) -> Result<Postgres, Error> {
        self.check_store()?;
        let url = match (self.text("store.url"), self.store_kind()?) {
            (Some(url), Some(StoreKind::Postgres)) => url,
            _ => {
                return Err(Error::misconfigured("store.url does not name PostgreSQL"));
            }
        };
        let postgres = Postgres::url(url);
        Ok(match self.time("store.timeout").or(default_timeout) {
            Some(timeout) => postgres.timeout(timeout),
            None => postgres,
        })
    }

    /// Creates the Redis store. Without `store.timeout` the timeout is `default_timeout`; without
    /// both it is the default of [`Redis`].
    ///
    /// # Errors
    /// Another store is configured, or none.
    #[cfg(feature = "redis")]
    pub fn redis(&self, default_timeout: Option<Duration>) -> Result<Redis, Error> {
        self.check_store()?;
        if self.store_kind()?.ok_or_else(no_store)? != StoreKind::Redis {
            return Err(Error::misconfigured("store.url does not name Redis"));
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
        if let Some(timeout) = self.time("store.timeout").or(default_timeout) {
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

    /// `store.replicas` and its timeout; by default only the primary acknowledges a claim.
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

    /// `store.scope`, or no scope.
    ///
    /// # Errors
    /// The scope has a character that is invalid in a key, or is too long.
    pub fn scope(&self) -> Result<Scope, Error> {
        match self.text("store.scope") {
            None => Ok(Scope::none()),
            Some(name) => Scope::named(name)
                .map_err(|error| Error::misconfigured(format!("store.scope: {error}"))),
        }
    }

    pub(crate) fn allows_volatile_store(&self) -> bool {
        self.text("store.volatile") == Some("accepted")
    }
}

pub(crate) fn no_store() -> Error {
    Error::misconfigured(
        "no store: set store.url in oncegate.toml, or ONCEGATE_STORE_URL, for example redis://localhost:6379",
    )
}
