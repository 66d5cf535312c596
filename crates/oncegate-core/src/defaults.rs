//! The defaults of all settings.

use std::time::Duration;

use crate::store::APPLY_TIMEOUT;

/// The dedup window: how long the id of a handled message is remembered.
pub const DEDUP_WINDOW: Duration = Duration::from_secs(24 * 3600);
/// How long a claim is valid without renewal; it is renewed after a third of this time.
pub const LEASE: Duration = Duration::from_secs(30);
/// The maximum number of attempts before a message is dead-lettered.
pub const MAX_ATTEMPTS: u32 = 5;
/// The maximum number of processes that may crash while they handle a message before it is
/// dead-lettered.
pub const MAX_CRASHES: u32 = 10;
/// The maximum number of inline retries within one attempt.
pub const MAX_INLINE_RETRIES: u32 = 3;
/// The first pause before a retry. Each further one is twice as long, up to [`LONGEST_BACKOFF`].
pub const BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause before a retry.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// The maximum number of `reconcile` calls before a message goes to the in-doubt queue.
pub const MAX_RECONCILES: u32 = 5;
/// The timeout of a handler.
pub const HANDLER_TIMEOUT: Duration = Duration::from_secs(300);
/// The maximum number of deliveries in flight.
pub const MAX_IN_FLIGHT: usize = 512;
/// The maximum number of bytes of key, headers and body in flight; a single delivery may be larger.
pub const MAX_IN_FLIGHT_BYTES: usize = 64 << 20;
/// The maximum number of deliveries that wait for a retry, or behind others of their key or
/// partition.
pub const MAX_QUEUED: usize = 10_000;
/// The maximum number of queued bytes of key, headers and body; one delivery may exceed it.
pub const MAX_QUEUED_BYTES: usize = 64 << 20;
/// How long handlers may continue to run after the consumer begins to stop.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a stop waits, after the drain timeout, until the store has recorded the outcomes of
/// handlers that were dropped. It is not configurable.
pub const STOP_TIMEOUT: Duration = APPLY_TIMEOUT;
