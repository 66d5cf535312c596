//! Begins transactions that are rolled back if their future is dropped.
//!
//! # Workaround
//! - *Symptom:* if the future of a `begin` is dropped before it has ended, the connection returns to its
//!   pool with an open transaction; if it was the `begin` of a savepoint, the whole transaction is rolled
//!   back, and later statements are committed one by one. *Version:* sqlx 0.9.0.
//! - *Upstream:* transact-rs/sqlx#4393, fixed by #4394 after 0.9.0; for savepoints
//!   `docs/upstream/sqlx-dropped-begin.md`.
//! - *Tests:* `a_begin_that_is_dropped_leaves_no_open_transaction_in_the_pool` and
//!   `a_savepoint_whose_begin_is_dropped_commits_nothing_without_the_record` in `tests/postgres`.
//! - *May be removed* when sqlx rolls back only the transaction or savepoint that a dropped `begin` has
//!   begun.

use oncegate_core::store::BoxError;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, PgPool, Transaction};

/// Begins a transaction in a task of its own, so that the `begin` ends also if this future is
/// dropped; the dropped transaction is then rolled back.
///
/// # Errors
/// sqlx could not connect or begin the transaction.
pub(crate) async fn begin(pool: &PgPool) -> Result<Transaction<'static, sqlx::Postgres>, BoxError> {
    let pool = pool.clone();
    Ok(tokio::spawn(async move { pool.begin().await }).await??)
}

/// Checks that the connection is in a transaction, before a statement of the handler.
///
/// # Panics
/// The transaction was rolled back by a `begin` that failed or was dropped.
pub(crate) fn assert_in_transaction(connection: &PgConnection) {
    assert!(
        connection.is_in_transaction(),
        "the transaction was rolled back by a begin() of a savepoint that failed or was dropped: return the error of a statement before \
         the next one, and do not drop begin() before it has ended"
    );
}
