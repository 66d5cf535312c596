//! Random histories, compared with [`marker::apply`](oncegate_core::marker::apply).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{
    self, Age, Ask, Change, Effect, Finding, Fingerprint, Guarantee, Marker, Operation, Terms,
    Token, Verdict,
};
use oncegate_core::{Key, Store};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, prop_oneof};
use proptest::sample::select;
use proptest::strategy::ValueTree;
use tokio::task::JoinSet;

use crate::laws::ask::{LONG, answers, key};
use crate::laws::belief::{PossibleMarkers, Span, UnexpectedVerdict};
use crate::laws::random::{repeat, runner, seeds};
use crate::laws::rows::questions;

/// The default number of histories in a run.
const HISTORIES: u64 = 64;
/// The number of concurrent histories.
const AT_ONCE: usize = 8;
/// The maximum length of a history, in steps.
const STEPS: usize = 16;
/// How long a failing history is shortened before it is printed.
const SHORTENING: Duration = Duration::from_secs(10);

/// Random histories of operations and waits: after each step, verdict and marker equal those of the
/// reference, by the store's own clock.
///
/// Each history runs on as many keys as it has steps: all of them take its first step, all but the
/// first the second, and so on. After its last step a key's marker is checked. So the marker after
/// each step is checked, although checking changes it.
pub async fn random_histories_match_the_reference(store: Arc<dyn Store>) {
    let mut left = seeds(HISTORIES);
    let (mut last, mut more) = (0u64, 0);
    let enough = left.size_hint().0 >= HISTORIES as usize;
    let mut running = JoinSet::new();
    let mut seen = HashSet::new();
    loop {
        while running.len() < AT_ONCE {
            let seed = match left.next() {
                Some(seed) => seed,
                // A verdict may be missing by chance: use further seeds.
                None if enough && more < 10 * HISTORIES && !reaches_all(&seen) => {
                    more += 1;
                    last.wrapping_add(1)
                }
                None => break,
            };
            last = seed;
            let (store, steps) = (store.clone(), history(seed).current());
            running.spawn(async move { (seed, run(&*store, &seed.to_string(), &steps).await) });
        }
        let Some(ended) = running.join_next().await else {
            break;
        };
        match ended.expect("a history does not panic") {
            (_, Ok(verdicts)) => seen.extend(verdicts),
            (seed, Err(why)) => {
                running.shutdown().await;
                let (steps, why) = shortest(&*store, seed, why).await;
                panic!("{why}\n{}\nafter {steps:#?}", repeat(seed));
            }
        }
    }
    // The histories must produce every verdict; otherwise they test too little.
    assert!(!enough || reaches_all(&seen), "only {seen:?} were seen");
}

/// Whether every kind of verdict was given.
fn reaches_all(seen: &HashSet<&'static str>) -> bool {
    let all = [
        "Granted",
        "InDoubt",
        "Busy",
        "Duplicate",
        "Rejected",
        "Conflict",
        "Kept",
        "Done",
        "Lost",
    ];
    all.iter().all(|verdict| seen.contains(verdict))
}

/// The shortest history that still fails, shortened by proptest. Time is part of a history, so a
/// failure may not be reproducible.
async fn shortest(store: &dyn Store, seed: u64, mut why: String) -> (Vec<Step>, String) {
    let mut tree = history(seed);
    let mut steps = tree.current();
    let started = Instant::now();
    for attempt in 0.. {
        let shorter = tree.current();
        let can_continue = match run(store, &format!("{seed}-{attempt}"), &shorter).await {
            Err(broken) => {
                (steps, why) = (shorter, broken);
                tree.simplify()
            }
            Ok(_) => tree.complicate(),
        };
        if !can_continue || started.elapsed() > SHORTENING {
            break;
        }
    }
    (steps, why)
}

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// Sends these operations in one batch.
    Ask(Vec<PlannedOperation>),
    /// Waits.
    Wait(Duration),
}

