//! `KafkaSource`: connects, and implements `receive`, `settle` and `close` on the state that it
//! shares with the polling thread.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::internal::{Backoff, fault};
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{Connect, ConnectOptions, QueueLevel, SourceProperties};
use oncegate_core::{
    Delivery, IdSource, Incoming, Limit, MessageId, Order, Origin, Settled, Source, SourceError,
};

use crate::client::callbacks::CallbackContext;
use crate::client::connection_errors::ConnectionErrors;
use crate::client::dead_letters::DeadLetters;
use crate::client::{error, poll, topics, watch};
use crate::settings::Kafka;
use crate::shared::{RejectedDelivery, SharedState, SourcePhase, count_if_stale};

/// The first and the longest pause before a dead letter is published again.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// The last part of the time for `close`, in which the source does not wait for dead letters but
/// commits and leaves the group.
const LEAVE_TIME: Duration = Duration::from_millis(500);

/// A member of a consumer group. Opened from [`Kafka`].
///
/// A separate thread polls the broker, so that a slow handler cannot exceed `max.poll.interval.ms`.
/// If the source is dropped without being closed, it leaves the group on that thread, and unsettled
/// messages are redelivered.
pub struct KafkaSource {
    shared: Arc<SharedState>,
    dead_letters: Arc<DeadLetters>,
    body_limit: usize,
    /// From where ids are read, for log lines.
    id: Option<IdSource>,
}

#[async_trait]
impl Connect for Kafka {
    type Source = KafkaSource;

    /// Refuses [`IdSource::message_id`], which Kafka messages do not have.
    fn check_id(&self, id: &IdSource) -> Result<(), SourceError> {
        if !id.reads_message_id() {
            return Ok(());
        }
        Err(SourceError::misconfigured(
            "id",
            "IdSource::message_id() reads a property of AMQP that Kafka messages do not have, so every message would be a dead letter",
            "use IdSource::header(\"…\"), IdSource::key(), IdSource::json_pointer(\"/…\") or IdSource::body_hash()",
        ))
    }

    /// Checks the settings, waits for a broker, checks or creates the topics, and joins the group.
    ///
    /// Logs a warning if the topics retain messages for longer than the dedup window. Requires a
    /// tokio runtime, on which dead letters are published.
    async fn connect(mut self, options: ConnectOptions) -> Result<KafkaSource, SourceError> {
        self.window = options.dedup_window;
        self.check()?;
        let shared = Arc::new(SharedState::default());
        let connection_errors = Arc::new(ConnectionErrors::new(&self.brokers));
        let new_consumer = || {
            CallbackContext::new(shared.clone(), &self, connection_errors.clone()).consumer(&self)
        };
        let first_consumer = new_consumer()?;
        let dead_letters = DeadLetters::open(
            self.producer_config(),
            self.destinations.clone(),
            connection_errors.clone(),
        )
        .map_err(error::from_config)?;
        let consumer =
            topics::check(&self, first_consumer, new_consumer, &connection_errors).await?;

        poll::subscribe(&consumer, &self)?;
        self.status.attach(&shared);
        tracing::info!(topics = ?self.topics, group = self.group, "reading from Kafka");
        let source = KafkaSource {
            shared: shared.clone(),
            dead_letters: Arc::new(dead_letters),
            body_limit: self.body_limit,
            id: options.id,
        };
        let watched = self.clone();
        spawn_thread("oncegate-kafka", move || {
            poll::run(self, Arc::new(consumer))
        })?;
        spawn_thread("oncegate-kafka-watch", move || {
            watch::run(&watched, &shared, &connection_errors)
        })?;
        Ok(source)
    }
}

fn spawn_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), SourceError> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
    spawned.map(drop).map_err(|error| {
        SourceError::Unavailable(
            format!("cannot start a thread ({error}); check the thread limit of the process")
                .into(),
        )
    })
}

impl KafkaSource {
    /// Appends the deliveries that are ready to `into`, without waiting. Returns the deliveries
    /// whose body exceeds `body_limit`.
    fn take(&self, limit: Limit, into: &mut Vec<Incoming>) -> Result<Vec<Delivery>, SourceError> {
        let mut state = self.shared.lock();
        if let Some(error) = state.take_error() {
            return Err(error);
        }
        if state.phase() == SourcePhase::Ended {
            return Err(SourceError::Unavailable(
                "the polling thread has ended; see the log for the reason, and restart the consumer"
                    .into(),
            ));
        }
        let mut oversize = Vec::new();
        state.hand_out(limit, self.body_limit, into, &mut oversize);
        Ok(oversize)
    }

