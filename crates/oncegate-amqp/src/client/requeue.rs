//! Requeues unsettled deliveries before a channel is closed.
//!
//! # Workaround
//! - *Symptom:* closing a channel counts towards the delivery limit for every message that it holds, also
//!   for those that did not fail. *Version:* RabbitMQ 4.3, where `basic.reject` counts and `basic.nack`
//!   does not.
//! - *Upstream:* nothing to report: rabbitmq/rabbitmq-server#15387 introduced the distinction.
//! - *Test:* `releases::closing_rejects_failed_deliveries_and_nacks_the_others` in `tests/amqp`.
//! - *May be removed:* never.

use lapin::options::{BasicNackOptions, BasicRejectOptions};
use oncegate_core::internal::fault;

use crate::client::close_delay::CloseDelay;
use crate::client::session::ConsumerSession;

impl ConsumerSession {
    /// Cancels the consumer and requeues unsettled deliveries: by `basic.reject` those that failed
    /// and were released while the source stopped, by `basic.nack` all others. Since RabbitMQ 4.3
    /// the former count towards the delivery limit and the latter do not; closing the channel would
    /// count for all.
    pub(super) async fn requeue_unsettled(&mut self) -> lapin::Result<()> {
        // Before requeuing, because the broker would deliver the requeued messages to this consumer
        // again, and closing the channel would count for them.
        self.cancel().await;
        fault::point("amqp.requeue.before");
        let mut rejected = 0;
        for tag in self.deliveries.take_failed_tags() {
            rejected += 1;
            self.channel
                .basic_reject(tag, BasicRejectOptions { requeue: true })
                .await?;
            fault::point("amqp.requeue.rejected");
        }
        // Tag 0 with `multiple` means all unacknowledged deliveries.
        self.channel
            .basic_nack(
                0,
                BasicNackOptions {
                    multiple: true,
                    requeue: true,
                },
            )
            .await?;
        fault::point("amqp.requeue.after");
        let mut close_delay = CloseDelay::default();
        close_delay.acks_sent(rejected);
        close_delay.wait().await;
        Ok(())
    }
}
