//! Ctrl-C, SIGTERM and SIGHUP: noticed, so that servers are stopped first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// Whether we were told to stop.
#[derive(Debug)]
pub struct Stopping(Arc<AtomicBool>);

impl Stopping {
    /// From now on these signals set this instead of ending the process.
    ///
    /// # Errors
    /// What the system said.
    pub fn on_signals() -> Result<Self, Error> {
        let told = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&told))?;
        }
        Ok(Self(told))
    }

    /// Fails when we were told to stop.
    ///
    /// # Errors
    /// That we were.
    pub fn go_on(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) {
            Err("stopped by a signal".into())
        } else {
            Ok(())
        }
    }
}
