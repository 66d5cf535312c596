//! The contract of a source, which receives messages from a broker and settles them.

use std::time::{Duration, Instant, UNIX_EPOCH};

use async_trait::async_trait;

use crate::id::{IdSource, Scope};
use crate::lifecycle::{Reason, Settlement};
use crate::message::{Message, Origin};
use crate::store::BoxError;

/// Receives messages from a broker and settles them.
///
/// # The contract
/// - A message is redelivered until it is settled, also after the source ends.
/// - `Accept`: the message is not redelivered. `Release`: it is redelivered; with
///   [`RetryDelays::InSource`] after the delay at the earliest, and with [`Delivery::failures`] set
///   as requested unless the source is closed before. `Reject`: it is published to the dead-letter
///   or in-doubt destination, and settled after the broker has confirmed that.
/// - The source reconnects with backoff, and logs that. It returns an error only if an operator has
///   to change something.
#[async_trait]
pub trait Source: Send {
    /// Waits for a message, then appends all that are ready, within the limit, without waiting for
    /// more.
    ///
    /// Cancel-safe: dropping the future loses no message. The call also drives the background work
    /// of the source, and may return without a message.
    ///
    /// # Errors
    /// Permanent errors only. The consumer drains and returns the error.
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError>;

    /// Takes settlements, in any order, and returns at once, leaving `settled` empty.
    ///
    /// The source settles in the background: it commits the lowest unsettled offset (Kafka) or
    /// acknowledges (AMQP), redelivers released messages, publishes dead letters and waits for
    /// their confirmation.
    ///
    /// # Errors
    /// As [`Source::receive`].
    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError>;

    /// Stops receiving. Called once when a drain starts; `receive` is not called after it.
    async fn stop(&mut self) {}

    /// Completes the settlements, until the deadline, then leaves the group or closes the channel.
    ///
    /// # Errors
    /// Settlements that could not be completed; their messages will be redelivered.
    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError>;

    /// Called when the consumer's queue reaches another level. At [`QueueLevel::High`], a source
    /// with several partitions returns no message of a partition that has more than its share of
    /// the unsettled deliveries, so that the retries of one partition do not stop the others.
    fn queue_level(&mut self, level: QueueLevel) {
        let _ = level;
    }

    /// The topic or queue to which a message of this origin is rejected for this reason, for the
    /// log; `None` if it has no name.
    fn destination(&self, origin: &Origin, reason: &Reason) -> Option<String> {
        let _ = (origin, reason);
        None
    }

    /// The properties of this source that the consumer needs.
    fn properties(&self) -> SourceProperties {
        SourceProperties::default()
    }
}

/// The properties of a source that the consumer needs, from [`Source::properties`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceProperties {
    /// The order, unless the user sets one. Default: [`Order::Unordered`]. Kafka: by key.
    pub default_order: Order,
    /// The maximum number of claims in one batch to the store, at least 1; the same maximum applies
    /// to its outcomes and to its late completions. Default: 256. AMQP: a quarter of the prefetch.
    pub max_store_batch: usize,
    /// Whether batches to a slow store may overlap. Default: no. Kafka: yes.
    pub overlapping_batches: bool,
    /// Where deliveries wait for their next attempt. Default: in the consumer, without a limit of
    /// time. RabbitMQ: in delay queues if they wait for longer than five seconds.
    pub retry_delays: RetryDelays,
}

/// How full the consumer's queue is, in which deliveries wait for their next attempt, or behind
/// others of their key or partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueLevel {
    /// Less than half of `max_queued` and of `max_queued_bytes`.
    #[default]
    Low,
    /// At least half of `max_queued` or of `max_queued_bytes`. At the full limit, the consumer
    /// receives nothing.
    High,
}

/// Where a delivery waits after a failed attempt, or for another holder of its id.
///
/// A delivery that waits in the consumer counts towards `max_queued`. If a broker limits the number
/// or the time of unsettled deliveries, its source should use [`InSource`](Self::InSource). A
/// delivery with an ordering key always waits in the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetryDelays {
    /// In the consumer. The source redelivers a released message at once.
    InConsumer {
        /// The maximum delay; a longer one is shortened to it.
        longest: Duration,
    },
    /// In the source: the consumer releases the delivery with the delay.
    InSource {
        /// A delivery whose delay is not longer waits in the consumer.
        above: Duration,
        /// While the consumer has at least this many queued deliveries, or is at `max_queued`, the
        /// source also executes shorter delays.
        max_kept: usize,
    },
}

impl Default for SourceProperties {
    fn default() -> Self {
        Self {
            default_order: Order::Unordered,
            max_store_batch: 256,
            overlapping_batches: false,
            retry_delays: RetryDelays::InConsumer {
                longest: Duration::MAX,
            },
        }
    }
}

