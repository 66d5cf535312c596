//! The configured store, with the requests of operators.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "redis")]
use oncegate::Redis;
use oncegate::marker::{Operation, Verdict};
use oncegate::store::{ListedKey, MarkerWithExpiry};
use oncegate::{Key, Store, StoreError};
#[cfg(feature = "sqlite")]
use oncegate::{Sqlite, sqlite::SqliteBrowse};
use oncegate_config::StoreKind;
#[cfg(feature = "postgres")]
use oncegate_postgres::{Postgres, PostgresBrowse};

use crate::config::Config;
use crate::error::CliError;
use crate::marker::description;

/// The reply timeout if `store.timeout` is not set: an operator can wait longer than a consumer.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A store that another process can read.
#[derive(Clone)]
#[allow(
    clippy::large_enum_variant,
    reason = "a command has only one, so its size does not matter"
)]
pub(crate) enum MarkerStore {
    #[cfg(feature = "redis")]
    Redis(Redis),
    #[cfg(feature = "sqlite")]
    Sqlite(Sqlite),
    #[cfg(feature = "postgres")]
    Postgres(Postgres),
    /// For builds without any of these stores.
    #[allow(dead_code)]
    None(Infallible),
}

/// Reads all markers, page by page.
pub(crate) enum MarkerPages {
    #[cfg(feature = "redis")]
    Redis(oncegate::redis::Browse),
    #[cfg(feature = "sqlite")]
    Sqlite(SqliteBrowse),
    #[cfg(feature = "postgres")]
    Postgres(PostgresBrowse),
    /// For builds without any of these stores.
    #[allow(dead_code)]
    None(Infallible),
}

/// A value that this release cannot read as a marker.
pub(crate) enum UnreadableValue {
    /// This release does not write such a value; its description, or the error. From SQLite and
    /// PostgreSQL also a value of a newer release.
    Foreign(String),
    /// A newer release of oncegate wrote the value; the error, which names the versions.
    NewerRelease(String),
}

impl MarkerStore {
    /// Opens the configured store; the connection is made on first use.
    ///
    /// # Errors
    /// No store is configured, another process cannot read it, or its file does not exist.
    pub(crate) fn of(config: &Config) -> Result<Self, CliError> {
        match config.store_kind()? {
            #[cfg(feature = "sqlite")]
            Some(StoreKind::Sqlite(file)) => {
                // The store would create the file.
                if !file.exists() {
                    let remedy = "no consumer has used it yet, or store.url names another file";
                    return Err(CliError::server(format!(
                        "there is no {}: {remedy}",
                        file.display()
                    )));
                }
                Ok(Self::Sqlite(sqlite(config, file)))
            }
            Some(StoreKind::Memory) => Err(CliError::usage(
                "store.url: memory: is the memory of the consumer process; no other process can read it, and it is lost when that process ends",
            )),
            #[cfg(not(feature = "sqlite"))]
            Some(StoreKind::Sqlite(_)) => Err(CliError::feature_missing("SQLite", "sqlite")),
            #[cfg(feature = "postgres")]
            Some(StoreKind::Postgres) => Ok(Self::Postgres(config.postgres(Some(REPLY_TIMEOUT))?)),
            #[cfg(not(feature = "postgres"))]
            Some(StoreKind::Postgres) => Err(CliError::feature_missing("PostgreSQL", "postgres")),
            #[cfg(feature = "redis")]
            Some(StoreKind::Redis) | None => Ok(Self::Redis(config.redis(Some(REPLY_TIMEOUT))?)),
            #[cfg(not(feature = "redis"))]
            Some(StoreKind::Redis) => Err(CliError::feature_missing("Redis", "redis")),
            #[cfg(not(feature = "redis"))]
            None => Err(config
                .store()
                .err()
                .map_or_else(|| CliError::usage("no store"), CliError::from)),
            Some(_) => Err(CliError::unknown_store()),
        }
    }

    /// Reads the marker of a key.
    ///
    /// # Errors
    /// The store failed, or the value is no marker; then the error describes it, with the remedy.
    pub(crate) async fn read_marker(
        &self,
        config: &Config,
        key: &Key,
    ) -> Result<MarkerWithExpiry, CliError> {
        self.read_marker_or_describe(key).await?.map_err(|value| {
            CliError::unreadable_marker(description::foreign_value_text(config, key, &value))
        })
    }

