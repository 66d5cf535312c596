//! The metrics of this source.

use oncegate_core::metric::Metric;

pub(crate) const UNACKED: &str = "oncegate_amqp_unacked";
pub(crate) const DELIVERED: &str = "oncegate_amqp_delivered_total";
pub(crate) const REDELIVERED: &str = "oncegate_amqp_redelivered_total";
pub(crate) const CHANNELS_LOST: &str = "oncegate_amqp_channels_lost_total";
pub(crate) const UNAVAILABLE: &str = "oncegate_amqp_unavailable";
pub(crate) const STALE_SETTLEMENTS: &str = "oncegate_amqp_stale_settlements_total";
pub(crate) const COPIES: &str = "oncegate_amqp_copies_total";
pub(crate) const PUBLISH_RETRIES: &str = "oncegate_amqp_publish_retries_total";
pub(crate) const BLOCKED: &str = "oncegate_amqp_blocked";
pub(crate) const BLOCKED_SECONDS: &str = "oncegate_amqp_blocked_seconds_total";

/// The metrics of the RabbitMQ source.
pub const RABBITMQ_METRICS: &[Metric] = &[
    Metric::gauge(UNACKED, &["queue"], "Unacknowledged deliveries"),
    Metric::counter(DELIVERED, &["queue"], "Deliveries received"),
    Metric::counter(
        REDELIVERED,
        &["queue"],
        "Deliveries that the broker marked as redelivered",
    ),
    Metric::counter(
        CHANNELS_LOST,
        &["queue"],
        "Channels lost; the source opens another one for each",
    ),
    Metric::gauge(
        UNAVAILABLE,
        &["queue"],
        "1 while there is no channel because one was lost and no other could be opened yet",
    ),
    Metric::counter(
        STALE_SETTLEMENTS,
        &["queue"],
        "Settlements for a closed channel: dropped, and their deliveries redelivered",
    ),
    Metric::counter(
        COPIES,
        &["queue"],
        "Dead letters, in-doubt messages and delayed copies published and confirmed",
    ),
    Metric::counter(
        PUBLISH_RETRIES,
        &["queue"],
        "Copies published again because they were not confirmed",
    ),
    Metric::gauge(
        BLOCKED,
        &["queue"],
        "1 while the broker blocks publishing because of a resource alarm (memory or disk space)",
    ),
    Metric::counter(
        BLOCKED_SECONDS,
        &["queue"],
        "Whole seconds for which the broker blocked publishing, summed over ended alarms",
    ),
];
