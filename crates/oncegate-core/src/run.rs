//! One run of a handler: decodes the payload, enforces the timeout and the lease, catches panics.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::CatchUnwind;
use tracing::Span;

use crate::boot_time::BootTime;
use crate::context::Context;
use crate::decode::Decode;
use crate::fault;
use crate::handler::{Failure, Handler, NoReconcile, Reconciled};
use crate::lease::Lease;
use crate::lifecycle::{DoubtCause, Event, Outcome};
use crate::marker::Finding;
use crate::spans;

/// A handler with its decoder and its timeout.
pub(crate) struct Runner<H, D> {
    pub(crate) handler: H,
    pub(crate) decode: D,
    pub(crate) timeout: Duration,
}

/// The result of a run: its event, and the text of its error.
#[derive(Debug)]
pub(crate) struct RunResult {
    pub(crate) event: Event,
    pub(crate) error: Option<String>,
}

impl RunResult {
    /// The task of the handler ended without a result.
    pub(crate) fn lost() -> Self {
        Self::returned(
            Outcome::Unknown(DoubtCause::Panicked),
            Some("the handler's task ended without a result".into()),
        )
    }

    fn returned(outcome: Outcome, error: Option<String>) -> Self {
        Self {
            event: Event::Returned(outcome),
            error,
        }
    }
}

impl<H: Handler, D: Decode> Runner<H, D> {
    /// Runs the handler once. Its timeout counts from `began`.
    pub(crate) async fn handle(self: Arc<Self>, cx: Context, began: Instant) -> RunResult {
        let span = spans::handle(&cx);
        let work = std::pin::pin!(caught(async {
            let payload = match self.decode.decode::<H::Payload>(&cx.message) {
                Ok(payload) => payload,
                Err(error) => {
                    return RunResult::returned(Outcome::Unreadable, Some(error.to_string()));
                }
            };
            fault::point("handler.before");
            let handled = self.handler.handle(payload, &cx).await;
            fault::point("handler.after");
            match handled {
                Ok(()) => RunResult::returned(Outcome::Done, None),
                Err(failure) => {
                    let outcome = match &failure {
                        Failure::Retry(_) => Outcome::Retry,
                        Failure::Reject(_) => Outcome::Reject,
                        Failure::InDoubt(_) => Outcome::Unknown(DoubtCause::HandlerReported),
                    };
                    RunResult::returned(outcome, Some(failure.to_string()))
                }
            }
        }));
        let finished = match bounded(work, &span, began, self.timeout, cx.lease.as_deref()).await {
            BoundedEnd::Completed(finished) => finished,
            BoundedEnd::Panicked(message) => {
                RunResult::returned(Outcome::Unknown(DoubtCause::Panicked), Some(message))
            }
            BoundedEnd::TimedOut => RunResult::returned(
                Outcome::Unknown(DoubtCause::TimedOut),
                Some(format!("the handler timed out after {:?}", self.timeout)),
            ),
            BoundedEnd::LeaseOver => RunResult {
                event: Event::LeaseOver,
                error: Some("the lease has ended".into()),
            },
        };
        span.record("outcome", tracing::field::debug(&finished.event));
        finished
    }

