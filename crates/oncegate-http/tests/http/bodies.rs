//! Bodies of requests and responses: limits, streams, trailers.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, Request, Response};
use futures_util::future::ready;
use futures_util::stream;
use http_body::{Body as _, Frame};
use oncegate_core::marker::Guarantee;
use oncegate_http::{BufferedBody, IdempotencyLayer};
use tower::{Layer, ServiceExt, service_fn};

use crate::support::{Answer, App, BOTH, builder, charge, layer, layer_with};

/// A body of these frames, with an unknown size.
struct Frames(Vec<Result<Frame<Bytes>, io::Error>>);

fn frames(frames: impl IntoIterator<Item = Result<Frame<Bytes>, io::Error>>) -> Body {
    let mut frames: Vec<_> = frames.into_iter().collect();
    frames.reverse();
    Body::new(Frames(frames))
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(self.0.pop())
    }
}

fn text(text: &'static str) -> Result<Frame<Bytes>, io::Error> {
    Ok(Frame::data(Bytes::from_static(text.as_bytes())))
}

fn with_body(body: Body) -> Request<Body> {
    charge("key").map(|_| body)
}

#[tokio::test]
async fn the_service_receives_the_request_unchanged() {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-trailer", HeaderValue::from_static("a"));
    let sent = trailers.clone();
    let service = layer()
        .await
        .layer(service_fn(move |request: Request<BufferedBody<Body>>| {
            let sent = sent.clone();
            async move {
                assert_eq!(request.uri(), "/charges?a=1");
                assert_eq!(request.headers()["x-header"], "a");
                assert_eq!(request.extensions().get(), Some(&7_u8));
                let mut body = request.into_body();
                let mut data = Vec::new();
                let mut trailers = None;
                while let Some(frame) = next(&mut body).await {
                    match frame.expect("a frame").into_data() {
                        Ok(bytes) => data.extend(bytes),
                        Err(frame) => trailers = frame.into_trailers().ok(),
                    }
                }
                assert!(body.is_end_stream());
                assert_eq!((&data[..], trailers), (&b"4200"[..], Some(sent)));
                Ok::<_, io::Error>(Response::new(Body::empty()))
            }
        }));
    let request = Request::post("/charges?a=1").header("x-header", "a");
    let request = request.header("idempotency-key", "key").extension(7_u8);
    let body = frames([text("42"), text("00"), Ok(Frame::trailers(trailers))]);
    let response = service
        .oneshot(request.body(body).expect("a request"))
        .await;
    assert_eq!(response.expect("a response").status(), 200);
}

