//! The metrics of this store.

use oncegate_core::metric::Metric;

pub(crate) const PAUSED: &str = "oncegate_redis_paused";
pub(crate) const ANOMALIES: &str = "oncegate_redis_anomalies_total";

/// The metrics of the Redis store.
pub const REDIS_METRICS: &[Metric] = &[
    Metric::gauge(
        PAUSED,
        &[],
        "1 while at-most-once claims are paused because Redis lost data or its clock jumped forward",
    ),
    Metric::counter(
        ANOMALIES,
        &["anomaly"],
        "Anomalies of Redis, such as lost data or a clock that jumped",
    ),
];
