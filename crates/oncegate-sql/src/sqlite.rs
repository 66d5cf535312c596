//! [`Sqlite`], the store.

mod browse;
mod clock;
mod failure;
mod file;
mod handler_guard;
mod inbox;
mod inbox_transaction;
mod marker_table;
mod metric;
mod recent;
mod results;
mod sweep;
mod windows;
mod writer_thread;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::internal::Lock;
use oncegate_core::marker::{Fingerprint, Marker, Operation, Verdict};
use oncegate_core::store::APPLY_TIMEOUT;
use oncegate_core::{Completion, Key, Persistence, ResultStore, Store, StoreError};
use tokio::sync::oneshot;

pub use browse::{SqliteBrowse, SqliteListed};
use failure::StoreFailure;
use file::FileConfig;
pub use inbox::{SqliteInbox, SqliteTransaction};
pub use metric::SQLITE_METRICS;
use recent::MergeLimits;
use writer_thread::WriterRequest;

/// Stores markers, and results of runs, in one SQLite file, which several processes of one machine
/// may share.
///
/// Each operation is atomic on its key and uses the machine's wall clock. Answered operations
/// survive a crash of the process and, with [`Synchronous::Full`], a power cut. A missing file is
/// created; its directory must exist, on a local disk: the write-ahead log needs shared memory,
/// which network file systems do not offer.
///
/// One thread reads and writes the file, from the first use until the last clone is dropped. It
/// combines waiting requests into one transaction of at most about 4,096 operations. Clones share
/// the thread.
///
/// ```
/// use oncegate_sql::Sqlite;
///
/// let store = Sqlite::file("payments.db");
/// ```
#[derive(Clone, Debug)]
pub struct Sqlite(Arc<SqliteHandle>);

/// Which writes a power cut may lose: SQLite's setting `synchronous`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Synchronous {
    /// Nothing that was answered: each transaction is synced to the disk before its operations are
    /// answered. At most once needs this.
    #[default]
    Full,
    /// The last transactions; a crash of the process alone loses nothing. Several times faster on
    /// disks with slow syncs. At most once rejects it, unless a volatile store is allowed.
    Normal,
}

/// What the clones of a store share.
#[derive(Debug)]
struct SqliteHandle {
    config: FileConfig,
    timeout: Duration,
    /// The requests to the thread; `None` until the first one starts it.
    writer: Lock<Option<Sender<WriterRequest>>>,
}

impl Sqlite {
    /// The store in this file. Does not open it yet: errors are returned at the first use.
    pub fn file(path: impl AsRef<Path>) -> Self {
        Self::with_config(
            FileConfig {
                path: path.as_ref().to_owned(),
                synchronous: Synchronous::default(),
                busy_timeout: APPLY_TIMEOUT / 2,
                merge: MergeLimits::default(),
                shares_database: false,
            },
            APPLY_TIMEOUT,
        )
    }

