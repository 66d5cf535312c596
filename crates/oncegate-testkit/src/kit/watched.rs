//! A wrapper of the handler that crashes the consumer as planned.

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as Poller, Poll, Wake, Waker};

use oncegate_core::{Context, Failure, Handler, Reconciled};

use super::faults::{Fault, Faults};
use super::report::Ended;

pub(super) struct WatchedHandler<H> {
    handler: Arc<H>,
    faults: Arc<Faults>,
    generation: u32,
}

/// Marks a run as running until it is dropped.
struct Running(Arc<Faults>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.run_ended();
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
        // After a crash nothing may run: the consumer drops this future.
        let Some(run) = faults.starts(self.generation, cx.id(), cx.attempt()) else {
            return pending().await;
        };
        let _running = Running(faults.clone());
        if faults.crashes_here(Fault::Before) {
            return pending().await;
        }
        let mut work = Waits::of(self.handler.handle(payload, cx));
        let handled = poll_fn(|poller| match work.poll(poller) {
            Poll::Ready(handled) => Poll::Ready(Some(handled)),
            Poll::Pending if faults.crashes_at_wait(work.waits) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        let Some(handled) = handled.await else {
            return pending().await;
        };
        faults.ended(
            run,
            if handled.is_ok() {
                Ended::Happened
            } else {
                Ended::Failed
            },
        );
        if faults.crashes_here(Fault::After) {
            return pending().await;
        }
        handled
    }

    async fn reconcile(&self, payload: H::Payload, cx: &Context) -> Result<Reconciled, Failure> {
        let Some(place) = self
            .faults
            .reconcile_starts(self.generation, cx.id(), cx.attempt())
        else {
            return pending().await;
        };
        let _running = Running(self.faults.clone());
        let found = self.handler.reconcile(payload, cx).await;
        self.faults.found(place, &found);
        found
    }
}

/// Counts how often a future had to wait. Polls without a wake-up do not count, because a future
/// may be polled spuriously.
struct Waits<F> {
    work: Pin<Box<F>>,
    wakes: Arc<WakeRecorder>,
    waits: u32,
}

/// Wakes the task and records it.
struct WakeRecorder {
    woken: AtomicBool,
    poller: Mutex<Waker>,
}

impl Wake for WakeRecorder {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.poller
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .wake_by_ref();
    }
}

impl<F: Future> Waits<F> {
    fn of(work: F) -> Self {
        // The first poll counts.
        let wakes = Arc::new(WakeRecorder {
            woken: AtomicBool::new(true),
            poller: Mutex::new(Waker::noop().clone()),
        });
        Self {
            work: Box::pin(work),
            wakes,
            waits: 0,
        }
    }

    fn poll(&mut self, poller: &mut Poller<'_>) -> Poll<F::Output> {
        self.wakes
            .poller
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(poller.waker());
        let woken = self.wakes.woken.swap(false, Ordering::AcqRel);
        let polled = self
            .work
            .as_mut()
            .poll(&mut Poller::from_waker(&self.wakes.clone().into()));
        self.waits += u32::from(woken && polled.is_pending());
        polled
    }
}
