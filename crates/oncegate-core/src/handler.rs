//! What the user writes: a handler, and what it says when it fails.

use async_trait::async_trait;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::store::BoxError;

/// Handles messages.
///
/// The payload is decoded from the body: as JSON, unless the consumer was given another
/// [`Decode`](crate::Decode). A payload that does not parse goes to the dead letters, and the
/// consumer goes on.
///
/// The future may be dropped at any `.await`: when its lease is over, at its timeout, at the end of
/// a drain. What it had sent by then is an unknown outcome, and is treated as one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler",
    label = "this is no `Handler`",
    note = "implement it: `#[async_trait] impl Handler for … {{ type Payload = …; async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure> {{ … }} }}`",
    note = "`()` says that the consumer was given no handler: call `.handler(…)`"
)]
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// What the body is decoded into.
    type Payload: DeserializeOwned + Send;

    /// Does the work. `Ok` means that it happened.
    ///
    /// # Errors
    /// A [`Failure`] says what is known of the effect: nothing happened, it never will, or nobody
    /// knows.
    async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure>;

    /// Finds out whether an earlier attempt happened, when nobody knows. The payload comes by
    /// value, as in `handle`.
    ///
    /// [`Reconciled::DidNotHappen`] means: it did not, *and nothing still can*, up to and including
    /// `cx.attempt()`. Whoever can only look answers [`Reconciled::Unknown`].
    ///
    /// # Errors
    /// Any failure counts as not having found out; it is tried again, and then the message goes to
    /// the in-doubt queue.
    async fn reconcile(
        &self,
        _payload: Self::Payload,
        _cx: &Context,
    ) -> Result<Reconciled, Failure> {
        Err(Failure::InDoubt("the handler has no `reconcile`".into()))
    }
}

/// What a handler knows of its effect when it fails. There is no conversion from errors in general:
/// at each fallible call the handler says what it knows, with [`FailureExt`].
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nothing happened: safe to run again.
    #[error("nothing happened: {0}")]
    Retry(#[source] BoxError),
    /// It will never work: dead letters.
    #[error("it will never work: {0}")]
    Reject(#[source] BoxError),
    /// It may have happened: never run again on a guess.
    #[error("it may have happened: {0}")]
    InDoubt(#[source] BoxError),
}

/// An error that always means the same [`Failure`]: `?` alone converts it. Implement it for errors
/// of your own; no other error says by itself whether anything happened, so that [`FailureExt`] has to.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whether anything happened, and makes no `Failure` by itself",
    label = "say what is known: `.retry()?` if nothing happened, `.reject()?` if it will never work, `.in_doubt()?` if it may have happened; with `use oncegate::FailureExt;`"
)]
pub trait IntoFailure {
    /// The failure that it means.
    fn into_failure(self) -> Failure;
}

impl<E: IntoFailure> From<E> for Failure {
    fn from(error: E) -> Self {
        error.into_failure()
    }
}

/// What `reconcile` found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reconciled {
    /// The effect happened.
    Happened,
    /// It did not, and nothing still can: the provider deduplicates by id, or was told to refuse
    /// what comes under it with an attempt up to and including
    /// [`Context::attempt`](crate::Context::attempt). With attempts below it alone the effect of a
    /// handler that reconciles its own outcome could still happen, beside that of the next run.
    DidNotHappen,
    /// Nobody can tell.
    Unknown,
}

/// Says what a handler knows when a call fails: `card(…).await.retry()?`.
pub trait FailureExt<T> {
    /// What the call fails with.
    type Error;

    /// Nothing happened: safe to run again.
    ///
    /// # Errors
    /// [`Failure::Retry`] in place of the error.
    fn retry(self) -> Result<T, Failure>
    where
        Self::Error: IntoCause;

    /// It will never work: dead letters.
    ///
    /// # Errors
    /// [`Failure::Reject`] in place of the error.
    fn reject(self) -> Result<T, Failure>
    where
        Self::Error: IntoCause;

    /// It may have happened: never run again on a guess.
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

/// What can be the cause of a [`Failure`]: every error that may go to another thread, and text.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the cause of a `Failure`",
    label = "its error is neither text nor a `std::error::Error` that is `Send`, `Sync` and `'static`",
    note = "implement `std::error::Error` for it, or hand over its text: `.map_err(|error| format!(\"{{error:?}}\")).retry()?`"
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
