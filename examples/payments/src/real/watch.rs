//! What a run looks at while it goes: how much was charged, and for how long nothing has moved.

use std::time::Duration;

use tokio::time::Instant;

use super::Error;
use super::rundir::RunDir;
use crate::ledger::LedgerFile;
use crate::progress::Progress;

/// Looks at the ledger and at what the workers count.
pub(crate) struct Watch {
    run_dir: RunDir,
    ledger: LedgerFile,
    progress: Progress,
    charged: usize,
    in_doubt: u64,
    killed: usize,
    since: Instant,
    seen: (usize, u64),
}

impl Watch {
    /// Nothing seen yet.
    pub(crate) fn over(run_dir: &RunDir, payments: usize) -> Self {
        Self {
            run_dir: run_dir.clone(),
            ledger: LedgerFile::at(run_dir.ledger()),
            progress: Progress::new(payments as u64),
            charged: 0,
            in_doubt: 0,
            killed: 0,
            since: Instant::now(),
            seen: (0, 0),
        }
    }

    /// Looks, and shows it.
    ///
    /// # Errors
    /// If the run directory cannot be read.
    pub(crate) fn look(&mut self) -> Result<(), Error> {
        self.charged = self.ledger.refresh()?.charged();
        self.progress.at(self.charged as u64);
        self.progress
            .says(format!("charged, {} workers killed", self.killed));
        let counts = self.run_dir.counts()?;
        self.in_doubt = counts.of("in_doubt");
        let now = (self.ledger.lines(), counts.settled());
        if now != self.seen {
            (self.seen, self.since) = (now, Instant::now());
        }
        Ok(())
    }

    /// How many payments were charged when it was looked last.
    pub(crate) fn charged(&self) -> usize {
        self.charged
    }

    /// How many messages the workers had left in doubt when it was looked last: as many as they
    /// wrote down.
    pub(crate) fn in_doubt(&self) -> u64 {
        self.in_doubt
    }

    /// For how long nothing has moved: neither the ledger nor what the workers count.
    pub(crate) fn quiet(&self) -> Duration {
        self.since.elapsed()
    }

    /// From now on, whatever was before.
    pub(crate) fn begin_again(&mut self) {
        self.since = Instant::now();
    }

    /// A worker was killed.
    pub(crate) fn note_kill(&mut self) {
        self.killed += 1;
    }

    /// How many workers were killed.
    pub(crate) fn killed(&self) -> usize {
        self.killed
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.progress.done();
    }
}
