//! Sends the reply of each handled message before its source settles it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::task::JoinSet;

use super::{PendingReplies, Replies};
use crate::id::{IdSource, Key, MessageId};
use crate::internal::{Backoff, Lock, LogThrottle};
use crate::lifecycle::{Reason, Settlement};
use crate::message::Origin;
use crate::outbox::{CONTENT_TYPE_HEADER, NotPublished, OutboxMessage, Publisher};
use crate::source::{
    Connect, ConnectOptions, Incoming, Limit, QueueLevel, Settled, Source, SourceError,
    SourceProperties,
};
use crate::store::{Store, StoreError};

/// With this number of unsent replies nothing is received.
const MAX_UNSENT: usize = 1_000;

/// At most one line about replies that were not sent in this period.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Describes a source whose handled messages are settled after their replies were sent:
/// see [`Builder::replying_handler`](crate::Builder::replying_handler).
pub struct ReplySource<S, P> {
    pub(crate) source: S,
    pub(crate) replies: Replies<P>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) pending: Arc<PendingReplies>,
}

#[async_trait]
impl<S: Connect, P: Publisher> Connect for ReplySource<S, P> {
    type Source = ConnectedReplySource<S::Source, P>;

    fn check_id(&self, id: &IdSource) -> Result<(), SourceError> {
        self.source.check_id(id)
    }

    async fn connect(self, options: ConnectOptions) -> Result<Self::Source, SourceError> {
        self.replies.publisher.preflight().await?;
        let _ = self.pending.scope.set(options.scope.clone());
        let sender = ReplySender {
            replies: self.replies,
            store: self.store,
            pending: self.pending,
            id: options.id.clone(),
            log: Lock::new(LogThrottle::every(LOG_INTERVAL)),
        };
        Ok(ConnectedReplySource {
            source: Box::new(self.source.connect(options).await?),
            sender: Arc::new(sender),
            sending: JoinSet::new(),
            sent: Vec::new(),
        })
    }
}

/// A source whose handled messages are settled after their replies were sent.
pub struct ConnectedReplySource<S, P> {
    source: Box<S>,
    sender: Arc<ReplySender<P>>,
    sending: JoinSet<Settled>,
    /// The messages whose replies were sent, to be settled.
    sent: Vec<Settled>,
}

impl<S: Source, P: Publisher> ConnectedReplySource<S, P> {
    async fn settle_sent(&mut self) -> Result<(), SourceError> {
        if self.sent.is_empty() {
            return Ok(());
        }
        self.source.settle(&mut self.sent).await
    }
}

#[async_trait]
impl<S: Source, P: Publisher> Source for ConnectedReplySource<S, P> {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        self.settle_sent().await?;
        let limit = if self.sending.len() < MAX_UNSENT {
            limit
        } else {
            Limit::NOTHING
        };
        tokio::select! {
            biased;
            Some(sent) = self.sending.join_next() => self.sent.extend(sent.ok()),
            received = self.source.receive(limit, into) => return received,
        }
        while let Some(Ok(sent)) = self.sending.try_join_next() {
            self.sent.push(sent);
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        for settled in settled.drain(..) {
            match self.sender.task(&settled) {
                Some(task) => {
                    let sender = Arc::clone(&self.sender);
                    self.sending.spawn(async move {
                        sender.send(task).await;
                        settled
                    });
                }
                None => self.sent.push(settled),
            }
        }
        self.settle_sent().await
    }

    async fn stop(&mut self) {
        self.source.stop().await;
    }

    async fn close(mut self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        let all_sent = async {
            while let Some(sent) = self.sending.join_next().await {
                self.sent.extend(sent.ok());
            }
        };
        // Messages whose replies were not sent are redelivered.
        let _ = tokio::time::timeout_at(deadline.into(), all_sent).await;
        self.settle_sent().await?;
        self.source.close(deadline).await
    }

    fn queue_level(&mut self, level: QueueLevel) {
        self.source.queue_level(level);
    }

    fn destination(&self, origin: &Origin, reason: &Reason) -> Option<String> {
        self.source.destination(origin, reason)
    }

    fn properties(&self) -> SourceProperties {
        self.source.properties()
    }
}

/// Sends replies that the store has.
struct ReplySender<P> {
    replies: Replies<P>,
    store: Arc<dyn Store>,
    pending: Arc<PendingReplies>,
    id: Option<IdSource>,
    log: Lock<LogThrottle>,
}

impl<P: Publisher> ReplySender<P> {
    /// What is needed to send the reply; `None` if the message is not done, or names no address.
    fn task(&self, settled: &Settled) -> Option<ReplyTask> {
        let Settlement::Accept(_) = settled.settlement else {
            return None;
        };
        let message = &settled.delivery.message;
        let (address, correlation_header) = self.replies.address(message)?;
        let id = self.id.as_ref()?.read(message).ok()?;
        let mut headers = vec![(CONTENT_TYPE_HEADER.into(), "application/json".into())];
        headers.extend(
            address
                .correlation_id
                .map(|id| (correlation_header.to_owned(), id)),
        );
        let mut message = OutboxMessage::new(format!("{id}/reply"), address.destination, "");
        message.headers = headers;
        Some(ReplyTask {
            key: self.pending.scope.get()?.key(&id),
            id,
            message,
        })
    }

    /// Sends the stored reply, or logs why none is sent.
    async fn send(&self, task: ReplyTask) {
        let ReplyTask {
            key,
            id,
            mut message,
        } = task;
        let why = match self.stored(&key).await {
            Ok(Some(reply)) => {
                message.body = reply.into();
                match self.publish(&message).await {
                    Ok(()) => return,
                    Err(error) => error.to_string(),
                }
            }
            Ok(None) => "the store has no reply: the message was completed without one".to_owned(),
            Err(error) => error.to_string(),
        };
        if let Some(suppressed_lines) = self.log.lock().due(Instant::now()) {
            tracing::warn!(%id, destination = %message.destination, error = %why, suppressed_lines, "reply not sent: the message is done and is settled; its sender may send it again to get the reply");
        }
    }

    /// The stored reply. Waits while the store is unavailable.
    async fn stored(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        let mut backoff = Backoff::default();
        loop {
            let Some(results) = self.store.results() else {
                return Ok(None); // does not occur: checked at start
            };
            match results.read(key).await {
                Err(StoreError::NotApplied(_) | StoreError::Unknown(_)) => {
                    tokio::time::sleep(backoff.advance_with_jitter()).await;
                }
                answered => return answered,
            }
        }
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        let give_up_at = Instant::now() + self.replies.timeout;
        let mut backoff = Backoff::default();
        loop {
            match self.replies.publisher.publish(message).await {
                Err(NotPublished::NotConfirmed(_)) if Instant::now() < give_up_at => {
                    tokio::time::sleep(backoff.advance_with_jitter()).await;
                }
                ended => return ended,
            }
        }
    }
}

/// What is needed to send the reply to one message.
struct ReplyTask {
    key: Key,
    id: MessageId,
    /// The reply without its body.
    message: OutboxMessage,
}

impl<S: fmt::Debug, P: Publisher> fmt::Debug for ReplySource<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplySource")
            .field("source", &self.source)
            .field("replies", &self.replies)
            .finish_non_exhaustive()
    }
}

impl<S, P> fmt::Debug for ConnectedReplySource<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectedReplySource")
            .field("unsent", &self.sending.len())
            .finish_non_exhaustive()
    }
}
