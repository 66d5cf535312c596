//! The contract of a store: it remembers ids.

use std::time::Duration;

use async_trait::async_trait;

use crate::marker::{Guarantee, Marker, Operation, Verdict};

/// Remembers ids.
///
/// # The contract
/// - Each operation is applied as [`marker::apply`](crate::marker::apply) says, atomically on its
///   own key, by the store's own clock.
/// - The answer has one entry per operation, in order. Operations on one key are applied in the
///   order in which they stand. One bad operation spoils no other.
/// - Dropping the future leaves each operation applied or not: its outcome is unknown, and asking
///   again is safe.
/// - Nothing waits for ever: an answer that does not come in time is [`StoreError::Unknown`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a store",
    label = "this is no store",
    note = "hand over one of `Redis::at(…)`, `Sqlite::file(…)` and `MemoryStore::new()`; the first two need the features `redis` and `sqlite`",
    note = "`()` says that no store was given: call `.store(…)`"
)]
#[async_trait]
pub trait Store: Send + Sync {
    /// Applies the operations and answers each.
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>>;

    /// What it is and where, in a few words for people, such as `Redis at 10.0.0.7:6379`: a status
    /// page names the store so. Never a secret. By default the name of its type.
    fn described(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// Whether the store, as it is set up, offers all that this guarantee asks of it: its version,
    /// its commands, the rights of its user. By default it is enough that it can tell its
    /// [`persistence`](Self::persistence).
    ///
    /// Asked at start, before anything is received. A store that is not there yet says
    /// [`StoreError::NotApplied`] or [`StoreError::Unknown`], and is asked again;
    /// [`StoreError::Misconfigured`] ends the consumer.
    ///
    /// # Errors
    /// What keeps the store from being used on these terms: the setting, what is wrong with it, and
    /// what to do.
    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        let _ = guarantee;
        self.persistence().await.map(drop)
    }

    /// Whether what the store said survives its own crash. At most once refuses a store that
    /// forgets, and is the only guarantee that asks.
    ///
    /// Asked at start, after [`preflight`](Self::preflight). A store that is not there yet says
    /// [`StoreError::NotApplied`] or [`StoreError::Unknown`], and is asked again;
    /// [`StoreError::Misconfigured`] ends the consumer.
    ///
    /// # Errors
    /// What keeps the store from being used, with what to do about it.
    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(Persistence::Volatile(
            "it does not say that it survives a crash".into(),
        ))
    }

    /// A handle on the same store for the renewals: they run on a thread of their own, which no
    /// handler can block, and must not share a connection whose driver lives on another runtime. It
    /// connects when it is first used, there.
    ///
    /// `None` where the store itself is as good, because it needs no runtime.
    fn for_renewals(&self) -> Option<std::sync::Arc<dyn Store>> {
        None
    }

    /// How many applies may be in flight at once to make the best use of this store. At least 1.
    fn parallel_applies(&self) -> usize {
        1
    }
}

/// Whether a store's answers survive its own crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// What was answered is still known after a crash; the text says what that rests on.
    Durable(String),
    /// It may be forgotten; the text says why, and how to change it. That it can be accepted is
    /// said by whoever refuses it.
    Volatile(String),
}

/// Why a store did not answer an operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nothing was applied: ask again later.
    #[error("the store changed nothing, and asking again is safe: {0}")]
    NotApplied(#[source] BoxError),
    /// It may have been applied: ask again with the same token.
    #[error("no answer from the store, which may have made the change; asking again is safe: {0}")]
    Unknown(#[source] BoxError),
    /// What is stored under this key is no marker that this release can read. It concerns this id
    /// alone, and nothing was changed.
    #[error("unreadable marker: {0}")]
    UnreadableMarker(#[source] BoxError),
    /// It will never work like this: stop, and tell a person what to change.
    #[error("the store is misconfigured: {0}")]
    Misconfigured(#[source] BoxError),
}

/// The error below.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How long a store may take for one apply, where it has no better figure of its own.
pub const APPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// A marker, and how long it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What stands under the key.
    pub marker: Marker,
    /// When the key expires; `None` without an expiry, and where there is no key.
    pub expires_in: Option<Duration>,
}

impl Standing {
    /// How long ago a marker in progress or in doubt was last written, by the server's clock.
    /// `None` of others, whose records do not tell, and where the expiry was not set by this
    /// protocol alone.
    pub fn age(&self) -> Option<Duration> {
        match self.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => {
                hold.horizon.checked_sub(self.expires_in?)
            }
            _ => None,
        }
    }
}

/// One key of a page.
#[derive(Debug)]
pub struct Listed {
    /// The key without the prefix: the id, behind its scope and `|` where there is one.
    pub name: String,
    /// The marker; an error if the key holds none that this release can read.
    pub standing: Result<Standing, StoreError>,
}
