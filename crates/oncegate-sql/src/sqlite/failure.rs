//! Converts errors of SQLite: whether an operation was applied, and what an operator has to do.

pub(crate) use oncegate_core::internal::{Problem, StoreFailure};
use rusqlite::ErrorCode;

use super::file::FileConfig;

/// When an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureStage {
    /// While the file was opened for the first time.
    Opening,
    /// After the file was opened once, and before a commit: the transaction is rolled back.
    Working,
    /// During the commit.
    Committing,
}

/// Converts an error of SQLite.
pub(crate) fn of(error: rusqlite::Error, stage: FailureStage, config: &FileConfig) -> StoreFailure {
    use ErrorCode::*;
    let (file, setting) = (config.name(), config.setting());
    let text = match error.sqlite_error_code() {
        Some(DatabaseBusy | DatabaseLocked) => {
            let text = format!(
                "other processes kept {file} locked for {:?}; the operation is retried",
                config.busy_timeout
            );
            return StoreFailure::NotApplied(Problem::of(text, error)); // also during a commit, which is then rolled back
        }
        Some(CannotOpen) if stage == FailureStage::Opening => {
            return StoreFailure::Misconfigured(Problem::of(not_writable(&file, setting), error));
        }
        Some(ReadOnly | PermissionDenied) => {
            return StoreFailure::Misconfigured(Problem::of(not_writable(&file, setting), error));
        }
        Some(NotADatabase) => {
            let text = format!(
                "{setting}: {file} is not a SQLite database: use another file; the file is unchanged"
            );
            return StoreFailure::Misconfigured(Problem::of(text, error));
        }
        Some(DatabaseCorrupt) => {
            let text = format!(
                "{setting}: {file} is corrupt: stop all processes that use it, and replace it by a backup, which lacks all later markers; without \
                 one, name a new file, which has no id, or recover the old one with a sqlite3 that has .recover: `sqlite3 {file} .recover | sqlite3 NEW`"
            );
            return StoreFailure::Misconfigured(Problem::of(text, error));
        }
        Some(DiskFull) => {
            format!("the disk of {file} is full: free space; the consumer then continues")
        }
        _ => format!("SQLite failed on {file}: {error}"),
    };
    let problem = Problem::of(text, error);
    match stage {
        FailureStage::Opening | FailureStage::Working => StoreFailure::NotApplied(problem),
        FailureStage::Committing => StoreFailure::Unknown(problem),
    }
}

fn not_writable(file: &str, setting: &str) -> String {
    format!(
        "{setting}: {file} is not writable: grant this user write access to the file and its directory, or use another file"
    )
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
            merge: Default::default(),
            shares_database: false,
        };
        let failure = |code, stage| {
            of(
                rusqlite::Error::SqliteFailure(ffi::Error::new(code), Some("text".to_owned())),
                stage,
                &config,
            )
        };
        for stage in [
            FailureStage::Opening,
            FailureStage::Working,
            FailureStage::Committing,
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
                    failure(code, FailureStage::Working),
                    StoreFailure::NotApplied(_)
                ),
                "{code}"
            );
            assert!(
                matches!(
                    failure(code, FailureStage::Committing),
                    StoreFailure::Unknown(_)
                ),
                "{code}"
            );
        }
        assert!(matches!(
            failure(ffi::SQLITE_CANTOPEN, FailureStage::Opening),
            StoreFailure::Misconfigured(_)
        ));
        // Temporary after the first open, for example with too many open files.
        assert!(matches!(
            failure(ffi::SQLITE_CANTOPEN, FailureStage::Working),
            StoreFailure::NotApplied(_)
        ));
    }
}
