//! A chaos test of the guarantees: injects faults into real servers and consumers.
//!
//! A run publishes messages, injects faults, waits until all messages are settled, and then checks
//! the effects. A separate process, the sink, counts effects, so a killed consumer can neither lose
//! nor forge one. All events are in a [`ledger`]; [`check`] reads only the ledger and reports each
//! violated invariant with the history of the id. Terms such as claim and marker:
//! `docs/src/promises.md`.
#![forbid(unsafe_code)]

pub mod broker_client;
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
pub mod probes;
pub mod processors;
pub mod recorded;
pub mod report;
pub mod run;
pub mod scenario;
pub mod schedule;
pub mod secrets;
pub mod servers;
pub mod sink;
mod stopping;
pub mod watch;
pub mod worker;

pub use stopping::Stopping;

/// A temporary directory on a memory file system if the system has one, so that a slow disk does
/// not affect timing. Files survive the kill of a process as on a disk.
pub(crate) fn in_memory() -> std::io::Result<tempfile::TempDir> {
    let memory = std::path::Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory)
    } else {
        tempfile::tempdir()
    }
}

/// The error of a run that could not be completed.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
