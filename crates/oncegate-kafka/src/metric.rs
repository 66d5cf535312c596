//! The metrics of this source.

use oncegate_core::metric::Metric;

pub(crate) const LAG: &str = "oncegate_kafka_lag";
pub(crate) const COMMIT_BLOCKED: &str = "oncegate_kafka_commit_blocked_seconds";
pub(crate) const PARTITIONS: &str = "oncegate_kafka_partitions";
pub(crate) const ASSIGNED: &str = "oncegate_kafka_partitions_assigned_total";
pub(crate) const REVOKED: &str = "oncegate_kafka_partitions_revoked_total";
pub(crate) const STALE_SETTLEMENTS: &str = "oncegate_kafka_stale_settlements_total";
pub(crate) const DEAD_LETTERS: &str = "oncegate_kafka_dead_letters_total";
pub(crate) const DEAD_LETTER_FAILURES: &str = "oncegate_kafka_dead_letter_failures_total";
pub(crate) const CLIENTS_REPLACED: &str = "oncegate_kafka_clients_replaced_total";
pub(crate) const MESSAGES_EXPIRED: &str = "oncegate_kafka_messages_expired_total";
pub(crate) const LOGS_TRUNCATED: &str = "oncegate_kafka_logs_truncated_total";
pub(crate) const TOPICS_RECREATED: &str = "oncegate_kafka_topics_recreated_total";
pub(crate) const REPLICA_OFFSETS: &str = "oncegate_kafka_replica_offsets_total";
pub(crate) const IDS_REPEATED: &str = "oncegate_kafka_ids_repeated_total";
pub(crate) const PARTITIONS_ADDED: &str = "oncegate_kafka_partitions_added_total";
pub(crate) const PARTITIONS_WITHOUT_LOG_END: &str = "oncegate_kafka_partitions_without_log_end";
pub(crate) const LOG_ENDS_UNKNOWN: &str = "oncegate_kafka_log_ends_unknown_total";

/// The metrics of the Kafka source.
pub const KAFKA_METRICS: &[Metric] = &[
    Metric::gauge(
        LAG,
        &["topic", "partition"],
        "Offsets between the offset to commit next and the last stable offset; absent until both are known, 0 once the partition is revoked",
    ),
    Metric::gauge(
        COMMIT_BLOCKED,
        &["topic", "partition"],
        "How long the lowest unsettled message has blocked the commits of its partition",
    ),
    Metric::gauge(PARTITIONS, &[], "Assigned partitions"),
    Metric::counter(ASSIGNED, &[], "Partitions assigned"),
    Metric::counter(
        REVOKED,
        &["lost"],
        "Partitions revoked, or lost without a revocation",
    ),
    Metric::counter(
        STALE_SETTLEMENTS,
        &[],
        "Settlements of partitions that were revoked before; nothing is committed for them",
    ),
    Metric::counter(
        DEAD_LETTERS,
        &["reason"],
        "Confirmed dead letters and in-doubt messages",
    ),
    Metric::counter(
        DEAD_LETTER_FAILURES,
        &[],
        "Failed attempts to publish a dead letter or an in-doubt message; each is retried",
    ),
    Metric::counter(
        CLIENTS_REPLACED,
        &[],
        "Kafka clients replaced because they stalled, could not reach the group coordinator, had a fatal error, or their topic moved to another cluster",
    ),
    Metric::counter(
        MESSAGES_EXPIRED,
        &[],
        "Offsets that expired before the group read them",
    ),
    Metric::counter(
        LOGS_TRUNCATED,
        &[],
        "Partitions whose log was truncated below the group's offset",
    ),
    Metric::gauge(
        PARTITIONS_WITHOUT_LOG_END,
        &[],
        "Assigned partitions whose last stable offset no broker returns; too low while no broker answers, because a check then stops early",
    ),
    Metric::counter(
        LOG_ENDS_UNKNOWN,
        &[],
        "Times that a partition's last stable offset became unknown, so that its lag is not updated",
    ),
    Metric::counter(
        TOPICS_RECREATED,
        &[],
        "Partitions whose topic was deleted and created again",
    ),
    Metric::counter(
        REPLICA_OFFSETS,
        &[],
        "Partitions read from an offset that was committed for a topic with another id, on another or an unknown cluster",
    ),
    Metric::counter(
        IDS_REPEATED,
        &[],
        "Messages of a recreated or mirrored topic, or of a truncated log, skipped because their id was handled before",
    ),
    Metric::counter(
        PARTITIONS_ADDED,
        &[],
        "Partitions added to a topic that the group already read",
    ),
];
