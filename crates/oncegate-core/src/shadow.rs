//! [`Shadow`]: counts the messages that the store would delay or skip, and runs all of them.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::internal::Lock;
use async_trait::async_trait;
use metrics::{Counter, counter};

use crate::marker::{Attempts, Guarantee, Operation, OperationKind, Token, Verdict};
use crate::metric;
use crate::store::{Persistence, Store, StoreError};

/// A store that lets every message run, and counts the messages that its inner store would delay,
/// skip or dead-letter. Use it to introduce oncegate into a running system.
///
/// It grants every claim, whatever the inner store answers, and no answer of the inner store stops
/// a message or discards the result of its run. The [`ShadowReport`] counts what a consumer without
/// the `Shadow` would have done. The inner store gets the same claims, except for a second after an
/// error, and the results of those that it granted, so it has the ids of handled messages when the
/// `Shadow` is removed.
///
/// If the system already deduplicates messages with keys in the same store, the `Shadow` needs its
/// own keys (a prefix of the store, or a scope). Otherwise the present deduplication finds the key
/// that the `Shadow` writes before the handler runs, and skips the message as a duplicate.
///
/// It supports [`Guarantee::EffectivelyOnce`] and [`Guarantee::Bare`]. A consumer with
/// [`Guarantee::AtMostOnce`] does not start with it: its effects must not happen twice.
/// A message without an id is rejected as without a `Shadow`: choose an id that every message has.
///
/// ```
/// use oncegate_core::{Consumer, MemoryStore, Shadow, ShadowReport};
///
/// let report = ShadowReport::new();
/// let consumer = Consumer::builder().store(Shadow::new(MemoryStore::new(), report.clone()));
/// println!("{report}"); // at any time
/// assert_eq!(report.claims(), 0);
/// ```
pub struct Shadow<S: ?Sized> {
    shared: Arc<ShadowShared>,
    store: Arc<S>,
}

/// Counts what would have happened to the messages of a [`Shadow`] without it. Clones share the
/// counts.
#[derive(Clone, Default)]
pub struct ShadowReport(Arc<ShadowCounts>);

/// Why a message would not have run at once without a [`Shadow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShadowOutcome {
    /// The message was handled before, and is handled again.
    Duplicate,
    /// Another run of the same id was in progress: both run at the same time.
    Busy,
    /// An earlier run was interrupted, and it is unknown whether it had its effect.
    InDoubt,
    /// The id was used before for another body: it would have been dead-lettered.
    Conflict,
    /// The message was dead-lettered before.
    Rejected,
    /// The store returned an error, or was not asked because of an earlier one. If it was
    /// unavailable, the consumer would have waited.
    StoreUnavailable,
}

/// How long the `Shadow` sends no operations to the store after one that failed, so that no message
/// waits for an unavailable store.
const STORE_PAUSE: Duration = Duration::from_secs(1);

struct ShadowShared {
    report: ShadowReport,
    /// The tokens of claims that the store did not grant. Further operations with these tokens are
    /// not sent to it.
    ungranted_tokens: Lock<HashSet<Token>>,
    /// The time until which no operations are sent to the store, because it did not answer the last
    /// ones.
    store_down_until: Lock<Option<Instant>>,
    counters: [Counter; ShadowOutcome::ALL.len()],
}

#[derive(Default)]
struct ShadowCounts {
    claims: AtomicU64,
    outcomes: [AtomicU64; ShadowOutcome::ALL.len()],
}

impl ShadowOutcome {
    /// All outcomes, in the order of the enum.
    const ALL: [Self; 6] = [
        Self::Duplicate,
        Self::Busy,
        Self::InDoubt,
        Self::Conflict,
        Self::Rejected,
        Self::StoreUnavailable,
    ];

    /// The outcome as one word: the value of the metric's label `outcome`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Duplicate => "accept",
            Self::Busy => "wait",
            Self::InDoubt => "doubt",
            Self::Conflict => "conflict",
            Self::Rejected => "reject",
            Self::StoreUnavailable => "pause",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Duplicate => "handled before, handled again",
            Self::Busy => "handled while another run of the same id was in progress",
            Self::InDoubt => "handled though the outcome of an earlier run is unknown",
            Self::Conflict => "handled though the id was used for another body",
            Self::Rejected => "handled though it was dead-lettered before",
            Self::StoreUnavailable => "handled though the store did not answer",
        }
    }
}

impl ShadowReport {
    /// A report without claims.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of claims: one for each attempt of each delivery.
    pub fn claims(&self) -> u64 {
        self.0.claims.load(Ordering::Relaxed)
    }

    /// The number of claims with this outcome.
    pub fn count(&self, outcome: ShadowOutcome) -> u64 {
        self.0.outcomes[outcome as usize].load(Ordering::Relaxed)
    }
}

impl fmt::Display for ShadowReport {
    /// One line with the total, and one line for each outcome.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let not_granted: u64 = ShadowOutcome::ALL
            .map(|outcome| self.count(outcome))
            .iter()
            .sum();
        writeln!(
            f,
            "{} claims; without the shadow, {} would have been granted at once",
            self.claims(),
            self.claims().saturating_sub(not_granted)
        )?;
        ShadowOutcome::ALL.into_iter().try_for_each(|outcome| {
            writeln!(f, "{:>10} {}", self.count(outcome), outcome.description())
        })
    }
}

