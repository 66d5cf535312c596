//! Delays the closing of a channel after many acknowledgements: `basic.ack`, also with `multiple`,
//! and `basic.reject`.
//!
//! # Workaround
//! - *Symptom:* acknowledgements are lost when the channel closes soon after many of them; their
//!   messages are redelivered. *Version:* RabbitMQ 3.10.8, quorum queues.
//! - *Upstream:* rabbitmq/rabbitmq-server#10327 (open).
//! - *Test:* `deliveries_settled_just_before_closing_are_not_redelivered` in `tests/amqp`.
//! - *May be removed* when RabbitMQ applies them before it closes the channel.

use std::time::Duration;

use tokio::time::Instant;

/// After more acknowledgements than this in a short time, closing the channel is delayed. RabbitMQ has
/// up to 32 commands of a channel to a quorum queue in flight. It keeps further ones in the channel
/// process and drops them, without an error, when the channel closes: those messages would be
/// redelivered. Half of 32 leaves room for the channel's other commands.
const MAX_WITHOUT_DELAY: usize = 16;
/// How long RabbitMQ is assumed to take to apply the acknowledgements. AMQP does not confirm them.
const ASSUMED_APPLY_TIME: Duration = Duration::from_millis(500);

/// Counts the latest acknowledgements of a channel: those sent without a pause of
/// [`ASSUMED_APPLY_TIME`] between them.
#[derive(Default)]
pub(crate) struct CloseDelay {
    count: usize,
    last: Option<Instant>,
}

impl CloseDelay {
    /// Records that this number of acknowledgements is sent now.
    pub(crate) fn acks_sent(&mut self, count: usize) {
        let now = Instant::now();
        if self
            .last
            .is_none_or(|last| now >= last + ASSUMED_APPLY_TIME)
        {
            self.count = 0;
        }
        self.count += count;
        self.last = Some(now);
    }

    /// Waits until [`ASSUMED_APPLY_TIME`] after the last acknowledgement, if there were more than
    /// [`MAX_WITHOUT_DELAY`].
    pub(crate) async fn wait(&self) {
        if let Some(last) = self.last.filter(|_| self.count > MAX_WITHOUT_DELAY) {
            tokio::time::sleep_until(last + ASSUMED_APPLY_TIME).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn waited(delay: &CloseDelay) -> Duration {
        let started = Instant::now();
        delay.wait().await;
        started.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn closing_waits_after_many_acknowledgements_and_not_after_few() {
        let mut delay = CloseDelay::default();
        assert_eq!(waited(&delay).await, Duration::ZERO);
        delay.acks_sent(MAX_WITHOUT_DELAY);
        assert_eq!(waited(&delay).await, Duration::ZERO);
        delay.acks_sent(1);
        assert!(waited(&delay).await >= ASSUMED_APPLY_TIME);
        delay.acks_sent(MAX_WITHOUT_DELAY);
        assert_eq!(
            waited(&delay).await,
            Duration::ZERO,
            "acknowledgements before the pause do not count"
        );
    }
}
