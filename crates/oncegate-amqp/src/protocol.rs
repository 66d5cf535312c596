//! The logic of the source, without I/O: no async code, no clock, no client of the broker.
//!
//! `client` reads the clock, executes the actions that these functions return, and passes the
//! broker's replies to them.

use std::time::Duration;

use tokio::time::Instant;

pub(crate) mod ack_ledger;
pub(crate) mod broker_version;
pub(crate) mod channel_deliveries;
pub(crate) mod close_mode;
pub(crate) mod confirm_window;
pub(crate) mod incoming;
pub(crate) mod message_copy;
pub(crate) mod queue_settings;
pub(crate) mod topology;

/// The current time, which the caller has read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CurrentTime {
    /// For delays and timeouts.
    pub(crate) now: Instant,
    /// The time since 1970 by the system clock, for headers.
    pub(crate) unix: Duration,
}
