//! What follows from what the service returns.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use axum::response::IntoResponse;
use futures_util::future::{Ready, ready};
use oncegate_core::marker::{
    Effect, Fingerprint, Guarantee, Marker, Operation, OperationKind, Terms, Token, Verdict,
};
use oncegate_core::{
    Completion, Gate, Key, MemoryStore, MessageId, ResultStore, Scope, Store, StoreError, WhenHeld,
    async_trait,
};
use oncegate_http::{BufferedBody, IdempotencyLayer, ResponseOutcome};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::support::{Answer, App, BOTH, builder, charge, layer_with};

/// The number of the call, with a status.
fn with_status(status: u16) -> impl Fn(u32) -> Ready<(StatusCode, String)> + Clone {
    let status = StatusCode::from_u16(status).expect("a status");
    move |call| ready((status, call.to_string()))
}

#[tokio::test]
async fn responses_below_500_are_stored() {
    for guarantee in BOTH {
        for status in [200, 204, 302, 400, 404, 422, 429] {
            let app = App::new(layer_with(guarantee).await, with_status(status));
            let first = app.charge("key").await;
            let repeat = app.charge("key").await;
            assert_eq!((first.status, first.is_replay()), (status, false));
            assert_eq!((repeat.status, repeat.is_replay()), (status, true));
            assert_eq!(first.body, repeat.body);
        }
    }
}

/// The response to a later request with the same key, after one whose outcome is unknown: it is
/// processed again, or it is in doubt.
async fn check_unknown(guarantee: Guarantee, app: &App, again: (u16, &str, bool)) {
    let repeat = app.charge("key").await;
    match guarantee {
        Guarantee::AtMostOnce => {
            assert_eq!(repeat.problem(), (500, "in-doubt".into()));
            assert_eq!(repeat.json()["id"], "key");
            assert_eq!(app.calls(), 1);
        }
        _ => {
            assert_eq!(repeat.summary(), again);
            assert_eq!(app.calls(), 2);
        }
    }
}

#[tokio::test]
async fn a_response_from_500_is_sent_and_its_outcome_is_unknown() {
    for guarantee in BOTH {
        let app = App::new(layer_with(guarantee).await, with_status(503));
        assert_eq!(app.charge("key").await.summary(), (503, "1", false));
        check_unknown(guarantee, &app, (503, "2", false)).await;
    }
}

#[tokio::test]
async fn a_panic_is_answered_with_500_and_its_outcome_is_unknown() {
    for guarantee in BOTH {
        let app = App::new(layer_with(guarantee).await, |call| async move {
            assert_ne!(call, 1, "the handler panics, as this test expects");
            call.to_string()
        });
        let name = match guarantee {
            Guarantee::AtMostOnce => "in-doubt",
            _ => "outcome-unknown",
        };
        assert_eq!(app.charge("key").await.problem(), (500, name.into()));
        check_unknown(guarantee, &app, (200, "2", false)).await;
    }
}

#[tokio::test]
async fn an_error_of_the_service_is_returned_and_its_outcome_is_unknown() {
    for guarantee in BOTH {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = calls.clone();
        let service =
            layer_with(guarantee)
                .await
                .layer(service_fn(move |_: Request<BufferedBody<Body>>| {
                    let call = counted.fetch_add(1, Ordering::SeqCst) + 1;
                    ready(match call {
                        1 => Err("broken"),
                        _ => Ok(Response::new(Body::empty())),
                    })
                }));
        let first = service.clone().oneshot(charge("key")).await;
        assert_eq!(first.map(drop), Err("broken"));
        let repeat = service.clone().oneshot(charge("key")).await;
        let status = repeat.expect("a response").status();
        let expected = match guarantee {
            Guarantee::AtMostOnce => (500, 1),
            _ => (200, 2),
        };
        assert_eq!((status.as_u16(), calls.load(Ordering::SeqCst)), expected);
    }
}

