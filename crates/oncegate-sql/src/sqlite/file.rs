//! The file: what it must be, how it is opened, and whether it survives.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oncegate_core::Persistence;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::Synchronous;
use super::failure::{Failure, Stage};
use super::windows;

/// Marks the file as ours: `once` in ASCII.
const APPLICATION: i32 = i32::from_be_bytes(*b"once");

/// The version of the table. Another one is refused, and left as it is.
const VERSION: i32 = 1;

/// The comments stand in the file too, for whoever looks at it with `sqlite3`.
const TABLE: &str = "
CREATE TABLE markers (        -- what oncegate remembers: a row per id; times in milliseconds since 1970
    key         TEXT PRIMARY KEY, -- <id>, or <scope>|<id>
    expires     INTEGER NOT NULL, -- after this time the row counts as absent
    state       INTEGER NOT NULL, -- 0 done, 1 cleared, 2 in progress, 3 in doubt, 4 in doubt and reconciling, 5 rejected
    fingerprint INTEGER,          -- of the body, where bodies are compared
    attempt     INTEGER,          -- the number of the last attempt; NULL if done
    base        INTEGER,          -- how many attempts the budget does not count; from here on NULL if done or rejected
    crashes     INTEGER,          -- holders whose lease ended without an outcome since the id was last sent back
    effect      INTEGER,          -- what earlier attempts left behind: 0 nothing, 1 unknown
    token       BLOB,             -- the claim that holds it
    lease       INTEGER,          -- how long it belongs to its holder alone, in milliseconds
    horizon     INTEGER,          -- how long it is kept, in milliseconds: written at expires - horizon
    guarantee   INTEGER           -- 0 at most once, 1 effectively once, 2 bare
) WITHOUT ROWID, STRICT";

/// After so many pages the log is copied into the file: more than SQLite's own 1,000, because ids
/// in no order touch a page each.
const CHECKPOINT_PAGES: u32 = 4_000;

/// What the log is cut to when it has become longer, because someone read for long: 64 MiB.
const LOG_LIMIT: u32 = 64 << 20;

/// How much of the file is kept in memory, in KiB.
const CACHE: i32 = 16 << 10;

/// Which file, and how it is to be used.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
    pub(crate) synchronous: Synchronous,
    /// How long others are waited for.
    pub(crate) patience: Duration,
}

impl Place {
    /// The path, for a person.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// What an error of SQLite's means at this stage.
    pub(crate) fn failure(&self, stage: Stage) -> impl Fn(rusqlite::Error) -> Failure {
        move |error| Failure::of(error, stage, self)
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) connection: Connection,
    /// Which file it is.
    pub(crate) identity: Identity,
    /// What lies beside it: its log, and the memory that all who use the log share. SQLite makes
    /// both for the first who reads, and removes them with the last; who has the file open has a
    /// lock on it that keeps others from that.
    beside: [(PathBuf, Identity); 2],
}

impl OpenFile {
    /// Opens the file, or makes it. Once a file is `known` it is that one or none: this process
    /// went by what it remembered.
    ///
    /// # Errors
    /// [`Failure::Misconfigured`] for what a person has to change; a file that is not ours is left
    /// as it is.
    pub(crate) fn open(place: &Place, known: Option<Identity>) -> Result<Self, Failure> {
        let before = Identity::of(&place.path);
        if known.is_some() && before != known {
            return Err(replaced(place));
        }
        check_path(place)?;
        let stage = if known.is_some() {
            Stage::Working
        } else {
            Stage::Opening
        };
        let failed = place.failure(stage);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = Connection::open_with_flags(&place.path, flags).map_err(&failed)?;
        connection.busy_timeout(place.patience).map_err(&failed)?;
        if connection.is_readonly("main").map_err(&failed)? {
            return Err(Failure::of(only_readable(), stage, place));
        }
        // In a transaction: another process may be making the table at this moment.
        let contents = connection
            .unchecked_transaction()
            .and_then(|reading| Contents::of(&reading))
            .map_err(&failed)?;
        if contents.is_ours(place)? == Ours::Empty {
            log_ahead(&connection, place).map_err(&failed)?;
            create(&mut connection, place, &failed)?;
        }
        let mode = log_ahead(&connection, place).map_err(&failed)?;
        if mode != "wal" {
            return Err(Failure::misconfigured(format!(
                "Sqlite::file: {} cannot have a write-ahead log (its journal mode is {mode}): name a file on a local disk",
                place.name()
            )));
        }
        set_up(&connection, place).map_err(&failed)?;
        connection.execute_batch(windows::TABLE).map_err(&failed)?; // changes nothing where it is there
        version(&connection).map_err(&failed)?; // from this reading on, the log is open
        // SQLite opened it between these two looks at its name.
        let identity =
            Identity::of(&place.path).filter(|after| before.is_none_or(|before| before == *after));
        let identity = identity.ok_or_else(|| replaced(place))?;
        let beside = beside(&place.path).ok_or_else(|| replaced(place))?;
        Ok(Self {
            connection,
            identity,
            beside,
        })
    }

