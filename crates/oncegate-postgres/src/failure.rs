//! Whether a failed operation may have been applied, by the error of PostgreSQL.

use oncegate_core::internal::{Problem, StoreFailure};
use sqlx::Error;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

/// When an error occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatementStage {
    /// Before a statement was sent, or while one was executed that changes nothing.
    Connecting,
    /// While a statement was executed that commits if it succeeds.
    Executing,
    /// While the tables were created or updated.
    Migrating,
}

/// Converts an error. `server` is the address of the server.
pub(crate) fn of(error: Error, stage: StatementStage, server: &str) -> StoreFailure {
    let code = match &error {
        Error::Database(error) => error.code().map(|code| code.into_owned()),
        _ => None,
    };
    if let Some(remedy) = code.as_deref().and_then(|code| remedy(code, stage)) {
        let text = format!("PostgreSQL at {server} refuses: {error}; {remedy}");
        return StoreFailure::Misconfigured(Problem::of(text, error));
    }
    let problem = Problem::of(format!("PostgreSQL at {server}: {error}"), error);
    let is_rolled_back = code.as_deref().is_some_and(is_rolled_back);
    match stage {
        StatementStage::Connecting => StoreFailure::NotApplied(problem),
        _ if is_rolled_back => StoreFailure::NotApplied(problem),
        StatementStage::Executing | StatementStage::Migrating => StoreFailure::Unknown(problem),
    }
}

/// What an operator has to change; `None` for an error that may be transient.
fn remedy(code: &str, stage: StatementStage) -> Option<&'static str> {
    Some(match code {
        "42501" if stage == StatementStage::Migrating => {
            "GRANT USAGE, CREATE ON SCHEMA … TO this user, or create the tables as another user with Postgres::migrate"
        }
        "3F000" => "create a schema of this user's search_path, or correct the search_path",
        "42P07" => {
            "that table is not of this release: rename it, or use another schema in the search_path"
        }
        "42P01" | "42703" | "42P10" | "42804" => {
            "create or update the tables with Postgres::create_tables or Postgres::migrate"
        }
        "42501" => {
            "grant this user SELECT, INSERT, UPDATE and DELETE on oncegate_markers, oncegate_results and oncegate_outbox, and SELECT on oncegate_schema"
        }
        "28000" | "28P01" => "correct the user or the password in the URL",
        "3D000" => "create the database, or correct its name in the URL",
        _ => return None,
    })
}

/// Whether the error of a COMMIT proves that the server rolled the transaction back. After it has
/// committed, the server only reports errors that end the session (not those of severity ERROR).
pub(crate) fn was_rolled_back(error: &Error) -> bool {
    let error = error
        .as_database_error()
        .and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
    error.is_some_and(|error| error.severity() == PgSeverity::Error && error.code() != "40003")
}

/// Whether the server rolled the statement back. The listed classes are raised only before the
/// commit. Class 57 is not listed: a session that has committed and waits for a replica may end
/// with it.
fn is_rolled_back(code: &str) -> bool {
    // 57014: cancelled by `statement_timeout` or by an operator.
    code == "57014"
        || ["22", "23", "25", "40", "42", "53", "54", "55"]
            .iter()
            .any(|class| code.starts_with(class) && code != "40003")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_before_the_commit_are_known_to_have_changed_nothing() {
        for code in ["40001", "40P01", "53300", "57014", "25006", "55P03"] {
            assert!(is_rolled_back(code), "{code}");
        }
        for code in ["57P01", "57P02", "40003", "XX000", "08006", "58030"] {
            assert!(!is_rolled_back(code), "{code}");
        }
    }

    #[test]
    fn a_lost_connection_leaves_a_sent_statement_unknown() {
        let lost = || Error::Io(std::io::ErrorKind::ConnectionReset.into());
        assert!(matches!(
            of(lost(), StatementStage::Executing, "x"),
            StoreFailure::Unknown(_)
        ));
        assert!(matches!(
            of(lost(), StatementStage::Connecting, "x"),
            StoreFailure::NotApplied(_)
        ));
    }
}
