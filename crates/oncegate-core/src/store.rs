//! The contract of a store, which keeps the markers of ids.

use std::time::Duration;

use async_trait::async_trait;

use crate::marker::{Guarantee, Marker, Operation, Verdict};
use crate::result_store::ResultStore;

/// Keeps the marker of each id, which records its state.
///
/// # The contract
/// - Each operation is applied as [`marker::apply`](crate::marker::apply) defines, atomically on
///   its own key, with ages by the store's own clock.
/// - The answer has one entry per operation, in order. Operations on one key are applied in the
///   given order. One failed operation does not affect the others.
/// - If the future is dropped, each operation may or may not be applied. Repeating it is safe.
/// - Each call returns in bounded time: a missing answer is [`StoreError::Unknown`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a store",
    label = "this is not a store",
    note = "pass one of `Redis::at(…)`, `Sqlite::file(…)` and `MemoryStore::new()`; the first two need the features `redis` and `sqlite`",
    note = "`()` means that no store is set: call `.store(…)`"
)]
#[async_trait]
pub trait Store: Send + Sync {
    /// Applies the operations, and returns a verdict or an error for each.
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>>;

    /// The store and its address, such as `Redis at 10.0.0.7:6379`, for status pages. Must not
    /// contain secrets. Default: the name of the type.
    fn described(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// Checks that the server can keep this guarantee: its version, its commands, the permissions
    /// of its user. By default it only calls [`persistence`](Self::persistence).
    ///
    /// Called at start, before the first message. [`StoreError::NotApplied`] and
    /// [`StoreError::Unknown`] are retried; [`StoreError::Misconfigured`] ends the consumer.
    ///
    /// # Errors
    /// The store cannot keep the guarantee. The text names the wrong setting, what is wrong with
    /// it, and what to do.
    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        let _ = guarantee;
        self.persistence().await.map(drop)
    }

    /// Whether acknowledged changes survive a crash of the store. A consumer with at most once or
    /// an inbox, and a gate with at most once, refuse a volatile store.
    ///
    /// Called at start, after [`preflight`](Self::preflight), with the same errors.
    ///
    /// # Errors
    /// The store cannot be used. The text says why and what to do.
    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(Persistence::Volatile(
            "it does not report whether its data survives a crash".into(),
        ))
    }

    /// Another handle to the same store, for lease renewals. They run on a thread with its own
    /// tokio runtime, and must not share a connection whose tasks run on another runtime. The
    /// handle connects at its first use.
    ///
    /// `None` if the store needs no runtime and can be shared.
    fn for_renewals(&self) -> Option<std::sync::Arc<dyn Store>> {
        None
    }

    /// The number of concurrent `apply` calls with which this store has its highest throughput, at
    /// least 1.
    fn parallel_applies(&self) -> usize {
        1
    }

    /// The results that the store keeps beside its markers; `None` (the default) if it keeps none.
    fn results(&self) -> Option<&dyn ResultStore> {
        None
    }
}

/// Whether acknowledged changes survive a crash of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Persistence {
    /// They survive a crash; the text says why.
    Durable(String),
    /// They may be lost; the text says why, and how to change that.
    Volatile(String),
}

/// Why a store returned no verdict for an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operation was not applied: retry later.
    #[error("{0} (the store did not apply the operation; a retry is safe)")]
    NotApplied(#[source] BoxError),
    /// The operation may have been applied: retry the same operation.
    #[error("{0} (the store may have applied the operation; a retry is safe)")]
    Unknown(#[source] BoxError),
    /// The record under this key is not a marker that this release can read. Only this id is
    /// affected, and nothing was changed.
    #[error("unreadable marker: {0}")]
    UnreadableMarker(#[source] BoxError),
    /// A permanent error, until an operator changes what the text names.
    #[error("the store is misconfigured: {0}")]
    Misconfigured(#[source] BoxError),
}

/// A boxed error of any type.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The default timeout of one `apply`.
pub const APPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// A marker with its expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MarkerWithExpiry {
    /// The marker under the key.
    pub marker: Marker,
    /// The time until the key expires; `None` if it has no expiry or does not exist.
    pub expires_in: Option<Duration>,
}

impl MarkerWithExpiry {
    /// A marker, and the time until its key expires.
    pub fn new(marker: Marker, expires_in: Option<Duration>) -> Self {
        Self { marker, expires_in }
    }

    /// How long ago a marker in progress or in doubt was last written, by the server's clock.
    /// `None` for other markers, which do not record it, and if another program changed the expiry.
    pub fn age(&self) -> Option<Duration> {
        match self.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => {
                hold.horizon.checked_sub(self.expires_in?)
            }
            _ => None,
        }
    }
}

/// One key of a listing.
#[derive(Debug)]
#[non_exhaustive]
pub struct ListedKey {
    /// The key without its prefix: the id, after `scope|` if there is a scope.
    pub name: String,
    /// The marker, or an error if the record is not a marker that this release can read.
    pub marker: Result<MarkerWithExpiry, StoreError>,
}

impl ListedKey {
    /// A key without its prefix, and its marker.
    pub fn new(name: String, marker: Result<MarkerWithExpiry, StoreError>) -> Self {
        Self { name, marker }
    }
}
