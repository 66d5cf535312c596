//! What a response says about the effect of its request.

use http::StatusCode;
use http::header::HeaderValue;

/// What a response says about the effect of its request, and what follows for the key.
///
/// A handler that knows it puts this into the extensions of its response, where it has precedence
/// over [`IdempotencyLayer::outcome_by`](crate::IdempotencyLayer::outcome_by). With axum:
/// `(Extension(ResponseOutcome::NothingHappened), StatusCode::UNPROCESSABLE_ENTITY)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseOutcome {
    /// The request was processed, with success or not: the response is stored, and repeats get it.
    /// By default that of each status below 500.
    Store,
    /// The request had no effect and will have none: the key is free, and a repeat is processed as
    /// a new request. Never by default.
    NothingHappened,
    /// It is unknown whether the request had its effect. In effectively once a repeat is processed
    /// again; in at most once it is refused, until an operator has resolved the id of the key. By
    /// default that of each status from 500: such a response says nothing about the effect.
    MayHaveHappened,
}

impl ResponseOutcome {
    /// The default, by the status, or by that of gRPC if the response has one.
    pub(crate) fn by_status(status: StatusCode, grpc_status: Option<&HeaderValue>) -> Self {
        let is_known = match grpc_status.map(HeaderValue::as_bytes) {
            // OK, and what is like a 4xx: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS,
            // PERMISSION_DENIED, FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED, UNAUTHENTICATED.
            Some(code) => ["0", "3", "5", "6", "7", "9", "11", "12", "16"]
                .iter()
                .any(|known| known.as_bytes() == code),
            None => !status.is_server_error(),
        };
        if is_known {
            Self::Store
        } else {
            Self::MayHaveHappened
        }
    }
}
