//! The outbox: messages that a transaction stores beside its rows, and that a [`Relay`] publishes
//! after the commit. A message that can never be published is *parked*: its row stays, with the
//! error, until an operator retries or drops it.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;

use crate::handler::{Failure, IntoFailure};
use crate::source::{SourceError, headers};
use crate::store::{BoxError, StoreError};

pub use crate::relay::Relay;

/// The header that has the id of a message on Kafka: `IdSource::header("message-id")`. On RabbitMQ
/// the id is the property `message_id`: `IdSource::message_id()`.
pub const ID_HEADER: &str = "message-id";

/// The header that has the key of a message on RabbitMQ: `RabbitMq::key_header("message-key")`. On
/// Kafka the key is the record key.
pub const KEY_HEADER: &str = "message-key";

/// The header that [`Outgoing::json`] sets. On RabbitMQ it is the property `content_type`.
pub const CONTENT_TYPE_HEADER: &str = "content-type";

/// The header of a correlation id. On RabbitMQ it is the property `correlation_id`.
pub const CORRELATION_ID_HEADER: &str = "correlation-id";

/// The longest name of a destination, an exchange or a header, in bytes: that of AMQP.
const MAX_NAME_BYTES: usize = 255;
/// The longest key, in bytes. Storages have an index of keys.
const MAX_KEY_BYTES: usize = 1_000;
/// The largest names and values of all headers, in bytes. They fit into a frame of RabbitMQ's
/// default size, 128 KiB.
const MAX_HEADER_BYTES: usize = 64 * 1024;
/// The largest body, in bytes: what RabbitMQ 4 accepts by default.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// A message to send to a queue or topic.
///
/// ```
/// # use oncegate_core::outbox::Outgoing;
/// # #[derive(serde::Serialize)] struct Booked { cents: i64 }
/// Outgoing::to("ledger.booked").key("account-7").header("currency", "EUR").json(&Booked { cents: 5 });
/// ```
#[derive(Clone, Debug)]
#[must_use = "pass it to `send` of the transaction"]
pub struct Outgoing {
    exchange: String,
    destination: String,
    key: Option<Bytes>,
    headers: Vec<(String, String)>,
    body: Result<Bytes, String>,
}

impl Outgoing {
    /// A message for this Kafka topic or RabbitMQ queue, with an empty body. With an
    /// [`exchange`](Self::exchange), this is the routing key.
    pub fn to(queue_or_topic: impl Into<String>) -> Self {
        Self {
            exchange: String::new(),
            destination: queue_or_topic.into(),
            key: None,
            headers: Vec::new(),
            body: Ok(Bytes::new()),
        }
    }

    /// The RabbitMQ exchange to publish to. A publisher for Kafka refuses the message.
    pub fn exchange(mut self, name: impl Into<String>) -> Self {
        self.exchange = name.into();
        self
    }

