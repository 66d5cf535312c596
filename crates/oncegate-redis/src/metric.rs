//! The metrics of this store.

use oncegate_core::metric::Metric;

pub(crate) const PAUSED: &str = "oncegate_redis_paused";
pub(crate) const FINDINGS: &str = "oncegate_redis_findings_total";

/// The metrics of the Redis store.
pub const REDIS_METRICS: &[Metric] = &[
    Metric::gauge(
        PAUSED,
        &[],
        "1 while at-most-once claims are paused because Redis lost data",
    ),
    Metric::counter(
        FINDINGS,
        &["finding"],
        "Anomalies of Redis, such as lost data or a clock that jumped",
    ),
];
