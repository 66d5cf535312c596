//! Reads markers and the audit for operators.

use oncegate_core::marker::Marker;
use oncegate_core::store::{ListedKey, MarkerWithExpiry};
use oncegate_core::{Key, StoreError};
use sqlx::Row;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use std::time::Duration;

use crate::apply::unreadable;
use crate::failure::StatementStage;
use crate::statement::{SelectedRow, decode_row};
use crate::store::Postgres;

/// The key, and the columns that [`decode_row`] reads.
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "WITH clock AS MATERIALIZED (SELECT floor(extract(epoch FROM statement_timestamp()) * 1000)::int8 AS now)
            SELECT key, xmin::text, greatest(expires, 0) - now, state, fingerprint, attempt, base, crashes, effect, token, lease,
                horizon, guarantee
            FROM oncegate_markers, clock WHERE ",
            $rest
        )
    };
}

const SELECT_ONE: &str = select!("key = $1");
const SELECT_PAGE: &str = select!("key > $1 ORDER BY key LIMIT $2");

/// A listing of all markers, page by page, in the order of their keys. Created by
/// [`Postgres::browse`].
#[derive(Debug)]
pub struct PostgresBrowse {
    store: Postgres,
    page: i64,
    /// The key after which the next page starts; `None` after the last page.
    after: Option<String>,
}

impl PostgresBrowse {
    /// The next page, which may be empty; `None` after the last. A key that exists during the whole
    /// listing is listed once; one that is added or removed meanwhile may be missing.
    ///
    /// # Errors
    /// As for [`Postgres::read_marker`].
    pub async fn next(&mut self) -> Result<Option<Vec<ListedKey>>, StoreError> {
        let Some(after) = &self.after else {
            return Ok(None);
        };
        let page = sqlx::query(SELECT_PAGE).bind(after.clone()).bind(self.page);
        let rows = self.store.read_rows(page).await?;
        let is_last = (rows.len() as i64) < self.page;
        self.after = match rows.last() {
            Some((key, _)) if !is_last => Some(key.clone()),
            _ => None,
        };
        let listed = rows.into_iter().filter_map(|(name, row)| {
            let marker = marker(&name, row);
            let is_absent = matches!(&marker, Ok(found) if found.marker == Marker::Absent);
            (!is_absent).then(|| ListedKey::new(name, marker))
        });
        Ok(Some(listed.collect()))
    }
}

impl Postgres {
    /// The current marker of a key, which
    /// [`OperationKind::Redrive`](oncegate_core::marker::OperationKind::Redrive) and
    /// [`OperationKind::Forget`](oncegate_core::marker::OperationKind::Forget) compare with.
    /// Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::UnreadableMarker`] if the row holds no marker that this release can read;
    /// otherwise as for [`Store::apply`](oncegate_core::Store::apply).
    pub async fn read_marker(&self, key: &Key) -> Result<Marker, StoreError> {
        Ok(self.read_marker_with_expiry(key).await?.marker)
    }

    /// The marker of a key and the time until it expires; no time for [`Marker::Absent`]. Changes
    /// nothing.
    ///
    /// # Errors
    /// As for [`read_marker`](Self::read_marker).
    pub async fn read_marker_with_expiry(&self, key: &Key) -> Result<MarkerWithExpiry, StoreError> {
        let one = sqlx::query(SELECT_ONE).bind(key.as_str().to_owned());
        match self.read_rows(one).await?.pop() {
            Some((name, row)) => marker(&name, row),
            None => Ok(MarkerWithExpiry::new(Marker::Absent, None)),
        }
    }

    /// Lists all markers, at most `page` rows a page; 0 counts as 1.
    pub fn browse(&self, page: usize) -> PostgresBrowse {
        PostgresBrowse {
            store: self.clone(),
            page: i64::try_from(page.max(1)).unwrap_or(i64::MAX),
            after: Some(String::new()),
        }
    }

    /// Appends a line to the audit log, the table `oncegate_audit`, from which nothing is deleted.
    ///
    /// # Errors
    /// [`StoreError::Unknown`] if the line may have been written; otherwise as for
    /// [`Store::apply`](oncegate_core::Store::apply).
    pub async fn write_audit(&self, line: &str) -> Result<(), StoreError> {
        let insert = sqlx::query("INSERT INTO oncegate_audit (entry) VALUES ($1)").bind(line);
        let write = async |connection: &mut sqlx::PgConnection| insert.execute(connection).await;
        let (timeout, stage) = (self.timeout_setting(), StatementStage::Executing);
        let written = self.connections().request(timeout, stage, write).await;
        Ok(written.map(drop)?)
    }

    /// All lines of the audit log, oldest first.
    ///
    /// # Errors
    /// As for [`Store::apply`](oncegate_core::Store::apply).
    pub async fn read_audit(&self) -> Result<Vec<String>, StoreError> {
        let read = async |connection: &mut sqlx::PgConnection| {
            sqlx::query_scalar("SELECT entry FROM oncegate_audit ORDER BY number")
                .fetch_all(connection)
                .await
        };
        let lines = self.connections().read(self.timeout_setting(), read);
        Ok(lines.await?)
    }

    /// The rows that a query selects, with their keys.
    async fn read_rows(
        &self,
        query: Query<'static, sqlx::Postgres, PgArguments>,
    ) -> Result<Vec<(String, SelectedRow)>, StoreError> {
        let read = async |connection: &mut sqlx::PgConnection| {
            let rows = query.fetch_all(connection).await?;
            rows.iter()
                .map(|row| Ok((row.try_get(0)?, decode_row(row, 1)?)))
                .collect()
        };
        Ok(self
            .connections()
            .read(self.timeout_setting(), read)
            .await?)
    }
}

/// The marker of a selected row; absent if the row is missing or expired.
fn marker(key: &str, row: SelectedRow) -> Result<MarkerWithExpiry, StoreError> {
    match row {
        SelectedRow::Row { left, row, .. } if left > 0 => {
            let marker = row.marker().map_err(|_| unreadable(key))?;
            let left = Duration::from_millis(left.unsigned_abs());
            Ok(MarkerWithExpiry::new(marker, Some(left)))
        }
        SelectedRow::Unreadable => Err(unreadable(key).into()),
        SelectedRow::Row { .. } | SelectedRow::Missing => {
            Ok(MarkerWithExpiry::new(Marker::Absent, None))
        }
    }
}