    /// The key, at most 1,000 bytes: messages of one key arrive at a destination in their order. It is
    /// the record key on Kafka, and the header [`KEY_HEADER`] on RabbitMQ. Messages without a key
    /// have no order.
    pub fn key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(Bytes::copy_from_slice(key.as_ref()));
        self
    }

    /// Adds a header. All names and values together have at most 64 KiB. Names that begin with
    /// `oncegate-`, [`ID_HEADER`], [`KEY_HEADER`], and RabbitMQ's `CC` and `BCC` are refused.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// The body as JSON, with the header `content-type: application/json`. A value that cannot be
    /// serialized is an error of `send`.
    pub fn json(mut self, value: &(impl Serialize + ?Sized)) -> Self {
        self.body = serde_json::to_vec(value)
            .map(Bytes::from)
            .map_err(|error| format!("the body cannot be serialized as JSON: {error}"));
        self.header(CONTENT_TYPE_HEADER, "application/json")
    }

    /// The body, at most 16 MiB.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = Ok(body.into());
        self
    }

    /// Checks the message, and gives it this id. For storages.
    ///
    /// # Errors
    /// [`OutgoingError`]: the message can never be published.
    pub fn with_id(self, id: String) -> Result<OutboxMessage, OutgoingError> {
        let fail = |problem: String| Err(OutgoingError(problem));
        if self.destination.is_empty() {
            return fail("the destination is empty: name a queue, a topic or a routing key".into());
        }
        for (what, name) in [
            ("destination", &self.destination),
            ("exchange", &self.exchange),
        ] {
            if name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
                return fail(format!(
                    "the {what} has a control character, or more than {MAX_NAME_BYTES} bytes"
                ));
            }
        }
        let key_bytes = self.key.as_ref().map_or(0, Bytes::len);
        if key_bytes > MAX_KEY_BYTES {
            return fail(format!(
                "the key has {key_bytes} bytes, and at most {MAX_KEY_BYTES} are allowed"
            ));
        }
        if let Some((name, _)) = self.headers.iter().find(|(name, _)| is_reserved(name)) {
            return fail(format!(
                "the header `{}` is empty, longer than {MAX_NAME_BYTES} bytes, or reserved: use another name",
                name.escape_debug().take(80).collect::<String>()
            ));
        }
        let header_bytes: usize = self
            .headers
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        if header_bytes > MAX_HEADER_BYTES {
            return fail(format!(
                "the headers have {header_bytes} bytes, and at most {MAX_HEADER_BYTES} are allowed"
            ));
        }
        let body = self.body.map_err(OutgoingError)?;
        if body.len() > MAX_BODY_BYTES {
            return fail(format!(
                "the body has {} bytes, and at most {MAX_BODY_BYTES} are allowed",
                body.len()
            ));
        }
        Ok(OutboxMessage {
            id,
            exchange: self.exchange,
            destination: self.destination,
            key: self.key,
            headers: self.headers,
            body,
        })
    }
}

/// Whether a header may not be set by the sender: publishers write it, or RabbitMQ would route the
/// message to other queues, too.
fn is_reserved(name: &str) -> bool {
    name.is_empty()
        || name.len() > MAX_NAME_BYTES
        || name.starts_with(headers::PREFIX)
        || [ID_HEADER, KEY_HEADER, "CC", "BCC"].contains(&name)
}

/// A message that can never be published. The text says what to change, and quotes nothing of the
/// message but the name of a refused header and the error of its serializer. With `?`, a handler
/// rejects the message that it handles.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("message not sent: {0}")]
pub struct OutgoingError(String);

impl OutgoingError {
    /// An error with this text. For storages.
    pub fn new(problem: impl Into<String>) -> Self {
        Self(problem.into())
    }
}

impl IntoFailure for OutgoingError {
    fn into_failure(self) -> Failure {
        Failure::Reject(self.into())
    }
}

/// A message in an outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxMessage {
    /// The id, by which the next consumer recognizes copies.
    pub id: String,
    /// The RabbitMQ exchange; empty for the default exchange, and on Kafka.
    pub exchange: String,
    /// The queue, topic or routing key.
    pub destination: String,
    /// The key, if any.
    pub key: Option<Bytes>,
    /// The headers, in their order.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
}

impl OutboxMessage {
    /// A message without an exchange, a key or headers; set these fields afterwards.
    pub fn new(
        id: impl Into<String>,
        destination: impl Into<String>,
        body: impl Into<Bytes>,
    ) -> Self {
        Self {
            id: id.into(),
            exchange: String::new(),
            destination: destination.into(),
            key: None,
            headers: Vec::new(),
            body: body.into(),
        }
    }

    /// The size in bytes, for limits of memory.
    pub fn size(&self) -> usize {
        let headers = self.headers.iter();
        self.body.len()
            + self.key.as_ref().map_or(0, Bytes::len)
            + headers
                .map(|(name, value)| name.len() + value.len())
                .sum::<usize>()
    }