async fn next(body: &mut BufferedBody<Body>) -> Option<Result<Frame<Bytes>, axum::Error>> {
    std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

#[tokio::test]
async fn a_request_body_over_the_limit_is_refused() {
    let app = App::numbered(layer().await.max_request_bytes(4));
    for body in [Body::from("12345"), frames([text("123"), text("45")])] {
        let answer = app.send(with_body(body)).await;
        assert_eq!(answer.problem(), (413, "request-too-large".into()));
    }
    let broken = frames([text("12"), Err(io::Error::other("broken off"))]);
    let answer = app.send(with_body(broken)).await;
    assert_eq!(answer.problem(), (400, "unreadable-body".into()));
    assert_eq!(app.calls(), 0);
    let fits = || frames([text("123"), text("4")]);
    assert_eq!(
        app.send(with_body(fits())).await.summary(),
        (201, "1", false)
    );
    assert_eq!(
        app.send(with_body(fits())).await.summary(),
        (201, "1", true)
    );
}

#[tokio::test]
async fn a_response_over_the_limit_is_sent_and_not_stored() {
    for guarantee in BOTH {
        // The limit is that of the encoded response: a body of 100 bytes does not fit, either.
        for length in [1000, 100] {
            let gate = builder().guarantee(guarantee).max_result_bytes(100);
            let layer = IdempotencyLayer::new(gate.open().await.expect("a gate"));
            let app = App::new(layer, move |_| ready("x".repeat(length)));
            let first = app.charge("key").await;
            assert_eq!((first.status, first.body.len()), (200, length));
            let repeat = app.charge("key").await;
            assert_eq!(repeat.problem(), (409, "response-not-stored".into()));
            assert_eq!(app.calls(), 1);
        }
    }
}

/// The head is sent before the stream ends, which may be never.
#[tokio::test]
async fn an_event_stream_is_sent_at_once_and_not_stored() {
    let app = App::new(layer().await, |_| {
        let endless = Body::from_stream(stream::pending::<Result<Bytes, io::Error>>());
        ready(([("content-type", "Text/Event-Stream")], endless))
    });
    let first = app.router.clone().oneshot(charge("key")).await;
    assert_eq!(first.expect("a response").status(), 200);
    let repeat = app.charge("key").await;
    assert_eq!(repeat.problem(), (409, "response-not-stored".into()));
}

/// The caller gets what there is of the response, and then its error.
#[tokio::test]
async fn a_response_that_breaks_off_leaves_an_unknown_outcome() {
    let app = App::new(layer().await, |_| {
        let broken = frames([text("12"), Err(io::Error::other("broken off"))]);
        ready(broken)
    });
    for call in [1, 2] {
        let response = app.router.clone().oneshot(charge("key")).await;
        let mut body = response.expect("a response").into_body();
        let mut next = async || std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
        let data = next().await.expect("a frame").expect("data");
        assert_eq!(data.into_data().expect("data"), "12");
        let error = next().await.expect("a frame").expect_err("an error");
        assert!(error.to_string().contains("broken off"), "{error}");
        assert_eq!(app.calls(), call);
    }
}

fn grpc(key: &str) -> Request<Body> {
    let mut request = charge(key);
    let content_type = HeaderValue::from_static("application/grpc");
    request.headers_mut().insert("content-type", content_type);
    request
}

#[tokio::test]
async fn the_trailers_of_grpc_are_replayed_and_its_status_counts() {
    for guarantee in BOTH {
        for (status, is_stored) in [("0", true), ("9", true), ("14", false)] {
            let app = App::new(layer_with(guarantee).await, move |call| {
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static(status));
                trailers.insert("x-call", call.into());
                ready(frames([text("message"), Ok(Frame::trailers(trailers))]))
            });
            let mut calls = Vec::new();
            for _ in 0..2 {
                let response = app.router.clone().oneshot(grpc("key")).await;
                let response = response.expect("a response");
                if let Some(status) = response.headers().get("grpc-status") {
                    assert_eq!(
                        (status.as_bytes(), guarantee),
                        (&b"2"[..], Guarantee::AtMostOnce)
                    );
                    let answer = Answer::read(response).await;
                    assert!(
                        answer
                            .header("grpc-message")
                            .expect("a text")
                            .contains("Id: key")
                    );
                    continue;
                }
                let mut body = response.into_body();
                while let Some(frame) =
                    std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await
                {
                    if let Ok(trailers) = frame.expect("a frame").into_trailers() {
                        assert_eq!(trailers["grpc-status"], status);
                        calls.push(trailers["x-call"].clone());
                    }
                }
            }
            let expected: &[&str] = match (is_stored, guarantee) {
                (true, _) => &["1", "1"],
                (false, Guarantee::AtMostOnce) => &["1"],
                (false, _) => &["1", "2"],
            };
            assert_eq!(calls, expected, "{status}");
        }
    }
}

#[tokio::test]
async fn problems_are_a_status_to_grpc() {
    let app = App::numbered(layer().await);
    let answer = app.send(grpc("")).await;
    assert_eq!(
        (answer.status, answer.header("grpc-status")),
        (200, Some("3"))
    );
    assert_eq!(answer.header("content-type"), Some("application/grpc"));
    assert!(
        answer
            .header("grpc-message")
            .expect("a text")
            .contains("it is empty")
    );
    assert!(answer.body.is_empty());
}
