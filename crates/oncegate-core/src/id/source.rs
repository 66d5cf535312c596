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
    FirstOf(Arc<[IdReader]>),
    AllOf(Arc<[IdReader]>),
    Hashed(Arc<IdReader>),
}

impl IdReader {
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Hashed(read) => read.check(),
            Self::FirstOf(parts) | Self::AllOf(parts) if parts.is_empty() => {
                Err("the list of its sources is empty".into())
            }
            Self::FirstOf(parts) => {
                let earlier = &parts[..parts.len() - 1];
                match earlier.iter().find(|part| part.is_computed()) {
                    Some(part) => Err(format!(
                        "each message has a {part:?}, so the sources after it are never used"
                    )),
                    None => match parts.last() {
                        // It is not compared with the sources before it, but it may have parts that
                        // a producer wrote.
                        Some(last) if last.is_computed() && last.is_combined() => Err(format!(
                            "{last:?} cannot be the last source: use a body hash or a position"
                        )),
                        _ => parts.iter().try_for_each(Self::check),
                    },
                }
            }
            Self::AllOf(parts) => parts.iter().try_for_each(Self::check),
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

    /// Whether ids, or parts of them, are read from [`Message::message_id`]: see [`Connect::check_id`].
    ///
    /// [`Connect::check_id`]: crate::source::Connect::check_id
    pub fn reads_message_id(&self) -> bool {
        self.0.any(&|reader| matches!(reader, IdReader::MessageId))
    }

    /// Whether ids, or parts of them, are [positions](Self::position): see [`Connect::check_id`].
    ///
    /// [`Connect::check_id`]: crate::source::Connect::check_id
    pub fn reads_position(&self) -> bool {
        self.0.any(&|reader| matches!(reader, IdReader::Position))
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

    /// The id of the first of these sources that the message has. If a later one has a different id,
    /// the id is unusable, because the next copy may have only one of them. [`body_hash`](Self::body_hash)
    /// and [`position`](Self::position), which each message has, may be the last source, and are not
    /// compared.
    ///
    /// The consumer does not start with an empty list.
    pub fn first_of(sources: impl IntoIterator<Item = Self>) -> Self {
        // The sources of an inner list are compared, too.
        let parts = sources.into_iter().flat_map(|source| match source.0 {
            IdReader::FirstOf(inner) => inner.to_vec(),
            reader => vec![reader],
        });
        Self(IdReader::FirstOf(parts.collect()))
    }

    /// The ids of all these sources, joined by `/`, for an id that is unique only within a tenant or a
    /// topic: `tenant-7/pay-42`. `/` and `=` in a part are preceded by `=`, so that different parts are
    /// never the same id. A message without one of the parts has no id.
    ///
    /// The consumer does not start with an empty list.
    pub fn all_of(sources: impl IntoIterator<Item = Self>) -> Self {
        let parts = sources.into_iter().map(|source| source.0);
        Self(IdReader::AllOf(parts.collect()))
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
        let needs_body = |reader: &IdReader| {
            matches!(
                reader,
                IdReader::JsonPointer(_) | IdReader::BodyHash | IdReader::By(_)
            )
        };
        if self.0.any(&needs_body) {
            return None;
        }
        self.read(message).ok()
    }
}

impl IdReader {
    /// Whether the condition is true of this reader, or of one that it consists of.
    fn any(&self, condition: &impl Fn(&Self) -> bool) -> bool {
        match self {
            Self::Hashed(read) => read.any(condition),
            Self::FirstOf(parts) | Self::AllOf(parts) => {
                parts.iter().any(|part| part.any(condition))
            }
            other => condition(other),
        }
    }

    /// Whether it consists of several sources.
    fn is_combined(&self) -> bool {
        match self {
            Self::Hashed(read) => read.is_combined(),
            Self::FirstOf(_) | Self::AllOf(_) => true,
            _ => false,
        }
    }

