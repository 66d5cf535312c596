//! A server that loses data while the consumer runs.

use std::path::Path;
use std::time::Instant;

use oncegate_core::marker::{Guarantee, Operation, OperationKind, Verdict};
use oncegate_core::{Persistence, Store, StoreError};
use oncegate_redis::Redis;
use oncegate_testkit::proxy::{Proxy, RequestFault, contains};
use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use crate::support::{DONE, GRANTED, SECOND, apply_one, at, claim, terms};

/// Longer than the interval of checks.
const CHECK_INTERVAL: std::time::Duration = std::time::Duration::from_millis(2_100);

fn strict(id: &str, token: u128) -> Operation {
    Operation {
        terms: terms(Guarantee::AtMostOnce),
        ..claim(id, token)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_pauses_when_the_keys_are_lost() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let (store, accepting) = (at(&server.url()), at(&server.url()).allow_volatile_store());
    assert_eq!(
        apply_one(&store, strict("charged", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(
            &store,
            Operation {
                attempt: 1,
                kind: OperationKind::Complete,
                ..strict("charged", 1)
            }
        )
        .await
        .expect("a verdict"),
        DONE
    );
    assert_eq!(
        apply_one(&store, strict("held", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(&accepting, strict("other", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    server.command("FLUSHALL").expect("a reply");
    tokio::time::sleep(CHECK_INTERVAL).await;

    for _ in 0..2 {
        let paused = apply_one(&store, strict("charged", 2)).await;
        assert!(
            matches!(&paused, Err(StoreError::NotApplied(why)) if why.to_string().contains("accept_loss")),
            "{paused:?}"
        );
    }
    assert_eq!(
        server.command("EXISTS processed:charged").expect("a reply"),
        ":0",
        "nothing was sent"
    );
    // Granted claims complete, and other guarantees continue.
    let end = Operation {
        attempt: 1,
        kind: OperationKind::Complete,
        ..strict("held", 1)
    };
    assert_eq!(
        apply_one(&store, end).await.expect("a verdict"),
        Verdict::Done { marker_lost: true }
    );
    assert_eq!(
        apply_one(&store, claim("other terms", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(&accepting, strict("charged too", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );

    store.clone().accept_loss().await;
    assert_eq!(
        apply_one(&store, strict("charged", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

/// An operator may accept a loss before this process detects it.
#[tokio::test(flavor = "multi_thread")]
async fn a_loss_may_be_accepted_before_it_is_detected() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("charged", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    server.command("FLUSHALL").expect("a reply");
    store.accept_loss().await;
    assert_eq!(
        apply_one(&store, strict("charged", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );
    server.command("FLUSHALL").expect("a reply");
    assert!(
        refused(&store, "charged", "accept_loss").await,
        "a later loss pauses again"
    );
}

/// The canary is in the pipeline of the claims, so that detection does not wait for the next check.
#[tokio::test(flavor = "multi_thread")]
async fn claims_just_after_the_keys_are_lost_are_not_granted() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("charged", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(
            &store,
            Operation {
                attempt: 1,
                kind: OperationKind::Complete,
                ..strict("charged", 1)
            }
        )
        .await
        .expect("a verdict"),
        DONE
    );
    server.command("FLUSHALL").expect("a reply");
    let answers = store
        .apply(&[
            strict("charged", 2),
            claim("other terms", 1),
            strict("new", 3),
        ])
        .await;
    let paused = |answer: &Result<Verdict, StoreError>| match answer {
        Err(StoreError::Unknown(why) | StoreError::NotApplied(why)) => {
            why.to_string().contains("accept_loss")
        }
        _ => false,
    };
    assert!(
        paused(&answers[0]) && paused(&answers[2]) && matches!(answers[1], Ok(GRANTED)),
        "{answers:?}"
    );

    store.accept_loss().await;
    assert_eq!(
        apply_one(&store, strict("charged", 2))
            .await
            .expect("a verdict"),
        GRANTED,
        "the same claim"
    );
}

/// Restores the server's files from before `during`, like a power cut that loses unsynced writes.
/// All earlier answered writes must be in the files.
async fn lose_writes_during(server: &mut RedisServer, during: impl Future<Output = ()>) {
    let (files, kept) = (
        server.directory().join("appendonlydir"),
        server.directory().join("kept"),
    );
    let copy = |from: &Path, to: &Path| {
        std::fs::create_dir_all(to).expect("a directory");
        for file in std::fs::read_dir(from).expect("a directory").flatten() {
            std::fs::copy(file.path(), to.join(file.file_name())).expect("a copy");
        }
    };
    copy(&files, &kept);
    during.await;
    server.kill();
    copy(&kept, &files);
    server.start_again().expect("it starts again");
}

/// A loss between two checks, after which the canary has the values of the last check.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_lost_the_last_claims_pauses() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("kept", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    lose_writes_during(&mut server, async {
        assert_eq!(
            apply_one(&store, strict("charged", 1))
                .await
                .expect("a verdict"),
            GRANTED
        );
    })
    .await;
    assert!(refused(&store, "charged", "last writes").await);
    assert_eq!(
        server.command("EXISTS processed:charged").expect("a reply"),
        ":0",
        "nothing was sent"
    );
}

/// Checks increment the count as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_lost_only_checks_does_not_pause() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("kept", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    lose_writes_during(&mut server, async {
        // This performs a check.
        store.accept_loss().await;
    })
    .await;
    assert_eq!(
        crate::sentinel_and_cluster::until_answered(&store, strict("new", 1)).await,
        GRANTED
    );
}

/// If the reply to a check is lost, the next check must show the loss again.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_a_check_hides_no_loss() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let store = at(&format!("redis://127.0.0.1:{}", proxy.port()));
    assert_eq!(
        apply_one(&store, strict("kept", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    lose_writes_during(&mut server, async {
        assert_eq!(
            apply_one(&store, strict("charged", 1))
                .await
                .expect("a verdict"),
            GRANTED
        );
        proxy.inject_faults(|request| {
            if contains(request, "!canary") {
                RequestFault::LoseReply
            } else {
                RequestFault::Pass
            }
        });
    })
    .await;
    let deadline = Instant::now() + 30 * SECOND;
    while proxy.lost_replies() < 3 {
        assert!(Instant::now() < deadline, "no check");
        let answer = apply_one(&store, strict("charged", 2)).await;
        assert!(
            matches!(
                answer,
                Err(StoreError::NotApplied(_) | StoreError::Unknown(_))
            ),
            "{answer:?}"
        );
    }
    proxy.pass();
    assert!(refused(&store, "charged", "last writes").await);
    assert_eq!(
        server.command("EXISTS processed:charged").expect("a reply"),
        ":0",
        "nothing was sent"
    );
}

/// Repeats a claim until it fails for this reason.
async fn refused(store: &Redis, id: &str, says: &str) -> bool {
    let deadline = Instant::now() + 30 * SECOND;
    while Instant::now() < deadline {
        match apply_one(store, strict(id, 2)).await {
            Err(StoreError::NotApplied(why) | StoreError::Unknown(why))
                if why.to_string().contains(says) =>
            {
                return true;
            }
            Err(StoreError::NotApplied(_) | StoreError::Unknown(_)) => {
                tokio::time::sleep(SECOND / 20).await
            }
            other => panic!("{other:?}"),
        }
    }
    false
}

/// Only one of two consumers lost claims; the other cannot detect it by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_lost_claims_shows_it_to_the_others() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let (loses, other) = (at(&server.url()), at(&server.url()));
    assert_eq!(
        apply_one(&loses, strict("first", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(&other, strict("second", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    lose_writes_during(&mut server, async {
        assert_eq!(
            apply_one(&loses, strict("charged", 1))
                .await
                .expect("a verdict"),
            GRANTED
        );
    })
    .await;
    assert!(
        refused(&other, "charged", "another run_id").await,
        "it pauses after a restart, for consumers that lost writes"
    );
    assert!(refused(&loses, "charged", "last writes").await);
    assert!(refused(&other, "charged", "another consumer").await);
    // Reported once: the consumer that replaced the generation gets no second report.
    loses.accept_loss().await;
    assert_eq!(
        apply_one(&loses, strict("charged", 3))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

/// A new connection starts with a check.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_without_its_keys_gets_no_at_most_once_claims() {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("charged", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(
            &store,
            Operation {
                attempt: 1,
                kind: OperationKind::Complete,
                ..strict("charged", 1)
            }
        )
        .await
        .expect("a verdict"),
        DONE
    );
    server.kill();
    server.start_again().expect("it starts again");
    let deadline = std::time::Instant::now() + 20 * SECOND;
    loop {
        match apply_one(&store, strict("charged", 2)).await {
            Err(StoreError::NotApplied(why)) if why.to_string().contains("accept_loss") => break,
            Err(StoreError::NotApplied(_) | StoreError::Unknown(_)) => {
                assert!(std::time::Instant::now() < deadline, "never reported")
            }
            granted => panic!("{granted:?}"),
        }
    }
    assert_eq!(
        server.command("EXISTS processed:charged").expect("a reply"),
        ":0",
        "nothing was sent"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_continue_after_a_crash_that_loses_nothing() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    server.kill();
    server.start_again().expect("it starts again");
    assert!(matches!(
        crate::sentinel_and_cluster::until_answered(&store, strict("k", 2)).await,
        Verdict::Busy { .. }
    ));
    assert_eq!(
        crate::sentinel_and_cluster::until_answered(&store, strict("l", 1)).await,
        GRANTED
    );
}

/// For example after the promotion of a replica that lagged behind.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_are_rolled_back_are_detected() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    let reply = server.reply("KEYS processed:!canary:*").expect("a reply");
    let count = reply
        .lines()
        .find(|line| line.starts_with("processed:"))
        .expect("a key")
        .to_owned();
    let before = server
        .reply(&format!("GET {count}"))
        .expect("a reply")
        .lines()
        .nth(1)
        .expect("a value")
        .to_owned();
    assert_eq!(
        apply_one(&store, strict("l", 1)).await.expect("a verdict"),
        GRANTED
    );
    server
        .command(&format!("SET {count} {before}"))
        .expect("a reply");
    let paused = apply_one(&store, strict("m", 1)).await;
    let is_expected = |why: &str| why.contains("last writes") && why.contains("accept_loss");
    assert!(
        matches!(&paused, Err(StoreError::Unknown(why) | StoreError::NotApplied(why)) if is_expected(&why.to_string())),
        "{paused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_keys_are_detected() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, strict("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    server
        .command("CONFIG SET maxmemory-policy allkeys-random")
        .expect("a reply");
    for it in 0..200 {
        server
            .command(&format!("SET filling{it} {}", "x".repeat(10_000)))
            .expect("a reply");
    }
    let used: u64 = server
        .reply("INFO memory")
        .expect("a reply")
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:")?.parse().ok())
        .expect("a number");
    server
        .command(&format!("CONFIG SET maxmemory {}", used - 500_000))
        .expect("a reply");
    server.command("SET one more").expect("a reply");
    tokio::time::sleep(CHECK_INTERVAL).await;
    let paused = apply_one(&store, strict("m", 1)).await;
    // The canary may be among the evicted keys.
    let is_expected = |why: &str| why.contains("evicted") || why.contains("canary");
    assert!(
        matches!(&paused, Err(StoreError::NotApplied(why)) if is_expected(&why.to_string())),
        "{paused:?}"
    );
    let memory = store.persistence().await;
    assert!(
        matches!(&memory, Ok(Persistence::Volatile(why)) if why.contains("allkeys-random")),
        "{memory:?}"
    );
}

/// A value of another program there would otherwise make the marker of each id count as unreadable.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_value_under_the_canary_key_is_named_and_grants_nothing() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let running = at(&server.url());
    let granted = apply_one(&running, strict("before", 1)).await;
    assert_eq!(granted.expect("a verdict"), GRANTED);
    server.command("DEL processed:!canary").expect("a reply");
    server
        .command("RPUSH processed:!canary x")
        .expect("a reply");
    for store in [running, at(&server.url())] {
        let refused = apply_one(&store, strict("after", 2)).await;
        assert!(
            matches!(&refused, Err(StoreError::Misconfigured(why)) if why.to_string().contains("!canary")),
            "{refused:?}"
        );
    }
}
