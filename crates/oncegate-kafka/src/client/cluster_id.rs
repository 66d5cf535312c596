//! Reads the cluster id.
//!
//! # Workaround
//! - *Symptom:* rdkafka's `fetch_cluster_id` never frees librdkafka's string, so each call leaks
//!   about 23 bytes. *Version:* rdkafka 0.39.0.
//! - *Workaround:* [`fetch`] is called once per rebalance and per changed topic id, and repeatedly
//!   only until the cluster id is known.
//! - *Upstream:* `docs/upstream/rust-rdkafka-cluster-id-leak.md`.
//! - *Test:* none.
//! - *May be removed* when rdkafka calls `rd_kafka_mem_free`.

use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};

/// The cluster id of the last metadata response; `None` if none arrives within `timeout`. Do not
/// call this periodically: each call leaks memory.
pub(crate) fn fetch<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    timeout: Duration,
) -> Option<String> {
    consumer.client().fetch_cluster_id(timeout)
}
