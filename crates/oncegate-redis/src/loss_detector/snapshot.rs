//! Snapshots of a server by `INFO`, and the anomalies between two of them.

use std::time::{Duration, Instant};

use crate::anomaly::Anomaly;
use crate::info::InfoReply;

/// `INFO` of a server process at one moment.
#[derive(Clone, Debug)]
pub(super) struct ServerSnapshot {
    pub(super) run_id: String,
    pub(super) replication_id: String,
    /// The replication ID of the primary that it followed before its promotion.
    pub(super) previous_replication_id: Option<String>,
    pub(super) uptime: Duration,
    /// Keys evicted since the process started.
    pub(super) evicted: u64,
    /// The server's clock, since 1970; zero if `INFO` does not show it.
    pub(super) clock: Duration,
    /// The snapshot was taken between this moment and `received_at`.
    pub(super) requested_at: Instant,
    pub(super) received_at: Instant,
}

impl ServerSnapshot {
    pub(super) fn read(info: &InfoReply, requested_at: Instant) -> Self {
        Self {
            run_id: info.field("run_id").unwrap_or_default().to_owned(),
            replication_id: info.field("master_replid").unwrap_or_default().to_owned(),
            previous_replication_id: info.field("master_replid2").map(str::to_owned),
            uptime: Duration::from_secs(info.number("uptime_in_seconds").unwrap_or(0)),
            evicted: info.number("evicted_keys").unwrap_or(0),
            clock: Duration::from_micros(info.number("server_time_usec").unwrap_or(0)),
            requested_at,
            received_at: Instant::now(),
        }
    }

    /// Whether this server was a replica of the one in `before`, and already ran when that snapshot
    /// was taken. A server started later may have read the replication ID from a file.
    pub(super) fn was_replica_of(&self, before: &Self) -> bool {
        !before.replication_id.is_empty()
            && self.previous_replication_id.as_deref() == Some(&before.replication_id)
            && self.uptime
                > self
                    .received_at
                    .saturating_duration_since(before.requested_at)
    }
}

/// Compares two snapshots: of one server, or of a server and the one that replaced it.
pub(super) fn detect_anomalies(
    before: &ServerSnapshot,
    now: &ServerSnapshot,
    tolerance: Duration,
) -> Vec<Anomaly> {
    let mut anomalies = Vec::new();
    // A new process counts from 0.
    let evicted_before = if now.run_id == before.run_id {
        before.evicted
    } else {
        0
    };
    if now.evicted > evicted_before {
        anomalies.push(Anomaly::Evicted(now.evicted - evicted_before));
    }
    if before.clock.is_zero() || now.clock.is_zero() {
        return anomalies;
    }
    // The bounds of the time between the two snapshots: a request may be sent late, a reply read
    // late.
    let (least, most) = (
        now.requested_at
            .saturating_duration_since(before.received_at),
        now.received_at
            .saturating_duration_since(before.requested_at),
    );
    let tolerance = tolerance + most / 1_000;
    match now.clock.checked_sub(before.clock) {
        Some(advance) if advance > most + tolerance => {
            anomalies.push(Anomaly::ClockForward(advance - most))
        }
        Some(advance) if advance + tolerance < least => {
            anomalies.push(Anomaly::ClockBackward(least - advance))
        }
        None if before.clock - now.clock > tolerance => {
            anomalies.push(Anomaly::ClockBackward(before.clock - now.clock + least))
        }
        _ => {}
    }
    anomalies
}
