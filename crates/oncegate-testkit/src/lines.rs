//! What was logged, line by line.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Every line that was logged in this process, and when it came. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Lines(Arc<Mutex<Vec<(Instant, String)>>>);

impl Lines {
    /// Listens to all that is logged at `INFO` and above, from now on. There is one listener in a
    /// process, so that a test that uses it stands alone in its binary.
    ///
    /// # Panics
    /// If somebody listens already.
    pub fn of_this_process() -> Self {
        let lines = Self::default();
        let writer = lines.clone();
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::INFO)
            .with_writer(move || writer.clone())
            .init();
        lines
    }

    /// What was said since it was taken last.
    pub fn take(&self) -> Vec<(Instant, String)> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let said = String::from_utf8_lossy(line).into_owned();
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((Instant::now(), said));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
