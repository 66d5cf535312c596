//! Reads the idempotency key (the id) of a message.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

use super::{MessageId, json, push_hex};
use crate::message::{Message, Position};

/// Why no id could be read from a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdError {
    /// The value that the id is read from is absent, null or empty.
    #[error("the message has no id")]
    Missing,
    /// The value cannot be an id, or there are two different values. The text says why, and does
    /// not quote the message.
    #[error("{0}")]
    Unusable(String),
}

/// Where the idempotency key of a message is read from.
#[derive(Clone)]
pub struct IdSource(IdReader);

/// What [`Builder::id`](crate::Builder::id) accepts: an [`IdSource`]. The compiler's error for
/// anything else names the constructors.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say where the id is read from",
    label = "this is not an `IdSource`",
    note = "pass `IdSource::header(\"…\")`, `IdSource::message_id()`, `IdSource::key()`, `IdSource::json_pointer(\"/…\")`, `IdSource::body_hash()` or `IdSource::by(|message| …)`"
)]
pub trait IntoIdSource {
    /// Returns the source.
    fn into_id_source(self) -> IdSource;
}

impl IntoIdSource for IdSource {
    fn into_id_source(self) -> IdSource {
        self
    }
}

/// A user's function that reads an id: [`IdSource::by`].
type ReadId = dyn Fn(&Message) -> Option<Vec<u8>> + Send + Sync;

/// The part of a message that contains the id.
#[derive(Clone)]
enum IdReader {
    Header(Arc<str>),
    MessageId,
    Key,
    JsonPointer(Arc<str>),
    BodyHash,
    Position,
    By(Arc<ReadId>),
    Hashed(Arc<IdReader>),
}

impl IdReader {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Hashed(read) => read.check(),
            Self::Header(name) if name.is_empty() => Err("the name of the header is empty".into()),
            Self::JsonPointer(pointer) if !pointer.is_empty() && !pointer.starts_with('/') => Err(
                format!("the JSON pointer `{pointer}` does not begin with `/`"),
            ),
            Self::JsonPointer(pointer)
                if pointer
                    .split('~')
                    .skip(1)
                    .any(|after_tilde| !after_tilde.starts_with(['0', '1'])) =>
            {
                Err(format!(
                    "the JSON pointer `{pointer}` has a `~` that is not `~0` or `~1`"
                ))
            }
            _ => Ok(()),
        }
    }
}

impl IdSource {
    /// The header of this name. A message in which it occurs several times with different values
    /// has an unusable id.
    pub fn header(name: &str) -> Self {
        Self(IdReader::Header(Arc::from(name)))
    }

    /// The CloudEvents id in the Kafka binding: the header `ce_id`.
    pub fn cloud_events() -> Self {
        Self::header("ce_id")
    }

    /// The AMQP property `message_id`.
    pub fn message_id() -> Self {
        Self(IdReader::MessageId)
    }

    /// The key: see [`Message::key`]. Use it only if no two different messages have the same key. A
    /// routing key that is the name of the queue, as with the default exchange, is an unusable id.
    pub fn key() -> Self {
        Self(IdReader::Key)
    }

    /// A string or a whole number in the JSON body, by its pointer (RFC 6901), such as
    /// `/payment/id`.
    ///
    /// A whole number becomes its digits, at most 200: `7`, `7.0` and `7e0` are the id `7`. A byte
    /// order mark before the JSON is skipped. `null` is a missing id. An object, a fraction, a body
    /// that is not JSON, and a field of the path that occurs twice in its object are an unusable
    /// id.
    ///
    /// The consumer does not start with a pointer that does not begin with `/`, or that has a `~`
    /// without `0` or `1` after it. The empty pointer is the whole body.
    pub fn json_pointer(pointer: &str) -> Self {
        Self(IdReader::JsonPointer(Arc::from(pointer)))
    }

