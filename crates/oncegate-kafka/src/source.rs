//! The public source: `receive`, `settle` and `close` over the state that the polling thread shares.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::SourceProperties;
use oncegate_core::{
    Delivery, Incoming, Limit, Order, Origin, Settled, Source, SourceError, fault,
};

use crate::dead_letters::{DeadLetters, UnpublishedDeadLetter};
use crate::shared::{RejectedDelivery, SharedState, SourcePhase, detached};

/// The first and the longest pause before a dead letter is published again.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// The part of the time for `close` that is reserved for leaving the group.
const LEAVE_TIME: Duration = Duration::from_millis(500);

/// A member of a consumer group. Opened from [`Kafka`](crate::Kafka).
///
/// A separate thread polls the broker, so that a slow handler cannot exceed `max.poll.interval.ms`.
/// If the source is dropped without being closed, it leaves the group on that thread, and unsettled
/// messages are redelivered.
pub struct KafkaSource {
    shared: Arc<SharedState>,
    dead_letters: Arc<DeadLetters>,
    body_limit: usize,
}

impl KafkaSource {
    pub(crate) fn new(
        shared: Arc<SharedState>,
        dead_letters: Arc<DeadLetters>,
        body_limit: usize,
    ) -> Self {
        Self {
            shared,
            dead_letters,
            body_limit,
        }
    }

    /// Takes the deliveries that are ready, without waiting.
    fn take(&self, limit: Limit, into: &mut Vec<Incoming>) -> Result<TakenDeliveries, SourceError> {
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
        let (before, mut oversize) = (into.len(), Vec::new());
        state.hand_out(limit, self.body_limit, into, &mut oversize);
        // With a limit of 0 the caller waits for revocations only.
        let next_due = state.next_due().filter(|_| limit.count > 0);
        Ok(TakenDeliveries {
            has_incoming: into.len() > before,
            oversize,
            next_due,
        })
    }

    /// Publishes a rejected delivery until it is confirmed, then settles it.
    fn publish(&self, rejected: RejectedDelivery) {
        let (shared, dead_letters) = (self.shared.clone(), self.dead_letters.clone());
        let delivery = Delivery {
            message: detached(&rejected.delivery.message),
            ..rejected.delivery
        };
        let mut dead_letter = UnpublishedDeadLetter::new(RejectedDelivery {
            delivery,
            ..rejected
        });
        tokio::spawn(async move {
            let (mut pause, longest) = RETRY_PAUSES;
            fault::point("kafka.dead-letter.before");
            while let Err(error) = dead_letters.publish(&mut dead_letter).await {
                metrics::counter!(crate::metric::DEAD_LETTER_FAILURES).increment(1);
                dead_letters.warn_of_failure(&dead_letter, &error);
                if shared.lock().phase() >= SourcePhase::Closing {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
            let RejectedDelivery {
                delivery, reason, ..
            } = &dead_letter.rejected;
            metrics::counter!(crate::metric::DEAD_LETTERS, "reason" => reason.as_str())
                .increment(1);
            fault::point("kafka.dead-letter.confirmed");
            let effect = shared.lock().published(delivery);
            fault::point("kafka.dead-letter.settled");
            effect.count();
            shared.wake_poller();
            shared.wake_consumer();
        });
    }
}

/// The result of [`KafkaSource::take`] in addition to the deliveries.
struct TakenDeliveries {
    has_incoming: bool,
    oversize: Vec<Delivery>,
    next_due: Option<Instant>,
}

#[async_trait]
impl Source for KafkaSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        loop {
            let taken = self.take(limit, into)?;
            let has_oversize = !taken.oversize.is_empty();
            for delivery in taken.oversize {
                tracing::warn!(
                    topic = %delivery.message.origin.name,
                    partition = delivery.receipt.partition,
                    offset = delivery.receipt.position,
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
            if taken.has_incoming {
                self.shared.wake_poller();
                return Ok(());
            }
            if has_oversize {
                // Deliveries behind the rejected ones may be ready.
                continue;
            }
            match taken.next_due {
                // Timeout or not, the next iteration takes the ready deliveries.
                Some(due) => {
                    drop(tokio::time::timeout_at(due.into(), self.shared.wait_for_wakeup()).await)
                }
                None => self.shared.wait_for_wakeup().await,
            }
        }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        self.shared
            .settle(settled)
            .into_iter()
            .for_each(|rejected| self.publish(rejected));
        Ok(())
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
        let publishing = self
            .wait_until(publish_until, |shared| shared.lock().publishing() == 0)
            .await;
        self.shared.enter(SourcePhase::Closing);
        let leaving = self
            .wait_until(deadline, |shared| {
                shared.lock().phase() == SourcePhase::Ended
            })
            .await;
        match (publishing, leaving) {
            (WaitOutcome::InTime, WaitOutcome::InTime) => Ok(()),
            (WaitOutcome::TooLong, _) => Err(SourceError::Unavailable(
                "dead letters were not confirmed in time; their messages are redelivered; check that the dead-letter topics accept messages"
                    .into(),
            )),
            (_, WaitOutcome::TooLong) => Err(SourceError::Unavailable(
                "did not leave the group in time; messages that were settled last may be redelivered; check the group coordinator, or raise .drain_timeout(…)"
                    .into(),
            )),
        }
    }

    fn properties(&self) -> SourceProperties {
        let mut properties = SourceProperties::default();
        properties.default_order = Order::ByKey;
        properties.overlapping_batches = true;
        properties
    }
}

/// Whether the condition of [`KafkaSource::wait_until`] was met before the deadline.
#[derive(Clone, Copy)]
enum WaitOutcome {
    InTime,
    TooLong,
}

impl KafkaSource {
    async fn wait_until(
        &self,
        deadline: Instant,
        reached: impl Fn(&SharedState) -> bool,
    ) -> WaitOutcome {
        while !reached(&self.shared) {
            if tokio::time::timeout_at(deadline.into(), self.shared.wait_for_wakeup())
                .await
                .is_err()
            {
                return if reached(&self.shared) {
                    WaitOutcome::InTime
                } else {
                    WaitOutcome::TooLong
                };
            }
        }
        WaitOutcome::InTime
    }
}

impl Drop for KafkaSource {
    /// Returns at once: the polling thread leaves the group.
    fn drop(&mut self) {
        self.shared.enter(SourcePhase::Closing);
    }
}

impl std::fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSource").finish_non_exhaustive()
    }
}
