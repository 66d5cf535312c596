//! A message with its origin and headers, independent of its broker.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;

/// One message as it was sent. Cloning copies no content: key, headers and body are slices of
/// shared memory.
///
/// The slices keep the memory of the whole received batch allocated. Before you store a message,
/// call [`detach`](Self::detach) on a clone.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Message {
    /// Where the message came from.
    pub origin: Origin,
    /// The Kafka record key, or on AMQP the routing key or the header that the source names.
    pub key: Option<Bytes>,
    /// The AMQP `message_id` property; Kafka has none.
    pub message_id: Option<Bytes>,
    /// The headers, in the order in which they were sent.
    pub headers: Headers,
    /// The body. Empty where the broker had none (a Kafka tombstone).
    pub body: Bytes,
    /// The AMQP properties `reply_to` and `correlation_id`; `None` without `reply_to`, and on Kafka.
    pub reply_to: Option<Box<ReplyAddress>>,
    /// The timestamp of the message, which its producer or its broker has set; `None` if it has
    /// none.
    pub sent_at: Option<SystemTime>,
}

impl Message {
    /// A message with a body and nothing else, for the in-memory source and for tests.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Self {
            body: body.into(),
            ..Self::default()
        }
    }

    /// A message with an origin and a body and nothing else, for sources, which then set the fields
    /// that their broker has.
    #[inline]
    pub fn received(origin: Origin, body: impl Into<Bytes>) -> Self {
        Self {
            origin,
            key: None,
            message_id: None,
            headers: Headers::default(),
            body: body.into(),
            reply_to: None,
            sent_at: None,
        }
    }

    /// The same message with a key.
    pub fn with_key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// The same message with an AMQP `message_id` property.
    pub fn with_message_id(mut self, id: impl Into<Bytes>) -> Self {
        self.message_id = Some(id.into());
        self
    }

    /// The same message with the queue to which its sender expects a reply, and a correlation id.
    pub fn with_reply_to(mut self, queue: impl Into<String>, correlation_id: &str) -> Self {
        self.reply_to = Some(Box::new(ReplyAddress {
            destination: queue.into(),
            correlation_id: Some(correlation_id.to_owned()),
        }));
        self
    }

    /// The same message with one more header.
    pub fn with_header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let mut headers = HeadersBuilder::from(&self.headers);
        headers.push(name.as_bytes(), Some(value.as_ref()));
        self.headers = headers.finish();
        self
    }

    /// The same message with these headers instead of its own.
    pub fn with_headers(mut self, headers: Headers) -> Self {
        self.headers = headers;
        self
    }

    /// The same message with the time at which it was sent.
    pub fn with_sent_at(mut self, sent_at: SystemTime) -> Self {
        self.sent_at = Some(sent_at);
        self
    }

    /// Copies key, headers and body, so that keeping the message does not keep the memory of its
    /// whole batch.
    pub fn detach(&mut self) {
        let copy = |bytes: &mut Bytes| *bytes = Bytes::copy_from_slice(bytes);
        self.key.iter_mut().for_each(copy);
        copy(&mut self.headers.0);
        copy(&mut self.body);
    }

    /// The number of bytes that this message holds in memory: body, key and headers.
    pub fn size(&self) -> usize {
        self.body.len() + self.key.as_ref().map_or(0, Bytes::len) + self.headers.0.len()
    }
}

/// Where the sender of a message expects the reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyAddress {
    /// The queue or topic.
    pub destination: String,
    /// What the reply has to contain, so that the sender knows the request.
    pub correlation_id: Option<String>,
}

/// Where a message came from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Origin {
    /// The topic or the queue.
    pub name: Arc<str>,
    /// The position in the topic; a queue has no permanent positions.
    pub position: Position,
    /// The value of the span attribute `messaging.system` of OpenTelemetry's semantic conventions,
    /// such as `kafka` or `rabbitmq`; `None` omits the attribute.
    pub system: Option<&'static str>,
}

impl Origin {
    /// The queue of this name.
    #[inline]
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            position: Position::Queue,
            system: None,
        }
    }

    /// The same origin with a position.
    #[inline]
    pub fn with_position(mut self, position: Position) -> Self {
        self.position = position;
        self
    }

    /// The same origin with a messaging system, as OpenTelemetry names it.
    #[inline]
    pub fn with_system(mut self, system: &'static str) -> Self {
        self.system = Some(system);
        self
    }
}

impl Default for Origin {
    fn default() -> Self {
        Self::new("")
    }
}

