//! The gate on trial: it counts what it would stop, and stops nothing.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use metrics::{Counter, counter};

use crate::marker::{Ask, Attempts, Guarantee, Operation, Token, Verdict};
use crate::metric;
use crate::store::{Persistence, Store, StoreError};

/// A store that is asked, counted, and not obeyed: for bringing the gate into a running system.
///
/// Every claim is granted, whatever the store says of it, and no answer of the store stops a
/// message or undoes its run. The [`ShadowReport`] says what the gate would have done. What the
/// store is told is what a gate would tell it, so that it knows what was handled when the `Shadow`
/// is taken away.
///
/// Where the system has a gate of its own already, the trial needs keys of its own (the store's
/// prefix, or a scope): a marker that the shadow writes before the handler runs would look to that
/// gate like a message that was handled before.
///
/// It grants effectively once and the bare gate alone; [`Guarantee::AtMostOnce`] is refused at
/// start, because there a run of which nobody knows the end goes to a person. A message without an
/// id is rejected as ever: choose an id that each has.
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
    shared: Arc<Shared>,
    store: Arc<S>,
}

/// What a gate would have done with the messages that went through a [`Shadow`]. Clones share it.
#[derive(Clone, Default)]
pub struct ShadowReport(Arc<Figures>);

/// Why a gate would not have let a message through at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShadowOutcome {
    /// It was handled before: its effect happened twice.
    Accept,
    /// Another run of the same id was not over: both ran at the same time.
    Wait,
    /// An earlier run ended without a word, and nobody knows whether it had its effect.
    Doubt,
    /// The id was used before for another body: to the dead letters.
    Conflict,
    /// It was dead-lettered before.
    Reject,
    /// The store did not answer: the consumer would have waited for it.
    Pause,
}

const ALL: [ShadowOutcome; 6] = [
    ShadowOutcome::Accept,
    ShadowOutcome::Wait,
    ShadowOutcome::Doubt,
    ShadowOutcome::Conflict,
    ShadowOutcome::Reject,
    ShadowOutcome::Pause,
];

/// After a question that was not answered, the store is left alone for so long: what waits for it
/// waits in vain.
const PAUSE: Duration = Duration::from_secs(1);

struct Shared {
    report: ShadowReport,
    /// Claims that were granted here and not by the store: it is told nothing more of them.
    ours: Mutex<HashSet<Token>>,
    /// Until when the store is not asked.
    away: Mutex<Option<Instant>>,
    counters: [Counter; ALL.len()],
}

#[derive(Default)]
struct Figures {
    claims: AtomicU64,
    would: [AtomicU64; ALL.len()],
}

impl ShadowOutcome {
    /// The value of the label `would`, for metrics and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Wait => "wait",
            Self::Doubt => "doubt",
            Self::Conflict => "conflict",
            Self::Reject => "reject",
            Self::Pause => "pause",
        }
    }

    fn says(self) -> &'static str {
        match self {
            Self::Accept => "handled before, handled again",
            Self::Wait => "handled while another run of the same id was not over",
            Self::Doubt => "handled though nobody knows whether an earlier run had its effect",
            Self::Conflict => "handled though the id was used for another body",
            Self::Reject => "handled though it was dead-lettered before",
            Self::Pause => "handled though the store did not answer",
        }
    }
}

impl ShadowReport {
    /// Of a shadow that has seen nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many claims were asked for: once for each attempt of each delivery.
    pub fn claims(&self) -> u64 {
        self.0.claims.load(Ordering::Relaxed)
    }

    /// How many of them a gate would have treated so.
    pub fn would(&self, what: ShadowOutcome) -> u64 {
        self.0.would[what as usize].load(Ordering::Relaxed)
    }
}

impl fmt::Display for ShadowReport {
    /// A line for all, and one for each thing that the gate would have done.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stopped: u64 = ALL.iter().map(|what| self.would(*what)).sum();
        writeln!(
            f,
            "{} claims; the gate would have let {} through at once",
            self.claims(),
            self.claims().saturating_sub(stopped)
        )?;
        ALL.iter()
            .try_for_each(|what| writeln!(f, "{:>10} {}", self.would(*what), what.says()))
    }
}

