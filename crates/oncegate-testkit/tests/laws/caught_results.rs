//! Stores that make one mistake each with the results of runs, and the laws that detect it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use oncegate_core::marker::{Fingerprint, Marker, Operation, Verdict};
use oncegate_core::{Completion, Key, MemoryStore, ResultStore, Store, StoreError, async_trait};
use oncegate_testkit::laws::{run, store as law};

/// The mistake of a store that keeps results beside the markers of a memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// The completion and its result are two steps, the result first.
    StoresBeforeCompleting,
    ReplacesTheResult,
    HidesTheEarlierResult,
    KeepsTheResultOfAForgottenId,
    AddsAResultToADoneId,
    EndsResultsAtAZero,
}

struct Mistaken {
    markers: MemoryStore,
    results: Mutex<HashMap<Key, Vec<u8>>>,
    mistake: Mistake,
}

impl Mistaken {
    fn new(mistake: Mistake) -> Self {
        Self {
            markers: MemoryStore::new(),
            results: Mutex::default(),
            mistake,
        }
    }

    fn is_done(&self, key: &Key) -> bool {
        matches!(self.markers.marker(key).0, Marker::Done(_))
    }
}

#[async_trait]
impl Store for Mistaken {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let verdicts = self.markers.apply(operations).await;
        let mut results = self
            .results
            .lock()
            .expect("nothing panics while it is locked");
        results.retain(|key, _| {
            self.mistake == Mistake::KeepsTheResultOfAForgottenId || self.is_done(key)
        });
        verdicts
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }
}

#[async_trait]
impl ResultStore for Mistaken {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        let key = &completion.key;
        let results = || {
            self.results
                .lock()
                .expect("nothing panics while it is locked")
        };
        if self.mistake == Mistake::StoresBeforeCompleting {
            results().entry(key.clone()).or_insert(result.to_vec());
            tokio::task::yield_now().await;
        }
        let (before, _) = self.markers.marker(key);
        let was_done = self.is_done(key);
        let is_same = before.is_done_for(completion.terms.fingerprint);
        let mut earlier = results().get(key).filter(|_| is_same).cloned();
        let verdict = self.markers.apply(std::slice::from_ref(completion)).await;
        let writes = match self.mistake {
            Mistake::StoresBeforeCompleting => false,
            Mistake::ReplacesTheResult => self.is_done(key),
            Mistake::AddsAResultToADoneId => self.is_done(key) && earlier.is_none(),
            _ => self.is_done(key) && !was_done,
        };
        if writes {
            let end = match self.mistake {
                Mistake::EndsResultsAtAZero => result.iter().position(|byte| *byte == 0),
                _ => None,
            };
            results().insert(key.clone(), result[..end.unwrap_or(result.len())].to_vec());
        }
        if self.mistake == Mistake::HidesTheEarlierResult {
            earlier = None;
        }
        let verdict = verdict.into_iter().next().expect("one answer")?;
        Ok(Completion { verdict, earlier })
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let results = self
            .results
            .lock()
            .expect("nothing panics while it is locked");
        let (marker, _) = self.markers.marker(key);
        let is_readable = match self.mistake {
            Mistake::StoresBeforeCompleting | Mistake::KeepsTheResultOfAForgottenId => true,
            _ => marker.is_done_for(fingerprint),
        };
        Ok(results.get(key).filter(|_| is_readable).cloned())
    }
}

/// Whether a law fails with a store that makes this mistake.
macro_rules! breaks {
    ($mistake:ident, $law:ident) => {
        catch_unwind(AssertUnwindSafe(|| {
            run(async || Mistaken::new(Mistake::$mistake), law::$law)
        }))
        .is_err()
    };
}

mistakes! {
    a_result_that_is_stored_before_its_completion: StoresBeforeCompleting breaks
        a_lost_completion_stores_no_result, random_results_match_the_memory_store;
    a_result_that_is_replaced: ReplacesTheResult breaks the_first_result_is_kept;
    an_earlier_result_that_is_not_returned: HidesTheEarlierResult breaks the_first_result_is_kept;
    a_result_that_outlives_a_forgotten_id: KeepsTheResultOfAForgottenId breaks
        a_forgotten_id_has_no_result, a_result_expires_with_its_marker;
    a_result_that_is_added_to_a_done_id: AddsAResultToADoneId breaks the_first_result_is_kept;
    a_result_that_ends_at_a_zero: EndsResultsAtAZero breaks a_result_is_stored_with_its_completion;
}
