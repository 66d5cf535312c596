//! The audit of operator actions: who did what and when, with the state before and after.
//!
//! Each action has two lines: one before it starts and one with its result. If the command crashes
//! in between, only the first exists, so the result is unknown.

mod command;
mod entry;

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use oncegate::MessageId;
#[cfg(feature = "redis")]
use oncegate::Redis;
use oncegate::marker::Token;
#[cfg(feature = "postgres")]
use oncegate_postgres::Postgres;

use crate::CliContext;
use crate::error::{CliError, CliErrorCode};
use crate::marker_store::{MarkerStore, sqlite_audit_file};
use crate::output::{now_ms, utc_text};
pub(crate) use command::{AuditArgs, run, table};
pub(crate) use entry::{
    ActionStage, AuditEntry, AuditedAction, DROPPED_CONFLICT, MessageLocation, PlannedAction,
};

/// Where the audit is stored.
enum AuditStorage {
    File(PathBuf),
    #[cfg(feature = "redis")]
    Redis(Redis),
    #[cfg(feature = "postgres")]
    Postgres(Postgres),
}

/// Reads and writes the audit. Names the operator and the scope in each line that it writes.
pub(crate) struct Audit {
    storage: AuditStorage,
    /// The operator.
    who: String,
    scope: Option<String>,
}

/// An action whose start is recorded and whose result must be recorded.
#[must_use]
pub(crate) struct PendingAction(AuditEntry);

impl Audit {
    /// The audit in the file `audit.file`, or else beside the markers: a file next to the SQLite
    /// file, a Redis stream, or a PostgreSQL table.
    ///
    /// # Errors
    /// Neither `audit.file` nor a store that has an audit is configured.
    pub(crate) fn of(context: &CliContext) -> Result<Self, CliError> {
        let config = &context.config;
        let storage = match (config.text("audit.file"), config.store_kind()?) {
            (Some(path), _) => AuditStorage::File(path.into()),
            (None, Some(oncegate_config::StoreKind::Sqlite(file))) => {
                AuditStorage::File(sqlite_audit_file(file))
            }
            (None, _) => match MarkerStore::of(config)? {
                #[cfg(feature = "redis")]
                MarkerStore::Redis(redis) => AuditStorage::Redis(redis),
                #[cfg(feature = "postgres")]
                MarkerStore::Postgres(postgres) => AuditStorage::Postgres(postgres),
                // SQLite is handled above.
                #[allow(unreachable_patterns)]
                _ => {
                    return Err(CliError::usage(
                        "no audit destination is configured; set audit.file",
                    ));
                }
            },
        };
        Ok(Self {
            storage,
            who: context.operator.clone(),
            scope: config.text("store.scope").map(str::to_owned),
        })
    }

    /// Whether `audit.file` or a store is configured.
    pub(crate) fn is_configured(context: &CliContext) -> Result<bool, CliError> {
        Ok(context.config.has("audit.file") || context.config.store_kind()?.is_some())
    }

    /// Whether the audit is a file that does not exist.
    fn is_missing_file(&self) -> bool {
        matches!(&self.storage, AuditStorage::File(path) if !path.exists())
    }

    /// Records an action before it starts.
    ///
    /// # Errors
    /// The audit cannot be written; the action must not start.
    pub(crate) async fn begin(
        &self,
        action: PlannedAction,
        why: Option<&str>,
    ) -> Result<PendingAction, CliError> {
        let PlannedAction {
            what,
            id,
            handle,
            location,
            before,
            after,
            attempt,
        } = action;
        let (at_ms, why) = (now_ms(), why.map(str::to_owned));
        let (action_id, at, who, scope) = (
            format!("{:032x}", Token::random().0),
            utc_text(at_ms),
            self.who.clone(),
            self.scope.clone(),
        );
        let (what, stage) = (what.to_owned(), ActionStage::Begun);
        let entry = AuditEntry {
            action_id,
            at_ms,
            at,
            who,
            what,
            stage,
            scope,
            id,
            handle,
            location,
            before,
            after,
            attempt,
            why,
            failure: None,
        };
        self.write(&entry).await.map_err(|error| {
            CliError::server(format!(
                "nothing was done, since the audit cannot be written: {error}"
            ))
        })?;
        Ok(PendingAction(entry))
    }

