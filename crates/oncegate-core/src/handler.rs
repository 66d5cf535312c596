//! The handler that a user writes, and how it reports failures.

mod function;
mod router;

use std::future::Future;

pub use function::{HandlerFn, MessageFn, ReconcilingFn, handler_fn};
pub(crate) use router::NoRoute;
pub use router::{NoRoutes, Route, RoutedPayload, Router, Routes};

use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::decode::Decode;
use crate::message::Message;
use crate::run_context::RunContext;
use crate::store::BoxError;

/// Handles messages.
///
/// The payload is decoded from the body: as JSON, unless the consumer has another
/// [`Decode`]. A message whose payload does not parse is dead-lettered.
///
/// The consumer drops the future, which may be at any `.await`, when the lease ends, at the handler
/// timeout and at the end of the drain timeout. The outcome is then unknown.
///
/// A function or closure is a handler, too: [`handler_fn`]. A [`Router`] has a handler for each type
/// of message. Write the methods as `async fn`, without a macro:
///
/// ```
/// use oncegate_core::{Context, Failure, Handler};
///
/// struct Shelf;
///
/// impl Handler for Shelf {
///     type Payload = String;
///
///     async fn handle(&self, article: String, cx: &Context) -> Result<(), Failure> {
///         println!("{} {article}", cx.id());
///         Ok(())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "this is not a `Handler`",
    note = "pass a function in `handler_fn(…)`, or implement it: `impl Handler for … {{ type Payload = …; async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure> {{ … }} }}`",
    note = "`()` means that the consumer has no handler: call `.handler(…)`"
)]
pub trait Handler: Send + Sync + 'static {
    /// The type into which the body is decoded.
    type Payload: DeserializeOwned + Send;

    /// Does the work. `Ok` means that it happened.
    ///
    /// # Errors
    /// A [`Failure`] that says whether the effect happened, and whether a retry helps.
    fn handle(
        &self, // in the impl: `async fn handle(&self, …)`, without `#[async_trait]`
        payload: Self::Payload,
        cx: &Context,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Runs [`handle`](Self::handle). With an inbox, it also begins and commits the transaction.
    #[doc(hidden)]
    fn run(
        &self,
        payload: Self::Payload,
        cx: &Context,
        run: &RunContext,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        let _ = run;
        self.handle(payload, cx)
    }

    /// Decodes the payload of a message. A [`Router`] first selects the route.
    #[doc(hidden)]
    #[inline]
    fn decode_payload<D: Decode>(
        &self,
        decode: &D,
        message: &Message,
    ) -> Result<Self::Payload, BoxError> {
        decode.decode(message)
    }

    /// Checks the routes of a [`Router`]. The error says what is wrong.
    #[doc(hidden)]
    fn check_routes(&self) -> Result<(), String> {
        Ok(())
    }

    /// Finds out whether an attempt whose outcome is unknown had its effect. Called for ids that this
    /// or an earlier consumer claimed in at most once.
    ///
    /// [`Reconciled::DidNotHappen`] means that it had no effect, *and that no attempt up to and
    /// including `cx.attempt()` can have one later*. A handler that cannot prevent a late effect
    /// returns [`Reconciled::Unknown`].
    ///
    /// It is called for each delivery of the message, so copies may call it at the same time, and
    /// while another delivery runs the handler with a higher attempt. Only the result of the delivery
    /// that holds the id counts.
    ///
    /// Without this method, a message whose outcome is unknown goes to the in-doubt queue at once.
    ///
    /// # Errors
    /// Any failure counts as [`Reconciled::Unknown`]: `reconcile` is called up to `max_reconciles`
    /// times for a delivery, then the message goes to the in-doubt queue.
    fn reconcile(
        &self, // in the impl: `async fn reconcile(&self, …)`, without `#[async_trait]`
        payload: Self::Payload,
        cx: &Context,
    ) -> impl Future<Output = Result<Reconciled, Failure>> + Send {
        let _ = (payload, cx);
        async { Err(Failure::InDoubt(NoReconcile.into())) }
    }
}

