//! The metrics of this store.

use oncegate_core::metric::Metric;

pub(super) const CLOCK_JUMPS: &str = "oncegate_sqlite_clock_jumps_total";
pub(super) const MARKERS_EXPIRED: &str = "oncegate_sqlite_markers_expired_total";

/// The metrics of the SQLite store.
pub const SQLITE_METRICS: &[Metric] = &[
    Metric::counter(CLOCK_JUMPS, &["direction"], "Jumps of the system clock"),
    Metric::counter(MARKERS_EXPIRED, &[], "Expired markers deleted"),
];
