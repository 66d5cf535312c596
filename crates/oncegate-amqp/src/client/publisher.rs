//! Publishes copies of messages (dead letters, in-doubt messages and delayed messages) on a
//! connection of their own.
//!
//! During a resource alarm RabbitMQ stops reading from connections that publish. Acknowledgements on
//! such a connection would wait for the end of the alarm.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use lapin::types::ShortString;
use lapin::{Connection, Event};
use oncegate_core::internal::Lock;
use tokio::sync::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

use crate::client::connector;
use crate::client::context::SourceContext;
use crate::client::destination_publisher::DestinationPublisher;
use crate::client::problem_throttle::ProblemThrottle;
use crate::protocol::message_copy::MessageCopy;
use oncegate_core::internal::Backoff;

/// The handle of the source's task (`driver`) to the publishers. Each destination queue has a task of
/// its own, so that a missing or full queue does not delay copies for others.
pub(crate) struct CopyPublisher {
    context: Arc<PublisherContext>,
    destinations: HashMap<ShortString, UnboundedSender<MessageCopy>>,
    tasks: JoinSet<()>,
    confirmed: UnboundedReceiver<Vec<ConfirmedCopy>>,
}

/// A copy that the broker has confirmed.
pub(crate) struct ConfirmedCopy {
    /// The consuming channel that delivered the original: [`MessageCopy::epoch`].
    pub(crate) epoch: u64,
    /// The delivery tag of the original.
    pub(crate) tag: u64,
}

/// What the publishers of a source share.
pub(crate) struct PublisherContext {
    pub(crate) source: Arc<SourceContext>,
    /// The epoch of the open consuming channel; 0 while none is open.
    open_epoch: Arc<AtomicU64>,
    confirmations: UnboundedSender<Vec<ConfirmedCopy>>,
    connection: Mutex<PublishConnection>,
    throttle: Lock<ProblemThrottle>,
}

/// The connection for publishing. It is opened when there is something to publish.
#[derive(Default)]
struct PublishConnection {
    open: Option<Arc<Connection>>,
    /// The task that tracks resource alarms.
    alarm_listener: Option<AbortHandle>,
    backoff: Backoff,
}

impl CopyPublisher {
    /// `open_epoch` is the epoch of the open consuming channel, or 0. Copies from other channels are
    /// dropped, because the broker redelivers their originals.
    pub(crate) fn new(source: Arc<SourceContext>, open_epoch: Arc<AtomicU64>) -> Self {
        let (confirmations, confirmed) = unbounded_channel();
        Self {
            context: PublisherContext::new(source, open_epoch, confirmations),
            destinations: HashMap::new(),
            tasks: JoinSet::new(),
            confirmed,
        }
    }

    /// Publishes the copy, again until it is confirmed or
    /// [obsolete](PublisherContext::is_obsolete).
    pub(crate) fn publish(&mut self, copy: MessageCopy) {
        let (context, tasks) = (&self.context, &mut self.tasks);
        let destination = self
            .destinations
            .entry(copy.destination.clone())
            .or_insert_with(|| {
                let (sender, copies) = unbounded_channel();
                tasks.spawn(DestinationPublisher::new(Arc::clone(context), copies).run());
                sender
            });
        // If the task ended, `confirmed` returns `None`.
        let _ = destination.send(copy);
    }

    /// The next confirmed copies; `None` if a publisher task ended, which only a bug can cause.
    /// Cancel-safe.
    pub(crate) async fn confirmed(&mut self) -> Option<Vec<ConfirmedCopy>> {
        tokio::select! {
            biased;
            confirmed = self.confirmed.recv() => confirmed,
            Some(_) = self.tasks.join_next() => None,
        }
    }

    /// Ends the tasks and closes the connection. Copies that are not confirmed are dropped, and the
    /// broker redelivers their originals.
    pub(crate) async fn close(mut self, timeout: Duration) {
        self.tasks.shutdown().await;
        let mut connection = self.context.connection.lock().await;
        if let Some(open) = connection.end(&self.context.source) {
            connector::close(&open, timeout).await;
        }
    }
}

impl PublishConnection {
    /// Stops tracking alarms, and returns the connection, which is open or lost.
    fn end(&mut self, source: &SourceContext) -> Option<Arc<Connection>> {
        if let Some(listener) = self.alarm_listener.take() {
            listener.abort();
        }
        source.metrics.unblocked();
        self.open.take()
    }
}