#[tokio::test]
async fn a_response_that_says_that_nothing_happened_frees_the_key() {
    for guarantee in BOTH {
        for status in [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE] {
            let app = App::new(layer_with(guarantee).await, move |call| async move {
                match call {
                    1 => (Extension(ResponseOutcome::NothingHappened), status).into_response(),
                    _ => StatusCode::CREATED.into_response(),
                }
            });
            let first = app.charge("key").await;
            assert_eq!(first.status, status.as_u16());
            assert_eq!(app.calls(), 1, "it is not called again for one request");
            // The key is free: also for another request.
            let other = Request::post("/refunds").header("idempotency-key", "key");
            let other = app
                .send(other.body(Body::empty()).expect("a request"))
                .await;
            assert_eq!((other.status, other.is_replay()), (201, false));
        }
    }
}

#[tokio::test]
async fn the_service_decides_which_statuses_are_stored() {
    for guarantee in BOTH {
        let layer =
            layer_with(guarantee)
                .await
                .outcome_by(|response| match response.status.as_u16() {
                    500 => ResponseOutcome::Store,
                    429 => ResponseOutcome::NothingHappened,
                    _ => ResponseOutcome::MayHaveHappened,
                });
        for (status, repeats) in [(500, true), (429, false)] {
            let app = App::new(layer.clone(), with_status(status));
            let key = status.to_string();
            assert_eq!(app.charge(&key).await.summary(), (status, "1", false));
            let repeat = app.charge(&key).await;
            assert_eq!((repeat.status, repeat.is_replay()), (status, repeats));
        }
        let app = App::new(layer.clone(), with_status(404));
        assert_eq!(app.charge("key").await.summary(), (404, "1", false));
        check_unknown(guarantee, &app, (404, "2", false)).await;

        // What the handler says has precedence.
        let app = App::new(layer, |_| {
            ready((Extension(ResponseOutcome::Store), StatusCode::NOT_FOUND))
        });
        assert!(!app.charge("other").await.is_replay());
        assert!(app.charge("other").await.is_replay());
    }
}

/// A store that is not there, or not the right one.
struct Broken(fn() -> StoreError);

#[async_trait]
impl Store for Broken {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        operations.iter().map(|_| Err((self.0)())).collect()
    }

    async fn preflight(&self, _: Guarantee) -> Result<(), StoreError> {
        Ok(())
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }
}

#[async_trait]
impl ResultStore for Broken {
    async fn complete(&self, _: &Operation, _: &[u8]) -> Result<Completion, StoreError> {
        Err((self.0)())
    }

    async fn read(&self, _: &Key, _: Option<Fingerprint>) -> Result<Option<Vec<u8>>, StoreError> {
        Err((self.0)())
    }
}

#[tokio::test]
async fn without_the_store_the_service_is_not_called() {
    let errors: [fn() -> StoreError; 4] = [
        || StoreError::NotApplied("no connection".into()),
        || StoreError::Unknown("no reply".into()),
        || StoreError::Misconfigured("no permission".into()),
        || StoreError::UnreadableMarker("not ours".into()),
    ];
    for error in errors {
        let gate = builder().store(Broken(error)).open().await;
        let app = App::numbered(IdempotencyLayer::new(gate.expect("a gate")));
        let answer = app.charge("key").await;
        assert_eq!(answer.problem(), (503, "store-unavailable".into()));
        assert_eq!(answer.header("retry-after"), Some("5"));
        assert_eq!(app.calls(), 0);
    }
}

/// A gate that has no results, or the guarantee that records a key before its run, is refused.
#[tokio::test]
async fn a_gate_that_cannot_store_responses_calls_no_service() {
    let gate = Gate::builder().store(MemoryStore::new());
    let gate = gate.guarantee(Guarantee::Bare).open().await;
    let app = App::numbered(IdempotencyLayer::new(gate.expect("a gate")));
    let answer = app.charge("key").await;
    assert_eq!(answer.problem(), (503, "store-unavailable".into()));
    assert_eq!(app.calls(), 0);
}

/// An id that was completed without a response is never run again.
#[tokio::test]
async fn an_id_that_is_done_without_a_response_has_a_problem_of_its_own() {
    let gate = builder().open().await.expect("a gate");
    gate.run("key", || async { Ok(()) }).await.expect("ran");
    gate.run_stored("other", || async { Ok("not a response".to_owned()) })
        .await
        .expect("ran");
    let app = App::numbered(IdempotencyLayer::new(gate));
    for key in ["key", "other"] {
        let answer = app.charge(key).await;
        assert_eq!(answer.problem(), (409, "response-not-stored".into()));
    }
    assert_eq!(app.calls(), 0);
}