/// The description of a source, which a user passes to the builder and from which the consumer
/// connects the source. `connect` checks the settings.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a source of messages",
    label = "this is not a source",
    note = "pass one of `Kafka::topic(…)`, `RabbitMq::queue(…)` and `MemoryBroker::source()`; the first two need the features `kafka` and `rabbitmq`",
    note = "`()` means that the consumer has no source: call `.source(…)`"
)]
#[async_trait]
pub trait Connect: Send + 'static {
    /// The connected source.
    type Source: Source + 'static;

    /// Checks that messages of this source have the part that this [`IdSource`] reads. Connects to
    /// nothing. [`Builder::build`](crate::Builder::build) calls this method.
    ///
    /// # Errors
    /// Messages of this source do not have that part. The error says what to use instead.
    fn check_id(&self, id: &IdSource) -> Result<(), SourceError> {
        let _ = id;
        Ok(())
    }

    /// Checks the settings and connects.
    ///
    /// # Errors
    /// An operator has to change something, which the text names. While the broker is unavailable,
    /// `connect` retries and logs a warning.
    async fn connect(self, options: ConnectOptions) -> Result<Self::Source, SourceError>;
}

/// The consumer's settings that concern its source, for [`Connect::connect`]. `None` means that no
/// value is set.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// `max_in_flight` of the consumer. If a source prefetches more messages, they wait in this
    /// process, perhaps longer than the broker allows.
    pub max_in_flight: Option<usize>,
    /// The dedup window. A message that is redelivered after the window is handled again. A source
    /// that can detect that its broker keeps messages for longer logs a warning.
    pub dedup_window: Option<Duration>,
    /// The order that the user set. With [`Order::ByKey`] or [`Order::ByPartition`], a source must
    /// not reorder released messages.
    pub order: Option<Order>,
    /// How long a delivery may stay unsettled, [`Builder::max_unsettled_time`]. A source whose
    /// broker has a lower limit logs a warning.
    ///
    /// [`Builder::max_unsettled_time`]: crate::Builder::max_unsettled_time
    pub max_unsettled_time: Option<Duration>,
    /// From where ids are read, for the log lines of messages that the source rejects by itself.
    pub id: Option<IdSource>,
    /// The scope of the ids in the store.
    pub(crate) scope: Scope,
}

/// The maximum that [`Source::receive`] may append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limit {
    /// Deliveries. With 0, `receive` waits for revocations and errors only.
    pub count: usize,
    /// Bytes of key, headers and body. A larger delivery is returned alone.
    pub bytes: usize,
}

impl Limit {
    /// No deliveries, while the consumer is at its limit: only revocations and errors.
    pub const NOTHING: Self = Self::new(0, 0);

    /// At most this many deliveries and bytes.
    pub const fn new(count: usize, bytes: usize) -> Self {
        Self { count, bytes }
    }
}

/// One item that [`Source::receive`] appends.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all values are deliveries: a box would cost an allocation for each"
)]
pub enum Incoming {
    /// A delivery to settle.
    Delivery(Delivery),
    /// The assignment (Kafka) or channel (AMQP) with this [`Receipt::epoch`] is being revoked.
    /// Deliveries with this epoch that have not started do not start; running ones are settled if
    /// they end in time.
    Revoked(u64),
}

/// One delivery of a message.
#[derive(Debug)]
#[non_exhaustive]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// The source's handle to settle the delivery.
    pub receipt: Receipt,
    /// How many attempts of this message failed before, as its last release reported; 0 if the
    /// source does not transport this number.
    pub failures: u32,
}

impl Delivery {
    /// A delivery without failed attempts.
    #[inline]
    pub fn new(message: Message, receipt: Receipt) -> Self {
        Self {
            message,
            receipt,
            failures: 0,
        }
    }

    /// The same delivery with this many failed attempts.
    #[inline]
    pub fn with_failures(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }
}

/// The source's handle to settle one delivery. Only the source interprets it. It cannot be cloned.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The serial number of the assignment (Kafka) or of the channel (AMQP).
    pub epoch: u64,
    /// The partition, or 0.
    pub partition: u32,
    /// The offset or the delivery tag.
    pub position: u64,
}

impl Receipt {
    /// A receipt of this epoch, with an offset or a delivery tag, in partition 0.
    #[inline]
    pub const fn new(epoch: u64, position: u64) -> Self {
        Self {
            epoch,
            partition: 0,
            position,
        }
    }

    /// The same receipt with a partition.
    #[inline]
    pub const fn with_partition(mut self, partition: u32) -> Self {
        self.partition = partition;
        self
    }

