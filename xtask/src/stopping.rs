//! Handles Ctrl-C, SIGTERM and SIGHUP, so that servers are stopped before the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// Whether one of the signals has requested a stop.
pub(crate) struct StopSignals(Arc<AtomicBool>);

impl StopSignals {
    /// Installs the signal handlers. From then on the signals do not end the process.
    pub(crate) fn on_signals() -> Result<Self, Error> {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&requested)).map_err(Error::Signals)?;
        }
        Ok(Self(requested))
    }

    /// Fails if a signal requested a stop.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_requested() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    pub(crate) fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
