//! What the user writes: a handler, and what it says when it fails.

use async_trait::async_trait;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::store::Cause;

/// Handles messages.
///
/// The payload is decoded from the body: as JSON, unless the consumer was given another [`Decode`](crate::Decode). A
/// payload that does not parse goes to the dead letters, and the consumer goes on.
///
/// The future may be dropped at any `.await`: when its lease is over, at its timeout, at the end of a drain. What it had
/// sent by then is an unknown outcome, and is treated as one.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// What the body is decoded into.
    type Payload: DeserializeOwned + Send;

    /// Does the work. `Ok` means that it happened.
    ///
    /// # Errors
    /// A [`Failure`] says what is known of the effect: nothing happened, it never will, or nobody knows.
    async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure>;

    /// Finds out whether an earlier attempt happened, when nobody knows.
    ///
    /// [`Reconciled::DidNotHappen`] means: it did not, *and nothing still can*. Whoever can only look answers
    /// [`Reconciled::Unknown`].
    ///
    /// # Errors
    /// Any failure counts as not having found out; it is tried again, and then the message goes to the in-doubt queue.
    async fn reconcile(&self, _payload: Self::Payload, _cx: &Context) -> Result<Reconciled, Failure> {
        Ok(Reconciled::Unknown)
    }
}

/// What a handler knows of its effect when it fails. There is no conversion from an error: at each fallible call the
/// handler says what it knows, with [`Knows`].
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nothing happened: safe to run again.
    #[error("nothing happened: {0}")]
    Retry(#[source] Cause),
    /// It will never work: dead letters.
    #[error("it will never work: {0}")]
    Reject(#[source] Cause),
    /// It may have happened: never run again on a guess.
    #[error("it may have happened: {0}")]
    InDoubt(#[source] Cause),
}

/// What `reconcile` found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reconciled {
    /// The effect happened.
    Happened,
    /// It did not, and nothing still can: the provider deduplicates by id, or was told to refuse what comes under it.
    DidNotHappen,
    /// Nobody can tell.
    Unknown,
}

/// Says what a handler knows when a call fails: `card(…).await.retry()?`.
pub trait Knows<T> {
    /// Nothing happened: safe to run again.
    ///
    /// # Errors
    /// [`Failure::Retry`] in place of the error.
    fn retry(self) -> Result<T, Failure>;

    /// It will never work: dead letters.
    ///
    /// # Errors
    /// [`Failure::Reject`] in place of the error.
    fn reject(self) -> Result<T, Failure>;

    /// It may have happened: never run again on a guess.
    ///
    /// # Errors
    /// [`Failure::InDoubt`] in place of the error.
    fn in_doubt(self) -> Result<T, Failure>;
}

impl<T, E: Into<Cause>> Knows<T> for Result<T, E> {
    fn retry(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Retry(error.into()))
    }

    fn reject(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::Reject(error.into()))
    }

    fn in_doubt(self) -> Result<T, Failure> {
        self.map_err(|error| Failure::InDoubt(error.into()))
    }
}
