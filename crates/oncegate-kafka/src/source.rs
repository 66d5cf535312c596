//! The source as the consumer sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::lifecycle::Reason;
use oncegate_core::{
    Delivery, Incoming, Limit, Order, Origin, Settled, Source, SourceError, fault,
};

use crate::dead_letters::{DeadLetter, DeadLetters};
use crate::shared::{Phase, Rejected, Shared, detached};

/// The pause before a dead letter is published again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// What is left of the time to close for leaving the group, at the least.
const LEAVING: Duration = Duration::from_millis(500);

/// A member of a consumer group. Opened from [`Kafka`](crate::Kafka).
///
/// A thread of its own polls the broker, so that no handler can have the group take this member for
/// dead. Dropped without being closed, it leaves the group on that thread, and what was not settled
/// is delivered again.
pub struct KafkaSource {
    shared: Arc<Shared>,
    dead_letters: Arc<DeadLetters>,
    body_limit: usize,
}

impl KafkaSource {
    pub(crate) fn new(
        shared: Arc<Shared>,
        dead_letters: Arc<DeadLetters>,
        body_limit: usize,
    ) -> Self {
        Self {
            shared,
            dead_letters,
            body_limit,
        }
    }

    /// Takes what is ready, without waiting.
    fn take(&self, limit: Limit, into: &mut Vec<Incoming>) -> Result<Taken, SourceError> {
        let mut state = self.shared.lock();
        if let Some(fault) = state.take_fault() {
            return Err(fault);
        }
        if state.phase() == Phase::Ended {
            return Err(SourceError::Unavailable("the source has ended".into()));
        }
        let (before, mut oversize) = (into.len(), Vec::new());
        state.hand_out(limit, self.body_limit, into, &mut oversize);
        // Whoever asks for no deliveries is not woken for one.
        let next_due = state.next_due().filter(|_| limit.count > 0);
        Ok(Taken {
            any: into.len() > before,
            oversize,
            next_due,
        })
    }

    /// Publishes a rejected delivery until it stands, then counts it as settled.
    fn publish(&self, rejected: Rejected) {
        let (shared, dead_letters) = (self.shared.clone(), self.dead_letters.clone());
        let delivery = Delivery {
            message: detached(&rejected.delivery.message),
            ..rejected.delivery
        };
        let mut letter = DeadLetter::new(Rejected {
            delivery,
            ..rejected
        });
        tokio::spawn(async move {
            let (mut pause, longest) = PAUSES;
            fault::point("kafka.letter.before");
            while let Err(error) = dead_letters.publish(&mut letter).await {
                metrics::counter!(crate::metric::DEAD_LETTER_FAILURES).increment(1);
                dead_letters.warn_of_failure(&letter, &error);
                if shared.lock().phase() >= Phase::Closing {
                    return;
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(longest);
            }
            let Rejected {
                delivery, reason, ..
            } = &letter.rejected;
            metrics::counter!(crate::metric::DEAD_LETTERS, "reason" => reason.as_str())
                .increment(1);
            fault::point("kafka.letter.confirmed");
            let fate = shared.lock().published(delivery);
            fault::point("kafka.letter.settled");
            fate.count();
            shared.wake_poller();
            shared.wake_consumer();
        });
    }
}

/// What was taken, beside what was handed over.
struct Taken {
    any: bool,
    oversize: Vec<Delivery>,
    next_due: Option<Instant>,
}

#[async_trait]
impl Source for KafkaSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        loop {
            let found = self.take(limit, into)?;
            let made_room = !found.oversize.is_empty();
            for delivery in found.oversize {
                let (size, limit, origin) = (
                    delivery.message.body.len(),
                    self.body_limit,
                    &delivery.message.origin,
                );
                tracing::warn!(
                    size,
                    limit,
                    ?origin,
                    "a body is over the limit: to the dead letters"
                );
                self.publish(Rejected {
                    delivery,
                    reason: Reason::TooLarge,
                    story: None,
                });
            }
            if found.any {
                self.shared.wake_poller();
                return Ok(());
            }
            if made_room {
                continue; // for what was ready behind them
            }
            match found.next_due {
                // Over in time or not: what there is then is taken above.
                Some(due) => drop(tokio::time::timeout_at(due.into(), self.shared.news()).await),
                None => self.shared.news().await,
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
        self.shared.enter(Phase::Stopped);
    }

    /// Waits for dead letters that are on their way, commits what is settled, and leaves the group.
    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        self.shared.enter(Phase::Stopped);
        let publish_until = deadline.checked_sub(LEAVING).unwrap_or(deadline);
        let unpublished = self
            .wait_until(publish_until, |shared| shared.lock().publishing() == 0)
            .await;
        self.shared.enter(Phase::Closing);
        let staying = self
            .wait_until(deadline, |shared| shared.lock().phase() == Phase::Ended)
            .await;
        match (unpublished, staying) {
            (Wait::InTime, Wait::InTime) => Ok(()),
            (Wait::TooLong, _) => Err(SourceError::Unavailable(
                "dead letters were not confirmed in time; their messages are delivered again"
                    .into(),
            )),
            (_, Wait::TooLong) => Err(SourceError::Unavailable(
                "the group was not left in time; what was settled last may be delivered again"
                    .into(),
            )),
        }
    }

    fn default_order(&self) -> Order {
        Order::ByKey
    }

    fn overlap(&self) -> bool {
        true
    }
}

/// How a wait ended.
#[derive(Clone, Copy)]
enum Wait {
    InTime,
    TooLong,
}

impl KafkaSource {
    async fn wait_until(&self, deadline: Instant, reached: impl Fn(&Shared) -> bool) -> Wait {
        while !reached(&self.shared) {
            if tokio::time::timeout_at(deadline.into(), self.shared.news())
                .await
                .is_err()
            {
                return if reached(&self.shared) {
                    Wait::InTime
                } else {
                    Wait::TooLong
                };
            }
        }
        Wait::InTime
    }
}

impl Drop for KafkaSource {
    /// Returns at once: the polling thread leaves the group by itself.
    fn drop(&mut self) {
        self.shared.enter(Phase::Closing);
    }
}

impl std::fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaSource").finish_non_exhaustive()
    }
}
