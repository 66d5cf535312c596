//! Every default, in one place.

use std::time::Duration;

use crate::store::APPLY_TIMEOUT;

/// How long a done id is remembered.
pub const WINDOW: Duration = Duration::from_secs(24 * 3600);
/// How long a claim holds without renewal; it is renewed at a third of this.
pub const LEASE: Duration = Duration::from_secs(30);
/// How many attempts a message gets before it is dead-lettered.
pub const ATTEMPTS: u32 = 5;
/// How many processes may end while they handle a message before it is dead-lettered.
pub const MAX_CRASHES: u32 = 10;
/// How often a handler is run again in place within one attempt.
pub const RETRIES: u32 = 3;
/// The first pause before a retry; it doubles.
pub const BACKOFF: Duration = Duration::from_millis(100);
/// The longest pause before a retry.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(10);
/// How often `reconcile` is tried before a message goes to the in-doubt queue.
pub const RECONCILES: u32 = 5;
/// How long a handler may run.
pub const HANDLER_TIMEOUT: Duration = Duration::from_secs(300);
/// How many deliveries are in flight at the most.
pub const IN_FLIGHT: usize = 512;
/// How many bytes of key, headers and body are in flight at the most, but for one delivery that is
/// larger alone.
pub const IN_FLIGHT_BYTES: usize = 64 << 20;
/// How many deliveries wait at the most behind others of their key or partition.
pub const WAITING: usize = 10_000;
/// How many bytes of key, headers and body wait there at the most, and one delivery more.
pub const WAITING_BYTES: usize = 64 << 20;
/// How long handlers may run on once the consumer stops.
pub const DRAIN: Duration = Duration::from_secs(30);
/// How long a stop waits, on top of the drain timeout, until the store has recorded the outcomes of
/// handlers that were dropped. There is no setting for it.
pub const STOP_TIMEOUT: Duration = APPLY_TIMEOUT;
