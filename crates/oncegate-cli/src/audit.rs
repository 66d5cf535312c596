//! The audit: who did what and when, with the state before and after.
//!
//! Each action has two lines: one before it starts, so that no action goes unrecorded, and one with
//! its result. A crash leaves only the first: the result is unknown.

use std::collections::{BTreeSet, HashMap};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use clap::Args;
use oncegate::MessageId;
#[cfg(feature = "redis")]
use oncegate::Redis;
use oncegate::marker::Token;
use serde::{Deserialize, Serialize};

use crate::Context;
use crate::config::TimeArg;
use crate::failure::{Failure, FailureCode};
use crate::marker_store::{MarkerStore, audit_beside};
use crate::output::{TextTable, ms, now_ms, utc_text};

#[derive(Args)]
pub(crate) struct AuditArguments {
    /// Only actions on this id
    #[arg(long)]
    id: Option<String>,
    /// Only actions by this operator
    #[arg(long)]
    who: Option<String>,
    /// Only actions in this scope, since several services may share an audit; an empty one selects
    /// services without a scope
    #[arg(long)]
    scope: Option<String>,
    /// Only actions within this time, such as 24h
    #[arg(long, value_name = "TIME")]
    since: Option<TimeArg>,
    /// Maximum number of actions to show; the newest are shown
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

/// The progress of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ActionStage {
    /// It was started. Without a later line its result is unknown.
    Begun,
    Done,
    /// Nothing was changed.
    NotDone,
    /// The copy was refused, so nothing was sent; the marker may have been released before.
    NotSent,
}

impl ActionStage {
    fn description(self) -> &'static str {
        match self {
            Self::Begun => "begun, end unknown",
            Self::Done => "done",
            Self::NotDone => "not done",
            Self::NotSent => "not sent",
        }
    }
}

/// The position of a message in a broker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MessageLocation {
    pub(crate) broker: String,
    /// The topic or queue.
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) offset: Option<i64>,
    /// Kafka: the timestamp of the record, since a recreated topic reuses offsets. RabbitMQ: when
    /// the message was moved to its destination, if it says so.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) written_ms: Option<u64>,
}

impl std::fmt::Display for MessageLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.partition, self.offset) {
            (Some(partition), Some(offset)) => {
                write!(f, "{} {}/{partition}/{offset}", self.broker, self.name)
            }
            _ => write!(f, "{} {}", self.broker, self.name),
        }
    }
}

/// One line of the audit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AuditEntry {
    /// Identifies the action; both of its lines have it.
    pub(crate) act: String,
    pub(crate) at_ms: u64,
    /// The same as RFC 3339.
    pub(crate) at: String,
    pub(crate) who: String,
    /// The command, such as `marker forget`.
    pub(crate) what: String,
    pub(crate) stage: ActionStage,
    /// The scope of the markers; another service may use the same ids.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) place: Option<MessageLocation>,
    /// The state before.
    pub(crate) before: String,
    /// The intended state.
    pub(crate) after: String,
    /// The last known attempt of the id: a fence that no later action may lower.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) attempt: Option<u32>,
    /// The reason that the operator gave.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) why: Option<String>,
    /// The error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) failure: Option<String>,
}

/// The effect of an action on the id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuditedAction {
    SentBack,
    Dropped,
    Forgotten,
    /// The id counts as handled.
    Completed,
    /// No effect on the next delivery.
    Other,
}

impl AuditEntry {
    /// Whether it concerns this id. Forgotten ids are recorded as hashes.
    pub(crate) fn concerns(&self, id: &MessageId) -> bool {
        self.id
            .as_deref()
            .is_some_and(|it| it == id.as_str() || it == id.clone().hashed().as_str())
    }

    pub(crate) fn action(&self) -> AuditedAction {
        match self.what.as_str() {
            _ if self.after.starts_with("sent to ") => AuditedAction::SentBack,
            _ if self.after.starts_with("done") => AuditedAction::Completed,
            "dead-letters drop" => AuditedAction::Dropped,
            "marker forget" => AuditedAction::Forgotten,
            _ => AuditedAction::Other,
        }
    }
}

