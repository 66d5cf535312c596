//! Detects a client that has lost its broker metadata.
//!
//! # Workaround
//! - *Symptom:* after a metadata response without brokers, a client may never connect again. A
//!   broker that was frozen for longer than `broker.session.timeout.ms` sends such a response.
//!   *Version:* librdkafka 2.12.1.
//! - *Workaround:* the client is replaced: the consumer by `watch` and `poll`, the client that
//!   opens the source by `topics`, producers by `restarting_producer`.
//! - *Upstream:* confluentinc/librdkafka#5301, with the open pull request #5303.
//! - *Tests:* `lost_metadata_is_detected_once_probes_succeed_for_the_reconnect_time`, and
//!   `a_client_whose_requests_fail_is_replaced` in `topics`.
//! - *May be removed* when #5301 is fixed in the bundled librdkafka, and no client of `cargo xtask
//!   chaos` with frozen brokers is replaced.

use std::time::{Duration, Instant};

use oncegate_core::internal::Backoff;

/// The first and the longest pause before a probe. A probe is a request of a new client to the
/// group coordinator, which is sent while the watched client does not reach the coordinator. The
/// pause doubles while probes fail.
const PROBE_PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));
/// How long a client may take to connect and to find the coordinator.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Detects that the watched client has lost its broker metadata. librdkafka removes all brokers
/// that a metadata response does not name, and may then never try its bootstrap servers again.
pub(crate) struct LostMetadata {
    /// The time within which a client with broker metadata reconnects.
    reconnect_time: Duration,
    /// Since when the client has not reached the group coordinator.
    without_coordinator_since: Option<Instant>,
    last_probe: Option<Instant>,
    /// The pause before the next probe.
    backoff: Backoff,
    /// Since when every probe has succeeded; `None` if the last probe failed.
    succeeding_since: Option<Instant>,
}

impl LostMetadata {
    /// `reconnect_backoff_max` is the longest pause before the watched client reconnects.
    pub(crate) fn new(reconnect_backoff_max: Duration) -> Self {
        Self::without_probes(reconnect_backoff_max + CONNECT_TIME, None)
    }

    const fn without_probes(
        reconnect_time: Duration,
        without_coordinator_since: Option<Instant>,
    ) -> Self {
        Self {
            reconnect_time,
            without_coordinator_since,
            last_probe: None,
            backoff: Backoff::between(PROBE_PAUSES.0, PROBE_PAUSES.1),
            succeeding_since: None,
        }
    }

    /// Runs a probe if one is due. Returns whether new clients have reached the coordinator for
    /// longer than the watched client needs to reconnect. `without_coordinator_since` is since when
    /// the watched client does not reach it; another value than at the last call restarts the
    /// measurement.
    pub(crate) fn check(
        &mut self,
        without_coordinator_since: Option<Instant>,
        clock: impl Fn() -> Instant,
        probe: impl FnOnce() -> bool,
    ) -> bool {
        if self.without_coordinator_since != without_coordinator_since {
            *self = Self::without_probes(self.reconnect_time, without_coordinator_since);
        }
        let Some(started) = self.last_probe.or(without_coordinator_since) else {
            return false;
        };
        if clock().duration_since(started) < self.backoff.current() {
            return false;
        }
        let has_succeeded = probe();
        let now = clock();
        self.last_probe = Some(now);
        // Longer pauses limit the load of probes on a cluster that is unavailable or just starts.
        if has_succeeded {
            self.backoff.reset();
        } else {
            self.backoff.advance();
        }
        self.succeeding_since = if has_succeeded {
            self.succeeding_since.or(Some(now))
        } else {
            None
        };
        self.succeeding_since
            .is_some_and(|since| now.duration_since(since) >= self.reconnect_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_metadata_is_detected_once_probes_succeed_for_the_reconnect_time() {
        let started = Instant::now();
        let at = |seconds| started + Duration::from_secs(seconds);
        // The watched client loses the coordinator at second 0 and reconnects at `reconnected`;
        // probes succeed from second `answered` on.
        let detected_at = |reconnected: u64, answered: u64| {
            let mut detector = LostMetadata::new(Duration::from_secs(1));
            (0..200).find(|now| {
                detector.check(
                    (*now < reconnected).then_some(started),
                    || at(*now),
                    || *now >= answered,
                )
            })
        };
        assert_eq!(
            detected_at(200, 0),
            Some(8),
            "probed after 2 s, and then every 2 s"
        );
        assert_eq!(
            detected_at(200, 33),
            Some(50),
            "probed at 2, 6, 14, 29 and 44: nothing is detected while probes fail"
        );
        assert_eq!(detected_at(8, 0), None, "the watched client reconnected");
        // A failed probe restarts the measurement, and so does a reconnect.
        let mut detector = LostMetadata::new(Duration::from_secs(1));
        assert!(
            [(2, true), (4, false), (8, true), (13, true)]
                .iter()
                .all(|(now, is)| !detector.check(Some(started), || at(*now), || *is))
        );
        assert!(detector.check(Some(started), || at(15), || true));
        assert!(!detector.check(Some(at(16)), || at(21), || true));
        assert!(detector.check(Some(at(16)), || at(27), || true));
        // A longer reconnect backoff extends the time.
        let mut slow_reconnect = LostMetadata::new(Duration::from_secs(10));
        assert_eq!(
            (0..200).find(|now| slow_reconnect.check(Some(started), || at(*now), || true)),
            Some(18)
        );
    }
}
