//! The answers of the layer itself, as problem details (RFC 9457).

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use http_body::Body;
use serde::Serialize;

use crate::body::BufferedBody;

/// The page that explains each type, under a heading with its name.
const PAGE: &str = "https://github.com/oncegate/oncegate/blob/main/docs/src/http.md";

/// Why the layer answers in place of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProblemType {
    MissingKey,
    MalformedKey,
    MissingScope,
    RequestTooLarge,
    UnreadableBody,
    InProgress,
    OtherRequest,
    ResponseNotStored,
    OutcomeUnknown,
    InDoubt,
    StoreUnavailable,
    TooManyRequests,
}

/// The constant parts of a problem.
struct Description {
    name: &'static str,
    status: StatusCode,
    title: &'static str,
    /// What the client should do.
    detail: &'static str,
    /// Seconds.
    retry_after: Option<u16>,
    /// The status in an answer to gRPC.
    grpc_status: u16,
}

/// A problem as JSON.
#[derive(Serialize)]
struct ProblemDetails<'a> {
    r#type: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    /// The id under which the store knows the key, for the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
}

impl ProblemType {
    #[cfg(test)]
    pub(crate) const ALL: [Self; 12] = [
        Self::MissingKey,
        Self::MalformedKey,
        Self::MissingScope,
        Self::RequestTooLarge,
        Self::UnreadableBody,
        Self::InProgress,
        Self::OtherRequest,
        Self::ResponseNotStored,
        Self::OutcomeUnknown,
        Self::InDoubt,
        Self::StoreUnavailable,
        Self::TooManyRequests,
    ];

    fn description(self) -> Description {
        let (name, status, title, detail, retry_after, grpc_status) = match self {
            Self::MissingKey => (
                "missing-key",
                StatusCode::BAD_REQUEST,
                "The Idempotency-Key header is missing",
                "Send the header Idempotency-Key with a value that is unique to this request, such as a UUID.",
                None,
                3, // INVALID_ARGUMENT
            ),
            Self::MalformedKey => (
                "malformed-key",
                StatusCode::BAD_REQUEST,
                "The Idempotency-Key header is malformed",
                "Send one key of visible ASCII characters, such as a UUID.",
                None,
                3,
            ),
            Self::MissingScope => (
                "missing-scope",
                StatusCode::BAD_REQUEST,
                "The request does not say whose Idempotency-Key it has",
                "Send the request with the credentials that this service asks for.",
                None,
                16, // UNAUTHENTICATED
            ),
            Self::RequestTooLarge => (
                "request-too-large",
                StatusCode::PAYLOAD_TOO_LARGE,
                "The body is too large for a request with an Idempotency-Key",
                "Send a smaller body.",
                None,
                8, // RESOURCE_EXHAUSTED
            ),
            Self::UnreadableBody => (
                "unreadable-body",
                StatusCode::BAD_REQUEST,
                "The body could not be read",
                "This attempt was not processed. Send the request again with the same key.",
                None,
                3,
            ),
            Self::InProgress => (
                "in-progress",
                StatusCode::CONFLICT,
                "A request with this Idempotency-Key is being processed",
                "Send the request again later, with the same key.",
                Some(1),
                10, // ABORTED
            ),
            Self::OtherRequest => (
                "other-request",
                StatusCode::UNPROCESSABLE_ENTITY,
                "The Idempotency-Key was used for another request",
                "The request was not processed. Use a new key for each request. A repeat must have the same method, path, query and body.",
                None,
                9, // FAILED_PRECONDITION
            ),
            Self::ResponseNotStored => (
                "response-not-stored",
                StatusCode::CONFLICT,
                "The request was processed before, and its response is not available",
                "Do not send the request again. Find out its result in another way.",
                None,
                6, // ALREADY_EXISTS
            ),
            Self::OutcomeUnknown => (
                "outcome-unknown",
                StatusCode::INTERNAL_SERVER_ERROR,
                "It is unknown whether the request was processed",
                "Send the request again with the same key, not with a new one.",
                None,
                2, // UNKNOWN
            ),
            Self::InDoubt => (
                "in-doubt",
                StatusCode::INTERNAL_SERVER_ERROR,
                "It is unknown whether the request was processed",
                "The request is not processed again. Do not send it with a new key. Ask the operator of this service to resolve the id.",
                None,
                2,
            ),
            Self::StoreUnavailable => (
                "store-unavailable",
                StatusCode::SERVICE_UNAVAILABLE,
                "Requests with an Idempotency-Key cannot be processed at the moment",
                "This attempt was not processed; it is not known whether an earlier one was. Send the request again later, with the same key and not with a new one.",
                Some(5),
                14, // UNAVAILABLE
            ),
            Self::TooManyRequests => (
                "too-many-requests",
                StatusCode::SERVICE_UNAVAILABLE,
                "Too many requests with an Idempotency-Key are in progress",
                "This attempt was not processed. Send the request again later, with the same key and not with a new one.",
                Some(1),
                14,
            ),
        };
        Description {
            name,
            status,
            title,
            detail,
            retry_after,
            grpc_status,
        }
    }