    /// Begins a transaction that nobody else's write can come into.
    pub(crate) fn begin(&self) -> rusqlite::Result<Transaction<'_>> {
        Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)
    }

    /// Whether this still is the file under its name, with its log, and of our version. Asked
    /// within each transaction: what is written into a file or a log that was removed is seen by
    /// nobody, and a newer release may have made it its own.
    pub(crate) fn check(&self, place: &Place) -> Result<(), Failure> {
        if !self.stands(place) {
            return Err(replaced(place));
        }
        let version = version(&self.connection).map_err(place.failure(Stage::Working))?;
        if version == VERSION {
            Ok(())
        } else {
            Err(other_version(version, place))
        }
    }

    /// Whether the file, its log and the memory that is shared are those that were opened.
    pub(crate) fn stands(&self, place: &Place) -> bool {
        let stands = |(path, identity): &(PathBuf, Identity)| Identity::of(path) == Some(*identity);
        Identity::of(&place.path) == Some(self.identity) && self.beside.iter().all(stands)
    }

    /// Whether it survives its own crash, and a power cut.
    ///
    /// # Errors
    /// If SQLite does not say.
    pub(crate) fn memory(&self, place: &Place) -> rusqlite::Result<Persistence> {
        const FULL: i32 = 2;
        let (file, sqlite) = (place.name(), rusqlite::version());
        if is_on_memory_file_system(&place.path) {
            return Ok(Persistence::Volatile(format!(
                "{file} lies on a file system in memory, and is gone when the machine starts anew: name a file on a disk"
            )));
        }
        let synchronous: i32 = self
            .connection
            .query_row("PRAGMA synchronous", [], |row| row.get(0))?;
        Ok(if synchronous >= FULL {
            Persistence::Durable(format!(
                "SQLite {sqlite} writes ahead with synchronous=FULL in {file}: what was answered survives a crash and a power cut, as long as \
                 the disk keeps what it says it has written"
            ))
        } else {
            Persistence::Volatile(format!(
                "{file} is used with synchronous=NORMAL, and a power cut may cost the last answers: leave Synchronous::Normal out"
            ))
        })
    }
}

impl Drop for OpenFile {
    /// The last to close copies its log into the file, and removes what has the log's name. If that
    /// is another log by now, both would destroy what others wrote since.
    fn drop(&mut self) {
        let is_another = |(path, identity): &(PathBuf, Identity)| {
            Identity::of(path).is_some_and(|found| found != *identity)
        };
        if self.beside.iter().any(is_another)
            && let Err(error) = self
                .connection
                .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
        {
            tracing::debug!(%error, "a log that was replaced is closed like any other");
        }
    }
}

/// The log and the shared memory. They lie beside the file itself, not beside a link to it.
fn beside(path: &Path) -> Option<[(PathBuf, Identity); 2]> {
    let file = std::fs::canonicalize(path).ok()?;
    let one = |suffix| {
        let mut name = file.clone().into_os_string();
        name.push(suffix);
        let path = PathBuf::from(name);
        Identity::of(&path).map(|identity| (path, identity))
    };
    Some([one("-wal")?, one("-shm")?])
}

fn replaced(place: &Place) -> Failure {
    Failure::misconfigured(format!(
        "Sqlite::file: {} or its log (-wal, -shm) was removed or replaced while it was in use, and what it remembered with it: put it back, or \
         start anew with what is there now",
        place.name()
    ))
}

/// What SQLite itself would say at the first write.
fn only_readable() -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(
        rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_READONLY),
        None,
    )
}

/// What SQLite says less clearly, or not at all: it would take an empty path and `:memory:` for
/// databases in memory.
fn check_path(place: &Place) -> Result<(), Failure> {
    let (path, file) = (&place.path, place.name());
    let directory = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    if path.as_os_str().is_empty() || path.as_os_str() == ":memory:" {
        return Err(Failure::misconfigured(format!(
            "Sqlite::file: `{file}` is no file: name one, or use MemoryStore"
        )));
    }
    if path.is_dir() {
        return Err(Failure::misconfigured(format!(
            "Sqlite::file: {file} is a directory: name a file in it"
        )));
    }
    if !directory.is_dir() {
        let directory = directory.display();
        return Err(Failure::misconfigured(format!(
            "Sqlite::file: there is no directory {directory}: create it, or name another file"
        )));
    }
    Ok(())
}

