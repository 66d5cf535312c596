//! A store whose leases expire exactly when their holder crashes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::internal::Lock;
use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};
use oncegate_core::{IdSource, Key, MemoryBroker, Store, StoreError, async_trait};

/// [`marker::apply`] on a map without a clock: the age of a marker is 0 until the consumer that
/// wrote it crashes or sends the message to the in-doubt queue, and then longer than any lease.
#[derive(Clone)]
pub(super) struct KitStore {
    rows: Arc<Lock<HashMap<Key, MarkerRow>>>,
    /// The number of consumers that crashed before this one.
    generation: u32,
    broker: MemoryBroker,
    id: IdSource,
}

#[derive(Clone, Copy)]
struct MarkerRow {
    marker: Marker,
    /// The generation of the consumer that wrote the marker.
    generation: u32,
    /// The number of in-doubt messages of this id when the marker was written.
    in_doubt: usize,
}

/// Longer than any lease.
const EXPIRED: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl KitStore {
    /// An empty store. It reads from the broker which messages are in doubt.
    pub(super) fn new(broker: MemoryBroker, id: IdSource) -> Self {
        Self {
            rows: Arc::default(),
            generation: 0,
            broker,
            id,
        }
    }

    /// The same store for the next consumer after a crash.
    pub(super) fn after_a_crash(&self) -> Self {
        Self {
            generation: self.generation + 1,
            ..self.clone()
        }
    }

    fn age(&self, key: &Key, row: &MarkerRow) -> Duration {
        let is_in_in_doubt_queue =
            matches!(row.marker, Marker::InDoubt(..)) && self.in_doubt(key) > row.in_doubt;
        if is_in_in_doubt_queue || row.generation < self.generation {
            EXPIRED
        } else {
            Duration::ZERO
        }
    }

    /// The number of in-doubt messages of this id.
    fn in_doubt(&self, key: &Key) -> usize {
        // `|` separates the scope; no id contains it.
        let id = key.as_str().rsplit('|').next().unwrap_or_default();
        let has_id = |message| self.id.read(message).is_ok_and(|it| it.as_str() == id);
        self.broker
            .in_doubt()
            .iter()
            .filter(|rejected| has_id(&rejected.message))
            .count()
    }

    fn apply_one(&self, rows: &mut HashMap<Key, MarkerRow>, operation: &Operation) -> Verdict {
        let key = &operation.key;
        let (marker, age) = rows
            .get(key)
            .map_or((Marker::Absent, Duration::ZERO), |row| {
                (row.marker, self.age(key, row))
            });
        let (change, verdict) = marker::apply(marker, Age::Of(age), operation);
        match change {
            Change::Keep => {}
            Change::Write(marker, _) => {
                let in_doubt = if matches!(marker, Marker::InDoubt(..)) {
                    self.in_doubt(key)
                } else {
                    0
                };
                rows.insert(
                    key.clone(),
                    MarkerRow {
                        marker,
                        generation: self.generation,
                        in_doubt,
                    },
                );
            }
            Change::Delete => drop(rows.remove(key)),
        }
        verdict
    }
}

#[async_trait]
impl Store for KitStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut rows = self.rows.lock();
        operations
            .iter()
            .map(|operation| Ok(self.apply_one(&mut rows, operation)))
            .collect()
    }
}