    /// Validates the name of a header and the syntax of a JSON pointer. The error says what is
    /// wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.0.check()
    }

    /// Whether ids are read from [`Message::message_id`]: see [`Connect::check_id`].
    ///
    /// [`Connect::check_id`]: crate::source::Connect::check_id
    pub fn reads_message_id(&self) -> bool {
        matches!(self.0.unhashed(), IdReader::MessageId)
    }

    /// Whether ids are [positions](Self::position): see [`Connect::check_id`].
    ///
    /// [`Connect::check_id`]: crate::source::Connect::check_id
    pub fn reads_position(&self) -> bool {
        matches!(self.0.unhashed(), IdReader::Position)
    }

    /// The SHA-256 of the body: two messages are the same if their bodies are.
    pub fn body_hash() -> Self {
        Self(IdReader::BodyHash)
    }

    /// Topic, partition and offset: detects redeliveries only, not a producer that sends a message
    /// twice.
    pub fn position() -> Self {
        Self(IdReader::Position)
    }

    /// A function of the message. `None` or an empty id is a missing id.
    pub fn by(read: impl Fn(&Message) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self(IdReader::By(Arc::new(read)))
    }

    /// The same ids, each as `h:` and its SHA-256. For ids that are personal data: no key, header
    /// or log of oncegate shows them. The message itself, and its dead letter, still contain what
    /// the producer wrote.
    ///
    /// The hash has no secret key: someone who can guess an id (a telephone number, for example)
    /// can check whether it was handled. To look an id up or to forget it, hash it the same way:
    /// `printf %s ID | sha256sum`. A consumer does not recognise the ids that it handled before
    /// `hashed` was added; make sure that no message is delivered both before and after that
    /// change.
    pub fn hashed(self) -> Self {
        match self.0 {
            IdReader::Hashed(_) => self,
            read => Self(IdReader::Hashed(Arc::new(read))),
        }
    }

    /// The error text for a message without an id.
    pub(crate) fn missing_text(&self) -> String {
        format!("no id in the {self:?}, or an empty one")
    }

    /// Reads the id of a message.
    ///
    /// # Errors
    /// [`IdError`] if it is missing or unusable.
    pub fn read(&self, message: &Message) -> Result<MessageId, IdError> {
        self.0.read(message)
    }

    /// The id of a message whose body is too large, for a log line; `None` if the id cannot be read
    /// without the body.
    #[doc(hidden)]
    pub fn read_without_body(&self, message: &Message) -> Option<MessageId> {
        match self.0.unhashed() {
            IdReader::Header(_) | IdReader::MessageId | IdReader::Key | IdReader::Position => {
                self.read(message).ok()
            }
            _ => None,
        }
    }
}

impl IdReader {
    /// The reader without [`IdSource::hashed`].
    fn unhashed(&self) -> &Self {
        match self {
            Self::Hashed(read) => read.unhashed(),
            other => other,
        }
    }

    fn read(&self, message: &Message) -> Result<MessageId, IdError> {
        let id = match self {
            IdReader::Header(name) => unambiguous_header(message, name)?.and_then(MessageId::new),
            IdReader::MessageId => message.message_id.as_ref().and_then(MessageId::new),
            IdReader::Key if is_default_routing_key(message) => {
                return Err(IdError::Unusable(
                    "the routing key is the name of the queue, as for every message that is sent through the default exchange; read the id from a header, the message id or the body".into(),
                ));
            }
            IdReader::Key => message.key.as_ref().and_then(MessageId::new),
            IdReader::JsonPointer(pointer) => MessageId::new(json::read(pointer, &message.body)?),
            IdReader::BodyHash => {
                let mut hex = SmallVec::<[u8; 64]>::new();
                push_hex(&mut hex, &Sha256::digest(&message.body));
                MessageId::new(hex)
            }
            IdReader::Position => match message.origin.position {
                Position::Offset { partition, offset } => {
                    MessageId::new(format!("{}/{partition}/{offset}", message.origin.name))
                }
                Position::Queue => {
                    return Err(IdError::Unusable(
                        "a queue has no positions; read the id from the message, for example from a header".into(),
                    ));
                }
            },
            IdReader::By(read) => read(message).and_then(MessageId::new),
            IdReader::Hashed(read) => Some(read.read(message)?.hashed()),
        };
        id.ok_or(IdError::Missing)
    }
}

/// Whether the key is the name of the queue. All such messages would have one id, and all but the
/// first would be skipped as duplicates.
fn is_default_routing_key(message: &Message) -> bool {
    message.origin.position == Position::Queue
        && !message.origin.name.is_empty()
        && message.key.as_deref() == Some(message.origin.name.as_bytes())
}

/// The value of a header.
///
/// # Errors
/// [`IdError::Unusable`] if the header is null, occurs with different values, or is `true` or
/// `false`.
fn unambiguous_header<'a>(message: &'a Message, name: &str) -> Result<Option<&'a [u8]>, IdError> {
    let mut values = message
        .headers
        .iter()
        .filter(|(header, _)| *header == name.as_bytes())
        .map(|(_, value)| value);
    let first = values.next();
    if first == Some(None) {
        return Err(IdError::Unusable(format!(
            "header `{name}` has no text: it is null, or in RabbitMQ a table, an array or a decimal"
        )));
    }
    let first = first.flatten();
    if values.any(|value| value != first) {
        return Err(IdError::Unusable(format!(
            "header `{name}` is ambiguous: it occurs several times with different values"
        )));
    }
    // All messages with `true` would have one id, and all but the first would be skipped as
    // duplicates.
    if let Some(b"true" | b"false") = first {
        return Err(IdError::Unusable(format!("header `{name}` is a boolean")));
    }
    Ok(first)
}

