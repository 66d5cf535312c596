//! Records the consumer's counter of deliveries in the diary.

use std::sync::Arc;

use metrics::{
    Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

use crate::diary::{Diary, Entry};

/// The counter of the outcomes of deliveries.
const DELIVERIES: &str = oncegate::outcome::DELIVERIES;

/// A metrics recorder that writes each increment of the counter of deliveries into a diary, and
/// ignores all other metrics.
#[derive(Debug)]
pub struct DeliveryRecorder(Arc<Diary>);

impl DeliveryRecorder {
    /// Counters that write into this diary.
    pub fn new(diary: Arc<Diary>) -> Self {
        Self(diary)
    }
}

/// One outcome.
struct Counted {
    diary: Arc<Diary>,
    outcome: String,
}

impl CounterFn for Counted {
    fn increment(&self, by: u64) {
        for _ in 0..by {
            self.diary.write(&Entry::Counted(self.outcome.clone()));
        }
    }

    fn absolute(&self, _: u64) {}
}

impl Recorder for DeliveryRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        match key.labels().find(|label| label.key() == "outcome") {
            Some(label) if key.name() == DELIVERIES => Counter::from_arc(Arc::new(Counted {
                diary: Arc::clone(&self.0),
                outcome: label.value().to_owned(),
            })),
            _ => Counter::noop(),
        }
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
