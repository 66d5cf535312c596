//! The metrics of this source.

use oncegate_core::metric::Metric;

pub(crate) const LAG: &str = "oncegate_kafka_lag";
pub(crate) const WATERMARK_AGE: &str = "oncegate_kafka_watermark_age_seconds";
pub(crate) const PARTITIONS: &str = "oncegate_kafka_partitions";
pub(crate) const ASSIGNED: &str = "oncegate_kafka_partitions_assigned_total";
pub(crate) const REVOKED: &str = "oncegate_kafka_partitions_revoked_total";
pub(crate) const STALE_SETTLEMENTS: &str = "oncegate_kafka_stale_settlements_total";
pub(crate) const DEAD_LETTERS: &str = "oncegate_kafka_dead_letters_total";
pub(crate) const DEAD_LETTER_FAILURES: &str = "oncegate_kafka_dead_letter_failures_total";
pub(crate) const CLIENTS_REPLACED: &str = "oncegate_kafka_clients_replaced_total";
pub(crate) const MESSAGES_MISSED: &str = "oncegate_kafka_messages_missed_total";
pub(crate) const LOGS_CUT: &str = "oncegate_kafka_logs_cut_total";
pub(crate) const TOPICS_MADE_ANEW: &str = "oncegate_kafka_topics_made_anew_total";
pub(crate) const REPLICA_OFFSETS: &str = "oncegate_kafka_replica_offsets_total";
pub(crate) const IDS_REPEATED: &str = "oncegate_kafka_ids_repeated_total";
pub(crate) const PARTITIONS_ADDED: &str = "oncegate_kafka_partitions_added_total";
pub(crate) const PARTITIONS_SILENT: &str = "oncegate_kafka_partitions_silent";
pub(crate) const LOG_ENDS_UNKNOWN: &str = "oncegate_kafka_log_ends_unknown_total";

/// The metrics of the Kafka source.
pub const KAFKA_METRICS: &[Metric] = &[
    Metric::gauge(
        LAG,
        &["topic", "partition"],
        "Offsets between the commit watermark and the end of the log; not told before both are known, 0 once the partition has left",
    ),
    Metric::gauge(
        WATERMARK_AGE,
        &["topic", "partition"],
        "For how long the watermark has waited for its lowest message",
    ),
    Metric::gauge(PARTITIONS, &[], "Partitions that are assigned now"),
    Metric::counter(ASSIGNED, &[], "Partitions that were assigned"),
    Metric::counter(
        REVOKED,
        &["lost"],
        "Partitions that were taken away; lost ones without a word before",
    ),
    Metric::counter(
        STALE_SETTLEMENTS,
        &[],
        "Settlements that came after their partition had gone: nothing is committed for them",
    ),
    Metric::counter(
        DEAD_LETTERS,
        &["reason"],
        "Dead letters and in-doubt messages that stand, confirmed",
    ),
    Metric::counter(
        DEAD_LETTER_FAILURES,
        &[],
        "Attempts to publish one that failed; it is tried again",
    ),
    Metric::counter(
        CLIENTS_REPLACED,
        &[],
        "Kafka clients that stalled, were without their group or failed for good",
    ),
    Metric::counter(
        MESSAGES_MISSED,
        &[],
        "Offsets that were removed from the log before the group had read them",
    ),
    Metric::counter(
        LOGS_CUT,
        &[],
        "Partitions whose log ended before the group's offset",
    ),
    Metric::gauge(
        PARTITIONS_SILENT,
        &[],
        "Own partitions of which no broker says where their log ends; not all of them are asked while none answers",
    ),
    Metric::counter(
        LOG_ENDS_UNKNOWN,
        &[],
        "Times that brokers ceased to say where a partition's log ends, so that its lag stands still",
    ),
    Metric::counter(
        TOPICS_MADE_ANEW,
        &[],
        "Partitions whose topic was deleted and made again",
    ),
    Metric::counter(
        REPLICA_OFFSETS,
        &[],
        "Partitions read from an offset that was committed for a topic with another id, on another cluster or an unknown one",
    ),
    Metric::counter(
        IDS_REPEATED,
        &[],
        "Messages of a recreated topic, of a replica, or of a log that lost its end, whose id was handled before: skipped",
    ),
    Metric::counter(
        PARTITIONS_ADDED,
        &[],
        "Partitions that were added to a topic which the group read already",
    ),
];
