//! The context of a run, the second argument of a handler.

use std::sync::Arc;
use std::time::Duration;

use crate::id::MessageId;
use crate::lease::Lease;
use crate::message::Message;

/// The context of one run of a handler: the id, the fencing token, the message itself.
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) id: MessageId,
    pub(crate) attempt: u32,
    /// How many attempts failed before, including those without an effect, which the store does not
    /// count.
    pub(crate) failures: u32,
    pub(crate) message: Message,
    pub(crate) lease: Option<Arc<Lease>>,
}

impl Context {
    /// The idempotency key: pass it to downstream systems that deduplicate.
    pub fn id(&self) -> &str {
        self.id.as_str()
    }

    /// The fencing token: the number of the granted attempt, from 1. A downstream system that refuses
    /// numbers below the highest one that it has seen for an id is safe from a handler that runs on
    /// after its lease was lost.
    ///
    /// It increases after each attempt that may have had an effect. An attempt that ended with
    /// [`retry`](crate::FailureExt::retry) had none, so the next one may have the same number.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The message: key, headers, body, origin.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// How long the lease lasts without a renewal; zero once it is lost. Leases are renewed in the
    /// background. Code that continues when the future is dropped, such as a blocking thread, has to
    /// check this before each effect.
    ///
    /// [`Duration::MAX`] without a lease: with [`Guarantee::Bare`](crate::Guarantee::Bare), and without
    /// the gate.
    pub fn lease_remaining(&self) -> Duration {
        self.lease
            .as_ref()
            .map_or(Duration::MAX, |lease| lease.remaining())
    }
}
