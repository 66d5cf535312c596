//! Up to [`MAX_CONNECTIONS`] connections to one server.

use std::time::Duration;

use oncegate_core::internal::{Lock, Problem, StoreFailure, milliseconds};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, Connection, Executor};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::failure::{self, StatementStage};

/// Two for the batches that a consumer may apply at the same time, and one for the rest: the
/// deletion of expired rows, or an operator's request.
const MAX_CONNECTIONS: usize = 3;

/// The settings of each session. A batch passes its keys as an array, whose length the planner does
/// not know, and the statistics of a table that grows quickly are outdated: without these settings
/// the planner may read the whole table for each batch.
///
/// `synchronous_commit` is set for the session, so that an answered operation survives a crash also
/// if the server's setting is changed to `off` later.
///
/// `connect` adds `statement_timeout`: the server then cancels a statement that waits for a lock
/// when the store no longer waits for its reply. Otherwise each retry would leave one more waiting
/// session, up to `max_connections`.
const SESSION: &str = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off;
    SET plan_cache_mode = force_generic_plan; SET default_transaction_isolation = 'read committed';
    SELECT set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)";

/// The connections of one store.
pub(crate) struct PostgresConnections {
    options: Result<PgConnectOptions, Problem>,
    statement_timeout: Duration,
    permits: Semaphore,
    idle: Lock<Vec<PgConnection>>,
}

/// A connection in use. Dropping it closes the connection; [`put_back`](Self::put_back) keeps it.
pub(crate) struct ConnectionGuard<'a> {
    pub(crate) connection: PgConnection,
    connections: &'a PostgresConnections,
    _permit: SemaphorePermit<'a>,
}

impl PostgresConnections {
    pub(crate) fn new(
        options: Result<PgConnectOptions, Problem>,
        statement_timeout: Duration,
    ) -> Self {
        Self {
            options,
            statement_timeout,
            permits: Semaphore::new(MAX_CONNECTIONS),
            idle: Lock::default(),
        }
    }

    pub(crate) fn options(&self) -> &Result<PgConnectOptions, Problem> {
        &self.options
    }

    /// The address of the server, without secrets.
    pub(crate) fn server(&self) -> String {
        match &self.options {
            Ok(options) => {
                let database = options.get_database().unwrap_or(options.get_username());
                format!("{}:{}/{database}", options.get_host(), options.get_port())
            }
            Err(_) => "an invalid address".to_owned(),
        }
    }

    /// Takes an idle connection, or opens a new one. Waits while [`MAX_CONNECTIONS`] are in use.
    ///
    /// # Errors
    /// The URL is invalid, or connecting failed. Nothing was applied.
    pub(crate) async fn take(&self) -> Result<ConnectionGuard<'_>, StoreFailure> {
        let options = match &self.options {
            Ok(options) => options,
            Err(problem) => return Err(StoreFailure::Misconfigured(problem.clone())),
        };
        let permit = self
            .permits
            .acquire()
            .await
            .map_err(|_| StoreFailure::not_applied("the store is closed"))?;
        let idle = self.idle.lock().pop();
        let connection = match idle {
            Some(connection) => connection,
            None => self
                .connect(options)
                .await
                .map_err(|error| failure::of(error, StatementStage::Connecting, &self.server()))?,
        };
        Ok(ConnectionGuard {
            connection,
            connections: self,
            _permit: permit,
        })
    }

    async fn connect(&self, options: &PgConnectOptions) -> Result<PgConnection, sqlx::Error> {
        let mut connection = PgConnection::connect_with(options).await?;
        let timeout = milliseconds(self.statement_timeout).max(1);
        let session = format!("{SESSION}; SET statement_timeout = {timeout}");
        connection.execute(AssertSqlSafe(session)).await?;
        Ok(connection)
    }

    /// Closes the idle connections. Called after a request failed: the server may have been
    /// restarted, and then the idle connections are broken, too.
    pub(crate) fn close_idle(&self) {
        self.idle.lock().clear();
    }

    /// Runs a request within a timeout. `stage` decides whether an error may have applied it; for a
    /// request that changes nothing it is [`StatementStage::Connecting`], because such a request
    /// can always be repeated.
    pub(crate) async fn request<T>(
        &self,
        timeout: Duration,
        stage: StatementStage,
        request: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, StoreFailure> {
        let run = async {
            let mut taken = self.take().await?;
            match request(&mut taken.connection).await {
                Ok(answer) => {
                    taken.put_back();
                    Ok(answer)
                }
                Err(error) => {
                    self.close_idle();
                    Err(failure::of(error, stage, &self.server()))
                }
            }
        };
        let ended = tokio::time::timeout(timeout, run).await;
        ended.unwrap_or_else(|_| {
            self.close_idle();
            let text = self.no_answer(timeout);
            Err(match stage {
                StatementStage::Connecting => StoreFailure::not_applied(text),
                StatementStage::Executing | StatementStage::Migrating => {
                    StoreFailure::unknown(text)
                }
            })
        })
    }

    /// Runs a request that changes nothing, within a timeout.
    pub(crate) async fn read<T>(
        &self,
        timeout: Duration,
        request: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, StoreFailure> {
        self.request(timeout, StatementStage::Connecting, request)
            .await
    }

    /// The error text after a timeout.
    pub(crate) fn no_answer(&self, timeout: Duration) -> String {
        format!(
            "no answer from PostgreSQL at {} within {timeout:?}; check its load and the network, or raise Postgres::timeout",
            self.server()
        )
    }
}

impl ConnectionGuard<'_> {
    /// Keeps the connection for the next request.
    pub(crate) fn put_back(self) {
        self.connections.idle.lock().push(self.connection);
    }
}