/// The error of the default `reconcile`, which is not called again.
#[derive(Debug, thiserror::Error)]
#[error("the handler has no `reconcile`")]
pub(crate) struct NoReconcile;

/// The failure of a handler, which says whether the effect happened. There is no blanket conversion
/// from errors, because they do not say that: convert the error of each call with [`FailureExt`].
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nothing happened: safe to run again.
    #[error("nothing happened: {0}")]
    Retry(#[source] BoxError),
    /// Nothing happened, and a retry does not help: the message is dead-lettered.
    #[error("it will never work: {0}")]
    Reject(#[source] BoxError),
    /// It may have happened: the outcome is unknown.
    #[error("it may have happened: {0}")]
    InDoubt(#[source] BoxError),
}

/// An error that always means the same [`Failure`], so that `?` alone converts it. Implement this
/// for your own errors. Convert other errors with [`FailureExt`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whether anything happened, so it cannot become a `Failure`",
    label = "say what is known: `.retry()?` if nothing happened, `.reject()?` if it will never work, `.in_doubt()?` if it may have happened; with `use oncegate::FailureExt;`"
)]
pub trait IntoFailure {
    /// Converts it into the failure.
    fn into_failure(self) -> Failure;
}

impl<E: IntoFailure> From<E> for Failure {
    fn from(error: E) -> Self {
        error.into_failure()
    }
}

/// The result of `reconcile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reconciled {
    /// The effect happened.
    Happened,
    /// The effect did not happen and cannot happen later: the sink (the system in which the handler
    /// causes its effect) deduplicates by id, or now refuses requests of this id with an attempt up
    /// to and including [`Context::attempt`](crate::Context::attempt). If the sink refused only
    /// lower attempts, the effect of a handler that reconciles its own outcome could still happen,
    /// in addition to the effect of the next run.
    DidNotHappen,
    /// It cannot be determined whether the effect happened.
    Unknown,
}

/// Converts the error of a call into a [`Failure`]: `charge(…).await.retry()?`.
pub trait FailureExt<T> {
    /// The error of the call.
    type Error;

    /// Nothing happened: safe to run again.
    ///
    /// # Errors
    /// [`Failure::Retry`] in place of the error.
    fn retry(self) -> Result<T, Failure>
    where
        Self::Error: IntoCause;

    /// Nothing happened, and a retry does not help: the message is dead-lettered.
    ///
    /// # Errors
    /// [`Failure::Reject`] in place of the error.
    fn reject(self) -> Result<T, Failure>
    where
        Self::Error: IntoCause;

    /// It may have happened: the outcome is unknown.
    ///
    /// # Errors
    /// [`Failure::InDoubt`] in place of the error.
    fn in_doubt(self) -> Result<T, Failure>
    where
        Self::Error: IntoCause;
}

impl<T, E> FailureExt<T> for Result<T, E> {
    type Error = E;

    fn retry(self) -> Result<T, Failure>
    where
        E: IntoCause,
    {
        self.map_err(|error| Failure::Retry(error.into_cause()))
    }

    fn reject(self) -> Result<T, Failure>
    where
        E: IntoCause,
    {
        self.map_err(|error| Failure::Reject(error.into_cause()))
    }

    fn in_doubt(self) -> Result<T, Failure>
    where
        E: IntoCause,
    {
        self.map_err(|error| Failure::InDoubt(error.into_cause()))
    }
}

/// Types that can be the cause of a [`Failure`]: errors that are `Send` and `Sync`, and text.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the cause of a `Failure`",
    label = "its error is neither text nor a `std::error::Error` that is `Send`, `Sync` and `'static`",
    note = "implement `std::error::Error` for it, or pass its text: `.map_err(|error| format!(\"{{error:?}}\")).retry()?`"
)]
pub trait IntoCause {
    /// The error, boxed.
    fn into_cause(self) -> BoxError;
}

#[diagnostic::do_not_recommend]
impl<E: Into<BoxError>> IntoCause for E {
    fn into_cause(self) -> BoxError {
        self.into()
    }
}