impl fmt::Debug for ShadowReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entry(&"claims", &self.claims())
            .entries(ALL.map(|what| (what.as_str(), self.would(what))))
            .finish()
    }
}

impl<S: Store> Shadow<S> {
    /// Asks this store, and tells this report.
    pub fn new(store: S, report: ShadowReport) -> Self {
        let counters = ALL.map(|what| counter!(metric::SHADOW, "would" => what.as_str()));
        let shared = Shared {
            report,
            ours: Mutex::default(),
            away: Mutex::default(),
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
        let asked: Vec<Operation> = {
            let ours = self.shared.ours();
            operations
                .iter()
                .filter(|operation| !ours.contains(&operation.token))
                .cloned()
                .collect()
        };
        let mut answers = self.shared.ask(&*self.store, &asked).await.into_iter();
        let mut next = asked.iter().map(|operation| operation.token).peekable();
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
            "{}, behind a shadow that answers in its place",
            self.store.described()
        )
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        if guarantee == Guarantee::AtMostOnce {
            let problem = "a shadow stops nothing, and at most once has to: choose Guarantee::EffectivelyOnce while it is on trial";
            return Err(StoreError::Misconfigured(problem.into()));
        }
        match self.store.preflight(guarantee).await {
            Err(error @ (StoreError::NotApplied(_) | StoreError::Unknown(_))) => {
                tracing::warn!(%error, "the store is not there; in a shadow nothing waits for it");
                Ok(())
            }
            found => found,
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

impl Shared {
    /// What the store says, or nothing for an answer that it owes.
    async fn ask<S: Store + ?Sized>(
        &self,
        store: &S,
        operations: &[Operation],
    ) -> Vec<Option<Verdict>> {
        let away = *lock(&self.away);
        if operations.is_empty() || away.is_some_and(|until| Instant::now() < until) {
            return vec![None; operations.len()];
        }
        let mut answers = store.apply(operations).await;
        if answers.len() != operations.len() {
            answers.clear();
        }
        if let Some(Err(error)) = answers.iter().find(|answer| answer.is_err()) {
            tracing::warn!(%error, "the store does not answer; in a shadow nothing waits for it");
            *lock(&self.away) = Some(Instant::now() + PAUSE);
        }
        let mut answers: Vec<_> = answers.into_iter().map(Result::ok).collect();
        answers.resize(operations.len(), None);
        answers
    }

    /// What the consumer hears: that it may go on.
    fn verdict(&self, operation: &Operation, answer: Option<Option<Verdict>>) -> Verdict {
        if let Ask::Claim = operation.ask {
            return self.granted(operation, answer.flatten());
        }
        if answer.is_none() && operation.ask != Ask::Renew {
            self.ours().remove(&operation.token);
        }
        match operation.ask {
            Ask::Complete => Verdict::Done { marker_lost: false },
            _ => Verdict::Kept,
        }
    }

    fn granted(&self, operation: &Operation, answer: Option<Verdict>) -> Verdict {
        self.report.0.claims.fetch_add(1, Ordering::Relaxed);
        let would = match answer {
            Some(granted @ Verdict::Granted(_)) => return granted,
            // The store holds it for this claim: it may be told how it ends.
            Some(Verdict::InDoubt(attempts)) => {
                self.count(ShadowOutcome::Doubt);
                return Verdict::Granted(attempts);
            }
            Some(Verdict::Busy { .. }) => ShadowOutcome::Wait,
            Some(Verdict::Conflict) => ShadowOutcome::Conflict,
            Some(Verdict::Rejected { .. }) => ShadowOutcome::Reject,
            Some(Verdict::Duplicate | Verdict::Kept | Verdict::Done { .. } | Verdict::Lost) => {
                ShadowOutcome::Accept
            }
            None => ShadowOutcome::Pause,
        };
        self.count(would);
        self.ours().insert(operation.token);
        Verdict::Granted(Attempts::new(1))
    }

    fn count(&self, would: ShadowOutcome) {
        self.report.0.would[would as usize].fetch_add(1, Ordering::Relaxed);
        self.counters[would as usize].increment(1);
    }

    fn ours(&self) -> MutexGuard<'_, HashSet<Token>> {
        lock(&self.ours)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
