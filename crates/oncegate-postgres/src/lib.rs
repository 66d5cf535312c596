//! The PostgreSQL store of oncegate: [`Postgres::url`], or [`Postgres::pool`] with the options of
//! an sqlx pool; PostgreSQL 14 or newer.
//!
//! Its metrics are [`POSTGRES_METRICS`]; call [`describe`](oncegate_core::metric::Metric::describe)
//! on each.
//!
//! A batch of claims of new ids and of completions is one statement: one round trip and one commit.
//! So is a completion with the result of a run (`Gate::run_stored`), which is stored with it.
//! Terms such as claim and marker: <https://github.com/oncegate/oncegate/blob/main/docs/src/promises.md#terms>.
#![forbid(unsafe_code)]

mod apply;
mod browse;
mod connections;
mod dropped_begin;
mod failure;
mod inbox;
mod metric;
mod outbox;
mod preflight;
mod results;
mod savepoint_depth;
mod schema;
mod statement;
mod store;
mod sweep;
mod url_parameters;

pub use browse::PostgresBrowse;
pub use inbox::{PostgresInbox, PostgresTransaction};
pub use metric::POSTGRES_METRICS;
pub use outbox::{ListedMessage, OutboxFilter, PostgresOutbox, PostgresOutboxSession};
pub use store::Postgres;
