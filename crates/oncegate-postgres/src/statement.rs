//! The statement that executes a batch of steps, and its parameters.

use oncegate_core::internal::MarkerColumns;
use oncegate_core::marker::Operation;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Row, query};

/// One step for each key, all in one transaction. A step that does not apply changes nothing. The
/// last SELECT returns the row of each key whose step was not applied, as it was before this
/// statement: all parts of a statement see the same snapshot. If a concurrent transaction changed
/// the row meanwhile, the returned row is stale. The step that is decided from it is not applied
/// either, and that statement, with its own snapshot, returns the changed row.
///
/// Kinds: 0 insert; 1 write and 3 delete, if the row is still that of the version `seen`; 2 write,
/// if the row is a live claim with this token and attempt; 4 read. A version is `xmin`, the
/// transaction that wrote the row. Each statement is a transaction and writes a row at most once,
/// so an equal version proves an unchanged row. A version is compared only within one call of
/// `Store::apply`, too short for transaction ids to be reused.
///
/// The parameters of the macro are what a variant adds for results: a part of the statement, and
/// the column of the last SELECT with its join. The variants are separate statements, so that
/// batches without results do not pay for them.
macro_rules! apply {
    ($part:literal, $none:literal, $column:literal, $join:literal) => {
        concat!("
WITH clock AS MATERIALIZED (SELECT floor(extract(epoch FROM statement_timestamp()) * 1000)::int8 AS now),
step AS MATERIALIZED (
    SELECT s.*, clock.now, clock.now + s.time_to_live AS expires FROM clock, unnest(
        $1::text[], $2::int2[], $3::text[], $4::bytea[], $5::int8[], $6::int8[], $7::int2[], $8::int8[], $9::int8[], $10::int8[],
        $11::int8[], $12::int2[], $13::bytea[], $14::int8[], $15::int8[], $16::int2[]
    ) AS s (key, kind, seen, own_token, own_attempt, time_to_live, state, fingerprint, attempt, base, crashes, effect, token, lease,
        horizon, guarantee)
),
inserted AS (
    INSERT INTO oncegate_markers AS m
        (key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee)
    SELECT key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee
    FROM step WHERE kind = 0 ORDER BY key
    ON CONFLICT (key) DO NOTHING RETURNING m.key
),
updated AS (
    UPDATE oncegate_markers AS m SET expires = s.expires, state = s.state, fingerprint = s.fingerprint, attempt = s.attempt,
        base = s.base, crashes = s.crashes, effect = s.effect, token = s.token, lease = s.lease, horizon = s.horizon,
        guarantee = s.guarantee
    FROM step AS s
    WHERE m.key = s.key AND CASE s.kind
        WHEN 1 THEN m.xmin = s.seen::xid
        WHEN 2 THEN m.state = 2 AND m.token = s.own_token AND m.attempt = s.own_attempt AND m.expires > s.now
        ELSE false END
    RETURNING m.key
),
deleted AS (
    DELETE FROM oncegate_markers AS m USING step AS s
    WHERE s.kind = 3 AND m.key = s.key AND m.xmin = s.seen::xid RETURNING m.key
),
applied AS MATERIALIZED (SELECT key FROM inserted UNION ALL SELECT key FROM updated UNION ALL SELECT key FROM deleted)", $part, "
SELECT key, true, NULL::text, NULL::int8, NULL::int2, NULL::int8, NULL::int8, NULL::int8, NULL::int8, NULL::int2, NULL::bytea,
    NULL::int8, NULL::int8, NULL::int2", $none, "
FROM applied
UNION ALL
SELECT s.key, false, m.xmin::text, greatest(m.expires, 0) - s.now, m.state, m.fingerprint, m.attempt, m.base, m.crashes, m.effect, m.token,
    m.lease, m.horizon, m.guarantee", $column, "
FROM step AS s LEFT JOIN oncegate_markers AS m ON m.key = s.key", $join, "
WHERE s.key NOT IN (SELECT key FROM applied)")
    };
}

const APPLY: &str = apply!("", "", "", "");

/// Also deletes the results of the rows that it changes.
const APPLY_AND_FORGET: &str = apply!(
    ",
forgotten AS (
    DELETE FROM oncegate_results WHERE key IN (SELECT key FROM updated UNION ALL SELECT key FROM deleted)
)",
    "",
    "",
    ""
);

/// Also stores the result of the done marker that it writes, in place of any other. Else returns
/// the result of the row, if that is a live done marker.
///
/// The row of a result is written while the transaction has locked that of its marker, so that two
/// transactions wait for each other in one direction only.
const APPLY_AND_STORE: &str = apply!(
    ",
stored AS (
    INSERT INTO oncegate_results (key, expires, result)
    SELECT key, expires, $17::bytea FROM step WHERE state = 0 AND key IN (SELECT key FROM applied)
    ON CONFLICT (key) DO UPDATE SET expires = excluded.expires, result = excluded.result
)",
    ", NULL::bytea",
    ", r.result",
    " LEFT JOIN oncegate_results AS r ON r.key = m.key AND r.expires = m.expires AND m.state = 0 AND m.expires > s.now"
);

/// What a statement does with results.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ResultStep<'a> {
    Keep,
    /// Deletes those of the changed rows.
    Forget,
    /// Stores this one with the done marker that is written.
    Store(&'a [u8]),
}

/// What a step does, and on which condition.
#[derive(Clone, Debug)]
pub(crate) enum MarkerStep {
    /// Inserts a row if there is none.
    Insert(MarkerColumns, i64),
    /// Writes the row if it has this version.
    Replace(String, MarkerColumns, i64),
    /// Writes the row if it is a live claim with this token and attempt.
    ReplaceOwn(u128, u32, MarkerColumns, i64),
    /// Deletes the row if it has this version.
    Delete(String),
    /// Reads the row.
    Read,
}

/// The parameters of the statement, one array for each column. Times to live are in milliseconds.
#[derive(Default)]
pub(crate) struct Steps<'a> {
    keys: Vec<&'a str>,
    kinds: Vec<i16>,
    seen: Vec<Option<String>>,
    own_tokens: Vec<Option<[u8; 16]>>,
    own_attempts: Vec<Option<i64>>,
    times_to_live: Vec<Option<i64>>,
    rows: Vec<MarkerColumns>,
}