    /// Which writes a power cut may lose: none, by default.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self::with_config(
            FileConfig {
                synchronous,
                ..self.0.config.clone()
            },
            self.0.timeout,
        )
    }

    /// The timeout of an operation, after which its outcome is unknown: 2 s by default. An
    /// operation that waits for locks of other processes for half of it fails, and is not applied.
    /// 0 is [`StoreError::Misconfigured`] at the first use.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self::with_config(
            FileConfig {
                busy_timeout: timeout / 2,
                ..self.0.config.clone()
            },
            timeout,
        )
    }

    /// The current marker of a key, which
    /// [`OperationKind::Redrive`](oncegate_core::marker::OperationKind::Redrive) and
    /// [`OperationKind::Forget`](oncegate_core::marker::OperationKind::Forget) compare with.
    /// Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::UnreadableMarker`] if the row holds no marker that this release can read;
    /// otherwise as for [`Store::apply`].
    pub async fn read_marker(&self, key: &Key) -> Result<Marker, StoreError> {
        Ok(self.read_marker_with_expiry(key).await?.0)
    }

    /// Whether this file or directory is on a file system in memory; at most once does not start
    /// with such a store. `false` where that cannot be determined, as on systems other than Linux.
    pub fn is_on_memory_file_system(path: impl AsRef<Path>) -> bool {
        file::is_on_memory_file_system(path.as_ref())
    }

    /// The bytes that this user may still write on the file system of this file or directory;
    /// `None` if it does not tell. A full disk takes nothing: the consumer waits until there is
    /// space, and its write-ahead log alone may need 16 MB.
    pub fn free_space(path: impl AsRef<Path>) -> Option<u64> {
        let system = rustix::fs::statvfs(path.as_ref()).ok()?;
        // Some network file systems report no size.
        (system.f_blocks > 0).then_some(system.f_bavail.saturating_mul(system.f_frsize))
    }

    fn with_config(config: FileConfig, timeout: Duration) -> Self {
        Self(Arc::new(SqliteHandle {
            config,
            timeout,
            writer: Lock::default(),
        }))
    }

    /// Sends a request to the thread, and waits for the answer within the timeout.
    async fn request<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> WriterRequest,
    ) -> Result<T, StoreFailure> {
        if self.0.timeout.is_zero() {
            let text = "Sqlite::timeout: the timeout is 0: set a longer one, or remove it for the default of";
            return Err(StoreFailure::misconfigured(format!(
                "{text} {APPLY_TIMEOUT:?}"
            )));
        }
        let (reply, answer) = oneshot::channel();
        self.0.submit(request(reply))?;
        match tokio::time::timeout(self.0.timeout, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(StoreFailure::unknown(format!(
                "the SQLite thread for {} panicked",
                self.0.config.name()
            ))),
            Err(_) => Err(StoreFailure::unknown(format!(
                "no answer from {} within {:?}: its disk is slow, or other processes keep it locked; raise Sqlite::timeout",
                self.0.config.name(),
                self.0.timeout
            ))),
        }
    }
}

impl SqliteHandle {
    /// Sends a request to the thread; the first request starts it.
    fn submit(&self, request: WriterRequest) -> Result<(), StoreFailure> {
        let mut writer = self.writer.lock();
        let running = match writer.take() {
            Some(running) => running,
            None => writer_thread::start(self.config.clone()).map_err(|error| {
                StoreFailure::not_applied(format!("cannot start the SQLite thread: {error}; raise the thread limit of this process (`ulimit -u`)"))
            })?,
        };
        writer
            .insert(running)
            .send(request)
            .map_err(|_| StoreFailure::not_applied("the SQLite thread ended"))
    }
}

#[async_trait]
impl Store for Sqlite {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if operations.is_empty() {
            return Vec::new();
        }
        match self
            .request(|reply| WriterRequest::Apply(operations.to_vec(), reply))
            .await
        {
            Ok(answers) => answers
                .into_iter()
                .map(|answer| answer.map_err(StoreError::from))
                .collect(),
            Err(failure) => operations
                .iter()
                .map(|_| Err(failure.clone().into()))
                .collect(),
        }
    }

    fn described(&self) -> String {
        format!("SQLite in {}", self.0.config.name())
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(self.request(WriterRequest::Persistence).await??)
    }

    /// Two batches: the caller processes the answers of one while the thread applies the other.
    fn parallel_applies(&self) -> usize {
        2
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }

    // `for_renewals` keeps its default, which shares this store: the thread needs no runtime, so
    // that a handler that blocks the threads of the runtime does not block it.
}

/// A completion shares the commit of the operations that are waiting with it.
#[async_trait]
impl ResultStore for Sqlite {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        let (completion, result) = (Box::new(completion.clone()), result.to_vec());
        Ok(self
            .request(|reply| WriterRequest::Complete(completion, result, reply))
            .await??)
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let read = Box::new((key.clone(), fingerprint));
        Ok(self
            .request(|reply| WriterRequest::ReadResult(read, reply))
            .await??)
    }
}
