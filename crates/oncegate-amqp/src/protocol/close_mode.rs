//! How a channel is closed, which decides where unacknowledged messages are requeued.
//!
//! # Workarounds
//! - *Symptom:* requeuing many messages by one `basic.nack` loses their order. Hence
//!   [`CloseMode::CloseOnly`]. *Version:* RabbitMQ 3.10.8; not 4.3.6.
//! - *Upstream:* `docs/upstream/rabbitmq-nack-order.md`.
//! - *Test:* `releases::deliveries_to_a_stopping_ordered_consumer_are_requeued_in_order` in `tests/amqp`.
//! - *May be removed* when the oldest supported release keeps the order.
//!
//! - *Symptom:* when a single active consumer is cancelled, the next one becomes active before the
//!   messages of the first are requeued. Hence [`CloseMode::StayActive`]. *Version:* all.
//! - *Upstream:* nothing to report: `basic.cancel` leaves unacknowledged messages with the channel.
//! - *Test:* `nodes::with_a_single_active_consumer_order_by_key_holds_across_a_fleet` in `tests/amqp`.
//! - *May be removed:* never.

use crate::protocol::broker_version::BrokerVersion;
use crate::protocol::queue_settings::{ConsumerMode, QueueSettings};

/// How a channel is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseMode {
    /// Cancels the consumer and requeues unsettled deliveries: failed ones by `basic.reject`, all
    /// others by `basic.nack`.
    Requeue,
    /// Cancels the consumer and closes the channel: RabbitMQ requeues its messages in the order of
    /// the queue, which it did not for one `basic.nack` of many before
    /// [`BrokerVersion::UNCOUNTED_NACK`]. All of them count towards the delivery limit.
    CloseOnly,
    /// Closes the channel without cancelling the consumer; the source ignores deliveries that
    /// arrive before that. RabbitMQ activates the next consumer as soon as the active one is
    /// cancelled, before it requeues the messages of the cancelled one. All of them count towards
    /// the delivery limit.
    StayActive,
}

impl CloseMode {
    /// The mode that keeps the order of the messages, if the settings require one, with a broker of
    /// this version (`None` if it is unknown).
    pub(crate) fn for_settings(settings: &QueueSettings, version: Option<BrokerVersion>) -> Self {
        let nack_keeps_order = version >= Some(BrokerVersion::UNCOUNTED_NACK);
        match settings.consumers {
            _ if !settings.preserves_order() => Self::Requeue,
            ConsumerMode::Competing if nack_keeps_order => Self::Requeue,
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
        use CloseMode::{CloseOnly, Requeue, StayActive};
        use ConsumerMode::{Competing, SingleActive};
        use Order::{ByKey, Unordered};
        let (old, new) = (
            Some(BrokerVersion::OLDEST),
            Some(BrokerVersion::UNCOUNTED_NACK),
        );
        for (order, consumers, version, mode, requeues) in [
            (Unordered, Competing, old, Requeue, [true, true]),
            (Unordered, Competing, new, Requeue, [true, true]),
            (Unordered, SingleActive, new, Requeue, [true, false]),
            (ByKey, Competing, None, CloseOnly, [false, false]),
            (ByKey, Competing, old, CloseOnly, [false, false]),
            (ByKey, Competing, new, Requeue, [true, true]),
            (ByKey, SingleActive, old, StayActive, [false, false]),
            (ByKey, SingleActive, new, StayActive, [false, false]),
        ] {
            let mut options = ConnectOptions::default();
            options.order = Some(order);
            let source = RabbitMq::queue("orders").with_options(options);
            let source = match consumers {
                ConsumerMode::Competing => source,
                ConsumerMode::SingleActive => source.single_active_consumer(),
            };
            let found = CloseMode::for_settings(&source.check().expect("settings"), version);
            assert_eq!(found, mode, "{order:?}, {consumers:?}, {version:?}");
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
