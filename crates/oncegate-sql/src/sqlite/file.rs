//! The database file: its checks, its settings and its durability.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oncegate_core::Persistence;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};

use super::Synchronous;
use super::failure::{self, FailureStage, StoreFailure};
use super::handler_guard::HandlerGuard;
use super::marker_table::EXPIRED;
use super::recent::{self, MergeLimits};
use super::{results, windows};

/// The version of the schema. A file with another version is rejected and not changed.
const VERSION: i32 = 3;

/// The `application_id` of files before version 3: `once` in ASCII. Their version is
/// in `user_version`, which a program that shares its file with an inbox uses for its own tables.
const FORMER_APPLICATION_ID: i32 = i32::from_be_bytes(*b"once");

/// The columns of a marker. SQLite keeps the comments in the file, for readers of `.schema`.
const COLUMNS: &str = "
    expires     INTEGER NOT NULL, -- after this time the row counts as absent
    state       INTEGER NOT NULL, -- 0 done, 1 cleared, 2 in progress, 3 in doubt, 4 in doubt and reconciling, 5 rejected
    fingerprint INTEGER,          -- of the body, where bodies are compared
    attempt     INTEGER,          -- the number of the last attempt; NULL if done
    base        INTEGER,          -- how many attempts max_attempts does not count; from here on NULL if done or rejected
    crashes     INTEGER,          -- holders whose lease ended without an outcome since the id was last redriven or forgotten
    effect      INTEGER,          -- the effect of earlier attempts: 0 nothing, 1 unknown
    token       BLOB,             -- the claim that holds it
    lease       INTEGER,          -- how long after its last write no other claim is granted, in milliseconds
    horizon     INTEGER,          -- how long the row is kept, in milliseconds; its last write was at expires - horizon
    guarantee   INTEGER           -- 0 at most once, 1 effectively once, 2 bare
";

/// The tables, the views and the trigger.
fn schema() -> String {
    let progress = recent::TABLE;
    format!(
        "
CREATE TABLE oncegate_schema (version INTEGER NOT NULL -- one row
) STRICT;
INSERT INTO oncegate_schema VALUES ({VERSION});
CREATE TABLE oncegate_merged_markers ( -- markers in the order of their keys, one row per id, outdated if oncegate_unmerged_markers has the key; times in milliseconds since 1970
    key         TEXT PRIMARY KEY, -- <id>, or <scope>|<id>{COLUMNS}) WITHOUT ROWID, STRICT;
CREATE TABLE oncegate_recent_markers ( -- markers that were not written to oncegate_merged_markers at once, in the order of their first writes; merged rows are outdated
    number      INTEGER PRIMARY KEY,
    key         TEXT NOT NULL,{COLUMNS}) STRICT;{progress};
CREATE VIEW oncegate_unmerged_markers AS -- the rows of oncegate_recent_markers that are not in oncegate_merged_markers yet
    SELECT oncegate_recent_markers.* FROM oncegate_recent_markers, oncegate_merge_progress
    WHERE number > merged_until AND (number > cycle_end OR key > cursor);
CREATE VIEW oncegate_markers AS -- all stored markers, also expired ones that are not deleted yet
    SELECT key, expires, state, fingerprint, attempt, base, crashes, effect, token, lease, horizon, guarantee FROM oncegate_unmerged_markers
    WHERE expires > {EXPIRED}
    UNION ALL
    SELECT * FROM oncegate_merged_markers WHERE expires > {EXPIRED} AND key NOT IN (SELECT key FROM oncegate_unmerged_markers);
CREATE TRIGGER oncegate_delete_marker INSTEAD OF DELETE ON oncegate_markers BEGIN -- keeps recent rows, whose numbers processes remember
    UPDATE oncegate_recent_markers SET expires = {EXPIRED} WHERE key = old.key;
    DELETE FROM oncegate_merged_markers WHERE key = old.key;
END"
    )
}

/// `wal_autocheckpoint`: more pages than SQLite's default of 1,000, since each random id changes
/// another page.
const CHECKPOINT_PAGES: u32 = 4_000;

/// `journal_size_limit`: the WAL is truncated to 64 MiB after a long read let it grow.
const WAL_SIZE_LIMIT: u32 = 64 << 20;

/// The size of the page cache, in KiB.
const CACHE_KIB: i32 = 16 << 10;

/// How many prepared statements a connection caches: more than this crate has.
const STATEMENTS: usize = 64;

/// The path and the connection settings of the database.
#[derive(Clone, Debug)]
pub(crate) struct FileConfig {
    pub(crate) path: PathBuf,
    pub(crate) synchronous: Synchronous,
    /// How long to wait for locks of other processes.
    pub(crate) busy_timeout: Duration,
    pub(crate) merge: MergeLimits,
    /// Whether the tables may be created in the database of another program.
    pub(crate) shares_database: bool,
}

