//! Writes a file of the ledger.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use super::record::{Record, What};

/// Microseconds of the machine's monotonic clock, which all processes share.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is never negative, and overflows after 500,000 years.
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1_000
}

/// A ledger file that is open for writing. Several threads may use it; the records of one call stay
/// together.
#[derive(Debug)]
pub struct Log {
    file: File,
    by: String,
}

impl Log {
    /// Opens or creates the file; `by` is the name of this process in its records.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: &Path, by: impl Into<String>) -> io::Result<Self> {
        Ok(Self {
            file: OpenOptions::new().append(true).create(true).open(path)?,
            by: by.into(),
        })
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
    /// If the file cannot be written: without the record the checks would be wrong.
    pub fn write_all(&self, records: impl IntoIterator<Item = What>) {
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        let (at, wall) = (now(), u64::try_from(wall).unwrap_or_default());
        let mut lines = Vec::new();
        for what in records {
            let record = Record {
                at,
                wall,
                by: self.by.clone(),
                what,
            };
            serde_json::to_writer(&mut lines, &record).expect("a record has only text and numbers");
            lines.push(b'\n');
        }
        if !lines.is_empty() {
            (&self.file)
                .write_all(&lines)
                .expect("the ledger can be written");
        }
    }
}
