//! Ctrl-C, SIGTERM and SIGHUP: noticed, so that what was started is stopped first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::Error;

/// Whether we were told to stop.
pub(crate) struct Stopping(Arc<AtomicBool>);

impl Stopping {
    /// From now on these signals set this instead of ending the process.
    pub(crate) fn on_signals() -> Result<Self, Error> {
        let told = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&told)).map_err(Error::Signals)?;
        }
        Ok(Self(told))
    }

    /// Fails when we were told to stop.
    pub(crate) fn go_on(&self) -> Result<(), Error> {
        if self.is_told() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }

    pub(crate) fn is_told(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
