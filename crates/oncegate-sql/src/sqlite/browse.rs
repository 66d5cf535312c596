//! Reads markers with their expiry, and lists all markers, for operators. A consumer does not use
//! this.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate_core::internal::UnreadableRow;
use oncegate_core::marker::Marker;
use oncegate_core::{Key, StoreError};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::Sqlite;
use super::clock::ClockReading;
use super::failure::StoreFailure;
use super::marker_table;
use super::recent::RecentMarkers;
use super::writer_thread::WriterRequest;

const SELECT_MERGED: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee, key
    FROM oncegate_merged_markers WHERE key > ?1 ORDER BY key LIMIT ?2";

const SELECT_ONE_MERGED: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee, key
    FROM oncegate_merged_markers WHERE key = ?1";

const SELECT_RECENT: &str = "SELECT expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee, key
    FROM oncegate_recent_markers WHERE number = ?1";

/// A marker and the time until it expires; no time for [`Marker::Absent`].
pub(crate) type MarkerAndTimeLeft = (Marker, Option<Duration>);

/// One page of the listing.
#[derive(Debug)]
pub(crate) struct MarkerPage {
    /// The rows in the order of their keys, without expired ones.
    rows: Vec<(String, Result<MarkerAndTimeLeft, StoreFailure>)>,
    /// The key after which the next page starts; `None` after the last page.
    pub(crate) next: Option<String>,
}

#[cfg(test)]
impl MarkerPage {
    pub(crate) fn keys(&self) -> impl Iterator<Item = String> {
        self.rows.iter().map(|(key, _)| key.clone())
    }
}

/// Reads the marker of a key, and the time until it expires.
pub(crate) fn marker_with_expiry(
    connection: &Connection,
    recent: &RecentMarkers,
    now: ClockReading,
    key: &Key,
) -> rusqlite::Result<Result<MarkerAndTimeLeft, StoreFailure>> {
    let found = match recent.number(key.as_str()) {
        Some(number) => connection
            .prepare_cached(SELECT_RECENT)?
            .query_row([number], |row| read_row(row, now)),
        None => connection
            .prepare_cached(SELECT_ONE_MERGED)?
            .query_row([key.as_str()], |row| read_row(row, now)),
    };
    Ok(found
        .optional()?
        .map_or(Ok((Marker::Absent, None)), |(_, marker)| marker))
}

/// Reads at most `limit` rows after a key, in the order of keys. If both tables have a row of a
/// key, only that of `oncegate_recent_markers` is current.
pub(crate) fn read_page(
    connection: &Connection,
    recent: &RecentMarkers,
    now: ClockReading,
    after: &str,
    limit: usize,
) -> rusqlite::Result<MarkerPage> {
    let mut merged = connection.prepare_cached(SELECT_MERGED)?;
    let read = merged.query_map(
        params![after, i64::try_from(limit).unwrap_or(i64::MAX)],
        |row| read_row(row, now),
    )?;
    let mut rows = read.collect::<rusqlite::Result<BTreeMap<_, _>>>()?;
    let mut select_recent = connection.prepare_cached(SELECT_RECENT)?;
    for (key, number) in recent.after(after, limit) {
        rows.remove(key);
        let row = select_recent.query_row([number], |row| read_row(row, now));
        rows.extend(row.optional()?);
    }
    let mut rows: Vec<_> = rows.into_iter().take(limit).collect();
    let next = rows
        .last()
        .filter(|_| rows.len() == limit)
        .map(|(key, _)| key.clone());
    rows.retain(|(_, marker)| !matches!(marker, Ok((Marker::Absent, _))));
    Ok(MarkerPage { rows, next })
}

/// The key and the marker of a row.
fn read_row(
    row: &Row<'_>,
    now: ClockReading,
) -> rusqlite::Result<(String, Result<MarkerAndTimeLeft, StoreFailure>)> {
    let (key, expires): (String, i64) = (row.get(11)?, row.get(0)?);
    let left =
        Duration::from_millis(u64::try_from(expires.saturating_sub(now.wall)).unwrap_or_default());
    let marker = match marker_table::read(row, now) {
        Ok(found) => Ok((
            found.marker,
            (found.marker != Marker::Absent).then_some(left),
        )),
        Err(UnreadableRow) => Err(marker_table::unreadable(&key)),
    };
    Ok((key, marker))
}

/// A listing of all markers, page by page, in the order of their keys. Created by
/// [`Sqlite::browse`].
#[derive(Debug)]
pub struct SqliteBrowse {
    store: Sqlite,
    page: usize,
    /// The key after which the next page starts; `None` after the last page.
    after: Option<String>,
}

/// A key (`<id>` or `<scope>|<id>`), with its marker and the time until it expires, or an error if
/// this release cannot read the row.
pub type SqliteListed = (String, Result<(Marker, Duration), StoreError>);

impl SqliteBrowse {
    /// The next page, which may be empty; `None` after the last. A key that exists during the whole
    /// listing is listed once; one that is added or removed meanwhile may be missing.
    ///
    /// # Errors
    /// As for [`Sqlite::read_marker`].
    pub async fn next(&mut self) -> Result<Option<Vec<SqliteListed>>, StoreError> {
        let Some(after) = self.after.clone() else {
            return Ok(None);
        };
        let limit = self.page;
        let MarkerPage { rows, next } = self
            .store
            .request(|reply| WriterRequest::ReadPage(after, limit, reply))
            .await??;
        self.after = next;
        let listed = rows.into_iter().map(|(key, marker)| {
            let marker = marker
                .map(|(marker, left)| (marker, left.unwrap_or_default()))
                .map_err(StoreError::from);
            (key, marker)
        });
        Ok(Some(listed.collect()))
    }
}

impl Sqlite {
    /// The marker of a key and the time until it expires; no time for [`Marker::Absent`]. Changes
    /// nothing.
    ///
    /// # Errors
    /// As for [`Sqlite::read_marker`].
    pub async fn read_marker_with_expiry(
        &self,
        key: &Key,
    ) -> Result<(Marker, Option<Duration>), StoreError> {
        Ok(self
            .request(|reply| WriterRequest::ReadMarker(key.clone(), reply))
            .await??)
    }

    /// Lists all markers, at most `page` rows a page; 0 counts as 1.
    pub fn browse(&self, page: usize) -> SqliteBrowse {
        SqliteBrowse {
            store: self.clone(),
            page: page.max(1),
            after: Some(String::new()),
        }
    }
}
