//! How many effects a second there are.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::ledger::{Record, What, now};
use crate::sink::FILE;

/// Over how long effects are counted.
pub const SPAN: Duration = Duration::from_secs(1);
/// Nine tenths of what comes when nothing is wrong; that is 95 in 100 of the messages, as the
/// others are copies.
const ENOUGH: f64 = 0.9 * 0.95;

/// Looks at what the sink writes.
#[derive(Debug)]
pub struct Flow {
    path: PathBuf,
    file: Option<File>,
    enough: usize,
    /// What of a line has come so far.
    rest: Vec<u8>,
    /// When there was an effect, by the ledger's clock.
    effects: VecDeque<u64>,
}

impl Flow {
    /// Over the sink of a run to which so many messages are sent a second.
    pub fn over(folder: &Path, rate: u32) -> Self {
        let enough = (f64::from(rate) * ENOUGH) as usize;
        Self {
            path: folder.join(FILE),
            file: None,
            enough,
            rest: Vec::new(),
            effects: VecDeque::new(),
        }
    }

    /// Whether there were enough effects in the last second, and that second began no earlier than
    /// at this moment of the ledger's clock: a burst is no flow.
    ///
    /// # Errors
    /// What the file system said.
    pub fn flows_since(&mut self, since: u64) -> io::Result<bool> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::open(&self.path)?),
        };
        file.read_to_end(&mut self.rest)?;
        if let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') {
            let lines: Vec<u8> = self.rest.drain(..=end).collect();
            let records = lines
                .split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice::<Record>(line).ok());
            self.effects.extend(
                records
                    .filter(|record| matches!(record.what, What::Effect { .. }))
                    .map(|record| record.at),
            );
        }
        let from = now().saturating_sub(u64::try_from(SPAN.as_micros()).unwrap_or(u64::MAX));
        while self.effects.front().is_some_and(|at| *at < from) {
            self.effects.pop_front();
        }
        Ok(from >= since && self.effects.len() >= self.enough)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Log, Unique, What};

    #[test]
    fn it_flows_when_there_were_enough_effects_for_a_second() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(&folder.path().join(FILE), "sink").unwrap();
        let effects = |count| {
            (0..count).map(|_| What::Effect {
                id: "u-1".into(),
                consumer: "c0.1".into(),
                attempt: 1,
                unique: Unique::Known,
            })
        };
        let mut flow = Flow::over(folder.path(), 100);
        let begun = now();
        // As if it had begun a second before.
        let before = begun - 1_000_000;
        log.write_all(effects(84));
        log.write(What::Refused {
            id: "u-1".into(),
            consumer: "c0.1".into(),
            attempt: 1,
        });
        assert!(!flow.flows_since(before).unwrap());
        log.write_all(effects(1));
        assert!(!flow.flows_since(begun + 3_600_000_000).unwrap());
        assert!(flow.flows_since(before).unwrap() || now() - begun > 1_000_000);
    }
}
