//! Deletes expired rows in the background, a few blocks of the table at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::internal::Lock;
use oncegate_core::internal::LogThrottle;
use sqlx::Row;

use crate::connections::PostgresConnections;
use crate::metric::MARKERS_EXPIRED;
use crate::results;

/// The time limit of a scan, so that it does not hold its connection to a server that does not
/// answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The shortest time between two log lines about failed scans.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// After how many operations the next blocks are scanned.
const OPERATIONS: usize = 1_000;

/// How many blocks a scan reads: about 3,000 rows after 1,000 operations, which are about 500 new
/// ids. So all rows are scanned before their number has grown by a sixth.
const BLOCKS: i64 = 64;

/// Deletes the expired rows in the blocks from `$1` to before `$2`, except rows that other
/// transactions have locked. Reads no index.
const SWEEP: &str = "
WITH clock AS MATERIALIZED (SELECT floor(extract(epoch FROM statement_timestamp()) * 1000)::int8 AS now),
deleted AS (
    DELETE FROM oncegate_markers WHERE ctid = ANY (ARRAY(
        SELECT m.ctid FROM oncegate_markers AS m
        WHERE m.ctid >= format('(%s,0)', $1::int8)::tid AND m.ctid < format('(%s,0)', $2::int8)::tid
            AND m.expires <= (SELECT now FROM clock)
        FOR UPDATE SKIP LOCKED
    )) RETURNING 1
)
SELECT (SELECT count(*) FROM deleted),
    pg_relation_size('oncegate_markers') / current_setting('block_size')::int8";

/// The position of one process in its cycle through the blocks of the table. The cycle starts at a
/// random block, so that many short-lived processes together scan all blocks.
#[derive(Debug)]
pub(crate) struct Sweep {
    /// Operations since the last scan.
    operations: AtomicUsize,
    /// `None` before the first scan. That reads the first blocks, and the number of blocks, from
    /// which the random start is chosen.
    next_block: Lock<Option<i64>>,
    throttle: Lock<LogThrottle>,
    is_running: AtomicBool,
}

impl Default for Sweep {
    fn default() -> Self {
        Self {
            operations: AtomicUsize::new(fastrand::usize(..OPERATIONS)),
            next_block: Lock::default(),
            throttle: Lock::new(LogThrottle::every(LOG_INTERVAL)),
            is_running: AtomicBool::new(false),
        }
    }
}

/// Resets [`Sweep::is_running`] however the scan ends.
struct ScanInProgress<'a>(&'a AtomicBool);

impl Drop for ScanInProgress<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Sweep {
    /// Counts operations, and starts a scan in a task after every [`OPERATIONS`] of them, on
    /// another connection than the operations.
    pub(crate) fn count(
        self: &Arc<Self>,
        operations: usize,
        connections: &Arc<PostgresConnections>,
    ) {
        let counted = self.operations.fetch_add(operations, Ordering::Relaxed) + operations;
        if counted < OPERATIONS || self.is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        self.operations.store(0, Ordering::Relaxed);
        let (sweep, connections) = (self.clone(), connections.clone());
        tokio::spawn(async move {
            let _in_progress = ScanInProgress(&sweep.is_running);
            let swept = tokio::time::timeout(TIMEOUT, sweep.run(&connections)).await;
            let swept = swept.unwrap_or_else(|elapsed| Err(SweepError(elapsed.into())));
            if let Err(error) = swept
                && let Some(suppressed_lines) = sweep.throttle.lock().due(Instant::now())
            {
                tracing::warn!(%error, suppressed_lines, "expired markers not deleted, the next scan tries again; until one succeeds, the table grows");
            }
        });
    }

    async fn run(&self, connections: &PostgresConnections) -> Result<(), SweepError> {
        let first = *self.next_block.lock();
        let from = first.unwrap_or(0);
        let mut taken = connections
            .take()
            .await
            .map_err(|error| SweepError(oncegate_core::StoreError::from(error).into()))?;
        let row = sqlx::query(SWEEP)
            .bind(from)
            .bind(from + BLOCKS)
            .fetch_one(&mut taken.connection)
            .await
            .map_err(|error| SweepError(error.into()))?;
        let columns = || Ok::<(i64, i64), sqlx::Error>((row.try_get(0)?, row.try_get(1)?));
        let (deleted, blocks) = columns().map_err(|error| SweepError(error.into()))?;
        let next = match first {
            None => fastrand::i64(0..blocks.max(1)),
            Some(_) if from + BLOCKS >= blocks => 0,
            Some(_) => from + BLOCKS,
        };
        *self.next_block.lock() = Some(next);
        metrics::counter!(MARKERS_EXPIRED).increment(deleted.unsigned_abs());
        results::delete_expired(&mut taken.connection, 2 * OPERATIONS)
            .await
            .map_err(|error| SweepError(error.into()))?;
        taken.put_back();
        Ok(())
    }
}

/// Why a scan failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct SweepError(oncegate_core::store::BoxError);
