//! The clock of the engine and of its status.

use std::time::Instant;

/// The time by the clock of tokio's timers: that of the system, or in a test the paused clock. So a
/// wake-up time is reached exactly when the sleep until then ends.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