/// An action before it starts.
pub(crate) struct PlannedAction {
    pub(crate) what: &'static str,
    pub(crate) id: Option<String>,
    pub(crate) place: Option<MessageLocation>,
    pub(crate) before: String,
    pub(crate) after: String,
    pub(crate) attempt: Option<u32>,
}

/// Where the audit is stored.
enum AuditStorage {
    File(PathBuf),
    #[cfg(feature = "redis")]
    Store(Redis),
}

/// Reads and writes the audit.
pub(crate) struct Audit {
    at: AuditStorage,
    who: String,
    scope: Option<String>,
}

/// A recorded action whose result has to be recorded.
#[must_use]
pub(crate) struct PendingAction(AuditEntry);

impl Audit {
    /// Opens the configured file, or else the stream in the store.
    pub(crate) fn of(context: &Context) -> Result<Self, Failure> {
        let config = &context.config;
        let at = match (config.text("audit.file"), config.store_kind()?) {
            (Some(path), _) => AuditStorage::File(path.into()),
            (None, Some(oncegate_config::StoreKind::Sqlite(file))) => {
                AuditStorage::File(audit_beside(file))
            }
            (None, _) => match MarkerStore::of(config)? {
                #[cfg(feature = "redis")]
                MarkerStore::Redis(redis) => AuditStorage::Store(redis),
                // SQLite is handled above.
                #[allow(unreachable_patterns)]
                _ => {
                    return Err(Failure::usage(
                        "no place for the audit is configured; set audit.file",
                    ));
                }
            },
        };
        Ok(Self {
            at,
            who: context.operator.clone(),
            scope: config.text("store.scope").map(str::to_owned),
        })
    }

    /// Whether a file or a store is configured.
    pub(crate) fn is_configured(context: &Context) -> Result<bool, Failure> {
        Ok(context.config.has("audit.file") || context.config.store_kind()?.is_some())
    }

    /// Whether it is a file that does not exist.
    fn has_no_file(&self) -> bool {
        matches!(&self.at, AuditStorage::File(path) if !path.exists())
    }

    /// Records an action before it starts.
    ///
    /// # Errors
    /// It was not recorded: the action must not start.
    pub(crate) async fn begin(
        &self,
        act: PlannedAction,
        why: Option<&str>,
    ) -> Result<PendingAction, Failure> {
        let PlannedAction {
            what,
            id,
            place,
            before,
            after,
            attempt,
        } = act;
        let (at_ms, why) = (now_ms(), why.map(str::to_owned));
        let (act, at, who, scope) = (
            format!("{:032x}", Token::random().0),
            utc_text(at_ms),
            self.who.clone(),
            self.scope.clone(),
        );
        let (what, stage) = (what.to_owned(), ActionStage::Begun);
        let entry = AuditEntry {
            act,
            at_ms,
            at,
            who,
            what,
            stage,
            scope,
            id,
            place,
            before,
            after,
            attempt,
            why,
            failure: None,
        };
        self.write(&entry).await.map_err(|error| {
            Failure::server(format!(
                "nothing was done, since the audit cannot be written: {error}"
            ))
        })?;
        Ok(PendingAction(entry))
    }

    /// Records that the action was done.
    ///
    /// # Errors
    /// It was done, and the audit does not record it.
    pub(crate) async fn done(&self, pending: PendingAction) -> Result<(), Failure> {
        self.end(pending.0, ActionStage::Done, None).await
    }

    /// Records that nothing was changed, and why.
    ///
    /// # Errors
    /// Nothing was changed, and the audit does not record it.
    async fn not_done(&self, pending: PendingAction, failure: &Failure) -> Result<(), Failure> {
        self.end(pending.0, ActionStage::NotDone, Some(failure.to_string()))
            .await
    }

    /// Records that the copy was refused, and why.
    ///
    /// # Errors
    /// Nothing was sent, and the audit does not record it.
    pub(crate) async fn not_sent(
        &self,
        pending: PendingAction,
        failure: &Failure,
    ) -> Result<(), Failure> {
        self.end(pending.0, ActionStage::NotSent, Some(failure.to_string()))
            .await
    }