/// An operation that probably fits the current marker.
#[derive(Clone, Debug)]
struct PlannedOperation {
    ask: AskChoice,
    by: TokenChoice,
    attempt: Attempt,
    terms: Terms,
}

#[derive(Clone, Debug)]
enum AskChoice {
    This(Ask),
    ForgetCurrent,
    SendBackCurrent(Effect),
}

#[derive(Clone, Debug)]
enum TokenChoice {
    Holder,
    Any(Token),
}

#[derive(Clone, Debug)]
enum Attempt {
    OfHolder,
    Next,
    Last,
}

fn history(seed: u64) -> impl ValueTree<Value = Vec<Step>> {
    // These strategies never reject a value.
    vec(step(), 1..=STEPS)
        .new_tree(&mut runner(seed))
        .expect("a history")
}

fn step() -> impl Strategy<Value = Step> {
    let milliseconds = prop_oneof![10 => select(vec![5, 30, 60]), 3 => Just(300), 1 => Just(1100)];
    prop_oneof![
        5 => vec(question(), 1..=3).prop_map(Step::Ask),
        1 => milliseconds.prop_map(|ms| Step::Wait(Duration::from_millis(ms))),
    ]
}

fn question() -> impl Strategy<Value = PlannedOperation> {
    let one_of = |asks: &[Ask]| select(asks.to_vec()).prop_map(AskChoice::This);
    let asked = prop_oneof![
        5 => Just(AskChoice::This(Ask::Claim)),
        1 => Just(AskChoice::This(Ask::Renew)),
        1 => Just(AskChoice::This(Ask::Complete)),
        1 => one_of(&[Ask::Clear(Effect::Nothing), Ask::Clear(Effect::Unknown)]),
        1 => Just(AskChoice::This(Ask::Withdraw)),
        2 => one_of(&[Ask::Reject(Effect::Nothing), Ask::Reject(Effect::Unknown)]),
        2 => Just(AskChoice::This(Ask::Doubt)),
        1 => one_of(&[Ask::Resolve(Finding::Happened), Ask::Resolve(Finding::DidNotHappen)]),
        1 => prop_oneof![2 => Just(AskChoice::ForgetCurrent), 1 => one_of(&[Ask::Forget { seen: Marker::Done(None) }])],
        2 => select(vec![Effect::Nothing, Effect::Unknown]).prop_map(AskChoice::SendBackCurrent),
        1 => one_of(&[Ask::SendBack { seen: Marker::Absent, effect: Effect::Unknown }]),
    ];
    let by = prop_oneof![2 => Just(TokenChoice::Holder), 1 => (0..4u128).prop_map(|token| TokenChoice::Any(Token(token)))];
    let attempt = prop_oneof![13 => Just(Attempt::OfHolder), 2 => Just(Attempt::Next), 1 => Just(Attempt::Last)];
    (asked, by, attempt, terms()).prop_map(|(ask, by, attempt, terms)| PlannedOperation {
        ask,
        by,
        attempt,
        terms,
    })
}