impl FileConfig {
    /// The path, for error texts and log lines.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The function with which the path is set, for error texts.
    pub(crate) fn setting(&self) -> &'static str {
        match self.shares_database {
            true => "SqliteInbox::file",
            false => "Sqlite::file",
        }
    }

    /// A function that converts errors of SQLite at this stage.
    pub(crate) fn failure(&self, stage: FailureStage) -> impl Fn(rusqlite::Error) -> StoreFailure {
        move |error| failure::of(error, stage, self)
    }
}

/// An open database.
#[derive(Debug)]
pub(crate) struct OpenDatabase {
    pub(crate) connection: Connection,
    /// The file that was opened.
    pub(crate) identity: FileIdentity,
    /// The WAL and the shared-memory file. SQLite creates both for the first connection to the
    /// database and removes them when the last one closes; while this connection is open, SQLite
    /// keeps them.
    companions: [(PathBuf, FileIdentity); 2],
    pub(crate) guard: HandlerGuard,
}

impl OpenDatabase {
    /// Opens the database, or creates it. With an `expected` identity only that file is opened,
    /// because this process has relied on its content.
    ///
    /// # Errors
    /// [`StoreFailure::Misconfigured`] if the configuration must change; a file of another program
    /// is not changed.
    pub(crate) fn open(
        config: &FileConfig,
        expected: Option<FileIdentity>,
    ) -> Result<Self, StoreFailure> {
        let before = FileIdentity::of(&config.path);
        if expected.is_some() && before != expected {
            return Err(replaced(config));
        }
        check_path(config)?;
        let stage = if expected.is_some() {
            FailureStage::Working
        } else {
            FailureStage::Opening
        };
        let to_failure = config.failure(stage);
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection =
            Connection::open_with_flags(&config.path, flags).map_err(&to_failure)?;
        connection
            .busy_timeout(config.busy_timeout)
            .map_err(&to_failure)?;
        if connection.is_readonly("main").map_err(&to_failure)? {
            return Err(failure::of(readonly_error(), stage, config));
        }
        // Reads in a transaction: another process may be creating the tables.
        let header = connection
            .unchecked_transaction()
            .and_then(|reading| DatabaseHeader::of(&reading))
            .map_err(&to_failure)?;
        if header.ownership(config)? == Ownership::Unclaimed {
            enable_wal(&connection, config).map_err(&to_failure)?;
            create(&mut connection, config, &to_failure)?;
        }
        let mode = enable_wal(&connection, config).map_err(&to_failure)?;
        if mode != "wal" {
            return Err(StoreFailure::misconfigured(format!(
                "{}: {} does not support a write-ahead log (journal mode {mode}): use a file on a local disk",
                config.setting(),
                config.name()
            )));
        }
        configure(&connection, config).map_err(&to_failure)?;
        for table in [windows::TABLE, results::TABLE] {
            connection.execute_batch(table).map_err(&to_failure)?; // no effect if it exists
        }
        version(&connection).map_err(&to_failure)?; // this read opens the WAL
        // SQLite has opened the file between the two reads of the identity. If both are equal, that
        // is the file with this identity.
        let identity = FileIdentity::of(&config.path)
            .filter(|after| before.is_none_or(|before| before == *after));
        let identity = identity.ok_or_else(|| replaced(config))?;
        let companions = companions(&config.path).ok_or_else(|| replaced(config))?;
        let guard = HandlerGuard::install(&connection).map_err(&to_failure)?;
        Ok(Self {
            connection,
            identity,
            companions,
            guard,
        })
    }

