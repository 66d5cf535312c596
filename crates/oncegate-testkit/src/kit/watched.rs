//! A wrapper of the handler that crashes the consumer as planned.

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Wake, Waker};

use oncegate_core::internal::Lock;
use oncegate_core::store::BoxError;
use oncegate_core::{Context, Decode, Failure, Handler, Message, Reconciled};

use super::faults::{Fault, Faults};
use super::report::HandlerResult;

/// Records the runs of a handler, and crashes the consumer as planned.
pub(super) struct WatchedHandler<H> {
    handler: Arc<H>,
    faults: Arc<Faults>,
    generation: u32,
}

/// Records the end of a run or a `reconcile` when its future ends or is dropped.
struct RunGuard(Arc<Faults>);

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.0.record_future_end();
    }
}

impl<H> WatchedHandler<H> {
    pub(super) fn new(handler: Arc<H>, faults: Arc<Faults>) -> Self {
        let generation = faults.generation();
        Self {
            handler,
            faults,
            generation,
        }
    }
}

impl<H: Handler> Handler for WatchedHandler<H> {
    type Payload = H::Payload;

    async fn handle(&self, payload: H::Payload, cx: &Context) -> Result<(), Failure> {
        let faults = &self.faults;
        // No handler starts after a crash: this future waits until its consumer is dropped.
        let Some(run) = faults.record_run_start(self.generation, cx.id(), cx.attempt()) else {
            return pending().await;
        };
        let _guard = RunGuard(faults.clone());
        if faults.crashes_here(Fault::BeforeHandler) {
            return pending().await;
        }
        let mut work = WaitCounter::of(self.handler.handle(payload, cx));
        let handled = poll_fn(|task| match work.poll(task) {
            Poll::Ready(handled) => Poll::Ready(Some(handled)),
            Poll::Pending if faults.crashes_at_wait(work.waits) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        let Some(handled) = handled.await else {
            return pending().await;
        };
        faults.record_run_result(
            run,
            if handled.is_ok() {
                HandlerResult::Succeeded
            } else {
                HandlerResult::Failed
            },
        );
        if faults.crashes_here(Fault::AfterHandler) {
            return pending().await;
        }
        handled
    }

    fn decode_payload<D: Decode>(
        &self,
        decode: &D,
        message: &Message,
    ) -> Result<H::Payload, BoxError> {
        self.handler.decode_payload(decode, message)
    }

    fn check_routes(&self) -> Result<(), String> {
        self.handler.check_routes()
    }

    async fn reconcile(&self, payload: H::Payload, cx: &Context) -> Result<Reconciled, Failure> {
        let Some(index) =
            self.faults
                .record_reconcile_start(self.generation, cx.id(), cx.attempt())
        else {
            return pending().await;
        };
        let _guard = RunGuard(self.faults.clone());
        let result = self.handler.reconcile(payload, cx).await;
        self.faults.record_reconcile_result(index, &result);
        result
    }
}

/// Counts how often a future returned `Pending`. Polls without a wake-up do not count, because an
/// executor may poll a future spuriously.
struct WaitCounter<F> {
    work: Pin<Box<F>>,
    wakes: Arc<WakeRecorder>,
    waits: u32,
}

/// Records a wake-up and forwards it to the task.
struct WakeRecorder {
    woken: AtomicBool,
    waker: Lock<Waker>,
}

impl Wake for WakeRecorder {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.waker.lock().wake_by_ref();
    }
}

impl<F: Future> WaitCounter<F> {
    fn of(work: F) -> Self {
        let wakes = Arc::new(WakeRecorder {
            // The first poll counts, although nothing has woken the task before it.
            woken: AtomicBool::new(true),
            waker: Lock::new(Waker::noop().clone()),
        });
        Self {
            work: Box::pin(work),
            wakes,
            waits: 0,
        }
    }

    fn poll(&mut self, task: &mut TaskContext<'_>) -> Poll<F::Output> {
        self.wakes.waker.lock().clone_from(task.waker());
        let woken = self.wakes.woken.swap(false, Ordering::AcqRel);
        let polled = self
            .work
            .as_mut()
            .poll(&mut TaskContext::from_waker(&self.wakes.clone().into()));
        self.waits += u32::from(woken && polled.is_pending());
        polled
    }
}
