//! Keeps a channel open until RabbitMQ has applied its last acknowledgements.
//!
//! # Workaround
//! - *Symptom:* acknowledgements are lost when the channel closes soon after many of them; their
//!   messages are redelivered. *Version:* RabbitMQ 3.10.8, quorum queues.
//! - *Upstream:* rabbitmq/rabbitmq-server#10327 (open).
//! - *Test:* `deliveries_settled_just_before_closing_are_not_redelivered` in `tests/amqp`.
//! - *May be removed* when RabbitMQ applies them before it closes the channel.

use std::time::Duration;

use tokio::time::Instant;

/// More acknowledgements than this in a short time may not be applied yet. A quorum queue applies
/// up to 32 at once; RabbitMQ keeps the rest in the channel process and drops it, without an error,
/// when the channel closes: those messages would be redelivered.
const MAX_UNAPPLIED: usize = 16;
/// How long RabbitMQ needs to apply them.
const APPLY_TIME: Duration = Duration::from_millis(500);

/// The latest acknowledgements of a channel, if they followed each other within [`APPLY_TIME`].
#[derive(Default)]
pub(crate) struct AckDrain {
    count: usize,
    last: Option<Instant>,
}

impl AckDrain {
    /// This number of acknowledgements is sent now.
    pub(crate) fn sent(&mut self, count: usize) {
        let now = Instant::now();
        if self.last.is_none_or(|last| now >= last + APPLY_TIME) {
            self.count = 0;
        }
        self.count += count;
        self.last = Some(now);
    }

    /// Waits until the acknowledgements are applied.
    pub(crate) async fn applied(&self) {
        if let Some(last) = self.last.filter(|_| self.count > MAX_UNAPPLIED) {
            tokio::time::sleep_until(last + APPLY_TIME).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn waits(drain: &AckDrain) -> Duration {
        let begun = Instant::now();
        drain.applied().await;
        begun.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn many_acknowledgements_are_waited_for_and_few_are_not() {
        let mut drain = AckDrain::default();
        assert_eq!(waits(&drain).await, Duration::ZERO);
        drain.sent(MAX_UNAPPLIED);
        assert_eq!(waits(&drain).await, Duration::ZERO);
        drain.sent(1);
        assert!(waits(&drain).await >= APPLY_TIME);
        drain.sent(MAX_UNAPPLIED);
        assert_eq!(
            waits(&drain).await,
            Duration::ZERO,
            "the others are applied"
        );
    }
}
