//! The tables, and how they are created and updated.

use oncegate_core::internal::{Problem, StoreFailure};
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Executor, Row};

/// The version of the tables that this release reads and writes.
pub(crate) const VERSION: i32 = 3;

/// The statements that update the tables from each version to the next, the first from version 0.
///
/// `fillfactor` leaves room on the page of a claim for its completion, which then changes no index.
/// The scale factors of autovacuum are lower than PostgreSQL's, by which a fifth of the rows may be dead
/// before it starts.
///
/// Results are not updated, and most are written in the order of their expiry, so an index on it
/// costs little.
const MIGRATIONS: [&str; VERSION as usize] = ["
CREATE TABLE oncegate_markers ( -- all stored markers, one row per id; times in milliseconds, by this server's clock
    key         text COLLATE \"C\" PRIMARY KEY, -- <id>, or <scope>|<id>
    expires     int8 NOT NULL, -- since 1970; the row counts as absent from then on
    state       int2 NOT NULL, -- 0 done, 1 cleared, 2 in progress, 3 in doubt, 4 in doubt and being reconciled, 5 rejected
    guarantee   int2, -- of the holder: 0 at most once, 1 effectively once, 2 bare
    effect      int2, -- what earlier attempts may have done: 0 nothing, 1 unknown
    fingerprint int8, -- of the body, if bodies are compared
    attempt     int8, -- the number of the last attempt, the fencing token
    base        int8, -- how many attempts max_attempts does not count
    crashes     int8, -- how many leases ended without an outcome
    lease       int8,
    horizon     int8, -- from the last write until it expires
    token       bytea -- the claim that holds the id
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05);
CREATE TABLE IF NOT EXISTS oncegate_audit ( -- what operators did, one line of JSON per step
    number int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    entry  text NOT NULL)", "
CREATE TABLE IF NOT EXISTS oncegate_outbox ( -- messages of committed transactions that the relay has not published yet
    number      int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- transactions may be committed in another order
    id          text NOT NULL, -- the message id
    created     timestamptz NOT NULL DEFAULT clock_timestamp(),
    exchange    text NOT NULL, -- of RabbitMQ; empty for the default exchange and for Kafka
    destination text NOT NULL, -- queue, topic or routing key
    key         bytea,
    headers     text NOT NULL, -- JSON: [[name, value], ...]
    body        bytea NOT NULL,
    error       text -- why the message cannot be published; the relay skips such rows, and later ones of their key
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS oncegate_outbox_unsent ON oncegate_outbox (exchange, destination, number) WHERE error IS NULL;
CREATE INDEX IF NOT EXISTS oncegate_outbox_parked ON oncegate_outbox (exchange, destination, key) WHERE error IS NOT NULL", "
CREATE TABLE IF NOT EXISTS oncegate_results ( -- what completed runs returned, written together with their done markers
    key     text COLLATE \"C\" PRIMARY KEY, -- that of the marker
    expires int8 NOT NULL, -- that of the marker; a result without a done marker of this expiry does not count
    result  bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS oncegate_results_expires ON oncegate_results (expires)"];

/// Whether the tables exist, and their version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SchemaVersion {
    Missing,
    Found(i32),
}

/// Reads the version of the tables.
///
/// # Errors
/// A query failed.
pub(crate) async fn version(connection: &mut PgConnection) -> Result<SchemaVersion, sqlx::Error> {
    let exists = sqlx::query("SELECT to_regclass('oncegate_schema') IS NOT NULL AND to_regclass('oncegate_markers') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await?;
    if !exists.try_get::<bool, _>(0)? {
        return Ok(SchemaVersion::Missing);
    }
    let row = sqlx::query("SELECT max(version) FROM oncegate_schema")
        .fetch_one(connection)
        .await?;
    Ok(row
        .try_get::<Option<i32>, _>(0)?
        .map_or(SchemaVersion::Missing, SchemaVersion::Found))
}

/// Checks that the tables have the version of this release.
///
/// # Errors
/// They do not exist, or have another version; the text has the remedy.
pub(crate) fn check(found: SchemaVersion) -> Result<(), StoreFailure> {
    let remedy = match found {
        SchemaVersion::Found(VERSION) => return Ok(()),
        SchemaVersion::Missing => {
            "oncegate_markers or another table of oncegate does not exist in the search_path of this user: create them with \
             Postgres::create_tables or Postgres::migrate"
                .to_owned()
        }
        SchemaVersion::Found(older) if older < VERSION => format!(
            "the tables have version {older}, this release supports {VERSION}: update them with \
             Postgres::create_tables or Postgres::migrate"
        ),
        SchemaVersion::Found(newer) => {
            format!("the tables have version {newer}, this release supports {VERSION}: upgrade oncegate here")
        }
    };
    Err(StoreFailure::Misconfigured(Problem::new(remedy)))
}

/// Creates or updates the tables, in one transaction. Returns the version that they had. Changes
/// nothing if that is this release's or newer.
///
/// # Errors
/// A statement failed; nothing was changed, unless that was the commit.
pub(crate) async fn migrate(connection: &mut PgConnection) -> Result<SchemaVersion, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    transaction
        .execute("SET LOCAL statement_timeout = 0")
        .await?;
    // Several processes may start at the same time: one migrates, the others wait. The lock's
    // number is arbitrary.
    transaction
        .execute("SELECT pg_advisory_xact_lock(7310482266195035741)")
        .await?;
    let before = version(&mut transaction).await?;
    let from = match before {
        SchemaVersion::Missing => 0,
        SchemaVersion::Found(version) => version,
    };
    if from == 0 {
        transaction
            .execute(
                "CREATE TABLE IF NOT EXISTS oncegate_schema (version int4 PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())",
            )
            .await?;
    }
    for (index, migration) in MIGRATIONS.into_iter().enumerate() {
        let number = index as i32 + 1;
        if number > from {
            transaction.execute(migration).await?;
            sqlx::query("INSERT INTO oncegate_schema (version) VALUES ($1) ON CONFLICT DO NOTHING")
                .bind(number)
                .execute(&mut *transaction)
                .await?;
        }
    }
    transaction.commit().await?;
    Ok(before)
}
