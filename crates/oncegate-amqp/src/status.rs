//! The status and the metrics of a source.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge};

use crate::metric;
use oncegate_core::internal::Lock;

/// The status of one RabbitMQ source: its counters and gauges. Clones share it.
///
/// The same values are recorded through the `metrics` facade, with the label `queue`; see
/// [`RABBITMQ_METRICS`](crate::RABBITMQ_METRICS).
///
/// ```
/// use oncegate_amqp::{RabbitMq, RabbitMqStatus};
///
/// let status = RabbitMqStatus::new();
/// let source = RabbitMq::queue("payments").status(status.clone());
/// assert_eq!(status.snapshot().channels_lost, 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct RabbitMqStatus(Arc<StatusCounters>);

/// The values of a [`RabbitMqStatus`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RabbitMqSnapshot {
    /// Unacknowledged deliveries of the open channel, at most the prefetch count.
    pub unacked: u64,
    /// Deliveries received.
    pub delivered: u64,
    /// Deliveries that the broker marked as redelivered.
    pub redelivered: u64,
    /// Channels lost. The source opens another one for each.
    pub channels_lost: u64,
    /// How long the source has been without a channel; zero while there is one.
    pub unavailable: Duration,
    /// Settlements for a closed channel. They were dropped, and their deliveries are redelivered.
    pub stale_settlements: u64,
    /// Dead letters, in-doubt messages and delayed copies that were published and confirmed.
    pub copies: u64,
    /// Copies that were published again because they were not confirmed.
    pub copy_retries: u64,
    /// How long the broker has blocked publishing because of a resource alarm (memory or disk
    /// space), including the current alarm.
    pub blocked: Duration,
}

#[derive(Debug, Default)]
struct StatusCounters {
    unacked: AtomicU64,
    delivered: AtomicU64,
    redelivered: AtomicU64,
    channels_lost: AtomicU64,
    stale_settlements: AtomicU64,
    copies: AtomicU64,
    copy_retries: AtomicU64,
    blocked: Lock<BlockedTime>,
    /// Since when the source has been without a channel; `None` while there is one.
    unavailable_since: Lock<Option<Instant>>,
}

#[derive(Debug, Default)]
struct BlockedTime {
    /// The sum of all alarms that are over.
    total: Duration,
    /// The start of the current alarm.
    since: Option<Instant>,
}

impl RabbitMqStatus {
    /// The status of a source that is not open. Pass it to one source only, with
    /// [`RabbitMq::status`](crate::RabbitMq::status).
    pub fn new() -> Self {
        Self::default()
    }

    /// The current values.
    pub fn snapshot(&self) -> RabbitMqSnapshot {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counters = &*self.0;
        let blocked = counters.blocked.lock();
        RabbitMqSnapshot {
            unacked: read(&counters.unacked),
            delivered: read(&counters.delivered),
            redelivered: read(&counters.redelivered),
            channels_lost: read(&counters.channels_lost),
            unavailable: counters
                .unavailable_since
                .lock()
                .map_or(Duration::ZERO, |since| since.elapsed()),
            stale_settlements: read(&counters.stale_settlements),
            copies: read(&counters.copies),
            copy_retries: read(&counters.copy_retries),
            blocked: blocked.total
                + blocked
                    .since
                    .map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }
}

/// Updates the status and records the `metrics`.
pub(crate) struct SourceMetrics {
    status: RabbitMqStatus,
    unacked: Gauge,
    delivered: Counter,
    redelivered: Counter,
    channels_lost: Counter,
    unavailable: Gauge,
    stale_settlements: Counter,
    copies: Counter,
    copy_retries: Counter,
    blocked: Gauge,
    blocked_seconds: Counter,
}

impl SourceMetrics {
    pub(crate) fn new(status: RabbitMqStatus, queue: &str) -> Self {
        let counter = |name: &'static str| metrics::counter!(name, "queue" => queue.to_owned());
        let gauge = |name: &'static str| metrics::gauge!(name, "queue" => queue.to_owned());
        Self {
            status,
            unacked: gauge(metric::UNACKED),
            delivered: counter(metric::DELIVERED),
            redelivered: counter(metric::REDELIVERED),
            channels_lost: counter(metric::CHANNELS_LOST),
            unavailable: gauge(metric::UNAVAILABLE),
            stale_settlements: counter(metric::STALE_SETTLEMENTS),
            copies: counter(metric::COPIES),
            copy_retries: counter(metric::PUBLISH_RETRIES),
            blocked: gauge(metric::BLOCKED),
            blocked_seconds: counter(metric::BLOCKED_SECONDS),
        }
    }

    /// Sets the number of unacknowledged deliveries.
    pub(crate) fn set_unacked(&self, unacked: usize) {
        if self
            .status
            .0
            .unacked
            .swap(unacked as u64, Ordering::Relaxed)
            != unacked as u64
        {
            self.unacked.set(unacked as f64);
        }
    }

    pub(crate) fn delivered(&self, count: usize, redelivered: usize) {
        add(&self.status.0.delivered, &self.delivered, count);
        add(&self.status.0.redelivered, &self.redelivered, redelivered);
    }

