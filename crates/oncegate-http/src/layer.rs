//! The layer and its settings.

use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderName;
use http::{Method, request, response};
use oncegate_core::Gate;
use oncegate_core::internal::{Lock, LogThrottle};
use tokio::sync::Semaphore;
use tower_layer::Layer;

use crate::outcome::ResponseOutcome;
use crate::service::IdempotencyService;

/// The header `Idempotency-Replayed`, which marks the stored response of an earlier request with the
/// value `true`. Other responses do not have it.
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// As many bytes as axum reads of a body by default.
const MAX_REQUEST_BYTES: usize = 2 * 1024 * 1024;

/// The default limit of requests in progress.
const MAX_IN_PROGRESS: usize = 1_000;

/// As many bytes as Stripe allows.
const MAX_KEY_BYTES: usize = 255;

/// A tower layer for the `Idempotency-Key`: a repeated request gets the response of the first one, and
/// the service is not called again, unless the first outcome is unknown.
///
/// - It processes requests with the header `Idempotency-Key` and one of its
///   [`methods`](Self::methods). The service receives all other requests unchanged.
/// - The service is called only after the gate has granted the key, at most once for each request,
///   in a task of its own: if the client disconnects, it runs on, and a repeat gets its response.
///   Task-local variables of the caller are not set in it.
/// - The request body is read before the service is called, and the response body before the response
///   is sent, unless its type is `text/event-stream`. Streams of gRPC need requests without the header.
/// - The response is stored up to [`GateBuilder::max_result_bytes`](oncegate_core::GateBuilder), as
///   the [`ResponseOutcome`] says. A larger response, and one of the type `text/event-stream`, is
///   sent and not stored: repeats get a problem of the type `response-not-stored`.
/// - These headers are not stored: `connection` and those that it names, `content-length`, `date`,
///   `keep-alive`, `proxy-authenticate`, `proxy-connection`, `set-cookie`, `te`, `trailer`,
///   `transfer-encoding`, `upgrade`.
/// - Its own answers are of the type `application/problem+json`; to gRPC, a status.
/// - While the store is unavailable, the service is not called, and the answer is 503.
///
/// Give the gate a [`scope`](oncegate_core::GateBuilder::scope) of its own, and a store that keeps
/// results. In effectively once a request whose outcome is unknown (a status from 500, a panic, a
/// crash) is processed again when it is repeated; in at most once it is refused until an operator
/// has resolved its id. A process that stops does not wait for services whose clients have
/// disconnected: their outcomes are then unknown.
///
/// Put authentication, rate limits, validation, compression, CORS and the layer of tonic-web outside
/// of this one: what they refuse is not stored, and what they add depends on the request.
///
/// With axum, add the layer outside of `Router::nest`, which removes the prefix of the path that
/// belongs to the fingerprint.
#[derive(Clone)]
pub struct IdempotencyLayer(Arc<LayerSettings>);

type ScopeFn = dyn Fn(&request::Parts) -> Option<Vec<u8>> + Send + Sync;
type OutcomeFn = dyn Fn(&response::Parts) -> ResponseOutcome + Send + Sync;

#[derive(Clone)]
pub(crate) struct LayerSettings {
    pub(crate) gate: Gate,
    pub(crate) methods: Vec<Method>,
    pub(crate) missing_key: MissingKey,
    pub(crate) max_key_bytes: usize,
    pub(crate) max_request_bytes: usize,
    /// A permit for each further request in progress.
    pub(crate) in_progress: Arc<Semaphore>,
    pub(crate) scope: Option<Arc<ScopeFn>>,
    pub(crate) outcome: Option<Arc<OutcomeFn>>,
    /// Limits the log lines of all requests.
    pub(crate) log: Arc<Lock<LogThrottle>>,
}

/// What happens to a request without a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingKey {
    PassThrough,
    Refuse,
}

impl IdempotencyLayer {
    /// A layer with every setting at its default. Use the gate for nothing else: without
    /// [`scope_by`](Self::scope_by), clients choose its ids.
    ///
    /// With [`WhenHeld::Skip`](oncegate_core::WhenHeld) and `GiveUp` a request is answered with 409
    /// while another one with its key is processed; with `Wait` it waits for the response.
    pub fn new(gate: Gate) -> Self {
        Self(Arc::new(LayerSettings {
            gate,
            methods: vec![Method::POST, Method::PATCH],
            missing_key: MissingKey::PassThrough,
            max_key_bytes: MAX_KEY_BYTES,
            max_request_bytes: MAX_REQUEST_BYTES,
            in_progress: Arc::new(Semaphore::new(MAX_IN_PROGRESS)),
            scope: None,
            outcome: None,
            log: Arc::new(Lock::new(LogThrottle::up_to(100, Duration::from_secs(10)))),
        }))
    }

