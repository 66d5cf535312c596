//! TLS with client certificates, for a single server, Sentinels and a Cluster.

use oncegate_core::marker::{Guarantee, Operation, Verdict};
use oncegate_core::{Store, StoreError};
use oncegate_redis::{Durability, Redis};
use oncegate_testkit::servers::{
    ClusterServers, RedisOptions, RedisServer, SENTINEL_NAME, SentinelServers,
};

use crate::sentinel_and_cluster::until_answered;
use crate::support::{DONE, GRANTED, SECOND, apply_one, at, claim, complete, verdicts};

/// The store with a client certificate and the CA certificate of this server.
fn with_client_certificate(store: Redis, server: &RedisServer) -> Redis {
    let (certificate, key) = server.client_certificate();
    store
        .timeout(5 * SECOND)
        .ca_certificate(server.certificate_authority())
        .client_certificate(certificate, key)
}

async fn misconfigured(store: &Redis) -> String {
    match apply_one(store, claim("k", 1)).await {
        Err(StoreError::Misconfigured(why)) => why.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_requests_a_certificate_gets_it() {
    let server =
        RedisServer::start(RedisOptions::new().tls().certified_clients()).expect("a Redis");
    let other_server = RedisServer::start(RedisOptions::new().tls()).expect("a Redis");
    let store = with_client_certificate(at(&server.url()), &server);
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    let renewals = store.for_renewals().expect("a handle");
    assert_eq!(
        apply_one(&*renewals, complete("k", 1, 1))
            .await
            .expect("a verdict"),
        DONE
    );
    // In either order.
    let (certificate, key) = server.client_certificate();
    let reversed_order = at(&server.url())
        .client_certificate(&certificate, &key)
        .ca_certificate(server.certificate_authority());
    assert_eq!(
        apply_one(&reversed_order, claim("k", 2))
            .await
            .expect("a verdict"),
        Verdict::Duplicate
    );

    // No certificate, and one of another authority.
    let trusting = || at(&server.url()).ca_certificate(server.certificate_authority());
    let (others, others_key) = other_server.client_certificate();
    for store in [
        trusting(),
        trusting().client_certificate(others, others_key),
    ] {
        let line = misconfigured(&store).await;
        assert!(
            line.starts_with("Redis::at") && line.contains("client_certificate(certificate, key)"),
            "{line}"
        );
    }
    // A valid one, while the server is not trusted.
    let line = misconfigured(&at(&server.url()).client_certificate(&certificate, &key)).await;
    assert!(line.contains("ca_certificate"), "{line}");
}

#[tokio::test]
async fn files_without_a_certificate_or_key_are_reported() {
    let server = RedisServer::start(RedisOptions::new().tls()).expect("a Redis");
    let (certificate, key) = server.client_certificate();
    let missing = "/no/such/file".into();
    for (certificate, key, says) in [
        (&missing, &key, "cannot read /no/such/file"),
        (&certificate, &missing, "cannot read /no/such/file"),
        (&key, &key, "contains no certificate"),
        (&certificate, &certificate, "contains no private key"),
    ] {
        let line = misconfigured(&at(&server.url()).client_certificate(certificate, key)).await;
        assert!(
            line.starts_with("client_certificate: ") && line.contains(says),
            "{line}"
        );
    }
    let line = misconfigured(&at("redis://localhost").client_certificate(&certificate, &key)).await;
    assert!(line.contains("write rediss://"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_and_their_servers_over_tls() {
    let mut servers = SentinelServers::start_with_tls().expect("Redis and Sentinels");
    let replicas = Durability::Replicas {
        count: 1,
        timeout: 5 * SECOND,
    };
    let store = with_client_certificate(
        Redis::sentinel(servers.urls(), SENTINEL_NAME),
        &servers.redis()[0],
    )
    .durability(replicas);
    store
        .preflight(Guarantee::AtMostOnce)
        .await
        .expect("nothing is missing");
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    let old = servers.primary();
    servers.redis_mut(old).kill();
    assert!(
        matches!(
            until_answered(&store, claim("k", 2)).await,
            Verdict::Busy { .. }
        ),
        "the new primary knows the holder"
    );
    assert_eq!(until_answered(&store, complete("k", 1, 1)).await, DONE);

    let untrusted =
        misconfigured(&Redis::sentinel(servers.urls(), SENTINEL_NAME).timeout(5 * SECOND)).await;
    assert!(
        untrusted.contains("not trusted") && untrusted.contains("Redis::sentinel"),
        "{untrusted}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_nodes_of_a_cluster_over_tls() {
    let cluster = ClusterServers::start_with_tls().expect("a Cluster");
    let store = with_client_certificate(Redis::cluster(&cluster.urls()[..1]), &cluster.nodes()[0]);
    store
        .preflight(Guarantee::AtMostOnce)
        .await
        .expect("nothing is missing");
    let claims: Vec<Operation> = (0..60).map(|it| claim(&format!("k{it}"), it)).collect();
    assert_eq!(verdicts(&store, &claims).await, vec![GRANTED; 60]);
    let ends: Vec<Operation> = (0..60)
        .map(|it| complete(&format!("k{it}"), it, 1))
        .collect();
    assert_eq!(verdicts(&store, &ends).await, vec![DONE; 60]);
    for which in cluster.primaries() {
        let reply = cluster.nodes()[which].command("DBSIZE").expect("a reply");
        assert!(
            reply[1..].parse::<u32>().is_ok_and(|keys| keys > 5),
            "every node has some of the keys: {reply}"
        );
    }
}
