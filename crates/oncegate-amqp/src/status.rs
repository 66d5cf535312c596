//! What a source has done and what it holds, for those who ask from outside.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge};

use crate::metric;

/// What one RabbitMQ source has done and holds. Clones share it.
///
/// The same figures go through the `metrics` facade, with the label `queue`, as
/// [`RABBITMQ_METRICS`](crate::RABBITMQ_METRICS) lists them.
///
/// ```
/// use oncegate_amqp::{RabbitMq, RabbitMqStatus};
///
/// let status = RabbitMqStatus::new();
/// let source = RabbitMq::queue("payments").status(status.clone());
/// assert_eq!(status.snapshot().reconnects, 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct RabbitMqStatus(Arc<Counts>);

/// The figures of one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RabbitMqSnapshot {
    /// Deliveries of the open channel that were not acknowledged yet. It never exceeds the
    /// prefetch.
    pub unacked: u64,
    /// Deliveries that came in.
    pub delivered: u64,
    /// Those of them that the broker marked as redelivered.
    pub redelivered: u64,
    /// Channels that were lost; each is opened anew.
    pub reconnects: u64,
    /// How long there has been no channel since the last one was lost; zero while there is one.
    pub away: Duration,
    /// Settlements whose channel had gone. They were not sent, and their deliveries come back.
    pub stale_receipts: u64,
    /// Dead letters, in-doubt messages and delayed copies that stand in their queue.
    pub copies: u64,
    /// Copies that were not confirmed and are published again.
    pub copy_retries: u64,
    /// How long the broker has refused to read what is published, for want of memory or disk space.
    /// The present refusal counts.
    pub blocked: Duration,
}

#[derive(Debug, Default)]
struct Counts {
    unacked: AtomicU64,
    delivered: AtomicU64,
    redelivered: AtomicU64,
    reconnects: AtomicU64,
    stale_receipts: AtomicU64,
    copies: AtomicU64,
    copy_retries: AtomicU64,
    blocked: Mutex<Blocked>,
    away: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Blocked {
    before: Duration,
    since: Option<Instant>,
}

impl RabbitMqStatus {
    /// Of a source that has not been opened. Hand it to one source alone: to
    /// [`RabbitMq::status`](crate::RabbitMq::status).
    pub fn new() -> Self {
        Self::default()
    }

    /// The figures as they are now.
    pub fn snapshot(&self) -> RabbitMqSnapshot {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &*self.0;
        let blocked = counts.blocked();
        RabbitMqSnapshot {
            unacked: read(&counts.unacked),
            delivered: read(&counts.delivered),
            redelivered: read(&counts.redelivered),
            reconnects: read(&counts.reconnects),
            away: counts
                .away()
                .map_or(Duration::ZERO, |since| since.elapsed()),
            stale_receipts: read(&counts.stale_receipts),
            copies: read(&counts.copies),
            copy_retries: read(&counts.copy_retries),
            blocked: blocked.before
                + blocked
                    .since
                    .map_or(Duration::ZERO, |since| since.elapsed()),
        }
    }
}

impl Counts {
    fn blocked(&self) -> MutexGuard<'_, Blocked> {
        // Nothing panics while it is held.
        self.blocked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn away(&self) -> MutexGuard<'_, Option<Instant>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts, here and through the `metrics` facade.
pub(crate) struct Meter {
    status: RabbitMqStatus,
    unacked: Gauge,
    delivered: Counter,
    redelivered: Counter,
    reconnects: Counter,
    away: Gauge,
    stale_receipts: Counter,
    copies: Counter,
    copy_retries: Counter,
    blocked: Gauge,
    blocked_seconds: Counter,
}

impl Meter {
    pub(crate) fn new(status: RabbitMqStatus, queue: &str) -> Self {
        let counter = |name: &'static str| metrics::counter!(name, "queue" => queue.to_owned());
        let gauge = |name: &'static str| metrics::gauge!(name, "queue" => queue.to_owned());
        Self {
            status,
            unacked: gauge(metric::UNACKED),
            delivered: counter(metric::DELIVERED),
            redelivered: counter(metric::REDELIVERED),
            reconnects: counter(metric::CHANNELS_LOST),
            away: gauge(metric::AWAY),
            stale_receipts: counter(metric::STALE_RECEIPTS),
            copies: counter(metric::COPIES),
            copy_retries: counter(metric::PUBLISH_RETRIES),
            blocked: gauge(metric::BLOCKED),
            blocked_seconds: counter(metric::BLOCKED_SECONDS),
        }
    }

