//! The laws of every store.

use std::sync::Arc;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::{Persistence, ResultStore, Store, StoreError, async_trait};
use oncegate_sql::{Sqlite, Synchronous};

use crate::support::Directory;

/// A store in a directory of its own.
struct Owned {
    store: Sqlite,
    _directory: Directory,
}

#[async_trait]
impl Store for Owned {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.store.apply(operations).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.store.persistence().await
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        self.store.results()
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        // Another handle with its own thread, like another process.
        Some(Arc::new(self._directory.store()))
    }
}

oncegate_testkit::store_laws!(async || {
    let directory = Directory::new();
    // The laws simulate no power cut, and some disks sync slowly.
    Owned {
        store: directory.store().synchronous(Synchronous::Normal),
        _directory: directory,
    }
});