impl std::fmt::Display for Origin {
    /// `topic/partition/offset`, or the name of the queue.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.position {
            Position::Offset { partition, offset } => {
                write!(f, "{}/{partition}/{offset}", self.name)
            }
            Position::Queue => f.write_str(&self.name),
        }
    }
}

/// The position of a message in its topic or queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Position {
    /// A log, in which a message has a permanent partition and offset.
    Offset {
        /// The partition, from 0.
        partition: i32,
        /// The offset in the partition, from 0.
        offset: i64,
    },
    /// A queue, in which messages have no permanent position.
    Queue,
}

/// Message headers: names with optional values, in the order in which they were sent. A name may
/// occur several times.
///
/// Stored as one block of bytes, so that the headers of a whole batch can share one allocation.
#[derive(Clone, Default, PartialEq)]
pub struct Headers(Bytes);

/// The length that a block of headers has in place of that of a value, if the value is null.
const NULL: u32 = u32::MAX;

impl Headers {
    /// The headers in a block that [`Headers::encode`] has written. The first header that is cut
    /// off ends them.
    pub fn from_block(block: Bytes) -> Self {
        Self(block)
    }

    /// Appends one header to a block. A name or value must be shorter than 4 GiB; no
    /// broker accepts longer ones.
    pub fn encode(block: &mut Vec<u8>, name: &[u8], value: Option<&[u8]>) {
        block.extend_from_slice(&(name.len() as u32).to_le_bytes());
        block.extend_from_slice(&value.map_or(NULL, |value| value.len() as u32).to_le_bytes());
        block.extend_from_slice(name);
        block.extend_from_slice(value.unwrap_or_default());
    }

    /// The value of the last header of this name; `None` where there is no such header or its value
    /// is null.
    ///
    /// The last, because a program that forwards a message replaces a header by adding it again.
    pub fn last(&self, name: &str) -> Option<&[u8]> {
        self.iter()
            .filter(|(header, _)| *header == name.as_bytes())
            .last()
            .and_then(|(_, value)| value)
    }

    /// All headers in order. A name need not be UTF-8; a value may be null.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let mut unread: &[u8] = &self.0;
        std::iter::from_fn(move || {
            let (name_length, after) = unread.split_first_chunk::<4>()?;
            let (value_length, after) = after.split_first_chunk::<4>()?;
            let (name, after) = after.split_at_checked(u32::from_le_bytes(*name_length) as usize)?;
            let value_length = u32::from_le_bytes(*value_length);
            if value_length == NULL {
                unread = after;
                return Some((name, None));
            }
            let (value, after) = after.split_at_checked(value_length as usize)?;
            unread = after;
            Some((name, Some(value)))
        })
    }

    /// Whether there are no headers.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl std::fmt::Debug for Headers {
    /// Names only: values may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.iter().map(|(name, _)| String::from_utf8_lossy(name)))
            .finish()
    }
}

/// Builds [`Headers`].
#[derive(Debug, Default)]
pub struct HeadersBuilder(Vec<u8>);

impl HeadersBuilder {
    /// Appends a header.
    pub fn push(&mut self, name: &[u8], value: Option<&[u8]>) {
        Headers::encode(&mut self.0, name, value);
    }

    /// The headers that were pushed.
    pub fn finish(self) -> Headers {
        Headers(Bytes::from(self.0))
    }
}

impl From<&Headers> for HeadersBuilder {
    fn from(headers: &Headers) -> Self {
        Self(headers.0.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_keep_order_repeats_nulls_and_names_that_are_not_utf8() {
        let mut builder = HeadersBuilder::default();
        builder.push(b"a", Some(b"1"));
        builder.push(&[0xff, 0xfe], None);
        builder.push(b"a", Some(b""));
        let headers = builder.finish();
        let all: Vec<_> = headers.iter().collect();
        assert_eq!(
            all,
            [
                (&b"a"[..], Some(&b"1"[..])),
                (&[0xff, 0xfe][..], None),
                (&b"a"[..], Some(&b""[..]))
            ]
        );
        assert_eq!(headers.last("a"), Some(&b""[..]));
        assert_eq!(headers.last("b"), None);
    }

    #[test]
    fn a_truncated_block_ends_the_headers() {
        let whole = Message::new("x").with_header("name", "value").headers.0;
        for length in 0..whole.len() {
            assert_eq!(Headers::from_block(whole.slice(..length)).iter().count(), 0);
        }
    }

    #[test]
    fn debug_shows_no_header_value() {
        let message = Message::new("x").with_header("authorization", "secret-canary");
        assert!(!format!("{:?}", message.headers).contains("canary"));
    }
}