/// The result of a step.
#[derive(Debug)]
pub(crate) enum MarkerStepResult {
    Applied,
    /// The key is not in the expected state; its row. With [`ResultStep::Store`] also its result.
    NotApplied(SelectedRow, Option<Vec<u8>>),
}

/// The row of a key.
#[derive(Clone, Debug)]
pub(crate) enum SelectedRow {
    Missing,
    /// Its token has another length than this release writes.
    Unreadable,
    Row {
        version: String,
        /// The time until it expires, in milliseconds; negative if it has expired.
        left: i64,
        row: MarkerColumns,
    },
}

impl SelectedRow {
    /// Whether it is a done marker with a body that is not known to be another one than that of the
    /// operation.
    pub(crate) fn is_done_for(&self, operation: &Operation) -> bool {
        match self {
            Self::Row { row, .. } => row
                .marker()
                .is_ok_and(|marker| marker.is_done_for(operation.terms.fingerprint)),
            Self::Missing | Self::Unreadable => false,
        }
    }
}

impl<'a> Steps<'a> {
    /// Adds the step of a key.
    pub(crate) fn push(&mut self, key: &'a str, step: MarkerStep) {
        let (kind, seen, own, written) = match step {
            MarkerStep::Insert(row, time_to_live) => (0, None, None, Some((row, time_to_live))),
            MarkerStep::Replace(version, row, time_to_live) => {
                (1, Some(version), None, Some((row, time_to_live)))
            }
            MarkerStep::ReplaceOwn(token, attempt, row, time_to_live) => {
                (2, None, Some((token, attempt)), Some((row, time_to_live)))
            }
            MarkerStep::Delete(version) => (3, Some(version), None, None),
            MarkerStep::Read => (4, None, None, None),
        };
        self.keys.push(key);
        self.kinds.push(kind);
        self.seen.push(seen);
        self.own_tokens
            .push(own.map(|(token, _)| token.to_be_bytes()));
        self.own_attempts
            .push(own.map(|(_, attempt)| attempt.into()));
        self.times_to_live
            .push(written.map(|(_, time_to_live)| time_to_live));
        self.rows
            .push(written.map_or_else(MarkerColumns::default, |(row, _)| row));
    }

