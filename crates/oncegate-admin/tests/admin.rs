//! The admin port, tested by a real client while consumers run in memory.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, mpsc};
use std::time::{Duration, Instant};

use oncegate::marker::{Guarantee, Operation, Verdict};
use oncegate::*;
use oncegate_admin::{Admin, AdminServer, LastErrors, PORT};
use oncegate_testkit::servers::{RedisOptions, RedisServer};
use serde_json::Value;
use tokio::sync::Semaphore;
use tracing_subscriber::layer::SubscriberExt;

/// Part of every text that must not be on a page: payload, header, key, error text of a handler.
const CANARY: &str = "secret-canary";

const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

/// The log of this process.
static LOGGED: LazyLock<LastErrors> = LazyLock::new(|| {
    let errors = LastErrors::new();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(errors.clone()))
        .expect("the only one");
    errors
});

/// Waits for a permit for the id `waits`, and rejects the id `refused`.
struct TestHandler(Arc<Semaphore>);

impl Handler for TestHandler {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        match cx.id() {
            "waits" => drop(self.0.acquire().await.retry()?),
            "refused" => return Err(format!("the card {CANARY} was refused")).reject(),
            _ => {}
        }
        Ok(())
    }
}

/// A store that can become unavailable.
#[derive(Clone, Default)]
struct SwitchableStore {
    store: MemoryStore,
    is_unavailable: Arc<AtomicBool>,
}

#[async_trait]
impl Store for SwitchableStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.is_unavailable.load(Ordering::SeqCst) {
            return operations
                .iter()
                .map(|_| Err(StoreError::NotApplied("the network is down".into())))
                .collect();
        }
        self.store.apply(operations).await
    }
}

fn message(id: &str) -> Message {
    Message::new(format!("body {CANARY}"))
        .with_message_id(id.to_owned())
        .with_header("authorization", CANARY)
        .with_key(CANARY)
}

async fn get(server: &AdminServer, path: &str) -> (u16, String) {
    let answer = reqwest::get(format!("http://{}{path}", server.address()))
        .await
        .expect("it answers");
    (answer.status().as_u16(), answer.text().await.expect("text"))
}

async fn page(server: &AdminServer) -> Value {
    let (status, text) = get(server, "/status").await;
    assert_eq!(status, 200);
    assert!(!text.contains(CANARY), "{text}");
    serde_json::from_str(&text).expect("JSON")
}

/// Polls until there is a result.
async fn until<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            match poll().await {
                Some(found) => return found,
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), found)
        .await
        .unwrap_or_else(|_| panic!("timed out: {what}"))
}

async fn until_ready_answers(server: &AdminServer, status: u16) {
    until(&format!("/ready answers {status}"), async || {
        (get(server, "/ready").await.0 == status).then_some(())
    })
    .await;
}

#[tokio::test]
async fn ready_follows_the_consumer_and_live_does_not() {
    let (broker, store, readiness, status) = (
        MemoryBroker::new("payments"),
        SwitchableStore::default(),
        Readiness::new(),
        ConsumerStatus::new(),
    );
    let server = Admin::new()
        .listen(ANY_PORT)
        .consumer("ledger", readiness.clone(), status.clone())
        .serve()
        .expect("it opens");
    assert_eq!(
        get(&server, "/ready").await,
        (503, "not ready\n".to_owned()),
        "no consumer has started"
    );
    assert_eq!(get(&server, "/live").await.0, 200);

    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(TestHandler(Arc::new(Semaphore::new(0))))
        .readiness(readiness)
        .status(status);
    let running = tokio::spawn(consumer.run_until(async move {
        let _ = stopped.await; // fails if the test has ended
    }));
    until_ready_answers(&server, 200).await;

    store.is_unavailable.store(true, Ordering::SeqCst);
    broker.publish(message("one"));
    until_ready_answers(&server, 503).await;
    let store_view = page(&server).await["consumers"][0]["store"].clone();
    assert_eq!(
        (&store_view["name"], &store_view["state"]),
        (&"admin::SwitchableStore".into(), &"unavailable".into()),
        "a store without a name of its own"
    );
    assert_eq!(
        store_view["last_error"]["text"],
        "the network is down (the store did not apply the operation; a retry is safe)"
    );
    assert_eq!(
        get(&server, "/live").await,
        (200, "live\n".to_owned()),
        "an unavailable store does not affect /live"
    );

    store.is_unavailable.store(false, Ordering::SeqCst);
    until_ready_answers(&server, 200).await;
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(
        get(&server, "/ready").await.0,
        503,
        "the consumer has ended"
    );
}

