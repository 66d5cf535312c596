//! The validated settings of a source.

use std::sync::Arc;
use std::time::Duration;

use lapin::types::ShortString;
use oncegate_core::IdSource;
use oncegate_core::source::{Order, RetryDelays, SourceError};

use crate::settings::{QueueKind, Rejects, Topology};

/// The longest delay for which a delivery waits in the consumer, if there are delay queues. A copy in
/// a delay queue costs the broker more, and cannot be published during a resource alarm.
const LONGEST_KEPT_DELAY: Duration = Duration::from_secs(5);

/// Which consumers of the queue receive messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConsumerMode {
    /// All.
    Competing,
    /// One at a time (`x-single-active-consumer`).
    SingleActive,
}

/// The validated settings.
pub(crate) struct QueueSettings {
    pub(crate) name: Arc<str>,
    pub(crate) queue: ShortString,
    pub(crate) dead_letters: ShortString,
    pub(crate) in_doubt: ShortString,
    pub(crate) prefetch: u16,
    pub(crate) key_header: Option<String>,
    pub(crate) body_limit: usize,
    pub(crate) consumer_timeout: Duration,
    /// How long the consumer may leave a delivery unsettled; zero if unknown.
    pub(crate) longest_open: Duration,
    pub(crate) topology: Topology,
    pub(crate) kind: QueueKind,
    pub(crate) consumers: ConsumerMode,
    pub(crate) order: Order,
    pub(crate) rejects: Rejects,
    /// From where ids are read, for log lines.
    pub(crate) id: Option<IdSource>,
}

impl QueueSettings {
    /// Whether `x-death` has the number of this source's rejections. With [`Rejects::ByQueue`] the
    /// broker adds it; otherwise a producer may have forged it.
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
        let (open, limit) = (self.longest_open, self.unsettled_timeout());
        (open > limit).then(|| {
            format!(
                "a delivery may exceed RabbitMQ's consumer_timeout: it may stay unacknowledged for {open:?} with these settings of .handler_timeout(…), .max_inline_retries(…) and .lease(…), \
                 but the source closes the channel after {limit:?} and the broker after {:?}, and then all unacknowledged messages are redelivered; \
                 shorten one of them, or raise consumer_timeout in rabbitmq.conf and in .consumer_timeout(…)",
                self.consumer_timeout
            )
        })
    }

    /// The queue that holds a message for one of [`DELAYS`].
    pub(crate) fn delay_queue(&self, delay: Duration) -> ShortString {
        // A short string of at most 255 bytes, because `queue_name` allows 240 bytes for the name.
        format!("{}.delay.{}", self.name, delay.as_millis()).into()
    }

    /// Whether released deliveries may wait in delay queues. Not if the order is preserved: a consumer
    /// could receive later messages before the delayed one.
    pub(crate) fn uses_delay_queues(&self) -> bool {
        self.topology == Topology::Declare
            && self.consumers == ConsumerMode::Competing
            && !self.preserves_order()
    }

    /// Where deliveries wait for their next attempt. One that waits in the consumer is unacknowledged: it
    /// takes a place of the prefetch, and the broker closes the channel after the consumer timeout.
    pub(crate) fn retry_delays(&self) -> RetryDelays {
        if self.uses_delay_queues() {
            RetryDelays::InSource {
                above: LONGEST_KEPT_DELAY.min(self.consumer_timeout / 2),
                max_kept: usize::from(self.prefetch / 2),
            }
        } else {
            RetryDelays::InConsumer {
                longest: self.consumer_timeout / 2,
            }
        }
    }

    /// Whether the order of messages is preserved: requeued messages must be in their old position
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
