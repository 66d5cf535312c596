//! Failover behind Sentinels and in a Cluster; redirections.

use std::time::{Duration, Instant};

use oncegate_core::marker::{Effect, Guarantee, Marker, Operation, OperationKind, Verdict};
use oncegate_core::{Persistence, Store, StoreError};
use oncegate_redis::Redis;
use oncegate_testkit::servers::{
    ClusterServers, RedisOptions, RedisServer, SENTINEL_NAME, SentinelServers,
};

use crate::support::{
    DONE, GRANTED, SECOND, apply_one, claim, complete, key, operation, rights, terms, verdicts,
};

/// Repeats an operation until the store returns a verdict; `Misconfigured` fails.
pub(crate) async fn until_answered(store: &Redis, operation: Operation) -> Verdict {
    let deadline = Instant::now() + 40 * SECOND;
    loop {
        match apply_one(store, operation.clone()).await {
            Ok(verdict) => return verdict,
            Err(error @ StoreError::Misconfigured(_)) => panic!("{error}"),
            Err(error) => assert!(Instant::now() < deadline, "still {error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_primary_named_by_the_sentinels_is_used() {
    let mut servers = SentinelServers::start().expect("Redis and Sentinels");
    let store = Redis::sentinel(servers.urls(), SENTINEL_NAME).timeout(2 * SECOND);
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert!(matches!(
        store.persistence().await,
        Ok(Persistence::Durable(_))
    ));
    let old = servers.primary();
    assert_eq!(
        servers.redis()[old]
            .command("WAIT 2 5000")
            .expect("a reply"),
        ":2"
    );

    let other_server = apply_one(&Redis::sentinel(servers.urls(), "unknown"), claim("k", 1)).await;
    assert!(
        matches!(&other_server, Err(StoreError::Misconfigured(why)) if why.to_string().contains("unknown")),
        "{other_server:?}"
    );

    // Killed: the connection breaks.
    servers.redis_mut(old).kill();
    let claimed = until_answered(&store, claim("k", 2)).await;
    assert!(
        matches!(claimed, Verdict::Busy { .. }),
        "the new primary knows the holder: {claimed:?}"
    );
    assert_eq!(until_answered(&store, complete("k", 1, 1)).await, DONE);
    let new = servers.wait_for_failover(old).expect("a failover");

    // Frozen: the connection stays open, and only timeouts detect it. First the old primary comes
    // back as a replica.
    servers
        .redis_mut(old)
        .start_again()
        .expect("it starts again");
    let deadline = Instant::now() + 40 * SECOND;
    while !servers.redis()[old]
        .reply("INFO replication")
        .is_ok_and(|reply| reply.contains("master_link_status:up"))
    {
        assert!(Instant::now() < deadline, "the old primary does not follow");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    servers.redis_mut(new).freeze();
    let short_timeout = Redis::sentinel(servers.urls(), SENTINEL_NAME).timeout(SECOND / 5);
    assert_eq!(
        until_answered(&store, claim("k", 3)).await,
        Verdict::Duplicate
    );
    assert_eq!(until_answered(&short_timeout, claim("l", 1)).await, GRANTED);
    servers.redis_mut(new).thaw();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_sentinel_blocks_a_claim() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    // A Redis server is not a Sentinel.
    let answer = apply_one(
        &Redis::sentinel([server.url()], SENTINEL_NAME),
        claim("k", 1),
    )
    .await;
    assert!(
        matches!(
            answer,
            Err(StoreError::NotApplied(_) | StoreError::Misconfigured(_))
        ),
        "{answer:?}"
    );
    let url = server.url();
    drop(server);
    let answer = apply_one(&Redis::sentinel([url], SENTINEL_NAME), claim("k", 1)).await;
    assert!(
        matches!(answer, Err(StoreError::NotApplied(_))),
        "{answer:?}"
    );
    let none = apply_one(
        &Redis::sentinel(Vec::<String>::new(), SENTINEL_NAME),
        claim("k", 1),
    )
    .await;
    assert!(
        matches!(none, Err(StoreError::Misconfigured(_))),
        "{none:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_sent_to_all_nodes_of_a_cluster() {
    let mut cluster = ClusterServers::start().expect("a Cluster");
    // One node is enough to discover the others.
    let store = Redis::cluster(&cluster.urls()[..1]).timeout(2 * SECOND);
    assert!(matches!(
        store.persistence().await,
        Ok(Persistence::Durable(_))
    ));

    let claims: Vec<Operation> = (0..600).map(|it| claim(&format!("k{it}"), it)).collect();
    assert_eq!(verdicts(&store, &claims).await, vec![GRANTED; 600]);
    let mixed: Vec<Operation> = (0..600)
        .map(|it| match it % 3 {
            0 => complete(&format!("k{it}"), it, 1),
            1 => claim(&format!("k{it}"), it),
            _ => claim(&format!("k{it}"), it + 1),
        })
        .collect();
    for (it, verdict) in verdicts(&store, &mixed).await.into_iter().enumerate() {
        match it % 3 {
            0 => assert_eq!(verdict, DONE),
            1 => assert_eq!(verdict, GRANTED),
            _ => assert!(matches!(verdict, Verdict::Busy { .. }), "{verdict:?}"),
        }
    }
    assert!(matches!(
        store.read_marker(&key("k0")).await,
        Ok(Marker::Done(None))
    ));
    // Several on one key keep their order.
    let clear = operation(
        "same",
        OperationKind::Clear(Effect::Nothing),
        1,
        1,
        terms(Guarantee::EffectivelyOnce),
    );
    let answers = verdicts(
        &store,
        &[
            claim("same", 1),
            clear,
            claim("same", 2),
            complete("same", 2, 1),
        ],
    )
    .await;
    assert_eq!(answers, [GRANTED, Verdict::Applied, GRANTED, DONE]);
    for node in cluster.nodes() {
        node.command("SCRIPT FLUSH").expect("a reply");
    }
    let rest: Vec<Operation> = (0..600)
        .filter(|it| it % 3 == 1)
        .map(|it| complete(&format!("k{it}"), it, 1))
        .collect();
    assert_eq!(verdicts(&store, &rest).await, vec![DONE; 200]);

    // Every node has some of the keys.
    for which in cluster.primaries() {
        let reply = cluster.nodes()[which].command("DBSIZE").expect("a reply");
        assert!(
            reply[1..].parse::<u32>().is_ok_and(|keys| keys > 100),
            "{reply}"
        );
    }

    // One of its nodes, configured as a single server, is rejected.
    let single = apply_one(&Redis::at(&cluster.urls()[0]), claim("k0", 9)).await;
    let moved = apply_one(&Redis::at(&cluster.urls()[0]), claim("k1", 9)).await;
    assert!(
        [single, moved].iter().any(|it| matches!(it, Err(StoreError::Misconfigured(why)) if why.to_string().contains("Redis::cluster")))
    );

    // A primary fails: its replica takes over its slots.
    let dead = cluster.primaries()[0];
    for which in cluster.primaries() {
        cluster.nodes()[which]
            .command("WAIT 1 5000")
            .expect("a reply");
    }
    cluster.node_mut(dead).kill();
    for it in (0..600).step_by(7) {
        let verdict = until_answered(&store, complete(&format!("k{it}"), it, 1)).await;
        assert!(
            matches!(
                verdict,
                Verdict::Done { marker_lost: false } | Verdict::Lost
            ),
            "k{it}: {verdict:?}"
        );
    }
}

/// Repeats a request until the servers can be queried.
async fn until_queried<T, F: Future<Output = Result<T, StoreError>>>(look: impl Fn() -> F) -> T {
    let deadline = Instant::now() + 40 * SECOND;
    loop {
        match look().await {
            Ok(until_queried) => return until_queried,
            Err(StoreError::NotApplied(why) | StoreError::Unknown(why)) => {
                assert!(Instant::now() < deadline, "still {why}")
            }
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_during_a_failover_finds_the_new_primary() {
    let mut cluster = ClusterServers::start().expect("a Cluster");
    let stores: Vec<Redis> = (0..3)
        .map(|_| Redis::cluster(cluster.urls()).timeout(2 * SECOND))
        .collect();
    for store in &stores {
        until_queried(|| store.preflight(Guarantee::AtMostOnce)).await;
    }
    // A primary and its replica change places.
    let slot = 12_182;
    let old = cluster.primary_of_slot(slot);
    let port_of_primary = format!("master_port:{}", cluster.nodes()[old].port());
    let says = |which: usize, what: &str| {
        cluster.nodes()[which]
            .reply("INFO replication")
            .expect("a reply")
            .contains(what)
    };
    let replica = (0..cluster.nodes().len())
        .find(|which| says(*which, &port_of_primary))
        .expect("its replica");
    assert!(
        cluster.nodes()[replica]
            .command("CLUSTER FAILOVER")
            .expect("a reply")
            .starts_with("+OK")
    );
    let deadline = Instant::now() + 40 * SECOND;
    while !says(old, "role:slave") || !says(replica, "role:master") {
        assert!(Instant::now() < deadline, "no failover");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        until_queried(|| stores[0].preflight(guarantee)).await;
    }
    let memory = until_queried(|| stores[1].persistence()).await;
    assert!(matches!(memory, Persistence::Durable(_)), "{memory:?}");
    // And with an old primary that does not reply at all.
    cluster.node_mut(old).kill();
    until_queried(|| stores[2].preflight(Guarantee::EffectivelyOnce)).await;
}

/// Effectively once does not depend on the loss detector, which checks all nodes.
#[tokio::test(flavor = "multi_thread")]
async fn effectively_once_does_not_wait_for_a_node_that_is_silent() {
    let mut cluster = ClusterServers::start().expect("a Cluster");
    let store = Redis::cluster(cluster.urls())
        .timeout(120 * SECOND)
        .prefix("");
    // Connects to every node.
    until_queried(|| store.preflight(Guarantee::EffectivelyOnce)).await;
    // `foo` is in slot 12182.
    let serves = cluster.primary_of_slot(12_182);
    let other = cluster
        .primaries()
        .into_iter()
        .find(|which| *which != serves)
        .expect("another primary");
    // On a busy machine a failover may start before the claim, and the Cluster would be down.
    assert_eq!(
        cluster.nodes()[serves]
            .command("CONFIG SET cluster-require-full-coverage no")
            .expect("a reply"),
        "+OK"
    );
    cluster.node_mut(other).freeze();
    let claimed = tokio::time::timeout(60 * SECOND, until_answered(&store, claim("foo", 1))).await;
    assert_eq!(
        claimed.expect("it does not wait for the other node"),
        GRANTED
    );
    cluster.node_mut(other).thaw();
}

#[tokio::test(flavor = "multi_thread")]
async fn redirections_of_a_migrating_slot_are_followed() {
    let cluster = ClusterServers::start().expect("a Cluster");
    // The user of the book with access to all keys: without a prefix the key is `foo`, in slot 12182.
    let user = rights("+cluster|slots +asking").replace("~processed:*", "~*");
    for node in cluster.nodes() {
        assert_eq!(node.command(&user).expect("a reply"), "+OK");
    }
    let urls = cluster
        .urls()
        .into_iter()
        .map(|url| url.replace("redis://", "redis://oncegate:PASSWORD@"));
    let store = Redis::cluster(urls).timeout(2 * SECOND).prefix("");
    let slot = 12_182;
    assert_eq!(
        apply_one(&store, claim("foo", 1)).await.expect("a verdict"),
        GRANTED
    );
    let from = cluster.primary_of_slot(slot);
    let to = cluster
        .primaries()
        .into_iter()
        .find(|which| *which != from)
        .expect("another primary");
    let id = |which: usize| {
        cluster.nodes()[which]
            .reply("CLUSTER MYID")
            .expect("a reply")
            .lines()
            .nth(1)
            .expect("an id")
            .to_owned()
    };
    let (from_id, to_id) = (id(from), id(to));
    let run_on = |which: usize, line: String| {
        let reply = cluster.nodes()[which].command(&line).expect("a reply");
        assert!(reply.starts_with("+OK"), "{line}: {reply}");
    };
    run_on(to, format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}"));
    run_on(from, format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}"));
    // During the migration the key is on the new node, which serves it only after ASKING.
    run_on(
        from,
        format!(
            "MIGRATE 127.0.0.1 {} foo 0 5000",
            cluster.nodes()[to].port()
        ),
    );
    assert!(matches!(
        apply_one(&store, claim("foo", 2)).await,
        Ok(Verdict::Busy { .. })
    ));
    assert_eq!(
        apply_one(&store, claim("foo", 1)).await.expect("a verdict"),
        GRANTED
    );
    // With the canary of the new node in the same pipeline.
    let strict = Operation {
        terms: terms(Guarantee::AtMostOnce),
        ..claim("foo", 1)
    };
    assert_eq!(apply_one(&store, strict).await.expect("a verdict"), GRANTED);
    // Redis refuses commands with several keys until the slot has moved.
    let results = store.results().expect("results");
    let completion = complete("foo", 1, 1);
    let refused = results.complete(&completion, b"result").await;
    assert!(
        matches!(&refused, Err(StoreError::NotApplied(why)) if why.to_string().contains("TRYAGAIN")),
        "{refused:?}"
    );
    assert_eq!(results.read(&completion.key).await.expect("a reply"), None);

    run_on(to, format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
    run_on(from, format!("CLUSTER SETSLOT {slot} NODE {to_id}"));
    let completed = results.complete(&completion, b"result").await;
    assert_eq!(completed.expect("an answer").verdict, DONE);
    let stored = results.read(&completion.key).await.expect("a reply");
    assert_eq!(stored.as_deref(), Some(&b"result"[..]));
    assert_eq!(
        apply_one(&store, claim("foo", 2)).await.expect("a verdict"),
        Verdict::Duplicate
    );
}

/// A slot that stays in migration must not block new connections if it has a node's canary.
#[tokio::test(flavor = "multi_thread")]
async fn a_canary_in_a_migrating_slot_blocks_no_claim() {
    let cluster = ClusterServers::start().expect("a Cluster");
    let long = oncegate_core::marker::Terms {
        lease: 300 * SECOND,
        ..terms(Guarantee::AtMostOnce)
    };
    let strict = |id: &str, token| Operation {
        terms: long,
        ..claim(id, token)
    };
    let ids: Vec<String> = (0..30).map(|it| format!("k{it}")).collect();
    let before = Redis::cluster(cluster.urls()).timeout(2 * SECOND);
    for id in &ids {
        assert_eq!(until_answered(&before, strict(id, 1)).await, GRANTED);
    }
    let lines = |which: usize, line: &str| cluster.nodes()[which].reply(line).expect("a reply");
    let (from, to) = (cluster.primaries()[0], cluster.primaries()[1]);
    let reply = lines(from, "KEYS processed:!canary*");
    let canary = reply
        .lines()
        .find(|line| line.starts_with("processed:!canary") && !line.contains("y:"))
        .expect("its canary");
    let slot = |key: &str| {
        lines(from, &format!("CLUSTER KEYSLOT {key}"))
            .trim()
            .trim_start_matches(':')
            .parse()
            .expect("a slot")
    };
    let probes = (0..).map(|number| format!("processed:!probe{number}"));
    let probe = probes
        .into_iter()
        .find(|probe| cluster.primary_of_slot(slot(probe)) == from)
        .expect("a probe key on this node");
    let id = |which: usize| {
        lines(which, "CLUSTER MYID")
            .lines()
            .nth(1)
            .expect("an id")
            .to_owned()
    };
    let (from_id, to_id) = (id(from), id(to));
    for slot in [slot(canary), slot(&probe)] {
        assert!(
            lines(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}")).starts_with("+OK")
        );
        assert!(
            lines(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}")).starts_with("+OK")
        );
    }
    let moved = lines(
        from,
        &format!(
            "MIGRATE 127.0.0.1 {} {canary} 0 5000",
            cluster.nodes()[to].port()
        ),
    );
    assert!(moved.starts_with("+OK"), "{moved}");

    let new_store = Redis::cluster(cluster.urls()).timeout(2 * SECOND);
    until_queried(|| new_store.preflight(Guarantee::AtMostOnce)).await;
    for id in &ids {
        assert!(matches!(
            until_answered(&new_store, strict(id, 2)).await,
            Verdict::Busy { .. }
        ));
        assert!(matches!(
            until_answered(&before, strict(id, 1)).await,
            GRANTED
        ));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_in_a_cluster_is_reported() {
    let single = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let answer = apply_one(&Redis::cluster([single.url()]), claim("k", 1)).await;
    assert!(
        matches!(&answer, Err(StoreError::Misconfigured(why)) if why.to_string().contains("Redis::at")),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slot_map_of_a_reset_node_is_not_used() {
    let cluster = ClusterServers::start().expect("a Cluster");
    let urls = cluster.urls();
    let primaries = cluster.primaries();
    // A replica, so that no slot is lost, and by its address the first to be queried.
    let leaving = (0..urls.len())
        .filter(|which| !primaries.contains(which))
        .min_by_key(|which| &urls[*which])
        .expect("a replica");
    assert_eq!(
        cluster.nodes()[leaving]
            .command("CLUSTER RESET")
            .expect("a reply"),
        "+OK"
    );
    let (left, other) = (&urls[leaving], urls.iter().max().expect("a node"));
    let store = Redis::cluster([left, other]).timeout(2 * SECOND);
    for it in 0..20 {
        assert_eq!(
            apply_one(&store, claim(&format!("k{it}"), 1))
                .await
                .expect("a verdict"),
            GRANTED
        );
    }
    let alone = apply_one(&Redis::cluster([left]), claim("k", 1)).await;
    assert!(
        matches!(&alone, Err(StoreError::NotApplied(why)) if why.to_string().contains("no served slot")),
        "{alone:?}"
    );
}

/// A renewal waits for a part of its lease, which may be shorter than the timeout of a reply.
#[tokio::test(flavor = "multi_thread")]
async fn repeatedly_cancelled_renewals_find_the_new_primary() {
    let mut cluster = ClusterServers::start().expect("a Cluster");
    let store = Redis::cluster(cluster.urls())
        .timeout(5 * SECOND)
        .prefix("");
    let long = oncegate_core::marker::Terms {
        lease: 120 * SECOND,
        ..terms(Guarantee::EffectivelyOnce)
    };
    // In slot 12182.
    assert_eq!(
        apply_one(&store, operation("foo", OperationKind::Claim, 1, 0, long))
            .await
            .expect("a verdict"),
        GRANTED
    );
    let renewals = store.for_renewals().expect("a handle");
    let renew = operation("foo", OperationKind::Renew, 1, 1, long);
    assert_eq!(
        apply_one(&*renewals, renew.clone())
            .await
            .expect("a verdict"),
        Verdict::Applied
    );
    let serves = cluster.primary_of_slot(12_182);
    assert_eq!(
        cluster.nodes()[serves]
            .command("WAIT 1 5000")
            .expect("a reply"),
        ":1"
    );
    cluster.node_mut(serves).freeze();
    let deadline = Instant::now() + 40 * SECOND;
    while !matches!(
        tokio::time::timeout(SECOND / 5, apply_one(&*renewals, renew.clone())).await,
        Ok(Ok(Verdict::Applied))
    ) {
        assert!(
            Instant::now() < deadline,
            "renewals still go to the frozen node"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.node_mut(serves).thaw();
}
