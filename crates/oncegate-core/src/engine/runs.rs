//! How a run of a handler starts, and how its result comes back.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{self, Poll, Waker};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::boot_time::BootTime;
use crate::context::Context;
use crate::decode::Decode;
use crate::handler::Handler;
use crate::run::{RunClock, RunResult, Runner};
use crate::slots::Slot;

/// Which function of the handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunKind {
    Handle,
    Reconcile,
}

/// Starts runs. It hides the types of the handler and of its future, so that the engine is not
/// generic.
pub(super) trait StartRun: Send {
    /// Polls a run once, here. Returns its result, or the future if it is pending.
    fn poll_once(
        &mut self,
        kind: RunKind,
        cx: Context,
        now: BootTime,
    ) -> Result<RunResult, BoxFuture<'static, RunResult>>;

    /// Spawns a run as a task, which begins now.
    fn spawn(
        &mut self,
        kind: RunKind,
        cx: Context,
        began: BootTime,
        report: RunReport,
    ) -> RunningTask;
}

/// Starts the runs of one handler. The future of `handle` is polled in a place that is kept: a run
/// that ends at once allocates nothing.
struct RunStarter<H, D, M, F> {
    runner: Arc<Runner<H, D>>,
    handle: M,
    place: Pin<Box<Option<F>>>,
}

/// Starts the runs of this handler.
pub(super) fn starter<H: Handler, D: Decode>(runner: Runner<H, D>) -> Box<dyn StartRun> {
    let runner = Arc::new(runner);
    let shared = runner.clone();
    Box::new(RunStarter {
        runner,
        handle: move |cx, clock| shared.clone().handle(cx, clock),
        place: Box::pin(None),
    })
}

impl<H, D, M, F> StartRun for RunStarter<H, D, M, F>
where
    H: Handler,
    D: Decode,
    M: Fn(Context, RunClock) -> F + Clone + Send + 'static,
    F: Future<Output = RunResult> + Send + 'static,
{
    fn poll_once(
        &mut self,
        kind: RunKind,
        cx: Context,
        now: BootTime,
    ) -> Result<RunResult, BoxFuture<'static, RunResult>> {
        let clock = RunClock { began: now, now };
        // The waker of this poll may be ignored: a pending future is polled again by its task.
        let mut poller = task::Context::from_waker(Waker::noop());
        if kind == RunKind::Reconcile {
            let mut run: BoxFuture<_> = Box::pin(self.runner.clone().reconcile(cx, clock));
            return match run.as_mut().poll(&mut poller) {
                Poll::Ready(finished) => Ok(finished),
                Poll::Pending => Err(run),
            };
        }
        self.place.set(Some((self.handle)(cx, clock)));
        let polled = self
            .place
            .as_mut()
            .as_pin_mut()
            .map(|run| run.poll(&mut poller));
        if let Some(Poll::Ready(finished)) = polled {
            self.place.set(None);
            return Ok(finished);
        }
        let mut place = std::mem::replace(&mut self.place, Box::pin(None));
        Err(Box::pin(std::future::poll_fn(move |poller| {
            match place.as_mut().as_pin_mut() {
                Some(run) => run.poll(poller),
                None => Poll::Ready(RunResult::lost()), // does not occur: it was pending
            }
        })))
    }

    fn spawn(
        &mut self,
        kind: RunKind,
        cx: Context,
        began: BootTime,
        report: RunReport,
    ) -> RunningTask {
        // The task may wait for a thread: the clock is read when it is polled.
        let clock = move || RunClock {
            began,
            now: BootTime::now(),
        };
        RunningTask::new(match kind {
            RunKind::Handle => {
                let handle = self.handle.clone();
                tokio::spawn(async move { report.send(handle(cx, clock()).await) })
            }
            RunKind::Reconcile => {
                let runner = self.runner.clone();
                tokio::spawn(async move { report.send(runner.reconcile(cx, clock()).await) })
            }
        })
    }
}

/// The task of a run, which is aborted on drop.
pub(super) struct RunningTask(Option<JoinHandle<()>>);

impl RunningTask {
    pub(super) fn new(task: JoinHandle<()>) -> Self {
        Self(Some(task))
    }

    /// The run has reported its result: there is nothing to abort.
    pub(super) fn finished(mut self) {
        self.0 = None;
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// The result of a spawned run, with its delivery and the turn of the run.
pub(super) struct FinishedRun {
    pub(super) slot: Slot,
    pub(super) turn: u32,
    pub(super) result: RunResult,
}

/// The results of spawned runs that the engine has not processed. Cheaper than a channel: the
/// engine takes all at once.
#[derive(Default)]
pub(super) struct FinishedRuns {
    queue: Mutex<Vec<FinishedRun>>,
    /// Notified when the queue gets its first result.
    any: Notify,
}

impl FinishedRuns {
    fn push(&self, run: FinishedRun) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(run);
        let is_first = queue.len() == 1;
        drop(queue);
        if is_first {
            self.any.notify_one();
        }
    }

    /// Moves all results to `into`, which is empty.
    pub(super) fn take(&self, into: &mut Vec<FinishedRun>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *queue, into);
    }

    /// Completes when there is a result. It may complete once too often.
    pub(super) async fn wait(&self) {
        self.any.notified().await;
    }
}

/// Sends the result of a spawned run on drop, however its task ends.
pub(super) struct RunReport {
    pub(super) to: Arc<FinishedRuns>,
    pub(super) slot: Slot,
    pub(super) turn: u32,
    pub(super) result: Option<RunResult>,
}

impl RunReport {
    pub(super) fn send(mut self, result: RunResult) {
        self.result = Some(result);
    }
}

impl Drop for RunReport {
    fn drop(&mut self) {
        self.to.push(FinishedRun {
            slot: self.slot,
            turn: self.turn,
            result: self.result.take().unwrap_or_else(RunResult::lost),
        });
    }
}
