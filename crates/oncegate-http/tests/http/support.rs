//! A service that counts its calls, behind the layer.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, Request, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::any;
use oncegate_core::{Gate, GateBuilder, Guarantee, MemoryStore};
use oncegate_http::{IdempotencyLayer, REPLAYED};
use tower::ServiceExt;

pub(crate) const BOTH: [Guarantee; 2] = [Guarantee::EffectivelyOnce, Guarantee::AtMostOnce];

pub(crate) fn builder() -> GateBuilder<MemoryStore> {
    let pause = Duration::from_millis(1);
    Gate::builder()
        .store(MemoryStore::new())
        .scope("tests")
        .backoff(pause, pause)
        .allow_volatile_store()
}

pub(crate) async fn layer() -> IdempotencyLayer {
    layer_with(Guarantee::EffectivelyOnce).await
}

pub(crate) async fn layer_with(guarantee: Guarantee) -> IdempotencyLayer {
    let gate = builder().guarantee(guarantee).open().await;
    IdempotencyLayer::new(gate.expect("a gate"))
}

/// A service with the layer, which counts the calls that get through.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) router: Router,
    calls: Arc<AtomicU32>,
}

impl App {
    /// `respond` gets the number of the call, from 1.
    pub(crate) fn new<F>(
        layer: IdempotencyLayer,
        respond: impl Fn(u32) -> F + Clone + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output: IntoResponse> + Send,
    {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = calls.clone();
        let handler = move || {
            let call = counted.fetch_add(1, Ordering::SeqCst) + 1;
            respond(call)
        };
        let router = Router::new()
            .route("/charges", any(handler.clone()))
            .route("/refunds", any(handler))
            .layer(layer);
        Self { router, calls }
    }

    /// Each call is answered with 201 and its number.
    pub(crate) fn numbered(layer: IdempotencyLayer) -> Self {
        Self::new(layer, |call| async move {
            (StatusCode::CREATED, call.to_string())
        })
    }

    pub(crate) fn calls(&self) -> u32 {
        self.calls.load(Ordering::SeqCst)
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await;
        Answer::read(response.expect("a router has no errors")).await
    }

    /// Sends the same charge with this key.
    pub(crate) async fn charge(&self, key: &str) -> Answer {
        self.send(charge(key)).await
    }
}

pub(crate) fn charge(key: &str) -> Request<Body> {
    let request = Request::post("/charges").header("idempotency-key", key);
    request.body(Body::from("4200")).expect("a request")
}

/// A response that was read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) async fn read(response: Response<Body>) -> Self {
        let (parts, body) = response.into_parts();
        Self {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: to_bytes(body, usize::MAX).await.expect("a body"),
        }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let value = self.headers.get(name)?;
        Some(value.to_str().expect("ASCII"))
    }

    pub(crate) fn is_replay(&self) -> bool {
        let value = self.headers.get(REPLAYED);
        assert!(value.is_none_or(|value| value == "true"), "{value:?}");
        value.is_some()
    }

    /// Status and body, and whether the answer is a replay.
    pub(crate) fn summary(&self) -> (u16, &str, bool) {
        let body = std::str::from_utf8(&self.body).expect("text");
        (self.status, body, self.is_replay())
    }

    /// The status and the type of a problem.
    pub(crate) fn problem(&self) -> (u16, String) {
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json")
        );
        assert!(!self.is_replay());
        let problem = self.json();
        assert_eq!(problem["status"], self.status);
        for member in ["title", "detail"] {
            let text = problem[member].as_str().expect("text");
            assert!(text.len() > 10, "{problem}");
        }
        let problem_type = problem["type"].as_str().expect("text");
        let name = problem_type
            .strip_prefix("https://github.com/oncegate/oncegate/blob/main/docs/src/http.md#")
            .expect("a heading of the book");
        (self.status, name.to_owned())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}