    /// Records that the action was done.
    ///
    /// # Errors
    /// The audit cannot be written; the action was done.
    pub(crate) async fn done(&self, pending: PendingAction) -> Result<(), CliError> {
        self.end(pending.0, ActionStage::Done, None).await
    }

    /// Records that the store refused the marker change, and why.
    ///
    /// # Errors
    /// The audit cannot be written; nothing was changed.
    async fn not_done(&self, pending: PendingAction, failure: &CliError) -> Result<(), CliError> {
        self.end(pending.0, ActionStage::NotDone, Some(failure.to_string()))
            .await
    }

    /// Records that no copy of the message was published, and why.
    ///
    /// # Errors
    /// The audit cannot be written; no copy exists.
    pub(crate) async fn not_sent(
        &self,
        pending: PendingAction,
        failure: &CliError,
    ) -> Result<(), CliError> {
        self.end(pending.0, ActionStage::NotSent, Some(failure.to_string()))
            .await
    }

    /// Records a failure of the marker change: nothing was changed if the store refused the change;
    /// otherwise the result is unknown.
    ///
    /// # Errors
    /// The audit cannot be written; nothing was changed.
    pub(crate) async fn failed(
        &self,
        pending: PendingAction,
        failure: &CliError,
    ) -> Result<(), CliError> {
        match failure.code {
            CliErrorCode::Incomplete => self.not_done(pending, failure).await,
            // Without an answer from the store the result is unknown.
            _ => {
                self.unknown(pending, failure).await;
                Ok(())
            }
        }
    }

    /// Records why the result is unknown, with the stage [`ActionStage::Begun`]. Ignores a write
    /// error: an action with only its first line has an unknown result, too.
    pub(crate) async fn unknown(&self, pending: PendingAction, failure: &CliError) {
        let _ = self
            .end(pending.0, ActionStage::Begun, Some(failure.to_string()))
            .await;
    }

    async fn end(
        &self,
        entry: AuditEntry,
        stage: ActionStage,
        failure: Option<String>,
    ) -> Result<(), CliError> {
        let at_ms = now_ms();
        let entry = AuditEntry {
            stage,
            at_ms,
            at: utc_text(at_ms),
            failure,
            ..entry
        };
        let failed = |error| {
            CliError::server(format!(
                "{} was {}, and the audit cannot record that: {error}",
                entry.what,
                stage.description()
            ))
        };
        self.write(&entry).await.map_err(failed)
    }

    async fn write(&self, entry: &AuditEntry) -> Result<(), String> {
        let line = serde_json::to_string(entry).map_err(|error| error.to_string())?;
        match &self.storage {
            #[cfg(feature = "redis")]
            AuditStorage::Redis(redis) => redis
                .write_audit(&line)
                .await
                .map_err(|error| error.to_string()),
            #[cfg(feature = "postgres")]
            AuditStorage::Postgres(postgres) => postgres
                .write_audit(&line)
                .await
                .map_err(|error| error.to_string()),
            AuditStorage::File(path) => {
                append(path, &line).map_err(|error| format!("{}: {error}", path.display()))
            }
        }
    }

    /// The actions on an id in the configured scope, oldest first. Services with other scopes may
    /// share the audit.
    pub(crate) async fn actions_on(&self, id: &MessageId) -> Result<Vec<AuditEntry>, CliError> {
        let mut actions = self.actions().await?;
        actions.retain(|entry| entry.concerns(id) && entry.scope == self.scope);
        Ok(actions)
    }

