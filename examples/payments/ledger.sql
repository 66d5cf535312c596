-- The provider's ledger.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF; -- enough: a killed process loses no commit
CREATE TABLE IF NOT EXISTS charges (id TEXT, amount INTEGER, attempt INTEGER);
CREATE INDEX IF NOT EXISTS charges_by_id ON charges (id);
-- Attempts up to and including this one are refused.
CREATE TABLE IF NOT EXISTS voided (id TEXT PRIMARY KEY, attempt INTEGER);
-- The metrics of each worker process, for the report.
CREATE TABLE IF NOT EXISTS workers (name TEXT PRIMARY KEY, metrics TEXT);
