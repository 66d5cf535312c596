//! A store whose replies get lost.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate_core::marker::{Guarantee, Operation, Verdict};
use oncegate_core::{Persistence, Store, StoreError};

/// A store behind a network that loses replies: what was asked is applied, or the first part of it,
/// and the asker is not told. A plan says what becomes of each apply, and sees what is asked.
///
/// ```
/// use std::sync::Arc;
/// use oncegate_core::MemoryStore;
/// use oncegate_core::marker::Operation;
/// use oncegate_testkit::{Fate, LosesReplies};
///
/// let everything_is_lost = |asked: &[Operation]| Fate::Lost { applied: asked.len() };
/// let store = LosesReplies::new(Arc::new(MemoryStore::new()), everything_is_lost);
/// ```
pub struct LosesReplies<P> {
    store: Arc<dyn Store>,
    plan: P,
}

/// What becomes of one apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is applied and answered.
    Answered,
    /// So many of its operations, from the first, are applied, and each of them is answered with
    /// [`StoreError::Unknown`].
    Lost {
        /// Any number; more than there are means all.
        applied: usize,
    },
}

impl<P: Fn(&[Operation]) -> Fate + Send + Sync> LosesReplies<P> {
    /// The store behind such a network.
    pub fn new(store: Arc<dyn Store>, plan: P) -> Self {
        Self { store, plan }
    }
}

#[async_trait]
impl<P: Fn(&[Operation]) -> Fate + Send + Sync> Store for LosesReplies<P> {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        match (self.plan)(operations) {
            Fate::Answered => self.store.apply(operations).await,
            Fate::Lost { applied } => {
                let _unheard = self
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

    /// The handle of the store behind the network, which loses nothing.
    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        self.store.for_renewals()
    }

    fn parallel_applies(&self) -> usize {
        self.store.parallel_applies()
    }
}
