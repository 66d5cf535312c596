//! Claims that wait for replicas.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use oncegate_core::marker::{Guarantee, Marker, Operation, OperationKind, Terms, Verdict};
use oncegate_core::{Store, StoreError};
use oncegate_redis::{Durability, Redis};
use oncegate_testkit::servers::{
    RedisOptions, RedisPersistence, RedisServer, SENTINEL_NAME, SentinelServers,
};

use crate::outages::proxy_with_changeable_target;
use crate::sentinel_and_cluster::until_answered;
use crate::support::{
    DONE, GRANTED, SECOND, apply_one, at, claim, client_of, complete, key, operation, rights,
    terms, verdicts,
};

/// With a long timeout: the machine may be busy with other tests.
const ONE_REPLICA: Durability = Durability::Replicas {
    count: 1,
    timeout: SECOND,
};

fn with_replica() -> (RedisServer, RedisServer) {
    let primary = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let replica =
        RedisServer::start(RedisOptions::new().replica_of(primary.port())).expect("a Redis");
    let deadline = Instant::now() + 30 * SECOND;
    while primary.command("WAIT 1 200").expect("a reply") != ":1" {
        assert!(Instant::now() < deadline, "the replica does not follow");
    }
    (primary, replica)
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_granted_while_the_replica_is_stopped() {
    let (primary, mut replica) = with_replica();
    assert_eq!(primary.command(&rights("+wait")).expect("a reply"), "+OK");
    let store = at(&format!(
        "redis://oncegate:PASSWORD@127.0.0.1:{}",
        primary.port()
    ))
    .durability(ONE_REPLICA);
    let short_lease_terms = Terms {
        lease: Duration::from_millis(1),
        ..terms(Guarantee::AtMostOnce)
    };
    let abandoned = Operation {
        terms: short_lease_terms,
        ..claim("abandoned", 1)
    };
    for id in ["k", "own", "done"] {
        assert_eq!(until_answered(&store, claim(id, 1)).await, GRANTED);
    }
    // A repeated claim would find its lease expired.
    let _ = store.apply(std::slice::from_ref(&abandoned)).await;
    assert_eq!(verdicts(&store, &[complete("done", 1, 1)]).await, [DONE]);

    replica.freeze();
    let mut requests: Vec<Operation> = (0..20).map(|it| claim(&format!("new{it}"), it)).collect();
    // A repeated claim and a doubt that is taken over: both let something run.
    requests.push(claim("own", 1));
    requests.push(Operation {
        token: oncegate_core::marker::Token(2),
        ..abandoned
    });
    for (operation, answer) in requests.iter().zip(store.apply(&requests).await) {
        let is_expected = matches!(&answer, Err(StoreError::Unknown(why)) if why.to_string().contains("0 of the 1 required replicas"));
        assert!(is_expected, "{operation:?}: {answer:?}");
    }
    // A partitioned primary must not renew leases that others take over on the new primary.
    let renewal = |guarantee| operation("own", OperationKind::Renew, 1, 1, terms(guarantee));
    let answer = apply_one(&store, renewal(Guarantee::AtMostOnce)).await;
    assert!(
        matches!(&answer, Err(StoreError::Unknown(why)) if why.to_string().contains("0 of the 1 required replicas")),
        "{answer:?}"
    );
    assert_eq!(
        apply_one(&store, renewal(Guarantee::EffectivelyOnce))
            .await
            .expect("a verdict"),
        Verdict::Applied,
        "effectively once renews without waiting"
    );
    // Verdicts that let nothing run are returned, and other operations do not wait for replicas.
    let answers = store
        .apply(&[claim("k", 2), claim("done", 2), complete("k", 1, 1)])
        .await;
    assert!(
        matches!(
            answers[..],
            [Ok(Verdict::Busy { .. }), Ok(Verdict::Duplicate), Ok(DONE)]
        ),
        "{answers:?}"
    );

    replica.thaw();
    for operation in &requests[..21] {
        assert_eq!(
            until_answered(&store, operation.clone()).await,
            GRANTED,
            "the same token is the same claim: {operation:?}"
        );
    }
    assert!(matches!(
        until_answered(&store, requests[21].clone()).await,
        Verdict::InDoubt { .. }
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_replicas_grant_nothing_and_bare_does_not_wait() {
    let (primary, _replica) = with_replica();
    let store = at(&primary.url()).durability(Durability::Replicas {
        count: 2,
        timeout: SECOND / 20,
    });
    let answer = apply_one(&store, claim("k", 1)).await;
    assert!(
        matches!(&answer, Err(StoreError::Unknown(why)) if why.to_string().contains("of the 2 required replicas")),
        "{answer:?}"
    );
    let bare = Operation {
        terms: terms(Guarantee::Bare),
        ..claim("bare", 1)
    };
    assert_eq!(apply_one(&store, bare).await.expect("a verdict"), GRANTED);
}

/// Claims new ids, cuts the replication and kills the primary. Returns the number of grants, and how
/// many of them the new primary lacks.
async fn failover(durability: Durability) -> (usize, usize) {
    let mut servers = SentinelServers::start().expect("Redis and Sentinels");
    let store = Redis::sentinel(servers.urls(), SENTINEL_NAME)
        .timeout(2 * SECOND)
        .durability(durability);
    let mut granted = Vec::new();
    let mut next = 0_u128;
    let old = servers.primary();
    for linked in [true, false] {
        if !linked {
            servers.cut_replication().expect("cut");
        }
        let until = Instant::now() + 2 * SECOND;
        while Instant::now() < until {
            let batch: Vec<Operation> = (next..next + 50)
                .map(|it| claim(&format!("k{it}"), it))
                .collect();
            next += 50;
            for (operation, answer) in batch.iter().zip(store.apply(&batch).await) {
                match answer {
                    Ok(GRANTED) => granted.push(operation.key.clone()),
                    Ok(other) => panic!("{other:?}"),
                    Err(error) => {
                        assert!(!matches!(error, StoreError::Misconfigured(_)), "{error}")
                    }
                }
            }
        }
    }
    servers.redis_mut(old).kill();
    servers.wait_for_failover(old).expect("a failover");
    // The store finds the new primary by itself.
    until_answered(&store, complete("found", 1, 1)).await;
    let new = servers.primary();
    let mut raw = client_of(&servers.redis()[new].url()).await;
    let mut lost = 0;
    for some in granted.chunks(1_000) {
        let keys: Vec<String> = some
            .iter()
            .map(|key| format!("processed:{}", key.as_str()))
            .collect();
        let known: usize = redis::cmd("EXISTS")
            .arg(keys)
            .query_async(&mut raw)
            .await
            .expect("an answer");
        lost += some.len() - known;
    }
    (granted.len(), lost)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_loses_no_grant_that_a_replica_acknowledged() {
    let (granted, lost) = failover(ONE_REPLICA).await;
    println!("with one replica: {lost} of {granted} grants lost");
    assert!(granted > 1_000 && lost == 0, "{lost} of {granted} lost");
    // The control: without replicas the failover loses the grants after the cut.
    let (granted, lost) = failover(Durability::Primary).await;
    println!("without: {lost} of {granted} grants lost");
    assert!(
        lost > 1_000,
        "{lost} of {granted} lost: too few to prove anything"
    );
}

/// Claims without enough replicas were not granted, so losing them is not a loss of data.
#[tokio::test(flavor = "multi_thread")]
async fn at_most_once_continues_after_a_failover_that_lost_no_grant() {
    let (mut primary, replica) = with_replica();
    let (url, target_port) = proxy_with_changeable_target(&primary).await;
    let store = at(&url).durability(ONE_REPLICA);
    let strict = |id| Operation {
        terms: terms(Guarantee::AtMostOnce),
        ..claim(id, 1)
    };
    assert_eq!(until_answered(&store, strict("known")).await, GRANTED);
    // The replica becomes a separate primary.
    assert_eq!(replica.command("REPLICAOF NO ONE").expect("a reply"), "+OK");
    for _ in 0..3 {
        let unknown = apply_one(&store, strict("not granted")).await;
        assert!(
            matches!(&unknown, Err(StoreError::Unknown(why)) if why.to_string().contains("replicas")),
            "{unknown:?}"
        );
    }
    let _third =
        RedisServer::start(RedisOptions::new().replica_of(replica.port())).expect("a Redis");
    target_port.store(replica.port(), Ordering::SeqCst);
    primary.kill();
    assert_eq!(until_answered(&store, strict("new")).await, GRANTED);
    assert_eq!(
        until_answered(&store, strict("known")).await,
        GRANTED,
        "the same claim"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_ends_the_pipeline_of_claims_on_a_separate_connection() {
    let (primary, _replica) = with_replica();
    let store = at(&primary.url()).durability(ONE_REPLICA);
    verdicts(&store, &[claim("warm", 1), claim("too", 1)]).await;
    verdicts(&store, &[complete("warm", 1, 1)]).await;
    let mut monitor = crate::wire::Monitor::of(primary.port());
    let answers = verdicts(&store, &[claim("a", 1), complete("b", 1, 1), claim("c", 1)]).await;
    assert_eq!(
        answers,
        [GRANTED, Verdict::Done { marker_lost: true }, GRANTED]
    );
    let sent = monitor.lines();
    let of = |word: &str| {
        sent.iter()
            .filter(move |(_, command)| command.starts_with(&format!("\"{word}\"")))
            .collect::<Vec<_>>()
    };
    let claims: Vec<_> = sent
        .iter()
        .filter(|(_, command)| command.contains("\"NX\""))
        .collect();
    let (wait, script) = (of("WAIT"), of("EVALSHA"));
    assert_eq!(
        (claims.len(), wait.len(), script.len()),
        (2, 1, 1),
        "{sent:?}"
    );
    assert!(
        claims.iter().all(|(client, _)| *client == wait[0].0),
        "{sent:?}"
    );
    assert_ne!(script[0].0, wait[0].0, "{sent:?}");
    assert_eq!(wait[0].1, r#""WAIT" "1" "1000""#);
    let place = |command: &str| sent.iter().position(|(_, it)| it == command);
    assert!(place(&wait[0].1) > place(&claims[1].1), "{sent:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_to_wait_is_reported() {
    let server = RedisServer::start(RedisOptions::new().persistence(RedisPersistence::Nothing))
        .expect("a Redis");
    server
        .command("ACL SETUSER some on nopass ~processed:* -@all +set +get +mget +del +pttl +pexpire +eval +evalsha +info +hello")
        .expect("a reply");
    let store = at(&format!("redis://some:x@127.0.0.1:{}", server.port())).durability(ONE_REPLICA);
    let answer = apply_one(&store, claim("k", 1)).await;
    assert!(
        matches!(&answer, Err(StoreError::Misconfigured(why)) if why.to_string().contains("+wait")),
        "{answer:?}"
    );
    assert!(
        matches!(
            store.read_marker(&key("k")).await,
            Ok(Marker::InProgress(_))
        ),
        "applied; repeated with the same token it has the same result"
    );
}
