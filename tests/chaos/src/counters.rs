//! The counters of a consumer process, as they go into the ledger.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

use crate::Error;
use crate::ledger::{Log, What};

/// How often they are written down, if they have changed: what a killed process had counted is known up to here.
const EVERY: Duration = Duration::from_secs(1);

/// All counters of this process.
#[derive(Clone, Debug)]
pub struct Counters {
    all: All,
    log: Arc<Log>,
}

#[derive(Clone, Debug, Default)]
struct All(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Counters {
    /// Takes what this process counts from now on, and writes it into the ledger each second.
    ///
    /// # Errors
    /// If somebody else takes it already.
    pub fn install(log: Arc<Log>) -> Result<Self, Error> {
        let all = All::default();
        metrics::set_global_recorder(all.clone()).map_err(|error| error.to_string())?;
        let counters = Self { all, log };
        let meanwhile = counters.clone();
        std::thread::spawn(move || {
            let mut written = BTreeMap::new();
            loop {
                std::thread::sleep(EVERY);
                let now = meanwhile.all.values();
                if now != written {
                    written.clone_from(&now);
                    meanwhile.log.write(What::Counted { values: now, last: false });
                }
            }
        });
        Ok(counters)
    }

    /// Writes down what they came to, when nothing is counted any more.
    pub fn write_the_last(&self) {
        self.log.write(What::Counted { values: self.all.values(), last: true });
    }
}

impl All {
    /// What has been counted at all.
    fn values(&self) -> BTreeMap<String, u64> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let value = |(name, value): (&String, &Arc<AtomicU64>)| (name.clone(), value.load(Ordering::Relaxed));
        all.iter().map(value).filter(|(_, value)| *value > 0).collect()
    }
}

impl Recorder for All {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = if labels.is_empty() { key.name().to_owned() } else { format!("{}{{{}}}", key.name(), labels.join(",")) };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Counter::from_arc(Arc::clone(all.entry(name).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_the_same_name_and_labels_counts_together() {
        let all = All::default();
        metrics::with_local_recorder(&all, || {
            metrics::counter!("deliveries", "outcome" => "first").increment(2);
            metrics::counter!("deliveries", "outcome" => "first").increment(1);
            metrics::counter!("deliveries", "outcome" => "busy").increment(0);
            metrics::counter!("lost").increment(1);
        });
        let expected = [("deliveries{outcome=first}".to_owned(), 3), ("lost".to_owned(), 1)];
        assert_eq!(all.values(), BTreeMap::from(expected));
    }
}
