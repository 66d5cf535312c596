//! A server that forgets while it runs.

use std::path::Path;
use std::time::Instant;

use oncegate_core::marker::{Ask, Guarantee, Operation, Verdict};
use oncegate_core::{Persistence, Store, StoreError};
use oncegate_redis::Redis;
use oncegate_testkit::proxy::{Fate, Proxy, holds};
use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use crate::support::{DONE, GRANTED, SECOND, ask, at, claim, terms};

/// Longer than a store takes to look again.
const A_LOOK: std::time::Duration = std::time::Duration::from_millis(2_100);

fn strict(id: &str, token: u128) -> Operation {
    Operation {
        terms: terms(Guarantee::AtMostOnce),
        ..claim(id, token)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_pauses_when_the_keys_are_gone() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let (store, accepting) = (at(&server.url()), at(&server.url()).allow_volatile_store());
    assert_eq!(
        ask(&store, strict("charged", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        ask(
            &store,
            Operation {
                attempt: 1,
                ask: Ask::Complete,
                ..strict("charged", 1)
            }
        )
        .await
        .expect("a verdict"),
        DONE
    );
    assert_eq!(
        ask(&store, strict("held", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        ask(&accepting, strict("other", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    server.command("FLUSHALL").expect("a reply");
    tokio::time::sleep(A_LOOK).await;

    for _ in 0..2 {
        let paused = ask(&store, strict("charged", 2)).await;
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
    // What runs is brought to its end, and who promised less goes on.
    let end = Operation {
        attempt: 1,
        ask: Ask::Complete,
        ..strict("held", 1)
    };
    assert_eq!(
        ask(&store, end).await.expect("a verdict"),
        Verdict::Done { marker_lost: true }
    );
    assert_eq!(
        ask(&store, claim("other terms", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        ask(&accepting, strict("charged too", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );

    store.clone().accept_loss().await;
    assert_eq!(
        ask(&store, strict("charged", 2)).await.expect("a verdict"),
        GRANTED
    );
}

/// A person who knows of the loss may say so before this process noticed it.
#[tokio::test(flavor = "multi_thread")]
async fn a_loss_may_be_accepted_before_it_was_noticed() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("charged", 1)).await.expect("a verdict"),
        GRANTED
    );
    server.command("FLUSHALL").expect("a reply");
    store.accept_loss().await;
    assert_eq!(
        ask(&store, strict("charged", 2)).await.expect("a verdict"),
        GRANTED
    );
    server.command("FLUSHALL").expect("a reply");
    assert!(
        refused(&store, "charged", "accept_loss").await,
        "the next one is another"
    );
}

/// The canary travels with the claims: nobody waits for the next look.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_claimed_just_after_the_keys_are_gone_is_not_granted() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("charged", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        ask(
            &store,
            Operation {
                attempt: 1,
                ask: Ask::Complete,
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
        ask(&store, strict("charged", 2)).await.expect("a verdict"),
        GRANTED,
        "the same claim"
    );
}

/// Puts the server's files back to what they were before `during`, as a power cut does to what was
/// not synced. All that was answered before has to be in them.
async fn losing_what_is_written(server: &mut RedisServer, during: impl Future<Output = ()>) {
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

/// A loss between two looks: the canary stands where the last look left it.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_lost_the_last_claims_pauses() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("kept", 1)).await.expect("a verdict"),
        GRANTED
    );
    losing_what_is_written(&mut server, async {
        assert_eq!(
            ask(&store, strict("charged", 1)).await.expect("a verdict"),
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

/// Looks count up as well.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_lost_looks_alone_pauses_nobody() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("kept", 1)).await.expect("a verdict"),
        GRANTED
    );
    losing_what_is_written(&mut server, async {
        // Which looks first.
        store.accept_loss().await;
    })
    .await;
    assert_eq!(
        crate::forms::healed(&store, strict("new", 1)).await,
        GRANTED
    );
}

/// Nobody read what the first look showed; the next one shows it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_look_whose_reply_is_lost_hides_no_loss() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let store = at(&format!("redis://127.0.0.1:{}", proxy.port()));
    assert_eq!(
        ask(&store, strict("kept", 1)).await.expect("a verdict"),
        GRANTED
    );
    losing_what_is_written(&mut server, async {
        assert_eq!(
            ask(&store, strict("charged", 1)).await.expect("a verdict"),
            GRANTED
        );
        proxy.judge(|request| {
            if holds(request, "!canary") {
                Fate::LoseReply
            } else {
                Fate::Pass
            }
        });
    })
    .await;
    let deadline = Instant::now() + 30 * SECOND;
    while proxy.lost_replies() < 3 {
        assert!(Instant::now() < deadline, "nobody looks");
        let answer = ask(&store, strict("charged", 2)).await;
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

/// Asks for a claim until the reason why it is not granted is this one.
async fn refused(store: &Redis, id: &str, says: &str) -> bool {
    let deadline = Instant::now() + 30 * SECOND;
    while Instant::now() < deadline {
        match ask(store, strict(id, 2)).await {
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

/// The claims of one consumer are gone, those of the other are there: it cannot know by itself.
#[tokio::test(flavor = "multi_thread")]
async fn who_lost_its_claims_tells_the_others() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let (loses, other) = (at(&server.url()), at(&server.url()));
    assert_eq!(
        ask(&loses, strict("first", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        ask(&other, strict("second", 1)).await.expect("a verdict"),
        GRANTED
    );
    losing_what_is_written(&mut server, async {
        assert_eq!(
            ask(&loses, strict("charged", 1)).await.expect("a verdict"),
            GRANTED
        );
    })
    .await;
    assert!(
        refused(&other, "charged", "another Redis process").await,
        "it waits for the others"
    );
    assert!(refused(&loses, "charged", "last writes").await);
    assert!(refused(&other, "charged", "another consumer").await);
    // Told once: the one that told is not told.
    loses.accept_loss().await;
    assert_eq!(
        ask(&loses, strict("charged", 3)).await.expect("a verdict"),
        GRANTED
    );
}

/// Nobody waits for the next look: who connects anew looks first.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_without_its_keys_is_asked_for_nothing_at_most_once() {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("charged", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        ask(
            &store,
            Operation {
                attempt: 1,
                ask: Ask::Complete,
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
        match ask(&store, strict("charged", 2)).await {
            Err(StoreError::NotApplied(why)) if why.to_string().contains("accept_loss") => break,
            Err(StoreError::NotApplied(_) | StoreError::Unknown(_)) => {
                assert!(std::time::Instant::now() < deadline, "never told")
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
async fn a_crash_that_loses_nothing_is_gone_on_after() {
    let mut server =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite))
            .expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    server.kill();
    server.start_again().expect("it starts again");
    assert!(matches!(
        crate::forms::healed(&store, strict("k", 2)).await,
        Verdict::Busy { .. }
    ));
    assert_eq!(crate::forms::healed(&store, strict("l", 1)).await, GRANTED);
}

/// A replica that lagged behind and took over under the same name, say.
#[tokio::test(flavor = "multi_thread")]
async fn writes_that_are_rolled_back_are_noticed() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    let said = server.reply("KEYS processed:!canary:*").expect("a reply");
    let count = said
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
        ask(&store, strict("l", 1)).await.expect("a verdict"),
        GRANTED
    );
    server
        .command(&format!("SET {count} {before}"))
        .expect("a reply");
    let paused = ask(&store, strict("m", 1)).await;
    let told = |why: &str| why.contains("last writes") && why.contains("accept_loss");
    assert!(
        matches!(&paused, Err(StoreError::Unknown(why) | StoreError::NotApplied(why)) if told(&why.to_string())),
        "{paused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_keys_are_noticed() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        ask(&store, strict("k", 1)).await.expect("a verdict"),
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
    tokio::time::sleep(A_LOOK).await;
    let paused = ask(&store, strict("m", 1)).await;
    // The canary may be among them.
    let told = |why: &str| why.contains("evicted") || why.contains("canary");
    assert!(
        matches!(&paused, Err(StoreError::NotApplied(why)) if told(&why.to_string())),
        "{paused:?}"
    );
    let memory = store.persistence().await;
    assert!(
        matches!(&memory, Ok(Persistence::Volatile(why)) if why.contains("allkeys-random")),
        "{memory:?}"
    );
}
