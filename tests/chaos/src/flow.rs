//! Measures the rate of effects.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::ledger::{Record, What, now};
use crate::sink::FILE;

/// The interval over which effects are counted.
pub const SPAN: Duration = Duration::from_secs(1);
/// The fraction of the publishing rate that counts as recovered: nine tenths of the normal rate,
/// which is 95 % of the published messages; the others are copies.
const RECOVERED_FRACTION: f64 = 0.9 * 0.95;

/// Reads the ledger file of the sink.
#[derive(Debug)]
pub struct Flow {
    path: PathBuf,
    file: Option<File>,
    enough: usize,
    /// An incomplete last line.
    incomplete_line: Vec<u8>,
    /// The times of recent effects, by the ledger's clock.
    effects: VecDeque<u64>,
}

impl Flow {
    /// Measures the sink of a run with this publishing rate, in messages per second.
    pub fn over(folder: &Path, rate: u32) -> Self {
        let enough = (f64::from(rate) * RECOVERED_FRACTION) as usize;
        Self {
            path: folder.join(FILE),
            file: None,
            enough,
            incomplete_line: Vec::new(),
            effects: VecDeque::new(),
        }
    }

    /// Whether the last second had enough effects and started at `since` (the ledger's clock) or
    /// later.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn flows_since(&mut self, since: u64) -> io::Result<bool> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::open(&self.path)?),
        };
        file.read_to_end(&mut self.incomplete_line)?;
        if let Some(end) = self.incomplete_line.iter().rposition(|byte| *byte == b'\n') {
            let lines: Vec<u8> = self.incomplete_line.drain(..=end).collect();
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
    fn the_rate_is_reached_after_a_second_with_enough_effects() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(&folder.path().join(FILE), "sink").unwrap();
        let effects = |count| {
            (0..count).map(|_| What::Effect {
                id: "u-1".into(),
                consumer: "c0.1".into(),
                attempt: 1,
                unique: Unique::Repeated,
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
