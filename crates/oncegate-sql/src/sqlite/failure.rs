//! What went wrong, and what the caller does next.

use std::sync::Arc;

use oncegate_core::StoreError;
use rusqlite::ErrorCode;

use super::file::Place;

/// Why there is no verdict. Can be cloned, because one failed transaction fails many operations.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// Nothing was applied: ask again later.
    NotApplied(Problem),
    /// It may have been applied: ask again with the same token.
    Unknown(Problem),
    /// The row of a key holds no marker; it concerns this key alone.
    UnreadableMarker(Problem),
    /// It will never work like this.
    Misconfigured(Problem),
}

/// One line for a person, and the error below it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Problem {
    text: Arc<str>,
    #[source]
    source: Option<Arc<rusqlite::Error>>,
}

/// How far it had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The file was being opened for the first time.
    Opening,
    /// It was open before, or the transaction had begun: what it did is rolled back.
    Working,
    /// The transaction was being committed.
    Committing,
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotApplied(problem) => Self::NotApplied(problem.into()),
            Failure::Unknown(problem) => Self::Unknown(problem.into()),
            Failure::UnreadableMarker(problem) => Self::UnreadableMarker(problem.into()),
            Failure::Misconfigured(problem) => Self::Misconfigured(problem.into()),
        }
    }
}

impl Failure {
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

    /// What an error of SQLite's means.
    pub(crate) fn of(error: rusqlite::Error, stage: Stage, place: &Place) -> Self {
        use ErrorCode::*;
        let file = place.name();
        let said = |text: String| Problem {
            text: text.into(),
            source: None,
        };
        let problem = match error.sqlite_error_code() {
            Some(DatabaseBusy | DatabaseLocked) => {
                let text = format!(
                    "others write to {file}, and did not let go for {:?}; it is asked again",
                    place.patience
                );
                return Self::NotApplied(said(text).over(error)); // a commit that is refused so is rolled back
            }
            Some(CannotOpen) if stage == Stage::Opening => {
                return Self::Misconfigured(not_writable(&file).over(error));
            }
            Some(ReadOnly | PermissionDenied) => {
                return Self::Misconfigured(not_writable(&file).over(error));
            }
            Some(NotADatabase) => {
                let text = format!(
                    "Sqlite::file: {file} is no SQLite database: name another file; this one is left as it is"
                );
                return Self::Misconfigured(said(text).over(error));
            }
            Some(DatabaseCorrupt) => {
                let text = format!(
                    "Sqlite::file: {file} is damaged: stop all who use it, and recover it with `sqlite3 {file} .recover` or from a backup; a \
                     backup has forgotten what came after it"
                );
                return Self::Misconfigured(said(text).over(error));
            }
            Some(DiskFull) => said(format!(
                "the disk of {file} is full: make room, and it goes on by itself"
            )),
            _ => said(format!("SQLite cannot work on {file}: {error}")),
        };
        match stage {
            Stage::Opening | Stage::Working => Self::NotApplied(problem.over(error)),
            Stage::Committing => Self::Unknown(problem.over(error)),
        }
    }
}

impl Problem {
    fn over(self, error: rusqlite::Error) -> Self {
        Self {
            source: Some(Arc::new(error)),
            ..self
        }
    }
}

fn not_writable(file: &str) -> Problem {
    let text = format!(
        "Sqlite::file: {file} may not be written: let this user write the file and its directory, or name another"
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
    fn what_heals_is_not_applied_what_a_person_has_to_change_is_misconfigured_and_a_broken_commit_is_unknown()
     {
        let place = Place {
            path: "x.db".into(),
            synchronous: Default::default(),
            patience: Default::default(),
        };
        let failure = |code, stage| {
            Failure::of(
                rusqlite::Error::SqliteFailure(ffi::Error::new(code), Some("said".to_owned())),
                stage,
                &place,
            )
        };
        for stage in [Stage::Opening, Stage::Working, Stage::Committing] {
            assert!(matches!(
                failure(ffi::SQLITE_BUSY_RECOVERY, stage),
                Failure::NotApplied(_)
            ));
            for wrong in [
                ffi::SQLITE_READONLY_DIRECTORY,
                ffi::SQLITE_NOTADB,
                ffi::SQLITE_CORRUPT_INDEX,
                ffi::SQLITE_PERM,
            ] {
                assert!(
                    matches!(failure(wrong, stage), Failure::Misconfigured(_)),
                    "{wrong} {stage:?}"
                );
            }
        }
        for trouble in [
            ffi::SQLITE_FULL,
            ffi::SQLITE_IOERR_FSYNC,
            ffi::SQLITE_IOERR_WRITE,
            ffi::SQLITE_NOMEM,
        ] {
            assert!(
                matches!(failure(trouble, Stage::Working), Failure::NotApplied(_)),
                "{trouble}"
            );
            assert!(
                matches!(failure(trouble, Stage::Committing), Failure::Unknown(_)),
                "{trouble}"
            );
        }
        assert!(matches!(
            failure(ffi::SQLITE_CANTOPEN, Stage::Opening),
            Failure::Misconfigured(_)
        ));
        // It was open before: too many files are open, perhaps, and soon are not.
        assert!(matches!(
            failure(ffi::SQLITE_CANTOPEN, Stage::Working),
            Failure::NotApplied(_)
        ));
    }
}
