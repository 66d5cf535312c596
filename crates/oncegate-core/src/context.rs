//! The context of a run, the second argument of a handler.

use std::sync::Arc;
use std::time::Duration;

use crate::id::{MessageId, Scope};
use crate::lease::Lease;
use crate::marker::{Operation, OperationKind, Terms, Token};
use crate::message::Message;

/// The context of one run of a handler: the id, the fencing token, the message itself.
#[derive(Clone, Debug)]
pub struct Context(pub(crate) Arc<SharedDelivery>);

/// The data of one delivery that the engine, the context of a handler and the renewals share.
///
/// The engine changes a record only while no other reference to it exists, and otherwise a copy: a
/// handler that keeps its context keeps the values of its own run. Only the deadlines of the lease
/// change for all references.
#[derive(Clone, Debug)]
pub(crate) struct SharedDelivery {
    /// `None` if the message has no usable id, so that its handler never runs.
    pub(crate) id: Option<MessageId>,
    /// `None` in a [`Gate`](crate::Gate), and after the delivery was settled.
    pub(crate) message: Option<Message>,
    pub(crate) terms: Terms,
    /// How many attempts failed before, including those without an effect, which the store does not
    /// count.
    pub(crate) failures: u32,
    /// The number of the granted attempt; 0 before the grant.
    pub(crate) attempt: u32,
    /// `None` without a grant.
    pub(crate) lease: Option<Lease>,
}

impl SharedDelivery {
    /// The message of a delivery that is not settled.
    #[inline]
    pub(crate) fn message(&self) -> &Message {
        self.message
            .as_ref()
            .expect("only settling takes the message, after the last run")
    }

    /// The operation that renews the lease; `None` without a lease.
    pub(crate) fn renewal(&self, scope: &Scope) -> Option<Operation> {
        Some(Operation {
            key: scope.key(self.id.as_ref()?),
            kind: OperationKind::Renew,
            token: self.lease.as_ref()?.token,
            attempt: self.attempt,
            terms: self.terms,
        })
    }
}

impl Context {
    /// The operation that claims the id; `None` without an id.
    pub(crate) fn claim(&self, scope: &Scope) -> Option<Operation> {
        Some(Operation {
            key: scope.key(self.0.id.as_ref()?),
            kind: OperationKind::Claim,
            token: self.0.lease.as_ref().map_or(Token(0), |lease| lease.token),
            attempt: 0,
            terms: self.0.terms,
        })
    }

    /// The idempotency key: pass it to a sink that deduplicates. The sink is the system in which
    /// the handler causes its effect.
    pub fn id(&self) -> &str {
        self.0.id.as_ref().map_or("", MessageId::as_str)
    }

    /// The fencing token: the number of the granted attempt, from 1. A sink that refuses numbers
    /// below the highest one that it has seen for an id is protected from a handler that continues
    /// after its lease was lost.
    ///
    /// With an [inbox](crate::inbox) it is no fencing token: each process counts from 1. It is
    /// always 1 with [`Guarantee::Bare`](crate::Guarantee::Bare), and in a run without the store
    /// ([`Outage::PassThrough`](crate::Outage::PassThrough)).
    ///
    /// It increases after each attempt that may have had an effect. An attempt that ended with
    /// [`retry`](crate::FailureExt::retry) had no effect, so the next attempt may have the same
    /// number.
    pub fn attempt(&self) -> u32 {
        self.0.attempt.max(1)
    }

    /// The message: key, headers, body, origin.
    pub fn message(&self) -> &Message {
        self.0.message()
    }

    /// How long the lease lasts without a renewal; zero once it is lost. Leases are renewed in the
    /// background. Code that continues when the future is dropped, such as a blocking thread, has
    /// to check this before each effect.
    ///
    /// [`Duration::MAX`] without a lease: with [`Guarantee::Bare`](crate::Guarantee::Bare), and
    /// while the store is unavailable with [`Outage::PassThrough`](crate::Outage::PassThrough).
    pub fn lease_remaining(&self) -> Duration {
        self.0
            .lease
            .as_ref()
            .map_or(Duration::MAX, Lease::remaining)
    }
}
