//! The contract of a source: where deliveries come from, and where settlements go.

use std::time::{Duration, Instant, UNIX_EPOCH};

use async_trait::async_trait;

use crate::lifecycle::{Reason, Settlement};
use crate::message::{Message, Origin};
use crate::store::BoxError;

/// Where deliveries come from, and where settlements go.
///
/// # The contract
/// - A delivery is handed over until it is settled: what is not settled when the source ends comes
///   back.
/// - `Accept` never comes back. `Release` comes back, not before its delay, with
///   [`Delivery::failures`] as it says. `Reject` stands in the dead-letter or in-doubt destination,
///   confirmed, before the delivery is taken as settled.
/// - Trouble with the broker is the source's own work: it reconnects with backoff, and says so in
///   its logs. It returns an error only for what a person has to change.
#[async_trait]
pub trait Source: Send {
    /// Waits until there is something, then adds all that is ready, within the limit, without
    /// waiting for more.
    ///
    /// Cancel-safe: a dropped future loses nothing. Also drives what the source has to do in the
    /// background, and may return with nothing added.
    ///
    /// # Errors
    /// Only for what retrying cannot heal; the consumer drains and ends with it.
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError>;

    /// Hands settlements over, in any order, and returns at once, leaving `settled` empty.
    ///
    /// Commit watermark, multiple acknowledgement, holding a released delivery, publishing a dead
    /// letter and waiting for its confirmation are the source's own work, done in the background.
    ///
    /// # Errors
    /// As [`Source::receive`].
    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError>;

    /// Stops handing out new deliveries; called once when a drain begins; `receive` is not called
    /// any more.
    async fn stop(&mut self) {}

    /// Finishes what was settled, until the deadline, then leaves the group or closes the channel.
    ///
    /// # Errors
    /// What could not be finished; it will be delivered again.
    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError>;

    /// Where a delivery of this origin goes that is rejected for this reason, for the log; `None`
    /// where that has no name.
    fn destination(&self, origin: &Origin, reason: &Reason) -> Option<String> {
        let _ = (origin, reason);
        None
    }

    /// What each delivery is ordered by, unless the user chose otherwise.
    fn default_order(&self) -> Order {
        Order::Unordered
    }

    /// How many deliveries one apply to the store should carry at the most. AMQP: a quarter of the
    /// prefetch.
    fn chunk(&self) -> usize {
        256
    }

    /// Whether applies to a slow store should overlap. Kafka: yes; AMQP: no.
    fn overlap(&self) -> bool {
        false
    }
}

/// A description of a source that can be opened: what a user hands to the consumer.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a source of messages",
    label = "this is no source",
    note = "hand over one of `Kafka::topic(…)`, `RabbitMq::queue(…)` and `MemoryBroker::source()`; the first two need the features `kafka` and `rabbitmq`",
    note = "`()` says that the consumer was given no source: call `.source(…)`"
)]
#[async_trait]
pub trait Open: Send {
    /// What it opens.
    type Source: Source + 'static;

    /// Told before it is opened: how many deliveries the consumer holds at once. What a source
    /// takes beyond that only waits in it, and may wait too long for its broker.
    fn for_in_flight(self, count: usize) -> Self
    where
        Self: Sized,
    {
        let _ = count;
        self
    }

    /// Told before it is opened: for how long the consumer remembers a message that it has handled.
    /// What a source may deliver again later than that is handled again; one that can tell says so
    /// when it is opened.
    fn for_window(self, window: Duration) -> Self
    where
        Self: Sized,
    {
        let _ = window;
        self
    }

    /// Told before it is opened, where the user chose one: the order that the consumer keeps. A
    /// source that keeps what is released elsewhere than in its place may not do so then.
    fn for_order(self, order: Order) -> Self
    where
        Self: Sized,
    {
        let _ = order;
        self
    }

    /// Told before it is opened: how long a delivery may stay unsettled by the consumer's settings,
    /// [`Builder::longest_open`]. A source whose broker bounds that says so when it is opened.
    ///
    /// [`Builder::longest_open`]: crate::Builder::longest_open
    fn for_longest_open(self, open: Duration) -> Self
    where
        Self: Sized,
    {
        let _ = open;
        self
    }

    /// Checks the settings and connects.
    ///
    /// # Errors
    /// What a person has to change. A broker that is not there yet is waited for, with a warning in
    /// the log.
    async fn open(self) -> Result<Self::Source, SourceError>;
}

/// How much a source may hand over at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Deliveries. With 0, only revocations and errors are waited for.
    pub count: usize,
    /// Bytes of key, headers and body. One delivery larger than this is handed over alone.
    pub bytes: usize,
}

impl Limit {
    /// No deliveries: the consumer is full, and still wants to hear what is taken from it.
    pub const NOTHING: Self = Self { count: 0, bytes: 0 };
}

/// What a source hands over.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all of them are deliveries: a box would cost each an allocation"
)]
pub enum Incoming {
    /// A delivery to settle.
    Delivery(Delivery),
    /// Every delivery whose receipt has this epoch belongs to someone else soon: what has not
    /// started is not to start; what runs is settled if it is quick.
    Revoked(u64),
}

/// One hand-over of a message.
#[derive(Debug)]
pub struct Delivery {
    /// What was sent.
    pub message: Message,
    /// The transport's handle to settle it.
    pub receipt: Receipt,
    /// How many attempts of this message failed before, as its last release said; 0 where the
    /// source does not know.
    pub failures: u32,
}

/// The transport's handle to settle one delivery. Its source reads its meaning; nobody can copy it.
#[derive(Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The assignment or the channel that it belongs to.
    pub epoch: u64,
    /// The partition, or 0.
    pub partition: u32,
    /// The offset or the delivery tag.
    pub position: u64,
}