impl fmt::Debug for ShadowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entry(&"claims", &self.claims())
            .entries(ShadowOutcome::ALL.map(|outcome| (outcome.as_str(), self.count(outcome))))
            .finish()
    }
}

impl<S: Store> Shadow<S> {
    /// A shadow of this store, which counts in this report.
    pub fn new(store: S, report: ShadowReport) -> Self {
        let counters = ShadowOutcome::ALL
            .map(|outcome| counter!(metric::SHADOW, "outcome" => outcome.as_str()));
        let shared = ShadowShared {
            report,
            ungranted_tokens: Lock::default(),
            store_down_until: Lock::default(),
            counters,
        };
        Self {
            shared: Arc::new(shared),
            store: Arc::new(store),
        }
    }
}

impl<S: ?Sized> fmt::Debug for Shadow<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Shadow").field(&self.shared.report).finish()
    }
}

#[async_trait]
impl<S: Store + ?Sized> Store for Shadow<S> {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let sent: Vec<Operation> = {
            let ungranted_tokens = self.shared.ungranted_tokens.lock();
            operations
                .iter()
                .filter(|operation| !ungranted_tokens.contains(&operation.token))
                .cloned()
                .collect()
        };
        let mut answers = self.shared.apply_to(&*self.store, &sent).await.into_iter();
        let mut next = sent.iter().map(|operation| operation.token).peekable();
        operations
            .iter()
            .map(|operation| {
                let answer = next
                    .next_if_eq(&operation.token)
                    .and_then(|_| answers.next());
                Ok(self.shared.verdict(operation, answer))
            })
            .collect()
    }

    fn described(&self) -> String {
        format!(
            "{}, behind a shadow that lets every message run",
            self.store.described()
        )
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        if guarantee == Guarantee::AtMostOnce {
            let problem = "a shadow lets every message run, and in at most once no effect may happen twice: use Guarantee::EffectivelyOnce while the shadow is in place";
            return Err(StoreError::Misconfigured(problem.into()));
        }
        match self.store.preflight(guarantee).await {
            Err(error @ (StoreError::NotApplied(_) | StoreError::Unknown(_))) => {
                tracing::warn!(%error, "store unavailable, the shadow starts without it; check the store and its network");
                Ok(())
            }
            checked => checked,
        }
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.store.persistence().await
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        let store = self.store.for_renewals()?;
        Some(Arc::new(Shadow {
            shared: Arc::clone(&self.shared),
            store,
        }))
    }

    fn parallel_applies(&self) -> usize {
        self.store.parallel_applies()
    }
}

impl ShadowShared {
    /// The verdicts of the store; `None` for each operation that it did not answer.
    async fn apply_to<S: Store + ?Sized>(
        &self,
        store: &S,
        operations: &[Operation],
    ) -> Vec<Option<Verdict>> {
        let store_down_until = *self.store_down_until.lock();
        if operations.is_empty() || store_down_until.is_some_and(|until| Instant::now() < until) {
            return vec![None; operations.len()];
        }
        let mut answers = store.apply(operations).await;
        if answers.len() != operations.len() {
            answers.clear();
        }
        if let Some(Err(error)) = answers.iter().find(|answer| answer.is_err()) {
            tracing::warn!(%error, "store unavailable, the shadow lets messages run without it; check the store and its network");
            *self.store_down_until.lock() = Some(Instant::now() + STORE_PAUSE);
        }
        let mut answers: Vec<_> = answers.into_iter().map(Result::ok).collect();
        answers.resize(operations.len(), None);
        answers
    }

    /// The verdict for the consumer, which lets the message run or accepts its result.
    ///
    /// `answer` is `None` for an operation whose token the store did not grant, and `Some(None)` for
    /// one without an answer, also while the store is not asked.
    fn verdict(&self, operation: &Operation, answer: Option<Option<Verdict>>) -> Verdict {
        if let OperationKind::Claim = operation.kind {
            return self.granted(operation, answer.flatten());
        }
        if answer.is_none() && operation.kind != OperationKind::Renew {
            self.ungranted_tokens.lock().remove(&operation.token);
        }
        match operation.kind {
            OperationKind::Complete => Verdict::Done { marker_lost: false },
            _ => Verdict::Applied,
        }
    }

    /// Counts the answer of the store to a claim, and returns a verdict that grants the claim.
    fn granted(&self, operation: &Operation, answer: Option<Verdict>) -> Verdict {
        self.report.0.claims.fetch_add(1, Ordering::Relaxed);
        let outcome = match answer {
            Some(granted @ Verdict::Granted(_)) => return granted,
            // The store granted this claim in doubt, so it accepts operations with its token.
            Some(Verdict::InDoubt(attempts)) => {
                self.count(ShadowOutcome::InDoubt);
                return Verdict::Granted(attempts);
            }
            Some(Verdict::Busy { .. }) => ShadowOutcome::Busy,
            Some(Verdict::Conflict) => ShadowOutcome::Conflict,
            Some(Verdict::Rejected { .. }) => ShadowOutcome::Rejected,
            Some(Verdict::Duplicate | Verdict::Applied | Verdict::Done { .. } | Verdict::Lost) => {
                ShadowOutcome::Duplicate
            }
            None => ShadowOutcome::StoreUnavailable,
        };
        self.count(outcome);
        self.ungranted_tokens.lock().insert(operation.token);
        Verdict::Granted(Attempts::new(1))
    }

    fn count(&self, outcome: ShadowOutcome) {
        self.report.0.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
        self.counters[outcome as usize].increment(1);
    }
}
