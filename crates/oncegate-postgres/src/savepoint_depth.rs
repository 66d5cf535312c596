//! Finds savepoints that a handler has left open.
//!
//! sqlx counts open transactions and savepoints, and `commit` ends the innermost one: with a savepoint
//! that was forgotten, it would release the savepoint and report success. sqlx does not export the
//! trait that has the count, sqlx-core does.

use sqlx::postgres::{PgConnection, PgTransactionManager};
use sqlx_core::transaction::TransactionManager;

/// Rolls back the savepoints that are open. Returns whether there were any.
pub(crate) async fn end_savepoints(connection: &mut PgConnection) -> bool {
    let mut any = false;
    while PgTransactionManager::get_transaction_depth(connection) > 1 {
        any = true;
        if PgTransactionManager::rollback(connection).await.is_err() {
            break; // the connection is lost, and is not used again
        }
    }
    any
}