    /// Whether each message has this id, even if its producer wrote none.
    fn is_computed(&self) -> bool {
        match self {
            Self::BodyHash | Self::Position => true,
            Self::Hashed(read) => read.is_computed(),
            Self::FirstOf(parts) => parts.iter().any(Self::is_computed),
            Self::AllOf(parts) => parts.iter().all(Self::is_computed),
            _ => false,
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
            IdReader::FirstOf(parts) => read_first(parts, message)?,
            IdReader::AllOf(parts) => MessageId::new(read_all(parts, message)?),
            IdReader::Hashed(read) => Some(read.read(message)?.hashed()),
        };
        id.ok_or(IdError::Missing)
    }
}

/// The first id that the message has.
///
/// # Errors
/// [`IdError::Unusable`] if a later source has another id, or the id of the first source is unusable.
fn read_first(parts: &[IdReader], message: &Message) -> Result<Option<MessageId>, IdError> {
    let mut first: Option<(&IdReader, MessageId)> = None;
    for part in parts {
        if first.is_some() && part.is_computed() {
            continue;
        }
        let id = match part.read(message) {
            Err(IdError::Missing) => continue,
            // A copy with only this source is refused, so it cannot have another id.
            Err(IdError::Unusable(_)) if first.is_some() => continue,
            id => id?,
        };
        match &first {
            None => first = Some((part, id)),
            Some((source, first)) if *first != id => {
                return Err(IdError::Unusable(format!(
                    "the id is ambiguous: {source:?} and {part:?} have different values"
                )));
            }
            Some(_) => {}
        }
    }
    Ok(first.map(|(_, id)| id))
}

/// The ids of all parts, joined by `/`. `=` precedes `/` and `=` in a part.
///
/// # Errors
/// Those of the first part that has no usable id.
fn read_all(parts: &[IdReader], message: &Message) -> Result<Vec<u8>, IdError> {
    let mut joined = Vec::new();
    for (position, part) in parts.iter().enumerate() {
        if position > 0 {
            joined.push(b'/');
        }
        for byte in part.read(message)?.as_str().bytes() {
            if let b'/' | b'=' = byte {
                joined.push(b'=');
            }
            joined.push(byte);
        }
    }
    Ok(joined)
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
    let value = match message.headers.unique(name).map_err(IdError::Unusable)? {
        Some(None) => {
            return Err(IdError::Unusable(format!(
                "header `{name}` has no text: it is null, or in RabbitMQ a table, an array or a decimal"
            )));
        }
        value => value.flatten(),
    };
    // All messages with `true` would have one id, and all but the first would be skipped as
    // duplicates.
    if let Some(b"true" | b"false") = value {
        return Err(IdError::Unusable(format!("header `{name}` is a boolean")));
    }
    Ok(value)
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
            IdReader::FirstOf(parts) => write_list(f, parts, " or "),
            IdReader::AllOf(parts) => write_list(f, parts, " and "),
            IdReader::Hashed(read) => write!(f, "{read:?}, hashed"),
        }
    }
}

