//! Sends the reply of each handled message before its source settles it.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::task::{JoinError, JoinSet};

use super::{PendingReplies, Replies};
use crate::id::{IdSource, Key, MessageId};
use crate::internal::{Backoff, Lock, LogThrottle};
use crate::lifecycle::{Reason, Settlement};
use crate::marker::Fingerprint;
use crate::message::Origin;
use crate::outbox::{CONTENT_TYPE_HEADER, NotPublished, OutboxMessage, Publisher};
use crate::settings::MAX_DURATION;
use crate::source::{
    Connect, ConnectOptions, Incoming, Limit, QueueLevel, Settled, Source, SourceError,
    SourceProperties,
};
use crate::store::{BoxError, Store, StoreError};

/// With this number of unsent replies nothing is received.
const MAX_UNSENT: usize = 1_000;

/// With this number of bytes in messages whose replies are unsent, nothing is received.
const MAX_UNSENT_BYTES: usize = 64 * 1024 * 1024;

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
        let _ = self.pending.recording.set(options.recording.clone());
        let sender = ReplySender {
            replies: self.replies,
            store: self.store,
            pending: self.pending,
            id: options.id.clone(),
            log: Lock::new(LogThrottle::every(LOG_INTERVAL)),
            waiting_log: Lock::new(LogThrottle::every(LOG_INTERVAL)),
            without_queue: Lock::default(),
        };
        Ok(ConnectedReplySource {
            source: Box::new(self.source.connect(options).await?),
            sender: Arc::new(sender),
            sending: JoinSet::new(),
            sending_bytes: 0,
            sent: Vec::new(),
        })
    }
}

/// A source whose handled messages are settled after their replies were sent.
pub struct ConnectedReplySource<S, P> {
    source: Box<S>,
    sender: Arc<ReplySender<P>>,
    sending: JoinSet<Settled>,
    sending_bytes: usize,
    /// The messages whose replies were sent, to be settled.
    sent: Vec<Settled>,
}

impl<S: Source, P: Publisher> ConnectedReplySource<S, P> {
    /// Settles the messages whose replies were sent.
    async fn settle_sent(&mut self) -> Result<(), SourceError> {
        while let Some(sent) = self.sending.try_join_next() {
            self.sent(sent);
        }
        if self.sent.is_empty() {
            return Ok(());
        }
        self.source.settle(&mut self.sent).await
    }

    /// Takes the message of a task, which ends without a panic: see [`ReplySender::send`].
    fn sent(&mut self, sent: Result<Settled, JoinError>) {
        if let Ok(settled) = sent {
            self.sending_bytes -= settled.delivery.message.size();
            self.sent.push(settled);
        }
    }
}

