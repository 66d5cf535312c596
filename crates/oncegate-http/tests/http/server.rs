//! An axum server on a socket, and its clients.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::post;
use futures_util::{StreamExt, stream};
use oncegate_core::internal::Lock;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::support::layer;

/// Serves until the runtime of the test ends.
async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

#[derive(Default)]
struct Events {
    begun: Notify,
    disconnected: Notify,
    finish: Notify,
    calls: Lock<u32>,
}

async fn slow_charge(State(events): State<Arc<Events>>) -> (StatusCode, String) {
    *events.calls.lock() += 1;
    events.begun.notify_one();
    events.finish.notified().await;
    (StatusCode::CREATED, "charged".to_owned())
}

/// Notifies when the server drops the future of a request without a response.
async fn watch(State(events): State<Arc<Events>>, request: Request, next: Next) -> Response {
    struct Dropped(Arc<Events>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.disconnected.notify_one();
        }
    }
    let dropped = Dropped(events);
    let response = next.run(request).await;
    std::mem::forget(dropped);
    response
}

#[tokio::test]
async fn a_client_that_disconnects_does_not_lose_the_response() {
    let events = Arc::new(Events::default());
    let router = Router::new()
        .route("/charges", post(slow_charge))
        .with_state(events.clone())
        .layer(layer().await.max_in_progress(1))
        .layer(middleware::from_fn_with_state(events.clone(), watch));
    let address = serve(router).await;
    let mut client = TcpStream::connect(address).await.expect("connected");
    let request = "POST /charges HTTP/1.1\r\nhost: localhost\r\nidempotency-key: key\r\ncontent-length: 4\r\n\r\n4200";
    client.write_all(request.as_bytes()).await.expect("sent");
    events.begun.notified().await;
    drop(client);
    events.disconnected.notified().await;
    // The request is still in progress.
    let client = reqwest::Client::new();
    let other = send(&client, address, "other");
    let other = tokio::time::timeout(Duration::from_secs(10), other).await;
    let (status, ..) = other.expect("a request over the limit is refused at once");
    assert_eq!(status, 503);
    events.finish.notify_one();

    let (status, body, is_replay) = send(&reqwest::Client::new(), address, "key").await;
    assert_eq!((status, &*body, is_replay), (201, "charged", true));
    assert_eq!(*events.calls.lock(), 1);
}

/// Sends a charge until it is not answered with 409.
async fn send(client: &reqwest::Client, address: SocketAddr, key: &str) -> (u16, String, bool) {
    loop {
        let request = client.post(format!("http://{address}/charges"));
        let request = request.header("idempotency-key", key).body("4200");
        let response = request.send().await.expect("a response");
        let status = response.status().as_u16();
        if status == 409 || status == 503 && key == "key" {
            assert_eq!(response.headers()["retry-after"], "1", "{status}");
            tokio::time::sleep(Duration::from_millis(2)).await; // as a client does, but shorter
            continue;
        }
        let is_replay = response.headers().contains_key("idempotency-replayed");
        let body = response.text().await.expect("a body");
        return (status, body, is_replay);
    }
}

/// The charges of each key.
type Ledger = Arc<Lock<HashMap<String, u32>>>;

async fn charge(State(ledger): State<Ledger>, headers: HeaderMap) -> (StatusCode, String) {
    let key = headers["idempotency-key"]
        .to_str()
        .expect("ASCII")
        .to_owned();
    tokio::task::yield_now().await; // other requests run in between
    let number = {
        let mut ledger = ledger.lock();
        let charges = ledger.entry(key).or_default();
        *charges += 1;
        ledger.values().sum::<u32>()
    };
    tokio::task::yield_now().await;
    (StatusCode::CREATED, format!("charge {number}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_storm_of_repeats_each_key_is_charged_once() {
    const KEYS: usize = 2_000;
    const SENDS: usize = 5;
    let ledger = Ledger::default();
    let router = Router::new()
        .route("/charges", post(charge))
        .with_state(ledger.clone())
        .layer(layer().await);
    let address = serve(router).await;
    let client = reqwest::Client::new();
    let senders = (0..KEYS).flat_map(|key| (0..SENDS).map(move |_| format!("key-{key}")));
    let answers: Vec<(String, (u16, String, bool))> = stream::iter(senders)
        .map(|key| {
            let client = client.clone();
            tokio::spawn(async move {
                let answer = send(&client, address, &key).await;
                (key, answer)
            })
        })
        .buffer_unordered(100)
        .map(|joined| joined.expect("a sender"))
        .collect()
        .await;
    let ledger = ledger.lock();
    assert_eq!(ledger.len(), KEYS);
    assert!(ledger.values().all(|charges| *charges == 1));
    let mut by_key: HashMap<String, Vec<(u16, String, bool)>> = HashMap::new();
    for (key, answer) in answers {
        by_key.entry(key).or_default().push(answer);
    }
    for (key, answers) in by_key {
        let (status, body, _) = &answers[0];
        assert_eq!((*status, answers.len()), (201, SENDS), "{key}");
        assert!(
            answers.iter().all(|it| (&it.0, &it.1) == (status, body)),
            "{key}: {answers:?}"
        );
        let first = answers.iter().filter(|(_, _, is_replay)| !is_replay);
        assert_eq!(first.count(), 1, "{key}");
    }
}
