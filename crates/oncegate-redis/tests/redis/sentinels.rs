//! Sentinels that disagree or are unreachable.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use oncegate_core::StoreError;
use oncegate_core::marker::Marker;
use oncegate_redis::Redis;
use oncegate_testkit::proxy::contains;
use oncegate_testkit::servers::{RedisOptions, RedisServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{GRANTED, SECOND, apply_one, claim, key};

/// The password of Sentinels that require one.
const PASSWORD: &str = "s3cret";

/// The behaviour of a simulated Sentinel.
#[derive(Clone, Copy)]
enum SentinelBehaviour {
    /// Names a primary at this port.
    At(u16),
    /// The same, after a login.
    AtAfterLogin(u16),
    UnknownName,
}

/// Starts a simulated Sentinel. Returns its URL and the number of queries.
async fn sentinel(behaviour: SentinelBehaviour) -> (String, Arc<AtomicU32>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!(
        "redis://one:{PASSWORD}@{}/3",
        listener.local_addr().expect("an address")
    );
    let queries = Arc::new(AtomicU32::new(0));
    let counter = queries.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(talk(client, behaviour, counter.clone()));
        }
    });
    (url, queries)
}

async fn talk(mut client: TcpStream, behaviour: SentinelBehaviour, queries: Arc<AtomicU32>) {
    let mut request = vec![0; 4096];
    let mut logged_in = false;
    while let Ok(length @ 1..) = client.read(&mut request).await {
        // Each command starts with the number of its words.
        for command in String::from_utf8_lossy(&request[..length])
            .split('*')
            .skip(1)
        {
            let is = |word: &str| contains(command.as_bytes(), word);
            let reply = match behaviour {
                // As a Sentinel does.
                _ if is("SELECT") => "-ERR unknown command 'SELECT'\r\n".into(),
                _ if is("AUTH") => {
                    logged_in = is(PASSWORD);
                    "+OK\r\n".into()
                }
                SentinelBehaviour::AtAfterLogin(_) if !logged_in => {
                    "-NOAUTH Authentication required.\r\n".into()
                }
                _ if !is("get-master-addr-by-name") => "+OK\r\n".into(),
                SentinelBehaviour::UnknownName => "*-1\r\n".into(),
                SentinelBehaviour::At(port) | SentinelBehaviour::AtAfterLogin(port) => {
                    queries.fetch_add(1, Ordering::SeqCst);
                    let port = port.to_string();
                    format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
                }
            };
            if client.write_all(reply.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}

/// A Redis server that accepts the login of the URLs.
fn redis() -> RedisServer {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    assert_eq!(
        server
            .command(&format!("ACL SETUSER one on >{PASSWORD} ~* &* +@all"))
            .expect("a reply"),
        "+OK"
    );
    server
}

/// A port without a listener.
async fn unused_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("an address").port()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_that_names_an_old_primary_is_skipped() {
    let (primary, replica) = (redis(), redis());
    replica
        .command(&format!("REPLICAOF 127.0.0.1 {}", primary.port()))
        .expect("a reply");
    for old in [unused_port().await, replica.port()] {
        let ((stale, _), (current, queries)) = (
            sentinel(SentinelBehaviour::At(old)).await,
            sentinel(SentinelBehaviour::At(primary.port())).await,
        );
        let store = Redis::sentinel([stale, current], "mymaster").timeout(5 * SECOND);
        let first = store.read_marker(&key("k")).await;
        assert!(matches!(first, Err(StoreError::NotApplied(_))), "{first:?}");
        assert!(matches!(
            store.read_marker(&key("k")).await,
            Ok(Marker::Absent)
        ));
        assert_eq!(
            apply_one(&store, claim("k", 1)).await.expect("a verdict"),
            GRANTED
        );
        // The Sentinel that named the primary is queried first from now on.
        let before = queries.load(Ordering::SeqCst);
        primary
            .command("CLIENT KILL TYPE normal SKIPME yes")
            .expect("a reply");
        assert_eq!(
            crate::sentinel_and_cluster::until_answered(&store, claim("k", 1)).await,
            GRANTED
        );
        assert!(queries.load(Ordering::SeqCst) > before);
        primary.command("FLUSHALL").expect("a reply");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_unknown_only_if_every_sentinel_reports_it() {
    let ((other_server, _), unreachable) = (
        sentinel(SentinelBehaviour::UnknownName).await,
        format!("redis://127.0.0.1:{}", unused_port().await),
    );
    for urls in [[&other_server, &unreachable], [&unreachable, &other_server]] {
        let answer = apply_one(&Redis::sentinel(urls, "mymaster"), claim("k", 1)).await;
        assert!(
            matches!(answer, Err(StoreError::NotApplied(_))),
            "{answer:?}"
        );
    }
    let answer = apply_one(
        &Redis::sentinel([&other_server, &other_server], "mymaster"),
        claim("k", 1),
    )
    .await;
    assert!(
        matches!(&answer, Err(StoreError::Misconfigured(why)) if why.to_string().contains("mymaster")),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn no_database_is_selected_on_a_sentinel_with_a_login() {
    let primary = redis();
    let (url, _) = sentinel(SentinelBehaviour::AtAfterLogin(primary.port())).await;
    let store = Redis::sentinel([url], "mymaster").timeout(5 * SECOND);
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert!(
        primary
            .reply("INFO keyspace")
            .expect("a reply")
            .contains("db3:"),
        "the primary has databases"
    );
}
