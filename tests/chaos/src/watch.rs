//! Samples the memory of consumers and the committed offsets of their group during a run.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::broker_client::BrokerClient;
use crate::fleet::Fleet;
use crate::ledger::{Log, What};

/// The ledger file of the samples, which grows even if nothing else happens.
pub const FILE: &str = "watch.jsonl";
/// The interval of the samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// Samples until it is dropped.
#[derive(Debug)]
pub struct Watch {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Starts to sample these consumers and their group; writes to a ledger file in the folder.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn over(fleet: &Arc<Fleet>, client: &Arc<BrokerClient>, folder: &Path) -> io::Result<Self> {
        let log = Arc::new(Log::open(&folder.join(FILE), "harness")?);
        let over = Arc::new(AtomicBool::new(false));
        let (of_memory, of_commits) = (Arc::clone(&over), Arc::clone(&over));
        let (fleet, client) = (Arc::clone(fleet), Arc::clone(client));
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
                std::thread::sleep(SAMPLE_INTERVAL);
            }
        });
        let commits =
            std::thread::spawn(move || watch_commits(&client, &log_of_commits, &of_commits));
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
            // A thread panics only if it cannot write the ledger; then the run fails elsewhere,
            // too.
            let _ = thread.join();
        }
    }
}

/// Records each change of a committed offset. After an error it uses a new client: the old one may
/// have lost the metadata of the broker.
fn watch_commits(client: &BrokerClient, log: &Log, over: &AtomicBool) {
    let Some(mut group) = client.group() else {
        return;
    };
    let mut known: HashMap<i32, i64> = HashMap::new();
    while !over.load(Ordering::Relaxed) {
        let Ok(committed) = group.committed() else {
            group = client.group().unwrap_or(group);
            std::thread::sleep(SAMPLE_INTERVAL);
            continue;
        };
        let changed = committed
            .into_iter()
            .filter(|(partition, offset)| known.insert(*partition, *offset) != Some(*offset));
        log.write_all(changed.map(|(partition, offset)| What::Committed { partition, offset }));
        std::thread::sleep(SAMPLE_INTERVAL);
    }
}

/// The anonymous resident memory of a process, in KiB.
fn resident(number: u32) -> Option<u64> {
    anonymous_memory(&std::fs::read_to_string(format!("/proc/{number}/status")).ok()?)
}

/// Excludes mapped files, such as the program itself: the system can reclaim those pages.
fn anonymous_memory(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_missing_process_has_no_memory_sample() {
        assert!(super::resident(std::process::id()).is_some_and(|resident| resident > 100));
        assert_eq!(super::resident(u32::MAX), None);
    }

    #[test]
    fn mapped_files_are_not_counted() {
        let status = "Name:\toncegate-chaos\nVmRSS:\t  150000 kB\nRssAnon:\t   31000 kB\nRssFile:\t  119000 kB\n";
        assert_eq!(super::anonymous_memory(status), Some(31_000));
        assert_eq!(
            super::anonymous_memory("Name:\toncegate-chaos\nState:\tZ (zombie)\n"),
            None
        );
    }

    #[test]
    fn allocated_memory_is_counted() {
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
