//! The metrics of the crates that this build includes.

use oncegate_core::metric::{METRICS, Metric, OUTBOX_METRICS};

/// The metrics of the crates that this build includes, one list for each crate.
const ALL: &[&[Metric]] = &[
    METRICS,
    OUTBOX_METRICS,
    #[cfg(feature = "kafka")]
    oncegate_kafka::KAFKA_METRICS,
    #[cfg(feature = "rabbitmq")]
    oncegate_amqp::RABBITMQ_METRICS,
    #[cfg(feature = "redis")]
    oncegate_redis::REDIS_METRICS,
    #[cfg(feature = "sqlite")]
    oncegate_sql::SQLITE_METRICS,
];

/// All metrics of the included crates.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    ALL.iter().copied().flatten()
}

/// Describes each metric to the metrics recorder of this process. Call it once, after the recorder
/// is installed.
pub fn describe() {
    all().for_each(Metric::describe);
}
