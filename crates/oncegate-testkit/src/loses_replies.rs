//! A store that loses replies.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate_core::marker::{Fingerprint, Guarantee, Operation, Verdict};
use oncegate_core::{Completion, Key, Persistence, ResultStore, Store, StoreError};

/// A store behind a network that loses replies: the operations of a batch, or only the first n, are
/// applied, and the caller receives no reply. A plan chooses the outcome of each batch by its
/// operations.
///
/// ```
/// use std::sync::Arc;
/// use oncegate_core::MemoryStore;
/// use oncegate_core::marker::Operation;
/// use oncegate_testkit::{ReplyFault, LosesReplies};
///
/// let lose_all = |operations: &[Operation]| ReplyFault::Lost { applied: operations.len() };
/// let store = LosesReplies::new(Arc::new(MemoryStore::new()), lose_all);
/// ```
pub struct LosesReplies<P> {
    store: Arc<dyn Store>,
    plan: P,
}

/// Whether the reply to one batch is lost, and how many of its operations are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplyFault {
    /// All operations are applied, and the caller receives the reply.
    Answered,
    /// Only the first n operations (`applied`) are applied, and each operation of the batch fails with
    /// [`StoreError::Unknown`].
    Lost {
        /// The number of applied operations; if it exceeds the size of the batch, all are applied.
        applied: usize,
    },
}

impl<P: Fn(&[Operation]) -> ReplyFault + Send + Sync> LosesReplies<P> {
    /// Wraps a store; `plan` chooses the outcome of each batch.
    pub fn new(store: Arc<dyn Store>, plan: P) -> Self {
        Self { store, plan }
    }

    fn inner_results(&self) -> Result<&dyn ResultStore, StoreError> {
        self.store
            .results()
            .ok_or_else(|| StoreError::Misconfigured("the store keeps no results".into()))
    }
}

#[async_trait]
impl<P: Fn(&[Operation]) -> ReplyFault + Send + Sync> Store for LosesReplies<P> {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        match (self.plan)(operations) {
            ReplyFault::Answered => self.store.apply(operations).await,
            ReplyFault::Lost { applied } => {
                let _lost = self
                    .store
                    .apply(&operations[..applied.min(operations.len())])
                    .await;
                operations
                    .iter()
                    .map(|_| Err(StoreError::Unknown("the reply was lost".into())))
                    .collect()
            }
        }
    }

    fn described(&self) -> String {
        self.store.described()
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.store.preflight(guarantee).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.store.persistence().await
    }

    /// Returns the inner store's handle for renewals. If it has one, replies to renewals are not
    /// lost; otherwise renewals pass through this store.
    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        self.store.for_renewals()
    }

    fn parallel_applies(&self) -> usize {
        self.store.parallel_applies()
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        self.store.results().map(|_| self as &dyn ResultStore)
    }
}

/// The plan is asked for each completion; reads are always answered.
#[async_trait]
impl<P: Fn(&[Operation]) -> ReplyFault + Send + Sync> ResultStore for LosesReplies<P> {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        let results = self.inner_results()?;
        match (self.plan)(std::slice::from_ref(completion)) {
            ReplyFault::Answered => return results.complete(completion, result).await,
            ReplyFault::Lost { applied: 0 } => {}
            ReplyFault::Lost { .. } => drop(results.complete(completion, result).await),
        }
        Err(StoreError::Unknown("the reply was lost".into()))
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner_results()?.read(key, fingerprint).await
    }
}
