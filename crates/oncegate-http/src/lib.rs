//! The `Idempotency-Key` header for HTTP services: a client that repeats a request gets the response
//! of the first one, and the service is not called again.
//!
//! Start with [`IdempotencyLayer`], a tower layer for axum, tonic and every other service over
//! `http::Request` and `http::Response`. [The book](https://github.com/oncegate/oncegate/blob/main/docs/src/http.md)
//! has an example and all answers of the layer.
#![forbid(unsafe_code)]

mod body;
mod key;
mod layer;
mod outcome;
mod problem;
mod service;
mod stored_response;

pub use body::BufferedBody;
pub use layer::{IdempotencyLayer, REPLAYED};
pub use outcome::ResponseOutcome;
pub use service::IdempotencyService;
