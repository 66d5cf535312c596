//! Servers that stop, freeze or have no space, and recover.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::marker::{Guarantee, Operation, OperationKind, Verdict};
use oncegate_core::{Store, StoreError};
use oncegate_redis::Redis;
use oncegate_testkit::laws;
use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{
    DONE, GRANTED, SECOND, apply_one, at, claim, client_of, complete, operation, terms, verdicts,
};

/// The longest time of any answer, with connecting, on a busy machine.
const BOUND: Duration = Duration::from_secs(8);

async fn bounded(store: &Redis, operation: Operation) -> Result<Verdict, StoreError> {
    let started = Instant::now();
    let answer = apply_one(store, operation).await;
    assert!(
        started.elapsed() < BOUND,
        "{answer:?} after {:?}",
        started.elapsed()
    );
    answer
}

/// Repeats an operation until the store returns a verdict.
async fn until_answered(store: &Redis, operation: Operation) -> Verdict {
    let deadline = Instant::now() + 30 * SECOND;
    loop {
        match bounded(store, operation.clone()).await {
            Ok(verdict) => return verdict,
            Err(error) => assert!(Instant::now() < deadline, "still {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_server_is_detected_at_once_and_reconnected() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = Redis::at(server.url());
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
    server.stop();
    let first = bounded(&store, claim("k", 2)).await;
    assert!(
        matches!(
            first,
            Err(StoreError::NotApplied(_) | StoreError::Unknown(_))
        ),
        "{first:?}"
    );
    for _ in 0..3 {
        let refused = bounded(&store, claim("k", 2)).await;
        assert!(
            matches!(&refused, Err(StoreError::NotApplied(why)) if why.to_string().contains("127.0.0.1")),
            "{refused:?}"
        );
    }
    assert!(matches!(
        store.persistence().await,
        Err(StoreError::NotApplied(_))
    ));

    server.start_again().expect("it starts again");
    assert!(matches!(
        until_answered(&store, claim("k", 2)).await,
        Verdict::Busy { .. }
    ));
    assert_eq!(until_answered(&store, complete("k", 1, 1)).await, DONE);
}

/// After each restart the store connects again, and tries again which commands the server has.
#[tokio::test(flavor = "multi_thread")]
async fn histories_are_linearizable_while_the_server_is_killed() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = Arc::new(at(&server.url()));
    laws::linearizable_while_killed(store, move || {
        server.kill();
        server.start_again().expect("it starts again");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loading_server_applies_nothing() {
    let options = RedisOptions::new().persistence(RedisPersistence::EveryWrite);
    // While loading it serves clients after every 1,024 commands, so many and slow ones are needed.
    let mut server = RedisServer::start(options.setting("key-load-delay", "250")).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
    let rest: Vec<_> = (0..10_000).map(|it| claim(&format!("k{it}"), it)).collect();
    assert_eq!(verdicts(&store, &rest).await, vec![GRANTED; 10_000]);
    server.kill();
    let starting = tokio::task::spawn_blocking(move || {
        server.start_again().expect("it starts again");
        server
    });
    let mut loading = 0;
    let deadline = Instant::now() + 30 * SECOND;
    loop {
        match bounded(&store, claim("k", 2)).await {
            Ok(verdict) => {
                assert!(matches!(verdict, Verdict::Busy { .. }), "{verdict:?}");
                break;
            }
            Err(StoreError::NotApplied(why)) => {
                loading += u32::from(why.to_string().contains("LOADING"))
            }
            Err(StoreError::Unknown(_)) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < deadline, "the server is still loading");
        tokio::time::sleep(SECOND / 20).await;
    }
    assert!(loading > 0, "no reply LOADING");
    drop(starting.await.expect("started"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_starts_later_is_found() {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    server.stop();
    let store = Redis::at(server.url());
    let all =
        futures_util::future::join_all((0..50).map(|token| bounded(&store, claim("k", token))))
            .await;
    assert!(
        all.iter()
            .all(|answer| matches!(answer, Err(StoreError::NotApplied(_)))),
        "{all:?}"
    );
    server.start_again().expect("it starts again");
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_server_means_unknown_outcomes_and_a_reconnect() {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = Redis::at(server.url()).timeout(SECOND / 5);
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
    server.freeze();
    let batch = [claim("a", 1), complete("k", 1, 1), complete("a", 1, 1)];
    let answers = store.apply(&batch).await;
    assert!(
        matches!(
            answers[..2],
            [Err(StoreError::Unknown(_)), Err(StoreError::Unknown(_))]
        ),
        "{answers:?}"
    );
    assert!(
        matches!(answers[2], Err(StoreError::NotApplied(_))),
        "the second on the same key was not sent: {answers:?}"
    );
    // After three consecutive timeouts connecting fails, so that nothing is sent. A check of the
    // loss detector counts as one of the three.
    let mut unknown = 1;
    loop {
        match bounded(&store, claim("b", 2)).await {
            Err(StoreError::Unknown(_)) => unknown += 1,
            Err(StoreError::NotApplied(_)) => break,
            answered => panic!("a frozen server answered: {answered:?}"),
        }
        assert!(
            unknown <= 3,
            "the connection is still in use after {unknown} timeouts"
        );
    }
    server.thaw();
    // Repeated with the same token, an operation of unknown outcome has the same result.
    assert_eq!(until_answered(&store, claim("a", 1)).await, GRANTED);
    assert_eq!(until_answered(&store, complete("k", 1, 1)).await, DONE);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_count_as_timeouts() {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
    server.freeze();
    for _ in 0..3 {
        let short_timeout =
            tokio::time::timeout(SECOND / 20, apply_one(&store, claim("k", 1))).await;
        assert!(
            short_timeout.is_err(),
            "a frozen server answered: {short_timeout:?}"
        );
    }
    let connecting = bounded(&store, claim("k", 1)).await;
    assert!(
        matches!(connecting, Err(StoreError::NotApplied(_))),
        "{connecting:?}"
    );
    server.thaw();
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
}

/// A proxy that forwards new connections to a server that can be changed; open connections stay.
pub(crate) async fn proxy_with_changeable_target(first: &RedisServer) -> (String, Arc<AtomicU16>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("redis://{}", listener.local_addr().expect("an address"));
    let target_port = Arc::new(AtomicU16::new(first.port()));
    let now = target_port.clone();
    tokio::spawn(async move {
        while let Ok((mut here, _)) = listener.accept().await {
            let port = now.load(Ordering::SeqCst);
            tokio::spawn(async move {
                let mut there = TcpStream::connect(("127.0.0.1", port)).await?;
                tokio::io::copy_bidirectional(&mut here, &mut there).await
            });
        }
    });
    (url, target_port)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_primary_is_found_without_a_claim() {
    let old = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let new = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let (url, target_port) = proxy_with_changeable_target(&old).await;
    let store = at(&url);
    assert_eq!(
        until_answered(&store, complete("loads the script", 1, 1)).await,
        Verdict::Done { marker_lost: true }
    );

    target_port.store(new.port(), Ordering::SeqCst);
    let mut raw = client_of(&old.url()).await;
    let _: () = redis::cmd("REPLICAOF")
        .arg("127.0.0.1")
        .arg(new.port())
        .query_async(&mut raw)
        .await
        .expect("an answer");
    // Renewals send only the script, and so does a consumer with an idle queue.
    let refused = bounded(&store, complete("k", 1, 1)).await;
    assert!(
        matches!(&refused, Err(StoreError::NotApplied(why)) if why.to_string().contains("READONLY")),
        "{refused:?}"
    );
    assert_eq!(
        bounded(&store, complete("k", 1, 1))
            .await
            .expect("the new primary"),
        Verdict::Done { marker_lost: true }
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_connection_is_replaced() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let mut raw = client_of(&server.url()).await;
    for token in 1..5 {
        assert_eq!(
            until_answered(&store, claim(&format!("k{token}"), token)).await,
            GRANTED
        );
        let _: i64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("TYPE")
            .arg("normal")
            .arg("SKIPME")
            .arg("yes")
            .query_async(&mut raw)
            .await
            .expect("an answer");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flushed_script_is_sent_again() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let mut raw = client_of(&server.url()).await;
    for token in 1..4 {
        let _: () = redis::cmd("SCRIPT")
            .arg("FLUSH")
            .query_async(&mut raw)
            .await
            .expect("an answer");
        let id = format!("k{token}");
        assert_eq!(
            verdicts(&store, &[claim(&id, token), complete(&id, token, 1)]).await,
            [GRANTED, DONE]
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_applies_nothing_but_renewals() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let mut raw = client_of(&server.url()).await;
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
    let config = |value: &'static str| {
        redis::cmd("CONFIG")
            .arg("SET")
            .arg("maxmemory")
            .arg(value)
            .to_owned()
    };
    let _: () = config("1").query_async(&mut raw).await.expect("an answer");
    for refused in [claim("new", 2), complete("k", 1, 1), claim("k", 2)] {
        let answer = bounded(&store, refused).await;
        assert!(
            matches!(&answer, Err(StoreError::NotApplied(why)) if why.to_string().contains("OOM")),
            "{answer:?}"
        );
    }
    let renew = operation(
        "k",
        OperationKind::Renew,
        1,
        1,
        terms(Guarantee::EffectivelyOnce),
    );
    assert_eq!(until_answered(&store, renew).await, Verdict::Applied);
    let _: () = config("0").query_async(&mut raw).await.expect("an answer");
    assert_eq!(until_answered(&store, complete("k", 1, 1)).await, DONE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_and_too_few_replicas_apply_nothing() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    let mut raw = client_of(&server.url()).await;
    let _: () = redis::cmd("REPLICAOF")
        .arg("127.0.0.1")
        .arg(server.port())
        .query_async(&mut raw)
        .await
        .expect("an answer");
    for refused in [claim("k", 1), complete("k", 1, 1)] {
        let answer = bounded(&store, refused).await;
        assert!(
            matches!(&answer, Err(StoreError::NotApplied(why)) if why.to_string().contains("READONLY")),
            "{answer:?}"
        );
    }
    for guarantee in [Guarantee::EffectivelyOnce, Guarantee::Bare] {
        let checked = at(&server.url()).preflight(guarantee).await;
        assert!(
            matches!(&checked, Err(StoreError::NotApplied(why)) if why.to_string().contains("is a replica")),
            "{checked:?}"
        );
    }
    let _: () = redis::cmd("REPLICAOF")
        .arg("NO")
        .arg("ONE")
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let _: () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("min-replicas-to-write")
        .arg(1)
        .query_async(&mut raw)
        .await
        .expect("an answer");
    for refused in [claim("k", 1), complete("k", 1, 1)] {
        let answer = bounded(&store, refused).await;
        assert!(
            matches!(&answer, Err(StoreError::NotApplied(why)) if why.to_string().contains("NOREPLICAS")),
            "{answer:?}"
        );
    }
    let _: () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("min-replicas-to-write")
        .arg(0)
        .query_async(&mut raw)
        .await
        .expect("an answer");
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
}

#[test]
fn renewals_connect_on_a_runtime_of_their_own() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    };
    let store = at(&server.url()).prefix("p:");
    let first = runtime();
    assert_eq!(
        first
            .block_on(apply_one(&store, claim("k", 1)))
            .expect("a verdict"),
        GRANTED
    );
    let renewals = store.for_renewals().expect("a handle");
    let renew = operation(
        "k",
        OperationKind::Renew,
        1,
        1,
        terms(Guarantee::EffectivelyOnce),
    );
    assert_eq!(
        runtime()
            .block_on(apply_one(&*renewals, renew.clone()))
            .expect("a verdict"),
        Verdict::Applied
    );
    // The runtime was dropped with the driver of the connection, which reconnects on the next
    // runtime.
    let next = runtime();
    let verdict = next.block_on(async {
        match apply_one(&*renewals, renew.clone()).await {
            Err(_) => apply_one(&*renewals, renew).await,
            answer => answer,
        }
    });
    assert_eq!(verdict.expect("a verdict"), Verdict::Applied);
    assert_eq!(
        first
            .block_on(apply_one(&store, complete("k", 1, 1)))
            .expect("a verdict"),
        DONE
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_until_it_has_room() {
    let options = RedisOptions::new()
        .persistence(RedisPersistence::EverySecond)
        .disk_may_fill();
    let server = RedisServer::start(options).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(until_answered(&store, claim("held", 1)).await, GRANTED);
    server.fill_disk().expect("it is full");
    // Redis acknowledges the first write that does not fit into the file.
    let deadline = Instant::now() + 30 * SECOND;
    for token in 0.. {
        match bounded(&store, claim(&format!("k{token}"), token)).await {
            Ok(verdict) => assert_eq!(verdict, GRANTED),
            Err(StoreError::NotApplied(why)) if why.to_string().contains("MISCONF") => break,
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < deadline, "never reported");
    }
    for refused in [claim("new", 1), complete("held", 1, 1)] {
        let answer = bounded(&store, refused).await;
        let is_expected = |why: &str| why.contains("MISCONF") && why.contains("AOF");
        assert!(
            matches!(&answer, Err(StoreError::NotApplied(why)) if is_expected(&why.to_string())),
            "{answer:?}"
        );
    }
    let memory = store.persistence().await;
    // A consumer that starts now retries: this is an outage, not a configuration.
    assert!(
        matches!(&memory, Err(StoreError::NotApplied(why)) if why.to_string().contains("check its disk")),
        "{memory:?}"
    );

    server.free_disk().expect("there is room");
    assert_eq!(until_answered(&store, complete("held", 1, 1)).await, DONE);
    assert_eq!(until_answered(&store, claim("new", 1)).await, GRANTED);
}
