//! The metrics of a consumer process: counters for the ledger, and all metrics in the Prometheus
//! text format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::Error;
use crate::ledger::{Log, What};
use oncegate::internal::Lock;

/// The interval of writing the metrics. A killed process loses at most the counts of one interval.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The extension of the file with the Prometheus text.
pub(crate) const SCRAPE: &str = "metrics";
/// The bounds of the histogram buckets, in seconds; the harness does not use them.
const BUCKETS: [f64; 4] = [0.001, 0.01, 0.1, 1.0];

/// All metrics of this process.
#[derive(Clone, Debug)]
pub struct ProcessMetrics {
    all: All,
    log: Arc<Log>,
    /// The path of the Prometheus text; locked while it is written.
    scrape: Arc<Lock<PathBuf>>,
}

#[derive(Clone, Debug)]
struct All {
    counters: Arc<Lock<BTreeMap<String, Arc<AtomicU64>>>>,
    prometheus: Arc<PrometheusRecorder>,
    handle: PrometheusHandle,
}

impl ProcessMetrics {
    /// Installs the global metrics recorder. Writes every second the counters to the ledger and the
    /// Prometheus text to a file in the folder.
    ///
    /// # Errors
    /// A recorder is already installed.
    pub fn install(log: Arc<Log>, folder: &Path, name: &str) -> Result<Self, Error> {
        let all = All::new()?;
        metrics::set_global_recorder(all.clone()).map_err(|error| error.to_string())?;
        oncegate::metrics::describe();
        let counters = Self {
            all,
            log,
            scrape: Arc::new(Lock::new(folder.join(format!("{name}.{SCRAPE}")))),
        };
        let meanwhile = counters.clone();
        std::thread::spawn(move || {
            let mut written = BTreeMap::new();
            loop {
                std::thread::sleep(WRITE_INTERVAL);
                let now = meanwhile.all.values();
                if now != written {
                    written.clone_from(&now);
                    meanwhile.log.write(What::Counted {
                        values: now,
                        last: false,
                    });
                }
                meanwhile.write_scrape();
            }
        });
        Ok(counters)
    }

    /// Writes the final values; call it when nothing is measured any more.
    pub fn write_final(&self) {
        self.log.write(What::Counted {
            values: self.all.values(),
            last: true,
        });
        self.write_scrape();
    }

    fn write_scrape(&self) {
        let scrape = self.scrape.lock();
        self.all.write(&scrape);
    }
}

impl All {
    fn new() -> Result<Self, Error> {
        let recorder = PrometheusBuilder::new()
            .set_buckets(&BUCKETS)?
            .build_recorder();
        let handle = recorder.handle();
        Ok(Self {
            counters: Arc::default(),
            prometheus: Arc::new(recorder),
            handle,
        })
    }

    /// All counters that are not 0.
    fn values(&self) -> BTreeMap<String, u64> {
        let all = self.counters.lock();
        let value = |(name, value): (&String, &Arc<AtomicU64>)| {
            (name.clone(), value.load(Ordering::Relaxed))
        };
        all.iter()
            .map(value)
            .filter(|(_, value)| *value > 0)
            .collect()
    }

    /// Replaces the Prometheus text atomically: a process that is killed meanwhile leaves the
    /// previous one.
    fn write(&self, scrape: &Path) {
        let new = scrape.with_extension("metrics-new");
        let written =
            std::fs::write(&new, self.handle.render()).and_then(|()| std::fs::rename(&new, scrape));
        // Without the file the search for secrets would be incomplete, so the run must fail.
        written.expect("the metrics can be written");
    }
}

/// A counter for the ledger and for Prometheus.
struct MirroredCounter {
    value: Arc<AtomicU64>,
    shown: Counter,
}

impl CounterFn for MirroredCounter {
    fn increment(&self, value: u64) {
        self.value.fetch_add(value, Ordering::Relaxed);
        self.shown.increment(value);
    }

    fn absolute(&self, value: u64) {
        self.value.fetch_max(value, Ordering::Relaxed);
        self.shown.absolute(value);
    }
}

impl Recorder for All {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.prometheus.describe_counter(name, unit, text);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.prometheus.describe_gauge(name, unit, text);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, text: SharedString) {
        self.prometheus.describe_histogram(name, unit, text);
    }

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        let labels: Vec<String> = key
            .labels()
            .map(|label| format!("{}={}", label.key(), label.value()))
            .collect();
        let name = if labels.is_empty() {
            key.name().to_owned()
        } else {
            format!("{}{{{}}}", key.name(), labels.join(","))
        };
        let mut all = self.counters.lock();
        let value = Arc::clone(all.entry(name).or_default());
        Counter::from_arc(Arc::new(MirroredCounter {
            value,
            shown: self.prometheus.register_counter(key, metadata),
        }))
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        self.prometheus.register_gauge(key, metadata)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.prometheus.register_histogram(key, metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::{Secret, find, random_password};

    #[test]
    fn counters_with_equal_name_and_labels_are_one() {
        let all = All::new().unwrap();
        metrics::with_local_recorder(&all, || {
            metrics::counter!("deliveries", "outcome" => "first").increment(2);
            metrics::counter!("deliveries", "outcome" => "first").increment(1);
            metrics::counter!("deliveries", "outcome" => "busy").increment(0);
            metrics::counter!("lost").increment(1);
        });
        let expected = [
            ("deliveries{outcome=first}".to_owned(), 3),
            ("lost".to_owned(), 1),
        ];
        assert_eq!(all.values(), BTreeMap::from(expected));
    }

    #[test]
    fn a_secret_in_a_metric_of_any_kind_is_found() {
        let (all, folder) = (All::new().unwrap(), tempfile::tempdir().unwrap());
        let secrets = ["counter", "gauge", "histogram", "name", "help"].map(|of| Secret {
            of,
            text: random_password(),
        });
        let [counter, gauge, histogram, name, help] = &secrets;
        metrics::with_local_recorder(&all, || {
            metrics::describe_gauge!("rate", format!("of {}", help.text));
            metrics::counter!("lost", "url" => format!("redis://:{}@h", counter.text)).increment(1);
            metrics::gauge!("rate", "url" => format!("amqp://u:{}@h", gauge.text)).set(0.5);
            metrics::histogram!("claim_seconds", "user" => histogram.text.clone()).record(0.1);
            metrics::gauge!(format!("of_{}", name.text)).set(1.0);
        });
        all.write(&folder.path().join(format!("c0.1.{SCRAPE}")));

        let text = format!("{:?}", find(folder.path(), &secrets).unwrap());

        for Secret { of, .. } in &secrets {
            assert!(
                text.contains(&format!("{of:?}")),
                "the one in a {of} was not found: {text}"
            );
        }
    }
}
