//! What the workers count of themselves: the outcomes that oncegate reports to the `metrics` facade.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use serde::{Deserialize, Serialize};

/// The counter that has one label, the outcome.
const DELIVERIES: &str = "oncegate_deliveries_total";

/// Outcomes and how often each occurred.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counts(BTreeMap<String, u64>);

impl Counts {
    /// How often this outcome occurred.
    pub(crate) fn of(&self, outcome: &str) -> u64 {
        self.0.get(outcome).copied().unwrap_or_default()
    }

    /// How many deliveries were accepted: roughly, how many messages are through.
    pub(crate) fn accepted(&self) -> u64 {
        ["completed", "duplicate"].map(|outcome| self.of(outcome)).iter().sum()
    }

    /// How many deliveries were settled, one way or another.
    #[cfg_attr(not(feature = "real"), allow(dead_code))]
    pub(crate) fn settled(&self) -> u64 {
        ["completed", "duplicate", "passed_without_gate", "released", "rejected", "in_doubt"].map(|outcome| self.of(outcome)).iter().sum()
    }

    /// Adds what another worker counted.
    #[cfg_attr(not(feature = "real"), allow(dead_code))]
    pub(crate) fn add(&mut self, other: &Self) {
        for (outcome, count) in &other.0 {
            *self.0.entry(outcome.clone()).or_default() += count;
        }
    }
}

/// Those that occurred, with how often.
impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let occurred: Vec<_> =
            self.0.iter().filter(|(_, count)| **count > 0).map(|(outcome, count)| format!("{outcome} {count}")).collect();
        f.write_str(&occurred.join(", "))
    }
}

/// Keeps the outcomes of this process.
#[derive(Clone, Default)]
pub(crate) struct Outcomes(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Outcomes {
    /// Keeps the outcomes of this process from now on. Called once a process.
    pub(crate) fn install() -> Self {
        let outcomes = Self::default();
        metrics::set_global_recorder(outcomes.clone()).expect("main installs the only recorder of the process");
        outcomes
    }

    /// What was counted so far.
    pub(crate) fn counts(&self) -> Counts {
        let counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Counts(counters.iter().map(|(outcome, counter)| (outcome.clone(), counter.load(Ordering::Relaxed))).collect())
    }

    /// The counter of an outcome.
    pub(crate) fn counter(&self, outcome: &str) -> Arc<AtomicU64> {
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(counters.entry(outcome.to_owned()).or_default())
    }
}

impl Recorder for Outcomes {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let outcome = key.labels().find(|label| key.name() == DELIVERIES && label.key() == "outcome");
        outcome.map_or_else(Counter::noop, |label| Counter::from_arc(self.counter(label.value())))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
