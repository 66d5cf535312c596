//! What a repeat gets while the first request runs, and after it.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::AppendHeaders;
use oncegate_core::WhenHeld;
use oncegate_http::IdempotencyLayer;
use tokio::sync::Notify;

use crate::support::{App, BOTH, builder, layer, layer_with};

#[tokio::test]
async fn a_repeat_gets_the_response_of_the_first_request() {
    for guarantee in BOTH {
        let app = App::new(layer_with(guarantee).await, |call| async move {
            let headers = [
                ("location", "/charges/1"),
                ("x-list", "a"),
                ("x-list", "b"),
                ("content-type", "application/json"),
            ];
            (
                StatusCode::CREATED,
                AppendHeaders(headers),
                format!("{{\"id\":{call}}}"),
            )
        });
        let first = app.charge("key").await;
        assert_eq!(first.summary(), (201, "{\"id\":1}", false));
        for _ in 0..2 {
            let repeat = app.charge("key").await;
            assert_eq!(repeat.summary(), (201, "{\"id\":1}", true));
            for name in ["location", "x-list", "content-type"] {
                let values = |headers: &axum::http::HeaderMap| -> Vec<HeaderValue> {
                    headers.get_all(name).iter().cloned().collect()
                };
                assert_eq!(values(&repeat.headers), values(&first.headers), "{name}");
            }
        }
        assert_eq!(app.calls(), 1);
    }
}

#[tokio::test]
async fn headers_of_the_connection_and_cookies_are_not_stored() {
    let app = App::new(layer().await, |_| async {
        AppendHeaders([
            ("set-cookie", "session=secret"),
            ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
            ("connection", "close, X-Hop"),
            ("keep-alive", "timeout=5"),
            ("x-hop", "a"),
            ("idempotency-replayed", "false"),
            ("x-kept", "a"),
        ])
    });
    let first = app.send(crate::support::charge("key")).await;
    assert_eq!(first.header("set-cookie"), Some("session=secret"));
    let repeat = app.charge("key").await;
    assert!(repeat.is_replay());
    let mut names: Vec<&str> = repeat.headers.keys().map(|name| name.as_str()).collect();
    names.retain(|name| *name != "content-length"); // of this response, from its body
    names.sort_unstable();
    assert_eq!(names, ["idempotency-replayed", "x-kept"]);
}

#[tokio::test]
async fn binary_bodies_and_headers_are_replayed_byte_by_byte() {
    let all_bytes: Vec<u8> = (0..=255).collect();
    for body in [
        Bytes::from(all_bytes),
        Bytes::new(),
        Bytes::from_static(b"\xff\0"),
    ] {
        let sent = body.clone();
        let app = App::new(layer().await, move |_| {
            let body = sent.clone();
            async move {
                let mut response = Response::new(Body::from(body));
                let value = HeaderValue::from_bytes(b"a\xe9\xff").expect("a value");
                response.headers_mut().insert("x-bytes", value);
                response
            }
        });
        for is_replay in [false, true] {
            let answer = app.charge("key").await;
            assert_eq!((answer.is_replay(), &answer.body), (is_replay, &body));
            assert_eq!(answer.headers["x-bytes"], b"a\xe9\xff"[..]);
        }
    }
}

/// A service whose calls begin and end when the test says so.
#[derive(Clone, Default)]
struct Slow {
    begun: Arc<Notify>,
    end: Arc<Notify>,
}

impl Slow {
    fn app(&self, layer: IdempotencyLayer) -> App {
        let slow = self.clone();
        App::new(layer, move |call| {
            let slow = slow.clone();
            async move {
                slow.begun.notify_one();
                slow.end.notified().await;
                (StatusCode::CREATED, call.to_string())
            }
        })
    }
}

#[tokio::test]
async fn a_repeat_while_the_first_runs_is_answered_with_409() {
    for when_held in [WhenHeld::Skip, WhenHeld::GiveUp] {
        let gate = builder().when_held(when_held).open().await;
        let slow = Slow::default();
        let app = slow.app(IdempotencyLayer::new(gate.expect("a gate")));
        let repeat = async {
            slow.begun.notified().await;
            let repeat = app.charge("key").await;
            slow.end.notify_one();
            repeat
        };
        let (first, repeat) = tokio::join!(app.charge("key"), repeat);
        assert_eq!(first.summary(), (201, "1", false));
        assert_eq!(repeat.problem(), (409, "in-progress".into()));
        assert_eq!(repeat.header("retry-after"), Some("1"));
        assert_eq!(app.charge("key").await.summary(), (201, "1", true));
    }
}

#[tokio::test]
async fn requests_over_the_limit_are_refused_before_they_are_read() {
    let slow = Slow::default();
    let app = slow.app(layer().await.max_in_progress(1));
    let other = async {
        slow.begun.notified().await;
        let other = app.charge("other").await;
        slow.end.notify_one();
        other
    };
    let (first, other) = tokio::join!(app.charge("key"), other);
    assert_eq!(first.summary(), (201, "1", false));
    assert_eq!(other.problem(), (503, "too-many-requests".into()));
    assert_eq!(other.header("retry-after"), Some("1"));
    slow.end.notify_one();
    assert_eq!(app.charge("other").await.summary(), (201, "2", false));
}

#[tokio::test]
async fn a_repeat_waits_for_the_first_if_the_gate_does() {
    let when_held = WhenHeld::Wait(Duration::from_secs(60));
    let gate = builder().when_held(when_held).open().await;
    let slow = Slow::default();
    let app = slow.app(IdempotencyLayer::new(gate.expect("a gate")));
    let repeat = async {
        slow.begun.notified().await;
        let (repeat, ()) = tokio::join!(app.charge("key"), async {
            tokio::task::yield_now().await; // the repeat is on its way
            slow.end.notify_one();
        });
        repeat
    };
    let (first, repeat) = tokio::join!(app.charge("key"), repeat);
    assert_eq!(first.summary(), (201, "1", false));
    assert_eq!(repeat.summary(), (201, "1", true));
}
