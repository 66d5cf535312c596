//! Runs a handler once: decodes the payload, drops the handler at its timeout and at the end of its
//! lease, and catches panics.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::Duration;

use tracing::Span;

use crate::boot_time::BootTime;
use crate::context::Context;
use crate::decode::Decode;
use crate::fault;
use crate::handler::{Failure, Handler, NoReconcile, NoRoute, Reconciled};
use crate::id::Scope;
use crate::inbox::{InboxUnavailable, RecordFound};
use crate::lease::Lease;
use crate::lifecycle::{DoubtCause, Event, Outcome};
use crate::marker::Finding;
use crate::run_context::RunContext;
use crate::spans;

/// A handler with its decoder, its timeout and the scope of its consumer.
pub(crate) struct Runner<H, D> {
    pub(crate) handler: H,
    pub(crate) decode: D,
    pub(crate) timeout: Duration,
    pub(crate) scope: Scope,
}

/// The result of a run: its event, the text of its error, and when it ended.
#[derive(Debug)]
pub(crate) struct RunResult {
    pub(crate) event: Event,
    pub(crate) error: Option<String>,
    pub(crate) ended: BootTime,
}

/// The time at which a run was started, and the time just before its first poll.
#[derive(Clone, Copy)]
pub(crate) struct RunClock {
    pub(crate) began: BootTime,
    pub(crate) now: BootTime,
}

impl RunResult {
    /// The result of a run whose task ended without a result.
    pub(crate) fn lost() -> Self {
        let error = "the handler's task ended without a result";
        Self::ended(
            Event::Returned(Outcome::Unknown(DoubtCause::Panicked)),
            Some(error.into()),
            None,
        )
    }

    #[inline]
    fn ended(event: Event, error: Option<String>, span: Option<&Span>) -> Self {
        if let Some(span) = span {
            span.record("outcome", tracing::field::debug(&event));
        }
        let ended = BootTime::now();
        Self {
            event,
            error,
            ended,
        }
    }
}

impl<H: Handler, D: Decode> Runner<H, D> {
    /// Runs the handler once. Its timeout counts from `clock.began`.
    pub(crate) async fn handle(self: Arc<Self>, cx: Context, clock: RunClock) -> RunResult {
        let span = spans::if_enabled(|| spans::handle(&cx));
        let run = RunContext::new(&self.scope, self.timeout);
        let work = std::pin::pin!(Some(async {
            let payload = match self.handler.decode_payload(&self.decode, cx.message()) {
                Ok(payload) => payload,
                Err(error) if error.is::<NoRoute>() => {
                    return (Outcome::NoRoute, Some(error.to_string()));
                }
                Err(error) => return (Outcome::Unreadable, Some(error.to_string())),
            };
            fault::point("handler.before");
            let handled = self.handler.run(payload, &cx, &run).await;
            fault::point("handler.after");
            let Err(failure) = handled else {
                return (Outcome::Done, None);
            };
            let outcome = match &failure {
                // Without an error, which would become the first error of a dead letter.
                Failure::Retry(cause) if cause.is::<RecordFound>() => {
                    return (Outcome::Recorded, None);
                }
                Failure::Retry(cause) if cause.is::<InboxUnavailable>() => Outcome::Unavailable,
                Failure::Retry(_) => Outcome::Retry,
                Failure::Reject(_) => Outcome::Reject,
                Failure::InDoubt(_) => Outcome::Unknown(DoubtCause::HandlerReported),
            };
            (outcome, Some(failure.to_string()))
        }));
        let lease = cx.0.lease.as_ref();
        let (event, error) = match bounded(work, span.as_deref(), clock, self.timeout, lease).await
        {
            BoundedEnd::Completed((outcome, error)) => (Event::Returned(outcome), error),
            BoundedEnd::Panicked(message) => {
                let outcome = Outcome::Unknown(DoubtCause::Panicked);
                (Event::Returned(outcome), Some(message))
            }
            BoundedEnd::TimedOut if run.waits_for_database() => (
                Event::Returned(Outcome::Unavailable),
                Some(format!(
                    "the database did not answer within {:?}",
                    self.timeout
                )),
            ),
            BoundedEnd::TimedOut => (
                Event::Returned(Outcome::Unknown(DoubtCause::TimedOut)),
                Some(format!("the handler timed out after {:?}", self.timeout)),
            ),
            BoundedEnd::LeaseOver => (Event::LeaseOver, Some("the lease has ended".into())),
        };
        RunResult::ended(event, error, span.as_deref())
    }

