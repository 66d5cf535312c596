//! The run directory: what each process wrote down of what it did.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Error;
use crate::counters::Counts;
use crate::sent::{Sending, Sent};
use crate::traffic::{Kind, Outgoing};

/// A directory that the processes of one run share.
#[derive(Clone, Debug)]
pub(crate) struct RunDir(PathBuf);

/// The name of a worker, which no other worker of the run has while this lives.
#[derive(Debug)]
pub(crate) struct Name {
    name: String,
    /// Its lock ends with the process, however that ends.
    _held: File,
}

impl Name {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

#[derive(Serialize, Deserialize)]
struct Noted {
    sending: Sending,
    name: String,
    kind: Kind,
}

impl RunDir {
    /// This directory, which is made if it is missing.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn at(path: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(path)
            .map_err(|error| format!("--run-dir {}: {error}", path.display()))?;
        Ok(Self(path.to_owned()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The provider's ledger.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.0.join("ledger.jsonl")
    }

    /// What the store remembers, where it is a file.
    pub(crate) fn store(&self) -> PathBuf {
        self.0.join("payments.db")
    }

    /// The log of a process.
    pub(crate) fn log(&self, process: &str) -> PathBuf {
        self.0.join(format!("{process}.log"))
    }

    /// Writes down that these are sent: before it is attempted, and once the broker has confirmed
    /// it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn note_sent(&self, sending: Sending, messages: &[Outgoing]) -> Result<(), Error> {
        let mut lines = Vec::new();
        for message in messages {
            serde_json::to_writer(
                &mut lines,
                &Noted {
                    sending,
                    name: message.name(),
                    kind: message.kind,
                },
            )?;
            lines.push(b'\n');
        }
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.0.join("sent.jsonl"))?
            .write_all(&lines)?;
        Ok(())
    }

    /// What was sent. A last line without an end is still being written.
    ///
    /// # Errors
    /// If it cannot be read, or nothing was sent.
    pub(crate) fn sent(&self) -> Result<Sent, Error> {
        let path = self.0.join("sent.jsonl");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("{}: {error}; was anything sent?", path.display()))?;
        let mut sent = Sent::default();
        for line in text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
        {
            let noted: Noted = serde_json::from_str(line)?;
            sent.note(noted.sending, noted.name, noted.kind);
        }
        Ok(sent)
    }

    /// Takes this name for a worker.
    ///
    /// # Errors
    /// If a worker that runs has it, or it cannot be written down.
    pub(crate) fn take_name(&self, name: &str) -> Result<Name, Error> {
        let taken = || {
            format!(
                "--worker {name}: a worker that runs has this name in {}; give each its own",
                self.0.display()
            )
        };
        Ok(self.try_name(name)?.ok_or_else(taken)?)
    }

    /// Takes the first name for a worker that is free: this one, or `worker` if it is empty, or
    /// that with a number.
    ///
    /// # Errors
    /// If none can be written down.
    pub(crate) fn take_free_name(&self, wanted: &str) -> Result<Name, Error> {
        let wanted = if wanted.is_empty() { "worker" } else { wanted };
        if let Some(taken) = self.try_name(wanted)? {
            return Ok(taken);
        }
        for number in 2_u32.. {
            if let Some(taken) = self.try_name(&format!("{wanted}-{number}"))? {
                return Ok(taken);
            }
        }
        unreachable!("numbers do not end before processes do")
    }

    /// `None` if a worker that runs has it.
    fn try_name(&self, name: &str) -> Result<Option<Name>, Error> {
        if name.is_empty() || name.contains(['/', '\\']) {
            return Err(format!(
                "--worker {name:?}: it becomes part of a file's name; use letters and digits"
            )
            .into());
        }
        let path = self.0.join(format!("counts-{name}.lock"));
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Name {
                name: name.to_owned(),
                _held: file,
            })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(format!("{}: {error}", path.display()).into()),
        }
    }

    /// Writes down what a worker has counted so far. A worker that is killed takes its last moments
    /// with it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn note_counts(&self, worker: &str, counts: &Counts) -> Result<(), Error> {
        let (written, whole) = (
            self.0.join(format!("counts-{worker}.tmp")),
            self.0.join(format!("counts-{worker}.json")),
        );
        std::fs::write(&written, serde_json::to_vec(counts)?)?;
        std::fs::rename(written, whole)?;
        Ok(())
    }

    /// What one worker has counted; nothing if it has not begun.
    pub(crate) fn counts_of(&self, worker: &str) -> Counts {
        let read = std::fs::read(self.0.join(format!("counts-{worker}.json"))).ok();
        read.and_then(|counts| serde_json::from_slice(&counts).ok())
            .unwrap_or_default()
    }

    /// What all workers have counted.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn counts(&self) -> Result<Counts, Error> {
        let mut all = Counts::default();
        for entry in std::fs::read_dir(&self.0)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            if name.starts_with("counts-") && name.ends_with(".json") {
                all.add(&serde_json::from_slice(&std::fs::read(&path)?)?);
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic;

    #[test]
    fn what_a_producer_did_not_live_to_confirm_is_known_to_be_attempted() {
        let directory = tempfile::tempdir().expect("a directory");
        let run_dir = RunDir::at(directory.path()).expect("it is there");
        let messages = traffic::of(&traffic::payments(100, "pay", 1), 1);
        let (confirmed, attempted) = messages.split_at(messages.len() / 2);
        run_dir
            .note_sent(Sending::Attempted, &messages)
            .expect("written");
        run_dir
            .note_sent(Sending::Confirmed, confirmed)
            .expect("written");
        let mut file = OpenOptions::new()
            .append(true)
            .open(directory.path().join("sent.jsonl"))
            .expect("it is there");
        file.write_all(b"{\"sending\":\"conf").expect("written"); // it was killed in the middle of a line

        let sent = run_dir.sent().expect("whole lines");
        assert_eq!(
            (sent.confirmed(), sent.unconfirmed()),
            (confirmed.len() as u64, attempted.len() as u64)
        );
        let mut valid = messages
            .iter()
            .filter(|message| matches!(message.kind, traffic::Kind::Valid { .. }));
        assert!(valid.all(|message| sent.amounts(&message.name()).is_some()));
        assert!(sent.payments().count() < 100);
    }

    #[test]
    fn no_two_workers_that_run_share_a_name_and_one_that_is_over_leaves_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let run_dir = RunDir::at(directory.path()).expect("it is there");
        let free = |wanted: &str| run_dir.take_free_name(wanted).expect("a name");
        let (first, second) = (free(""), free(""));
        assert_eq!((first.name(), second.name()), ("worker", "worker-2"));
        let refusal = run_dir
            .take_name("worker-2")
            .expect_err("it is taken")
            .to_string();
        assert!(
            refusal.starts_with("--worker worker-2: a worker that runs has this name"),
            "{refusal}"
        );
        assert_eq!(free("host").name(), "host");
        drop(second);
        assert_eq!(
            run_dir
                .take_name("worker-2")
                .expect("it is free again")
                .name(),
            "worker-2"
        );
        assert_eq!(run_dir.counts().expect("no counts yet"), Counts::default());
        assert!(run_dir.take_name("../x").is_err());
    }
}