    /// Reads the marker of a key, or describes the value if it is not a marker.
    ///
    /// # Errors
    /// The store failed.
    pub(crate) async fn read_marker_or_describe(
        &self,
        key: &Key,
    ) -> Result<Result<MarkerWithExpiry, UnreadableValue>, CliError> {
        let (error, value): (StoreError, Option<UnreadableValue>) = match self {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => match redis.read_marker_with_expiry(key).await {
                Err(error @ StoreError::UnreadableMarker(_)) => {
                    // If the user may not run TYPE, the description is the text of the error.
                    let value = redis.foreign_value(key).await.ok().map(|value| {
                        if value.record_version.is_some() {
                            return UnreadableValue::NewerRelease(error.to_string());
                        }
                        let unit = if value.kind == "string" {
                            "bytes"
                        } else {
                            "elements"
                        };
                        UnreadableValue::Foreign(match value.length {
                            Some(length) => format!("a {} of {length} {unit}", value.kind),
                            None => format!("a {}", value.kind),
                        })
                    });
                    (error, value)
                }
                read => return Ok(Ok(read?)),
            },
            #[cfg(feature = "sqlite")]
            Self::Sqlite(sqlite) => match sqlite.read_marker_with_expiry(key).await {
                Err(error @ StoreError::UnreadableMarker(_)) => (error, None),
                read => {
                    let (marker, expires_in) = read?;
                    return Ok(Ok(MarkerWithExpiry::new(marker, expires_in)));
                }
            },
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => match postgres.read_marker_with_expiry(key).await {
                Err(error @ StoreError::UnreadableMarker(_)) => (error, None),
                read => return Ok(Ok(read?)),
            },
            Self::None(never) => match *never {},
        };
        Ok(Err(value.unwrap_or_else(|| {
            UnreadableValue::Foreign(error.to_string())
        })))
    }

    /// Lists all markers, at most `page` keys a page.
    pub(crate) async fn browse(&self, page: usize) -> Result<MarkerPages, CliError> {
        Ok(match self {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => MarkerPages::Redis(redis.browse(page).await?),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(sqlite) => MarkerPages::Sqlite(sqlite.browse(page)),
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => MarkerPages::Postgres(postgres.browse(page)),
            Self::None(never) => match *never {},
        })
    }

    /// Applies one operation.
    pub(crate) async fn apply(&self, operation: Operation) -> Result<Verdict, CliError> {
        let answers: Vec<Result<Verdict, StoreError>> = match self {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => redis.apply(&[operation]).await,
            #[cfg(feature = "sqlite")]
            Self::Sqlite(sqlite) => sqlite.apply(&[operation]).await,
            #[cfg(feature = "postgres")]
            Self::Postgres(postgres) => postgres.apply(&[operation]).await,
            Self::None(never) => match *never {},
        };
        Ok(answers
            .into_iter()
            .next()
            .ok_or_else(|| CliError::server("the store gave no answer"))??)
    }
}

impl MarkerPages {
    /// The next page, or `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<ListedKey>>, CliError> {
        Ok(match self {
            #[cfg(feature = "redis")]
            Self::Redis(browse) => browse.next().await?,
            #[cfg(feature = "sqlite")]
            Self::Sqlite(browse) => browse.next().await?.map(|page| {
                let listed = page.into_iter().map(|(name, marker)| {
                    let marker =
                        marker.map(|(marker, left)| MarkerWithExpiry::new(marker, Some(left)));
                    ListedKey::new(name, marker)
                });
                listed.collect()
            }),
            #[cfg(feature = "postgres")]
            Self::Postgres(browse) => browse.next().await?,
            Self::None(never) => match *never {},
        })
    }
}

/// The SQLite store of this file, with the configured timeout.
#[cfg(feature = "sqlite")]
pub(crate) fn sqlite(config: &Config, file: &Path) -> Sqlite {
    Sqlite::file(file).timeout(config.time("store.timeout").unwrap_or(REPLY_TIMEOUT))
}

/// The default audit file of an SQLite store: `<file>.audit.jsonl`.
pub(crate) fn sqlite_audit_file(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".audit.jsonl");
    name.into()
}
