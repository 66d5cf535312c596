//! The results of completed runs, in the table `oncegate_results`. A result belongs to the done
//! marker of its key with the same expiry. It is written by the statement of the completion, and
//! deleted by that of an operation by which its marker leaves the state done.

use async_trait::async_trait;
use oncegate_core::internal::MarkerColumns;
use oncegate_core::marker::{Fingerprint, Marker, Operation};
use oncegate_core::{Completion, Key, ResultStore, StoreError};
use sqlx::postgres::PgConnection;
use sqlx::{query, query_scalar};

use crate::store::Postgres;

const READ: &str = "
SELECT r.result FROM oncegate_markers AS m JOIN oncegate_results AS r ON r.key = m.key AND r.expires = m.expires
WHERE m.key = $1 AND m.state = 0 AND (m.fingerprint IS NULL OR $2 IS NULL OR m.fingerprint = $2) AND m.expires > floor(extract(epoch FROM statement_timestamp()) * 1000)::int8";

/// Deletes $1 expired results, except rows that other transactions have locked.
const DELETE_EXPIRED: &str = "
DELETE FROM oncegate_results WHERE key = ANY (ARRAY(
    SELECT key FROM oncegate_results WHERE expires <= floor(extract(epoch FROM statement_timestamp()) * 1000)::int8
    ORDER BY expires LIMIT $1 FOR UPDATE SKIP LOCKED
))";

/// How many results a statement deletes: few, because large ones take as long as many rows.
const DELETED_AT_ONCE: usize = 100;

#[async_trait]
impl ResultStore for Postgres {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        let (mut answers, earlier) = self
            .run(std::slice::from_ref(completion), Some(result))
            .await;
        let no_answer = || StoreError::Unknown("PostgreSQL returned no result".into());
        let verdict = answers.pop().ok_or_else(no_answer)??;
        Ok(Completion { verdict, earlier })
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.check()?;
        let fingerprint = Marker::Done(fingerprint);
        let fingerprint = MarkerColumns::of(fingerprint).and_then(|row| row.fingerprint);
        let select = query_scalar(READ).bind(key.as_str()).bind(fingerprint);
        let read = async |connection: &mut PgConnection| select.fetch_optional(connection).await;
        let result = self.connections().read(self.timeout_setting(), read);
        Ok(result.await?)
    }
}

/// Deletes at most so many expired results, rounded up.
///
/// # Errors
/// A statement failed; earlier ones are committed.
pub(crate) async fn delete_expired(
    connection: &mut PgConnection,
    at_most: usize,
) -> Result<(), sqlx::Error> {
    for _ in 0..at_most.div_ceil(DELETED_AT_ONCE) {
        let delete = query(DELETE_EXPIRED).bind(DELETED_AT_ONCE as i64);
        let deleted = delete.execute(&mut *connection).await?.rows_affected();
        if deleted < DELETED_AT_ONCE as u64 {
            break;
        }
    }
    Ok(())
}