#[tokio::test]
async fn status_shows_deliveries_and_warnings_without_secrets() {
    let errors = LOGGED.clone();
    let (broker, readiness, status, permits) = (
        MemoryBroker::new("payments"),
        Readiness::new(),
        ConsumerStatus::new(),
        Arc::new(Semaphore::new(0)),
    );
    let server = Admin::new()
        .listen(ANY_PORT)
        .consumer("ledger", readiness.clone(), status.clone())
        .consumer("never started", Readiness::new(), ConsumerStatus::new())
        .last_errors(errors)
        .serve()
        .expect("it opens");
    for id in ["waits", "refused"] {
        broker.publish(message(id));
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .guarantee(Guarantee::EffectivelyOnce)
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(TestHandler(permits.clone()))
        .readiness(readiness)
        .status(status);
    let all = broker.clone();
    let running = tokio::spawn(consumer.run_until(async move { all.all_settled().await }));

    let warning = "message rejected, sending it to the dead letters";
    let page = until("one delivery is running and one is rejected", async || {
        let page = page(&server).await;
        let warnings: Vec<String> = page["last_errors"]
            .as_array()?
            .iter()
            .map(|it| it["text"].to_string())
            .collect();
        let is_expected = page["consumers"][0]["in_flight"] == 1
            && warnings
                .iter()
                .any(|it| it.contains(warning) && it.contains("refused"));
        is_expected.then_some(page)
    })
    .await;
    let consumers = page["consumers"].as_array().expect("a list");
    assert_eq!(
        (
            &page["ready"],
            &consumers[0]["ready"],
            &consumers[1]["ready"]
        ),
        (&false.into(), &true.into(), &false.into())
    );
    assert_eq!(
        (&consumers[0]["name"], &consumers[1]["name"]),
        (&"ledger".into(), &"never started".into())
    );
    assert_eq!(
        (&consumers[0]["store"]["name"], &consumers[1]["store"]),
        (&"the memory of this process".into(), &Value::Null)
    );
    let oldest = &consumers[0]["oldest"][0];
    let expected = [
        ("id", Value::from("waits")),
        ("from", "payments".into()),
        ("state", "handling".into()),
        ("attempt", 1.into()),
    ];
    for (field, value) in expected {
        assert_eq!(oldest[field], value, "{field} of {oldest}");
    }
    assert!(
        oldest["seconds"].as_f64().is_some_and(|it| it >= 0.0),
        "{oldest}"
    );

    permits.add_permits(1);
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(self::page(&server).await["consumers"][0]["in_flight"], 0);
}

/// The URL of the store contains the password: `page` checks that it is not shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_shows_when_the_store_is_unavailable_and_back() {
    let mut redis = RedisServer::start(RedisOptions::new().password(CANARY)).expect("Redis starts");
    assert!(redis.url().contains(CANARY));
    let (broker, status) = (MemoryBroker::new("payments"), ConsumerStatus::new());
    let server = Admin::new()
        .listen(ANY_PORT)
        .consumer("ledger", Readiness::new(), status.clone())
        .serve()
        .expect("it opens");
    let store = async || page(&server).await["consumers"][0]["store"].clone();
    let until_state = async |state: &str| {
        until(state, async || {
            Some(store().await).filter(|it| it["state"] == state)
        })
        .await
    };
    assert_eq!(store().await, Value::Null, "no consumer has started");

    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(Redis::at(redis.url()))
        .scope("ledger")
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(TestHandler(Arc::new(Semaphore::new(0))))
        .status(status);
    let running = tokio::spawn(consumer.run_until(async move {
        let _ = stopped.await; // fails if the test has ended
    }));
    let found = until_state("available").await;
    assert_eq!(
        (&found["name"], &found["last_error"]),
        (
            &format!("Redis at 127.0.0.1:{}", redis.port()).into(),
            &Value::Null
        )
    );
    broker.publish(message("one"));
    broker.all_settled().await;

    redis.stop();
    let stopped_store = store().await;
    assert!(
        stopped_store["state"] == "available" && stopped_store["last_answer_seconds"].is_f64(),
        "the page sends no request to the store: {stopped_store}"
    );
    broker.publish(message("two"));
    let unavailable = until_state("unavailable").await;
    let last_error = &unavailable["last_error"];
    assert!(
        unavailable["unavailable_seconds"].is_f64() && last_error["seconds_ago"].is_f64(),
        "{unavailable}"
    );
    assert!(
        last_error["text"]
            .as_str()
            .is_some_and(|it| it.contains("no connection to Redis")),
        "{unavailable}"
    );

    redis.start_again().expect("Redis starts again");
    broker.all_settled().await;
    let back = until_state("available").await;
    assert!(
        back["last_error"]["text"].is_string(),
        "the last error is kept: {back}"
    );
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(store().await, Value::Null, "the consumer has ended");
}

/// Blocks its thread until it is released.
struct BlockingHandler(std::sync::Mutex<(mpsc::Sender<()>, mpsc::Receiver<()>)>);

impl Handler for BlockingHandler {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        let (started_tx, release_rx) = &*self.0.lock().expect("it runs once");
        started_tx.send(()).expect("the test waits");
        release_rx.recv().expect("the test releases it");
        Ok(())
    }
}