    /// Where the message goes, for log lines: `destination`, or `exchange/destination`.
    pub fn described_destination(&self) -> String {
        if self.exchange.is_empty() {
            self.destination.clone()
        } else {
            format!("{}/{}", self.exchange, self.destination)
        }
    }
}

/// A row of an outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxRow {
    /// The position of the row. Rows that are inserted later have greater numbers, but may be
    /// committed earlier.
    pub number: i64,
    /// The message.
    pub message: OutboxMessage,
}

/// A storage of outgoing messages, of which one relay at a time is the leader.
///
/// # The contract
/// - At most one session that was returned by [`try_lead`](Self::try_lead) is the leader. Once a
///   session is no longer the leader, all its methods fail.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an outbox",
    label = "this is not an `Outbox`",
    note = "pass `PostgresOutbox::new(&pool)` of the crate `oncegate-postgres`"
)]
pub trait Outbox: Send + Sync + 'static {
    /// The session of the leader.
    type Session: OutboxSession;

    /// The database and its address, without secrets, for log lines.
    fn described(&self) -> String;

    /// Checks the storage at the start.
    ///
    /// # Errors
    /// The storage cannot be used; [`StoreError::Misconfigured`] ends the relay.
    fn preflight(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Becomes the leader, until the returned session is dropped or lost. `None` while another
    /// session is the leader.
    ///
    /// # Errors
    /// The storage is unavailable.
    fn try_lead(&self) -> impl Future<Output = Result<Option<Self::Session>, StoreError>> + Send;
}

/// What the leader does with the rows of an [`Outbox`]. After an error the session is dropped, and
/// the relay tries to become the leader again.
pub trait OutboxSession: Send + Sync + 'static {
    /// Of each destination the rows with the lowest numbers that this query selects, all in order of
    /// their numbers. All rows that are present are considered, because a row may be committed
    /// after rows with greater numbers. A storage may return the rows of some destinations only, if
    /// later reads return those of the others. Not selected are parked rows, and rows behind a
    /// parked one: those with the same exchange, destination and key, and a greater number.
    ///
    /// # Errors
    /// The session is lost.
    fn read(
        &self,
        query: &UnsentQuery,
    ) -> impl Future<Output = Result<Vec<OutboxRow>, StoreError>> + Send;

    /// Those of the rows with these numbers that are present and not parked.
    ///
    /// # Errors
    /// The session is lost.
    fn read_again(
        &self,
        numbers: &[i64],
    ) -> impl Future<Output = Result<Vec<OutboxRow>, StoreError>> + Send;

    /// Deletes rows whose messages were published.
    ///
    /// # Errors
    /// The session is lost. The rows may be deleted.
    fn remove(&self, numbers: &[i64]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Parks a row with this error.
    ///
    /// # Errors
    /// The session is lost. The row may be parked.
    fn park(&self, number: i64, error: &str)
    -> impl Future<Output = Result<(), StoreError>> + Send;

    /// The number and age of the rows. Also a check that this session is still the leader.
    ///
    /// # Errors
    /// The session is lost.
    fn level(&self) -> impl Future<Output = Result<OutboxLevel, StoreError>> + Send;

    /// Ends the session, so that another one can become the leader at once.
    fn close(self) -> impl Future<Output = ()> + Send;
}

/// Which rows [`OutboxSession::read`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsentQuery {
    /// The maximum number of rows, at least 1.
    pub max_rows: usize,
    /// The size in bytes after which no further row is added. The first row is always returned.
    pub max_bytes: usize,
    /// The numbers of rows that the relay already has.
    pub except: Vec<i64>,
    /// Destinations that cannot be published to at the moment: exchange and destination.
    pub except_destinations: Vec<(String, String)>,
}

