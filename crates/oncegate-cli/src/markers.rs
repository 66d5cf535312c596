//! The store that is configured, as an operator looks into it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use oncegate::marker::{Operation, Verdict};
use oncegate::{Key, Listed, Redis, Sqlite, SqliteBrowse, Standing, Store};
use oncegate_config::Place;

use crate::config::Config;
use crate::failure::Failure;

/// How long an answer may take where nothing is configured: a person waits longer than a consumer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Where markers stand that others can look at.
#[derive(Clone)]
pub(crate) enum Markers {
    Redis(Redis),
    Sqlite(Sqlite),
}

/// Goes through all of them.
pub(crate) enum Browse {
    Redis(oncegate::Browse),
    Sqlite(SqliteBrowse),
}

impl Markers {
    /// Connected to when it is first used.
    ///
    /// # Errors
    /// No store is configured, or one that nobody else can look at, or a file that is not there.
    pub(crate) fn of(config: &Config) -> Result<Self, Failure> {
        match config.place()? {
            Some(Place::Sqlite(file)) => {
                // The store itself would make a new one.
                if !file.exists() {
                    let remedy = "no consumer has used it yet, or store.url names another file";
                    return Err(Failure::server(format!("there is no {}: {remedy}", file.display())));
                }
                Ok(Self::Sqlite(sqlite(config, file)))
            }
            Some(Place::Memory) => Err(Failure::usage(
                "store.url: memory: is the memory of the consumer's process; nobody else can look into it, and it is lost with that process",
            )),
            Some(Place::Redis) | None => Ok(Self::Redis(config.redis(Some(PATIENCE))?)),
        }
    }

    /// What stands under a key.
    pub(crate) async fn look(&self, key: &Key) -> Result<Standing, Failure> {
        Ok(match self {
            Self::Redis(redis) => redis.look_closely(key).await?,
            Self::Sqlite(sqlite) => {
                let (marker, expires_in) = sqlite.look_with_expiry(key).await?;
                Standing { marker, expires_in }
            }
        })
    }

    pub(crate) async fn browse(&self, page: usize) -> Result<Browse, Failure> {
        Ok(match self {
            Self::Redis(redis) => Browse::Redis(redis.browse(page).await?),
            Self::Sqlite(sqlite) => Browse::Sqlite(sqlite.browse(page)),
        })
    }

    /// Asks for one change.
    pub(crate) async fn apply(&self, operation: Operation) -> Result<Verdict, Failure> {
        let answers = match self {
            Self::Redis(redis) => redis.apply(&[operation]).await,
            Self::Sqlite(sqlite) => sqlite.apply(&[operation]).await,
        };
        Ok(answers.into_iter().next().ok_or_else(|| Failure::server("the store gave no answer"))??)
    }
}

impl Browse {
    /// The next page; `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<Listed>>, Failure> {
        Ok(match self {
            Self::Redis(browse) => browse.next().await?,
            Self::Sqlite(browse) => browse.next().await?.map(|page| {
                let listed = page.into_iter().map(|(name, standing)| {
                    let standing = standing.map(|(marker, left)| Standing { marker, expires_in: Some(left) });
                    Listed { name, standing }
                });
                listed.collect()
            }),
        })
    }
}

pub(crate) fn sqlite(config: &Config, file: &Path) -> Sqlite {
    Sqlite::file(file).timeout(config.time("store.timeout").unwrap_or(PATIENCE))
}

/// Where the audit of an SQLite file stands unless another file is configured: beside it.
pub(crate) fn audit_beside(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".audit.jsonl");
    name.into()
}
