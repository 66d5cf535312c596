//! What happened in a run, record by record, in the order of one clock.
//!
//! Each process of a run appends to a file of its own, one JSON object a line. What a killed process had written stays:
//! each record is handed to the system before the process goes on.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// When, in microseconds of the machine's monotonic clock, which all processes share.
    #[serde(rename = "t")]
    pub at: u64,
    /// The same by the wall clock, in milliseconds since 1970.
    #[serde(rename = "w")]
    pub wall: u64,
    /// Which process wrote it: `player`, `sink`, or a consumer's name.
    pub by: String,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// What may happen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum What {
    /// A message was handed to the broker.
    Attempted {
        /// The message's.
        id: String,
    },
    /// The broker has confirmed it.
    Confirmed {
        /// The message's.
        id: String,
    },
    /// The sink applied an effect.
    Effect {
        /// The message's.
        id: String,
        /// Who asked for it.
        consumer: String,
        /// The attempt that the store had granted.
        attempt: u32,
        /// Whether the unique table took it, or had it already.
        unique: Unique,
    },
    /// The sink refused an effect: its attempt was voided before.
    Refused {
        /// The message's.
        id: String,
        /// Who asked for it.
        consumer: String,
        /// The attempt that the store had granted.
        attempt: u32,
    },
    /// A consumer asked the sink whether an effect had happened, and to void it if not.
    Looked {
        /// The message's.
        id: String,
        /// Who asked.
        consumer: String,
        /// Attempts up to this are void now, if it had not.
        attempt: u32,
        /// What the sink said.
        found: Found,
    },
    /// A source handed a delivery over.
    Received {
        /// The message's.
        id: String,
        /// Partition and offset, or the delivery tag.
        position: String,
    },
    /// The store answered.
    Answered {
        /// The message's.
        id: String,
        /// What was asked.
        ask: Asked,
        /// What it said.
        verdict: String,
    },
    /// A handler was started.
    Started {
        /// The message's.
        id: String,
        /// The attempt that the store had granted.
        attempt: u32,
        /// A number of its own among the handlers of this consumer.
        run: u64,
    },
    /// A handler ended.
    Ended {
        /// The message's.
        id: String,
        /// The handler's.
        run: u64,
        /// How.
        how: Ending,
    },
    /// A delivery was settled.
    Settled {
        /// The message's.
        id: String,
        /// Partition and offset, or the delivery tag.
        position: String,
        /// How.
        how: Settling,
        /// The proof of an acceptance, or the reason of a rejection.
        why: String,
    },
    /// A consumer noticed that it had not run for so long, though nobody had frozen it: it ended at the record's time.
    Stalled {
        /// For how long.
        ms: u64,
    },
    /// A consumer is about to abort, because a message says so: its process ends with SIGABRT.
    Aborting {
        /// The message's.
        id: String,
    },
    /// The player began or ended a fault.
    Fault {
        /// A number of its own among the faults of the run.
        number: u64,
        /// The kind, as schedules name it.
        kind: String,
        /// The consumer that it was done to; none if a server.
        target: Option<String>,
        /// Which of the two.
        edge: Edge,
    },
    /// A consumer process has ended.
    Gone {
        /// Its name.
        consumer: String,
        /// What the player had done to it.
        after: Sent,
        /// As the system says it: `exit 0`, `signal 9`.
        status: String,
        /// How long it took from the signal, in milliseconds.
        took_ms: u64,
    },
    /// A message stands in the dead letters or in doubt after the run.
    Aside {
        /// The message's.
        id: String,
        /// Where.
        place: Place,
        /// Why.
        reason: String,
    },
    /// A marker in the store after the run that is not done.
    Marker {
        /// The message's.
        id: String,
        /// What stands there.
        record: String,
    },
    /// How many deliveries were left when the run had to end.
    Left {
        /// By the broker's count.
        count: u64,
    },
    /// The group has committed this, as Kafka told a client of the player's; written when it has changed.
    Committed {
        /// Of the topic.
        partition: i32,
        /// The next to be read.
        offset: i64,
    },
    /// How much memory a consumer had, as the system told the player.
    Sampled {
        /// Its name.
        consumer: String,
        /// What it had resident, in KiB.
        resident: u64,
    },
    /// A secret that the run was given stands in one of its files.
    Leaked {
        /// Whose password it is.
        secret: String,
        /// Which file, and which line of it.
        place: String,
    },
    /// The broker closed a channel because it was told something that it refuses (406).
    ChannelRefused {
        /// The line in its log.
        line: String,
    },
}