/// What a file holds, before anything is changed in it.
struct Contents {
    application: i32,
    version: i32,
    tables: i64,
}

#[derive(PartialEq, Eq)]
enum Ours {
    Empty,
    Made,
}

impl Contents {
    /// Within a transaction, so that all of it is of one moment.
    fn of(connection: &Transaction<'_>) -> rusqlite::Result<Self> {
        let tables =
            connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        let application = connection.query_row("PRAGMA application_id", [], |row| row.get(0))?;
        Ok(Self {
            application,
            version: version(connection)?,
            tables,
        })
    }

    fn is_ours(&self, place: &Place) -> Result<Ours, Failure> {
        match self {
            Self {
                application: APPLICATION,
                version: VERSION,
                ..
            } => Ok(Ours::Made),
            Self {
                application: APPLICATION,
                version,
                ..
            } => Err(other_version(*version, place)),
            Self {
                application: 0,
                version: 0,
                tables: 0,
            } => Ok(Ours::Empty),
            _ => Err(Failure::misconfigured(format!(
                "Sqlite::file: {} belongs to another program: name a file of its own for oncegate; this one is left as it is",
                place.name()
            ))),
        }
    }
}

fn version(connection: &Connection) -> rusqlite::Result<i32> {
    connection
        .prepare_cached("PRAGMA user_version")?
        .query_row([], |row| row.get(0))
}

fn other_version(version: i32, place: &Place) -> Failure {
    Failure::misconfigured(format!(
        "Sqlite::file: {} was written by a newer release (version {version}, this one knows {VERSION}): upgrade oncegate here; the file is left \
         as it is",
        place.name()
    ))
}

/// Turns the write-ahead log on, and says which journal there is. SQLite does not wait for others
/// who do the same.
fn log_ahead(connection: &Connection, place: &Place) -> rusqlite::Result<String> {
    let begun = Instant::now();
    loop {
        let mode = connection.query_row("PRAGMA journal_mode=WAL", [], |row| row.get(0));
        let is_busy =
            |error: &rusqlite::Error| error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy);
        if !mode.as_ref().is_err_and(is_busy) || begun.elapsed() > place.patience {
            return mode;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes the table, unless another process just did.
fn create(
    connection: &mut Connection,
    place: &Place,
    failed: &impl Fn(rusqlite::Error) -> Failure,
) -> Result<(), Failure> {
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(failed)?;
    if Contents::of(&transaction).map_err(failed)?.is_ours(place)? == Ours::Empty {
        transaction.execute_batch(TABLE).map_err(failed)?;
        transaction
            .pragma_update(None, "application_id", APPLICATION)
            .map_err(failed)?;
        transaction
            .pragma_update(None, "user_version", VERSION)
            .map_err(failed)?;
        tracing::info!(
            file = place.name(),
            "a new file, which remembers nothing yet"
        );
    }
    transaction.commit().map_err(failed)
}

/// What each connection has to be told.
fn set_up(connection: &Connection, place: &Place) -> rusqlite::Result<()> {
    let synchronous = match place.synchronous {
        Synchronous::Full => "FULL",
        Synchronous::Normal => "NORMAL",
    };
    connection.pragma_update(None, "synchronous", synchronous)?;
    // macOS alone knows the difference: there, a plain sync stops at the disk's own cache.
    connection.pragma_update(None, "fullfsync", "ON")?;
    connection.pragma_update(None, "checkpoint_fullfsync", "ON")?;
    connection.pragma_update(None, "cache_size", -CACHE)?;
    connection.query_row(
        &format!("PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}"),
        [],
        |_| Ok(()),
    )?;
    connection.query_row(
        &format!("PRAGMA journal_size_limit={LOG_LIMIT}"),
        [],
        |_| Ok(()),
    )
}

/// Which file stands under a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    number: u64,
}

impl Identity {
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            number: metadata.ino(),
        })
    }

    /// An open file cannot be removed here.
    #[cfg(not(unix))]
    fn of(_: &Path) -> Option<Self> {
        Some(Self {
            device: 0,
            number: 0,
        })
    }
}

#[cfg(target_os = "linux")]
pub(crate) fn is_on_memory_file_system(path: &Path) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    const RAMFS: i64 = 0x8584_58f6;
    // What cannot be asked is taken for a disk.
    rustix::fs::statfs(path).is_ok_and(|system| [TMPFS, RAMFS].contains(&system.f_type))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn is_on_memory_file_system(_: &Path) -> bool {
    false
}
