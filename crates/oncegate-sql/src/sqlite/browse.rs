//! What operators look at: markers with their time, and all of them page by page. None of it is on
//! the way of a message.

use std::time::Duration;

use oncegate_core::marker::Marker;
use oncegate_core::{Key, StoreError};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::Sqlite;
use super::clock::Now;
use super::desk::Request;
use super::failure::Failure;
use super::rows::{self, Unreadable};

const ONE: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee, key FROM markers
    WHERE key = ?1";

const PAGE: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee, key FROM markers
    WHERE key > ?1
    ORDER BY key LIMIT ?2";

/// A marker, and how long it still stands; no time where there is none.
pub(crate) type Standing = (Marker, Option<Duration>);

/// One page of all rows.
#[derive(Debug)]
pub(crate) struct Page {
    /// By key; what has expired is left out.
    rows: Vec<(String, Result<Standing, Failure>)>,
    /// The key behind which the next page begins; `None` after the last.
    next: Option<String>,
}

/// What stands under a key.
pub(crate) fn one(
    connection: &Connection,
    now: Now,
    key: &Key,
) -> rusqlite::Result<Result<Standing, Failure>> {
    let found = connection
        .prepare_cached(ONE)?
        .query_row([key.as_str()], |row| standing(row, now))
        .optional()?;
    Ok(found.map_or(Ok((Marker::Absent, None)), |(_, standing)| standing))
}

/// So many rows behind this key, in the order of keys.
pub(crate) fn page(
    connection: &Connection,
    now: Now,
    after: &str,
    limit: usize,
) -> rusqlite::Result<Page> {
    let mut statement = connection.prepare_cached(PAGE)?;
    let read = statement.query_map(
        params![after, i64::try_from(limit).unwrap_or(i64::MAX)],
        |row| standing(row, now),
    )?;
    let mut rows = read.collect::<rusqlite::Result<Vec<_>>>()?;
    let next = rows
        .last()
        .filter(|_| rows.len() == limit)
        .map(|(key, _)| key.clone());
    rows.retain(|(_, standing)| !matches!(standing, Ok((Marker::Absent, _))));
    Ok(Page { rows, next })
}

/// The key of a row, and what stands there.
fn standing(row: &Row<'_>, now: Now) -> rusqlite::Result<(String, Result<Standing, Failure>)> {
    let (key, expires): (String, i64) = (row.get(11)?, row.get(0)?);
    let left =
        Duration::from_millis(u64::try_from(expires.saturating_sub(now.wall)).unwrap_or_default());
    let standing = match rows::read(row, now) {
        Ok(found) => Ok((
            found.marker,
            (found.marker != Marker::Absent).then_some(left),
        )),
        Err(Unreadable) => Err(rows::unreadable(&key)),
    };
    Ok((key, standing))
}

/// Goes through all markers, page by page, in the order of their keys. Made by [`Sqlite::browse`].
#[derive(Debug)]
pub struct SqliteBrowse {
    store: Sqlite,
    page: usize,
    /// Behind which key the next page begins; `None` after the last.
    after: Option<String>,
}

/// A key (an id, behind its scope and `|` where there is one), its marker and how long that still
/// stands, or an error if the row holds none that this release can read.
pub type SqliteListed = (String, Result<(Marker, Duration), StoreError>);

impl SqliteBrowse {
    /// The next page, which may be empty; `None` after the last. A key that stands all the while is
    /// listed once; one that comes or goes meanwhile may be listed or not.
    ///
    /// # Errors
    /// As for [`Sqlite::look`].
    pub async fn next(&mut self) -> Result<Option<Vec<SqliteListed>>, StoreError> {
        let Some(after) = self.after.clone() else {
            return Ok(None);
        };
        let limit = self.page;
        let Page { rows, next } = self
            .store
            .ask(|reply| Request::Page(after, limit, reply))
            .await??;
        self.after = next;
        let listed = rows.into_iter().map(|(key, standing)| {
            let standing = standing
                .map(|(marker, left)| (marker, left.unwrap_or_default()))
                .map_err(StoreError::from);
            (key, standing)
        });
        Ok(Some(listed.collect()))
    }
}

impl Sqlite {
    /// The marker under a key as it is now, and how long it still stands; no time where there is
    /// none. Changes nothing.
    ///
    /// # Errors
    /// As for [`Sqlite::look`].
    pub async fn look_with_expiry(
        &self,
        key: &Key,
    ) -> Result<(Marker, Option<Duration>), StoreError> {
        Ok(self
            .ask(|reply| Request::LookClosely(key.clone(), reply))
            .await??)
    }

    /// Goes through all markers, so many rows a page, at least 1.
    pub fn browse(&self, page: usize) -> SqliteBrowse {
        SqliteBrowse {
            store: self.clone(),
            page: page.max(1),
            after: Some(String::new()),
        }
    }
}
