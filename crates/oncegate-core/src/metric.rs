//! The metrics of this crate with their descriptions, for the metrics recorder and for the
//! documentation.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

/// The description of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// Its name, by Prometheus's conventions.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its labels, each of which has few values.
    pub labels: &'static [&'static str],
    /// Its description.
    pub help: &'static str,
}

/// The kind of a metric, as in Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Only increases, from 0 at the start of the process.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// The distribution of the recorded values.
    Histogram,
}

impl Metric {
    /// A counter; its name ends in `_total`.
    pub const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind: Kind::Counter,
            labels,
            help,
        }
    }

    /// A gauge.
    pub const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind: Kind::Gauge,
            labels,
            help,
        }
    }

    /// A histogram of durations; its name ends in `_seconds`.
    pub const fn histogram(name: &'static str, help: &'static str) -> Self {
        Self {
            name,
            kind: Kind::Histogram,
            labels: &[],
            help,
        }
    }

    /// Describes the metric to the recorder of the process. Has no effect before a recorder is
    /// installed.
    pub fn describe(&self) {
        let Self { name, help, .. } = *self;
        let unit = if name.ends_with("_seconds") || name.ends_with("_seconds_total") {
            Unit::Seconds
        } else {
            Unit::Count
        };
        match self.kind {
            Kind::Counter => describe_counter!(name, unit, help),
            Kind::Gauge => describe_gauge!(name, unit, help),
            Kind::Histogram => describe_histogram!(name, unit, help),
        }
    }
}

impl Kind {
    /// As Prometheus names it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

pub(crate) const CLAIM_SECONDS: &str = "oncegate_claim_seconds";
pub(crate) const HANDLE_SECONDS: &str = "oncegate_handle_seconds";
pub(crate) const COMPLETE_SECONDS: &str = "oncegate_complete_seconds";
pub(crate) const LEASE_AGE_SECONDS: &str = "oncegate_lease_age_seconds";
pub(crate) const DELIVERY_SECONDS: &str = "oncegate_delivery_seconds";
pub(crate) const IN_FLIGHT: &str = "oncegate_in_flight";
pub(crate) const WAITING: &str = "oncegate_waiting";
pub(crate) const AWAITING_CLAIM: &str = "oncegate_awaiting_claim";
pub(crate) const ISOLATED: &str = "oncegate_isolated";
pub(crate) const STORE_UNAVAILABLE: &str = "oncegate_store_unavailable";
pub(crate) const SHADOW: &str = "oncegate_shadow_total";
pub(crate) const OUTBOX_LEADING: &str = "oncegate_outbox_leading";
pub(crate) const OUTBOX_OLDEST_AGE_SECONDS: &str = "oncegate_outbox_oldest_age_seconds";
pub(crate) const OUTBOX_UNSENT: &str = "oncegate_outbox_unsent";
pub(crate) const OUTBOX_PARKED: &str = "oncegate_outbox_parked";
pub(crate) const OUTBOX_PUBLISHED: &str = "oncegate_outbox_published_total";
pub(crate) const OUTBOX_FAILED: &str = "oncegate_outbox_failed_total";
pub(crate) const OUTBOX_REFUSED: &str = "oncegate_outbox_refused_total";

/// The metrics of the consumer and the gate. If several run in one process, each metric is the sum
/// over all of them.
pub const METRICS: &[Metric] = &[
    Metric::counter(
        crate::outcome::DELIVERIES,
        &["outcome"],
        "Events of deliveries: verdicts of the store, results of runs, settlements",
    ),
    Metric::histogram(
        CLAIM_SECONDS,
        "From sending a claim to the store until its answer",
    ),
    Metric::histogram(
        HANDLE_SECONDS,
        "Duration of one run of the handler or of reconcile, without runs that a drain or a lost lease ended",
    ),
    Metric::histogram(
        COMPLETE_SECONDS,
        "From asking the store to record an id as done until its answer",
    ),
    Metric::histogram(
        LEASE_AGE_SECONDS,
        "From sending the claim until the store recorded the id as done",
    ),
    Metric::histogram(
        DELIVERY_SECONDS,
        "From the receipt of a delivery until it is settled, including backoff and time in a queue",
    ),
    Metric::gauge(
        IN_FLIGHT,
        &[],
        "Deliveries in flight: all unsettled ones that are not queued",
    ),
    Metric::gauge(
        WAITING,
        &[],
        "Queued deliveries: behind another of their key or partition, or backing off after a failed attempt",
    ),
    Metric::gauge(
        AWAITING_CLAIM,
        &[],
        "Deliveries whose claim is repeated later: another delivery holds the id, or the store is unavailable",
    ),
    Metric::gauge(
        ISOLATED,
        &[],
        "Deliveries that run apart from others, or wait for that, because processes crashed while they handled them",
    ),
    Metric::gauge(
        STORE_UNAVAILABLE,
        &[],
        "Consumers whose store is unavailable: claims wait, or handlers run without the store",
    ),
    Metric::counter(
        SHADOW,
        &["outcome"],
        "Claims that shadow mode granted and the store did not, by the store's answer: accept (duplicate), wait (busy), doubt, conflict, reject, pause (no answer)",
    ),
];

/// The metrics of a [`Relay`](crate::Relay). If several run in one process, the counters are sums,
/// and the gauges are those of one of them.
pub const OUTBOX_METRICS: &[Metric] = &[
    Metric::gauge(
        OUTBOX_LEADING,
        &[],
        "1 in the process whose relay publishes, 0 in those that wait",
    ),
    Metric::gauge(
        OUTBOX_OLDEST_AGE_SECONDS,
        &[],
        "Age of the oldest unsent message of the outbox; 0 while the relay of this process is not the leader",
    ),
    Metric::gauge(
        OUTBOX_UNSENT,
        &[],
        "Unsent messages of the outbox, counted up to 100,000, without parked ones; 0 while not the leader",
    ),
    Metric::gauge(
        OUTBOX_PARKED,
        &[],
        "Parked messages of the outbox, counted up to 100,000; 0 while not the leader",
    ),
    Metric::counter(
        OUTBOX_PUBLISHED,
        &[],
        "Messages of the outbox that a broker confirmed",
    ),
    Metric::counter(
        OUTBOX_FAILED,
        &[],
        "Attempts to publish a message of the outbox without a confirm",
    ),
    Metric::counter(
        OUTBOX_REFUSED,
        &[],
        "Messages of the outbox that the broker or the publisher refused: they are parked",
    ),
];
