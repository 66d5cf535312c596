//! Collects log lines for assertions.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use oncegate_core::internal::Lock;

/// Collected log lines with the times at which they were written. Clones share the lines.
#[derive(Clone, Debug, Default)]
pub struct Lines(Arc<Lock<Vec<(Instant, String)>>>);

impl Lines {
    /// Installs a global subscriber that collects all lines of the process at `INFO` and above. A
    /// process has one global subscriber, so a test that calls this must be alone in its binary.
    ///
    /// # Panics
    /// If there is a subscriber already.
    pub fn of_this_process() -> Self {
        Self::filtered("info")
    }

    /// Like [`of_this_process`](Self::of_this_process), with a filter in the syntax of `RUST_LOG`.
    ///
    /// # Panics
    /// If there is a subscriber already.
    pub fn filtered(filter: &str) -> Self {
        let lines = Self::default();
        let writer = lines.clone();
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_env_filter(filter)
            .with_writer(move || writer.clone())
            .init();
        lines
    }

    /// All lines since the last [`take`](Self::take), as one text.
    pub fn text(&self) -> String {
        let lines = self.0.lock();
        lines.iter().map(|(_, line)| line.as_str()).collect()
    }

    /// The lines since the last call.
    pub fn take(&self) -> Vec<(Instant, String)> {
        std::mem::take(&mut *self.0.lock())
    }
}

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line).into_owned();
        self.0.lock().push((Instant::now(), text));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
