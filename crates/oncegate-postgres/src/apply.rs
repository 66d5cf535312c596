//! Applies operations optimistically. The first statement assumes the usual state of each key and
//! writes by compare-and-set. For each key in another state it returns the row, from which
//! `marker::apply` decides the write of the next statement.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use oncegate_core::internal::{MarkerColumns, StoreFailure, milliseconds};
use oncegate_core::marker::{
    Age, Attempts, Change, Effect, Guarantee, Hold, Marker, Operation, OperationKind, Verdict,
    apply,
};
use sqlx::postgres::PgConnection;

use crate::statement::{MarkerStep, MarkerStepResult, ResultStep, SelectedRow, Steps};

/// The answers of a batch that are known so far.
pub(crate) struct Progress {
    answers: Vec<Option<Result<Verdict, StoreFailure>>>,
    /// Operations in a statement that was sent and has no reply yet.
    sent: Vec<usize>,
    /// The result of an id that was done before its completion.
    pub(crate) earlier: Option<Vec<u8>>,
}

/// The step of an operation for the next statement.
struct PlannedStep {
    /// The index of the operation in its batch.
    index: usize,
    step: MarkerStep,
    /// The answer if the step is applied; `None` for [`MarkerStep::Read`].
    verdict: Option<Verdict>,
    /// Whether it changes a done marker, whose result has to be deleted.
    leaves_done: bool,
}

impl Progress {
    pub(crate) fn new(operations: usize) -> Self {
        Self {
            answers: (0..operations).map(|_| None).collect(),
            sent: Vec::new(),
            earlier: None,
        }
    }

    /// The answers, or `failure` for operations that have none. For operations that were not in a
    /// statement without a reply, the failure becomes one that applied nothing.
    pub(crate) fn into_answers(
        self,
        failure: Option<StoreFailure>,
    ) -> Vec<Result<Verdict, StoreFailure>> {
        let missing = || StoreFailure::unknown("PostgreSQL returned no result for an operation");
        let sent: HashSet<usize> = self.sent.into_iter().collect();
        let answers = self.answers.into_iter().enumerate();
        answers
            .map(|(index, answer)| {
                answer.unwrap_or_else(|| {
                    Err(match failure.clone() {
                        None => missing(),
                        Some(failure) if sent.contains(&index) => failure,
                        Some(failure) => of_unsent_operation(failure),
                    })
                })
            })
            .collect()
    }
}

/// The failure of an operation that was not sent: an unknown outcome becomes "not applied".
fn of_unsent_operation(failure: StoreFailure) -> StoreFailure {
    match failure {
        StoreFailure::Unknown(problem) => StoreFailure::NotApplied(problem),
        failure => failure,
    }
}

/// Applies the operations; those on the same key in their order, each in a round of its own.
/// Repeats until each is answered; the caller limits the time. With a `result`, the only operation is
/// a completion that stores it.
///
/// # Errors
/// The connection or a statement failed. `progress` has the answers so far.
pub(crate) async fn run(
    connection: &mut PgConnection,
    operations: &[Operation],
    result: Option<&[u8]>,
    progress: &mut Progress,
) -> Result<(), sqlx::Error> {
    let mut remaining: Vec<usize> = (0..operations.len()).collect();
    while !remaining.is_empty() {
        let mut keys = HashSet::with_capacity(remaining.len());
        let (round, later): (Vec<usize>, Vec<usize>) = remaining
            .into_iter()
            .partition(|index| keys.insert(operations[*index].key.as_bytes()));
        run_round(connection, operations, &round, result, progress).await?;
        remaining = later;
    }
    Ok(())
}

/// Applies operations of which no two have the same key.
async fn run_round(
    connection: &mut PgConnection,
    operations: &[Operation],
    round: &[usize],
    result: Option<&[u8]>,
    progress: &mut Progress,
) -> Result<(), sqlx::Error> {
    let mut steps: Vec<PlannedStep> = round
        .iter()
        .map(|index| first_step(*index, &operations[*index]))
        .collect();
    while !steps.is_empty() {
        let mut parameters = Steps::default();
        let mut by_key = HashMap::with_capacity(steps.len());
        progress.sent.clear();
        let results = match result {
            Some(result) => ResultStep::Store(result),
            None if steps.iter().any(|planned| planned.leaves_done) => ResultStep::Forget,
            None => ResultStep::Keep,
        };
        // Concurrent batches must lock the same rows in the same order, or they may deadlock.
        steps.sort_unstable_by(|one, other| {
            let key = |it: &PlannedStep| operations[it.index].key.as_bytes();
            key(one).cmp(key(other))
        });
        for planned in steps.drain(..) {
            let key = operations[planned.index].key.as_str();
            parameters.push(key, planned.step);
            progress.sent.push(planned.index);
            by_key.insert(key, (planned.index, planned.verdict));
        }
        for (key, answer) in parameters.execute(connection, results).await? {
            let Some((index, verdict)) = by_key.remove(key.as_str()) else {
                continue;
            };
            match (answer, verdict) {
                (MarkerStepResult::Applied, Some(verdict)) => {
                    progress.answers[index] = Some(Ok(verdict));
                }
                // Does not occur: only a read has no verdict, and it is never applied.
                (MarkerStepResult::Applied, None) => {}
                (MarkerStepResult::NotApplied(found, stored), _) => {
                    let stored = stored.filter(|_| found.is_done_for(&operations[index]));
                    match next_step(index, &operations[index], found) {
                        Ok(step) => steps.push(step),
                        Err(answer) => {
                            progress.answers[index] = Some(answer);
                            progress.earlier = stored;
                        }
                    }
                }
            }
        }
    }
    progress.sent.clear();
    Ok(())
}

