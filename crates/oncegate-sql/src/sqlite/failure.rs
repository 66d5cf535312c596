//! Why an operation has no verdict, and whether it may be repeated.

use std::sync::Arc;

use oncegate_core::StoreError;
use rusqlite::ErrorCode;

use super::file::FileConfig;

/// Why an operation has no verdict. `Clone`, because one failed transaction fails many operations.
#[derive(Clone, Debug)]
pub(crate) enum StoreFailure {
    /// Nothing was applied; may be repeated.
    NotApplied(Problem),
    /// It may have been applied; may be repeated with the same token.
    Unknown(Problem),
    /// The row holds no marker; other keys are not affected.
    UnreadableMarker(Problem),
    /// Fails until the configuration or the file is changed.
    Misconfigured(Problem),
}

/// A message of one line and its source.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Problem {
    text: Arc<str>,
    #[source]
    source: Option<Arc<rusqlite::Error>>,
}

/// When an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransactionStage {
    /// While the file was opened for the first time.
    Opening,
    /// After the file was opened once, before the commit: the transaction is rolled back.
    Working,
    /// During the commit.
    Committing,
}

impl From<StoreFailure> for StoreError {
    fn from(failure: StoreFailure) -> Self {
        match failure {
            StoreFailure::NotApplied(problem) => Self::NotApplied(problem.into()),
            StoreFailure::Unknown(problem) => Self::Unknown(problem.into()),
            StoreFailure::UnreadableMarker(problem) => Self::UnreadableMarker(problem.into()),
            StoreFailure::Misconfigured(problem) => Self::Misconfigured(problem.into()),
        }
    }
}

impl StoreFailure {
    pub(crate) fn not_applied(text: impl AsRef<str>) -> Self {
        Self::NotApplied(Problem {
            text: text.as_ref().into(),
            source: None,
        })
    }

    pub(crate) fn unknown(text: impl AsRef<str>) -> Self {
        Self::Unknown(Problem {
            text: text.as_ref().into(),
            source: None,
        })
    }

    pub(crate) fn unreadable_marker(text: impl AsRef<str>) -> Self {
        Self::UnreadableMarker(Problem {
            text: text.as_ref().into(),
            source: None,
        })
    }

    pub(crate) fn misconfigured(text: impl AsRef<str>) -> Self {
        Self::Misconfigured(Problem {
            text: text.as_ref().into(),
            source: None,
        })
    }

    /// Converts an error of SQLite.
    pub(crate) fn of(error: rusqlite::Error, stage: TransactionStage, config: &FileConfig) -> Self {
        use ErrorCode::*;
        let file = config.name();
        let with_text = |text: String| Problem {
            text: text.into(),
            source: None,
        };
        let problem = match error.sqlite_error_code() {
            Some(DatabaseBusy | DatabaseLocked) => {
                let text = format!(
                    "other processes kept {file} locked for {:?}; the operation is retried",
                    config.busy_timeout
                );
                return Self::NotApplied(with_text(text).with_source(error)); // such a commit is rolled back
            }
            Some(CannotOpen) if stage == TransactionStage::Opening => {
                return Self::Misconfigured(not_writable(&file).with_source(error));
            }
            Some(ReadOnly | PermissionDenied) => {
                return Self::Misconfigured(not_writable(&file).with_source(error));
            }
            Some(NotADatabase) => {
                let text = format!(
                    "Sqlite::file: {file} is not a SQLite database: use another file; the file is unchanged"
                );
                return Self::Misconfigured(with_text(text).with_source(error));
            }
            Some(DatabaseCorrupt) => {
                let text = format!(
                    "Sqlite::file: {file} is corrupt: stop all processes that use it, and recover it with `sqlite3 {file} .recover` or from a \
                     backup, which lacks all later markers"
                );
                return Self::Misconfigured(with_text(text).with_source(error));
            }
            Some(DiskFull) => with_text(format!(
                "the disk of {file} is full: free space; the consumer then continues"
            )),
            _ => with_text(format!("SQLite failed on {file}: {error}")),
        };
        match stage {
            TransactionStage::Opening | TransactionStage::Working => {
                Self::NotApplied(problem.with_source(error))
            }
            TransactionStage::Committing => Self::Unknown(problem.with_source(error)),
        }
    }
}

impl Problem {
    fn with_source(self, error: rusqlite::Error) -> Self {
        Self {
            source: Some(Arc::new(error)),
            ..self
        }
    }
}

fn not_writable(file: &str) -> Problem {
    let text = format!(
        "Sqlite::file: {file} is not writable: grant this user write access to the file and its directory, or use another file"
    );
    Problem {
        text: text.into(),
        source: None,
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::ffi;

    use super::*;

    #[test]
    fn errors_are_retryable_misconfigured_or_unknown_after_a_commit() {
        let config = FileConfig {
            path: "x.db".into(),
            synchronous: Default::default(),
            busy_timeout: Default::default(),
        };
        let failure = |code, stage| {
            StoreFailure::of(
                rusqlite::Error::SqliteFailure(ffi::Error::new(code), Some("text".to_owned())),
                stage,
                &config,
            )
        };
        for stage in [
            TransactionStage::Opening,
            TransactionStage::Working,
            TransactionStage::Committing,
        ] {
            assert!(matches!(
                failure(ffi::SQLITE_BUSY_RECOVERY, stage),
                StoreFailure::NotApplied(_)
            ));
            for code in [
                ffi::SQLITE_READONLY_DIRECTORY,
                ffi::SQLITE_NOTADB,
                ffi::SQLITE_CORRUPT_INDEX,
                ffi::SQLITE_PERM,
            ] {
                assert!(
                    matches!(failure(code, stage), StoreFailure::Misconfigured(_)),
                    "{code} {stage:?}"
                );
            }
        }
        for code in [
            ffi::SQLITE_FULL,
            ffi::SQLITE_IOERR_FSYNC,
            ffi::SQLITE_IOERR_WRITE,
            ffi::SQLITE_NOMEM,
        ] {
            assert!(
                matches!(
                    failure(code, TransactionStage::Working),
                    StoreFailure::NotApplied(_)
                ),
                "{code}"
            );
            assert!(
                matches!(
                    failure(code, TransactionStage::Committing),
                    StoreFailure::Unknown(_)
                ),
                "{code}"
            );
        }
        assert!(matches!(
            failure(ffi::SQLITE_CANTOPEN, TransactionStage::Opening),
            StoreFailure::Misconfigured(_)
        ));
        // Temporary after the first open, for example with too many open files.
        assert!(matches!(
            failure(ffi::SQLITE_CANTOPEN, TransactionStage::Working),
            StoreFailure::NotApplied(_)
        ));
    }
}