/// Another process has claimed the key, and dies: after its lease this request holds the key again.
#[tokio::test]
async fn a_request_that_lost_its_key_and_got_it_back_calls_the_service_once() {
    let store = MemoryStore::new();
    let gate = builder()
        .store(store.clone())
        .when_held(WhenHeld::Wait(Duration::from_secs(60)))
        .open()
        .await
        .expect("a gate");
    let id = MessageId::new("key").expect("an id");
    let key = Scope::named("tests").expect("a scope").key(&id);
    let app = App::new(IdempotencyLayer::new(gate), move |call| {
        let (store, key) = (store.clone(), key.clone());
        async move {
            let (Marker::InProgress(hold), _) = store.marker(&key) else {
                panic!("the request holds the key");
            };
            let operation = |kind, token, attempt| Operation {
                key: key.clone(),
                kind,
                token,
                attempt,
                terms: Terms {
                    guarantee: hold.guarantee,
                    lease: Duration::from_millis(1),
                    window: hold.horizon,
                    fingerprint: hold.fingerprint,
                },
            };
            let taken = store
                .apply(&[
                    operation(OperationKind::Withdraw, hold.token, hold.attempts.number),
                    operation(OperationKind::Claim, Token::random(), 0),
                ])
                .await;
            assert!(
                matches!(taken[..], [Ok(Verdict::Applied), Ok(Verdict::Granted(_))]),
                "{taken:?}"
            );
            call.to_string()
        }
    });
    assert_eq!(app.charge("key").await.summary(), (200, "1", false));
    assert_eq!(app.charge("key").await.summary(), (200, "1", true));
    assert_eq!(app.calls(), 1);
}

/// The problem has the id that the store and the command line know, which does not show the scope.
#[tokio::test]
async fn an_operator_resolves_the_id_of_a_request_in_doubt() {
    let store = MemoryStore::new();
    let gate = builder().store(store.clone());
    let gate = gate.guarantee(Guarantee::AtMostOnce).open().await;
    let layer = IdempotencyLayer::new(gate.expect("a gate")).scope_by(|_| Some("sk_live_secret"));
    let app = App::new(layer, with_status(500));
    assert_eq!(app.charge("key").await.summary(), (500, "1", false));
    let in_doubt = app.charge("key").await;
    assert_eq!(in_doubt.problem(), (500, "in-doubt".into()));
    let problem = in_doubt.json();
    let id = problem["id"].as_str().expect("an id");
    assert!(id.starts_with("h:") && id.len() == 66, "{id}");
    let id = MessageId::stored(id).expect("an id");
    let key = Scope::named("tests").expect("a scope").key(&id);
    let (seen, _) = store.marker(&key);
    let did_not_happen = Operation {
        key,
        kind: OperationKind::Redrive {
            seen,
            effect: Effect::Nothing,
        },
        token: Token::random(),
        attempt: 0,
        terms: Terms {
            guarantee: Guarantee::AtMostOnce,
            lease: Duration::from_secs(1),
            window: Duration::from_secs(60),
            fingerprint: None,
        },
    };
    let resolved = store.apply(&[did_not_happen]).await;
    assert!(
        matches!(resolved[..], [Ok(Verdict::Applied)]),
        "{resolved:?}"
    );
    assert_eq!(app.charge("key").await.summary(), (500, "2", false));
}

/// A service that has to be ready before each call, and whose clones are not ready.
struct CalledIfReady {
    is_ready: bool,
}

impl Clone for CalledIfReady {
    fn clone(&self) -> Self {
        Self { is_ready: false }
    }
}

impl Service<Request<BufferedBody<Body>>> for CalledIfReady {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<BufferedBody<Body>>) -> Self::Future {
        assert!(self.is_ready, "called before it was ready");
        self.is_ready = false;
        ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn the_service_that_was_ready_is_called() {
    let layer = layer_with(Guarantee::EffectivelyOnce).await;
    let mut service = layer.layer(CalledIfReady { is_ready: false });
    let get = || Request::get("/").body(Body::empty()).expect("a request");
    for request in [charge("a"), get(), charge("b"), charge("a")] {
        let service = service.ready().await.expect("ready");
        let response = service.call(request).await.expect("a response");
        let answer = Answer::read(response.map(Body::new)).await;
        assert_eq!(answer.status, 200);
    }
}
