//! What the player looks at all the time: how much memory consumers have, and what their group has
//! committed.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::fleet::Fleet;
use crate::ledger::{Log, What};
use crate::wire::Wire;

/// Its part of the ledger, which grows while nothing else does.
pub const FILE: &str = "watch.jsonl";
/// How often.
const EVERY: Duration = Duration::from_millis(250);

/// Looks until it is dropped.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Over these consumers and their group; what it sees stands in a file of its own in the run's
    /// folder.
    ///
    /// # Errors
    /// What the file system said.
    pub fn over(fleet: &Arc<Fleet>, wire: &Arc<Wire>, folder: &Path) -> io::Result<Self> {
        let log = Arc::new(Log::open(&folder.join(FILE), "player")?);
        let over = Arc::new(AtomicBool::new(false));
        let (of_memory, of_commits) = (Arc::clone(&over), Arc::clone(&over));
        let (fleet, wire) = (Arc::clone(fleet), Arc::clone(wire));
        let (log_of_memory, log_of_commits) = (Arc::clone(&log), log);
        let memory = std::thread::spawn(move || {
            while !of_memory.load(Ordering::Relaxed) {
                let sampled = fleet
                    .running()
                    .into_iter()
                    .filter_map(|(consumer, number)| {
                        let resident = resident(number)?;
                        Some(What::Sampled { consumer, resident })
                    });
                log_of_memory.write_all(sampled);
                std::thread::sleep(EVERY);
            }
        });
        let commits =
            std::thread::spawn(move || watch_commits(&wire, &log_of_commits, &of_commits));
        Ok(Self {
            over,
            threads: vec![memory, commits],
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that panicked could not write its part of the ledger, which ends the run
            // elsewhere.
            let _ = thread.join();
        }
    }
}

/// Writes down each change. A broker that does not answer is asked again, by another client: the
/// one before may have forgotten it.
fn watch_commits(wire: &Wire, log: &Log, over: &AtomicBool) {
    let Some(mut group) = wire.group() else {
        return;
    };
    let mut known: HashMap<i32, i64> = HashMap::new();
    while !over.load(Ordering::Relaxed) {
        let Ok(committed) = group.committed() else {
            group = wire.group().unwrap_or(group);
            std::thread::sleep(EVERY);
            continue;
        };
        let changed = committed
            .into_iter()
            .filter(|(partition, offset)| known.insert(*partition, *offset) != Some(*offset));
        log.write_all(changed.map(|(partition, offset)| What::Committed { partition, offset }));
        std::thread::sleep(EVERY);
    }
}

/// The memory that a process has for itself, in KiB.
fn resident(number: u32) -> Option<u64> {
    for_itself(&std::fs::read_to_string(format!("/proc/{number}/status")).ok()?)
}

/// Not what it has mapped of files, say of its own program: the system can take that back at any
/// time.
fn for_itself(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_has_memory_and_one_that_is_not_there_has_none() {
        assert!(super::resident(std::process::id()).is_some_and(|resident| resident > 100));
        assert_eq!(super::resident(u32::MAX), None);
    }

    #[test]
    fn what_is_mapped_of_files_is_not_counted() {
        let status = "Name:\toncegate-chaos\nVmRSS:\t  150000 kB\nRssAnon:\t   31000 kB\nRssFile:\t  119000 kB\n";
        assert_eq!(super::for_itself(status), Some(31_000));
        assert_eq!(
            super::for_itself("Name:\toncegate-chaos\nState:\tZ (zombie)\n"),
            None
        );
    }

    #[test]
    fn what_a_process_fills_is_counted() {
        let before = super::resident(std::process::id()).expect("this process");
        let filled = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = super::resident(std::process::id()).expect("this process");
        // Other tests may free some of theirs meanwhile.
        assert!(
            after > before + 32 * 1_024,
            "{before} KiB, and {after} with {} bytes more",
            filled.len()
        );
    }
}
