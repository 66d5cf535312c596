//! Three processes of an HTTP service, which are killed in turn, and clients that send each request
//! several times.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use oncegate_testkit::redis_url;
use redis::AsyncCommands;
use reqwest::{Client, StatusCode};
use tokio::sync::Mutex;

use crate::process::ConsumerProcess;

const SERVERS: usize = 3;
/// How often each request is sent, at the same time or later.
const COPIES: usize = 5;
const CONCURRENT: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(240);

/// The number of requests; `ONCEGATE_HTTP_KEYS` sets another one.
fn keys() -> usize {
    let variable = std::env::var("ONCEGATE_HTTP_KEYS");
    variable.map_or(1_500, |text| text.parse().expect("a number"))
}

struct TillServers {
    arguments: Vec<Vec<String>>,
    processes: Mutex<Vec<Option<ConsumerProcess>>>,
    urls: Vec<String>,
    directory: tempfile::TempDir,
}

impl TillServers {
    fn new(scope: &str, at_most_once: bool) -> Self {
        // Free ports: they are closed again before the servers open them.
        let listeners: Vec<_> = (0..SERVERS)
            .map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"))
            .collect();
        let addresses: Vec<_> = listeners
            .iter()
            .map(|it| it.local_addr().expect("an address").to_string())
            .collect();
        let redis = redis_url().unwrap_or_else(|missing| panic!("{missing}"));
        let arguments = addresses.iter().map(|address| {
            let mut all = vec![
                "--listen".into(),
                address.clone(),
                "--redis".into(),
                redis.clone(),
            ];
            all.extend(["--scope".into(), scope.to_owned()]);
            all.extend(at_most_once.then(|| "--at-most-once".into()));
            all
        });
        Self {
            arguments: arguments.collect(),
            processes: Mutex::new((0..SERVERS).map(|_| None).collect()),
            urls: addresses
                .iter()
                .map(|it| format!("http://{it}/charges"))
                .collect(),
            directory: tempfile::tempdir().expect("a directory"),
        }
    }

    /// Kills the process of this server, if it runs, and starts another.
    async fn restart(&self, which: usize) {
        let mut processes = self.processes.lock().await;
        if let Some(process) = processes[which].take() {
            process.kill();
        }
        let log = self.directory.path().join(format!("{which}.log"));
        let program = env!("CARGO_BIN_EXE_till");
        let started = ConsumerProcess::start(program, &self.arguments[which], log);
        processes[which] = Some(started);
    }
}

/// Sends a request until it has an answer: its receipt, or `None` if it is in doubt.
async fn send(client: &Client, servers: &TillServers, key: usize, copy: usize) -> Option<String> {
    for attempt in 0.. {
        let url = &servers.urls[(key + copy + attempt) % SERVERS];
        let request = client
            .post(url)
            .header("idempotency-key", format!("key-{key}"));
        if let Ok(response) = request.send().await {
            let status = response.status();
            let body = response.text().await.unwrap_or_default();
            match status {
                StatusCode::CREATED => return Some(body),
                StatusCode::INTERNAL_SERVER_ERROR if body.contains("#in-doubt") => return None,
                _ => {}
            }
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    None
}

/// Charges, receipts and answers of all keys, after servers were killed in turn.
async fn run(at_most_once: bool) {
    let scope = format!("till-{:016x}", fastrand::u64(..));
    let servers = Arc::new(TillServers::new(&scope, at_most_once));
    for which in 0..SERVERS {
        servers.restart(which).await;
    }
    let client = Client::new();
    let mut sends: Vec<(usize, usize)> = (0..keys())
        .flat_map(|key| (0..COPIES).map(move |copy| (key, copy)))
        .collect();
    // Copies of a request are near each other, so that many are sent while the first one runs.
    for chunk in sends.chunks_mut(20 * COPIES) {
        fastrand::shuffle(chunk);
    }
    let killer = tokio::spawn({
        let servers = servers.clone();
        async move {
            for kill in 0.. {
                tokio::time::sleep(Duration::from_millis(700)).await;
                servers.restart(kill % SERVERS).await;
            }
        }
    });
    let began = Instant::now();
    let answers = futures_util::stream::iter(sends)
        .map(|(key, copy)| {
            let (client, servers) = (&client, &servers);
            async move { (key, send(client, servers, key, copy).await) }
        })
        .buffer_unordered(CONCURRENT)
        .collect::<Vec<_>>();
    let answers = tokio::time::timeout(TIMEOUT, answers).await;
    killer.abort();
    let answers = answers.expect("each request gets an answer");
    let kills = began.elapsed().as_millis() / 700;

    let redis = redis::Client::open(redis_url().expect("Redis")).expect("a URL");
    let mut redis = redis
        .get_multiplexed_async_connection()
        .await
        .expect("Redis");
    let charges: HashMap<String, u64> = redis
        .hgetall(format!("{scope}:charges"))
        .await
        .expect("charges");
    let mut receipts: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    let mut in_doubt = BTreeSet::new();
    for (key, answer) in answers {
        match answer {
            Some(receipt) => drop(receipts.entry(key).or_default().insert(receipt)),
            None => drop(in_doubt.insert(key)),
        }
    }
    for key in 0..keys() {
        let charged = charges.get(&format!("key-{key}")).copied().unwrap_or(0);
        let answers = receipts.get(&key).map_or(0, BTreeSet::len);
        assert!(
            answers <= 1,
            "key {key} has several answers: {:?}",
            receipts[&key]
        );
        if at_most_once {
            assert!(charged <= 1, "key {key} is charged {charged} times");
            assert!(
                answers == 0 || charged == 1 && !in_doubt.contains(&key),
                "key {key}"
            );
        } else {
            assert!(
                charged >= 1 && answers == 1,
                "key {key}: {charged} charges, {answers} answers"
            );
        }
    }
    if !at_most_once {
        assert_eq!(in_doubt.len(), 0);
    }
    // A server that is killed leaves the requests in doubt that it was processing.
    assert!(
        in_doubt.len() as u128 <= kills * CONCURRENT as u128,
        "{}",
        in_doubt.len()
    );
    let repeated = charges.values().filter(|count| **count > 1).count();
    println!(
        "{} keys, {COPIES} copies, {kills} kills in {:?}: {} in doubt, {repeated} charged again with the receipt of the first charge",
        keys(),
        began.elapsed(),
        in_doubt.len()
    );
    assert!(kills >= 3, "only {kills} kills");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_each_key_is_charged_once_or_in_doubt() {
    run(true).await;
}

/// The service may be called again after a crash, and its effect can be repeated.
#[tokio::test(flavor = "multi_thread")]
async fn effectively_once_each_caller_gets_the_same_receipt() {
    run(false).await;
}
