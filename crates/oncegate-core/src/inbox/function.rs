//! Functions that handle messages in transactions.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;

use serde::de::DeserializeOwned;

use super::{Inbox, TransactionalHandler};
use crate::context::Context;
use crate::handler::Failure;

/// Makes a [`TransactionalHandler`] of an `async fn`, or of an async closure that captures nothing:
///
/// ```text
/// async fn book(transfer: Transfer, transaction: &mut PostgresTransaction, cx: &Context) -> Result<(), Failure>
/// ```
///
/// A handler with state implements the trait instead.
pub fn transactional_fn<F, P, T>(function: F) -> TransactionalFn<F, P>
where
    F: for<'a> TransactionFn<'a, P, T>,
{
    TransactionalFn {
        function,
        payload: PhantomData,
    }
}

/// A function that is a [`TransactionalHandler`]: see [`transactional_fn`].
pub struct TransactionalFn<F, P> {
    function: F,
    payload: PhantomData<fn(P)>,
}

impl<I, F, P> TransactionalHandler<I> for TransactionalFn<F, P>
where
    I: Inbox,
    F: for<'a> TransactionFn<'a, P, I::Transaction> + Send + Sync + 'static,
    P: DeserializeOwned + Send + 'static,
{
    type Payload = P;

    async fn handle(
        &self,
        payload: P,
        transaction: &mut I::Transaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        (self.function)(payload, transaction, cx).await
    }
}

impl<F, P> fmt::Debug for TransactionalFn<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionalFn").finish_non_exhaustive()
    }
}

/// A function that [`transactional_fn`] accepts, with the payload `P` and the transaction `T`.
/// Implemented for all of them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a function that handles messages in transactions",
    label = "not such a function, or one whose future is not `Send`",
    note = "write it as `async fn handle(payload: …, transaction: &mut …, cx: &Context) -> Result<(), Failure>`; a handler with state implements `TransactionalHandler`"
)]
pub trait TransactionFn<'a, P, T: 'a>: Fn(P, &'a mut T, &'a Context) -> Self::Handling {
    /// The future of a run.
    type Handling: Future<Output = Result<(), Failure>> + Send;
}

impl<'a, P, T, F, R> TransactionFn<'a, P, T> for F
where
    T: 'a,
    F: Fn(P, &'a mut T, &'a Context) -> R,
    R: Future<Output = Result<(), Failure>> + Send,
{
    type Handling = R;
}