impl fmt::Debug for IdSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for IdReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdReader::Header(name) => write!(f, "header `{name}`"),
            IdReader::MessageId => f.write_str("message id property"),
            IdReader::Key => f.write_str("record key"),
            IdReader::JsonPointer(pointer) => write!(f, "JSON pointer `{pointer}`"),
            IdReader::BodyHash => f.write_str("body hash"),
            IdReader::Position => f.write_str("position"),
            IdReader::By(_) => f.write_str("function"),
            IdReader::Hashed(read) => write!(f, "{read:?}, hashed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Origin;

    #[test]
    fn a_header_without_a_name_is_refused() {
        for source in [IdSource::header(""), IdSource::header("").hashed()] {
            assert!(source.check().is_err());
        }
        assert_eq!(IdSource::header("id").check(), Ok(()));
    }

    /// RabbitMQ has boolean headers, which arrive as text.
    #[test]
    fn a_boolean_header_is_an_unusable_id() {
        let read = |value: &'static str| {
            let message = Message::new("").with_header("id", value);
            IdSource::header("id").read(&message)
        };
        for value in ["true", "false"] {
            assert!(
                matches!(read(value), Err(IdError::Unusable(text)) if text.contains("boolean")),
                "{value}"
            );
        }
        assert!(read("truest").is_ok());
    }

    #[test]
    fn the_routing_key_of_the_default_exchange_is_an_unusable_id() {
        let message = |name: &str, position| Message {
            origin: Origin {
                name: name.into(),
                position,
                system: None,
            },
            ..Message::new("").with_key("payments")
        };
        let read = |name, position| IdSource::key().read(&message(name, position));
        assert!(
            matches!(read("payments", Position::Queue), Err(IdError::Unusable(text)) if text.contains("default exchange"))
        );
        assert!(read("other", Position::Queue).is_ok());
        let offset = Position::Offset {
            partition: 0,
            offset: 7,
        };
        assert!(
            read("payments", offset).is_ok(),
            "a topic has no default exchange"
        );
    }

    #[test]
    fn a_hashed_id_hides_its_text_and_is_not_hashed_again() {
        let source = IdSource::message_id().hashed().hashed();
        let read = |raw: &'static str| {
            source
                .read(&Message::new("").with_message_id(raw))
                .expect("an id")
        };
        assert_eq!(
            read("pay-42").as_str(),
            "h:93f7a481b0295a38d34dbe78ccd1740f069b66bed97bb50423cfb39119b3f3f4"
        );
        assert_eq!(read("{}"), MessageId::new("{}").expect("an id"));
        assert_ne!(read("pay-42"), read("pay-43"));
        assert_eq!(source.read(&Message::new("")), Err(IdError::Missing));
        assert_eq!(format!("{source:?}"), "message id property, hashed");
    }

    #[test]
    fn every_id_source_reads_its_part_of_the_message() {
        let message = Message::new(r#"{"p":{"id":"x1","n":7,"f":1.5,"o":{},"z":null}}"#)
            .with_key("k")
            .with_message_id("m")
            .with_header("h", "v");
        let read = |source: IdSource| source.read(&message).ok().map(|id| id.to_string());
        assert_eq!(read(IdSource::header("h")).as_deref(), Some("v"));
        assert_eq!(read(IdSource::header("other")), None);
        assert_eq!(read(IdSource::message_id()).as_deref(), Some("m"));
        assert_eq!(read(IdSource::key()).as_deref(), Some("k"));
        assert_eq!(
            IdSource::key().read(&Message::new("{}")),
            Err(IdError::Missing)
        );
        assert_eq!(read(IdSource::json_pointer("/p/id")).as_deref(), Some("x1"));
        assert_eq!(read(IdSource::json_pointer("/p/n")).as_deref(), Some("7"));
        for unusual in ["/p/f", "/p/o", "/p/z", "/q"] {
            assert_eq!(read(IdSource::json_pointer(unusual)), None);
        }
        assert_eq!(read(IdSource::body_hash()).map(|id| id.len()), Some(64));
        assert!(matches!(
            IdSource::position().read(&message),
            Err(IdError::Unusable(_))
        ));
        assert_eq!(
            read(IdSource::by(|message| message
                .key
                .as_ref()
                .map(|key| key.to_vec())))
            .as_deref(),
            Some("k")
        );
    }

    #[test]
    fn an_invalid_json_pointer_is_refused() {
        for pointer in ["", "/", "/id", "/a/0/b", "/a~1b~0c", "/a b"] {
            assert_eq!(IdSource::json_pointer(pointer).check(), Ok(()), "{pointer}");
        }
        for pointer in ["id", "$.id", "#/id", "a/b", "/a~2", "/a~", "/~~1"] {
            for source in [
                IdSource::json_pointer(pointer),
                IdSource::json_pointer(pointer).hashed(),
            ] {
                let problem = source.check().expect_err(pointer);
                assert!(problem.contains(pointer), "{problem}");
            }
        }
    }

    #[test]
    fn a_header_with_two_values_is_unusable() {
        let message = Message::new("")
            .with_header("id", "a")
            .with_header("other", "b")
            .with_header("id", "a");
        assert_eq!(
            IdSource::header("id")
                .read(&message)
                .map(|id| id.to_string())
                .as_deref(),
            Ok("a")
        );
        let Err(IdError::Unusable(text)) = IdSource::header("id")
            .hashed()
            .read(&message.with_header("id", "b"))
        else {
            panic!("two ids")
        };
        assert!(text.contains("`id` is ambiguous"), "{text}");
    }
}
