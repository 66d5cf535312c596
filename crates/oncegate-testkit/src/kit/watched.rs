//! A handler around yours, which ends the consumer where the plan says so.

use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as Poller, Poll, Wake, Waker};

use oncegate_core::{Context, Failure, Handler, Reconciled, async_trait};

use super::faults::{Fault, Faults};
use super::report::Ended;

pub(super) struct Watched<H> {
    handler: Arc<H>,
    faults: Arc<Faults>,
    life: u32,
}

/// A run that goes on for as long as this lives.
struct Running(Arc<Faults>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.is_over();
    }
}

impl<H> Watched<H> {
    pub(super) fn new(handler: Arc<H>, faults: Arc<Faults>) -> Self {
        let life = faults.life();
        Self {
            handler,
            faults,
            life,
        }
    }
}

#[async_trait]
impl<H: Handler> Handler for Watched<H> {
    type Payload = H::Payload;

    async fn handle(&self, payload: H::Payload, cx: &Context) -> Result<(), Failure> {
        let faults = &self.faults;
        // Where the process ends, nothing comes after: the consumer is dropped, and this future
        // with it.
        let Some(run) = faults.starts(self.life, cx.id(), cx.attempt()) else {
            return pending().await;
        };
        let _running = Running(faults.clone());
        if faults.strikes(Fault::Before) {
            return pending().await;
        }
        let mut work = Waits::of(self.handler.handle(payload, cx));
        let handled = poll_fn(|poller| match work.poll(poller) {
            Poll::Ready(handled) => Poll::Ready(Some(handled)),
            Poll::Pending if faults.strikes_at_wait(work.waits) => Poll::Ready(None),
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
        if faults.strikes(Fault::After) {
            return pending().await;
        }
        handled
    }

    async fn reconcile(&self, payload: H::Payload, cx: &Context) -> Result<Reconciled, Failure> {
        let Some(place) = self
            .faults
            .reconcile_starts(self.life, cx.id(), cx.attempt())
        else {
            return pending().await;
        };
        let _running = Running(self.faults.clone());
        let found = self.handler.reconcile(payload, cx).await;
        self.faults.found(place, &found);
        found
    }
}

/// Counts how often a future had to wait. Polls that nothing woke it for do not count: whoever
/// polls may do so twice.
struct Waits<F> {
    work: Pin<Box<F>>,
    bell: Arc<Bell>,
    waits: u32,
}

/// Wakes the poller, and remembers that it did.
struct Bell {
    rang: AtomicBool,
    poller: Mutex<Waker>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rang.store(true, Ordering::Release);
        self.poller
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .wake_by_ref();
    }
}

impl<F: Future> Waits<F> {
    fn of(work: F) -> Self {
        // It has not waited yet: the first poll counts.
        let bell = Arc::new(Bell {
            rang: AtomicBool::new(true),
            poller: Mutex::new(Waker::noop().clone()),
        });
        Self {
            work: Box::pin(work),
            bell,
            waits: 0,
        }
    }

    fn poll(&mut self, poller: &mut Poller<'_>) -> Poll<F::Output> {
        self.bell
            .poller
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(poller.waker());
        let rang = self.bell.rang.swap(false, Ordering::AcqRel);
        let polled = self
            .work
            .as_mut()
            .poll(&mut Poller::from_waker(&self.bell.clone().into()));
        self.waits += u32::from(rang && polled.is_pending());
        polled
    }
}
