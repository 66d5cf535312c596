//! [`Postgres`], the store.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::internal::{Problem, StoreFailure};
use oncegate_core::marker::{Guarantee, Operation, Verdict};
use oncegate_core::store::APPLY_TIMEOUT;
use oncegate_core::{Persistence, ResultStore, Store, StoreError};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, PgPool};

use crate::apply::{self, Progress};
use crate::connections::PostgresConnections;
use crate::failure::StatementStage;
use crate::preflight::PostgresState;
use crate::schema::SchemaVersion;
use crate::sweep::Sweep;
use crate::{preflight, schema, url_parameters};

/// The time limit of creating or updating the tables.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Stores markers in the table `oncegate_markers` of a PostgreSQL database, version 14 or newer, and
/// results of runs in `oncegate_results`.
///
/// Each operation is atomic on its key and uses the server's clock. A batch of claims of new ids
/// and of completions is one statement; an operation on a key in another state needs a second
/// statement. The store opens up to three connections on first use, and three for the renewal of
/// leases, and reconnects after a failure; operations that were in flight then are
/// [`StoreError::Unknown`]. Clones share the connections.
///
/// Expired rows are deleted in the background, in proportion to the operations.
///
/// ```
/// use oncegate_postgres::Postgres;
///
/// let store = Postgres::url("postgres://ledger:secret@localhost/ledger").create_tables();
/// ```
#[derive(Clone)]
pub struct Postgres {
    connections: Arc<PostgresConnections>,
    sweep: Arc<Sweep>,
    timeout: Duration,
    tables: TableSetup,
}

/// What the preflight does if the tables are missing or older than this release: it fails, or
/// creates or updates them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TableSetup {
    Check,
    Create,
}

impl Postgres {
    /// The database at `postgres://[user[:password]@]host[:port]/database[?sslmode=verify-full&…]`,
    /// with the parameters that sqlx knows, and one host. Tables are searched in the schemas of the
    /// user's `search_path`, and created in the first of them.
    ///
    /// Does not connect yet. An invalid URL is [`StoreError::Misconfigured`] at the first use.
    pub fn url(url: impl AsRef<str>) -> Self {
        let url = url.as_ref();
        let is_postgres = ["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| url.starts_with(scheme));
        // sqlx's error is not returned, since its text may quote the URL with the password. An
        // unknown parameter whose name contains an @ is not named either: it is part of a password
        // that contains a ?.
        let unknown = url_parameters::first_unknown(url);
        let is_readable = is_postgres && unknown.is_none_or(|name| !name.contains('@'));
        let options = PgConnectOptions::from_str(url).ok().filter(|_| is_readable);
        Self::with_options(match (options, unknown) {
            (Some(options), None) => Ok(options),
            (Some(_), Some(name)) => Err(Problem::new(format!(
                "Postgres::url: the parameter {name:?} is unknown, and would be ignored; remove it, or correct it, such as sslmode"
            ))),
            (None, _) => Err(Problem::new(
                "Postgres::url: it is not a URL such as postgres://user:password@host:5432/database",
            )),
        })
    }

    /// The database of this pool: the same address, user and TLS settings, with connections that do
    /// not count as the pool's. Its `after_connect` is not called.
    pub fn pool(pool: &PgPool) -> Self {
        Self::with_options(Ok(pool.connect_options().as_ref().clone()))
    }

    fn with_options(options: Result<PgConnectOptions, Problem>) -> Self {
        // sqlx would log each slow statement with its text.
        let options = options.map(|options| {
            options
                .application_name("oncegate")
                .disable_statement_logging()
        });
        Self {
            connections: Arc::new(PostgresConnections::new(options, APPLY_TIMEOUT)),
            sweep: Arc::default(),
            timeout: APPLY_TIMEOUT,
            tables: TableSetup::Check,
        }
    }

    /// Creates the tables at the start, or updates those of an older release. The user needs the
    /// right `CREATE` on the schema. Without this, missing tables are
    /// [`StoreError::Misconfigured`].
    #[must_use]
    pub fn create_tables(mut self) -> Self {
        self.tables = TableSetup::Create;
        self
    }

    /// The timeout of an operation, including the time to connect, after which its outcome is
    /// unknown: 2 s by default. 0 is [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self.connections = self.new_connections();
        self
    }

    /// Checks the URL and the settings without connecting.
    ///
    /// # Errors
    /// [`StoreError::Misconfigured`], as at the first use.
    pub fn check(&self) -> Result<(), StoreError> {
        Ok(self.check_settings()?)
    }