    /// Moves the receipt out of a delivery, which is dropped afterwards, and leaves a placeholder.
    #[inline]
    pub(crate) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::new(0, 0))
    }
}

/// A delivery with its settlement. Only [`InFlight`](crate::internal::in_flight::InFlight) and tests
/// of sources create it. [`Source::settle`] consumes it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Settled {
    /// The delivery, moved.
    pub delivery: Delivery,
    /// How the source settles the delivery.
    pub settlement: Settlement,
    /// The history of its failures, for the headers of a dead letter; `None` if it is not rejected.
    pub failure_history: Option<Box<FailureHistory>>,
}

impl Settled {
    /// A delivery with its settlement, without a history of failures.
    #[inline]
    pub fn new(delivery: Delivery, settlement: Settlement) -> Self {
        Self {
            delivery,
            settlement,
            failure_history: None,
        }
    }

    /// The same with the history of its failures.
    pub fn with_failure_history(mut self, failure_history: FailureHistory) -> Self {
        self.failure_history = Some(Box::new(failure_history));
        self
    }
}

/// The failures of a message, which its dead letter carries in headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailureHistory {
    /// The id, if the message has a usable one.
    pub id: Option<String>,
    /// How many attempts count towards `max_attempts`. Inline retries belong to their attempt. An
    /// attempt without a recorded outcome counts in `crashes`.
    pub attempts: u32,
    /// How many leases ended without a recorded outcome: the process crashed, or lost its
    /// connection to the store.
    pub crashes: u32,
    /// The number of the last attempt of the id, which is its fencing token: the highest known one;
    /// 0 if no attempt was granted. The attempts after a redrive have higher numbers.
    pub last_attempt: u32,
    /// The first error, cut to 1,000 characters.
    pub first_error: Option<String>,
    /// The last error, cut to 1,000 characters.
    pub last_error: Option<String>,
}

/// Which messages are handled one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// None: any deliveries may run at the same time.
    Unordered,
    /// Deliveries with the same key of the same topic or queue.
    ByKey,
    /// Deliveries of the same partition.
    ByPartition,
}

