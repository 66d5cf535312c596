//! The book as a file: appended to by one provider, and read by others meanwhile.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Ledger;

/// The file, as its only writer has it.
#[derive(Debug)]
pub(super) struct Appended {
    file: File,
    /// How long the whole lines are, in bytes.
    length: u64,
    /// Whether something stands behind the whole lines.
    tail: Tail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tail {
    None,
    /// What a write left that failed halfway.
    Torn,
}

impl Appended {
    /// Opens the file for one writer, and reads it. A last line without an end is cut off: it was
    /// never answered.
    pub(super) fn open(path: &Path) -> io::Result<(Self, Ledger)> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        // Before anything is read or cut off: the last line of another writer is no torn one.
        #[cfg(unix)]
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |error| {
                let text = format!(
                    "{} is not free, another provider may have it: {error}",
                    path.display()
                );
                io::Error::new(io::Error::from(error).kind(), text)
            },
        )?;
        let mut read = LedgerFile::at(path.to_owned());
        read.refresh()?;
        let tail = if file.metadata()?.len() > read.offset {
            Tail::Torn
        } else {
            Tail::None
        };
        let mut appended = Self {
            file,
            length: read.offset,
            tail,
        };
        appended.cut_tail()?;
        Ok((appended, read.ledger))
    }

    /// Adds a line. One that fails halfway, as on a full disk, is cut off again; at the latest
    /// before the next.
    pub(super) fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.cut_tail()?;
        let written = self.file.write_all(line);
        match written {
            Ok(()) => self.length += line.len() as u64,
            Err(_) => {
                self.tail = Tail::Torn;
                let _ = self.cut_tail(); // the error of the write says more, and the next one tries again
            }
        }
        written
    }

    fn cut_tail(&mut self) -> io::Result<()> {
        if self.tail == Tail::Torn {
            self.file.set_len(self.length)?;
            self.tail = Tail::None;
        }
        Ok(())
    }
}

/// The book of a provider in another process, to be read while it is written.
#[derive(Debug)]
pub(crate) struct LedgerFile {
    path: PathBuf,
    offset: u64,
    lines: usize,
    ledger: Ledger,
}

impl LedgerFile {
    /// The book in this file; one that is missing is empty.
    pub(crate) fn at(path: PathBuf) -> Self {
        Self {
            path,
            offset: 0,
            lines: 0,
            ledger: Ledger::default(),
        }
    }

    /// Reads what was added. A last line without an end is still being written, and is left for the
    /// next time.
    ///
    /// # Errors
    /// If the file cannot be read, or a line of it is no entry.
    pub(crate) fn refresh(&mut self) -> io::Result<&Ledger> {
        let mut added = Vec::new();
        match File::open(&self.path) {
            Ok(mut file) => {
                file.seek(SeekFrom::Start(self.offset))?;
                file.read_to_end(&mut added)?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        for line in added
            .split_inclusive(|byte| *byte == b'\n')
            .filter(|line| line.ends_with(b"\n"))
        {
            self.ledger.note(serde_json::from_slice(line)?);
            self.offset += line.len() as u64;
            self.lines += 1;
        }
        Ok(&self.ledger)
    }

    /// How many entries were read.
    #[cfg(feature = "real")]
    pub(crate) fn lines(&self) -> usize {
        self.lines
    }
}

#[cfg(test)]
mod tests {
    use super::super::Repeats;
    use super::*;

    const WHOLE: &str = "{\"charged\":{\"id\":\"a\",\"amount\":5,\"attempt\":1}}\n";

    #[test]
    fn a_file_keeps_the_charges_and_the_refusals() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ledger.jsonl");
        let mut ledger = Ledger::in_file(&path).expect("a new file");
        ledger
            .charge("a", 5, 1, Repeats::ChargeAgain)
            .expect("booked");
        ledger.find_or_void("b", 1).expect("written");
        drop(ledger);
        let mut again = Ledger::in_file(&path).expect("the same file");
        again
            .charge("a", 5, 1, Repeats::ChargeAgain)
            .expect("booked");
        assert!(again.charge("b", 5, 1, Repeats::ChargeAgain).is_err());
        let mut file = LedgerFile::at(path);
        let read = file.refresh().expect("the same file");
        assert_eq!(
            (read.charged(), read.charged_twice(), read.has_charged("b")),
            (1, 1, false)
        );
    }

    #[test]
    fn a_line_that_is_still_being_written_is_left_for_the_next_time() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ledger.jsonl");
        std::fs::write(&path, format!("{WHOLE}{}", &WHOLE[..20])).expect("written");
        let mut file = LedgerFile::at(path.clone());
        assert_eq!(file.refresh().expect("one line").charged_twice(), 0);
        std::fs::write(&path, WHOLE.repeat(2)).expect("written");
        assert_eq!(file.refresh().expect("two lines").charged_twice(), 1);
    }

    #[test]
    fn a_second_writer_is_turned_away_and_cuts_nothing_off() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ledger.jsonl");
        let first = Ledger::in_file(&path).expect("a new file");
        let halfway = format!("{WHOLE}{}", &WHOLE[..20]); // the first is in the middle of a line
        std::fs::write(&path, &halfway).expect("written");
        assert!(
            Ledger::in_file(&path)
                .expect_err("it is taken")
                .to_string()
                .contains("another provider")
        );
        assert_eq!(std::fs::read_to_string(&path).expect("read"), halfway);
        drop(first);
        Ledger::in_file(&path).expect("it is free");
        assert_eq!(std::fs::read_to_string(&path).expect("read"), WHOLE);
    }

    #[test]
    fn a_line_follows_no_torn_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ledger.jsonl");
        let (mut appended, _) = Appended::open(&path).expect("a new file");
        appended.append(WHOLE.as_bytes()).expect("written");
        appended.file.write_all(b"{\"char").expect("written");
        appended.tail = Tail::Torn; // as if the rest had not been written, nor the beginning cut off
        appended.append(WHOLE.as_bytes()).expect("written");
        assert_eq!(
            std::fs::read_to_string(&path).expect("read"),
            WHOLE.repeat(2)
        );
    }
}
