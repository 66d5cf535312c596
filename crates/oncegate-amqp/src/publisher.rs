//! Publishes copies of messages (dead letters, in-doubt messages and delayed messages) on a
//! connection of their own.
//!
//! During a resource alarm RabbitMQ stops reading from connections that publish. Acknowledgements on
//! such a connection would wait for the end of the alarm.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, FuturesUnordered};
use lapin::{Connection, Event};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::connector;
use crate::message_copy::{MessageCopy, PublishCancellation};
use crate::problem_throttle::ProblemThrottle;
use crate::publish_channel::{BatchOutcome, CopyPublishError, PublishChannel};
use crate::queue_settings::QueueSettings;

/// Maximum number of copies in a batch, and so of unconfirmed copies on a channel.
const MAX_BATCH: usize = 256;

/// Maximum number of [isolated](PublishQueueKey::Isolated) copies. If every copy fails, for example
/// without the write permission, more isolated ones would only close more channels.
const MAX_ISOLATED: usize = 8;

/// The driver's handle to the publisher task.
pub(crate) struct CopyPublisher {
    copies: UnboundedSender<MessageCopy>,
    confirmed: UnboundedReceiver<ConfirmedCopy>,
    task: JoinHandle<()>,
}

/// A copy that the broker has confirmed.
pub(crate) struct ConfirmedCopy {
    /// The consuming channel that delivered the original: [`MessageCopy::epoch`].
    pub(crate) epoch: u64,
    /// The delivery tag of the original.
    pub(crate) tag: u64,
    /// [`MessageCopy::cancellation`].
    pub(crate) cancellation: Option<PublishCancellation>,
}

impl CopyPublisher {
    /// Starts the task, which connects when there is something to publish. `open_epoch` is the epoch of
    /// the open consuming channel, or 0. Copies from other channels are dropped, because the broker
    /// redelivers their originals.
    pub(crate) fn start(settings: Arc<QueueSettings>, open_epoch: Arc<AtomicU64>) -> Self {
        let (copies, to_publish) = unbounded_channel();
        let (confirmations, confirmed) = unbounded_channel();
        let task = PublisherTask::new(settings, open_epoch, to_publish, confirmations);
        Self {
            copies,
            confirmed,
            task: tokio::spawn(task.run()),
        }
    }

    /// Publishes the copy until it is confirmed.
    pub(crate) fn publish(&self, copy: MessageCopy) {
        // If the task ended, `confirmed` returns `None`.
        let _ = self.copies.send(copy);
    }

    /// The next confirmed copy; `None` if the task ended, which only a bug can cause.
    pub(crate) async fn confirmed(&mut self) -> Option<ConfirmedCopy> {
        self.confirmed.recv().await
    }

    /// Ends the task. Copies that are not confirmed are dropped, and the broker redelivers their
    /// originals.
    pub(crate) async fn close(self, timeout: Duration) {
        drop(self.copies);
        let _ = tokio::time::timeout(timeout, self.task).await;
    }
}

struct PublisherTask {
    settings: Arc<QueueSettings>,
    /// The epoch of the open consuming channel; 0 while none is open.
    open_epoch: Arc<AtomicU64>,
    copies: UnboundedReceiver<MessageCopy>,
    confirmations: UnboundedSender<ConfirmedCopy>,
    queues: BTreeMap<PublishQueueKey, PublishQueue>,
    in_flight: FuturesUnordered<BoxFuture<'static, (PublishQueueKey, BatchOutcome)>>,
    /// For reconnecting.
    backoff: Backoff,
    /// When to connect again after a failure.
    connect_at: Instant,
    connection: Option<Arc<Connection>>,
    /// The events of the connection, such as `connection.blocked`.
    events: BoxStream<'static, Event>,
    throttle: ProblemThrottle,
}

