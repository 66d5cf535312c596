-- The ledger of an inbox in PostgreSQL, in a schema of the run, which is the search_path. The lock is held until the
-- end of these statements, because several workers start at the same time.
SELECT pg_advisory_xact_lock(1);
CREATE SCHEMA IF NOT EXISTS "NAME";
CREATE TABLE IF NOT EXISTS charges (id text, amount bigint);
