//! Whether the promises hold on real servers under real faults.
//!
//! A run publishes messages, kills and freezes whatever it can meanwhile, waits until everything
//! has drained, and then counts. Effects are counted by a process of their own, so that a consumer
//! that is killed can neither lose nor forge one. All that happens is written into a [`ledger`];
//! [`check`] reads that and nothing else, and says which invariant does not hold for which id, with
//! the id's history.
#![forbid(unsafe_code)]

pub mod check;
pub mod consume;
pub mod counters;
pub mod fleet;
pub mod flow;
pub mod ledger;
pub mod markers;
pub mod matrix;
pub mod message;
pub mod mutants;
pub mod play;
pub mod probes;
pub mod processors;
pub mod recorded;
pub mod report;
pub mod scenario;
pub mod schedule;
pub mod secrets;
pub mod sink;
pub mod stage;
mod stopping;
pub mod watch;
pub mod wire;
pub mod worker;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use stopping::Stopping;

/// A directory in memory, where there is such a place: what a killed process has written there
/// stays as on a disk, and no disk that is busy with other work costs time.
pub(crate) fn in_memory() -> std::io::Result<tempfile::TempDir> {
    let memory = std::path::Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    }
}

/// What a lock guards, also when whoever held it has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why something could not be run.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