    /// Counts a lost channel, and begins the time without a channel.
    pub(crate) fn channel_lost(&self) {
        add(&self.status.0.channels_lost, &self.channels_lost, 1);
        self.status
            .0
            .unavailable_since
            .lock()
            .get_or_insert_with(Instant::now);
        self.unavailable.set(1);
    }

    /// Ends the time without a channel, because a channel is open again or the source is closed.
    pub(crate) fn clear_unavailable(&self) {
        *self.status.0.unavailable_since.lock() = None;
        self.unavailable.set(0);
    }

    pub(crate) fn stale_settlement(&self) {
        add(&self.status.0.stale_settlements, &self.stale_settlements, 1);
    }

    pub(crate) fn copies_confirmed(&self, count: usize) {
        add(&self.status.0.copies, &self.copies, count);
    }

    pub(crate) fn copies_retried(&self, count: usize) {
        add(&self.status.0.copy_retries, &self.copy_retries, count);
    }

    /// Begins the time for which the broker blocks publishing (`connection.blocked`).
    pub(crate) fn blocked(&self) {
        self.status
            .0
            .blocked
            .lock()
            .since
            .get_or_insert_with(Instant::now);
        self.blocked.set(1);
    }

    /// Ends the time for which the broker blocks publishing: the alarm is over, or the publishing
    /// connection is closed.
    pub(crate) fn unblocked(&self) {
        let mut blocked = self.status.0.blocked.lock();
        if let Some(since) = blocked.since.take() {
            let counted_seconds = blocked.total.as_secs();
            blocked.total += since.elapsed();
            self.blocked.set(0);
            // The counter counts whole seconds. It increases with the total, so that the fractions
            // of several alarms are not lost.
            self.blocked_seconds
                .increment(blocked.total.as_secs() - counted_seconds);
        }
    }
}

fn add(count: &AtomicU64, counter: &Counter, by: usize) {
    if by > 0 {
        count.fetch_add(by as u64, Ordering::Relaxed);
        counter.increment(by as u64);
    }
}

#[cfg(test)]
mod tests {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    use super::*;

    #[test]
    fn the_snapshot_has_the_recorded_values() {
        let status = RabbitMqStatus::new();
        let metrics = SourceMetrics::new(status.clone(), "orders");
        metrics.set_unacked(7);
        metrics.delivered(9, 2);
        metrics.channel_lost();
        metrics.stale_settlement();
        metrics.copies_confirmed(3);
        metrics.copies_retried(4);
        let read = status.snapshot();
        let expected = RabbitMqSnapshot {
            unacked: 7,
            delivered: 9,
            redelivered: 2,
            channels_lost: 1,
            stale_settlements: 1,
            copies: 3,
            copy_retries: 4,
            ..read
        };
        assert_eq!((read, read.blocked), (expected, Duration::ZERO));
    }

    #[test]
    fn the_time_without_a_channel_grows_until_one_is_open() {
        let status = RabbitMqStatus::new();
        let metrics = SourceMetrics::new(status.clone(), "orders");
        assert_eq!(status.snapshot().unavailable, Duration::ZERO);
        metrics.channel_lost();
        std::thread::sleep(Duration::from_millis(2));
        assert!(status.snapshot().unavailable >= Duration::from_millis(2));
        metrics.clear_unavailable();
        assert_eq!(status.snapshot().unavailable, Duration::ZERO);
    }

    #[test]
    fn the_blocked_time_grows_during_an_alarm_and_remains_afterwards() {
        let status = RabbitMqStatus::new();
        let metrics = SourceMetrics::new(status.clone(), "orders");
        metrics.blocked();
        std::thread::sleep(Duration::from_millis(2));
        let during = status.snapshot().blocked;
        assert!(during >= Duration::from_millis(2));
        metrics.blocked();
        metrics.unblocked();
        let after = status.snapshot().blocked;
        assert!(after >= during);
        metrics.unblocked();
        assert_eq!(status.snapshot().blocked, after);
    }

    #[test]
    fn whole_seconds_are_counted_and_fractions_add_up() {
        let (recorder, status) = (DebuggingRecorder::new(), RabbitMqStatus::new());
        let snapshotter = recorder.snapshotter();
        let counted = || match snapshotter
            .snapshot()
            .into_vec()
            .into_iter()
            .find(|it| it.0.key().name() == metric::BLOCKED_SECONDS)
        {
            Some((_, _, _, DebugValue::Counter(since_last_snapshot))) => since_last_snapshot,
            other => panic!("{other:?}"),
        };
        metrics::with_local_recorder(&recorder, || {
            let (metrics, mut all) = (SourceMetrics::new(status.clone(), "orders"), 0);
            for _ in 0..4 {
                metrics.blocked();
                // As if the alarm had begun earlier.
                status.0.blocked.lock().since =
                    Instant::now().checked_sub(Duration::from_millis(600));
                metrics.unblocked();
                all += counted();
                assert_eq!(all, status.snapshot().blocked.as_secs());
            }
            assert!(all >= 2, "{all}");
        });
    }
}