    /// The answer to a request with these headers.
    pub(crate) fn answer<B: Body>(self, headers: &HeaderMap) -> Response<BufferedBody<B>> {
        self.answer_with(headers, None, None)
    }

    /// The answer with another detail, or with the id of the key.
    pub(crate) fn answer_with<B: Body>(
        self,
        headers: &HeaderMap,
        detail: Option<&str>,
        id: Option<&str>,
    ) -> Response<BufferedBody<B>> {
        let it = self.description();
        let detail = detail.unwrap_or(it.detail);
        let grpc = headers
            .get(CONTENT_TYPE)
            .filter(|content_type| content_type.as_bytes().starts_with(b"application/grpc"));
        let mut response = match grpc {
            Some(content_type) => {
                let mut response = answer_to_grpc(&it, detail, id);
                response
                    .headers_mut()
                    .insert(CONTENT_TYPE, content_type.clone());
                response
            }
            None => {
                let json = serde_json::to_vec(&ProblemDetails {
                    r#type: format!("{PAGE}#{}", it.name),
                    title: it.title,
                    status: it.status.as_u16(),
                    detail,
                    id,
                });
                // Text alone can always be serialized.
                let mut response = with_body(json.unwrap_or_default().into());
                *response.status_mut() = it.status;
                let content_type = HeaderValue::from_static("application/problem+json");
                response.headers_mut().insert(CONTENT_TYPE, content_type);
                response
            }
        };
        if let Some(seconds) = it.retry_after {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// A client of gRPC reads the headers `grpc-status` and `grpc-message`, and no body.
fn answer_to_grpc<B: Body>(
    it: &Description,
    detail: &str,
    id: Option<&str>,
) -> Response<BufferedBody<B>> {
    let mut response = with_body(Bytes::new());
    let headers = response.headers_mut();
    headers.insert("grpc-status", it.grpc_status.into());
    let id = id.map(|id| format!(" Id: {id}")).unwrap_or_default();
    // Percent-encoded, which only `%` needs: the texts are printable ASCII.
    let message = format!("{}. {detail}{id}", it.title).replace('%', "%25");
    if let Ok(message) = HeaderValue::try_from(message) {
        headers.insert("grpc-message", message);
    }
    response
}

fn with_body<B: Body>(body: Bytes) -> Response<BufferedBody<B>> {
    Response::new(BufferedBody::complete(body, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_book_explains_each_problem_type() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/http.md");
        let page = std::fs::read_to_string(page).expect("the page of the book");
        for problem in ProblemType::ALL {
            let it = problem.description();
            let heading = format!("\n### {}\n\n{}", it.name, it.status.as_u16());
            assert!(page.contains(&heading), "{heading}");
        }
    }
}
