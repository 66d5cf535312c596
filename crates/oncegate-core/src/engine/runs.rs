//! Starts runs of a handler, and returns their results to the engine.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll, Waker};

use crate::internal::Lock;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::boot_time::BootTime;
use crate::context::Context;
use crate::decode::Decode;
use crate::handler::Handler;
use crate::run::{RunClock, RunResult, Runner};
use crate::settings::Execution;
use crate::slots::Slot;

/// Which function of the handler runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunKind {
    Handle,
    Reconcile,
}

/// A run that was started.
pub(super) enum StartedRun {
    /// It was inline and ended on its first poll.
    Finished(RunResult),
    /// It runs in a task.
    Task {
        task: RunningTask,
        /// The time after the first poll, which may have blocked; the time of the start if the run
        /// was not polled.
        now: BootTime,
    },
}

/// Starts runs. It hides the types of the handler and of its future, so that the engine is not
/// generic.
pub(super) trait StartRun: Send {
    /// Starts a run. With [`Execution::Inline`], this call polls it once. If it runs in a task, its
    /// result is added to [`FinishedRuns`], with this ticket.
    fn start(&mut self, kind: RunKind, cx: Context, now: BootTime, ticket: RunTicket)
    -> StartedRun;
}

/// Starts the runs of one handler. The boxes for the futures of `handle` are used again: a run that
/// ends on its first poll allocates nothing, and a spawned run allocates only its task, which is
/// small.
struct RunStarter<H, D, M, F> {
    runner: Arc<Runner<H, D>>,
    handle: M,
    execution: Execution,
    finished: Arc<FinishedRuns>,
    /// The box of the last inline run that ended on its first poll, for the next run.
    boxed: Option<FutureBox<F>>,
    pool: Arc<FutureBoxPool<F>>,
}

/// The allocation for the future of a run; `None` between runs.
type FutureBox<F> = Pin<Box<Option<F>>>;

/// The boxes that no run uses.
struct FutureBoxPool<F>(Lock<Vec<FutureBox<F>>>);

/// The maximum number of boxes in the pool.
const MAX_POOLED_BOXES: usize = 256;

impl<F> FutureBoxPool<F> {
    fn take(&self) -> FutureBox<F> {
        let boxed = self.0.lock().pop();
        boxed.unwrap_or_else(|| Box::pin(None))
    }

    fn put_back(&self, boxed: FutureBox<F>) {
        let mut pool = self.0.lock();
        if pool.len() < MAX_POOLED_BOXES {
            pool.push(boxed);
        }
    }
}

/// The starter of runs of this handler.
pub(super) fn starter<H: Handler, D: Decode>(
    runner: Runner<H, D>,
    execution: Execution,
    finished: Arc<FinishedRuns>,
) -> Box<dyn StartRun> {
    let runner = Arc::new(runner);
    let shared = runner.clone();
    Box::new(RunStarter {
        runner,
        handle: move |cx, clock| shared.clone().handle(cx, clock),
        execution,
        finished,
        boxed: None,
        pool: Arc::new(FutureBoxPool(Lock::default())),
    })
}

impl<H, D, M, F> StartRun for RunStarter<H, D, M, F>
where
    H: Handler,
    D: Decode,
    M: Fn(Context, RunClock) -> F + Clone + Send + Unpin + 'static,
    F: Future<Output = RunResult> + Send + 'static,
{
    fn start(
        &mut self,
        kind: RunKind,
        cx: Context,
        now: BootTime,
        ticket: RunTicket,
    ) -> StartedRun {
        let report = |finished: &Arc<FinishedRuns>| RunReport {
            to: finished.clone(),
            ticket,
            result: None,
        };
        if kind == RunKind::Reconcile {
            let (runner, report) = (self.runner.clone(), report(&self.finished));
            let task = RunningTask::new(tokio::spawn(async move {
                let (began, now) = (now, BootTime::now());
                report.send(runner.reconcile(cx, RunClock { began, now }).await);
            }));
            return StartedRun::Task { task, now };
        }
        let boxed = self.boxed.take();
        let mut boxed = boxed.unwrap_or_else(|| self.pool.take());
        let (mut unstarted, mut after) = (None, now);
        if self.execution == Execution::Inline {
            boxed.set(Some((self.handle)(cx, RunClock { began: now, now })));
            // A waker that does nothing suffices for this poll, because the task of a pending
            // future polls it again.
            let mut poller = task::Context::from_waker(Waker::noop());
            let polled = boxed.as_mut().as_pin_mut().map(|run| run.poll(&mut poller));
            if let Some(Poll::Ready(result)) = polled {
                boxed.set(None);
                self.boxed = Some(boxed);
                return StartedRun::Finished(result);
            }
            after = BootTime::now();
        } else {
            unstarted = Some((self.handle.clone(), cx, now));
        }
        let task = RunningTask::new(tokio::spawn(SpawnedRun {
            unstarted,
            boxed: Some(boxed),
            pool: self.pool.clone(),
            report: Some(report(&self.finished)),
        }));
        StartedRun::Task { task, now: after }
    }
}