    /// Begins a transaction that takes the write lock at once.
    pub(crate) fn begin(&self) -> rusqlite::Result<Transaction<'_>> {
        Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)
    }

    /// Like [`begin`](Self::begin), without waiting for locks; `None` if another connection has the write lock.
    pub(crate) fn begin_unless_locked(
        &self,
        config: &FileConfig,
    ) -> rusqlite::Result<Option<Transaction<'_>>> {
        self.connection.busy_timeout(Duration::ZERO)?;
        let begun = self.begin();
        self.connection.busy_timeout(config.busy_timeout)?;
        match begun {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => Ok(None),
            begun => begun.map(Some),
        }
    }

    /// Checks that the path still refers to this file and WAL, and that its version is supported.
    /// Called within each writing transaction: writes to a removed file or WAL would be lost, and a newer
    /// release may have migrated the file.
    pub(crate) fn check(&self, config: &FileConfig) -> Result<(), StoreFailure> {
        if !self.is_current(config) {
            return Err(replaced(config));
        }
        let version = version(&self.connection).map_err(config.failure(FailureStage::Working))?;
        if version == VERSION {
            Ok(())
        } else {
            Err(other_version(version, config))
        }
    }

    /// Whether the file, its WAL and its shared memory are those that were opened.
    pub(crate) fn is_current(&self, config: &FileConfig) -> bool {
        let is_same =
            |(path, identity): &(PathBuf, FileIdentity)| FileIdentity::of(path) == Some(*identity);
        FileIdentity::of(&config.path) == Some(self.identity) && self.companions.iter().all(is_same)
    }

    /// Whether data survives a crash of the process and a power cut.
    ///
    /// # Errors
    /// If SQLite fails.
    pub(crate) fn persistence(&self, config: &FileConfig) -> rusqlite::Result<Persistence> {
        const FULL: i32 = 2;
        let (file, sqlite) = (config.name(), rusqlite::version());
        if is_on_memory_file_system(&config.path) {
            return Ok(Persistence::Volatile(format!(
                "{file} is on a file system in memory and is lost when the machine restarts: use a file on a disk"
            )));
        }
        let synchronous: i32 = self
            .connection
            .query_row("PRAGMA synchronous", [], |row| row.get(0))?;
        Ok(if synchronous >= FULL {
            Persistence::Durable(format!(
                "SQLite {sqlite} with a write-ahead log and synchronous=FULL in {file}: answered operations survive a crash and a power \
                 cut, if the disk honours syncs"
            ))
        } else {
            Persistence::Volatile(format!(
                "{file} is used with synchronous=NORMAL, and a power cut may lose the last transactions: remove Synchronous::Normal"
            ))
        })
    }
}

impl Drop for OpenDatabase {
    /// When the last connection closes, SQLite copies its WAL into the database file and removes
    /// the file with the name of the WAL. If another process has replaced the WAL, this would
    /// destroy the writes of that process.
    fn drop(&mut self) {
        let is_another = |(path, identity): &(PathBuf, FileIdentity)| {
            FileIdentity::of(path).is_some_and(|found| found != *identity)
        };
        if self.companions.iter().any(is_another)
            && let Err(error) = self
                .connection
                .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
        {
            tracing::debug!(%error, "cannot disable the checkpoint of a replaced write-ahead log");
        }
    }
}

/// The paths and identities of the WAL and the shared-memory file; `None` if one is missing. If the
/// path is a symbolic link, they are in the directory of its target.
fn companions(path: &Path) -> Option<[(PathBuf, FileIdentity); 2]> {
    let file = std::fs::canonicalize(path).ok()?;
    let companion = |suffix| {
        let mut name = file.clone().into_os_string();
        name.push(suffix);
        let path = PathBuf::from(name);
        FileIdentity::of(&path).map(|identity| (path, identity))
    };
    Some([companion("-wal")?, companion("-shm")?])
}

fn replaced(config: &FileConfig) -> StoreFailure {
    StoreFailure::misconfigured(format!(
        "{}: {} or its write-ahead log (-wal, -shm) was removed or replaced while in use: restore it, or restart to use the file that \
         is there now; then messages whose ids only the missing file has are handled again, so check those logged as `outcome not recorded`",
        config.setting(),
        config.name()
    ))
}

/// The error that SQLite returns for a write to a read-only file.
fn readonly_error() -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(
        rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_READONLY),
        None,
    )
}

/// Rejects paths for which SQLite returns a less clear error, or opens a temporary database: an
/// empty path and `:memory:`.
fn check_path(config: &FileConfig) -> Result<(), StoreFailure> {
    let (path, file, setting) = (&config.path, config.name(), config.setting());
    let directory = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    if path.as_os_str().is_empty() || path.as_os_str() == ":memory:" {
        return Err(StoreFailure::misconfigured(format!(
            "{setting}: `{file}` is not a file: set the path of one, or use MemoryStore"
        )));
    }
    if path.is_dir() {
        return Err(StoreFailure::misconfigured(format!(
            "{setting}: {file} is a directory: set the path of a file in it"
        )));
    }
    if !directory.is_dir() {
        let directory = directory.display();
        return Err(StoreFailure::misconfigured(format!(
            "{setting}: the directory {directory} does not exist: create it, or use another path"
        )));
    }
    Ok(())
}

/// Which program a file belongs to, and the version of its schema. Read before anything is changed.
struct DatabaseHeader {
    application: i32,
    user_version: i32,
    tables: i64,
    /// The version of the tables of oncegate; `None` without them.
    version: Option<i32>,
}

/// Whether a file may be used.
#[derive(PartialEq, Eq)]
enum Ownership {
    /// The tables are to be created: the database is new, empty, or that of a program with an inbox.
    Unclaimed,
    /// The file has the schema of this release.
    Oncegate,
}

