//! The validated settings of a source.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::types::ShortString;
use oncegate_core::source::{Order, SourceError};

use crate::connector::BrokerConnector;
use crate::settings::{QueueKind, Rejects, Topology};
use crate::status::SourceMetrics;

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
    pub(crate) connector: BrokerConnector,
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
    pub(crate) metrics: SourceMetrics,
    pub(crate) mismatches: MismatchLog,
}

/// The queues for which the warning about other arguments was logged, with the broker's text. Queues
/// are declared at each reconnect and with each retry of a copy, and the warning is logged once.
#[derive(Debug, Default)]
pub(crate) struct MismatchLog(Mutex<HashMap<ShortString, String>>);

impl MismatchLog {
    /// Whether to log that the queue has other arguments: the broker's text is new for this queue.
    pub(crate) fn is_new(&self, queue: &ShortString, text: &str) -> bool {
        let logged = self.lock().insert(queue.clone(), text.to_owned());
        logged.as_deref() != Some(text)
    }

    /// Forgets the text of a queue, which has the declared arguments now.
    pub(crate) fn clear(&self, queue: &ShortString) {
        self.lock().remove(queue);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ShortString, String>> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The delays of the delay queues. All messages of a queue have the same TTL, because RabbitMQ expires
/// messages only at the head of a queue.
pub(crate) const DELAYS: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(600),
];

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

    /// Whether the order of messages is preserved: requeued messages must be in their old position
    /// before any consumer receives later ones.
    pub(crate) fn preserves_order(&self) -> bool {
        self.order != Order::Unordered
    }

    /// The URL of the current node, without the password.
    pub(crate) fn redacted_url(&self) -> &str {
        &self.connector.nodes.current().redacted_url
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_arguments_of_a_queue_are_logged_once() {
        let (log, queue) = (MismatchLog::default(), ShortString::from("q"));
        assert!(log.is_new(&queue, "x-max-length"));
        assert!(!log.is_new(&queue, "x-max-length"));
        assert!(log.is_new(&"other".into(), "x-max-length"));
        assert!(log.is_new(&queue, "x-message-ttl"));
        log.clear(&queue);
        assert!(log.is_new(&queue, "x-message-ttl"));
    }
}
