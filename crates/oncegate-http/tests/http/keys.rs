//! Which requests the layer processes, and which of them are the same request.

use axum::body::Body;
use axum::http::{Method, Request};
use oncegate_http::IdempotencyLayer;

use crate::support::{App, builder, charge, layer};

fn request(method: Method, path: &str, body: &'static str) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    let request = request.header("idempotency-key", "key");
    request.body(Body::from(body)).expect("a request")
}

#[tokio::test]
async fn post_and_patch_are_processed_and_other_methods_are_not() {
    let app = App::numbered(layer().await);
    for method in [Method::GET, Method::PUT, Method::DELETE] {
        let calls = app.calls();
        for call in [calls + 1, calls + 2] {
            let answer = app.send(request(method.clone(), "/charges", "")).await;
            assert_eq!(
                answer.summary(),
                (201, &*call.to_string(), false),
                "{method}"
            );
        }
    }
    for method in [Method::POST, Method::PATCH] {
        let app = App::numbered(layer().await);
        for is_replay in [false, true] {
            let answer = app.send(request(method.clone(), "/charges", "")).await;
            assert_eq!(answer.summary(), (201, "1", is_replay), "{method}");
        }
    }
    let app = App::numbered(layer().await.methods([Method::PUT]));
    for (method, calls) in [
        (Method::PUT, 1),
        (Method::PUT, 1),
        (Method::POST, 2),
        (Method::POST, 3),
    ] {
        app.send(request(method, "/charges", "")).await;
        assert_eq!(app.calls(), calls);
    }
}

#[tokio::test]
async fn a_missing_key_passes_through_or_is_refused() {
    let without_key = || {
        Request::post("/charges")
            .body(Body::empty())
            .expect("a request")
    };
    let app = App::numbered(layer().await);
    for call in ["1", "2"] {
        assert_eq!(app.send(without_key()).await.summary(), (201, call, false));
    }
    let app = App::numbered(layer().await.required());
    let refused = app.send(without_key()).await;
    assert_eq!(refused.problem(), (400, "missing-key".into()));
    assert_eq!(app.calls(), 0);
    let get = Request::get("/charges")
        .body(Body::empty())
        .expect("a request");
    assert_eq!(app.send(get).await.summary(), (201, "1", false));
}

#[tokio::test]
async fn a_malformed_key_is_refused() {
    let app = App::numbered(layer().await);
    for key in [
        "",
        "\"\"",
        "a b",
        "\"a",
        "\"a\"b",
        "caf\u{e9}",
        &"a".repeat(256),
    ] {
        let answer = app.charge(key).await;
        assert_eq!(answer.problem(), (400, "malformed-key".into()), "{key}");
    }
    let mut several = charge("a");
    let other = "b".parse().expect("a header value");
    several.headers_mut().append("idempotency-key", other);
    let answer = app.send(several).await;
    assert_eq!(answer.problem(), (400, "malformed-key".into()));
    assert_eq!(app.calls(), 0);
    assert_eq!(app.charge(&"a".repeat(255)).await.status, 201);

    let app = App::numbered(layer().await.max_key_bytes(3));
    assert_eq!(app.charge("abcd").await.status, 400);
    assert_eq!(app.charge("abc").await.status, 201);
}

#[tokio::test]
async fn a_quoted_key_equals_the_bare_one() {
    let app = App::numbered(layer().await);
    assert_eq!(
        app.charge("\"8e03978e\"").await.summary(),
        (201, "1", false)
    );
    assert_eq!(app.charge("8e03978e").await.summary(), (201, "1", true));
}

#[tokio::test]
async fn another_request_with_the_same_key_is_refused() {
    let app = App::numbered(layer().await);
    let first = || request(Method::POST, "/charges?a=1", "4200");
    assert_eq!(app.send(first()).await.summary(), (201, "1", false));
    for other in [
        request(Method::POST, "/charges?a=1", "9900"),
        request(Method::POST, "/charges?a=2", "4200"),
        request(Method::POST, "/charges?a=14", "200"),
        request(Method::POST, "/charges", "4200"),
        request(Method::POST, "/refunds?a=1", "4200"),
        request(Method::PATCH, "/charges?a=1", "4200"),
    ] {
        let answer = app.send(other).await;
        assert_eq!(answer.problem(), (422, "other-request".into()));
    }
    assert_eq!(app.send(first()).await.summary(), (201, "1", true));
    assert_eq!(app.calls(), 1);
}

#[tokio::test]
async fn equal_keys_of_two_tenants_are_different_keys() {
    let layer = IdempotencyLayer::new(builder().open().await.expect("a gate"));
    let layer = layer.scope_by(|parts| parts.headers.get("x-tenant").cloned());
    let app = App::numbered(layer);
    let charge_of = |tenant: &str, key: &str| {
        let mut request = charge(key);
        let tenant = tenant.parse().expect("a header value");
        request.headers_mut().insert("x-tenant", tenant);
        app.send(request)
    };
    assert_eq!(charge_of("a", "bc").await.summary(), (201, "1", false));
    assert_eq!(charge_of("ab", "c").await.summary(), (201, "2", false));
    assert_eq!(charge_of("b", "bc").await.summary(), (201, "3", false));
    assert_eq!(charge_of("a", "bc").await.summary(), (201, "1", true));
    for anonymous in [app.charge("bc").await, charge_of("", "bc").await] {
        assert_eq!(anonymous.problem(), (400, "missing-scope".into()));
    }
    assert_eq!(app.calls(), 3);
}
