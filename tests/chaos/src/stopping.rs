//! Handles Ctrl-C, SIGTERM and SIGHUP, so that servers are stopped before the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// Whether a signal requested a stop.
#[derive(Debug)]
pub struct Stopping(Arc<AtomicBool>);

impl Stopping {
    /// Installs the signal handlers: the signals no longer end the process.
    ///
    /// # Errors
    /// The operating system's.
    pub fn on_signals() -> Result<Self, Error> {
        let requested = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&requested))?;
        }
        Ok(Self(requested))
    }

    /// Checks that no stop was requested.
    ///
    /// # Errors
    /// A signal requested a stop.
    pub fn check(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) {
            Err("stopped by a signal".into())
        } else {
            Ok(())
        }
    }
}