/// How many messages an outbox has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxLevel {
    /// Unsent rows that are not parked. Storages may stop counting at 100,000.
    pub unsent: u64,
    /// Parked rows. Storages may stop counting at 100,000.
    pub parked: u64,
    /// The age of the oldest unsent row that is not parked; zero without one.
    pub oldest_age: Duration,
}

/// Publishes messages of an outbox.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a publisher",
    label = "this is not a `Publisher`",
    note = "pass `RabbitMq::queue(…).url(…).publisher()` or `Kafka::topic(…).brokers(…).publisher()`"
)]
pub trait Publisher: Send + Sync + 'static {
    /// The broker and its address, without secrets, for log lines.
    fn described(&self) -> String;

    /// Checks the settings at the start. The broker need not be available.
    ///
    /// # Errors
    /// [`SourceError::Misconfigured`] ends the relay.
    fn preflight(&self) -> impl Future<Output = Result<(), SourceError>> + Send;

    /// Publishes a message, and returns once the broker has confirmed it. Called concurrently, at
    /// most once at a time for one destination and key. If the future is dropped, the message may
    /// be published.
    ///
    /// # Errors
    /// [`NotPublished`] says whether another attempt may succeed. The future must end: it has a
    /// timeout of its own.
    fn publish(
        &self,
        message: &OutboxMessage,
    ) -> impl Future<Output = Result<(), NotPublished>> + Send;
}

/// Why a message was not published.
#[derive(Debug, thiserror::Error)]
pub enum NotPublished {
    /// No attempt to publish this message can succeed, for example because it is too large: the
    /// relay parks it.
    #[error("refused: {0}")]
    Refused(#[source] BoxError),
    /// It is not confirmed, and may be published. The broker or the destination may be unavailable
    /// or missing: the relay tries again, and other destinations continue.
    #[error("{0}")]
    NotConfirmed(#[source] BoxError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(message: Outgoing) -> String {
        message
            .with_id("t-1/1".into())
            .expect_err("it is refused")
            .to_string()
    }

    #[test]
    fn a_message_that_cannot_be_published_is_refused_when_it_is_sent() {
        let to = || Outgoing::to("ledger.booked");
        for (message, part) in [
            (Outgoing::to(""), "destination is empty"),
            (Outgoing::to("a\0b"), "destination has a control"),
            (Outgoing::to("q".repeat(256)), "destination has"),
            (to().exchange("e".repeat(256)), "exchange has"),
            (to().key([0; 1_001]), "key has 1001 bytes"),
            (to().header("", "v"), "header ``"),
            (to().header("message-id", "v"), "header `message-id`"),
            (to().header("oncegate-id", "v"), "header `oncegate-id`"),
            (to().header("CC", "v"), "header `CC`"),
            (to().header("h", "v".repeat(65_536)), "headers have 65537"),
            (
                to().body(vec![0; 16 * 1024 * 1024 + 1]),
                "body has 16777217",
            ),
            (
                to().json(&std::collections::HashMap::from([((1, 2), 3)])),
                "cannot be serialized",
            ),
        ] {
            assert!(problem(message).contains(part), "{part}");
        }
        let largest = Outgoing::to("q".repeat(255))
            .key([0; 1_000])
            .header("h", "v".repeat(65_535))
            .body(vec![0; 16 * 1024 * 1024]);
        assert!(largest.with_id("t-1/1".into()).is_ok());
    }

    #[test]
    fn json_has_its_content_type() {
        let message = Outgoing::to("q").json("text").with_id("t/1".into());
        let message = message.expect("a message");
        assert_eq!(&message.body[..], b"\"text\"");
        let content_type = ("content-type".into(), "application/json".into());
        assert_eq!(message.headers, [content_type]);
    }

    #[test]
    fn a_handler_rejects_with_a_question_mark() {
        let send = || -> Result<(), Failure> {
            Outgoing::to("").with_id("t/1".into())?;
            Ok(())
        };
        assert!(matches!(send(), Err(Failure::Reject(_))));
    }
}