/// The step for the usual state of the key: no row for a claim; for a completion, the claim of the
/// same token in progress. Other operations start with a read.
fn first_step(index: usize, operation: &Operation) -> PlannedStep {
    let read = PlannedStep {
        index,
        step: MarkerStep::Read,
        verdict: None,
        leaves_done: false,
    };
    let Operation {
        kind,
        token,
        attempt,
        terms,
        ..
    } = operation;
    let expected = match kind {
        OperationKind::Claim => Marker::Absent,
        OperationKind::Complete if terms.guarantee != Guarantee::Bare => Marker::InProgress(Hold {
            token: *token,
            attempts: Attempts::new(*attempt),
            earlier: Effect::Unknown,
            lease: terms.lease,
            horizon: terms.horizon(),
            guarantee: terms.guarantee,
            fingerprint: terms.fingerprint,
        }),
        _ => return read,
    };
    let (Change::Write(marker, time_to_live), verdict) =
        apply(expected, Age::Of(Duration::ZERO), operation)
    else {
        return read;
    };
    let (Some(row), time_to_live) = (MarkerColumns::of(marker), time_to_live_ms(time_to_live))
    else {
        return read;
    };
    let step = match kind {
        OperationKind::Claim => MarkerStep::Insert(row, time_to_live),
        _ => MarkerStep::ReplaceOwn(token.0, *attempt, row, time_to_live),
    };
    PlannedStep {
        index,
        step,
        verdict: Some(verdict),
        leaves_done: false,
    }
}

/// The next step of an operation whose key has this row; `Err` with the answer if nothing has to be
/// written.
fn next_step(
    index: usize,
    operation: &Operation,
    found: SelectedRow,
) -> Result<PlannedStep, Result<Verdict, StoreFailure>> {
    let (marker, age, version) = match found {
        SelectedRow::Missing => (Marker::Absent, Age::Of(Duration::ZERO), None),
        SelectedRow::Unreadable => return Err(Err(unreadable(operation.key.as_str()))),
        // An expired row counts as absent, and stays in the table until it is deleted or
        // overwritten.
        SelectedRow::Row { version, left, .. } if left <= 0 => {
            (Marker::Absent, Age::Of(Duration::ZERO), Some(version))
        }
        SelectedRow::Row { version, left, row } => match row.marker() {
            Ok(marker) => (marker, row.age(left), Some(version)),
            Err(_) => return Err(Err(unreadable(operation.key.as_str()))),
        },
    };
    let (change, verdict) = apply(marker, age, operation);
    let step = match (change, version) {
        (Change::Keep, _) | (Change::Delete, None) => return Err(Ok(verdict)),
        (Change::Delete, Some(version)) => MarkerStep::Delete(version),
        (Change::Write(written, time_to_live), version) => {
            let Some(row) = MarkerColumns::of(written) else {
                return Err(Ok(verdict)); // does not occur: an absent marker is deleted
            };
            let time_to_live = time_to_live_ms(time_to_live);
            match version {
                Some(version) => MarkerStep::Replace(version, row, time_to_live),
                None => MarkerStep::Insert(row, time_to_live),
            }
        }
    };
    Ok(PlannedStep {
        index,
        step,
        verdict: Some(verdict),
        leaves_done: matches!(marker, Marker::Done(_)),
    })
}

/// A time to live in milliseconds, at least 1.
pub(crate) fn time_to_live_ms(time_to_live: Duration) -> i64 {
    milliseconds(time_to_live).max(1)
}

/// The failure of an operation whose row this release cannot read.
pub(crate) fn unreadable(key: &str) -> StoreFailure {
    StoreFailure::unreadable_marker(format!(
        "the row of {key} in oncegate_markers holds no marker that this release can read: delete the row, or upgrade oncegate here; \
         the row is unchanged"
    ))
}
