//! The ledger of the provider, in a SQLite file that several processes may share.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, Result, Transaction, TransactionBehavior, params};

const TABLES: &str = "
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = OFF; -- survives a killed process
    CREATE TABLE IF NOT EXISTS charges (id TEXT, amount INTEGER, attempt INTEGER);
    CREATE INDEX IF NOT EXISTS charges_by_id ON charges (id);
    -- Attempts up to and including this one are refused.
    CREATE TABLE IF NOT EXISTS voided (id TEXT PRIMARY KEY, attempt INTEGER);
    -- What the workers count, for the report.
    CREATE TABLE IF NOT EXISTS counts
        (worker TEXT, outcome TEXT, count INTEGER, PRIMARY KEY (worker, outcome));
";
const FIND: &str = "SELECT 1 FROM charges WHERE id = ?";
/// Changes nothing if the attempt was voided.
const CHARGE: &str = "
    INSERT INTO charges SELECT ?1, ?2, ?3
    WHERE NOT EXISTS (SELECT 1 FROM voided WHERE id = ?1 AND attempt >= ?3)";
/// Changes nothing if the payment was charged.
const VOID: &str = "
    INSERT INTO voided SELECT ?1, ?2 WHERE NOT EXISTS (SELECT 1 FROM charges WHERE id = ?1)
    ON CONFLICT DO UPDATE SET attempt = max(attempt, excluded.attempt)";

pub(crate) struct Ledger(Connection);

impl Ledger {
    pub(crate) fn open(run_dir: &Path) -> Result<Self> {
        let file = Connection::open(run_dir.join("ledger.db"))?;
        file.busy_timeout(Duration::from_secs(10))?;
        file.execute_batch(TABLES)?;
        Ok(Self(file))
    }

    /// Books a charge, with `once` only if there is none with this id; `false` if its attempt
    /// was voided.
    pub(crate) fn charge(
        &mut self,
        id: &str,
        amount: u32,
        attempt: u32,
        once: bool,
    ) -> Result<bool> {
        let file = self.write()?;
        let is_repeated = once && file.prepare(FIND)?.exists([id])?;
        let is_accepted = is_repeated || file.execute(CHARGE, params![id, amount, attempt])? > 0;
        file.commit()?;
        Ok(is_accepted)
    }

    /// Whether a payment was charged; if not, voids its attempts up to and including this one.
    pub(crate) fn find_or_void(&self, id: &str, attempt: u32) -> Result<bool> {
        Ok(self.0.execute(VOID, params![id, attempt])? == 0)
    }

    /// How often each payment was charged.
    pub(crate) fn charges(&self) -> Result<HashMap<String, i64>> {
        self.numbers("SELECT id, count(*) FROM charges GROUP BY id")
    }

    /// Records what a worker has counted, from its metrics in the Prometheus text format.
    pub(crate) fn note_counts(&mut self, worker: &str, metrics: &str) -> Result<()> {
        let file = self.write()?;
        for line in metrics.lines() {
            let deliveries = line.strip_prefix("oncegate_deliveries_total{outcome=\"");
            if let Some((outcome, count)) = deliveries.and_then(|it| it.split_once("\"} ")) {
                let values = params![worker, outcome, count];
                file.execute("INSERT OR REPLACE INTO counts VALUES (?, ?, ?)", values)?;
            }
        }
        file.commit()
    }

    /// The counts of all workers by outcome.
    pub(crate) fn counts(&self) -> Result<HashMap<String, i64>> {
        self.numbers("SELECT outcome, sum(count) FROM counts GROUP BY outcome")
    }

    fn numbers(&self, query: &str) -> Result<HashMap<String, i64>> {
        let mut query = self.0.prepare(query)?;
        let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        rows.collect()
    }

    fn write(&mut self) -> Result<Transaction<'_>> {
        self.0
            .transaction_with_behavior(TransactionBehavior::Immediate)
    }
}
