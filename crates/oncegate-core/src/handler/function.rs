//! Functions and closures that handle messages.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;

use serde::de::DeserializeOwned;

use super::{Failure, Handler, Reconciled};
use crate::context::Context;

/// Makes a [`Handler`] of an `async fn` or a closure. Its context is owned, so that its future borrows
/// nothing:
///
/// ```
/// # use oncegate_core::{Context, Failure, handler::handler_fn};
/// async fn print(article: String, cx: Context) -> Result<(), Failure> {
///     println!("{} {article}", cx.id());
///     Ok(())
/// }
/// let handler = handler_fn(print);
/// ```
///
/// A closure runs once for each message, so it clones what it captures (an `Arc`, a pool) for each
/// future:
///
/// ```
/// # use std::sync::Arc;
/// # use oncegate_core::{FailureExt, handler::handler_fn};
/// # struct Shelf;
/// # impl Shelf { async fn put(&self, _: &str, _: String) -> Result<(), String> { Ok(()) } }
/// # let shelf = Arc::new(Shelf);
/// let handler = handler_fn(move |article: String, cx| {
///     let shelf = shelf.clone();
///     async move { shelf.put(cx.id(), article).await.retry() }
/// });
/// ```
pub fn handler_fn<F, P>(function: F) -> HandlerFn<F, P>
where
    F: MessageFn<P, ()>,
{
    HandlerFn {
        function,
        payload: PhantomData,
    }
}

/// A function that is a [`Handler`] without `reconcile`: see [`handler_fn`].
pub struct HandlerFn<F, P> {
    function: F,
    payload: PhantomData<fn(P)>,
}

impl<F, P> HandlerFn<F, P> {
    /// Adds the function that finds out whether an attempt had its effect:
    /// [`Handler::reconcile`]. It has the same arguments, and returns a [`Reconciled`].
    pub fn reconcile<G>(self, reconcile: G) -> ReconcilingFn<F, G, P>
    where
        G: MessageFn<P, Reconciled>,
    {
        ReconcilingFn {
            function: self.function,
            reconcile,
            payload: PhantomData,
        }
    }
}

impl<F, P> Handler for HandlerFn<F, P>
where
    F: MessageFn<P, ()> + Send + Sync + 'static,
    P: DeserializeOwned + Send + 'static,
{
    type Payload = P;

    async fn handle(&self, payload: P, cx: &Context) -> Result<(), Failure> {
        (self.function)(payload, cx.clone()).await
    }
}

impl<F, P> fmt::Debug for HandlerFn<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerFn").finish_non_exhaustive()
    }
}

/// Two functions that are a [`Handler`]: see [`HandlerFn::reconcile`].
pub struct ReconcilingFn<F, G, P> {
    function: F,
    reconcile: G,
    payload: PhantomData<fn(P)>,
}

impl<F, G, P> Handler for ReconcilingFn<F, G, P>
where
    F: MessageFn<P, ()> + Send + Sync + 'static,
    G: MessageFn<P, Reconciled> + Send + Sync + 'static,
    P: DeserializeOwned + Send + 'static,
{
    type Payload = P;

    async fn handle(&self, payload: P, cx: &Context) -> Result<(), Failure> {
        (self.function)(payload, cx.clone()).await
    }

    async fn reconcile(&self, payload: P, cx: &Context) -> Result<Reconciled, Failure> {
        (self.reconcile)(payload, cx.clone()).await
    }
}

impl<F, G, P> fmt::Debug for ReconcilingFn<F, G, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconcilingFn").finish_non_exhaustive()
    }
}

/// A function that [`handler_fn`] accepts, with the payload `P` and the result `T`. Implemented for
/// all of them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a function that handles messages",
    label = "not such a function, or one whose future is not `Send`",
    note = "write it as `async fn handle(payload: …, cx: Context) -> Result<{T}, Failure>`, or as the closure `|payload: …, cx| async move {{ … }}`, which clones what it captures before `async move`"
)]
pub trait MessageFn<P, T>: Fn(P, Context) -> Self::Handling {
    /// The future of a run.
    type Handling: Future<Output = Result<T, Failure>> + Send;
}

impl<P, T, F, R> MessageFn<P, T> for F
where
    F: Fn(P, Context) -> R,
    R: Future<Output = Result<T, Failure>> + Send,
{
    type Handling = R;
}
