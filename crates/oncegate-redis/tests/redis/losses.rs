//! A server that forgets while it runs.

use oncegate_core::marker::{Ask, Guarantee, Operation, Verdict};
use oncegate_core::{Memory, Store, StoreError};
use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use crate::support::{DONE, GRANTED, SECOND, ask, at, claim, terms};

/// Longer than a store takes to look again.
const A_LOOK: std::time::Duration = std::time::Duration::from_millis(2_100);

fn strict(id: &str, token: u128) -> Operation {
    Operation { terms: terms(Guarantee::AtMostOnce), ..claim(id, token) }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_pauses_when_the_keys_are_gone() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let (store, accepting) = (at(&server.url()), at(&server.url()).accept_forgetful_store());
    assert_eq!(ask(&store, strict("charged", 1)).await.expect("a verdict"), GRANTED);
    assert_eq!(ask(&store, Operation { attempt: 1, ask: Ask::Complete, ..strict("charged", 1) }).await.expect("a verdict"), DONE);
    assert_eq!(ask(&store, strict("held", 1)).await.expect("a verdict"), GRANTED);
    assert_eq!(ask(&accepting, strict("other", 1)).await.expect("a verdict"), GRANTED);
    server.command("FLUSHALL").expect("a reply");
    tokio::time::sleep(A_LOOK).await;

    for _ in 0..2 {
        let paused = ask(&store, strict("charged", 2)).await;
        assert!(matches!(&paused, Err(StoreError::NotApplied(why)) if why.to_string().contains("accept_loss")), "{paused:?}");
    }
    assert_eq!(server.command("EXISTS processed:charged").expect("a reply"), ":0", "nothing was sent");
    // What runs is brought to its end, and who promised less goes on.
    let end = Operation { attempt: 1, ask: Ask::Complete, ..strict("held", 1) };
    assert_eq!(ask(&store, end).await.expect("a verdict"), Verdict::Done { marker_lost: true });
    assert_eq!(ask(&store, claim("other terms", 1)).await.expect("a verdict"), GRANTED);
    assert_eq!(ask(&accepting, strict("charged too", 2)).await.expect("a verdict"), GRANTED);

    store.clone().accept_loss().await;
    assert_eq!(ask(&store, strict("charged", 2)).await.expect("a verdict"), GRANTED);
}

/// Nobody waits for the next look: who connects anew looks first.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_without_its_keys_is_asked_for_nothing_at_most_once() {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(ask(&store, strict("charged", 1)).await.expect("a verdict"), GRANTED);
    assert_eq!(ask(&store, Operation { attempt: 1, ask: Ask::Complete, ..strict("charged", 1) }).await.expect("a verdict"), DONE);
    server.kill();
    server.start_again().expect("it starts again");
    let deadline = std::time::Instant::now() + 20 * SECOND;
    loop {
        match ask(&store, strict("charged", 2)).await {
            Err(StoreError::NotApplied(why)) if why.to_string().contains("accept_loss") => break,
            Err(StoreError::NotApplied(_) | StoreError::Unknown(_)) => assert!(std::time::Instant::now() < deadline, "never told"),
            granted => panic!("{granted:?}"),
        }
    }
    assert_eq!(server.command("EXISTS processed:charged").expect("a reply"), ":0", "nothing was sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_that_loses_nothing_pauses_nothing() {
    let mut server = RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EveryWrite)).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(ask(&store, strict("k", 1)).await.expect("a verdict"), GRANTED);
    server.kill();
    server.start_again().expect("it starts again");
    tokio::time::sleep(A_LOOK).await;
    assert!(matches!(crate::forms::healed(&store, strict("k", 2)).await, Verdict::Busy { .. }));
    assert_eq!(crate::forms::healed(&store, strict("l", 1)).await, GRANTED);
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_that_are_rolled_back_are_noticed() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(ask(&store, strict("k", 1)).await.expect("a verdict"), GRANTED);
    let before = server.reply("GET processed:!canary").expect("a reply").lines().nth(1).expect("a value").to_owned();
    tokio::time::sleep(A_LOOK).await;
    assert_eq!(ask(&store, strict("l", 1)).await.expect("a verdict"), GRANTED);
    // As a replica that lagged behind has it.
    server.command(&format!("SET processed:!canary \"{}\"", before.trim_end_matches('1').to_owned() + "0")).expect("a reply");
    tokio::time::sleep(A_LOOK).await;
    let paused = ask(&store, strict("m", 1)).await;
    assert!(matches!(&paused, Err(StoreError::NotApplied(why)) if why.to_string().contains("last writes")), "{paused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_keys_are_noticed() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(ask(&store, strict("k", 1)).await.expect("a verdict"), GRANTED);
    server.command("CONFIG SET maxmemory-policy allkeys-random").expect("a reply");
    for it in 0..200 {
        server.command(&format!("SET filling{it} {}", "x".repeat(10_000))).expect("a reply");
    }
    let used: u64 = server
        .reply("INFO memory")
        .expect("a reply")
        .lines()
        .find_map(|line| line.strip_prefix("used_memory:")?.parse().ok())
        .expect("a number");
    server.command(&format!("CONFIG SET maxmemory {}", used - 500_000)).expect("a reply");
    server.command("SET one more").expect("a reply");
    tokio::time::sleep(A_LOOK).await;
    let paused = ask(&store, strict("m", 1)).await;
    // The canary may be among them.
    let told = |why: &str| why.contains("evicted") || why.contains("canary");
    assert!(matches!(&paused, Err(StoreError::NotApplied(why)) if told(&why.to_string())), "{paused:?}");
    let memory = store.memory().await;
    assert!(matches!(&memory, Ok(Memory::Forgets(why)) if why.contains("allkeys-random")), "{memory:?}");
}

#[tokio::test]
async fn a_right_that_is_missing_is_told_at_start() {
    let server = RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond)).expect("a Redis");
    server.command("ACL SETUSER poor on nopass ~processed:* -@all +set +get +del +pttl +eval +evalsha +info +hello").expect("a reply");
    let logged = crate::support::Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(logged.clone()).with_ansi(false).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let store = at(&format!("redis://poor:x@127.0.0.1:{}", server.port())).timeout(5 * SECOND);
    assert!(matches!(store.memory().await, Ok(Memory::Survives(_))));
    let lines = logged.text();
    let told: Vec<&str> = lines.lines().filter(|line| line.contains("it refuses")).collect();
    assert!(told.len() == 1 && told[0].contains("PEXPIRE") && told[0].contains("NOPERM"), "{lines}");
}
