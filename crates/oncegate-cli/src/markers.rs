//! The store that is configured, as an operator looks into it.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "redis")]
use oncegate::Redis;
use oncegate::marker::{Operation, Verdict};
use oncegate::{Key, Listed, Standing, Store};
#[cfg(feature = "sqlite")]
use oncegate::{Sqlite, SqliteBrowse};
use oncegate_config::Place;

use crate::config::Config;
use crate::failure::Failure;

/// How long an answer may take where nothing is configured: a person waits longer than a consumer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Where markers stand that others can look at.
#[derive(Clone)]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one of them, whatever the build holds"
)]
pub(crate) enum Markers {
    #[cfg(feature = "redis")]
    Redis(Redis),
    #[cfg(feature = "sqlite")]
    Sqlite(Sqlite),
    /// In a build with neither.
    #[allow(dead_code)]
    None(Infallible),
}

/// Goes through all of them.
pub(crate) enum Browse {
    #[cfg(feature = "redis")]
    Redis(oncegate::Browse),
    #[cfg(feature = "sqlite")]
    Sqlite(SqliteBrowse),
    /// In a build with neither.
    #[allow(dead_code)]
    None(Infallible),
}

impl Markers {
    /// Connected to when it is first used.
    ///
    /// # Errors
    /// No store is configured, or one that nobody else can look at, or a file that is not there.
    pub(crate) fn of(config: &Config) -> Result<Self, Failure> {
        match config.place()? {
            #[cfg(feature = "sqlite")]
            Some(Place::Sqlite(file)) => {
                // The store itself would make a new one.
                if !file.exists() {
                    let remedy = "no consumer has used it yet, or store.url names another file";
                    return Err(Failure::server(format!(
                        "there is no {}: {remedy}",
                        file.display()
                    )));
                }
                Ok(Self::Sqlite(sqlite(config, file)))
            }
            Some(Place::Memory) => Err(Failure::usage(
                "store.url: memory: is the memory of the consumer's process; nobody else can look into it, and it is lost with that process",
            )),
            #[cfg(not(feature = "sqlite"))]
            Some(Place::Sqlite(_)) => Err(Failure::left_out("SQLite", "sqlite")),
            #[cfg(feature = "redis")]
            Some(Place::Redis) | None => Ok(Self::Redis(config.redis(Some(PATIENCE))?)),
            #[cfg(not(feature = "redis"))]
            Some(Place::Redis) => Err(Failure::left_out("Redis", "redis")),
            #[cfg(not(feature = "redis"))]
            None => Err(config
                .store()
                .err()
                .map_or_else(|| Failure::usage("no store"), Failure::from)),
        }
    }

    /// What stands under a key.
    pub(crate) async fn look(&self, key: &Key) -> Result<Standing, Failure> {
        Ok(match self {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => redis.look_with_expiry(key).await?,
            #[cfg(feature = "sqlite")]
            Self::Sqlite(sqlite) => {
                let (marker, expires_in) = sqlite.look_with_expiry(key).await?;
                Standing { marker, expires_in }
            }
            Self::None(never) => match *never {},
        })
    }

    pub(crate) async fn browse(&self, page: usize) -> Result<Browse, Failure> {
        Ok(match self {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => Browse::Redis(redis.browse(page).await?),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(sqlite) => Browse::Sqlite(sqlite.browse(page)),
            Self::None(never) => match *never {},
        })
    }

    /// Asks for one change.
    pub(crate) async fn apply(&self, operation: Operation) -> Result<Verdict, Failure> {
        let answers = match self {
            #[cfg(feature = "redis")]
            Self::Redis(redis) => redis.apply(&[operation]).await,
            #[cfg(feature = "sqlite")]
            Self::Sqlite(sqlite) => sqlite.apply(&[operation]).await,
            Self::None(never) => match *never {},
        };
        Ok(answers
            .into_iter()
            .next()
            .ok_or_else(|| Failure::server("the store gave no answer"))??)
    }
}

impl Browse {
    /// The next page; `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Listed>>, Failure> {
        Ok(match self {
            #[cfg(feature = "redis")]
            Self::Redis(browse) => browse.next().await?,
            #[cfg(feature = "sqlite")]
            Self::Sqlite(browse) => browse.next().await?.map(|page| {
                let listed = page.into_iter().map(|(name, standing)| {
                    let standing = standing.map(|(marker, left)| Standing {
                        marker,
                        expires_in: Some(left),
                    });
                    Listed { name, standing }
                });
                listed.collect()
            }),
            Self::None(never) => match *never {},
        })
    }
}

#[cfg(feature = "sqlite")]
pub(crate) fn sqlite(config: &Config, file: &Path) -> Sqlite {
    Sqlite::file(file).timeout(config.time("store.timeout").unwrap_or(PATIENCE))
}

/// Where the audit of an SQLite file stands unless another file is configured: beside it.
pub(crate) fn audit_beside(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".audit.jsonl");
    name.into()
}
