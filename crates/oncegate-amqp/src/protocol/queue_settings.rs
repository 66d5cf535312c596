//! The validated settings of a source.

use std::sync::Arc;
use std::time::Duration;

use lapin::types::ShortString;
use oncegate_core::IdSource;
use oncegate_core::source::{Order, RetryDelays, SourceError};

use crate::settings::{QueueKind, Rejects, Topology};

/// Up to this delay a delivery waits in the consumer although there are delay queues: a copy in a
/// delay queue costs the broker more, and the broker accepts none during a resource alarm.
const MAX_DELAY_IN_CONSUMER: Duration = Duration::from_secs(5);

/// Which consumers of the queue receive messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConsumerMode {
    /// All.
    Competing,
    /// One at a time (`x-single-active-consumer`).
    SingleActive,
}

/// The validated settings of a source.
pub(crate) struct QueueSettings {
    /// The name of the consumed queue, in the type for messages and log lines.
    pub(crate) name: Arc<str>,
    /// The same name, in the type for lapin.
    pub(crate) queue: ShortString,
    pub(crate) dead_letters: ShortString,
    pub(crate) in_doubt: ShortString,
    pub(crate) prefetch: u16,
    pub(crate) key_header: Option<String>,
    pub(crate) body_limit: usize,
    pub(crate) consumer_timeout: Duration,
    /// See [`ConnectOptions::max_unsettled_time`](oncegate_core::source::ConnectOptions).
    pub(crate) max_unsettled_time: Duration,
    pub(crate) topology: Topology,
    pub(crate) kind: QueueKind,
    pub(crate) consumers: ConsumerMode,
    pub(crate) order: Order,
    pub(crate) rejects: Rejects,
    /// From where ids are read, for log lines.
    pub(crate) id: Option<IdSource>,
}

impl QueueSettings {
    /// Whether `x-death` counts this source's rejections. With [`Rejects::ByQueue`] the broker adds
    /// the header; otherwise a producer may have forged it.
    pub(crate) fn counts_rejections(&self) -> bool {
        self.rejects == Rejects::ByQueue
    }

    /// How long a delivery may be unsettled before the source closes the channel: nine tenths of the
    /// consumer timeout, so that the source closes it before the broker does.
    pub(crate) fn unsettled_timeout(&self) -> Duration {
        self.consumer_timeout.mul_f64(0.9)
    }

    /// A warning, if a delivery may be unsettled for longer than [`Self::unsettled_timeout`].
    pub(crate) fn consumer_timeout_warning(&self) -> Option<String> {
        let (open, limit) = (self.max_unsettled_time, self.unsettled_timeout());
        (open > limit).then(|| {
            format!(
                "a delivery may exceed RabbitMQ's consumer_timeout: it may stay unacknowledged for {open:?} with these settings of .handler_timeout(…), .max_inline_retries(…) and .lease(…), \
                 but the source closes the channel after {limit:?} and the broker after {:?}, and then all unacknowledged messages are redelivered; \
                 lower one of these settings, or raise consumer_timeout in rabbitmq.conf and in .consumer_timeout(…)",
                self.consumer_timeout
            )
        })
    }

    /// The name of the delay queue for one of the [`DELAYS`](crate::protocol::topology::DELAYS).
    pub(crate) fn delay_queue(&self, delay: Duration) -> ShortString {
        // AMQP limits a short string to 255 bytes; `queue_name` has limited the name to 240.
        format!("{}.delay.{}", self.name, delay.as_millis()).into()
    }

    /// Whether released deliveries may wait in delay queues, which only [`Topology::Declare`]
    /// creates. Not with an order or a single active consumer: later messages would be received
    /// before the delayed one.
    pub(crate) fn uses_delay_queues(&self) -> bool {
        self.topology == Topology::Declare
            && self.consumers == ConsumerMode::Competing
            && !self.preserves_order()
    }

    /// Where deliveries wait for their next attempt. A delivery that waits in the consumer is
    /// unacknowledged: it counts towards the prefetch, and the broker closes the channel after the
    /// consumer timeout.
    pub(crate) fn retry_delays(&self) -> RetryDelays {
        if self.uses_delay_queues() {
            RetryDelays::InSource {
                above: MAX_DELAY_IN_CONSUMER.min(self.consumer_timeout / 2),
                max_kept: usize::from(self.prefetch / 2),
            }
        } else {
            RetryDelays::InConsumer {
                longest: self.consumer_timeout / 2,
            }
        }
    }

    /// Whether the user set an order. Then requeued messages must be back in their old position
    /// before any consumer receives later ones.
    pub(crate) fn preserves_order(&self) -> bool {
        self.order != Order::Unordered
    }
}

/// Checks that the name of a queue leaves room for `.delay.600000` within AMQP's 255 bytes.
pub(crate) fn queue_name(setting: &str, name: String) -> Result<ShortString, SourceError> {
    if name.is_empty() {
        return Err(SourceError::misconfigured(
            setting,
            "the name is empty",
            "name a queue",
        ));
    }
    if name.len() > 240 {
        let problem = format!("the name has {} bytes", name.len());
        return Err(SourceError::misconfigured(
            setting,
            problem,
            "use a name of at most 240 bytes",
        ));
    }
    Ok(name.into())
}
