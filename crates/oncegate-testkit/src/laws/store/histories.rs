//! Random histories, compared with [`marker::apply`](oncegate_core::marker::apply).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{
    self, Age, Change, Effect, Finding, Fingerprint, Guarantee, Marker, Operation, OperationKind,
    Terms, Token, Verdict,
};
use oncegate_core::{Key, Store};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, prop_oneof};
use proptest::sample::select;
use proptest::strategy::ValueTree;
use tokio::task::JoinSet;

use crate::laws::fixtures::{LONG_LEASE, key};
use crate::laws::possible_markers::{PossibleMarkers, UnexpectedVerdict, timed_answers};
use crate::laws::random::{repeat_hint, runner, seeds};
use crate::laws::rows::probe_operations;

/// The default number of histories in a run.
const HISTORIES: u64 = 64;
/// The number of concurrent histories.
const CONCURRENT_HISTORIES: usize = 8;
/// The maximum length of a history, in steps.
const MAX_STEPS: usize = 16;
/// How long a failing history is shortened before it is printed.
const SHORTENING_TIME: Duration = Duration::from_secs(10);

/// In random histories of batches and waits, the verdicts and the markers after each batch equal
/// those of `marker::apply`, by the store's own clock.
///
/// Checking a marker changes it, so a key cannot be used after its check. Therefore a history of n
/// batches runs on n keys: key i is in the first i batches and is checked after them.
pub async fn random_histories_match_the_reference(store: Arc<dyn Store>) {
    let mut seeds = seeds(HISTORIES);
    let (mut last_seed, mut extra) = (0u64, 0);
    let is_full_run = seeds.size_hint().0 >= HISTORIES as usize;
    let mut running = JoinSet::new();
    let mut seen = HashSet::new();
    loop {
        while running.len() < CONCURRENT_HISTORIES {
            let seed = match seeds.next() {
                Some(seed) => seed,
                // A kind of verdict may be missing by chance: use further seeds.
                None if is_full_run && extra < 10 * HISTORIES && !has_all_verdicts(&seen) => {
                    extra += 1;
                    last_seed.wrapping_add(1)
                }
                None => break,
            };
            last_seed = seed;
            let (store, steps) = (store.clone(), history(seed).current());
            running.spawn(
                async move { (seed, run_history(&*store, &seed.to_string(), &steps).await) },
            );
        }
        let Some(finished) = running.join_next().await else {
            break;
        };
        match finished.expect("a history does not panic") {
            (_, Ok(verdicts)) => seen.extend(verdicts),
            (seed, Err(why)) => {
                running.shutdown().await;
                let (steps, why) = shorten(&*store, seed, why).await;
                panic!("{why}\n{}\nafter {steps:#?}", repeat_hint(seed));
            }
        }
    }
    // Histories that do not produce every kind of verdict test too little.
    assert!(
        !is_full_run || has_all_verdicts(&seen),
        "the histories produced only the verdicts {seen:?}"
    );
}

/// Whether every kind of verdict occurred.
fn has_all_verdicts(seen: &HashSet<&'static str>) -> bool {
    let all = [
        "Granted",
        "InDoubt",
        "Busy",
        "Duplicate",
        "Rejected",
        "Conflict",
        "Applied",
        "Done",
        "Lost",
    ];
    all.iter().all(|verdict| seen.contains(verdict))
}

/// The shortest history that still fails, as found by proptest. Time is part of a history, so a
/// failure may not be reproducible.
async fn shorten(store: &dyn Store, seed: u64, mut why: String) -> (Vec<Step>, String) {
    let mut tree = history(seed);
    let mut steps = tree.current();
    let started = Instant::now();
    for attempt in 0.. {
        let shorter = tree.current();
        let can_continue = match run_history(store, &format!("{seed}-{attempt}"), &shorter).await {
            Err(broken) => {
                (steps, why) = (shorter, broken);
                tree.simplify()
            }
            Ok(_) => tree.complicate(),
        };
        if !can_continue || started.elapsed() > SHORTENING_TIME {
            break;
        }
    }
    (steps, why)
}

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// Sends these operations in one batch.
    Apply(Vec<PlannedOperation>),
    /// Waits.
    Wait(Duration),
}

/// An operation that takes token, attempt and marker from the expected marker, so that it often
/// changes something.
#[derive(Clone, Debug)]
struct PlannedOperation {
    kind: KindChoice,
    by: TokenChoice,
    attempt: AttemptChoice,
    terms: Terms,
}

