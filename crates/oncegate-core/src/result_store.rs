//! The results of completed runs, which a store keeps beside its markers.

use async_trait::async_trait;

use crate::id::Key;
use crate::marker::{Fingerprint, Operation, Verdict};
use crate::store::StoreError;

/// Stores results, so that a caller who repeats a request gets the answer of its first run:
/// [`Gate::run_stored`](crate::Gate::run_stored). An optional part of a store:
/// [`Store::results`](crate::Store::results).
///
/// # The contract
/// - A result is written together with the done marker of its run: both or neither, with the same
///   expiry. While the marker is done, its result is never replaced.
/// - A result is only returned with the done marker with which it was written, and not for another
///   body: if both fingerprints are known, they are equal.
/// - [`OperationKind::Forget`](crate::marker::OperationKind::Forget) deletes the result together with
///   the marker.
/// - Each call returns in bounded time, and is safe to repeat.
#[async_trait]
pub trait ResultStore: Send + Sync {
    /// Applies [`OperationKind::Complete`](crate::marker::OperationKind::Complete), or
    /// [`OperationKind::Resolve`](crate::marker::OperationKind::Resolve) with
    /// [`Finding::Happened`](crate::marker::Finding::Happened), as
    /// [`Store::apply`](crate::Store::apply) does. If it writes the done marker, it stores the result,
    /// which replaces one that an expired marker left.
    ///
    /// # Errors
    /// As for one operation of [`Store::apply`](crate::Store::apply).
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError>;

    /// The result of a done id; `None` if it has none, is not done, or has another fingerprint.
    ///
    /// # Errors
    /// As for one operation of [`Store::apply`](crate::Store::apply).
    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError>;
}

/// The answer to [`ResultStore::complete`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The verdict on the completion.
    pub verdict: Verdict,
    /// If the id was done before, and nothing was changed: its result, if it has one. It is that of
    /// this very run if the reply to an earlier request was lost.
    pub earlier: Option<Vec<u8>>,
}