/// A permanent error of a source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A setting is wrong.
    #[error("{setting}: {problem}; {remedy}")]
    Misconfigured {
        /// The setting.
        setting: String,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// The broker refuses the request or is unavailable, and a retry does not help.
    #[error("the broker cannot be used: {0}")]
    Unavailable(#[source] BoxError),
}

impl SourceError {
    /// A wrong setting.
    pub fn misconfigured(
        setting: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Misconfigured {
            setting: setting.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}

/// The headers that oncegate writes on dead letters, in-doubt messages and delayed copies. Adapters
/// may add others with [`PREFIX`](headers::PREFIX).
///
/// A producer can set these headers, too, so a source copies only the [`kept_headers`] of a message
/// to its dead letter, and adds [`rejection_headers`].
pub mod headers {
    /// The prefix of all these headers.
    pub const PREFIX: &str = "oncegate-";
    /// Why the message was rejected: [`Reason::as_str`](crate::lifecycle::Reason::as_str).
    pub const REASON: &str = "oncegate-reason";
    /// The id of the message.
    pub const ID: &str = "oncegate-id";
    /// How many attempts count towards `max_attempts`. Inline retries belong to their attempt. An
    /// attempt without a recorded outcome counts in [`CRASHES`].
    pub const ATTEMPTS: &str = "oncegate-attempts";
    /// How many leases ended without a recorded outcome: the process crashed, or lost its
    /// connection to the store; left out if it is 0.
    pub const CRASHES: &str = "oncegate-crashes";
    /// The number of the last attempt of the id, which is its fencing token: the highest known
    /// one; left out if no attempt was granted.
    pub const LAST_ATTEMPT: &str = "oncegate-last-attempt";
    /// The first error.
    pub const FIRST_ERROR: &str = "oncegate-first-error";
    /// The last error.
    pub const LAST_ERROR: &str = "oncegate-last-error";
    /// Topic, partition and offset, or the queue.
    pub const ORIGIN: &str = "oncegate-origin";
    /// How many attempts of a delayed copy failed before.
    pub const FAILURES: &str = "oncegate-failures";
    /// The earliest known time of the message, in milliseconds since 1970: its timestamp, or, on a
    /// delayed copy of RabbitMQ, the time of receipt if it is earlier or there is no timestamp.
    pub const FIRST_SEEN: &str = "oncegate-first-seen";
}

/// Whether a header of this name is reserved for oncegate. Names are compared byte by byte, as
/// Kafka and RabbitMQ do.
pub fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(headers::PREFIX.as_bytes())
}

/// The headers of a message that its dead letter keeps: all but the reserved ones, which a producer
/// may have forged, or which describe an earlier delivery.
pub fn kept_headers(message: &Message) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
    message
        .headers
        .iter()
        .filter(|(name, _)| !is_reserved(name))
}

/// The earliest known time of a message, in milliseconds since 1970: the earlier of its own
/// timestamp and [`headers::FIRST_SEEN`]. So a producer that writes the header can make its message
/// older, never younger.
pub fn first_seen(message: &Message) -> Option<u64> {
    let sent = message
        .sent_at
        .and_then(|at| u64::try_from(at.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok());
    first_seen_header(message).into_iter().chain(sent).min()
}

/// The value of [`headers::FIRST_SEEN`].
pub(crate) fn first_seen_header(message: &Message) -> Option<u64> {
    let value = message.headers.last(headers::FIRST_SEEN)?;
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// The headers that a source adds to the [`kept_headers`] of a rejected message, in this order:
/// name and value.
pub fn rejection_headers(
    delivery: &Delivery,
    reason: &crate::lifecycle::Reason,
    failure_history: Option<&FailureHistory>,
) -> Vec<(&'static str, String)> {
    let failure_history = failure_history.cloned().unwrap_or_default();
    let origin = delivery.message.origin.to_string();
    let mut added = vec![
        (headers::REASON, reason.as_str().to_owned()),
        (headers::ATTEMPTS, failure_history.attempts.to_string()),
        (headers::ORIGIN, origin),
    ];
    added.extend(
        (failure_history.crashes > 0)
            .then(|| (headers::CRASHES, failure_history.crashes.to_string())),
    );
    added.extend((failure_history.last_attempt > 0).then(|| {
        (
            headers::LAST_ATTEMPT,
            failure_history.last_attempt.to_string(),
        )
    }));
    added.extend(failure_history.id.map(|id| (headers::ID, id)));
    added.extend(
        failure_history
            .first_error
            .map(|error| (headers::FIRST_ERROR, error)),
    );
    added.extend(
        failure_history
            .last_error
            .map(|error| (headers::LAST_ERROR, error)),
    );
    added.extend(first_seen(&delivery.message).map(|at| (headers::FIRST_SEEN, at.to_string())));
    added
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::Reason;
    use crate::message::HeadersBuilder;

    #[test]
    fn forged_headers_are_stripped_from_dead_letters() {
        let mut builder = HeadersBuilder::default();
        let own: [(&[u8], Option<&[u8]>); 5] = [
            (b"id", Some(b"1")),
            (b"oncegate", Some(b"2")),
            (b"Oncegate-Id", Some(b"3")),
            (b"\xffoncegate-id", None),
            (b"id", None),
        ];
        let forged: [&[u8]; 5] = [
            b"oncegate-id",
            b"oncegate-id",
            b"oncegate-",
            b"oncegate-of-a-later-release",
            b"oncegate-\xff",
        ];
        own.iter()
            .for_each(|(name, value)| builder.push(name, *value));
        forged
            .iter()
            .for_each(|name| builder.push(name, Some(b"victim")));
        let message = Message {
            headers: builder.finish(),
            ..Message::default()
        };
        assert_eq!(kept_headers(&message).collect::<Vec<_>>(), own);
        let delivery = Delivery {
            message,
            receipt: Receipt {
                epoch: 1,
                partition: 0,
                position: 0,
            },
            failures: 0,
        };
        let written = rejection_headers(&delivery, &Reason::MissingId, None);
        assert_eq!(
            written.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            [headers::REASON, headers::ATTEMPTS, headers::ORIGIN]
        );
        assert!(
            written
                .iter()
                .all(|(name, value)| is_reserved(name.as_bytes()) && value != "victim")
        );
    }

    #[test]
    fn a_header_makes_a_message_older_and_never_younger() {
        let seen = |header: Option<&[u8]>, sent: Option<u64>| {
            let message = header.map_or_else(Message::default, |value| {
                Message::default().with_header(headers::FIRST_SEEN, value)
            });
            first_seen(&Message {
                sent_at: sent.map(|ms| UNIX_EPOCH + Duration::from_millis(ms)),
                ..message
            })
        };
        assert_eq!(
            (
                seen(None, None),
                seen(None, Some(7)),
                seen(Some(b"7"), None)
            ),
            (None, Some(7), Some(7))
        );
        assert_eq!(
            (seen(Some(b"7"), Some(9)), seen(Some(b"9"), Some(7))),
            (Some(7), Some(7))
        );
        for invalid in [&b"soon"[..], b"", b"-1", b"\xff", b"99999999999999999999"] {
            assert_eq!(seen(Some(invalid), Some(7)), Some(7), "{invalid:?}");
        }
    }
}
