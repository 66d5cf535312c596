//! The store that users name.

mod browse;
mod clock;
mod desk;
mod failure;
mod file;
mod metric;
mod rows;
mod sweep;
mod windows;

use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::marker::{Marker, Operation, Verdict};
use oncegate_core::store::APPLY_TIMEOUT;
use oncegate_core::{Key, Persistence, Store, StoreError};
use tokio::sync::oneshot;

pub use browse::{SqliteBrowse, SqliteListed};
use desk::Request;
use failure::Failure;
use file::Place;
pub use metric::SQLITE_METRICS;

/// Remembers ids in one SQLite file, which several processes of one machine may share.
///
/// Each operation is atomic on its key and judged by the machine's wall clock. What was answered
/// survives the end of the process, kill -9 included, and, with [`Synchronous::Full`], a power cut.
/// The file is made when it is missing; its directory has to be there, on a local disk: write-ahead
/// logging needs memory that the processes share, which network file systems do not offer.
///
/// A thread of its own works on the file, from the first use until the last clone is dropped. All
/// that waits for it shares one transaction. Clones share the thread.
///
/// ```
/// use oncegate_sql::Sqlite;
///
/// let store = Sqlite::file("payments.db");
/// ```
#[derive(Clone, Debug)]
pub struct Sqlite(Arc<Handle>);

/// What a power cut may cost: SQLite's setting `synchronous`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// Nothing that was answered: each transaction is on the disk before its operations are
    /// answered. At most once needs this.
    #[default]
    Full,
    /// The transactions of the last moments; the end of the process alone costs nothing. Several
    /// times faster on disks that are slow to sync. At most once refuses it, unless told to accept
    /// a forgetful store.
    Normal,
}

#[derive(Debug)]
struct Handle {
    place: Place,
    timeout: Duration,
    desk: Mutex<Option<Sender<Request>>>,
}

impl Sqlite {
    /// The store in this file. Opens nothing yet: what is wrong with it is said at the first use.
    pub fn file(path: impl AsRef<Path>) -> Self {
        Self::at(
            Place {
                path: path.as_ref().to_owned(),
                synchronous: Synchronous::default(),
                patience: APPLY_TIMEOUT / 2,
            },
            APPLY_TIMEOUT,
        )
    }

    /// What a power cut may cost: nothing, by default.
    #[must_use]
    pub fn synchronous(self, synchronous: Synchronous) -> Self {
        Self::at(
            Place {
                synchronous,
                ..self.0.place.clone()
            },
            self.0.timeout,
        )
    }

    /// How long an answer may take before its outcome is unknown: 2 s by default. Half of it may be
    /// spent waiting for other processes that write to the file; after that nothing was applied.
    /// Zero is refused at the first use.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        Self::at(
            Place {
                patience: timeout / 2,
                ..self.0.place.clone()
            },
            timeout,
        )
    }

    /// The marker under a key as it is now: what an operator has to have seen before
    /// [`Ask::Forget`](oncegate_core::marker::Ask::Forget) or
    /// [`Ask::Resolve`](oncegate_core::marker::Ask::Resolve). Changes nothing.
    ///
    /// # Errors
    /// [`StoreError::UnreadableMarker`] if the row holds no marker that this release can read;
    /// otherwise as for [`Store::apply`].
    pub async fn look(&self, key: &Key) -> Result<Marker, StoreError> {
        Ok(self
            .ask(|reply| Request::Look(key.clone(), reply))
            .await??)
    }

    /// Whether this file or directory is on a file system in memory, where at most once refuses to
    /// store markers. `false` where that cannot be determined, as on systems other than Linux.
    pub fn is_on_memory_file_system(path: impl AsRef<Path>) -> bool {
        file::is_on_memory_file_system(path.as_ref())
    }

    fn at(place: Place, timeout: Duration) -> Self {
        Self(Arc::new(Handle {
            place,
            timeout,
            desk: Mutex::default(),
        }))
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, Failure> {
        if self.0.timeout.is_zero() {
            let text = "Sqlite::timeout: no file answers within no time: allow some, or leave it out for the default of";
            return Err(Failure::misconfigured(format!("{text} {APPLY_TIMEOUT:?}")));
        }
        let (reply, answer) = oneshot::channel();
        self.0.hand_in(request(reply))?;
        match tokio::time::timeout(self.0.timeout, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(Failure::unknown(format!(
                "the thread that works on {} panicked",
                self.0.place.name()
            ))),
            Err(_) => Err(Failure::unknown(format!(
                "{} has not answered within {:?}: its disk is slow, or others write to it all the time; Sqlite::timeout allows more",
                self.0.place.name(),
                self.0.timeout
            ))),
        }
    }
}

impl Handle {
    /// Gives a request to the thread, which the first one starts.
    fn hand_in(&self, request: Request) -> Result<(), Failure> {
        let mut desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        let running = match desk.take() {
            Some(running) => running,
            None => desk::start(self.place.clone())
                .map_err(|error| Failure::not_applied(format!("no thread for SQLite: {error}")))?,
        };
        desk.insert(running)
            .send(request)
            .map_err(|_| Failure::not_applied("the thread for SQLite ended"))
    }
}

#[async_trait]
impl Store for Sqlite {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if operations.is_empty() {
            return Vec::new();
        }
        match self
            .ask(|reply| Request::Apply(operations.to_vec(), reply))
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
        format!("SQLite in {}", self.0.place.name())
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        Ok(self.ask(Request::Memory).await??)
    }

    /// Two: while one is worked on, what the other came to is carried out.
    fn parallel_applies(&self) -> usize {
        2
    }

    // For the renewals this handle is as good as another: its thread needs no runtime, and no
    // handler can block it.
}