fn write_list(f: &mut fmt::Formatter<'_>, parts: &[IdReader], word: &str) -> fmt::Result {
    f.write_str("(")?;
    for (position, part) in parts.iter().enumerate() {
        write!(f, "{}{part:?}", if position == 0 { "" } else { word })?;
    }
    f.write_str(")")
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
    fn the_first_of_several_sources_is_the_id_unless_another_differs() {
        let first_of = || {
            IdSource::first_of([
                IdSource::header("id"),
                IdSource::message_id(),
                IdSource::json_pointer("/id"),
            ])
        };
        let read = |message: &Message| first_of().read(message).map(|id| id.to_string());
        let body = |body: &'static str| Message::new(body);
        assert_eq!(read(&body("{}")), Err(IdError::Missing));
        assert_eq!(read(&body(r#"{"id":7}"#)).as_deref(), Ok("7"));
        let with_property = body("{}").with_message_id("m");
        assert_eq!(read(&with_property).as_deref(), Ok("m"));
        let equal = body(r#"{"id":7}"#)
            .with_message_id("7")
            .with_header("id", "7");
        assert_eq!(read(&equal).as_deref(), Ok("7"));
        let not_json = body("not json").with_header("id", "h");
        assert_eq!(read(&not_json).as_deref(), Ok("h"));
        let unusable_first = body(r#"{"id":7}"#).with_header("id", "true");
        assert!(matches!(read(&unusable_first), Err(IdError::Unusable(_))));
        for different in [
            body(r#"{"id":7}"#).with_header("id", "8"),
            body(r#"{"id":7}"#).with_message_id("8"),
            body("{}").with_message_id("8").with_header("id", "9"),
        ] {
            let Err(IdError::Unusable(text)) = read(&different) else {
                panic!("two ids: {different:?}")
            };
            assert!(text.contains("the id is ambiguous"), "{text}");
        }
        assert_eq!(
            first_of().missing_text(),
            "no id in the (header `id` or message id property or JSON pointer `/id`), or an empty one"
        );
    }

    #[test]
    fn each_source_but_a_computed_one_is_compared() {
        let message = Message::new("x")
            .with_header("a", "7")
            .with_header("b", "7");
        // With `b` alone the message would have another id.
        let mixed = [IdSource::header("a").hashed(), IdSource::header("b")];
        assert!(IdSource::first_of(mixed).read(&message).is_err());
        let inner = IdSource::first_of([IdSource::header("b"), IdSource::body_hash()]);
        let other = message.clone().with_header("c", "8");
        let nested = IdSource::first_of([IdSource::header("c"), inner]);
        assert!(nested.read(&other).is_err());
        let inner = IdSource::first_of([IdSource::header("b"), IdSource::body_hash()]);
        let hashed = IdSource::first_of([IdSource::header("c"), inner.hashed()]);
        assert!(hashed.check().is_err());
        let with_fallback =
            |name| IdSource::first_of([IdSource::header(name), IdSource::body_hash()]);
        let id = with_fallback("a").read(&message).expect("an id");
        assert_eq!(id.as_str(), "7");
        let hash = with_fallback("c").read(&message);
        assert_eq!(hash, IdSource::body_hash().read(&message));
    }

    #[test]
    fn all_parts_are_joined_and_different_parts_are_different_ids() {
        let read = |parts: [&str; 2]| {
            let [a, b] = parts;
            let message = Message::new("").with_header("a", a).with_header("b", b);
            IdSource::all_of([IdSource::header("a"), IdSource::header("b")]).read(&message)
        };
        let id = |parts| read(parts).expect("an id").to_string();
        assert_eq!(id(["tenant-7", "pay-42"]), "tenant-7/pay-42");
        assert_eq!(id(["a/b", "c="]), "a=/b/c==");
        assert!(id(["a b", "c"]).starts_with("h:"));
        let parts = [
            "a", "ab", "bc", "c", "/", "=", "a/", "/b", "a=", "=/", "a b", "=/b",
        ];
        let pairs = parts.iter().flat_map(|a| parts.map(|b| [*a, b]));
        let ids: std::collections::HashSet<String> = pairs.map(id).collect();
        assert_eq!(ids.len(), parts.len() * parts.len());
        for missing in [["", "b"], ["a", ""], ["", ""]] {
            assert_eq!(read(missing), Err(IdError::Missing), "{missing:?}");
        }
        assert!(matches!(read(["a", "true"]), Err(IdError::Unusable(_))));
    }

    #[test]
    fn a_list_of_sources_is_checked() {
        let header = || IdSource::header("a");
        for source in [
            IdSource::first_of([]),
            IdSource::all_of([]),
            IdSource::all_of([header(), IdSource::header("")]),
            IdSource::first_of([header(), IdSource::json_pointer("id")]),
            IdSource::first_of([IdSource::body_hash(), header()]),
            IdSource::first_of([IdSource::position().hashed(), header()]).hashed(),
        ] {
            assert!(source.check().is_err(), "{source:?}");
        }
        let computed_last = IdSource::first_of([header(), IdSource::position()]);
        assert_eq!(computed_last.check(), Ok(()));
        assert!(computed_last.reads_position() && !computed_last.reads_message_id());
        let both = IdSource::all_of([header(), IdSource::message_id()]).hashed();
        assert!(both.reads_message_id());
    }

    #[test]
    fn an_id_of_several_sources_is_read_without_the_body_if_no_source_is_the_body() {
        let message = Message::new("").with_header("a", "7");
        let header = || IdSource::header("a");
        let without_body = |source: IdSource| source.read_without_body(&message);
        assert!(without_body(IdSource::all_of([header(), header()])).is_some());
        let with_body = IdSource::first_of([header(), IdSource::json_pointer("/id")]);
        assert_eq!(without_body(with_body.hashed()), None);
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
