//! How a channel is closed, which decides where unacknowledged messages are requeued.
//!
//! # Workarounds
//! - *Symptom:* requeuing many messages by one `basic.nack` loses their order. Hence
//!   [`CloseMode::CloseOnly`]. *Version:* RabbitMQ 3.10.8.
//! - *Upstream:* `docs/upstream/rabbitmq-nack-order.md`.
//! - *Test:* `releases::deliveries_to_a_stopping_ordered_consumer_are_requeued_in_order` in `tests/amqp`.
//! - *May be removed* when the oldest supported release keeps the order.
//!
//! - *Symptom:* when a single active consumer is cancelled, the next one becomes active before the
//!   messages of the first are requeued. Hence [`CloseMode::StayActive`]. *Version:* all.
//! - *Upstream:* nothing to report: `basic.cancel` leaves unacknowledged messages with the channel.
//! - *Test:* `nodes::with_a_single_active_consumer_order_by_key_holds_across_a_fleet` in `tests/amqp`.
//! - *May be removed:* never.

use crate::protocol::queue_settings::{ConsumerMode, QueueSettings};

/// How a channel is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseMode {
    /// Cancels the consumer and requeues unsettled deliveries: failed ones by `basic.reject`, all
    /// others by `basic.nack`.
    Requeue,
    /// Cancels the consumer and closes the channel: RabbitMQ requeues its messages in the order of
    /// the queue, which it does not guarantee for one `basic.nack` of many.
    CloseOnly,
    /// Closes the channel without cancelling the consumer; the source ignores deliveries that
    /// arrive before that. RabbitMQ activates the next consumer as soon as the active one is
    /// cancelled, before it requeues the messages of the cancelled one.
    StayActive,
}

impl CloseMode {
    /// The mode that keeps the order of the messages, if the settings require one.
    pub(crate) fn for_settings(settings: &QueueSettings) -> Self {
        match settings.consumers {
            _ if !settings.preserves_order() => Self::Requeue,
            ConsumerMode::Competing => Self::CloseOnly,
            ConsumerMode::SingleActive => Self::StayActive,
        }
    }

    /// Whether a source that stops cancels its consumer before its deliveries are settled.
    pub(crate) fn cancels_at_stop(self) -> bool {
        self != Self::StayActive
    }

    /// Whether unsettled deliveries are requeued by `basic.reject` and `basic.nack` before the
    /// channel is closed. Not those of a single active consumer that was not stopped: requeuing
    /// cancels the consumer first, and then the next one would receive later messages before the
    /// requeued ones.
    pub(crate) fn requeues_before_close(self, consumers: ConsumerMode, was_stopped: bool) -> bool {
        self == Self::Requeue && (was_stopped || consumers == ConsumerMode::Competing)
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::source::{ConnectOptions, Order};

    use super::*;
    use crate::RabbitMq;

    #[test]
    fn the_mode_follows_from_the_order_and_the_consumers() {
        for (order, consumers, mode, requeues) in [
            (
                Order::Unordered,
                ConsumerMode::Competing,
                CloseMode::Requeue,
                [true, true],
            ),
            (
                Order::Unordered,
                ConsumerMode::SingleActive,
                CloseMode::Requeue,
                [true, false],
            ),
            (
                Order::ByKey,
                ConsumerMode::Competing,
                CloseMode::CloseOnly,
                [false, false],
            ),
            (
                Order::ByKey,
                ConsumerMode::SingleActive,
                CloseMode::StayActive,
                [false, false],
            ),
        ] {
            let mut options = ConnectOptions::default();
            options.order = Some(order);
            let source = RabbitMq::queue("orders").with_options(options);
            let source = match consumers {
                ConsumerMode::Competing => source,
                ConsumerMode::SingleActive => source.single_active_consumer(),
            };
            let found = CloseMode::for_settings(&source.check().expect("settings"));
            assert_eq!(found, mode, "{order:?}, {consumers:?}");
            assert_eq!(
                [true, false]
                    .map(|was_stopped| found.requeues_before_close(consumers, was_stopped)),
                requeues,
                "{order:?}, {consumers:?}"
            );
            assert_eq!(found.cancels_at_stop(), mode != CloseMode::StayActive);
        }
    }
}