    /// The highest attempt number of this id in the audit; 0 if none is recorded.
    pub(crate) async fn highest_attempt(&self, id: &MessageId) -> Result<u32, CliError> {
        let not_done = |failure| {
            CliError::server(format!(
                "nothing was done, since the audit cannot be read: {failure}"
            ))
        };
        Ok(self
            .actions_on(id)
            .await
            .map_err(not_done)?
            .iter()
            .filter_map(|entry| entry.attempt)
            .max()
            .unwrap_or(0))
    }

    /// All actions with their last recorded stage, in the order in which they started. Skips lines
    /// that cannot be parsed.
    pub(crate) async fn actions(&self) -> Result<Vec<AuditEntry>, CliError> {
        Ok(self.read().await?.0)
    }

    /// Like [`Self::actions`], with the number of lines that cannot be parsed.
    async fn read(&self) -> Result<(Vec<AuditEntry>, usize), CliError> {
        let text = match &self.storage {
            #[cfg(feature = "redis")]
            AuditStorage::Redis(redis) => redis.read_audit().await?.join("\n").into_bytes(),
            #[cfg(feature = "postgres")]
            AuditStorage::Postgres(postgres) => {
                postgres.read_audit().await?.join("\n").into_bytes()
            }
            AuditStorage::File(path) => match std::fs::read(path) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
                Err(error) => {
                    return Err(CliError::server(format!(
                        "the audit: {}: {error}",
                        path.display()
                    )));
                }
            },
        };
        let mut actions: Vec<AuditEntry> = Vec::new();
        let (mut index_of, mut unreadable) = (HashMap::new(), 0);
        // Parsed line by line: a line that is not UTF-8 must not make the others unreadable.
        for line in lines(&text) {
            let Ok(entry) = serde_json::from_slice::<AuditEntry>(line) else {
                unreadable += 1;
                continue;
            };
            match index_of.get(&entry.action_id) {
                Some(index) => actions[*index] = entry,
                None => {
                    index_of.insert(entry.action_id.clone(), actions.len());
                    actions.push(entry);
                }
            }
        }
        Ok((actions, unreadable))
    }
}

/// The lines of a text, which may end with a line break; none of an empty text.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    (!text.is_empty())
        .then(|| text.split(|byte| *byte == b'\n'))
        .into_iter()
        .flatten()
}

/// Appends a line with one write, so that lines of concurrent commands do not mix, and syncs it to
/// the disk. Starts a new line if a crash left the last one without its line break.
fn append(path: &PathBuf, line: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true).read(true);
    // Only the owner may read it, since ids may be confidential.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    let line_break = if last == [b'\n'] { "" } else { "\n" };
    file.write_all(format!("{line_break}{line}\n").as_bytes())?;
    file.sync_data()
}

/// `user@host`. The user is that of `SUDO_USER`, `USER` or `LOGNAME`, or else the numeric user id
/// of this process.
pub(crate) fn login_name() -> String {
    let first_set = |names: &[&str]| {
        names
            .iter()
            .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    };
    let host = first_set(&["HOSTNAME"]).or_else(|| {
        std::fs::read_to_string("/etc/hostname")
            .ok()
            .map(|name| name.trim().to_owned())
    });
    format!(
        "{}@{}",
        first_set(&["SUDO_USER", "USER", "LOGNAME"])
            .or_else(user_id)
            .unwrap_or_else(|| "unknown".into()),
        host.unwrap_or_else(|| "unknown".into())
    )
}

/// `uid-` and the effective user id of this process, where the system has `/proc`.
#[cfg(unix)]
fn user_id() -> Option<String> {
    let own = std::fs::metadata("/proc/self").ok()?;
    Some(format!("uid-{}", std::os::unix::fs::MetadataExt::uid(&own)))
}

#[cfg(not(unix))]
fn user_id() -> Option<String> {
    None
}
