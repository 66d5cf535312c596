//! Ctrl-C, SIGTERM and SIGHUP: noticed, so that what was started is stopped first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Whether we were told to stop.
#[derive(Clone)]
pub(crate) struct Stopping(Arc<AtomicBool>);

impl Stopping {
    /// From now on these signals set this instead of ending the process.
    pub(crate) fn on_signals() -> std::io::Result<Self> {
        let told = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&told))?;
        }
        Ok(Self(told))
    }

    pub(crate) fn is_told(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
