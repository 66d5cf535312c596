//! Replies to the senders of messages, as in a request over a queue (RPC).
//!
//! The handler returns a reply. The store keeps it together with the record that the message is done,
//! and a publisher sends it before the message is settled. A copy of the message gets the stored reply
//! again, byte for byte, and the handler does not run.
//!
//! A message names its sender in its reply address: on RabbitMQ the properties `reply_to` and
//! `correlation_id`, on Kafka the headers of [`Replies::kafka_headers`]. A message without an address
//! is handled like any other.

mod source;
mod store;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::handler::{Failure, Handler, NoReconcile, Reconciled};
use crate::id::Key;
use crate::internal::Lock;
use crate::marker::Token;
use crate::message::{Message, ReplyAddress};
use crate::outbox::{CORRELATION_ID_HEADER, Publisher};
use crate::source::Recording;

pub use source::{ConnectedReplySource, ReplySource};
pub use store::ReplyStore;

/// Handles messages whose senders expect a reply: see [`replies`](self). Otherwise as a [`Handler`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler that replies",
    label = "this is not a `ReplyingHandler`",
    note = "implement it: `impl ReplyingHandler for … {{ type Payload = …; type Reply = …; async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<Self::Reply, Failure> {{ … }} }}`"
)]
pub trait ReplyingHandler: Send + Sync + 'static {
    /// The type into which the body is decoded.
    type Payload: DeserializeOwned + Send;
    /// The reply, which is sent as JSON.
    type Reply: Serialize + Send;

    /// Does the work, and returns the reply.
    ///
    /// # Errors
    /// A [`Failure`] that says whether the effect happened, and whether a retry helps. No reply is sent
    /// for it.
    fn handle(
        &self,
        payload: Self::Payload,
        cx: &Context,
    ) -> impl Future<Output = Result<Self::Reply, Failure>> + Send;

    /// As [`Handler::reconcile`]. If the effect happened, returns the reply.
    ///
    /// # Errors
    /// As [`Handler::reconcile`].
    fn reconcile(
        &self,
        payload: Self::Payload,
        cx: &Context,
    ) -> impl Future<Output = Result<ReconciledReply<Self::Reply>, Failure>> + Send {
        let _ = (payload, cx);
        async { Err(Failure::InDoubt(NoReconcile.into())) }
    }
}

/// The result of [`ReplyingHandler::reconcile`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconciledReply<R> {
    /// The effect happened; this is the reply.
    Happened(R),
    /// As [`Reconciled::DidNotHappen`].
    DidNotHappen,
    /// It cannot be determined whether the effect happened.
    Unknown,
}

/// How replies are sent.
#[derive(Clone)]
pub struct Replies<P> {
    publisher: P,
    max_bytes: usize,
    timeout: Duration,
    kafka_headers: (String, String),
}

/// The default limit of a reply, in bytes.
const MAX_BYTES: usize = 64 * 1024;

/// How long the publishing of a reply is retried by default.
const TIMEOUT: Duration = Duration::from_secs(10);

impl<P: Publisher> Replies<P> {
    /// Sends replies with this publisher: `RabbitMq::publisher` or `Kafka::publisher`.
    pub fn by(publisher: P) -> Self {
        Self {
            publisher,
            max_bytes: MAX_BYTES,
            timeout: TIMEOUT,
            kafka_headers: ("reply-topic".into(), CORRELATION_ID_HEADER.into()),
        }
    }

    /// The largest reply, in bytes of JSON. Default: 64 KiB. With a larger one, the message is done
    /// without a reply, and a warning is logged.
    #[must_use]
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// How long the publishing of a reply is retried whose queue or topic is missing or full. After
    /// that, the message is settled without a reply, a warning is logged, and for
    /// another such period each reply to that queue is tried only once. Default: 10 s. While the broker is unavailable, the reply
    /// waits, and the message is not settled.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The headers of a Kafka record that name the reply topic and the correlation id. The reply has the
    /// correlation id, which must be UTF-8, in a header of the same name. Default: `reply-topic` and
    /// `correlation-id`.
    #[must_use]
    pub fn kafka_headers(
        mut self,
        topic: impl Into<String>,
        correlation: impl Into<String>,
    ) -> Self {
        self.kafka_headers = (topic.into(), correlation.into());
        self
    }

