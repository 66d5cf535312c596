//! Who did what, when, and what it was before and after.
//!
//! Each act has two lines: one before it, so that nothing is done that is not written down, and one
//! that says how it ended. Between them stands what a crash leaves: an act of which nobody knows
//! whether it was done.

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
use crate::config::Span;
use crate::failure::{Code, Failure};
use crate::markers::{Markers, audit_beside};
use crate::say::{Table, ms, now_ms, utc};

#[derive(Args)]
pub(crate) struct AuditArguments {
    /// Only acts on this id.
    #[arg(long)]
    id: Option<String>,
    /// Only acts by this operator.
    #[arg(long)]
    who: Option<String>,
    /// Only acts in this scope: several services may write into one audit. An empty one is that of
    /// a service without a scope.
    #[arg(long)]
    scope: Option<String>,
    /// Only what was done within this time, such as 24h.
    #[arg(long, value_name = "TIME")]
    since: Option<Span>,
    /// The most to show, the newest of them.
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

/// How an act ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Stage {
    /// It was about to be done. Where no other line says more, nobody knows whether it was.
    Begun,
    Done,
    /// Nothing was done.
    NotDone,
    /// Its copy was refused, so that nothing was sent; its marker may have been freed before.
    NotSent,
}

impl Stage {
    fn told(self) -> &'static str {
        match self {
            Self::Begun => "begun, end unknown",
            Self::Done => "done",
            Self::NotDone => "not done",
            Self::NotSent => "not sent",
        }
    }
}

/// Where a message stands that was acted on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) broker: String,
    /// The topic or queue.
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) partition: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) offset: Option<i64>,
    /// On Kafka the record's timestamp: a topic that is made anew counts its offsets from 0 again.
    /// On RabbitMQ, where a message has no place of its own, when it was set aside, if it says so.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) written_ms: Option<u64>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.partition, self.offset) {
            (Some(partition), Some(offset)) => {
                write!(f, "{} {}/{partition}/{offset}", self.broker, self.name)
            }
            _ => write!(f, "{} {}", self.broker, self.name),
        }
    }
}

/// One line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// What both lines of an act share.
    pub(crate) act: String,
    pub(crate) at_ms: u64,
    /// The same for people.
    pub(crate) at: String,
    pub(crate) who: String,
    /// The command, such as `marker forget`.
    pub(crate) what: String,
    pub(crate) stage: Stage,
    /// Of the markers that it was about: another service's may have the same ids.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) place: Option<Place>,
    /// What was there.
    pub(crate) before: String,
    /// What was to come of it.
    pub(crate) after: String,
    /// The number of the last attempt of the id that was known: its fence, which no later act may
    /// set back.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) attempt: Option<u32>,
    /// Why, as the operator says.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) why: Option<String>,
    /// What went wrong.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) failure: Option<String>,
}

/// What an act came to, for the id that it was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    SentBack,
    Dropped,
    Forgotten,
    /// It counts as handled since.
    Completed,
    /// Nothing that the next delivery would see.
    Other,
}

impl Entry {
    /// Whether it is about this id. What was forgotten is written by its hash.
    pub(crate) fn is_of(&self, id: &MessageId) -> bool {
        self.id
            .as_deref()
            .is_some_and(|it| it == id.as_str() || it == id.clone().hashed().as_str())
    }

    pub(crate) fn deed(&self) -> Deed {
        match self.what.as_str() {
            _ if self.after.starts_with("sent to ") => Deed::SentBack,
            _ if self.after.starts_with("done") => Deed::Completed,
            "dead-letters drop" => Deed::Dropped,
            "marker forget" => Deed::Forgotten,
            _ => Deed::Other,
        }
    }
}

/// What is about to be done.
pub(crate) struct Act {
    pub(crate) what: &'static str,
    pub(crate) id: Option<String>,
    pub(crate) place: Option<Place>,
    pub(crate) before: String,
    pub(crate) after: String,
    pub(crate) attempt: Option<u32>,
}

/// Where it is written.
enum Where {
    File(PathBuf),
    #[cfg(feature = "redis")]
    Store(Redis),
}

/// The audit.
pub(crate) struct Audit {
    at: Where,
    who: String,
    scope: Option<String>,
}

/// An act that was begun: it has to be ended.
#[must_use]
pub(crate) struct Begun(Entry);

