//! The diary: a file in which consumers record runs and effects for the tests; it survives a crash.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;

/// One line of a diary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A handler has started: `start <id> <attempt>`.
    Start(DiaryRun),
    /// An effect happened: `effect <id> <attempt>`.
    Effect(DiaryRun),
    /// The consumer counted a delivery under this outcome: `counted <outcome>`.
    Counted(String),
}

/// One run of a handler.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiaryRun {
    /// The id of the message.
    pub id: String,
    /// The attempt that the store granted.
    pub attempt: u32,
}

/// A diary that is open for writing. Several processes may share it: each line is one write.
#[derive(Debug)]
pub struct Diary(File);

impl Diary {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .map(Self)
    }

    /// Adds a line.
    ///
    /// # Panics
    /// If the file cannot be written: without the record the test would be wrong.
    pub fn write(&self, entry: &Entry) {
        let line = format!("{entry}\n");
        (&self.0)
            .write_all(line.as_bytes())
            .expect("the diary can be written");
    }
}

/// The entries of a diary; none if it does not exist yet. Skips an incomplete last line.
///
/// # Panics
/// If a line is not an entry.
pub fn read(path: &Path) -> Vec<Entry> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| {
            line.parse()
                .unwrap_or_else(|NotAnEntry| panic!("`{line}` is not an entry of a diary"))
        })
        .collect()
}

/// The text is not an entry of a diary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAnEntry;

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(run) => write!(f, "start {} {}", run.id, run.attempt),
            Self::Effect(run) => write!(f, "effect {} {}", run.id, run.attempt),
            Self::Counted(outcome) => write!(f, "counted {outcome}"),
        }
    }
}

impl FromStr for Entry {
    type Err = NotAnEntry;

    fn from_str(line: &str) -> Result<Self, NotAnEntry> {
        let run = |id: &str, attempt: &str| {
            Ok(DiaryRun {
                id: id.to_owned(),
                attempt: attempt.parse().map_err(|_| NotAnEntry)?,
            })
        };
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["start", id, attempt] => Ok(Self::Start(run(id, attempt)?)),
            ["effect", id, attempt] => Ok(Self::Effect(run(id, attempt)?)),
            ["counted", outcome] => Ok(Self::Counted(outcome.to_owned())),
            _ => Err(NotAnEntry),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_as_it_was_written() {
        let run = DiaryRun {
            id: "pay-1".into(),
            attempt: 2,
        };
        for entry in [
            Entry::Start(run.clone()),
            Entry::Effect(run),
            Entry::Counted("completed".into()),
        ] {
            assert_eq!(entry.to_string().parse(), Ok(entry));
        }
        assert_eq!("effect a b".parse::<Entry>(), Err(NotAnEntry));
    }
}