    fn publish_oversize(&self, delivery: Delivery) {
        let id = self.id.as_ref();
        let id = id.and_then(|id| id.read_without_body(&delivery.message));
        tracing::warn!(
            reason = Reason::TooLarge.as_str(),
            id = id.as_ref().map(MessageId::as_str),
            origin = %delivery.message.origin,
            key = delivery.message.key.as_deref().map(String::from_utf8_lossy).as_deref(),
            destination = self.dead_letters.destination(&delivery.message.origin.name, &Reason::TooLarge),
            bytes = delivery.message.body.len(),
            limit = self.body_limit,
            "message body exceeds body_limit; rejecting the message to the dead-letter topic; raise body_limit if such messages are valid"
        );
        self.publish(RejectedDelivery {
            delivery,
            reason: Reason::TooLarge,
            failure_history: None,
        });
    }

    /// Starts a task that publishes a rejected delivery, again until it is confirmed, and then
    /// settles it.
    fn publish(&self, rejected: RejectedDelivery) {
        let (shared, dead_letters) = (self.shared.clone(), self.dead_letters.clone());
        let mut dead_letter = dead_letters.prepare(rejected);
        tokio::spawn(async move {
            let mut backoff = Backoff::between(RETRY_PAUSES.0, RETRY_PAUSES.1);
            fault::point("kafka.dead-letter.before");
            while let Err(error) = dead_letters.publish(&mut dead_letter).await {
                metrics::counter!(crate::metric::DEAD_LETTER_FAILURES).increment(1);
                dead_letters.warn_of_failure(&dead_letter, &error);
                if shared.lock().phase() >= SourcePhase::Closing {
                    return;
                }
                tokio::time::sleep(backoff.advance()).await;
            }
            let rejected = &dead_letter.rejected;
            let reason = rejected.reason.as_str();
            metrics::counter!(crate::metric::DEAD_LETTERS, "reason" => reason).increment(1);
            fault::point("kafka.dead-letter.confirmed");
            let is_assigned = shared.lock().dead_letter_confirmed(&rejected.delivery);
            fault::point("kafka.dead-letter.settled");
            count_if_stale(is_assigned);
            shared.wake_poller();
            shared.wake_consumer();
        });
    }

    /// Waits until the condition is met; false if that is not the case at the deadline.
    async fn wait_until(
        &self,
        deadline: Instant,
        condition: impl Fn(&SharedState) -> bool,
    ) -> bool {
        while !condition(&self.shared) {
            let wakeup = self.shared.wait_for_wakeup();
            if tokio::time::timeout_at(deadline.into(), wakeup)
                .await
                .is_err()
            {
                return condition(&self.shared);
            }
        }
        true
    }
}

#[async_trait]
impl Source for KafkaSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        let before = into.len();
        loop {
            let oversize = self.take(limit, into)?;
            let has_oversize = !oversize.is_empty();
            for delivery in oversize {
                self.publish_oversize(delivery);
            }
            if into.len() > before {
                self.shared.wake_poller();
                return Ok(());
            }
            // If deliveries were rejected, others that were queued behind them may be ready.
            if !has_oversize {
                self.shared.wait_for_wakeup().await;
            }
        }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        for rejected in self.shared.settle(settled) {
            self.publish(rejected);
        }
        Ok(())
    }

    fn queue_level(&mut self, level: QueueLevel) {
        self.shared.set_queue_level(level);
    }

    fn destination(&self, origin: &Origin, reason: &Reason) -> Option<String> {
        Some(self.dead_letters.destination(&origin.name, reason))
    }

    async fn stop(&mut self) {
        self.shared.enter(SourcePhase::Stopped);
    }

    /// Waits for unconfirmed dead letters, commits, and leaves the group.
    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        self.shared.enter(SourcePhase::Stopped);
        let publish_until = deadline.checked_sub(LEAVE_TIME).unwrap_or(deadline);
        let all_published = |shared: &SharedState| shared.lock().unconfirmed_count() == 0;
        let is_published = self.wait_until(publish_until, all_published).await;
        self.shared.enter(SourcePhase::Closing);
        let has_ended = |shared: &SharedState| shared.lock().phase() == SourcePhase::Ended;
        let has_left = self.wait_until(deadline, has_ended).await;
        let problem = match (is_published, has_left) {
            (true, true) => return Ok(()),
            (false, _) => {
                "dead letters were not confirmed in time; their messages are redelivered; check that the dead-letter topics accept messages"
            }
            (true, false) => {
                "did not leave the group in time; messages that were settled last may be redelivered; check the group coordinator, or raise .drain_timeout(…)"
            }
        };
        Err(SourceError::Unavailable(problem.into()))
    }

    fn properties(&self) -> SourceProperties {
        let mut properties = SourceProperties::default();
        properties.default_order = Order::ByKey;
        properties.overlapping_batches = true;
        properties
    }
}

impl Drop for KafkaSource {
    /// Returns at once: the polling thread leaves the group.
    fn drop(&mut self) {
        self.shared.enter(SourcePhase::Closing);
    }
}

impl fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource").finish_non_exhaustive()
    }
}
