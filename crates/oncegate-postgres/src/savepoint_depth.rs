//! Finds savepoints that a handler has left open.
//!
//! sqlx counts open transactions and savepoints, and `commit` ends the innermost one: with a savepoint
//! that was forgotten, it would release the savepoint and report success. sqlx does not export the
//! trait that has the count, sqlx-core does.

use sqlx::postgres::{PgConnection, PgTransactionManager};
use sqlx_core::transaction::TransactionManager;

/// Whether a savepoint is open.
pub(crate) fn has_savepoints(connection: &PgConnection) -> bool {
    PgTransactionManager::get_transaction_depth(connection) > 1
}

/// Rolls back the savepoints that are open.
pub(crate) async fn end_savepoints(connection: &mut PgConnection) {
    while has_savepoints(connection) {
        if PgTransactionManager::rollback(connection).await.is_err() {
            break; // the connection is lost, and is not used again
        }
    }
}
