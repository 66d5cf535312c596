//! Stores that make one mistake each, and the laws that detect it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::marker::{
    self, Age, Attempts, Change, Effect, Marker, Operation, OperationKind, Verdict,
};
use oncegate_core::{Key, MessageId, Store, StoreError, async_trait};
use oncegate_testkit::laws::{run, store as law};

/// The mistake of a store that otherwise applies `marker::apply` to a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    ReadsThenWrites,
    AnswersReversed,
    LeavesTheLastUnanswered,
    AppliesABatchToTheInitialMarkers,
    StopsAtALostOperation,
    NeverExpires,
    ExpiresWithTheLease,
    ExpiresUnresolvedWithTheWindow,
    KeepsTheFirstExpiry,
    RestartsTheExpiryOfKeptMarkers,
    CountsWholeSeconds,
    DropsTheAttempt,
    DropsTheSecondAttemptThatWasRejected,
    ForgetsTheBase,
    DropsTheUnknownOutcome,
    KeepsForTheWindowOfTheOperation,
    DropsTheFingerprint,
    FoldsCase,
    CutsIds,
    RenewsInAnotherStore,
}

type Rows = HashMap<Key, (Marker, Instant, Duration)>;

struct Mistaken {
    rows: Mutex<Rows>,
    mistake: Mistake,
}

impl Mistaken {
    fn new(mistake: Mistake) -> Self {
        Self {
            rows: Mutex::default(),
            mistake,
        }
    }

    fn key(&self, key: &Key) -> Key {
        let id = match self.mistake {
            Mistake::FoldsCase => key.as_str().to_lowercase(),
            Mistake::CutsIds => key.as_str().chars().take(64).collect(),
            _ => return key.clone(),
        };
        Key::new(&MessageId::new(id).expect("no key is empty"))
    }

    fn read(&self, rows: &Rows, key: &Key) -> (Marker, Duration) {
        let Some((marker, written, expiry)) = rows.get(key) else {
            return (Marker::Absent, Duration::ZERO);
        };
        let expiry = match (self.mistake, marker) {
            (Mistake::NeverExpires, _) => Duration::MAX,
            (Mistake::ExpiresWithTheLease, Marker::InProgress(hold)) => hold.lease,
            (
                Mistake::ExpiresUnresolvedWithTheWindow,
                Marker::InProgress(_) | Marker::InDoubt(..),
            ) => (*expiry).min(Duration::from_secs(1)),
            _ => *expiry,
        };
        match written.elapsed() {
            age if age >= expiry => (Marker::Absent, Duration::ZERO),
            age if self.mistake == Mistake::CountsWholeSeconds => {
                (*marker, Duration::from_secs(age.as_secs()))
            }
            age => (*marker, age),
        }
    }

    /// The change and verdict of `marker::apply`, with the mistake applied.
    fn apply_one(&self, marker: Marker, age: Duration, operation: &Operation) -> (Change, Verdict) {
        let (change, verdict) = marker::apply(marker, Age::Of(age), operation);
        let change = match (self.mistake, operation.kind, change) {
            (
                Mistake::DropsTheSecondAttemptThatWasRejected,
                OperationKind::Reject(Effect::Nothing),
                Change::Write(
                    Marker::Cleared {
                        attempts: Attempts { number: 2, .. },
                        ..
                    },
                    _,
                ),
            ) => Change::Delete,
            (
                Mistake::ForgetsTheBase,
                _,
                Change::Write(Marker::Cleared { attempts, effect }, expiry),
            ) => Change::Write(
                Marker::Cleared {
                    attempts: Attempts {
                        base: 0,
                        ..attempts
                    },
                    effect,
                },
                expiry,
            ),
            (
                Mistake::DropsTheUnknownOutcome,
                _,
                Change::Write(Marker::Cleared { attempts, .. }, expiry),
            ) => Change::Write(
                Marker::Cleared {
                    attempts,
                    effect: Effect::Nothing,
                },
                expiry,
            ),
            (
                Mistake::KeepsForTheWindowOfTheOperation,
                _,
                Change::Write(held @ (Marker::InProgress(_) | Marker::InDoubt(..)), _),
            ) => Change::Write(held, operation.terms.horizon()),
            _ => change,
        };
        (change, verdict)
    }

    fn write(&self, rows: &mut Rows, key: Key, change: Change) {
        match change {
            Change::Keep if self.mistake == Mistake::RestartsTheExpiryOfKeptMarkers => {
                rows.entry(key).and_modify(|row| row.1 = Instant::now());
            }
            Change::Keep => {}
            Change::Write(Marker::Cleared { .. }, _)
                if self.mistake == Mistake::DropsTheAttempt =>
            {
                rows.remove(&key);
            }
            Change::Write(Marker::Done(_), expiry)
                if self.mistake == Mistake::DropsTheFingerprint =>
            {
                rows.insert(key, (Marker::Done(None), Instant::now(), expiry));
            }
            Change::Write(marker, expiry) => {
                let first = rows
                    .get(&key)
                    .filter(|row| row.1.elapsed() < row.2)
                    .map(|row| row.1);
                let written = if self.mistake == Mistake::KeepsTheFirstExpiry {
                    first
                } else {
                    None
                };
                rows.insert(key, (marker, written.unwrap_or_else(Instant::now), expiry));
            }
            Change::Delete => {
                rows.remove(&key);
            }
        }
    }
}