    /// Executes the steps, at most one for each key. Returns the result of each key, in any order.
    ///
    /// # Errors
    /// The statement failed, or its outcome is unknown because the connection was lost.
    pub(crate) async fn execute(
        &self,
        connection: &mut PgConnection,
        result: ResultStep<'_>,
    ) -> Result<Vec<(String, MarkerStepResult)>, sqlx::Error> {
        let statement = match result {
            ResultStep::Keep => APPLY,
            ResultStep::Forget => APPLY_AND_FORGET,
            ResultStep::Store(_) => APPLY_AND_STORE,
        };
        let rows = &self.rows;
        let int8 = |column: fn(&MarkerColumns) -> Option<i64>| -> Vec<Option<i64>> {
            rows.iter().map(column).collect()
        };
        let int2 = |column: fn(&MarkerColumns) -> Option<i16>| -> Vec<Option<i16>> {
            rows.iter().map(column).collect()
        };
        let tokens: Vec<Option<[u8; 16]>> = rows
            .iter()
            .map(|row| row.token.map(u128::to_be_bytes))
            .collect();
        let answers = query(statement)
            .bind(&self.keys)
            .bind(&self.kinds)
            .bind(&self.seen)
            .bind(&self.own_tokens)
            .bind(&self.own_attempts)
            .bind(&self.times_to_live)
            .bind(int2(|row| Some(row.state)))
            .bind(int8(|row| row.fingerprint))
            .bind(int8(|row| row.attempt))
            .bind(int8(|row| row.base))
            .bind(int8(|row| row.crashes))
            .bind(int2(|row| row.effect))
            .bind(tokens)
            .bind(int8(|row| row.lease))
            .bind(int8(|row| row.horizon))
            .bind(int2(|row| row.guarantee));
        let answers = match result {
            ResultStep::Keep | ResultStep::Forget => answers,
            ResultStep::Store(result) => answers.bind(result),
        };
        let answers = answers.fetch_all(connection).await?;
        answers
            .iter()
            .map(|answer| {
                let key = answer.try_get::<String, _>(0)?;
                let step = match answer.try_get(1)? {
                    true => MarkerStepResult::Applied,
                    false => {
                        let stored = match result {
                            ResultStep::Keep | ResultStep::Forget => None,
                            ResultStep::Store(_) => answer.try_get(14)?,
                        };
                        MarkerStepResult::NotApplied(decode_row(answer, 2)?, stored)
                    }
                };
                Ok((key, step))
            })
            .collect()
    }
}

/// Reads a row from the columns that start at `first`: version, time left, and those of
/// [`MarkerColumns`].
pub(crate) fn decode_row(answer: &PgRow, first: usize) -> Result<SelectedRow, sqlx::Error> {
    let Some(version) = answer.try_get::<Option<String>, _>(first)? else {
        return Ok(SelectedRow::Missing);
    };
    let bytes = answer.try_get::<Option<&[u8]>, _>(first + 8)?;
    let Ok(token) = bytes.map(<[u8; 16]>::try_from).transpose() else {
        return Ok(SelectedRow::Unreadable);
    };
    let row = MarkerColumns {
        state: answer.try_get(first + 2)?,
        fingerprint: answer.try_get(first + 3)?,
        attempt: answer.try_get(first + 4)?,
        base: answer.try_get(first + 5)?,
        crashes: answer.try_get(first + 6)?,
        effect: answer.try_get(first + 7)?,
        token: token.map(u128::from_be_bytes),
        lease: answer.try_get(first + 9)?,
        horizon: answer.try_get(first + 10)?,
        guarantee: answer.try_get(first + 11)?,
    };
    Ok(SelectedRow::Row {
        version,
        left: answer.try_get(first + 1)?,
        row,
    })
}