    /// Runs `reconcile` once. Its timeout counts from `clock.began`.
    pub(crate) async fn reconcile(self: Arc<Self>, cx: Context, clock: RunClock) -> RunResult {
        let span = spans::if_enabled(|| spans::reconcile(&cx));
        let work = std::pin::pin!(Some(async {
            let found = async {
                let payload = self.handler.decode_payload(&self.decode, cx.message())?;
                fault::point("reconcile.before");
                let found = self.handler.reconcile(payload, &cx).await;
                fault::point("reconcile.after");
                found.map_err(|failure| match failure {
                    Failure::Retry(cause) | Failure::Reject(cause) | Failure::InDoubt(cause) => {
                        cause
                    }
                })
            };
            // The error is formatted and dropped inside this future, whose panics are caught,
            // because both may panic.
            match found.await {
                Ok(Reconciled::Happened) => (Event::Reconciled(Some(Finding::Happened)), None),
                Ok(Reconciled::DidNotHappen) => {
                    (Event::Reconciled(Some(Finding::DidNotHappen)), None)
                }
                Ok(Reconciled::Unknown) => {
                    let text = "reconcile returned Unknown".to_owned();
                    (Event::Reconciled(None), Some(text))
                }
                Err(error) if error.is::<NoReconcile>() => {
                    (Event::CannotReconcile, Some(error.to_string()))
                }
                Err(error) => (Event::Reconciled(None), Some(error.to_string())),
            }
        }));
        let lease = cx.0.lease.as_ref();
        let (event, error) = match bounded(work, span.as_deref(), clock, self.timeout, lease).await
        {
            BoundedEnd::Completed(found) => found,
            BoundedEnd::Panicked(message) => (Event::Reconciled(None), Some(message)),
            BoundedEnd::TimedOut => (
                Event::Reconciled(None),
                Some(format!("reconcile timed out after {:?}", self.timeout)),
            ),
            BoundedEnd::LeaseOver => (Event::LeaseOver, Some("the lease has ended".into())),
        };
        RunResult::ended(event, error, span.as_deref())
    }
}

/// How a bounded future ended.
pub(crate) enum BoundedEnd<T> {
    /// It completed with this output.
    Completed(T),
    /// It panicked with this text.
    Panicked(String),
    /// Its timeout was over.
    TimedOut,
    /// Its lease ended.
    LeaseOver,
}

/// Runs a future in its span until it completes, until the timeout (counted from `clock.began`) is
/// over, or until its lease ends; then drops it. Catches its panics. Checks the lease before each
/// poll, because after a pause of the process tokio polls the future before its timers fire.
pub(crate) async fn bounded<F: Future>(
    mut work: Pin<&mut Option<F>>,
    span: Option<&Span>,
    clock: RunClock,
    timeout: Duration,
    lease: Option<&Lease>,
) -> BoundedEnd<F::Output> {
    let mut poll = |now: BootTime, poller: &mut task::Context<'_>| match lease {
        Some(lease) if !lease.is_live(now) => Poll::Ready(BoundedEnd::LeaseOver),
        _ => poll_caught(work.as_mut(), span, poller),
    };
    // The first poll has no timer, because a timer costs more than a handler that is ready at once.
    let first = |poller: &mut task::Context<'_>| Poll::Ready(poll(clock.now, poller));
    let ended = match std::future::poll_fn(first).await {
        Poll::Ready(ended) => ended,
        Poll::Pending => {
            // `timeout` gets a duration, not a deadline, because in tests with paused time the
            // clock of tokio differs from that of `began`.
            let remaining = timeout.saturating_sub(clock.began.elapsed_at(BootTime::now()));
            let completed = std::future::poll_fn(|poller| poll(BootTime::now(), poller));
            tokio::select! {
                biased;
                ended = tokio::time::timeout(remaining, completed) => ended.unwrap_or(BoundedEnd::TimedOut),
                () = lease_end(lease) => BoundedEnd::LeaseOver,
            }
        }
    };
    if work.is_some()
        && let Err(panic) = catch_unwind(AssertUnwindSafe(|| in_span(span, || work.set(None))))
    {
        log_panic_of_drop(panic);
    }
    ended
}

/// Polls a future, drops it if it is ready, and catches the panics of both.
fn poll_caught<F: Future>(
    mut work: Pin<&mut Option<F>>,
    span: Option<&Span>,
    poller: &mut task::Context<'_>,
) -> Poll<BoundedEnd<F::Output>> {
    let mut output = None;
    let polled = catch_unwind(AssertUnwindSafe(|| {
        in_span(span, || {
            if let Some(Poll::Ready(value)) =
                work.as_mut().as_pin_mut().map(|work| work.poll(poller))
            {
                output = Some(value);
                work.set(None);
            }
        })
    }));
    match (output, polled) {
        (None, Ok(())) => Poll::Pending,
        (None, Err(panic)) => Poll::Ready(BoundedEnd::Panicked(panic_text(panic))),
        (Some(value), Ok(())) => Poll::Ready(BoundedEnd::Completed(value)),
        (Some(value), Err(panic)) => {
            log_panic_of_drop(panic);
            Poll::Ready(BoundedEnd::Completed(value))
        }
    }
}

fn in_span<T>(span: Option<&Span>, run: impl FnOnce() -> T) -> T {
    match span {
        Some(span) => span.in_scope(run),
        None => run(),
    }
}

#[cold]
fn log_panic_of_drop(panic: Box<dyn Any + Send>) {
    tracing::error!(
        panic = panic_text(panic),
        "the handler panicked while it was dropped"
    );
}

/// Completes when the lease ends. A renewal of the lease postpones this.
async fn lease_end(lease: Option<&Lease>) {
    let Some(lease) = lease else {
        return std::future::pending().await;
    };
    while lease.is_live(BootTime::now()) {
        tokio::time::sleep(lease.remaining()).await;
    }
}

/// The text of a panic, which begins with `panicked: `.
#[cold]
pub(crate) fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let message = format!(
        "panicked: {}",
        text.unwrap_or("with a payload that is not text")
    );
    if let Err(second_panic) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(second_panic); // dropping it may panic, too
    }
    message
}