#[async_trait]
impl Store for Mistaken {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let rows = || self.rows.lock().expect("nothing panics while it is locked");
        let before = rows().clone();
        let mut verdicts = Vec::with_capacity(operations.len());
        for operation in operations {
            let key = self.key(&operation.key);
            let (change, verdict) = if self.mistake == Mistake::ReadsThenWrites {
                let (marker, age) = self.read(&rows(), &key);
                tokio::task::yield_now().await;
                let applied = self.apply_one(marker, age, operation);
                self.write(&mut rows(), key, applied.0);
                applied
            } else {
                let mut rows = rows();
                let seen = if self.mistake == Mistake::AppliesABatchToTheInitialMarkers {
                    &before
                } else {
                    &*rows
                };
                let (marker, age) = self.read(seen, &key);
                let applied = self.apply_one(marker, age, operation);
                self.write(&mut rows, key, applied.0);
                applied
            };
            verdicts.push(Ok(verdict));
            if self.mistake == Mistake::StopsAtALostOperation
                && (change, verdict) == (Change::Keep, Verdict::Lost)
            {
                break;
            }
        }
        verdicts.resize_with(operations.len(), || {
            Err(StoreError::NotApplied("stopped".into()))
        });
        match self.mistake {
            Mistake::AnswersReversed => verdicts.reverse(),
            Mistake::LeavesTheLastUnanswered => {
                verdicts.truncate(operations.len().saturating_sub(1))
            }
            _ => {}
        }
        verdicts
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        (self.mistake == Mistake::RenewsInAnotherStore)
            .then(|| Arc::new(Self::new(Mistake::None)) as Arc<dyn Store>)
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
    a_store_that_is_not_atomic: ReadsThenWrites breaks
        of_a_hundred_simultaneous_claims_one_is_granted, concurrent_operations_are_linearizable;
    answers_in_another_order: AnswersReversed breaks a_batch_is_answered_in_order;
    a_missing_answer: LeavesTheLastUnanswered breaks a_batch_is_answered_in_order;
    a_batch_whose_operations_do_not_see_each_other: AppliesABatchToTheInitialMarkers breaks
        operations_on_one_key_in_a_batch_keep_their_order;
    a_batch_that_ends_at_an_invalid_operation: StopsAtALostOperation breaks an_invalid_operation_does_not_affect_the_others;
    markers_that_never_expire: NeverExpires breaks a_marker_expires_after_its_window;
    markers_that_expire_with_their_lease: ExpiresWithTheLease breaks an_ended_lease_is_in_doubt_in_at_most_once;
    unresolved_markers_that_expire_with_the_window: ExpiresUnresolvedWithTheWindow breaks an_unresolved_at_most_once_marker_outlives_the_window;
    a_write_that_does_not_restart_the_expiry: KeepsTheFirstExpiry breaks every_write_restarts_the_window, a_renewal_restarts_the_lease;
    a_duplicate_that_restarts_the_expiry: RestartsTheExpiryOfKeptMarkers breaks
        an_operation_without_effect_does_not_extend_a_window, an_operation_without_effect_does_not_extend_a_lease;
    a_clock_with_a_resolution_of_seconds: CountsWholeSeconds breaks a_lease_ends_after_its_duration;
    a_fencing_token_that_decreases: DropsTheAttempt breaks clearing_keeps_the_attempt, random_histories_match_the_reference;
    a_rejection_that_drops_its_attempt: DropsTheSecondAttemptThatWasRejected breaks rejecting_clears_in_effectively_once;
    an_attempt_budget_that_an_operator_cannot_reset: ForgetsTheBase breaks
        sending_back_requires_the_expected_marker, forgetting_requires_the_expected_done_marker, random_histories_match_the_reference;
    an_unknown_outcome_that_is_dropped: DropsTheUnknownOutcome breaks
        an_unknown_outcome_is_in_doubt_in_at_most_once, an_unknown_outcome_stays_unknown, random_histories_match_the_reference;
    a_window_that_changes_with_the_settings: KeepsForTheWindowOfTheOperation breaks the_holders_window_decides;
    a_fingerprint_that_is_dropped: DropsTheFingerprint breaks all_fingerprints_are_distinguished;
    a_key_without_case: FoldsCase breaks ids_of_every_kind_stay_distinct, scopes_stay_distinct;
    a_key_that_is_truncated: CutsIds breaks ids_of_every_kind_stay_distinct;
    renewals_in_another_store: RenewsInAnotherStore breaks the_handle_for_renewals_is_the_same_store;
}