#[tokio::test]
async fn the_port_responds_while_a_handler_blocks_the_runtime() {
    let (started_tx, started_rx) = mpsc::channel();
    let (release_tx, release_rx) = mpsc::channel();
    let (readiness, status) = (Readiness::new(), ConsumerStatus::new());
    let admin = Admin::new()
        .listen(ANY_PORT)
        .consumer("ledger", readiness.clone(), status.clone());
    let consuming = std::thread::spawn(move || {
        let broker = MemoryBroker::new("payments");
        broker.publish(message("blocks"));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        // Opened on the thread that the handler blocks: the port must not need it.
        runtime.block_on(async move {
            let server = admin.serve().expect("it opens");
            let all = broker.clone();
            started_tx
                .send(Err(server.address()))
                .expect("the test waits");
            let (tell, told) = mpsc::channel();
            std::thread::spawn(move || started_tx.send(Ok(told.recv())));
            Consumer::builder()
                .source(broker.source())
                .store(MemoryStore::new())
                .id(IdSource::message_id())
                .decode(RawBytes)
                .handler(BlockingHandler(std::sync::Mutex::new((tell, release_rx))))
                .readiness(readiness)
                .status(status)
                .run_until(async move { all.all_settled().await })
                .await
                .expect("a clean end");
            drop(server);
        });
    });
    let address: SocketAddr = started_rx
        .recv()
        .expect("it runs")
        .expect_err("the address comes first");
    started_rx
        .recv()
        .expect("it runs")
        .expect("the handler has started")
        .expect("the handler is blocked");
    for path in ["live", "status"] {
        let answer = reqwest::get(format!("http://{address}/{path}"))
            .await
            .expect("it answers");
        assert_eq!(answer.status(), 200, "{path}");
    }
    release_tx.send(()).expect("it waits");
    consuming.join().expect("no panic");
}

#[tokio::test]
async fn other_methods_and_paths_are_rejected() {
    let server = Admin::new().listen(ANY_PORT).serve().expect("it opens");
    let client = reqwest::Client::new();
    for (method, path, status) in [
        ("POST", "/status", 405),
        ("DELETE", "/ready", 405),
        ("GET", "/nothing", 404),
        ("GET", "/metrics", 404),
    ] {
        let request = client.request(
            method.parse().expect("a method"),
            format!("http://{}{path}", server.address()),
        );
        assert_eq!(
            request.send().await.expect("it answers").status(),
            status,
            "{method} {path}"
        );
    }
    assert_eq!(
        get(&server, "/ready").await.0,
        503,
        "without a consumer it is never ready"
    );
    let (status, start) = get(&server, "/").await;
    let listed: Vec<&str> = start
        .lines()
        .filter(|line| line.starts_with('/'))
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert_eq!(
        (status, listed),
        (200, vec!["/live", "/ready", "/status", "/metrics"]),
        "{start}"
    );
}

/// The connections that the server has not closed.
fn open_connections(connections: &mut [TcpStream]) -> usize {
    let is_open = |connection: &mut TcpStream| {
        let read = connection.read(&mut [0; 1_024]);
        read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    };
    connections
        .iter_mut()
        .map(is_open)
        .filter(|is_open| *is_open)
        .count()
}

#[tokio::test]
async fn incomplete_requests_are_bounded_and_live_answers() {
    let server = Admin::new().listen(ANY_PORT).serve().expect("it opens");
    let connect = || {
        let mut connection = TcpStream::connect(server.address()).expect("it listens");
        connection
            .write_all(b"GET /live HTTP/1.1\r\nHost: x\r\n")
            .expect("it is read");
        connection.set_nonblocking(true).expect("a socket");
        connection
    };
    let mut connections: Vec<TcpStream> = (0..300).map(|_| connect()).collect();
    let client = reqwest::Client::builder()
        .timeout(Duration::from_secs(2))
        .build()
        .expect("a client");
    let live = format!("http://{}/live", server.address());
    for _ in 0..3 {
        let answer = client.get(&live).send().await.expect("it answers");
        assert_eq!(answer.status(), 200);
    }
    until("at most 64 are open", async || {
        (open_connections(&mut connections) <= 64).then_some(())
    })
    .await;
    assert!(
        open_connections(&mut connections) > 32,
        "the newest stay open"
    );
    // The headers of a request have to arrive within five seconds.
    let began = Instant::now();
    until("none is open", async || {
        (open_connections(&mut connections) == 0).then_some(())
    })
    .await;
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn the_port_is_on_localhost_and_errors_name_the_address() {
    let (taken, local) = (
        Admin::new().serve(),
        SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)),
    );
    match taken {
        Ok(server) => assert_eq!(server.address(), local),
        Err(error) => assert!(
            error
                .to_string()
                .starts_with(&format!("the admin port {local} cannot be opened: ")),
            "{error}"
        ),
    }
    let first = Admin::new().listen(ANY_PORT).serve().expect("it opens");
    let second = Admin::new()
        .listen(first.address())
        .serve()
        .expect_err("it is taken");
    assert!(
        second.to_string().contains(&first.address().to_string())
            && second.to_string().contains("choose another address"),
        "{second}"
    );
}

#[test]
fn dropping_the_server_closes_the_port() {
    let server = Admin::new().listen(ANY_PORT).serve().expect("it opens");
    let address = server.address();
    TcpStream::connect(address).expect("it listens");
    drop(server);
    TcpStream::connect(address).expect_err("it is closed");
}
