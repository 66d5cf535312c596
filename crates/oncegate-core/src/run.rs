//! One run of a handler: decoded, bounded, guarded by its lease, with its panics caught.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::CatchUnwind;
use tracing::Span;

use crate::context::Context;
use crate::decode::Decode;
use crate::fault;
use crate::handler::{Failure, Handler, Reconciled};
use crate::lease::Lease;
use crate::lifecycle::{DoubtCause, Event, Outcome};
use crate::marker::Finding;
use crate::moment::Moment;
use crate::spans;

/// A handler, and what it needs to run.
pub(crate) struct Runner<H, D> {
    pub(crate) handler: H,
    pub(crate) decode: D,
    pub(crate) timeout: Duration,
}

/// What a run came to, and what it said.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) event: Event,
    pub(crate) error: Option<String>,
}

impl Finished {
    /// Its task ended without a word.
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
    /// Runs the handler once; its time began at `began`.
    pub(crate) async fn handle(self: Arc<Self>, cx: Context, began: Instant) -> Finished {
        let span = spans::handles(&cx);
        let work = std::pin::pin!(caught(async {
            let payload = match self.decode.decode::<H::Payload>(&cx.message) {
                Ok(payload) => payload,
                Err(error) => {
                    return Finished::returned(Outcome::Unreadable, Some(error.to_string()));
                }
            };
            fault::point("handler.before");
            let handled = self.handler.handle(payload, &cx).await;
            fault::point("handler.after");
            match handled {
                Ok(()) => Finished::returned(Outcome::Done, None),
                Err(failure) => {
                    let outcome = match &failure {
                        Failure::Retry(_) => Outcome::Retry,
                        Failure::Reject(_) => Outcome::Reject,
                        Failure::InDoubt(_) => Outcome::Unknown(DoubtCause::Said),
                    };
                    Finished::returned(outcome, Some(failure.to_string()))
                }
            }
        }));
        let finished = match bounded(work, &span, began, self.timeout, cx.lease.as_deref()).await {
            Ended::Over(finished) => finished,
            Ended::Panicked(said) => {
                crate::wrong_version!("panic-is-a-failure", {
                    return Finished::returned(Outcome::Retry, Some(said));
                });
                Finished::returned(Outcome::Unknown(DoubtCause::Panicked), Some(said))
            }
            Ended::TimedOut => Finished::returned(
                Outcome::Unknown(DoubtCause::TimedOut),
                Some(format!("no end after {:?}", self.timeout)),
            ),
            Ended::LeaseOver => Finished {
                event: Event::LeaseOver,
                error: Some("the lease was over".into()),
            },
        };
        span.record("outcome", tracing::field::debug(&finished.event));
        finished
    }

    /// Runs `reconcile` once; its time began at `began`.
    pub(crate) async fn reconcile(self: Arc<Self>, cx: Context, began: Instant) -> Finished {
        let span = spans::reconciles(&cx);
        let work = std::pin::pin!(caught(async {
            let payload = self
                .decode
                .decode::<H::Payload>(&cx.message)
                .map_err(|error| error.to_string())?;
            fault::point("reconcile.before");
            let found =
                self.handler
                    .reconcile(payload, &cx)
                    .await
                    .map_err(|failure| match failure {
                        Failure::Retry(cause)
                        | Failure::Reject(cause)
                        | Failure::InDoubt(cause) => cause.to_string(),
                    });
            fault::point("reconcile.after");
            found
        }));
        let (found, error) =
            match bounded(work, &span, began, self.timeout, cx.lease.as_deref()).await {
                Ended::Over(Ok(Reconciled::Happened)) => (Some(Finding::Happened), None),
                Ended::Over(Ok(Reconciled::DidNotHappen)) => (Some(Finding::DidNotHappen), None),
                Ended::Over(Ok(Reconciled::Unknown)) => {
                    (None, Some("reconcile could not tell".to_owned()))
                }
                Ended::Over(Err(error)) => (None, Some(error)),
                Ended::Panicked(said) => (None, Some(said)),
                Ended::TimedOut => (
                    None,
                    Some(format!("reconcile had no end after {:?}", self.timeout)),
                ),
                Ended::LeaseOver => {
                    return Finished {
                        event: Event::LeaseOver,
                        error: Some("the lease was over".into()),
                    };
                }
            };
        span.record("outcome", tracing::field::debug(&found));
        Finished {
            event: Event::Found(found),
            error,
        }
    }
}

/// How a bounded future ended.
pub(crate) enum Ended<T> {
    Over(T),
    Panicked(String),
    TimedOut,
    LeaseOver,
}

/// A future whose panics are caught. It is pinned where it was made: a handler's may be large, and
/// each move copies it.
type Caught<F> = Option<CatchUnwind<AssertUnwindSafe<F>>>;

pub(crate) fn caught<F: Future>(work: F) -> Caught<F> {
    Some(AssertUnwindSafe(work).catch_unwind())
}

/// Runs a future in its span, for so long at the most, counted from `began`, and no longer than its
/// lease lives. It is polled only while the lease lives: a process that was stopped and continued
/// polls before its timers fire. It is dropped here.
pub(crate) async fn bounded<F: Future>(
    mut work: Pin<&mut Caught<F>>,
    span: &Span,
    began: Instant,
    timeout: Duration,
    lease: Option<&Lease>,
) -> Ended<F::Output> {
    let mut poll = |poller: &mut task::Context<'_>| match (work.as_mut().as_pin_mut(), lease) {
        (None, _) => Poll::Ready(None),
        (_, Some(lease)) if !lease.lives(Moment::now()) => Poll::Ready(None),
        (Some(work), _) => span.in_scope(|| work.poll(poller)).map(Some),
    };
    // Timers cost more than a handler that is ready at once.
    let ended = match std::future::poll_fn(|poller| Poll::Ready(poll(poller))).await {
        Poll::Ready(ended) => Ok(ended),
        Poll::Pending => tokio::select! {
            biased;
            // What is left, not until when: where a test pauses the runtime's time, its clock is
            // another.
            ended = tokio::time::timeout(timeout.saturating_sub(began.elapsed()), std::future::poll_fn(poll)) => ended,
            () = end_of(lease) => Ok(None),
        },
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| span.in_scope(|| work.set(None)))) {
        tracing::error!(
            said = what_it_said(panic),
            "the handler panicked while it was dropped"
        );
    }
    match ended {
        Ok(Some(Ok(value))) => Ended::Over(value),
        Ok(Some(Err(panic))) => Ended::Panicked(what_it_said(panic)),
        Ok(None) => Ended::LeaseOver,
        Err(_) => Ended::TimedOut,
    }
}

/// Ends when the lease does, however often it is renewed meanwhile.
async fn end_of(lease: Option<&Lease>) {
    let Some(lease) = lease else {
        return std::future::pending().await;
    };
    while lease.lives(Moment::now()) {
        tokio::time::sleep(lease.remaining()).await;
    }
}

pub(crate) fn what_it_said(panic: Box<dyn std::any::Any + Send>) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let said = format!(
        "panicked: {}",
        text.unwrap_or("with something that is no text")
    );
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again); // it would go on for ever
    }
    said
}
