//! Which claims are looked up in the inbox.
//!
//! A transaction finds a record by itself, so a lookup only makes duplicates cheaper: it takes no
//! connection of the pool, and no handler waits for it. Lookups are left out while no duplicates
//! come, except for claims of messages whose last run found a record or no database.

use std::collections::HashSet;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{RecordFound, is_unavailable};
use crate::handler::Failure;
use crate::id::Key;
use crate::internal::Lock;
use crate::marker::{Operation, Verdict};
use crate::store::StoreError;

/// After this many claims in a row without a record, claims are not looked up.
const CLAIMS_WITHOUT_RECORD: usize = 1_000;

/// The maximum size of [`Lookups::runs`].
const MAX_RUNS: usize = 100_000;

#[derive(Debug, Default)]
pub(super) struct Lookups {
    /// How many claims in a row had no record.
    claims_without_record: AtomicUsize,
    /// The messages whose runs have not ended, were dropped, found a record, or found no database.
    /// Their next claims are looked up: they get the verdict of the record, or the consumer finds
    /// out that the database does not answer.
    runs: Lock<HashSet<Key>>,
}

impl Lookups {
    /// Whether these claims are looked up.
    pub(super) fn are_needed(&self, claims: &[Operation]) -> bool {
        if self.claims_without_record.load(Ordering::Relaxed) < CLAIMS_WITHOUT_RECORD {
            return !claims.is_empty();
        }
        let runs = self.runs.lock();
        claims.iter().any(|claim| runs.contains(&claim.key))
    }

    /// The claims were looked up, with these verdicts.
    pub(super) fn looked_up(&self, claims: &[Operation], verdicts: &[Result<Verdict, StoreError>]) {
        let mut any_record = false;
        for (claim, verdict) in claims.iter().zip(verdicts) {
            if !matches!(verdict, Ok(Verdict::Granted(_))) {
                any_record = true;
                self.runs.lock().remove(&claim.key);
            }
        }
        if any_record {
            self.begin_again();
        } else {
            self.claims_without_record
                .fetch_add(claims.len(), Ordering::Relaxed);
        }
    }

    /// Looks up the next claims.
    fn begin_again(&self) {
        self.claims_without_record.store(0, Ordering::Relaxed);
    }

    fn begin_run(&self, key: Key) {
        let mut runs = self.runs.lock();
        if runs.len() >= MAX_RUNS {
            // Entries accumulate only for messages that other processes have handled since.
            runs.clear();
            self.begin_again();
        }
        runs.insert(key);
    }

    /// Executes the run of this claim.
    pub(super) async fn during(
        &self,
        claim: &Operation,
        run: impl Future<Output = Result<(), Failure>>,
    ) -> Result<(), Failure> {
        self.begin_run(claim.key.clone());
        let result = run.await;
        if is_unavailable(&result) || RecordFound::is_cause_of(&result) {
            self.begin_again();
        } else {
            self.runs.lock().remove(&claim.key);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::defaults;
    use crate::id::{MessageId, Scope};
    use crate::inbox::InboxUnavailable;
    use crate::marker::{Attempts, Guarantee, OperationKind, Terms, Token};

    fn claim(id: &str) -> Operation {
        Operation {
            key: Scope::none().key(&MessageId::new(id).expect("an id")),
            token: Token(1),
            attempt: 0,
            kind: OperationKind::Claim,
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: defaults::LEASE,
                window: defaults::DEDUP_WINDOW,
                fingerprint: None,
            },
        }
    }

    /// After many claims without a record.
    fn lookups() -> Lookups {
        let lookups = Lookups::default();
        let granted = || Ok(Verdict::Granted(Attempts::new(1)));
        for _ in 0..CLAIMS_WITHOUT_RECORD {
            assert!(lookups.are_needed(&[claim("a")]));
            lookups.looked_up(&[claim("a")], &[granted()]);
        }
        assert!(!lookups.are_needed(&[claim("a")]));
        lookups
    }

    #[test]
    fn claims_are_looked_up_until_many_had_no_record_and_again_after_one_had_one() {
        let lookups = lookups();
        lookups.looked_up(&[claim("a")], &[Ok(Verdict::Duplicate)]);
        assert!(lookups.are_needed(&[claim("b")]));
        assert!(!lookups.are_needed(&[]));
    }

    #[tokio::test]
    async fn the_claim_after_a_run_without_a_transaction_is_looked_up() {
        let of_a = claim("a");
        for failure in [
            Failure::Retry(RecordFound.into()),
            InboxUnavailable::failure("it is down"),
        ] {
            let lookups = lookups();
            let result = lookups.during(&of_a, async { Err(failure) }).await;
            assert!(result.is_err());
            assert!(lookups.are_needed(&[claim("b")]), "for all claims");
            // Many others may be claimed first.
            lookups
                .claims_without_record
                .store(CLAIMS_WITHOUT_RECORD, Ordering::Relaxed);
            assert!(!lookups.are_needed(&[claim("b")]));
            assert!(lookups.are_needed(&[claim("b"), claim("a")]));
            lookups.looked_up(&[claim("a")], &[Ok(Verdict::Duplicate)]);
            assert!(lookups.runs.lock().is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_claim_after_a_run_that_was_dropped_is_looked_up() {
        let lookups = lookups();
        let of_a = claim("a");
        let run = lookups.during(&of_a, std::future::pending());
        let dropped = tokio::time::timeout(defaults::HANDLER_TIMEOUT, run).await;
        assert!(dropped.is_err());
        assert!(lookups.are_needed(&[claim("a")]));
        for result in [Ok(()), Err(Failure::Reject("no".into()))] {
            let _ = lookups.during(&of_a, async { result }).await;
            assert!(!lookups.are_needed(&[claim("a")]), "it ended");
        }
    }
}