/// Which copies share a [`PublishQueue`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PublishQueueKey {
    /// The copies for the queue with this name. Each queue is separate, so that a missing one does not
    /// delay copies for others.
    Destination(String),
    /// The copy with this tag, because the broker closed the channel when it was published alone. It
    /// must not close the channel of other copies again.
    Isolated(u64),
}

/// Copies that wait to be published, with their own backoff.
struct PublishQueue {
    waiting: VecDeque<MessageCopy>,
    /// 1 after a failure, so that it is known which copy fails, and no other one is published twice.
    batch_limit: usize,
    backoff: Backoff,
    /// When to publish the next batch.
    publish_at: Instant,
    /// `None` while a batch is in flight.
    channel: Option<PublishChannel>,
}

impl PublishQueue {
    fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            batch_limit: MAX_BATCH,
            backoff: Backoff::default(),
            publish_at: Instant::now(),
            channel: Some(PublishChannel::default()),
        }
    }

    /// Removes the next batch.
    fn take_batch(&mut self) -> Vec<MessageCopy> {
        self.waiting
            .drain(..self.batch_limit.min(self.waiting.len()))
            .collect()
    }

    /// When to publish the next batch; `None` while no copy waits or a batch is in flight.
    fn due(&self) -> Option<Instant> {
        (!self.waiting.is_empty() && self.channel.is_some()).then_some(self.publish_at)
    }
}

impl PublisherTask {
    fn new(
        settings: Arc<QueueSettings>,
        open_epoch: Arc<AtomicU64>,
        copies: UnboundedReceiver<MessageCopy>,
        confirmations: UnboundedSender<ConfirmedCopy>,
    ) -> Self {
        Self {
            settings,
            open_epoch,
            copies,
            confirmations,
            queues: BTreeMap::new(),
            in_flight: FuturesUnordered::new(),
            backoff: Backoff::default(),
            connect_at: Instant::now(),
            connection: None,
            events: Box::pin(futures_util::stream::pending()),
            throttle: ProblemThrottle::default(),
        }
    }

