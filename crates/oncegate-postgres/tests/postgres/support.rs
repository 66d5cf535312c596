//! Stores in schemas of their own, and raw connections.

use oncegate_core::marker::Token;
use oncegate_postgres::Postgres;
use sqlx::{Connection, Executor, PgConnection};

pub(crate) use oncegate_testkit::operations::{
    DONE, GRANTED, SECOND, key, operation, terms, verdicts,
};

/// The URL of a new, empty schema of the shared server.
pub(crate) async fn new_schema() -> String {
    new_schema_at(&oncegate_testkit::postgres_url().expect("ONCEGATE_POSTGRES is set")).await
}

/// The URL of a new, empty schema of this server.
pub(crate) async fn new_schema_at(url: &str) -> String {
    let schema = format!("test_{:032x}", Token::random().0);
    let mut connection = PgConnection::connect(url).await.expect("a connection");
    let create = format!("CREATE SCHEMA {schema}");
    connection
        .execute(sqlx::AssertSqlSafe(create))
        .await
        .expect("a schema");
    connection.close().await.expect("closed");
    format!("{url}?options[search_path]={schema}")
}

/// A store in the schema of this URL, with its tables.
pub(crate) async fn store_at(url: &str) -> Postgres {
    let store = Postgres::url(url).timeout(10 * SECOND);
    store.migrate().await.expect("the tables are created");
    store
}

/// A store in a schema of its own.
pub(crate) async fn store() -> Postgres {
    store_at(&new_schema().await).await
}

/// A connection to the schema of a URL.
pub(crate) async fn raw(url: &str) -> PgConnection {
    PgConnection::connect(url).await.expect("a connection")
}