impl DatabaseHeader {
    /// Reads the header in a transaction, so that all values are of the same state of the file.
    fn of(connection: &Transaction<'_>) -> rusqlite::Result<Self> {
        let pragma = |sql| connection.query_row(sql, [], |row| row.get(0));
        let (tables, is_oncegate) = connection.query_row(
            "SELECT count(*), count(*) FILTER (WHERE name = 'oncegate_schema') FROM sqlite_schema",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
        Ok(Self {
            application: pragma("PRAGMA application_id")?,
            user_version: pragma("PRAGMA user_version")?,
            tables,
            version: if is_oncegate {
                Some(version(connection)?)
            } else {
                None
            },
        })
    }

    /// Whether the file may be used.
    ///
    /// # Errors
    /// The file belongs to another program or has another version of the schema.
    fn ownership(&self, config: &FileConfig) -> Result<Ownership, StoreFailure> {
        match self {
            Self {
                version: Some(VERSION),
                ..
            } => Ok(Ownership::Oncegate),
            Self {
                version: Some(version),
                ..
            }
            | Self {
                application: FORMER_APPLICATION_ID,
                user_version: version,
                ..
            } => Err(other_version(*version, config)),
            Self {
                application: 0,
                user_version: 0,
                tables: 0,
                ..
            } => Ok(Ownership::Unclaimed),
            _ if config.shares_database => Ok(Ownership::Unclaimed),
            _ => Err(StoreFailure::misconfigured(format!(
                "{}: {} belongs to another program: use a separate file for oncegate; the file is unchanged",
                config.setting(),
                config.name()
            ))),
        }
    }
}

fn version(connection: &Connection) -> rusqlite::Result<i32> {
    connection
        .prepare_cached("SELECT version FROM oncegate_schema")?
        .query_row([], |row| row.get(0))
}

fn other_version(version: i32, config: &FileConfig) -> StoreFailure {
    let (age, remedy) = if version < VERSION {
        ("an older", "use a new file, which has none of its ids")
    } else {
        ("a newer", "upgrade oncegate here")
    };
    StoreFailure::misconfigured(format!(
        "{}: {} was written by {age} release (version {version}, this release supports {VERSION}): {remedy}; the file is unchanged",
        config.setting(),
        config.name()
    ))
}

/// Enables the write-ahead log and returns the journal mode. Retries, since SQLite's busy timeout
/// does not apply here.
fn enable_wal(connection: &Connection, config: &FileConfig) -> rusqlite::Result<String> {
    let started = Instant::now();
    loop {
        let mode = connection.query_row("PRAGMA journal_mode=WAL", [], |row| row.get(0));
        let is_busy =
            |error: &rusqlite::Error| error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy);
        if !mode.as_ref().is_err_and(is_busy) || started.elapsed() > config.busy_timeout {
            return mode;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Creates the tables, unless another process has created them meanwhile.
fn create(
    connection: &mut Connection,
    config: &FileConfig,
    to_failure: &impl Fn(rusqlite::Error) -> StoreFailure,
) -> Result<(), StoreFailure> {
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(to_failure)?;
    if DatabaseHeader::of(&transaction)
        .map_err(to_failure)?
        .ownership(config)?
        == Ownership::Unclaimed
    {
        transaction.execute_batch(&schema()).map_err(to_failure)?;
        tracing::info!(
            file = config.name(),
            "created new SQLite tables for markers"
        );
    }
    transaction.commit().map_err(to_failure)
}

/// Sets the pragmas of a connection.
fn configure(connection: &Connection, config: &FileConfig) -> rusqlite::Result<()> {
    let synchronous = match config.synchronous {
        Synchronous::Full => "FULL",
        Synchronous::Normal => "NORMAL",
    };
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    connection.pragma_update(None, "synchronous", synchronous)?;
    // Only for macOS, where a plain fsync does not flush the disk's cache.
    connection.pragma_update(None, "fullfsync", "ON")?;
    connection.pragma_update(None, "checkpoint_fullfsync", "ON")?;
    connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
    connection.query_row(
        &format!("PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}"),
        [],
        |_| Ok(()),
    )?;
    connection.query_row(
        &format!("PRAGMA journal_size_limit={WAL_SIZE_LIMIT}"),
        [],
        |_| Ok(()),
    )
}

/// The device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    device: u64,
    number: u64,
}

impl FileIdentity {
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            number: metadata.ino(),
        })
    }

    /// Always the same identity: on this system no program can remove or replace an open file.
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
    // If the query fails, a disk is assumed.
    rustix::fs::statfs(path).is_ok_and(|system| [TMPFS, RAMFS].contains(&system.f_type))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn is_on_memory_file_system(_: &Path) -> bool {
    false
}
