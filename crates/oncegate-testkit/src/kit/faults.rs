//! Which faults are still to come, and what runs there were.

use std::sync::{Mutex, MutexGuard, PoisonError};

use oncegate_core::marker::{Ask, Operation};
use oncegate_core::{Failure, Reconciled};
use tokio::sync::Notify;

use super::report::{Ended, Reconcile, Run};
use crate::Fate;

/// What may be done to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Before,
    Inside,
    After,
    ReplyToClaim,
    ReplyToCompletion,
}

/// How many kinds there are.
const KINDS: usize = 5;

/// What has to come to pass if it was asked for. A completion need not: perhaps nothing succeeds.
const DUE: [(Fault, &str); 4] = [
    (Fault::Before, "crash_before_handler"),
    (Fault::Inside, "crash_in_handler"),
    (Fault::After, "crash_after_handler"),
    (Fault::ReplyToClaim, "lost_replies"),
];

/// The plan, and how far it has come.
#[derive(Debug, Default)]
pub(super) struct Faults {
    state: Mutex<State>,
    /// A consumer has to end.
    crashes: Notify,
    /// A run is over.
    over: Notify,
}

#[derive(Debug, Default)]
struct State {
    planned: [u32; KINDS],
    came: [u32; KINDS],
    /// A consumer is being ended: nothing of it may start.
    crashing: bool,
    running: usize,
    /// How many consumers have ended.
    life: u32,
    runs: Vec<Run>,
    reconciles: Vec<Reconcile>,
}

impl Faults {
    pub(super) fn plan(&mut self, fault: Fault, times: u32) {
        self.lock().planned[fault as usize] = times;
    }

    /// What becomes of a request to the store.
    pub(super) fn reply(&self, asked: &[Operation]) -> Fate {
        let mut state = self.lock();
        let holds = |ask: Ask| asked.iter().any(|operation| operation.ask == ask);
        let loses_claim = holds(Ask::Claim) && state.takes(Fault::ReplyToClaim);
        let loses_completion = holds(Ask::Complete) && state.takes(Fault::ReplyToCompletion);
        if loses_claim || loses_completion {
            Fate::Lost {
                applied: asked.len(),
            }
        } else {
            Fate::Answered
        }
    }

    /// Ends when the consumer has to.
    pub(super) async fn crash(&self) {
        self.crashes.notified().await;
    }

    /// Waits until nothing runs of the consumer that was dropped, and lets the next one live.
    pub(super) async fn buried(&self) {
        loop {
            let mut over = std::pin::pin!(self.over.notified());
            over.as_mut().enable();
            {
                let mut state = self.lock();
                if state.running == 0 {
                    state.crashing = false;
                    state.life += 1;
                    return;
                }
            }
            over.await;
        }
    }

    /// The life of the consumer that runs now.
    pub(super) fn life(&self) -> u32 {
        self.lock().life
    }

    /// A handler of a consumer of this life is about to run: its place among the runs. `None` if
    /// that consumer is gone.
    pub(super) fn starts(&self, life: u32, id: &str, attempt: u32) -> Option<usize> {
        let mut state = self.lock();
        if state.crashing || state.life != life {
            return None;
        }
        state.running += 1;
        state.runs.push(Run {
            id: id.to_owned(),
            attempt,
            ended: Ended::Cut,
        });
        Some(state.runs.len() - 1)
    }

    /// `reconcile` of a consumer of this life is about to run: its place among the reconciles.
    /// `None` if that consumer is gone.
    pub(super) fn reconcile_starts(&self, life: u32, id: &str, attempt: u32) -> Option<usize> {
        let mut state = self.lock();
        if state.crashing || state.life != life {
            return None;
        }
        state.running += 1;
        let after = state.runs.len();
        state.reconciles.push(Reconcile {
            id: id.to_owned(),
            attempt,
            found: None,
            after,
        });
        Some(state.reconciles.len() - 1)
    }

    /// What a reconcile found, if it did before its consumer ended.
    pub(super) fn found(&self, reconcile: usize, found: &Result<Reconciled, Failure>) {
        let found = found.as_ref().copied().map_err(ToString::to_string);
        self.lock().reconciles[reconcile].found = Some(found);
    }

    /// How a run ended, if it did before its consumer.
    pub(super) fn ended(&self, run: usize, ended: Ended) {
        self.lock().runs[run].ended = ended;
    }

    /// Nothing of this run goes on.
    pub(super) fn is_over(&self) {
        self.lock().running -= 1;
        self.over.notify_waiters();
    }

    /// Whether the process ends here.
    pub(super) fn strikes(&self, fault: Fault) -> bool {
        let mut state = self.lock();
        let strikes = !state.crashing && state.takes(fault);
        self.end_consumer(&mut state, strikes)
    }

    /// Whether the process ends where a handler waits for the so many-th time.
    pub(super) fn strikes_at_wait(&self, waits: u32) -> bool {
        let mut state = self.lock();
        let strikes = !state.crashing
            && waits > state.came[Fault::Inside as usize]
            && state.takes(Fault::Inside);
        self.end_consumer(&mut state, strikes)
    }

    fn end_consumer(&self, state: &mut State, ends: bool) -> bool {
        if ends {
            state.crashing = true;
            self.crashes.notify_one();
        }
        ends
    }

    pub(super) fn runs(&self) -> (Vec<Run>, Vec<Reconcile>) {
        let state = self.lock();
        (state.runs.clone(), state.reconciles.clone())
    }

    pub(super) fn assert_all_came_to_pass(&self) {
        let state = self.lock();
        for (fault, name) in DUE {
            let (planned, came) = (state.planned[fault as usize], state.came[fault as usize]);
            let hint = if fault == Fault::Inside {
                "no handler waited at so many `.await`s"
            } else {
                "there were too few runs"
            };
            assert!(
                came == planned,
                "{name}: {planned} were asked for and {came} came to pass: {hint}, so this test would show nothing"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes one of these faults, if some are left.
    fn takes(&mut self, fault: Fault) -> bool {
        let takes = self.came[fault as usize] < self.planned[fault as usize];
        self.came[fault as usize] += u32::from(takes);
        takes
    }
}
