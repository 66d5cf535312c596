//! Why a consumer did not start, or ended.

use crate::id::BadScope;
use crate::source::SourceError;
use crate::store::StoreError;

/// Why a consumer did not start, or ended. Each says what to do.
#[derive(thiserror::Error)]
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
    /// A scope that cannot stand in a key.
    #[error(transparent)]
    Scope(#[from] BadScope),
    /// At most once was asked of a store that may forget what it said.
    #[error(
        "store: at most once needs a store that does not forget, and {0}; change that, or accept it with `allow_volatile_store()`"
    )]
    ForgetfulStore(String),
    /// The store cannot be used as it is configured.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The thread that renews leases ended; without it no handler is safe.
    #[error(
        "renewals: their thread ended, and without it no lease lives on; start again, and report what stands in the log before this"
    )]
    Renewals,
    /// The source cannot go on.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl Error {
    /// The thread of the renewals did not start.
    pub(crate) fn threads(error: std::io::Error) -> Self {
        let problem = format!("their thread could not be started: {error}");
        Self::Misconfigured {
            setting: "renewals",
            problem,
            remedy: "raise the limit of threads of this process",
        }
    }
}

impl std::fmt::Debug for Error {
    /// The same line as `Display`: it is what a `main` that returns this error prints.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}