    /// The methods whose requests the layer processes. Default: `POST` and `PATCH`.
    #[must_use]
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.settings().methods = methods.into_iter().collect();
        self
    }

    /// Refuses requests without a key with 400. Default: the service receives them unchanged.
    #[must_use]
    pub fn required(mut self) -> Self {
        self.settings().missing_key = MissingKey::Refuse;
        self
    }

    /// The longest key, in bytes. A longer one is refused with 400. Default: 255.
    #[must_use]
    pub fn max_key_bytes(mut self, bytes: usize) -> Self {
        self.settings().max_key_bytes = bytes;
        self
    }

    /// The largest body of a request with a key, in bytes, which is read into memory. A larger one
    /// is refused with 413. Default: 2 MiB.
    #[must_use]
    pub fn max_request_bytes(mut self, bytes: usize) -> Self {
        self.settings().max_request_bytes = bytes;
        self
    }

    /// How many requests with a key may be read, wait for another one, or be processed at a time,
    /// including those whose clients have disconnected. Further ones are answered with 503. Default: 1,000.
    #[must_use]
    pub fn max_in_progress(mut self, requests: usize) -> Self {
        let requests = requests.min(Semaphore::MAX_PERMITS);
        self.settings().in_progress = Arc::new(Semaphore::new(requests));
        self
    }

    /// The tenant, the user or the API key of a request: equal keys of different scopes are
    /// different ids. The store and the log contain a hash of scope and key alone.
    ///
    /// Without this, a caller who sends the key and the request of another one gets the response to
    /// that one. Use what does not change between a request and its repeat: an account rather than
    /// a token that expires. `None` and an empty scope refuse the request with 400.
    ///
    /// ```
    /// # fn scoped(layer: oncegate_http::IdempotencyLayer) -> oncegate_http::IdempotencyLayer {
    /// layer.scope_by(|request| request.headers.get("x-api-key").cloned())
    /// # }
    /// ```
    #[must_use]
    pub fn scope_by<S: AsRef<[u8]>>(
        mut self,
        scope: impl Fn(&request::Parts) -> Option<S> + Send + Sync + 'static,
    ) -> Self {
        let scope = move |parts: &request::Parts| Some(scope(parts)?.as_ref().to_vec());
        self.settings().scope = Some(Arc::new(scope));
        self
    }

    /// What a response says about the effect of its request. It is asked for each response without
    /// a [`ResponseOutcome`] in its extensions, before the body is read. Default: see there.
    ///
    /// In at most once the service runs a second time for a key only after
    /// [`ResponseOutcome::NothingHappened`]: a status that may follow an effect must not have it.
    #[must_use]
    pub fn outcome_by(
        mut self,
        outcome: impl Fn(&response::Parts) -> ResponseOutcome + Send + Sync + 'static,
    ) -> Self {
        self.settings().outcome = Some(Arc::new(outcome));
        self
    }

    fn settings(&mut self) -> &mut LayerSettings {
        Arc::make_mut(&mut self.0)
    }
}

impl LayerSettings {
    /// What a response says by its head; `None` if the gRPC status may follow in its trailers.
    pub(crate) fn outcome(&self, parts: &response::Parts) -> Option<ResponseOutcome> {
        if let Some(outcome) = parts.extensions.get::<ResponseOutcome>() {
            return Some(*outcome);
        }
        if let Some(outcome) = &self.outcome {
            return Some(outcome(parts));
        }
        let grpc_status = parts.headers.get(GRPC_STATUS);
        match ResponseOutcome::by_status(parts.status, grpc_status) {
            ResponseOutcome::Store if grpc_status.is_none() => None,
            outcome => Some(outcome),
        }
    }
}

/// The header or trailer with the status of gRPC.
pub(crate) const GRPC_STATUS: &str = "grpc-status";

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> IdempotencyService<S> {
        IdempotencyService::new(inner, self.0.clone())
    }
}

impl std::fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let settings = &self.0;
        f.debug_struct("IdempotencyLayer")
            .field("gate", &settings.gate)
            .field("methods", &settings.methods)
            .finish_non_exhaustive()
    }
}
