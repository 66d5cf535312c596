//! A store whose leases end when their holder does, and not before.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};
use oncegate_core::{IdSource, Key, MemoryBroker, Store, StoreError, async_trait};

/// [`marker::apply`] on a map, in which no time passes: a marker is new while its holder has it,
/// and older than any lease once that consumer has crashed, or has put the message among those in
/// doubt and lets go.
#[derive(Clone)]
pub(super) struct Remembered {
    rows: Arc<Mutex<HashMap<Key, Row>>>,
    /// How many consumers have crashed before this one.
    life: u32,
    broker: MemoryBroker,
    id: IdSource,
}

#[derive(Clone, Copy)]
struct Row {
    marker: Marker,
    /// The life of the consumer that wrote it.
    life: u32,
    /// How many messages of this id stood in doubt when it was written.
    in_doubt: usize,
}

/// Longer than any lease may be.
const OVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Remembered {
    /// Remembers nothing yet. The broker says what its consumer has put among the messages in
    /// doubt.
    pub(super) fn new(broker: MemoryBroker, id: IdSource) -> Self {
        Self {
            rows: Arc::default(),
            life: 0,
            broker,
            id,
        }
    }

    /// The same store, for the consumer that comes after one that crashed.
    pub(super) fn after_a_crash(&self) -> Self {
        Self {
            life: self.life + 1,
            ..self.clone()
        }
    }

    fn age(&self, key: &Key, row: &Row) -> Duration {
        let let_go = matches!(row.marker, Marker::InDoubt(..)) && self.in_doubt(key) > row.in_doubt;
        if let_go || row.life < self.life {
            OVER
        } else {
            Duration::ZERO
        }
    }

    /// How many messages of this id stand in doubt.
    fn in_doubt(&self, key: &Key) -> usize {
        // No id has the sign that stands behind a scope.
        let id = key.as_str().rsplit('|').next().unwrap_or_default();
        let is_it = |message| self.id.read(message).is_ok_and(|it| it.as_str() == id);
        self.broker
            .in_doubt()
            .iter()
            .filter(|letter| is_it(&letter.message))
            .count()
    }

    fn apply_one(&self, rows: &mut HashMap<Key, Row>, operation: &Operation) -> Verdict {
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
                    Row {
                        marker,
                        life: self.life,
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
impl Store for Remembered {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        operations
            .iter()
            .map(|operation| Ok(self.apply_one(&mut rows, operation)))
            .collect()
    }
}
