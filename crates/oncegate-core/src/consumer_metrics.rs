//! The histograms and gauges of a consumer, through the `metrics` facade.

use std::time::Duration;

use metrics::{Gauge, Histogram, gauge, histogram};

use crate::marker::{Operation, OperationKind};
use crate::metric;

/// The histograms and gauges of one consumer, looked up once.
pub(crate) struct ConsumerMetrics {
    claim: Histogram,
    handle: Histogram,
    complete: Histogram,
    lease_age: Histogram,
    delivery: Histogram,
    in_flight: GaugeShare,
    waiting: GaugeShare,
    awaiting_claim: GaugeShare,
    isolated: GaugeShare,
    store_unavailable: GaugeShare,
}

/// The share of one consumer in a gauge that all consumers of the process add to.
struct GaugeShare {
    gauge: Gauge,
    value: usize,
}

/// The values of a consumer's gauges.
#[derive(Default)]
pub(crate) struct GaugeValues {
    pub(crate) in_flight: usize,
    pub(crate) waiting: usize,
    pub(crate) awaiting_claim: usize,
    pub(crate) isolated: usize,
    pub(crate) unavailable_stores: usize,
}

impl GaugeShare {
    fn of(name: &'static str) -> Self {
        let gauge = gauge!(name);
        gauge.increment(0); // registers the gauge, which is exported as 0
        Self { gauge, value: 0 }
    }

    fn set(&mut self, now: usize) {
        if now != self.value {
            self.gauge.increment(now as f64 - self.value as f64);
            self.value = now;
        }
    }
}

impl ConsumerMetrics {
    pub(crate) fn new() -> Self {
        Self {
            claim: histogram!(metric::CLAIM_SECONDS),
            handle: histogram!(metric::HANDLE_SECONDS),
            complete: histogram!(metric::COMPLETE_SECONDS),
            lease_age: histogram!(metric::LEASE_AGE_SECONDS),
            delivery: histogram!(metric::DELIVERY_SECONDS),
            in_flight: GaugeShare::of(metric::IN_FLIGHT),
            waiting: GaugeShare::of(metric::WAITING),
            awaiting_claim: GaugeShare::of(metric::AWAITING_CLAIM),
            isolated: GaugeShare::of(metric::ISOLATED),
            store_unavailable: GaugeShare::of(metric::STORE_UNAVAILABLE),
        }
    }

    /// Records that the store answered this batch after this time.
    pub(crate) fn answered(&self, operations: &[Operation], after: Duration) {
        let (mut claims, mut completions) = (0, 0);
        for operation in operations {
            claims += usize::from(matches!(operation.kind, OperationKind::Claim));
            completions += usize::from(matches!(operation.kind, OperationKind::Complete));
        }
        for (histogram, count) in [(&self.claim, claims), (&self.complete, completions)] {
            if count > 0 {
                histogram.record_many(after, count);
            }
        }
    }

    /// Records that a handler or `reconcile` ended after this time.
    #[inline]
    pub(crate) fn handled(&self, after: Duration) {
        self.handle.record(after);
    }

    /// Records that an id was recorded as done, this long after its claim was sent.
    #[inline]
    pub(crate) fn completed(&self, after: Duration) {
        self.lease_age.record(after);
    }

    /// Records that a delivery was settled, this long after it was received.
    #[inline]
    pub(crate) fn settled(&self, after: Duration) {
        self.delivery.record(after);
    }

    pub(crate) fn set_gauges(&mut self, now: GaugeValues) {
        self.in_flight.set(now.in_flight);
        self.waiting.set(now.waiting);
        self.awaiting_claim.set(now.awaiting_claim);
        self.isolated.set(now.isolated);
        self.store_unavailable.set(now.unavailable_stores);
    }
}

impl Drop for ConsumerMetrics {
    /// Subtracts the share of this consumer.
    fn drop(&mut self) {
        self.set_gauges(GaugeValues::default());
    }
}