    /// Records a failure before anything was sent: that nothing was changed, if that is certain.
    ///
    /// # Errors
    /// Nothing was changed, and the audit does not record it.
    pub(crate) async fn failed(
        &self,
        pending: PendingAction,
        failure: &Failure,
    ) -> Result<(), Failure> {
        match failure.code {
            FailureCode::NotAll => self.not_done(pending, failure).await,
            // Without an answer from the store the result is unknown.
            _ => {
                self.unknown(pending, failure).await;
                Ok(())
            }
        }
    }

    /// Records why the result is unknown. The action stays `begun`, even if this cannot be written.
    pub(crate) async fn unknown(&self, pending: PendingAction, failure: &Failure) {
        let _ = self
            .end(pending.0, ActionStage::Begun, Some(failure.to_string()))
            .await;
    }

    async fn end(
        &self,
        entry: AuditEntry,
        stage: ActionStage,
        failure: Option<String>,
    ) -> Result<(), Failure> {
        let at_ms = now_ms();
        let entry = AuditEntry {
            stage,
            at_ms,
            at: utc_text(at_ms),
            failure,
            ..entry
        };
        let failed = |error| {
            Failure::server(format!(
                "{} was {}, and the audit cannot record that: {error}",
                entry.what,
                stage.description()
            ))
        };
        self.write(&entry).await.map_err(failed)
    }

    async fn write(&self, entry: &AuditEntry) -> Result<(), String> {
        let line = serde_json::to_string(entry).map_err(|error| error.to_string())?;
        match &self.at {
            #[cfg(feature = "redis")]
            AuditStorage::Store(redis) => redis
                .write_audit(&line)
                .await
                .map_err(|error| error.to_string()),
            AuditStorage::File(path) => {
                append(path, &line).map_err(|error| format!("{}: {error}", path.display()))
            }
        }
    }

    /// The actions on an id in the configured scope. Several services may share one audit.
    pub(crate) async fn actions_on(&self, id: &MessageId) -> Result<Vec<AuditEntry>, Failure> {
        let mut actions = self.actions().await?;
        actions.retain(|act| act.concerns(id) && act.scope == self.scope);
        Ok(actions)
    }

    /// The highest attempt of this id in the audit; 0 if none is recorded.
    pub(crate) async fn fence(&self, id: &MessageId) -> Result<u32, Failure> {
        let unread = |failure| {
            Failure::server(format!(
                "nothing was done, since the audit cannot be read: {failure}"
            ))
        };
        Ok(self
            .actions_on(id)
            .await
            .map_err(unread)?
            .iter()
            .filter_map(|act| act.attempt)
            .max()
            .unwrap_or(0))
    }

    /// All actions with their results, oldest first. Skips lines that cannot be read.
    pub(crate) async fn actions(&self) -> Result<Vec<AuditEntry>, Failure> {
        Ok(self.read().await?.0)
    }

    /// Like [`Self::actions`], with the number of lines that cannot be read.
    async fn read(&self) -> Result<(Vec<AuditEntry>, usize), Failure> {
        let text = match &self.at {
            #[cfg(feature = "redis")]
            AuditStorage::Store(redis) => redis.read_audit().await?.join("\n").into_bytes(),
            AuditStorage::File(path) => match std::fs::read(path) {
                Ok(text) => text,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
                Err(error) => {
                    return Err(Failure::server(format!(
                        "the audit: {}: {error}",
                        path.display()
                    )));
                }
            },
        };
        let mut actions: Vec<AuditEntry> = Vec::new();
        let (mut at, mut unreadable) = (HashMap::new(), 0);
        // A line that is not UTF-8 must not hide the others.
        for line in lines(&text) {
            let Ok(entry) = serde_json::from_slice::<AuditEntry>(line) else {
                unreadable += 1;
                continue;
            };
            match at.get(&entry.act) {
                Some(index) => actions[*index] = entry,
                None => {
                    at.insert(entry.act.clone(), actions.len());
                    actions.push(entry);
                }
            }
        }
        Ok((actions, unreadable))
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    (!text.is_empty())
        .then(|| text.split(|byte| *byte == b'\n'))
        .into_iter()
        .flatten()
}

/// Appends with one write, so that lines of several operators do not mix. Starts a new line after
/// one that a crash cut off.
fn append(path: &PathBuf, line: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true).read(true);
    // Only the owner may read it: it holds ids.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    let mut last = [b'\n'];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    let begins = if last == [b'\n'] { "" } else { "\n" };
    file.write_all(format!("{begins}{line}\n").as_bytes())?;
    file.sync_data()
}

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
        first_set(&["SUDO_USER", "USER", "LOGNAME"]).unwrap_or_else(|| "unknown".into()),
        host.unwrap_or_else(|| "unknown".into())
    )
}