/// Whether an effect was the first of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unique {
    /// The unique table took it.
    Accepted,
    /// It was there already.
    Known,
}

/// What the sink says when it is asked for an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// It happened.
    Happened,
    /// It did not, and is void now.
    Voided,
}

/// What a store may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Asked {
    /// May I handle this id now?
    Claim,
    /// I still hold it.
    Renew,
    /// It happened.
    Complete,
    /// Free it for another attempt.
    Clear,
    /// Keep it from running.
    Reject,
    /// Nobody knows.
    Doubt,
    /// It is known now.
    Resolve,
    /// An operator frees it.
    Forget,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// It said that it happened.
    Ok,
    /// It said that it failed.
    Failed,
    /// It panicked.
    Panicked,
    /// It was dropped before it ended.
    Dropped,
}

/// How a delivery was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Settling {
    /// It is done with.
    Accepted,
    /// It comes back.
    Released,
    /// It goes to the dead letters or in doubt.
    Rejected,
}

/// One end of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Edge {
    /// It begins.
    Begin,
    /// It is over.
    End,
}

/// What a consumer was told before it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sent {
    /// SIGKILL.
    Kill,
    /// SIGTERM.
    Terminate,
    /// Nothing: it ended by itself.
    Nothing,
}

/// Where a message stands that was set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The dead letters.
    DeadLetters,
    /// The in-doubt queue.
    InDoubt,
}

impl What {
    /// The id that it is about, if it is about one.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Attempted { id }
            | Self::Confirmed { id }
            | Self::Effect { id, .. }
            | Self::Refused { id, .. }
            | Self::Looked { id, .. }
            | Self::Received { id, .. }
            | Self::Answered { id, .. }
            | Self::Started { id, .. }
            | Self::Ended { id, .. }
            | Self::Settled { id, .. }
            | Self::Aborting { id }
            | Self::Aside { id, .. }
            | Self::Marker { id, .. } => Some(id),
            Self::Stalled { .. }
            | Self::Fault { .. }
            | Self::Gone { .. }
            | Self::Left { .. }
            | Self::Committed { .. }
            | Self::Sampled { .. }
            | Self::Leaked { .. }
            | Self::ChannelRefused { .. } => None,
        }
    }
}

/// Microseconds of the machine's monotonic clock, which goes on while a process is frozen.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The machine has been up for a positive time, and not for 500,000 years.
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1_000
}

/// A file of the ledger that is being written. Several threads may write it: what is written at once stands together.
#[derive(Debug)]
pub struct Log {
    file: File,
    by: String,
}

impl Log {
    /// Opens the file, or creates it; records in it are by this process.
    ///
    /// # Errors
    /// What the file system said.
    pub fn open(path: &Path, by: impl Into<String>) -> io::Result<Self> {
        Ok(Self { file: OpenOptions::new().append(true).create(true).open(path)?, by: by.into() })
    }

    /// Adds a record.
    ///
    /// # Panics
    /// As [`write_all`](Self::write_all).
    pub fn write(&self, what: What) {
        self.write_all([what]);
    }

    /// Adds records, in one write.
    ///
    /// # Panics
    /// When the file cannot be written: a run that cannot see what happened is worth nothing.
    pub fn write_all(&self, records: impl IntoIterator<Item = What>) {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let (at, wall) = (now(), u64::try_from(wall).unwrap_or_default());
        let mut lines = Vec::new();
        for what in records {
            let record = Record { at, wall, by: self.by.clone(), what };
            serde_json::to_writer(&mut lines, &record).expect("a record has only text and numbers");
            lines.push(b'\n');
        }
        if !lines.is_empty() {
            (&self.file).write_all(&lines).expect("the ledger can be written");
        }
    }
}

/// All records of a run, in the order of the clock.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    records: Vec<Record>,
    by_id: HashMap<String, Vec<usize>>,
}

