//! The planned faults, and the recorded runs.

use std::sync::MutexGuard;

use oncegate_core::internal::Lock;
use oncegate_core::marker::{Operation, OperationKind};
use oncegate_core::{Failure, Reconciled};
use tokio::sync::Notify;

use super::report::{HandlerResult, Reconcile, Run};
use crate::ReplyFault;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A crash after the claim and before the handler.
    BeforeHandler,
    /// A crash while the handler waits.
    InHandler,
    /// A crash after the handler returned and before its result is recorded.
    AfterHandler,
    /// A lost reply to a request with a claim.
    ReplyToClaim,
    /// A lost reply to a request with a completion.
    ReplyToCompletion,
}

/// The number of variants of [`Fault`].
const FAULT_COUNT: usize = 5;

/// The faults that must occur if they are planned. A lost reply to a completion is not among them,
/// because a test may have no successful run.
const REQUIRED: [(Fault, &str); 4] = [
    (Fault::BeforeHandler, "crash_before_handler"),
    (Fault::InHandler, "crash_in_handler"),
    (Fault::AfterHandler, "crash_after_handler"),
    (Fault::ReplyToClaim, "lost_replies"),
];

/// The planned faults, those that have occurred, and the runs of the handler.
#[derive(Debug, Default)]
pub(super) struct Faults {
    state: Lock<FaultState>,
    /// Notified when a crash of the consumer has started.
    crashes: Notify,
    /// Notified when the future of a run or a `reconcile` has ended or was dropped.
    run_ended: Notify,
}

#[derive(Debug, Default)]
struct FaultState {
    planned: [u32; FAULT_COUNT],
    occurred: [u32; FAULT_COUNT],
    /// Whether the consumer crashes: none of its handlers may start.
    crashing: bool,
    /// The number of futures of runs and of `reconcile` that exist.
    running: usize,
    /// The number of consumers that have crashed.
    generation: u32,
    runs: Vec<Run>,
    reconciles: Vec<Reconcile>,
}

impl Faults {
    pub(super) fn plan(&mut self, fault: Fault, times: u32) {
        self.lock().planned[fault as usize] = times;
    }

    /// Whether the reply to a request with these operations is lost. Uses up a planned fault if so.
    pub(super) fn reply_fault(&self, operations: &[Operation]) -> ReplyFault {
        let mut state = self.lock();
        let contains =
            |kind: OperationKind| operations.iter().any(|operation| operation.kind == kind);
        let loses_claim = contains(OperationKind::Claim) && state.use_up(Fault::ReplyToClaim);
        let loses_completion =
            contains(OperationKind::Complete) && state.use_up(Fault::ReplyToCompletion);
        if loses_claim || loses_completion {
            ReplyFault::Lost {
                applied: operations.len(),
            }
        } else {
            ReplyFault::Answered
        }
    }

    /// Waits until a crash of the consumer has started.
    pub(super) async fn crash_started(&self) {
        self.crashes.notified().await;
    }

    /// Waits until no handler of the dropped consumer runs, then allows the next consumer to run.
    pub(super) async fn wait_for_handlers(&self) {
        loop {
            let mut run_ended = std::pin::pin!(self.run_ended.notified());
            run_ended.as_mut().enable();
            {
                let mut state = self.lock();
                if state.running == 0 {
                    state.crashing = false;
                    state.generation += 1;
                    return;
                }
            }
            run_ended.await;
        }
    }

    /// The number of the current consumer: how many crashed before it.
    pub(super) fn generation(&self) -> u32 {
        self.lock().generation
    }

    /// Records the start of a handler and returns its index in the runs; `None` if its consumer has
    /// crashed.
    pub(super) fn record_run_start(
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
        state.runs.push(Run {
            id: id.to_owned(),
            attempt,
            result: HandlerResult::Interrupted,
        });
        Some(state.runs.len() - 1)
    }

    /// Records the start of `reconcile` and returns its index; `None` if its consumer has crashed.
    pub(super) fn record_reconcile_start(
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
            result: None,
            after,
        });
        Some(state.reconciles.len() - 1)
    }

    /// Records the result of `reconcile`.
    pub(super) fn record_reconcile_result(
        &self,
        reconcile: usize,
        result: &Result<Reconciled, Failure>,
    ) {
        let result = result.as_ref().copied().map_err(ToString::to_string);
        self.lock().reconciles[reconcile].result = Some(result);
    }

    /// Records the result of a run.
    pub(super) fn record_run_result(&self, run: usize, result: HandlerResult) {
        self.lock().runs[run].result = result;
    }

    /// Records that the future of a run or a `reconcile` has ended or was dropped.
    pub(super) fn record_future_end(&self) {
        self.lock().running -= 1;
        self.run_ended.notify_waiters();
    }

    /// Whether the consumer crashes at this point. Starts the crash if so.
    pub(super) fn crashes_here(&self, fault: Fault) -> bool {
        let mut state = self.lock();
        let crashes_here = !state.crashing && state.use_up(fault);
        self.crash_if(&mut state, crashes_here)
    }

    /// Whether the consumer crashes at the `waits`-th wait of a handler. Starts the crash if so.
    pub(super) fn crashes_at_wait(&self, waits: u32) -> bool {
        let mut state = self.lock();
        let crashes_here = !state.crashing
            && waits > state.occurred[Fault::InHandler as usize]
            && state.use_up(Fault::InHandler);
        self.crash_if(&mut state, crashes_here)
    }

    /// Starts a crash of the consumer if `crashes`, and returns `crashes`.
    fn crash_if(&self, state: &mut FaultState, crashes: bool) -> bool {
        if crashes {
            state.crashing = true;
            self.crashes.notify_one();
        }
        crashes
    }

    pub(super) fn runs(&self) -> (Vec<Run>, Vec<Reconcile>) {
        let state = self.lock();
        (state.runs.clone(), state.reconciles.clone())
    }

    pub(super) fn assert_all_occurred(&self) {
        let state = self.lock();
        for (fault, name) in REQUIRED {
            let (planned, occurred) = (
                state.planned[fault as usize],
                state.occurred[fault as usize],
            );
            let hint = if fault == Fault::InHandler {
                "the handler waited at too few `.await`s"
            } else {
                "there were too few runs"
            };
            assert!(
                occurred == planned,
                "{name}: {occurred} of {planned} planned faults occurred: {hint}, so this test would prove nothing"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, FaultState> {
        self.state.lock()
    }
}

impl FaultState {
    /// Uses up one fault of this kind, if one is left.
    fn use_up(&mut self, fault: Fault) -> bool {
        let is_left = self.occurred[fault as usize] < self.planned[fault as usize];
        self.occurred[fault as usize] += u32::from(is_left);
        is_left
    }
}
