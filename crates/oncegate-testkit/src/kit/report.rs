//! The results of a run of the kit.

use std::collections::BTreeSet;

use oncegate_core::{DeadLetter, IdSource, MemoryBroker, Reconciled};

/// The results of all messages of a [`Kit`](super::Kit), after each is settled.
#[derive(Debug)]
pub struct Report {
    ids: BTreeSet<String>,
    runs: Vec<Run>,
    reconciles: Vec<Reconcile>,
    dead_letters: Vec<DeadLetter>,
    in_doubt: Vec<DeadLetter>,
    /// The ids of the dead letters and in-doubt messages.
    rejected_ids: BTreeSet<String>,
}

/// One run of the handler.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// The id.
    pub id: String,
    /// The attempt number in the handler's context.
    pub attempt: u32,
    /// The result.
    pub result: HandlerResult,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandlerResult {
    /// It returned `Ok`.
    Succeeded,
    /// It returned a failure.
    Failed,
    /// It did not return: a crash, a panic or a timeout ended it.
    Interrupted,
}

/// One call of the handler's `reconcile`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconcile {
    /// The id.
    pub id: String,
    /// The attempt number in the context of `reconcile`.
    pub attempt: u32,
    /// The result, or the text of the failure; `None` if a crash, a panic or a timeout ended it.
    pub result: Option<Result<Reconciled, String>>,
    /// The number of runs of all ids that had started before it: its position between the elements
    /// of [`Report::runs`].
    pub after: usize,
}

impl Report {
    pub(super) fn new(
        ids: BTreeSet<String>,
        runs: Vec<Run>,
        reconciles: Vec<Reconcile>,
        broker: &MemoryBroker,
        id: &IdSource,
    ) -> Self {
        let (dead_letters, in_doubt) = (broker.dead_letters(), broker.in_doubt());
        let rejected_ids = dead_letters
            .iter()
            .chain(&in_doubt)
            .filter_map(|rejected| id.read(&rejected.message).ok())
            .map(|id| id.to_string())
            .collect();
        Self {
            ids,
            runs,
            reconciles,
            dead_letters,
            in_doubt,
            rejected_ids,
        }
    }

    /// Every run of the handler, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Every call of `reconcile`, in order.
    pub fn reconciles(&self) -> &[Reconcile] {
        &self.reconciles
    }

    /// The number of runs of this id.
    pub fn starts(&self, id: &str) -> usize {
        self.runs.iter().filter(|run| run.id == id).count()
    }

    /// The dead letters.
    pub fn dead_letters(&self) -> &[DeadLetter] {
        &self.dead_letters
    }

    /// The in-doubt messages.
    pub fn in_doubt(&self) -> &[DeadLetter] {
        &self.in_doubt
    }

    /// Asserts that no id has more than one effect. `effects` returns the number of effects of an
    /// id.
    ///
    /// # Panics
    /// If an id has more: the handler is not idempotent, and the guarantee allows a second run.
    pub fn assert_none_twice(&self, effects: impl Fn(&str) -> usize) -> &Self {
        for id in &self.ids {
            let count = effects(id);
            assert!(
                count <= 1,
                "`{id}` happened {count} times. Its runs: {}",
                self.events_of(id)
            );
        }
        self
    }

    /// Asserts that each id has an effect, or is among the dead letters or in-doubt messages.
    /// `effects` returns the number of effects of an id.
    ///
    /// # Panics
    /// If an id has neither: it was accepted, and its effect never happened.
    pub fn assert_none_lost(&self, effects: impl Fn(&str) -> usize) -> &Self {
        for id in &self.ids {
            let is_accounted_for = effects(id) > 0 || self.rejected_ids.contains(id);
            assert!(
                is_accounted_for,
                "`{id}` was accepted, and its effect never happened. Its runs: {}",
                self.events_of(id)
            );
        }
        self
    }

    /// Asserts that there are no dead letters and no in-doubt messages.
    ///
    /// # Panics
    /// If there is one.
    pub fn assert_none_rejected(&self) -> &Self {
        if let Some(rejected) = self.dead_letters.iter().chain(&self.in_doubt).next() {
            let failure_history = rejected.failure_history.clone().unwrap_or_default();
            let (id, error) = (
                failure_history.id.unwrap_or_default(),
                failure_history.last_error.unwrap_or_default(),
            );
            panic!(
                "`{id}` was rejected, {}: {error}. Its runs: {}",
                rejected.reason.as_str(),
                self.events_of(&id)
            );
        }
        self
    }

    /// The runs and reconciles of an id with their results, in order.
    fn events_of(&self, id: &str) -> String {
        let runs = self
            .runs
            .iter()
            .enumerate()
            .filter(|(_, run)| run.id == id)
            .map(|(index, run)| {
                let result = match run.result {
                    HandlerResult::Succeeded => "returned Ok",
                    HandlerResult::Failed => "failed",
                    HandlerResult::Interrupted => "was interrupted",
                };
                (index + 1, format!("attempt {} {result}", run.attempt))
            });
        let reconciles = self.reconciles.iter().filter(|it| it.id == id).map(|it| {
            let result = match &it.result {
                Some(Ok(Reconciled::Happened)) => "returned Happened",
                Some(Ok(Reconciled::DidNotHappen)) => "returned DidNotHappen",
                Some(Ok(Reconciled::Unknown)) => "returned Unknown",
                Some(Err(failure)) => &format!("failed ({failure})"),
                None => "was interrupted",
            };
            (
                it.after,
                format!("reconcile (attempt {}) {result}", it.attempt),
            )
        });
        let mut steps: Vec<(usize, String)> = runs.chain(reconciles).collect();
        steps.sort_by_key(|(position, _)| *position); // stable: a run precedes its reconcile
        let repeated = steps.chunk_by(|(_, one), (_, next)| one == next);
        let steps: Vec<String> = repeated
            .map(|same| {
                if same.len() == 1 {
                    same[0].1.clone()
                } else {
                    format!("{}, {} times", same[0].1, same.len())
                }
            })
            .collect();
        if steps.is_empty() {
            "none".to_owned()
        } else {
            steps.join(", then ")
        }
    }
}