/// Why there is no ledger.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// The file system said so.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: String,
        /// What it said.
        source: io::Error,
    },
    /// A line is none of ours.
    #[error("{path}, line {line}: {source}")]
    Line {
        /// Which file.
        path: String,
        /// From 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

impl Ledger {
    /// Puts records into the order of the clock; what has the same time stays as it stood.
    pub fn of(records: impl IntoIterator<Item = Record>) -> Self {
        let mut records: Vec<Record> = records.into_iter().collect();
        records.sort_by_key(|record| record.at);
        let mut by_id: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, record) in records.iter().enumerate() {
            if let Some(id) = record.what.id() {
                match by_id.get_mut(id) {
                    Some(of_id) => of_id.push(index),
                    None => drop(by_id.insert(id.to_owned(), vec![index])),
                }
            }
        }
        Self { records, by_id }
    }

    /// Reads every file in a folder whose name ends in `.jsonl`. The last line of a killed process may be cut off: it is
    /// left out.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn read(folder: &Path) -> Result<Self, Unreadable> {
        let failed = |path: &Path, source| Unreadable::File { path: path.display().to_string(), source };
        let mut records = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(|source| failed(folder, source))? {
            let path = entry.map_err(|source| failed(folder, source))?.path();
            if path.extension().is_some_and(|extension| extension == "jsonl") {
                let text = std::fs::read_to_string(&path).map_err(|source| failed(&path, source))?;
                let whole = text.rfind('\n').map_or("", |end| &text[..end]);
                for (index, line) in whole.lines().enumerate() {
                    let unreadable = |source| Unreadable::Line { path: path.display().to_string(), line: index + 1, source };
                    records.push(serde_json::from_str(line).map_err(unreadable)?);
                }
            }
        }
        Ok(Self::of(records))
    }

    /// Every record.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// What was written from one time to another, by the ledger's clock.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = &Record> {
        let first = self.records.partition_point(|record| record.at < from);
        self.records[first..].iter().take_while(move |record| record.at <= to)
    }

    /// Every id that something is known of, in no order.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.by_id.keys().map(String::as_str)
    }

    /// What is known of an id.
    pub fn history<'a>(&'a self, id: &str) -> impl Iterator<Item = &'a Record> + Clone + use<'a> {
        self.by_id.get(id).into_iter().flatten().map(|index| &self.records[*index])
    }
}

/// As a history tells it: seconds since the machine began, who, what.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06} {:<8} ", self.at / 1_000_000, self.at % 1_000_000, self.by)?;
        let said = serde_json::to_value(&self.what).map_err(|_| fmt::Error)?;
        let what = said.get("what").and_then(|what| what.as_str()).unwrap_or_default();
        write!(f, "{what}")?;
        for (name, value) in said.as_object().into_iter().flatten().filter(|(name, _)| *name != "what" && *name != "id") {
            match value.as_str() {
                Some(text) => write!(f, " {name}={text}")?,
                None => write!(f, " {name}={value}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effect(id: &str) -> What {
        What::Effect { id: id.into(), consumer: "c0.1".into(), attempt: 2, unique: Unique::Accepted }
    }

    #[test]
    fn what_was_written_is_read_again_but_for_a_line_that_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let (sink, player) = (folder.path().join("sink.jsonl"), folder.path().join("player.jsonl"));
        let fault = What::Fault { number: 1, kind: "kill-redis".into(), target: None, edge: Edge::Begin };
        Log::open(&player, "player").unwrap().write_all([What::Attempted { id: "a".into() }, fault.clone()]);
        Log::open(&sink, "sink").unwrap().write(effect("a"));
        (&OpenOptions::new().append(true).open(&sink).unwrap()).write_all(br#"{"t":1,"w":"#).unwrap();
        std::fs::write(folder.path().join("consumer.log"), "not a ledger").unwrap();

        let ledger = Ledger::read(folder.path()).unwrap();

        let seen: Vec<(&str, &What)> = ledger.records().iter().map(|record| (record.by.as_str(), &record.what)).collect();
        assert_eq!(seen, [("player", &What::Attempted { id: "a".into() }), ("player", &fault), ("sink", &effect("a"))]);
        assert_eq!(ledger.history("a").count(), 2);
        assert_eq!(ledger.history("b").count(), 0);
        assert!(ledger.records().iter().all(|record| record.at > 0 && record.wall > 0));
    }

    #[test]
    fn a_line_of_another_kind_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("x.jsonl"), "{}\n").unwrap();
        let error = Ledger::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("x.jsonl, line 1"), "{error}");
    }

    #[test]
    fn a_record_reads_as_a_line_of_a_history() {
        let record = Record { at: 12_000_345, wall: 0, by: "sink".into(), what: effect("a") };
        assert_eq!(record.to_string(), "12.000345 sink     effect attempt=2 consumer=c0.1 unique=accepted");
    }
}
