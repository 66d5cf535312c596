//! The clock of pauses, deadlines and log throttles.

use std::time::Instant;

/// The time by the clock of tokio's timers: that of the system, or in a test the paused clock, so that
/// an alarm is due when the sleep until it ends.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
