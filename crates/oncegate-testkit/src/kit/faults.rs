//! The planned faults, and the recorded runs.

use std::sync::{Mutex, MutexGuard, PoisonError};

use oncegate_core::marker::{Ask, Operation};
use oncegate_core::{Failure, Reconciled};
use tokio::sync::Notify;

use super::report::{Ended, Reconcile, Run};
use crate::ReplyFault;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Before,
    Inside,
    After,
    ReplyToClaim,
    ReplyToCompletion,
}

/// The number of kinds.
const KINDS: usize = 5;

/// The faults that must occur if they are planned. A lost completion need not: perhaps no run
/// succeeds.
const DUE: [(Fault, &str); 4] = [
    (Fault::Before, "crash_before_handler"),
    (Fault::Inside, "crash_in_handler"),
    (Fault::After, "crash_after_handler"),
    (Fault::ReplyToClaim, "lost_replies"),
];

/// The planned faults and those that have occurred.
#[derive(Debug, Default)]
pub(super) struct Faults {
    state: Mutex<State>,
    /// Notified when a consumer must crash.
    crashes: Notify,
    /// Notified when a run has ended.
    over: Notify,
}

#[derive(Debug, Default)]
struct State {
    planned: [u32; KINDS],
    occurred: [u32; KINDS],
    /// A consumer is crashing: none of its handlers may start.
    crashing: bool,
    running: usize,
    /// The number of crashed consumers.
    generation: u32,
    runs: Vec<Run>,
    reconciles: Vec<Reconcile>,
}

impl Faults {
    pub(super) fn plan(&mut self, fault: Fault, times: u32) {
        self.lock().planned[fault as usize] = times;
    }

    /// Whether the reply to a request to the store is lost.
    pub(super) fn reply(&self, asked: &[Operation]) -> ReplyFault {
        let mut state = self.lock();
        let holds = |ask: Ask| asked.iter().any(|operation| operation.ask == ask);
        let loses_claim = holds(Ask::Claim) && state.takes(Fault::ReplyToClaim);
        let loses_completion = holds(Ask::Complete) && state.takes(Fault::ReplyToCompletion);
        if loses_claim || loses_completion {
            ReplyFault::Lost {
                applied: asked.len(),
            }
        } else {
            ReplyFault::Answered
        }
    }

    /// Waits until the consumer must crash.
    pub(super) async fn crash(&self) {
        self.crashes.notified().await;
    }

    /// Waits until no handler of the dropped consumer runs, then allows the next consumer to run.
    pub(super) async fn wait_for_handlers(&self) {
        loop {
            let mut over = std::pin::pin!(self.over.notified());
            over.as_mut().enable();
            {
                let mut state = self.lock();
                if state.running == 0 {
                    state.crashing = false;
                    state.generation += 1;
                    return;
                }
            }
            over.await;
        }
    }

    /// The number of the current consumer.
    pub(super) fn generation(&self) -> u32 {
        self.lock().generation
    }

    /// Records the start of a handler and returns its index in the runs; `None` if its consumer has
    /// crashed.
    pub(super) fn starts(&self, generation: u32, id: &str, attempt: u32) -> Option<usize> {
        let mut state = self.lock();
        if state.crashing || state.generation != generation {
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

    /// Records the start of `reconcile` and returns its index; `None` if its consumer has crashed.
    pub(super) fn reconcile_starts(
        &self,
        generation: u32,
        id: &str,
        attempt: u32,
    ) -> Option<usize> {
        let mut state = self.lock();
        if state.crashing || state.generation != generation {
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

    /// Records the result of `reconcile`.
    pub(super) fn found(&self, reconcile: usize, found: &Result<Reconciled, Failure>) {
        let found = found.as_ref().copied().map_err(ToString::to_string);
        self.lock().reconciles[reconcile].found = Some(found);
    }

    /// Records the result of a run.
    pub(super) fn ended(&self, run: usize, ended: Ended) {
        self.lock().runs[run].ended = ended;
    }

    /// Records that nothing of a run is executed any more.
    pub(super) fn run_ended(&self) {
        self.lock().running -= 1;
        self.over.notify_waiters();
    }

    /// Whether the consumer crashes at this point.
    pub(super) fn crashes_here(&self, fault: Fault) -> bool {
        let mut state = self.lock();
        let crashes_here = !state.crashing && state.takes(fault);
        self.end_consumer(&mut state, crashes_here)
    }

    /// Whether the consumer crashes at the `waits`-th wait of a handler.
    pub(super) fn crashes_at_wait(&self, waits: u32) -> bool {
        let mut state = self.lock();
        let crashes_here = !state.crashing
            && waits > state.occurred[Fault::Inside as usize]
            && state.takes(Fault::Inside);
        self.end_consumer(&mut state, crashes_here)
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

    pub(super) fn assert_all_occurred(&self) {
        let state = self.lock();
        for (fault, name) in DUE {
            let (planned, occurred) = (
                state.planned[fault as usize],
                state.occurred[fault as usize],
            );
            let hint = if fault == Fault::Inside {
                "no handler waited at so many `.await`s"
            } else {
                "there were too few runs"
            };
            assert!(
                occurred == planned,
                "{name}: {planned} were asked for and {occurred} came to pass: {hint}, so this test would show nothing"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Uses up one fault of this kind, if one is left.
    fn takes(&mut self, fault: Fault) -> bool {
        let takes = self.occurred[fault as usize] < self.planned[fault as usize];
        self.occurred[fault as usize] += u32::from(takes);
        takes
    }
}