impl Audit {
    /// In the file that is configured, or else on the store.
    pub(crate) fn of(context: &Context) -> Result<Self, Failure> {
        let config = &context.config;
        let at = match (config.text("audit.file"), config.place()?) {
            (Some(path), _) => Where::File(path.into()),
            (None, Some(oncegate_config::Place::Sqlite(file))) => Where::File(audit_beside(file)),
            (None, _) => match Markers::of(config)? {
                #[cfg(feature = "redis")]
                Markers::Redis(redis) => Where::Store(redis),
                // An SQLite file's stands at the place that was asked for above.
                #[allow(unreachable_patterns)]
                _ => return Err(Failure::usage("the audit has no place; set audit.file")),
            },
        };
        Ok(Self {
            at,
            who: context.operator.clone(),
            scope: config.text("store.scope").map(str::to_owned),
        })
    }

    /// Whether there is a place for it.
    pub(crate) fn has_place(context: &Context) -> Result<bool, Failure> {
        Ok(context.config.has("audit.file") || context.config.place()?.is_some())
    }

    /// Whether it is a file that is not there.
    fn has_no_file(&self) -> bool {
        matches!(&self.at, Where::File(path) if !path.exists())
    }

    /// Writes down what is about to be done.
    ///
    /// # Errors
    /// It does not stand there: do nothing.
    pub(crate) async fn begin(&self, act: Act, why: Option<&str>) -> Result<Begun, Failure> {
        let Act {
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
            utc(at_ms),
            self.who.clone(),
            self.scope.clone(),
        );
        let (what, stage) = (what.to_owned(), Stage::Begun);
        let entry = Entry {
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
        Ok(Begun(entry))
    }

    /// Writes down that it was done.
    ///
    /// # Errors
    /// It was done, and the audit does not say so.
    pub(crate) async fn done(&self, begun: Begun) -> Result<(), Failure> {
        self.end(begun.0, Stage::Done, None).await
    }

    /// Writes down that it was not done, and why.
    ///
    /// # Errors
    /// It was not done, and the audit does not say so.
    async fn not_done(&self, begun: Begun, failure: &Failure) -> Result<(), Failure> {
        self.end(begun.0, Stage::NotDone, Some(failure.to_string()))
            .await
    }

    /// Writes down that the copy was refused, and why.
    ///
    /// # Errors
    /// It was not sent, and the audit does not say so.
    pub(crate) async fn not_sent(&self, begun: Begun, failure: &Failure) -> Result<(), Failure> {
        self.end(begun.0, Stage::NotSent, Some(failure.to_string()))
            .await
    }

    /// Writes down that something went wrong before anything was sent: that nothing was done, if
    /// that is certain.
    ///
    /// # Errors
    /// Nothing was done, and the audit does not say so.
    pub(crate) async fn failed(&self, begun: Begun, failure: &Failure) -> Result<(), Failure> {
        match failure.code {
            Code::NotAll => self.not_done(begun, failure).await,
            // Where the store's answer is missing, nobody knows.
            _ => {
                self.unknown(begun, failure).await;
                Ok(())
            }
        }
    }

    /// Writes down why nobody knows whether it was done. The act stays begun, whether or not this
    /// can be written.
    pub(crate) async fn unknown(&self, begun: Begun, failure: &Failure) {
        let _ = self
            .end(begun.0, Stage::Begun, Some(failure.to_string()))
            .await;
    }

    async fn end(
        &self,
        entry: Entry,
        stage: Stage,
        failure: Option<String>,
    ) -> Result<(), Failure> {
        let at_ms = now_ms();
        let entry = Entry {
            stage,
            at_ms,
            at: utc(at_ms),
            failure,
            ..entry
        };
        let failed = |error| {
            Failure::server(format!(
                "{} was {}, and the audit could not be told so: {error}",
                entry.what,
                stage.told()
            ))
        };
        self.write(&entry).await.map_err(failed)
    }

    async fn write(&self, entry: &Entry) -> Result<(), String> {
        let line = serde_json::to_string(entry).map_err(|error| error.to_string())?;
        match &self.at {
            #[cfg(feature = "redis")]
            Where::Store(redis) => redis
                .write_audit(&line)
                .await
                .map_err(|error| error.to_string()),
            Where::File(path) => {
                append(path, &line).map_err(|error| format!("{}: {error}", path.display()))
            }
        }
    }

    /// The acts on an id in the scope that is configured. Several services may write into one
    /// audit.
    pub(crate) async fn acts_on(&self, id: &MessageId) -> Result<Vec<Entry>, Failure> {
        let mut acts = self.acts().await?;
        acts.retain(|act| act.is_of(id) && act.scope == self.scope);
        Ok(acts)
    }

    /// The highest number of an attempt of this id that any act knew; 0 if none did.
    pub(crate) async fn fence(&self, id: &MessageId) -> Result<u32, Failure> {
        let unread = |failure| {
            Failure::server(format!(
                "nothing was done, since the audit cannot be read: {failure}"
            ))
        };
        Ok(self
            .acts_on(id)
            .await
            .map_err(unread)?
            .iter()
            .filter_map(|act| act.attempt)
            .max()
            .unwrap_or(0))
    }

    /// Every act once, with how it ended, the oldest first. A line that cannot be read is passed
    /// over.
    pub(crate) async fn acts(&self) -> Result<Vec<Entry>, Failure> {
        Ok(self.read().await?.0)
    }

    /// The same, and how many lines could not be read.
    async fn read(&self) -> Result<(Vec<Entry>, usize), Failure> {
        let lines = match &self.at {
            #[cfg(feature = "redis")]
            Where::Store(redis) => redis.read_audit().await?,
            Where::File(path) => match std::fs::read_to_string(path) {
                Ok(text) => text.lines().map(str::to_owned).collect(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
                Err(error) => {
                    return Err(Failure::server(format!(
                        "the audit: {}: {error}",
                        path.display()
                    )));
                }
            },
        };
        let mut acts: Vec<Entry> = Vec::new();
        let (mut at, mut unreadable) = (HashMap::new(), 0);
        for line in &lines {
            let Ok(entry) = serde_json::from_str::<Entry>(line) else {
                unreadable += 1;
                continue;
            };
            match at.get(&entry.act) {
                Some(index) => acts[*index] = entry,
                None => {
                    at.insert(entry.act.clone(), acts.len());
                    acts.push(entry);
                }
            }
        }
        Ok((acts, unreadable))
    }
}

/// One write, so that the lines of several operators do not mix. A line that a crash cut off is not
/// continued.
fn append(path: &PathBuf, line: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true).read(true);
    // It holds ids.
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

pub(crate) fn user_of_this_machine() -> String {
    let said = |names: &[&str]| {
        names
            .iter()
            .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    };
    let host = said(&["HOSTNAME"]).or_else(|| {
        std::fs::read_to_string("/etc/hostname")
            .ok()
            .map(|name| name.trim().to_owned())
    });
    format!(
        "{}@{}",
        said(&["SUDO_USER", "USER", "LOGNAME"]).unwrap_or_else(|| "unknown".into()),
        host.unwrap_or_else(|| "unknown".into())
    )
}

pub(crate) fn table(acts: &[Entry]) -> Table {
    let mut table = Table::new(&[
        "when", "who", "what", "scope", "id", "before", "after", "end", "where", "why", "failure",
    ]);
    for act in acts {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        table.row([
            act.at.clone(),
            act.who.clone(),
            act.what.clone(),
            or_dash(act.scope.clone()),
            or_dash(act.id.clone()),
            act.before.clone(),
            act.after.clone(),
            act.stage.told().to_owned(),
            or_dash(act.place.as_ref().map(Place::to_string)),
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
    let (mut acts, unreadable) = audit.read().await?;
    is_known(
        "--who",
        arguments.who.as_deref(),
        acts.iter().map(|act| act.who.as_str()),
    )?;
    let ours = context
        .config
        .text("store.scope")
        .into_iter()
        .chain([""])
        .filter(|_| !acts.is_empty());
    is_known(
        "--scope",
        arguments.scope.as_deref(),
        acts.iter()
            .map(|act| act.scope.as_deref().unwrap_or_default())
            .chain(ours),
    )?;
    acts.retain(|act| {
        act.at_ms >= since
            && id.as_ref().is_none_or(|id| act.is_of(id))
            && arguments.who.as_ref().is_none_or(|who| act.who == *who)
            && arguments
                .scope
                .as_ref()
                .is_none_or(|scope| act.scope.as_deref().unwrap_or_default() == scope)
    });
    let shown = &acts[acts.len().saturating_sub(arguments.limit)..];
    let count = match acts.len() {
        all if all > shown.len() => format!("The newest {} of {all} are shown: raise --limit.", shown.len()),
        0 if audit.has_no_file() => {
            "0 shown: the file of the audit does not exist. Nobody has acted yet, or audit.file names another file.".into()
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

/// Whether a filter names what some act has.
///
/// # Errors
/// There are acts, and none has it.
fn is_known<'a>(
    filter: &str,
    word: Option<&str>,
    known: impl Iterator<Item = &'a str>,
) -> Result<(), Failure> {
    let Some(word) = word else { return Ok(()) };
    let known: BTreeSet<&str> = known.collect();
    if known.is_empty() || known.contains(word) {
        return Ok(());
    }
    Err(Failure::unknown_word(
        filter,
        word,
        &known.into_iter().collect::<Vec<_>>(),
    ))
}
