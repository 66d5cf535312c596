//! A user-defined store, as shown in the book.
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};
use oncegate_core::{Key, Store, StoreError, async_trait};

/// Each marker with the time at which it was written, and its time to live from then on.
#[derive(Default)]
struct OwnStore {
    rows: Mutex<HashMap<Key, (Marker, Instant, Duration)>>,
}

#[async_trait]
impl Store for OwnStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        // Makes each operation atomic. Elsewhere this is a transaction or a script on the server.
        let mut rows = self.rows.lock().expect("nothing panics while it is locked");
        let mut verdicts = Vec::with_capacity(operations.len());
        for operation in operations {
            let row = rows
                .get(&operation.key)
                .map(|(marker, written, expiry)| (*marker, written.elapsed(), *expiry));
            let (marker, age) = match row {
                Some((marker, age, expiry)) if age < expiry => (marker, age),
                _ => (Marker::Absent, Duration::ZERO),
            };
            let (change, verdict) = marker::apply(marker, Age::Of(age), operation);
            match change {
                Change::Keep => {}
                Change::Write(marker, expiry) => {
                    rows.insert(operation.key.clone(), (marker, Instant::now(), expiry));
                }
                Change::Delete => {
                    rows.remove(&operation.key);
                }
            }
            verdicts.push(Ok(verdict));
        }
        verdicts
    }
}
oncegate_testkit::store_laws!(async || OwnStore::default());

#[test]
fn all_laws_in_one_test() {
    oncegate_testkit::laws::all(async || OwnStore::default());
}