    /// The address of a message, and the header in which the reply has the correlation id; `None` if the
    /// sender expects no reply.
    fn address(&self, message: &Message) -> Option<(ReplyAddress, &str)> {
        if let Some(address) = &message.reply_to {
            return Some(((**address).clone(), CORRELATION_ID_HEADER));
        }
        let text = |name: &str| {
            let value = std::str::from_utf8(message.headers.last(name)?).ok()?;
            (!value.is_empty()).then(|| value.to_owned())
        };
        let (topic, correlation) = &self.kafka_headers;
        let address = ReplyAddress {
            destination: text(topic)?,
            correlation_id: text(correlation),
        };
        Some((address, correlation))
    }
}

impl<P: Publisher> fmt::Debug for Replies<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replies")
            .field("publisher", &self.publisher.described())
            .field("max_bytes", &self.max_bytes)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// The replies of runs that succeeded, until the store has them.
#[derive(Debug, Default)]
pub(crate) struct PendingReplies {
    /// Set when the source is connected, before the first run.
    recording: OnceLock<Recording>,
    of_claims: Lock<HashMap<(Key, Token), PendingReply>>,
}

/// The reply of a run.
#[derive(Debug)]
struct PendingReply {
    reply: Vec<u8>,
    kept_since: Instant,
}

/// From this number of pending replies, those of runs that lost their claim are removed.
const SWEEP_AT: usize = 4_096;

/// A reply that is pending for longer is that of a run that lost its claim, unless the store was
/// unavailable meanwhile.
const LONGEST_PENDING: Duration = Duration::from_secs(3_600);

impl PendingReplies {
    fn insert(&self, cx: &Context, reply: Vec<u8>) {
        let (Some(recording), Some(id)) = (self.recording.get(), &cx.0.id) else {
            return; // does not occur
        };
        if let Some(lease) = &cx.0.lease {
            let mut of_claims = self.of_claims.lock();
            if of_claims.len() >= SWEEP_AT {
                of_claims.retain(|_, pending| pending.kept_since.elapsed() < LONGEST_PENDING);
            }
            let pending = PendingReply {
                reply,
                kept_since: Instant::now(),
            };
            of_claims.insert((recording.scope.key(id), lease.token), pending);
        }
    }
}

/// A [`ReplyingHandler`] as a handler: see
/// [`Builder::replying_handler`](crate::Builder::replying_handler).
pub struct Replying<H> {
    handler: H,
    pending: Arc<PendingReplies>,
    max_bytes: usize,
}

impl<H> Replying<H> {
    pub(crate) fn new<P>(handler: H, pending: Arc<PendingReplies>, replies: &Replies<P>) -> Self {
        Self {
            handler,
            pending,
            max_bytes: replies.max_bytes,
        }
    }
}

impl<H> fmt::Debug for Replying<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replying").finish_non_exhaustive()
    }
}

impl<H: ReplyingHandler> Replying<H> {
    /// Keeps the reply for the store. A reply that cannot be stored is left out, because the effect
    /// happened.
    fn keep(&self, reply: &H::Reply, cx: &Context) {
        let problem = match serde_json::to_vec(reply) {
            Ok(encoded) if encoded.len() <= self.max_bytes => {
                return self.pending.insert(cx, encoded);
            }
            Ok(encoded) => format!(
                "it has {} bytes, and at most {} are allowed; raise `Replies::max_bytes`",
                encoded.len(),
                self.max_bytes
            ),
            // The error of a serializer may quote the reply.
            Err(_) => "it cannot be serialized as JSON".to_owned(),
        };
        tracing::warn!(
            id = cx.id(),
            problem,
            "reply not stored: the message is done, and its sender gets none"
        );
    }
}

impl<H: ReplyingHandler> Handler for Replying<H> {
    type Payload = H::Payload;

    async fn handle(&self, payload: Self::Payload, cx: &Context) -> Result<(), Failure> {
        let reply = self.handler.handle(payload, cx).await?;
        self.keep(&reply, cx);
        Ok(())
    }

    async fn reconcile(&self, payload: Self::Payload, cx: &Context) -> Result<Reconciled, Failure> {
        Ok(match self.handler.reconcile(payload, cx).await? {
            ReconciledReply::Happened(reply) => {
                self.keep(&reply, cx);
                Reconciled::Happened
            }
            ReconciledReply::DidNotHappen => Reconciled::DidNotHappen,
            ReconciledReply::Unknown => Reconciled::Unknown,
        })
    }
}
