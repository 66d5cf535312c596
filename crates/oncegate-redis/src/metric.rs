//! The metrics of this store.

use oncegate_core::metric::Metric;

pub(crate) const PAUSED: &str = "oncegate_redis_paused";
pub(crate) const FINDINGS: &str = "oncegate_redis_findings_total";

/// The metrics of the Redis store.
pub const REDIS_METRICS: &[Metric] = &[
    Metric::gauge(
        PAUSED,
        &[],
        "1 while at most once claims nothing because Redis was seen to forget",
    ),
    Metric::counter(
        FINDINGS,
        &["finding"],
        "What was seen of Redis that no server should do, such as to forget or to jump in time",
    ),
];
