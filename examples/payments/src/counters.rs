//! What the workers count of themselves: the outcomes that oncegate reports to the `metrics`
//! facade.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
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
        ["completed", "duplicate"]
            .map(|outcome| self.of(outcome))
            .iter()
            .sum()
    }

    /// How many deliveries were settled, one way or another.
    #[cfg_attr(not(feature = "real"), allow(dead_code))]
    pub(crate) fn settled(&self) -> u64 {
        [
            "completed",
            "duplicate",
            "passed_without_gate",
            "released",
            "rejected",
            "in_doubt",
        ]
        .map(|outcome| self.of(outcome))
        .iter()
        .sum()
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
        let occurred: Vec<_> = self
            .0
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(outcome, count)| format!("{outcome} {count}"))
            .collect();
        f.write_str(&occurred.join(", "))
    }
}

/// Keeps the outcomes of this process.
#[derive(Clone, Default)]
pub(crate) struct Outcomes {
    counters: Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>,
    beside: Option<Arc<dyn Recorder + Send + Sync>>,
}

/// An outcome, and the counter of the recorder beside.
struct Both(Arc<AtomicU64>, Counter);

impl CounterFn for Both {
    fn increment(&self, value: u64) {
        self.0.increment(value);
        self.1.increment(value);
    }

    fn absolute(&self, value: u64) {
        self.0.absolute(value);
        self.1.absolute(value);
    }
}

impl Outcomes {
    /// Keeps the outcomes of this process from now on. Called once a process.
    pub(crate) fn install() -> Self {
        Self::default().installed()
    }

    /// The same, with another recorder that hears of everything.
    #[cfg_attr(not(feature = "real"), allow(dead_code))]
    pub(crate) fn install_beside(recorder: impl Recorder + Send + Sync + 'static) -> Self {
        Self {
            beside: Some(Arc::new(recorder)),
            ..Self::default()
        }
        .installed()
    }

    fn installed(self) -> Self {
        metrics::set_global_recorder(self.clone())
            .expect("main installs the only recorder of the process");
        self
    }

    /// What was counted so far.
    pub(crate) fn counts(&self) -> Counts {
        let counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        Counts(
            counters
                .iter()
                .map(|(outcome, counter)| (outcome.clone(), counter.load(Ordering::Relaxed)))
                .collect(),
        )
    }

    /// The counter of an outcome.
    pub(crate) fn counter(&self, outcome: &str) -> Arc<AtomicU64> {
        let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(counters.entry(outcome.to_owned()).or_default())
    }
}

impl Recorder for Outcomes {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, says: SharedString) {
        self.beside
            .iter()
            .for_each(|it| it.describe_counter(name.clone(), unit, says.clone()));
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, says: SharedString) {
        self.beside
            .iter()
            .for_each(|it| it.describe_gauge(name.clone(), unit, says.clone()));
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, says: SharedString) {
        self.beside
            .iter()
            .for_each(|it| it.describe_histogram(name.clone(), unit, says.clone()));
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        let beside = self
            .beside
            .as_ref()
            .map_or_else(Counter::noop, |it| it.register_counter(key, metadata));
        match key
            .labels()
            .find(|label| key.name() == DELIVERIES && label.key() == "outcome")
        {
            Some(label) => Counter::from_arc(Arc::new(Both(self.counter(label.value()), beside))),
            None => beside,
        }
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        self.beside
            .as_ref()
            .map_or_else(Gauge::noop, |it| it.register_gauge(key, metadata))
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.beside
            .as_ref()
            .map_or_else(Histogram::noop, |it| it.register_histogram(key, metadata))
    }
}