/// A delivery and what becomes of it. Made by the road alone, consumed by [`Source::settle`].
#[derive(Debug)]
pub struct Settled {
    /// The delivery, moved.
    pub delivery: Delivery,
    /// What becomes of it.
    pub settlement: Settlement,
    /// What a person who finds it in the dead letters wants to know; `None` where nothing failed.
    pub story: Option<Box<FailureHistory>>,
}

/// What is written beside a dead letter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailureHistory {
    /// The id, where one could be read.
    pub id: Option<String>,
    /// How many attempts count towards the budget, without a grant over it, which is not run.
    pub attempts: u32,
    /// The highest number of an attempt that is known of its id: after a redrive, attempts go on
    /// above it; 0 if none was granted.
    pub fence: u32,
    /// The first error, cut to 1,000 bytes.
    pub first_error: Option<String>,
    /// The last error, cut to 1,000 bytes.
    pub last_error: Option<String>,
}

/// What is handled one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Nothing: any two deliveries may run at once.
    Unordered,
    /// Deliveries with the same key of the same topic or queue.
    ByKey,
    /// Deliveries of the same partition.
    ByPartition,
}

/// Why a source cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A setting is wrong: the text names it and says what to do.
    #[error("{setting}: {problem}; {remedy}")]
    Misconfigured {
        /// The setting.
        setting: String,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// The broker refuses or is not there, and trying again does not help.
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

/// The headers that oncegate writes on dead letters, in-doubt messages and delayed copies.
///
/// A producer can write them, too. So a source copies only [`kept_headers`] of a message onto its
/// dead letter, and adds its own.
pub mod headers {
    /// The prefix of all their names.
    pub const PREFIX: &str = "oncegate-";
    /// Why the message was rejected: [`Reason::as_str`](crate::lifecycle::Reason::as_str).
    pub const REASON: &str = "oncegate-reason";
    /// The id that the gate used.
    pub const ID: &str = "oncegate-id";
    /// How many attempts count towards the budget, without a grant over it, which is not run.
    pub const ATTEMPTS: &str = "oncegate-attempts";
    /// The number of the last attempt that was granted; left out if none was.
    pub const FENCE: &str = "oncegate-fence";
    /// The first error.
    pub const FIRST_ERROR: &str = "oncegate-first-error";
    /// The last error.
    pub const LAST_ERROR: &str = "oncegate-last-error";
    /// Topic or queue, and partition and offset where there are some.
    pub const ORIGIN: &str = "oncegate-origin";
    /// How many attempts of a delayed copy failed before.
    pub const FAILURES: &str = "oncegate-failures";
    /// When the first copy was seen, in milliseconds since 1970.
    pub const FIRST_SEEN: &str = "oncegate-first-seen";
}

/// Whether a header of this name is reserved for oncegate. Names are compared byte by byte, as
/// Kafka and RabbitMQ do.
pub fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(headers::PREFIX.as_bytes())
}

/// The headers of a message that its dead letter keeps: all but the reserved ones. Those were
/// forged by a producer, or describe an earlier delivery.
pub fn kept_headers(message: &Message) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
    message
        .headers
        .iter()
        .filter(|(name, _)| !is_reserved(name))
}

/// When a message was first seen, in milliseconds since 1970: the earlier of its own timestamp and
/// [`headers::FIRST_SEEN`]. So a producer that writes the header can make its message older, never
/// younger.
pub fn first_seen(message: &Message) -> Option<u64> {
    let header = message
        .headers
        .last(headers::FIRST_SEEN)
        .and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
    let sent = message
        .sent_at
        .and_then(|at| u64::try_from(at.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok());
    header.into_iter().chain(sent).min()
}

/// The headers that a source writes onto a rejected delivery, in this order, beside its
/// [`kept_headers`]: name and value.
pub fn rejection_headers(
    delivery: &Delivery,
    reason: &crate::lifecycle::Reason,
    story: Option<&FailureHistory>,
) -> Vec<(&'static str, String)> {
    let story = story.cloned().unwrap_or_default();
    let origin = delivery.message.origin.to_string();
    let mut written = vec![
        (headers::REASON, reason.as_str().to_owned()),
        (headers::ATTEMPTS, story.attempts.to_string()),
        (headers::ORIGIN, origin),
    ];
    written.extend((story.fence > 0).then(|| (headers::FENCE, story.fence.to_string())));
    written.extend(story.id.map(|id| (headers::ID, id)));
    written.extend(story.first_error.map(|error| (headers::FIRST_ERROR, error)));
    written.extend(story.last_error.map(|error| (headers::LAST_ERROR, error)));
    written.extend(first_seen(&delivery.message).map(|at| (headers::FIRST_SEEN, at.to_string())));
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::Reason;
    use crate::message::HeadersBuilder;

    #[test]
    fn forged_headers_are_stripped_from_dead_letters() {
        let mut builder = HeadersBuilder::default();
        let mine: [(&[u8], Option<&[u8]>); 5] = [
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
        mine.iter()
            .for_each(|(name, value)| builder.push(name, *value));
        forged
            .iter()
            .for_each(|name| builder.push(name, Some(b"victim")));
        let message = Message {
            headers: builder.finish(),
            ..Message::default()
        };
        assert_eq!(kept_headers(&message).collect::<Vec<_>>(), mine);
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
        for nonsense in [&b"soon"[..], b"", b"-1", b"\xff", b"99999999999999999999"] {
            assert_eq!(seen(Some(nonsense), Some(7)), Some(7), "{nonsense:?}");
        }
    }
}
