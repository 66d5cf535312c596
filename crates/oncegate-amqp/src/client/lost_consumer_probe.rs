//! Detects that the broker has lost a consumer.
//!
//! # Workaround
//! - *Symptom:* a quorum queue loses a consumer when its leader moves to another node, without
//!   `basic.cancel`: the channel remains open and receives nothing more. *Version:* RabbitMQ 3.10.8.
//! - *Upstream:* `docs/upstream/rabbitmq-lost-consumer.md`.
//! - *Tests:* `RabbitMqFault::ConsumerLost` and
//!   `a_lost_single_active_consumer_consumes_again_with_unsettled_deliveries` in `tests/faults`.
//! - *May be removed* when RabbitMQ cancels or restores such a consumer.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use lapin::Connection;
use lapin::options::QueueDeclareOptions;
use lapin::types::{FieldTable, ShortString};
use tokio::time::Instant;

/// How long a consumer with room in its prefetch receives nothing before the probe checks the queue.
pub(crate) const PROBE_INTERVAL: Duration = Duration::from_secs(3);
/// The same on a channel that replaces one whose consumer counted as lost, until its first
/// delivery: the consumer may receive nothing for another reason, for example because another
/// program declared the queue with a single active consumer.
pub(crate) const LONG_PROBE_INTERVAL: Duration = Duration::from_secs(60);
/// When to check again after a check that found ready messages: the broker may be delivering them.
const RECHECK_AFTER: Duration = Duration::from_millis(200);

/// Reads the number of ready messages of a queue when its consumer has received nothing for a while.
///
/// If two checks find ready messages without a delivery in between, while the prefetch has room, the
/// consumer counts as lost.
pub(crate) struct LostConsumerProbe {
    connection: Arc<Connection>,
    queue: ShortString,
    interval: Duration,
    next_check: Instant,
    check: Option<BoxFuture<'static, lapin::Result<u32>>>,
    /// Whether a check found ready messages since the last delivery.
    found_ready: bool,
    is_enabled: bool,
}

impl LostConsumerProbe {
    /// The probe of a single active consumer starts disabled, and the first delivery enables it: a
    /// consumer that is not the active one receives nothing.
    pub(crate) fn new(
        connection: Arc<Connection>,
        queue: ShortString,
        interval: Duration,
        is_enabled: bool,
    ) -> Self {
        Self {
            connection,
            queue,
            interval,
            next_check: Instant::now() + interval,
            check: None,
            found_ready: false,
            is_enabled,
        }
    }

    /// Records that the consumer received a delivery: enables the probe, and restarts its interval.
    pub(crate) fn delivered(&mut self) {
        self.interval = PROBE_INTERVAL;
        self.next_check = Instant::now() + PROBE_INTERVAL;
        self.found_ready = false;
        self.is_enabled = true;
    }

    /// When to start the next check; `None` while one is running or the probe is disabled.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        (self.is_enabled && self.check.is_none()).then_some(self.next_check)
    }

    /// Starts a check if one is due.
    pub(crate) fn check_if_due(&mut self) {
        if self.next_check().is_none_or(|at| at > Instant::now()) {
            return;
        }
        self.next_check = Instant::now() + self.interval;
        let (connection, queue) = (Arc::clone(&self.connection), self.queue.clone());
        self.check = Some(Box::pin(async move {
            let channel = connection.create_channel().await?;
            let options = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            let declared = channel
                .queue_declare(queue, options, FieldTable::default())
                .await?;
            channel.close(200, "OK".into()).await?;
            Ok(declared.message_count())
        }));
    }

    pub(crate) fn is_checking(&self) -> bool {
        self.check.is_some()
    }

    /// Waits for the running check and returns the number of ready messages; 0 if the check failed.
    /// Cancel-safe; never returns while no check is running.
    pub(crate) async fn ready_messages(&mut self) -> u32 {
        let Some(check) = &mut self.check else {
            return std::future::pending().await;
        };
        let checked = check.await;
        self.check = None;
        checked.unwrap_or(0)
    }

    /// Whether the consumer is lost, given the result of a check. After the first check with ready
    /// messages, the next one follows after [`RECHECK_AFTER`].
    pub(crate) fn is_consumer_lost(&mut self, ready_messages: u32, has_room: bool) -> bool {
        if ready_messages == 0 {
            return false;
        }
        if has_room && self.found_ready {
            return true;
        }
        self.found_ready = true;
        self.next_check = Instant::now() + RECHECK_AFTER;
        false
    }
}
