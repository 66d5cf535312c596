//! All metrics of what is built in.

use oncegate_core::metric::{METRICS, Metric};

/// The lists of the parts that are built in.
const ALL: &[&[Metric]] = &[
    METRICS,
    #[cfg(feature = "kafka")]
    oncegate_kafka::KAFKA_METRICS,
    #[cfg(feature = "rabbitmq")]
    oncegate_amqp::RABBITMQ_METRICS,
    #[cfg(feature = "redis")]
    oncegate_redis::REDIS_METRICS,
    #[cfg(feature = "sqlite")]
    oncegate_sql::SQLITE_METRICS,
];

/// Every metric that the parts that are built in can tell.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    ALL.iter().copied().flatten()
}

/// Tells the recorder of this process what each metric says, for those who read its output. Call it
/// once, after the recorder was installed.
pub fn describe() {
    all().for_each(Metric::describe);
}
