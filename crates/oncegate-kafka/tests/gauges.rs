//! The gauges have the expected values. Alone in its process, because it installs the global
//! metrics recorder.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/fixture.rs"]
mod fixture;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{
    Counter, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use oncegate_core::source::{Connect, ConnectOptions};

use crate::fixture::*;

/// The value of each gauge, by its name and partition.
#[derive(Clone, Default)]
struct Gauges(Arc<Mutex<BTreeMap<String, f64>>>);

/// The gauge of this name and partition.
struct NamedGauge(Gauges, String);

impl GaugeFn for NamedGauge {
    fn increment(&self, _: f64) {
        unreachable!("the source only sets gauges");
    }

    fn decrement(&self, _: f64) {
        unreachable!("the source only sets gauges");
    }

    fn set(&self, value: f64) {
        self.0
            .0
            .lock()
            .expect("not poisoned")
            .insert(self.1.clone(), value);
    }
}

impl Recorder for Gauges {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let partition = key
            .labels()
            .find(|label| label.key() == "partition")
            .map_or_else(String::new, |it| format!("/{}", it.value()));
        Gauge::from_arc(Arc::new(NamedGauge(
            self.clone(),
            format!("{}{partition}", key.name()),
        )))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

impl Gauges {
    fn get(&self, name: &str) -> Option<f64> {
        self.0
            .lock()
            .expect("not poisoned")
            .get(&format!("oncegate_kafka_{name}"))
            .copied()
    }

    /// Waits until all gauges have these values at the same time.
    async fn wait_for(&self, expected: &[(&str, f64)]) {
        let end = Instant::now() + BOUND;
        while expected
            .iter()
            .any(|(name, value)| self.get(name) != Some(*value))
        {
            assert!(Instant::now() < end, "not {expected:?}: {:?}", self.0);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gauges_show_lag_assignment_and_blocked_commits() {
    let gauges = Gauges::default();
    metrics::set_global_recorder(gauges.clone())
        .unwrap_or_else(|_| panic!("there is another recorder"));
    let topic = Topic::new(2).await;
    topic.send_numbers(0, 7).await;
    topic.send_numbers(1, 3).await;
    // With this setting partitions are checked every second.
    let mut source = topic
        .source()
        .stalled_after(Duration::from_secs(4))
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let all = receive(&mut source, 10).await;
    gauges
        .wait_for(&[("partitions", 2.0), ("lag/0", 7.0), ("lag/1", 3.0)])
        .await;

    // All of partition 1, and all but the third message of partition 0.
    let (held, done): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|it| it.receipt.partition == 0 && offset(it) == 2);
    let before = Instant::now();
    accept(&mut source, done).await;
    let after = Instant::now();
    gauges
        .wait_for(&[
            ("lag/0", 5.0),
            ("lag/1", 0.0),
            ("commit_blocked_seconds/1", 0.0),
        ])
        .await;
    let end = Instant::now() + BOUND;
    let age = loop {
        match gauges.get("commit_blocked_seconds/0") {
            // It has been the lowest since the others were accepted, not since it was read.
            Some(age) if age >= 1.5 && after.elapsed() >= Duration::from_millis(1_500) => {
                break age;
            }
            age => assert!(Instant::now() < end, "{age:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(Duration::from_secs_f64(age) <= before.elapsed(), "{age} s");

    topic.send_numbers(1, 4).await;
    gauges.wait_for(&[("lag/0", 5.0), ("lag/1", 4.0)]).await;
    let last = receive(&mut source, 4).await;
    accept(&mut source, last.into_iter().chain(held)).await;
    gauges
        .wait_for(&[
            ("lag/0", 0.0),
            ("lag/1", 0.0),
            ("commit_blocked_seconds/0", 0.0),
            ("partitions", 2.0),
        ])
        .await;
    close(source).await;
    gauges.wait_for(&[("partitions", 0.0)]).await;
}
