//! Why a consumer did not start, or ended.

use crate::id::BadScope;
use crate::source::SourceError;
use crate::store::StoreError;

/// Why a consumer did not start, or ended. The text says what to do.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is wrong.
    #[error("{setting}: {problem}; {remedy}")]
    Misconfigured {
        /// The setting.
        setting: &'static str,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: &'static str,
    },
    /// The scope is empty, longer than 100 bytes, or has characters that are not allowed in a key.
    #[error(transparent)]
    Scope(#[from] BadScope),
    /// The guarantee is at most once, or there is an inbox, and the store may lose data in a crash.
    #[error(
        "store: at most once and an inbox need a store that keeps its data after a crash, and {0}; change that, or accept the loss with `allow_volatile_store()`"
    )]
    VolatileStore(String),
    /// The store cannot be used with its configuration.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The thread that renews leases ended. Without it leases end while handlers run.
    #[error(
        "the thread that renews leases ended, so the consumer cannot continue; restart it, and report the log lines before this one"
    )]
    Renewals,
    /// The source failed permanently.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl Error {
    /// The thread that renews leases could not be started.
    pub(crate) fn renewal_thread(error: std::io::Error) -> Self {
        let problem = format!("the thread that renews leases could not be started: {error}");
        Self::Misconfigured {
            setting: "renewals",
            problem,
            remedy: "raise the thread limit of this process (`ulimit -u`, or `pids` of its cgroup)",
        }
    }
}

impl std::fmt::Debug for Error {
    /// The same line as `Display`: it is what a `main` that returns this error prints.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}
