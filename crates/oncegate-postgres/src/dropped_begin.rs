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
//! - *May be removed* when sqlx rolls back what a dropped `begin` has sent, and nothing else.

use oncegate_core::store::BoxError;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, PgPool, Transaction};

/// Begins a transaction in a task of its own, whose result is dropped if the caller was dropped.
///
/// # Errors
/// sqlx's.
pub(crate) async fn begin(pool: &PgPool) -> Result<Transaction<'static, sqlx::Postgres>, BoxError> {
    let pool = pool.clone();
    Ok(tokio::spawn(async move { pool.begin().await }).await??)
}

/// # Panics
/// The transaction was rolled back by a `begin` that failed or was dropped.
pub(crate) fn assert_in_transaction(connection: &PgConnection) {
    assert!(
        connection.is_in_transaction(),
        "the transaction was rolled back by a begin() of a savepoint that failed or was dropped: return the error of a statement before \
         the next one, and do not drop begin() before it has ended"
    );
}
