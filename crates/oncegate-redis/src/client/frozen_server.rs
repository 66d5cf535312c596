//! Decides when a connection to a server that does not reply is reopened.
//!
//! # Workaround
//! *Symptom:* a frozen server, or a network that drops packets, never closes the connection, and each
//! later command waits until its timeout. *Version:* redis 1.8.1. *Upstream:* intended, see
//! <https://github.com/redis-rs/redis-rs/pull/1032>. *Test:*
//! `a_frozen_server_means_unknown_outcomes_and_a_reconnect`. *May be removed:* never.

use std::sync::atomic::{AtomicU32, Ordering};

/// After this many consecutive timeouts the connection is reopened.
const MAX_CONSECUTIVE_TIMEOUTS: u32 = 3;

/// The timeouts of one connection since its last reply.
#[derive(Default)]
pub(crate) struct ConsecutiveTimeouts(AtomicU32);

impl ConsecutiveTimeouts {
    /// Counts a timeout. Returns whether the connection has to be reopened.
    pub(crate) fn count(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_CONSECUTIVE_TIMEOUTS
    }

    /// Resets the count, because the server replied.
    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
