//! What a handler is told beside its payload.

use std::sync::Arc;
use std::time::Duration;

use crate::id::MessageId;
use crate::lease::Lease;
use crate::message::Message;

/// What a handler is told beside its payload: the id, the fence, the message itself.
#[derive(Clone, Debug)]
pub struct Context {
    pub(crate) id: MessageId,
    pub(crate) attempt: u32,
    /// How many attempts failed before, also those that the store forgot because they did nothing.
    pub(crate) failures: u32,
    pub(crate) message: Message,
    pub(crate) lease: Option<Arc<Lease>>,
}

impl Context {
    /// The idempotency key: hand it to whatever deduplicates further on.
    pub fn id(&self) -> &str {
        self.id.as_str()
    }

    /// The fence: which attempt the store granted, from 1. A sink that refuses anything below the
    /// highest attempt it has seen for an id is safe from a holder that was too slow to notice that
    /// it had lost its lease.
    ///
    /// It grows after each attempt that may have had an effect. An attempt that ended with
    /// [`retry`](crate::FailureExt::retry) had none, and the next may have the same number.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The message: key, headers, body, origin.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// How long the lease still lives if it is not renewed; zero once it is lost. Renewal goes on
    /// by itself; code that cannot be cancelled by dropping its future (a blocking thread) asks
    /// this before each effect.
    ///
    /// Without a lease (`bare`, or passed without the gate) it is [`Duration::MAX`].
    pub fn lease_remaining(&self) -> Duration {
        self.lease
            .as_ref()
            .map_or(Duration::MAX, |lease| lease.remaining())
    }
}
