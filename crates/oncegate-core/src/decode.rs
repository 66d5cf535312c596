//! Decoding of a message body into a payload.

use serde::de::DeserializeOwned;
use serde::de::value::BytesDeserializer;

use crate::message::Message;
use crate::store::BoxError;

/// Decodes the body of a message into the payload of a handler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not decode bodies",
    label = "this is not a decoder",
    note = "pass `Json` (the default) or `RawBytes`, or implement `Decode` for a type of yours"
)]
pub trait Decode: Send + Sync + 'static {
    /// Decodes one body.
    ///
    /// # Errors
    /// The body does not parse. The text of the error says why; the dead letter and the log contain
    /// it, so it must not quote the body.
    fn decode<T: DeserializeOwned>(&self, message: &Message) -> Result<T, BoxError>;
}

/// Decodes JSON: the default. Skips a byte order mark.
#[derive(Clone, Copy, Debug, Default)]
pub struct Json;

impl Decode for Json {
    fn decode<T: DeserializeOwned>(&self, message: &Message) -> Result<T, BoxError> {
        let body = crate::id::json::without_byte_order_mark(&message.body);
        serde_json::from_slice(body).map_err(|error| {
            if body.iter().all(u8::is_ascii_whitespace) {
                return "the body is empty, so it is not JSON".into();
            }
            let (line, column) = (error.line(), error.column());
            match expectation(&error.to_string()) {
                Some(expected) => {
                    format!(
                        "not the JSON that was expected: {expected} (line {line}, column {column})"
                    )
                }
                None => format!(
                    "not the JSON that was expected ({:?} error at line {line}, column {column})",
                    error.classify(),
                ),
            }
            .into()
        })
    }
}

/// The part of an error of serde_json that comes from the payload's type: the missing field, or the
/// expected type. The other parts may quote the body.
fn expectation(error: &str) -> Option<String> {
    let (error, _) = error.rsplit_once(" at line ")?;
    if error.starts_with("missing field `") {
        return Some(error.to_owned());
    }
    let may_quote = [
        "invalid type: ",
        "invalid value: ",
        "invalid length ",
        "unknown field `",
        "unknown variant `",
    ];
    if !may_quote.iter().any(|start| error.starts_with(start)) {
        return None;
    }
    let (_, expected) = error.rsplit_once(", expected ")?;
    Some(format!("expected {expected}"))
}

/// Passes the body unchanged, to a payload that can be deserialized from bytes, such as [`Raw`].
#[derive(Clone, Copy, Debug, Default)]
pub struct RawBytes;

impl Decode for RawBytes {
    fn decode<T: DeserializeOwned>(&self, message: &Message) -> Result<T, BoxError> {
        T::deserialize(BytesDeserializer::<serde::de::value::Error>::new(
            &message.body,
        ))
        .map_err(|_| "the payload type cannot be deserialized from bytes: use `Raw`".into())
    }
}

/// A copy of the bytes of a body as a payload. Needs the decoder [`RawBytes`]. The body of
/// [`Context::message`](crate::Context::message) is not copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Raw(pub Vec<u8>);

impl<'de> serde::Deserialize<'de> for Raw {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AsBytes;
        impl serde::de::Visitor<'_> for AsBytes {
            type Value = Raw;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Raw, E> {
                Ok(Raw(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(AsBytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_raw_bytes_decode_and_errors_quote_no_payload() {
        let number: u32 = Json.decode(&Message::new("42")).expect("a number");
        assert_eq!(number, 42);
        assert_eq!(
            Json.decode::<u32>(&Message::new("\u{feff}42"))
                .expect("a number behind a byte order mark"),
            42
        );
        for empty in ["", " \n", "\u{feff}"] {
            let error = Json.decode::<u32>(&Message::new(empty));
            assert!(error.expect_err("no JSON").to_string().contains("empty"));
        }
        let raw: Raw = RawBytes
            .decode(&Message::new(vec![0xff, 0]))
            .expect("bytes");
        assert_eq!(raw.0, [0xff, 0]);
        let error = Json
            .decode::<u32>(&Message::new("\"secret-canary\""))
            .expect_err("no number");
        assert!(!error.to_string().contains("canary"), "{error}");
    }

    #[test]
    fn an_error_names_the_field_or_the_type_and_quotes_no_payload() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Payment {
            #[expect(dead_code, reason = "only its name matters")]
            cents: u64,
        }
        let body = |body: &str| {
            Json.decode::<Payment>(&Message::new(body.to_owned()))
                .expect_err("not a payment")
                .to_string()
        };
        for (sent, expected) in [
            (
                r#"{}"#,
                "expected: missing field `cents` (line 1, column 2)",
            ),
            (
                r#"{"cents":"canary, expected 7"}"#,
                "expected: expected u64 (line 1, column 29)",
            ),
            (
                r#"{"cents":-1}"#,
                "expected: expected u64 (line 1, column 11)",
            ),
            (
                r#"{"canary at line 1":1}"#,
                "expected: expected `cents` (line 1, column 19)",
            ),
            (r#"{"cents":1"#, "(Eof error at line 1, column 10)"),
            ("canary", "(Syntax error at line 1, column 1)"),
        ] {
            let text = body(sent);
            assert!(text.ends_with(expected), "{sent}: {text}");
            assert!(!text.contains("canary"), "{text}");
        }
    }
}
