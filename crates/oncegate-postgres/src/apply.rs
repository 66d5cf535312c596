//! Applies operations optimistically: each assumes the usual state of its key and is a compare-and-set.
//! If the key was in another state, the operation is decided by that state, and tried again.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use oncegate_core::internal::{MarkerColumns, StoreFailure, milliseconds};
use oncegate_core::marker::{
    Age, Ask, Attempts, Change, Effect, Guarantee, Hold, Marker, Operation, Verdict, apply,
};
use sqlx::postgres::PgConnection;

use crate::statement::{MarkerStep, MarkerStepResult, SelectedRow, Steps};

/// The answers of a batch as far as they are known, and which operations are in a statement that has no
/// reply yet.
pub(crate) struct Progress {
    answers: Vec<Option<Result<Verdict, StoreFailure>>>,
    /// Operations in a statement that was sent and has no reply yet.
    sent: Vec<usize>,
}

/// An operation, and what to do if its step is applied.
struct Attempted {
    index: usize,
    step: MarkerStep,
    verdict: Option<Verdict>,
}

impl Progress {
    pub(crate) fn new(operations: usize) -> Self {
        Self {
            answers: (0..operations).map(|_| None).collect(),
            sent: Vec::new(),
        }
    }

    /// The answers; `failure` for operations that have none. It is a failure that applied nothing,
    /// unless they were in a statement that was sent.
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
                        Some(failure) => before_sending(failure),
                    })
                })
            })
            .collect()
    }
}

/// The same failure of an operation that was not sent.
fn before_sending(failure: StoreFailure) -> StoreFailure {
    match failure {
        StoreFailure::Unknown(problem) => StoreFailure::NotApplied(problem),
        failure => failure,
    }
}

/// Applies the operations, those on one key in their order. Repeats until each is answered; the
/// caller bounds the time.
///
/// # Errors
/// PostgreSQL's. `progress` has the answers up to then.
pub(crate) async fn run(
    connection: &mut PgConnection,
    operations: &[Operation],
    progress: &mut Progress,
) -> Result<(), sqlx::Error> {
    let mut remaining: Vec<usize> = (0..operations.len()).collect();
    while !remaining.is_empty() {
        let mut keys = HashSet::with_capacity(remaining.len());
        let (round, later): (Vec<usize>, Vec<usize>) = remaining
            .into_iter()
            .partition(|index| keys.insert(operations[*index].key.as_bytes()));
        run_round(connection, operations, &round, progress).await?;
        remaining = later;
    }
    Ok(())
}

/// Applies operations on different keys.
async fn run_round(
    connection: &mut PgConnection,
    operations: &[Operation],
    round: &[usize],
    progress: &mut Progress,
) -> Result<(), sqlx::Error> {
    let mut steps: Vec<Attempted> = round
        .iter()
        .map(|index| guess(*index, &operations[*index]))
        .collect();
    while !steps.is_empty() {
        let mut parameters = Steps::default();
        let mut by_key = HashMap::with_capacity(steps.len());
        progress.sent.clear();
        // Two batches that write the same rows must lock them in the same order.
        steps.sort_unstable_by(|one, other| {
            let key = |it: &Attempted| operations[it.index].key.as_bytes();
            key(one).cmp(key(other))
        });
        for attempted in steps.drain(..) {
            let key = operations[attempted.index].key.as_str();
            parameters.push(key, attempted.step);
            progress.sent.push(attempted.index);
            by_key.insert(key, (attempted.index, attempted.verdict));
        }
        for (key, result) in parameters.execute(connection).await? {
            let Some((index, verdict)) = by_key.remove(key.as_str()) else {
                continue;
            };
            match (result, verdict) {
                (MarkerStepResult::Applied, Some(verdict)) => {
                    progress.answers[index] = Some(Ok(verdict));
                }
                // A read is never applied.
                (MarkerStepResult::Applied, None) => {}
                (MarkerStepResult::Found(found), _) => {
                    match decide(index, &operations[index], found) {
                        Ok(step) => steps.push(step),
                        Err(answer) => progress.answers[index] = Some(answer),
                    }
                }
            }
        }
    }
    progress.sent.clear();
    Ok(())
}

/// The step for the usual state of the key: none for a claim, its own claim for a completion.
fn guess(index: usize, operation: &Operation) -> Attempted {
    let read = Attempted {
        index,
        step: MarkerStep::Read,
        verdict: None,
    };
    let Operation {
        ask,
        token,
        attempt,
        terms,
        ..
    } = operation;
    let expected = match ask {
        Ask::Claim => Marker::Absent,
        Ask::Complete if terms.guarantee != Guarantee::Bare => Marker::InProgress(Hold {
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
    let (Some(row), time_to_live) = (MarkerColumns::of(marker), expires_after(time_to_live)) else {
        return read;
    };
    let step = match ask {
        Ask::Claim => MarkerStep::Insert(row, time_to_live),
        _ => MarkerStep::ReplaceOwn(token.0, *attempt, row, time_to_live),
    };
    Attempted {
        index,
        step,
        verdict: Some(verdict),
    }
}

/// The next step for an operation on this row, or its answer.
fn decide(
    index: usize,
    operation: &Operation,
    found: SelectedRow,
) -> Result<Attempted, Result<Verdict, StoreFailure>> {
    let (marker, age, version) = match found {
        SelectedRow::Missing => (Marker::Absent, Age::Of(Duration::ZERO), None),
        SelectedRow::Unreadable => return Err(Err(unreadable(operation.key.as_str()))),
        // It stays until it is swept or written again.
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
        (Change::Write(marker, time_to_live), version) => {
            let Some(row) = MarkerColumns::of(marker) else {
                return Err(Ok(verdict)); // does not occur: an absent marker is deleted
            };
            let time_to_live = expires_after(time_to_live);
            match version {
                Some(version) => MarkerStep::Replace(version, row, time_to_live),
                None => MarkerStep::Insert(row, time_to_live),
            }
        }
    };
    Ok(Attempted {
        index,
        step,
        verdict: Some(verdict),
    })
}

pub(crate) fn expires_after(time_to_live: Duration) -> i64 {
    milliseconds(time_to_live).max(1)
}

pub(crate) fn unreadable(key: &str) -> StoreFailure {
    StoreFailure::unreadable_marker(format!(
        "the row of {key} in oncegate_markers holds no marker that this release can read: delete the row, or upgrade oncegate here; \
         the row is unchanged"
    ))
}