    /// Creates the tables, or updates those of an older release, in one transaction. Changes
    /// nothing if they are up to date.
    ///
    /// # Errors
    /// [`StoreError::Misconfigured`] if the user may not create tables, or the tables are newer
    /// than this release; otherwise as for [`Store::apply`].
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.check_settings()?;
        let before = self
            .connections
            .request(
                MIGRATION_TIMEOUT,
                StatementStage::Migrating,
                schema::migrate,
            )
            .await?;
        match before {
            SchemaVersion::Found(version) if version > schema::VERSION => {
                schema::check(before)?;
            }
            SchemaVersion::Found(schema::VERSION) => {}
            SchemaVersion::Missing | SchemaVersion::Found(_) => {
                tracing::info!(server = %self.connections.server(), version = schema::VERSION, "tables created or updated");
            }
        }
        Ok(())
    }

    /// Checks the settings, the server and the version of the tables, which are created or updated
    /// first if the settings say so.
    ///
    /// # Errors
    /// As for [`Store::preflight`].
    pub(crate) async fn prepare_tables(&self) -> Result<PostgresState, StoreError> {
        self.check_settings()?;
        let server = self.connections.server();
        let state = self
            .connections
            .read(self.timeout, preflight::inspect)
            .await?;
        state.check_server(&server)?;
        if self.tables == TableSetup::Create {
            self.migrate().await?;
        }
        let (version, state) = self
            .connections
            .read(self.timeout, async |connection: &mut _| {
                let version = schema::version(connection).await?;
                Ok((version, preflight::inspect(connection).await?))
            })
            .await?;
        schema::check(version)?;
        Ok(state)
    }

    fn new_connections(&self) -> Arc<PostgresConnections> {
        let options = self.connections.options().clone();
        Arc::new(PostgresConnections::new(options, self.timeout))
    }

    pub(crate) fn connections(&self) -> &PostgresConnections {
        &self.connections
    }

    /// Counts operations of the inbox, which do not go through [`Store::apply`]: expired rows are
    /// deleted in proportion to all operations.
    pub(crate) fn count_operations(&self, count: usize) {
        self.sweep.count(count, &self.connections);
    }

    pub(crate) fn timeout_setting(&self) -> Duration {
        self.timeout
    }

    fn check_settings(&self) -> Result<(), StoreFailure> {
        if let Err(problem) = self.connections.options() {
            return Err(StoreFailure::Misconfigured(problem.clone()));
        }
        if self.timeout.is_zero() {
            return Err(StoreFailure::misconfigured(
                "Postgres::timeout: the timeout is 0; set at least a network round trip, such as 500 ms",
            ));
        }
        Ok(())
    }

    /// Applies operations within the timeout; with a `result`, one completion that stores it.
    /// Returns their answers, and the result of an id that was done before its completion.
    pub(crate) async fn run(
        &self,
        operations: &[Operation],
        result: Option<&[u8]>,
    ) -> (Vec<Result<Verdict, StoreError>>, Option<Vec<u8>>) {
        let mut progress = Progress::new(operations.len());
        let failure = match self.check_settings() {
            Ok(()) => self.request(operations, result, &mut progress).await,
            Err(failure) => Some(failure),
        };
        self.sweep.count(operations.len(), &self.connections);
        let earlier = progress.earlier.take();
        let answers = progress.into_answers(failure).into_iter();
        let answers = answers.map(|answer| answer.map_err(StoreError::from));
        (answers.collect(), earlier)
    }

    /// Returns the failure of the operations without an answer in `progress`, if any.
    async fn request(
        &self,
        operations: &[Operation],
        result: Option<&[u8]>,
        progress: &mut Progress,
    ) -> Option<StoreFailure> {
        let apply = async |connection: &mut PgConnection| {
            apply::run(connection, operations, result, progress).await
        };
        let (timeout, stage) = (self.timeout, StatementStage::Executing);
        let applied = self.connections.request(timeout, stage, apply);
        applied.await.err()
    }
}

#[async_trait]
impl Store for Postgres {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if operations.is_empty() {
            return Vec::new();
        }
        self.run(operations, None).await.0
    }

    fn described(&self) -> String {
        format!("PostgreSQL at {}", self.connections.server())
    }

    async fn preflight(&self, _: Guarantee) -> Result<(), StoreError> {
        let state = self.prepare_tables().await?;
        let user = self.connections.options().as_ref();
        let user = user.map_or("", |options| options.get_username());
        Ok(state.check_rights(&self.connections.server(), user)?)
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.check_settings()?;
        let state = self
            .connections
            .read(self.timeout, preflight::inspect)
            .await?;
        Ok(state.persistence())
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        Some(Arc::new(Self {
            connections: self.new_connections(),
            sweep: Arc::default(),
            ..self.clone()
        }))
    }

    /// Two batches: the caller processes the answers of one while the server applies the other.
    fn parallel_applies(&self) -> usize {
        2
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("address", &self.connections.server())
            .field("timeout", &self.timeout)
            .field("tables", &self.tables)
            .finish()
    }
}
