//! Stores in schemas of their own, raw connections, and faults of a server.

use std::time::Duration;

use oncegate_core::marker::Token;
use oncegate_postgres::Postgres;
use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::PostgresServer;
use sqlx::{Connection, Executor, PgConnection, query};
use tokio::task::JoinHandle;

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

/// Terminates sessions that execute a statement of an inbox, until it is over. Returns how many.
pub(crate) async fn terminate_sessions(url: &str, is_over: impl Fn() -> bool) -> usize {
    let mut operator = raw(url).await;
    let mut terminated = 0;
    let mut words = ["COMMIT", "ledger", "oncegate_markers", "BEGIN"]
        .into_iter()
        .cycle();
    while !is_over() {
        let some = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle' AND query LIKE '%' || $1 || '%'";
        let ended = query(some).bind(words.next()).execute(&mut operator).await;
        terminated += usize::try_from(ended.expect("terminated").rows_affected()).expect("few");
        tokio::time::sleep(SECOND / 50).await;
    }
    println!("{terminated} sessions terminated");
    terminated
}

/// A server, a proxy to it, and the URL of a new schema through the proxy.
pub(crate) async fn behind_proxy() -> (PostgresServer, Proxy, String) {
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let url = new_schema_at(&server.url()).await;
    let [direct, through] = [server.port(), proxy.port()].map(|port| format!(":{port}/"));
    let url = url.replace(&direct, &through);
    (server, proxy, url)
}

/// Kills the server five times at random times, and starts it again.
pub(crate) fn kill_repeatedly(mut server: PostgresServer) -> JoinHandle<PostgresServer> {
    tokio::task::spawn_blocking(move || {
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(fastrand::u64(50..300)));
            server.kill();
            let restarted = (0..5).any(|_| server.start_again().is_ok());
            assert!(restarted, "it starts again");
        }
        server
    })
}
