//! The ledger: all events of a run, ordered by one clock.
//!
//! Each process of a run appends to its own file, one JSON object per line. Records are written
//! before the process continues, so a killed process leaves all its records.

mod log;
mod record;

use std::collections::HashMap;
use std::io;
use std::path::Path;

pub use log::{Log, now};
pub use record::{
    FaultEdge, HandlerEnd, Lookup, Record, RejectedTo, SentSignal, SettlementKind, StoreOperation,
    Unique, What,
};

/// All records of a run, ordered by time.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    records: Vec<Record>,
    by_id: HashMap<String, Vec<usize>>,
}

/// Why the ledger cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A line is not a record.
    #[error("{path}, line {line}: {source}")]
    Line {
        /// The file.
        path: String,
        /// The number of the line, from 1.
        line: usize,
        /// The error of the parser.
        source: serde_json::Error,
    },
}

impl Ledger {
    /// Sorts records by time; the sort is stable.
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

    /// Reads every file in a folder whose name ends in `.jsonl`. Skips an incomplete last line,
    /// which a killed process may leave.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn read(folder: &Path) -> Result<Self, LedgerError> {
        let failed = |path: &Path, source| LedgerError::File {
            path: path.display().to_string(),
            source,
        };
        let mut records = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(|source| failed(folder, source))? {
            let path = entry.map_err(|source| failed(folder, source))?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "jsonl")
            {
                let text =
                    std::fs::read_to_string(&path).map_err(|source| failed(&path, source))?;
                let whole = text.rfind('\n').map_or("", |end| &text[..end]);
                for (index, line) in whole.lines().enumerate() {
                    let unreadable = |source| LedgerError::Line {
                        path: path.display().to_string(),
                        line: index + 1,
                        source,
                    };
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

    /// The records between two times of the ledger's clock, both inclusive.
    pub fn between(&self, from: u64, to: u64) -> impl Iterator<Item = &Record> {
        let first = self.records.partition_point(|record| record.at < from);
        self.records[first..]
            .iter()
            .take_while(move |record| record.at <= to)
    }

    /// Every id that has a record, in no particular order.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.by_id.keys().map(String::as_str)
    }

    /// The records of an id.
    pub fn history<'a>(&'a self, id: &str) -> impl Iterator<Item = &'a Record> + Clone + use<'a> {
        self.by_id
            .get(id)
            .into_iter()
            .flatten()
            .map(|index| &self.records[*index])
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::*;

    fn effect(id: &str) -> What {
        What::Effect {
            id: id.into(),
            consumer: "c0.1".into(),
            attempt: 2,
            unique: Unique::First,
        }
    }

    #[test]
    fn records_are_read_again_except_an_incomplete_last_line() {
        let folder = tempfile::tempdir().unwrap();
        let (sink, harness) = (
            folder.path().join("sink.jsonl"),
            folder.path().join("harness.jsonl"),
        );
        let fault = What::Fault {
            number: 1,
            kind: "kill-redis".into(),
            target: None,
            edge: FaultEdge::Begin,
        };
        Log::open(&harness, "harness")
            .unwrap()
            .write_all([What::Attempted { id: "a".into() }, fault.clone()]);
        Log::open(&sink, "sink").unwrap().write(effect("a"));
        (&OpenOptions::new().append(true).open(&sink).unwrap())
            .write_all(br#"{"t":1,"w":"#)
            .unwrap();
        std::fs::write(folder.path().join("consumer.log"), "not a ledger").unwrap();

        let ledger = Ledger::read(folder.path()).unwrap();

        let seen: Vec<(&str, &What)> = ledger
            .records()
            .iter()
            .map(|record| (record.by.as_str(), &record.what))
            .collect();
        assert_eq!(
            seen,
            [
                ("harness", &What::Attempted { id: "a".into() }),
                ("harness", &fault),
                ("sink", &effect("a"))
            ]
        );
        assert_eq!(ledger.history("a").count(), 2);
        assert_eq!(ledger.history("b").count(), 0);
        assert!(
            ledger
                .records()
                .iter()
                .all(|record| record.at > 0 && record.wall > 0)
        );
    }

    #[test]
    fn an_invalid_line_is_reported_with_its_number() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("x.jsonl"), "{}\n").unwrap();
        let error = Ledger::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("x.jsonl, line 1"), "{error}");
    }
}
