//! A file of the ledger that is being written.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

use super::record::{Record, What};

/// Microseconds of the machine's monotonic clock, which goes on while a process is frozen.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The machine has been up for a positive time, and not for 500,000 years.
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1_000
}

/// A file of the ledger that is being written. Several threads may write it: what is written at
/// once stands together.
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
    /// When the file cannot be written: a run that cannot see what happened is worth nothing.
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
