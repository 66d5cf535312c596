//! The stored form of a response.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue};
use http::response::Parts;
use http::{Response, StatusCode};
use http_body::Body;
use serde::{Deserialize, Serialize};

use crate::body::BufferedBody;
use crate::layer::REPLAYED;

/// The headers that are not stored, besides those that `connection` names: they belong to one
/// connection or to one moment, and the server that sends the replay sets its own.
const NOT_STORED: &[&str] = &[
    "connection",
    "content-length",
    "date",
    "idempotency-replayed",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// A response, as the gate stores it. A version that this release does not know cannot be decoded,
/// so that its key gets the answer for a response that is not available.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "version")]
pub(crate) enum StoredResponse {
    #[serde(rename = "1")]
    V1 {
        status: u16,
        headers: Vec<(String, StoredBytes)>,
        body: StoredBytes,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        trailers: Vec<(String, StoredBytes)>,
    },
}

/// Bytes: as text if they are text, which is shorter and readable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum StoredBytes {
    Text(String),
    Binary { base64: String },
}

impl StoredBytes {
    fn new(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Binary {
                base64: BASE64_STANDARD.encode(bytes),
            },
        }
    }

    /// `None` if it was not written by [`new`](Self::new).
    fn into_bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Text(text) => Some(text.into_bytes()),
            Self::Binary { base64 } => BASE64_STANDARD.decode(base64).ok(),
        }
    }
}

impl StoredResponse {
    pub(crate) fn new(parts: &Parts, body: &[u8], trailers: Option<&HeaderMap>) -> Self {
        Self::V1 {
            status: parts.status.as_u16(),
            headers: stored(&parts.headers),
            body: StoredBytes::new(body),
            trailers: trailers.map(stored).unwrap_or_default(),
        }
    }

    /// The response of the first request, marked as a replay. `None` if it was not written by
    /// [`new`](Self::new).
    pub(crate) fn replay<B: Body>(self) -> Option<Response<BufferedBody<B>>> {
        let Self::V1 {
            status,
            headers,
            body,
            trailers,
        } = self;
        let trailers = match trailers.is_empty() {
            true => None,
            false => Some(restored(trailers)?),
        };
        let body = Bytes::from(body.into_bytes()?);
        let mut response = Response::new(BufferedBody::complete(body, trailers));
        *response.status_mut() = StatusCode::from_u16(status).ok()?;
        *response.headers_mut() = restored(headers)?;
        response
            .headers_mut()
            .insert(REPLAYED, HeaderValue::from_static("true"));
        Some(response)
    }
}

fn stored(headers: &HeaderMap) -> Vec<(String, StoredBytes)> {
    let of_the_connection: Vec<&str> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(',').map(str::trim))
        .collect();
    let is_stored = |name: &HeaderName| {
        !NOT_STORED.contains(&name.as_str())
            && !of_the_connection
                .iter()
                .any(|other| other.eq_ignore_ascii_case(name.as_str()))
    };
    headers
        .iter()
        .filter(|(name, _)| is_stored(name))
        .map(|(name, value)| (name.to_string(), StoredBytes::new(value.as_bytes())))
        .collect()
}

fn restored(stored: Vec<(String, StoredBytes)>) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in stored {
        let name = HeaderName::try_from(name).ok()?;
        let value = HeaderValue::from_bytes(&value.into_bytes()?).ok()?;
        headers.append(name, value);
    }
    Some(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Responses that an earlier release stored are read for as long as the dedup window lasts, so
    /// this form must not change without a new version.
    #[test]
    fn the_stored_form_is_that_of_version_1() {
        let response = Response::builder()
            .status(201)
            .header("x-text", "a")
            .header(
                "x-bytes",
                HeaderValue::from_bytes(b"\xff").expect("a value"),
            );
        let (parts, ()) = response.body(()).expect("a response").into_parts();
        let json = r#"{"version":"1","status":201,"headers":[["x-text","a"],["x-bytes",{"base64":"/w=="}]],"body":"{\"id\":1}"}"#;
        let response = StoredResponse::new(&parts, br#"{"id":1}"#, None);
        assert_eq!(serde_json::to_string(&response).expect("JSON"), json);
        let read: StoredResponse = serde_json::from_str(json).expect("version 1");
        assert_eq!(read, response);
        assert!(serde_json::from_str::<StoredResponse>(&json.replace("\"1\"", "\"2\"")).is_err());
    }
}