/// The task of a run. Its future is in a box, so that the task is small.
struct SpawnedRun<M, F> {
    /// What a run needs to begin; `None` once it has begun.
    unstarted: Option<(M, Context, BootTime)>,
    boxed: Option<FutureBox<F>>,
    pool: Arc<FutureBoxPool<F>>,
    report: Option<RunReport>,
}

impl<M, F> Future for SpawnedRun<M, F>
where
    M: Fn(Context, RunClock) -> F + Unpin,
    F: Future<Output = RunResult>,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, poller: &mut task::Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let Some(boxed) = &mut this.boxed else {
            return Poll::Ready(());
        };
        if let Some((handle, cx, began)) = this.unstarted.take() {
            // Reads the clock again, because the task may have waited for a thread.
            let now = BootTime::now();
            boxed.set(Some(handle(cx, RunClock { began, now })));
        }
        let Some(Poll::Ready(result)) = boxed.as_mut().as_pin_mut().map(|run| run.poll(poller))
        else {
            return Poll::Pending;
        };
        boxed.set(None); // drops the context of the run before its result is reported
        if let Some(boxed) = this.boxed.take() {
            this.pool.put_back(boxed);
        }
        if let Some(report) = this.report.take() {
            report.send(result);
        }
        Poll::Ready(())
    }
}

/// The handle of the task of a run. Aborts the task on drop.
pub(super) struct RunningTask(Option<JoinHandle<()>>);

impl RunningTask {
    fn new(task: JoinHandle<()>) -> Self {
        Self(Some(task))
    }

    /// Drops the handle without aborting the task, which has reported its result.
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

/// The delivery of a run, and its `InFlightEntry::generation` when the run started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunTicket {
    pub(super) slot: Slot,
    pub(super) generation: u32,
}

/// The result of a spawned run.
pub(super) struct FinishedRun {
    pub(super) ticket: RunTicket,
    pub(super) result: RunResult,
}

/// The results of spawned runs that the engine has not processed yet. Cheaper than a channel,
/// because the engine takes all of them at once.
#[derive(Default)]
pub(super) struct FinishedRuns {
    queue: Lock<Vec<FinishedRun>>,
    /// Notified when the queue gets its first result.
    not_empty: Notify,
}

impl FinishedRuns {
    fn push(&self, run: FinishedRun) {
        let mut queue = self.queue.lock();
        queue.push(run);
        let is_first = queue.len() == 1;
        drop(queue);
        if is_first {
            self.not_empty.notify_one();
        }
    }

    /// Moves all results to `into`, which is empty.
    pub(super) fn take(&self, into: &mut Vec<FinishedRun>) {
        let mut queue = self.queue.lock();
        std::mem::swap(&mut *queue, into);
    }

    /// Completes when there is a result. May also complete once when there is none.
    pub(super) async fn wait(&self) {
        self.not_empty.notified().await;
    }
}

/// Adds the result of a spawned run to [`FinishedRuns`] on drop, even if its task is aborted or
/// panics.
struct RunReport {
    to: Arc<FinishedRuns>,
    ticket: RunTicket,
    /// `None` if the task ended without a result.
    result: Option<RunResult>,
}

impl RunReport {
    fn send(mut self, result: RunResult) {
        self.result = Some(result);
    }
}

impl Drop for RunReport {
    fn drop(&mut self) {
        self.to.push(FinishedRun {
            ticket: self.ticket,
            result: self.result.take().unwrap_or_else(RunResult::lost),
        });
    }
}