    async fn run(mut self) {
        loop {
            self.publish_due().await;
            let due = self
                .queues
                .values()
                .filter_map(PublishQueue::due)
                .min()
                .map(|due| due.max(self.connect_at));
            tokio::select! {
                copy = self.copies.recv() => match copy {
                    Some(copy) => self.enqueue(copy),
                    None => break,
                },
                Some((key, outcome)) = self.in_flight.next(), if !self.in_flight.is_empty() => {
                    self.batch_finished(key, outcome);
                }
                event = self.events.next() => self.connection_event(event),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
        }
        self.settings.metrics.unblocked();
        if let Some(connection) = self.connection.take() {
            connector::close(&connection, Duration::from_secs(1)).await;
        }
    }

    /// Tracks `connection.blocked` and `connection.unblocked`.
    fn connection_event(&mut self, event: Option<Event>) {
        let queue = &*self.settings.name;
        match event {
            Some(Event::ConnectionBlocked(reason)) => {
                tracing::warn!(
                    queue,
                    reason,
                    "RabbitMQ blocks publishing because of a resource alarm; dead letters and delayed messages wait; free memory or disk space on the broker"
                );
                self.settings.metrics.blocked();
            }
            Some(Event::ConnectionUnblocked) => {
                tracing::info!(queue, "RabbitMQ no longer blocks publishing");
                self.settings.metrics.unblocked();
            }
            Some(_) => {}
            None => {
                self.settings.metrics.unblocked();
                self.events = Box::pin(futures_util::stream::pending());
            }
        }
    }

    fn enqueue(&mut self, copy: MessageCopy) {
        self.queues
            .entry(PublishQueueKey::Destination(copy.destination.to_string()))
            .or_insert_with(PublishQueue::new)
            .waiting
            .push_back(copy);
    }

    /// Publishes one batch of each queue that is due.
    async fn publish_due(&mut self) {
        while let Ok(copy) = self.copies.try_recv() {
            self.enqueue(copy);
        }
        let open_epoch = self.open_epoch.load(Ordering::Acquire);
        self.queues.values_mut().for_each(|queue| {
            queue
                .waiting
                .retain(|copy| copy.epoch == open_epoch && !copy.is_cancelled())
        });
        self.queues.retain(|key, queue| {
            matches!(key, PublishQueueKey::Destination(_))
                || queue.channel.is_none()
                || !queue.waiting.is_empty()
        });
        let now = Instant::now();
        if now < self.connect_at
            || !self
                .queues
                .values()
                .filter_map(PublishQueue::due)
                .any(|due| due <= now)
        {
            return;
        }
        let Some(connection) = self.connection().await else {
            return;
        };
        for (key, queue) in self
            .queues
            .iter_mut()
            .filter(|(_, queue)| queue.due().is_some_and(|due| due <= now))
        {
            let Some(channel) = queue.channel.take() else {
                continue;
            };
            let batch = queue.take_batch();
            let (key, connection, settings) = (
                key.clone(),
                Arc::clone(&connection),
                Arc::clone(&self.settings),
            );
            self.in_flight.push(Box::pin(async move {
                (
                    key,
                    channel.publish_batch(&connection, &settings, batch).await,
                )
            }));
        }
    }

    /// The open connection, or a new one; `None` if connecting fails, which is logged.
    async fn connection(&mut self) -> Option<Arc<Connection>> {
        if let Some(connection) = self
            .connection
            .as_ref()
            .filter(|connection| connection.status().connected())
        {
            return Some(Arc::clone(connection));
        }
        self.connection = None;
        self.settings.metrics.unblocked();
        match connector::connect(&self.settings, "publishes").await {
            Ok(connection) => {
                self.backoff.reset();
                self.events = Box::pin(connection.events_listener());
                Some(Arc::clone(self.connection.insert(Arc::new(connection))))
            }
            Err(error) => {
                let pause = self.backoff.pause();
                self.connect_at = Instant::now() + pause;
                self.warn(&error.to_string(), pause);
                None
            }
        }
    }

    /// Reports the confirmed copies, and puts the unconfirmed ones back into their publish queue.
    fn batch_finished(&mut self, key: PublishQueueKey, outcome: BatchOutcome) {
        let BatchOutcome {
            channel,
            confirmed,
            mut unconfirmed,
            error,
        } = outcome;
        let is_single_copy = confirmed.is_empty() && unconfirmed.len() == 1;
        self.settings.metrics.copies_confirmed(confirmed.len());
        for copy in confirmed {
            let _ = self.confirmations.send(ConfirmedCopy {
                epoch: copy.epoch,
                tag: copy.tag,
                cancellation: copy.cancellation,
            });
        }
        let queue = self
            .queues
            .entry(key.clone())
            .or_insert_with(PublishQueue::new);
        queue.channel = Some(channel);
        let Some(error) = error else {
            queue.batch_limit = (queue.batch_limit * 2).min(MAX_BATCH);
            queue.backoff.reset();
            return;
        };
        self.settings.metrics.copies_retried(unconfirmed.len());
        let pause = queue.backoff.pause();
        queue.publish_at = Instant::now() + pause;
        queue.batch_limit = 1;
        let closes_its_channel = is_single_copy
            && matches!(
                (&error, &key),
                (
                    CopyPublishError::ChannelClosed(_),
                    PublishQueueKey::Destination(_)
                )
            );
        let to_isolate = if closes_its_channel {
            unconfirmed.pop()
        } else {
            None
        };
        unconfirmed
            .into_iter()
            .rev()
            .for_each(|copy| queue.waiting.push_front(copy));
        if let Some(copy) = to_isolate {
            self.isolate(copy, key);
        }
        self.warn(&error.to_string(), pause);
    }

    /// Moves a copy to a publish queue of its own, or to the end of its queue if [`MAX_ISOLATED`] copies
    /// are isolated already.
    fn isolate(&mut self, copy: MessageCopy, key: PublishQueueKey) {
        let isolated = self
            .queues
            .keys()
            .filter(|key| matches!(key, PublishQueueKey::Isolated(_)))
            .count();
        let may_isolate = isolated < MAX_ISOLATED;
        let queue = self
            .queues
            .entry(if may_isolate {
                PublishQueueKey::Isolated(copy.tag)
            } else {
                key
            })
            .or_insert_with(PublishQueue::new);
        if may_isolate {
            queue.batch_limit = 1;
            queue.publish_at = Instant::now() + queue.backoff.pause();
        }
        queue.waiting.push_back(copy);
    }

    /// Logs a failure at a limited rate.
    fn warn(&mut self, error: &str, pause: Duration) {
        let (queue, broker) = (&*self.settings.name, self.settings.redacted_url());
        if self.throttle.is_due(error, Instant::now()) {
            tracing::warn!(
                queue,
                broker,
                error,
                ?pause,
                "cannot publish to the dead-letter, in-doubt or delay queue; retrying; the original message stays unacknowledged; check that the queue exists, is not full, and that the user may publish to it"
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RabbitMq;

    fn task() -> PublisherTask {
        let settings = Arc::new(RabbitMq::queue("orders").check().expect("settings"));
        PublisherTask::new(
            settings,
            Arc::default(),
            unbounded_channel().1,
            unbounded_channel().0,
        )
    }

    fn copy(tag: u64, to: &str) -> MessageCopy {
        MessageCopy {
            epoch: 1,
            tag,
            destination: to.into(),
            properties: lapin::BasicProperties::default(),
            body: "".into(),
            cancellation: None,
        }
    }

    fn destination(name: &str) -> PublishQueueKey {
        PublishQueueKey::Destination(name.to_owned())
    }

    fn outcome(
        confirmed: Vec<MessageCopy>,
        unconfirmed: Vec<MessageCopy>,
        error: Option<CopyPublishError>,
    ) -> BatchOutcome {
        BatchOutcome {
            channel: PublishChannel::default(),
            confirmed,
            unconfirmed,
            error,
        }
    }

    fn closed() -> Option<CopyPublishError> {
        Some(CopyPublishError::ChannelClosed("closed".into()))
    }

    #[tokio::test]
    async fn a_single_copy_that_closes_its_channel_is_isolated_with_its_own_backoff() {
        let mut task = task();
        task.batch_finished(
            destination("a"),
            outcome(vec![], vec![copy(1, "a"), copy(2, "a")], closed()),
        );
        let queue = &task.queues[&destination("a")];
        assert_eq!(
            (queue.batch_limit, queue.waiting.len()),
            (1, 2),
            "either copy may have closed the channel"
        );
        task.queues
            .get_mut(&destination("a"))
            .expect("the queue")
            .waiting
            .clear();
        task.batch_finished(
            destination("a"),
            outcome(vec![], vec![copy(1, "a")], closed()),
        );
        assert!(task.queues[&destination("a")].waiting.is_empty());
        assert_eq!(task.queues[&PublishQueueKey::Isolated(1)].waiting.len(), 1);
        for _ in 0..8 {
            task.queues
                .get_mut(&PublishQueueKey::Isolated(1))
                .expect("the queue")
                .waiting
                .clear();
            task.batch_finished(
                PublishQueueKey::Isolated(1),
                outcome(vec![], vec![copy(1, "a")], closed()),
            );
            task.batch_finished(destination("a"), outcome(vec![copy(2, "a")], vec![], None));
        }
        assert!(
            task.queues[&PublishQueueKey::Isolated(1)].publish_at
                > Instant::now() + Duration::from_secs(2)
        );
        assert!(
            task.queues[&destination("a")].publish_at < Instant::now() + Duration::from_secs(1)
        );
        assert!(task.queues[&destination("a")].batch_limit > 1);
    }

    #[tokio::test]
    async fn if_every_copy_closes_its_channel_few_are_isolated_and_none_is_dropped() {
        let mut task = task();
        (1..=500).for_each(|tag| task.enqueue(copy(tag, "a")));
        for _ in 0..2_000 {
            let queue = task.queues.get_mut(&destination("a")).expect("the queue");
            let Some(first) = queue.waiting.pop_front() else {
                break;
            };
            task.batch_finished(destination("a"), outcome(vec![], vec![first], closed()));
        }
        assert_eq!(task.queues.len(), 1 + MAX_ISOLATED);
        let mut kept: Vec<u64> = task
            .queues
            .values()
            .flat_map(|queue| &queue.waiting)
            .map(|copy| copy.tag)
            .collect();
        kept.sort();
        assert_eq!(kept, (1..=500).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn confirms_of_another_queue_do_not_reset_the_backoff_of_a_failing_one() {
        let mut task = task();
        for _ in 0..8 {
            task.queues
                .entry(destination("a"))
                .or_insert_with(PublishQueue::new)
                .waiting
                .clear();
            task.batch_finished(
                destination("a"),
                outcome(
                    vec![],
                    vec![copy(1, "a"), copy(2, "a")],
                    Some(CopyPublishError::ReturnedOrNacked("NO_ROUTE".into())),
                ),
            );
            task.batch_finished(destination("b"), outcome(vec![copy(3, "b")], vec![], None));
        }
        let queue = &task.queues[&destination("a")];
        assert!(queue.publish_at > Instant::now() + Duration::from_secs(2));
        assert_eq!(
            queue
                .waiting
                .iter()
                .map(|copy| copy.tag)
                .collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(task.queues[&destination("b")].batch_limit, MAX_BATCH);
    }

    #[tokio::test]
    async fn copies_are_published_in_batches_and_one_by_one_after_a_failure() {
        let mut task = task();
        (0..259).for_each(|tag| task.enqueue(copy(tag, "a")));
        let queue = task.queues.get_mut(&destination("a")).expect("the queue");
        assert_eq!(
            [
                queue.take_batch().len(),
                queue.take_batch().len(),
                queue.take_batch().len()
            ],
            [256, 3, 0]
        );
        task.batch_finished(
            destination("a"),
            outcome(vec![], vec![copy(1, "a"), copy(2, "a")], closed()),
        );
        assert_eq!(
            task.queues
                .get_mut(&destination("a"))
                .expect("the queue")
                .take_batch()
                .len(),
            1
        );
    }

    #[tokio::test]
    async fn a_cancelled_copy_is_not_published() {
        let mut task = task();
        let cancellation = PublishCancellation::default();
        task.open_epoch.store(1, Ordering::Release);
        task.connect_at = Instant::now() + Duration::from_secs(3_600);
        task.enqueue(MessageCopy {
            cancellation: Some(cancellation.clone()),
            ..copy(1, "a")
        });
        task.enqueue(copy(2, "a"));
        task.publish_due().await;
        assert_eq!(task.queues[&destination("a")].waiting.len(), 2);
        cancellation.cancel();
        task.publish_due().await;
        assert_eq!(
            task.queues[&destination("a")]
                .waiting
                .iter()
                .map(|copy| copy.tag)
                .collect::<Vec<_>>(),
            [2]
        );
    }

    #[tokio::test]
    async fn the_end_of_the_publisher_task_is_reported() {
        let settings = Arc::new(RabbitMq::queue("orders").check().expect("settings"));
        let mut publisher = CopyPublisher::start(settings, Arc::default());
        publisher.task.abort();
        let confirmed = tokio::time::timeout(Duration::from_secs(5), publisher.confirmed()).await;
        assert!(confirmed.expect("confirmed() returns in time").is_none());
    }
}