fn terms() -> impl Strategy<Value = Terms> {
    const SECOND: Duration = Duration::from_secs(1);
    let guarantee = prop_oneof![3 => Just(Guarantee::AtMostOnce), 3 => Just(Guarantee::EffectivelyOnce), 1 => Just(Guarantee::Bare)];
    let lease = select(vec![Duration::from_millis(40), LONG]);
    let window = select(vec![SECOND / 4, SECOND, 600 * SECOND]);
    let bodies = vec![
        None,
        None,
        Some(Fingerprint::new(7)),
        Some(Fingerprint::new(Fingerprint::LIMIT - 1)),
    ];
    (guarantee, lease, window, select(bodies)).prop_map(
        |(guarantee, lease, window, fingerprint)| {
            // The literal gate has a resolution of one second.
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
    /// The operation, if this is the expected marker.
    fn on(&self, marker: Marker, key: &Key) -> Operation {
        let ask = match &self.ask {
            AskChoice::This(ask) => *ask,
            AskChoice::ForgetCurrent => Ask::Forget { seen: marker },
            AskChoice::SendBackCurrent(effect) => Ask::SendBack {
                seen: marker,
                effect: *effect,
            },
        };
        let (holder, at) = match marker {
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
            Attempt::OfHolder => at,
            Attempt::Next => at.saturating_add(1),
            Attempt::Last => u32::MAX,
        };
        Operation {
            key: key.clone(),
            ask,
            token,
            attempt,
            terms: self.terms,
        }
    }
}

/// Runs a history and returns the verdicts that occurred.
///
/// # Errors
/// The first reply that the reference cannot give.
async fn run(
    store: &dyn Store,
    name: &str,
    steps: &[Step],
) -> Result<HashSet<&'static str>, String> {
    let asked = steps
        .iter()
        .filter(|step| matches!(step, Step::Ask(_)))
        .count();
    let start = Instant::now();
    let mut twins: Vec<(Key, PossibleMarkers)> = (0..asked)
        .map(|it| (key(format!("{name}.{it}")), PossibleMarkers::new(start)))
        .collect();
    let mut seen = HashSet::new();
    // The keys before this one have taken their last step and were checked.
    let mut first = 0;
    for (number, step) in steps.iter().enumerate() {
        let questions_of = match step {
            Step::Wait(duration) => {
                tokio::time::sleep(*duration).await;
                continue;
            }
            Step::Ask(questions) => questions,
        };
        let mut batch = Vec::with_capacity(questions_of.len() * twins.len());
        let mut marker = twins.last().expect("a key for each batch").1.marker();
        for question in questions_of {
            batch.extend((first..asked).map(|twin| (twin, question.on(marker, &twins[twin].0))));
            // The marker that the next operation will probably meet.
            marker =
                match marker::apply(marker, Age::Of(Duration::ZERO), &batch[batch.len() - 1].1).0 {
                    Change::Keep => marker,
                    Change::Write(marker, _) => marker,
                    Change::Delete => Marker::Absent,
                };
        }
        seen.extend(
            exchange(store, &mut twins, batch)
                .await
                .map_err(|why| format!("step {number}: {why}"))?,
        );
        let (key, belief) = &twins[first];
        let look = questions(key, &belief.marker())
            .into_iter()
            .map(|(operation, _)| (first, operation))
            .collect();
        exchange(store, &mut twins, look)
            .await
            .map_err(|why| format!("reading the marker after step {number}: {why}"))?;
        first += 1;
    }
    Ok(seen)
}

/// Sends one batch, each operation on one key, and updates the possible markers with the replies.
/// Returns the verdicts.
///
/// # Errors
/// The first reply that the reference cannot give.
async fn exchange(
    store: &dyn Store,
    twins: &mut [(Key, PossibleMarkers)],
    batch: Vec<(usize, Operation)>,
) -> Result<Vec<&'static str>, String> {
    let operations: Vec<Operation> = batch
        .iter()
        .map(|(_, operation)| operation.clone())
        .collect();
    let from = Instant::now();
    let answers = answers(store, &operations).await;
    let during = Span {
        from,
        to: Instant::now(),
    };
    let mut seen = Vec::with_capacity(answers.len());
    for ((twin, operation), answer) in batch.into_iter().zip(answers) {
        let heard = answer.map_err(|error| format!("{error}, to {operation:?}"))?;
        let surprised = |it: UnexpectedVerdict| {
            format!(
                "{:?}, not {:?}, to {operation:?} on {:?}",
                it.heard, it.expected, it.believed
            )
        };
        twins[twin]
            .1
            .hear(&operation, during, heard)
            .map_err(surprised)?;
        seen.push(name(heard));
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
        Verdict::Kept => "Kept",
        Verdict::Done { .. } => "Done",
        Verdict::Lost => "Lost",
    }
}
