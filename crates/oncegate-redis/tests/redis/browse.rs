//! Scans, reads with expiry, the audit and `INFO`, for operators.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate_core::MarkerWithExpiry;
use oncegate_core::marker::{Attempts, Effect, Guarantee, Marker, OperationKind};
use oncegate_core::{MessageId, Scope, StoreError};
use oncegate_redis::Redis;

use crate::support::{apply_one, claim, client, complete, key, operation, store, terms};

async fn all(store: &Redis, page: usize) -> BTreeMap<String, Result<MarkerWithExpiry, StoreError>> {
    let mut browse = store.browse(page).await.expect("Redis answers");
    let mut all = BTreeMap::new();
    while let Some(page) = browse.next().await.expect("Redis answers") {
        all.extend(page.into_iter().map(|listed| (listed.name, listed.marker)));
    }
    all
}

#[tokio::test]
async fn every_marker_is_listed_and_none_of_the_librarys_own_keys() {
    let (store, prefix) = store();
    // Unescaped, its glob characters would match other keys, or none.
    let odd = store.clone().prefix(format!("{prefix}[a]*?:"));
    for n in 0..30 {
        apply_one(&odd, claim(&format!("id-{n}"), n))
            .await
            .expect("a verdict");
    }
    apply_one(&odd, complete("id-0", 0, 1))
        .await
        .expect("a verdict");
    let scoped = Scope::named("ledger")
        .expect("a scope")
        .key(&MessageId::new("id-1").expect("an id"));
    apply_one(
        &odd,
        oncegate_core::marker::Operation {
            key: scoped,
            ..claim("id-1", 77)
        },
    )
    .await
    .expect("a verdict");
    odd.write_audit("a line").await.expect("it is written");
    let listed = all(&odd, 7).await;
    assert_eq!(listed.len(), 31, "{:?}", listed.keys());
    assert!(listed.contains_key("ledger|id-1") && !listed.keys().any(|name| name.starts_with('!')));
    let stored = |id: &str| *listed[id].as_ref().expect("a marker");
    assert!(matches!(stored("id-0").marker, Marker::Done(None)) && stored("id-0").age().is_none());
    assert!(matches!(stored("id-1").marker, Marker::InProgress(_)));
    assert!(
        stored("id-1")
            .age()
            .is_some_and(|age| age < Duration::from_secs(600)),
        "{:?}",
        stored("id-1")
    );
}

#[tokio::test]
async fn a_marker_is_read_with_its_expiry_and_unchanged() {
    let (store, prefix) = store();
    let absent = store
        .read_marker_with_expiry(&key("x"))
        .await
        .expect("Redis answers");
    assert_eq!(absent, MarkerWithExpiry::new(Marker::Absent, None));
    apply_one(&store, claim("x", 1)).await.expect("a verdict");
    apply_one(
        &store,
        operation(
            "x",
            OperationKind::Clear(Effect::Unknown),
            1,
            1,
            terms(Guarantee::EffectivelyOnce),
        ),
    )
    .await
    .expect("a verdict");
    for _ in 0..2 {
        let seen = store
            .read_marker_with_expiry(&key("x"))
            .await
            .expect("Redis answers");
        assert_eq!(
            seen.marker,
            Marker::Cleared {
                attempts: Attempts::new(1),
                effect: Effect::Unknown
            }
        );
        assert!(seen.expires_in.is_some());
    }
    let () = redis::cmd("SET")
        .arg(format!("{prefix}y"))
        .arg("nothing of ours")
        .query_async(&mut client().await)
        .await
        .expect("set");
    assert!(matches!(
        store.read_marker_with_expiry(&key("y")).await,
        Err(StoreError::UnreadableMarker(_))
    ));
    let listed = all(&store, 100).await;
    assert!(listed["x"].is_ok() && listed["y"].is_err());
}

#[tokio::test]
async fn the_audit_is_read_in_the_order_in_which_it_was_written() {
    let (store, _) = store();
    assert!(store.read_audit().await.expect("Redis answers").is_empty());
    let written: Vec<String> = (0..1_050).map(|n| format!("{{\"n\":{n}}}")).collect();
    for line in &written {
        store.write_audit(line).await.expect("it is written");
    }
    assert_eq!(store.read_audit().await.expect("Redis answers"), written);
}

#[tokio::test]
async fn info_of_a_server_is_read() {
    let (store, _) = store();
    let servers = store.servers().await.expect("Redis answers");
    assert_eq!(servers.len(), 1);
    assert!(
        servers[0]
            .field("redis_version")
            .is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
    );
    assert!(servers[0].number("server_time_usec").is_some() && servers[0].address.contains(':'));
}
