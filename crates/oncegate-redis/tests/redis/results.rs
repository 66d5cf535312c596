//! The results of completed runs, beside what the laws of stores say.

use oncegate_core::marker::Verdict;
use oncegate_core::{Gate, RunOutcome, Store, StoreError, Stored};
use oncegate_redis::Redis;
use oncegate_testkit::servers::{ClusterServers, RedisOptions, RedisServer};

use crate::support::{
    DONE, GRANTED, SECOND, apply_one, at, claim, client, client_of, complete, key, rights, store,
};

#[tokio::test]
async fn a_result_has_a_key_beside_the_marker_and_its_expiry() {
    let (store, prefix) = store();
    let results = store.results().expect("results");
    let completion = complete("42", 1, 1);
    results
        .complete(&completion, b"\"charged\"")
        .await
        .expect("an answer");
    let mut client = client().await;
    let (marker_key, result_key) = (
        format!("{prefix}42"),
        format!("{prefix}!result:{{{prefix}42}}"),
    );
    let mut values = redis::pipe();
    for key in [&marker_key, &result_key] {
        values.get(key).cmd("PEXPIRETIME").arg(key);
    }
    let (marker, marker_expiry, result, result_expiry): (String, i64, String, i64) =
        values.query_async(&mut client).await.expect("replies");
    assert_eq!((&*marker, &*result), ("1", "\"charged\""));
    assert!((marker_expiry - result_expiry).abs() < 1_000);

    // The key of a result is no marker.
    let mut browse = store.browse(100).await.expect("a scan");
    let mut names = Vec::new();
    while let Some(page) = browse.next().await.expect("a page") {
        names.extend(page.into_iter().map(|listed| listed.name));
    }
    assert_eq!(names, ["42"]);

    // A result with another expiry is that of another run.
    let _: () = redis::cmd("PEXPIRE")
        .arg(&result_key)
        .arg(5_000)
        .query_async(&mut client)
        .await
        .expect("a reply");
    assert_eq!(
        results.read(&key("42"), None).await.expect("an answer"),
        None
    );

    // Another program wrote the key: an error that concerns this id alone.
    let _: () = redis::pipe()
        .del(&result_key)
        .lpush(&result_key, "x")
        .query_async(&mut client)
        .await
        .expect("a reply");
    for error in [
        results.read(&key("42"), None).await.map(drop),
        results.complete(&completion, b"x").await.map(drop),
    ] {
        assert!(
            matches!(error, Err(StoreError::UnreadableMarker(_))),
            "{error:?}"
        );
    }
}

/// A server that is full stores neither the result nor the done marker, nor does one whose user may not
/// write the result.
#[tokio::test]
async fn a_refused_result_completes_nothing() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let ok = |line: &str| assert_eq!(server.command(line).expect("a reply"), "+OK", "{line}");
    ok(&rights("+wait"));
    let url = server
        .url()
        .replace("redis://", "redis://oncegate:PASSWORD@");
    let store = at(&url);
    let results = store.results().expect("results");
    assert_eq!(
        apply_one(&store, claim("42", 1)).await.expect("a verdict"),
        GRANTED
    );
    let completion = complete("42", 1, 1);
    for (refuse, allow, reply) in [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "OOM"),
        (
            "ACL SETUSER oncegate resetkeys ~processed:42",
            "ACL SETUSER oncegate ~processed:*",
            "NOPERM",
        ),
    ] {
        ok(refuse);
        let refused = results.complete(&completion, b"result").await;
        ok(allow);
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains(reply), "{text}");
        let mut client = client_of(&server.url()).await;
        let keys: Vec<String> = redis::cmd("KEYS")
            .arg("processed:*42*")
            .query_async(&mut client)
            .await
            .expect("a reply");
        assert_eq!(keys, ["processed:42"]);
        let busy = apply_one(&store, claim("42", 2)).await.expect("a verdict");
        assert!(matches!(busy, Verdict::Busy { .. }), "{busy:?}");
    }
    let completed = results.complete(&completion, b"result").await;
    assert_eq!(completed.expect("an answer").verdict, DONE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_of_a_cluster_keeps_marker_and_result_in_one_slot() {
    let servers = ClusterServers::start().expect("a Cluster");
    for (prefix, is_accepted) in [
        ("processed:", true),
        ("{payments}:", true),
        ("{}:", false),
        ("a}:", false),
        ("{a:", false),
    ] {
        let store = Redis::cluster(servers.urls())
            .prefix(prefix)
            .timeout(5 * SECOND);
        let gate = Gate::builder().store(store).open().await.expect("a gate");
        for id in ["a", "b", "c", "d"] {
            let run = || async { Ok(id.to_owned()) };
            let first = gate.run_stored(id, run).await;
            if is_accepted {
                assert_eq!(first.expect("ran"), Stored::Executed(id.to_owned()));
                let again = gate.run_stored(id, run).await.expect("stored");
                assert_eq!(again, Stored::Replayed(id.to_owned()));
            } else {
                let error = first.expect_err("no results").to_string();
                assert!(error.contains("hash tag"), "{error}");
                // No work runs before the error.
                let plain = gate.run(id, || async { Ok(()) }).await.expect("ran");
                assert_eq!(plain, RunOutcome::Executed(()));
            }
        }
    }
}