/// The kind of a [`PlannedOperation`].
#[derive(Clone, Debug)]
enum KindChoice {
    This(OperationKind),
    /// Forgets the expected marker.
    ForgetCurrent,
    /// Redrives the expected marker.
    RedriveCurrent(Effect),
}

/// The token of a [`PlannedOperation`].
#[derive(Clone, Debug)]
enum TokenChoice {
    Holder,
    Any(Token),
}

/// The attempt of a [`PlannedOperation`].
#[derive(Clone, Debug)]
enum AttemptChoice {
    /// The attempt in the expected marker.
    OfHolder,
    /// The attempt after that of the expected marker.
    Next,
    /// `u32::MAX`.
    Last,
}

/// The history with this seed, as a tree whose values proptest can shorten.
fn history(seed: u64) -> impl ValueTree<Value = Vec<Step>> {
    // These strategies never reject a value.
    vec(step(), 1..=MAX_STEPS)
        .new_tree(&mut runner(seed))
        .expect("a history")
}

fn step() -> impl Strategy<Value = Step> {
    let milliseconds = prop_oneof![10 => select(vec![5, 30, 60]), 3 => Just(300), 1 => Just(1100)];
    prop_oneof![
        5 => vec(random_operation(), 1..=3).prop_map(Step::Apply),
        1 => milliseconds.prop_map(|ms| Step::Wait(Duration::from_millis(ms))),
    ]
}

fn random_operation() -> impl Strategy<Value = PlannedOperation> {
    let one_of = |all: &[OperationKind]| select(all.to_vec()).prop_map(KindChoice::This);
    let kind = prop_oneof![
        5 => Just(KindChoice::This(OperationKind::Claim)),
        1 => Just(KindChoice::This(OperationKind::Renew)),
        1 => Just(KindChoice::This(OperationKind::Complete)),
        1 => one_of(&[OperationKind::Clear(Effect::Nothing), OperationKind::Clear(Effect::Unknown)]),
        1 => Just(KindChoice::This(OperationKind::Withdraw)),
        2 => one_of(&[OperationKind::Reject(Effect::Nothing), OperationKind::Reject(Effect::Unknown)]),
        2 => Just(KindChoice::This(OperationKind::Doubt)),
        1 => one_of(&[OperationKind::Resolve(Finding::Happened), OperationKind::Resolve(Finding::DidNotHappen)]),
        1 => prop_oneof![2 => Just(KindChoice::ForgetCurrent), 1 => one_of(&[OperationKind::Forget { seen: Marker::Done(None) }])],
        2 => select(vec![Effect::Nothing, Effect::Unknown]).prop_map(KindChoice::RedriveCurrent),
        1 => one_of(&[OperationKind::Redrive { seen: Marker::Absent, effect: Effect::Unknown }]),
    ];
    let by = prop_oneof![2 => Just(TokenChoice::Holder), 1 => (0..4u128).prop_map(|token| TokenChoice::Any(Token(token)))];
    let attempt = prop_oneof![13 => Just(AttemptChoice::OfHolder), 2 => Just(AttemptChoice::Next), 1 => Just(AttemptChoice::Last)];
    (kind, by, attempt, terms()).prop_map(|(kind, by, attempt, terms)| PlannedOperation {
        kind,
        by,
        attempt,
        terms,
    })
}

fn terms() -> impl Strategy<Value = Terms> {
    const SECOND: Duration = Duration::from_secs(1);
    let guarantee = prop_oneof![3 => Just(Guarantee::AtMostOnce), 3 => Just(Guarantee::EffectivelyOnce), 1 => Just(Guarantee::Bare)];
    let lease = select(vec![Duration::from_millis(40), LONG_LEASE]);
    let window = select(vec![SECOND / 4, SECOND, 600 * SECOND]);
    let bodies = vec![
        None,
        None,
        Some(Fingerprint::new(7)),
        Some(Fingerprint::new(Fingerprint::LIMIT - 1)),
    ];
    (guarantee, lease, window, select(bodies)).prop_map(
        |(guarantee, lease, window, fingerprint)| {
            // Redis expires the markers of `Guarantee::Bare` in whole seconds: `SET … EX`.
            let window = if guarantee == Guarantee::Bare {
                window.max(SECOND)
            } else {
                window
            };
            Terms {
                guarantee,
                lease,
                window,
                fingerprint,
            }
        },
    )
}