impl PublisherContext {
    fn new(
        source: Arc<SourceContext>,
        open_epoch: Arc<AtomicU64>,
        confirmations: UnboundedSender<Vec<ConfirmedCopy>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            source,
            open_epoch,
            confirmations,
            connection: Mutex::default(),
            throttle: Lock::default(),
        })
    }

    /// The context of a publisher whose reports are dropped.
    #[cfg(test)]
    pub(crate) fn for_tests(source: Arc<SourceContext>, open_epoch: u64) -> Arc<Self> {
        Self::new(
            source,
            Arc::new(AtomicU64::new(open_epoch)),
            unbounded_channel().0,
        )
    }

    /// The open connection, or a new one. Retries with backoff.
    pub(crate) async fn connection(&self) -> Arc<Connection> {
        let mut connection = self.connection.lock().await;
        loop {
            if let Some(open) = &connection.open
                && open.status().connected()
            {
                return Arc::clone(open);
            }
            connection.end(&self.source);
            match connector::connect(&self.source, "publishes").await {
                Ok((opened, _)) => {
                    connection.backoff.reset();
                    let events = opened.events_listener();
                    let tracking = track_alarms(Arc::clone(&self.source), events);
                    connection.alarm_listener = Some(tokio::spawn(tracking).abort_handle());
                    return Arc::clone(connection.open.insert(Arc::new(opened)));
                }
                Err(error) => {
                    let pause = connection.backoff.advance_with_jitter();
                    self.warn(&error.to_string(), pause);
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Whether the copy need not be published: its original is redelivered because its channel is
    /// closed.
    pub(crate) fn is_obsolete(&self, copy: &MessageCopy) -> bool {
        copy.epoch != self.open_epoch.load(Ordering::Acquire)
    }

    /// Reports confirmed copies to the driver.
    pub(crate) fn report_confirmed(&self, copies: Vec<Arc<MessageCopy>>) {
        self.source.metrics.copies_confirmed(copies.len());
        let confirmed = copies.iter().map(|copy| ConfirmedCopy {
            epoch: copy.epoch,
            tag: copy.tag,
        });
        let _ = self.confirmations.send(confirmed.collect());
    }

    /// Logs a failure at a limited rate.
    pub(crate) fn warn(&self, error: &str, pause: Duration) {
        let (queue, broker) = (&*self.source.name, self.source.redacted_url());
        let mut throttle = self.throttle.lock();
        if throttle.is_due(error, Instant::now()) {
            tracing::warn!(
                queue,
                broker,
                error,
                ?pause,
                "cannot publish to the dead-letter, in-doubt or delay queue; retrying; the original message stays unacknowledged; check that this queue exists and is not full, and that the user may publish to it"
            );
        } else {
            tracing::debug!(
                queue,
                broker,
                error,
                ?pause,
                "publishing failed again; retrying"
            );
        }
    }
}

/// Tracks `connection.blocked` and `connection.unblocked` until the connection is closed.
async fn track_alarms(source: Arc<SourceContext>, mut events: impl Stream<Item = Event> + Unpin) {
    let queue = &*source.name;
    while let Some(event) = events.next().await {
        match event {
            Event::ConnectionBlocked(reason) => {
                tracing::warn!(
                    queue,
                    reason,
                    "RabbitMQ blocks publishing because of a resource alarm; dead letters and delayed messages wait; free memory or disk space on the broker"
                );
                source.metrics.blocked();
            }
            Event::ConnectionUnblocked => {
                tracing::info!(queue, "RabbitMQ no longer blocks publishing");
                source.metrics.unblocked();
            }
            _ => {}
        }
    }
    source.metrics.unblocked();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RabbitMq;

    #[tokio::test]
    async fn the_end_of_a_publisher_task_is_reported() {
        let source = Arc::new(
            RabbitMq::queue("orders")
                .url("amqp://127.0.0.1:1")
                .check()
                .expect("settings"),
        );
        let mut publisher = CopyPublisher::new(source, Arc::default());
        publisher.publish(MessageCopy {
            epoch: 1,
            tag: 1,
            destination: "orders.dead-letters".into(),
            properties: lapin::BasicProperties::default(),
            body: "".into(),
        });
        let none_ended =
            tokio::time::timeout(Duration::from_millis(20), publisher.confirmed()).await;
        assert!(none_ended.is_err());
        publisher.tasks.abort_all();
        let confirmed = tokio::time::timeout(Duration::from_secs(5), publisher.confirmed()).await;
        assert!(confirmed.expect("confirmed() returns in time").is_none());
    }
}
