//! Stores each reply with the completion of its message.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt};

use super::PendingReplies;
use crate::marker::{Finding, Guarantee, Operation, OperationKind, Verdict};
use crate::result_store::ResultStore;
use crate::store::{Persistence, Store, StoreError};

/// How many completions of a batch are sent at a time: each has a timeout of its own.
const CONCURRENT_COMPLETIONS: usize = 32;

/// A store whose completions store the reply of their claim:
/// see [`Builder::replying_handler`](crate::Builder::replying_handler).
pub struct ReplyStore {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) pending: Arc<PendingReplies>,
}

impl fmt::Debug for ReplyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplyStore")
            .field("store", &self.store.described())
            .finish_non_exhaustive()
    }
}

impl ReplyStore {
    fn inner_results(&self) -> Result<&dyn ResultStore, StoreError> {
        self.store.results().ok_or_else(|| {
            StoreError::Misconfigured(
                "it keeps no replies; use Redis (in a Cluster with a prefix without `{` and `}`, or with a hash tag), PostgreSQL, SQLite or the memory store".into(),
            )
        })
    }

    /// Completes a message with its reply.
    async fn complete(&self, operation: &Operation, reply: Vec<u8>) -> Result<Verdict, StoreError> {
        let completed = self.inner_results()?.complete(operation, &reply).await;
        if !matches!(
            completed,
            Err(StoreError::NotApplied(_) | StoreError::Unknown(_))
        ) {
            let claim = (operation.key.clone(), operation.token);
            self.pending.of_claims.lock().remove(&claim);
        }
        Ok(completed?.verdict)
    }

    /// The reply that the operation stores, if any.
    fn reply(&self, operation: &Operation) -> Option<Vec<u8>> {
        let completes = matches!(
            operation.kind,
            OperationKind::Complete | OperationKind::Resolve(Finding::Happened)
        );
        if !completes {
            return None;
        }
        let claim = (operation.key.clone(), operation.token);
        let pending = self.pending.of_claims.lock();
        Some(pending.get(&claim)?.reply.clone())
    }
}

#[async_trait]
impl Store for ReplyStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let replies: Vec<_> = operations.iter().map(|it| self.reply(it)).collect();
        if replies.iter().all(Option::is_none) {
            return self.store.apply(operations).await;
        }
        let is_completion: Vec<bool> = replies.iter().map(Option::is_some).collect();
        // First, so that a claim of a message that is completed here is a duplicate.
        let (mut completions, mut others) = (Vec::new(), Vec::new());
        for (operation, reply) in operations.iter().zip(replies) {
            match reply {
                Some(reply) => completions.push(self.complete(operation, reply)),
                None => others.push(operation.clone()),
            }
        }
        let completed: Vec<_> = stream::iter(completions)
            .buffered(CONCURRENT_COMPLETIONS)
            .collect()
            .await;
        let others = if others.is_empty() {
            Vec::new()
        } else {
            self.store.apply(&others).await
        };
        let (mut completed, mut others) = (completed.into_iter(), others.into_iter());
        is_completion
            .into_iter()
            .map_while(|is_completion| match is_completion {
                true => completed.next(),
                false => others.next(),
            })
            .collect()
    }

    fn described(&self) -> String {
        self.store.described()
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.inner_results()?;
        if guarantee == Guarantee::Bare {
            let text =
                "Guarantee::Bare records a message before it has a reply; use another guarantee";
            return Err(StoreError::Misconfigured(text.into()));
        }
        self.store.preflight(guarantee).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.store.persistence().await
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        self.store.for_renewals()
    }

    fn parallel_applies(&self) -> usize {
        self.store.parallel_applies()
    }
}