    /// Runs `reconcile` once. Its timeout counts from `began`.
    pub(crate) async fn reconcile(self: Arc<Self>, cx: Context, began: Instant) -> RunResult {
        let span = spans::reconcile(&cx);
        let work = std::pin::pin!(caught(async {
            let payload = self.decode.decode::<H::Payload>(&cx.message)?;
            fault::point("reconcile.before");
            let found = self.handler.reconcile(payload, &cx).await;
            fault::point("reconcile.after");
            found.map_err(|failure| match failure {
                Failure::Retry(cause) | Failure::Reject(cause) | Failure::InDoubt(cause) => cause,
            })
        }));
        let (event, error) = match bounded(work, &span, began, self.timeout, cx.lease.as_deref())
            .await
        {
            BoundedEnd::Completed(Ok(Reconciled::Happened)) => {
                (Event::Reconciled(Some(Finding::Happened)), None)
            }
            BoundedEnd::Completed(Ok(Reconciled::DidNotHappen)) => {
                (Event::Reconciled(Some(Finding::DidNotHappen)), None)
            }
            BoundedEnd::Completed(Ok(Reconciled::Unknown)) => (
                Event::Reconciled(None),
                Some("reconcile returned Unknown".to_owned()),
            ),
            BoundedEnd::Completed(Err(error)) if error.is::<NoReconcile>() => {
                (Event::CannotReconcile, Some(error.to_string()))
            }
            BoundedEnd::Completed(Err(error)) => (Event::Reconciled(None), Some(error.to_string())),
            BoundedEnd::Panicked(message) => (Event::Reconciled(None), Some(message)),
            BoundedEnd::TimedOut => (
                Event::Reconciled(None),
                Some(format!("reconcile timed out after {:?}", self.timeout)),
            ),
            BoundedEnd::LeaseOver => (Event::LeaseOver, Some("the lease has ended".into())),
        };
        span.record("outcome", tracing::field::debug(&event));
        RunResult { event, error }
    }
}

/// How a bounded future ended.
pub(crate) enum BoundedEnd<T> {
    Completed(T),
    Panicked(String),
    TimedOut,
    LeaseOver,
}

/// A future whose panics are caught. It is pinned in place: the future of a handler may be large,
/// and each move copies it.
type Caught<F> = Option<CatchUnwind<AssertUnwindSafe<F>>>;

pub(crate) fn caught<F: Future>(work: F) -> Caught<F> {
    Some(AssertUnwindSafe(work).catch_unwind())
}

/// Runs a future in its span until it completes, the timeout since `began` is over, or its lease
/// ends, and drops it. The lease is checked before each poll: after a pause of the process the
/// future is polled before the timers fire.
pub(crate) async fn bounded<F: Future>(
    mut work: Pin<&mut Caught<F>>,
    span: &Span,
    began: Instant,
    timeout: Duration,
    lease: Option<&Lease>,
) -> BoundedEnd<F::Output> {
    let mut poll = |poller: &mut task::Context<'_>| match (work.as_mut().as_pin_mut(), lease) {
        (None, _) => Poll::Ready(None),
        (_, Some(lease)) if !lease.is_live(BootTime::now()) => Poll::Ready(None),
        (Some(work), _) => span.in_scope(|| work.poll(poller)).map(Some),
    };
    // Timers cost more than a handler that is ready at once.
    let ended = match std::future::poll_fn(|poller| Poll::Ready(poll(poller))).await {
        Poll::Ready(ended) => Ok(ended),
        Poll::Pending => tokio::select! {
            biased;
            // A duration, not a deadline: in tests with paused time tokio's clock differs from
            // `began`'s.
            ended = tokio::time::timeout(timeout.saturating_sub(began.elapsed()), std::future::poll_fn(poll)) => ended,
            () = lease_end(lease) => Ok(None),
        },
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| span.in_scope(|| work.set(None)))) {
        tracing::error!(
            panic = panic_text(panic),
            "the handler panicked while it was dropped"
        );
    }
    match ended {
        Ok(Some(Ok(value))) => BoundedEnd::Completed(value),
        Ok(Some(Err(panic))) => BoundedEnd::Panicked(panic_text(panic)),
        Ok(None) => BoundedEnd::LeaseOver,
        Err(_) => BoundedEnd::TimedOut,
    }
}

/// Completes when the lease ends. A renewal postpones that.
async fn lease_end(lease: Option<&Lease>) {
    let Some(lease) = lease else {
        return std::future::pending().await;
    };
    while lease.is_live(BootTime::now()) {
        tokio::time::sleep(lease.remaining()).await;
    }
}

pub(crate) fn panic_text(panic: Box<dyn std::any::Any + Send>) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let message = format!(
        "panicked: {}",
        text.unwrap_or("with a payload that is not text")
    );
    if let Err(second_panic) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(second_panic); // its drop may panic, too
    }
    message
}