#[async_trait]
impl<S: Source, P: Publisher> Source for ConnectedReplySource<S, P> {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        self.settle_sent().await?;
        let is_full = self.sending.len() >= MAX_UNSENT || self.sending_bytes >= MAX_UNSENT_BYTES;
        let limit = if is_full { Limit::NOTHING } else { limit };
        tokio::select! {
            biased;
            Some(sent) = self.sending.join_next() => {
                self.sent(sent);
                Ok(()) // settled by the next call
            }
            received = self.source.receive(limit, into) => received,
        }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        for mut settled in settled.drain(..) {
            // The function of `IdSource::by` may panic.
            let task = catch_unwind(AssertUnwindSafe(|| self.sender.task(&settled)));
            match task.unwrap_or_default() {
                Some(task) => {
                    settled.delivery.message.detach();
                    self.sending_bytes += settled.delivery.message.size();
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
        // The other half of the time is for the source.
        let now = Instant::now();
        let half = now + deadline.saturating_duration_since(now) / 2;
        let all_sent = async {
            while let Some(sent) = self.sending.join_next().await {
                self.sent(sent);
            }
        };
        // Messages whose replies were not sent are redelivered.
        if tokio::time::timeout_at(half.into(), all_sent)
            .await
            .is_err()
        {
            let unsent = self.sending.len();
            tracing::warn!(
                unsent,
                "stopping before all replies were sent; their messages are redelivered"
            );
        }
        let settled = self.settle_sent().await;
        let closed = self.source.close(deadline).await;
        settled.and(closed)
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
    waiting_log: Lock<LogThrottle>,
    /// The queues and topics to which a reply could not be published, and until when replies to them
    /// are tried only once.
    without_queue: Lock<HashMap<String, Instant>>,
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
        let recording = self.pending.recording.get()?;
        let fingerprint = recording.fingerprints.of(message, recording.guarantee);
        let mut headers = vec![(CONTENT_TYPE_HEADER.into(), "application/json".into())];
        headers.extend(
            address
                .correlation_id
                .map(|id| (correlation_header.to_owned(), id)),
        );
        let mut message = OutboxMessage::new(format!("{id}/reply"), address.destination, "");
        message.headers = headers;
        Some(ReplyTask {
            key: recording.scope.key(&id),
            fingerprint,
            id,
            message,
        })
    }

    /// Sends the stored reply, or logs why none is sent. Does not panic.
    async fn send(&self, task: ReplyTask) {
        let (id, destination) = (task.id.clone(), task.message.destination.clone());
        let sent = AssertUnwindSafe(self.try_send(task)).catch_unwind().await;
        let Err(error) = sent.unwrap_or_else(|_| Err("the publisher panicked".into())) else {
            return;
        };
        if let Some(suppressed_lines) = self.log.lock().due(Instant::now()) {
            tracing::warn!(%id, destination, %error, suppressed_lines, "reply not sent: the message is done and is settled; do what the error says; the sender may send the message again to get the reply");
        }
    }

    async fn try_send(&self, mut task: ReplyTask) -> Result<(), BoxError> {
        let reply = self.stored(&task).await?;
        task.message.body = reply
            .ok_or("the store has no reply: the message was completed without one")?
            .into();
        Ok(self.publish(&task).await?)
    }

    /// The stored reply. Waits while the store is unavailable.
    async fn stored(&self, task: &ReplyTask) -> Result<Option<Vec<u8>>, StoreError> {
        let mut backoff = Backoff::default();
        loop {
            let Some(results) = self.store.results() else {
                return Ok(None); // does not occur: checked at start
            };
            match results.read(&task.key, task.fingerprint).await {
                Err(StoreError::UnreadableMarker(error)) => {
                    return Err(StoreError::UnreadableMarker(error));
                }
                Ok(stored) => return Ok(stored),
                Err(error) => self.log_waiting(task, &self.store.described(), &error),
            }
            tokio::time::sleep(backoff.advance_with_jitter()).await;
        }
    }

    /// Publishes a reply. Waits while the broker is unavailable.
    async fn publish(&self, task: &ReplyTask) -> Result<(), NotPublished> {
        let to = &task.message.destination;
        let now = Instant::now();
        let single_try = self
            .without_queue
            .lock()
            .get(to)
            .is_some_and(|until| now < *until);
        let timeout = self.replies.timeout.min(MAX_DURATION);
        let mut missing_since = None;
        let mut backoff = Backoff::default();
        loop {
            match self.replies.publisher.publish(&task.message).await {
                Err(NotPublished::NotConfirmed(error)) => {
                    missing_since = None;
                    self.log_waiting(task, &self.replies.publisher.described(), &error);
                }
                Err(NotPublished::NoDestination(error)) => {
                    let now = Instant::now();
                    let is_over = now >= *missing_since.get_or_insert(now) + timeout;
                    if is_over && !single_try {
                        let mut without_queue = self.without_queue.lock();
                        without_queue.retain(|_, until| now < *until);
                        without_queue.insert(to.clone(), now + timeout);
                    }
                    if is_over || single_try {
                        return Err(NotPublished::NoDestination(error));
                    }
                }
                ended => return ended,
            }
            tokio::time::sleep(backoff.advance_with_jitter()).await;
        }
    }

    fn log_waiting(&self, task: &ReplyTask, waits_for: &str, error: &dyn fmt::Display) {
        if let Some(suppressed_lines) = self.waiting_log.lock().due(Instant::now()) {
            tracing::warn!(id = %task.id, destination = task.message.destination, waits_for, %error, suppressed_lines, "reply waits, and its message is not settled; with 1,000 such messages or 64 MiB nothing is received; check what waits_for and error name");
        }
    }
}

/// What is needed to send the reply to one message.
struct ReplyTask {
    key: Key,
    fingerprint: Option<Fingerprint>,
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