impl PlannedOperation {
    /// The operation for a key that probably has this marker.
    fn on(&self, marker: Marker, key: &Key) -> Operation {
        let kind = match &self.kind {
            KindChoice::This(kind) => *kind,
            KindChoice::ForgetCurrent => OperationKind::Forget { seen: marker },
            KindChoice::RedriveCurrent(effect) => OperationKind::Redrive {
                seen: marker,
                effect: *effect,
            },
        };
        let (holder, holder_attempt) = match marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => {
                (hold.token, hold.attempts.number)
            }
            Marker::Cleared { attempts, .. } => (Token(0), attempts.number),
            Marker::Rejected { attempt, .. } => (Token(0), attempt),
            Marker::Absent | Marker::Done(_) => (Token(0), 1),
        };
        let token = match self.by {
            TokenChoice::Holder => holder,
            TokenChoice::Any(token) => token,
        };
        let attempt = match self.attempt {
            AttemptChoice::OfHolder => holder_attempt,
            AttemptChoice::Next => holder_attempt.saturating_add(1),
            AttemptChoice::Last => u32::MAX,
        };
        Operation {
            key: key.clone(),
            kind,
            token,
            attempt,
            terms: self.terms,
        }
    }
}

/// Runs a history and returns the verdicts that occurred.
///
/// # Errors
/// A text about the first reply that `marker::apply` cannot give.
async fn run_history(
    store: &dyn Store,
    name: &str,
    steps: &[Step],
) -> Result<HashSet<&'static str>, String> {
    let batch_count = steps
        .iter()
        .filter(|step| matches!(step, Step::Apply(_)))
        .count();
    let start = Instant::now();
    let mut keys: Vec<(Key, PossibleMarkers)> = (0..batch_count)
        .map(|it| (key(format!("{name}.{it}")), PossibleMarkers::new(start)))
        .collect();
    let mut seen = HashSet::new();
    // The markers of the keys before this index were checked, so no further batch contains them.
    let mut next_to_check = 0;
    for (number, step) in steps.iter().enumerate() {
        let operations = match step {
            Step::Wait(duration) => {
                tokio::time::sleep(*duration).await;
                continue;
            }
            Step::Apply(operations) => operations,
        };
        let mut batch = Vec::with_capacity(operations.len() * keys.len());
        let mut marker = keys.last().expect("a key for each batch").1.marker();
        for operation in operations {
            let unchecked = next_to_check..batch_count;
            batch.extend(unchecked.map(|it| (it, operation.on(marker, &keys[it].0))));
            // The expected marker before the next operation.
            marker =
                match marker::apply(marker, Age::Of(Duration::ZERO), &batch[batch.len() - 1].1).0 {
                    Change::Keep => marker,
                    Change::Write(marker, _) => marker,
                    Change::Delete => Marker::Absent,
                };
        }
        seen.extend(
            send_batch(store, &mut keys, batch)
                .await
                .map_err(|why| format!("step {number}: {why}"))?,
        );
        let (key, markers) = &keys[next_to_check];
        let probes = probe_operations(key, &markers.marker())
            .into_iter()
            .map(|(operation, _)| (next_to_check, operation))
            .collect();
        send_batch(store, &mut keys, probes)
            .await
            .map_err(|why| format!("reading the marker after step {number}: {why}"))?;
        next_to_check += 1;
    }
    Ok(seen)
}

/// Sends one batch, each operation on one key, and updates the possible markers with the replies.
/// Returns the verdicts.
///
/// # Errors
/// A text about the first reply that `marker::apply` cannot give.
async fn send_batch(
    store: &dyn Store,
    keys: &mut [(Key, PossibleMarkers)],
    batch: Vec<(usize, Operation)>,
) -> Result<Vec<&'static str>, String> {
    let operations: Vec<Operation> = batch
        .iter()
        .map(|(_, operation)| operation.clone())
        .collect();
    let (answers, during) = timed_answers(store, &operations).await;
    let mut seen = Vec::with_capacity(answers.len());
    for ((key, operation), answer) in batch.into_iter().zip(answers) {
        let verdict = answer.map_err(|error| format!("{error}, to {operation:?}"))?;
        let mismatch = |it: UnexpectedVerdict| {
            format!(
                "{:?}, not {:?}, of {operation:?} on {:?}",
                it.received, it.expected, it.possible
            )
        };
        keys[key]
            .1
            .observe(&operation, during, verdict)
            .map_err(mismatch)?;
        seen.push(name(verdict));
    }
    Ok(seen)
}

fn name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Granted(_) => "Granted",
        Verdict::InDoubt(_) => "InDoubt",
        Verdict::Busy { .. } => "Busy",
        Verdict::Duplicate => "Duplicate",
        Verdict::Rejected { .. } => "Rejected",
        Verdict::Conflict => "Conflict",
        Verdict::Applied => "Applied",
        Verdict::Done { .. } => "Done",
        Verdict::Lost => "Lost",
    }
}