pub(crate) fn table(actions: &[AuditEntry]) -> TextTable {
    let mut table = TextTable::new(&[
        "when", "who", "what", "scope", "id", "before", "after", "end", "where", "why", "failure",
    ]);
    for act in actions {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        table.row([
            act.at.clone(),
            act.who.clone(),
            act.what.clone(),
            or_dash(act.scope.clone()),
            or_dash(act.id.clone()),
            act.before.clone(),
            act.after.clone(),
            act.stage.description().to_owned(),
            or_dash(act.place.as_ref().map(MessageLocation::to_string)),
            or_dash(act.why.clone()),
            or_dash(act.failure.clone()),
        ]);
    }
    table
}

pub(crate) async fn run(context: &Context, arguments: AuditArguments) -> Result<(), Failure> {
    let id = arguments
        .id
        .as_deref()
        .map(|id| crate::config::id(&context.config, id))
        .transpose()?;
    let since = arguments
        .since
        .map_or(0, |since| now_ms().saturating_sub(ms(since.0)));
    let audit = Audit::of(context)?;
    let (mut actions, unreadable) = audit.read().await?;
    check_known(
        "--who",
        arguments.who.as_deref(),
        actions.iter().map(|act| act.who.as_str()),
    )?;
    let ours = context
        .config
        .text("store.scope")
        .into_iter()
        .chain([""])
        .filter(|_| !actions.is_empty());
    check_known(
        "--scope",
        arguments.scope.as_deref(),
        actions
            .iter()
            .map(|act| act.scope.as_deref().unwrap_or_default())
            .chain(ours),
    )?;
    actions.retain(|act| {
        act.at_ms >= since
            && id.as_ref().is_none_or(|id| act.concerns(id))
            && arguments.who.as_ref().is_none_or(|who| act.who == *who)
            && arguments
                .scope
                .as_ref()
                .is_none_or(|scope| act.scope.as_deref().unwrap_or_default() == scope)
    });
    let shown = &actions[actions.len().saturating_sub(arguments.limit)..];
    let count = match actions.len() {
        all if all > shown.len() => format!("The newest {} of {all} are shown: raise --limit.", shown.len()),
        0 if audit.has_no_file() => {
            "0 shown: the audit file does not exist. No action was recorded yet, or audit.file names another file.".into()
        }
        all => format!("{all} shown."),
    };
    context
        .format
        .print(&shown, format!("{}{count}", table(shown)))?;
    match unreadable {
        0 => Ok(()),
        _ => Err(Failure::not_all(format!(
            "lines of the audit that cannot be read, and are not shown: {unreadable}"
        ))),
    }
}

/// Checks that a filter matches at least one action.
///
/// # Errors
/// There are actions, and none matches.
fn check_known<'a>(
    filter: &str,
    word: Option<&str>,
    known: impl Iterator<Item = &'a str>,
) -> Result<(), Failure> {
    let Some(word) = word else { return Ok(()) };
    let known: BTreeSet<&str> = known.collect();
    if known.is_empty() || known.contains(word) {
        return Ok(());
    }
    Err(Failure::unknown_value(
        filter,
        word,
        &known.into_iter().collect::<Vec<_>>(),
    ))
}