    /// How many deliveries the channel holds unacknowledged.
    pub(crate) fn holds(&self, unacked: usize) {
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

    /// The channel is gone.
    pub(crate) fn lost(&self) {
        add(&self.status.0.reconnects, &self.reconnects, 1);
        self.status.0.away().get_or_insert_with(Instant::now);
        self.away.set(1);
    }

    /// There is a channel again, or none is wanted any more.
    pub(crate) fn back(&self) {
        *self.status.0.away() = None;
        self.away.set(0);
    }

    pub(crate) fn stale(&self) {
        add(&self.status.0.stale_receipts, &self.stale_receipts, 1);
    }

    pub(crate) fn copied(&self, count: usize) {
        add(&self.status.0.copies, &self.copies, count);
    }

    pub(crate) fn copies_again(&self, count: usize) {
        add(&self.status.0.copy_retries, &self.copy_retries, count);
    }

    /// The broker reads nothing that is published from now on.
    pub(crate) fn blocked(&self) {
        self.status
            .0
            .blocked()
            .since
            .get_or_insert_with(Instant::now);
        self.blocked.set(1);
    }

    /// Whether the broker is known to read nothing that is published.
    pub(crate) fn is_blocked(&self) -> bool {
        self.status.0.blocked().since.is_some()
    }

    /// It reads again, or there is no connection on which it would not.
    pub(crate) fn unblocked(&self) {
        let mut blocked = self.status.0.blocked();
        if let Some(since) = blocked.since.take() {
            let told = blocked.before.as_secs();
            blocked.before += since.elapsed();
            self.blocked.set(0);
            // A counter has no fractions: those of several times add up here, and are told as soon
            // as they are a second.
            self.blocked_seconds
                .increment(blocked.before.as_secs() - told);
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
    fn what_is_counted_is_read() {
        let status = RabbitMqStatus::new();
        let meter = Meter::new(status.clone(), "orders");
        meter.holds(7);
        meter.delivered(9, 2);
        meter.lost();
        meter.stale();
        meter.copied(3);
        meter.copies_again(4);
        let read = status.snapshot();
        let expected = RabbitMqSnapshot {
            unacked: 7,
            delivered: 9,
            redelivered: 2,
            reconnects: 1,
            stale_receipts: 1,
            copies: 3,
            copy_retries: 4,
            ..read
        };
        assert_eq!((read, read.blocked), (expected, Duration::ZERO));
    }

    #[test]
    fn the_time_without_a_channel_grows_until_there_is_one() {
        let status = RabbitMqStatus::new();
        let meter = Meter::new(status.clone(), "orders");
        assert_eq!(status.snapshot().away, Duration::ZERO);
        meter.lost();
        std::thread::sleep(Duration::from_millis(2));
        assert!(status.snapshot().away >= Duration::from_millis(2));
        meter.back();
        assert_eq!(status.snapshot().away, Duration::ZERO);
    }

    #[test]
    fn the_time_of_a_refusal_grows_while_it_lasts_and_stays_when_it_is_over() {
        let status = RabbitMqStatus::new();
        let meter = Meter::new(status.clone(), "orders");
        meter.blocked();
        std::thread::sleep(Duration::from_millis(2));
        let during = status.snapshot().blocked;
        assert!(during >= Duration::from_millis(2));
        meter.blocked();
        meter.unblocked();
        let after = status.snapshot().blocked;
        assert!(after >= during);
        meter.unblocked();
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
            Some((_, _, _, DebugValue::Counter(since_the_last_look))) => since_the_last_look,
            other => panic!("{other:?}"),
        };
        metrics::with_local_recorder(&recorder, || {
            let (meter, mut all) = (Meter::new(status.clone(), "orders"), 0);
            for _ in 0..4 {
                meter.blocked();
                // As if it had begun earlier.
                status.0.blocked().since = Instant::now().checked_sub(Duration::from_millis(600));
                meter.unblocked();
                all += counted();
                assert_eq!(all, status.snapshot().blocked.as_secs());
            }
            assert!(all >= 2, "{all}");
        });
    }
}
